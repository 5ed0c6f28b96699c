package gatewayapi

import (
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

// readClasses finds the classes that are ours.
func (t *translation) readClasses() {
	for _, c := range t.w.Classes {
		if c.Spec.ControllerName != t.controller || t.w.Class != "" && c.Name != t.w.Class {
			continue
		}
		accepted := is(string(gwv1.GatewayClassConditionStatusAccepted), true, string(gwv1.GatewayClassReasonAccepted), "served by "+string(t.controller))
		if p := c.Spec.ParametersRef; p != nil {
			accepted = is(accepted.Type, false, string(gwv1.GatewayClassReasonInvalidParameters),
				"parametersRef to "+string(p.Kind)+" "+p.Name+": culvert takes no parameters here")
		} else {
			t.classes[c.Name] = true
		}
		conds := []metav1.Condition{accepted}
		if t.w.Bundle != "" {
			conds = append(conds, t.version())
		}
		t.res.Classes[c.Name] = ClassStatus{Conditions: observe(c.Generation, conds), Features: supported()}
	}
}

// version compares the CRDs with those that this was built for: only of the same
// minor version everything is known to be there, and nothing more.
func (t *translation) version() metav1.Condition {
	const kind = string(gwv1.GatewayClassConditionStatusSupportedVersion)
	ours := consts.BundleVersion
	if minor(t.w.Bundle) == minor(ours) {
		return is(kind, true, string(gwv1.GatewayClassReasonSupportedVersion), "the CRDs are of "+t.w.Bundle)
	}
	return is(kind, false, string(gwv1.GatewayClassReasonUnsupportedVersion), "the CRDs are of "+t.w.Bundle+", culvert was made for "+ours)
}

// minor cuts the patch off "v1.6.3".
func minor(version string) string {
	if i := strings.LastIndexByte(version, '.'); i > 0 {
		return version[:i]
	}
	return version
}
