package command

import (
	"errors"
	"net"
	"os"
	"reflect"
	"strings"
	"syscall"
	"testing"
	"time"

	"culvert.dev/dns"
	"culvert.dev/internal/gateway"
	"culvert.dev/registry/file"
)

// A DNS server learns from Kubernetes and tells it nothing: it must not take the
// Lease of gateways, which write.
func TestADNSServerWritesNothing(t *testing.T) {
	for text, want := range map[string]*file.Kubernetes{
		"kubernetes: {kubeconfig: a, discovery: {}, gatewayAPI: {}}":   {Kubeconfig: "a", Discovery: &file.Discovery{Network: "west"}},
		"kubernetes: {kubeconfig: a, discovery: {}, leader: some/one}": {Kubeconfig: "a", Discovery: &file.Discovery{Network: "west"}},
		"kubernetes: {kubeconfig: a, gatewayAPI: {}}":                  nil,
		"services: []": nil,
	} {
		c, err := file.Parse("culvert.yaml", []byte("cluster: west\ndns: {listen: [\"udp://:53\"]}\n"+text))
		if err != nil {
			t.Fatal(err)
		}
		if answersOnly(c); !reflect.DeepEqual(c.Kubernetes, want) {
			t.Errorf("%s: got %+v, want %+v", text, c.Kubernetes, want)
		}
	}
}

// What the file says is what is made of it.
func TestDNSServerOfAFile(t *testing.T) {
	c, err := file.Parse("culvert.yaml", []byte(`
dns:
  listen: ["udp://:53", "tls://:853"]
  tls: {certificateFile: dns.crt, keyFile: dns.key}
  zones: [mesh.internal]
  negativeTTL: 0s
  upstreams: ["tls://192.0.2.54#dns.example.com", "tls://192.0.2.55", 192.0.2.53]
  forward: [{zone: corp.example, upstreams: ["10.0.0.53:5353"]}]
  recursionClients: [10.0.0.0/8]
  rateLimit: -1
  cache: {size: 1MiB, maxStale: 0s}
services: []
`))
	if err != nil {
		t.Fatal(err)
	}
	d, err := dnsServer(c)
	if err != nil {
		t.Fatal(err)
	}
	s, f := d.Server, d.Server.Forward
	if len(d.Listeners) != 2 || d.Listeners[1] != (gateway.DNSListener{Transport: dns.TLS, Address: ":853"}) {
		t.Errorf("listeners %+v", d.Listeners)
	}
	if s.TTL != 5*time.Second || s.NegativeTTL >= 0 || s.RateLimit != -1 || len(s.RecursionClients) != 1 || s.Zones[0] != "mesh.internal" {
		t.Errorf("server %+v, %+v, %v, %v, %v", s.TTL, s.NegativeTTL, s.RateLimit, s.RecursionClients, s.Zones)
	}
	if f.CacheBytes != 1<<20 || f.MaxStale >= 0 || f.MinTTL != time.Second || f.MaxTTL != time.Hour || f.Zones["corp.example"][0].Addr != "10.0.0.53:5353" {
		t.Errorf("forwarder: %d bytes, %v, %v, %v, zones %v", f.CacheBytes, f.MaxStale, f.MinTTL, f.MaxTTL, f.Zones)
	}
	var names []string
	for _, u := range f.Upstreams {
		name := u.Addr
		if u.TLS != nil {
			name += " " + u.TLS.ServerName
		}
		names = append(names, name)
	}
	if got, want := strings.Join(names, ", "), "192.0.2.54:853 dns.example.com, 192.0.2.55:853 192.0.2.55, 192.0.2.53:53"; got != want {
		t.Errorf("upstreams %s, want %s", got, want)
	}

	c.DNS.RecursionClients = nil
	if d, err = dnsServer(c); err != nil || d.Server.Forward != nil {
		t.Errorf("%v, and it forwards for nobody: %v", err, d.Server.Forward)
	}
	c.DNS = nil
	if d, err = dnsServer(c); err != nil || d != nil {
		t.Errorf("%v, %v without dns in the file", d, err)
	}
}

func TestDNSErrorsHaveHints(t *testing.T) {
	at := func(address string, err error) error {
		return &gateway.DNSError{Listener: gateway.DNSListener{Transport: dns.UDP, Address: address}, Err: &net.OpError{Op: "listen", Err: os.NewSyscallError("bind", err)}}
	}
	for _, tt := range []struct {
		err  error
		hint string
	}{
		{at(":53", syscall.EACCES), "CAP_NET_BIND_SERVICE"},
		{at(":53", syscall.EADDRINUSE), "DNSStubListener=no"},
		{at(":5353", syscall.EADDRINUSE), ""},
		{at("192.0.2.1:53", syscall.EADDRNOTAVAIL), "this machine does not have the address"},
	} {
		var ce *cliError
		if !errors.As(dnsError(tt.err), &ce) || !strings.Contains(ce.hint, tt.hint) || (tt.hint == "") != (ce.hint == "") || ce.code != exitFailed {
			t.Errorf("%v: %+v, want a hint with %q", tt.err, ce, tt.hint)
		}
	}
	if err := errors.New("other"); dnsError(err) != err {
		t.Error("an error of others is changed")
	}
}
