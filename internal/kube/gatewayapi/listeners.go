package gatewayapi

import (
	"fmt"
	"slices"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	gwv1 "sigs.k8s.io/gateway-api/apis/v1"

	"culvert.dev/registry"
	"culvert.dev/tunnel"
)

// Kinds of routes.
const (
	tlsRoute  = "TLSRoute"
	tcpRoute  = "TCPRoute"
	udpRoute  = "UDPRoute"
	httpRoute = "HTTPRoute"
	grpcRoute = "GRPCRoute"
)

// A listener is one of a Gateway or a ListenerSet: the API has two types with
// the same fields for it.
type listener struct {
	gw   *gateway
	set  *listenerSet // nil for one of the Gateway's own
	spec gwv1.Listener
	host tunnel.Pattern // zero is any

	kinds    []gwv1.RouteGroupKind // of routes that may attach
	badKinds metav1.Condition      // zero if those that are asked for are all known

	refused  metav1.Condition // Accepted is False; zero if it is not
	conflict metav1.Condition // Conflicted is True; zero if it is not
	refs     metav1.Condition // ResolvedRefs is False, of certificates; zero if it is not
	overlap  metav1.Condition // OverlappingTLSConfig; zero if it is not
	outdone  bool             // it is refused, or conflicted, as another Gateway has what it wants

	ends   *registry.TLSTermination // how TLS ends here, if it does and can
	broken bool                     // TLS is to end here and can't

	attached map[RouteKey]bool
	rules    []*attachment       // routes that lead on from here
	shadowed map[*route][]string // of those, the names that others have instead: see shadowed.go

	names      []string // of the registry's listeners that it is of
	openErr    error    // of one of those
	unassigned bool     // openErr says that the address is none of this machine's
}

func (t *translator) newListener(g *gateway, s *listenerSet, spec gwv1.Listener) *listener {
	l := &listener{gw: g, set: s, spec: spec, attached: map[RouteKey]bool{}}
	l.findKinds()
	const kind = string(gwv1.ListenerConditionAccepted)
	if l.family() == "" {
		l.refused = condition(kind, false, string(gwv1.ListenerReasonUnsupportedProtocol), fmt.Sprintf("protocol %q is not supported; supported are HTTP, HTTPS, TLS, TCP and UDP", spec.Protocol))
		return l
	}
	if spec.Port < 1 || spec.Port > 65535 {
		l.refused = condition(kind, false, string(gwv1.ListenerReasonPortUnavailable), fmt.Sprintf("port %d is out of range 1-65535", spec.Port))
		return l
	}
	if h := ptr.Deref(spec.Hostname, ""); h != "" && l.hasHost() {
		p, err := tunnel.ParsePattern(string(h))
		if err != nil {
			l.refused = condition(kind, false, string(gwv1.ListenerReasonUnsupportedValue), fmt.Sprintf("hostname %q: %v", h, err))
			return l
		}
		l.host = p
	}
	if spec.Protocol == gwv1.TLSProtocolType || spec.Protocol == gwv1.HTTPSProtocolType {
		if spec.TLS == nil && spec.Protocol == gwv1.TLSProtocolType {
			l.refused = condition(kind, false, string(gwv1.ListenerReasonUnsupportedValue), "protocol TLS needs tls.mode")
		}
		switch m := l.mode(); m {
		case gwv1.TLSModeTerminate, gwv1.TLSModePassthrough:
		default:
			l.refused = condition(kind, false, string(gwv1.ListenerReasonUnsupportedValue), fmt.Sprintf("tls.mode %q is not supported; supported are Passthrough and Terminate", m))
		}
	}
	return l
}

// Families: listeners of one can share a port.
const (
	familyHTTP = "http"
	familyTLS  = "tls"
	familyTCP  = "tcp"
	familyUDP  = "udp"
)

func (l *listener) family() string {
	switch l.spec.Protocol {
	case gwv1.HTTPProtocolType:
		return familyHTTP
	case gwv1.HTTPSProtocolType, gwv1.TLSProtocolType:
		return familyTLS
	case gwv1.TCPProtocolType:
		return familyTCP
	case gwv1.UDPProtocolType:
		return familyUDP
	}
	return ""
}

// hasHost reports whether a listener is told from others by its hostname.
func (l *listener) hasHost() bool {
	return l.family() == familyHTTP || l.family() == familyTLS
}

func (l *listener) mode() gwv1.TLSModeType {
	if l.spec.TLS == nil {
		return gwv1.TLSModeTerminate
	}
	return ptr.Deref(l.spec.TLS.Mode, gwv1.TLSModeTerminate)
}

// terminates reports whether TLS ends at l.
func (l *listener) terminates() bool {
	return l.family() == familyTLS && l.mode() == gwv1.TLSModeTerminate
}

// findKinds says which routes l may have: those of its protocol, or of those
// only the ones it names.
func (l *listener) findKinds() {
	l.kinds = []gwv1.RouteGroupKind{} // for it to say that there are none
	var can string
	switch l.spec.Protocol {
	case gwv1.HTTPProtocolType, gwv1.HTTPSProtocolType:
		can = httpRoute
	case gwv1.TLSProtocolType:
		can = tlsRoute
	case gwv1.TCPProtocolType:
		can = tcpRoute
	case gwv1.UDPProtocolType:
		can = udpRoute
	default:
		return
	}
	group := gwv1.Group(gwv1.GroupName)
	if l.spec.AllowedRoutes == nil || len(l.spec.AllowedRoutes.Kinds) == 0 {
		l.kinds = append(l.kinds, gwv1.RouteGroupKind{Group: &group, Kind: gwv1.Kind(can)})
		return
	}
	for _, k := range l.spec.AllowedRoutes.Kinds {
		if ptr.Deref(k.Group, group) != group || string(k.Kind) != can {
			l.badKinds = condition(string(gwv1.ListenerConditionResolvedRefs), false, string(gwv1.ListenerReasonInvalidRouteKinds),
				fmt.Sprintf("kind %q of group %q: a listener of protocol %s takes %s", k.Kind, ptr.Deref(k.Group, group), l.spec.Protocol, can))
			continue
		}
		if len(l.kinds) == 0 {
			l.kinds = append(l.kinds, gwv1.RouteGroupKind{Group: &group, Kind: k.Kind})
		}
	}
}

func (l *listener) takes(kind string) bool {
	return slices.ContainsFunc(l.kinds, func(k gwv1.RouteGroupKind) bool { return string(k.Kind) == kind })
}

// owner is the object that l is written in.
func (l *listener) owner() metav1.Object {
	if l.set != nil {
		return l.set.ListenerSet
	}
	return l.gw.Gateway
}

// ownerKind is the kind of that.
func (l *listener) ownerKind() string {
	if l.set != nil {
		return "ListenerSet"
	}
	return "Gateway"
}

// String is what a section is called, and what people read.
func (l *listener) String() string {
	return strings.ToLower(l.ownerKind()) + "/" + key(l.owner()).String() + "/" + string(l.spec.Name)
}

// isAccepted reports whether l is to be served, if its owner is.
func (l *listener) isAccepted() bool { return l.refused.Type == "" && l.conflict.Type == "" }

// verdict is the condition Accepted.
func (l *listener) verdict() metav1.Condition {
	const kind = string(gwv1.ListenerConditionAccepted)
	switch {
	case l.conflict.Type != "":
		return condition(kind, false, l.conflict.Reason, l.conflict.Message)
	case l.refused.Type != "":
		return l.refused
	}
	message := "accepted"
	if l.spec.Protocol == gwv1.HTTPProtocolType || l.spec.Protocol == gwv1.HTTPSProtocolType {
		message = "accepted, but " + noHTTP
	}
	return condition(kind, true, string(gwv1.ListenerReasonAccepted), message)
}

// resolvedRefs is the condition ResolvedRefs.
func (l *listener) resolvedRefs() metav1.Condition {
	switch {
	case l.refs.Type != "":
		return l.refs
	case l.badKinds.Type != "":
		return l.badKinds
	}
	return condition(string(gwv1.ListenerConditionResolvedRefs), true, string(gwv1.ListenerReasonResolvedRefs), "all references are resolved")
}

// notAccepted is what listeners say of a Gateway that says why itself.
const notAccepted = "the Gateway is not accepted"

// programmed is the condition Programmed of l.
func (t *translator) programmed(l *listener) metav1.Condition {
	const kind = string(gwv1.ListenerConditionProgrammed)
	switch {
	case l.conflict.Type != "":
		return condition(kind, false, l.conflict.Reason, l.conflict.Message)
	case !l.isAccepted():
		return condition(kind, false, string(gwv1.ListenerReasonInvalid), l.refused.Message)
	case l.broken:
		return condition(kind, false, string(gwv1.ListenerReasonInvalid), l.refs.Message)
	case !l.gw.isAccepted():
		return condition(kind, false, string(gwv1.ListenerReasonInvalid), notAccepted)
	case len(l.gw.bound) == 0:
		return condition(kind, false, string(gwv1.ListenerReasonPending), "the Gateway has no address")
	case l.openErr != nil:
		return condition(kind, false, string(gwv1.ListenerReasonPortUnavailable), l.openErr.Error())
	}
	if why := t.unreached(l); why != "" {
		return condition(kind, false, string(gwv1.ListenerReasonPortUnavailable), why)
	}
	for _, name := range l.names {
		if _, known := t.in.Plane[name]; !known && t.in.Plane != nil && !l.wasProgrammed() {
			return condition(kind, false, string(gwv1.ListenerReasonPending), "being opened")
		}
	}
	return condition(kind, true, string(gwv1.ListenerReasonProgrammed), "in force")
}

// wasProgrammed reports whether l's status says so: it has the last word as long
// as the data plane has said nothing, as after a restart.
func (l *listener) wasProgrammed() bool {
	c, ok := l.lastProgrammed()
	return ok && c.Status == metav1.ConditionTrue
}

// lastProgrammed is the condition Programmed of l's status as it was read.
func (l *listener) lastProgrammed() (metav1.Condition, bool) {
	conds := conditionsOf(l.gw.Status.Listeners, l.spec.Name)
	if l.set != nil {
		conds = conditionsOf(l.set.Status.Listeners, l.spec.Name)
	}
	i := slices.IndexFunc(conds, func(c metav1.Condition) bool { return c.Type == string(gwv1.ListenerConditionProgrammed) })
	if i < 0 {
		return metav1.Condition{}, false
	}
	return conds[i], true
}

// listenerConditions are all of l's.
func (t *translator) listenerConditions(l *listener) []metav1.Condition {
	conflict := l.conflict
	if conflict.Type == "" {
		conflict = condition(string(gwv1.ListenerConditionConflicted), false, string(gwv1.ListenerReasonNoConflicts), "no conflicts")
	}
	refs := l.resolvedRefs()
	not, soon := t.notValid(l)
	for _, n := range []note{{reasonCertificateNotValid, not}, {reasonCertificateExpiresSoon, soon}} {
		if n.message != "" {
			refs.Message = truncate(refs.Message + ", but " + n.message)
			of := RouteKey{l.ownerKind(), key(l.owner())}
			t.res.Notes[of] = append(t.res.Notes[of], note{n.reason, truncate("listener " + string(l.spec.Name) + ": " + n.message)})
		}
	}
	conds := []metav1.Condition{l.verdict(), t.programmed(l), refs, conflict}
	if l.overlap.Type != "" {
		conds = append(conds, l.overlap)
	}
	return conds
}
