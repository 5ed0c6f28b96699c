package h3

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"math/big"
	"net"
	"sync"
	"testing"
	"time"

	"culvert.dev/internal/testnet"
	"culvert.dev/tunnel"
	"culvert.dev/tunnel/tunneltest"
)

func TestMain(m *testing.M) { testnet.GoroutinesEnd(m) }

// testTimeout is how long anything in these tests may take.
const testTimeout = time.Minute

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

// A gateway is a whole one over UDP: a Server, a Router and a Relay.
type gateway struct {
	tunneltest.Record
	addr  string
	relay *tunnel.Relay
	srv   *Server
}

// serve has s serve routes, on loopback.
func serve(t testing.TB, routes tunnel.Resolver, s *Server) *gateway {
	t.Helper()
	return serveAt(t, routes, s, socket(t))
}

// serveAt is serve with a socket on loopback.
func serveAt(t testing.TB, routes tunnel.Resolver, s *Server, pc net.PacketConn) *gateway {
	t.Helper()
	g := &gateway{relay: &tunnel.Relay{}, srv: s}
	s.Observe = g.Observe
	g.addr = serveHandlerAt(t, s, pc, &tunnel.Router{Relay: g.relay, Dialer: &tunnel.NetDialer{}, Resolver: routes, Observe: g.Observe})
	t.Cleanup(func() { _ = g.relay.Close() }) // before the Server's own
	return g
}

// with is g and a client of it, as the suites see them.
func (g *gateway) with(d *Dialer) tunneltest.Served {
	return tunneltest.Served{Record: &g.Record, Relay: g.relay, Server: g.srv, Dialer: d, Addr: "svc:1"}
}

// serveHandler has s serve on loopback, and returns where.
func serveHandler(t testing.TB, s *Server, h tunnel.Handler) string {
	t.Helper()
	return serveHandlerAt(t, s, socket(t), h)
}

func serveHandlerAt(t testing.TB, s *Server, pc net.PacketConn, h tunnel.Handler) string {
	t.Helper()
	if s.TLS == nil {
		s.TLS = serverTLS()
	}
	if s.Limits == (tunnel.Limits{}) {
		s.Limits = tunnel.Limits{ConnectionRatePerClient: -1, MaxConnectionsPerClient: -1}
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
		case <-time.After(testTimeout):
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

// newDialer returns a Dialer that ends with the test.
func newDialer(t testing.TB, proxy string) *Dialer {
	d := &Dialer{Proxy: proxy, TLS: clientTLS(), Idle: 50 * time.Millisecond}
	t.Cleanup(func() { _ = d.Close() })
	return d
}

// open dials addr.
func open(t testing.TB, d tunnel.Dialer, addr string) *Stream {
	t.Helper()
	return tunneltest.Dial(t, d, addr).(*Stream)
}
