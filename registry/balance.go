package registry

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	"culvert.dev/tunnel"
)

// Policies of a LoadBalancing.
const (
	RoundRobin       = "roundRobin"       // endpoints take turns
	LeastConnections = "leastConnections" // the endpoint with the fewest tunnels for its weight
	SourceHash       = "sourceHash"       // the same endpoint for the same client address, at every gateway
)

// A LoadBalancing says which endpoint of a service a new connection goes to. The zero
// LoadBalancing is RoundRobin.
type LoadBalancing struct {
	Policy string // "" means RoundRobin

	// StickyFor is how long a client keeps its endpoint after its last connection, as
	// long as the endpoint is healthy; 0 means that it does not.
	StickyFor time.Duration
}

// ParseLoadBalancing parses the text that an annotation has: a policy and, after a
// semicolon, how long clients keep their endpoint, "sourceHash; stickyFor=30m".
func ParseLoadBalancing(text string) (LoadBalancing, error) {
	var l LoadBalancing
	const hint = `write roundRobin, leastConnections or sourceHash, and after it "; stickyFor=30m" where clients keep their endpoint`
	policy, rest, more := strings.Cut(text, ";")
	switch l.Policy = strings.TrimSpace(policy); l.Policy {
	case RoundRobin, LeastConnections, SourceHash:
	default:
		return LoadBalancing{}, fmt.Errorf("%.40q is no policy: %s", l.Policy, hint)
	}
	if !more {
		return l, nil
	}
	key, value, ok := strings.Cut(rest, "=")
	if strings.TrimSpace(key) != "stickyFor" || !ok {
		return LoadBalancing{}, fmt.Errorf("%.40q is unknown: %s", strings.TrimSpace(rest), hint)
	}
	var err error
	if l.StickyFor, err = time.ParseDuration(strings.TrimSpace(value)); err != nil || l.StickyFor < MinStickyFor || l.StickyFor > MaxStickyFor {
		return LoadBalancing{}, fmt.Errorf("stickyFor %.40q is not a duration from %v to %v", strings.TrimSpace(value), MinStickyFor, MaxStickyFor)
	}
	return l, nil
}

// Bounds of StickyFor.
const (
	MinStickyFor = time.Second
	MaxStickyFor = 7 * 24 * time.Hour
)

// A balance chooses among the endpoints of a service that do not merely take turns.
type balance struct {
	policy    string
	stickyFor time.Duration
	zone      string        // the gateway's own, if some endpoints are in it and some are not
	state     *balanceState // that outlives the table; nil where nothing is remembered
	service   *Service
	spread    *spread // nil where all endpoints are equally near
}

// A balanceKey identifies a service across tables.
type balanceKey struct{ name, ports string }

// A balanceState is what is known of a service's endpoints and clients at run time.
type balanceState struct {
	sticky stickyClients

	outliers outliers

	mu    sync.Mutex // guards loads
	loads map[healthKey]*tunnel.EndpointLoad
}

// load returns the counter of an endpoint.
func (s *balanceState) load(key healthKey) *tunnel.EndpointLoad {
	s.mu.Lock()
	defer s.mu.Unlock()
	l := s.loads[key]
	if l == nil {
		if s.loads == nil {
			s.loads = map[healthKey]*tunnel.EndpointLoad{}
		}
		l = &tunnel.EndpointLoad{Watcher: &outlier{of: &s.outliers, addr: key.String()}}
		s.loads[key] = l
	}
	return l
}

// prune forgets the endpoints without a tunnel and without a failure of late. Those of
// the table that is made get their counters again.
func (s *balanceState) prune() {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := time.Now()
	for key, l := range s.loads {
		if l.Tunnels() == 0 && l.Watcher.(*outlier).forget(now) {
			delete(s.loads, key)
		}
	}
}

// countsLoad reports whether the tunnels of each endpoint of s are counted.
func (s *Service) countsLoad() bool {
	return s.LoadBalancing.Policy == LeastConnections || s.OutlierEjection != nil || s.Limits != nil && s.Limits.ConnectionsPerEndpoint > 0
}

// makeBalances gives each service what chooses among its endpoints.
func (b *builder) makeBalances() {
	for i := range b.services {
		b.makeBalance(&b.services[i])
	}
	if b.listeners != nil {
		for i := range b.listeners.backends {
			b.makeBalance(&b.listeners.backends[i])
		}
	}
}

func (b *builder) makeBalance(e *serviceEntry) {
	own, first, unequal, zoned := b.mesh.TopologyZone, &Endpoint{}, false, false
	if len(e.Endpoints) > 0 {
		first = &e.Endpoints[0]
	}
	for i := range e.Endpoints {
		ep := &e.Endpoints[i]
		unequal = unequal || ep.weight() != first.weight() || ep.Draining
		zoned = zoned || (ep.Zone == own) != (first.Zone == own)
	}
	if zoned = zoned && own != ""; !zoned {
		own = ""
	}
	l := e.LoadBalancing
	if !unequal && !zoned && l.StickyFor == 0 && (l.Policy == "" || l.Policy == RoundRobin) && !e.countsLoad() {
		return
	}
	e.balance = &balance{policy: l.Policy, stickyFor: l.StickyFor, zone: own, service: e.Service}
	if e.balance.policy == "" {
		e.balance.policy = RoundRobin
	}
	if l.StickyFor == 0 && !e.countsLoad() {
		return
	}
	key := balanceKey{e.Name, fmt.Sprint(e.Ports, e.Match.ALPN)}
	state := b.balances[key]
	if state == nil {
		if state = b.before[key]; state != nil {
			state.prune()
		} else {
			state = &balanceState{}
		}
		if b.balances == nil {
			b.balances = map[balanceKey]*balanceState{}
		}
		b.balances[key] = state
	}
	e.balance.state = state
	state.outliers.use(e.Name, e.OutlierEjection)
	if !e.countsLoad() {
		return
	}
	s := *e.Service
	s.Endpoints = slices.Clone(s.Endpoints)
	for i := range s.Endpoints {
		ep := &s.Endpoints[i]
		if key, ok := ep.loadKey(); ok {
			ep.load = state.load(key)
		}
	}
	e.Service = &s
}

// weight returns the weight of e beside the other endpoints.
func (e *Endpoint) weight() uint32 {
	switch {
	case e.Draining:
		return 0
	case e.Weight == 0:
		return 1
	}
	return uint32(e.Weight)
}

// A contender is what is known of an endpoint that may be chosen.
type contender struct {
	weight   uint32 // a multiple of weightUnit; 0 only for the endpoint of a sticky client
	tier     uint8  // of those that are chosen first, the lowest
	sameZone bool
}

const (
	// weightUnit is what an endpoint of weight 1 has, so that a DNS name can divide its
	// weight among its addresses.
	weightUnit = 1 << 12

	// maxOrdered is how many endpoints are put in the order of the policy. The Router
	// tries three.
	maxOrdered = 4

	// maxCompared is the number of endpoints up to which the one with the fewest
	// tunnels is found. Of more, two random ones are compared.
	maxCompared = 64
)

// Tiers. What has a higher one is chosen only where nothing else is left.
const (
	tierRank      = 1 << 0 // times the place of a gateway's network, by its distance, up to maxRank
	maxRank       = 15
	tierFamily    = 1 << 4 // an address of the family that is not the first of its DNS name
	tierZone      = 1 << 5 // not in the gateway's zone, as long as that has enough healthy endpoints
	tierNetwork   = 1 << 6 // in another network than the endpoints that are used first
	tierUnhealthy = 1 << 7
)

// balanced reports whether the endpoints of the service have an order of its own. A
// client that names one of them gets that one.
func (x *resolution) balanced() bool { return x.entry.balance != nil && x.match.endpoints == nil }

// count gives ep the counter of its tunnels, where they are counted. It is configured as
// c; nil where it is a gateway, or was asked for by its address.
func (x *resolution) count(ep *tunnel.Endpoint, c *Endpoint) {
	switch {
	case !x.entry.countsLoad():
	case c != nil && c.load != nil:
		ep.Load = c.load
	default:
		key := keyOf(ep)
		key.datagrams = false                            // they are load of the same host
		if !key.addr.Addr().IsValid() && key.hop == "" { // known to a next hop only
			key = healthKey{hop: ep.String()}
		}
		ep.Load = x.entry.balance.state.load(key)
	}
}

// contenderOf returns what is known of an endpoint, or of a gateway.
func (b *balance) contenderOf(c *Endpoint, hop *GatewayHop) contender {
	one := contender{weight: c.weight() * weightUnit, sameZone: c.Zone == b.zone}
	if hop != nil {
		one.weight = max(1, uint32(hop.Gateway.Weight)) * weightUnit
		one.tier = uint8(min(hop.Rank, maxRank)) * tierRank
	}
	return one
}

// contenderOf returns what is known of the endpoint, or of the gateway hop, that is
// configured at an index. Of a spread, those used first come before others, and direct
// ones before gateways.
func (x *resolution) contenderOf(c *Endpoint, hop *GatewayHop, at int) contender {
	one := x.entry.balance.contenderOf(c, hop)
	if x.near > 0 && at >= x.near {
		one.tier |= tierNetwork
		if hop != nil {
			one.tier = tierNetwork | uint8(min(hop.Rank+1, maxRank))*tierRank
		}
	}
	return one
}

// divide makes c the contender of one of a DNS name's addresses. The name divides its
// weight among the addresses of the first one's family, which are tried before others.
func (c *contender) divide(addrs []netip.Addr, row int, fixed bool) {
	if len(addrs) < 2 {
		return
	}
	if fixed || addrs[row].Is4() != addrs[0].Is4() {
		if row > 0 {
			c.tier |= tierFamily
		}
		return
	}
	if c.weight == 0 {
		return
	}
	first := uint32(0)
	for _, a := range addrs {
		if a.Is4() == addrs[0].Is4() {
			first++
		}
	}
	c.weight = max(1, c.weight/first)
}

// errAllDraining refuses a request where no endpoint takes a new client.
func (x *resolution) errAllDraining() error {
	return tunnel.Refusef(tunnel.NoEndpoint, "registry: the endpoints of service %q of %s take no new client: all have the weight 0", x.entry.Name, orUnknown(x.entry.Origin))
}

// Chosen implements tunnel.Balancer.
func (b *balance) Chosen(req *tunnel.Request, ep *tunnel.Endpoint) {
	if b.stickyFor == 0 {
		return
	}
	if client, known := clientOf(req); known {
		b.state.sticky.set(client, hashOf(ep), b.stickyFor, time.Now())
	}
}

// check returns the check whose word counts for the endpoints. Gateways have their own.
func (x *resolution) check(gateways bool) Check {
	if gateways {
		return Check{}
	}
	return x.entry.Check
}

// choose puts the endpoints to try first at the front of eps, and returns how many may be
// tried: not those that get no new client. all says more of each. It allocates nothing.
func (x *resolution) choose(eps []tunnel.Endpoint, all []contender, check Check) int {
	b := x.entry.balance
	x.health.unhealthy(eps, check, func(i int) { all[i].tier |= tierUnhealthy })
	if b.zone != "" {
		preferZone(all)
	}
	order := ordering{eps, all}
	client, known := clientOf(x.req)
	switch {
	case b.policy == SourceHash && known:
		order.byHash(client)
	case b.policy == LeastConnections:
		order.byLoad(x.turn)
	default:
		order.byTurn(x.turn)
	}
	if known && b.stickyFor > 0 {
		if hash := b.state.sticky.find(client, b.stickyFor, time.Now()); hash != 0 {
			order.keep(hash)
		}
	}
	return order.dropDraining()
}

// preferZone puts the endpoints of other zones into a higher tier, as long as at least
// half of the weight in the gateway's own zone is healthy.
func preferZone(all []contender) {
	var total, healthy uint64
	for i := range all {
		if c := &all[i]; c.sameZone {
			total += uint64(c.weight)
			if c.tier&tierUnhealthy == 0 {
				healthy += uint64(c.weight)
			}
		}
	}
	if healthy == 0 || 2*healthy < total {
		return
	}
	for i := range all {
		if !all[i].sameZone {
			all[i].tier |= tierZone
		}
	}
}
