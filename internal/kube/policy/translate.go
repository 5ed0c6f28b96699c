package policy

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	gwv1 "sigs.k8s.io/gateway-api/apis/v1"

	"culvert.dev/policy"
	"culvert.dev/tunnel"
)

// Settings are what a translation depends on besides the objects.
type Settings struct {
	Cluster      string   // as names of discovered services have it
	TrustDomains []string // of the workloads of this cluster
}

// A translator makes policies of objects.
type translator struct {
	Settings
	namespaces map[string]labels.Set // labels of each Namespace; nil where Namespaces can't be read
}

// A translated object is the policies that it becomes, one for each target.
type translated struct {
	*object
	policies []*policy.Policy
	err      error // why it can't be understood; its policies deny then
}

// translate makes policies of o. If o can't be understood, they are the ones that deny what it
// selects, as far as that is known.
func (t *translator) translate(o *object) *translated {
	out := &translated{object: o}
	one, err := t.common(o)
	all, targetErr := t.targets(o)
	if err = errors.Join(err, targetErr); err != nil {
		out.err = err
	}
	for i, at := range all {
		p := *one
		p.Targets = at
		if len(all) > 1 {
			p.Name = fmt.Sprintf("%s[%d]", p.Name, i)
		}
		if err != nil {
			p.Invalid, p.Rules = err.Error(), nil
		}
		out.policies = append(out.policies, &p)
	}
	return out
}

// common returns what all policies of o have in common.
func (t *translator) common(o *object) (*policy.Policy, error) {
	p := &policy.Policy{Name: o.Name, Origin: o.String(), DryRun: o.Spec.DryRun}
	var errs []error
	refuse := func(format string, args ...any) { errs = append(errs, fmt.Errorf(format, args...)) }
	if o.Spec.broken != nil {
		return p, o.Spec.broken
	}
	if !o.isOfCluster() {
		p.Name = o.Namespace + "/" + o.Name
	}
	if level := o.Spec.EnforcementLevel; level != "Network" {
		refuse("enforcementLevel %q is not supported; Network is", tunnel.Clip(level))
	}
	switch o.Spec.Action {
	case "ALLOW":
		p.Action = policy.Allow
	case "DENY":
		p.Action = policy.Deny
	default:
		refuse("action %q is not known; ALLOW and DENY are", tunnel.Clip(o.Spec.Action))
	}
	if o.Spec.Verb != "" {
		if err := p.Verb.UnmarshalText([]byte(strings.ToLower(o.Spec.Verb))); err != nil {
			refuse("verb %q is not known; Connect, Register, Catalog and Join are", tunnel.Clip(o.Spec.Verb))
		}
	}
	switch tier := o.Spec.Tier; {
	case !o.isOfCluster() && tier == "":
	case o.isOfCluster() && tier == "Admin":
		p.Tier = policy.Admin
	case o.isOfCluster() && tier == "Baseline":
		p.Tier = policy.Baseline
	default:
		refuse("tier %q is not one of a %s", tunnel.Clip(tier), o.Kind)
	}
	for i := range o.Spec.Rules {
		r, err := t.rule(o, &o.Spec.Rules[i])
		if err != nil {
			refuse("rules[%d]: %w", i, err)
			continue
		}
		p.Rules = append(p.Rules, r)
	}
	return p, errors.Join(errs...)
}

// targets returns what o selects, which is everything if that is not known and o is of the cluster,
// or else everything of its namespace.
func (t *translator) targets(o *object) (all []policy.Targets, err error) {
	if o.isOfCluster() {
		at, err := t.clusterTargets(o.Spec.Targets)
		return []policy.Targets{at}, err
	}
	whole := policy.Targets{Namespaces: []string{o.Namespace}}
	var errs []error
	for i := range o.Spec.TargetRefs {
		at, err := t.target(o.Namespace, &o.Spec.TargetRefs[i])
		if err != nil {
			errs = append(errs, fmt.Errorf("targetRefs[%d]: %w", i, err))
			at = whole
		}
		all = append(all, at)
	}
	if len(all) == 0 {
		return []policy.Targets{whole}, errors.New("targetRefs: there is none")
	}
	return all, errors.Join(errs...)
}

// Kinds of targets.
const (
	kindPod         = "Pod"
	kindService     = "Service"
	kindNamespace   = "Namespace"
	kindGateway     = "Gateway"
	kindListenerSet = "ListenerSet"
)

var routeKinds = []string{"TLSRoute", "TCPRoute", "UDPRoute", "HTTPRoute", "GRPCRoute"}

// target returns what a targetRef of a namespace selects.
func (t *translator) target(namespace string, ref *targetRef) (at policy.Targets, err error) {
	core, gateway := ref.Group == "" || ref.Group == "core", ref.Group == gwv1.GroupName
	isPod := core && ref.Kind == kindPod
	isNamespace := core && ref.Kind == kindNamespace
	isListener := gateway && (ref.Kind == kindGateway || ref.Kind == kindListenerSet)
	switch {
	case ref.Selector != nil && !isPod:
		return at, errors.New("a selector is for Pods alone")
	case isPod && (ref.Selector == nil || ref.Name != ""):
		return at, errors.New("a Pod is selected by a selector, and not by name")
	case isNamespace && ref.Name != "" && ref.Name != namespace:
		return at, fmt.Errorf("the Namespace %q is not the policy's own", tunnel.Clip(ref.Name))
	case !isPod && !isNamespace && ref.Name == "":
		return at, errors.New("name is empty")
	case ref.SectionName != "" && !isListener:
		return at, errors.New("a sectionName is for a Gateway or ListenerSet")
	}
	name := strings.ToLower(ref.Kind) + "/" + namespace + "/" + ref.Name // as gatewayapi names sections and rules
	switch {
	case isPod:
		selector, err := selectorOf(ref.Selector)
		return policy.Targets{Namespaces: []string{namespace}, Workloads: selector}, err
	case isNamespace:
		return policy.Targets{Namespaces: []string{namespace}}, nil
	case core && ref.Kind == kindService:
		return policy.Targets{Services: t.serviceNames(namespace, ref.Name)}, nil
	case isListener && ref.SectionName != "":
		return policy.Targets{Listeners: []string{name + "/" + ref.SectionName}}, nil
	case isListener:
		return policy.Targets{Listeners: []string{name + "/*"}}, nil
	case gateway && slices.Contains(routeKinds, ref.Kind):
		return policy.Targets{Routes: []string{name}}, nil
	}
	return at, fmt.Errorf("kind %q of group %q can't be a target", tunnel.Clip(ref.Kind), tunnel.Clip(ref.Group))
}

// serviceNames returns what a Service is called in the table: by discovery, and as the backend of
// routes.
func (t *translator) serviceNames(namespace, name string) []string {
	names := []string{namespace + "/" + name}
	if t.Cluster != "" {
		names = append(names, name+"."+namespace+"."+t.Cluster)
	}
	return names
}

// clusterTargets returns what the targets of a ClusterAuthorizationPolicy select; nil is everything.
func (t *translator) clusterTargets(ts *targets) (at policy.Targets, err error) {
	if ts == nil {
		return at, nil
	}
	if ts.Names != nil {
		at.Names = ts.Names
		for _, n := range ts.Names {
			if _, err := tunnel.ParsePattern(n); err != nil {
				return policy.Targets{}, fmt.Errorf("targets.names: %w", err)
			}
		}
	}
	at.Namespaces = ts.Namespaces
	if ts.NamespaceSelector != nil {
		if ts.Namespaces != nil {
			return policy.Targets{}, errors.New("targets: namespaces and namespaceSelector exclude each other")
		}
		selector, err := metav1.LabelSelectorAsSelector(ts.NamespaceSelector)
		if err != nil {
			return policy.Targets{}, fmt.Errorf("targets.namespaceSelector: %w", err)
		}
		if t.namespaces == nil {
			return policy.Targets{}, errors.New("targets.namespaceSelector: Namespaces can't be read")
		}
		at.Namespaces = []string{}
		for name, set := range t.namespaces {
			if selector.Matches(set) {
				at.Namespaces = append(at.Namespaces, name)
			}
		}
		slices.Sort(at.Namespaces)
	}
	if ts.PodSelector != nil {
		if at.Workloads, err = selectorOf(ts.PodSelector); err != nil {
			return policy.Targets{}, fmt.Errorf("targets.podSelector: %w", err)
		}
	}
	return at, nil
}

// selectorOf translates a label selector, after the checks of the API server.
func selectorOf(s *metav1.LabelSelector) (*policy.Selector, error) {
	if _, err := metav1.LabelSelectorAsSelector(s); err != nil {
		return nil, fmt.Errorf("selector: %w", err)
	}
	out := &policy.Selector{Labels: s.MatchLabels}
	for _, e := range s.MatchExpressions {
		out.Requirements = append(out.Requirements, policy.LabelRequirement{Key: e.Key, Operator: string(e.Operator), Values: e.Values})
	}
	return out, nil
}

// rule translates a rule of o.
func (t *translator) rule(o *object, r *rule) (out policy.Rule, err error) {
	if r.Sources != nil {
		sources := []policy.Source{}
		for i := range *r.Sources {
			s, err := t.source(o, &(*r.Sources)[i])
			if err != nil {
				return out, fmt.Errorf("sources[%d]: %w", i, err)
			}
			sources = append(sources, s)
		}
		out.Sources = &sources
	}
	if r.NetworkAttributes == nil {
		return out, nil
	}
	if r.NetworkAttributes.Ports != nil {
		ports := []policy.PortRange{}
		for _, p := range r.NetworkAttributes.Ports {
			if p < 1 || p > 65535 {
				return out, fmt.Errorf("networkAttributes.ports: %d is not a port", p)
			}
			ports = append(ports, policy.PortRange{First: uint16(p)})
		}
		out.Ports = &ports
	}
	if r.NetworkAttributes.Protocols != nil {
		out.Protocols = &r.NetworkAttributes.Protocols
	}
	return out, nil
}

// Types of sources.
const (
	typeServiceAccount = "ServiceAccount"
	typeSPIFFE         = "SPIFFE"
	typeTrustDomain    = "TrustDomain"
	typeUser           = "User"
	typeAny            = "Any"
)

// source translates a source of o.
func (t *translator) source(o *object, s *source) (out policy.Source, err error) {
	for _, only := range []struct {
		kind, field string
		has         bool
	}{
		{typeServiceAccount, "serviceAccount", s.ServiceAccount != nil}, {typeSPIFFE, "spiffe", s.SPIFFE != ""},
		{typeTrustDomain, "trustDomain", s.TrustDomain != ""}, {typeUser, "user", s.User != ""},
	} {
		switch {
		case s.Type == only.kind && !only.has:
			return out, fmt.Errorf("type %s needs %s", s.Type, only.field)
		case s.Type != only.kind && only.has:
			return out, fmt.Errorf("%s is for type %s alone", only.field, only.kind)
		}
	}
	switch s.Type {
	case typeServiceAccount:
		a := *s.ServiceAccount
		if a.Namespace == "" {
			a.Namespace = o.Namespace
		}
		switch {
		case a.Namespace == "":
			return out, errors.New("serviceAccount needs a namespace")
		case a.Name == "":
			return out, errors.New("serviceAccount needs a name")
		case a.Name == "*":
			out.Namespaces = []string{a.Namespace}
		default:
			out.ServiceAccounts = []policy.ServiceAccount{{Namespace: a.Namespace, Name: a.Name}}
		}
		out.TrustDomains = t.TrustDomains // the workload of another domain that is called the same is another
	case typeSPIFFE:
		if !strings.HasPrefix(s.SPIFFE, "spiffe://") {
			return out, fmt.Errorf("spiffe %q does not begin with spiffe://", tunnel.Clip(s.SPIFFE))
		}
		out.SPIFFE = []string{s.SPIFFE}
	case typeTrustDomain:
		out.TrustDomains = []string{s.TrustDomain}
	case typeUser:
		out.Users = []string{s.User}
	case typeAny:
	default:
		return out, fmt.Errorf("type %q is not known; %s, %s, %s, %s and %s are", tunnel.Clip(s.Type), typeServiceAccount, typeSPIFFE, typeTrustDomain, typeUser, typeAny)
	}
	for _, text := range s.CIDRs {
		p, err := netip.ParsePrefix(text)
		if err != nil {
			return out, fmt.Errorf("cidrs: %q is not a CIDR", tunnel.Clip(text))
		}
		out.CIDRs = append(out.CIDRs, p.Masked())
	}
	if s.CIDRs != nil && out.CIDRs == nil {
		out.CIDRs = []netip.Prefix{}
	}
	out.Networks, out.Actors, out.Claims = s.Networks, s.Actors, s.Claims
	return out, nil
}
