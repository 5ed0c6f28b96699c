// Package policy decides who may do what: which callers may connect to a service,
// serve it, see it or carry it.
//
// A Policy allows or denies. It selects what it is about by its Targets, and callers
// by its Rules. Policies of the tier Admin can't be overridden, those of Baseline are
// for what no other policy is about. There are no priorities: the order of evaluation
// is that of the Steps, whatever the order of the policies.
//
//	deny := &policy.Policy{Name: "no-legacy", Tier: policy.Admin, Action: policy.Deny,
//		Rules: []policy.Rule{{Sources: &[]policy.Source{{TrustDomains: []string{"old.example"}}}}}}
//	set, err := policy.Compile([]*policy.Policy{deny}, nil)
//	if err != nil {
//		log.Print(err) // and the set denies everything
//	}
//	d := set.Decide(req, 443, policy.Connect)
//
// Decide has no error: whatever can't be understood is denied.
//
// What it does not do: it does not know services. Whoever has the table chooses the
// policies of each service, by their Targets, and compiles them. Conditions on HTTP
// methods or paths do not exist.
//
// # Stability
//
// Until version 1.0 a release may change the exported API; CHANGELOG.md lists each
// change. From then on it follows semantic versioning.
package policy
