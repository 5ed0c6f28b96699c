package gateway

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"net/netip"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"culvert.dev/connect"
	"culvert.dev/identity"
	"culvert.dev/internal/testca"
	"culvert.dev/internal/testnet"
	"culvert.dev/registry"
	"culvert.dev/tunnel"
)

// A meshSide is a gateway at the edge of a mesh with a CA of its own.
type meshSide struct {
	t      *testing.T
	domain string
	ca     *testca.CA
	store  *identity.Store
	source later
	g      *Gateway
	listen *registry.Listener
	client string // where clients connect in the clear
	mesh   string // where the other gateway asks by HBONE
}

// newMeshSide starts a gateway that has no services yet.
func newMeshSide(t *testing.T, domain string, domains ...string) *meshSide {
	t.Helper()
	s := &meshSide{t: t, domain: domain, store: new(identity.Store), source: later{make(chan registry.Snapshot)}}
	hbone := &registry.Listener{
		Name: "mesh", Protocol: registry.Streams, Address: netip.MustParseAddr("127.0.0.1"),
		Settings: &registry.ListenerSettings{TLS: []registry.ListenerTLS{{
			Any: true, Protocols: []string{"hbone"}, TLSTermination: registry.TLSTermination{Keys: []string{"gw"}, TrustNames: domains},
		}}},
	}
	_, s.g = startGateway(t, Config{
		Listeners:       []Listener{{Address: "127.0.0.1:0", Protocols: []tunnel.Protocol{&connect.Protocol{}}}},
		SourceListeners: []*registry.Listener{hbone},
		Sources:         []registry.Source{s.source}, Via: domain, Identity: s.store,
		// No call may fail, on a machine that takes more than the usual 3 seconds for a dial.
		Limits: tunnel.Limits{ConnectTimeout: soon, ConnectTotalTimeout: 2 * soon, HandshakeTimeout: soon},
	})
	addrs := s.g.Addrs()
	if len(addrs) != 2 {
		t.Fatalf("the gateway of %s listens at %v, want two addresses", domain, addrs)
	}
	s.listen, s.client, s.mesh = hbone, addrs[0].String(), addrs[1].String()
	s.source.now <- registry.Snapshot{Listeners: []*registry.Listener{hbone}}
	return s
}

// newCA makes the side's next CA, and returns it.
func (s *meshSide) newCA() *testca.CA {
	s.t.Helper()
	ca, err := testca.New(s.domain, nil)
	if err != nil {
		s.t.Fatal(err)
	}
	return ca
}

// show has the gateway show a key that ca has signed.
func (s *meshSide) show(ca *testca.CA) {
	s.t.Helper()
	pair, err := ca.Issue(testca.Options{SPIFFEID: "spiffe://" + s.domain + "/ns/edge/sa/gw"})
	if err != nil {
		s.t.Fatal(err)
	}
	s.ca = ca
	s.store.Key("gw").Set(&pair.TLS)
}

// Two meshes with different roots call each other both ways while both CAs are replaced
// twice: no connection fails, open tunnels stay, and no table is made.
func TestMeshesRotate(t *testing.T) {
	t.Parallel()
	a, b := newMeshSide(t, "a.test", "a.test", "b.test"), newMeshSide(t, "b.test", "a.test", "b.test")
	sides := []*meshSide{a, b}
	// trust has both gateways trust cas for a domain.
	trust := func(domain string, cas ...*testca.CA) {
		for _, s := range sides {
			bundle := &identity.Bundle{TrustDomain: domain}
			for _, ca := range cas {
				bundle.Roots = append(bundle.Roots, ca.Root())
			}
			s.store.Trust(domain).Set(bundle)
		}
	}
	for i, s := range sides {
		ca := s.newCA()
		trust(s.domain, ca)
		s.show(ca)
		far := sides[1-i]
		echo := netip.MustParseAddrPort(testnet.Echo(t).Addr())
		service := func(name string, hops ...registry.Hop) *registry.Service {
			return &registry.Service{
				Name: name, Names: []tunnel.Pattern{{Suffix: tunnel.MustParseName(name)}}, Ports: []uint16{443}, Exposed: true, Via: hops,
				Endpoints: []registry.Endpoint{{Addr: echo.Addr(), Port: echo.Port()}},
			}
		}
		there := service("svc."+far.domain, registry.Hop{
			Proto: "hbone", Addresses: []string{far.mesh}, KeyName: "gw", TrustNames: []string{far.domain}, Peers: []string{"spiffe://" + far.domain},
		})
		there.Endpoints = nil
		s.source.now <- registry.Snapshot{Listeners: []*registry.Listener{s.listen}, Services: []*registry.Service{service("svc." + s.domain), there}}
	}
	call := func(from, to *meshSide) (c tunnel.Stream, err error) {
		ctx, cancel := context.WithTimeout(t.Context(), soon)
		defer cancel()
		conn, err := (&connect.Dialer{Proxy: from.client, Wait: soon}).DialContext(ctx, "tcp", "svc."+to.domain+":443")
		if err != nil {
			return nil, err
		}
		return conn.(tunnel.Stream), nil
	}
	var kept []tunnel.Stream
	for i, s := range sides {
		testnet.Eventually(t, soon, func() bool {
			c, err := call(s, sides[1-i])
			if err == nil {
				kept = append(kept, c)
			}
			return err == nil
		}, "%s reaches %s", s.domain, sides[1-i].domain)
	}
	var before [2]uint64
	for i, s := range sides {
		before[i] = s.g.registry.Table().Generation()
	}

	var calls [2]atomic.Int64 // from each side, that are over
	stop := make(chan struct{})
	var work sync.WaitGroup
	for i := range sides {
		for range 2 {
			work.Go(func() {
				for {
					select {
					case <-stop:
						return
					default:
					}
					c, err := call(sides[i], sides[1-i])
					if err != nil {
						t.Errorf("%s calls %s: %v", sides[i].domain, sides[1-i].domain, err)
						calls[i].Add(1)
						return
					}
					testnet.Ping(t, c, "hello")
					_ = c.Close()
					calls[i].Add(1)
				}
			})
		}
	}
	// settle waits until all calls that have begun are over, and some more.
	settle := func() {
		for i := range calls {
			from := calls[i].Load()
			testnet.Eventually(t, soon, func() bool { return t.Failed() || calls[i].Load() >= from+6 }, "%s calls", sides[i].domain)
		}
	}
	settle()
	for range 2 {
		for _, s := range sides {
			old, renewed := s.ca, s.newCA()
			trust(s.domain, old, renewed)
			settle()
			s.show(renewed)
			settle()
			trust(s.domain, renewed)
			settle()
		}
	}
	close(stop)
	work.Wait()
	for i, s := range sides {
		if after := s.g.registry.Table().Generation(); after != before[i] {
			t.Errorf("%s has table %d, want %d: rotation makes none", s.domain, after, before[i])
		}
		testnet.Ping(t, kept[i], "a tunnel from before")
		_ = kept[i].Close()
	}

	// Neither CA speaks for the domain of the other, and an old one for none.
	forger := *a.ca
	forger.TrustDomain = "b.test"
	forged, err := forger.Issue(testca.Options{SPIFFEID: "spiffe://b.test/ns/edge/sa/gw"})
	if err != nil {
		t.Fatal(err)
	}
	b.store.Key("gw").Set(&forged.TLS)
	a.show(a.ca) // a connection from before would do
	for i, s := range sides {
		if c, err := call(s, sides[1-i]); err == nil {
			_ = c.Close()
			t.Errorf("%s reaches %s, and a CA of a.test has signed the key of b.test", s.domain, sides[1-i].domain)
		}
	}
}

// A backend and its client certificate may be named, too, and both may be replaced.
func TestBackendTLSRotates(t *testing.T) {
	var pairs []*testca.Pair
	var cas []*testca.CA
	for range 2 {
		ca := newCA(t)
		pair, err := ca.Issue(testca.Options{SPIFFEID: "spiffe://" + ca.TrustDomain + "/db", DNSNames: []string{"svc.test"}})
		if err != nil {
			t.Fatal(err)
		}
		cas, pairs = append(cas, ca), append(pairs, pair)
	}
	var now atomic.Int64
	clients := make(chan *x509.Certificate, 10)
	backend := testnet.ServeTLS(t, &tls.Config{ClientAuth: tls.RequireAnyClientCert, GetCertificate: func(*tls.ClientHelloInfo) (*tls.Certificate, error) {
		return &pairs[now.Load()].TLS, nil
	}}, func(c *tls.Conn) {
		clients <- c.ConnectionState().PeerCertificates[0]
		buf := make([]byte, 16)
		for n, err := c.Read(buf); err == nil; n, err = c.Read(buf) {
			_, _ = c.Write(buf[:n])
		}
	})
	store := new(identity.Store)
	s := service(backend.Addr())
	s.TLS = &registry.BackendTLS{ServerName: "svc.test", KeyName: "me", TrustNames: []string{"db"}}
	addr := startConfig(t, Config{
		Listeners: []Listener{{Address: "127.0.0.1:0", Protocols: []tunnel.Protocol{&connect.Protocol{}}}},
		Sources:   []registry.Source{registry.Static{Name: "test", Snapshot: registry.Snapshot{Services: []*registry.Service{s}}}},
		Via:       "edge", Identity: store,
	})
	d := &connect.Dialer{Proxy: addr}
	dial := func() error {
		ctx, cancel := context.WithTimeout(t.Context(), soon)
		defer cancel()
		c, err := d.DialContext(ctx, "tcp", "svc.test:443")
		if err == nil {
			_ = c.SetDeadline(time.Now().Add(soon))
			testnet.Ping(t, c, "hello")
			_ = c.Close()
		}
		return err
	}
	if err := dial(); err == nil {
		t.Error("a backend is accepted before there is trust")
	}
	for i := range pairs {
		now.Store(int64(i))
		store.Key("me").Set(&pairs[i].TLS)
		if i > 0 {
			if err := dial(); err == nil {
				t.Error("a backend of a CA is accepted that is not trusted yet")
			}
		}
		store.Trust("db").Set(&identity.Bundle{Roots: []*x509.Certificate{cas[i].Root()}})
		if err := dial(); err != nil {
			t.Fatalf("with CA %d: %v", i, err)
		}
		if got := <-clients; !got.Equal(pairs[i].TLS.Leaf) {
			t.Errorf("with key %d: the backend sees %v", i, got.Subject)
		}
	}
}
