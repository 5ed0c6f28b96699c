package registry

import (
	"cmp"
	"encoding/binary"
	"fmt"
	"iter"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"culvert.dev/policy"
	"culvert.dev/tunnel"
)

// A Table is one state of the registry. It never changes, so any number of
// goroutines may read it, and what one request sees of it fits together. A nil
// Table is empty.
type Table struct {
	generation      uint64
	services        []serviceEntry
	exact           map[tunnel.Name]claims
	wild            map[tunnel.Name]claims // by what follows "*."
	catchAll        claims                 // of services with tunnel.AnyName
	hello           *helloClaims           // nil where no service has a HelloMatch
	byAddress       map[netip.Addr]claims
	byEndpoint      map[addrPortKey]int32   // endpoints written as addresses; the index of a service
	sharedEndpoints map[addrPortKey][]int32 // further services with the same endpoint
	prefixes        prefixTable

	networks        []networkState                // in the order of their indices
	networkIndex    map[string]int32              // by name
	here            int32                         // the network we are in, or -1
	headless        int                           // how many services are
	gateways        map[string]struct{}           // labels of gateways: see GatewayName
	endpointsByAddr map[netip.Addr]endpointRef    // endpoints of headless services
	parentNames     map[string]struct{}           // names that have names below them that everybody may look up
	parentNamesOf   map[int32]map[string]struct{} // and those that only a network may

	published   []Published // sorted by port
	publishedAs map[tunnel.Name][]Published
	vips        *vips // nil for none

	setAddresses map[setAddressKey][]netip.Addr // nil for none

	policies    []*policy.Policy   // of all snapshots
	catalog     *catalog           // nil where no policy decides who may see services
	listeners   *compiledListeners // nil where there is no listener
	clientCerts clientCerts        // nil where no listener requires them for a service

	balances map[balanceKey]*balanceState // that the next table takes over

	live *liveServices // nil for none

	mesh Mesh
}

// Mesh returns what the table's names were made of, and where the gateway is.
func (t *Table) Mesh() Mesh {
	if t == nil {
		return Mesh{}
	}
	return t.mesh
}

// A serviceEntry is a service in a table.
type serviceEntry struct {
	*Service // of the snapshot, or a copy with more
	index    int32
	views    []int32 // indices of the networks in ExposedTo; an unknown network has none
	clients  *clientFilter
	policies policySets

	transports *serviceTransports // that it shares with no other service; nil for none
	balance    *balance           // nil where its endpoints take turns

	home             int32           // the network its endpoints are in, or -1
	groups           []endpointGroup // its endpoints by network, where there is more than one
	hasPortEndpoints bool            // there are endpoints that serve one port only
	hasVias          bool            // there are endpoints with a Via, and it has none itself
	joined           []Endpoint      // those, and the ones that this gateway dials directly; nil where there are none with a Via
	spread           *spread         // of its endpoints, for this gateway; nil where all are equally near
}

// A claim is one pattern or address and port that a service answers to.
type claim struct {
	port    uint16 // 0 means any
	service int32
	pattern string // "svc.example.com", "*.example.com:443"
}

// claims are the claims to one pattern or address, sorted by port.
type claims []claim

// find returns the index of the claim to a port, and whether there is one.
func (c claims) find(port uint16) (at int, ok bool) {
	return slices.BinarySearchFunc(c, port, func(c claim, port uint16) int { return cmp.Compare(c.port, port) })
}

// A Conflict is something of a snapshot that Merge left out.
type Conflict struct {
	What    string // `name "a.example.com", port 443`
	Kept    string // the origin of the service that has it, unless there is a Why
	Why     string // why no service may have it; "" where another one has it
	Dropped string // the origin of what was left out
	Denies  bool   // a policy that can't be used, which denies what it selects
}

func (c *Conflict) Error() string {
	if c.Denies {
		return fmt.Sprintf("%s of %s denies all that it selects, because it can't be used: %s", c.What, orUnknown(c.Dropped), c.Why)
	}
	if c.Why != "" {
		return fmt.Sprintf("%s of %s is left out: %s", c.What, orUnknown(c.Dropped), c.Why)
	}
	return fmt.Sprintf("%s of %s is left out: %s has it already", c.What, orUnknown(c.Dropped), orUnknown(c.Kept))
}

// Merge makes a table of snapshots. Where two of them claim the same, the earlier one
// gets it: the order of sources is the order of precedence. The table is complete and
// usable in any case; err is Conflicts, with every claim that was left out, or nil.
//
// The table shares memory with the snapshots, which must not change any more.
func Merge(snapshots ...Snapshot) (*Table, error) { return Mesh{}.Merge(snapshots...) }

// Merge is the function Merge with the zone and the network of a mesh, where no snapshot
// has one.
func (m Mesh) Merge(snapshots ...Snapshot) (*Table, error) { return m.merge(nil, nil, snapshots) }

// Merge is the function Merge with r's Mesh and NewTransport, and with what r's current
// table knows of clients and endpoints for load balancing. Other tables have no
// transports: they are to look things up, and serve what the Router's Dialer reaches.
func (r *Registry) Merge(snapshots ...Snapshot) (*Table, error) {
	var before map[balanceKey]*balanceState
	if t := r.Table(); t != nil {
		before = t.balances
	}
	return r.Mesh.merge(r.NewTransport, before, snapshots)
}

// A newTransport is Registry.NewTransport.
type newTransport func(*Service, *Endpoint, *Gateway) (tunnel.Transport, error)

func (m Mesh) merge(newTransport newTransport, before map[balanceKey]*balanceState, snapshots []Snapshot) (*Table, error) {
	n, endpoints := 0, 0
	for i := range snapshots {
		n += len(snapshots[i].Services)
		for _, s := range snapshots[i].Services {
			endpoints += len(s.Endpoints)
		}
	}
	if i := slices.IndexFunc(snapshots, func(s Snapshot) bool { return s.Mesh != nil }); i >= 0 {
		m = *snapshots[i].Mesh
	}
	b := builder{
		Table: Table{
			mesh: m,

			services:        make([]serviceEntry, 0, n),
			exact:           make(map[tunnel.Name]claims, n),
			wild:            map[tunnel.Name]claims{},
			byAddress:       map[netip.Addr]claims{},
			byEndpoint:      make(map[addrPortKey]int32, endpoints),
			sharedEndpoints: map[addrPortKey][]int32{},
			prefixes:        prefixTable{byPrefix: map[netip.Prefix]int32{}},

			networkIndex:    map[string]int32{},
			gateways:        map[string]struct{}{},
			parentNames:     map[string]struct{}{},
			parentNamesOf:   map[int32]map[string]struct{}{},
			endpointsByAddr: map[netip.Addr]endpointRef{},
		},
		newTransport: newTransport,
		before:       before,
		sets:         map[tunnel.Name][]int32{},

		claims: make([]claim, 0, n),
	}
	var how *Hop
	asks := slices.IndexFunc(snapshots, func(s Snapshot) bool { return s.GatewayTransport != nil })
	if asks >= 0 {
		how = snapshots[asks].GatewayTransport
	}
	for i := range snapshots {
		for _, network := range snapshots[i].Networks {
			network.Gateways = completeGateways(network.Gateways)
			if i != asks {
				b.addTransports(network.Gateways, how)
			}
			addPublic(network.Gateways, snapshots)
			b.addNetwork(network)
		}
	}
	for i := range snapshots {
		for j := range snapshots[i].Services {
			b.addService(snapshots[i].Services[j])
		}
	}
	for i := range b.services { // after the Names of all services, which take precedence
		b.addMeshNames(int32(i))
	}
	b.addSets()
	b.addSetAddresses(snapshots)
	b.addListeners(snapshots)
	b.addClientCerts()
	b.addPolicies(snapshots)
	b.makeEndpointTransports()
	b.makeBalances()
	b.assignNetworks()
	b.makeTransports()
	b.indexParentNames()
	b.indexCatalog()
	if len(b.conflicts) > 0 {
		return &b.Table, b.conflicts
	}
	return &b.Table, nil
}

// Generation counts the tables of a Registry: it only goes up. It is 0 in a
// table that no Registry has taken yet.
func (t *Table) Generation() uint64 {
	if t == nil {
		return 0
	}
	return t.generation
}

// Len returns the number of services.
func (t *Table) Len() int {
	if t == nil {
		return 0
	}
	return len(t.services)
}

// Services iterates over the services in the order of their snapshots. What
// they point to must not be changed.
func (t *Table) Services() iter.Seq[*Service] {
	return func(yield func(*Service) bool) {
		if t == nil {
			return
		}
		for i := range t.services {
			if !yield(t.services[i].Service) {
				return
			}
		}
	}
}

// Networks iterates over the networks. What they point to must not be changed.
func (t *Table) Networks() iter.Seq[*Network] {
	return func(yield func(*Network) bool) {
		if t == nil {
			return
		}
		for i := range t.networks {
			if !yield(&t.networks[i].Network) {
				return
			}
		}
	}
}

// Reaches reports whether this gateway reaches ep without another one.
func (t *Table) Reaches(ep *Endpoint) bool { return t.direct(t.network(ep), t.here) }

// Network returns the name of the network a is in: that with the longest
// prefix that holds a. It is false for an address in none.
func (t *Table) Network(a netip.Addr) (string, bool) {
	if t == nil {
		return "", false
	}
	i := t.prefixes.find(a)
	if i < 0 {
		return "", false
	}
	return t.prefixes.names[i], true
}

// A builder makes a Table.
type builder struct {
	Table
	newTransport newTransport
	before       map[balanceKey]*balanceState // of the table before
	sets         map[tunnel.Name][]int32      // services by their names in the cluster set
	setNames     []tunnel.Name                // the keys of sets, in the order of their first services
	conflicts    Conflicts
	claims       []claim // memory for claims of one element
}

// refuse records that something is left out, and why.
func (b *builder) refuse(what, dropped, why string) {
	b.conflicts = append(b.conflicts, &Conflict{What: what, Dropped: dropped, Why: why})
}

// conflict records that what is left out because another service has it.
func (b *builder) conflict(what, kept, dropped string) {
	b.conflicts = append(b.conflicts, &Conflict{What: what, Kept: kept, Dropped: dropped})
}

func (b *builder) addNetwork(network Network) {
	i, ok := b.networkIndex[network.Name]
	if ok && b.networks[i].OnlyInsecure() {
		network.Insecure = true // the earlier source sets nothing else
	} else if ok {
		// Not a union: a source must not widen a network of another one.
		b.conflict(fmt.Sprintf("network %q", network.Name), "an earlier source", "a later one")
		return
	}
	if !ok {
		i = int32(len(b.prefixes.names))
		b.prefixes.names = append(b.prefixes.names, network.Name)
		b.networks = append(b.networks, networkState{})
	}
	for j := range network.Gateways {
		g := &network.Gateways[j]
		for _, at := range []*Endpoint{&g.Address, &g.Public} {
			if label := at.gatewayLabel(); g.Supports("sni") && label != "" {
				b.gateways[label] = struct{}{}
			}
		}
	}
	b.networks[i] = networkState{Network: network}
	b.networkIndex[network.Name] = i
	for _, p := range network.CIDRs {
		p = normalPrefix(p)
		if old, ok := b.prefixes.byPrefix[p]; ok {
			b.conflict("range "+p.String(), fmt.Sprintf("network %q", b.prefixes.names[old]), fmt.Sprintf("network %q", network.Name))
			continue
		}
		b.prefixes.add(p, i)
	}
}

// append adds a service that claims nothing yet.
func (b *builder) append(s *Service) int32 {
	i := int32(len(b.services))
	if check := s.Check.complete(s.Names); check != s.Check {
		whole := *s
		whole.Check = check
		s = &whole
	}
	e := serviceEntry{Service: s, index: i, home: -1, clients: compileClientFilter(s.Clients)}
	for _, name := range s.ExposedTo {
		if n, ok := b.networkIndex[name]; ok {
			e.views = append(e.views, n)
		}
	}
	b.services = append(b.services, e)
	return i
}

func (b *builder) addService(s *Service) {
	i := b.append(s)
	names := s.Names
	if !s.Match.IsZero() && !b.addHello(s, i) {
		names = nil
	}
	for _, p := range names {
		if p == tunnel.AnyName {
			b.catchAll = b.claim(b.catchAll, "name", p.String(), i)
			continue
		}
		if p.Suffix.IsZero() {
			b.refuse("the empty name", s.Origin, "it names nothing")
			continue
		}
		if p.Suffix.IsReserved() {
			b.refuse(fmt.Sprintf("name %q", p), s.Origin, ReservedName)
			continue
		}
		m := b.exact
		if p.Wildcard {
			m = b.wild
		}
		m[p.Suffix] = b.claim(m[p.Suffix], "name", p.String(), i)
	}
	for _, a := range s.Addresses {
		a = normalAddr(a)
		b.byAddress[a] = b.claim(b.byAddress[a], "address", a.String(), i)
	}
	for k := range s.Endpoints {
		ep := &s.Endpoints[k]
		if !ep.Addr.IsValid() || len(s.Via) > 0 || ep.isBehind() { // behind a Via the address is one of another network
			continue
		}
		for _, port := range ep.PortsFor(s) {
			at := addrPortKeyOf(ep.Addr, port)
			if first, taken := b.byEndpoint[at]; taken {
				b.share(at, first, i)
			} else {
				b.byEndpoint[at] = i
			}
		}
	}
}

// ReservedName says why no service has a name.
const ReservedName = "names below " + tunnel.ReservedZone + " are the gateway's own"

// share adds service i to the services of an endpoint, of which first is the first one,
// unless every client that may see i may see one of them: 100,000 services may share an
// endpoint, and a request for it goes through this list.
func (b *builder) share(at addrPortKey, first, i int32) {
	e := &b.services[i]
	covers := func(j int32) bool {
		h := &b.services[j]
		return h.Exposed && h.Clients.IsZero() && (len(h.ExposedTo) == 0 || len(e.ExposedTo) > 0 && slices.Equal(h.views, e.views))
	}
	if e.Exposed && !covers(first) && !slices.ContainsFunc(b.sharedEndpoints[at], covers) {
		b.sharedEndpoints[at] = append(b.sharedEndpoints[at], i)
	}
}

// An addrPortKey is an address and a port as the key of a large map: it is hashed quickly, and
// the garbage collector does not scan a map of it.
type addrPortKey struct{ high, low, port uint64 }

func addrPortKeyOf(a netip.Addr, port uint16) addrPortKey {
	b := a.As16() // IPv4 in its mapped form, and no zone
	return addrPortKey{binary.BigEndian.Uint64(b[:8]), binary.BigEndian.Uint64(b[8:]), uint64(port)}
}

// claim adds the claims of service i to one pattern or address to those that there are.
func (b *builder) claim(have claims, kind, pattern string, i int32) claims {
	for _, port := range orAny(b.services[i].Ports) {
		at, taken := have.find(port)
		if taken {
			if have[at].service != i { // else the service has it twice, which does no harm
				b.conflict(describe(kind, pattern, port), b.services[have[at].service].Origin, b.services[i].Origin)
			}
			continue
		}
		c := claim{port: port, service: i, pattern: pattern}
		if port != 0 {
			c.pattern = joinPort(pattern, port)
		}
		if len(have) == 0 { // most have one claim
			b.claims = append(b.claims, c)
			have = b.claims[len(b.claims)-1 : len(b.claims) : len(b.claims)]
			continue
		}
		have = slices.Insert(have, at, c)
	}
	return have
}

// describe names a claim for people.
func describe(kind, pattern string, port uint16) string {
	if port == 0 {
		return fmt.Sprintf("%s %q", kind, pattern)
	}
	return fmt.Sprintf("%s %q, port %d", kind, pattern, port)
}

func joinPort(pattern string, port uint16) string {
	return net.JoinHostPort(pattern, strconv.Itoa(int(port)))
}

// Conflicts is the error of Merge.
type Conflicts []*Conflict

func (c Conflicts) Error() string {
	const most = 10
	var b strings.Builder
	for i, one := range c {
		if i == most {
			fmt.Fprintf(&b, "; and %d more", len(c)-most)
			break
		}
		if i > 0 {
			b.WriteString("; ")
		}
		b.WriteString(one.Error())
	}
	return b.String()
}

func orUnknown(origin string) string {
	if origin == "" {
		return "an unnamed source"
	}
	return origin
}
