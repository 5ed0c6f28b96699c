package termination

import (
	"crypto/tls"
	"errors"
	"io"
	"net"
	"strings"
	"testing"
	"time"

	"culvert.dev/connect"
	"culvert.dev/internal/testca"
	"culvert.dev/internal/testnet"
	"culvert.dev/sni"
	"culvert.dev/tunnel"
	"culvert.dev/tunnel/tunneltest"
)

// patterns parses names.
func patterns(t testing.TB, names ...string) (all []tunnel.Pattern) {
	t.Helper()
	for _, s := range names {
		p, err := tunnel.ParsePattern(s)
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, p)
	}
	return all
}

// hear returns what a client that speaks TLS with cfg reads first, or the error of its
// handshake. In TLS 1.3 a client is done before its certificate was looked at.
func hear(t *testing.T, addr string, cfg *tls.Config) (string, error) {
	t.Helper()
	raw, err := net.DialTimeout("tcp", addr, patience)
	if err != nil {
		t.Fatal(err)
	}
	c := tls.Client(raw, cfg)
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(patience))
	if err := c.HandshakeContext(t.Context()); err != nil {
		return "", err
	}
	b := make([]byte, 100)
	n, err := c.Read(b)
	return string(b[:n]), err
}

// TestItems: the name in the hello decides which certificate is shown, what is asked of
// the client and what is inside, at one port.
func TestItems(t *testing.T) {
	ca, clients, others := newCA(t, "example.test"), newCA(t, "clients.test"), newCA(t, "others.test")
	plain := []tunnel.Protocol{Plain{}}
	shop, open, wild := issue(t, ca, "shop", "shop.test"), issue(t, ca, "open", "open.test"), issue(t, ca, "wild", "*.wild.test")
	gw := carrying(&Keys{Certificates: keysOf(issue(t, ca, "gw", "gw.test").TLS)}, false)
	p := &Protocol{Hello: &sni.Protocol{Nameless: true}, Pass: true}
	use := func(items ...Item) {
		t.Helper()
		if err := p.Use(items...); err != nil {
			t.Fatal(err)
		}
	}
	use(gw,
		Item{Keys: &Keys{Certificates: keysOf(shop.TLS), Trust: trusting(clients)}, Inner: plain},
		Item{Keys: &Keys{Certificates: keysOf(open.TLS)}, Inner: plain, ALPN: []Offer{{Name: "echo"}}},
		Item{Keys: &Keys{Certificates: keysOf(wild.TLS), Names: patterns(t, "*.wild.test"), Trust: trusting(clients), Optional: true}, Inner: plain},
		Item{Keys: &Keys{Certificates: keysOf(wild.TLS), Names: patterns(t, "exact.wild.test"), Trust: trusting(others)}, Inner: plain},
	)
	passed := testnet.Service(t, func(c net.Conn) {
		s := tls.Server(c, &tls.Config{Certificates: []tls.Certificate{issue(t, ca, "svc", "svc.test").TLS}})
		_, _ = io.WriteString(s, "svc.test")
	})
	routes := table{"svc.test": passed, "plain": testnet.Echo(t).Addr()}
	for _, name := range []string{"shop.test", "open.test", "a.wild.test", "exact.wild.test"} {
		routes[name] = testnet.Greeting(t, name).Addr()
	}
	g := serve(t, routes, tunnel.Limits{}, p, &connect.Protocol{})
	good, strange := issue(t, clients, "alice"), issue(t, others, "mallory")
	late, err := clients.Issue(testca.Options{SPIFFEID: "spiffe://clients.test/late", NotBefore: time.Now().Add(-time.Hour), TTL: time.Minute})
	if err != nil {
		t.Fatal(err)
	}
	alice := tunnel.Peer{ID: "spiffe://clients.test/ns/test/sa/alice", Method: "mtls"}
	for _, tt := range []struct {
		name  string
		cert  *testca.Pair
		alpn  string
		alert string // what the client hears; "" where it is let in
		peer  tunnel.Peer
	}{
		{"shop.test", good, "", "", alice},
		{"shop.test", good, "http/1.1", "", alice}, // where no ALPN is spoken, nobody minds it
		{"shop.test", nil, "", "certificate required", tunnel.Peer{}},
		{"shop.test", strange, "", "bad certificate", tunnel.Peer{}},
		{"shop.test", late, "", "bad certificate", tunnel.Peer{}},
		{"open.test", nil, "", "", tunnel.Peer{}},
		{"open.test", strange, "", "", tunnel.Peer{}}, // it is not asked for
		{"open.test", nil, "echo", "", tunnel.Peer{}},
		{"open.test", nil, "imap", "no application protocol", tunnel.Peer{}},
		{"a.wild.test", nil, "", "", tunnel.Peer{}},
		{"a.wild.test", good, "", "", alice},
		{"a.wild.test", strange, "", "bad certificate", tunnel.Peer{}},
		{"exact.wild.test", nil, "", "certificate required", tunnel.Peer{}},
		{"exact.wild.test", good, "", "bad certificate", tunnel.Peer{}},
		{"svc.test", nil, "", "", tunnel.Peer{}},
		{"nobody.test", nil, "", "unrecognized name", tunnel.Peer{}},
	} {
		cfg := roots(ca, tt.name)
		if tt.alpn != "" {
			cfg.NextProtos = []string{tt.alpn}
		}
		if tt.cert != nil {
			cfg.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return &tt.cert.TLS, nil }
		}
		before := len(g.Outcomes())
		got, err := hear(t, g.Addr, cfg)
		if tt.alert != "" {
			if err == nil || !strings.Contains(err.Error(), tt.alert) {
				t.Errorf("%s: heard %q, %v, want the alert %q", tt.name, got, err, tt.alert)
			}
		} else if got != tt.name {
			t.Errorf("%s: heard %q, %v", tt.name, got, err)
		}
		testnet.Eventually(t, patience, func() bool { return len(g.Outcomes()) > before }, "the connection for %s has ended", tt.name)
		o := g.Outcomes()[before]
		o.Peer.Auth = nil
		if o.Peer != tt.peer || tt.alert == "" && o.Target != tt.name {
			t.Errorf("%s: outcome for %q with the peer %+v, want %+v", tt.name, o.Target, o.Peer, tt.peer)
		}
	}
	testnet.Ping(t, tunneltest.Dial(t, &connect.Dialer{Proxy: g.Addr, TLS: roots(ca, "gw.test")}, "plain:1"), "CONNECT inside")
	testnet.Ping(t, tunneltest.Dial(t, &connect.Dialer{Proxy: g.Addr}, "plain:1"), "CONNECT in the clear")

	// What is refused by Check never sees a certificate.
	use(Item{Keys: &Keys{Certificates: keysOf(open.TLS)}, Inner: plain, Check: func(req *tunnel.Request) error {
		if req.Name.String() != "open.test" || req.Proto != "tls" || req.TLS != nil {
			t.Errorf("checked the request %+v", req)
		}
		return tunnel.Refusef(tunnel.NotExposed, "it is private")
	}})
	cfg := &tls.Config{ServerName: "open.test", InsecureSkipVerify: true, VerifyConnection: func(tls.ConnectionState) error {
		t.Error("a certificate was shown to a client that is refused")
		return nil
	}}
	if _, err := hear(t, g.Addr, cfg); err == nil || !strings.Contains(err.Error(), "unrecognized name") {
		t.Errorf("who is refused before the handshake hears %v", err)
	}
	if o := g.Reason(t, tunnel.NotExposed); o.Target != "open.test" {
		t.Errorf("the outcome is for %q", o.Target)
	}
}

// TestItemsPassNothing: without Pass all hellos for other names are refused, and those
// without a name, unless an Item is for any.
func TestItemsPassNothing(t *testing.T) {
	ca := newCA(t, "example.test")
	keys := func(name string) *Keys { return &Keys{Certificates: keysOf(issue(t, ca, name, name).TLS)} }
	p := &Protocol{Hello: &sni.Protocol{Nameless: true}}
	item := Item{Keys: keys("a.test"), Inner: []tunnel.Protocol{Plain{}}}
	if err := p.Use(item); err != nil {
		t.Fatal(err)
	}
	g := serve(t, table{"a.test": testnet.Greeting(t, "a").Addr(), "b.test": testnet.Greeting(t, "b").Addr()}, tunnel.Limits{}, p)
	for name, why := range map[string]tunnel.Reason{"b.test": tunnel.NoRoute, "": tunnel.NoSNI} {
		if got, err := hear(t, g.Addr, &tls.Config{ServerName: name, InsecureSkipVerify: true}); err == nil || !strings.Contains(err.Error(), "unrecognized name") {
			t.Errorf("a client for %q hears %q, %v", name, got, err)
		}
		g.Reason(t, why)
	}
	if err := p.Use(item, Item{Keys: keys("gw.test"), Any: true, Inner: []tunnel.Protocol{&connect.Protocol{}}}); err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]string{"a.test": "a.test", "b.test": "gw.test", "": "gw.test"} {
		shown := ""
		cfg := &tls.Config{ServerName: name, InsecureSkipVerify: true, VerifyConnection: func(cs tls.ConnectionState) error {
			shown = cs.PeerCertificates[0].DNSNames[0]
			return errors.New("it is enough to see it")
		}}
		if _, err := hear(t, g.Addr, cfg); err == nil || shown != want {
			t.Errorf("a client for %q is shown %q, want %q", name, shown, want)
		}
	}
}

// TestItemsThatClaimTheSame are refused, and the ones before stay.
func TestItemsThatClaimTheSame(t *testing.T) {
	ca := newCA(t, "example.test")
	keys := func(names []tunnel.Pattern, of ...string) *Keys {
		return &Keys{Certificates: keysOf(issue(t, ca, "gw", of...).TLS), Names: names}
	}
	p := &Protocol{Hello: &sni.Protocol{}}
	if err := p.Use(Item{Keys: keys(nil, "a.test")}); err != nil {
		t.Fatal(err)
	}
	for want, items := range map[string][]Item{
		"nothing to terminate":                 nil,
		`two items terminate TLS for "a.test"`: {{Keys: keys(nil, "a.test")}, {Keys: keys(nil, "a.test", "b.test")}},
		`two items terminate TLS for "*.test`:  {{Keys: keys(patterns(t, "*.test.test"), "*.test.test")}, {Keys: keys(patterns(t, "*.test.test"), "*.test.test")}},
		"for any name":                         {{Keys: keys(nil, "a.test"), Any: true}, {Keys: keys(nil, "b.test"), Any: true}},
		"could end here":                       {{Keys: keys(nil, "a.test")}, {Keys: keys(nil, "*.b.test")}},
	} {
		if err := p.Use(items...); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want %q", err, want)
		}
	}
	if a := tunnel.MustParseName("a.test"); !p.Owns(a) || p.Config(a, func(tunnel.Peer) {}, func(*tls.Certificate) {}) == nil || p.Owns(tunnel.MustParseName("b.test")) {
		t.Error("items that are refused are in use")
	}
	// A wildcard beside an exact name is no conflict, and the exact one comes first.
	if err := p.Use(Item{Keys: keys(patterns(t, "*.w.test"), "*.w.test"), Inner: []tunnel.Protocol{&connect.Protocol{}}}, Item{Keys: keys(nil, "a.w.test"), Inner: []tunnel.Protocol{Plain{}}}); err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]string{"a.w.test": "tls", "b.w.test": "connect", "b.a.w.test": "connect"} {
		if got := p.Inside(tunnel.MustParseName(name)); len(got) != 1 || got[0].Name() != want {
			t.Errorf("inside TLS for %s is %v, want %s", name, got, want)
		}
	}
}

// TestItemsChangeUnderHandshakes: each handshake has the items of one moment, whatever is
// used meanwhile, and those that are refused are never seen.
func TestItemsChangeUnderHandshakes(t *testing.T) {
	ca, clients := newCA(t, "example.test"), newCA(t, "clients.test")
	greeting := testnet.Greeting(t, "x").Addr()
	plain := []tunnel.Protocol{Plain{}}
	item := func(k Keys, name string) Item {
		k.Certificates = keysOf(issue(t, ca, "gw", name).TLS)
		return Item{Keys: &k, Inner: plain}
	}
	sets := [][]Item{
		{item(Keys{Trust: trusting(clients)}, "shop.test"), item(Keys{}, "open.test")},
		{item(Keys{}, "open.test"), item(Keys{Trust: trusting(clients)}, "shop.test")},
		{item(Keys{}, "shop.test"), item(Keys{}, "shop.test")}, // two of one name
		{{Keys: &Keys{}, Inner: plain}},                        // no certificate
	}
	p := &Protocol{Hello: &sni.Protocol{}}
	if err := p.Use(sets[0]...); err != nil {
		t.Fatal(err)
	}
	g := serve(t, table{"shop.test": greeting, "open.test": greeting}, tunnel.Limits{}, p)
	done, changed := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(changed)
		for i := 0; ; i++ {
			select {
			case <-done:
				return
			default:
				if err := p.Use(sets[i%len(sets)]...); (err == nil) != (i%len(sets) < 2) {
					t.Errorf("set %d: %v", i%len(sets), err)
				}
			}
		}
	}()
	cert := issue(t, clients, "alice").TLS
	for range 25 {
		cfg := roots(ca, "shop.test")
		cfg.Certificates = []tls.Certificate{cert}
		if got, err := hear(t, g.Addr, cfg); got != "x" {
			t.Errorf("shop.test: heard %q, %v", got, err)
		}
		if got, err := hear(t, g.Addr, roots(ca, "open.test")); got != "x" {
			t.Errorf("open.test: heard %q, %v", got, err)
		}
		if got, err := hear(t, g.Addr, roots(ca, "shop.test")); err == nil || !strings.Contains(err.Error(), "certificate required") {
			t.Errorf("shop.test without a certificate: heard %q, %v", got, err)
		}
	}
	close(done)
	<-changed
}
