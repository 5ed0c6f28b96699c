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

// A gate counts connections and unfinished handshakes, and holds sources to
// their share. The Server's mu guards it.
type gate struct {
	half    int
	sources map[netip.Prefix]*source
}

// A source is an IPv4 address or an IPv6 /64.
type source struct {
	half, open int
	tokens     float64 // of the bucket that meters new connections
	filled     time.Time
}

func prefixOf(addr netip.Addr) netip.Prefix {
	bits := 32
	if addr.Is6() {
		bits = 64
	}
	prefix, _ := addr.Prefix(bits)
	return prefix
}

// addrPort returns the address of a UDP peer.
func addrPort(addr net.Addr) netip.AddrPort {
	u, ok := addr.(*net.UDPAddr)
	if !ok {
		return netip.AddrPort{}
	}
	ap := u.AddrPort()
	return netip.AddrPortFrom(ap.Addr().Unmap(), ap.Port())
}

// of finds or makes the account of a source.
func (g *gate) of(p netip.Prefix, rate int, now time.Time) *source {
	if src := g.sources[p]; src != nil {
		return src
	}
	if g.sources == nil {
		g.sources = make(map[netip.Prefix]*source)
	}
	if n := len(g.sources); n >= 1024 && n&(n-1) == 0 { // at each doubling
		for p, src := range g.sources {
			if src.open+src.half == 0 && now.Sub(src.filled) > time.Second {
				delete(g.sources, p)
			}
		}
	}
	src := &source{tokens: float64(rate), filled: now}
	g.sources[p] = src
	return src
}

// spend takes a token for one new connection.
func (src *source) spend(rate int, now time.Time) bool {
	if rate < 0 {
		return true
	}
	src.tokens = min(src.tokens+now.Sub(src.filled).Seconds()*float64(rate), float64(rate))
	src.filled = now
	if src.tokens < 1 {
		return false
	}
	src.tokens--
	return true
}

// atMost returns a limit: what a tunnel.Limits leaves at zero is its default,
// and a negative one is none.
func atMost(limit, otherwise int) int {
	if limit == 0 {
		return otherwise
	}
	return limit
}

func over(n, limit int) bool { return limit >= 0 && n >= limit }

// mustRetry is the Transport's VerifySourceAddress.
func (s *Server) mustRetry(addr net.Addr) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	src := s.gate.sources[prefixOf(addrPort(addr).Addr())]
	return s.gate.half >= retryFrom || src != nil && src.half >= retryFromSource
}

// An attempt is a handshake, and then a connection, with its place in the gate.
type attempt struct {
	start    time.Time
	listener string
	addr     netip.AddrPort
	source   *source
	open     bool // the handshake is complete
}

type attemptKey struct{}

// knock is the Transport's ConnContext: a client at an address that may not be
// its own wants to begin a handshake. What it refuses hears CONNECTION_REFUSED,
// in a packet that is smaller than its own.
func (s *Server) knock(ctx context.Context, info *quic.ClientInfo, listener string) (context.Context, error) {
	now := time.Now()
	a := &attempt{start: now, listener: listener, addr: addrPort(info.RemoteAddr)}
	if err := s.letIn(a); err != nil {
		s.tell(a, err)
		return nil, err
	}
	context.AfterFunc(ctx, func() { s.left(a, context.Cause(ctx)) })
	return context.WithValue(ctx, attemptKey{}, a), nil
}

func (s *Server) letIn(a *attempt) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	l := &s.Limits
	prefix := prefixOf(a.addr.Addr())
	src := s.gate.of(prefix, atMost(l.NewPerSource, tunnel.DefaultNewPerSource), a.start)
	switch {
	case s.closed || s.draining:
		return refuse(tunnel.Drain, "the gateway is stopping")
	case s.Budget.Pressure() == tunnel.Full:
		return refuse(tunnel.Overload, "memory is full")
	case over(s.gate.half, atMost(l.HalfOpen, tunnel.DefaultHalfOpen)):
		return refuse(tunnel.Overload, "%d handshakes are unfinished, the limit", s.gate.half)
	case over(src.half, atMost(l.HalfOpenPerSource, tunnel.DefaultHalfOpenPerSource)):
		return refuse(tunnel.Overload, "%s has %d unfinished handshakes, the limit for one source", prefix, src.half)
	}
	a.source = src
	src.half++
	s.gate.half++
	return nil
}

// arrived is for a complete handshake, which has proven the address.
func (s *Server) arrived(a *attempt) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	l, src := &s.Limits, a.source
	s.gate.half--
	src.half--
	src.open++
	a.open = true
	switch {
	case s.closed || s.draining:
		return refuse(tunnel.Drain, "the gateway is stopping")
	case over(src.open-1, atMost(l.OpenPerSource, tunnel.DefaultOpenPerSource)):
		return refuse(tunnel.Overload, "%s has %d connections open, the limit for one source", prefixOf(a.addr.Addr()), src.open-1)
	case !src.spend(atMost(l.NewPerSource, tunnel.DefaultNewPerSource), time.Now()):
		return refuse(tunnel.Overload, "%s opens connections faster than one source may", prefixOf(a.addr.Addr()))
	}
	return nil
}

// left is for the end of the connection or of the attempt at one.
func (s *Server) left(a *attempt, err error) {
	s.mu.Lock()
	open, closed := a.open, s.closed
	if open {
		a.source.open--
	} else {
		a.source.half--
		s.gate.half--
	}
	s.mu.Unlock()
	switch {
	case open: // whoever serves it tells of it
	case closed:
		s.tell(a, refuse(tunnel.Drain, "closed in the middle of a handshake"))
	default:
		s.tell(a, handshakeError(err))
	}
}
