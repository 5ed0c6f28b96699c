package ports

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	"culvert.dev/registry"
	"culvert.dev/registry/leases"
)

// DefaultKeep is how long the port of a service that is gone is given to
// nobody else.
const DefaultKeep = leases.DefaultKeep

// A Range is the ports there are to give.
type Range = registry.PortRange

// A Key is what gets a port: one port of one service in one protocol.
type Key struct {
	Protocol string // "tcp" or "udp"
	Service  string // the name it is asked for by
	Port     uint16 // of the service; 0 for one that does not tell its ports apart
}

func (k Key) String() string {
	if k.Port == 0 {
		return k.Protocol + " " + k.Service
	}
	return fmt.Sprintf("%s %s:%d", k.Protocol, k.Service, k.Port)
}

// Compare orders keys by service, port and protocol.
func (k Key) Compare(other Key) int {
	return cmp.Or(cmp.Compare(k.Service, other.Service), cmp.Compare(k.Port, other.Port), cmp.Compare(k.Protocol, other.Protocol))
}

// An Assignment is a port that is a Key's. No two of one protocol have the same
// port.
type Assignment struct {
	Key
	Assigned uint16
	Since    time.Time
	Gone     time.Time // when its service was first missed; zero while that is there
}

// A Failure is a Key that gets no port.
type Failure struct {
	Key
	Err error // for people, without the Key
}

// A Plan is what Assign goes by.
type Plan struct {
	Range Range
	Keep  time.Duration // how long the port of a service that is gone is nobody's; 0 means DefaultKeep
	Now   time.Time

	// Taken reports whether a port must not be given to anyone new. What stands
	// is not asked about. May be nil.
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
func (p *Plan) Assign(keys []Key, have []Assignment) ([]Assignment, []Failure) {
	wanted := make(map[Key]bool, len(keys))
	byProtocol := map[string][]Key{}
	for _, k := range keys {
		if !wanted[k] {
			byProtocol[k.Protocol] = append(byProtocol[k.Protocol], k)
		}
		wanted[k] = true
	}
	leased := map[string][]leases.Lease[Key]{}
	for _, a := range inherit(wanted, have) {
		if p.Range.Contains(a.Assigned) {
			leased[a.Protocol] = append(leased[a.Protocol], leases.Lease[Key]{Key: a.Key, Place: uint64(a.Assigned - p.Range.First), Since: a.Since, Gone: a.Gone})
			if byProtocol[a.Protocol] == nil {
				byProtocol[a.Protocol] = []Key{} // all of it is gone
			}
		}
	}
	var all []Assignment
	var failures []Failure
	for protocol, keys := range byProtocol {
		plan := p.leases(protocol)
		next, without, full := plan.Assign(keys, leased[protocol])
		for _, l := range next {
			all = append(all, Assignment{Key: l.Key, Assigned: p.Range.First + uint16(l.Place), Since: l.Since, Gone: l.Gone})
		}
		if full != nil {
			full.What = fmt.Sprintf("%s port is free in %s", protocol, p.Range)
		}
		for _, k := range without {
			failures = append(failures, Failure{k, full})
		}
	}
	slices.SortFunc(all, func(a, b Assignment) int {
		return cmp.Or(cmp.Compare(a.Assigned, b.Assigned), cmp.Compare(a.Protocol, b.Protocol))
	})
	slices.SortFunc(failures, func(a, b Failure) int { return a.Compare(b.Key) })
	return all, failures
}

// leases returns the plan for one protocol.
func (p *Plan) leases(protocol string) *leases.Plan[Key] {
	plan := &leases.Plan[Key]{
		Places: uint64(p.Range.Len()), Keep: cmp.Or(p.Keep, DefaultKeep), Now: p.Now,
		Start: start, Compare: Key.Compare,
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

// inherit returns have, with the assignment of a service for any port as that
// for its one port where that is what is wanted now, and the reverse.
func inherit(wanted map[Key]bool, have []Assignment) []Assignment {
	type service struct{ protocol, name string }
	want, stand := map[service][]Key{}, map[service]int{}
	for k := range wanted {
		s := service{k.Protocol, k.Service}
		want[s] = append(want[s], k)
	}
	for _, a := range have {
		if a.Gone.IsZero() {
			stand[service{a.Protocol, a.Service}]++
		}
	}
	out, renamed := slices.Clone(have), map[Key]bool{}
	for i := range out {
		a := &out[i]
		s := service{a.Protocol, a.Service}
		if keys := want[s]; a.Gone.IsZero() && stand[s] == 1 && len(keys) == 1 && (a.Port == 0) != (keys[0].Port == 0) {
			a.Port = keys[0].Port
			renamed[a.Key] = true
		}
	}
	// What it had in that way before is nobody's: there must not be two.
	return slices.DeleteFunc(out, func(a Assignment) bool { return renamed[a.Key] && !a.Gone.IsZero() })
}

// start is where the search for k's port begins. It does not depend on the
// protocol: a service of TCP and UDP most likely has one port for both.
func start(k Key) uint64 { return leases.Hash(fmt.Sprintf("%s:%d", k.Service, k.Port)) }

// Exhausted is the error of a Failure for which there is no port left.
type Exhausted = leases.Exhausted
