package gateway

import (
	"context"
	"fmt"
	"io"
	"net/netip"
	"strings"
	"testing"
	"time"

	"culvert.dev/connect"
	"culvert.dev/connect/h2"
	"culvert.dev/connect/socks5"
	"culvert.dev/connect/ws"
	"culvert.dev/internal/testnet"
	"culvert.dev/registry"
	"culvert.dev/tunnel"
)

// say sends what to svc.test and returns the first bytes that come back.
func say(t *testing.T, d tunnel.Dialer, what string) (string, error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	c, err := d.DialContext(ctx, "tcp", "svc.test:443")
	if err != nil {
		return "", err
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(patience))
	if _, err := io.WriteString(c, what); err != nil {
		return "", err
	}
	got := make([]byte, len(what))
	n, err := io.ReadFull(c, got)
	return string(got[:n]), err
}

// Where the last hop has no TLS, a gateway carries what is TLS inside and refuses
// everything else, whatever it comes by.
func TestPlaintextByAPlainHop(t *testing.T) {
	const hello, plain = "\x16\x03\x01\x00\x40\x01 like a ClientHello", "GET / HTTP/1.1\r\n\r\n"
	far := start(t, "far", service(testnet.Echo(t).Addr()))
	at := netip.MustParseAddrPort(far)
	first := start(t, "first", &registry.Service{ // which the name of the last hop leads to
		Name: "far", Names: []tunnel.Pattern{{Suffix: tunnel.MustParseName("far.gw.test")}}, Exposed: true,
		Endpoints: []registry.Endpoint{{Addr: at.Addr(), Port: at.Port()}},
	})
	for name, row := range map[string]struct {
		last  registry.Hop
		plain bool // may be carried
	}{
		"a plain hop":             {byConnect("far.gw.test:8080"), false},
		"one said to be insecure": {inTheClear(byConnect("far.gw.test:8080")), true},
		"one on this host":        {byConnect(far), true},
	} {
		cfg := Config{
			Listeners: []Listener{
				{Address: "127.0.0.1:0", Protocols: append([]tunnel.Protocol{&ws.Protocol{}}, everything("near")...)},
				{Address: "127.0.0.2:0", Protocols: []tunnel.Protocol{&tunnel.Fixed{To: tunnel.MustParseName("svc.test"), Port: 443}}},
			},
			Sources: []registry.Source{registry.Static{Name: "test", Snapshot: registry.Snapshot{Services: []*registry.Service{service("", byConnect(first), row.last)}}}},
		}
		if row.last.Addresses[0] == far {
			cfg.Sources = []registry.Source{registry.Static{Name: "test", Snapshot: registry.Snapshot{Services: []*registry.Service{service("", row.last)}}}}
		}
		addr, g := startGateway(t, cfg)
		testnet.Eventually(t, patience, func() bool { return g.registry.Table() != nil }, "there is a table")
		for how, d := range map[string]tunnel.Dialer{
			"connect":    &connect.Dialer{Proxy: addr},
			"connect-h2": pooling(t, &h2.Dialer{Proxy: addr}),
			"socks5":     &socks5.Dialer{Proxy: addr},
			"websocket":  &ws.Dialer{URL: "ws://" + addr},
		} {
			if got, err := say(t, d, hello); got != hello || err != nil {
				t.Errorf("%s, by %s: a hello comes back as %q, %v", name, how, got, err)
			}
			got, err := say(t, d, plain)
			if row.plain && (got != plain || err != nil) || !row.plain && (got != "" || err == nil) {
				t.Errorf("%s, by %s: plaintext comes back as %q, %v; want it carried: %v", name, how, got, err, row.plain)
			}
			x := Explain(t.Context(), g.router, g.cfg.Listeners, Query{Host: "svc.test", Port: 443, Proto: how, Listener: g.cfg.Listeners[0].Address})
			if x.Reason != "" || len(x.Endpoints) != 1 || (x.Endpoints[0].TLSOnly == "") != row.plain {
				t.Errorf("%s, by %s: explained as %+v", name, how, x)
			}
		}
		// A port of the service's own carries what begins as TLS.
		if got, err := say(t, straight(g.Addrs()[1].String()), hello); got != hello || err != nil {
			t.Errorf("%s, by its own port: a hello comes back as %q, %v", name, got, err)
		}
		got, err := say(t, straight(g.Addrs()[1].String()), plain)
		if row.plain && (got != plain || err != nil) || !row.plain && (got != "" || err == nil) {
			t.Errorf("%s, by its own port: plaintext comes back as %q, %v; want it carried: %v", name, got, err, row.plain)
		}
		x := Explain(t.Context(), g.router, g.cfg.Listeners, Query{Listener: g.cfg.Listeners[1].Address})
		if x.Reason != "" || len(x.Endpoints) != 1 || row.plain != (x.Endpoints[0].TLSOnly == "") || !row.plain && !strings.Contains(x.Endpoints[0].TLSOnly, "far.gw.test:8080") {
			t.Errorf("%s, by its own port: explained as %+v", name, x)
		}
	}
}

// Endpoints in another network that are reached without a gateway get no plaintext,
// unless the network says so.
func TestPlaintextToOtherNetworks(t *testing.T) {
	cidr := func(s string) []netip.Prefix { return []netip.Prefix{netip.MustParsePrefix(s)} }
	for _, row := range []struct {
		name     string
		endpoint registry.Endpoint
		own      string // the gateway's network
		proto    string
		insecure bool
		want     tunnel.Reason
		tlsOnly  bool
	}{
		{"an address there", registry.Endpoint{Addr: netip.MustParseAddr("198.51.100.7"), Port: 443}, "west", "tls", false, tunnel.Insecure, false},
		{"by CONNECT", registry.Endpoint{Addr: netip.MustParseAddr("198.51.100.7"), Port: 443}, "west", "connect", false, "", true},
		{"by its own port", registry.Endpoint{Addr: netip.MustParseAddr("198.51.100.7"), Port: 443}, "west", "tcp", false, "", true},
		{"by UDP", registry.Endpoint{Addr: netip.MustParseAddr("198.51.100.7"), Port: 443}, "west", "udp", false, tunnel.Insecure, false},
		{"by UDP to one that may be", registry.Endpoint{Addr: netip.MustParseAddr("198.51.100.7"), Port: 443}, "west", "udp", true, "", false},
		{"by QUIC", registry.Endpoint{Addr: netip.MustParseAddr("198.51.100.7"), Port: 443}, "west", "quic", false, "", false},
		{"TLS by name", registry.Endpoint{Addr: netip.MustParseAddr("198.51.100.7"), Port: 443}, "west", "sni", false, "", false},
		{"one that may be", registry.Endpoint{Addr: netip.MustParseAddr("198.51.100.7"), Port: 443}, "west", "tcp", true, "", false},
		{"by CONNECT to one that may be", registry.Endpoint{Addr: netip.MustParseAddr("198.51.100.7"), Port: 443}, "west", "connect", true, "", false},
		{"an address here", registry.Endpoint{Addr: netip.MustParseAddr("192.0.2.7"), Port: 443}, "west", "tcp", false, "", false},
		{"an address nowhere", registry.Endpoint{Addr: netip.MustParseAddr("203.0.113.7"), Port: 443}, "west", "connect", false, "", false},
		{"a name that leads there", registry.Endpoint{Host: "db.test", Port: 443}, "west", "tls", false, tunnel.Insecure, false},
		{"a name that leads there, by SOCKS", registry.Endpoint{Host: "db.test", Port: 443}, "west", "socks5", false, "", true},
		{"a name that is said to be there", registry.Endpoint{Host: "out.test", Port: 443, Network: "lab"}, "west", "tls", false, tunnel.Insecure, false},
		{"a name that is said to be there, by CONNECT", registry.Endpoint{Host: "out.test", Port: 443, Network: "lab"}, "west", "connect", false, "", true},
		{"loopback, whatever is said of it", registry.Endpoint{Addr: netip.MustParseAddr("127.0.0.1"), Port: 443, Network: "lab"}, "west", "tcp", false, "", false},
		{"from a gateway in no network", registry.Endpoint{Addr: netip.MustParseAddr("198.51.100.7"), Port: 443}, "", "tcp", false, "", false},
	} {
		s := service("")
		s.Endpoints = []registry.Endpoint{row.endpoint}
		lookup := func(_ context.Context, host string) ([]netip.Addr, error) {
			a, ok := map[string]string{"db.test": "198.51.100.8", "out.test": "203.0.113.8"}[host]
			if !ok {
				return nil, fmt.Errorf("no such name: %s", host)
			}
			return []netip.Addr{netip.MustParseAddr(a)}, nil
		}
		reg := &registry.Registry{Mesh: registry.Mesh{Network: row.own}, Lookup: lookup}
		tab, err := reg.Mesh.Merge(registry.Snapshot{
			Networks: []registry.Network{{Name: "west", CIDRs: cidr("192.0.2.0/24")}, {Name: "lab", CIDRs: cidr("198.51.100.0/24"), Insecure: row.insecure}},
			Services: []*registry.Service{s},
		})
		if err != nil {
			t.Fatal(err)
		}
		reg.Swap(tab)
		route, err := reg.Resolve(t.Context(), &tunnel.Request{Proto: row.proto, Name: tunnel.MustParseName("svc.test"), Port: 443})
		if got := tunnel.ReasonOf(err); err == nil && row.want != "" || err != nil && got != row.want {
			t.Errorf("%s: got %v, want %q", row.name, err, row.want)
		}
		if err != nil {
			continue
		}
		if got := route.Endpoints[0].TLSOnly != nil; got != row.tlsOnly {
			t.Errorf("%s: TLS alone is carried: %v, want %v", row.name, got, row.tlsOnly)
		}
		if got := route.Endpoints[0].Insecure; got != row.insecure {
			t.Errorf("%s: insecure %v, want %v", row.name, got, row.insecure)
		}
	}
}

// A service that is insecure takes plaintext wherever it is, and the route says so.
func TestPlaintextToInsecureService(t *testing.T) {
	s := service("")
	s.Endpoints = []registry.Endpoint{{Addr: netip.MustParseAddr("198.51.100.7"), Port: 443}}
	s.Insecure = true
	reg := &registry.Registry{Mesh: registry.Mesh{Network: "west"}}
	tab, err := reg.Mesh.Merge(registry.Snapshot{
		Networks: []registry.Network{{Name: "west"}, {Name: "lab", CIDRs: []netip.Prefix{netip.MustParsePrefix("198.51.100.0/24")}}},
		Services: []*registry.Service{s},
	})
	if err != nil {
		t.Fatal(err)
	}
	reg.Swap(tab)
	for proto, want := range map[string]bool{"tls": true, "tcp": true, "connect": true, "udp": true, "sni": false} {
		route, err := reg.Resolve(t.Context(), &tunnel.Request{Proto: proto, Name: tunnel.MustParseName("svc.test"), Port: 443})
		if err != nil || route.Endpoints[0].TLSOnly != nil || route.Endpoints[0].Insecure != want {
			t.Errorf("%s: got %+v, %v; want it carried, and insecure %v", proto, route.Endpoints, err, want)
		}
	}
	if got := insecureIn(tab); got == nil || got.Count != 1 || len(got.Services) != 1 || len(got.Networks) != 0 {
		t.Errorf("the status has %+v, want the one service", got)
	}
}
