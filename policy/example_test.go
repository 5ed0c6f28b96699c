package policy_test

import (
	"fmt"

	"culvert.dev/policy"
	"culvert.dev/tunnel"
)

func Example() {
	set, err := policy.Compile([]*policy.Policy{
		{Name: "no-legacy", Tier: policy.Admin, Action: policy.Deny, Rules: []policy.Rule{{Sources: &[]policy.Source{{TrustDomains: []string{"old.example"}}}}}},
		{Name: "db", Rules: []policy.Rule{{Sources: &[]policy.Source{{ServiceAccounts: []policy.ServiceAccount{{Namespace: "shop", Name: "api"}}}}}}},
	}, nil)
	if err != nil {
		fmt.Println(err)
		return
	}
	for _, id := range []string{"spiffe://corp.example/ns/shop/sa/api", "spiffe://old.example/ns/shop/sa/api", "spiffe://corp.example/ns/shop/sa/web"} {
		d := set.Decide(&tunnel.Request{Peer: tunnel.Peer{ID: id, Method: "mtls"}}, 5432, policy.Connect)
		fmt.Println(id, d.Allowed, d.Step, d.Policy)
	}
	// Output:
	// spiffe://corp.example/ns/shop/sa/api true namespace allow db
	// spiffe://old.example/ns/shop/sa/api false admin deny no-legacy
	// spiffe://corp.example/ns/shop/sa/web false namespace allow db
}
