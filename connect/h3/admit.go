package h3

import (
	"context"
	"net"
	"net/netip"
	"time"

	"github.com/quic-go/quic-go"

	"culvert.dev/tunnel"
)

// When a client has to prove by a Retry that it is at its address, before a
// handshake begins (RFC 9000 section 8.1.2). Until it is proven, by this or by
// the handshake, it is sent no more than three times what came from there.
const (
	retryFrom       = 1000 // unfinished handshakes in all
	retryFromSource = 16   // unfinished handshakes of its source
)

// A gate counts unfinished handshakes. The Server's mu guards it.
type gate struct{ half int }

// addrPort returns the address of a UDP peer.
func addrPort(addr net.Addr) netip.AddrPort {
	u, ok := addr.(*net.UDPAddr)
	if !ok {
		return netip.AddrPort{}
	}
	ap := u.AddrPort()
	return netip.AddrPortFrom(ap.Addr().Unmap(), ap.Port())
}

// mustRetry is the Transport's VerifySourceAddress.
func (s *Server) mustRetry(addr net.Addr) (must bool) {
	defer s.recovered()
	must = true // also where it is not known
	s.mu.Lock()
	half := s.gate.half
	s.mu.Unlock()
	return half >= retryFrom || s.Budget.PendingOf(&s.clients, addrPort(addr).Addr()) >= retryFromSource
}

// An attempt is a handshake, and then a connection, with its place in the gate.
type attempt struct {
	start    time.Time
	listener string
	addr     netip.AddrPort
	client   *tunnel.Client
	open     bool // the handshake is complete
}

type attemptKey struct{}

// knock is the Transport's ConnContext: a client at an address that may not be
// its own wants to begin a handshake. What it refuses hears CONNECTION_REFUSED,
// in a packet that is smaller than its own.
func (s *Server) knock(ctx context.Context, info *quic.ClientInfo, listener string) (_ context.Context, err error) {
	defer func() {
		if v := recover(); v != nil { // in a goroutine of QUIC's, which is that of all connections
			p := tunnel.Caught(v)
			s.logPanic(p)
			err = p
		}
	}()
	now := time.Now()
	a := &attempt{start: now, listener: listener, addr: addrPort(info.RemoteAddr)}
	if err := s.letIn(a); err != nil {
		s.tell(a, err)
		return nil, err
	}
	context.AfterFunc(ctx, func() {
		defer s.recovered()
		s.left(a, context.Cause(ctx))
	})
	return context.WithValue(ctx, attemptKey{}, a), nil
}

func (s *Server) letIn(a *attempt) error {
	c := s.Budget.Client(&s.clients, a.addr.Addr())
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.mayBegin(c); err != nil {
		c.Release()
		return err
	}
	a.client = c
	c.AddPending(1)
	s.gate.half++
	return nil
}

// mayBegin refuses one more handshake of c. The caller holds mu.
func (s *Server) mayBegin(c *tunnel.Client) error {
	switch {
	case s.closed || s.draining:
		return refuse(tunnel.Drain, "the gateway is stopping")
	case s.Budget.Pressure() == tunnel.Full:
		return refuse(tunnel.Overload, "memory is full")
	}
	return c.CheckPending(&s.Limits, s.gate.half, "unfinished handshakes")
}

// arrived is for a complete handshake, which has proven the address.
func (s *Server) arrived(a *attempt) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	l, c := &s.Limits, a.client
	s.gate.half--
	c.AddPending(-1)
	a.open = true
	defer c.AddOpen(1)
	if s.closed || s.draining {
		return refuse(tunnel.Drain, "the gateway is stopping")
	}
	if err := c.CheckOpen(l, "connections"); err != nil {
		return err
	}
	return c.CheckRate(l, time.Now(), "connections")
}

// left is for the end of the connection or of the attempt at one.
func (s *Server) left(a *attempt, err error) {
	s.mu.Lock()
	open, closed := a.open, s.closed
	if open {
		a.client.AddOpen(-1)
	} else {
		a.client.AddPending(-1)
		s.gate.half--
	}
	s.mu.Unlock()
	a.client.Release()
	switch {
	case open: // whoever serves it tells of it
	case closed:
		s.tell(a, refuse(tunnel.Drain, "closed in the middle of a handshake"))
	default:
		s.tell(a, handshakeError(err))
	}
}
