package registry

import (
	"net/netip"
	"slices"
	"strconv"

	"culvert.dev/policy"
	"culvert.dev/tunnel"
)

// A Location says how a service is reached from one network: at endpoints that can
// be dialed from there, or else through gateways.
type Location struct {
	Service      *Service      // of the table; must not be changed
	Pattern      string        // that matched what was asked
	Port         uint16        // of the request, or the one that the service implies; 0 where it is not known
	VIPs         [2]netip.Addr // of IPv4 and IPv6, that the service has to itself; zero for none
	SetAddresses []netip.Addr  // of SetAddress, for the name and the network asked from; must not be changed
	Single       bool          // the name is of one endpoint, and not of the service
	GatewayLabel string        // of the one gateway that the name asks for, as in GatewayName; "" for all

	Endpoints []Endpoint   // that are dialed directly; must not be changed
	Gateways  []GatewayHop // if there are no Endpoints: the nearest network's first

	policies  *policy.Set    // of the service
	remote    *networkState  // the nearest of the networks it is in; nil where Endpoints is not empty
	remoteVia *madeTransport // from here, by remote's Via; nil for none
}

// A GatewayHop is a gateway on the way to a service.
type GatewayHop struct {
	Gateway *Gateway
	Network string   // that it leads into
	Address Endpoint // of the gateway, as the asking network knows it
	Rank    int      // 0 for the nearest network's

	insecure  bool           // plaintext may go into the network by a weak transport
	via       bool           // the network has a Via, so that the gateway is asked by SNI only
	transport *madeTransport // from here, by the gateway's Carriers; nil for none
}

// proxies reports whether the gateway can be asked for more than the name in a hello.
func (e *GatewayHop) proxies() bool {
	return e.transport != nil && (e.transport.Transport != nil || e.transport.err != nil)
}

// carriesDatagrams reports whether the gateway can be asked for datagrams. One whose
// transport could not be made is asked, too, and says why.
func (e *GatewayHop) carriesDatagrams() bool {
	return e.transport.err != nil || e.transport.Info().Datagrams
}

// A networkState network is one in a table.
type networkState struct {
	Network
	near       []int32            // of Near, those that are in the table
	transports *networkTransports // of services without layers, from here; nil for none
}

// hasGateways reports whether n is reached through gateways from outside. A network
// without any is reached directly from everywhere.
func (n *networkState) hasGateways() bool { return len(n.Gateways) > 0 || len(n.Via) > 0 }

// An endpointGroup holds those of a service's endpoints that are in one network, and no
// index of a network is -1.
type endpointGroup struct {
	network   int32
	endpoints []Endpoint
}

// assignNetworks groups the endpoints of every service by network.
func (b *builder) assignNetworks() {
	b.here = -1
	if i, ok := b.networkIndex[b.mesh.Network]; ok {
		b.here = i
	}
	for i := range b.networks {
		n := &b.networks[i]
		for _, name := range n.Near {
			if j, ok := b.networkIndex[name]; ok {
				n.near = append(n.near, j)
			}
		}
	}
	for i := range b.services {
		e := &b.services[i]
		if e.Headless {
			b.headless++
			b.indexAddresses(e)
		}
		b.groupEndpoints(e)
		b.spreadEndpoints(e)
	}
	if b.listeners != nil {
		for i := range b.listeners.backends {
			b.groupEndpoints(&b.listeners.backends[i])
			b.spreadEndpoints(&b.listeners.backends[i])
		}
	}
}

// groupEndpoints groups the endpoints of one service by network.
func (b *builder) groupEndpoints(e *serviceEntry) {
	if len(e.Via) > 0 || len(e.Endpoints) == 0 {
		return
	}
	if e.hasVias {
		b.joinEndpoints(e)
		return
	}
	home, same := b.network(&e.Endpoints[0]), true
	for j := range e.Endpoints {
		same = same && b.network(&e.Endpoints[j]) == home
		e.hasPortEndpoints = e.hasPortEndpoints || e.Endpoints[j].ServicePort != 0
	}
	e.home = home
	if same {
		return
	}
	for j := range e.Endpoints {
		ep := &e.Endpoints[j]
		in := b.network(ep)
		at := slices.IndexFunc(e.groups, func(g endpointGroup) bool { return g.network == in })
		if at < 0 {
			at = len(e.groups)
			e.groups = append(e.groups, endpointGroup{network: in})
		}
		e.groups[at].endpoints = append(e.groups[at].endpoints, *ep)
	}
}

// servingPort returns those of eps, which are e's, that serve a port; 0 stands for
// any. It allocates where endpoints serve one port each.
func (e *serviceEntry) servingPort(eps []Endpoint, port uint16) []Endpoint {
	if !e.hasPortEndpoints || port == 0 || !slices.ContainsFunc(eps, func(ep Endpoint) bool { return !ep.Serves(port) }) {
		return eps
	}
	some := make([]Endpoint, 0, len(eps))
	for i := range eps {
		if eps[i].Serves(port) {
			some = append(some, eps[i])
		}
	}
	return some
}

// An endpointRef is the endpoint of a headless service that has an address.
type endpointRef struct{ service, endpoint int32 }

// indexAddresses indexes the endpoints of a headless service by address. The first
// endpoint at an address keeps it.
func (b *builder) indexAddresses(e *serviceEntry) {
	for i := range e.Endpoints {
		a := e.Endpoints[i].Addr
		if _, ok := b.endpointsByAddr[a]; !ok && a.IsValid() && len(e.Via) == 0 && !e.Endpoints[i].isBehind() {
			b.endpointsByAddr[a] = endpointRef{e.index, int32(i)}
		}
	}
}

// Reverse returns the name of an address, as clients in network from may know it:
// that of the service whose VIP it is, or of a headless service's endpoint that can
// be reached from there. What the client of req may not see is left out.
func (t *Table) Reverse(a netip.Addr, from string, req *tunnel.Request) []string {
	if t == nil {
		return nil
	}
	in := t.indexOf(from)
	if i, ok := t.ByVIP(a); ok {
		e := &t.services[i]
		if name, ok := e.primaryName(); ok && t.exposedTo(e, in) && t.seesNamed(req, e, name) {
			return []string{name.String()}
		}
		return nil
	}
	o, ok := t.endpointsByAddr[normalAddr(a)]
	if !ok {
		return nil
	}
	e := &t.services[o.service]
	ep := &e.Endpoints[o.endpoint]
	name, ok := e.primaryName()
	if !ok || !t.exposedTo(e, in) || !t.direct(t.network(ep), in) || !t.seesNamed(req, e, name) {
		return nil
	}
	return []string{EndpointName(e.Service, ep, name.String())}
}

// network returns the index of the network an endpoint is in, or -1.
func (t *Table) network(ep *Endpoint) int32 {
	if ep.isBehind() {
		return t.here
	}
	if ep.Network != "" {
		if i, ok := t.networkIndex[ep.Network]; ok {
			return i
		}
	}
	if ep.Addr.IsValid() {
		if i := t.prefixes.find(ep.Addr); i >= 0 {
			return i
		}
	}
	return t.here
}

// indexOf returns the index of a network by its name, or -1.
func (t *Table) indexOf(name string) int32 {
	if i, ok := t.networkIndex[name]; ok && name != "" {
		return i
	}
	return -1
}

// direct reports whether endpoints in network can be reached from another
// network without a gateway.
func (t *Table) direct(network, from int32) bool {
	return network == from || network < 0 || !t.networks[network].hasGateways()
}

// reach returns the endpoints of f, whose service has no Via, that network from reaches
// directly, or else the networks behind gateways, nearest first. What has a Via of its own
// is reached from our own network. It does not allocate where all endpoints
// are in one network.
func (t *Table) reach(f match, from int32) (eps []Endpoint, beyond []int32) {
	e := f.entry
	switch {
	case f.endpoints != nil:
		in := t.network(&f.endpoints[0])
		if t.direct(in, from) {
			return f.endpoints, nil
		}
		return nil, []int32{in}
	case e.hasVias:
		return e.joined, nil
	case len(e.groups) == 0:
		if t.direct(e.home, from) {
			return e.Endpoints, nil
		}
		return nil, []int32{e.home}
	}
	for _, g := range e.groups {
		if g.network == from {
			return g.endpoints, nil
		}
	}
	for _, g := range e.groups {
		if t.direct(g.network, from) {
			eps = append(eps, g.endpoints...)
		} else {
			beyond = append(beyond, g.network)
		}
	}
	if len(eps) > 0 {
		return eps, nil
	}
	t.sortByDistance(beyond, from)
	return nil, beyond
}

// hasGatewayAt reports whether a is one of the gateways of p: a client at that
// address has another table. A loopback address proves nothing.
func (p *Location) hasGatewayAt(a netip.Addr) bool {
	a = normalAddr(a)
	return a.IsValid() && !a.IsLoopback() && slices.ContainsFunc(p.Gateways, func(e GatewayHop) bool {
		return e.Gateway.Address.Addr == a || e.Gateway.Public.Addr == a
	})
}

// sortByDistance sorts networks by their place in the Near list of from.
func (t *Table) sortByDistance(networks []int32, from int32) {
	if from < 0 || len(networks) < 2 {
		return
	}
	near := t.networks[from].near
	distance := func(n int32) int {
		if at := slices.Index(near, n); at >= 0 {
			return at
		}
		return len(near)
	}
	slices.SortStableFunc(networks, func(a, b int32) int { return distance(a) - distance(b) })
}

// locate returns the whole Location of f from a network.
func (t *Table) locate(f match, from int32) Location {
	var eps []Endpoint
	var beyond []int32
	switch {
	case !f.behindHops():
		eps, beyond = t.reach(f, from)
	case t.here >= 0: // behind the gateways of our own network, from everywhere
		beyond = []int32{t.here}
	}
	if f.endpoints == nil {
		eps = f.entry.servingPort(eps, f.port)
	}
	return t.locateBeyond(f, from, eps, beyond)
}

// locateBeyond returns the Location of f at eps, or else in the networks beyond.
func (t *Table) locateBeyond(f match, from int32, eps []Endpoint, beyond []int32) Location {
	p := Location{Service: f.entry.Service, Pattern: f.pattern, Port: f.port, Single: f.endpoints != nil, Endpoints: eps, policies: f.entry.policies.service}
	if f.rule == nil && f.entry.index >= 0 {
		p.VIPs[0], p.VIPs[1] = t.VIPs(int(f.entry.index))
	}
	name := ""
	if from >= 0 {
		name = t.networks[from].Name
	}
	for rank, i := range beyond {
		n := &t.networks[i]
		var transports *networkTransports
		if from == t.here {
			transports = t.transportsTo(&f, i)
		}
		if rank == 0 {
			p.remote = n
			if transports != nil {
				p.remoteVia = &transports.via
			}
		}
		for j := range n.Gateways {
			g := &n.Gateways[j]
			hop := GatewayHop{Gateway: g, Network: n.Name, Address: g.AddressFrom(n.Name, name), Rank: rank, via: len(n.Via) > 0, insecure: n.Insecure}
			if transports != nil && !hop.via {
				hop.transport = &transports.gateways[j]
			}
			p.Gateways = append(p.Gateways, hop)
		}
	}
	return p
}

// Locations returns where the services called name are, for a client in network from, "" for one in
// none. There may be several services of the name, each with its own ports; those that are not
// exposed to from are left out. It is false where that leaves nothing: there is no such name, for
// them.
func (t *Table) Locations(name tunnel.Name, from string) (places []Location, ok bool) {
	if t == nil {
		return nil, false
	}
	in := t.indexOf(from)
	m, ok := t.matchName(name)
	if !ok {
		if e := t.live.entry(t, name); e != nil {
			return []Location{t.locate(match{entry: e, pattern: e.Name}, in)}, true
		}
		return nil, false
	}
	for _, c := range m.claims {
		f, ok := t.matchOf(m, c, c.port)
		if !ok || !t.exposedTo(f.entry, in) {
			continue
		}
		p := t.locate(f, in)
		p.SetAddresses = t.setAddresses[setAddressKey{name, in}]
		if m.gateway == "" || p.selectGateway(m.gateway) {
			places = append(places, p)
		}
	}
	return places, len(places) > 0
}

// selectGateway leaves only those entries that are the gateway asked for. It is false
// where that leaves nothing.
func (p *Location) selectGateway(gateway string) bool {
	p.GatewayLabel = gateway
	p.Gateways = slices.DeleteFunc(p.Gateways, func(e GatewayHop) bool { return e.Address.gatewayLabel() != gateway })
	return len(p.Gateways) > 0
}

// Refusal says why Places has nothing of a name: it is an *tunnel.Error.
func (t *Table) Refusal(name tunnel.Name, from string) error {
	if t == nil {
		return tunnel.Refusef(tunnel.NoRoute, "registry: %q: no table is loaded yet", name)
	}
	m, ok := t.matchName(name)
	if !ok {
		return tunnel.Refusef(tunnel.NoRoute, "registry: no service is named %q; the routing table has %s", name, count(len(t.services)))
	}
	e := &t.services[m.claims[0].service]
	if !e.Exposed {
		return tunnel.Refusef(tunnel.NotExposed, "registry: %q is service %q of %s, which is not exposed", name, e.Name, orUnknown(e.Origin))
	}
	where := "none"
	if from != "" {
		where = strconv.Quote(from)
	}
	if in := t.indexOf(from); m.gateway != "" && t.exposedTo(e, in) {
		return tunnel.Refusef(tunnel.NoRoute, "registry: %q is service %q of %s by way of a gateway that leads there for others; the client is in %s", name, e.Name, orUnknown(e.Origin), where)
	}
	return tunnel.Refusef(tunnel.NotExposed, "registry: %q is service %q of %s, which is exposed to %q; the client is in %s", name, e.Name, orUnknown(e.Origin), e.ExposedTo, where)
}

// exposedTo reports whether those in a network may have e.
func (t *Table) exposedTo(e *serviceEntry, network int32) bool {
	return e.Exposed && (len(e.ExposedTo) == 0 || network >= 0 && slices.Contains(e.views, network))
}
