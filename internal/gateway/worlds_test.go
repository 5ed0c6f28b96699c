package gateway

import (
	"bytes"
	"context"
	"crypto/sha256"
	"crypto/tls"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"culvert.dev/connect"
	"culvert.dev/connect/h2"
	"culvert.dev/internal/testca"
	"culvert.dev/internal/testnet"
	"culvert.dev/policy"
	"culvert.dev/policy/policytest"
	"culvert.dev/registry"
	"culvert.dev/tunnel"
)

var (
	worldCount = flag.Int("worlds", 300, "how many worlds TestWorldsAgree makes")
	worldSeed  = flag.Uint64("world-seed", 1, "what its dice begin with; 0 means anything")
)

// TestWorldsAgree makes worlds by dice: services with endpoints, and policies of all kinds.
// In each of them callers of several trust domains, of tokens and of nothing open tunnels by
// the listeners of one running gateway. What becomes of each request is what the naive
// evaluator says, and so is what Explain says beforehand. Some tunnels stand until the next
// world, which ends those that it denies and no others.
func TestWorldsAgree(t *testing.T) {
	t.Parallel()
	const callers = 4
	worlds, seed := *worldCount, *worldSeed
	if seed == 0 {
		seed = rand.Uint64()
	}
	t.Logf("the seed is %d", seed)
	s := newWorldSite(t, policytest.NewDice(seed, 1))
	seen := map[string]int{} // how often there was something
	for i := range worlds {
		w := s.next()
		s.recheck(w, seen)
		for range callers {
			s.ask(w, seen)
		}
		if t.Failed() {
			text, _ := json.MarshalIndent(w.policies, "", " ")
			t.Fatalf("world %d of the seed %d\npolicies %s\nservices %s", i, seed, text, w)
		}
	}
	for _, d := range s.dialers {
		_ = d.Close()
	}
	t.Log(seen)
	if all := worlds * callers; worlds >= 5000 && (seen["connected"] < all/20 || seen["denied"] < all/20 || seen["not-exposed"] < all/200 || seen["dry run"] < all/100 || seen["some endpoints"] < all/200 || seen["revoked"] < all/200 || seen["stands"] < all/50) {
		t.Errorf("the dice have become poor: of %d requests got %v", all, seen)
	}
}

// A worldSite is a gateway with its callers, and the endpoints of all worlds.
type worldSite struct {
	*Gateway
	t         *testing.T
	dice      policytest.Dice
	ends      chan tunnel.Outcome
	backends  []netip.AddrPort // each sends the letter of its index: "a" for the first one
	listeners []*registry.Listener
	addrs     map[string]string // of listeners
	edge      *registry.Listener
	cas       map[string]*testca.CA
	roots     *testca.CA
	dialers   map[string]*h2.Dialer
	hellos    map[string][]byte
	certs     map[string]tls.Certificate
	last      *world
	standing  *standingTunnel
}

// A world is what one table has.
type world struct {
	services []*registry.Service
	policies []*policy.Policy
	ruled    *registry.Service // that the rule of the section leads to
}

func (w *world) String() string {
	var b strings.Builder
	for _, s := range append(w.services, w.ruled) {
		fmt.Fprintf(&b, "%+v\n", s)
		for i := range s.Endpoints {
			fmt.Fprintf(&b, "\t%d of %+v\n", s.Endpoints[i].Port, s.Endpoints[i].Workload)
		}
	}
	return b.String()
}

// A worldRequest is what a caller asks for, and how.
type worldRequest struct {
	*tunnel.Request        // as the gateway has to see it
	as              string // for Explain
	statable        bool   // Explain can be asked about the caller
	open            func() (net.Conn, error)
}

// A standingTunnel stands while the next world comes.
type standingTunnel struct {
	net.Conn
	req     *worldRequest
	service string
	letter  int
}

var worldTokens = map[string]string{"alice": "token-of-alice", "bob": "token-of-bob", policytest.IDs[0]: "token-of-a-user-with-a-name-like-an-id"}

func newWorldSite(t *testing.T, dice policytest.Dice) *worldSite {
	dice.Listeners = []string{"plain", "deferring", "mtls", "mtls-deferring", "both", "edge/https", "edge/*"}
	dice.Protocols = []string{"sni", "connect", "connect-h2"}
	s := &worldSite{
		t: t, dice: dice, ends: make(chan tunnel.Outcome, 1024), addrs: map[string]string{}, cas: map[string]*testca.CA{}, dialers: map[string]*h2.Dialer{},
		hellos: map[string][]byte{}, certs: map[string]tls.Certificate{},
	}
	for i := range 3 { // as many as are dialed for one request
		s.backends = append(s.backends, letterServer(t, byte('a'+i)))
	}
	trust := map[string]string{}
	for _, domain := range []string{"corp.example", "old.example", "gw.example"} {
		ca, err := testca.New(domain, nil)
		if err != nil {
			t.Fatal(err)
		}
		if s.cas[domain] = ca; domain != "gw.example" {
			trust[domain] = string(ca.CertPEM)
		}
	}
	s.roots = s.cas["gw.example"]
	for _, id := range policytest.IDs {
		domain, _, _ := strings.Cut(strings.TrimPrefix(id, "spiffe://"), "/")
		pair, err := s.cas[domain].Issue(testca.Options{SPIFFEID: id})
		if err != nil {
			t.Fatal(err)
		}
		s.certs[id] = pair.TLS
	}
	tokens := &registry.Auth{Tokens: map[registry.TokenDigest]string{}}
	for id, token := range worldTokens {
		tokens.Tokens[sha256.Sum256([]byte(token))] = id
	}
	server := keyPair(issueOf(t, s.roots, "gw.test"))
	add := func(name string, auth *registry.Auth, ends, deferring bool, protocols ...string) {
		settings := &registry.ListenerSettings{Protocols: protocols, Auth: auth, DeferIdentity: deferring, ProxyProtocol: []netip.Prefix{netip.MustParsePrefix("127.0.0.0/8")}}
		if ends {
			settings.Protocols = nil
			settings.TLS = []registry.ListenerTLS{{
				TLSTermination: registry.TLSTermination{Certificates: []registry.KeyPair{server}, Trust: trust, ClientCertOptional: true},
				Names:          []tunnel.Pattern{pattern("gw.test")}, Protocols: protocols,
			}}
		}
		s.listeners = append(s.listeners, &registry.Listener{Name: name, Protocol: registry.Streams, Address: netip.MustParseAddr("127.0.0.1"), Settings: settings, Origin: "test"})
	}
	add("plain", nil, false, false, "sni", "connect", "connect-h2")
	add("deferring", nil, false, true, "sni", "connect", "connect-h2")
	add("tokens", tokens, false, true, "connect", "connect-h2")
	add("mtls", nil, true, false, "connect-h2")
	add("mtls-deferring", nil, true, true, "connect-h2")
	add("both", tokens, true, true, "connect-h2")
	g, err := New(t.Context(), Config{SourceListeners: s.listeners, SourcesListen: true, Sources: []registry.Source{registry.Static{Name: "test", Snapshot: registry.Snapshot{Listeners: s.listeners}}}, Limits: noLimits, DrainDelay: -1, DrainTimeout: time.Second})
	if err != nil {
		t.Fatal(err)
	}
	s.Gateway = g
	for i, l := range s.listeners {
		s.addrs[l.Name] = g.Addrs()[i].String()
	}
	observe := g.router.Observe
	g.router.Observe = func(o *tunnel.Outcome) {
		observe(o)
		s.ends <- *o
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- g.Run(ctx, nil) }()
	t.Cleanup(func() {
		cancel()
		for {
			select {
			case <-s.ends: // so that none waits for room
			case err := <-done:
				if err != nil {
					t.Errorf("run: %v", err)
				}
				return
			}
		}
	})
	at := newPorts()
	s.edge = at.listener("edge", registry.TLS)
	testnet.Eventually(t, patience, func() bool { ok, _ := g.Ready(); return ok }, "the gateway is ready")
	s.use(&world{ruled: &registry.Service{Name: "none"}})
	testnet.Eventually(t, patience, func() bool { err, ok := g.ListenerErrors()["edge"]; return ok && err == nil }, "the listener with sections is open")
	s.addrs["edge/https"] = at.at(s.edge.Port)
	return s
}

// letterServer sends a letter to each client and reads until the client ends.
func letterServer(t *testing.T, letter byte) netip.AddrPort {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = ln.Close() })
	go func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				_, _ = c.Write([]byte{letter})
				_, _ = io.Copy(io.Discard, c)
			}()
		}
	}()
	return ln.Addr().(*net.TCPAddr).AddrPort()
}

// use makes w the table.
func (s *worldSite) use(w *world) {
	s.t.Helper()
	edge := with(s.edge, section("edge/https", "", ruled("r1", nil, registry.Backend{Weight: 1, Service: w.ruled})))
	snapshot := registry.Snapshot{Services: w.services, Policies: w.policies, Listeners: append(slices.Clone(s.listeners), edge)}
	for name, prefix := range policytest.Networks {
		snapshot.Networks = append(snapshot.Networks, registry.Network{Name: name, CIDRs: []netip.Prefix{prefix}})
	}
	table, err := s.registry.Merge(snapshot)
	if err != nil {
		s.t.Fatal(err)
	}
	s.registry.Swap(table)
}

// next makes the next world the table.
func (s *worldSite) next() *world {
	s.t.Helper()
	d := s.dice
	w := &world{}
	if last := s.last; last != nil && d.IntN(2) == 0 { // other policies alone
		w.services, w.ruled = last.services, last.ruled
	} else {
		s.addServices(w)
	}
	for i := range d.IntN(6) {
		w.policies = append(w.policies, d.Policy(i))
	}
	s.use(w)
	s.last = w
	return w
}

func (s *worldSite) addServices(w *world) {
	d := s.dice
	for _, name := range policytest.Services {
		v := s.service(name, uint16(400+20*d.IntN(4)))
		v.Names = []tunnel.Pattern{parsedName(name + ".test")}
		w.services = append(w.services, v)
	}
	for _, name := range policytest.Names { // each leads to one service, or to none
		if i := d.IntN(5) / 2; i < len(w.services) {
			w.services[i].Names = append(w.services[i].Names, parsedName(name))
		}
	}
	w.ruled = s.service(d.One(policytest.Services...), uint16(400+20*d.IntN(4)))
	w.ruled.Names = w.services[0].Names
}

func parsedName(s string) tunnel.Pattern {
	p, err := policy.ParseName(s)
	if err != nil {
		panic(err)
	}
	return p
}

// service returns a service without names.
func (s *worldSite) service(name string, port uint16) *registry.Service {
	d := s.dice
	v := &registry.Service{Name: name, Ports: []uint16{port}, Exposed: d.IntN(16) > 0, Origin: "test"}
	if d.IntN(3) > 0 {
		v.ID = registry.ID{Service: name, Namespace: d.One(policytest.Namespaces...), Cluster: "west"}
		if d.IntN(4) == 0 {
			v.Name = v.ID.Namespace + "/" + name
		}
	}
	pods := d.IntN(3) > 0
	for _, i := range d.Perm(len(s.backends))[:1+d.IntN(len(s.backends))] {
		ep := registry.Endpoint{Addr: s.backends[i].Addr(), Port: s.backends[i].Port()}
		if pods && d.IntN(4) > 0 {
			ep.Workload = d.Workload()
		}
		v.Endpoints = append(v.Endpoints, ep)
	}
	return v
}

// serving returns the service that clients of a name get.
func (w *world) serving(name string) *registry.Service {
	has := func(p string) *registry.Service {
		for _, s := range w.services {
			if slices.Contains(s.Names, parsedName(p)) {
				return s
			}
		}
		return nil
	}
	if s := has(name); s != nil {
		return s
	}
	for rest, ok := name, true; ok; {
		if _, rest, ok = strings.Cut(rest, "."); ok {
			if s := has("*." + rest); s != nil {
				return s
			}
		}
	}
	return has("*")
}

// A verdict is what the naive evaluator says of a request for a service.
type verdict struct {
	reason    tunnel.Reason // Done where it may be served
	decision  policy.Decision
	dryRun    policy.Decision
	endpoints []int // whose endpoints may be dialed, by the index of their letter
	pods      bool  // policies decide otherwise for some of the endpoints
}

// naive decides on a request for a service, whether or not that is exposed.
func (s *worldSite) naive(w *world, req *worldRequest, of *registry.Service) (v verdict) {
	one := policytest.World{
		Policies: w.policies, Request: req.Request, Port: of.Ports[0], Verb: policy.Connect,
		Target: policy.Target{Service: of.Name, ID: of.ID.Service, Namespace: of.ID.Namespace, Names: of.Names},
	}
	if of == w.ruled {
		one.Target.Route, one.Target.Names = "r1", append(slices.Clone(of.Names), tunnel.AnyName) // the rule has no names
	}
	v.reason = tunnel.Denied
	whole := one.Decide(false)
	for i := range of.Endpoints {
		one.Target.Workload = of.Endpoints[i].Workload
		d := one.Decide(false)
		if d.Allowed {
			v.endpoints = append(v.endpoints, slices.IndexFunc(s.backends, func(a netip.AddrPort) bool { return a.Port() == of.Endpoints[i].Port }))
		}
		if i == 0 || d.Allowed && v.reason != tunnel.Done {
			v.decision, v.dryRun = d, one.Decide(true)
		}
		if d.Allowed {
			v.reason = tunnel.Done
		}
		v.pods = v.pods || d != whole
	}
	slices.Sort(v.endpoints)
	return v
}

// request returns a request of one of the callers.
func (s *worldSite) request(w *world) *worldRequest {
	d := s.dice
	host := d.One("a.pay.example", "b.pay.example", "a.example", "pay.example", "x.b.pay.example", "elsewhere.test")
	r := &worldRequest{statable: true, Request: &tunnel.Request{Name: tunnel.MustParseName(host), Source: netip.AddrPortFrom(netip.MustParseAddr(d.One(policytest.Addresses...)), 1000)}}
	if of := w.serving(host); of != nil {
		r.Port = of.Ports[0]
	} else {
		r.Port = 400
	}
	to := func(name string) {
		r.Listener, r.DeferIdentity = name, name != "plain" && name != "mtls" && name != "edge/https"
	}
	way := proxied{r.Source}
	h2By := func(id, token string, cfg *tls.Config) {
		r.Proto = "connect-h2"
		key := strings.Join([]string{r.Listener, id, token, r.Source.String()}, " ")
		dialer := s.dialers[key]
		if dialer == nil {
			dialer = &h2.Dialer{Proxy: s.addrs[r.Listener], Dialer: way, TLS: cfg, Idle: time.Hour, Wait: patience}
			if token != "" {
				dialer.Authorization = connect.BearerCredentials(token)
			}
			s.dialers[key] = dialer
		}
		target := fmt.Sprintf("%s:%d", host, r.Port)
		r.open = func() (net.Conn, error) { return dialer.DialContext(s.t.Context(), "tcp", target) }
	}
	switch d.IntN(8) {
	case 0, 1: // TLS passes through, and nobody is known
		r.Proto, r.Port = "sni", 0
		to(d.One("plain", "deferring"))
		r.open = func() (net.Conn, error) { return s.sendHello(way, s.addrs[r.Listener], host) }
	case 2: // the same, to a section of a listener
		r.Proto, r.Port = "sni", 0
		to("edge/https")
		r.Source = netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), 0)
		r.open = func() (net.Conn, error) { return s.sendHello(&net.Dialer{}, s.addrs[r.Listener], host) }
	case 3: // CONNECT of nobody
		to(d.One("plain", "deferring"))
		if d.IntN(2) == 0 {
			h2By("", "", nil)
			break
		}
		r.Proto = "connect"
		dialer, target := &connect.Dialer{Proxy: s.addrs[r.Listener], Dialer: way}, fmt.Sprintf("%s:%d", host, r.Port)
		r.open = func() (net.Conn, error) { return dialer.DialContext(s.t.Context(), "tcp", target) }
	case 4: // of the owner of a token
		to("tokens")
		r.as = d.One("alice", "bob", policytest.IDs[0])
		r.statable = r.as != policytest.IDs[0] // Explain takes it for the workload's
		r.Peer = tunnel.Peer{ID: r.as, Method: "bearer"}
		h2By("", worldTokens[r.as], nil)
	default: // over TLS, with a certificate, a token, both or nothing
		to(d.One("mtls", "mtls", "mtls-deferring", "both"))
		r.TLS = &tunnel.EndedTLS{}
		cfg, token := &tls.Config{RootCAs: s.roots.Pool(), ServerName: "gw.test"}, ""
		if d.IntN(5) > 0 {
			r.as = d.One(policytest.IDs...)
			r.Peer = policytest.PeerOf(r.as)
			cfg.Certificates = []tls.Certificate{s.certs[r.as]}
		}
		id := r.as
		if r.Listener == "both" {
			user, cert := d.One("alice", "bob"), r.Peer
			r.Peer, token = tunnel.Peer{ID: user, Method: "bearer"}, worldTokens[user]
			r.as, r.statable = user, cert.Method == ""
			if cert.Method != "" {
				r.Peer.Auth = &tunnel.AuthInfo{Actor: &cert}
			}
		}
		h2By(id, token, cfg)
	}
	return r
}

// proxied dials as a proxy does that states a client.
type proxied struct{ client netip.AddrPort }

func (p proxied) DialContext(ctx context.Context, network, addr string) (net.Conn, error) {
	c, err := (&net.Dialer{}).DialContext(ctx, network, addr)
	if err != nil {
		return nil, err
	}
	family, to := "TCP4", "192.0.2.200"
	if p.client.Addr().Is6() {
		family, to = "TCP6", "2001:db8::200"
	}
	if _, err := fmt.Fprintf(c, "PROXY %s %s %s %d 443\r\n", family, p.client.Addr(), to, p.client.Port()); err != nil {
		_ = c.Close()
		return nil, err
	}
	return c, nil
}

// sendHello begins TLS with a name.
func (s *worldSite) sendHello(way tunnel.Dialer, addr, host string) (net.Conn, error) {
	if s.hellos[host] == nil {
		hello := &firstWrite{}
		_ = tls.Client(hello, &tls.Config{ServerName: host}).Handshake()
		s.hellos[host] = hello.Bytes()
	}
	c, err := way.DialContext(s.t.Context(), "tcp", addr)
	if err != nil {
		return nil, err
	}
	_, _ = c.Write(s.hellos[host])
	return c, nil
}

// A firstWrite keeps what is written, and answers nothing.
type firstWrite struct {
	net.Conn
	bytes.Buffer
}

func (f *firstWrite) Write(b []byte) (int, error)      { return f.Buffer.Write(b) }
func (f *firstWrite) Read([]byte) (int, error)         { return 0, io.EOF }
func (f *firstWrite) Close() error                     { return nil }
func (f *firstWrite) SetDeadline(time.Time) error      { return nil }
func (f *firstWrite) SetWriteDeadline(time.Time) error { return nil }

// ask has a caller ask, and compares.
func (s *worldSite) ask(w *world, seen map[string]int) {
	t := s.t
	t.Helper()
	req := s.request(w)
	of := w.serving(req.Name.String())
	if req.Listener == "edge/https" {
		of = w.ruled
	}
	var want verdict
	switch {
	case of == nil:
		want.reason = tunnel.NoRoute
	case of != w.ruled && !of.Exposed:
		want.reason = tunnel.NotExposed
	default:
		want = s.naive(w, req, of)
	}
	fail := func(where string, got any) {
		t.Helper()
		t.Errorf("%s as %q (%+v) from %v by %s at %s: %s: got %+v, want %+v", req.Name, req.as, req.Peer, req.Source, req.Proto, req.Listener, where, got, want)
	}
	if req.statable {
		s.explain(req, of, &want, fail)
	}
	letter := -1
	c, err := req.open()
	if err == nil {
		_ = c.SetDeadline(time.Now().Add(patience))
		b := make([]byte, 1)
		if _, err = io.ReadFull(c, b); err == nil && b[0] >= 'a' {
			letter = int(b[0] - 'a')
		}
		if letter >= 0 && s.standing == nil && s.dice.IntN(4) == 0 {
			s.standing = &standingTunnel{c, req, of.Name, letter}
		} else {
			_ = c.Close()
		}
	}
	if (letter >= 0) != (want.reason == tunnel.Done) || letter >= 0 && !slices.Contains(want.endpoints, letter) {
		fail("the data path", fmt.Sprintf("endpoint %d, %v", letter, err))
	}
	switch {
	case want.reason == tunnel.Done:
		seen["connected"]++
		if len(want.endpoints) < len(of.Endpoints) {
			seen["some endpoints"]++
		}
	default:
		seen[string(want.reason)]++
	}
	if want.decision != want.dryRun {
		seen["dry run"]++
	}
	if s.standing != nil && s.standing.req == req {
		return // its outcome comes later
	}
	o := s.outcome()
	reason := o.Reason
	if o.Carried() {
		reason = tunnel.Done
	}
	if o.Proto != req.Proto || o.Listener != req.Listener || o.Peer.ID != req.Peer.ID || o.Peer.Method != req.Peer.Method || reason != want.reason {
		fail("the outcome", o)
	}
	if !sameDecision(o.Policy, &want) {
		fail("the policy of the outcome", fmt.Sprintf("%+v", o.Policy))
	}
}

// outcome returns the next one of a request.
func (s *worldSite) outcome() tunnel.Outcome {
	s.t.Helper()
	late := time.NewTimer(patience)
	defer late.Stop()
	select {
	case o := <-s.ends:
		return o
	case <-late.C:
		s.t.Fatal("got no outcome of a request")
		return tunnel.Outcome{}
	}
}

// sameDecision reports whether got is what the naive evaluator says.
func sameDecision(got *tunnel.PolicyDecision, want *verdict) bool {
	is := func(got *tunnel.PolicyDecision, want *policy.Decision) bool {
		return got.Allowed == want.Allowed && got.Policy == want.Policy && got.Origin == want.Origin && got.Rule == want.Rule && got.Step == want.Step.String()
	}
	switch {
	case want.decision == (policy.Decision{}): // nobody was asked
		return got == nil
	case got == nil:
		return want.decision.Step == policy.Undecided && want.decision == want.dryRun
	case got.DryRun == nil:
		return is(got, &want.decision) && want.decision == want.dryRun
	}
	return is(got, &want.decision) && is(got.DryRun, &want.dryRun) && want.decision != want.dryRun
}

// explain compares what Explain says about a request.
func (s *worldSite) explain(req *worldRequest, of *registry.Service, want *verdict, fail func(string, any)) {
	s.t.Helper()
	x := Explain(s.t.Context(), s.router, s.inbound.listeners(), Query{Host: req.Name.String(), Port: req.Port, Listener: req.Listener, Proto: req.Proto, From: req.Source.Addr(), As: req.as})
	reason := x.Reason
	if reason == "" {
		reason = tunnel.Done
	}
	var dialed []int
	for _, ep := range x.Endpoints {
		dialed = append(dialed, slices.IndexFunc(s.backends, func(a netip.AddrPort) bool { return a.String() == ep.Address }))
	}
	slices.Sort(dialed)
	if reason != want.reason || !slices.Equal(dialed, want.endpoints) {
		fail("explain", fmt.Sprintf("%q %s at %v", x.Reason, x.Detail, dialed))
	}
	var got *tunnel.PolicyDecision
	if x.Policy != nil {
		back := func(d *PolicyDecision) *tunnel.PolicyDecision {
			return &tunnel.PolicyDecision{Allowed: d.Allowed, Policy: d.Policy, Origin: d.Origin, Rule: d.Rule - 1, Step: d.Step}
		}
		if got = back(&x.Policy.PolicyDecision); x.Policy.DryRun != nil {
			got.DryRun = back(x.Policy.DryRun)
		}
		decided := policy.Undecided.String()
		for _, step := range x.Policy.Steps {
			if step.Result == "next" {
				continue
			}
			if decided = step.Step; (step.Result == "allowed") != want.decision.Allowed || step.Match != want.decision.Policy && want.decision.Rule >= 0 || step.Rule != want.decision.Rule+1 {
				if !want.pods {
					fail("the step of explain", step)
				}
			}
		}
		if decided != want.decision.Step.String() && !want.pods {
			fail("the steps of explain", x.Policy.Steps)
		}
		if n := x.Policy.Endpoints; n > 0 && (n != len(of.Endpoints) || x.Policy.Admitted != len(want.endpoints)) {
			fail("the endpoints of explain", fmt.Sprintf("%d of %d", x.Policy.Admitted, n))
		}
	}
	if !sameDecision(got, want) {
		fail("the policy of explain", fmt.Sprintf("%+v", got))
	}
}

// recheck looks after the tunnel that has stood since the world before w, if there is one.
func (s *worldSite) recheck(w *world, seen map[string]int) {
	s.t.Helper()
	c := s.standing
	if c == nil {
		return
	}
	s.standing = nil
	of := w.serving(c.req.Name.String())
	if c.req.Listener == "edge/https" {
		of = w.ruled
	} else if of != nil && c.req.Port != 0 && of.Ports[0] != c.req.Port {
		of = nil
	}
	if of == nil || of.Name != c.service { // what it was opened for has gone
		_ = c.Close()
		s.outcome()
		return
	}
	want := s.naive(w, c.req, of)
	serves := slices.ContainsFunc(of.Endpoints, func(ep registry.Endpoint) bool { return ep.Port == s.backends[c.letter].Port() })
	denied := want.reason == tunnel.Denied || want.reason == tunnel.Done && serves && !slices.Contains(want.endpoints, c.letter)
	if denied {
		seen["revoked"]++
		_ = c.SetDeadline(time.Now().Add(patience))
		_, _ = io.Copy(io.Discard, c)
	} else {
		seen["stands"]++
	}
	_ = c.Close()
	if o := s.outcome(); (o.Reason == tunnel.Revoked) != denied {
		s.t.Errorf("the tunnel of %q (%+v) from %v to %s by %s at %s, endpoint %d: got %s, want it revoked: %v, by %+v",
			c.req.as, c.req.Peer, c.req.Source, c.req.Name, c.req.Proto, c.req.Listener, c.letter, o.Reason, denied, want)
	}
}
