package gatewayapi

import (
	"slices"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	gwv1 "sigs.k8s.io/gateway-api/apis/v1"
)

// noHTTP is what everything of HTTP says of itself.
const noHTTP = "culvert routes no HTTP yet: requests are refused"

// noGRPC is why no listener takes a GRPCRoute.
const noGRPC = "culvert routes no gRPC yet: a TLSRoute to a listener with tls.mode Passthrough carries it undecrypted"

// reasonHTTPNotRouted is of routes whose requests are refused though they are
// accepted. It is no reason of a condition: Gateway API wants HTTPRoutes to attach.
const reasonHTTPNotRouted = "HTTPNotRouted"

// httpRoutes are there to attach and to have a status, and for nothing else.
func (t *translator) httpRoutes() []*route {
	var rs []*route
	for _, o := range sorted(t.in.HTTPRoutes) {
		r := &route{Object: o, kind: httpRoute, parents: o.Spec.ParentRefs, hostnames: o.Spec.Hostnames}
		for _, rule := range o.Spec.Rules {
			for _, b := range rule.BackendRefs {
				r.refs = append(r.refs, b.BackendRef)
			}
		}
		rs = append(rs, r)
	}
	return rs
}

// grpcRoutes returns the GRPCRoutes, for their status to say that they are refused, and by which controller.
func (t *translator) grpcRoutes() []*route {
	var rs []*route
	for _, o := range sorted(t.in.GRPCRoutes) {
		r := &route{Object: o, kind: grpcRoute, parents: o.Spec.ParentRefs, hostnames: o.Spec.Hostnames}
		for _, rule := range o.Spec.Rules {
			for _, b := range rule.BackendRefs {
				r.refs = append(r.refs, b.BackendRef)
			}
		}
		rs = append(rs, r)
	}
	return rs
}

// noteHTTP has it told everywhere that the requests of an HTTPRoute are refused.
func (t *translator) noteHTTP(r *route, parents []gwv1.RouteParentStatus) {
	if acceptedBy(parents) {
		t.res.Notes[r.key()] = append(t.res.Notes[r.key()], note{reasonHTTPNotRouted, noHTTP})
	}
}

// acceptedBy reports whether any parent has accepted a route.
func acceptedBy(parents []gwv1.RouteParentStatus) bool {
	return slices.ContainsFunc(parents, func(p gwv1.RouteParentStatus) bool { return p.Conditions[0].Status == metav1.ConditionTrue })
}
