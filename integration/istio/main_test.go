package istio

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"io"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"

	"culvert.dev/connect/hbone"
	"culvert.dev/identity"
	"culvert.dev/internal/gateway"
	"culvert.dev/internal/termination"
	"culvert.dev/internal/testca"
	"culvert.dev/registry"
	"culvert.dev/sni"
	"culvert.dev/tunnel"
	istio "istio.io/istio/pkg/hbone"
	"istio.io/istio/pkg/log"
)

func TestMain(m *testing.M) {
	for _, s := range log.Scopes() {
		s.SetOutputLevel(log.NoneLevel)
	}
	// Istio's dialers have no end, and its double server waits for ever for the
	// inner one: what they keep goes with the process.
	goleak.VerifyTestMain(m,
		goleak.IgnoreTopFunction("istio.io/istio/pkg/hbone.hbone.func2"),
		goleak.IgnoreAnyFunction("istio.io/istio/pkg/hbone.handleDoubleConnect"),
		goleak.IgnoreAnyFunction("istio.io/istio/pkg/hbone.handleDoubleConnect.func1"),
		goleak.IgnoreAnyFunction("istio.io/istio/pkg/hbone.copyBuffered"),
		goleak.IgnoreAnyFunction("golang.org/x/net/http2.(*clientConnReadLoop).run"),
		goleak.IgnoreAnyFunction("net/http/internal/http2.(*clientConnReadLoop).run"),
	)
}

const patience = time.Minute

// A mesh is a CA and the keys of its workloads.
type mesh struct {
	t  *testing.T
	ca *testca.CA
}

func newMesh(t *testing.T) *mesh {
	t.Helper()
	ca, err := testca.New("cluster.local", nil)
	if err != nil {
		t.Fatal(err)
	}
	return &mesh{t, ca}
}

func id(name string) string { return "spiffe://cluster.local/ns/test/sa/" + name }

func (m *mesh) issue(name string) tls.Certificate {
	m.t.Helper()
	pair, err := m.ca.Issue(testca.Options{SPIFFEID: id(name), DNSNames: []string{"svc.test"}, IPs: []net.IP{net.IPv4(127, 0, 0, 1)}})
	if err != nil {
		m.t.Fatal(err)
	}
	return pair.TLS
}

func (m *mesh) client(name string) *tls.Config {
	return &tls.Config{Certificates: []tls.Certificate{m.issue(name)}, RootCAs: m.ca.Pool()}
}

func (m *mesh) server(name string) *tls.Config {
	return &tls.Config{
		Certificates: []tls.Certificate{m.issue(name)}, ClientAuth: tls.RequireAndVerifyClientCert, ClientCAs: m.ca.Pool(), NextProtos: []string{"h2"},
	}
}

// gateway runs ours: HBONE, and the services svc.test:80 and localhost at addr.
func (m *mesh) gateway(addr string) string {
	t := m.t
	t.Helper()
	p := &termination.Protocol{Hello: &sni.Protocol{Nameless: true}}
	pair := m.issue("gw")
	keys := &termination.Keys{Certificates: []*identity.Key{identity.NewKey(&pair)}, Trust: []*identity.Trust{m.trust()}}
	if err := p.Use(termination.Item{Keys: keys, Any: true, Inner: []tunnel.Protocol{&hbone.Protocol{Via: "ours"}}, ALPN: []termination.Offer{{Name: "h2"}}}); err != nil {
		t.Fatal(err)
	}
	at := netip.MustParseAddrPort(addr)
	service := func(name string, private bool, at netip.AddrPort) *registry.Service {
		return &registry.Service{
			Name: name, Names: []tunnel.Pattern{{Suffix: tunnel.MustParseName(name)}}, Ports: []uint16{80}, Exposed: !private,
			Addresses: map[string][]netip.Addr{"svc.test": {netip.MustParseAddr("10.96.0.10")}}[name],
			Endpoints: []registry.Endpoint{{Addr: at.Addr(), Port: at.Port()}},
		}
	}
	local := service("localhost", false, at)
	local.Ports = nil // any
	g, err := gateway.New(t.Context(), gateway.Config{
		Listeners: []gateway.Listener{{Address: "127.0.0.1:0", Protocols: []tunnel.Protocol{p}}},
		Sources: []registry.Source{registry.Static{Name: "test", Snapshot: registry.Snapshot{Services: []*registry.Service{
			service("svc.test", false, at), service("down.test", false, netip.MustParseAddrPort("127.0.0.1:1")), service("private.test", true, at), local,
		}}}},
		Limits:     tunnel.Limits{ConnectionRatePerClient: -1, MaxConnectionsPerClient: -1, MaxPendingPerClient: -1},
		DrainDelay: -1, DrainTimeout: -1,
	})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() {
		if err := g.Run(ctx, nil); err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(func() {
		cancel()
		wg.Wait()
	})
	return g.Addrs()[0].String()
}

// istioServer runs Istio's, as its echo server does.
func (m *mesh) istioServer(s *http.Server) string {
	m.t.Helper()
	ln, err := tls.Listen("tcp", "127.0.0.1:0", m.server("istio"))
	if err != nil {
		m.t.Fatal(err)
	}
	var wg sync.WaitGroup
	wg.Go(func() { _ = s.Serve(ln) })
	m.t.Cleanup(func() {
		_ = s.Close()
		wg.Wait()
	})
	return ln.Addr().String()
}

// trust has the CA of the mesh.
func (m *mesh) trust() *identity.Trust { return identity.NewTrust("cluster.local", m.ca.Root()) }

// verifier verifies that a server of the mesh is peer.
func (m *mesh) verifier(peer string) *identity.Verifier {
	return &identity.Verifier{Trust: []*identity.Trust{m.trust()}, Want: identity.Expectation{Usage: x509.ExtKeyUsageServerAuth, IDs: []string{id(peer)}}}
}

// ours is our dialer to addr.
func (m *mesh) ours(addr, peer string) *hbone.Dialer {
	d := &hbone.Dialer{Gateway: addr, TLS: m.client("alice"), Verifier: m.verifier(peer)}
	m.t.Cleanup(func() { _ = d.Close() })
	return d
}

// theirs is Istio's dialer to addr.
func (m *mesh) theirs(addr string) tunnel.Dialer {
	return istio.NewDialer(istio.Config{ProxyAddress: addr, TLS: m.client("alice")})
}

// backend accepts connections and gives each to f.
func backend(t *testing.T, f func(*net.TCPConn)) string {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			wg.Go(func() {
				defer c.Close()
				_ = c.SetDeadline(time.Now().Add(2 * patience))
				f(c.(*net.TCPConn))
			})
		}
	})
	t.Cleanup(func() {
		_ = ln.Close()
		wg.Wait()
	})
	return ln.Addr().String()
}

func echo(c *net.TCPConn) { _, _ = io.Copy(c, c) }

func dial(t *testing.T, d tunnel.Dialer, addr string) net.Conn {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	c, err := d.DialContext(ctx, "tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	_ = c.SetDeadline(time.Now().Add(patience))
	return c
}

// cable leads to addr until the test ends, and is cut before what is at addr
// stops: a Transport of x/net that is nested in another one's stream spins for
// ever where that stream is reset, for it takes the error for one of its own.
func cable(t *testing.T, addr string) string {
	t.Helper()
	ends := make(chan net.Conn, 2)
	near := backend(t, func(c *net.TCPConn) {
		out, err := net.Dial("tcp", addr)
		if err != nil {
			return
		}
		defer out.Close()
		ends <- c
		ends <- out
		go func() { _, _ = io.Copy(out, c) }()
		_, _ = io.Copy(c, out)
	})
	t.Cleanup(func() {
		for range cap(ends) {
			_ = (<-ends).Close()
		}
	})
	return near
}

// exchange writes s and reads the same.
func exchange(c net.Conn, s string) error {
	written := make(chan error, 1)
	go func() {
		_, err := io.WriteString(c, s)
		written <- err
	}()
	got := make([]byte, len(s))
	if _, err := io.ReadFull(c, got); err != nil {
		return err
	}
	if string(got) != s {
		return io.ErrUnexpectedEOF
	}
	return <-written
}

// refused dials addr and wants an error with that in it.
func refused(t *testing.T, d tunnel.Dialer, addr, want string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	for {
		c, err := d.DialContext(ctx, "tcp", addr)
		if err == nil {
			_ = c.Close()
		}
		if err != nil && strings.Contains(err.Error(), want) {
			return
		}
		// A server that refuses our certificate says so and closes: a write may fail
		// before what it said has been read.
		if ctx.Err() != nil || !errors.Is(err, syscall.EPIPE) && !errors.Is(err, syscall.ECONNRESET) {
			t.Errorf("%s: got %v, want %q", addr, err, want)
			return
		}
	}
}
