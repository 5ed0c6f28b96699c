package peer

import (
	"maps"
	"slices"
	"time"
)

// A Status is the state of a peer.
type Status struct {
	Name       string    `json:"name"`
	Connected  bool      `json:"connected"`         // its catalog is up to date
	Since      time.Time `json:"since"`             // of Connected, or of its end
	Gateway    string    `json:"gateway,omitempty"` // by which the catalog comes: its transport and address, or the address it has come from
	Dialed     bool      `json:"dialed,omitempty"`  // we have opened the stream
	Streams    int       `json:"streams"`           // with gateways of the peer
	Generation uint64    `json:"generation,omitempty"`
	Services   int       `json:"services"`              // that it offers and that are accepted
	Offered    int       `json:"offered"`               // services that we offer to it
	Contact    time.Time `json:"lastContact,omitzero"`  // when the last message has come
	Problem    string    `json:"problem,omitempty"`     // why it is not connected
	LeftOut    []string  `json:"leftOut,omitempty"`     // of what it offers, and why; 10 at most
	MoreLeft   int       `json:"moreLeftOut,omitempty"` // that are not listed
	Zones      []string  `json:"zones"`                 // names that it may offer
	Bundle     string    `json:"bundleProblem,omitempty"`
	SentBytes  uint64    `json:"sentBytes"`
}

// maxListed is how many services that were left out are listed.
const maxListed = 10

// Status returns the state of each peer with which catalogs are exchanged.
func (p *Peers) Status() []Status {
	all, _ := p.current()
	out := make([]Status, 0, len(all))
	for _, one := range all {
		if one.Network == "" {
			out = append(out, one.status())
		}
	}
	return out
}

// Catalog returns the state of the catalog that is only read, and nil if there is none.
func (p *Peers) Catalog() *Status {
	all, _ := p.current()
	for _, one := range all {
		if one.Network != "" {
			s := one.status()
			return &s
		}
	}
	return nil
}

func (p *peer) status() Status {
	p.mu.Lock()
	defer p.mu.Unlock()
	s := Status{Name: p.Name, Connected: p.fresh, Since: p.since, Contact: p.contact, Bundle: p.problem, SentBytes: p.bytes, Zones: []string{}}
	for _, zone := range p.Zones {
		s.Zones = append(s.Zones, zone.String())
	}
	for _, o := range p.sessions {
		if o.conn != nil {
			s.Streams++
		}
	}
	if p.active != nil {
		s.Gateway, s.Dialed = p.active.by, p.active.dialed
	}
	if !p.fresh {
		s.Problem = "no stream has been opened yet"
		if p.err != nil {
			s.Problem = p.err.Error()
		}
	}
	if p.got != nil {
		s.Generation, s.Services = p.got.generation, len(p.got.services)
		for _, key := range slices.Sorted(maps.Keys(p.got.leftOut)) {
			if len(s.LeftOut) == maxListed {
				s.MoreLeft = len(p.got.leftOut) - maxListed
				break
			}
			s.LeftOut = append(s.LeftOut, p.got.leftOut[key])
		}
	}
	for _, c := range p.offers {
		_, n := c.state()
		s.Offered = max(s.Offered, n)
	}
	return s
}
