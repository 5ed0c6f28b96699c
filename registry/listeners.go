package registry

import (
	"fmt"
	"iter"
	"net/netip"
	"slices"

	"culvert.dev/tunnel"
)

// compiledListeners are the listeners of a table, indexed for lookups.
type compiledListeners struct {
	byName   map[string]*compiledListener
	sections map[string]*compiledSection
	list     []*compiledListener
	hostKeys map[tunnel.Name][]SSHFingerprint // by name of the gateway
	refused  []refusedListener
	backends []serviceEntry // of rules: each Service once
	rules    []*compiledRule
	turns    int32 // how many counters rules and their backends need
}

type refusedListener struct {
	*Listener
	err error
}

// A compiledListener is a Listener with its sections by host.
type compiledListener struct {
	*Listener
	byHost hostMap[*compiledSection]
}

// A compiledSection is a Section with its rules by name.
type compiledSection struct {
	*Section
	byName  hostMap[*compiledRule]
	rules   int
	clients *clientFilter
	origin  string // of its listener
}

// A compiledRule is a Rule with its backends and counters.
type compiledRule struct {
	*Rule
	section  string
	asked    []tunnel.Pattern // the names that it leads on; none where requests have no name
	clients  *clientFilter
	turn     int32 // the index of its counter
	total    uint64
	backends []compiledBackend
}

type compiledBackend struct {
	weight      uint64
	broken      string
	entry       int32 // the index of its service; -1 for a broken one
	turn        int32 // its own counter, which is for its endpoints
	port        uint16
	serviceName tunnel.Name // zero where the entry's own endpoints are meant
	policies    *policySets // nil means those of the service
}

// A hostMap finds a value by name: the one with the exact name, or else the one
// with the longest wildcard, or else the fallback, which is for any name.
type hostMap[T any] struct {
	exact, wild map[tunnel.Name]hostMatch[T] // wild by what follows "*."
	fallback    hostMatch[T]
}

// A hostMatch is a value and the pattern that it is for. An empty pattern means none.
type hostMatch[T any] struct {
	value   T
	pattern string // "a.example.com", "*.example.com", or "*" for any
}

// add adds a value for p. It is false, and returns the earlier value, where p has
// one. The zero Pattern means any name.
func (c *hostMap[T]) add(p tunnel.Pattern, to T) (have T, ok bool) {
	one := hostMatch[T]{to, patternString(p)}
	if p.Suffix.IsZero() {
		if c.fallback.pattern != "" {
			return c.fallback.value, false
		}
		c.fallback = one
		return to, true
	}
	m := &c.exact
	if p.Wildcard {
		m = &c.wild
	}
	if have, taken := (*m)[p.Suffix]; taken {
		return have.value, false
	}
	if *m == nil {
		*m = make(map[tunnel.Name]hostMatch[T])
	}
	(*m)[p.Suffix] = one
	return to, true
}

// find returns the value for a name. Only the fallback matches the zero Name. It does
// not allocate.
func (c *hostMap[T]) find(name tunnel.Name) (one hostMatch[T], ok bool) {
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
	return c.fallback, c.fallback.pattern != ""
}

// patternString is p.String, with "*" for the zero Pattern, which means any name.
func patternString(p tunnel.Pattern) string {
	if p.Suffix.IsZero() {
		return "*"
	}
	return p.String()
}

// Listeners iterates over the listeners in the order of their snapshots, without
// those that are refused. What they point to must not be changed.
func (t *Table) Listeners() iter.Seq[*Listener] {
	return func(yield func(*Listener) bool) {
		if t == nil || t.listeners == nil {
			return
		}
		for _, f := range t.listeners.list {
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
		if t == nil || t.listeners == nil {
			return
		}
		for _, r := range t.listeners.refused {
			if !yield(r.Listener, r.err) {
				return
			}
		}
	}
}

// SectionOf returns the section of a listener that is for a name, of TLS, and
// nil where there is none. The zero Name means a client that sent no name,
// which only a section for any host serves.
func (t *Table) SectionOf(listener string, name tunnel.Name) *Section {
	if t == nil || t.listeners == nil {
		return nil
	}
	f := t.listeners.byName[listener]
	if f == nil {
		return nil
	}
	s, ok := f.byHost.find(name)
	if !ok {
		return nil
	}
	return s.value.Section
}

// SectionAdmits reports whether a section admits the client of req.
func (t *Table) SectionAdmits(section string, req *tunnel.Request) bool {
	s := t.listeners.sections[section]
	return s != nil && s.clients.admits(req, "section", s.Name, s.origin) == nil
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
		if t == nil || t.listeners == nil {
			return
		}
		for i := range t.listeners.backends {
			if !yield(t.listeners.backends[i].Service) {
				return
			}
		}
	}
}

// A socket is where at most one listener can be.
type socket struct {
	udp  bool
	host string
	addr netip.AddrPort
	path string // of a Unix socket; fd:NAME of one of systemd
}

// addListeners compiles the listeners of snapshots.
func (b *builder) addListeners(snapshots []Snapshot) {
	var f *compiledListeners
	sockets := map[socket]*Listener{}
	entries := map[*Service]int32{}
	for s := range snapshots {
		for _, l := range snapshots[s].Listeners {
			if f == nil {
				f = &compiledListeners{byName: map[string]*compiledListener{}, sections: map[string]*compiledSection{}}
				b.listeners = f
			}
			at := socket{l.Protocol == UDP || l.Protocol == Datagrams, l.Host, netip.AddrPortFrom(normalAddr(l.Address), l.Port), ""}
			if l.Unix != nil {
				at = socket{path: l.Unix.Path}
			} else if l.Inherited != "" {
				at = socket{path: "fd:" + l.Inherited}
			}
			what, kept, why := "", "", ""
			switch before := f.byName[l.Name]; {
			case l.Name == "" || l.Port == 0 && l.Settings == nil:
				what, why = fmt.Sprintf("listener %q, port %d", l.Name, l.Port), "it has no name, or no port"
			case !slices.Contains([]string{TLS, TCP, UDP, HTTP, Streams, Datagrams}, l.Protocol) || (l.Settings != nil) != (l.Protocol == Streams || l.Protocol == Datagrams):
				what, why = fmt.Sprintf("listener %q, protocol %q", l.Name, l.Protocol), "there is no such protocol"
			case before != nil:
				what, kept = fmt.Sprintf("listener %q", l.Name), before.Origin
			case (l.Unix != nil || l.Inherited != "") && l.Protocol != Streams:
				what, why = fmt.Sprintf("listener %q, protocol %q", l.Name, l.Protocol), "a Unix socket, or one of systemd, is for streams"
			case sockets[at] != nil && (l.Port != 0 || at.path != ""):
				what, kept = fmt.Sprintf("%s of listener %q", at, l.Name), fmt.Sprintf("listener %q of %s", sockets[at].Name, orUnknown(sockets[at].Origin))
			}
			if what != "" {
				b.conflicts = append(b.conflicts, &Conflict{What: what, Kept: kept, Dropped: l.Origin, Why: why})
				f.refused = append(f.refused, refusedListener{l, b.conflicts[len(b.conflicts)-1]})
				continue
			}
			sockets[at] = l
			one := &compiledListener{Listener: l}
			f.byName[l.Name] = one
			f.list = append(f.list, one)
			f.addHostKey(l)
			for _, s := range l.Sections {
				b.addSection(one, s, entries)
			}
		}
	}
}

// addHostKey takes in by which keys clients of SSH know the gateway.
func (f *compiledListeners) addHostKey(l *Listener) {
	if l.Settings == nil || l.Settings.SSH == nil {
		return
	}
	for _, name := range l.Settings.SSH.Names {
		for _, print := range l.Settings.SSH.Fingerprints {
			if slices.Contains(f.hostKeys[name], print) {
				continue
			}
			if f.hostKeys == nil {
				f.hostKeys = map[tunnel.Name][]SSHFingerprint{}
			}
			f.hostKeys[name] = append(f.hostKeys[name], print)
		}
	}
}

// HostKeys returns the fingerprints of the keys by which clients of SSH know the gateway that
// they call name; nil where no listener has that name.
func (t *Table) HostKeys(name tunnel.Name) []SSHFingerprint {
	if t == nil || t.listeners == nil {
		return nil
	}
	return t.listeners.hostKeys[name]
}

func (s socket) String() string {
	if s.path != "" {
		return "socket " + s.path
	}
	network := "tcp"
	if s.udp {
		network = "udp"
	}
	if !s.addr.Addr().IsValid() {
		return fmt.Sprintf("port %d of %s", s.addr.Port(), network)
	}
	return fmt.Sprintf("%s of %s", s.addr, network)
}

func (b *builder) addSection(l *compiledListener, s *Section, entries map[*Service]int32) {
	f := b.listeners
	if _, taken := f.sections[s.Name]; taken || s.Name == "" {
		b.conflict(fmt.Sprintf("section %q", s.Name), "an earlier listener", l.Origin)
		return
	}
	one := &compiledSection{Section: s, clients: compileClientFilter(s.Clients), origin: l.Origin}
	host := s.Host
	if l.Protocol != TLS {
		host = tunnel.Pattern{}
	}
	if have, ok := l.byHost.add(host, one); !ok {
		b.conflict(fmt.Sprintf("host %q of listener %q", patternString(host), l.Name), fmt.Sprintf("section %q", have.Name), fmt.Sprintf("section %q", s.Name))
		return
	}
	f.sections[s.Name] = one
	for _, r := range s.Rules {
		b.addRule(l, one, r, entries)
	}
}

func (b *builder) addRule(l *compiledListener, s *compiledSection, r *Rule, entries map[*Service]int32) {
	f := b.listeners
	one := &compiledRule{Rule: r, section: s.Name, clients: compileClientFilter(r.Clients), turn: f.turns, backends: make([]compiledBackend, len(r.Backends))}
	f.turns++
	f.rules = append(f.rules, one)
	if s.rules++; l.Protocol == TLS {
		switch one.asked = r.Names; {
		case len(r.Names) > 0:
		case s.Host != tunnel.Pattern{}:
			one.asked = []tunnel.Pattern{s.Host}
		default:
			one.asked = []tunnel.Pattern{tunnel.AnyName}
		}
	}
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
			to.serviceName = from.ServiceName
		}
		at, ok := entries[from.Service]
		if !ok {
			at = int32(len(f.backends))
			entries[from.Service] = at
			f.backends = append(f.backends, serviceEntry{Service: from.Service, index: -1, home: -1, clients: compileClientFilter(from.Service.Clients)})
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
			b.conflict(fmt.Sprintf("name %q of section %q", patternString(p), s.Name), have.origin(), one.origin())
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

func (r *compiledRule) origin() string {
	if r.Origin == "" {
		return r.Name
	}
	return r.Name + " of " + r.Origin
}
