package policy_test

import (
	"net/netip"
	"slices"
	"strings"

	"culvert.dev/policy"
	"culvert.dev/tunnel"
)

// A world is policies, a target that they may select, and one request for it.
type world struct {
	policies []*policy.Policy
	target   policy.Target
	req      *tunnel.Request
	port     uint16
	verb     policy.Verb
}

// naive decides by the text of the design, one step after another, without an index. It
// returns the decision with or without the policies in dry run.
func (w *world) naive(dryRun bool) (allowed bool, step policy.Step) {
	selected := func(tier policy.Tier, action policy.Action) (is, matches bool) {
		for _, p := range w.policies {
			if p.Verb != w.verb || p.Tier != tier || p.Action != action || p.DryRun && !dryRun {
				continue
			}
			if ok, part := w.selects(&p.Targets); ok {
				is = true
				matches = matches || slices.ContainsFunc(p.Rules, func(r policy.Rule) bool { return w.rule(p, &r, part) })
			}
		}
		return is, matches
	}
	if _, m := selected(policy.Admin, policy.Deny); m {
		return false, policy.AdminDeny
	}
	if _, m := selected(policy.Admin, policy.Allow); m {
		return true, policy.AdminAllow
	}
	denies, m := selected(policy.Namespace, policy.Deny)
	if m {
		return false, policy.NamespaceDeny
	}
	allows, m := selected(policy.Namespace, policy.Allow)
	if m || allows {
		return m, policy.NamespaceAllow
	}
	if !denies {
		if _, m = selected(policy.Baseline, policy.Deny); m {
			return false, policy.BaselineDeny
		}
		if allows, m = selected(policy.Baseline, policy.Allow); m || allows {
			return m, policy.BaselineAllow
		}
	}
	return w.verb == policy.Connect, policy.Undecided
}

// selects reports whether t selects the target, and whether that is by a part of a
// wildcard only.
func (w *world) selects(t *policy.Targets) (ok, part bool) {
	in := func(list []string, s string) bool { return list == nil || slices.Contains(list, s) }
	namespace := w.target.Namespace
	if t.Workloads != nil {
		if w.target.Workload == nil {
			return false, false
		}
		namespace = w.target.Workload.Namespace
		for k, v := range t.Workloads.Labels {
			if have, ok := w.target.Workload.Labels[k]; !ok || have != v {
				return false, false
			}
		}
	}
	if !in(t.Services, w.target.Service) || !in(t.Namespaces, namespace) || !in(t.Listeners, w.req.Listener) && !in(t.Listeners, w.req.Listener[:strings.LastIndexByte(w.req.Listener, '/')+1]+"*") || t.Routes != nil && (w.target.Route == "" || !in(t.Routes, w.target.Route)) {
		return false, false
	}
	if t.Names == nil {
		return true, false
	}
	for _, mine := range t.Names {
		for _, p := range w.target.Names {
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
func (w *world) rule(p *policy.Policy, r *policy.Rule, part bool) bool {
	if part && p.Action == policy.Allow && !slices.ContainsFunc(p.Targets.Names, func(n string) bool {
		x, _ := policy.ParseName(n)
		return x.Matches(w.req.Name)
	}) {
		return false
	}
	return (r.Ports == nil || slices.ContainsFunc(*r.Ports, func(p policy.PortRange) bool { return w.port >= p.First && w.port <= max(p.First, p.Last) })) &&
		(r.Protocols == nil || slices.Contains(*r.Protocols, w.req.Proto)) &&
		(r.Sources == nil || slices.ContainsFunc(*r.Sources, func(x policy.Source) bool { return w.source(p.Action, &x) }))
}

// source reports whether x holds for the caller.
func (w *world) source(action policy.Action, x *policy.Source) bool {
	a := w.req.Source.Addr()
	if x.CIDRs != nil && !slices.ContainsFunc(x.CIDRs, func(p netip.Prefix) bool { return p.Contains(a) }) || x.Networks != nil && !slices.Contains(x.Networks, networkOf(a)) {
		return false
	}
	asks := x.SPIFFE != nil || x.Namespaces != nil || x.Users != nil || x.TrustDomains != nil || x.Actors != nil || x.ServiceAccounts != nil || x.Claims != nil
	if p := w.req.Peer; !asks || p.Method != "" {
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
	return (action == policy.Allow) == (w.req.DeferIdentity && w.req.TLS == nil)
}

// networkOf is the networks of all worlds.
func networkOf(a netip.Addr) string {
	switch {
	case netip.MustParsePrefix("10.1.0.0/16").Contains(a):
		return "east"
	case netip.MustParsePrefix("10.0.0.0/8").Contains(a):
		return "west"
	}
	return ""
}
