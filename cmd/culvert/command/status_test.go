package command

import (
	"strings"
	"testing"
	"time"

	"culvert.dev/identity/jwt"
	"culvert.dev/internal/gateway"
	"culvert.dev/nat"
)

// Listeners that sources know of stand beside those of the configuration, with
// what is wrong with them.
func TestStatusOfSourceListeners(t *testing.T) {
	var b strings.Builder
	s := &gateway.Status{Ready: true, Started: time.Now(), SourceListeners: []gateway.StatusSourceListener{
		{Name: "default/edge/tls", Protocol: "tls", Address: ":443", State: gateway.ListenerOpen},
		{Name: "default/edge/dns", Protocol: "udp", Address: "udp://:53", State: gateway.ListenerFailed, Problem: "another process\nhas it"},
	}}
	if err := printStatus(&b, &runningStatus{Status: *s}, nil); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"listener:  :443 (tls) of default/edge/tls, open\n", "listener:  udp://:53 (udp) of default/edge/dns, failed: another process"} {
		if !strings.Contains(b.String(), want) {
			t.Errorf("not there: %q\n%s", want, b.String())
		}
	}
	if strings.Contains(b.String(), "process\nhas") {
		t.Error("a problem makes lines of its own")
	}
}

// A port that the router does not map is there with the reason.
func TestStatusOfPortsThatAreNotMapped(t *testing.T) {
	const none = "there is no default route of IPv4 with a router"
	s := &gateway.Status{NAT: &nat.Status{Kind: nat.Unknown, Problem: none, Mappings: []nat.Mapping{
		{Listener: ":443", State: nat.Pending}, {Listener: ":444", State: nat.Pending, Error: "not allowed"}, {Listener: ":445", State: nat.Verified},
	}}}
	var b strings.Builder
	if err := printStatus(&b, &runningStatus{Status: *s}, nil); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"nat:       the router does not map :443: " + none + "\n", "nat:       the router does not map :444: not allowed\n"} {
		if !strings.Contains(b.String(), want) {
			t.Errorf("not there: %q\n%s", want, b.String())
		}
	}
	if strings.Contains(b.String(), ":445") {
		t.Errorf("a port that is mapped is there:\n%s", b.String())
	}
}

// Certificates say when they expire, or since when they have.
func TestStatusOfCertificates(t *testing.T) {
	var b strings.Builder
	s := &gateway.Status{Ready: true, Started: time.Now(), Certificates: []gateway.Certificate{
		{UsedBy: "listener", File: "old.crt", NotAfter: time.Now().Add(-3*time.Hour - time.Second)},
		{UsedBy: "via", File: "new\n.crt", NotAfter: time.Now().Add(5*time.Hour + time.Minute)},
	}}
	if err := printStatus(&b, &runningStatus{Status: *s}, nil); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"expiry:    old.crt of listener expired 3h00m ago, at 2", "expiry:    new\uFFFD.crt of via expires in 5h0", "Z\n"} {
		if !strings.Contains(b.String(), want) {
			t.Errorf("not there: %q\n%s", want, b.String())
		}
	}
}

// Issuers of tokens say how their keys are.
func TestStatusOfIssuers(t *testing.T) {
	var b strings.Builder
	at := func(d time.Duration) *time.Time { when := time.Now().Add(d); return &when }
	s := &gateway.Status{Ready: true, Started: time.Now(), Issuers: []jwt.Status{
		{Issuer: "https://login.example/", Keys: 2, Fetched: at(-3*time.Hour - time.Second), Next: at(5*time.Hour + time.Minute)},
		{Issuer: "https://away.example/", Keys: 1, Fetched: at(-3*time.Hour - time.Second), Next: at(-time.Second), Error: "no\nanswer"},
		{Issuer: "corp.example"},
	}}
	if err := printStatus(&b, &runningStatus{Status: *s}, nil); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		"issuer:    https://login.example/: 2 keys, fetched 3h00m ago, next in 5h0", "issuer:    https://away.example/: 1 key, fetched 3h00m ago, next in 0s: no\uFFFDanswer\n",
		"issuer:    corp.example: 0 keys\n",
	} {
		if !strings.Contains(b.String(), want) {
			t.Errorf("not there: %q\n%s", want, b.String())
		}
	}
}

// Of several transports to a gateway, those that failed are listed.
func TestStatusOfTransports(t *testing.T) {
	var b strings.Builder
	s := &gateway.Status{Ready: true, Started: time.Now(), Transports: []gateway.StatusTransport{
		{Gateway: "gw.test:443", Carrier: "connect-h2", Since: time.Unix(0, 0), Error: "no\nanswer"},
		{Gateway: "gw.test:443", Carrier: "connect", Up: true},
	}}
	if err := printStatus(&b, &runningStatus{Status: *s}, nil); err != nil {
		t.Fatal(err)
	}
	const want = "transport: connect-h2 to gateway gw.test:443 is down since 1970-01-01T00:00:00Z: no\uFFFDanswer\n"
	if !strings.Contains(b.String(), want) || strings.Count(b.String(), "transport:") != 1 {
		t.Errorf("not there, or not alone: %q\n%s", want, b.String())
	}
}
