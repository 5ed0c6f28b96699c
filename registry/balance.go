package registry

import (
	"fmt"
	"math"
	"math/bits"
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
		if ep := &s.Endpoints[i]; ep.Addr.IsValid() {
			ep.load = state.load(healthKey{addr: netip.AddrPortFrom(ep.Addr.Unmap(), ep.Port)})
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

// An ordering puts endpoints in the order to try.
type ordering struct {
	eps []tunnel.Endpoint
	all []contender
}

func (o *ordering) swap(i, j int) {
	o.eps[i], o.eps[j] = o.eps[j], o.eps[i]
	o.all[i], o.all[j] = o.all[j], o.all[i]
}

// lowest returns the lowest tier of those from the index from on, and the number and the
// weight of its endpoints.
func (o *ordering) lowest(from int) (tier uint8, n int, weight uint64) {
	tier = math.MaxUint8
	for i := from; i < len(o.all); i++ {
		c := &o.all[i]
		if c.weight == 0 {
			continue
		}
		if c.tier < tier {
			tier, n, weight = c.tier, 0, 0
		}
		if c.tier == tier {
			n++
			weight += uint64(c.weight)
		}
	}
	return tier, n, weight
}

// byTurn chooses so that a few requests already are shared as the weights say.
func (o *ordering) byTurn(turn uint32) {
	tier, n, weight := o.lowest(0)
	if n == 0 {
		return
	}
	i := o.at(share(turn, weight), tier)
	o.swap(0, i)
	for done := 1; done < min(maxOrdered, len(o.eps)); done++ { // the next ones, of the same tier first
		if n--; n == 0 {
			if tier, n, _ = o.lowest(done); n == 0 {
				return
			}
		}
		for i = max(i+1, done); ; i++ {
			if i >= len(o.all) {
				i = done
			}
			if c := &o.all[i]; c.weight > 0 && c.tier == tier {
				break
			}
		}
		o.swap(done, i)
	}
}

// at returns the index of the endpoint of a tier that has a share of the tier's weight.
func (o *ordering) at(share uint64, tier uint8) int {
	for i := range o.all {
		c := &o.all[i]
		if c.weight == 0 || c.tier != tier {
			continue
		}
		if share < uint64(c.weight) {
			return i
		}
		share -= uint64(c.weight)
	}
	return 0 // never
}

// golden is the golden ratio's fraction, in units of 1/2^64: its multiples are
// spread evenly over any stretch, so that a few requests already are shared as
// the weights say.
const golden = 0x9E3779B97F4A7C15

// share returns a number below total. Those of successive turns are spread evenly.
func share(turn uint32, total uint64) uint64 {
	at, _ := bits.Mul64(uint64(turn)*golden, total)
	return at
}

// byLoad chooses the endpoint with the fewest tunnels for its weight. Of equal ones it
// is the next from that on whose turn it is, so that idle endpoints take turns.
func (o *ordering) byLoad(turn uint32) {
	tier, n, weight := o.lowest(0)
	if n == 0 {
		return
	}
	if n > maxCompared {
		o.byTwo(turn)
		return
	}
	next := o.at(share(turn, weight), tier)
	for done := range min(maxOrdered, len(o.eps)) {
		best, at := -1, max(next, done)
		for range len(o.eps) - done {
			if o.all[at].weight > 0 && (best < 0 || o.lighter(at, best)) {
				best = at
			}
			if at++; at == len(o.eps) {
				at = done
			}
		}
		if best < 0 {
			return
		}
		o.swap(done, best)
	}
}

// lighter reports whether endpoint i is to be chosen rather than endpoint j.
func (o *ordering) lighter(i, j int) bool {
	a, b := &o.all[i], &o.all[j]
	if a.tier != b.tier {
		return a.tier < b.tier
	}
	return uint64(o.eps[i].Load.Tunnels())*uint64(b.weight) < uint64(o.eps[j].Load.Tunnels())*uint64(a.weight)
}

// byTwo compares two random endpoints. What is random is a hash of the turn.
func (o *ordering) byTwo(turn uint32) {
	for done := range 2 {
		tier, n, _ := o.lowest(done)
		if n == 0 {
			return
		}
		at, _ := bits.Mul64(mix(uint64(turn)+1, uint64(done)+golden), uint64(n))
		for i := done; ; i++ {
			if c := &o.all[i]; c.weight == 0 || c.tier != tier {
				continue
			}
			if at == 0 {
				o.swap(done, i)
				break
			}
			at--
		}
	}
	if o.lighter(1, 0) {
		o.swap(0, 1)
	}
}

// byHash is rendezvous hashing with weights: each endpoint draws a number from the
// client and itself, and the lowest wins. So an endpoint that leaves takes no other
// client with it, and gateways with the same endpoints agree.
//
// The number is that of an exponential distribution with the weight as its rate:
// -ln(u)/weight for a u of even distribution.
func (o *ordering) byHash(client uint64) {
	var best [maxOrdered]struct {
		at   int
		tier uint8
		cost float64
	}
	n := 0
	for i := range o.eps {
		c := &o.all[i]
		if c.weight == 0 {
			continue
		}
		u := (float64(mix(numberOf(&o.eps[i]), client)>>11) + 0.5) / (1 << 53)
		weight := float64(c.weight)
		last := &best[maxOrdered-1]
		if n == maxOrdered && (c.tier > last.tier || c.tier == last.tier && (1-u) >= last.cost*weight) { // as -ln(u) is at least 1-u
			continue
		}
		cost := -math.Log(u) / weight
		at := min(n, maxOrdered-1)
		if n == maxOrdered && c.tier == last.tier && cost >= last.cost {
			continue
		}
		for at > 0 && (c.tier < best[at-1].tier || c.tier == best[at-1].tier && cost < best[at-1].cost) {
			best[at] = best[at-1]
			at--
		}
		best[at].at, best[at].tier, best[at].cost = i, c.tier, cost
		n = min(n+1, maxOrdered)
	}
	for i := range n {
		o.swap(i, best[i].at)
		for j := i + 1; j < n; j++ {
			if best[j].at == i {
				best[j].at = best[i].at // where it was moved to
			}
		}
	}
}

// keep puts the healthy endpoint that a client has already at the front, and keeps the
// order of the others.
func (o *ordering) keep(hash uint64) {
	for i := range o.eps {
		if o.all[i].tier&tierUnhealthy != 0 || hashOf(&o.eps[i]) != hash {
			continue
		}
		ep, c := o.eps[i], o.all[i]
		c.weight = max(c.weight, 1)
		copy(o.eps[1:i+1], o.eps[:i])
		copy(o.all[1:i+1], o.all[:i])
		o.eps[0], o.all[0] = ep, c
		return
	}
}

// dropDraining moves the endpoints that may be tried to the front, and returns how many
// those are. It must not return them: contenders would then be on the heap, too.
func (o *ordering) dropDraining() int {
	n := 0
	for i := range o.eps {
		if o.all[i].weight == 0 {
			continue
		}
		if n < i {
			o.eps[n] = o.eps[i]
		}
		n++
	}
	return n
}

// hashOf returns a hash of what is dialed: the endpoint, or the next hop to it. It is
// the same in every process, and never 0.
func hashOf(ep *tunnel.Endpoint) uint64 { return max(1, mix(numberOf(ep), golden)) }

// numberOf returns a number for the endpoint, whose bits are not mixed yet.
func numberOf(ep *tunnel.Endpoint) uint64 {
	addr, port := ep.Addr.Addr(), uint64(ep.Addr.Port())
	switch {
	case ep.HealthKey != "":
		return hashString(ep.HealthKey)
	case addr.Is4():
		b := addr.As4()
		return uint64(b[0])<<40 | uint64(b[1])<<32 | uint64(b[2])<<24 | uint64(b[3])<<16 | port
	case addr.IsValid():
		b := addr.As16()
		return mix(be64(b[:8]), be64(b[8:])^port)
	}
	return hashString(ep.Host) ^ port
}

// hashString is FNV-1a.
func hashString(s string) uint64 {
	h := uint64(0xcbf29ce484222325)
	for i := range len(s) {
		h = (h ^ uint64(s[i])) * 0x100000001b3
	}
	return h
}

func be64(b []byte) uint64 {
	_ = b[7]
	return uint64(b[0])<<56 | uint64(b[1])<<48 | uint64(b[2])<<40 | uint64(b[3])<<32 | uint64(b[4])<<24 | uint64(b[5])<<16 | uint64(b[6])<<8 | uint64(b[7])
}

// mix returns a hash of two numbers, by the product of both and its two halves.
func mix(a, b uint64) uint64 {
	high, low := bits.Mul64(a^0xa0761d6478bd642f, b^0xe7037ed1a0b428db)
	high, low = bits.Mul64(high^low^0x8ebc6af09c88c6e3, (high+low)^0x589965cc75374cc3)
	return high ^ low
}

// clientOf returns a number for the client of req: its IPv4 address, or the first 64
// bits of its IPv6 address. It is false where the address is not known.
func clientOf(req *tunnel.Request) (client uint64, known bool) {
	addr := req.Source.Addr().Unmap()
	switch {
	case !addr.IsValid():
		return 0, false
	case addr.Is4():
		b := addr.As4()
		return 1<<63 | uint64(b[0])<<24 | uint64(b[1])<<16 | uint64(b[2])<<8 | uint64(b[3]), true
	}
	b := addr.As16()
	return be64(b[:8]), true
}

// A Choice says how the endpoints of a route came to be in their order.
type Choice struct {
	Policy    string
	Client    string        // whose hash counts, or who keeps an endpoint; "" where neither is so
	StickyFor time.Duration // 0 where clients keep no endpoint
	Zone      string        // the gateway's own, where its endpoints are preferred
	Endpoints []EndpointChoice
}

// An EndpointChoice is what counted for one endpoint of a route.
type EndpointChoice struct {
	Weight  int    // 0 where there are no weights
	Tunnels int64  // open or being dialed; -1 where they are not counted
	Why     string // what speaks for the endpoint, or against it; "" for nothing
}

// Explain says how the endpoints of a route, which Resolve has returned for req, came to
// be in their order. It is for people.
func (r *Registry) Explain(req *tunnel.Request, route *tunnel.Route) Choice {
	c := Choice{Policy: RoundRobin, Endpoints: make([]EndpointChoice, len(route.Endpoints))}
	unhealthy := make([]bool, len(route.Endpoints))
	r.health.unhealthy(route.Endpoints, r.checkOf(req), func(i int) { unhealthy[i] = true })
	isEjected := make([]bool, len(route.Endpoints))
	eachEjected(route.Endpoints, func(i int) { isEjected[i] = true })
	b, ok := route.Balancer.(*balance)
	if !ok {
		b = &balance{policy: RoundRobin, service: &Service{}}
	}
	c.Policy, c.StickyFor, c.Zone = b.policy, b.stickyFor, b.zone
	client, known := clientOf(req)
	var kept uint64
	var left time.Duration
	if known && (b.policy == SourceHash || b.stickyFor > 0) {
		c.Client = clientText(req)
		if b.stickyFor > 0 {
			now := time.Now()
			kept, left = b.state.sticky.find(client, b.stickyFor, now), b.state.sticky.left(client, b.stickyFor, now)
		}
	}
	for i := range route.Endpoints {
		ep, to := &route.Endpoints[i], &c.Endpoints[i]
		configured := b.configured(ep)
		to.Tunnels = -1
		if ep.Load != nil {
			to.Tunnels = ep.Load.Tunnels()
		}
		if configured != nil {
			to.Weight = int(configured.weight())
		}
		switch {
		case isEjected[i]:
			to.Why = "ejected"
		case unhealthy[i]:
			to.Why = "unhealthy"
		case kept != 0 && kept == hashOf(ep):
			to.Why = fmt.Sprintf("the client's endpoint, for %v more", left.Round(time.Second))
		case b.zone != "" && configured != nil && configured.Zone == b.zone:
			to.Why = "in the gateway's zone"
		case b.zone != "" && configured != nil && configured.Zone != "":
			to.Why = "in zone " + configured.Zone
		}
		if i > 0 || unhealthy[i] || kept != 0 && kept == hashOf(ep) || len(route.Endpoints) < 2 {
			continue
		}
		why := map[string]string{RoundRobin: "its turn", LeastConnections: "fewest tunnels for its weight", SourceHash: "first by the client's hash"}[b.policy]
		switch {
		case b.policy == SourceHash && !known:
			why = "its turn, as the client's address is not known"
		case b.policy == LeastConnections && len(route.Endpoints) > maxCompared:
			why = "fewer tunnels for its weight than another one at random"
		}
		if to.Why != "" {
			why += ", " + to.Why
		}
		to.Why = why
	}
	return c
}

// checkOf returns the check of the service of req; that of a rule's backend is not known.
func (r *Registry) checkOf(req *tunnel.Request) Check {
	t := r.Table()
	if t.listenerOnly(req) {
		return Check{}
	}
	m, err := t.findVisible(req)
	if err != nil || t.here >= 0 && len(m.entry.Via) == 0 && !t.direct(m.entry.home, t.here) { // behind gateways
		return Check{}
	}
	return m.entry.Check
}

// configured returns the endpoint that ep is an address of; nil for none.
func (b *balance) configured(ep *tunnel.Endpoint) *Endpoint {
	for i := range b.service.Endpoints {
		c := &b.service.Endpoints[i]
		if c.Port != 0 && c.Port != ep.Addr.Port() {
			continue
		}
		if c.Host != "" && c.Host == ep.Host || c.Addr.IsValid() && c.Addr.Unmap() == ep.Addr.Addr() {
			return c
		}
	}
	return nil
}

// clientText is clientOf for people.
func clientText(req *tunnel.Request) string {
	addr := req.Source.Addr().Unmap()
	bits := 32
	if addr.Is6() {
		bits = 64
	}
	p, _ := addr.WithZone("").Prefix(bits)
	return p.String()
}
