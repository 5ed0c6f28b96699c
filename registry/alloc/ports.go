package alloc

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	"culvert.dev/registry"
)

// A PortKey identifies what gets a port: one port of one service in one protocol.
type PortKey struct {
	Protocol string // "tcp" or "udp"
	Service  string // the name it is asked for by
	Port     uint16 // of the service; 0 for one that does not tell its ports apart
}

func (k PortKey) String() string {
	if k.Port == 0 {
		return k.Protocol + " " + k.Service
	}
	return fmt.Sprintf("%s %s:%d", k.Protocol, k.Service, k.Port)
}

// Compare orders keys by service, port and protocol.
func (k PortKey) Compare(other PortKey) int {
	return cmp.Or(cmp.Compare(k.Service, other.Service), cmp.Compare(k.Port, other.Port), cmp.Compare(k.Protocol, other.Protocol))
}

// A Port is a port that is assigned to a service. No two of one protocol have the same
// number.
type Port struct {
	PortKey
	Assigned uint16
	Since    time.Time
	Gone     time.Time // when its service was first missed; zero while that is there
}

// A PortFailure is a PortKey that gets no port.
type PortFailure struct {
	PortKey
	Err error // for people, without the Key
}

// A PortPlan says how Assign assigns ports.
type PortPlan struct {
	Range      registry.PortRange
	ReuseAfter time.Duration // how long the port of a service that is gone is reserved; 0 means DefaultReuseAfter
	Now        time.Time

	// Taken reports whether a port must not be assigned to a new key. Existing
	// assignments stay. May be nil.
	Taken func(protocol string, port uint16) bool
}

// Assign returns the assignments, those of services that are gone included, and
// the keys that get none. Keys that are given twice count once; have is left as
// it is. The answer is ordered by port and protocol, and is the same for the
// same arguments in any order.
//
// An assignment outside of the range, which was another one once, is moved into
// it, or dropped where its service is gone. A service that did not tell its ports
// apart and now has a single one keeps its assignment, and the other way round.
func (p *PortPlan) Assign(keys []PortKey, have []Port) ([]Port, []PortFailure) {
	wanted := make(map[PortKey]bool, len(keys))
	byProtocol := map[string][]PortKey{}
	for _, k := range keys {
		if !wanted[k] {
			byProtocol[k.Protocol] = append(byProtocol[k.Protocol], k)
		}
		wanted[k] = true
	}
	leased := map[string][]allocation[PortKey]{}
	for _, a := range inheritPorts(wanted, have) {
		if p.Range.Contains(a.Assigned) {
			leased[a.Protocol] = append(leased[a.Protocol], allocation[PortKey]{Key: a.PortKey, Index: uint64(a.Assigned - p.Range.First), Since: a.Since, Gone: a.Gone})
			if byProtocol[a.Protocol] == nil {
				byProtocol[a.Protocol] = []PortKey{} // its services are all gone
			}
		}
	}
	var all []Port
	var failures []PortFailure
	for protocol, keys := range byProtocol {
		plan := p.pool(protocol)
		next, without, full := plan.assign(keys, leased[protocol])
		for _, l := range next {
			all = append(all, Port{PortKey: l.Key, Assigned: p.Range.First + uint16(l.Index), Since: l.Since, Gone: l.Gone})
		}
		if full != nil {
			full.What = fmt.Sprintf("%s port is free in %s", protocol, p.Range)
		}
		for _, k := range without {
			failures = append(failures, PortFailure{k, full})
		}
	}
	slices.SortFunc(all, func(a, b Port) int {
		return cmp.Or(cmp.Compare(a.Assigned, b.Assigned), cmp.Compare(a.Protocol, b.Protocol))
	})
	slices.SortFunc(failures, func(a, b PortFailure) int { return a.Compare(b.PortKey) })
	return all, failures
}

// pool returns the plan for one protocol.
func (p *PortPlan) pool(protocol string) *pool[PortKey] {
	plan := &pool[PortKey]{
		Size: uint64(p.Range.Len()), ReuseAfter: cmp.Or(p.ReuseAfter, DefaultReuseAfter), Now: p.Now,
		Start: portHash, Compare: PortKey.Compare,
	}
	if p.Taken != nil {
		plan.Taken = func(place uint64) uint64 {
			if p.Taken(protocol, p.Range.First+uint16(place)) {
				return 1
			}
			return 0
		}
	}
	return plan
}

// inheritPorts returns have, with the assignment of a service for any port as that for its one port
// if the service wants that now, and the reverse.
func inheritPorts(wanted map[PortKey]bool, have []Port) []Port {
	type service struct{ protocol, name string }
	want, stand := map[service][]PortKey{}, map[service]int{}
	for k := range wanted {
		s := service{k.Protocol, k.Service}
		want[s] = append(want[s], k)
	}
	for _, a := range have {
		if a.Gone.IsZero() {
			stand[service{a.Protocol, a.Service}]++
		}
	}
	out, renamed := slices.Clone(have), map[PortKey]bool{}
	for i := range out {
		a := &out[i]
		s := service{a.Protocol, a.Service}
		if keys := want[s]; a.Gone.IsZero() && stand[s] == 1 && len(keys) == 1 && (a.Port == 0) != (keys[0].Port == 0) {
			a.Port = keys[0].Port
			renamed[a.PortKey] = true
		}
	}
	// Its earlier assignment of that kind is released: there must not be two.
	return slices.DeleteFunc(out, func(a Port) bool { return renamed[a.PortKey] && !a.Gone.IsZero() })
}

// portHash is where the search for k's port begins. It does not depend on the
// protocol: a service of TCP and UDP most likely has one port for both.
func portHash(k PortKey) uint64 { return hashOf(fmt.Sprintf("%s:%d", k.Service, k.Port)) }
