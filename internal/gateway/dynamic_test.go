package gateway

import (
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"culvert.dev/internal/testca"
	"culvert.dev/internal/testnet"
	"culvert.dev/registry"
	"culvert.dev/tunnel"
)

// The hostnames of Gateway API: which section a name is for, and which rule.
func TestFrontNames(t *testing.T) {
	e := newEdge(t)
	b := func(hello string, names ...string) *registry.Rule {
		return to(tlsBackend(t, &tls.Config{Certificates: []tls.Certificate{e.issue("abc.example.com", "*.example.com", "*.sub.example.com", "other.example.org", "a.b.example.com", "www.other.test", "example.com").TLS}}, hello), names...)
	}
	exact, longer, shorter, any := b("e", "abc.example.com"), b("l", "*.sub.example.com"), b("s", "*.example.com"), b("a", "*.example.com", "other.example.org", "abc.example.com", "*.sub.example.com")
	one := e.listener("one", registry.TLS, section("one/exact", "abc.example.com", exact), section("one/longer", "*.sub.example.com", longer), section("one/shorter", "*.example.com", shorter), section("one/any", "", any))
	alone := e.listener("alone", registry.TLS, section("alone/exact", "abc.example.com", b("E", "abc.example.com")))
	rules := e.listener("rules", registry.TLS, section("rules/any", "", exact, longer, shorter))
	all := e.listener("all", registry.TLS, section("all/any", "", b("n")))
	none := e.listener("none", registry.TLS)
	e.have(one, alone, rules, all, none)
	for _, test := range []struct {
		at         *registry.Listener
		name, want string
	}{
		{one, "abc.example.com", "e"},
		{one, "ABC.Example.com", "e"},
		{one, "x.sub.example.com", "l"},
		{one, "a.b.example.com", "s"}, // a wildcard stands for any number of labels
		{one, "sub.example.com", "s"}, // and for one at least
		{one, "other.example.org", "a"},
		{one, "example.com", "cut"},
		{one, "other.test", "cut"},
		{one, "", "cut"}, // in the section for any host, which has no rule for it
		{alone, "abc.example.com", "E"},
		{alone, "x.abc.example.com", "cut"},
		{alone, "other.example.org", "cut"},
		{alone, "", "cut"},
		{rules, "abc.example.com", "e"},
		{rules, "x.sub.example.com", "l"},
		{rules, "y.example.com", "s"},
		{rules, "example.com", "cut"},
		{all, "abc.example.com", "n"},
		{all, "", "n"},
		{none, "abc.example.com", "cut"},
	} {
		if got := e.asked(test.at.Port, test.name); got != test.want {
			t.Errorf("%s is asked for %q: got %s, want %s", test.at.Name, test.name, got, test.want)
		}
	}
	e.logs("listener=one/shorter ", "target=a.b.example.com")
	e.logs("listener=rules/any ", "target=example.com", "reason=no-route")
	e.logs("listener=none ", "target=abc.example.com", "reason=no-route")
}

// TLS that is passed on and TLS that ends are at one port; inside of that which
// ends is what the client says.
func TestFrontModes(t *testing.T) {
	e := newEdge(t)
	passed := tlsBackend(t, &tls.Config{Certificates: []tls.Certificate{e.issue("abc.example.com").TLS}}, "p")
	ended := section("end", "tls.example.com", to(greeter(t, "t"), "tls.example.com"))
	pair := e.issue("tls.example.com")
	ended.TLS = &registry.TLSTermination{Certificates: []registry.KeyPair{keyPair(e.issue("first.test")), keyPair(pair)}}
	l := e.listener("mixed", registry.TLS, ended, section("pass", "abc.example.com", to(passed, "abc.example.com")))
	e.have(l)
	for name, want := range map[string]string{"tls.example.com": "t", "abc.example.com": "p", "other.example.com": "cut"} {
		if got := e.asked(l.Port, name); got != want {
			t.Errorf("%s: got %s, want %s", name, got, want)
		}
	}
	c, err := e.dialTLS(l.Port, "tls.example.com")
	if err != nil {
		t.Fatal(err)
	}
	if hears(c, 1); leafOf(c) != parseLeaf(t, pair).SerialNumber.String() {
		t.Error("not the certificate with the name is shown")
	}
	works(t, c)
	if err := c.CloseWrite(); err != nil { // close_notify is an end, and the backend's comes back
		t.Error(err)
	}
	if rest, err := io.ReadAll(c); err != nil || len(rest) > 0 {
		t.Errorf("after the end: %q, %v", rest, err)
	}
	_ = c.Close()
	e.logs("proto=tls listener=end ", "target=tls.example.com")
	e.logs("proto=sni listener=pass ", "target=abc.example.com")
}

// Whom nothing is there for is cut off, and hears no alert nor that the port is
// closed; where TLS ends, before it begins.
func TestFrontRefuses(t *testing.T) {
	e := newEdge(t)
	ends := e.ends("a.test", "b.test", "c.test", "d.test")
	broken := func(w uint32) registry.Backend { return registry.Backend{Weight: w, Broken: "no such service"} }
	empty := registry.Backend{Weight: 1, Service: &registry.Service{Name: "empty"}}
	works := registry.Backend{Weight: 0, Service: &registry.Service{Name: "w", Endpoints: []registry.Endpoint{greeter(t, "w")}}}
	rules := []*registry.Rule{ruled("broken", []string{"a.test"}, broken(1)), ruled("none", []string{"b.test"}), ruled("empty", []string{"c.test"}, empty), ruled("weightless", []string{"d.test"}, works, broken(0))}
	pass := e.listener("pass", registry.TLS, section("pass", "", rules...))
	end := section("end", "", rules...)
	end.TLS = ends
	terminate := e.listener("terminate", registry.TLS, end)
	bad := section("bad", "", to(greeter(t, "x")))
	bad.TLS = &registry.TLSTermination{Certificates: []registry.KeyPair{{Certificate: "nonsense"}}}
	mis := e.listener("misconfigured", registry.TLS, bad)
	all := []*registry.Listener{pass, terminate, mis}
	plain := map[*registry.Listener]bool{}
	for _, r := range rules {
		l := e.listener("tcp/"+r.Name, registry.TCP, section("tcp/"+r.Name, "", r))
		plain[l], all = true, append(all, l)
	}
	empties := e.listener("tcp", registry.TCP)
	plain[empties] = true
	e.have(append(all, empties)...)
	for _, l := range []*registry.Listener{pass, terminate, mis} {
		for _, name := range []string{"a.test", "b.test", "c.test", "d.test", "e.test"} {
			if got := e.asked(l.Port, name); got != "cut" {
				t.Errorf("%s, %s: got %s", l.Name, name, got)
			}
		}
		c, err := net.Dial("tcp", e.at(l.Port)) // who speaks no TLS
		if err != nil {
			t.Fatal(err)
		}
		_, _ = io.WriteString(c, "GET / HTTP/1.1\r\n\r\n")
		if b, err := io.ReadAll(c); len(b) > 0 {
			t.Errorf("%s: HTTP is answered with %q, %v", l.Name, b, err)
		}
		_ = c.Close()
	}
	for l := range plain {
		if got := e.plainly(l.Port); got != "cut" {
			t.Errorf("%s: got %s", l.Name, got)
		}
	}
	errs := e.ListenerErrors()
	if err, open := errs["misconfigured"]; errs["bad"] == nil || err != nil || !open { // its other sections are served
		t.Errorf("of the section without a certificate is said: %v", errs)
	}
	for _, want := range []string{"no such service", `service \"empty\" has no endpoint`, "no backend with a weight"} {
		e.logs("reason=no-endpoint", want)
	}
}

// Weights are kept within a point over 500 connections, a broken share is
// refused, and what has no weight gets nothing.
func TestFrontWeights(t *testing.T) {
	e := newEdge(t)
	backend := func(hello string, w uint32) registry.Backend {
		return registry.Backend{Weight: w, Service: &registry.Service{Name: hello, Endpoints: []registry.Endpoint{greeter(t, hello)}}}
	}
	r := ruled("weighted", nil, backend("a", 70), registry.Backend{Weight: 10, Broken: "gone"}, backend("b", 20), backend("z", 0))
	l := e.listener("tcp", registry.TCP, section("tcp", "", r))
	e.have(l)
	got := map[string]int{}
	const n = 500
	for i := range n {
		if i == n/2 { // another table goes on where this one was
			e.have(l)
		}
		got[e.plainly(l.Port)]++
	}
	for hello, want := range map[string]int{"a": 350, "b": 100, "cut": 50, "z": 0} {
		if d := got[hello] - want; d < -5 || d > 5 {
			t.Errorf("%s: %d of %d, want %d; all: %v", hello, got[hello], n, want, got)
		}
	}
}

// A backend's endpoints take turns whatever the turns of the backends are.
func TestFrontEndpointsTakeTurns(t *testing.T) {
	e := newEdge(t)
	two := &registry.Service{Name: "two", Endpoints: []registry.Endpoint{greeter(t, "a"), greeter(t, "b")}}
	r := ruled("r", nil, registry.Backend{Weight: 1, Service: two}, registry.Backend{Weight: 1, Service: &registry.Service{Name: "one", Endpoints: []registry.Endpoint{greeter(t, "c")}}})
	l := e.listener("tcp", registry.TCP, section("tcp", "", r))
	e.have(l)
	got := map[string]int{}
	for range 40 {
		got[e.plainly(l.Port)]++
	}
	if got["c"] < 19 || got["c"] > 21 || got["a"]-got["b"] < -1 || got["a"]-got["b"] > 1 {
		t.Errorf("got %v", got)
	}
}

// Client certificates: required, or optional, and then without an identity where
// they can't be verified.
func TestFrontClientCertificates(t *testing.T) {
	e := newEdge(t)
	other, err := testca.New("other.test", nil)
	if err != nil {
		t.Fatal(err)
	}
	good, strange := e.issue("client.test").TLS, issueOf(t, other, "client.test").TLS
	ep := greeter(t, "h")
	must, may := section("must", "must.test", to(ep)), section("may", "may.test", to(ep))
	must.TLS, may.TLS = e.ends("must.test"), e.ends("may.test")
	must.TLS.ClientCAs, may.TLS.ClientCAs, may.TLS.ClientCertOptional = string(e.ca.CertPEM), string(e.ca.CertPEM), true
	may.TLS.ClientCertUnverified = true
	l := e.listener("tls", registry.TLS, must, may)
	e.have(l)
	for i, test := range []struct {
		name string
		cert *tls.Certificate
		want bool
		peer string
	}{
		{"must.test", &good, true, "spiffe://edge.test/ns/test/sa/a"},
		{"must.test", &strange, false, ""},
		{"must.test", nil, false, ""},
		{"may.test", &good, true, "spiffe://edge.test/ns/test/sa/a"},
		{"may.test", &strange, true, ""},
		{"may.test", nil, true, ""},
	} {
		var certs []tls.Certificate
		if test.cert != nil {
			certs = append(certs, *test.cert)
		}
		before := len(e.log.String())
		cfg := &tls.Config{ServerName: test.name, RootCAs: e.ca.Pool()}
		if test.cert != nil { // whatever CAs the gateway names
			cfg.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return &certs[0], nil }
		}
		c, err := tls.Dial("tcp", e.at(l.Port), cfg)
		got := ""
		if err == nil {
			_ = c.SetDeadline(time.Now().Add(soon))
			got = hears(c, 1)
			_ = c.Close()
		}
		if (got == "h") != test.want {
			t.Errorf("%d: got %s, %v", i, got, err)
		}
		if test.want {
			testnet.Eventually(t, soon, func() bool {
				return strings.Contains(e.log.String()[before:], "listener="+strings.TrimSuffix(test.name, ".test"))
			}, "the log has a line")
			if said := e.log.String()[before:]; strings.Contains(said, "spiffe://") != (test.peer != "") || !strings.Contains(said, test.peer) {
				t.Errorf("%d: want the peer %q in %s", i, test.peer, said)
			}
		}
	}
}

// Certificates change with no tunnel dropped.
func TestFrontRotation(t *testing.T) {
	e := newEdge(t)
	rule := to(greeter(t, "h"), "a.test")
	sectioned := func(p *testca.Pair) *registry.Section {
		s := section("s", "a.test", rule)
		s.TLS = &registry.TLSTermination{Certificates: []registry.KeyPair{keyPair(p)}}
		return s
	}
	old, other := e.issue("a.test"), e.issue("a.test")
	l := e.listener("tls", registry.TLS, sectioned(old))
	e.have(l)
	before, err := e.dialTLS(l.Port, "a.test")
	if err != nil {
		t.Fatal(err)
	}
	hears(before, 1)
	e.have(with(l, sectioned(other)))
	after, err := e.dialTLS(l.Port, "a.test")
	if err != nil {
		t.Fatal(err)
	}
	if hears(after, 1); leafOf(after) != parseLeaf(t, other).SerialNumber.String() {
		t.Error("the old certificate is shown")
	}
	works(t, before)
	works(t, after)
	s := sectioned(other)
	s.TLS.Certificates[0].Key = "nonsense"
	e.have(with(l, s))
	if got := e.asked(l.Port, "a.test"); got != "cut" {
		t.Errorf("without a key: got %s", got)
	}
	works(t, before)
}

// A Secret that is replaced is shown by the next handshake, with no new table; one that no
// Gateway uses any more is gone once the table has not named it for a while.
func TestKeysOfSecrets(t *testing.T) {
	e := newEdge(t)
	s := section("s", "a.test", to(greeter(t, "h"), "a.test"))
	s.TLS = &registry.TLSTermination{Keys: []string{"secret/shop/edge"}}
	l := e.listener("tls", registry.TLS, s)
	use := func(p *testca.Pair) { e.UseKeys(map[string]*tls.Certificate{"secret/shop/edge": &p.TLS}) }
	old, other := e.issue("a.test"), e.issue("a.test")
	use(old)
	e.have(l)
	table := e.registry.Table().Generation()
	before, err := e.dialTLS(l.Port, "a.test")
	if err != nil {
		t.Fatal(err)
	}
	hears(before, 1)
	use(other)
	after, err := e.dialTLS(l.Port, "a.test")
	if err != nil {
		t.Fatal(err)
	}
	if hears(after, 1); leafOf(after) != parseLeaf(t, other).SerialNumber.String() {
		t.Error("the old certificate is shown")
	}
	e.UseKeys(nil)
	if got := e.asked(l.Port, "a.test"); got != "h" {
		t.Errorf("while the table may name it: got %s", got)
	}
	e.UseKeys(nil)
	if got := e.asked(l.Port, "a.test"); got == "h" {
		t.Error("a Secret that is gone is still shown")
	}
	use(old)
	if got := e.asked(l.Port, "a.test"); got != "h" {
		t.Errorf("once it is back: got %s", got)
	}
	works(t, before)
	works(t, after)
	if now := e.registry.Table().Generation(); now != table {
		t.Errorf("the table has generation %d, and had %d", now, table)
	}
}

// HTTP is not routed, and a client hears that.
func TestFrontHTTP(t *testing.T) {
	t.Parallel()
	e := newEdge(t)
	l := e.listener("http", registry.HTTP)
	e.have(l)
	c, err := net.Dial("tcp", e.at(l.Port))
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	_, _ = io.WriteString(c, "GET / HTTP/1.1\r\nHost: a.test\r\n\r\n")
	if b, err := io.ReadAll(c); err != nil || !strings.HasPrefix(string(b), "HTTP/1.1 501 ") || !strings.HasSuffix(string(b), "routes no HTTP.\n") {
		t.Errorf("got %q, %v", b, err)
	}
	if got := e.asked(l.Port, "a.test"); got != "cut" {
		t.Errorf("HTTPS: got %s", got)
	}
	e.logs("proto=http listener=http ", "reason=unsupported", "HTTPS is not")
	e.logs("proto=http listener=http ", "reason=unsupported", "HTTP is not")
}

// Names of Istio's form lead to services that are exposed, and to no others;
// other names do not leave the listener.
func TestFrontIstio(t *testing.T) {
	cfg := func(e *edge) *tls.Config { return &tls.Config{Certificates: []tls.Certificate{e.issue("a.test").TLS}} }
	e := newEdge(t)
	service := func(name string, exposed bool, port uint16) *registry.Service {
		return &registry.Service{Name: name, Names: []tunnel.Pattern{pattern(name)}, Ports: []uint16{port}, Endpoints: []registry.Endpoint{tlsBackend(t, cfg(e), "i")}, Exposed: exposed, Origin: "test"}
	}
	auto := section("auto", "*.local")
	auto.Istio = true
	l, plain := e.listener("auto", registry.TLS, auto), e.listener("plain", registry.TLS, section("plain", ""))
	narrow := e.listener("narrow", registry.TLS, section("narrow/x", "x.test"))
	e.say(registry.Snapshot{Services: []*registry.Service{service("reviews.default.svc.cluster.local", true, 443), service("private.default.svc.cluster.local", false, 443)}, Listeners: []*registry.Listener{l, plain, narrow}})
	for _, test := range []struct {
		at         *registry.Listener
		name, want string
	}{
		{l, "outbound_.443_._.reviews.default.svc.cluster.local", "i"},
		{l, "outbound_.443_.v1_.reviews.default.svc.cluster.local", "i"},
		{l, "outbound_.80_._.reviews.default.svc.cluster.local", "cut"},
		{l, "outbound_.443_._.private.default.svc.cluster.local", "cut"},
		{l, "reviews.default.svc.cluster.local", "cut"},
		{plain, "outbound_.443_._.reviews.default.svc.cluster.local", "cut"},
		{plain, "reviews.default.svc.cluster.local", "cut"},
		{narrow, "reviews.default.svc.cluster.local", "cut"},
	} {
		c, err := tls.Dial("tcp", e.at(test.at.Port), &tls.Config{ServerName: test.name, InsecureSkipVerify: true})
		got := "cut"
		if err == nil {
			_ = c.SetDeadline(time.Now().Add(soon))
			got = hears(c, 1)
			_ = c.Close()
		} else if !wasCut(err) {
			got = err.Error()
		}
		if got != test.want {
			t.Errorf("%s, %s: got %s, want %s", test.at.Name, test.name, got, test.want)
		}
	}
}

// A request by a section that has left the table meanwhile is refused, whatever
// services there are.
func TestFrontRequestsStayConfined(t *testing.T) {
	e := newEdge(t, &registry.Service{Name: "a.test", Names: []tunnel.Pattern{pattern("a.test")}, Endpoints: []registry.Endpoint{greeter(t, "a")}, Exposed: true})
	req := &tunnel.Request{Name: tunnel.MustParseName("a.test"), Listener: "gone"}
	if _, err := e.registry.Resolve(t.Context(), req); err != nil {
		t.Errorf("a request of a configured listener: %v", err)
	}
	req.ListenerOnly = true
	if route, err := e.registry.Resolve(t.Context(), req); tunnel.ReasonOf(err) != tunnel.NoRoute {
		t.Errorf("a request of a section that is gone: got %v, %v", route, err)
	}
}

// Explain says what a listener of the table leads to, by its name or a
// section's.
func TestFrontsAreExplained(t *testing.T) {
	e := newEdge(t)
	ep := greeter(t, "h")
	ended := section("ended", "end.test", to(ep, "end.test"))
	ended.TLS = e.ends("end.test")
	e.have(e.listener("tls", registry.TLS, ended, section("passed", "*.test", to(ep, "a.test"))),
		e.listener("tcp", registry.TCP, section("tcp", "", to(ep))),
		e.listener("udp", registry.UDP, section("udp", "", to(ep))), e.listener("http", registry.HTTP))
	for _, test := range []struct {
		q    Query
		want string
	}{
		{Query{Listener: "tls", Host: "end.test"}, "tls ended  end.test"},
		{Query{Listener: "passed", Host: "a.test"}, "sni passed  a.test"},
		{Query{Listener: "tls", Host: "b.test"}, "sni passed no-route "},
		{Query{Listener: "tls", Host: "b.example"}, "sni tls no-route "},
		{Query{Listener: "tcp"}, "tcp tcp  *"},
		{Query{Listener: "udp"}, "udp udp  *"},
		{Query{Listener: "http"}, "sni http unsupported "},
	} {
		x := Explain(t.Context(), e.router, e.inbound.listeners(), test.q)
		if got := fmt.Sprintf("%s %s %s %s", x.Proto, x.Listener, x.Reason, x.Pattern); got != test.want {
			t.Errorf("%+v: got %s, want %s (%s)", test.q, got, test.want, x.Detail)
		}
		if x.Reason == "" && (len(x.Endpoints) != 1 || x.Endpoints[0].Address != netip.AddrPortFrom(ep.Addr, ep.Port).String()) {
			t.Errorf("%+v: endpoints %v", test.q, x.Endpoints)
		}
	}
}

// A gateway without a listener starts where its sources may bring some.
func TestSourcesListen(t *testing.T) {
	if _, err := New(t.Context(), Config{}); err == nil || !strings.Contains(err.Error(), "no listener") {
		t.Errorf("without any: %v", err)
	}
	e := newEdge(t)
	if len(e.Addrs()) != 0 || len(e.ListenerErrors()) != 0 {
		t.Errorf("there are listeners: %v, %v", e.Addrs(), e.ListenerErrors())
	}
	e.end()
	if used := e.loops.Budget.Used(); used != 0 {
		t.Errorf("%d descriptors are counted after the end", used)
	}
}
