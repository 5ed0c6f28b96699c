package tunnel

import (
	"time"
)

// Limits bound what connections may cost before they have asked for anything, how much
// of the gateway one client may have, and how long tunnels may take. A zero field means
// its default, a negative one no limit.
//
// A Server, a Router, a Relay and servers of other protocols have Limits, and each heeds
// those that concern it. Where they may change, CurrentLimits returns those in force.
type Limits struct {
	FirstByteTimeout      time.Duration // from accept to the first byte; default 10 s
	HandshakeTimeout      time.Duration // from the first byte to a complete preamble, whatever comes; default 5 s
	MaxPendingConnections int           // pending connections in all; the oldest one of the client with most makes room; default 4,096

	// Fixed limits for each client, which is an IPv4 address or an IPv6 /64,
	// eight times as much for a /48. There are none by default: one client may
	// use what is free, and as that becomes scarce those who hold most are
	// refused first. See FairShare and Queue.
	MaxPendingPerClient     int // pending connections
	MaxConnectionsPerClient int // connections, and as many tunnels
	ConnectionRatePerClient int // new connections and new tunnels on shared ones a second, and as many at once

	// Fixed limits for each principal, which is the verified identity of a caller,
	// wherever it comes from. Its tunnels do not count for its address. There are none by
	// default, as for clients.
	MaxConnectionsPerPrincipal int // tunnels
	ConnectionRatePerPrincipal int // new tunnels a second, and as many at once

	// Of a Router.
	MaxTunnels          int           // standing or being dialed; by default as many as the Budget has descriptors for
	ConnectTimeout      time.Duration // for each address; default 3 s
	ConnectTotalTimeout time.Duration // for all addresses, with the lookup; default 10 s

	// Of a Relay, for tunnels whose Route has none, and of sessions of datagrams. A tunnel
	// keeps those that it began with.
	IdleTimeout       time.Duration // without a byte either way; default 1 h
	HalfClosedTimeout time.Duration // half-closed and silent; default 1 min
	UDPIdleTimeout    time.Duration // of a session, without a datagram either way; default 2 min
}

// Default Limits.
const (
	DefaultFirstByteTimeout      = 10 * time.Second
	DefaultHandshakeTimeout      = 5 * time.Second
	DefaultMaxPendingConnections = 4096
	DefaultConnectTimeout        = 3 * time.Second
	DefaultConnectTotalTimeout   = 10 * time.Second
	DefaultIdleTimeout           = time.Hour
	DefaultHalfClosedTimeout     = time.Minute

	// DefaultUDPIdleTimeout is how long a session may be without a datagram either way.
	// QUIC ends its own connections earlier, and NAT forgets UDP after two minutes at the
	// most (RFC 4787 section 4.3).
	DefaultUDPIdleTimeout = 2 * time.Minute
)

// PendingLimit returns how many pending connections there may be in all, and
// is false where there may be any number.
func (l *Limits) PendingLimit() (int, bool) {
	if l.MaxPendingConnections == 0 {
		return DefaultMaxPendingConnections, true
	}
	return l.MaxPendingConnections, l.MaxPendingConnections > 0
}

// PendingFull reports whether n pending connections, or what stands for them, are
// as many as there may be in all.
func (l *Limits) PendingFull(n int) bool {
	most, limited := l.PendingLimit()
	return limited && n >= most
}

// LimitsFunc returns the Limits in force, which are not changed in place: others take
// their place. It is called for each connection, at least, and must not block.
type LimitsFunc func() *Limits

// Or returns the Limits in force, and fixed where f is nil.
func (f LimitsFunc) Or(fixed *Limits) *Limits {
	if f != nil {
		return f()
	}
	return fixed
}
