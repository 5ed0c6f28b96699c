package inbound

import (
	"bytes"
	"log/slog"
	"net/netip"
	"strings"
	"testing"

	"culvert.dev/registry"
	"culvert.dev/tunnel"
)

// A name in TLS is compared with the service that a captured connection goes to.
func TestCapturedServes(t *testing.T) {
	address := netip.MustParseAddr("240.0.0.7")
	service := func(name string, addrs ...netip.Addr) *registry.Service {
		var names []tunnel.Pattern
		for n := range strings.FieldsSeq(name) {
			p, err := tunnel.ParsePattern(n)
			if err != nil {
				t.Fatal(err)
			}
			names = append(names, p)
		}
		return &registry.Service{Name: names[0].String(), Names: names, Addresses: addrs, Exposed: true,
			Endpoints: []registry.Endpoint{{Addr: netip.MustParseAddr("10.0.0.7"), Port: 443}}}
	}
	table, err := registry.Merge(registry.Snapshot{Services: []*registry.Service{
		service("db.shop.example *.db.shop.example", address), service("web.shop.example"),
	}})
	if err != nil {
		t.Fatal(err)
	}
	var log bytes.Buffer
	b := &Builder{Table: func() *registry.Table { return table }, Log: slog.New(slog.NewTextHandler(&log, nil))}
	dst := netip.AddrPortFrom(address, 443)
	for name, want := range map[string]bool{"db.shop.example": true, "a.db.shop.example": true, "web.shop.example": false, "other.example": false} {
		if got, ok := b.serves(dst, name); ok != want || got != "db.shop.example" {
			t.Errorf("%s at %s: %q, %t; want %t", name, dst, got, ok, want)
		}
	}
	if _, ok := b.serves(netip.MustParseAddrPort("240.0.0.8:443"), "db.shop.example"); !ok {
		t.Error("an address of no service is said to be another one's")
	}
	l, err := b.New(table, &registry.Listener{Protocol: registry.Streams, Settings: &registry.ListenerSettings{Protocols: []string{"captured"}}})
	if err != nil {
		t.Fatal(err)
	}
	ps := l.Current().Protocols
	if len(ps) != 1 || ps[0].Name() != "captured" || ps[0].Sniff(nil) != tunnel.Yes {
		t.Errorf("the listener has %v, want captured, which waits for no byte", ps)
	}
}
