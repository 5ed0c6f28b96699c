package policy

import (
	"testing"

	"culvert.dev/tunnel"
)

func TestListeners(t *testing.T) {
	for _, tt := range []struct {
		pattern, listener string
		want              bool
	}{
		{":443", ":443", true},
		{":443", ":8443", false},
		{"gateway/shop/edge/tls", "gateway/shop/edge/tls", true},
		{"gateway/shop/edge/tls", "gateway/shop/edge/tls@192.0.2.1", true},
		{"gateway/shop/edge/tls@192.0.2.1", "gateway/shop/edge/tls@192.0.2.1", true},
		{"gateway/shop/edge/tls@192.0.2.1", "gateway/shop/edge/tls@192.0.2.2", false},
		{"gateway/shop/edge/*", "gateway/shop/edge/tls", true},
		{"gateway/shop/edge/*", "gateway/shop/edge/tls@2001:db8::1", true},
		{"gateway/shop/edge/*", "gateway/shop/edges/tls", false},
		{"gateway/shop/*", "gateway/shop/edge/tls", false},
		{"*", "gateway/shop/edge/tls", false},
		{"/*", ":443", false},
	} {
		if got := onListener(tt.pattern, tt.listener); got != tt.want {
			t.Errorf("%q on %q: got %t, want %t", tt.pattern, tt.listener, got, tt.want)
		}
		// An allow without a rule denies what it selects, and nothing else.
		set, err := Compile([]*Policy{{Name: "p", Targets: Targets{Listeners: []string{tt.pattern}}}}, nil)
		if err != nil {
			t.Fatal(err)
		}
		req := &tunnel.Request{Listener: tt.listener}
		if got := set.Decide(req, 443, Connect); got.Allowed == tt.want {
			t.Errorf("%q on %q: allowed %t, want %t", tt.pattern, tt.listener, got.Allowed, !tt.want)
		}
		deny, err := Compile([]*Policy{{Name: "p", Action: Deny, Targets: Targets{Listeners: []string{tt.pattern}}, Rules: []Rule{{}}}}, nil)
		if err != nil {
			t.Fatal(err)
		}
		if got := deny.Decide(req, 443, Connect); got.Allowed == tt.want {
			t.Errorf("deny on %q at %q: allowed %t, want %t", tt.pattern, tt.listener, got.Allowed, !tt.want)
		}
		if n := testing.AllocsPerRun(100, func() { set.Decide(req, 443, Connect) }); n != 0 {
			t.Errorf("%q: %v allocations, want none", tt.pattern, n)
		}
	}
}

// An endpoint of a workload whose labels are not known serves nobody where labels select, and
// everybody where none do.
func TestUnknownWorkload(t *testing.T) {
	all := []*Policy{
		{Name: "shop/db", Targets: Targets{Namespaces: []string{"shop"}, Workloads: &Selector{Labels: map[string]string{"app": "db"}}}, Rules: []Rule{{}}},
		{Name: "stock/dry", DryRun: true, Targets: Targets{Namespaces: []string{"stock"}, Workloads: &Selector{}}, Rules: []Rule{{}}},
	}
	c := NewCompiler(all, nil)
	for _, tt := range []struct {
		name     string
		workload *Workload
		want     bool
	}{
		{"of those labels", &Workload{Namespace: "shop", Labels: map[string]string{"app": "db"}}, true},
		{"of others", &Workload{Namespace: "shop", Labels: map[string]string{"app": "web"}}, true},
		{"not known", &Workload{Namespace: "shop", Unknown: true}, false},
		{"not known, of another namespace", &Workload{Namespace: "edge", Unknown: true}, true},
		{"not known, in dry run", &Workload{Namespace: "stock", Unknown: true}, true},
		{"no workload", nil, true},
	} {
		target := &Target{Service: "s", Namespace: "shop", Workload: tt.workload}
		if tt.workload != nil {
			target.Namespace = tt.workload.Namespace
		}
		if got := c.Set(target).Decide(&tunnel.Request{}, 443, Connect); got.Allowed != tt.want {
			t.Errorf("%s: got %+v, want allowed %t", tt.name, got, tt.want)
		}
	}
}
