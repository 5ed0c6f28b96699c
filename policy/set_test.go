package policy_test

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"reflect"
	"strings"
	"testing"

	"culvert.dev/policy"
	"culvert.dev/policy/policytest"
	"culvert.dev/tunnel"
)

func mtls(id string) tunnel.Peer { return tunnel.Peer{ID: id, Method: "mtls"} }

func from(peer tunnel.Peer) *tunnel.Request {
	return &tunnel.Request{Proto: "connect", Listener: ":443", Peer: peer, Source: netip.MustParseAddrPort("10.1.2.3:5000")}
}

func sources(x ...policy.Source) []policy.Rule { return []policy.Rule{{Sources: &x}} }

var everybody = []policy.Rule{{}}

const (
	api = "spiffe://corp.example/ns/shop/sa/api"
	old = "spiffe://old.example/ns/shop/sa/api"
)

// Each row of the total order, and what a policy of a later step can't change.
func TestOrder(t *testing.T) {
	p := func(tier policy.Tier, action policy.Action, rules []policy.Rule) *policy.Policy {
		return &policy.Policy{Name: tier.String() + " " + action.String(), Tier: tier, Action: action, Rules: rules}
	}
	for _, test := range []struct {
		name     string
		policies []*policy.Policy
		want     bool
		step     policy.Step
	}{
		{"none", nil, true, policy.Undecided},
		{"admin deny before admin allow", []*policy.Policy{p(policy.Admin, policy.Allow, everybody), p(policy.Admin, policy.Deny, everybody)}, false, policy.AdminDeny},
		{"admin allow before namespace deny", []*policy.Policy{p(policy.Admin, policy.Allow, everybody), p(policy.Namespace, policy.Deny, everybody)}, true, policy.AdminAllow},
		{"admin allow that does not match denies nobody", []*policy.Policy{p(policy.Admin, policy.Allow, nil)}, true, policy.Undecided},
		{"namespace deny before namespace allow", []*policy.Policy{p(policy.Namespace, policy.Allow, everybody), p(policy.Namespace, policy.Deny, everybody)}, false, policy.NamespaceDeny},
		{"namespace allow", []*policy.Policy{p(policy.Namespace, policy.Allow, everybody), p(policy.Baseline, policy.Deny, everybody)}, true, policy.NamespaceAllow},
		{"namespace allow that does not match", []*policy.Policy{p(policy.Namespace, policy.Allow, nil)}, false, policy.NamespaceAllow},
		{"namespace deny that does not match leaves out the baseline", []*policy.Policy{p(policy.Namespace, policy.Deny, nil), p(policy.Baseline, policy.Deny, everybody)}, true, policy.Undecided},
		{"baseline deny before baseline allow", []*policy.Policy{p(policy.Baseline, policy.Allow, everybody), p(policy.Baseline, policy.Deny, everybody)}, false, policy.BaselineDeny},
		{"baseline allow", []*policy.Policy{p(policy.Baseline, policy.Allow, everybody)}, true, policy.BaselineAllow},
		{"baseline allow that does not match", []*policy.Policy{p(policy.Baseline, policy.Allow, nil)}, false, policy.BaselineAllow},
		{"baseline deny that does not match", []*policy.Policy{p(policy.Baseline, policy.Deny, nil)}, true, policy.Undecided},
	} {
		set, err := policy.Compile(test.policies, nil)
		if err != nil {
			t.Fatal(err)
		}
		if d := set.Decide(from(mtls(api)), 443, policy.Connect); d.Allowed != test.want || d.Step != test.step {
			t.Errorf("%s: got allowed %v at %q, want %v at %q", test.name, d.Allowed, d.Step, test.want, test.step)
		}
	}
}

// nil means any and an empty list means none, also after an encoder.
func TestNilAndEmpty(t *testing.T) {
	var noSources []policy.Source
	for _, test := range []struct {
		name string
		rule policy.Rule
		want bool
	}{
		{"no fields", policy.Rule{}, true},
		{"empty sources", policy.Rule{Sources: &[]policy.Source{}}, false},
		{"nil list of sources", policy.Rule{Sources: &noSources}, false},
		{"the source of everybody", policy.Rule{Sources: &[]policy.Source{{}}}, true},
		{"empty ports", policy.Rule{Ports: &[]policy.PortRange{}}, false},
		{"a port", policy.Rule{Ports: &[]policy.PortRange{{First: 443}}}, true},
		{"another port", policy.Rule{Ports: &[]policy.PortRange{{First: 444, Last: 500}}}, false},
		{"empty protocols", policy.Rule{Protocols: &[]string{}}, false},
		{"a protocol", policy.Rule{Protocols: &[]string{"connect"}}, true},
	} {
		p := &policy.Policy{Name: "p", Rules: []policy.Rule{test.rule}}
		text, err := json.Marshal(p)
		if err != nil {
			t.Fatal(err)
		}
		again := &policy.Policy{}
		if err := json.Unmarshal(text, again); err != nil {
			t.Fatal(err)
		}
		for _, p := range []*policy.Policy{p, again} {
			set, err := policy.Compile([]*policy.Policy{p}, nil)
			if err != nil {
				t.Fatal(err)
			}
			if got := set.Decide(from(mtls(api)), 443, policy.Connect).Allowed; got != test.want {
				t.Errorf("%s: got allowed %v of %s, want %v", test.name, got, text, test.want)
			}
		}
	}
}

func TestVerbsWithoutAPolicy(t *testing.T) {
	connect, err := policy.Compile([]*policy.Policy{{Name: "p", Rules: everybody}}, nil)
	if err != nil {
		t.Fatal(err)
	}
	register, err := policy.Compile([]*policy.Policy{{Name: "p", Verb: policy.Register, Rules: sources(policy.Source{SPIFFE: []string{"spiffe://corp.example/*"}})}}, nil)
	if err != nil {
		t.Fatal(err)
	}
	for v, want := range map[policy.Verb][3]bool{policy.Connect: {true, true, true}, policy.Register: {false, false, true}, policy.Catalog: {}, policy.Join: {}, policy.Join + 1: {}} {
		for i, s := range []*policy.Set{nil, connect, register} {
			if got := s.Decide(from(mtls(api)), 443, v).Allowed; got != want[i] {
				t.Errorf("verb %v, set %d: got allowed %v, want %v", v, i, got, want[i])
			}
		}
	}
	if register.Decide(from(mtls(old)), 443, policy.Register).Allowed {
		t.Error("got a caller of another trust domain allowed to register, want it denied")
	}
}

// What callers without an identity get where policies name identities.
func TestUnidentifiedCallers(t *testing.T) {
	who := policy.Source{TrustDomains: []string{"corp.example"}}
	where := policy.Source{TrustDomains: []string{"corp.example"}, CIDRs: []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8")}}
	for _, test := range []struct {
		name       string
		action     policy.Action
		source     policy.Source
		defers     bool
		ended      bool
		from       string
		wantAllows bool
	}{
		{"allow by identity", policy.Allow, who, false, false, "10.1.2.3", false},
		{"deny by identity", policy.Deny, who, false, false, "10.1.2.3", false},
		{"allow by identity, deferred", policy.Allow, who, true, false, "10.1.2.3", true},
		{"deny by identity, deferred", policy.Deny, who, true, false, "10.1.2.3", true},
		{"allow by identity, deferred, and TLS ends here", policy.Allow, who, true, true, "10.1.2.3", false},
		{"deny by identity, deferred, and TLS ends here", policy.Deny, who, true, true, "10.1.2.3", false},
		{"allow by identity and address, deferred", policy.Allow, where, true, false, "10.1.2.3", true},
		{"allow by identity and another address, deferred", policy.Allow, where, true, false, "192.0.2.1", false},
		{"deny by identity and address", policy.Deny, where, false, false, "10.1.2.3", false},
		{"deny by identity and another address", policy.Deny, where, false, false, "192.0.2.1", true},
	} {
		set, err := policy.Compile([]*policy.Policy{{Name: "p", Action: test.action, Rules: sources(test.source)}}, nil)
		if err != nil {
			t.Fatal(err)
		}
		req := &tunnel.Request{Proto: "sni", DeferIdentity: test.defers, Source: netip.AddrPortFrom(netip.MustParseAddr(test.from), 1)}
		if test.ended {
			req.TLS = &tunnel.EndedTLS{}
		}
		if got := set.Decide(req, 443, policy.Connect).Allowed; got != test.wantAllows {
			t.Errorf("%s: got allowed %v, want %v", test.name, got, test.wantAllows)
		}
	}
}

// Whoever chooses its own name must not become another principal by it.
func TestIdentities(t *testing.T) {
	gw := &tunnel.Peer{ID: "spiffe://corp.example/ns/edge/sa/gw", Method: "mtls"}
	for _, test := range []struct {
		name   string
		source policy.Source
		peer   tunnel.Peer
		want   bool
	}{
		{"SPIFFE id", policy.Source{SPIFFE: []string{api}}, mtls(api), true},
		{"SPIFFE wildcard", policy.Source{SPIFFE: []string{"spiffe://corp.example/ns/*"}}, mtls(api), true},
		{"SPIFFE wildcard of a longer trust domain", policy.Source{SPIFFE: []string{"spiffe://corp.example/*"}}, mtls("spiffe://corp.example.attacker/ns/shop/sa/api"), false},
		{"the id of the wildcard itself", policy.Source{SPIFFE: []string{"spiffe://corp.example/ns/*"}}, mtls("spiffe://corp.example/ns/"), false},
		{"user named like a SPIFFE id", policy.Source{SPIFFE: []string{api}}, tunnel.Peer{ID: api, Method: "basic"}, false},
		{"subject of a token named like a SPIFFE id", policy.Source{SPIFFE: []string{api}}, tunnel.Peer{ID: api, Method: "jwt", Auth: &tunnel.AuthInfo{}}, false},
		{"SPIFFE id of another trust domain than the bundle's", policy.Source{SPIFFE: []string{api}}, tunnel.Peer{ID: api, Method: "mtls", Auth: &tunnel.AuthInfo{TrustDomain: "old.example"}}, false},
		{"JWT-SVID", policy.Source{SPIFFE: []string{api}}, tunnel.Peer{ID: api, Method: "jwt", Auth: &tunnel.AuthInfo{TrustDomain: "corp.example"}}, true},
		{"an id without a method", policy.Source{SPIFFE: []string{api}}, tunnel.Peer{ID: api}, false},
		{"user", policy.Source{Users: []string{"alice"}}, tunnel.Peer{ID: "alice", Method: "basic"}, true},
		{"another user", policy.Source{Users: []string{"alice"}}, tunnel.Peer{ID: "bob", Method: "basic"}, false},
		{"service account", policy.Source{ServiceAccounts: []policy.ServiceAccount{{Namespace: "shop", Name: "api"}}}, mtls(api), true},
		{"service account of a trust domain", policy.Source{TrustDomains: []string{"corp.example"}, ServiceAccounts: []policy.ServiceAccount{{Namespace: "shop", Name: "api"}}}, mtls(old), false},
		{"service account of Linkerd", policy.Source{ServiceAccounts: []policy.ServiceAccount{{Namespace: "shop", Name: "api"}}}, tunnel.Peer{ID: "dns:api.shop.serviceaccount.identity.linkerd.cluster.local", Method: "mtls", Auth: &tunnel.AuthInfo{Namespace: "shop", ServiceAccount: "api"}}, true},
		{"a path that goes on after the account", policy.Source{ServiceAccounts: []policy.ServiceAccount{{Namespace: "shop", Name: "api"}}}, mtls(api + "/x"), false},
		{"namespace", policy.Source{Namespaces: []string{"shop"}}, mtls(api), true},
		{"claim", policy.Source{Claims: map[string][]string{"groups": {"dev", "ops"}}}, tunnel.Peer{ID: "x", Method: "jwt", Auth: &tunnel.AuthInfo{Claims: map[string][]string{"groups": {"a", "ops"}}}}, true},
		{"one of two claims", policy.Source{Claims: map[string][]string{"groups": {"ops"}, "azp": {"y"}}}, tunnel.Peer{ID: "x", Method: "jwt", Auth: &tunnel.AuthInfo{Claims: map[string][]string{"groups": {"ops"}}}}, false},
		{"identity and address", policy.Source{SPIFFE: []string{api}, CIDRs: []netip.Prefix{netip.MustParsePrefix("10.1.0.0/16")}}, mtls(api), true},
		{"identity and another address", policy.Source{SPIFFE: []string{api}, CIDRs: []netip.Prefix{netip.MustParsePrefix("10.2.0.0/16")}}, mtls(api), false},
		{"network", policy.Source{Networks: []string{"east"}}, mtls(api), true},
		{"the network around it", policy.Source{Networks: []string{"west"}}, mtls(api), false},
		{"actor", policy.Source{SPIFFE: []string{api}, Actors: []string{gw.ID}}, tunnel.Peer{ID: api, Method: "mtls", Auth: &tunnel.AuthInfo{TrustDomain: "corp.example", Actor: gw}}, true},
		{"no actor", policy.Source{SPIFFE: []string{api}, Actors: []string{gw.ID}}, mtls(api), false},
		{"an actor of that name without a certificate", policy.Source{Actors: []string{gw.ID}}, tunnel.Peer{ID: api, Method: "mtls", Auth: &tunnel.AuthInfo{TrustDomain: "corp.example", Actor: &tunnel.Peer{ID: gw.ID, Method: "basic"}}}, false},
	} {
		set, err := policy.Compile([]*policy.Policy{{Name: "p", Rules: sources(test.source)}}, policytest.NetworkOf)
		if err != nil {
			t.Fatal(err)
		}
		if got := set.Decide(from(test.peer), 443, policy.Connect).Allowed; got != test.want {
			t.Errorf("%s: got allowed %v, want %v", test.name, got, test.want)
		}
	}
}

func TestDryRunIsNeverEnforced(t *testing.T) {
	set, err := policy.Compile([]*policy.Policy{
		{Name: "a", Rules: sources(policy.Source{Users: []string{"alice"}}), DryRun: true},
		{Name: "b", Rules: sources(policy.Source{Users: []string{"bob"}}), DryRun: true},
	}, nil)
	if err != nil {
		t.Fatal(err)
	}
	d := set.Decide(from(tunnel.Peer{ID: "carol", Method: "basic"}), 443, policy.Connect)
	if !d.Allowed || d.DryRun == nil || d.DryRun.Allowed || d.DryRun.Policy != "a" || d.DryRun.Rule != -1 {
		t.Errorf("carol: got %+v, dry run %+v, want her allowed and the dry run of policy a to deny", d, d.DryRun)
	}
	// Policies in dry run are looked at together: the one for bob must not hide that for alice.
	d = set.Decide(from(tunnel.Peer{ID: "alice", Method: "basic"}), 443, policy.Connect)
	if !d.Allowed || d.DryRun == nil || !d.DryRun.Allowed || d.DryRun.Policy != "a" || d.DryRun.Rule != 0 {
		t.Errorf("alice: got %+v, dry run %+v, want her allowed by rule 0 of policy a", d, d.DryRun)
	}
}

// What can't be understood denies everything, and says so.
func TestUnusablePolicies(t *testing.T) {
	any4 := netip.MustParsePrefix("0.0.0.0/0")
	for _, test := range []struct {
		bad  policy.Policy
		want string
	}{
		{policy.Policy{Invalid: "unknown field \"rule\""}, "unknown field"},
		{policy.Policy{Tier: 7}, "unknown tier 7"},
		{policy.Policy{Action: 7}, "unknown action 7"},
		{policy.Policy{Verb: 7}, "unknown verb 7"},
		{policy.Policy{Targets: policy.Targets{Names: []string{"a b"}}}, `target name "a b"`},
		{policy.Policy{Targets: policy.Targets{Workloads: &policy.Selector{Requirements: []policy.LabelRequirement{{Key: "app", Operator: "Like"}}}}}, "unknown operator"},
		{policy.Policy{Targets: policy.Targets{Workloads: &policy.Selector{Requirements: []policy.LabelRequirement{{Key: "app", Operator: "In"}}}}}, "has no values"},
		{policy.Policy{Rules: sources(policy.Source{Users: []string{}})}, "users is empty"},
		{policy.Policy{Rules: sources(policy.Source{Users: []string{api}})}, "is a SPIFFE id"},
		{policy.Policy{Rules: sources(policy.Source{CIDRs: []netip.Prefix{}})}, "cidrs is empty"},
		{policy.Policy{Rules: sources(policy.Source{CIDRs: []netip.Prefix{{}}})}, "not valid"},
		{policy.Policy{Rules: sources(policy.Source{CIDRs: []netip.Prefix{netip.MustParsePrefix("10.0.0.1/8")}})}, "write 10.0.0.0/8"},
		{policy.Policy{Rules: sources(policy.Source{CIDRs: []netip.Prefix{any4}, SPIFFE: []string{"spiffe://corp.example"}})}, "is a trust domain"},
		{policy.Policy{Rules: sources(policy.Source{SPIFFE: []string{"corp.example/*"}})}, "no SPIFFE id"},
		{policy.Policy{Rules: sources(policy.Source{SPIFFE: []string{"spiffe://*/ns/shop/sa/api"}})}, "no SPIFFE id"},
		{policy.Policy{Rules: sources(policy.Source{ServiceAccounts: []policy.ServiceAccount{{Name: "api"}}})}, "empty namespace"},
		{policy.Policy{Rules: sources(policy.Source{Claims: map[string][]string{"groups": {}}})}, "has no values"},
		{policy.Policy{Rules: []policy.Rule{{Ports: &[]policy.PortRange{{First: 9, Last: 8}}}}}, "no range"},
	} {
		test.bad.Name, test.bad.Origin = "bad", "culvert.yaml:7"
		allow := &policy.Policy{Name: "good", Tier: policy.Admin, Rules: everybody}
		set, err := policy.Compile([]*policy.Policy{allow, &test.bad}, nil)
		if err == nil || !strings.Contains(err.Error(), test.want) || !strings.Contains(err.Error(), `"bad" of culvert.yaml:7`) {
			t.Errorf("got the error %v, want one with %q", err, test.want)
		}
		for v := policy.Connect; v <= policy.Join; v++ {
			if d := set.Decide(from(mtls(api)), 443, v); d.Allowed || d.Step != policy.Unreadable || d.Policy != "bad" {
				t.Errorf("%s: %v: got %+v, want it denied by the policy", test.want, v, d)
			}
		}
		test.bad.DryRun = true
		set, _ = policy.Compile([]*policy.Policy{allow, &test.bad}, nil)
		if d := set.Decide(from(mtls(api)), 443, policy.Connect); !d.Allowed || d.DryRun == nil || d.DryRun.Allowed {
			t.Errorf("%s, in dry run: got %+v, want it allowed, and denied in dry run", test.want, d)
		}
	}
}

// A policy whose targets can't be read selects all that it might be about.
func TestUnreadableTargets(t *testing.T) {
	c := policy.NewCompiler([]*policy.Policy{{Name: "bad", Rules: everybody, Targets: policy.Targets{Names: []string{"a..b"}, Namespaces: []string{"shop"}}}}, nil)
	if len(c.Errors()) != 1 {
		t.Errorf("got the errors %v, want one", c.Errors())
	}
	for namespace, want := range map[string]bool{"shop": false, "pay": true} {
		if got := c.Set(&policy.Target{Service: "db", Namespace: namespace}).Decide(from(mtls(api)), 443, policy.Connect).Allowed; got != want {
			t.Errorf("namespace %s: got allowed %v, want %v", namespace, got, want)
		}
	}
}

// Services that are selected by the same policies share a Set.
func TestSetsAreShared(t *testing.T) {
	c := policy.NewCompiler([]*policy.Policy{
		{Name: "all", Rules: everybody},
		{Name: "shop", Rules: everybody, Targets: policy.Targets{Namespaces: []string{"shop"}}},
	}, nil)
	a, b, other := c.Set(&policy.Target{Service: "a", Namespace: "shop"}), c.Set(&policy.Target{Service: "b", Namespace: "shop"}), c.Set(&policy.Target{Service: "c"})
	if a != b || a == other || len(a.Policies()) != 2 || len(other.Policies()) != 1 {
		t.Errorf("got sets %p, %p, %p of %d, %d and %d policies, want the first two to be one of 2, and the third of 1", a, b, other, len(a.Policies()), len(b.Policies()), len(other.Policies()))
	}
	if none := policy.NewCompiler(nil, nil).Set(&policy.Target{Service: "a"}); none != nil {
		t.Errorf("got %v, want no set without policies", none)
	}
}

// An allow for names below a wider wildcard of the service admits requests for these alone.
func TestPartOfAWildcard(t *testing.T) {
	allow := &policy.Policy{Name: "pay", Rules: everybody, Targets: policy.Targets{Names: []string{"*.pay.example"}}}
	deny := &policy.Policy{Name: "no-pay", Action: policy.Deny, Rules: everybody, Targets: policy.Targets{Names: []string{"a.pay.example"}}}
	pattern := func(s string) []tunnel.Pattern {
		p, err := policy.ParseName(s)
		if err != nil {
			t.Fatal(err)
		}
		return []tunnel.Pattern{p}
	}
	for _, test := range []struct {
		service, asked string
		policy         *policy.Policy
		want           bool
	}{
		{"*.example", "a.pay.example", allow, true},
		{"*.example", "a.example", allow, false},
		{"*.example", "", allow, false},
		{"a.pay.example", "", allow, true},
		{"*", "a.pay.example", allow, true},
		{"*", "a.example", allow, false},
		{"*.example", "a.pay.example", deny, false},
		{"*.example", "a.example", deny, false},
		{"b.example", "b.example", deny, true},
	} {
		req := from(mtls(api))
		if test.asked != "" {
			req.Name = tunnel.MustParseName(test.asked)
		}
		set := policy.NewCompiler([]*policy.Policy{test.policy}, nil).Set(&policy.Target{Names: pattern(test.service)})
		if got := set.Decide(req, 443, policy.Connect).Allowed; got != test.want {
			t.Errorf("policy %s, service %s, request for %q: got allowed %v, want %v", test.policy.Name, test.service, test.asked, got, test.want)
		}
	}
}

func TestWords(t *testing.T) {
	p := policy.Policy{Name: "p", Tier: policy.Baseline, Action: policy.Deny, Verb: policy.Catalog, Rules: sources(policy.Source{CIDRs: []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8")}})}
	text, err := json.Marshal(p)
	if err != nil {
		t.Fatal(err)
	}
	var again policy.Policy
	if err := json.Unmarshal(text, &again); err != nil || !reflect.DeepEqual(p, again) {
		t.Errorf("got %+v, %v from %s, want %+v", again, err, text, p)
	}
	for _, bad := range []string{`{"Tier":"root"}`, `{"Action":"maybe"}`, `{"Verb":"see"}`} {
		if err := json.Unmarshal([]byte(bad), &again); err == nil {
			t.Errorf("got no error for %s", bad)
		}
	}
}

// many returns a set of n rules, each for a principal and a range of its own, and a request
// that none of them but the last matches.
func many(tb testing.TB, n int) (*policy.Set, *tunnel.Request) {
	var policies []*policy.Policy
	for i := range n {
		p := &policy.Policy{Name: fmt.Sprintf("p%06d", i)}
		switch i % 3 {
		case 0:
			p.Rules = sources(policy.Source{SPIFFE: []string{fmt.Sprintf("spiffe://corp.example/ns/n%d/sa/api", i)}})
		case 1:
			p.Rules = sources(policy.Source{ServiceAccounts: []policy.ServiceAccount{{Namespace: fmt.Sprint("n", i), Name: "api"}}})
		case 2:
			p.Rules = sources(policy.Source{CIDRs: []netip.Prefix{netip.PrefixFrom(netip.AddrFrom4([4]byte{10, byte(i >> 8), byte(i), 0}), 24)}})
		}
		policies = append(policies, p)
	}
	set, err := policy.Compile(policies, nil)
	if err != nil {
		tb.Fatal(err)
	}
	req := from(mtls(fmt.Sprintf("spiffe://corp.example/ns/n%d/sa/api", n-1)))
	return set, req
}

// Nothing that a decision may look at takes memory, whoever calls.
func TestDecideDoesNotAllocate(t *testing.T) {
	for _, n := range []int{10, 10_000} {
		set, req := many(t, n)
		unknown := *req
		unknown.Peer = tunnel.Peer{}
		token := *req
		token.Peer = tunnel.Peer{ID: "alice", Method: "jwt", Auth: &tunnel.AuthInfo{Claims: map[string][]string{"groups": {"dev"}}, Actor: &tunnel.Peer{ID: "gw", Method: "mtls"}}}
		for name, one := range map[string]*tunnel.Request{"certificate": req, "nobody": &unknown, "token": &token} {
			if allocs := testing.AllocsPerRun(100, func() { set.Decide(one, 443, policy.Connect) }); allocs != 0 {
				t.Errorf("%d rules, %s: got %v allocations for a decision, want none", n, name, allocs)
			}
		}
	}
}

func BenchmarkDecide(b *testing.B) {
	for _, n := range []int{1, 10, 1000, 10_000} {
		set, req := many(b, n)
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				set.Decide(req, 443, policy.Connect)
			}
		})
	}
}
