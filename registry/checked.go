package registry

import (
	"cmp"
	"context"
	"iter"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	"culvert.dev/internal/background"
	"culvert.dev/tunnel"
)

// complete returns c with its defaults, and without what has no meaning for
// its kind, so that checks that ask the same are equal. A table has no others.
func (c Check) complete(names []tunnel.Pattern) Check {
	if c.Kind == "" {
		return Check{}
	}
	c.Interval = cmp.Or(c.Interval, DefaultCheckInterval)
	c.Timeout = min(cmp.Or(c.Timeout, DefaultCheckTimeout), c.Interval/2)
	c.HealthyThreshold = cmp.Or(c.HealthyThreshold, DefaultHealthyThreshold)
	c.UnhealthyThreshold = cmp.Or(c.UnhealthyThreshold, DefaultUnhealthyThreshold)
	switch c.Kind {
	case "http":
		c.Path = cmp.Or(c.Path, "/")
		c.Statuses = cmp.Or(c.Statuses, DefaultStatuses)
		if c.Host == "" {
			c.Host = firstName(names)
		}
	case "tls":
		// Without a host it is not the service's own: 100,000 of them may have
		// one endpoint, and whether there is TLS is not a matter of the name.
		c.Path, c.Statuses = "", ""
	default:
		c.Host, c.Path, c.Statuses = "", "", ""
	}
	return c
}

// firstName is the first name that is no wildcard, or "".
func firstName(names []tunnel.Pattern) string {
	for _, p := range names {
		if !p.Wildcard && !p.Suffix.IsZero() {
			return p.Suffix.String()
		}
	}
	return ""
}

func completeGateways(gateways []Gateway) []Gateway {
	gateways = slices.Clone(gateways) // what a source has said stays as it is
	for i := range gateways {
		gateways[i].Check = gateways[i].Check.complete(nil)
	}
	return gateways
}

// A Target is an address and how it is checked.
type Target struct {
	Addr  netip.AddrPort
	Host  string // the DNS name the address came from; "" for a written one
	Check Check

	Guarded bool // as the endpoint's

	// ProxyProtocol is the version of the header that connections there begin
	// with; 0 for none. It is inside of TLS if ProxyInsideTLS says so.
	ProxyProtocol  int
	ProxyInsideTLS bool

	// TLS is spoken there before anything is asked; nil for none. Equal settings have
	// the same one.
	TLS TLSLayer

	// Transport dials an endpoint that has a Via, and HealthKey is what the result is
	// counted under. Its Addr may be a port alone, as its Host is looked up by the last
	// gateway. Nil and "" for an address that is dialed from here. Equal hops have the
	// same Transport.
	Transport tunnel.Transport
	HealthKey string
}

// key returns what the result of a check of t is counted under.
func (t *Target) key() healthKey {
	if t.HealthKey != "" {
		return healthKey{hop: t.HealthKey}
	}
	return healthKey{addr: t.Addr}
}

// A TLSLayer speaks TLS by a BackendTLS on connections that were dialed. Handshake returns
// the connection that takes the place of c, and closes c where it fails. A probe has no
// request: req is nil.
type TLSLayer interface {
	Handshake(ctx context.Context, c net.Conn, ep *tunnel.Endpoint, req *tunnel.Request) (net.Conn, error)
}

// A verdict is what a check has found.
type verdict struct {
	since time.Time // of the state
	err   error     // nil where it works
}

// ReportCheck records the result of a check: nil if t works, otherwise the
// failure. An address is down while one of its checks fails: it is not Healthy, and
// requests for services with that check, or with none, try it after all others. A check that finds it well ends what
// failed dials have brought upon it.
func (r *Registry) ReportCheck(t Target, err error) { r.health.check(t, err) }

// ForgetCheck forgets what a check has found, as it is made no more.
func (r *Registry) ForgetCheck(t Target) {
	h := &r.health
	h.mu.Lock()
	defer h.mu.Unlock()
	if v, ok := h.checked[t]; ok {
		h.mark(t, v.err, nil)
		h.countName(t, -1, 0)
		delete(h.checked, t)
	}
	h.count()
}

// Healthy reports whether ap is neither down by a check nor waiting out a
// failed dial. It takes no lock while all is well. An answer may omit unhealthy
// addresses as long as others remain.
func (r *Registry) Healthy(ap netip.AddrPort) bool {
	h := &r.health
	if h.n.Load() == 0 {
		return true
	}
	now := time.Now()
	h.mu.RLock()
	defer h.mu.RUnlock()
	return h.down[healthKey{addr: ap}] == 0 && h.due(healthKey{addr: ap}, now).IsZero() && h.due(healthKey{addr: ap, datagrams: true}, now).IsZero()
}

// States returns a function that reports the state of an address at this moment, and its
// last error, as Health has them, or "" if nothing is known.
func (r *Registry) States() func(ap netip.AddrPort) (state string, err error) {
	type known struct {
		state string
		err   error
	}
	h := &r.health
	if h.n.Load() == 0 {
		return func(netip.AddrPort) (string, error) { return "", nil }
	}
	// The worst comes last.
	states := map[netip.AddrPort]known{}
	now := time.Now()
	h.mu.RLock()
	defer h.mu.RUnlock()
	for t := range h.checked {
		if t.HealthKey == "" {
			states[t.Addr] = known{state: StateUp}
		}
	}
	for key, f := range h.failing {
		if states[key.addr].err != nil && key.datagrams {
			continue // what TCP there has done is said
		}
		one := known{StateSuspect, f.err}
		switch {
		case f.open():
			one.state = StateOpen
		case !h.due(key, now).IsZero():
			one.state = StateFailing
		}
		states[key.addr] = one
	}
	for t, v := range h.checked {
		if key := t.key(); v.err != nil && key.hop == "" {
			states[key.addr] = known{StateDown, v.err}
		}
	}
	return func(ap netip.AddrPort) (string, error) { s := states[ap]; return s.state, s.err }
}

func (h *health) check(t Target, err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	v, known := h.checked[t]
	if !known {
		h.countName(t, 1, 0)
	}
	if !known || (v.err == nil) != (err == nil) {
		h.mark(t, v.err, err)
		v.since = time.Now()
	}
	v.err = err
	if h.checked == nil {
		h.checked = map[Target]verdict{}
	}
	h.checked[t] = v
	if err == nil {
		delete(h.failing, t.key())
		delete(h.failing, healthKey{hop: t.name()})
	}
	h.count()
}

// name returns HOST:PORT of a target whose address came from a name that was looked up
// here, or "".
func (t *Target) name() string {
	if t.Host == "" || t.HealthKey != "" {
		return ""
	}
	return net.JoinHostPort(t.Host, strconv.Itoa(int(t.Addr.Port())))
}

// mark counts how many checks say that an address is down, as one of them changes. The
// caller holds mu.
func (h *health) mark(t Target, before, after error) {
	key := t.key()
	by := checkedKey{key, t.Check}
	switch {
	case before == nil && after != nil:
		if h.down == nil {
			h.down, h.downBy = map[healthKey]int{}, map[checkedKey]int{}
		}
		h.down[key]++
		h.downBy[by]++
		h.countName(t, 0, 1)
	case before != nil && after == nil:
		if h.down[key]--; h.down[key] == 0 {
			delete(h.down, key)
		}
		if h.downBy[by]--; h.downBy[by] == 0 {
			delete(h.downBy, by)
		}
		h.countName(t, 0, -1)
	}
}

// countName adds to the counts of the name that t came from. The caller holds mu.
func (h *health) countName(t Target, all, down int) {
	if t.name() == "" {
		return
	}
	if h.byName == nil {
		h.byName = map[string]nameChecks{}
	}
	n := h.byName[t.name()]
	n.all, n.down = n.all+all, n.down+down
	if n.all == 0 {
		delete(h.byName, t.name())
		return
	}
	h.byName[t.name()] = n
}

// States of a Health.
const (
	StateDown    = "down"    // a check says so
	StateEjected = "ejected" // it has failed too often in a row, and is tried last for a while
	StateOpen    = "open"    // its circuit: connections fail again and again, and one each second is tried
	StateFailing = "failing" // it could not be dialed, and is tried last for a while
	StateSuspect = "suspect" // the while is over, and nobody has reached it since
	StateUp      = "up"      // a check says so
)

// A Health is the state of an address, or of a gateway that is asked by its name: Addr
// is only a port then.
type Health struct {
	Addr      netip.AddrPort
	Datagrams bool     // it is one of UDP
	Host      string   // the DNS name it came from; "" for a written one
	Services  []string // that have it, at most maxNamed
	More      int      // services beside those
	Gateway   string   // the network whose gateway it is; "" for none
	Network   string   // it is in; "" where that is not known
	Via       string   // the gateways on the way to an endpoint that has a Via, nearest first; "" for none

	State string
	Since time.Time // of the state; of the first failure in a row
	Err   error     // the last; nil where it works
	Check Check     // that says so; zero where dials do

	counted int // the last service, from 1, that has it by several endpoints maybe
}

// maxServicesNamed is how many services a Health names: 100,000 may have one endpoint.
const maxServicesNamed = 8

// Health returns the state of addresses that are checked, and of those that
// could not be dialed: the worst first, then by address. It looks through the
// whole table, so it is for people.
func (r *Registry) Health() []Health {
	list := r.health.list()
	if len(list) == 0 {
		return nil
	}
	background.Do(func() { attributeHealth(r.Table(), list) })
	worst := []string{StateDown, StateOpen, StateFailing, StateSuspect, StateUp}
	slices.SortFunc(list, func(a, b Health) int {
		return cmp.Or(
			cmp.Compare(slices.Index(worst, a.State), slices.Index(worst, b.State)), a.Addr.Compare(b.Addr), cmp.Compare(a.Host, b.Host), cmp.Compare(a.Via, b.Via),
			cmp.Compare(a.Check.Kind, b.Check.Kind), cmp.Compare(a.Check.Host, b.Check.Host), cmp.Compare(a.Check.Path, b.Check.Path),
			cmp.Compare(a.Check.Port, b.Check.Port), cmp.Compare(a.Check.Statuses, b.Check.Statuses),
			cmp.Compare(a.Check.Interval, b.Check.Interval), cmp.Compare(a.Check.Timeout, b.Check.Timeout),
			cmp.Compare(a.Check.HealthyThreshold, b.Check.HealthyThreshold), cmp.Compare(a.Check.UnhealthyThreshold, b.Check.UnhealthyThreshold))
	})
	return list
}

func (h *health) list() []Health {
	h.mu.RLock()
	defer h.mu.RUnlock()
	list := make([]Health, 0, len(h.checked)+len(h.failing))
	for t, v := range h.checked {
		one := Health{Addr: t.Addr, Host: t.Host, Check: t.Check, State: StateUp, Since: v.since, Err: v.err}
		if key := t.key(); key.hop != "" {
			one.setHop(key)
		}
		if v.err != nil {
			one.State = StateDown
		}
		list = append(list, one)
	}
	now := time.Now()
	for key, f := range h.failing {
		one := Health{Addr: key.addr, Datagrams: key.datagrams, Host: f.host, State: StateSuspect, Since: f.since, Err: f.err}
		if key.hop != "" {
			one.setHop(key)
		}
		switch {
		case f.open():
			one.State, one.Err = StateOpen, f.connectErr
		case !h.due(key, now).IsZero():
			one.State = StateFailing
		}
		list = append(list, one)
	}
	return list
}

// setHop sets what is known of an endpoint or a gateway that is asked by its name.
func (h *Health) setHop(key healthKey) {
	target, via, _ := strings.Cut(key.hop, behindWord)
	h.Host, h.Addr, h.Via = hostOf(target), netip.AddrPortFrom(netip.Addr{}, portOf(target)), via
}

// attributeHealth says of what in t the addresses of list are.
func attributeHealth(t *Table, list []Health) {
	if t == nil {
		return
	}
	byAddr, byHost := map[netip.Addr][]*Health{}, map[string][]*Health{}
	for i := range list {
		h := &list[i]
		h.Network, _ = t.Network(h.Addr.Addr())
		if h.Host != "" {
			byHost[h.Host] = append(byHost[h.Host], h)
		} else {
			byAddr[h.Addr.Addr()] = append(byAddr[h.Addr.Addr()], h)
		}
	}
	each := func(ep *Endpoint, s *Service, found func(*Health)) {
		candidates := byHost[ep.Host]
		if ep.isBehind() {
			candidates = byHost[ep.hostBehind()]
		} else if ep.Addr.IsValid() {
			candidates = byAddr[ep.Addr.Unmap()]
		}
		for _, h := range candidates {
			if (h.Via != "") != (ep.isBehind()) { // another host, whose name or address is the same
				continue
			}
			if ports := ep.PortsFor(s); len(ports) == 0 || slices.Contains(ports, h.Addr.Port()) {
				if i := t.network(ep); i >= 0 {
					h.Network = t.networks[i].Name
				}
				found(h)
			}
		}
	}
	i := 0
	for _, all := range []iter.Seq[*Service]{t.Services(), t.Backends()} {
		for s := range all {
			i++
			if len(s.Via) > 0 {
				continue // its endpoints are another's
			}
			for j := range s.Endpoints {
				each(&s.Endpoints[j], s, func(h *Health) {
					switch {
					case h.counted == i || slices.Contains(h.Services, s.Name): // a backend may be a service, too
					case len(h.Services) < maxServicesNamed:
						h.Services = append(h.Services, s.Name)
					default:
						h.More++
					}
					h.counted = i
				})
			}
		}
	}
	none := &Service{}
	for n := range t.Networks() {
		for _, g := range n.Gateways {
			each(&g.Address, none, func(h *Health) { h.Gateway = n.Name })
			each(&g.Public, none, func(h *Health) { h.Gateway = n.Name })
		}
	}
}
