package gateway

import (
	"net/netip"
	"strings"
	"testing"

	"culvert.dev/connect"
	"culvert.dev/connect/h2"
	"culvert.dev/connect/hbone"
	"culvert.dev/identity"
	"culvert.dev/internal/gateway/upstream"
	"culvert.dev/internal/termination"
	"culvert.dev/internal/testca"
	"culvert.dev/internal/testnet"
	"culvert.dev/registry"
	"culvert.dev/sni"
	"culvert.dev/tunnel"
	"culvert.dev/tunnel/tunneltest"
)

// startTLS runs a gateway that ends all TLS and speaks inner inside.
func startTLS(t *testing.T, ca *testca.CA, name string, inner tunnel.Protocol, services ...*registry.Service) (addr string) {
	t.Helper()
	pair, err := ca.Issue(testca.Options{SPIFFEID: "spiffe://" + ca.TrustDomain + "/" + name})
	if err != nil {
		t.Fatal(err)
	}
	p := &termination.Protocol{Hello: &sni.Protocol{Nameless: true}}
	if err := p.Use(termination.Item{Keys: &termination.Keys{Certificates: []*identity.Key{identity.NewKey(&pair.TLS)}, Trust: []*identity.Trust{identity.NewTrust(ca.TrustDomain, ca.Root())}}, Any: true, Inner: []tunnel.Protocol{inner}, ALPN: []termination.Offer{{Name: "h2"}}}); err != nil {
		t.Fatal(err)
	}
	return startWith(t, name, []tunnel.Protocol{p}, services...)
}

// hop is a hop by HBONE, of a gateway called name.
func hop(t *testing.T, ca *testca.CA, name, addr string) registry.Hop {
	t.Helper()
	pair, err := ca.Issue(testca.Options{SPIFFEID: "spiffe://" + ca.TrustDomain + "/client-of-" + name})
	if err != nil {
		t.Fatal(err)
	}
	return registry.Hop{
		Proto: "hbone", Addresses: []string{addr}, Certificate: string(pair.CertPEM), Key: registry.Secret(pair.KeyPEM),
		Roots: string(ca.CertPEM), Peers: []string{"spiffe://" + ca.TrustDomain + "/" + name},
	}
}

func newCA(t *testing.T) *testca.CA {
	t.Helper()
	ca, err := testca.New("example.test", nil)
	if err != nil {
		t.Fatal(err)
	}
	return ca
}

// TestSecureChain goes through connect-h2, in the clear and in TLS, and HBONE.
func TestSecureChain(t *testing.T) {
	ca := newCA(t)
	last := startTLS(t, ca, "last", &hbone.Protocol{Via: "last"}, service(testnet.Echo(t).Addr()))
	middle := startTLS(t, ca, "middle", &hbone.Protocol{Via: "middle"}, service("", hop(t, ca, "last", last)))
	first := start(t, "first", service("", hop(t, ca, "middle", middle)))
	for range 3 {
		if err := check(t, &connect.Dialer{Proxy: first}); err != nil {
			t.Error(err)
		}
	}

	plain := startWith(t, "plain", []tunnel.Protocol{&h2.Protocol{Via: "plain"}}, service(testnet.Echo(t).Addr()))
	edge := start(t, "edge", service("", registry.Hop{Proto: "connect-h2", Addresses: []string{plain}}))
	for range 3 {
		if err := check(t, &connect.Dialer{Proxy: edge}); err != nil {
			t.Error(err)
		}
	}
}

// TestBehind is double HBONE: the outer gateway passes on what it can't read.
func TestBehind(t *testing.T) {
	ca := newCA(t)
	inner := startTLS(t, ca, "inner", &hbone.Protocol{}, service(testnet.Echo(t).Addr()))
	outer := startTLS(t, ca, "outer", &hbone.Protocol{}, service(inner))
	h := hop(t, ca, "outer", outer)
	h.InnerPeers = []string{"spiffe://example.test/inner"}
	if err := check(t, &connect.Dialer{Proxy: start(t, "edge", service("", h))}); err != nil {
		t.Error(err)
	}
	h.InnerPeers = []string{"spiffe://example.test/outer"} // who is behind is not who is in front
	if err := check(t, &connect.Dialer{Proxy: start(t, "edge", service("", h))}); tunnel.ReasonOf(err) != tunnel.DialFailed {
		t.Errorf("got %v, want %s: another one is behind", err, tunnel.DialFailed)
	}
}

// TestSecureLoop: a request that comes back by HBONE is known by its Via.
func TestSecureLoop(t *testing.T) {
	ca := newCA(t)
	ap := netip.MustParseAddrPort(closed)
	s := service("")
	s.Endpoints = []registry.Endpoint{{Addr: ap.Addr(), Port: ap.Port()}}
	last := startTLS(t, ca, "one", &hbone.Protocol{Via: "one"}, s)
	first := start(t, "one", service("", hop(t, ca, "one", last)))
	if err := check(t, &connect.Dialer{Proxy: first}); tunnel.ReasonOf(err) != tunnel.Loop {
		t.Errorf("got %v, want %s", err, tunnel.Loop)
	}
}

// TestHopOfAnother: a gateway that can't prove who it is is not used, and the
// next one is.
func TestHopOfAnother(t *testing.T) {
	ca := newCA(t)
	other := startTLS(t, newCA(t), "right", &hbone.Protocol{}, service(testnet.Echo(t).Addr()))
	wrong := startTLS(t, ca, "wrong", &hbone.Protocol{}, service(testnet.Echo(t).Addr()))
	right := startTLS(t, ca, "right", &hbone.Protocol{}, service(testnet.Echo(t).Addr()))
	h := hop(t, ca, "right", other)
	h.Addresses = []string{other, wrong}
	if err := check(t, &connect.Dialer{Proxy: start(t, "edge", service("", h))}); tunnel.ReasonOf(err) != tunnel.DialFailed {
		t.Errorf("got %v, want %s: nobody is who it should be", err, tunnel.DialFailed)
	}
	h.Addresses = append(h.Addresses, right)
	if err := check(t, &connect.Dialer{Proxy: start(t, "edge", service("", h))}); err != nil {
		t.Error(err)
	}
}

// TestSecureWaysAreShared: a connection is shared by those who show the same
// certificate, and expect the same of the other side.
func TestSecureWaysAreShared(t *testing.T) {
	ca := newCA(t)
	d := &upstream.Transports{}
	defer d.Close()
	way := func(h registry.Hop) tunnel.Dialer {
		t.Helper()
		w, err := d.NextHop([]registry.Hop{h})
		if err != nil {
			t.Fatal(err)
		}
		return w
	}
	h := hop(t, ca, "gw", closed)
	if way(h) != way(h) {
		t.Error("the same hop is two ways")
	}
	for name, change := range map[string]func(*registry.Hop){
		"certificate": func(o *registry.Hop) { *o = hop(t, ca, "gw", closed) }, // with a key of its own
		"peers":       func(o *registry.Hop) { o.Peers = []string{"spiffe://example.test"} },
		"behind":      func(o *registry.Hop) { o.InnerPeers = o.Peers },
	} {
		other := h
		change(&other)
		if way(other) == way(h) {
			t.Errorf("another %s is the same way", name)
		}
	}
	h.Key = registry.Secret(h.Certificate)
	if _, err := d.NextHop([]registry.Hop{h}); err == nil || strings.Contains(err.Error(), "BEGIN") {
		t.Errorf("got %v, want an error without the key", err)
	}
}

// TestSharedConnectionsAreCounted: of tunnels that share a connection to the
// next gateway, the connection has a descriptor and they have none.
func TestSharedConnectionsAreCounted(t *testing.T) {
	ca := newCA(t)
	echo := testnet.Echo(t).Addr()
	for name, h := range map[string]registry.Hop{
		"connect-h2": {Proto: "connect-h2", Addresses: []string{startWith(t, "plain", []tunnel.Protocol{&h2.Protocol{Via: "plain"}}, service(echo))}},
		"hbone":      hop(t, ca, "last", startTLS(t, ca, "last", &hbone.Protocol{Via: "last"}, service(echo))),
	} {
		t.Run(name, func(t *testing.T) {
			d := &upstream.Transports{Direct: &tunnel.NetDialer{}, Budget: &tunnel.Budget{Limit: 100}}
			defer d.Close()
			way, err := d.NextHop([]registry.Hop{h})
			if err != nil {
				t.Fatal(err)
			}
			for range 3 {
				c := tunneltest.Dial(t, way, "svc.test:443")
				testnet.Ping(t, c, "hello")
				if s, ok := c.(tunnel.Multiplexed); !ok || !s.IsMultiplexed() {
					t.Errorf("a %T has a descriptor of its own", c)
				}
			}
			if n := d.Budget.Used(); n != 1 {
				t.Errorf("3 tunnels on one connection take %d descriptors, want 1", n)
			}
			d.Close()
			if n := d.Budget.Used(); n != 0 {
				t.Errorf("%d descriptors are taken when all is closed", n)
			}

			full := &upstream.Transports{Direct: &tunnel.NetDialer{}, Budget: &tunnel.Budget{}}
			defer full.Close()
			if way, err = full.NextHop([]registry.Hop{h}); err != nil {
				t.Fatal(err)
			}
			_, err = way.DialContext(t.Context(), "tcp", "svc.test:443")
			tunneltest.WantReason(t, err, tunnel.Overload)
			if n := full.Budget.Used(); n != 0 {
				t.Errorf("%d descriptors are taken by what was refused", n)
			}
		})
	}
}
