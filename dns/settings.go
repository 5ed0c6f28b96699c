package dns

import (
	"cmp"
	"net/netip"
	"time"
)

// Settings are the fields of a Server that may change while it serves.
type Settings struct {
	Zones            []string
	Claimed          []string
	TTL              time.Duration
	NegativeTTL      time.Duration
	Forward          *Forwarder
	RecursionClients []netip.Prefix
	RateLimit        int
	RateLimitExempt  []netip.Prefix
}

// Use puts c in the place of the Server's fields of the same names, from the next
// message on. Those that wait for an answer keep what held as they came, so that the
// earlier Forwarder is not to be closed for two seconds more.
func (s *Server) Use(c *Settings) {
	s.init()
	s.rules.Store(newRules(c, s.rules.Load()))
}

// rules are Settings as the hot path uses them. They are not changed.
type rules struct {
	zones, claimed   zoneSet
	ttl, negativeTTL uint32 // seconds
	rate             *rateLimit
	forward          *Forwarder
	recursionClients []netip.Prefix
	exempt           []netip.Prefix // from rate
}

// newRules makes the rules of c. Those of before may be nil; the responses that they
// have counted go on to count where the limit is the same.
func newRules(c *Settings, before *rules) *rules {
	r := &rules{
		zones: newZoneSet(c.Zones), claimed: newZoneSet(c.Claimed),
		ttl: wireTTL(cmp.Or(c.TTL, defaultTTL), maxTTL), negativeTTL: wireTTL(cmp.Or(c.NegativeTTL, defaultTTL), maxNoTTL),
		forward: c.Forward, recursionClients: c.RecursionClients, exempt: c.RateLimitExempt,
	}
	if c.RateLimit < 0 {
		return r
	}
	limit := cmp.Or(c.RateLimit, defaultRate)
	if before != nil && before.rate != nil && before.rate.limit == uint32(limit) {
		r.rate = before.rate
	} else {
		r.rate = newRateLimit(limit)
	}
	return r
}
