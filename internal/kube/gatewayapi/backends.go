package gatewayapi

import (
	"cmp"
	"crypto/tls"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
	gwv1 "sigs.k8s.io/gateway-api/apis/v1"
	mcsv1 "sigs.k8s.io/mcs-api/pkg/apis/v1beta1"

	"culvert.dev/internal/kube/annotations"
	"culvert.dev/internal/kube/endpoints"
	"culvert.dev/registry"
	"culvert.dev/tunnel"
)

// A targetKey names the object that a route leads to, or that a policy is for.
type targetKey struct {
	group, kind, namespace, name string
}

func (k targetKey) String() string { return k.kind + " " + k.namespace + "/" + k.name }

// A backendKey is a targetKey with a port.
type backendKey struct {
	targetKey
	port     int32
	protocol corev1.Protocol
}

// A backend is a resolved reference of a route.
type backend struct {
	backendKey
	weight           uint32
	portName         string
	service          *registry.Service // nil if broken
	of               tunnel.Name       // see registry.Backend
	reason           string            // of ResolvedRefs; "" if nothing is wrong
	why              string            // the reason in words
	broken           string            // why it can't be reached at all
	skippedEndpoints string            // which endpoints are not used, and why
	ignored          []string          // which annotations are malformed, and why

	secured map[*gateway]registry.Backend // with the policy that is for it
}

const serviceImportKind = "ServiceImport"

// resolveBackends finds the backends of a route. A backend that cannot be found keeps its weight, and
// its share of requests is refused: it must not go to the others.
func (t *translator) resolveBackends(r *route) {
	const kind = string(gwv1.RouteConditionResolvedRefs)
	r.resolved = condition(kind, true, string(gwv1.RouteReasonResolvedRefs), "all references are resolved")
	var reason string
	var wrong, warn []string
	for _, ref := range r.refs {
		b := t.resolve(r, ref)
		if w := ptr.Deref(ref.Weight, 1); w > 0 {
			b.weight = uint32(w)
		}
		r.backends = append(r.backends, b)
		if b.reason != "" {
			reason = cmp.Or(reason, b.reason)
			wrong = append(wrong, b.why)
		} else if b.skippedEndpoints != "" {
			warn = append(warn, b.skippedEndpoints)
		}
		for _, text := range b.ignored {
			if !slices.Contains(r.ignored, text) { // another backend may be of the same Service
				r.ignored = append(r.ignored, text)
			}
		}
		if b.service != nil && b.weight > 0 && len(b.service.Endpoints) == 0 && b.of.IsZero() {
			r.idle = append(r.idle, fmt.Sprintf("%s has no ready endpoint for port %d", b.targetKey, b.port))
		}
	}
	if reason != "" {
		r.resolved = condition(kind, false, reason, strings.Join(wrong, "; "))
	} else if warn != nil {
		r.resolved.Message += "; skipped: " + strings.Join(warn, "; ")
	}
	if reason == "" && r.ignored != nil {
		r.resolved.Message = truncate(r.resolved.Message + "; " + strings.Join(r.ignored, "; "))
	}
	if reason == "" && r.idle != nil { // for Gateway API the reference is resolved all the same
		r.resolved.Message = truncate(r.resolved.Message + ", but " + strings.Join(r.idle, "; ") + ": connections to it are refused")
	}
}

// resolve resolves one reference. The caller may change the backend.
func (t *translator) resolve(r *route, ref gwv1.BackendRef) *backend {
	k := backendKey{
		targetKey: targetKey{string(ptr.Deref(ref.Group, "")), string(ptr.Deref(ref.Kind, "Service")), string(ptr.Deref(ref.Namespace, gwv1.Namespace(r.GetNamespace()))), string(ref.Name)},
		port:      ptr.Deref(ref.Port, 0),
		protocol:  corev1.ProtocolTCP,
	}
	if r.kind == udpRoute {
		k.protocol = corev1.ProtocolUDP
	}
	fail := func(reason gwv1.RouteConditionReason, format string, args ...any) *backend {
		b := &backend{backendKey: k}
		b.fail(reason, format, args...)
		return b
	}
	isImport := k.group == mcsv1.GroupName && k.kind == serviceImportKind
	if !isImport && (k.group != "" || k.kind != "Service") {
		return fail(gwv1.RouteReasonInvalidKind, "backend of kind %q, group %q is not supported; supported are Services and ServiceImports", k.kind, k.group)
	}
	if from := (referrer{gwv1.GroupName, r.kind, r.GetNamespace()}); !t.granted(from, k.group, k.kind, k.namespace, k.name) {
		return fail(gwv1.RouteReasonRefNotPermitted, "%s", t.ungranted(from, k.kind, k.namespace, k.name))
	}
	b := t.backends[k]
	if b == nil {
		switch why := t.refused(k); {
		case why != "":
			b = &backend{backendKey: k}
			b.fail(gwv1.RouteReasonRefNotPermitted, "%s may not be exposed: %s", k.targetKey, why)
		case isImport:
			b = t.imported(k)
		default:
			b = t.served(k)
		}
		if b.service != nil {
			t.breakLoops(b)
		}
		t.backends[k] = b
	}
	return &backend{backendKey: k, portName: b.portName, service: b.service, of: b.of, reason: b.reason, why: b.why, broken: b.broken, skippedEndpoints: b.skippedEndpoints, ignored: b.ignored}
}

// refused returns why the administrator refuses that k is exposed, or "".
func (t *translator) refused(k backendKey) string {
	if t.in.Refuses == nil {
		return ""
	}
	return t.in.Refuses(k.namespace, k.name)
}

// served resolves a reference to a Service. The port is that of the Service. Its pods may use another
// number, and EndpointSlices have the port by its name.
func (t *translator) served(k backendKey) *backend {
	b := &backend{backendKey: k}
	s := t.service(k.namespace, k.name)
	if s == nil {
		b.fail(gwv1.RouteReasonBackendNotFound, "%s", t.absent("services", "Services", k.namespace, k.String()))
		return b
	}
	if key(s) == t.in.PublicService {
		b.fail(routeReasonLoop, "%s leads back to this gateway: it is the Service in front of it", k.targetKey)
		return b
	}
	if s.Spec.Type == corev1.ServiceTypeExternalName {
		// It may lead anywhere, and circumvent what protects a namespace: CVE-2021-25740.
		b.fail(gwv1.RouteReasonInvalidKind, "%s is an ExternalName, which culvert does not follow", k)
		return b
	}
	var other string
	for _, p := range s.Spec.Ports {
		if p.Port != k.port {
			continue
		}
		if cmp.Or(p.Protocol, corev1.ProtocolTCP) == k.protocol {
			b.portName = p.Name
			identity, ok := t.identity(b, s)
			if !ok {
				return b
			}
			t.reach(b, reachKey{k, p.Name, endpoints.ChoiceOf(s, t.in.Zone, t.in.Prefer), t.balancing(b, s), identity}, endpoints.OfService(k.namespace, k.name))
			if why := t.unread("endpointslices", "EndpointSlices", k.namespace); why != "" {
				b.service = nil
				b.fail(gwv1.RouteReasonBackendNotFound, "%s, and nothing is known of the endpoints of %s", why, k)
			}
			return b
		}
		other = string(cmp.Or(p.Protocol, corev1.ProtocolTCP))
	}
	if other != "" {
		b.fail(gwv1.RouteReasonUnsupportedProtocol, "port %d of %s is of %s, not %s", k.port, k, other, k.protocol)
	} else {
		b.fail(gwv1.RouteReasonBackendNotFound, "%s has no port %d", k, k.port)
	}
	return b
}

// imported resolves a reference to a ServiceImport.
func (t *translator) imported(k backendKey) *backend {
	b := &backend{backendKey: k}
	i := t.serviceImport(k.namespace, k.name)
	if i == nil {
		b.fail(gwv1.RouteReasonBackendNotFound, "%s", t.absent("serviceimports", "ServiceImports", k.namespace, k.String()))
		return b
	}
	for _, p := range i.Spec.Ports {
		if cmp.Or(p.Protocol, corev1.ProtocolTCP) == k.protocol && (p.Port == k.port || k.port == 0 && len(i.Spec.Ports) == 1) {
			b.portName = p.Name
			k.port = p.Port
			v6 := len(i.Spec.IPFamilies) > 0 && i.Spec.IPFamilies[0] == corev1.IPv6Protocol
			choice := endpoints.Choice{Zone: t.in.Zone, Prefer: t.in.Prefer, V6: v6, Headless: i.Spec.Type == mcsv1.Headless}
			t.reach(b, reachKey{backendKey: k, port: p.Name, choice: choice}, endpoints.OfImport(k.namespace, k.name))
			// Without EndpointSlices, requests go to the endpoints that discovery knows of the
			// clusters. SetName fails for names that no exported service can have.
			b.of, _ = registry.ID{Service: k.name, Namespace: k.namespace}.SetName()
			return b
		}
	}
	b.fail(gwv1.RouteReasonBackendNotFound, "%s has no port %d of %s", k, k.port, k.protocol)
	return b
}

// balancing returns what annotations of a Service and its Namespace say of load balancing. Malformed
// ones are added to b.ignored.
func (t *translator) balancing(b *backend, s *corev1.Service) annotations.Balancing {
	var inherited map[string]string
	ns := t.namespace(s.Namespace)
	if ns != nil {
		inherited = ns.Annotations
	}
	balancing, problems := annotations.ReadBalancing(s.Annotations, inherited)
	for _, p := range problems {
		of := b.targetKey.String()
		if p.Namespace {
			of = "Namespace " + s.Namespace
		}
		b.ignored = append(b.ignored, fmt.Sprintf("annotation %s%s of %s is ignored: %q: %v", annotations.Prefix, p.Key, of, p.Value, p.Err))
	}
	return balancing
}

// routeReasonAnnotation is the reason of ResolvedRefs if a backend has an annotation that is
// malformed, or that asks for what is not possible, and must not be ignored. The API has no reason
// for that.
const routeReasonAnnotation gwv1.RouteConditionReason = "InvalidAnnotation"

// identity returns how the endpoints of a Service are told who a client is. If the annotation can't
// be followed, b fails: a service that reads who calls must not be reached without.
func (t *translator) identity(b *backend, s *corev1.Service) (annotations.Identity, bool) {
	if b.protocol != corev1.ProtocolTCP {
		return annotations.Identity{}, true // datagrams have no header
	}
	var inherited map[string]string
	if ns := t.namespace(s.Namespace); ns != nil {
		inherited = ns.Annotations
	}
	identity, p := annotations.ReadIdentity(s.Annotations, inherited)
	of := b.targetKey.String()
	switch {
	case p != nil:
		if p.Namespace {
			of = "Namespace " + s.Namespace
		}
		b.fail(routeReasonAnnotation, "annotation %s%s of %s: %q: %v", annotations.Prefix, p.Key, of, p.Value, p.Err)
		return identity, false
	case identity.InsideTLS && t.policyFor(b) == nil && !slices.Contains(t.in.PoliciesUnread, b.namespace):
		b.fail(routeReasonAnnotation, "annotation %s%s tells %s of the client inside TLS, and no BackendTLSPolicy has the gateway speak TLS to it", annotations.Prefix, annotations.ForwardIdentity, of)
		return identity, false
	}
	return identity, true
}

// unsigned returns why the gateway can't tell b who a client is, or "".
func (b *backend) unsigned(g *gateway) string {
	if b.service == nil || b.service.ForwardIdentity == nil || !b.service.ForwardIdentity.Assertion || g.client != "" {
		return ""
	}
	return fmt.Sprintf("annotation %s%s of %s asks for an assertion, which is signed with the key of spec.tls.backend.clientCertificateRef, and Gateway %s/%s has none", annotations.Prefix, annotations.ForwardIdentity, b.targetKey, g.Namespace, g.Name)
}

func (b *backend) fail(reason gwv1.RouteConditionReason, format string, args ...any) {
	b.reason, b.why = string(reason), fmt.Sprintf(format, args...)
	b.broken = b.why
}

// A reachKey has everything that the service of a backend depends on, but for its EndpointSlices.
type reachKey struct {
	backendKey
	port      string
	choice    endpoints.Choice
	balancing annotations.Balancing
	identity  annotations.Identity
}

// A reached is a service with the Slices that it was made of. It is valid as long as they are the same,
// because a Slice is never changed, but replaced.
type reached struct {
	of               []*endpoints.Slice
	service          *registry.Service
	skippedEndpoints string
}

// reach sets the service of b, with its endpoints. It is the same service as last time if nothing of it
// has changed, which saves memory and makes it quick to compare snapshots.
func (t *translator) reach(b *backend, k reachKey, owner endpoints.Owner) {
	of := t.slices(owner)
	t.memo.mu.Lock()
	defer t.memo.mu.Unlock()
	r := t.memo.reached[k]
	if r == nil || !sameSlices(r.of, of) {
		r = &reached{of, serviceOf(k.backendKey, k.port, of, k.choice), skippedEndpoints(of)}
		k.balancing.Apply(r.service)
		k.identity.Apply(r.service)
		if !owner.Import {
			t.in.setNetwork(k.backendKey, r.service)
		}
	}
	t.memo.reaching[k] = r
	if r.skippedEndpoints != "" && len(r.service.Endpoints) == 0 {
		b.fail(gwv1.RouteReasonBackendNotFound, "no endpoint of %s can be used: %s", k, r.skippedEndpoints)
		return
	}
	b.service, b.skippedEndpoints = r.service, r.skippedEndpoints
}

// sameSlices compares two sets of Slices.
func sameSlices(a, b []*endpoints.Slice) bool {
	if len(a) != len(b) {
		return false
	}
	for _, s := range a {
		if !slices.Contains(b, s) {
			return false
		}
	}
	return true
}

// forget drops everything that the last translation has not used.
func (m *memo) forget() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.reached, m.reaching = m.reaching, make(map[reachKey]*reached, len(m.reaching))
	m.served, m.serving = m.serving, make(map[types.UID]bool, len(m.serving))
	m.held, m.holding = m.holding, make(map[holder]holding, len(m.holding))
	m.kept, m.keeping = m.keeping, make(map[types.NamespacedName]keptPair, len(m.keeping))
	m.good, m.using = m.using, make(map[types.UID]*tls.Certificate, len(m.using))
}

// serviceOf makes a service of the table from Slices, with the endpoints that are to be used for a
// port.
func serviceOf(k backendKey, port string, of []*endpoints.Slice, c endpoints.Choice) *registry.Service {
	s := &registry.Service{Name: k.namespace + "/" + k.name, ID: registry.ID{Namespace: k.namespace}, Exposed: true, Origin: k.String()}
	if k.port > 0 && k.port <= 65535 {
		s.Ports = []uint16{uint16(k.port)} // the port in requests to a further gateway
	}
	var parts []endpoints.Part
	for _, slice := range of {
		for _, p := range slice.Ports {
			if p.Name == port && p.Protocol == k.protocol && p.Number != 0 {
				parts = append(parts, endpoints.Part{Endpoints: slice.Endpoints, Port: p.Number})
			}
		}
	}
	pods := map[netip.Addr]uint64{}
	c.Choose(parts, func(e *endpoints.Endpoint, port uint16) {
		s.Endpoints = append(s.Endpoints, registry.Endpoint{Addr: e.Addr, Port: port, Zone: e.Zone, Workload: e.Workload})
		if pod := pods[e.Addr]; pod == 0 || e.Pod != 0 && e.Pod < pod {
			pods[e.Addr] = e.Pod // the same of two slices that differ, in any order
		}
	})
	if doubles := c.Doubles(maps.All(pods)); doubles != nil {
		for _, addr := range doubles {
			delete(pods, addr)
		}
		s.Endpoints = slices.DeleteFunc(s.Endpoints, func(e registry.Endpoint) bool {
			_, stays := pods[e.Addr]
			return !stays
		})
	}
	// Slices are in no order, and an endpoint that moves may be in two of them.
	slices.SortFunc(s.Endpoints, func(a, b registry.Endpoint) int {
		return cmp.Or(a.Addr.Compare(b.Addr), int(a.Port)-int(b.Port), endpoints.CompareZones(a.Zone, b.Zone))
	})
	s.Endpoints = slices.CompactFunc(s.Endpoints, func(a, b registry.Endpoint) bool { return a.Addr == b.Addr && a.Port == b.Port })
	return s
}

// setNetwork sets the network of the endpoints of a Service, and its name at the gateways there.
func (s *Settings) setNetwork(k backendKey, to *registry.Service) {
	if s.Network == "" {
		return
	}
	for i := range to.Endpoints {
		to.Endpoints[i].Network = s.Network
	}
	name, _, err := s.Mesh.Names(registry.ID{Service: k.name, Namespace: k.namespace, Cluster: s.Cluster})
	if err == nil { // else clients cannot ask for the name
		to.Names = []tunnel.Pattern{{Suffix: name}}
	}
}

// skippedEndpoints returns which endpoints are never used, whatever their state, or "".
func skippedEndpoints(of []*endpoints.Slice) string {
	first, n := "", 0 // the first in the order of texts, because slices are in no order
	for _, s := range of {
		if n += s.Skips; s.Skips > 0 && (first == "" || s.Skipped < first) {
			first = s.Skipped
		}
	}
	if n > 1 {
		first += fmt.Sprintf(", and %d more", n-1)
	}
	return first
}

// forRule is a backend as a rule has it; tls says that it is to be reached as
// its policy says, if it has one.
func (t *translator) forRule(g *gateway, b *backend, tls bool) registry.Backend {
	plain := registry.Backend{Weight: b.weight, Service: b.service, Broken: b.broken, ServiceName: b.of}
	if !tls || b.service == nil {
		return plain
	}
	if slices.Contains(t.in.PoliciesUnread, b.namespace) {
		return registry.Backend{Weight: b.weight, Broken: "BackendTLSPolicies of namespace " + b.namespace + " may not be read, and one may ask for TLS"}
	}
	p := t.policyFor(b)
	if p == nil {
		return plain
	}
	if secured, ok := b.secured[g]; ok {
		return secured
	}
	secured := registry.Backend{Weight: b.weight}
	switch why := p.why(); {
	case why != "":
		secured.Broken = "BackendTLSPolicy " + p.Name + ": " + why
	case g.clientErr != nil && g.client == "":
		secured.Broken = g.clientErr.Message
	case b.unsigned(g) != "":
		secured.Broken = b.unsigned(g)
	default:
		s := *b.service
		how := *p.tls
		how.KeyName = g.client
		s.TLS = &how
		secured.Service = &s
	}
	if b.secured == nil {
		b.secured = map[*gateway]registry.Backend{}
	}
	b.secured[g] = secured
	return secured
}
