package registry

import (
	"cmp"
	"fmt"
	"net/netip"
	"reflect"
	"slices"
	"strconv"
	"strings"

	"culvert.dev/tunnel"
)

// DefaultZone is the zone of a Mesh that has no other.
const DefaultZone = "mesh.internal"

// Clusterset is the zone of what clusters export to all others: the
// multi-cluster services DNS specification, KEP-1645.
const Clusterset = "clusterset.local"

// A Mesh says how snapshots are read: what makes their names, and where they are
// looked at from. The zero Mesh is ready.
type Mesh struct {
	Zone    string // that services with an ID have their names in; "" means DefaultZone
	Network string // the one we are in ourselves, and endpoints without another; "" for none

	// TopologyZone is the zone that we are in ourselves, as endpoints have theirs; ""
	// prefers none.
	TopologyZone string
}

// Names returns the names of a service in the mesh: the one of its cluster, and
// the short one, which belongs to the default namespace and is zero in others.
func (m Mesh) Names(id ID) (full, short tunnel.Name, err error) {
	full, err = tunnel.ParseName(id.Service + "." + id.namespace() + ".svc." + id.Cluster + "." + cmp.Or(m.Zone, DefaultZone))
	if err == nil && id.namespace() == DefaultNamespace {
		short, err = tunnel.ParseName(id.Service + "." + id.Cluster)
	}
	return full, short, err
}

// SetName returns the name of a service in the cluster set.
func (id ID) SetName() (tunnel.Name, error) {
	return tunnel.ParseName(id.Service + "." + id.namespace() + clustersetSuffix)
}

const clustersetSuffix = ".svc." + Clusterset

func (id ID) namespace() string { return cmp.Or(id.Namespace, DefaultNamespace) }

// addMeshNames claims the names that service i has by its ID.
func (b *builder) addMeshNames(i int32) {
	e := &b.services[i]
	if e.ID == (ID{}) {
		return
	}
	full, short, err := b.mesh.Names(e.ID)
	if err != nil {
		b.refuse(fmt.Sprintf("the mesh name of %q", e.Name), e.Origin, err.Error())
		return
	}
	for _, name := range []tunnel.Name{full, short} {
		if !name.IsZero() {
			b.exact[name] = b.claim(b.exact[name], "name", name.String(), i)
		}
	}
	if len(e.Names) == 0 {
		s := *e.Service
		s.Names = []tunnel.Pattern{{Suffix: full}}
		e.Service = &s
	}
	if !e.Exported {
		return
	}
	if set, err := e.ID.SetName(); err == nil {
		if b.sets[set] == nil {
			b.setNames = append(b.setNames, set)
		}
		b.sets[set] = append(b.sets[set], i)
	}
}

// addSets claims the names of the cluster set. For a name that several clusters export it
// adds a service with the endpoints of all of them.
func (b *builder) addSets() {
	for _, name := range b.setNames {
		members := b.sets[name]
		first := &b.services[members[0]]
		if len(members) == 1 {
			b.exact[name] = b.claim(b.exact[name], "name", name.String(), first.index)
			continue
		}
		s := *first.Service
		s.Name, s.Names, s.Addresses, s.ID, s.Exported = name.String(), nil, nil, ID{Service: s.ID.Service, Namespace: s.ID.Namespace}, false
		s.Publish, s.Endpoints, s.Ports, s.NamedPorts = false, nil, nil, nil
		var joined []*serviceEntry
		for _, m := range members {
			member := &b.services[m]
			if why := first.incompatibility(member); why != "" {
				b.conflict(fmt.Sprintf("what %q adds to %q (%s)", member.Name, name, why), first.Origin, member.Origin)
				continue
			}
			joined = append(joined, member)
			s.VIP = s.VIP || member.VIP
			s.Ports = union(s.Ports, member.Ports)
			s.NamedPorts = union(s.NamedPorts, member.NamedPorts)
		}
		for _, member := range joined {
			s.Endpoints = append(s.Endpoints, member.mergedEndpoints(s.Ports)...)
		}
		i := b.append(&s)
		b.exact[name] = b.claim(b.exact[name], "name", name.String(), i)
	}
}

// mergedEndpoints returns the endpoints of e as endpoints of a service that has other ports
// too: they serve the ports of e only.
func (e *serviceEntry) mergedEndpoints(ports []uint16) []Endpoint {
	var eps []Endpoint
	for _, ep := range e.Endpoints {
		if ep.Cluster == "" {
			ep.Cluster = e.ID.Cluster
		}
		if ep.Port == 0 && len(e.Ports) == 1 {
			ep.Port = e.Ports[0]
		}
		if ep.ServicePort != 0 || len(e.Ports) == 0 || len(e.Ports) == len(ports) {
			eps = append(eps, ep)
			continue
		}
		to := ep.Port
		for _, port := range e.Ports {
			ep.ServicePort, ep.Port = port, cmp.Or(to, port)
			eps = append(eps, ep)
		}
	}
	return eps
}

// union appends to a those elements of b that it does not have.
func union[T comparable](a, b []T) []T {
	for _, v := range b {
		if !slices.Contains(a, v) {
			a = append(a, v)
		}
	}
	return a
}

// incompatibility says why o, of another cluster, cannot share a name of the cluster set
// with e, or "". The first service decides, as KEP-1645 says of exports.
func (e *serviceEntry) incompatibility(o *serviceEntry) string {
	switch {
	case e == o:
		return ""
	case e.Headless != o.Headless:
		return "one of them is headless"
	case e.Exposed != o.Exposed, !sameSet(e.views, o.views), len(e.ExposedTo) != len(o.ExposedTo):
		return "they are exposed to different networks"
	case !e.Match.IsZero() || !o.Match.IsZero():
		return "one of them is for some ClientHellos only"
	case !e.Clients.equal(o.Clients):
		return "they admit different clients"
	case len(e.Via) > 0 || len(o.Via) > 0:
		return "one of them is reached via another gateway"
	case e.ProxyProtocol != o.ProxyProtocol:
		return "they speak different versions of the PROXY protocol"
	case !reflect.DeepEqual(e.ForwardIdentity, o.ForwardIdentity):
		return "they are told of the caller's identity in different ways"
	case e.StartTLS != o.StartTLS:
		return "they begin TLS in different ways"
	case e.Insecure != o.Insecure:
		return "one of them is insecure"
	}
	return ""
}

// sameSet reports whether a and b have the same elements in any order. Neither has one twice.
func sameSet(a, b []int32) bool {
	return len(a) == len(b) && !slices.ContainsFunc(a, func(v int32) bool { return !slices.Contains(b, v) })
}

// A nameMatch is the services that have a name, at any port.
type nameMatch struct {
	claims
	label   string // of one endpoint of a headless service; "" for the service
	cluster string // of that endpoint, in the cluster set; "" for any
	gateway string // the one gateway to use; "" for any
}

// matchName returns the first match of name as: an exact name, an endpoint of a headless
// service, one of these by way of one gateway, the wildcard with the longest suffix.
func (t *Table) matchName(name tunnel.Name) (nameMatch, bool) {
	if m, ok := t.matchExact(name); ok {
		return m, true
	}
	if m, ok := t.matchGateway(name); ok {
		return m, true
	}
	return t.matchWild(name)
}

// matchExact matches an exact name, or an endpoint of a headless service.
func (t *Table) matchExact(name tunnel.Name) (nameMatch, bool) {
	if c, ok := t.exact[name]; ok {
		return nameMatch{claims: c}, true
	}
	return t.matchEndpoint(name)
}

// matchGateway matches GATEWAY.NAME: see GatewayName.
func (t *Table) matchGateway(name tunnel.Name) (m nameMatch, ok bool) {
	if len(t.gateways) == 0 {
		return m, false
	}
	parent, ok := name.Parent()
	if !ok {
		return m, false
	}
	label := name.String()[:len(name.String())-len(parent.String())-1]
	if _, ok := t.gateways[label]; !ok {
		return m, false
	}
	if m, ok = t.matchExact(parent); !ok {
		m, ok = t.matchWild(parent)
	}
	m.gateway = label
	return m, ok
}

// matchWild matches the wildcard with the longest suffix.
func (t *Table) matchWild(name tunnel.Name) (nameMatch, bool) {
	for parent, ok := name.Parent(); ok; parent, ok = parent.Parent() {
		if c, ok := t.wild[parent]; ok {
			return nameMatch{claims: c}, true
		}
	}
	return nameMatch{}, false
}

// matchEndpoint matches ENDPOINT.NAME, where NAME is that of a headless service, and in the
// cluster set HOST.CLUSTER.NAME, where CLUSTER.NAME must not be a name.
func (t *Table) matchEndpoint(name tunnel.Name) (m nameMatch, ok bool) {
	if t.headless == 0 {
		return m, false
	}
	parent, ok := name.Parent()
	if !ok {
		return m, false
	}
	m.label = name.String()[:len(name.String())-len(parent.String())-1]
	if strings.HasSuffix(parent.String(), clustersetSuffix) {
		set, ok := parent.Parent()
		if !ok {
			return m, false
		}
		m.cluster = parent.String()[:len(parent.String())-len(set.String())-1]
		parent = set
		if !strings.HasSuffix(parent.String(), clustersetSuffix) {
			return m, false
		}
	}
	if m.claims, ok = t.exact[parent]; !ok {
		return m, false
	}
	for _, c := range m.claims {
		if len(t.services[c.service].endpointNamed(m.label, m.cluster, c.port)) > 0 {
			return m, true
		}
	}
	return m, false
}

// endpointNamed returns the part of e.Endpoints with the one endpoint that label is of: its
// name, its index in the list, or its address with dashes. Where endpoints serve one port
// each, it is the one that serves port.
func (e *serviceEntry) endpointNamed(label, cluster string, port uint16) []Endpoint {
	if !e.Headless {
		return nil
	}
	at := -1
	for i := range e.Endpoints {
		if ep := &e.Endpoints[i]; ep.Name == label && e.inCluster(ep, cluster) && ep.Serves(port) {
			at = i
			break
		}
	}
	if at < 0 {
		at = e.endpointNumbered(label, cluster, port)
	}
	if at < 0 {
		return nil
	}
	return e.Endpoints[at : at+1 : at+1]
}

// inCluster reports whether ep is in a cluster; "" is any.
func (e *serviceEntry) inCluster(ep *Endpoint, cluster string) bool {
	return cluster == "" || cluster == cmp.Or(ep.Cluster, e.ID.Cluster)
}

// endpointNumbered returns the index of the endpoint whose number or address is label, or -1.
// In the cluster set there are no numbers, because the order of clusters is not defined.
func (e *serviceEntry) endpointNumbered(label, cluster string, port uint16) int {
	if n, err := strconv.ParseUint(label, 10, 31); err == nil {
		if cluster == "" && int(n) < len(e.Endpoints) && (label == "0" || label[0] != '0') {
			return e.nthServing(int(n), port)
		}
		return -1
	}
	a, ok := parseDashed(label)
	if !ok {
		return -1
	}
	for i := range e.Endpoints {
		if e.Endpoints[i].Addr == a && e.inCluster(&e.Endpoints[i], cluster) && e.Endpoints[i].Serves(port) {
			return i
		}
	}
	return -1
}

// nthServing returns the index of the n-th endpoint, from 0, that serves port. Where each
// port of a pod is an endpoint of its own, it is the same pod for every port.
func (e *serviceEntry) nthServing(n int, port uint16) int {
	for i := range e.Endpoints {
		if !e.Endpoints[i].Serves(port) {
			continue
		}
		if n == 0 {
			return i
		}
		n--
	}
	return -1
}

// parseDashed reads an address with dashes for dots or colons: "10-1-2-3", "fd00--1". Before
// a dash at its beginning and after one at its end there is a zero, because a label must not
// begin or end with a dash.
func parseDashed(label string) (netip.Addr, bool) {
	if !strings.Contains(label, "-") || len(label) > 39+2 {
		return netip.Addr{}, false
	}
	if a, err := netip.ParseAddr(strings.ReplaceAll(label, "-", ".")); err == nil {
		return a, true
	}
	a, err := netip.ParseAddr(strings.ReplaceAll(label, "-", ":"))
	return a, err == nil
}

// Dashed returns an address as the label of an endpoint: with dashes for dots or colons.
func Dashed(a netip.Addr) string {
	s := a.Unmap().WithZone("").String()
	if a.Unmap().Is4() {
		return strings.ReplaceAll(s, ".", "-")
	}
	s = strings.ReplaceAll(s, ":", "-")
	if strings.HasPrefix(s, "-") {
		s = "0" + s
	}
	if strings.HasSuffix(s, "-") {
		s += "0"
	}
	return s
}

// EndpointName returns the name of an endpoint of a headless service below name, which is one
// of the service's names. It is "" for an endpoint with neither a name nor an address.
func EndpointName(s *Service, ep *Endpoint, name string) string {
	label := ep.Name
	if label == "" && ep.Addr.IsValid() {
		label = Dashed(ep.Addr)
	}
	if label == "" {
		return ""
	}
	if strings.HasSuffix(name, clustersetSuffix) {
		label += "." + cmp.Or(ep.Cluster, s.ID.Cluster)
	}
	return label + "." + name
}

// GatewayName returns the name below name that means the gateway at one address
// only: for records with a port, which differ between gateways. It is the
// address with dashes, or the DNS name with dashes for dots, before the name,
// and leads where the name does; "" if that is too long.
func GatewayName(at *Endpoint, name string) string {
	label := at.gatewayLabel()
	if label == "" || len(label)+1+len(name) > 253 {
		return ""
	}
	return label + "." + name
}

func (e *Endpoint) gatewayLabel() string {
	if e.Addr.IsValid() {
		return Dashed(e.Addr)
	}
	label := strings.ReplaceAll(strings.ToLower(strings.TrimSuffix(e.Host, ".")), ".", "-")
	if len(label) > 63 { // RFC 1035 section 2.3.4
		return ""
	}
	return label
}
