package h3

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"io"
	"math/big"
	"net"
	"net/netip"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"culvert.dev/internal/testnet"
	"culvert.dev/tunnel"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// patience is how long anything in these tests may take.
const patience = 20 * time.Second

// credentials are of a server called "gw.test", and for its clients.
var credentials = sync.OnceValues(func() (server, client *tls.Config) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		panic(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), DNSNames: []string{"gw.test"},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		panic(err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		panic(err)
	}
	roots := x509.NewCertPool()
	roots.AddCert(cert)
	return &tls.Config{Certificates: []tls.Certificate{{Certificate: [][]byte{der}, PrivateKey: key}}},
		&tls.Config{RootCAs: roots, ServerName: "gw.test"}
})

func serverTLS() *tls.Config { s, _ := credentials(); return s }
func clientTLS() *tls.Config { _, c := credentials(); return c.Clone() }

// A gateway is a whole one: a Server, a Router and a Relay.
type gateway struct {
	addr  string
	relay *tunnel.Relay
	srv   *Server

	mu       sync.Mutex // guards outcomes
	outcomes []*tunnel.Outcome
	changed  chan struct{}
}

// A table is a Resolver: from "name:port" to the address.
type table map[string]string

func (t table) Resolve(_ context.Context, req *tunnel.Request) (tunnel.Route, error) {
	to, ok := t[req.Target()]
	if !ok && req.Addr.IsValid() {
		to, ok = t["*"]
	}
	if !ok {
		return tunnel.Route{}, tunnel.Refusef(tunnel.NoRoute, "no route for %q", req.Target())
	}
	return tunnel.Route{Service: "svc", Endpoints: []tunnel.Endpoint{{Addr: netip.MustParseAddrPort(to), Named: true}}}, nil
}

// serve has s serve routes, on loopback.
func serve(t testing.TB, routes tunnel.Resolver, s *Server) *gateway {
	t.Helper()
	g := &gateway{relay: &tunnel.Relay{}, srv: s, changed: make(chan struct{}, 1)}
	s.Observe = func(o *tunnel.Outcome) {
		g.mu.Lock()
		defer g.mu.Unlock()
		g.outcomes = append(g.outcomes, o)
		select {
		case g.changed <- struct{}{}:
		default:
		}
	}
	g.addr = serveHandler(t, s, &tunnel.Router{Relay: g.relay, Dialer: &tunnel.NetDialer{}, Resolver: routes, Observe: s.Observe})
	t.Cleanup(func() { _ = g.relay.Close() }) // before the Server's own
	return g
}

// serveHandler has s serve on loopback, and returns where.
func serveHandler(t testing.TB, s *Server, h tunnel.Handler) string {
	t.Helper()
	pc := socket(t)
	if s.TLS == nil {
		s.TLS = serverTLS()
	}
	if s.Limits == (tunnel.Limits{}) {
		s.Limits = tunnel.Limits{NewPerSource: -1, OpenPerSource: -1}
	}
	served := make(chan error, 1)
	ctx := context.WithoutCancel(t.Context())
	go func() { served <- s.Serve(ctx, pc, h) }()
	t.Cleanup(func() {
		_ = s.Close()
		select {
		case err := <-served:
			if err != tunnel.ErrServerClosed {
				t.Errorf("Serve returned %v", err)
			}
		case <-time.After(patience):
			t.Error("Serve does not return after Close")
		}
	})
	return pc.LocalAddr().String()
}

// socket is a UDP socket on loopback, whoever closes it.
func socket(t testing.TB) *net.UDPConn {
	t.Helper()
	pc, err := net.ListenUDP("udp", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = pc.Close() })
	return pc
}

// outcome waits for the first outcome that f likes.
func (g *gateway) outcome(t testing.TB, what string, f func(*tunnel.Outcome) bool) *tunnel.Outcome {
	t.Helper()
	limit := time.After(patience)
	for {
		g.mu.Lock()
		for _, o := range g.outcomes {
			if f(o) {
				g.mu.Unlock()
				return o
			}
		}
		g.mu.Unlock()
		select {
		case <-g.changed:
		case <-limit:
			t.Fatalf("no outcome %s", what)
		}
	}
}

// reason waits for an outcome with that Reason.
func (g *gateway) reason(t testing.TB, want tunnel.Reason) *tunnel.Outcome {
	t.Helper()
	return g.outcome(t, "with reason "+string(want), func(o *tunnel.Outcome) bool { return o.Reason == want })
}

func listen(t testing.TB) net.Listener {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = ln.Close() })
	return ln
}

// backend accepts connections and gives each to f.
func backend(t testing.TB, f func(net.Conn)) string {
	t.Helper()
	return testnet.Serve(t, f).Addr()
}

func echo(c net.Conn) { _, _ = io.Copy(c, c) }

// newDialer returns a Dialer that ends with the test.
func newDialer(t testing.TB, proxy string) *Dialer {
	d := &Dialer{Proxy: proxy, TLS: clientTLS(), Idle: 50 * time.Millisecond}
	t.Cleanup(func() { _ = d.Close() })
	return d
}

// open dials addr.
func open(t testing.TB, d tunnel.Dialer, addr string) *Stream {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	c, err := d.DialContext(ctx, "tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	_ = c.SetDeadline(time.Now().Add(patience))
	return c.(*Stream)
}

// ping writes s and reads the same.
func ping(t testing.TB, c net.Conn, s string) {
	t.Helper()
	if _, err := io.WriteString(c, s); err != nil {
		t.Fatal(err)
	}
	got := make([]byte, len(s))
	if _, err := io.ReadFull(c, got); err != nil || string(got) != s {
		t.Fatalf("got %q and %v back, want %q", got, err, s)
	}
}

func wantReason(t testing.TB, err error, want tunnel.Reason) {
	t.Helper()
	var te *tunnel.Error
	if !errors.As(err, &te) || te.Reason != want {
		t.Errorf("got error %v (reason %q), want reason %q", err, tunnel.ReasonOf(err), want)
	}
}

// until polls ok.
func until(t testing.TB, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(patience); !ok(); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("waited in vain: %s", what)
		}
	}
}
