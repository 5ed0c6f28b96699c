package gatewayapi

import (
	"cmp"
	"crypto/tls"
	"fmt"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	gwv1 "sigs.k8s.io/gateway-api/apis/v1"
	mcsv1 "sigs.k8s.io/mcs-api/pkg/apis/v1beta1"

	"culvert.dev/registry"
	"culvert.dev/tunnel"
)

// A policy is a BackendTLSPolicy with what became of it, whatever its targets are.
type policy struct {
	*gwv1.BackendTLSPolicy
	accepted  metav1.Condition
	resolved  metav1.Condition
	tls       *registry.BackendTLS      // nil if no connection may be made by it
	ancestors map[*gateway][]*targeting // the targets that a Gateway has to do with
}

// A targeting is of a policy at one target; section is the name of the port that
// it is for, and "" is all others.
type targeting struct {
	*policy
	section string
	loser   bool                       // an older one is for the same
	reason  gwv1.PolicyConditionReason // why no connection may be made to the target by the policy; "" if one may
	message string                     // of reason; without one, a warning or ""
}

// why says why there is no connection to the target by its policy; "" if there is one.
func (p *targeting) why() string {
	switch {
	case p.tls != nil && p.reason != "":
		return p.message
	case p.tls != nil:
		return ""
	case p.accepted.Status != metav1.ConditionTrue:
		return p.accepted.Message
	}
	return p.resolved.Message
}

func (p *policy) target(ref gwv1.LocalPolicyTargetReferenceWithSectionName) targetKey {
	return targetKey{string(ref.Group), string(ref.Kind), p.Namespace, string(ref.Name)}
}

// readPolicies judges every policy by itself and beside others for the same
// target, of which the oldest is in force.
func (t *translator) readPolicies() {
	t.policies = map[targetKey][]*targeting{}
	for _, o := range sorted(t.in.Policies) {
		p := &policy{BackendTLSPolicy: o, ancestors: map[*gateway][]*targeting{}}
		t.all = append(t.all, p)
		t.judge(p)
		for _, ref := range o.Spec.TargetRefs {
			k := p.target(ref)
			at := &targeting{policy: p, section: string(ptr.Deref(ref.SectionName, ""))}
			rival := slices.IndexFunc(t.policies[k], func(q *targeting) bool { return !q.loser && q.section == at.section && q.policy != p })
			if rival >= 0 {
				at.loser = true
				at.reason, at.message = gwv1.PolicyReasonConflicted, fmt.Sprintf("an older policy, %q, is for the same", t.policies[k][rival].Name)
			} else {
				at.reason, at.message = t.judgeTarget(k, at.section)
			}
			t.policies[k] = append(t.policies[k], at)
		}
	}
}

// acceptance returns whether p is accepted, as a Gateway that has to do with some of its
// targets is told.
func (p *policy) acceptance(targets []*targeting) metav1.Condition {
	const accepted = string(gwv1.PolicyConditionAccepted)
	c := p.accepted
	for _, at := range targets {
		switch {
		case at.loser: // whatever else is wrong with it
			return condition(accepted, false, string(at.reason), at.message)
		case c.Status != metav1.ConditionTrue:
		case at.reason != "":
			c = condition(accepted, false, string(at.reason), at.message)
		case at.message != "":
			c.Message = at.message
		}
	}
	return c
}

// Options of a BackendTLSPolicy.
const (
	optionDomain       = "culvert.dev/"
	optionMinVersion   = optionDomain + "min-version"
	optionMaxVersion   = optionDomain + "max-version"
	optionCipherSuites = optionDomain + "cipher-suites"
)

// setOptions adds the options of a policy to how. An option that is not known is an error,
// as it may ask for more safety; those with the domain of another implementation are not
// for this one.
func setOptions(how *registry.BackendTLS, options map[gwv1.AnnotationKey]gwv1.AnnotationValue) error {
	for _, key := range slices.Sorted(maps.Keys(options)) {
		value := string(options[key])
		switch key {
		case optionMinVersion, optionMaxVersion:
			version := map[string]uint16{"1.2": tls.VersionTLS12, "1.3": tls.VersionTLS13}[value]
			if version == 0 {
				return fmt.Errorf("option %s: %q is not a version of TLS that is supported; supported are 1.2 and 1.3", key, tunnel.Clip(value))
			}
			if key == optionMinVersion {
				how.MinVersion = version
			} else {
				how.MaxVersion = version
			}
		case optionCipherSuites:
			for suite := range strings.SplitSeq(value, ",") {
				suite = strings.TrimSpace(suite)
				if _, err := registry.ParseCipherSuite(suite); err != nil {
					return fmt.Errorf("option %s: %w; supported are %s", key, err, strings.Join(registry.CipherSuites(), ", "))
				}
				how.CipherSuites = append(how.CipherSuites, suite)
			}
		default:
			if domain, _, prefixed := strings.Cut(string(key), "/"); !prefixed || domain+"/" == optionDomain {
				return fmt.Errorf("option %q is not supported; supported are %s, %s and %s", tunnel.Clip(string(key)), optionMinVersion, optionMaxVersion, optionCipherSuites)
			}
		}
	}
	switch {
	case how.MaxVersion != 0 && how.MinVersion > how.MaxVersion:
		return fmt.Errorf("option %s is above %s, which leaves no version of TLS", optionMinVersion, optionMaxVersion)
	case how.MinVersion == tls.VersionTLS13 && len(how.CipherSuites) > 0:
		return fmt.Errorf("option %s has no effect: TLS 1.3 has cipher suites of its own, which can't be chosen", optionCipherSuites)
	}
	return nil
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
	if err := setOptions(how, p.Spec.Options); err != nil {
		refuse(gwv1.PolicyReasonInvalid, "%v", err)
		return
	}
	p.tls = how
}

// judgeTarget says what is wrong with a target of a policy; with no reason but a
// message it is accepted with a warning.
func (t *translator) judgeTarget(k targetKey, section string) (gwv1.PolicyConditionReason, string) {
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
func (t *translator) policyFor(b *backend) *targeting {
	var general *targeting
	for _, p := range t.policies[b.targetKey] {
		switch {
		case p.loser:
		case p.section == "":
			general = p
		case p.section == b.portName:
			return p
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
				if !slices.Contains(p.ancestors[g], p) {
					p.ancestors[g] = append(p.ancestors[g], p)
				}
			}
		}
	}
}

// policyStatus has an entry for each Gateway that a policy has to do with.
func (t *translator) policyStatus(p *policy) []gwv1.PolicyAncestorStatus {
	var as []gwv1.PolicyAncestorStatus
	for _, g := range t.order {
		targets := p.ancestors[g]
		if len(targets) == 0 {
			continue
		}
		group, kind, namespace := gwv1.Group(gwv1.GroupName), gwv1.Kind("Gateway"), gwv1.Namespace(g.Namespace)
		as = append(as, gwv1.PolicyAncestorStatus{
			AncestorRef:    gwv1.ParentReference{Group: &group, Kind: &kind, Namespace: &namespace, Name: gwv1.ObjectName(g.Name)},
			ControllerName: t.controller,
			Conditions:     observe(p.Generation, []metav1.Condition{p.acceptance(targets), p.resolved}),
		})
	}
	return as
}
