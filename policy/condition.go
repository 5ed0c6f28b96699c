package policy

import (
	"net/netip"
	"slices"
	"strings"

	"culvert.dev/tunnel"
)

// A caller is what conditions look at in a request.
type caller struct {
	req  *tunnel.Request
	port uint16
	addr netip.Addr // of the client

	known bool // it has an identity
	who   identity
}

func callerOf(req *tunnel.Request, port uint16) caller {
	return caller{req: req, port: port, addr: req.Source.Addr().Unmap().WithZone(""), known: req.Peer.Method != "", who: identityOf(&req.Peer)}
}

// An identity is what a Peer is to conditions.
type identity struct {
	id                 string
	spiffe             bool // id is a verified SPIFFE id
	trustDomain        string
	namespace, account string
	claims             map[string][]string
	actor              *tunnel.Peer
}

// identityOf returns the identity of p. A user may be named like a SPIFFE id: it is one
// only where it rests on a trust domain, or on a client certificate.
func identityOf(p *tunnel.Peer) identity {
	who := identity{id: p.ID}
	if p.Method != "unix" && strings.HasPrefix(p.ID, tunnel.UserID) {
		who.id = "" // a token may say anything, and is no user of this machine
	}
	trustDomain, path, isURI := cutSPIFFE(p.ID)
	if p.Auth == nil {
		if isURI && p.Method == "mtls" {
			who.spiffe, who.trustDomain = true, trustDomain
			who.namespace, who.account = workloadOf(path)
		}
		return who
	}
	a := p.Auth
	who.trustDomain, who.namespace, who.account, who.claims, who.actor = a.TrustDomain, a.Namespace, a.ServiceAccount, a.Claims, a.Actor
	who.spiffe = isURI && trustDomain == a.TrustDomain
	return who
}

const spiffeScheme = "spiffe://"

// cutSPIFFE returns the trust domain and the path of a SPIFFE id. The path begins with
// a slash.
func cutSPIFFE(id string) (trustDomain, path string, ok bool) {
	rest, ok := strings.CutPrefix(id, spiffeScheme)
	if !ok {
		return "", "", false
	}
	at := strings.IndexByte(rest, '/')
	if at <= 0 {
		return "", "", false
	}
	return rest[:at], rest[at:], true
}

// workloadOf returns the namespace and the service account of a path as Istio writes
// it: "/ns/NAMESPACE/sa/ACCOUNT".
func workloadOf(path string) (namespace, account string) {
	rest, ok := strings.CutPrefix(path, "/ns/")
	if !ok {
		return "", ""
	}
	namespace, account, ok = strings.Cut(rest, "/sa/")
	if !ok || namespace == "" || account == "" || strings.Contains(namespace, "/") || strings.Contains(account, "/") {
		return "", ""
	}
	return namespace, account
}

// A condition is one source of one rule, with all that the rule and its policy ask for.
type condition struct {
	rank  int // conditions that count before others have a lower one
	step  Step
	match int32 // the index of the Decision

	listeners []string         // nil means any
	names     []tunnel.Pattern // one of which the request must be for; nil means any
	ports     *[]PortRange
	protocols *[]string
	source    *source // nil means any
}

// holds reports whether e holds for c. Without identities it leaves out what the
// source says of them.
func (e *condition) holds(c *caller, identities bool) bool {
	if e.listeners != nil && !slices.ContainsFunc(e.listeners, func(l string) bool { return onListener(l, c.req.Listener) }) {
		return false
	}
	if e.names != nil && !matchesAny(e.names, c.req.Name) {
		return false
	}
	if e.ports != nil && !hasPort(*e.ports, c.port) {
		return false
	}
	if e.protocols != nil && !slices.Contains(*e.protocols, c.req.Proto) {
		return false
	}
	return e.source == nil || e.source.holds(c, identities)
}

func hasPort(ranges []PortRange, port uint16) bool {
	for _, r := range ranges {
		if r.First <= port && port <= max(r.First, r.Last) {
			return true
		}
	}
	return false
}

func matchesAny(names []tunnel.Pattern, name tunnel.Name) bool {
	for _, p := range names {
		if matches(p, name) {
			return true
		}
	}
	return false
}

// matches reports whether name is p, or below it where p is a wildcard.
func matches(p tunnel.Pattern, name tunnel.Name) bool {
	if !p.Wildcard {
		return p.Suffix == name && !name.IsZero()
	}
	return p.Matches(name)
}

// A source is a Source for evaluation. Its lists are sorted; a nil one means any.
type source struct {
	ids, prefixes                   []string // SPIFFE ids; and what those of a wildcard begin with
	spiffe                          bool     // there are ids or prefixes
	users, namespaces, trustDomains []string
	actors                          *source // with ids, prefixes and users; nil means any
	accounts                        []ServiceAccount
	claims                          map[string][]string
	cidrs                           *prefixes[struct{}]
	networks                        []string
	networkOf                       NetworkOf
	asksIdentity                    bool
}

// identity reports whether s asks for anything of the identity of the caller.
func (s *source) identity() bool { return s != nil && s.asksIdentity }

func (x *Source) namesIdentity() bool {
	return x.SPIFFE != nil || x.Namespaces != nil || x.Users != nil || x.TrustDomains != nil || x.Actors != nil || x.ServiceAccounts != nil || x.Claims != nil
}

// compileSource returns x for evaluation. x has been checked.
func compileSource(x *Source, networkOf NetworkOf) *source {
	s := &source{
		users: sorted(x.Users), namespaces: sorted(x.Namespaces), trustDomains: sorted(x.TrustDomains), networks: sorted(x.Networks),
		accounts: slices.Clone(x.ServiceAccounts), claims: x.Claims, networkOf: networkOf, asksIdentity: x.namesIdentity(),
	}
	slices.SortFunc(s.accounts, compareAccounts)
	s.addSPIFFE(x.SPIFFE)
	if x.Actors != nil {
		s.actors = &source{}
		for _, id := range x.Actors {
			if strings.HasPrefix(id, spiffeScheme) {
				s.actors.addSPIFFE([]string{id})
			} else {
				s.actors.users = append(s.actors.users, id)
			}
		}
		slices.Sort(s.actors.users)
	}
	if x.CIDRs != nil {
		s.cidrs = &prefixes[struct{}]{}
		for _, p := range x.CIDRs {
			s.cidrs.add(p, struct{}{})
		}
		s.cidrs.finish()
	}
	return s
}

func (s *source) addSPIFFE(ids []string) {
	for _, id := range ids {
		s.spiffe = true
		if prefix, ok := strings.CutSuffix(id, "*"); ok {
			s.prefixes = append(s.prefixes, prefix)
		} else {
			s.ids = append(s.ids, id)
		}
	}
	slices.Sort(s.ids)
	slices.Sort(s.prefixes)
}

func sorted(list []string) []string {
	list = slices.Clone(list)
	slices.Sort(list)
	return list
}

func compareAccounts(a, b ServiceAccount) int {
	if a.Namespace != b.Namespace {
		return strings.Compare(a.Namespace, b.Namespace)
	}
	return strings.Compare(a.Name, b.Name)
}

func has(sorted []string, s string) bool {
	_, ok := slices.BinarySearch(sorted, s)
	return ok
}

// holds reports whether s holds for c.
func (s *source) holds(c *caller, identities bool) bool {
	if identities && s.asksIdentity && !s.holdsFor(&c.who) {
		return false
	}
	if s.cidrs != nil && !s.cidrs.contains(c.addr) {
		return false
	}
	return s.networks == nil || s.networkOf != nil && c.addr.IsValid() && s.inNetwork(c.addr)
}

func (s *source) inNetwork(a netip.Addr) bool {
	name := s.networkOf(a)
	return name != "" && has(s.networks, name)
}

// holdsFor reports whether s holds for an identity.
func (s *source) holdsFor(who *identity) bool {
	switch {
	case s.spiffe && !s.hasSPIFFE(who):
	case s.users != nil && (who.spiffe || !has(s.users, who.id)):
	case s.trustDomains != nil && (who.trustDomain == "" || !has(s.trustDomains, who.trustDomain)):
	case s.namespaces != nil && (who.namespace == "" || !has(s.namespaces, who.namespace)):
	case s.accounts != nil && !s.hasAccount(who):
	case s.claims != nil && !s.hasClaims(who):
	case s.actors != nil && !s.actors.isActor(who.actor):
	default:
		return true
	}
	return false
}

func (s *source) hasSPIFFE(who *identity) bool {
	if !who.spiffe {
		return false
	}
	if has(s.ids, who.id) {
		return true
	}
	for _, p := range s.prefixes {
		if len(who.id) > len(p) && strings.HasPrefix(who.id, p) {
			return true
		}
	}
	return false
}

func (s *source) hasAccount(who *identity) bool {
	if who.namespace == "" || who.account == "" {
		return false
	}
	_, ok := slices.BinarySearchFunc(s.accounts, ServiceAccount{who.namespace, who.account}, compareAccounts)
	return ok
}

func (s *source) hasClaims(who *identity) bool {
	for claim, values := range s.claims {
		if !slices.ContainsFunc(who.claims[claim], func(v string) bool { return slices.Contains(values, v) }) {
			return false
		}
	}
	return true
}

// isActor reports whether s, which has the ids of actors, has that of p.
func (s *source) isActor(p *tunnel.Peer) bool {
	if p == nil || p.Method == "" {
		return false
	}
	who := identityOf(p)
	return s.hasSPIFFE(&who) || !who.spiffe && has(s.users, who.id)
}
