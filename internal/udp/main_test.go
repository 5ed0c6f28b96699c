package udp

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"net"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	"culvert.dev/internal/testnet"
	"culvert.dev/tunnel"
)

func TestMain(m *testing.M) { testnet.GoroutinesEnd(m) }

// patience is how long a test waits for what must happen, and patient for what
// must not.
const (
	patience = 30 * time.Second
	patient  = 100 * time.Millisecond
)

// A rig is a Server with everything around it.
type rig struct {
	t      testing.TB
	s      *Server
	relay  *tunnel.Relay
	addr   netip.AddrPort
	health chan error // what the route's Report was told

	mu       sync.Mutex // guards what follows
	routes   map[string][]tunnel.Endpoint
	refusals map[string]error // of the sources' addresses, "host:port"
	outcomes []*tunnel.Outcome
	asked    int
}

// newRig serves ln, whose Conn it opens where there is none, on loopback.
func newRig(t testing.TB, ln Listener, change func(*Server)) *rig {
	t.Helper()
	r := &rig{t: t, relay: &tunnel.Relay{}, routes: map[string][]tunnel.Endpoint{}, refusals: map[string]error{}, health: make(chan error, 100)}
	guard := &tunnel.Guard{}
	if ln.Conn == nil {
		ln.Conn = listen(t, "127.0.0.1:0")
	}
	guard.OwnListener(ln.Conn.LocalAddr())
	r.addr = addrOf(ln.Conn)
	r.s = &Server{
		Router:  &tunnel.Router{Resolver: r, Relay: r.relay, Observe: r.observe},
		Dialer:  &Dialer{Guard: guard},
		Observe: r.observe,
	}
	if change != nil {
		change(r.s)
	}
	served := make(chan error, 1)
	go func() { served <- r.s.Serve(context.Background(), ln) }()
	t.Cleanup(func() {
		_ = r.s.Close()
		if err := <-served; !errors.Is(err, tunnel.ErrServerClosed) {
			t.Errorf("Serve = %v, want %v", err, tunnel.ErrServerClosed)
		}
		_ = r.relay.Close()
		if n := r.relay.Open(); n != 0 {
			t.Errorf("%d sessions open at the end", n)
		}
		if st := r.s.Stats(); st.Sessions != 0 || st.HalfOpen != 0 {
			t.Errorf("left at the end: %+v", st)
		}
		r.s.mu.Lock()
		defer r.s.mu.Unlock()
		if r.s.waiting != 0 {
			t.Errorf("%d bytes waiting at the end", r.s.waiting)
		}
		if r.s.sockets.n+r.s.sockets.unproven.Len()+r.s.sockets.answered.Len()+r.s.sockets.again.Len()+len(r.s.waitingBy) != 0 {
			t.Errorf("counted at the end: %+v, %v", &r.s.sockets, r.s.waitingBy)
		}
		for d := range r.s.listeners {
			if len(d.callers) != 0 {
				t.Errorf("%d callers at the end", len(d.callers))
			}
		}
		if err := r.s.clients.Idle(); err != nil {
			t.Errorf("at the end: %v", err)
		}
	})
	return r
}

func listen(t testing.TB, addr string) *net.UDPConn {
	t.Helper()
	c, err := Listen(context.Background(), addr)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func addrOf(c *net.UDPConn) netip.AddrPort { return c.LocalAddr().(*net.UDPAddr).AddrPort() }

// Resolve implements tunnel.Resolver.
func (r *rig) Resolve(_ context.Context, req *tunnel.Request) (tunnel.Route, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.asked++
	name := req.Name.String()
	if err := r.refusals[req.Source.String()]; err != nil {
		return tunnel.Route{}, err
	}
	eps, ok := r.routes[name]
	if !ok {
		return tunnel.Route{}, tunnel.Refusef(tunnel.NoRoute, "no service is named %q", name)
	}
	if name == "panic.test" {
		panic("planned")
	}
	if len(eps) > 1 { // the next one's turn
		r.routes[name] = append(eps[1:len(eps):len(eps)], eps[0])
	}
	return tunnel.Route{Service: name, Pattern: name, Endpoints: eps, Report: func(_ tunnel.Endpoint, err error) { r.health <- err }}, nil
}

func (r *rig) route(name string, to ...netip.AddrPort) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.routes[name] = nil
	for _, a := range to {
		r.routes[name] = append(r.routes[name], tunnel.Endpoint{Addr: a, Named: true})
	}
}

func (r *rig) observe(o *tunnel.Outcome) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.outcomes = append(r.outcomes, o)
}

func (r *rig) told() []*tunnel.Outcome {
	r.mu.Lock()
	defer r.mu.Unlock()
	return append([]*tunnel.Outcome(nil), r.outcomes...)
}

// outcome waits for the n-th outcome and compares its reason.
func (r *rig) outcome(n int, why tunnel.Reason) *tunnel.Outcome {
	r.t.Helper()
	testnet.Eventually(r.t, patience, func() bool { return len(r.told()) >= n }, "an outcome")
	o := r.told()[n-1]
	if o.Reason != why {
		r.t.Fatalf("outcome %d: %s (%v), want %s", n, o.Reason, o.Err, why)
	}
	return o
}

// A peer is a UDP socket of a test: a client or a service.
type peer struct {
	*net.UDPConn
	t testing.TB
}

func newPeer(t testing.TB) *peer {
	t.Helper()
	p := &peer{listen(t, "127.0.0.1:0"), t}
	t.Cleanup(func() { _ = p.Close() })
	return p
}

func (p *peer) addr() netip.AddrPort { return addrOf(p.UDPConn) }

func (p *peer) say(to netip.AddrPort, b []byte) {
	p.t.Helper()
	if _, err := p.WriteToUDPAddrPort(b, to); err != nil {
		p.t.Fatal(err)
	}
}

// hear waits for a datagram, which must be want, and returns who sent it.
func (p *peer) hear(want []byte) netip.AddrPort {
	p.t.Helper()
	got, from := p.next()
	if !bytes.Equal(got, want) {
		p.t.Fatalf("heard %q, want %q", got, want)
	}
	return from
}

// hearsOf waits for a datagram that client sends to addr again and again: a socket
// whose buffer is full drops what comes.
func (p *peer) hearsOf(client *peer, addr netip.AddrPort, want []byte) {
	p.t.Helper()
	b := make([]byte, maxDatagram)
	for end := time.Now().Add(patience); time.Now().Before(end); {
		client.say(addr, want)
		_ = p.SetReadDeadline(time.Now().Add(patient))
		if n, err := p.Read(b); err == nil {
			if !bytes.Equal(b[:n], want) {
				p.t.Fatalf("heard %q, want %q", b[:n], want)
			}
			return
		}
	}
	p.t.Fatalf("nothing was heard, want %q", want)
}

func (p *peer) next() ([]byte, netip.AddrPort) {
	p.t.Helper()
	b := make([]byte, maxDatagram)
	_ = p.SetReadDeadline(time.Now().Add(patience))
	n, from, err := p.ReadFromUDPAddrPort(b)
	if err != nil {
		p.t.Fatalf("nothing was heard: %v", err)
	}
	return b[:n], netip.AddrPortFrom(from.Addr().Unmap(), from.Port())
}

// silent fails if anything is heard.
func (p *peer) silent() {
	p.t.Helper()
	b := make([]byte, maxDatagram)
	_ = p.SetReadDeadline(time.Now().Add(patient))
	if n, from, err := p.ReadFromUDPAddrPort(b); err == nil {
		p.t.Fatalf("heard %q from %s, want nothing", b[:n], from)
	}
}

// What stands for QUIC here has its headers, and the hello in the clear:
// "name=svc.test", or "more" while it is not complete. What begins with "bad"
// may not follow.
type fakeOpening struct {
	mu    sync.Mutex // guards heard
	heard int
}

func (f *fakeOpening) ReadHello(b []byte, req *tunnel.Request) (tunnel.Verdict, error) {
	body := "" // what begins with a length that is not there
	if at := len(b) - int(b[len(b)-1]) - 1; at >= 0 {
		body = string(b[at : len(b)-1])
	}
	switch name, ok := strings.CutPrefix(body, "name="); {
	case ok && name == "":
		return tunnel.No, tunnel.Refusef(tunnel.NoSNI, "no name")
	case ok:
		n, err := tunnel.ParseName(name)
		req.Name = n
		return tunnel.Yes, err
	case body == "more":
		return tunnel.More, nil
	case body == "panic":
		panic("planned")
	case body == "stray":
		return tunnel.More, errors.New("a stray")
	case body == "version":
		return tunnel.No, tunnel.Refusef(tunnel.Unsupported, "another version")
	}
	return tunnel.No, tunnel.Refusef(tunnel.BadPreamble, "not QUIC: %q", body)
}

func (f *fakeOpening) Refuse(err error) []byte { return []byte("no: " + string(tunnel.ReasonOf(err))) }
func (f *fakeOpening) Check(b []byte) bool     { return !bytes.Contains(b, []byte("bad")) }
func (f *fakeOpening) ServiceDatagram([]byte)  { f.mu.Lock(); f.heard++; f.mu.Unlock() }

func newOpening() Opening { return &fakeOpening{} }

// long makes a packet of a long header: to an id, from an id, with a body that
// ends in its own length.
func long(dcid, scid, body string) []byte {
	b := []byte{0xc0, 0, 0, 0, 1, byte(len(dcid))}
	b = append(append(b, dcid...), byte(len(scid)))
	b = append(append(b, scid...), body...)
	return append(b, byte(len(body)))
}

func versionNegotiation(dcid, scid string) []byte {
	b := long(dcid, scid, "versions")
	binary.BigEndian.PutUint32(b[1:], 0)
	return b
}

// short makes a packet of a short header.
func short(id, body string) []byte { return append([]byte{0x40}, id+body...) }
