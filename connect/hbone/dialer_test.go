package hbone

import (
	"context"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"strings"
	"sync"
	"testing"

	"golang.org/x/net/http2"

	"culvert.dev/connect"
	"culvert.dev/connect/h2"
	"culvert.dev/identity"
	"culvert.dev/internal/testca"
	"culvert.dev/internal/testnet"
	"culvert.dev/tunnel"
	"culvert.dev/tunnel/tunneltest"
)

func TestDialer(t *testing.T) {
	m := newMesh(t)
	tunneltest.TestDialer(t, func(t *testing.T, ln net.Listener) tunneltest.Dialer {
		m := &mesh{m.CA, t}
		g := serve(t, m.server("gw"), table{"svc.test:443": ln.Addr().String(), "down.test:443": "127.0.0.1:1", "secret.test:443": "private"})
		d := m.newDialer(g.Addr, id("gw"))
		return tunneltest.Dialer{Dialer: d, Addr: "svc.test:443", Refused: map[string]tunnel.Reason{
			"other.test:443": tunnel.NoRoute, "down.test:443": tunnel.DialFailed, "secret.test:443": tunnel.NotExposed, "192.0.2.1:443": tunnel.NoRoute,
		}}
	}, tunneltest.Options{Streams: 1000})
}

// TestDouble has the outer server choose an inner one, which it can't read.
func TestDouble(t *testing.T) {
	m := newMesh(t)
	tunneltest.TestDialer(t, func(t *testing.T, ln net.Listener) tunneltest.Dialer {
		m := &mesh{m.CA, t}
		inner := serve(t, m.server("workload"), table{"svc.test:443": ln.Addr().String(), "down.test:443": "127.0.0.1:1"})
		outer := serve(t, m.server("gw"), table{"svc.test:443": inner.Addr, "down.test:443": inner.Addr, "unknown.test:443": inner.Addr})
		d := &Double{Outer: m.newDialer(outer.Addr, id("gw")), TLS: m.client("alice"), Verifier: m.verifier(id("workload"))}
		t.Cleanup(func() { _ = d.Close() })
		return tunneltest.Dialer{Dialer: d, Addr: "svc.test:443", Refused: map[string]tunnel.Reason{
			"other.test:443": tunnel.NoRoute, "unknown.test:443": tunnel.NoRoute, "down.test:443": tunnel.DialFailed,
		}}
	}, tunneltest.Options{Bytes: 2 << 20, Streams: 100}) // each has a TLS handshake of its own
}

// TestInnerIsNotPooled: each dial has an inner connection of its own, on one
// outer connection, and it goes with its stream.
func TestInnerIsNotPooled(t *testing.T) {
	m := newMesh(t)
	plain := testnet.Echo(t).Addr()
	var mu sync.Mutex
	chosen := map[string]int{}
	one, two := serve(t, m.server("workload"), table{"svc.test:80": plain}), serve(t, m.server("workload"), table{"svc.test:80": plain})
	turn := 0
	outer := serve(t, m.server("gw"), resolverFunc(func(req *tunnel.Request) (tunnel.Route, error) {
		mu.Lock()
		defer mu.Unlock()
		to := []string{one.Addr, two.Addr}[turn%2]
		turn++
		chosen[to]++
		return table{"svc.test:80": to}.Resolve(t.Context(), req)
	}))
	d := &Double{Outer: m.newDialer(outer.Addr, id("gw")), TLS: m.client("alice"), Verifier: m.verifier("spiffe://cluster.local")}
	defer d.Close()
	for range 6 {
		c := tunneltest.Dial(t, d, "svc.test:80")
		testnet.Ping(t, c, "hello")
		_ = c.Close()
	}
	mu.Lock()
	if chosen[one.Addr] != 3 || chosen[two.Addr] != 3 {
		t.Errorf("endpoints were chosen %v times, want 3 each", chosen)
	}
	mu.Unlock()
	if n := d.Outer.Conns(); n != 1 {
		t.Errorf("%d outer connections, want one for all", n)
	}
	testnet.Eventually(t, innerIdleTimeout/2, func() bool { return d.h2.Conns() == 0 }, "no inner connections are left")
}

type resolverFunc func(*tunnel.Request) (tunnel.Route, error)

func (f resolverFunc) Resolve(_ context.Context, req *tunnel.Request) (tunnel.Route, error) {
	return f(req)
}

// TestServerIdentity: whom a Dialer takes for its server.
func TestServerIdentity(t *testing.T) {
	m, other := newMesh(t), newMesh(t)
	plain := table{"svc.test:80": testnet.Echo(t).Addr()}
	g := serve(t, m.server("gw", "localhost"), plain)
	_, port, _ := net.SplitHostPort(g.Addr)
	for _, tt := range []struct {
		name, addr string
		peers      []string
		by         *mesh  // whose CA is trusted
		want       string // in the error; "" for none
	}{
		{"the very one", g.Addr, []string{id("x"), id("gw")}, m, ""},
		{"of a trust domain", g.Addr, []string{"spiffe://cluster.local"}, m, ""},
		{"by its name", "localhost:" + port, nil, m, ""},
		{"another one", g.Addr, []string{id("other")}, m, `the server's id is "spiffe://cluster.local/ns/test/sa/gw"`},
		{"of another trust domain", g.Addr, []string{"spiffe://cluster"}, m, "want one of"},
		{"a longer name", g.Addr, []string{id("g")}, m, "want one of"},
		{"an address it does not have", g.Addr, nil, m, "doesn't contain any IP SANs"},
		{"of another CA", g.Addr, []string{id("gw")}, other, "unknown authority"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			d := &Dialer{Gateway: tt.addr, TLS: m.client("alice")}
			if tt.peers != nil {
				d.Verifier = tt.by.verifier(tt.peers...)
			}
			defer d.Close()
			ctx, cancel := context.WithTimeout(t.Context(), patience)
			defer cancel()
			c, err := d.DialContext(ctx, "tcp", "svc.test:80")
			if err == nil {
				_ = c.Close()
			}
			if tt.want == "" && err != nil || tt.want != "" && (err == nil || !strings.Contains(err.Error(), tt.want)) {
				t.Errorf("got %v, want %q", err, tt.want)
			}
			if err != nil {
				tunneltest.WantReason(t, err, tunnel.DialFailed)
			}
		})
	}
}

// TestCallers: without a certificate that is verified, nobody is heard.
func TestCallers(t *testing.T) {
	m, other := newMesh(t), newMesh(t)
	g := serve(t, m.server("gw"), table{"svc.test:80": testnet.Echo(t).Addr()})
	for name, cfg := range map[string]*tls.Config{
		"none":          {RootCAs: m.Pool()},
		"of another CA": {RootCAs: m.Pool(), Certificates: other.client("mallory").Certificates},
	} {
		d := &Dialer{Gateway: g.Addr, TLS: cfg, Verifier: m.verifier(id("gw"))}
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		if c, err := d.DialContext(ctx, "tcp", "svc.test:80"); err == nil {
			_ = c.Close()
			t.Errorf("%s: was let in", name)
		}
		cancel()
		_ = d.Close()
	}
	g.Reason(t, tunnel.NoAuth)

	// Nor where TLS would let them in.
	keys := m.server("gw")
	keys.Optional = true
	g = serve(t, keys, table{"svc.test:80": testnet.Echo(t).Addr()})
	d := &Dialer{Gateway: g.Addr, TLS: &tls.Config{RootCAs: m.Pool()}, Verifier: m.verifier(id("gw"))}
	defer d.Close()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	_, err := d.DialContext(ctx, "tcp", "svc.test:80")
	tunneltest.WantReason(t, err, tunnel.NoAuth)
	if err != nil && !strings.Contains(err.Error(), "status 401") {
		t.Errorf("got %v, want status 401", err)
	}
	if o := g.Reason(t, tunnel.NoAuth); o.Proto != "hbone" || o.Target != "svc.test:80" {
		t.Errorf("outcome of %q for %q, want hbone and the target", o.Proto, o.Target)
	}
}

// TestWhoAsks: the peer is who the certificate says, and what the fields say
// is passed on and no more.
func TestWhoAsks(t *testing.T) {
	m := newMesh(t)
	second := serve(t, m.server("second"), table{"svc.test:80": testnet.Echo(t).Addr()})
	d := &Dialer{Gateway: second.Addr, TLS: m.client("alice"), Verifier: m.verifier(id("second")), Baggage: "k8s.cluster.name=west"}
	defer d.Close()
	c := tunneltest.Dial(t, d, "svc.test:80")
	testnet.Ping(t, c, "hello")
	_ = c.Close()
	o := second.Reason(t, tunnel.Done)
	if caller := (tunnel.Peer{ID: id("alice"), Method: "mtls", Auth: o.Peer.Auth}); o.Peer != caller || o.Proto != "hbone" || caller.Auth == nil || caller.Auth.ServiceAccount != "alice" {
		t.Errorf("%s by %+v, want hbone by %+v", o.Proto, o.Peer, caller)
	}
	if o.Unverified == nil || !connect.IsTrace(o.Unverified.Trace) || o.Unverified.Baggage != "k8s.cluster.name=west" || o.Unverified.Forwarded != "" {
		t.Errorf("it said %+v, want a trace and the dialer's baggage", o.Unverified)
	}

	req := &tunnel.Request{
		Source:     c.LocalAddr().(*net.TCPAddr).AddrPort(),
		Unverified: &tunnel.UnverifiedHeaders{Trace: o.Unverified.Trace, Baggage: "service.name=web", Forwarded: `for="192.0.2.7:999"`},
	}
	third := serve(t, m.server("third"), table{"svc.test:80": testnet.Echo(t).Addr()})
	ctx, cancel := context.WithTimeout(WithRequest(t.Context(), req), patience)
	defer cancel()
	on := m.newDialer(third.Addr, id("third"))
	c, err := on.DialContext(ctx, "tcp", "svc.test:80")
	if err != nil {
		t.Fatal(err)
	}
	_ = c.Close()
	o2 := third.Reason(t, tunnel.Done)
	want := tunnel.UnverifiedHeaders{Trace: o.Unverified.Trace, Baggage: "service.name=web", Forwarded: `for="192.0.2.7:999", for="` + req.Source.String() + `"`}
	if o2.Unverified == nil || *o2.Unverified != want {
		t.Errorf("it said %+v, want what its caller said: %+v", o2.Unverified, want)
	}
}

// TestFields: what is malformed or too long is not there.
func TestFields(t *testing.T) {
	const trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
	f := func(pairs ...string) (fs connect.Fields) {
		for i := 0; i < len(pairs); i += 2 {
			fs = append(fs, connect.Field{Name: pairs[i], Value: pairs[i+1]})
		}
		return fs
	}
	for _, tt := range []struct {
		name   string
		fields connect.Fields
		want   tunnel.UnverifiedHeaders
	}{
		{"all", f("baggage", "a=b", "forwarded", "for=x", "traceparent", trace), tunnel.UnverifiedHeaders{Trace: trace, Baggage: "a=b", Forwarded: "for=x"}},
		{"several of baggage", f("baggage", "a=b", "x", "y", "baggage", "c=d"), tunnel.UnverifiedHeaders{Baggage: "a=b, c=d"}},
		{"two traces", f("traceparent", trace, "traceparent", trace), tunnel.UnverifiedHeaders{}},
		{"no trace id", f("traceparent", "00-00000000000000000000000000000000-b7ad6b7169203331-01"), tunnel.UnverifiedHeaders{}},
		{"no parent id", f("traceparent", "00-0af7651916cd43dd8448eb211c80319c-0000000000000000-01"), tunnel.UnverifiedHeaders{}},
		{"capitals", f("traceparent", strings.ToUpper(trace)), tunnel.UnverifiedHeaders{}},
		{"another version", f("traceparent", "01"+trace[2:]), tunnel.UnverifiedHeaders{}},
		{"too short", f("traceparent", trace[:54]), tunnel.UnverifiedHeaders{}},
		{"too long", f("traceparent", trace+"-"), tunnel.UnverifiedHeaders{}},
		{"no hyphen", f("traceparent", strings.Replace(trace, "c-b", "cab", 1)), tunnel.UnverifiedHeaders{}},
		{"baggage at its limit", f("baggage", strings.Repeat("a", connect.MaxBaggage)), tunnel.UnverifiedHeaders{Baggage: strings.Repeat("a", connect.MaxBaggage)}},
		{"baggage over it", f("baggage", strings.Repeat("a", connect.MaxBaggage+1)), tunnel.UnverifiedHeaders{}},
		{"baggage over it in two", f("baggage", strings.Repeat("a", connect.MaxBaggage), "baggage", "b"), tunnel.UnverifiedHeaders{}},
		{"forwarded over it", f("forwarded", strings.Repeat("a", connect.MaxForwarded+1)), tunnel.UnverifiedHeaders{}},
		{"not ASCII", f("baggage", "a=\u00e9", "forwarded", "for=\x7f"), tunnel.UnverifiedHeaders{}},
		{"a tab", f("baggage", "a=\tb"), tunnel.UnverifiedHeaders{}},
	} {
		got := connect.UnverifiedHeaders(tt.fields)
		if tt.want == (tunnel.UnverifiedHeaders{}) && got != nil || tt.want != (tunnel.UnverifiedHeaders{}) && (got == nil || *got != tt.want) {
			t.Errorf("%s: got %.100v, want %.100v", tt.name, got, tt.want)
		}
	}
	if a, b := newTrace(), newTrace(); !connect.IsTrace(a) || !connect.IsTrace(b) || a == b {
		t.Errorf("new traces %q and %q, want two that differ", a, b)
	}
}

// TestThousandStreams has 1,000 tunnels at once, 100 on a connection.
func TestThousandStreams(t *testing.T) {
	m := newMesh(t)
	g := serve(t, m.server("gw"), table{"svc:1": testnet.Echo(t).Addr()})
	d := m.newDialer(g.Addr, id("gw"))
	d.inner().Idle = idleTimeout
	tunneltest.TestThousand(t, g.With(d, "svc:1"))
}

// TestALPN: a server that speaks something else is not used.
func TestALPN(t *testing.T) {
	m := newMesh(t)
	cert := m.issue("gw")
	to := testnet.Service(t, func(c net.Conn) {
		_ = tls.Server(c, &tls.Config{Certificates: []tls.Certificate{cert}}).Handshake()
		_, _ = io.Copy(io.Discard, c)
	})
	d := m.newDialer(to, id("gw"))
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	_, err := d.DialContext(ctx, "tcp", "svc.test:80")
	if err == nil || !strings.Contains(err.Error(), "does not speak HTTP/2") {
		t.Errorf("got %v, want that it does not speak HTTP/2", err)
	}
	tunneltest.WantReason(t, err, tunnel.DialFailed)
}

// TestHandshake: the client names nobody, offers h2 alone and TLS 1.3 alone.
func TestHandshake(t *testing.T) {
	m := newMesh(t)
	seen := make(chan *tls.ClientHelloInfo, 1)
	to := testnet.Service(t, func(c net.Conn) {
		_ = tls.Server(c, &tls.Config{GetConfigForClient: func(h *tls.ClientHelloInfo) (*tls.Config, error) {
			seen <- h
			return nil, errors.New("seen enough")
		}}).Handshake()
	})
	d := m.newDialer(strings.Replace(to, "127.0.0.1", "localhost", 1), id("gw"))
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	if _, err := d.DialContext(ctx, "tcp", "svc.test:80"); err == nil {
		t.Error("a dial worked that could not")
	}
	h := <-seen
	if h.ServerName != "" || len(h.SupportedProtos) != 1 || h.SupportedProtos[0] != "h2" || len(h.SupportedVersions) != 1 {
		t.Errorf("the hello names %q, offers %q and versions %x; want nobody, h2, and 1.3", h.ServerName, h.SupportedProtos, h.SupportedVersions)
	}
}

// TestDrain: the end of a gateway.
func TestDrain(t *testing.T) {
	m := newMesh(t)
	tunneltest.TestDrain(t, func(t *testing.T, routes tunnel.Resolver) tunneltest.Draining {
		m := &mesh{m.CA, t}
		g := serve(t, m.server("gw"), routes)
		d := m.newDialer(g.Addr, id("gw"))
		d.inner().Idle = idleTimeout
		return tunneltest.Draining{
			Served: g.With(d, "svc.test:443"), Socket: g.Addr, Begin: "\x16\x03",
			Told: func() bool { return d.Conns() == 0 },
			Cut: func(err error) bool {
				re, ok := errors.AsType[*h2.ResetError](err)
				return ok && re.Code == http2.ErrCodeConnect
			},
		}
	})
}

// TestDoubleDrain: the end of the inner gateway, which the outer one has no
// part in.
func TestDoubleDrain(t *testing.T) {
	m := newMesh(t)
	tunneltest.TestDrain(t, func(t *testing.T, routes tunnel.Resolver) tunneltest.Draining {
		m := &mesh{m.CA, t}
		inner := serve(t, m.server("workload"), routes)
		outer := serve(t, m.server("gw"), table{"svc.test:443": inner.Addr})
		d := &Double{Outer: m.newDialer(outer.Addr, id("gw")), TLS: m.client("alice"), Verifier: m.verifier(id("workload"))}
		d.Outer.inner().Idle = idleTimeout
		t.Cleanup(func() { _ = d.Close() })
		return tunneltest.Draining{
			Served: inner.With(d, "svc.test:443"), Socket: inner.Addr, Begin: "\x16\x03",
			Cut: func(err error) bool {
				re, ok := errors.AsType[*h2.ResetError](err)
				return ok && re.Code == http2.ErrCodeConnect
			},
		}
	})
}

// TestEnds checks that every byte arrives once and in order, that an end stays an
// end and an abort an abort, in both directions.
func TestEnds(t *testing.T) {
	testnet.TestPath(t, func(t *testing.T, service string) (testnet.Dialer, string) {
		m := newMesh(t)
		g := serve(t, m.server("gw"), table{"svc.test:80": service})
		return m.newDialer(g.Addr, id("gw")), "svc.test:80"
	}, nil)
}

// TestDoubleEnds is the same through two servers.
func TestDoubleEnds(t *testing.T) {
	testnet.TestPath(t, func(t *testing.T, service string) (testnet.Dialer, string) {
		m := newMesh(t)
		inner := serve(t, m.server("workload"), table{"svc.test:443": service})
		outer := serve(t, m.server("gw"), table{"svc.test:443": inner.Addr})
		d := &Double{Outer: m.newDialer(outer.Addr, id("gw")), TLS: m.client("alice"), Verifier: m.verifier(id("workload"))}
		t.Cleanup(func() { _ = d.Close() })
		return d, "svc.test:443"
	}, nil)
}

// TestTrust: the CA of one trust domain can't speak for a server of another,
// neither for the first server nor for the one behind it.
func TestTrust(t *testing.T) {
	cas := map[string]*testca.CA{}
	var trust []*identity.Trust
	for _, domain := range []string{"a.test", "b.test"} {
		ca, err := testca.New(domain, nil)
		if err != nil {
			t.Fatal(err)
		}
		cas[domain], trust = ca, append(trust, identity.NewTrust(domain, ca.Root()))
	}
	m := newMesh(t)
	to := testnet.Echo(t).Addr()
	// server starts one that has an id of a domain, signed by the CA of by.
	server := func(t *testing.T, by, domain, to string) string {
		forger := *cas[by]
		forger.TrustDomain = domain
		pair, err := forger.Issue(testca.Options{SPIFFEID: "spiffe://" + domain + "/gw"})
		if err != nil {
			t.Fatal(err)
		}
		keys := m.server("gw")
		keys.Certificates = []*identity.Key{identity.NewKey(&pair.TLS)}
		return serve(t, keys, table{"svc.test:80": to}).Addr
	}
	one := []string{"spiffe://a.test/gw"}
	peers := append(one, "spiffe://b.test")
	for _, tt := range []struct {
		by, domain string
		trust      []*identity.Trust
		peers      []string
		want       string // in the error; "" for none
	}{
		{"a.test", "a.test", trust, peers, ""},
		{"b.test", "b.test", trust, peers, ""},
		{"a.test", "b.test", trust, peers, `of trust domain "b.test", and its certificate is signed by a CA of ["a.test"]`},
		{"b.test", "a.test", trust, peers, `of trust domain "a.test", and its certificate is signed by a CA of ["b.test"]`},
		{"a.test", "c.test", trust, append(peers, "spiffe://c.test"), `the server's trust domain is "c.test", want one of ["a.test" "b.test"]`},
		{"a.test", "a.test", trust[:1], one, ""},
		{"b.test", "b.test", trust, one, "want one of"},
		{"a.test", "a.test", nil, peers, "no CA is configured"},
	} {
		t.Run(tt.by+" for "+tt.domain, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), patience)
			defer cancel()
			keys := m.client("alice")
			bad := server(t, tt.by, tt.domain, to)
			good := &Dialer{Gateway: serve(t, m.server("gw"), table{"svc.test:80": bad}).Addr, TLS: keys, Verifier: m.verifier(id("gw"))}
			for name, d := range map[string]interface {
				tunnel.Dialer
				io.Closer
			}{
				"first":  &Dialer{Gateway: bad, TLS: keys, Verifier: verifier(tt.peers, tt.trust...)},
				"second": &Double{Outer: good, TLS: keys, Verifier: verifier(tt.peers, tt.trust...)},
			} {
				defer d.Close()
				c, err := d.DialContext(ctx, "tcp", "svc.test:80")
				if err == nil {
					testnet.Ping(t, c, "hello")
					_ = c.Close()
				}
				if tt.want == "" && err != nil || tt.want != "" && (err == nil || !strings.Contains(err.Error(), tt.want)) {
					t.Errorf("%s: got %v, want %q", name, err, tt.want)
				}
			}
		})
	}
}
