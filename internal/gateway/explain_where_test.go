package gateway

import (
	"fmt"
	"net"
	"net/netip"
	"strings"
	"testing"

	"culvert.dev/registry"
	"culvert.dev/sni"
	"culvert.dev/tunnel"
)

// A listener is found by any name that people know it by: the address that status
// prints, its port alone, its Gateway, or no name where only one can be meant.
func TestExplainFindsTheListener(t *testing.T) {
	e := newEdge(t)
	ep := greeter(t, "h")
	web := e.listener("shop/web/tls/443@a", registry.TLS, section("gateway/shop/web/tls@a", "", to(ep, "a.test", "both.test")))
	web.Origin = "Gateway shop/web"
	api := e.listener("shop/api/tls/443@b", registry.TLS, section("gateway/shop/api/tls@b", "", to(ep, "b.test", "both.test")))
	api.Origin = "Gateway shop/api"
	db := e.listener("shop/db/tcp/5432", registry.TCP, section("gateway/shop/db/tcp", "", to(ep)))
	db.Origin = "Gateway shop/db"
	e.have(web, api, db)
	port := func(l *registry.Listener) string { return fmt.Sprint(":", l.Port) }
	for _, test := range []struct {
		q    Query
		want string // the section that answers, with the reason of a refusal; or what an error has
	}{
		{Query{Host: "a.test", Listener: e.at(web.Port)}, "gateway/shop/web/tls@a"},
		{Query{Host: "a.test", Listener: port(web)}, "gateway/shop/web/tls@a"},
		{Query{Host: "a.test", Listener: "0.0.0.0" + port(web)}, "gateway/shop/web/tls@a"},
		{Query{Host: "a.test", Listener: "[::]" + port(web)}, "gateway/shop/web/tls@a"},
		{Query{Host: "a.test", Listener: "shop/web"}, "gateway/shop/web/tls@a"},
		{Query{Host: "a.test", Listener: web.Name}, "gateway/shop/web/tls@a"},
		{Query{Host: "a.test", Listener: web.Sections[0].Name}, "gateway/shop/web/tls@a"},
		{Query{Host: "a.test", Port: web.Port, Listener: e.at(web.Port)}, "gateway/shop/web/tls@a"},
		{Query{Host: "b.test", Listener: port(web)}, "gateway/shop/web/tls@a no-route"},
		{Query{Listener: port(db)}, "gateway/shop/db/tcp"},
		{Query{Host: "a.test"}, "gateway/shop/web/tls@a"},
		{Query{Host: "a.test", Port: web.Port}, "gateway/shop/web/tls@a"},
		{Query{Host: "b.test"}, "gateway/shop/api/tls@b"},
		{Query{Host: "db.test", Port: db.Port}, "gateway/shop/db/tcp"},
		{Query{Host: "both.test"}, "Several have a route: name one of " + e.at(web.Port) + " (Gateway shop/web), " + e.at(api.Port) + " (Gateway shop/api)"},
		{Query{Host: "c.test"}, "None has a route for this; there are " + e.at(web.Port)},
		{Query{Host: "a.test", Listener: "nonsense"}, `there is no listener "nonsense"; there are ` + e.at(web.Port) + " (Gateway shop/web)"},
		{Query{Host: "a.test", Listener: "192.0.2.1" + port(web)}, "there is no listener"},
		{Query{Host: "a.test", Listener: "udp://" + port(web)}, "there is no listener"},
	} {
		x, err := e.explain(t.Context(), test.q)
		if err != nil {
			if !strings.Contains(err.Error(), test.want) {
				t.Errorf("%+v: got %v, want %s", test.q, err, test.want)
			}
			continue
		}
		if got := strings.TrimSpace(fmt.Sprint(x.Listener, " ", x.Reason)); got != test.want {
			t.Errorf("%+v: got %s (%s), want %s", test.q, got, x.Detail, test.want)
		}
	}

	// One that is not open says why.
	taken, err := net.Listen("tcp", e.at(e.port()))
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	closed := e.listener("shop/closed/tcp/1", registry.TCP, section("closed", "", to(ep)))
	closed.Port = taken.Addr().(*net.TCPAddr).AddrPort().Port()
	e.have(web, closed)
	if _, err := e.explain(t.Context(), Query{Listener: port(closed)}); err == nil || !strings.Contains(err.Error(), "is not open") || !strings.Contains(err.Error(), "in use") {
		t.Errorf("a listener that is not open: got %v", err)
	}
}

// Beside the listeners of sources those of the configuration answer as ever.
func TestExplainFindsConfiguredListeners(t *testing.T) {
	r := launch(t, Config{Listeners: []Listener{{Address: "127.0.0.1:0", Protocols: []tunnel.Protocol{&sni.Protocol{}}}}}, &registry.Service{
		Name: "a.test", Names: []tunnel.Pattern{{Suffix: tunnel.MustParseName("a.test")}}, Exposed: true, Endpoints: []registry.Endpoint{{Addr: netip.MustParseAddr("127.0.0.1"), Port: 1}},
	})
	_, port, _ := net.SplitHostPort(r.Addrs()[0].String())
	for _, listener := range []string{"", "127.0.0.1:0", r.Addrs()[0].String(), ":" + port} {
		if x, err := r.explain(t.Context(), Query{Host: "a.test", Listener: listener}); err != nil || x.Reason != "" || x.Service == "" {
			t.Errorf("listener %q: got %+v, %v", listener, x, err)
		}
		if x, err := r.explain(t.Context(), Query{Host: "b.test", Listener: listener}); err != nil || x.Reason != tunnel.NoRoute {
			t.Errorf("listener %q: got %+v, %v", listener, x, err)
		}
	}
	if _, err := r.explain(t.Context(), Query{Host: "a.test", Listener: "nonsense"}); err == nil || !strings.Contains(err.Error(), "127.0.0.1:0") {
		t.Errorf("an unknown listener: got %v", err)
	}
}
