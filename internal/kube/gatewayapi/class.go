package gatewayapi

import (
	"fmt"
	"slices"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	gwv1 "sigs.k8s.io/gateway-api/apis/v1"
	"sigs.k8s.io/gateway-api/pkg/consts"
	"sigs.k8s.io/gateway-api/pkg/features"
)

// supported is what GatewayClass.status says that we can do: no more than what
// holds. Features of HTTPRoute are not among them.
func supported() []gwv1.SupportedFeature {
	var fs []gwv1.SupportedFeature
	for _, f := range []features.FeatureName{
		features.SupportBackendTLSPolicy,
		features.SupportBackendTLSPolicySANValidation,
		features.SupportGateway,
		features.SupportGatewayAddressEmpty,
		features.SupportGatewayBackendClientCertificate,
		features.SupportGatewayFrontendClientCertificateValidation,
		features.SupportGatewayFrontendClientCertificateValidationInsecureFallback,
		features.SupportGatewayInfrastructure,
		features.SupportGatewayPort8080,
		features.SupportGatewayStaticAddresses,
		features.SupportListenerSet,
		features.SupportReferenceGrant,
		features.SupportTCPRoute,
		features.SupportTLSRoute,
		features.SupportTLSRouteModeMixed,
		features.SupportTLSRouteModeTerminate,
		features.SupportUDPRoute,
	} {
		fs = append(fs, gwv1.SupportedFeature{Name: gwv1.FeatureName(f)})
	}
	slices.SortFunc(fs, func(a, b gwv1.SupportedFeature) int { return strings.Compare(string(a.Name), string(b.Name)) })
	return fs
}

// A class is one that Gateways may name.
type class struct {
	ours   bool
	served bool   // by us: another instance may have classes of our controller's name, too
	wrong  string // why it is not accepted; "" if it is
}

// readClasses finds the classes that there are, and those that are ours.
func (t *translator) readClasses() {
	for _, c := range t.in.Classes {
		cl := &class{ours: c.Spec.ControllerName == t.controller}
		t.classes[c.Name] = cl
		if c.Spec.ControllerName != t.controller || t.in.Class != "" && c.Name != t.in.Class {
			continue
		}
		accepted := condition(string(gwv1.GatewayClassConditionStatusAccepted), true, string(gwv1.GatewayClassReasonAccepted), "served by "+string(t.controller))
		if p := c.Spec.ParametersRef; p != nil {
			cl.wrong = "parametersRef to " + string(p.Kind) + " " + p.Name + ": parameters are not supported"
			accepted = condition(accepted.Type, false, string(gwv1.GatewayClassReasonInvalidParameters), cl.wrong+"; Gateways that were accepted before are served as they were")
		}
		cl.served = true
		conds := []metav1.Condition{accepted}
		if t.in.Bundle != "" {
			conds = append(conds, t.version())
		}
		t.res.Classes[c.Name] = ClassStatus{Conditions: observe(c.Generation, conds), Features: supported()}
	}
}

// judgeClass returns a Gateway as its class permits, or nil if it is not ours. A class is a template:
// one that becomes invalid does not affect the Gateways that were accepted before. Without its class
// a Gateway is not served, and the replica that served it says so, because no other one can know
// that it was ours.
func (t *translator) judgeClass(o *gwv1.Gateway) *gateway {
	const accepted = string(gwv1.GatewayConditionAccepted)
	name := string(o.Spec.GatewayClassName)
	c := t.classes[name]
	switch {
	case c == nil && t.memo.served[o.UID]:
		t.res.Classless[name] = "it was deleted; its Gateways are not served"
		t.memo.serving[o.UID] = true
		return &gateway{Gateway: o, refused: condition(accepted, false, string(gwv1.GatewayReasonInvalid), fmt.Sprintf("there is no GatewayClass %q", name))}
	case c == nil || !c.served:
		return nil
	case c.wrong == "":
	case slices.ContainsFunc(o.Status.Conditions, func(s metav1.Condition) bool { return s.Type == accepted && s.Status == metav1.ConditionTrue }):
		t.res.Classless[name] = "it is not accepted: " + c.wrong + "; Gateways that were accepted before are served as before"
		t.memo.serving[o.UID] = true
		return &gateway{Gateway: o, remark: fmt.Sprintf("; GatewayClass %q is no longer accepted, which does not affect this Gateway", name)}
	default:
		return &gateway{Gateway: o, refused: condition(accepted, false, string(gwv1.GatewayReasonInvalidParameters), fmt.Sprintf("GatewayClass %q is not accepted: %s", name, c.wrong))}
	}
	t.memo.serving[o.UID] = true
	return &gateway{Gateway: o}
}

// mayBeAnothers reports whether another instance, with our controller's name, may
// serve a Gateway that we don't.
func (t *translator) mayBeAnothers(o *gwv1.Gateway) bool {
	c := t.classes[string(o.Spec.GatewayClassName)]
	return c != nil && c.ours || c == nil && t.in.Class != ""
}

// tellOfClasses says once for each class what has become of its Gateways.
func (r *run) logClasses(res *Result) {
	for name, text := range res.Classless {
		if r.loggedClasses.New(name, text) {
			r.log.Warn("GatewayClass in use is gone or not accepted", "class", name, "reason", text)
		}
	}
	for name := range r.classes {
		if _, still := res.Classless[name]; !still {
			r.loggedClasses.New(name, "")
			r.log.Info("GatewayClass accepted again or unused", "class", name)
		}
	}
	r.classes = res.Classless
}

// version compares the CRDs with those that this was built for: only of the same
// minor version everything is known to be there, and nothing more.
func (t *translator) version() metav1.Condition {
	const kind = string(gwv1.GatewayClassConditionStatusSupportedVersion)
	ours := consts.BundleVersion
	if minor(t.in.Bundle) == minor(ours) {
		return condition(kind, true, string(gwv1.GatewayClassReasonSupportedVersion), "the CRDs are of version "+t.in.Bundle+versionRemark(t.in.Versions))
	}
	return condition(kind, false, string(gwv1.GatewayClassReasonUnsupportedVersion), "the CRDs are of version "+t.in.Bundle+"; culvert supports version "+ours+versionRemark(t.in.Versions))
}

// minor cuts the patch off "v1.6.3".
func minor(version string) string {
	if i := strings.LastIndexByte(version, '.'); i > 0 {
		return version[:i]
	}
	return version
}
