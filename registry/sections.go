package registry

import (
	"fmt"
	"iter"
	"net/netip"

	"culvert.dev/tunnel"
)

// fronts are the listeners of a table, made ready.
type fronts struct {
	byName   map[string]*front
	sections map[string]*section
	list     []*front
	refused  []refusedListener
	backends []entry // of rules: each Service once
	turns    int32   // how many counters rules and their backends need
}

type refusedListener struct {
	*Listener
	err error
}

// A front is a listener in a table. Of its sections one is found as one of a
// section's rules is.
type front struct {
	*Listener
	byHost choice[*section]
}

// A section is one in a table.
type section struct {
	*Section
	byName choice[*rule]
	rules  int
}

// A rule is one in a table.
type rule struct {
	*Rule
	section  string
	turn     int32 // its counter, among those of fronts
	total    uint64
	backends []backend
}

type backend struct {
	weight uint64
	broken string
	entry  int32 // of fronts; -1 for a broken one
	turn   int32 // its own counter, which is for its endpoints
	port   uint16
	of     tunnel.Name // zero where the entry's own endpoints are meant
}

// A choice is of what has names: the one with the exact name, or else the one
// with the longest wildcard, or else the one for any.
type choice[T any] struct {
	exact, wild map[tunnel.Name]chosen[T] // wild by what follows "*."
	any         chosen[T]
}

// A chosen is what has a name, and the name. Where by is "" it is none.
type chosen[T any] struct {
	to T
	by string // "a.example.com", "*.example.com", or "*" for any
}

// add is false, and returns who is there, where p is taken. The zero Pattern
// means any.
func (c *choice[T]) add(p tunnel.Pattern, to T) (have T, ok bool) {
	one := chosen[T]{to, named(p)}
	if p.Suffix.IsZero() {
		if c.any.by != "" {
			return c.any.to, false
		}
		c.any = one
		return to, true
	}
	m := &c.exact
	if p.Wildcard {
		m = &c.wild
	}
	if have, taken := (*m)[p.Suffix]; taken {
		return have.to, false
	}
	if *m == nil {
		*m = make(map[tunnel.Name]chosen[T])
	}
	(*m)[p.Suffix] = one
	return to, true
}

// find returns what is meant by a name. The zero Name is matched by any only. It
// does not allocate.
func (c *choice[T]) find(name tunnel.Name) (one chosen[T], ok bool) {
	if one, ok = c.exact[name]; ok {
		return one, true
	}
	if len(c.wild) > 0 {
		for parent, more := name.Parent(); more; parent, more = parent.Parent() {
			if one, ok = c.wild[parent]; ok {
				return one, true
			}
		}
	}
	return c.any, c.any.by != ""
}

// named is what a pattern is called where the zero one means any.
func named(p tunnel.Pattern) string {
	if p.Suffix.IsZero() {
		return "*"
	}
	return p.String()
}

// Listeners iterates over the listeners in the order of their snapshots, without
// those that are refused. What they point to must not be changed.
func (t *Table) Listeners() iter.Seq[*Listener] {
	return func(yield func(*Listener) bool) {
		if t == nil || t.fronts == nil {
			return
		}
		for _, f := range t.fronts.list {
			if !yield(f.Listener) {
				return
			}
		}
	}
}

// RefusedListeners iterates over the listeners that can't be, and says why: an
// earlier one has their name, or the address and port.
func (t *Table) RefusedListeners() iter.Seq2[*Listener, error] {
	return func(yield func(*Listener, error) bool) {
		if t == nil || t.fronts == nil {
			return
		}
		for _, r := range t.fronts.refused {
			if !yield(r.Listener, r.err) {
				return
			}
		}
	}
}

// SectionOf returns the section of a listener that is for a name, of TLS, and
// nil where there is none. The zero Name stands for a client that asks for
// nobody, whom only a section for any host serves.
func (t *Table) SectionOf(listener string, name tunnel.Name) *Section {
	if t == nil || t.fronts == nil {
		return nil
	}
	f := t.fronts.byName[listener]
	if f == nil {
		return nil
	}
	s, ok := f.byHost.find(name)
	if !ok {
		return nil
	}
	return s.to.Section
}

// Rules iterates over the rules of all sections.
func (t *Table) Rules() iter.Seq[*Rule] {
	return func(yield func(*Rule) bool) {
		for l := range t.Listeners() {
			for _, s := range l.Sections {
				for _, r := range s.Rules {
					if !yield(r) {
						return
					}
				}
			}
		}
	}
}

// Backends iterates over the services that rules lead to, each once. What they
// point to must not be changed.
func (t *Table) Backends() iter.Seq[*Service] {
	return func(yield func(*Service) bool) {
		if t == nil || t.fronts == nil {
			return
		}
		for i := range t.fronts.backends {
			if !yield(t.fronts.backends[i].Service) {
				return
			}
		}
	}
}

// A place is where at most one listener can be.
type socket struct {
	udp  bool
	addr netip.AddrPort
}

// addListeners makes the listeners of snapshots ready.
func (b *builder) addListeners(snapshots []Snapshot) {
	var f *fronts
	sockets := map[socket]*Listener{}
	entries := map[*Service]int32{}
	i := 0
	for s := range snapshots {
		for _, l := range snapshots[s].Listeners {
			if f == nil {
				f = &fronts{byName: map[string]*front{}, sections: map[string]*section{}}
				b.fronts = f
			}
			at := socket{l.Protocol == UDP, netip.AddrPortFrom(normalAddr(l.Address), l.Port)}
			what, kept, why := "", "", ""
			switch before := f.byName[l.Name]; {
			case l.Name == "" || l.Port == 0:
				what, why = fmt.Sprintf("listener %q, port %d", l.Name, l.Port), "it has no name, or no port"
			case l.Protocol != TLS && l.Protocol != TCP && l.Protocol != UDP && l.Protocol != HTTP:
				what, why = fmt.Sprintf("listener %q, protocol %q", l.Name, l.Protocol), "there is no such protocol"
			case before != nil:
				what, kept = fmt.Sprintf("listener %q", l.Name), before.Origin
			case sockets[at] != nil:
				what, kept = fmt.Sprintf("%s of listener %q", at, l.Name), fmt.Sprintf("listener %q of %s", sockets[at].Name, orUnknown(sockets[at].Origin))
			}
			if what != "" {
				b.conflicts = append(b.conflicts, &Conflict{What: what, Kept: kept, Dropped: l.Origin, Why: why})
				f.refused = append(f.refused, refusedListener{l, b.conflicts[len(b.conflicts)-1]})
				continue
			}
			sockets[at] = l
			one := &front{Listener: l}
			f.byName[l.Name] = one
			f.list = append(f.list, one)
			for _, s := range l.Sections {
				Yield(i)
				i++
				b.addSection(one, s, entries)
			}
		}
	}
}

func (s socket) String() string {
	network := "tcp"
	if s.udp {
		network = "udp"
	}
	if !s.addr.Addr().IsValid() {
		return fmt.Sprintf("port %d of %s", s.addr.Port(), network)
	}
	return fmt.Sprintf("%s of %s", s.addr, network)
}

func (b *builder) addSection(l *front, s *Section, entries map[*Service]int32) {
	f := b.fronts
	if _, taken := f.sections[s.Name]; taken || s.Name == "" {
		b.conflict(fmt.Sprintf("section %q", s.Name), "an earlier listener", l.Origin)
		return
	}
	one := &section{Section: s}
	host := s.Host
	if l.Protocol != TLS {
		host = tunnel.Pattern{}
	}
	if have, ok := l.byHost.add(host, one); !ok {
		b.conflict(fmt.Sprintf("host %q of listener %q", named(host), l.Name), fmt.Sprintf("section %q", have.Name), fmt.Sprintf("section %q", s.Name))
		return
	}
	f.sections[s.Name] = one
	for i, r := range s.Rules {
		Yield(i)
		b.addRule(l, one, r, entries)
	}
}

func (b *builder) addRule(l *front, s *section, r *Rule, entries map[*Service]int32) {
	f := b.fronts
	one := &rule{Rule: r, section: s.Name, turn: f.turns, backends: make([]backend, len(r.Backends))}
	f.turns++
	s.rules++
	for i := range r.Backends {
		from := &r.Backends[i]
		to := &one.backends[i]
		to.weight, to.broken, to.entry = uint64(from.Weight), from.Broken, -1
		one.total += to.weight
		if to.broken == "" && from.Service == nil {
			to.broken = "it leads to no service"
		}
		if to.broken != "" {
			continue
		}
		to.turn = f.turns
		f.turns++
		if len(from.Service.Ports) > 0 {
			to.port = from.Service.Ports[0]
		}
		if len(from.Service.Endpoints) == 0 && len(from.Service.Via) == 0 {
			to.of = from.ServiceName
		}
		at, ok := entries[from.Service]
		if !ok {
			at = int32(len(f.backends))
			entries[from.Service] = at
			f.backends = append(f.backends, entry{Service: from.Service, index: -1, home: -1})
			if check := from.Service.Check.complete(from.Service.Names); check != from.Service.Check {
				whole := *from.Service
				whole.Check = check
				f.backends[at].Service = &whole
			}
		}
		to.entry = at
	}
	claim := func(p tunnel.Pattern) {
		if have, ok := s.byName.add(p, one); !ok && have != one {
			b.conflict(fmt.Sprintf("name %q of section %q", named(p), s.Name), have.origin(), one.origin())
		}
	}
	if l.Protocol != TLS || len(r.Names) == 0 {
		claim(tunnel.Pattern{})
		return
	}
	for _, p := range r.Names {
		if p.Suffix.IsZero() {
			b.refuse(fmt.Sprintf("the empty name of rule %q", r.Name), r.Origin, "it names nothing")
			continue
		}
		claim(p)
	}
}

func (r *rule) origin() string {
	if r.Origin == "" {
		return r.Name
	}
	return r.Name + " of " + r.Origin
}
