package registry

import (
	"testing"

	"culvert.dev/policy"
	"culvert.dev/tunnel"
)

func TestPolicyUses(t *testing.T) {
	leader, replica := &policy.Workload{Namespace: "shop", Labels: map[string]string{"role": "leader"}}, &policy.Workload{Namespace: "shop", Labels: map[string]string{"role": "replica"}}
	db := &Service{
		Name: "db", Names: []tunnel.Pattern{{Suffix: tunnel.MustParseName("db.test")}}, ID: ID{Service: "db", Namespace: "shop", Cluster: "west"}, Exposed: true,
		Endpoints: []Endpoint{{Host: "one.test", Workload: leader}, {Host: "two.test", Workload: replica}},
	}
	web := &Service{Name: "web", Names: []tunnel.Pattern{{Suffix: tunnel.MustParseName("web.test")}}, Endpoints: []Endpoint{{Host: "three.test"}}, Exposed: true}
	named := []policy.Rule{{Sources: &[]policy.Source{{Users: []string{"alice"}}}}}
	policies := []*policy.Policy{
		{Name: "all", Origin: "all", Rules: named},
		{Name: "leaders", Origin: "leaders", Targets: policy.Targets{Workloads: &policy.Selector{Labels: map[string]string{"role": "leader"}}}, Rules: named},
		{Name: "leaders too", Origin: "leaders", Targets: policy.Targets{Services: []string{"db"}}, Rules: named},
		{Name: "anybody", Origin: "anybody", Targets: policy.Targets{Services: []string{"web"}}, Rules: []policy.Rule{{}}},
		{Name: "nothing", Origin: "nothing", Targets: policy.Targets{Services: []string{"gone"}}, Rules: named},
	}
	listener := func(protocol string, deferred bool) *Listener {
		return &Listener{Name: ":443", Protocol: Streams, Port: 443, Settings: &ListenerSettings{Protocols: []string{protocol}, DeferIdentity: deferred}}
	}
	for _, tt := range []struct {
		name      string
		listeners []*Listener
		blind     bool
	}{
		{"no listener", nil, false},
		{"callers that may have an identity", []*Listener{listener("connect", false)}, false},
		{"TLS that passes", []*Listener{listener("sni", false)}, true},
		{"TLS that passes, identities left to the service", []*Listener{listener("sni", true)}, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			table, err := Merge(Snapshot{Services: []*Service{db, web}, Listeners: tt.listeners, Policies: policies})
			if err != nil {
				t.Fatal(err)
			}
			blind := 0
			if tt.blind {
				blind = 1
			}
			got := table.PolicyUses()
			for origin, want := range map[string]PolicyUse{"all": {2, 2 * blind}, "leaders": {1, blind}, "anybody": {1, 0}, "nothing": {0, 0}} {
				if got[origin] != want {
					t.Errorf("%s: got %+v, want %+v", origin, got[origin], want)
				}
			}
		})
	}
}
