package file

import (
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"
)

func TestDNS(t *testing.T) {
	dir := private(t, "testdata/good")
	path := filepath.Join(dir, "dns.yaml")
	cfg, err := Load(path)
	if err != nil {
		t.Fatal(err)
	}
	ranges := func(list ...string) (ps []netip.Prefix) {
		for _, s := range list {
			ps = append(ps, netip.MustParsePrefix(s))
		}
		return ps
	}
	got := *cfg.DNS
	if _, err := got.Certificate.X509(); err != nil {
		t.Error(err)
	}
	got.Files, got.Certificate = KeyFiles{}, KeyPair{}
	want := DNS{
		Listeners: []DNSListener{
			{DNSAddress: DNSAddress{"udp", "127.0.0.1:53"}}, {DNSAddress: DNSAddress{"tcp", "127.0.0.1:53"}}, {DNSAddress: DNSAddress{"udp", "127.0.0.2:53"}, View: "office"},
			{DNSAddress: DNSAddress{"tls", ":853"}}, {DNSAddress: DNSAddress{"https", ":443"}}, {DNSAddress: DNSAddress{"https", "127.0.0.1:8443"}},
		},
		Zones: []string{"mesh.internal", "10.in-addr.arpa"}, TTL: 2 * time.Second,
		Upstreams: []DNSUpstream{
			{Address: "192.0.2.53:53"}, {Address: "[2001:db8::53]:53"},
			{Address: "192.0.2.54:853", TLS: true, Name: "dns.example.com"}, {Address: "[2001:db8::53]:8853", TLS: true},
		},
		Forward:      []DNSForward{{Zone: "corp.example", Upstreams: []DNSUpstream{{Address: "10.0.0.53:5353"}}}},
		PrivateZones: []string{"lan.example"},
		VIPNetworks:  []string{"office"}, UnidentifiedCallers: "defer",
		RecursionClients: ranges("127.0.0.0/8", "10.0.0.0/8", "fd00::/8"), RateLimitExempt: ranges("192.0.2.53/32"), RateLimit: -1,
		Cache: DNSCache{Size: 64 << 20, MaxTTL: 10 * time.Minute},
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got  %+v\nwant %+v", got, want)
	}
	if s := fmt.Sprintf("%v %+v %#v", cfg.DNS, *cfg.DNS, *cfg.DNS); strings.Contains(s, "PRIVATE KEY") {
		t.Errorf("a printed configuration shows its key: %s", s)
	}
	if got := cfg.DNSZones(); !slices.Equal(got, want.Zones) {
		t.Errorf("zones %q", got)
	}

	// Another certificate is seen, and nothing needs a restart.
	for _, name := range []string{"crt", "key"} {
		data, err := os.ReadFile(filepath.Join(dir, "second."+name))
		if err == nil {
			err = os.WriteFile(filepath.Join(dir, "gw."+name), data, 0o600)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	next, err := Reload(path, cfg)
	if err != nil || next == cfg {
		t.Fatalf("unchanged: %v, %v", next == cfg, err)
	}
	if next.DNS.Certificate == cfg.DNS.Certificate {
		t.Error("the certificate is the one from before")
	}
	next.DNS.TTL++
	if parts := cfg.RestartNeeded(next); parts != nil {
		t.Errorf("a restart is needed for %q", parts)
	}
	next.DNS = nil
	if parts := cfg.RestartNeeded(next); parts != nil {
		t.Errorf("a restart is needed for %q", parts)
	}
}

func TestDNSDefaults(t *testing.T) {
	cfg, err := Parse("x.yaml", []byte("dns: {listen: [\"udp://:53\"]}\nservices: []\n"))
	if err != nil {
		t.Fatal(err)
	}
	want := defaults[DNS]()
	want.Listeners = []DNSListener{{DNSAddress: DNSAddress{"udp", ":53"}}}
	if !reflect.DeepEqual(cfg.DNS, want) {
		t.Errorf("got  %+v\nwant %+v", cfg.DNS, want)
	}
	if got, want := cfg.DNSZones(), []string{"mesh.internal", "svc.clusterset.local"}; !slices.Equal(got, want) {
		t.Errorf("zones %q, want %q", got, want)
	}
	if none, err := Parse("x.yaml", []byte("services: []\n")); err != nil || none.DNS != nil {
		t.Errorf("%+v, %v", none.DNS, err)
	}
}
