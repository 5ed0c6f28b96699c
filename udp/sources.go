package udp

import (
	"net/netip"
	"time"

	"culvert.dev/tunnel"
)

// A source is what one address has open: an IPv4 address or an IPv6 /64.
type source struct {
	prefix   netip.Prefix
	open     int
	halfOpen int     // of them, not proven
	tokens   float64 // of the bucket that meters new sessions
	filled   time.Time
}

// sources are the accounts of all. They are guarded by the Server's mu.
type sources map[netip.Prefix]*source

// of finds or makes the account of addr.
func (m sources) of(addr netip.Addr, l *tunnel.Limits, now time.Time) *source {
	bits := 32
	if addr.Is6() {
		bits = 64
	}
	prefix, _ := addr.Prefix(bits)
	if src := m[prefix]; src != nil {
		return src
	}
	if n := len(m); n >= 1024 && n&(n-1) == 0 { // at each doubling
		m.forget(now)
	}
	src := &source{prefix: prefix, tokens: float64(limit(l.NewPerSource, tunnel.DefaultNewPerSource)), filled: now}
	m[prefix] = src
	return src
}

// forget drops the accounts that say nothing.
func (m sources) forget(now time.Time) {
	for p, src := range m {
		if src.open == 0 && now.Sub(src.filled) > time.Second {
			delete(m, p)
		}
	}
}

// admit says which limit one more session of src would break.
func (src *source) admit(l *tunnel.Limits, now time.Time) error {
	rate := limit(l.NewPerSource, tunnel.DefaultNewPerSource)
	src.tokens = min(src.tokens+now.Sub(src.filled).Seconds()*float64(rate), float64(rate))
	src.filled = now
	switch {
	case capped(src.open, limit(l.OpenPerSource, tunnel.DefaultOpenPerSource)):
		return tunnel.Refusef(tunnel.Overload, "%s has %d sessions open, the limit for one source", src.prefix, src.open)
	case capped(src.halfOpen, limit(l.HalfOpenPerSource, tunnel.DefaultHalfOpenPerSource)):
		return tunnel.Refusef(tunnel.Overload, "%s has %d sessions of which nothing is proven, the limit for one source", src.prefix, src.halfOpen)
	case rate >= 0 && src.tokens < 1:
		return tunnel.Refusef(tunnel.Overload, "%s opens sessions faster than one source may", src.prefix)
	}
	src.tokens--
	return nil
}

// limit is n, or otherwise where n is zero.
func limit[T int | time.Duration](n, otherwise T) T {
	if n == 0 {
		return otherwise
	}
	return n
}

// capped reports whether n has reached limit. A negative one is never reached.
func capped(n, limit int) bool { return limit >= 0 && n >= limit }
