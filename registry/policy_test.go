package registry

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"

	"culvert.dev/policy"
	"culvert.dev/tunnel"
)

const (
	apiID = "spiffe://corp.example/ns/shop/sa/api"
	webID = "spiffe://corp.example/ns/shop/sa/web"
)

// allowing is a policy that allows one caller.
func allowing(name, id string, t policy.Targets) *policy.Policy {
	return &policy.Policy{Name: name, Origin: "culvert.yaml:7", Targets: t, Rules: []policy.Rule{{Sources: &[]policy.Source{{SPIFFE: []string{id}}}}}}
}

func as(req *tunnel.Request, id string) *tunnel.Request {
	req.Peer = tunnel.Peer{ID: id, Method: "mtls"}
	return req
}

func merged(t testing.TB, s Snapshot) *Registry {
	t.Helper()
	m, err := Merge(s)
	if err != nil {
		t.Fatal(err)
	}
	r := &Registry{}
	r.Swap(m)
	return r
}

// Whatever a client asks for, the policies of the service decide, and not those of a name.
func TestPolicyBelongsToTheService(t *testing.T) {
	db := service(t, "db.test", 5432)
	db.Name, db.VIP, db.Publish = "db", true, true
	db.ID = ID{Service: "db", Namespace: "shop", Cluster: "west"}
	db.Names = append(db.Names, tunnel.Pattern{Suffix: tunnel.MustParseName("db.example"), Wildcard: true}, tunnel.Pattern{Suffix: tunnel.MustParseName("alias.test")})
	db.Addresses = []netip.Addr{netip.MustParseAddr("192.0.2.50")}
	db.Endpoints = endpoints("192.0.2.1:5432")
	web := service(t, "web.test", 443)
	web.Endpoints = endpoints("192.0.2.9:443")
	section := &Section{Name: "edge/s", Rules: []*Rule{ruleOf(t, "r", nil, Backend{Weight: 1, Service: db})}}
	r := merged(t, Snapshot{
		Services: []*Service{db, web}, Listeners: []*Listener{listenerOf("edge", 443, section)},
		Policies: []*policy.Policy{allowing("db", apiID, policy.Targets{Services: []string{"db"}})},
	})
	r.AssignVIPs([]VIP{{Key: r.Table().VIPRequests()[0].Keys[0], V4: netip.MustParseAddr("240.0.0.9")}})
	requests := map[string]func() *tunnel.Request{
		"name":                 func() *tunnel.Request { return byName("db.test", 5432, 0) },
		"alias":                func() *tunnel.Request { return byName("alias.test", 5432, 0) },
		"wildcard":             func() *tunnel.Request { return byName("x.db.example", 5432, 0) },
		"mesh name":            func() *tunnel.Request { return byName("db.shop.svc.west.mesh.internal", 5432, 0) },
		"SNI":                  func() *tunnel.Request { q := byName("db.test", 0, 443); q.Proto = "sni"; return q },
		"UDP":                  func() *tunnel.Request { q := byName("db.test", 5432, 0); q.Proto = "udp"; return q },
		"address":              func() *tunnel.Request { return byAddr("192.0.2.50", 5432) },
		"endpoint":             func() *tunnel.Request { return byAddr("192.0.2.1", 5432) },
		"VIP":                  func() *tunnel.Request { return byAddr("240.0.0.9", 5432) },
		"a rule of a listener": func() *tunnel.Request { return confined("edge/s", "") },
	}
	for name, req := range requests {
		for id, want := range map[string]tunnel.Reason{apiID: tunnel.Done, webID: tunnel.Denied, "": tunnel.Denied} {
			q := req()
			if id != "" {
				as(q, id)
			}
			route, err := r.Resolve(t.Context(), q)
			if got := tunnel.ReasonOf(err); got != want {
				t.Errorf("%s as %q: got %s, %v, want %s", name, id, got, err, want)
			}
			if route.Policy == nil || route.Policy.Policy != "db" || route.Policy.Origin != "culvert.yaml:7" || route.Policy.Allowed != (want == tunnel.Done) {
				t.Errorf("%s as %q: got the decision %+v, want one of policy db", name, id, route.Policy)
			}
			if route.Service == "" {
				t.Errorf("%s as %q: the route does not say which service it was about", name, id)
			}
		}
	}
	if route, err := r.Resolve(t.Context(), byName("web.test", 443, 0)); err != nil || route.Policy != nil {
		t.Errorf("a service without policies: got %+v, %v, want a route without a decision", route.Policy, err)
	}
}

// Exposure comes before policy.
func TestPolicyOpensNothingThatIsPrivate(t *testing.T) {
	s := service(t, "a.test", 443)
	s.Exposed = false
	r := merged(t, Snapshot{Services: []*Service{s}, Policies: []*policy.Policy{{Name: "all", Tier: policy.Admin, Rules: []policy.Rule{{}}}}})
	if _, err := r.Resolve(t.Context(), byName("a.test", 443, 0)); tunnel.ReasonOf(err) != tunnel.NotExposed {
		t.Errorf("got %v, want not-exposed", err)
	}
}

// Routes of listeners can have policies of their own.
func TestPolicyOfARoute(t *testing.T) {
	db := service(t, "db.test", 5432)
	db.Endpoints = endpoints("192.0.2.1:5432")
	of := func(name string) *Section {
		return &Section{Name: "edge/" + name, Rules: []*Rule{ruleOf(t, name, nil, Backend{Weight: 1, Service: db})}}
	}
	closed, open := of("closed"), of("open")
	open.Host = tunnel.Pattern{}
	r := merged(t, Snapshot{
		Listeners: []*Listener{listenerOf("edge", 443, closed), listenerOf("other", 444, open)},
		Policies:  []*policy.Policy{allowing("closed", apiID, policy.Targets{Routes: []string{"closed"}})},
	})
	for section, want := range map[string]tunnel.Reason{"edge/closed": tunnel.Denied, "edge/open": tunnel.Done} {
		if _, err := r.Resolve(t.Context(), as(confined(section, ""), webID)); tunnel.ReasonOf(err) != want {
			t.Errorf("%s: got %v, want %s", section, err, want)
		}
	}
}

// A policy for names is for every rule that leads on a request for one of them, whatever the
// service behind it is called.
func TestPolicyOfTheNamesOfARule(t *testing.T) {
	db := service(t, "db.test", 5432)
	db.Endpoints = endpoints("192.0.2.1:5432")
	rule := func(name, host string, names ...string) *Section {
		s := &Section{Name: name, Rules: []*Rule{ruleOf(t, name, names, Backend{Weight: 1, Service: db})}}
		if host != "" {
			s.Host = patterns(t, host)[0]
		}
		return s
	}
	deny := allowing("pay", webID, policy.Targets{Names: []string{"*.pay.test"}})
	deny.Action = policy.Deny
	all := []*Listener{
		listenerOf("a", 1443, rule("exact", "", "a.pay.test")), listenerOf("b", 2443, rule("another", "", "a.shop.test")),
		listenerOf("c", 3443, rule("wide", "", "*.test")), listenerOf("d", 4443, rule("host", "a.pay.test")),
		listenerOf("e", 5443, rule("anything", "")), listenerOf("f", 6443, rule("stream", "")),
	}
	all[5].Protocol = TCP
	r := merged(t, Snapshot{Listeners: all, Policies: []*policy.Policy{deny}})
	for _, tt := range []struct {
		section, name string
		want          tunnel.Reason
	}{
		{"exact", "a.pay.test", tunnel.Denied}, {"another", "a.shop.test", tunnel.Done}, {"wide", "a.pay.test", tunnel.Denied},
		{"host", "a.pay.test", tunnel.Denied}, {"anything", "a.pay.test", tunnel.Denied}, {"stream", "", tunnel.Done},
	} {
		if _, err := r.Resolve(t.Context(), as(confined(tt.section, tt.name), webID)); tunnel.ReasonOf(err) != tt.want {
			t.Errorf("%s: got %v, want %s", tt.section, err, tt.want)
		}
		if _, err := r.Resolve(t.Context(), as(confined(tt.section, tt.name), apiID)); err != nil {
			t.Errorf("%s, for another caller: %v", tt.section, err)
		}
	}
}

// workloads is a service of five endpoints, three of which policy denies to all but the api.
func workloads(t testing.TB) (*Service, []*policy.Policy) {
	db, web := &policy.Workload{Namespace: "shop", Labels: map[string]string{"app": "db"}}, &policy.Workload{Namespace: "shop", Labels: map[string]string{"app": "web"}}
	s := service(t, "a.test", 443)
	s.Endpoints = endpoints("192.0.2.1:443", "192.0.2.2:443", "192.0.2.3:443", "192.0.2.4:443", "192.0.2.5:443")
	for i := range s.Endpoints {
		s.Endpoints[i].Workload = db
		if i > 2 {
			s.Endpoints[i].Workload = web
		}
	}
	return s, []*policy.Policy{allowing("db-pods", apiID, policy.Targets{Namespaces: []string{"shop"}, Workloads: &policy.Selector{Labels: map[string]string{"app": "db"}}})}
}

func addrs(route *tunnel.Route) (all []string) {
	for _, ep := range route.Endpoints {
		all = append(all, ep.Addr.String())
	}
	slices.Sort(all)
	return all
}

func TestPolicyOfWorkloads(t *testing.T) {
	s, policies := workloads(t)
	r := merged(t, Snapshot{Services: []*Service{s}, Policies: policies})
	for id, want := range map[string]int{apiID: 5, webID: 2} {
		route, err := r.Resolve(t.Context(), as(byName("a.test", 443, 0), id))
		if got := addrs(&route); err != nil || len(got) != want {
			t.Errorf("%s: got %v, %v, want %d endpoints", id, got, err, want)
		}
		if id == apiID && (route.Policy == nil || route.Policy.Admitted != 5 || route.Policy.Endpoints != 5 || route.Policy.Policy != "db-pods") {
			t.Errorf("%s: got the decision %+v, want policy db-pods to admit it to 5 of 5", id, route.Policy)
		}
		if got := addrs(&route); id == webID && !slices.Equal(got, []string{"192.0.2.4:443", "192.0.2.5:443"}) {
			t.Errorf("%s: got %v, want the endpoints of web", id, got)
		}
	}
	// Who names an endpoint gets no other one.
	if _, err := r.Resolve(t.Context(), as(byAddr("192.0.2.1", 443), webID)); tunnel.ReasonOf(err) != tunnel.Denied {
		t.Errorf("a denied endpoint by its address: got %v, want denied", err)
	}
	if route, err := r.Resolve(t.Context(), as(byAddr("192.0.2.4", 443), webID)); err != nil || len(route.Endpoints) != 1 {
		t.Errorf("an admitted endpoint by its address: got %v, %v, want it", route.Endpoints, err)
	}
	s.Endpoints = s.Endpoints[:3]
	r = merged(t, Snapshot{Services: []*Service{s}, Policies: policies})
	if route, err := r.Resolve(t.Context(), as(byName("a.test", 443, 0), webID)); tunnel.ReasonOf(err) != tunnel.Denied {
		t.Errorf("where no endpoint is left: got %v, %v, want denied", route.Endpoints, err)
	}
}

// Behind a gateway of another network somebody else chooses the endpoint.
func TestPolicyOfWorkloadsElsewhere(t *testing.T) {
	s, policies := workloads(t)
	snapshot := Snapshot{
		Services: []*Service{s}, Policies: policies,
		Networks: []Network{
			{Name: "here", CIDRs: []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8")}},
			{Name: "there", CIDRs: []netip.Prefix{netip.MustParsePrefix("192.0.2.0/24")}, Gateways: []Gateway{{Address: Endpoint{Host: "gw.test", Port: 443}}}},
		},
	}
	r := &Registry{Mesh: Mesh{Network: "here"}, Lookup: func(context.Context, string) ([]netip.Addr, error) {
		return []netip.Addr{netip.MustParseAddr("203.0.113.1")}, nil
	}}
	m, err := r.Merge(snapshot)
	if err != nil {
		t.Fatal(err)
	}
	r.Swap(m)
	for id, want := range map[string]tunnel.Reason{apiID: tunnel.Done, webID: tunnel.Denied} {
		req := as(byName("a.test", 0, 443), id)
		req.Proto = "sni"
		if _, err := r.Resolve(t.Context(), req); tunnel.ReasonOf(err) != want {
			t.Errorf("%s: got %v, want %s", id, err, want)
		}
	}
}

// A policy that can't be understood denies what it selects, and the table says so.
func TestPolicyThatIsInvalid(t *testing.T) {
	s, other := service(t, "a.test", 443), service(t, "b.test", 443)
	s.Name, s.Endpoints, other.Endpoints = "a", endpoints("192.0.2.1:443"), endpoints("192.0.2.1:443")
	m, err := Merge(Snapshot{Services: []*Service{s, other}, Policies: []*policy.Policy{{Name: "bad", Origin: "AuthorizationPolicy shop/bad", Invalid: "unknown key", Targets: policy.Targets{Services: []string{"a"}}}}})
	if err == nil || !strings.Contains(err.Error(), `policy "bad" of AuthorizationPolicy shop/bad denies all that it selects`) {
		t.Errorf("got the conflict %v, want one about the policy", err)
	}
	r := &Registry{}
	r.Swap(m)
	for name, want := range map[string]tunnel.Reason{"a.test": tunnel.Denied, "b.test": tunnel.Done} {
		if _, err := r.Resolve(t.Context(), as(byName(name, 443, 0), apiID)); tunnel.ReasonOf(err) != want {
			t.Errorf("%s: got %v, want %s", name, err, want)
		}
	}
}

// The networks of a source are those of the table.
func TestPolicyByNetwork(t *testing.T) {
	s := service(t, "a.test", 443)
	s.Endpoints = endpoints("192.0.2.1:443")
	r := merged(t, Snapshot{
		Services: []*Service{s},
		Networks: []Network{{Name: "east", CIDRs: []netip.Prefix{netip.MustParsePrefix("10.1.0.0/16")}}, {Name: "west", CIDRs: []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8")}}},
		Policies: []*policy.Policy{{Name: "east", Rules: []policy.Rule{{Sources: &[]policy.Source{{Networks: []string{"east"}}}}}}},
	})
	for from, want := range map[string]tunnel.Reason{"10.1.2.3": tunnel.Done, "10.2.2.3": tunnel.Denied, "192.0.2.7": tunnel.Denied} {
		req := byName("a.test", 443, 0)
		req.Source = netip.AddrPortFrom(netip.MustParseAddr(from), 1)
		if _, err := r.Resolve(t.Context(), req); tunnel.ReasonOf(err) != want {
			t.Errorf("from %s: got %v, want %s", from, err, want)
		}
	}
}

// Recheck decides by the table of its time, and ends nothing but what policy denies.
func TestRecheck(t *testing.T) {
	s, policies := workloads(t)
	r := merged(t, Snapshot{Services: []*Service{s}})
	req := as(byName("a.test", 443, 0), webID)
	route, err := r.Resolve(t.Context(), req)
	if err != nil {
		t.Fatal(err)
	}
	at := func(addr string) *tunnel.Route {
		one := route
		one.Endpoints = []tunnel.Endpoint{{Addr: netip.MustParseAddrPort(addr)}}
		return &one
	}
	check := func(when string, route *tunnel.Route, want tunnel.Reason) {
		t.Helper()
		if err := r.Recheck(req, route); tunnel.ReasonOf(err) != want {
			t.Errorf("%s: got %v, want %s", when, err, want)
		}
	}
	swap := func(s Snapshot) {
		t.Helper()
		m, err := Merge(s)
		if err != nil {
			t.Fatal(err)
		}
		r.Swap(m)
	}
	check("without policies", &route, tunnel.Done)
	swap(Snapshot{Services: []*Service{s}, Policies: policies})
	check("to a denied endpoint", at("192.0.2.1:443"), tunnel.Denied)
	check("to an admitted endpoint", at("192.0.2.4:443"), tunnel.Done)
	swap(Snapshot{Services: []*Service{s}, Policies: []*policy.Policy{allowing("p", apiID, policy.Targets{})}})
	check("of a denied caller", at("192.0.2.4:443"), tunnel.Denied)
	swap(Snapshot{Policies: []*policy.Policy{allowing("p", apiID, policy.Targets{})}})
	check("of a service that is gone", &route, tunnel.Done)

	// By a rule, it is about the backend that the tunnel goes to.
	other := service(t, "b.test", 443)
	s.Name, other.Name, other.Endpoints = "a", "b", endpoints("192.0.2.9:443")
	section := &Section{Name: "s", Rules: []*Rule{ruleOf(t, "r", nil, Backend{Weight: 1, Service: s}, Backend{Weight: 1, Service: other})}}
	swap(Snapshot{Listeners: []*Listener{listenerOf("l", 443, section)}, Policies: []*policy.Policy{allowing("p", apiID, policy.Targets{Services: []string{"b"}})}})
	req = as(confined("s", ""), webID)
	for backend, want := range map[string]tunnel.Reason{"a": tunnel.Done, "b": tunnel.Denied} {
		check("by a rule to "+backend, &tunnel.Route{Service: "r", Backend: backend}, want)
	}
}

// No request is decided by half a change: each table lets one caller in, and says by its
// policy which one.
func TestPolicySwapHammer(t *testing.T) {
	s := service(t, "a.test", 443)
	s.Endpoints = endpoints("192.0.2.1:443")
	ids := []string{apiID, webID}
	var tables []*Table
	for i, id := range ids {
		m, err := Merge(Snapshot{Services: []*Service{s}, Policies: []*policy.Policy{allowing(fmt.Sprint("p", i), id, policy.Targets{})}})
		if err != nil {
			t.Fatal(err)
		}
		tables = append(tables, m)
	}
	r := &Registry{}
	r.Swap(tables[0])
	var wg sync.WaitGroup
	for i, id := range ids {
		wg.Go(func() {
			for range 5000 {
				route, err := r.Resolve(context.Background(), as(byName("a.test", 443, 0), id))
				if allowed := err == nil; route.Policy == nil || allowed != (route.Policy.Policy == fmt.Sprint("p", i)) || allowed != route.Policy.Allowed {
					t.Errorf("%s: got %v by %+v", id, err, route.Policy)
					return
				}
			}
		})
	}
	for i := range 2000 {
		r.Swap(tables[i%2])
	}
	wg.Wait()
}

// A service that no policy is about pays nothing for those of others.
func TestPolicyCostsNothingElsewhere(t *testing.T) {
	s := service(t, "a.test", 443)
	s.Endpoints = endpoints("192.0.2.1:443")
	req := as(byName("a.test", 443, 0), apiID)
	measure := func(snapshot Snapshot) float64 {
		r := merged(t, snapshot)
		return testing.AllocsPerRun(100, func() {
			if _, err := r.Resolve(context.Background(), req); err != nil {
				t.Fatal(err)
			}
		})
	}
	without := measure(Snapshot{Services: []*Service{s}})
	with := measure(Snapshot{Services: []*Service{s}, Policies: []*policy.Policy{allowing("p", apiID, policy.Targets{Services: []string{"other"}})}})
	if with != without {
		t.Errorf("got %v allocations with a policy of another service, want %v", with, without)
	}
}

// Worlds of few words: the table decides as a set that is compiled for the service alone.
func TestTableAgreesWithSets(t *testing.T) {
	d := rand.New(rand.NewPCG(7, 9))
	one := func(of ...string) string { return of[d.IntN(len(of))] }
	denied := 0
	const worlds = 10_000
	for range worlds {
		var snapshot Snapshot
		for _, name := range []string{"a", "b", "c"} {
			s := service(t, name+".test", 443)
			s.Name, s.Endpoints = name, endpoints("192.0.2.1:443")
			if d.IntN(2) == 0 {
				s.ID = ID{Service: name, Namespace: "shop", Cluster: "west"}
			}
			if d.IntN(4) == 0 {
				s.Names = append(s.Names, tunnel.Pattern{Suffix: tunnel.MustParseName(name + ".example"), Wildcard: true})
			}
			snapshot.Services = append(snapshot.Services, s)
		}
		for i := range d.IntN(5) {
			p := &policy.Policy{Name: fmt.Sprint("p", i), Tier: policy.Tier(d.IntN(3)), Action: policy.Action(d.IntN(2)), DryRun: d.IntN(5) == 0}
			switch d.IntN(4) {
			case 0:
				p.Targets.Services = []string{one("a", "b")}
			case 1:
				p.Targets.Names = []string{one("*.test", "a.test", "b.example", "*.example")}
			case 2:
				p.Targets.Namespaces = []string{"shop"}
			}
			for range d.IntN(3) {
				p.Rules = append(p.Rules, policy.Rule{Sources: &[]policy.Source{{SPIFFE: []string{one(apiID, webID)}}}})
			}
			snapshot.Policies = append(snapshot.Policies, p)
		}
		r := merged(t, snapshot)
		for _, s := range snapshot.Services {
			req := as(byName(s.Name+".test", 443, 0), one(apiID, webID, "spiffe://corp.example/x"))
			set := policy.NewCompiler(snapshot.Policies, nil).Set(&policy.Target{Service: s.Name, Namespace: s.ID.Namespace, Names: s.Names})
			want := set.Decide(req, 443, policy.Connect)
			route, err := r.Resolve(context.Background(), req)
			if allowed := err == nil; allowed != want.Allowed || err != nil && tunnel.ReasonOf(err) != tunnel.Denied {
				t.Fatalf("%s as %s: got %v, want allowed %v by %q; policies %+v", s.Name, req.Peer.ID, err, want.Allowed, want.Policy, snapshot.Policies)
			}
			if recheck := r.Recheck(req, &route); (recheck == nil) != want.Allowed {
				t.Fatalf("%s as %s: got %v from Recheck, want allowed %v", s.Name, req.Peer.ID, recheck, want.Allowed)
			}
			if err != nil {
				denied++
			}
		}
	}
	if denied < worlds/10 || denied > 3*worlds-worlds/10 {
		t.Errorf("%d of %d requests were denied: the dice have become poor", denied, 3*worlds)
	}
}

func BenchmarkMergePolicies(b *testing.B) {
	var snapshot Snapshot
	for i := range 100_000 {
		s := service(b, fmt.Sprintf("s%d.test", i), 443)
		s.Name = fmt.Sprint("s", i)
		snapshot.Services = append(snapshot.Services, s)
	}
	for _, n := range []int{0, 10_000} {
		snapshot.Policies = nil
		for i := range n {
			p := allowing(fmt.Sprint("p", i), fmt.Sprintf("spiffe://corp.example/ns/n%d/sa/api", i), policy.Targets{})
			if i%2 == 0 {
				p.Targets.Services = []string{fmt.Sprint("s", i), fmt.Sprint("s", i+1), fmt.Sprint("s", i+50_000)}
			} else {
				p.Targets.Names = []string{fmt.Sprintf("s%d.test", i)}
			}
			snapshot.Policies = append(snapshot.Policies, p)
		}
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				if _, err := Merge(snapshot); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
