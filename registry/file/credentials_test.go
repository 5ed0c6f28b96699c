package file

import (
	"context"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"culvert.dev/internal/testca"
	"culvert.dev/internal/testnet"
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

// renewed is a configuration with a certificate and CAs in place, and what writes its files.
func renewed(t *testing.T) (path string, issue func(names ...string) *testca.Pair) {
	t.Helper()
	dir := t.TempDir()
	path = filepath.Join(dir, "culvert.yaml")
	issue = func(names ...string) *testca.Pair {
		t.Helper()
		ca, err := testca.New("example.test", nil)
		if err != nil {
			t.Fatal(err)
		}
		pair, err := ca.Issue(testca.Options{SPIFFEID: "spiffe://example.test/gw", DNSNames: names})
		if err != nil {
			t.Fatal(err)
		}
		replace(t, filepath.Join(dir, "ca.pem"), string(ca.CertPEM))
		replace(t, filepath.Join(dir, "gw.key"), string(pair.KeyPEM))
		replace(t, filepath.Join(dir, "copy.key"), string(pair.KeyPEM))
		replace(t, filepath.Join(dir, "gw.crt"), string(pair.CertPEM))
		return pair
	}
	write(t, path, `
listeners:
  - address: :443
    tls: {certificateFile: gw.crt, keyFile: gw.key, names: [gw.test], clientCAFile: {example.test: ca.pem}}
services:
  - {name: a.test, ports: [1], endpoints: ["192.0.2.1:1"], tls: {caFile: ca.pem, certificateFile: gw.crt, keyFile: copy.key}}
  - {name: b.test, ports: [1], via: [{hbone: "192.0.2.1:15008", certificateFile: gw.crt, keyFile: gw.key, caFile: ca.pem, peers: ["spiffe://example.test"]}]}
`)
	return path, issue
}

// Certificates and CAs that are renewed make no table: it has their names. A change of the
// file does.
func TestRenewalMakesNoTable(t *testing.T) {
	path, issue := renewed(t)
	issue("gw.test")
	var now atomic.Pointer[Config]
	src := &Source{Path: path, OnConfig: func(c *Config) *registry.Group { now.Store(c); return nil }}
	reg := &registry.Registry{}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() { defer close(done); _ = reg.Run(ctx, src) }()
	t.Cleanup(func() { cancel(); <-done })
	testnet.Eventually(t, time.Minute, func() bool { return reg.Table() != nil }, "there is a table")
	first := reg.Table()
	if got := now.Load().Snapshot(); got.Services[0].TLS.KeyName != "file:gw.crt,copy.key" || got.Services[1].Via[0].KeyName != "file:gw.crt" || !slices.Equal(got.Listeners[0].Settings.TLS[0].Keys, []string{"file:gw.crt"}) {
		t.Errorf("names in the table: got %+v, %+v and %+v, want the files, and both for another key", got.Services[0].TLS, got.Services[1].Via, got.Listeners[0].Settings.TLS)
	}
	for range 3 {
		pair := issue("gw.test")
		testnet.Eventually(t, time.Minute, func() bool {
			c := now.Load().Credentials
			return c.Keys["file:gw.crt"].Certificate == string(pair.CertPEM) && c.Keys["file:gw.crt,copy.key"].Certificate == string(pair.CertPEM)
		}, "the renewed certificate is read")
	}
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	replace(t, path, string(text)+"  - {name: c.test, ports: [1], endpoints: [\"192.0.2.1:1\"]}\n")
	testnet.Eventually(t, time.Minute, func() bool { return reg.Table() != first }, "there is another table")
	if got, want := reg.Table().Generation(), first.Generation()+1; got != want || reg.Table().Len() != 3 {
		t.Errorf("after three renewals and a change the table is %d with %d services, want %d with 3", got, reg.Table().Len(), want)
	}
}

// A running gateway whose renewed certificate lacks a name of its listener keeps the one
// from before, and says so; a start is refused.
func TestRenewalLacksAName(t *testing.T) {
	path, issue := renewed(t)
	first := issue("gw.test")
	current, err := Load(path)
	if err != nil {
		t.Fatal(err)
	}
	issue("other.test")
	next, err := Reload(path, current)
	if err != nil {
		t.Fatal(err)
	}
	if got := next.Credentials.Keys["file:gw.crt"].Certificate; got != string(first.CertPEM) {
		t.Error("a certificate without the name takes the place of the one with it")
	}
	if got := next.Warnings.Error(); !strings.Contains(got, `no certificate covers "gw.test"; those from before stay in force`) {
		t.Errorf("the warnings are %q, want one of the name", got)
	}
	if _, err := Load(path); err == nil || !strings.Contains(err.Error(), `no certificate covers "gw.test"`) {
		t.Errorf("a start: got error %v, want one of the name", err)
	}
	again := issue("gw.test", "other.test")
	if next, err = Reload(path, next); err != nil || next.Credentials.Keys["file:gw.crt"].Certificate != string(again.CertPEM) || strings.Contains(next.Warnings.Error(), "covers") {
		t.Errorf("with the name again: got error %v, want the new certificate and no warning", err)
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
