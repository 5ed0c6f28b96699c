package file

import (
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"culvert.dev/registry"
)

func TestForwardIdentity(t *testing.T) {
	cfg, err := Load(filepath.Join(private(t, "testdata/good"), "forward-identity.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	for i, want := range []struct {
		registry.ForwardIdentity
		audience string
	}{
		{registry.ForwardIdentity{InsideTLS: true, Assertion: true, Audience: "shop.corp.example"}, "shop.corp.example"},
		{registry.ForwardIdentity{InsideTLS: true}, ""},
		{registry.ForwardIdentity{}, ""},
	} {
		s := cfg.Services[i]
		if s.ForwardIdentity == nil || !reflect.DeepEqual(*s.ForwardIdentity, want.ForwardIdentity) || s.ProxyProtocol != 2 || s.ForwardedAudience() != want.audience {
			t.Errorf("%s: got %+v, version %d, for %q; want %+v", s.Name, s.ForwardIdentity, s.ProxyProtocol, s.ForwardedAudience(), want)
		}
	}
	s := cfg.Services[0]
	s.ForwardIdentity.Audience = ""
	if got := s.ForwardedAudience(); got != "spiffe://corp.example/ns/shop/sa/api" {
		t.Errorf("without an audience: got %q, want the id in sans", got)
	}
	s.TLS.SANs = append(s.TLS.SANs, "shop.internal")
	if got := s.ForwardedAudience(); got != "shop.example.com" {
		t.Errorf("with two names: got %q, want the server name", got)
	}
}

// A hop is told of callers in each form that is asked for, and "true" is an assertion.
func TestForwardIdentityOfHops(t *testing.T) {
	cfg, err := Load(filepath.Join(private(t, "testdata/good"), "forward-identity.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	for i, want := range []registry.HopIdentity{{Assertion: true}, {XFCC: "sanitizeSet"}, {Assertion: true, XFCC: "appendForward", ClientCert: true}, {}} {
		if s := cfg.Services[3+i]; len(s.Via) != 1 || s.Via[0].ForwardIdentity != want {
			t.Errorf("%s: got %+v, want %+v", s.Name, s.Via, want)
		}
	}
}

// A header that anybody on the network can write is warned of, unless the network is said to
// be trusted.
func TestForwardIdentityBeforeTLSIsWarnedOf(t *testing.T) {
	for trust, want := range map[string]bool{"": true, ", trustNetwork: false": true, ", trustNetwork: true": false} {
		cfg, err := Parse("culvert.yaml", []byte(`listeners: [{address: "127.0.0.1:1001", protocols: [connect]}]
services:
  - {name: a.test, endpoints: ["10.0.0.2:1"], forwardIdentity: {position: beforeTLS`+trust+`}}
`))
		if err != nil {
			t.Fatal(err)
		}
		if got := strings.Contains(cfg.Warnings.Error(), "whoever can connect to an endpoint can say by such a header who it is"); got != want {
			t.Errorf("%q: got the warning: %v, want it: %v; all are %v", trust, got, want, cfg.Warnings)
		}
	}
}

// Without gateways that may state callers there is nobody to append.
func TestAppendForwardWithoutDelegatesIsWarnedOf(t *testing.T) {
	const listed = ", delegates: [\"spiffe://corp.example/gw\"]"
	for _, row := range []struct {
		mode, trust string
		want        bool
	}{
		{"appendForward", "", true},
		{"appendForward", listed, false},
		{"sanitizeSet", "", false},
		{"none, assertion: true", "", false},
	} {
		for _, identityFirst := range []bool{true, false} {
			identity := "identity: {trust: {corp.example: {caFile: gw.crt" + row.trust + "}}}\n"
			text := `listeners: [{address: "127.0.0.1:1001", protocols: [connect]}]
services:
  - {name: a.example.com, ports: [1], via: [{hbone: "gw.example.com:1", certificateFile: gw.crt, keyFile: gw.key, trust: corp.example, peers: ["spiffe://corp.example/gw"], forwardIdentity: {xfcc: ` + row.mode + `}}]}
`
			if identityFirst {
				text = identity + text
			} else {
				text += identity
			}
			dir := private(t, "testdata/good")
			path := filepath.Join(dir, "append.yaml")
			if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
				t.Fatal(err)
			}
			cfg, err := Load(path)
			if err != nil {
				t.Fatal(err)
			}
			got := cfg.Warnings != nil && strings.Contains(cfg.Warnings.Error(), "append.yaml:") && strings.Contains(cfg.Warnings.Error(), "appendForward does what sanitizeSet does")
			if got != row.want {
				t.Errorf("%s, %q: got the warning: %v, want it: %v; all are %v", row.mode, row.trust, got, row.want, cfg.Warnings)
			}
		}
	}
}
