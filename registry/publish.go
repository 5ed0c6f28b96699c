package registry

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"culvert.dev/tunnel"
)

// A PortRange is the ports from First to Last, both included.
type PortRange struct{ First, Last uint16 }

// ParsePortRange reads "20000-20999". A single port is a range, too.
func ParsePortRange(s string) (PortRange, error) {
	first, last, found := strings.Cut(s, "-")
	if !found {
		last = first
	}
	var r PortRange
	for _, p := range []struct {
		text string
		to   *uint16
	}{{first, &r.First}, {last, &r.Last}} {
		v, err := strconv.ParseUint(p.text, 10, 16)
		if err != nil || v == 0 || p.text[0] == '0' {
			return PortRange{}, fmt.Errorf("%q is not a number from 1 to 65535", p.text)
		}
		*p.to = uint16(v)
	}
	if r.First > r.Last {
		return PortRange{}, fmt.Errorf("it ends with %d, before it begins with %d", r.Last, r.First)
	}
	return r, nil
}

func (r PortRange) String() string {
	if r.First == r.Last {
		return strconv.Itoa(int(r.First))
	}
	return fmt.Sprintf("%d-%d", r.First, r.Last)
}

// Len returns the number of ports.
func (r PortRange) Len() int { return int(r.Last) - int(r.First) + 1 }

// Contains reports whether port is in the range.
func (r PortRange) Contains(port uint16) bool { return r.First <= port && port <= r.Last }

// A Published is a port of a service that has a port of the gateway of its own.
type Published struct {
	Protocol string      // "tcp"
	Service  string      // the service's name
	Name     tunnel.Name // by which connections to Assigned request the service
	Port     uint16      // of the service; 0 if the service has no list of ports
	Assigned uint16      // of the gateway
}

// unassigned returns p without its assigned port.
func (p Published) unassigned() Published {
	p.Assigned = 0
	return p
}

// Publishable returns the ports that want a port of the gateway: each port of each service
// that is exposed and has Publish, with the first of its names that leads to it. A service
// with wildcards only has no such name. Assigned is 0 in all of them.
func (t *Table) Publishable() []Published {
	if t == nil {
		return nil
	}
	var all []Published
	for i := range t.services {
		e := &t.services[i]
		if !e.Publish || !e.Exposed {
			continue
		}
		for _, port := range orAny(e.Ports) {
			at := slices.IndexFunc(e.Names, func(p tunnel.Pattern) bool { return !p.Wildcard && t.claimant(p.Suffix, port) == e.index })
			if at >= 0 {
				all = append(all, Published{Protocol: "tcp", Service: e.Name, Name: e.Names[at].Suffix, Port: port})
			}
		}
	}
	return all
}

// claimant returns the index of the service that has a name at a port, or -1.
func (t *Table) claimant(name tunnel.Name, port uint16) int32 {
	c := t.exact[name]
	at, ok := c.find(port)
	if !ok {
		return -1
	}
	return c[at].service
}

// Published returns the ports of services that have a port of the gateway, in the order of
// the latter. The slice must not be changed.
func (t *Table) Published() []Published {
	if t == nil {
		return nil
	}
	return t.published
}

// PublishedAs returns those of Published that lead to the service called name.
func (t *Table) PublishedAs(name tunnel.Name) []Published {
	if t == nil {
		return nil
	}
	return t.publishedAs[name]
}

// publish sets Published to those of list that are Publishable.
func (t *Table) publish(list []Published) {
	t.published, t.publishedAs = nil, nil
	if len(list) == 0 {
		return
	}
	known := make(map[Published]bool)
	for _, p := range t.Publishable() {
		known[p] = true
	}
	for _, p := range list {
		if known[p.unassigned()] {
			t.published = append(t.published, p)
		}
	}
	slices.SortFunc(t.published, func(a, b Published) int {
		return cmp.Or(cmp.Compare(a.Assigned, b.Assigned), cmp.Compare(a.Protocol, b.Protocol))
	})
	t.publishedAs = make(map[tunnel.Name][]Published, len(t.published))
	for _, p := range t.published {
		t.publishedAs[p.Name] = append(t.publishedAs[p.Name], p)
	}
}

// Publish sets what Published returns from now on, for later tables too, as far as it is
// Publishable. It returns the current table, which is a new one if something has changed. It
// returns nil before the first table.
func (r *Registry) Publish(list []Published) *Table {
	return r.change(func(next *Table) bool {
		before := next.published
		next.publish(list)
		return !slices.Equal(next.published, before)
	})
}

// change replaces the current table by a copy that edit has changed, if edit returns true. edit
// must not change the services. change returns the current table, nil before the first one.
func (r *Registry) change(edit func(next *Table) bool) *Table {
	r.mu.Lock()
	defer r.mu.Unlock()
	old := r.current.Load()
	if old == nil {
		return nil
	}
	next := *old.table
	if !edit(&next) {
		return old.table
	}
	next.generation++
	r.current.Store(&state{table: &next, turns: old.turns, ruleOffset: old.ruleOffset})
	return &next
}
