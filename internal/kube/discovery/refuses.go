package discovery

import (
	"fmt"
	"net/netip"
	"slices"
)

// api is the Service of the API server. An ExternalName may lead there only if Allow names it.
var api = key{Namespace: "default", Name: "kubernetes"}

// Refuses returns why an ExternalName may not lead to an address, or "". It refuses the addresses of
// Services that the Rules refuse, of their endpoints, of nodes, and of pods that belong to no
// Service. It may be called at any time.
func (s *Source) Refuses(a netip.Addr) string {
	if !s.Rules.ExternalNames {
		return "the administrator allows no ExternalName"
	}
	s.mu.Lock()
	r := s.run
	s.mu.Unlock()
	if r == nil {
		return s.unknown()
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.listed() {
		return s.unknown()
	}
	a = a.Unmap().WithZone("")
	known := false
	of := func(k key, what string) string {
		known = true
		if why := s.refusesTarget(k); why != "" {
			return fmt.Sprintf("it is %s Service %s: %s", what, k, why)
		}
		return ""
	}
	for k, svc := range r.services {
		if slices.Contains(svc.addresses, a) || slices.Contains(svc.outer, a) || slices.Contains(svc.ingress, a.String()) {
			if why := of(k, "the address of"); why != "" {
				return why
			}
		}
	}
	for _, o := range r.slices.At(a) {
		if o.Import {
			continue
		}
		if why := of(o.NamespacedName, "an endpoint of"); why != "" {
			return why
		}
	}
	if known {
		return ""
	}
	for _, n := range r.nodes {
		if slices.Contains(n.own, a) || slices.Contains(n.outer, a) {
			return "it is an address of the node " + n.name
		}
		if slices.ContainsFunc(n.pods, func(p netip.Prefix) bool { return p.Contains(a) }) {
			return "it is an address of pods, and of no Service"
		}
	}
	if len(s.Namespaces) > 0 && (a.IsPrivate() || shared.Contains(a)) {
		return "it is private, and not all namespaces of cluster " + s.Cluster + " are watched: it may be one of theirs"
	}
	return ""
}

// shared is the address space of RFC 6598, which some clusters use for pods and Services.
var shared = netip.MustParsePrefix("100.64.0.0/10")

func (s *Source) unknown() string {
	return "the Services of cluster " + s.Cluster + " are not known yet"
}

// refusesTarget returns why an ExternalName may not lead to a Service.
func (s *Source) refusesTarget(k key) string {
	if k == api && !slices.Contains(s.Rules.Allow, api.String()) {
		return "that is the API server"
	}
	return s.Rules.Refuses(k.Namespace, k.Name)
}

// Listed reports whether all that Refuses judges by has been listed.
func (s *Source) Listed() bool {
	s.mu.Lock()
	r := s.run
	s.mu.Unlock()
	if r == nil {
		return false
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.listed()
}

// listed reports whether all Services and EndpointSlices have been listed. The
// caller holds mu.
func (r *run) listed() bool {
	return !slices.ContainsFunc(r.scopes, func(sc *scope) bool { return !sc.optional && !sc.State().Synced })
}

// Refuses is Source.Refuses of all clusters that are there.
func (c *Clusters) Refuses(a netip.Addr) string {
	c.mu.Lock()
	sources := make([]*Source, 0, len(c.sources))
	for _, s := range c.sources {
		sources = append(sources, s)
	}
	c.mu.Unlock()
	for _, s := range sources {
		if why := s.Refuses(a); why != "" {
			return why
		}
	}
	return ""
}
