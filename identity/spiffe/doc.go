// Package spiffe keeps keys and trust bundles of an identity.Store as the SPIFFE Workload
// API gives them: X.509-SVIDs as keys, X.509 and JWT bundles of the own trust domain and
// of federated ones as trust. An agent of SPIRE, for example, serves that API at a socket.
//
//	src := &spiffe.Source{Store: store, Socket: "unix:///run/spire/agent.sock"}
//	src.Configure(spiffe.Config{
//		Keys:  map[string]string{"shop": "spiffe://corp.example/ns/shop/sa/gw"},
//		Trust: map[string]string{"corp.example": "corp.example"},
//	})
//	err := src.Run(ctx)
//
// While the agent is away, or answers nonsense, the last good keys and bundles stay.
// JWT-SVIDs are fetched when they are needed: see Source.Token.
//
// The build tag nospiffe leaves out gRPC, and with it what the package does: Run and
// Token are errors then.
//
// The package is not stable yet.
package spiffe
