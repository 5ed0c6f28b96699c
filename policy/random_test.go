package policy_test

import (
	"encoding/json"
	"math/rand/v2"
	"net/netip"
	"testing"

	"culvert.dev/policy"
	"culvert.dev/tunnel"
)

// dice make a world of few words, so that most policies are about the request.
type dice struct{ *rand.Rand }

func (d dice) one(of ...string) string { return of[d.IntN(len(of))] }

// some returns nil most of the time, or one or two of the words.
func (d dice) some(of ...string) []string {
	if d.IntN(3) > 0 {
		return nil
	}
	return append([]string{d.one(of...)}, d.few(of...)...)
}

func (d dice) few(of ...string) []string {
	if d.IntN(2) == 0 {
		return nil
	}
	return []string{d.one(of...)}
}

var (
	names  = []string{"*", "*.example", "*.pay.example", "a.pay.example", "b.pay.example", "a.example", "pay.example", "*.b.pay.example"}
	ids    = []string{"spiffe://corp.example/ns/shop/sa/api", "spiffe://corp.example/ns/shop/sa/web", "spiffe://old.example/ns/shop/sa/api", "spiffe://corp.example/edge"}
	ranges = []string{"10.0.0.0/8", "10.1.0.0/16", "10.1.2.0/24", "10.1.2.3/32", "0.0.0.0/0", "2001:db8::/32", "::/0", "192.0.2.0/24", "10.1.2.2/31"}
)

func (d dice) source() policy.Source {
	x := policy.Source{
		SPIFFE: d.some(append([]string{"spiffe://corp.example/ns/shop/*", "spiffe://old.example/*", "spiffe://corp.example/ns/*"}, ids...)...), Users: d.some("alice", "bob"),
		Namespaces: d.some("shop", "pay"), TrustDomains: d.some("corp.example", "old.example"), Networks: d.some("east", "west"),
	}
	if d.IntN(4) == 0 {
		x.Actors = d.some("gw", "spiffe://corp.example/*")
	}
	if d.IntN(4) == 0 {
		x.ServiceAccounts = []policy.ServiceAccount{{Namespace: "shop", Name: d.one("api", "web")}}
	}
	if d.IntN(6) == 0 {
		x.Claims = map[string][]string{"groups": {d.one("dev", "ops")}}
	}
	if d.IntN(3) == 0 {
		for range 1 + d.IntN(3) {
			x.CIDRs = append(x.CIDRs, netip.MustParsePrefix(d.one(ranges...)))
		}
	}
	if d.IntN(3) == 0 { // few sources ask for much at once
		return policy.Source{CIDRs: x.CIDRs, SPIFFE: x.SPIFFE}
	}
	return x
}

func (d dice) policy(i int) *policy.Policy {
	p := &policy.Policy{
		Name: "p" + string(rune('a'+i)), Tier: policy.Tier(d.IntN(3)), Action: policy.Action(d.IntN(2)), DryRun: d.IntN(5) == 0,
		Targets: policy.Targets{Names: d.some(names...), Services: d.some("db", "web"), Namespaces: d.some("shop", "pay"), Listeners: d.some(":443", ":80", "edge/https", "edge/*"), Routes: nil},
	}
	if d.IntN(8) == 0 {
		p.Targets.Routes = d.some("r1", "r2")
	}
	if d.IntN(6) == 0 {
		p.Targets.Workloads = &policy.Selector{Labels: map[string]string{"app": d.one("db", "web")}}
	}
	if d.IntN(5) == 0 {
		p.Verb = policy.Verb(d.IntN(4))
	}
	for range d.IntN(4) {
		var r policy.Rule
		if d.IntN(4) > 0 {
			r.Sources = &[]policy.Source{}
			for range d.IntN(4) {
				*r.Sources = append(*r.Sources, d.source())
			}
		}
		if d.IntN(4) == 0 {
			r.Ports = &[]policy.PortRange{}
			if d.IntN(4) > 0 {
				*r.Ports = append(*r.Ports, policy.PortRange{First: 400, Last: uint16(d.IntN(2) * 450)})
			}
		}
		if d.IntN(6) == 0 {
			r.Protocols = &[]string{d.one("sni", "connect")}
		}
		p.Rules = append(p.Rules, r)
	}
	return p
}

func (d dice) peer() tunnel.Peer {
	switch id := d.one(ids...); d.IntN(4) {
	case 0:
		return tunnel.Peer{}
	case 1:
		return tunnel.Peer{ID: d.one("alice", "bob", ids[0]), Method: "basic", Auth: &tunnel.AuthInfo{Claims: map[string][]string{"groups": {d.one("dev", "ops", "all")}}}}
	default:
		p := tunnel.Peer{ID: id, Method: "mtls", Auth: &tunnel.AuthInfo{TrustDomain: id[9:20]}}
		if id[9] == 'c' {
			p.Auth.TrustDomain = "corp.example"
		}
		if id != ids[3] {
			p.Auth.Namespace, p.Auth.ServiceAccount = "shop", id[len(id)-3:]
		}
		if d.IntN(3) == 0 {
			p.Auth.Actor = &tunnel.Peer{ID: d.one("gw", "other"), Method: "basic"}
		}
		return p
	}
}

func (d dice) world() *world {
	w := &world{
		req: &tunnel.Request{
			Proto: d.one("sni", "connect"), Listener: d.one(":443", ":80", "edge/https", "edge/tls"), Peer: d.peer(), DeferIdentity: d.IntN(3) == 0,
			Source: netip.AddrPortFrom(netip.MustParseAddr(d.one("10.1.2.3", "10.1.9.9", "10.9.9.9", "192.0.2.1", "2001:db8::1", "2001:db9::1")), 1000),
		},
		target: policy.Target{Service: d.one("db", "web"), Namespace: d.one("shop", "pay", "")},
		port:   uint16(400 + d.IntN(100)),
		verb:   policy.Connect,
	}
	if d.IntN(4) == 0 {
		w.req.TLS = &tunnel.EndedTLS{}
	}
	if d.IntN(4) > 0 {
		w.req.Name = tunnel.MustParseName(d.one("a.pay.example", "b.pay.example", "a.example", "pay.example"))
	}
	for range 1 + d.IntN(2) {
		p, err := policy.ParseName(d.one(names...))
		if err != nil {
			panic(err)
		}
		w.target.Names = append(w.target.Names, p)
	}
	if d.IntN(4) == 0 {
		w.target.Route = d.one("r1", "r2")
	}
	if d.IntN(3) == 0 {
		w.target.Workload = &policy.Workload{Namespace: d.one("shop", "pay"), Labels: map[string]string{"app": d.one("db", "web")}}
	}
	if d.IntN(8) == 0 {
		w.verb = policy.Verb(d.IntN(4))
	}
	for i := range 1 + d.IntN(6) {
		w.policies = append(w.policies, d.policy(i))
	}
	return w
}

// check compares the decision of the compiled policies with the naive one.
func (w *world) check(t *testing.T) {
	t.Helper()
	set := policy.NewCompiler(w.policies, networkOf).Set(&w.target)
	d := set.Decide(w.req, w.port, w.verb)
	allowed, step := w.naive(false)
	wouldAllow, wouldStep := w.naive(true)
	dry := d
	if d.DryRun != nil {
		dry = *d.DryRun
	}
	if d.Allowed != allowed || d.Step != step || dry.Allowed != wouldAllow || dry.Step != wouldStep {
		text, _ := json.MarshalIndent(w.policies, "", " ")
		t.Fatalf("policies %s\ntarget %+v\nrequest %+v\nport %d %v\ngot %v at %q (dry run %v at %q), want %v at %q (%v at %q)", text, w.target, w.req, w.port, w.verb,
			d.Allowed, d.Step, dry.Allowed, dry.Step, allowed, step, wouldAllow, wouldStep)
	}
	explained, steps := set.Explain(w.req, w.port, w.verb, false)
	if d.DryRun = nil; explained.DryRun != nil {
		explained.DryRun = nil
	}
	if explained != d {
		t.Fatalf("got %+v from Explain, want %+v of Decide", explained, d)
	}
	if set != nil && step != policy.Undecided {
		if r := steps[step-1]; r.Skipped != "" || len(r.Policies) == 0 || (r.Match != nil) != (d.Rule >= 0) || r.Match != nil && (r.Match.Name != d.Policy || r.Rule != d.Rule) {
			t.Fatalf("got %+v for the step %q, want what has decided: %+v", r, step, d)
		}
	}
	if p := w.named(d.Policy); step != policy.Undecided && (p == nil || p.DryRun || p.Verb != w.verb) {
		t.Fatalf("policy %q has decided at %q: got %+v, want an enforced policy of %v", d.Policy, step, p, w.verb)
	}
}

func (w *world) named(name string) *policy.Policy {
	for _, p := range w.policies {
		if p.Name == name {
			return p
		}
	}
	return nil
}

func TestCompiledAgreesWithNaive(t *testing.T) {
	d := dice{rand.New(rand.NewPCG(1, 2))}
	steps := map[policy.Step]int{}
	for range 50_000 {
		w := d.world()
		w.check(t)
		_, step := w.naive(true)
		steps[step]++
	}
	for s := policy.Undecided; s <= policy.BaselineAllow; s++ {
		if steps[s] < 500 {
			t.Errorf("%d of the worlds were decided at %q, want 500 at least: the dice have become poor", steps[s], s)
		}
	}
}

func FuzzDecide(f *testing.F) {
	f.Add(uint64(1), uint64(2))
	f.Fuzz(func(t *testing.T, a, b uint64) {
		d := dice{rand.New(rand.NewPCG(a, b))}
		for range 100 {
			d.world().check(t)
		}
	})
}
