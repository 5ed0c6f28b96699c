package gatewayapi

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
	gwv1 "sigs.k8s.io/gateway-api/apis/v1"

	"culvert.dev/registry"
	"culvert.dev/tunnel"
)

// A route is one of any kind: what they differ in is a few fields.
type route struct {
	metav1.Object
	kind      string
	parents   []gwv1.ParentReference
	hostnames []gwv1.Hostname
	refs      []gwv1.BackendRef // of its one rule; of HTTP all rules' together

	hosts    []tunnel.Pattern // that hostnames say
	badHosts []string         // of hostnames, those that are none
	backends []*backend
	resolved metav1.Condition // ResolvedRefs, the same for each parent
	idle     []string         // of backends, those without an endpoint
	ignored  []string         // malformed annotations of backends

	clients    registry.ClientFilter
	clientsErr error // why the annotations for clients can't be read; nobody is admitted then
}

// An attachment is of a route to a listener.
type attachment struct {
	route *route
	hosts []tunnel.Pattern // of the route, those that the listener has any of; empty means that there is no question of hosts
}

func (r *route) key() RouteKey { return RouteKey{r.kind, key(r.Object)} }

func (r *route) String() string {
	return strings.ToLower(r.kind) + "/" + r.GetNamespace() + "/" + r.GetName()
}

// routes are all that there are, in order of precedence within each kind.
func (t *translator) routes() []*route {
	var rs []*route
	for _, o := range sorted(t.in.TLSRoutes) {
		rs = append(rs, &route{Object: o, kind: tlsRoute, parents: o.Spec.ParentRefs, hostnames: o.Spec.Hostnames, refs: refsOf(o.Spec.Rules)})
	}
	for _, o := range sorted(t.in.TCPRoutes) {
		rs = append(rs, &route{Object: o, kind: tcpRoute, parents: o.Spec.ParentRefs, refs: refsOf(o.Spec.Rules)})
	}
	for _, o := range sorted(t.in.UDPRoutes) {
		rs = append(rs, &route{Object: o, kind: udpRoute, parents: o.Spec.ParentRefs, refs: refsOf(o.Spec.Rules)})
	}
	return append(append(rs, t.httpRoutes()...), t.grpcRoutes()...)
}

// refsOf are the backends of all rules.
func refsOf[R gwv1.TLSRouteRule | gwv1.TCPRouteRule | gwv1.UDPRouteRule](rules []R) (refs []gwv1.BackendRef) {
	for _, r := range rules {
		refs = append(refs, gwv1.TCPRouteRule(r).BackendRefs...)
	}
	return refs
}

// attachRoutes finds the listeners of every route, and says what became of each
// of its parents.
func (t *translator) attachRoutes() {
	for _, r := range t.routes() {
		r.parseHosts()
		r.clients, r.clientsErr = clientsOf(r)
		st := RouteStatus{Others: t.others(r)}
		if !t.concerns(r) {
			t.res.Routes[r.key()] = st
			continue
		}
		t.resolveBackends(r)
		for _, ref := range r.parents {
			g, listeners, ok := t.parent(r, ref)
			if !ok || slices.ContainsFunc(st.Parents, func(p gwv1.RouteParentStatus) bool { return sameParent(p.ParentRef, ref, r.GetNamespace()) }) {
				continue
			}
			accepted, resolved := t.attach(r, ref, listeners), r.resolved
			if accepted.Status == metav1.ConditionTrue {
				t.notePolicies(r, g)
				resolved = r.resolvedAt(g)
			}
			st.Parents = append(st.Parents, gwv1.RouteParentStatus{
				ParentRef: ref, ControllerName: t.controller,
				Conditions: observe(r.GetGeneration(), []metav1.Condition{accepted, resolved}),
			})
		}
		if len(st.Parents) > 0 {
			t.res.addCause(r.key(), r.resolved)
		}
		if len(r.idle) > 0 && r.kind != httpRoute && r.kind != grpcRoute && acceptedBy(st.Parents) {
			n := note{reasonNoEndpoints, truncate(strings.Join(r.idle, "; ") + ": connections to it are refused")}
			if t.res.addNoteCause(r.key(), n) {
				t.res.Notes[r.key()] = append(t.res.Notes[r.key()], n)
			}
		}
		if len(r.ignored) > 0 && r.kind != httpRoute && r.kind != grpcRoute && acceptedBy(st.Parents) {
			n := note{reasonAnnotationIgnored, truncate(strings.Join(r.ignored, "; "))}
			if t.res.addNoteCause(r.key(), n) {
				t.res.Notes[r.key()] = append(t.res.Notes[r.key()], n)
			}
		}
		if r.kind == httpRoute {
			t.noteHTTP(r, st.Parents)
		}
		t.res.Routes[r.key()] = st
	}
}

// resolvedAt returns the ResolvedRefs of a route at one of its Gateways.
func (r *route) resolvedAt(g *gateway) metav1.Condition {
	if r.resolved.Status != metav1.ConditionTrue {
		return r.resolved
	}
	for _, b := range r.backends {
		if why := b.unsigned(g); why != "" {
			return condition(string(gwv1.RouteConditionResolvedRefs), false, string(routeReasonAnnotation), why)
		}
	}
	return r.resolved
}

// concerns reports whether a route has any parent of ours.
func (t *translator) concerns(r *route) bool {
	return slices.ContainsFunc(r.parents, func(ref gwv1.ParentReference) bool {
		_, _, ok := t.parent(r, ref)
		return ok
	})
}

// parentName is the namespaced name that a route's reference means.
func parentName(ref gwv1.ParentReference, home string) types.NamespacedName {
	return types.NamespacedName{Namespace: string(ptr.Deref(ref.Namespace, gwv1.Namespace(home))), Name: string(ref.Name)}
}

// parent finds what a reference is to: one of our Gateways with its own
// listeners, or a ListenerSet of one with the set's. It is false for all
// others, of which we say nothing.
func (t *translator) parent(r *route, ref gwv1.ParentReference) (*gateway, []*listener, bool) {
	if ptr.Deref(ref.Group, gwv1.GroupName) != gwv1.GroupName {
		return nil, nil, false
	}
	name := parentName(ref, r.GetNamespace())
	switch ptr.Deref(ref.Kind, "Gateway") {
	case "Gateway":
		if g := t.gateways[name]; g != nil {
			return g, g.own, true
		}
	case "ListenerSet":
		if s := t.sets[name]; s != nil {
			return s.gw, s.entries, true
		}
	}
	return nil, nil, false
}

// others says which entries with our controller's name in a route's status are not ours to remove:
// those of a Gateway, or of a ListenerSet of one, that exists but is of a class that another
// instance serves, or is in a namespace that is not watched. If the class is another controller's
// the entries are removed.
func (t *translator) others(r *route) func(gwv1.ParentReference) bool {
	home := r.GetNamespace()
	return func(ref gwv1.ParentReference) bool {
		name := parentName(ref, home)
		if len(t.in.Namespaces) != 0 && !slices.Contains(t.in.Namespaces, name.Namespace) {
			return true
		}
		at := t.foreign
		if ptr.Deref(ref.Kind, "Gateway") == "ListenerSet" {
			at = t.unheld
		}
		return at[name] && slices.ContainsFunc(r.parents, func(p gwv1.ParentReference) bool { return sameParent(p, ref, home) })
	}
}

// sameParent compares references by what they mean.
func sameParent(a, b gwv1.ParentReference, home string) bool {
	return ptr.Deref(a.Group, gwv1.GroupName) == ptr.Deref(b.Group, gwv1.GroupName) && ptr.Deref(a.Kind, "Gateway") == ptr.Deref(b.Kind, "Gateway") &&
		parentName(a, home) == parentName(b, home) &&
		ptr.Deref(a.SectionName, "") == ptr.Deref(b.SectionName, "") && ptr.Deref(a.Port, 0) == ptr.Deref(b.Port, 0)
}

// attach finds those of a parent's listeners that take a route, and says
// whether there are any: in the order in which they can fail to.
func (t *translator) attach(r *route, ref gwv1.ParentReference, all []*listener) metav1.Condition {
	const kind = string(gwv1.RouteConditionAccepted)
	var named, takers []*listener
	for _, l := range all {
		if !l.isOf(ref) {
			continue
		}
		named = append(named, l)
		if l.takes(r.kind) && t.takesNamespace(l, r.GetNamespace()) {
			takers = append(takers, l)
		}
	}
	switch {
	case len(named) == 0:
		return condition(kind, false, string(gwv1.RouteReasonNoMatchingParent), t.noListener(r, ref))
	case r.kind == grpcRoute:
		return condition(kind, false, string(gwv1.RouteReasonNotAllowedByListeners), noGRPC)
	case len(takers) == 0:
		return condition(kind, false, string(gwv1.RouteReasonNotAllowedByListeners), t.noTaker(r, named)+t.unselected(named...))
	case r.clientsErr != nil:
		return condition(kind, false, string(gwv1.RouteReasonUnsupportedValue), r.clientsErr.Error())
	case len(r.badHosts) > 0 && len(r.hosts) == 0:
		return condition(kind, false, string(gwv1.RouteReasonUnsupportedValue), "no hostname can be used: "+strings.Join(r.badHosts, ", "))
	}
	attached := false
	for _, l := range takers {
		a := &attachment{route: r}
		if len(r.hosts) > 0 {
			for _, h := range r.hosts {
				if _, ok := intersect(h, l.host); ok {
					a.hosts = append(a.hosts, h)
				}
			}
			if a.hosts == nil {
				continue
			}
		}
		attached = true
		if !l.attached[r.key()] {
			l.attached[r.key()] = true
			l.rules = append(l.rules, a)
		}
	}
	if !attached {
		return condition(kind, false, string(gwv1.RouteReasonNoMatchingListenerHostname), "no listener has any of the hostnames")
	}
	message := "accepted"
	switch {
	case r.kind == httpRoute:
		message = "accepted, but " + noHTTP
	case len(r.badHosts) > 0:
		message = "accepted without hostnames that can't be used: " + strings.Join(r.badHosts, ", ")
	}
	return condition(kind, true, string(gwv1.RouteReasonAccepted), message)
}

// noTaker says why none of the listeners that a route names takes it.
func (t *translator) noTaker(r *route, named []*listener) string {
	for _, l := range named {
		if l.takes(r.kind) {
			return fmt.Sprintf("no listener allows a %s of namespace %q: see allowedRoutes.namespaces", r.kind, r.GetNamespace())
		}
	}
	return fmt.Sprintf("no listener allows a %s: %s", r.kind, takenBy(named))
}

// takenBy says which kinds of routes listeners allow.
func takenBy(ls []*listener) string {
	var texts []string
	for _, l := range ls {
		var kinds []string
		for _, k := range l.kinds {
			kinds = append(kinds, string(k.Kind))
		}
		texts = append(texts, fmt.Sprintf("%s (%s) allows %s", l.spec.Name, l.spec.Protocol, cmp.Or(strings.Join(kinds, ", "), "none")))
	}
	return strings.Join(texts, "; ")
}

// noListener says which listener it is that a parent does not have, and where it is.
func (t *translator) noListener(r *route, ref gwv1.ParentReference) string {
	name := parentName(ref, r.GetNamespace())
	text := string(ptr.Deref(ref.Kind, "Gateway")) + " " + name.String() + " has no listener"
	if section := ptr.Deref(ref.SectionName, ""); section != "" {
		text += fmt.Sprintf(" named %q", section)
	}
	if ref.Port != nil {
		text += fmt.Sprintf(" at port %d", *ref.Port)
	}
	if g := t.gateways[name]; g != nil && ptr.Deref(ref.Kind, "Gateway") == "Gateway" {
		for _, s := range g.sets {
			if slices.ContainsFunc(s.entries, func(l *listener) bool { return l.isOf(ref) }) {
				return text + "; its ListenerSet " + key(s).String() + " has: name that as the parent"
			}
		}
	}
	return text
}

// unselected says that namespaces are selected by labels that may not be read, or is "".
func (t *translator) unselected(ls ...*listener) string {
	for _, l := range ls {
		if a := l.spec.AllowedRoutes; a != nil && a.Namespaces != nil && ptr.Deref(a.Namespaces.From, "") == gwv1.NamespacesFromSelector {
			if why := t.unread("namespaces", "Namespaces", ""); why != "" {
				return ", for all that is known: " + why + ", and they are selected by their labels"
			}
		}
	}
	return ""
}

// isOf reports whether l is one of those of its owner that a reference means.
func (l *listener) isOf(ref gwv1.ParentReference) bool {
	return (ref.SectionName == nil || *ref.SectionName == "" || *ref.SectionName == l.spec.Name) && (ref.Port == nil || *ref.Port == l.spec.Port)
}

// takesNamespace reports whether l takes routes of a namespace.
func (t *translator) takesNamespace(l *listener, namespace string) bool {
	from, selector := gwv1.NamespacesFromSame, (*metav1.LabelSelector)(nil)
	if a := l.spec.AllowedRoutes; a != nil && a.Namespaces != nil {
		from, selector = ptr.Deref(a.Namespaces.From, gwv1.NamespacesFromSame), a.Namespaces.Selector
	}
	return t.selects(from, selector, l.owner().GetNamespace(), namespace)
}

func (r *route) parseHosts() {
	if r.kind == tlsRoute && len(r.hostnames) == 0 {
		r.hosts = []tunnel.Pattern{{}} // as CRDs before v1.5 let routes be: for any name
		return
	}
	for _, h := range r.hostnames {
		p, err := tunnel.ParsePattern(string(h))
		if err != nil {
			r.badHosts = append(r.badHosts, fmt.Sprintf("%q (%v)", h, err))
			continue
		}
		if !slices.Contains(r.hosts, p) {
			r.hosts = append(r.hosts, p)
		}
	}
}
