package connectudp

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
	"sync/atomic"
	"testing"
	"time"

	"culvert.dev/connect"
	"culvert.dev/connect/h2"
	"culvert.dev/connect/h3"
	"culvert.dev/internal/testnet"
	"culvert.dev/internal/udp"
	"culvert.dev/tunnel"
	"culvert.dev/tunnel/tunneltest"
)

func TestMain(m *testing.M) { testnet.GoroutinesEnd(m) }

// patience is how long anything in these tests may take.
const patience = 30 * time.Second

// credentials are of a server called "gw.test", and for its clients.
var credentials = sync.OnceValues(func() (server, client *tls.Config) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		panic(err)
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(1), DNSNames: []string{"gw.test"}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour)}
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
	return &tls.Config{Certificates: []tls.Certificate{{Certificate: [][]byte{der}, PrivateKey: key}}}, &tls.Config{RootCAs: roots, ServerName: "gw.test"}
})

// A proxy is a whole one: a Protocol on a carrier, a Router and a Relay.
type proxy struct {
	*tunneltest.Record
	relay   *tunnel.Relay
	router  *tunnel.Router
	addr    string
	p       *Protocol
	d       *Dialer // a client of it
	carrier interface {
		tunnel.Dialer
		Close() error
		Conns() int
	}
}

// eachVersion runs a test over both carriers. The routes lead to addresses of UDP; change,
// which may be nil, sets more of the proxy before it serves.
func eachVersion(t *testing.T, routes tunneltest.Table, change func(*proxy), test func(*testing.T, *proxy)) {
	t.Helper()
	start := func(t *testing.T) *proxy {
		p := &proxy{Record: new(tunneltest.Record), relay: &tunnel.Relay{}}
		p.p = &Protocol{Protocol: connect.Protocol{Via: "gw"}, Dialer: &udp.Dialer{}, Dropped: new(atomic.Uint64)}
		p.router = &tunnel.Router{Relay: p.relay, Dialer: &tunnel.NetDialer{}, Resolver: routes, Observe: p.Observe}
		p.d = &Dialer{Proxy: "gw.test:443", Dropped: new(atomic.Uint64)}
		if change != nil {
			change(p)
		}
		return p
	}
	limits := tunnel.Limits{ConnectionRatePerClient: -1, MaxConnectionsPerClient: -1}
	t.Run("h2", func(t *testing.T) {
		p := start(t)
		ctx := context.WithoutCancel(t.Context())
		ln, err := tunnel.Listen(ctx, "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		p.addr = ln.Addr().String()
		s := &tunnel.Server{Handler: p.router, Limits: limits, Observe: p.Observe}
		served := make(chan error, 1)
		go func() {
			served <- s.Serve(ctx, tunnel.Listener{Listener: ln, Protocols: []tunnel.Protocol{&h2.Protocol{Extended: []connect.ExtendedService{p.p}}}})
		}()
		d := &h2.Dialer{Proxy: p.addr}
		p.d.Open, p.carrier = d.Open, d
		t.Cleanup(func() {
			_ = d.Close()
			_ = p.relay.Close()
			_ = s.Close()
			<-served
		})
		test(t, p)
	})
	t.Run("h3", func(t *testing.T) {
		p := start(t)
		pc, err := net.ListenUDP("udp", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
		if err != nil {
			t.Fatal(err)
		}
		server, client := credentials()
		p.addr = pc.LocalAddr().String()
		s := &h3.Server{TLS: server, Extended: []connect.ExtendedService{p.p}, Limits: limits, Observe: p.Observe}
		served := make(chan error, 1)
		go func() { served <- s.Serve(context.WithoutCancel(t.Context()), pc, p.router) }()
		d := &h3.Dialer{Proxy: p.addr, TLS: client.Clone()}
		p.d.Open, p.carrier = d.Open, d
		t.Cleanup(func() {
			_ = d.Close()
			_ = p.relay.Close()
			_ = s.Close()
			<-served
		})
		test(t, p)
	})
}

// dial returns a Conn to addr, which ends with the test.
func (p *proxy) dial(t *testing.T, addr string) *received {
	t.Helper()
	c, err := p.tryDial(t, addr)
	if err != nil {
		t.Fatal(err)
	}
	return receive(t, c.(*Conn))
}

func (p *proxy) tryDial(t *testing.T, addr string) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	return p.d.DialContext(ctx, "udp", addr)
}

// A received is a Conn whose datagrams are kept.
type received struct {
	*Conn
	datagrams chan string
	ended     chan error // gets what ReceiveDatagrams returned
}

func receive(t *testing.T, c *Conn) *received {
	r := &received{Conn: c, datagrams: make(chan string, 1000), ended: make(chan error, 1)}
	var wg sync.WaitGroup
	wg.Go(func() {
		r.ended <- c.ReceiveDatagrams(func(b []byte) {
			select {
			case r.datagrams <- string(b):
			default:
			}
		})
	})
	t.Cleanup(func() {
		_ = c.Close()
		wg.Wait()
	})
	return r
}

// ask sends a datagram until it is answered: any of them may be lost.
func (r *received) ask(t *testing.T, text string) string {
	t.Helper()
	again := time.NewTicker(time.Second)
	defer again.Stop()
	late := time.After(patience)
	for {
		if err := r.SendDatagram([]byte(text)); err != nil {
			t.Fatalf("send: %v", err)
		}
		select {
		case got := <-r.datagrams:
			return got
		case err := <-r.ended:
			t.Fatalf("the tunnel ended: %v", err)
		case <-late:
			t.Fatal("no answer")
		case <-again.C:
		}
	}
}

// end waits for the end of what r receives.
func (r *received) end(t *testing.T) error {
	t.Helper()
	select {
	case err := <-r.ended:
		return err
	case <-time.After(patience):
		t.Fatal("the tunnel does not end")
		return nil
	}
}

// udpServer answers each datagram with what answer returns; nil is no answer.
func udpServer(t *testing.T, answer func(b []byte) [][]byte) string {
	t.Helper()
	c, err := net.ListenUDP("udp", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	wg.Go(func() {
		b := make([]byte, 1<<16)
		for {
			n, from, err := c.ReadFromUDPAddrPort(b)
			if err != nil {
				return
			}
			for _, a := range answer(b[:n]) {
				_, _ = c.WriteToUDPAddrPort(a, from)
			}
		}
	})
	t.Cleanup(func() {
		_ = c.Close()
		wg.Wait()
	})
	return c.LocalAddr().String()
}

// echo is a udpServer that answers with what it gets.
func echo(t *testing.T) string {
	return udpServer(t, func(b []byte) [][]byte { return [][]byte{b} })
}
