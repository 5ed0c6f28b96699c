package peer

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"culvert.dev/registry"
	"culvert.dev/tunnel"
)

// covers reports whether one who speaks for a zone speaks for all names of p.
func covers(zone, p tunnel.Pattern) bool {
	switch {
	case p == tunnel.AnyName || p.Suffix.IsZero():
		return false
	case zone == p:
		return true
	case p.Wildcard:
		return zone.Wildcard && zone.Matches(p.Suffix)
	}
	return zone.Matches(p.Suffix)
}

// Overlap reports whether there is a name of both zones. Names of the cluster set belong to
// all clusters, so that several peers may offer them.
func Overlap(a, b tunnel.Pattern) bool {
	return (covers(a, b) || covers(b, a)) && !shared(a) && !shared(b)
}

func shared(zone tunnel.Pattern) bool {
	name := zone.Suffix.String()
	return name == registry.Clusterset || strings.HasSuffix(name, "."+registry.Clusterset)
}

// A received is the catalog that a peer has sent. It is replaced and not changed.
type received struct {
	instance   string
	generation uint64
	services   map[string]*registry.Service // by key
	sizes      map[string]cost              // of each
	size       int                          // of all, in bytes
	names      int                          // of all
	gateways   []registry.Gateway           // that the peer names; none means those that are configured
	named      []Gateway                    // of which gateways are made
	leftOut    map[string]string            // by key: why, of the service or of names of it
}

// A cost is what a service counts for, against MaxCatalog and MaxNames.
type cost struct{ bytes, names int }

// A importer makes services of what a peer offers.
type importer struct {
	*Config
	site string        // ours
	mesh registry.Mesh // ours
}

// service returns s as the registry has it; nil where it is left out. What is left out is
// said, for people.
func (im *importer) service(s *Service, peerSite string) (out *registry.Service, leftOut string) {
	name := clip(cmp.Or(s.Name, s.Key))
	switch err := s.check(); {
	case err != nil:
		return nil, fmt.Sprintf("service %q: %v", name, err)
	case im.site != "" && (s.Site == im.site || s.Cluster == im.site):
		return nil, fmt.Sprintf("service %q is our own", name)
	case s.Site != "" && s.Site != peerSite:
		return nil, fmt.Sprintf("service %q is that of site %q, for which the peer does not speak", name, clip(s.Site))
	}
	out = &registry.Service{
		Name: s.Name, Ports: s.Ports, ALPN: s.ALPN, VIP: s.VIP,
		Exposed: true, ExposedTo: im.ExposedTo, Origin: im.origin(),
	}
	var outside []string
	for _, text := range s.Names {
		p, err := tunnel.ParsePattern(text)
		if err != nil || !im.speaksFor(p) {
			outside = append(outside, clip(text))
			continue
		}
		if !slices.Contains(out.Names, p) {
			out.Names = append(out.Names, p)
		}
	}
	if len(outside) > 0 {
		leftOut = fmt.Sprintf("service %q: %q is outside of the zones of the %s", name, outside[0], im.whose())
		if n := len(outside) - 1; n > 0 {
			leftOut += fmt.Sprintf(", and so are %d others", n)
		}
		leftOut += "; " + im.zones()
	}
	if len(out.Names) == 0 {
		return nil, cmp.Or(leftOut, fmt.Sprintf("service %q has no name", name))
	}
	if out.Name = readable(out.Name); out.Name == "" {
		out.Name = out.Names[0].String()
	}
	for _, p := range s.NamedPorts {
		out.NamedPorts = append(out.NamedPorts, registry.NamedPort(p))
	}
	im.join(out, s)
	out.Endpoints = []registry.Endpoint{{Host: out.Names[0].Suffix.String(), Network: im.network()}}
	return out, leftOut
}

// readable returns s without what a log line should not have.
func readable(s string) string {
	return strings.Map(func(r rune) rune {
		if r < ' ' || r == 0x7f {
			return -1
		}
		return r
	}, strings.ToValidUTF8(s, ""))
}

// network is the network that the services of the peer are in.
func (c *Config) network() string { return cmp.Or(c.Network, NetworkPrefix+c.Name) }

// source is what the registry calls the catalog of the peer.
func (c *Config) source() string {
	if c.Network != "" {
		return "catalog of " + c.Name
	}
	return c.network()
}

// origin says where services of the peer come from, for people.
func (c *Config) origin() string {
	if c.Network != "" {
		return catalogPrefix + "the " + c.Name
	}
	return originPrefix + c.Name
}

// whose names the peer, in a sentence that begins with "the".
func (c *Config) whose() string {
	if c.Network != "" {
		return c.Name
	}
	return "peer"
}

// zones says which the zones of the peer are, the first of many, for people.
func (c *Config) zones() string {
	const most = 3
	if len(c.Zones) == 0 {
		return "it has none"
	}
	var all []string
	for _, zone := range c.Zones[:min(most, len(c.Zones))] {
		all = append(all, strconv.Quote(zone.String()))
	}
	list := "the zones are " + strings.Join(all, ", ")
	if n := len(c.Zones) - most; n > 0 {
		list += fmt.Sprintf(" and %d more", n)
	}
	return list
}

// settings is what the catalog depends on beside the peer itself.
func (c *Config) settings() string {
	s := fmt.Sprint(c.Name, c.Zones, c.ExposedTo, c.IDs)
	if c.Network == "" {
		return s
	}
	for i := range c.Gateways { // whose catalog is no longer believed once others are asked
		s += fmt.Sprint(" ", c.Gateways[i].AddressFrom("", ""))
	}
	return s + " " + c.Network
}

// speaksFor reports whether the peer may offer the names of p. The zone AnyName is that of all
// names but those of the host and its link (RFC 6761 section 6.3, RFC 6762 section 3), and
// wildcards below one label, such as *.com.
func (c *Config) speaksFor(p tunnel.Pattern) bool {
	if p.Suffix.IsReserved() || c.Network != "" && registry.IsLocalhost(p.Suffix.String()) {
		return false
	}
	return slices.ContainsFunc(c.Zones, func(zone tunnel.Pattern) bool {
		if zone == tunnel.AnyName {
			_, several := p.Suffix.Parent()
			name := p.Suffix.String()
			if name == "local" || strings.HasSuffix(name, ".local") || p.Wildcard && !several {
				return false
			}
		}
		return covers(zone, p)
	})
}

// join makes out one of the services that several clusters have under one name, if the peer
// speaks for all names that out gets by that.
func (im *importer) join(out *registry.Service, s *Service) {
	id := registry.ID{Service: s.Service, Namespace: s.Namespace, Cluster: s.Cluster}
	if !isLabel(id.Service) || !isLabel(id.Cluster) || id.Namespace != "" && !isLabel(id.Namespace) {
		return
	}
	full, short, err := im.mesh.Names(id)
	set, bad := id.SetName()
	if err != nil || bad != nil {
		return
	}
	for _, n := range []tunnel.Name{full, short, set} {
		if !n.IsZero() && !im.speaksFor(tunnel.Pattern{Suffix: n}) {
			return
		}
	}
	out.ID, out.Exported, out.Headless = id, true, s.Headless
	out.Names = slices.DeleteFunc(out.Names, func(p tunnel.Pattern) bool { return p == tunnel.Pattern{Suffix: set} })
	if len(out.Names) == 0 {
		out.Names = []tunnel.Pattern{{Suffix: full}}
	}
}

// gateways returns those that the peer names, and why some are left out.
func (im *importer) gateways(all []Gateway) (out []registry.Gateway, leftOut []string) {
	if im.Access.KeyName == "" {
		return nil, nil // they would not know us
	}
	for i := range all {
		g, err := all[i].Registered(im.Access, false)
		if err != nil {
			leftOut = append(leftOut, err.Error())
			continue
		}
		g.Check = im.Check
		out = append(out, g)
	}
	return out, leftOut
}

// use has r have the gateways that the peer names.
func (im *importer) use(r *received, named []Gateway) {
	maps.DeleteFunc(r.leftOut, func(key, _ string) bool { return strings.HasPrefix(key, gatewayKey) })
	var leftOut []string
	r.gateways, leftOut = im.gateways(named)
	r.named = named
	for i, why := range leftOut {
		r.leftOut[fmt.Sprintf("%s%d", gatewayKey, i)] = why
	}
}

// gatewayKey begins the keys of gateways in received.leftOut.
const gatewayKey = "gateway "

// An assembly is a snapshot or a change of which not all lines have come.
type assembly struct {
	kind       string
	generation uint64
	lines      int
	read       int // bytes of lines
	next       *received
}

// begin returns the assembly that the first line m belongs to, which changes before.
func begin(m *Message, instance string, before *received) (*assembly, error) {
	a := &assembly{kind: m.Kind, generation: m.Generation}
	switch {
	case m.Generation == 0:
		return nil, fmt.Errorf("a %s has no generation", m.Kind)
	case m.Kind == KindSnapshot:
		if before != nil && before.instance == instance && m.Generation < before.generation {
			return nil, fmt.Errorf("a snapshot of generation %d has come after generation %d", m.Generation, before.generation)
		}
		a.next = &received{services: map[string]*registry.Service{}, sizes: map[string]cost{}, leftOut: map[string]string{}}
	case before == nil || before.generation == 0 || before.instance != instance:
		return nil, fmt.Errorf("a change has come, and no snapshot before it")
	case m.Generation <= before.generation:
		return nil, fmt.Errorf("a change of generation %d has come after generation %d", m.Generation, before.generation)
	default:
		a.next = &received{services: maps.Clone(before.services), sizes: maps.Clone(before.sizes), size: before.size, names: before.names, leftOut: maps.Clone(before.leftOut)}
	}
	a.next.instance, a.next.generation = instance, m.Generation
	return a, nil
}

// add adds a line of size bytes. After an error the assembly is of no use.
func (a *assembly) add(im *importer, m *Message, size int, peerSite string) error {
	a.lines++
	if m.Kind != a.kind || m.Generation != a.generation {
		return fmt.Errorf("a %s of generation %d has come within a %s of generation %d", m.Kind, m.Generation, a.kind, a.generation)
	}
	a.read += size
	switch {
	case a.lines > MaxServices+1:
		return fmt.Errorf("a %s has more than %d lines", a.kind, MaxServices)
	case a.read > 2*MaxCatalog: // what is removed counts, too, and what this version does not know
		return fmt.Errorf("a %s has more than %d bytes", a.kind, 2*MaxCatalog)
	}
	for _, key := range m.Removed {
		a.remove(key)
	}
	for i := range m.Services {
		s := &m.Services[i]
		if _, twice := a.next.sizes[s.Key]; twice && a.kind == KindSnapshot {
			return fmt.Errorf("the key %q is there twice", clip(s.Key))
		}
		a.remove(s.Key)
		each := cost{s.size(), len(s.Names)}
		a.next.sizes[s.Key] = each
		a.next.size += each.bytes
		a.next.names += each.names
		svc, leftOut := im.service(s, peerSite)
		if svc != nil {
			a.next.services[s.Key] = svc
		}
		if leftOut != "" {
			a.next.leftOut[s.Key] = leftOut
		}
	}
	switch {
	case len(a.next.sizes) > MaxServices:
		return fmt.Errorf("the peer offers more than %d services", MaxServices)
	case a.next.size > MaxCatalog:
		return fmt.Errorf("what the peer offers takes more than %d bytes", MaxCatalog)
	case a.next.names > MaxNames:
		return fmt.Errorf("what the peer offers has more than %d names", MaxNames)
	}
	return nil
}

func (a *assembly) remove(key string) {
	a.next.size -= a.next.sizes[key].bytes
	a.next.names -= a.next.sizes[key].names
	delete(a.next.sizes, key)
	delete(a.next.services, key)
	delete(a.next.leftOut, key)
}

// snapshot returns what the registry is told of r; the gateways are those that the peer
// names, if any.
func (r *received) snapshot(c *Config) registry.Snapshot {
	s := registry.Snapshot{}
	if c.Network == "" { // else the configuration has it
		s.Networks = []registry.Network{{Name: c.network(), Gateways: r.gateways}}
	}
	for _, key := range slices.Sorted(maps.Keys(r.services)) {
		s.Services = append(s.Services, r.services[key])
	}
	return s
}
