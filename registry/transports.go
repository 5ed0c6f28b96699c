package registry

import (
	"fmt"

	"culvert.dev/tunnel"
)

// A madeTransport is what Registry.NewTransport has returned, or failed with. One
// without a Transport and an error stands for the Router's Dialer.
type madeTransport struct {
	tunnel.Transport
	security tunnel.Security // of the Transport
	err      error
}

// refusal returns an error where the transport could not be made.
func (m *madeTransport) refusal(e *serviceEntry) error {
	if m == nil || m.err == nil {
		return nil
	}
	return &tunnel.Error{Reason: tunnel.Internal, Err: fmt.Errorf("registry: the way to service %q of %s: %w", e.Name, orUnknown(e.Origin), m.err)}
}

// networkTransports lead into one network from outside: through its Via, or else to
// each of its gateways, in their order.
type networkTransports struct {
	network  int32
	via      madeTransport
	gateways []madeTransport // of those without Carriers, zero
}

// serviceTransports are those of one service alone.
type serviceTransports struct {
	own    madeTransport        // to its endpoints that are not behind a network's gateways
	remote []*networkTransports // to those that are, where it has layers

	// passthrough are those for clients that speak TLS with the service themselves,
	// where own speaks TLS, too; nil where these need none.
	passthrough *serviceTransports
}

// noTransport is of services that need none.
var noTransport madeTransport

// transport returns the transport to the endpoints of f's service that are not behind a
// network's gateways.
func (f *match) transport() *madeTransport {
	t := f.transports()
	if t == nil {
		return &noTransport
	}
	return &t.own
}

// transports returns those of f's service alone, nil for none.
func (f *match) transports() *serviceTransports {
	if f.passthrough && f.entry.TLS != nil && f.entry.transports != nil {
		return f.entry.transports.passthrough
	}
	return f.entry.transports
}

// hasLayers reports whether f's service asks for more on a connection than the client's
// bytes.
func (f *match) hasLayers() bool {
	e := f.entry
	return e.TLS != nil && !f.passthrough || e.ProxyProtocol != 0 || e.StartTLS != ""
}

// hasLayers reports whether s asks for more on a connection than the client's bytes.
func (s *Service) hasLayers() bool { return s.TLS != nil || s.ProxyProtocol != 0 || s.StartTLS != "" }

// makeTransports calls newTransport for everything in the table that has to be
// reached otherwise than by the Router's Dialer. Services without layers share the
// transports into a network.
func (b *builder) makeTransports() {
	if b.newTransport == nil {
		return
	}
	plain := &Service{}
	for i := range b.networks {
		if n := int32(i); n != b.here && b.networks[i].hasGateways() {
			b.networks[i].transports = b.transportsInto(plain, n)
		}
	}
	for i := range b.services {
		b.makeOwnTransports(&b.services[i])
	}
	if b.listeners != nil {
		for i := range b.listeners.backends {
			b.makeOwnTransports(&b.listeners.backends[i])
		}
	}
}

// makeOwnTransports makes the transports that e shares with no other service.
func (b *builder) makeOwnTransports(e *serviceEntry) {
	e.transports = b.transportsOf(e, e.Service)
	if e.TLS != nil {
		passthrough := *e.Service
		passthrough.TLS = nil
		e.transports.passthrough = b.transportsOf(e, &passthrough)
	}
}

// transportsOf returns the transports of s, which is e's service or differs from it in its
// layers; nil where it needs none of its own.
func (b *builder) transportsOf(e *serviceEntry, s *Service) *serviceTransports {
	if len(s.Via) == 0 && !s.hasLayers() {
		return nil
	}
	t := &serviceTransports{own: b.newMadeTransport(s, nil, nil)}
	if len(s.Via) > 0 || len(s.Endpoints) == 0 || !s.hasLayers() {
		return t
	}
	networks := []int32{e.home}
	if e.spread != nil {
		networks = e.spread.beyond
	} else if len(e.groups) > 0 {
		networks = nil
		for _, g := range e.groups {
			networks = append(networks, g.network)
		}
	}
	for _, n := range networks {
		if !b.direct(n, b.here) {
			t.remote = append(t.remote, b.transportsInto(s, n))
		}
	}
	return t
}

// transportsInto makes the transports of s into network n.
func (b *builder) transportsInto(s *Service, n int32) *networkTransports {
	network := &b.networks[n]
	t := &networkTransports{network: n}
	if len(network.Via) > 0 {
		behind := *s
		behind.Via, behind.StartTLS = network.Via, "" // the gateway there does it
		t.via = b.newMadeTransport(&behind, nil, nil)
		return t
	}
	here := ""
	if b.here >= 0 {
		here = b.networks[b.here].Name
	}
	t.gateways = make([]madeTransport, len(network.Gateways))
	for i := range network.Gateways {
		if g := &network.Gateways[i]; g.HasCarriers() {
			at := g.AddressFrom(network.Name, here)
			t.gateways[i] = b.newMadeTransport(s, &at, g)
		}
	}
	return t
}

func (b *builder) newMadeTransport(s *Service, ep *Endpoint, g *Gateway) (m madeTransport) {
	if m.Transport, m.err = b.newTransport(s, ep, g); m.err == nil && m.Transport != nil {
		m.security = m.Info().Security
	}
	return m
}

// transportsTo returns the transports of f's service into a network, nil for none.
func (t *Table) transportsTo(f *match, network int32) *networkTransports {
	if !f.hasLayers() {
		return t.networks[network].transports
	}
	own := f.transports()
	if own == nil {
		return nil
	}
	for _, r := range own.remote {
		if r.network == network {
			return r
		}
	}
	return nil
}
