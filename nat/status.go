package nat

import (
	"context"
	"log/slog"
	"net/netip"
	"reflect"
	"time"
)

// A Status is the state of a Manager. The admin port shows it as JSON.
type Status struct {
	Kind        Kind       `json:"nat"`
	Explanation string     `json:"explanation"`
	Route       *Route     `json:"route,omitempty"`
	Outside     netip.Addr `json:"outsideAddress,omitzero"` // that the router says it has
	Seen        netip.Addr `json:"seenAddress,omitzero"`    // that STUN servers see
	Unseen      string     `json:"stunProblem,omitempty"`   // why no STUN server has answered the last question
	Protocols   []string   `json:"protocols,omitempty"`     // that the router speaks
	Problem     string     `json:"problem,omitempty"`       // why the router cannot be asked
	Mappings    []Mapping  `json:"mappings"`
}

// States of a Mapping.
const (
	Pending  = "pending"  // the router does not grant it, or not yet
	Mapped   = "mapped"   // the router has granted it, and nobody has connected from outside
	Verified = "verified" // somebody outside has connected, and this gateway has answered
	Direct   = "direct"   // there is no NAT, and nobody has connected from outside
)

// A Mapping is a port in a Status.
type Mapping struct {
	Listener string         `json:"listener"`
	Network  string         `json:"network"`
	Port     uint16         `json:"port"`
	State    string         `json:"state"`
	External netip.AddrPort `json:"external,omitzero"`
	Protocol string         `json:"protocol,omitempty"`
	Expires  time.Time      `json:"expires,omitzero"` // zero for a permanent one
	Error    string         `json:"error,omitempty"`  // of the last request, or of the last verification
}

// Public returns the address at which the port is reached from outside, if that is verified.
func (p *Mapping) Public() (netip.AddrPort, bool) { return p.External, p.State == Verified }

// Status returns the state as of the last step. It may be called at any time.
func (m *Manager) Status() Status {
	if s := m.status.Load(); s != nil {
		return *s
	}
	return Status{Kind: Unknown, Explanation: "the router has not been asked yet", Mappings: []Mapping{}}
}

// report stores the Status, and calls OnChange if it differs from the one before.
func (m *Manager) report() {
	kind, why := m.assess()
	s := Status{Kind: kind, Explanation: why, Outside: m.outside, Seen: m.seen, Unseen: m.unseen, Problem: m.problem, Mappings: []Mapping{}}
	if m.route.Router.IsValid() {
		route := m.route
		s.Route = &route
	}
	for _, c := range m.clients {
		s.Protocols = append(s.Protocols, c.Protocol())
	}
	if s.Problem == "" && s.Route != nil && len(s.Protocols) == 0 && kind != NoNAT {
		s.Problem = "the router answers by none of PCP, NAT-PMP and UPnP: enable one of them on the router, or forward the ports by hand"
	}
	for _, p := range m.mappings {
		one := Mapping{Listener: p.Name, Network: p.Network, Port: p.Internal, State: Pending, External: m.public(p)}
		if p.client != nil {
			one.State, one.Protocol, one.External, one.Expires = Mapped, p.client.Protocol(), p.external, p.expires
		} else if one.External.IsValid() {
			one.State = Direct
		}
		if p.verified {
			one.State = Verified
		}
		switch {
		case p.err != nil:
			one.Error = p.err.Error()
		case p.verifyErr != nil:
			one.Error = p.verifyErr.Error()
		}
		s.Mappings = append(s.Mappings, one)
	}
	was := m.status.Swap(&s)
	if (kind == CGNAT || kind == DoubleNAT) && (was == nil || was.Kind != kind) {
		m.Log.Warn("another NAT is between the router and the internet", "nat", kind, "explanation", why)
	}
	if s.Problem != "" && len(m.mappings) > 0 && (was == nil || was.Problem != s.Problem) {
		m.Log.Warn("no port can be mapped; trying again", "error", s.Problem)
	}
	if m.OnChange != nil && (was == nil || !reflect.DeepEqual(*was, s)) {
		m.OnChange(s)
	}
}

// Probe asks the router and the STUN servers of s once, and maps nothing. Run must not be called on
// the same Manager.
func (m *Manager) Probe(ctx context.Context, s Settings) (*Status, error) {
	if m.Log == nil {
		m.Log = slog.New(slog.DiscardHandler)
	}
	find := m.FindRoute
	if find == nil {
		find = DefaultRoute
	}
	route, err := find(ctx, s.Router)
	if err != nil {
		return nil, err
	}
	m.route = route
	m.seen, m.unseen = m.askSTUN(ctx, s.STUN)
	m.search(ctx, &s)
	m.poll(ctx)
	m.report()
	status := m.Status()
	return &status, nil
}
