package tunnel_test

import (
	"context"
	"crypto/tls"
	"fmt"
	"net"
	"runtime"
	"testing"
	"time"

	"culvert.dev/connect"
	"culvert.dev/internal/testnet"
	"culvert.dev/sni"
	"culvert.dev/tunnel"
)

// An edge is the whole of a gateway's data path over real sockets, with the
// service that all of its routes lead to.
type edge struct {
	srv    *tunnel.Server
	relay  *tunnel.Relay
	loops  *tunnel.Loops
	budget *tunnel.Budget
	addr   string
	told   chan *tunnel.Outcome

	service *net.TCPListener
	dialing chan struct{} // a dial that will not end was begun
	served  chan error

	goroutines int // before there was an edge
	files      int
}

// stuck is the name of the service that is dialed for ever.
const stuck = "stuck.test"

func newEdge(t *testing.T) *edge {
	t.Helper()
	e := &edge{budget: &tunnel.Budget{Limit: 1000}, told: make(chan *tunnel.Outcome, 100), dialing: make(chan struct{}, 10), served: make(chan error, 1)}
	e.goroutines = runtime.NumGoroutine()
	e.files, _ = testnet.OpenFiles()
	service, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	e.service = service.(*net.TCPListener)
	ln, err := tunnel.Listen(t.Context(), "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	e.addr = ln.Addr().String()
	observe := func(o *tunnel.Outcome) { e.told <- o }
	e.loops = &tunnel.Loops{Budget: e.budget}
	e.relay = &tunnel.Relay{Loops: e.loops}
	e.srv = &tunnel.Server{
		Loops: e.loops, Budget: e.budget, Observe: observe, Limits: tunnel.Limits{ConnectionRatePerClient: -1},
		Handler: &tunnel.Router{Budget: e.budget, Observe: observe, Relay: e.relay, Dialer: e, Resolver: resolverFunc(e.resolve)},
	}
	go func() {
		e.served <- e.srv.Serve(t.Context(), tunnel.Listener{Listener: ln, Protocols: []tunnel.Protocol{&sni.Protocol{}, &connect.Protocol{}}})
	}()
	return e
}

func (e *edge) resolve(_ context.Context, req *tunnel.Request) (tunnel.Route, error) {
	r := tunnel.Route{Service: req.Name.String(), Endpoints: endpoints(e.service.Addr().String())}
	if r.Service == stuck {
		r.Endpoints = endpoints("192.0.2.1:1")
	}
	return r, nil
}

// DialContext dials the service, or nothing for ever.
func (e *edge) DialContext(ctx context.Context, network, addr string) (net.Conn, error) {
	if addr != e.service.Addr().String() {
		e.dialing <- struct{}{}
		<-ctx.Done()
		return nil, ctx.Err()
	}
	var d tunnel.NetDialer
	d.Guard = &tunnel.Guard{}
	return d.DialEndpoint(ctx, tunnel.Endpoint{Addr: e.service.Addr().(*net.TCPAddr).AddrPort(), Named: true})
}

// dial connects a client.
func (e *edge) dial(t *testing.T) *net.TCPConn {
	t.Helper()
	c, err := net.Dial("tcp", e.addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	_ = c.SetDeadline(time.Now().Add(patience))
	return c.(*net.TCPConn)
}

// accept is the service's end of the next tunnel.
func (e *edge) accept(t *testing.T) *net.TCPConn {
	t.Helper()
	_ = e.service.SetDeadline(time.Now().Add(patience))
	c, err := e.service.AcceptTCP()
	if err != nil {
		t.Fatalf("no connection came to the service: %v", err)
	}
	t.Cleanup(func() { _ = c.Close() })
	_ = c.SetDeadline(time.Now().Add(patience))
	return c
}

// outcome waits for the next one.
func (e *edge) outcome(t *testing.T) *tunnel.Outcome {
	t.Helper()
	select {
	case o := <-e.told:
		return o
	case <-time.After(patience):
		t.Fatal("nothing was told")
		panic("unreachable")
	}
}

// close ends what is left, and checks that nothing is.
func (e *edge) close(t *testing.T) {
	t.Helper()
	_ = e.srv.Close()
	if err := e.srv.Shutdown(context.WithoutCancel(t.Context())); err != nil {
		t.Errorf("shutdown: %v", err)
	}
	_ = e.relay.Close()
	_ = e.loops.Close()
	_ = e.service.Close()
	if err := <-e.served; err != tunnel.ErrServerClosed {
		t.Errorf("serve: %v", err)
	}
	if open, half, waiting := e.srv.Account(); open != 0 || half != 0 || waiting != 0 || e.budget.Used() != 0 || e.relay.Open() != 0 {
		t.Errorf("afterwards: %d open, %d half-open, %d waiting, %d descriptors counted, %d tunnels; want none", open, half, waiting, e.budget.Used(), e.relay.Open())
	}
	testnet.Eventually(t, patience, func() bool { return runtime.NumGoroutine() <= e.goroutines }, "no goroutine is left")
}

// wantNoFiles checks that there are no more descriptors than before the edge,
// once the test has closed its own.
func (e *edge) wantNoFiles(t *testing.T) {
	t.Helper()
	testnet.Eventually(t, patience, func() bool { n, ok := testnet.OpenFiles(); return !ok || n <= e.files }, "no descriptor is left of %d", e.files)
}

// A manner is a way to say where to.
type manner struct {
	name     string
	preamble func(t *testing.T, target string) []byte
	yes      string // what the client hears; the service then gets no preamble
}

var manners = []manner{
	{"sni", hello, ""},
	{"connect", func(_ *testing.T, target string) []byte {
		return fmt.Appendf(nil, "CONNECT %s:443 HTTP/1.1\r\nHost: %s:443\r\n\r\n", target, target)
	}, "HTTP/1.1 200 Connection Established\r\n\r\n"},
}

// hello is what a TLS client of this machine sends first.
func hello(t *testing.T, name string) []byte {
	t.Helper()
	a, b := net.Pipe()
	go func() {
		_ = tls.Client(a, &tls.Config{ServerName: name, CurvePreferences: []tls.CurveID{tls.X25519}}).HandshakeContext(t.Context())
	}()
	buf := make([]byte, 4<<10)
	n, err := b.Read(buf)
	if err != nil {
		t.Fatal(err)
	}
	_, _ = a.Close(), b.Close()
	return buf[:n]
}
