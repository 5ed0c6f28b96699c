package file

import (
	"os"
	"path/filepath"
	"slices"
	"testing"

	"culvert.dev/registry"
)

// What names a key and trust has their names in the table, and no certificate.
func TestCredentialNames(t *testing.T) {
	dir := private(t, "testdata/good")
	c, err := Load(filepath.Join(dir, "named.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	s := c.Snapshot()
	both := []string{"corp.example", "partner.example"}
	for i, want := range []registry.TLSTermination{
		{Keys: []string{"edge"}, TrustNames: both[:1]},
		{Keys: []string{"edge", "gateway"}, TrustNames: both},
		{Keys: []string{"gateway"}, TrustNames: both[:1], ClientCertOptional: true},
	} {
		got := s.Listeners[i].Settings.TLS[0]
		if !slices.Equal(got.Keys, want.Keys) || !slices.Equal(got.TrustNames, want.TrustNames) || got.ClientCertificates() != want.ClientCertificates() || len(got.Certificates) > 0 || got.ClientCAs != "" {
			t.Errorf("listener %d: got %+v, want %+v", i, got.TLSTermination, want)
		}
	}
	transports := s.Networks[0].Gateways[0].Transports
	for _, tt := range []struct {
		what  string
		hop   registry.Hop
		key   string
		trust []string
	}{
		{"hbone of east", transports[0], "gateway", both},
		{"websocket of east", transports[1], "gateway", both[:1]},
		{"via of west", s.Networks[1].Via[0], "edge", both[1:]},
		{"via of an endpoint", s.Services[1].Endpoints[0].Hops()[0], "gateway", both[:1]},
	} {
		if tt.hop.KeyName != tt.key || !slices.Equal(tt.hop.TrustNames, tt.trust) || tt.hop.Certificate != "" || tt.hop.Roots != "" {
			t.Errorf("%s: got key %q and trust %q, want %q and %q", tt.what, tt.hop.KeyName, tt.hop.TrustNames, tt.key, tt.trust)
		}
	}
	if b := s.Services[0].TLS; b.KeyName != "gateway" || !slices.Equal(b.TrustNames, both[1:]) {
		t.Errorf("tls of a service: got key %q and trust %q, want gateway and partner.example", b.KeyName, b.TrustNames)
	}
}

// A service that was read before keeps its names, and an identity that loses one is refused.
func TestCredentialNamesAreReadAgain(t *testing.T) {
	path := filepath.Join(t.TempDir(), "culvert.yaml")
	const (
		one      = "identity: {spiffe: {socket: unix:///run/a.sock}, keys: {one: {spiffe: default}}}\n"
		two      = "identity: {spiffe: {socket: unix:///run/a.sock}, keys: {two: {spiffe: default}}}\n"
		services = "services:\n- {name: a.test, endpoints: [\"192.0.2.1:1\"]}\n- {name: b.test, endpoints: [\"192.0.2.1:1\"], tls: {key: one}}\n"
		listener = "listeners: [{address: \":1\", protocols: [connect]}]\n"
	)
	var current *Config
	for _, tt := range []struct {
		text string
		ok   bool
	}{
		{listener + one + services, true},
		{listener + one + services + "- {name: c.test, endpoints: [\"192.0.2.1:1\"]}\n", true},
		{listener + two + services, false},
		{listener + services, false},
	} {
		if err := os.WriteFile(path, []byte(tt.text), 0o600); err != nil {
			t.Fatal(err)
		}
		next, err := Reload(path, current)
		if (err == nil) != tt.ok {
			t.Errorf("got error %v, want one: %v, for\n%s", err, !tt.ok, tt.text)
		}
		if err == nil {
			current = next
			if got := next.Services[1].TLS.KeyName; got != "one" {
				t.Errorf("the key is %q, want one", got)
			}
		}
	}
}
