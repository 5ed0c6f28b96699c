package gatewayapi

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	gwv1 "sigs.k8s.io/gateway-api/apis/v1"
	mcsv1 "sigs.k8s.io/mcs-api/pkg/apis/v1beta1"

	"culvert.dev/registry"
)

// A policy is a BackendTLSPolicy with what became of it.
type policy struct {
	*gwv1.BackendTLSPolicy
	accepted  metav1.Condition
	resolved  metav1.Condition
	tls       *registry.BackendTLS // nil if no connection may be made by it
	ancestors map[*gateway]bool
}

// why says why there is no connection by it.
func (p *policy) why() string {
	if p.accepted.Status != metav1.ConditionTrue {
		return p.accepted.Message
	}
	return p.resolved.Message
}

// A targeting is of a policy at one target; section is the name of the port that
// it is for, and "" is all others.
type targeting struct {
	*policy
	section string
	loser   bool // an older one is for the same
}

func (p *policy) target(ref gwv1.LocalPolicyTargetReferenceWithSectionName) targetKey {
	return targetKey{string(ref.Group), string(ref.Kind), p.Namespace, string(ref.Name)}
}

// readPolicies judges every policy by itself and beside others for the same
// target, of which the oldest is in force.
func (t *translator) readPolicies() {
	t.policies = map[targetKey][]targeting{}
	for _, o := range sorted(t.in.Policies) {
		p := &policy{BackendTLSPolicy: o, ancestors: map[*gateway]bool{}}
		t.all = append(t.all, p)
		t.judge(p)
		for _, ref := range o.Spec.TargetRefs {
			k := p.target(ref)
			at := targeting{policy: p, section: string(ptr.Deref(ref.SectionName, ""))}
			rival := slices.IndexFunc(t.policies[k], func(q targeting) bool { return !q.loser && q.section == at.section && q.policy != p })
			if rival >= 0 {
				at.loser = true
				p.accepted = condition(string(gwv1.PolicyConditionAccepted), false, string(gwv1.PolicyReasonConflicted),
					fmt.Sprintf("an older policy, %q, is for the same", t.policies[k][rival].Name))
			}
			t.policies[k] = append(t.policies[k], at)
		}
	}
}

// judge says whether connections can be made by a policy, and how.
func (t *translator) judge(p *policy) {
	const accepted, resolved = string(gwv1.PolicyConditionAccepted), string(gwv1.BackendTLSPolicyConditionResolvedRefs)
	p.accepted = condition(accepted, true, string(gwv1.PolicyReasonAccepted), "accepted")
	p.resolved = condition(resolved, true, string(gwv1.BackendTLSPolicyReasonResolvedRefs), "all references are resolved")
	refuse := func(reason gwv1.PolicyConditionReason, format string, args ...any) {
		p.accepted = condition(accepted, false, string(reason), fmt.Sprintf(format, args...))
	}

	v := p.Spec.Validation
	how := &registry.BackendTLS{ServerName: string(v.Hostname)}
	for _, n := range v.SubjectAltNames {
		switch n.Type {
		case gwv1.HostnameSubjectAltNameType:
			how.SANs = append(how.SANs, string(n.Hostname))
		case gwv1.URISubjectAltNameType:
			how.SANs = append(how.SANs, string(n.URI))
		default:
			refuse(gwv1.PolicyReasonInvalid, "subject alternative name of type %q is not supported; supported are Hostname and URI", n.Type)
			return
		}
	}
	if slices.Contains(how.SANs, "") {
		refuse(gwv1.PolicyReasonInvalid, "a subject alternative name is empty")
		return
	}
	switch known := ptr.Deref(v.WellKnownCACertificates, ""); {
	case len(v.CACertificateRefs) > 0 && known == "":
		var roots strings.Builder
		for _, ref := range v.CACertificateRefs {
			// Policies refer to their own namespace only; from there no grant is needed.
			bundle, reason, err := t.bundle(referrer{gwv1.GroupName, "BackendTLSPolicy", p.Namespace}, string(ref.Group), string(ref.Kind), p.Namespace, string(ref.Name))
			if err == nil {
				roots.WriteString(bundle)
				continue
			}
			word := gwv1.BackendTLSPolicyReasonInvalidCACertificateRef
			if reason == gwv1.ListenerReasonInvalidCACertificateKind {
				word = gwv1.BackendTLSPolicyReasonInvalidKind
			}
			if p.resolved.Status == metav1.ConditionTrue {
				p.resolved = condition(resolved, false, string(word), err.Error())
			}
		}
		if how.Roots = roots.String(); how.Roots == "" {
			refuse(gwv1.BackendTLSPolicyReasonNoValidCACertificate, "none of the CA certificates can be used: %s", p.resolved.Message)
			return
		}
	case len(v.CACertificateRefs) == 0 && known == gwv1.WellKnownCACertificatesSystem:
	default:
		refuse(gwv1.PolicyReasonInvalid, "wellKnownCACertificates %q with %d caCertificateRefs is not supported; supported are either certificates or %q", known, len(v.CACertificateRefs), gwv1.WellKnownCACertificatesSystem)
		return
	}
	if len(p.Spec.TargetRefs) != 1 {
		refuse(gwv1.PolicyReasonInvalid, "%d targetRefs: only one target is supported", len(p.Spec.TargetRefs))
		return
	}
	p.tls = how
	reason, message := t.judgeTarget(p, p.target(p.Spec.TargetRefs[0]), string(ptr.Deref(p.Spec.TargetRefs[0].SectionName, "")))
	switch {
	case reason != "":
		refuse(reason, "%s", message)
		p.tls = nil
	case message != "":
		p.accepted.Message = message
	}
}

// judgeTarget says what is wrong with what a policy is for; with no reason but a
// message it is accepted with a warning.
func (t *translator) judgeTarget(p *policy, k targetKey, section string) (gwv1.PolicyConditionReason, string) {
	type port struct {
		name     string
		protocol corev1.Protocol
	}
	var ports []port
	switch {
	case k.group == "" && k.kind == "Service":
		s := t.service(k.namespace, k.name)
		if s == nil {
			return gwv1.PolicyReasonTargetNotFound, t.absent("services", "Services", k.namespace, k.String())
		}
		for _, p := range s.Spec.Ports {
			ports = append(ports, port{p.Name, cmp.Or(p.Protocol, corev1.ProtocolTCP)})
		}
	case k.group == mcsv1.GroupName && k.kind == serviceImportKind:
		i := t.serviceImport(k.namespace, k.name)
		if i == nil {
			return gwv1.PolicyReasonTargetNotFound, t.absent("serviceimports", "ServiceImports", k.namespace, k.String())
		}
		for _, p := range i.Spec.Ports {
			ports = append(ports, port{p.Name, cmp.Or(p.Protocol, corev1.ProtocolTCP)})
		}
	default:
		return gwv1.PolicyReasonInvalid, fmt.Sprintf("target of kind %q, group %q is not supported; supported are Services and ServiceImports", k.kind, k.group)
	}
	if section != "" {
		ports = slices.DeleteFunc(ports, func(p port) bool { return p.name != section })
		if len(ports) == 0 {
			return gwv1.PolicyReasonTargetNotFound, fmt.Sprintf("%s has no port named %q", k, section)
		}
	}
	udp := 0
	for _, p := range ports {
		if p.protocol == corev1.ProtocolUDP {
			udp++
		}
	}
	switch {
	case len(ports) > 0 && udp == len(ports):
		return gwv1.PolicyReasonInvalid, fmt.Sprintf("all targeted ports of %s are UDP, which has no TLS", k)
	case udp > 0:
		return "", fmt.Sprintf("accepted; ports of UDP of %s are left as they are", k)
	}
	return "", ""
}

// policyFor returns the policy in force for a backend: that of its port, or else the one for all
// ports. An invalid policy is in force as well, and then the backend is refused: to connect without
// TLS would be the worse failure.
func (t *translator) policyFor(b *backend) *policy {
	var general *policy
	for _, p := range t.policies[b.targetKey] {
		switch {
		case p.loser:
		case p.section == "":
			general = p.policy
		case p.section == b.portName:
			return p.policy
		}
	}
	return general
}

// notePolicies remembers that a Gateway has to do with the policies of a route's
// backends. A Passthrough listener has not: what passes is TLS already, and not
// ours.
func (t *translator) notePolicies(r *route, g *gateway) {
	if r.kind == httpRoute {
		return
	}
	if r.kind == tlsRoute && !slices.ContainsFunc(g.all(), func(l *listener) bool { return l.terminates() && l.attached[r.key()] }) {
		return
	}
	for _, b := range r.backends {
		for _, p := range t.policies[b.targetKey] {
			if p.section == "" || p.section == b.portName || b.service == nil {
				p.ancestors[g] = true
			}
		}
	}
}

// policyStatus has an entry for each Gateway that a policy has to do with.
func (t *translator) policyStatus(p *policy) []gwv1.PolicyAncestorStatus {
	var as []gwv1.PolicyAncestorStatus
	for _, g := range t.order {
		if !p.ancestors[g] {
			continue
		}
		group, kind, namespace := gwv1.Group(gwv1.GroupName), gwv1.Kind("Gateway"), gwv1.Namespace(g.Namespace)
		as = append(as, gwv1.PolicyAncestorStatus{
			AncestorRef:    gwv1.ParentReference{Group: &group, Kind: &kind, Namespace: &namespace, Name: gwv1.ObjectName(g.Name)},
			ControllerName: t.controller,
			Conditions:     observe(p.Generation, []metav1.Condition{p.accepted, p.resolved}),
		})
	}
	return as
}
