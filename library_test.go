package culvert_test

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	culvert "culvert.dev"
	"culvert.dev/identity"
	"culvert.dev/internal/gateway"
	"culvert.dev/internal/testca"
	"culvert.dev/internal/testnet"
	"culvert.dev/registry"
	"culvert.dev/registry/file"
	"culvert.dev/tunnel"
)

const patience = 30 * time.Second

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// A site is a gateway that lets those with a certificate of its CA register names below
// shop.test, and asks nobody else in.
type site struct {
	ca      *testca.CA
	roots   []*x509.Certificate
	address string
	stop    func()
	mu      sync.Mutex
	pairs   map[string]*testca.Pair
}

func newSite() *site {
	s := &site{pairs: map[string]*testca.Pair{}}
	var err error
	check := func() {
		if err != nil {
			panic(err)
		}
	}
	s.ca, err = testca.New("shop.test", nil)
	check()
	s.roots, err = identity.ParseCertificates(string(s.ca.CertPEM))
	check()
	keys := new(identity.Store)
	pair, err := s.ca.Issue(testca.Options{SPIFFEID: "spiffe://shop.test/gateway", IPs: []net.IP{net.IPv4(127, 0, 0, 1)}, Usage: testca.ServerOnly})
	check()
	keys.Key("gw").Set(&pair.TLS)
	keys.Trust("shop.test").Set(&identity.Bundle{TrustDomain: "shop.test", Roots: s.roots})
	at, release, err := testnet.ReservePort()
	check()
	dir, err := os.MkdirTemp("", "culvert-library-")
	check()
	defer os.RemoveAll(dir)
	err = errors.Join(s.ca.Save(dir), pair.Save(dir, "gw"))
	check()
	config := filepath.Join(dir, "culvert.yaml")
	err = os.WriteFile(config, fmt.Appendf(nil, `
identity:
  keys: {gw: {certificateFile: gw.crt, keyFile: gw.key}}
  trust: {shop.test: {caFile: ca.crt}}
services: []
listeners: [{address: %q, tls: {key: gw, trust: shop.test, protocols: [connect, connect-h2, websocket]}}]
policies:
  - {name: register, verb: register, action: allow, targets: {names: ["*.shop.test"]}, rules: [{sources: [{spiffe: ["spiffe://shop.test/orders"]}]}]}
`, at), 0o600)
	check()
	c, err := file.Load(config)
	check()
	g, err := gateway.New(context.Background(), gateway.Config{
		Mesh: c.Mesh, Identity: keys, SourceListeners: c.Snapshot().Listeners, DrainDelay: -1, DrainTimeout: time.Millisecond,
		Sources: []registry.Source{registry.Static{Name: "test", Snapshot: c.Snapshot()}},
	})
	check()
	ctx, cancel := context.WithCancelCause(context.Background())
	ended := make(chan struct{})
	go func() { defer close(ended); _ = g.Run(ctx, nil) }()
	s.address = g.Addrs()[0].String()
	s.stop = func() {
		cancel(gateway.ErrInterrupted)
		<-ended
		release()
	}
	return s
}

func (s *site) close() { s.stop() }

// pair is the certificate of a member of the site.
func (s *site) pair(name string) *testca.Pair {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.pairs[name] == nil {
		pair, err := s.ca.Issue(testca.Options{SPIFFEID: "spiffe://shop.test/" + name, DNSNames: []string{name + ".shop.test"}})
		if err != nil {
			panic(err)
		}
		s.pairs[name] = pair
	}
	return s.pairs[name]
}

// as says how a member of the site asks its gateway.
func (s *site) as(name string, carriers ...string) *culvert.Gateways {
	keys := new(identity.Store)
	keys.Key("me").Set(&s.pair(name).TLS)
	keys.Trust("gateways").Set(&identity.Bundle{Roots: s.roots})
	return &culvert.Gateways{Addresses: []string{s.address}, Carriers: carriers, Identity: keys, Key: "me", Trust: []string{"gateways"}}
}

// Every carrier carries both what a Dialer asks for and the sessions of a Listener, in order
// and with the end of each direction by itself.
func TestDialerReachesListener(t *testing.T) {
	s := newSite()
	defer s.close()
	for _, carrier := range []string{"", "connect", "connect-h2", "websocket"} {
		t.Run("by "+carrier, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), patience)
			defer cancel()
			carriers := strings.Fields(carrier)
			ln, err := culvert.Listen(ctx, "orders.shop.test:7", s.as("orders", carriers...))
			if err != nil {
				t.Fatal(err)
			}
			var echoing sync.WaitGroup
			defer echoing.Wait()
			defer ln.Close()
			echoing.Go(func() {
				for {
					c, err := ln.Accept()
					if err != nil {
						if !errors.Is(err, net.ErrClosed) {
							t.Error(err)
						}
						return
					}
					echoing.Go(func() {
						defer c.Close()
						_, _ = io.Copy(c, c)
						_ = c.(tunnel.Stream).CloseWrite()
					})
				}
			})
			d := &culvert.Dialer{Via: s.as("laptop", carriers...)}
			defer d.Close()
			var all sync.WaitGroup
			defer all.Wait()
			for i := range 10 {
				all.Go(func() {
					c, err := d.DialContext(ctx, "tcp", "orders.shop.test:7")
					if err != nil {
						t.Error(err)
						return
					}
					defer c.Close()
					_ = c.SetDeadline(time.Now().Add(patience))
					want := strings.Repeat(fmt.Sprint("hello ", i), 20_000)
					all.Go(func() {
						_, _ = io.WriteString(c, want)
						_ = c.(tunnel.Stream).CloseWrite()
					})
					if got, err := io.ReadAll(c); string(got) != want || err != nil {
						t.Errorf("%d bytes came back, %v; want %d", len(got), err, len(want))
					}
				})
			}
			all.Wait()
			if c, err := d.DialContext(ctx, "tcp", "other.shop.test:7"); tunnel.ReasonOf(err) != tunnel.NoRoute {
				t.Errorf("a name that is not there: %v, %v", c, err)
			}
			if c, err := d.DialContext(ctx, "udp", "orders.shop.test:7"); err == nil {
				t.Errorf("by UDP: %v", c)
			}
		})
	}
}

// Close of a Dialer and of a Listener ends what they carry, and gives the name back.
func TestCloseEndsAll(t *testing.T) {
	s := newSite()
	defer s.close()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	ln, err := culvert.Listen(ctx, "orders.shop.test", s.as("orders"))
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	d, other := &culvert.Dialer{Via: s.as("laptop")}, &culvert.Dialer{Via: s.as("phone")}
	defer other.Close()
	first, over := context.WithCancel(ctx) // the context of a dial is of nothing after it
	if c, err := d.DialContext(first, "tcp", "orders.shop.test:7"); err != nil {
		t.Fatal(err)
	} else if served, err := ln.Accept(); err != nil {
		t.Fatal(err)
	} else {
		_, _ = c.Close(), served.Close()
	}
	over()
	var conns []net.Conn
	for _, d := range []*culvert.Dialer{d, other} {
		c, err := d.DialContext(ctx, "tcp", "orders.shop.test:7")
		if err != nil {
			t.Fatal(err)
		}
		served, err := ln.Accept()
		if err != nil {
			t.Fatal(err)
		}
		for _, c := range []net.Conn{c, served} {
			defer c.Close()
			_ = c.SetDeadline(time.Now().Add(patience))
			conns = append(conns, c)
		}
	}
	ended := func(c net.Conn) {
		t.Helper()
		if n, err := c.Read(make([]byte, 1)); err == nil || errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("read %d bytes, %v", n, err)
		}
	}
	_ = d.Close()
	ended(conns[0])
	ended(conns[1])
	if c, err := d.DialContext(ctx, "tcp", "orders.shop.test:7"); !errors.Is(err, net.ErrClosed) {
		t.Errorf("dial after Close: %v, %v", c, err)
	}
	_, _ = ln.Close(), ln.Close()
	ended(conns[2])
	ended(conns[3])
	if c, err := ln.Accept(); !errors.Is(err, net.ErrClosed) {
		t.Errorf("accept after Close: %v, %v", c, err)
	}
	testnet.Eventually(t, patience, func() bool {
		c, err := other.DialContext(ctx, "tcp", "orders.shop.test:7")
		if err == nil {
			_ = c.Close()
		}
		return err != nil
	}, "the name is free")
	again, err := culvert.Listen(ctx, "orders.shop.test", s.as("orders"))
	if err != nil {
		t.Fatal(err)
	}
	_ = again.Close()
}

// What nobody accepts is refused at a limit, and does not hold up the rest.
func TestListenerRefusesWhatNobodyAccepts(t *testing.T) {
	s := newSite()
	defer s.close()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	ln, err := culvert.Listen(ctx, "orders.shop.test", s.as("orders"))
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	d := &culvert.Dialer{Via: s.as("laptop")}
	defer d.Close()
	for n := 0; ; n++ {
		c, err := d.DialContext(ctx, "tcp", "orders.shop.test:7")
		if err != nil {
			if tunnel.ReasonOf(err) != tunnel.Overload || n != 128 {
				t.Errorf("stream %d: %v; want 128, and overload", n, err)
			}
			break
		}
		defer c.Close()
	}
	if _, err := ln.Accept(); err != nil {
		t.Fatal(err)
	}
	c, err := d.DialContext(ctx, "tcp", "orders.shop.test:7")
	if err != nil {
		t.Fatal(err)
	}
	_ = c.Close()
}

// What cannot work is an error that says why.
func TestRefusals(t *testing.T) {
	s := newSite()
	defer s.close()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	listen := func(address string, via *culvert.Gateways) error {
		ln, err := culvert.Listen(ctx, address, via)
		if err == nil {
			_ = ln.Close()
		}
		return err
	}
	dial := func(via *culvert.Gateways) error {
		d := &culvert.Dialer{Via: via}
		defer d.Close()
		_, err := d.DialContext(ctx, "tcp", "orders.shop.test:443")
		return err
	}
	soon, cancel := context.WithTimeout(ctx, 100*time.Millisecond)
	defer cancel()
	nowhere, err := culvert.Listen(soon, "orders.shop.test", &culvert.Gateways{Addresses: []string{"127.0.0.1:1"}, TokenFile: "none"})
	if err == nil {
		_ = nowhere.Close()
	}
	with := func(change func(*culvert.Gateways)) *culvert.Gateways {
		via := s.as("orders", "connect-h2")
		change(via)
		return via
	}
	for what, got := range map[string]struct {
		err  error
		want string
	}{
		"no gateway":          {dial(nil), "set Gateways.Addresses"},
		"no credentials":      {dial(with(func(g *culvert.Gateways) { g.Key = "" })), "set Gateways.Key"},
		"no port":             {dial(with(func(g *culvert.Gateways) { g.Addresses[0] = "gw.example" })), "write HOST:PORT"},
		"another carrier":     {dial(with(func(g *culvert.Gateways) { g.Carriers = []string{"socks5"} })), "use connect"},
		"an unknown CA":       {dial(with(func(g *culvert.Gateways) { g.Trust = nil })), "certificate"},
		"a key that is none":  {dial(with(func(g *culvert.Gateways) { g.Key = "other" })), "other"},
		"no name":             {listen("", s.as("orders")), "not a name"},
		"port 0":              {listen("orders.shop.test:0", s.as("orders")), "NAME:PORT"},
		"a name of others":    {listen("orders.other.test", s.as("orders")), "refused"},
		"somebody else":       {listen("orders.shop.test", s.as("laptop")), "refused"},
		"another CA":          {listen("orders.shop.test", with(func(g *culvert.Gateways) { g.Trust = nil })), "unknown authority"},
		"a gateway not there": {err, "no gateway has taken"},
	} {
		if got.err == nil || !strings.Contains(got.err.Error(), got.want) {
			t.Errorf("%s: %v; want %q", what, got.err, got.want)
		}
	}
}
