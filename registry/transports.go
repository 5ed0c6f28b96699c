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
	gateways []madeTransport // of those without a ProxyTransport, zero
}

// serviceTransports are those of one service alone.
type serviceTransports struct {
	own    madeTransport        // to its endpoints that are not behind a network's gateways
	remote []*networkTransports // to those that are, where it has layers
}

// noTransport is of services that need none.
var noTransport madeTransport

// transport returns the transport to e's endpoints that are not behind a network's
// gateways.
func (e *serviceEntry) transport() *madeTransport {
	if e.transports == nil {
		return &noTransport
	}
	return &e.transports.own
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
	if len(e.Via) == 0 && !e.hasLayers() {
		return
	}
	e.transports = &serviceTransports{own: b.newMadeTransport(e.Service, nil, nil)}
	if len(e.Via) > 0 || len(e.Endpoints) == 0 {
		return
	}
	networks := []int32{e.home}
	if len(e.groups) > 0 {
		networks = nil
		for _, g := range e.groups {
			networks = append(networks, g.network)
		}
	}
	for _, n := range networks {
		if !b.direct(n, b.here) {
			e.transports.remote = append(e.transports.remote, b.transportsInto(e.Service, n))
		}
	}
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
		if g := &network.Gateways[i]; g.ProxyTransport() != "" {
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

// transportsTo returns the transports of e into a network, nil for none.
func (t *Table) transportsTo(e *serviceEntry, network int32) *networkTransports {
	if !e.hasLayers() {
		return t.networks[network].transports
	}
	if e.transports == nil {
		return nil
	}
	for _, r := range e.transports.remote {
		if r.network == network {
			return r
		}
	}
	return nil
}
