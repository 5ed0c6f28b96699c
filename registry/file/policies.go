package file

import (
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"culvert.dev/policy"
	"culvert.dev/registry"
	"go.yaml.in/yaml/v3"
)

// A policyEntry is an element of policies.
type policyEntry struct {
	Name    string        `yaml:"name,required" what:"the name of a policy"`
	Tier    string        `yaml:"tier" oneof:"admin namespace baseline" default:"namespace"`
	Action  string        `yaml:"action,required" oneof:"allow deny"`
	Verb    string        `yaml:"verb" oneof:"connect register catalog join" default:"connect"`
	DryRun  bool          `yaml:"dryRun"`
	Targets policyTargets `yaml:"targets"`
	Rules   []policyRule  `yaml:"rules" what:"a rule"`
}

// policyTargets say what a policy is about.
type policyTargets struct {
	Names      []string `yaml:"names" what:"the name of a service" as:"policyName" empty:"leave the key out for all names"`
	Services   []string `yaml:"services" what:"a service" empty:"leave the key out for all services"`
	Namespaces []string `yaml:"namespaces" what:"a namespace" empty:"leave the key out for all namespaces"`
	Listeners  []string `yaml:"listeners" what:"a listener" empty:"leave the key out for all listeners"`
}

// A policyRule matches requests.
type policyRule struct {
	Sources   *[]policySource     `yaml:"sources" what:"a source"`
	Ports     *[]policy.PortRange `yaml:"ports" what:"a port" as:"policyPorts"`
	Protocols *[]string           `yaml:"protocols" what:"a protocol" oneof:"sni quic connect connect-h2 connect-h3 connect-udp hbone socks5 websocket proxy tcp udp"`
}

const emptySource = "leave the key out for any, or write sources: [] for nobody"

// A policySource matches callers.
type policySource struct {
	SPIFFE          []string        `yaml:"spiffe" what:"a SPIFFE id" as:"spiffePattern" empty:"leave the key out for any, or write sources: [] for nobody"`
	Namespaces      []string        `yaml:"namespaces" what:"a namespace" empty:"leave the key out for any, or write sources: [] for nobody"`
	ServiceAccounts []policyAccount `yaml:"serviceAccounts" what:"a service account" empty:"leave the key out for any, or write sources: [] for nobody"`
	Users           []string        `yaml:"users" what:"a user" as:"user" empty:"leave the key out for any, or write sources: [] for nobody"`
	Claims          policyClaims    `yaml:"claims"`
	TrustDomains    []string        `yaml:"trustDomains" what:"a trust domain" as:"trustDomain" empty:"leave the key out for any, or write sources: [] for nobody"`
	Actors          []string        `yaml:"actors" what:"an actor" as:"actor" empty:"leave the key out for any, or write sources: [] for nobody"`
	CIDRs           []netip.Prefix  `yaml:"cidrs" what:"a range" as:"cidr" empty:"leave the key out for any, or write sources: [] for nobody"`
	Networks        []string        `yaml:"networks" what:"a network" empty:"leave the key out for any, or write sources: [] for nobody"`
}

// check finds a source that matches everybody, which is said by leaving sources out.
func (s *policySource) check(d *decoder, at mapping) {
	if len(at.node.Content) == 0 {
		d.errorf(at.node, "leave sources out for any caller", "a source is empty")
	}
}

// A policyAccount is a service account of Kubernetes.
type policyAccount struct {
	Namespace string `yaml:"namespace,required" as:"label"`
	Name      string `yaml:"name,required" what:"the name of a service account"`
}

// policyClaims are the values that claims of a token may have.
type policyClaims map[string][]string

func (c *policyClaims) decode(d *decoder, n *yaml.Node, key string) {
	if !d.is(n, yaml.MappingNode, key) {
		return
	}
	if len(n.Content) == 0 {
		d.errorf(n, emptySource, "%s is empty", key)
		return
	}
	*c = policyClaims{}
	for i := 0; i+1 < len(n.Content); i += 2 {
		k, v := n.Content[i], n.Content[i+1]
		name, ok := d.text(k, "a claim")
		if !ok || !d.is(v, yaml.SequenceNode, "the claim "+strconv.Quote(clip(name))) {
			continue
		}
		if _, twice := (*c)[name]; twice {
			d.errorf(k, "keep one of them", "claim %q is listed twice", clip(name))
		}
		if len(v.Content) == 0 {
			d.errorf(v, "list the values that it may have", "claim %q has no values", clip(name))
		}
		for _, value := range v.Content {
			if s, ok := d.text(value, "the value of a claim"); ok {
				(*c)[name] = append((*c)[name], s)
			}
		}
	}
}

// policies are registered with the places that they have in the file.
type policies []*policy.Policy

func (l *policies) decode(d *decoder, n *yaml.Node, key string) {
	if !d.is(n, yaml.SequenceNode, key) {
		return
	}
	for _, n := range n.Content {
		if isNull(n) {
			d.errorf(n, "give it a value, or take it out", "%s has an empty element", key)
			continue
		}
		var p policyEntry
		into(d, n, "a policy", &p)
		*l = append(*l, p.registered(d.origin(n.Line)))
		d.policies = append(d.policies, mapping{n})
	}
}

// registered returns p as the registry has it. Words that could not be read are reported
// already.
func (p *policyEntry) registered(origin string) *policy.Policy {
	out := &policy.Policy{
		Name: p.Name, Origin: origin, DryRun: p.DryRun,
		Targets: policy.Targets{Names: p.Targets.Names, Services: p.Targets.Services, Namespaces: p.Targets.Namespaces, Listeners: p.Targets.Listeners},
	}
	for word, to := range map[string]interface{ UnmarshalText([]byte) error }{p.Tier: &out.Tier, p.Action: &out.Action, p.Verb: &out.Verb} {
		_ = to.UnmarshalText([]byte(word))
	}
	for i := range p.Rules {
		from := &p.Rules[i]
		r := policy.Rule{Ports: from.Ports, Protocols: from.Protocols}
		if from.Sources != nil {
			list := make([]policy.Source, len(*from.Sources))
			for j := range list {
				list[j] = (*from.Sources)[j].registered()
			}
			r.Sources = &list
		}
		out.Rules = append(out.Rules, r)
	}
	return out
}

// registered returns s as the registry has it.
func (s *policySource) registered() policy.Source {
	out := policy.Source{
		SPIFFE: s.SPIFFE, Namespaces: s.Namespaces, Users: s.Users, TrustDomains: s.TrustDomains, Networks: s.Networks, Actors: s.Actors,
		Claims: s.Claims, CIDRs: s.CIDRs,
	}
	for _, a := range s.ServiceAccounts {
		out.ServiceAccounts = append(out.ServiceAccounts, policy.ServiceAccount(a))
	}
	return out
}

func parsePolicyName(_, s string) (string, *complaint) {
	if s == "*" {
		return "", complain("leave the key out for all names", "the name of a service can't be \"*\"")
	}
	p, c := parseNamePattern("", s)
	return p.String(), c
}

func parseSPIFFEPattern(_, s string) (string, *complaint) {
	if err := policy.CheckSPIFFE(s); err != nil {
		return "", complain(`write spiffe://domain/path, or spiffe://domain/* for all below`, "%v", err)
	}
	return s, nil
}

func parseUser(_, s string) (string, *complaint) {
	if strings.HasPrefix(s, "spiffe://") {
		return "", complain("write it under spiffe", "user %q is a SPIFFE id", clip(s))
	}
	return s, nil
}

func parseActor(what, s string) (string, *complaint) {
	if strings.HasPrefix(s, "spiffe://") {
		return parseSPIFFEPattern(what, s)
	}
	return s, nil
}

// parsePolicyPorts parses a port, or a range of them.
func parsePolicyPorts(_, s string) (policy.PortRange, *complaint) {
	first, last, isRange := strings.Cut(s, "-")
	a, err := strconv.ParseUint(first, 10, 16)
	b := a
	if err == nil && isRange {
		b, err = strconv.ParseUint(last, 10, 16)
	}
	if err != nil || a == 0 || b < a {
		return policy.PortRange{}, complain("write 5432, or 8000-8999", "%q is no port from 1 to 65535, and no range of them", clip(s))
	}
	if !isRange {
		b = 0
	}
	return policy.PortRange{First: uint16(a), Last: uint16(b)}, nil
}

// checkPolicies finds policies that can't mean what they say.
func (d *decoder) checkPolicies() {
	if len(d.policies) == 0 || len(d.errs) > 0 {
		return // what could not be read would seem to be missing
	}
	named := map[string]*yaml.Node{}
	networks := map[string]bool{}
	for _, n := range d.cfg.Networks {
		networks[n.Name] = true
	}
	for i, p := range d.cfg.Policies {
		at := d.policies[i]
		if first := named[p.Name]; first != nil {
			d.errorf(at.where("name"), "give each a name of its own: logs and metrics have it", "policy %q is already in line %d", clip(p.Name), first.Line)
		} else {
			named[p.Name] = at.where("name")
		}
		if err := p.Check(); err != nil {
			d.errorf(at.node, "", "policy %q: %v", clip(p.Name), err)
		}
		d.checkPolicyWords(p, at, networks)
		d.checkCatalogPolicy(p, at)
	}
	if len(d.errs) == 0 {
		d.warnPolicies()
	}
}

// checkCatalogPolicy finds what a policy about seeing services can't ask for.
func (d *decoder) checkCatalogPolicy(p *policy.Policy, at mapping) {
	if p.Verb != policy.Catalog {
		return
	}
	const hint = "leave it out"
	if p.Targets.Listeners != nil {
		d.errorf(at.object("targets").where("listeners"), hint, "policy %q: with the verb catalog, listeners has no effect: DNS is asked, which has none of them", clip(p.Name))
	}
	for i, r := range p.Rules {
		rule := mapping{at.item("rules", i)}
		if r.Ports != nil {
			d.errorf(rule.where("ports"), hint, "policy %q: with the verb catalog, ports has no effect: a service is seen, or it is not", clip(p.Name))
		}
		if r.Protocols != nil {
			d.errorf(rule.where("protocols"), hint, "policy %q: with the verb catalog, protocols has no effect: DNS is asked, which is none of them", clip(p.Name))
		}
	}
}

// warnCatalog reports services that nobody sees, where policies decide about that.
func (d *decoder) warnCatalog(c *policy.Compiler) {
	first := slices.IndexFunc(d.cfg.Policies, func(p *policy.Policy) bool { return p.Verb == policy.Catalog && !p.DryRun })
	if first < 0 {
		return
	}
	everybody := "[{}]"
	if len(d.cfg.Peers) > 0 || d.cfg.Site != nil {
		everybody = `[{sources: [{cidrs: ["0.0.0.0/0", "::/0"]}]}]` // which peers are never in
		for i, p := range d.cfg.Policies {
			open := slices.IndexFunc(p.Rules, func(r policy.Rule) bool { return r.Sources == nil })
			if p.Verb == policy.Catalog && p.Action == policy.Allow && !p.DryRun && open >= 0 {
				d.warnf(d.policies[i].item("rules", open), "name sources: cidrs for clients of DNS, trustDomains or spiffe for peers", "policy %q offers services to every peer: a rule without sources is for all callers", clip(p.Name))
			}
		}
	}
	hidden, one := 0, ""
	for _, s := range d.cfg.Services {
		all := slices.DeleteFunc(c.Set(registry.PolicyTarget(d.cfg.Mesh, s)).Policies(), func(p *policy.Policy) bool { return p.Verb != policy.Catalog || p.DryRun })
		own := slices.ContainsFunc(all, func(p *policy.Policy) bool { return p.Tier == policy.Namespace })
		if !slices.ContainsFunc(all, func(p *policy.Policy) bool {
			return p.Action == policy.Allow && len(p.Rules) > 0 && !(own && p.Tier == policy.Baseline)
		}) {
			if hidden++; hidden == 1 {
				one = s.Name
			}
		}
	}
	if hidden > 0 {
		d.warnf(d.policies[first].where("verb"), "if that is not meant, add a policy that lets all clients see all others: {name: see-all, verb: catalog, tier: baseline, action: allow, rules: "+everybody+"}",
			"DNS does not answer for %q, %d in all: there are policies with the verb catalog, and none lets clients see them", clip(one), hidden)
	}
}

// checkPolicyWords finds names in p of what the file does not have.
func (d *decoder) checkPolicyWords(p *policy.Policy, at mapping, networks map[string]bool) {
	for i, name := range p.Targets.Listeners {
		known := strings.Contains(name, "/") && !isSocket(name) || slices.ContainsFunc(d.cfg.Listeners, func(l Listener) bool { return l.Address == name })
		if !known {
			d.errorf(at.object("targets").item("listeners", i), "write the address as the listener has it", "policy %q is for the listener %q, which there is not", clip(p.Name), clip(name))
		}
	}
	for i, r := range p.Rules {
		if r.Sources == nil {
			continue
		}
		for j, s := range *r.Sources {
			for k, name := range s.Networks {
				if !networks[name] && d.cfg.Kubernetes == nil {
					n := mapping{mapping{at.item("rules", i)}.item("sources", j)}.item("networks", k)
					d.errorf(n, "add it to networks", "policy %q names the network %q, which there is not", clip(p.Name), clip(name))
				}
			}
		}
	}
}

// warnPolicies reports policies that have no effect, or more than seems to be meant.
func (d *decoder) warnPolicies() {
	selects := map[*policy.Policy]bool{}
	c, seen := policy.NewCompiler(d.cfg.Policies, nil), map[*policy.Set]bool{}
	for _, s := range d.cfg.Services {
		set := c.Set(registry.PolicyTarget(d.cfg.Mesh, s))
		if set == nil || seen[set] {
			continue
		}
		seen[set] = true
		for _, p := range set.Policies() {
			selects[p] = true
		}
	}
	d.warnCatalog(c)
	blind := d.blindListeners()
	if len(blind) > 1 {
		blind = blind[:1] // one is enough to say it
	}
	domains := d.clientDomains()
	for i, p := range d.cfg.Policies {
		at := d.policies[i]
		if !selects[p] && d.cfg.Kubernetes == nil && (p.Verb == policy.Connect || p.Verb == policy.Catalog) {
			d.warnf(at.where("targets"), "compare it with the names of services", "policy %q selects no service", clip(p.Name))
		}
		if p.Action == policy.Deny && len(p.Rules) == 0 {
			d.warnf(at.node, "add rules: [{}] to deny everybody", "policy %q has no rules, and so denies nobody", clip(p.Name))
		}
		if p.Action == policy.Allow && len(domains) > 1 {
			d.warnDomains(p, at, domains)
		}
		if p.Verb != policy.Connect || !p.NamesIdentities() || p.Targets.Listeners != nil {
			continue
		}
		for _, n := range blind {
			then := "and nobody is allowed by an identity there"
			if p.Action == policy.Deny {
				then = "and all of them are denied there"
			}
			d.warnf(at.where("rules"), "write unidentifiedCallers: deny at the listener if that is meant, or defer to leave it to the services",
				"policy %q names identities, and callers at the listener %s in line %d have none: TLS passes through it, %s", clip(p.Name), n.Value, n.Line, then)
		}
	}
}

// warnDomains reports workloads that a policy allows and that are of any trust domain, where
// clients may be of several: an account of one cluster has a namesake in another.
func (d *decoder) warnDomains(p *policy.Policy, at mapping, domains []string) {
	for i, r := range p.Rules {
		if r.Sources == nil {
			continue
		}
		for j, s := range *r.Sources {
			key := "serviceAccounts"
			if s.ServiceAccounts == nil {
				key = "namespaces"
			}
			if s.ServiceAccounts == nil && s.Namespaces == nil || s.TrustDomains != nil || s.SPIFFE != nil {
				continue
			}
			n := mapping{mapping{at.item("rules", i)}.item("sources", j)}.where(key)
			d.warnf(n, "add trustDomains: ["+domains[0]+"] to it, or whichever is meant", "policy %q allows %s of any trust domain, and clients may be of %s", clip(p.Name), key, clip(strings.Join(domains, ", ")))
		}
	}
}

// clientDomains returns the trust domains that clients may be of, by their certificates and
// by their tokens.
func (d *decoder) clientDomains() (all []string) {
	for i := range d.cfg.Listeners {
		l := &d.cfg.Listeners[i]
		for j, item := range tlsItems(d.listener(i)) {
			all = append(all, trustDomains(item)...)
			if cas := item.value("clientCAFile"); cas != nil && cas.Kind == yaml.MappingNode {
				for k := 0; k < len(cas.Content); k += 2 {
					all = append(all, cas.Content[k].Value)
				}
			}
			if d.cfg.Identity == nil || j >= len(l.TLS) {
				continue
			}
			for _, name := range l.TLS[j].TrustNames {
				if t := d.cfg.Identity.Trust[name]; t != nil {
					all = append(all, t.TrustDomain(name))
				}
			}
		}
		if l.Auth == nil || d.cfg.Identity == nil {
			continue
		}
		for _, t := range d.cfg.Identity.Tokens {
			if slices.Contains(l.Auth.Issuers, t.Name()) {
				all = append(all, t.TrustDomain) // "" for users
			}
		}
	}
	slices.Sort(all)
	return slices.DeleteFunc(slices.Compact(all), func(s string) bool { return s == "" })
}

// blindListeners returns the addresses of listeners where no caller can have an
// identity, and that do not say what is to become of policies then.
func (d *decoder) blindListeners() (all []*yaml.Node) {
	for i := range d.cfg.Listeners {
		l := &d.cfg.Listeners[i]
		if l.UnidentifiedCallers == "" && l.Auth == nil && !l.PeerCredentials && l.SSH == nil && len(l.TLS) == 0 {
			if n := d.listener(i).value("address"); n != nil {
				all = append(all, n)
			}
		}
	}
	return all
}
