package tunnel

import (
	"iter"
	"maps"
	"net/netip"
	"time"
)

// Sources are the accounts of what each source has: an IPv4 address, or an IPv6
// /64. They lock nothing: whoever uses them does. The zero value is ready.
type Sources struct{ accounts map[netip.Prefix]*Source }

// A Source is what one address has open. Who opens something asks whether it
// may and counts it.
type Source struct {
	Open     int // connections, sessions and tunnels
	HalfOpen int // of which nothing is known yet

	prefix netip.Prefix
	tokens float64 // of the bucket that meters new ones
	filled time.Time
}

// Of finds or makes the account of addr. An invalid one stands for all sources
// without an address.
func (m *Sources) Of(addr netip.Addr, l *Limits, now time.Time) *Source {
	prefix := prefixOf(addr)
	if src := m.accounts[prefix]; src != nil {
		return src
	}
	if m.accounts == nil {
		m.accounts = make(map[netip.Prefix]*Source)
	}
	if n := len(m.accounts); n >= 1024 && n&(n-1) == 0 { // at each doubling
		m.Forget(now)
	}
	src := &Source{prefix: prefix, tokens: float64(l.newPerSource()), filled: now}
	m.accounts[prefix] = src
	return src
}

// Find returns the account of addr, nil where there is none.
func (m *Sources) Find(addr netip.Addr) *Source { return m.accounts[prefixOf(addr)] }

// All iterates over the accounts, in no order.
func (m *Sources) All() iter.Seq[*Source] { return maps.Values(m.accounts) }

// Forget drops the accounts that say nothing.
func (m *Sources) Forget(now time.Time) {
	for p, src := range m.accounts {
		if src.Open+src.HalfOpen == 0 && now.Sub(src.filled) > time.Second {
			delete(m.accounts, p)
		}
	}
}

func prefixOf(addr netip.Addr) netip.Prefix {
	bits := 32
	if addr.Is6() {
		bits = 64
	}
	prefix, _ := addr.Prefix(bits)
	return prefix
}

func (s *Source) String() string { return s.prefix.String() }

// MayOpen refuses one more of what, "connections", where s has as many open as
// one source may.
func (s *Source) MayOpen(l *Limits, what string) error {
	if capped(s.Open, l.OpenPerSource, DefaultOpenPerSource) {
		return Refusef(Overload, "%s has %d %s open, the limit for one source", s.prefix, s.Open, what)
	}
	return nil
}

// MayBegin is MayOpen for what nothing is known of yet, "unfinished preambles".
func (s *Source) MayBegin(l *Limits, what string) error {
	if capped(s.HalfOpen, l.HalfOpenPerSource, DefaultHalfOpenPerSource) {
		return Refusef(Overload, "%s has %d %s, the limit for one source", s.prefix, s.HalfOpen, what)
	}
	return nil
}

// Spend takes a token for one new of what, and refuses it where s opens them
// faster than one source may.
func (s *Source) Spend(l *Limits, now time.Time, what string) error {
	rate := l.newPerSource()
	if rate < 0 {
		return nil
	}
	s.tokens = min(s.tokens+now.Sub(s.filled).Seconds()*float64(rate), float64(rate))
	s.filled = now
	if s.tokens < 1 {
		return Refusef(Overload, "%s opens %s faster than one source may", s.prefix, what)
	}
	s.tokens--
	return nil
}
