package gateway

import (
	"strings"

	"culvert.dev/identity"
	"culvert.dev/identity/jwt"
	"culvert.dev/internal/names"
	"culvert.dev/policy"
	"culvert.dev/registry"
	"culvert.dev/tunnel"
)

// An ExplanationPolicy says what policies decide about a request.
type ExplanationPolicy struct {
	PolicyDecision
	Steps  []ExplanationStep `json:"steps,omitempty"`  // of the order of evaluation
	DryRun *PolicyDecision   `json:"dryRun,omitempty"` // if policies in dry run were enforced; nil where that is the same
}

// A PolicyDecision names the policy that decides.
type PolicyDecision struct {
	Allowed   bool   `json:"allowed"`
	Policy    string `json:"policy,omitempty"`
	Origin    string `json:"origin,omitempty"`
	Rule      int    `json:"rule,omitempty"` // its number, from 1; 0 where the policy allows others only
	Step      string `json:"step"`
	Admitted  int    `json:"admittedEndpoints,omitempty"` // of Endpoints, where policies select endpoints
	Endpoints int    `json:"endpoints,omitempty"`
}

// An ExplanationStep is a step of the order of evaluation.
type ExplanationStep struct {
	Step     string `json:"step"`
	Policies int    `json:"policies"`         // that select the service
	Match    string `json:"match,omitempty"`  // the first one that matches
	Origin   string `json:"origin,omitempty"` // of it
	Rule     int    `json:"rule,omitempty"`   // of it, from 1
	Result   string `json:"result"`           // denied, allowed, or next
	Why      string `json:"why,omitempty"`    // the step is left out
}

// Stated returns the peer that a person asks about, as a carrier would make it. tokens are those
// whose service accounts it may be; nil for none.
func Stated(id string, tokens *jwt.Tokens) tunnel.Peer {
	if tokens != nil {
		if p, ok := tokens.Account(id); ok {
			return p
		}
	}
	if strings.HasPrefix(id, "spiffe://") || strings.HasPrefix(id, "dns:") || strings.HasPrefix(id, "uri:") || strings.HasPrefix(id, "subject:") {
		return tunnel.Peer{ID: id, Method: "mtls"}
	}
	if strings.HasPrefix(id, tunnel.UserID) {
		return tunnel.Peer{ID: id, Method: "unix"}
	}
	return tunnel.Peer{ID: id, Method: "basic"}
}

// WithStatedActor returns p, which was stated or logged, with actor beside it, if there is one.
func WithStatedActor(p, actor tunnel.Peer) tunnel.Peer {
	if p.Auth == nil && (p.Method == "mtls" || p.Method == "jwt") {
		if a, err := identity.Principal(p.ID); err == nil { // else it is no SPIFFE id
			p.Auth = a
		}
	}
	return p.WithActor(actor)
}

// explainPolicy returns what policies decide about req, and nil where none is about it.
func explainPolicy(r tunnel.Resolver, req *tunnel.Request, route *tunnel.Route) *ExplanationPolicy {
	known, ok := r.(interface {
		ExplainPolicy(*tunnel.Request, *tunnel.Route) registry.PolicyExplanation
	})
	if !ok || route.Policy == nil {
		return nil
	}
	x := &ExplanationPolicy{PolicyDecision: decisionOf(route.Policy)}
	if dry := route.Policy.DryRun; dry != nil {
		d := decisionOf(dry)
		x.DryRun = &d
	}
	decided := false
	for _, s := range known.ExplainPolicy(req, route).Steps {
		step := ExplanationStep{Step: s.Step.String(), Policies: len(s.Policies), Result: "next", Why: s.Skipped}
		if s.Match != nil {
			step.Match, step.Origin, step.Rule = s.Match.Name, s.Match.Origin, s.Rule+1
		}
		allows := s.Step == policy.NamespaceAllow || s.Step == policy.BaselineAllow
		switch {
		case s.Skipped != "":
		case decided:
			step.Why = "an earlier step has decided"
		case s.Match != nil:
			step.Result, decided = "denied", true
			if s.Match.Action == policy.Allow {
				step.Result = "allowed"
			}
		case allows && len(s.Policies) > 0:
			step.Result, decided = "denied", true
			step.Origin = s.Policies[0].Origin
		}
		x.Steps = append(x.Steps, step)
	}
	return x
}

func decisionOf(d *tunnel.PolicyDecision) PolicyDecision {
	return PolicyDecision{Allowed: d.Allowed, Policy: d.Policy, Origin: d.Origin, Rule: d.Rule + 1, Step: d.Step, Admitted: d.Admitted, Endpoints: d.Endpoints}
}

// AddResolution adds what DNS answers the client of q, and the health of what is there, if
// q names a client and asks for a name.
func (x *Explanation) AddResolution(src *names.Source, q Query) {
	if src == nil || src.Registry == nil || !q.From.IsValid() && q.As == "" {
		return
	}
	from := "none"
	if q.From.IsValid() {
		from = q.From.String()
	} else if src.Registry.Mesh.Network != "" {
		from = src.Registry.Mesh.Network
	}
	if r, err := ResolveFrom(src, q.Host, from); err == nil {
		x.Resolution = r
	}
}
