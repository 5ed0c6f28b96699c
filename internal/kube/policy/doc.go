// Package policy reads AuthorizationPolicies and ClusterAuthorizationPolicies of Kubernetes, makes
// policies of the registry of them, and writes their status.
//
//	s, err := policy.New(policy.Config{Cluster: "west", REST: rest, Definitions: defs, Log: log})
//	...
//	g, err := gateway.New(ctx, gateway.Config{Sources: append(sources, s)})
//
// The objects have the shape that Gateway API proposes in GEP-3779, in the group policy.culvert.dev.
// What this package adds is the action DENY, more kinds of sources and targets, and the cluster's
// policies, which are of the tier admin or baseline.
//
// An object that can't be understood denies every request for what it selects: somebody meant to
// restrict something. Its condition Accepted says what is wrong.
package policy
