package policy

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"slices"
)

// A Policy allows or denies requests for what its Targets select. Once it is compiled
// or part of a snapshot it must not change, nor anything that it points to.
type Policy struct {
	Name   string // for logs, metrics and explain: "db", "shop/db"
	Origin string // who says so, for people: "culvert.yaml:12", "AuthorizationPolicy shop/db"

	Tier    Tier    // the zero value is Namespace
	Action  Action  // the zero value is Allow
	Verb    Verb    `json:",omitzero"` // what the caller wants to do; the zero value is Connect
	DryRun  bool    `json:",omitzero"` // it is evaluated and reported, and never enforced
	Targets Targets `json:",omitzero"`
	Rules   []Rule  // a request matches the Policy if it matches one of them; none means that none does

	// Invalid says why the Policy can't be understood; it is empty for one that can. An
	// invalid Policy denies every request for what it selects, whatever else it says.
	Invalid string `json:",omitzero"`
}

// Targets select what a Policy is about. All fields must match; nil matches
// everything, and an empty list nothing. The zero Targets select every service.
type Targets struct {
	// Names are names of services, and those by which rules of listeners lead to them:
	// "db.shop.example", or "*.pay.example" for all below.
	// A Policy also selects a service whose own wildcard is wider, such as "*.example".
	// A deny then counts for the whole service, and an allow admits only requests for
	// the names of the Policy.
	Names []string `json:",omitzero"`

	Services   []string `json:",omitzero"` // names of services: those that logs have, or those in their namespaces
	Namespaces []string `json:",omitzero"` // of services and workloads
	Listeners  []string `json:",omitzero"` // names of listeners, or of sections of one, that the request came by; "gateway/shop/edge/*" has all sections below
	Routes     []string `json:",omitzero"` // names of rules of listeners that lead to the service

	// Workloads selects endpoints by the labels of their workloads; nil means the whole
	// service.
	Workloads *Selector `json:",omitzero"`
}

// A Selector selects workloads by their labels. All of it must match; the zero
// Selector matches every workload.
type Selector struct {
	Labels       map[string]string  `json:",omitzero"`
	Requirements []LabelRequirement `json:",omitzero"`
}

// A LabelRequirement is a condition of a Selector, as in Kubernetes.
type LabelRequirement struct {
	Key      string
	Operator string   // "In", "NotIn", "Exists" or "DoesNotExist"
	Values   []string `json:",omitzero"` // of In and NotIn
}

// A Rule matches a request if all of its fields do. A nil field matches every
// request, and an empty list none. The fields are pointers because encoders drop
// empty lists, which would turn "nobody" into "anybody".
type Rule struct {
	Sources   *[]Source    `json:",omitempty"` // any of them
	Ports     *[]PortRange `json:",omitempty"` // of the service
	Protocols *[]string    `json:",omitempty"` // by which the client asked: "sni", "connect", "tcp"
}

// A Source matches a caller if all of its fields do. A nil field matches every
// caller; an empty list is an error, because it looks like one that was filled in by
// mistake. The zero Source matches everybody.
//
// All fields but Networks and CIDRs are about the verified identity of the caller.
type Source struct {
	SPIFFE          []string            `json:",omitzero"` // SPIFFE ids: whole ones, or "spiffe://corp.example/ns/edge/*" for all below
	Namespaces      []string            `json:",omitzero"` // of the caller's workload
	Users           []string            `json:",omitzero"` // other ids, as logs have them: "alice", "dns:a.example"
	TrustDomains    []string            `json:",omitzero"` // of the caller's SPIFFE id
	Networks        []string            `json:",omitzero"` // names of networks that have the client's address
	Actors          []string            `json:",omitzero"` // ids of the nearer peer that stated the identity, like SPIFFE or Users
	ServiceAccounts []ServiceAccount    `json:",omitzero"`
	Claims          map[string][]string `json:",omitzero"` // of a token: each claim has one of the values
	CIDRs           []netip.Prefix      `json:",omitzero"` // that have the client's address
}

// A ServiceAccount is a Kubernetes service account, in any trust domain. Both
// fields are required. Source.TrustDomains says in which trust domain.
type ServiceAccount struct{ Namespace, Name string }

// A PortRange is all ports from First to Last. A Last of 0 means First alone.
type PortRange struct {
	First uint16
	Last  uint16 `json:",omitzero"`
}

// A Tier says before which other policies a Policy counts.
type Tier uint8

// Tiers. A Policy of Admin can't be overridden; one of Baseline counts only for what
// no policy of Namespace selects.
const (
	Namespace Tier = iota
	Admin
	Baseline
)

// An Action is what a Policy does with requests that match it.
type Action uint8

// Actions.
const (
	Allow Action = iota
	Deny
)

// A Verb is what a caller wants to do with a service or its name.
type Verb uint8

// Verbs. Where no policy is about it, Connect is allowed, and all others are denied.
const (
	Connect  Verb = iota // to open a tunnel to it
	Register             // to serve it, by a tunnel from behind
	Catalog              // to see it in a list or in DNS
	Join                 // to be one of the gateways that carry it
)

var (
	tiers   = []string{Namespace: "namespace", Admin: "admin", Baseline: "baseline"}
	actions = []string{Allow: "allow", Deny: "deny"}
	verbs   = []string{Connect: "connect", Register: "register", Catalog: "catalog", Join: "join"}
)

func (t Tier) String() string   { return word(tiers, int(t)) }
func (a Action) String() string { return word(actions, int(a)) }
func (v Verb) String() string   { return word(verbs, int(v)) }

// MarshalText implements encoding.TextMarshaler.
func (t Tier) MarshalText() ([]byte, error) { return []byte(t.String()), nil }

// MarshalText implements encoding.TextMarshaler.
func (a Action) MarshalText() ([]byte, error) { return []byte(a.String()), nil }

// MarshalText implements encoding.TextMarshaler.
func (v Verb) MarshalText() ([]byte, error) { return []byte(v.String()), nil }

// UnmarshalText implements encoding.TextUnmarshaler.
func (t *Tier) UnmarshalText(text []byte) error {
	i, err := indexOf("tier", tiers, text)
	*t = Tier(i)
	return err
}

// UnmarshalText implements encoding.TextUnmarshaler.
func (a *Action) UnmarshalText(text []byte) error {
	i, err := indexOf("action", actions, text)
	*a = Action(i)
	return err
}

// UnmarshalText implements encoding.TextUnmarshaler.
func (v *Verb) UnmarshalText(text []byte) error {
	i, err := indexOf("verb", verbs, text)
	*v = Verb(i)
	return err
}

func word(words []string, i int) string {
	if i < len(words) {
		return words[i]
	}
	return fmt.Sprintf("unknown(%d)", i)
}

func indexOf(kind string, words []string, text []byte) (int, error) {
	i := slices.Index(words, string(text))
	if i < 0 {
		return len(words), fmt.Errorf("policy: unknown %s %q, expected one of %q", kind, text, words)
	}
	return i, nil
}

// MarshalJSON implements json.Marshaler: a pointer to a nil list is an empty one.
func (r Rule) MarshalJSON() ([]byte, error) {
	type plain Rule
	p := plain(r)
	p.Sources, p.Ports, p.Protocols = filled(p.Sources), filled(p.Ports), filled(p.Protocols)
	return json.Marshal(p)
}

func filled[T any](list *[]T) *[]T {
	if list != nil && *list == nil {
		return &[]T{}
	}
	return list
}

// A Decision is the answer of a Set to one request.
type Decision struct {
	Allowed bool

	// Policy and Origin are those of the Policy that has decided, and Rule is the index
	// of its rule. Rule is -1 where the Policy denies because it allows others only.
	// Policy is empty where none has decided.
	Policy, Origin string
	Rule           int

	Step   Step   // of the order that has decided
	Action Action // of the Policy

	// DryRun is what would be decided if the policies in dry run were enforced, too. It
	// is nil where that is the same Decision. It belongs to the Set.
	DryRun *Decision
}

// A Step is a step of the order of evaluation.
type Step uint8

// Steps, in their order. The Decision of a request is that of the first step in
// which a policy matches, with the exceptions that are stated with each.
const (
	Undecided      Step = iota // there is no policy: Connect is allowed, other verbs are denied
	AdminDeny                  // denied
	AdminAllow                 // allowed
	NamespaceDeny              // denied
	NamespaceAllow             // allowed; denied if none matches and there is one
	BaselineDeny               // denied; left out where a policy of the tier Namespace selects the target
	BaselineAllow              // allowed; denied if none matches and there is one; left out like BaselineDeny
	Unreadable                 // denied: a policy can't be understood
)

var steps = []string{
	Undecided: "no policy", AdminDeny: "admin deny", AdminAllow: "admin allow", NamespaceDeny: "namespace deny", NamespaceAllow: "namespace allow",
	BaselineDeny: "baseline deny", BaselineAllow: "baseline allow", Unreadable: "unreadable policy",
}

func (s Step) String() string { return word(steps, int(s)) }

// step is the step in which p counts.
func (p *Policy) step() Step {
	if p.Tier > Baseline || p.Action > Deny {
		return Unreadable
	}
	first := [...]Step{Namespace: NamespaceDeny, Admin: AdminDeny, Baseline: BaselineDeny}[p.Tier]
	if p.Action == Allow {
		first++
	}
	return first
}
