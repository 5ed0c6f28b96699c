package policytest

import (
	"cmp"
	"net/netip"
	"slices"
	"strings"

	"culvert.dev/policy"
	"culvert.dev/tunnel"
)

// A World is policies, a target that they may select, and one request for it.
type World struct {
	Policies []*policy.Policy
	Target   policy.Target
	Request  *tunnel.Request
	Port     uint16
	Verb     policy.Verb
}

// Decide decides one step after another, without an index. With dryRun the policies in dry
// run count like others. Of several policies that match in one step, the first one by name
// has decided.
func (w *World) Decide(dryRun bool) policy.Decision {
	policies := slices.SortedStableFunc(slices.Values(w.Policies), func(a, b *policy.Policy) int { return cmp.Compare(a.Name, b.Name) })
	// tell returns the policies of a tier and action that select the target, and the decision
	// of the first one that matches, or nil.
	tell := func(step policy.Step, tier policy.Tier, action policy.Action) (selected []*policy.Policy, d *policy.Decision) {
		for _, p := range policies {
			if p.Verb != w.Verb || p.Tier != tier || p.Action != action || p.DryRun && !dryRun {
				continue
			}
			ok, part := w.selects(&p.Targets)
			if !ok {
				continue
			}
			selected = append(selected, p)
			for i := range p.Rules {
				if d == nil && w.rule(p, &p.Rules[i], part) {
					d = &policy.Decision{Allowed: action == policy.Allow, Policy: p.Name, Origin: p.Origin, Rule: i, Step: step, Action: action}
				}
			}
		}
		return selected, d
	}
	// others is the decision where none of the policies that allow admits the caller.
	others := func(step policy.Step, allows []*policy.Policy) policy.Decision {
		return policy.Decision{Policy: allows[0].Name, Origin: allows[0].Origin, Rule: -1, Step: step, Action: policy.Allow}
	}
	if _, d := tell(policy.AdminDeny, policy.Admin, policy.Deny); d != nil {
		return *d
	}
	if _, d := tell(policy.AdminAllow, policy.Admin, policy.Allow); d != nil {
		return *d
	}
	denies, d := tell(policy.NamespaceDeny, policy.Namespace, policy.Deny)
	if d != nil {
		return *d
	}
	allows, d := tell(policy.NamespaceAllow, policy.Namespace, policy.Allow)
	switch {
	case d != nil:
		return *d
	case len(allows) > 0:
		return others(policy.NamespaceAllow, allows)
	case len(denies) == 0:
		if _, d = tell(policy.BaselineDeny, policy.Baseline, policy.Deny); d != nil {
			return *d
		}
		allows, d = tell(policy.BaselineAllow, policy.Baseline, policy.Allow)
		switch {
		case d != nil:
			return *d
		case len(allows) > 0:
			return others(policy.BaselineAllow, allows)
		}
	}
	return policy.Decision{Allowed: w.Verb == policy.Connect, Rule: -1}
}

// selects reports whether t selects the target, and whether that is by a part of a
// wildcard only.
func (w *World) selects(t *policy.Targets) (ok, part bool) {
	in := func(list []string, s string) bool { return list == nil || slices.Contains(list, s) }
	namespace := w.Target.Namespace
	if t.Workloads != nil {
		if w.Target.Workload == nil {
			return false, false
		}
		namespace = w.Target.Workload.Namespace
		for k, v := range t.Workloads.Labels {
			if have, ok := w.Target.Workload.Labels[k]; !ok || have != v {
				return false, false
			}
		}
	}
	l := w.Request.Listener
	if !in(t.Services, w.Target.Service) && (w.Target.ID == "" || !in(t.Services, w.Target.ID)) || !in(t.Namespaces, namespace) ||
		!in(t.Listeners, l) && !in(t.Listeners, l[:strings.LastIndexByte(l, '/')+1]+"*") || t.Routes != nil && (w.Target.Route == "" || !in(t.Routes, w.Target.Route)) {
		return false, false
	}
	if t.Names == nil {
		return true, false
	}
	for _, mine := range t.Names {
		for _, p := range w.Target.Names {
			theirs := p.String()
			below := func(s, of string) bool {
				suffix, wild := strings.CutPrefix(of, "*")
				return of == s || wild && (suffix == "" || strings.HasSuffix(s, suffix) && strings.TrimPrefix(s, "*") != suffix)
			}
			switch {
			case below(theirs, mine):
				return true, false
			case below(mine, theirs):
				ok, part = true, true
			}
		}
	}
	return ok, part
}

// rule reports whether r of p holds for the request.
func (w *World) rule(p *policy.Policy, r *policy.Rule, part bool) bool {
	if part && p.Action == policy.Allow && !slices.ContainsFunc(p.Targets.Names, func(n string) bool {
		x, _ := policy.ParseName(n)
		return x.Matches(w.Request.Name)
	}) {
		return false
	}
	return (r.Ports == nil || slices.ContainsFunc(*r.Ports, func(p policy.PortRange) bool { return w.Port >= p.First && w.Port <= max(p.First, p.Last) })) &&
		(r.Protocols == nil || slices.Contains(*r.Protocols, w.Request.Proto)) &&
		(r.Sources == nil || slices.ContainsFunc(*r.Sources, func(x policy.Source) bool { return w.source(p.Action, &x) }))
}

// source reports whether x holds for the caller.
func (w *World) source(action policy.Action, x *policy.Source) bool {
	a := w.Request.Source.Addr()
	if x.CIDRs != nil && !slices.ContainsFunc(x.CIDRs, func(p netip.Prefix) bool { return p.Contains(a) }) || x.Networks != nil && !slices.Contains(x.Networks, NetworkOf(a)) {
		return false
	}
	asks := x.SPIFFE != nil || x.Namespaces != nil || x.Users != nil || x.TrustDomains != nil || x.Actors != nil || x.ServiceAccounts != nil || x.Claims != nil
	if p := w.Request.Peer; !asks || p.Method != "" {
		auth := p.Auth
		if auth == nil {
			auth = &tunnel.AuthInfo{}
		}
		spiffe := auth.TrustDomain != "" && strings.HasPrefix(p.ID, "spiffe://"+auth.TrustDomain+"/")
		id := func(list []string, id string) bool {
			return slices.ContainsFunc(list, func(s string) bool {
				prefix, wild := strings.CutSuffix(s, "*")
				return s == id || wild && strings.HasPrefix(id, prefix) && id != prefix
			})
		}
		return (x.SPIFFE == nil || spiffe && id(x.SPIFFE, p.ID)) && (x.Users == nil || !spiffe && slices.Contains(x.Users, p.ID)) &&
			(x.Namespaces == nil || slices.Contains(x.Namespaces, auth.Namespace)) && (x.TrustDomains == nil || slices.Contains(x.TrustDomains, auth.TrustDomain)) &&
			(x.ServiceAccounts == nil || slices.Contains(x.ServiceAccounts, policy.ServiceAccount{Namespace: auth.Namespace, Name: auth.ServiceAccount})) &&
			(x.Claims == nil || slices.ContainsFunc(x.Claims["groups"], func(v string) bool { return slices.Contains(auth.Claims["groups"], v) })) &&
			(x.Actors == nil || auth.Actor != nil && id(x.Actors, auth.Actor.ID))
	}
	return (action == policy.Allow) == (w.Request.DeferIdentity && w.Request.TLS == nil)
}

// Networks are those of all worlds. The longest prefix that has an address counts.
var Networks = map[string]netip.Prefix{"east": netip.MustParsePrefix("10.1.0.0/16"), "west": netip.MustParsePrefix("10.0.0.0/8")}

// NetworkOf returns the name of the network that has a, or "".
func NetworkOf(a netip.Addr) string {
	switch {
	case Networks["east"].Contains(a):
		return "east"
	case Networks["west"].Contains(a):
		return "west"
	}
	return ""
}
