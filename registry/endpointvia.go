package registry

import (
	"net/netip"
	"slices"
	"strings"

	"culvert.dev/tunnel"
)

// behindWord is in the key of an endpoint that has a Via, between the endpoint and the
// gateways on the way there, and in that of a service that is asked of a gateway. No
// HOST:PORT has it.
const behindWord = tunnel.HealthKeyBehind

// endpointTransports are those to one endpoint that has a Via.
type endpointTransports struct {
	own         madeTransport
	passthrough madeTransport // for clients that speak TLS with the service themselves
	check       madeTransport // without the layers of the service; zero where it is not checked
	healthKey   string        // of the endpoint; "" where it has no port
}

// CheckedBehind returns what a check of e at a port dials with and what it reports the
// result under, where e has a Via. It is false where e has none, or is not to be checked
// over it: a transport could not be made, or the check would go in the clear to where
// plaintext may not.
func (e *Endpoint) CheckedBehind(port uint16) (t tunnel.Transport, healthKey string, ok bool) {
	if e.transports == nil || e.transports.check.Transport == nil {
		return nil, "", false
	}
	return e.transports.check.Transport, e.healthKey(port), true
}

// UncheckedHop returns the gateway before ep, one of the endpoints of s, over which the
// check of s is not made: it would go in the clear to where plaintext may not. It returns
// nil where there is none.
func (s *Service) UncheckedHop(ep *Endpoint) *WeakHop {
	inTLS := s.TLS != nil && s.Check.Port == 0
	if s.Check.Kind != "http" || inTLS || s.Insecure {
		return nil
	}
	return InsecureVia(ep.Hops())
}

// transport returns the transport for requests of f.
func (t *endpointTransports) transport(f *match) *madeTransport {
	if f.passthrough {
		return &t.passthrough
	}
	return &t.own
}

// Hops returns the gateways of e's Via.
func (e *Endpoint) Hops() []Hop {
	if e.Via == nil {
		return nil
	}
	return *e.Via
}

// isBehind reports whether e is reached over the gateways of its own Via, or by the
// sessions of a group.
func (e *Endpoint) isBehind() bool { return e.Group != "" || len(e.Hops()) > 0 }

// healthKey returns what the failures of e, which is behind others, are counted under. There may
// be another host with its address in another network, so it names the gateways too.
func (e *Endpoint) healthKey(port uint16) string {
	if e.transports != nil && e.transports.healthKey != "" {
		return e.transports.healthKey
	}
	at := *e
	at.Port = port
	if e.Group != "" {
		return at.String() + behindWord + "reverse sessions"
	}
	return at.String() + behindWord + hopsText(e.Hops())
}

// hopsText returns hops as a key has them.
func hopsText(hops []Hop) string {
	way := make([]string, len(hops))
	for i, hop := range hops {
		way[i] = hop.Proto + " " + strings.Join(hop.Addresses, " or ")
	}
	return strings.Join(way, ", ")
}

// gateway returns the key of the gateway that k is behind, where k is of a service that a
// gateway of a network leads to. The hops of a Via have their protocols.
func (k healthKey) gateway() (healthKey, bool) {
	_, hops, ok := strings.Cut(k.hop, behindWord)
	if !ok || strings.Contains(hops, " ") {
		return healthKey{}, false
	}
	return keyOf(&tunnel.Endpoint{HealthKey: hops}), true
}

// isBehind reports whether a HealthKey is that of an endpoint with a Via, and not that of
// a gateway.
func isBehind(healthKey string) bool { return strings.Contains(healthKey, behindWord) }

// target returns the HOST:PORT of k: of the endpoint or of the next hop.
func (k healthKey) target() string {
	target, _, _ := strings.Cut(k.String(), behindWord)
	return target
}

// hostBehind returns the host of an endpoint with a Via, as target has it.
func (e *Endpoint) hostBehind() string {
	switch {
	case e.Group != "":
		return e.Group
	case e.Addr.IsValid():
		return e.Addr.String()
	}
	return e.Host
}

// HasEndpointVia reports whether one of the endpoints of s has a Via that counts, or a Group.
func (s *Service) HasEndpointVia() bool {
	if len(s.Via) > 0 {
		return false
	}
	for i := range s.Endpoints {
		if s.Endpoints[i].isBehind() {
			return true
		}
	}
	return false
}

// makeEndpointTransports makes the transports to each endpoint that has a Via.
func (b *builder) makeEndpointTransports() {
	for i := range b.services {
		b.makeEndpointTransportsOf(&b.services[i])
	}
	if b.listeners != nil {
		for i := range b.listeners.backends {
			b.makeEndpointTransportsOf(&b.listeners.backends[i])
		}
	}
}

func (b *builder) makeEndpointTransportsOf(e *serviceEntry) {
	if e.hasVias = e.HasEndpointVia(); !e.hasVias {
		return
	}
	s := *e.Service // what a source has said stays as it is
	s.Endpoints = slices.Clone(s.Endpoints)
	passthrough := s
	passthrough.TLS = nil
	for i := range s.Endpoints {
		ep := &s.Endpoints[i]
		if !ep.isBehind() {
			continue
		}
		w := &endpointTransports{}
		if ep.Port != 0 {
			w.healthKey = ep.healthKey(ep.Port)
		}
		if b.newTransport != nil {
			w.own = b.newMadeTransport(&s, ep, nil)
			w.passthrough = w.own
			if s.TLS != nil {
				w.passthrough = b.newMadeTransport(&passthrough, ep, nil)
			}
			if s.Check.Kind != "" && s.UncheckedHop(ep) == nil {
				w.check = b.newMadeTransport(&Service{}, ep, nil)
			}
		}
		ep.transports = w
	}
	e.Service = &s
}

// joinEndpoints sets the endpoints that this gateway chooses among for e: those with a
// Via, and beside them the ones of its own network, or else of networks without gateways.
func (b *builder) joinEndpoints(e *serviceEntry) {
	e.home = b.here
	own := slices.ContainsFunc(e.Endpoints, func(ep Endpoint) bool { return !ep.isBehind() && b.network(&ep) == b.here })
	for i := range e.Endpoints {
		ep := &e.Endpoints[i]
		e.hasPortEndpoints = e.hasPortEndpoints || ep.ServicePort != 0
		if in := b.network(ep); in == b.here || !own && b.direct(in, b.here) {
			e.joined = append(e.joined, *ep)
		}
	}
}

// endpointBehind returns the endpoint c, which has a Via, as its last gateway is asked
// for it. It is a name or an address there, so nothing is looked up.
func (x *resolution) endpointBehind(c *Endpoint, port uint16) (tunnel.Endpoint, error) {
	t := c.transports.transport(&x.match)
	if err := t.refusal(x.entry); err != nil {
		return tunnel.Endpoint{}, err
	}
	if t.Transport == nil {
		return tunnel.Endpoint{}, tunnel.Refusef(tunnel.Unsupported, "registry: endpoint %s of service %q of %s is behind another gateway, and there is no way there", c, x.entry.Name, orUnknown(x.entry.Origin))
	}
	ep := x.target(c, port, t.Transport)
	ep.HealthKey = c.healthKey(port)
	if x.payload == encrypted {
		return ep, nil
	}
	if c.Group != "" { // its sessions come and go
		if t.Info().Security < tunnel.Mutual {
			x.restrict(&ep, false, &insecureError{service: x.entry.Name, group: c.Group})
		}
		return ep, nil
	}
	hops := c.Hops()
	if hop := weakVia(hops); hop != nil {
		x.restrict(&ep, hops[len(hops)-1].Insecure, &insecureError{service: x.entry.Name, hop: hop, endpoint: c.String()})
	}
	return ep, nil
}

// behindHops reports whether what f asks for is reached over next hops, or some of it is,
// so that others than this gateway must ask this gateway for it.
func (f *match) behindHops() bool {
	switch {
	case len(f.entry.Via) > 0:
		return true
	case f.endpoints != nil:
		return f.endpoints[0].isBehind()
	}
	return f.entry.hasVias
}

// loadKey returns what the tunnels of e are counted under, false where that depends on
// the request.
func (e *Endpoint) loadKey() (healthKey, bool) {
	switch {
	case e.transports != nil:
		return healthKey{hop: e.transports.healthKey}, e.transports.healthKey != ""
	case e.Addr.IsValid():
		return healthKey{addr: netip.AddrPortFrom(e.Addr.Unmap(), e.Port)}, true
	}
	return healthKey{}, false
}
