package h3

import (
	"context"
	"crypto/x509"
	"net"
	"net/netip"
	"time"

	"github.com/quic-go/quic-go"

	"culvert.dev/tunnel"
)

// From these numbers on a client has to prove its address by a Retry before a
// handshake begins (RFC 9000 section 8.1.2). Until the address is proven, by this or
// by the handshake, it is sent no more than three times what came from there.
const (
	retryFrom       = 1000 // unfinished handshakes in all
	retryFromSource = 16   // unfinished handshakes of its source
)

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
	must = true // also after a panic
	s.mu.Lock()
	half := s.handshakes
	s.mu.Unlock()
	return half >= retryFrom || s.Budget.PendingOf(&s.clients, addrPort(addr).Addr()) >= retryFromSource
}

// An attempt is a handshake, and then a connection, as the accounts have it.
type attempt struct {
	start    time.Time
	listener string
	addr     netip.AddrPort
	client   *tunnel.Client
	open     bool // the handshake is complete

	// peer is the identity of the client. It is written in the handshake, and read when
	// that is complete.
	peer  tunnel.Peer
	shown *x509.Certificate // the server's own; nil where it is not known
}

type attemptKey struct{}

// Identified notes who the client of a handshake is, by the certificate that Server.TLS
// has verified. ctx is that of its tls.ClientHelloInfo. It is true once the handshake is
// complete: only then is it known that the client has the key.
func Identified(ctx context.Context, peer tunnel.Peer) {
	if a, ok := ctx.Value(attemptKey{}).(*attempt); ok {
		a.peer = peer
	}
}

// Shown notes which certificate the server has shown in a handshake, as Identified does.
func Shown(ctx context.Context, own *x509.Certificate) {
	if a, ok := ctx.Value(attemptKey{}).(*attempt); ok {
		a.shown = own
	}
}

// admitHandshake is the Transport's ConnContext: it admits or refuses the handshake
// of a client whose address may be forged. A client that is refused gets
// CONNECTION_REFUSED, in a packet that is smaller than its own.
func (s *Server) admitHandshake(ctx context.Context, info *quic.ClientInfo, listener string) (_ context.Context, err error) {
	defer func() {
		if v := recover(); v != nil { // in a goroutine of QUIC's, which is that of all connections
			p := tunnel.Caught(v)
			s.logPanic(p)
			err = p
		}
	}()
	now := time.Now()
	a := &attempt{start: now, listener: listener, addr: addrPort(info.RemoteAddr)}
	if err := s.reserve(a); err != nil {
		s.reportAttempt(a, err)
		return nil, err
	}
	context.AfterFunc(ctx, func() {
		defer s.recovered()
		s.release(a, context.Cause(ctx))
	})
	return context.WithValue(ctx, attemptKey{}, a), nil
}

func (s *Server) limits() *tunnel.Limits { return s.CurrentLimits.Or(&s.Limits) }

func (s *Server) reserve(a *attempt) error {
	c := s.Budget.Client(&s.clients, a.addr.Addr())
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.checkBegin(c); err != nil {
		c.Release()
		return err
	}
	a.client = c
	c.AddPending(1)
	s.handshakes++
	return nil
}

// checkBegin refuses one more handshake of c. The caller holds mu.
func (s *Server) checkBegin(c *tunnel.Client) error {
	switch {
	case s.closed || s.draining:
		return refuse(tunnel.Drain, "the gateway is stopping")
	case s.Budget.Pressure() == tunnel.Full:
		return refuse(tunnel.Overload, "memory is full")
	}
	return c.CheckPending(s.limits(), s.handshakes, "unfinished handshakes")
}

// admitConn admits or refuses a connection whose handshake is complete, which has
// proven the client's address.
func (s *Server) admitConn(a *attempt) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	l, c := s.limits(), a.client
	s.handshakes--
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

// release ends the accounts of a connection or of a handshake that has ended.
func (s *Server) release(a *attempt, err error) {
	s.mu.Lock()
	open, closed := a.open, s.closed
	if open {
		a.client.AddOpen(-1)
	} else {
		a.client.AddPending(-1)
		s.handshakes--
	}
	s.mu.Unlock()
	a.client.Release()
	switch {
	case open: // serverConn reports it
	case closed:
		s.reportAttempt(a, refuse(tunnel.Drain, "closed in the middle of a handshake"))
	default:
		s.reportAttempt(a, handshakeError(err))
	}
}
