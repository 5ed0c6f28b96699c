package gatewayapi

import (
	"fmt"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	gwv1 "sigs.k8s.io/gateway-api/apis/v1"

	"culvert.dev/registry"
)

// A gateway is one of ours, on its way through a translation.
type gateway struct {
	*gwv1.Gateway
	own  []*listener    // of its spec
	sets []*listenerSet // that may attach, oldest first
	held []*listenerSet // that may not

	clients registry.ClientFilter // that may connect

	refused  metav1.Condition // why it is not accepted by itself; zero if it is
	remark   string           // on that it is accepted
	insecure bool             // its frontend validation lets anybody in

	client    string            // the name of the key to show to backends; "" for none
	clientErr *metav1.Condition // why there is none though one is asked for, or only the one of before

	bound     []Address                   // its addresses, as sockets have them
	published []gwv1.GatewayStatusAddress // and as clients do
	unusable  string                      // what is wrong with those that were asked for
	unfound   string                      // why it has none
}

// readGateways finds the Gateways that are ours, with their listeners.
func (t *translator) readGateways() {
	for _, o := range sorted(t.in.Gateways) {
		g := t.judgeClass(o)
		if g == nil {
			t.foreign[key(o)] = t.mayBeAnothers(o)
			continue
		}
		for i := range o.Spec.Listeners {
			l := o.Spec.Listeners[i]
			g.own = append(g.own, t.newListener(g, nil, l))
		}
		if g.refused.Type == "" {
			g.refused = t.refuseGateway(g)
		}
		t.gateways[key(o)] = g
		t.order = append(t.order, g)
	}
}

// refuseGateway says why a Gateway can't be accepted, whatever its listeners are.
func (t *translator) refuseGateway(g *gateway) metav1.Condition {
	const kind = string(gwv1.GatewayConditionAccepted)
	if in := g.Spec.Infrastructure; in != nil && in.ParametersRef != nil {
		return condition(kind, false, string(gwv1.GatewayReasonInvalidParameters),
			fmt.Sprintf("infrastructure.parametersRef to %s %q: parameters are not supported", in.ParametersRef.Kind, in.ParametersRef.Name))
	}
	var err error
	if g.clients, err = clientsOf(g); err != nil {
		return condition(kind, false, string(gwv1.GatewayReasonInvalid), err.Error())
	}
	for _, a := range g.Spec.Addresses {
		if typ := ptr.Deref(a.Type, gwv1.IPAddressType); typ != gwv1.IPAddressType {
			return condition(kind, false, string(gwv1.GatewayReasonUnsupportedAddress),
				fmt.Sprintf("address %q is of type %s; only %s is supported", a.Value, typ, gwv1.IPAddressType))
		}
	}
	return metav1.Condition{}
}

// all are the listeners of a gateway and its sets in order of precedence.
func (g *gateway) all() []*listener {
	ls := g.own
	for _, s := range g.sets {
		ls = append(ls[:len(ls):len(ls)], s.entries...)
	}
	return ls
}

// accepted is the Gateway's condition Accepted.
func (g *gateway) accepted() metav1.Condition {
	const kind = string(gwv1.GatewayConditionAccepted)
	if g.refused.Type != "" {
		return g.refused
	}
	var bad []string
	for _, l := range g.own {
		if !l.isAccepted() {
			bad = append(bad, fmt.Sprintf("%s (%s)", l.spec.Name, l.verdict().Reason))
		}
	}
	switch {
	case len(bad) == 0:
		return condition(kind, true, string(gwv1.GatewayReasonAccepted), "all listeners are accepted"+g.remark)
	case len(bad) == len(g.own):
		return condition(kind, false, string(gwv1.GatewayReasonListenersNotValid), "no listener is accepted: "+strings.Join(bad, ", "))
	}
	return condition(kind, true, string(gwv1.GatewayReasonListenersNotValid), "these listeners are not accepted, the others are: "+strings.Join(bad, ", ")+g.remark)
}

func (g *gateway) isAccepted() bool { return g.accepted().Status == metav1.ConditionTrue }

// gatewayProgrammed is the Gateway's condition Programmed.
func (t *translator) gatewayProgrammed(g *gateway) metav1.Condition {
	const kind = string(gwv1.GatewayConditionProgrammed)
	switch {
	case !g.isAccepted():
		return condition(kind, false, string(gwv1.GatewayReasonInvalid), "the Gateway is not accepted")
	case g.unusable != "":
		return condition(kind, false, string(gwv1.GatewayReasonAddressNotUsable), g.unusable)
	case g.unfound != "":
		return condition(kind, false, string(gwv1.GatewayReasonAddressNotAssigned), g.unfound)
	}
	var open, pending int
	var closed []string
	for _, l := range g.all() {
		switch c := t.programmed(l); {
		case c.Status == metav1.ConditionTrue:
			open++
		case l.openErr != nil && l.unassigned:
			return condition(kind, false, string(gwv1.GatewayReasonAddressNotUsable), l.openErr.Error())
		case c.Reason == string(gwv1.ListenerReasonPending):
			pending++
		default:
			closed = append(closed, string(l.spec.Name)+" ("+c.Reason+")")
		}
	}
	switch {
	case open > 0:
		return condition(kind, true, string(gwv1.GatewayReasonProgrammed), "in force"+t.portRemark(g))
	case pending > 0:
		return condition(kind, false, string(gwv1.GatewayReasonPending), "listeners are being opened")
	}
	return condition(kind, false, string(gwv1.GatewayReasonInvalid), "no listener can be reached: "+strings.Join(closed, ", "))
}

// refs is the Gateway's condition ResolvedRefs: of its own references
// first, and then of all its listeners'.
func (g *gateway) refs() metav1.Condition {
	const kind = string(gwv1.GatewayConditionResolvedRefs)
	if g.clientErr != nil {
		return *g.clientErr
	}
	for _, l := range g.own {
		if c := l.resolvedRefs(); c.Status != metav1.ConditionTrue {
			return condition(kind, false, string(gwv1.GatewayReasonListenersNotResolved), fmt.Sprintf("listener %s: %s", l.spec.Name, c.Message))
		}
	}
	return condition(kind, true, string(gwv1.GatewayReasonResolvedRefs), "all references are resolved")
}

// gatewayStatus is what the Gateway is to say of itself.
func (t *translator) gatewayStatus(g *gateway) gwv1.GatewayStatus {
	conds := []metav1.Condition{g.accepted(), t.gatewayProgrammed(g), g.refs()}
	if g.insecure {
		conds = append(conds, condition(string(gwv1.GatewayConditionInsecureFrontendValidationMode), true, string(gwv1.GatewayReasonConfigurationChanged),
			"clients without a valid certificate are admitted: AllowInsecureFallback"))
	}
	attached := int32(0)
	for _, s := range g.sets {
		if s.accepted().Status == metav1.ConditionTrue {
			attached++
		}
	}
	st := gwv1.GatewayStatus{Conditions: observe(g.Generation, conds), AttachedListenerSets: &attached}
	if g.isAccepted() {
		st.Addresses = g.published
	}
	for _, l := range g.own {
		st.Listeners = append(st.Listeners, gwv1.ListenerStatus{
			Name: l.spec.Name, SupportedKinds: l.kinds, AttachedRoutes: int32(len(l.attached)),
			Conditions: observe(g.Generation, t.listenerConditions(l)),
		})
	}
	return st
}
