package peer

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"culvert.dev/internal/testnet"
	"culvert.dev/policy"
	"culvert.dev/registry"
	"culvert.dev/tunnel"
)

func TestMain(m *testing.M) { testnet.Main(m) }

// A site is a gateway with a table and peers.
type site struct {
	peers *Peers
	table *registry.Registry
	own   registry.Snapshot

	mu      sync.Mutex
	updates []registry.Update
	known   map[string]registry.Snapshot
	stale   map[string]error
	news    chan struct{}
}

func patterns(names ...string) (all []tunnel.Pattern) {
	for _, n := range names {
		p, err := tunnel.ParsePattern(n)
		if err != nil {
			panic(err)
		}
		all = append(all, p)
	}
	return all
}

func service(name string, names ...string) *registry.Service {
	if len(names) == 0 {
		names = []string{name}
	}
	return &registry.Service{Name: name, Names: patterns(names...), Ports: []uint16{443}, Exposed: true, Endpoints: []registry.Endpoint{{Addr: netip.MustParseAddr("10.0.0.1"), Port: 443}}}
}

// seen lets the gateways of trust domains see services.
func seen(services []string, domains ...string) *policy.Policy {
	return &policy.Policy{Name: "seen-" + strings.Join(services, "-"), Verb: policy.Catalog, Action: policy.Allow, Targets: policy.Targets{Services: services},
		Rules: []policy.Rule{{Sources: &[]policy.Source{{TrustDomains: domains}}}}}
}

func newSite(t testing.TB, name string) *site {
	s := &site{peers: &Peers{Site: name}, table: &registry.Registry{}, known: map[string]registry.Snapshot{}, stale: map[string]error{}, news: make(chan struct{}, 1)}
	s.peers.Table = s.table.Table
	s.table.OnTable = s.peers.TableChanged
	s.set(t)
	return s
}

// set has the site serve services, by policies.
func (s *site) set(t testing.TB, what ...any) {
	t.Helper()
	s.own = snapshotOf(what...)
	table, err := registry.Merge(s.own)
	if err != nil {
		t.Fatal(err)
	}
	s.table.Swap(table)
}

// snapshotOf has services and policies.
func snapshotOf(what ...any) registry.Snapshot {
	out := registry.Snapshot{Mesh: &registry.Mesh{Zone: "mesh.example"}}
	for _, w := range what {
		switch w := w.(type) {
		case *registry.Service:
			out.Services = append(out.Services, w)
		case *policy.Policy:
			out.Policies = append(out.Policies, w)
		}
	}
	return out
}

// run runs the source of the site until ctx is done.
func (s *site) run(ctx context.Context) {
	updates := make(chan registry.Update)
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = s.peers.Run(ctx, updates)
	}()
	for {
		select {
		case u := <-updates:
			s.mu.Lock()
			s.updates = append(s.updates, u)
			if u.Err != nil {
				s.stale[u.Source] = u.Err
			} else {
				delete(s.stale, u.Source)
				s.known[u.Source] = u.Snapshot
			}
			s.mu.Unlock()
			select {
			case s.news <- struct{}{}:
			default:
			}
		case <-done:
			return
		}
	}
}

// await waits until what the site knows is right.
func (s *site) await(t testing.TB, what string, right func() bool) {
	t.Helper()
	deadline := time.After(time.Minute)
	for {
		s.mu.Lock()
		ok := right()
		s.mu.Unlock()
		if ok {
			return
		}
		select {
		case <-s.news:
		case <-time.After(10 * time.Millisecond):
		case <-deadline:
			s.mu.Lock()
			defer s.mu.Unlock()
			t.Fatalf("%s: not within a minute; known %v, stale %v, status %+v", what, s.names("peer/west"), s.stale, s.peers.Status())
		}
	}
}

// names returns those of the services of a source. The caller holds mu.
func (s *site) names(source string) (all []string) {
	for _, svc := range s.known[source].Services {
		for _, n := range svc.Names {
			all = append(all, n.String())
		}
	}
	slices.Sort(all)
	return all
}

// lockedNames returns those of the services of west.
func (s *site) lockedNames() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.names("peer/west")
}

func (s *site) awaitNames(t testing.TB, source string, want ...string) {
	t.Helper()
	s.await(t, fmt.Sprintf("names %q of %s", want, source), func() bool { return slices.Equal(s.names(source), want) && s.stale[source] == nil })
}

// A link is a transport by which one site asks another.
type link struct {
	mu    sync.Mutex
	to    *site  // nil where nobody answers
	as    string // the id that the other side sees
	conns []net.Conn
	wrap  func(net.Conn) net.Conn // of the server's end
	dials int
}

func (l *link) Check(*tunnel.Endpoint) error { return nil }
func (l *link) Info() tunnel.TransportInfo {
	return tunnel.TransportInfo{Hops: []string{"link"}, Security: tunnel.Mutual}
}

func (l *link) Dial(ctx context.Context, ep *tunnel.Endpoint, _ *tunnel.Request) (net.Conn, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.dials++
	if l.to == nil {
		return nil, errors.New("nobody answers")
	}
	if ep.Host != Host {
		return nil, fmt.Errorf("asked for %q", ep.Host)
	}
	a, b := net.Pipe()
	if l.wrap != nil {
		b = l.wrap(b)
	}
	l.conns = append(l.conns, a)
	refused := make(chan error, 1)
	accepted := make(chan struct{})
	go l.to.peers.ServeTunnel(context.WithoutCancel(ctx), &tunnel.Request{
		Peer:   tunnel.Peer{ID: l.as, Method: "mtls", Auth: &tunnel.AuthInfo{TrustDomain: strings.Split(l.as, "/")[2]}},
		Source: netip.MustParseAddrPort("192.0.2.7:4711"),
		Accept: func() (tunnel.Stream, error) { close(accepted); return stream{b}, nil },
		Refuse: func(err error) { refused <- err },
	})
	select {
	case err := <-refused:
		return nil, tunnel.HopRefusedf(tunnel.ReasonOf(err), "%w", err)
	case <-accepted:
		return a, nil
	}
}

// cut ends all connections, and with to nil there are no more.
func (l *link) cut(to *site) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.to = to
	for _, c := range l.conns {
		_ = c.Close()
	}
	l.conns = nil
}

type stream struct{ net.Conn }

func (stream) CloseWrite() error { return errors.ErrUnsupported }

var hop = registry.Hop{Proto: "connect-h2", TLS: true, KeyName: "edge", TrustNames: []string{"west.example"}}

func configOf(name string, dialable bool) Config {
	c := Config{Name: name, IDs: []string{"spiffe://" + name + ".example/gw/*"}, Zones: patterns("*." + name + ".example"), Access: hop}
	if dialable {
		c.Gateways = []registry.Gateway{{Address: registry.Endpoint{Host: "gw." + name + ".example", Port: 443}, Transports: []registry.Hop{hop}}}
	}
	return c
}

// join has east dial west by a link, and knows both to each other.
func join(t testing.TB, east, west *site) *link {
	l := &link{to: west, as: "spiffe://east.example/gw/1"}
	east.peers.NewTransport = func(*registry.Service, *registry.Endpoint, *registry.Gateway) (tunnel.Transport, error) {
		return l, nil
	}
	if err := east.peers.Configure([]Config{configOf("west", true)}); err != nil {
		t.Fatal(err)
	}
	if err := west.peers.Configure([]Config{configOf("east", false)}); err != nil {
		t.Fatal(err)
	}
	return l
}

// start runs sites until the end of the test.
func start(t testing.TB, sites ...*site) {
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	for _, s := range sites {
		wg.Go(func() { s.run(ctx) })
	}
	t.Cleanup(func() {
		cancel()
		for _, s := range sites {
			_ = s.peers.Configure(nil)
		}
		wg.Wait()
	})
}

// Each side sees what policies of the other let it see, by one stream that one of them has
// opened.
func TestBothSidesSeeWhatPolicyAllows(t *testing.T) {
	east, west := newSite(t, "east"), newSite(t, "west")
	west.set(t, service("orders.west.example"), service("hr.west.example"), seen([]string{"orders.west.example"}, "east.example"))
	east.set(t, service("shop.east.example"), seen([]string{"shop.east.example"}, "west.example"))
	join(t, east, west)
	start(t, east, west)
	east.awaitNames(t, "peer/west", "orders.west.example")
	west.awaitNames(t, "peer/east", "shop.east.example")

	// What changes is told.
	added := service("new.west.example")
	west.set(t, west.own.Services[0], west.own.Services[1], added, seen([]string{"orders.west.example", "new.west.example"}, "east.example"))
	east.awaitNames(t, "peer/west", "new.west.example", "orders.west.example")
	west.set(t, added, seen([]string{"new.west.example"}, "east.example"))
	east.awaitNames(t, "peer/west", "new.west.example")
	// A policy that goes takes the name away, and leaves the service.
	west.set(t, added)
	east.awaitNames(t, "peer/west")

	east.mu.Lock()
	defer east.mu.Unlock()
	networks := east.known["peer/west"].Networks
	if len(networks) != 1 || networks[0].Name != "peer/west" || len(networks[0].Gateways) != 1 || networks[0].Gateways[0].Address.Host != "gw.west.example" {
		t.Errorf("networks are %+v, want peer/west with the gateway that is configured", networks)
	}
}

// Without a policy a peer sees nothing, and neither does a stranger.
func TestNothingIsOfferedByDefault(t *testing.T) {
	east, west := newSite(t, "east"), newSite(t, "west")
	west.set(t, service("orders.west.example"), seen([]string{"orders.west.example"}, "south.example"))
	l := join(t, east, west)
	start(t, east, west)
	east.awaitNames(t, "peer/west")
	l.as = "spiffe://east.example/other"
	l.cut(west)
	east.await(t, "a refusal", func() bool {
		return east.stale["peer/west"] != nil && strings.Contains(east.peers.Status()[0].Problem, "is not the id of a peer's gateway")
	})
}

// What a peer offers that it may not offer is left out, and the rest is taken.
func TestLyingPeer(t *testing.T) {
	im := &importer{Config: &Config{Name: "west", Zones: patterns("*.west.example", "one.example", "*.svc.clusterset.local")}, site: "east", mesh: registry.Mesh{Zone: "mesh.example"}}
	for _, c := range []struct {
		name    string
		offer   Service
		names   []string // nil where the service is left out
		leftOut string
	}{
		{"its own", Service{Names: []string{"a.west.example", "*.b.west.example", "one.example"}}, []string{"a.west.example", "*.b.west.example", "one.example"}, ""},
		{"a zone as a whole", Service{Names: []string{"*.west.example"}}, []string{"*.west.example"}, ""},
		{"another's beside its own", Service{Names: []string{"a.west.example", "bank.example"}}, []string{"a.west.example"}, `"bank.example" is outside`},
		{"only another's", Service{Names: []string{"bank.example"}}, nil, `"bank.example" is outside`},
		{"above its zone", Service{Names: []string{"*.example"}}, nil, `"*.example" is outside`},
		{"the apex", Service{Names: []string{"west.example"}}, nil, "is outside"},
		{"below an exact zone", Service{Names: []string{"x.one.example", "*.one.example"}}, nil, "is outside"},
		{"a suffix that is no parent", Service{Names: []string{"evilwest.example"}}, nil, "is outside"},
		{"everything", Service{Names: []string{"*"}}, nil, "is outside"},
		{"a reserved name", Service{Names: []string{"join.culvert.alt", "culvert.alt"}}, nil, "is outside"},
		{"no name", Service{}, nil, "has no name"},
		{"a malformed name", Service{Names: []string{"a..west.example"}}, nil, "is outside"},
		{"our own", Service{Names: []string{"a.west.example"}, Site: "east"}, nil, "is our own"},
		{"our cluster's", Service{Names: []string{"a.west.example"}, Cluster: "east"}, nil, "is our own"},
		{"a third one's", Service{Names: []string{"a.west.example"}, Site: "south"}, nil, `is that of site "south"`},
		{"port 0", Service{Names: []string{"a.west.example"}, Ports: []uint16{0}}, nil, "port 0"},
		{"a named port", Service{Names: []string{"a.west.example"}, NamedPorts: []NamedPort{{"a.b", "tcp", 1}}}, nil, "named port"},
		{"a protocol", Service{Names: []string{"a.west.example"}, NamedPorts: []NamedPort{{"a", "sctp", 1}}}, nil, "named port"},
		{"ALPN", Service{Names: []string{"a.west.example"}, ALPN: []string{""}}, nil, "ALPN"},
		{"many names", Service{Names: make([]string, maxNames+1)}, nil, "more than 256"},
		{"a key", Service{Names: []string{"a.west.example"}, Key: strings.Repeat("k", 1000)}, nil, "no usable key"},
		{"a cluster's names outside of its zones", Service{Names: []string{"a.west.example"}, Service: "db", Namespace: "default", Cluster: "north"}, []string{"a.west.example"}, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			if c.offer.Key == "" {
				c.offer.Key = "k"
			}
			s, leftOut := im.service(&c.offer, "west")
			var names []string
			if s != nil {
				for _, n := range s.Names {
					names = append(names, n.String())
				}
				if s.ID != (registry.ID{}) || s.Exported {
					t.Errorf("ID is %v, exported %v, want neither", s.ID, s.Exported)
				}
				if len(s.Endpoints) != 1 || s.Endpoints[0].Network != "peer/west" || !s.Exposed {
					t.Errorf("service is %+v, want one endpoint in peer/west", s)
				}
			}
			if !slices.Equal(names, c.names) || !strings.Contains(leftOut, c.leftOut) || c.leftOut == "" && leftOut != "" {
				t.Errorf("names %q, left out %q; want %q, %q", names, leftOut, c.names, c.leftOut)
			}
		})
	}
	im.Zones = patterns("*.svc.clusterset.local", "*.svc.west.mesh.example", "db.west")
	s, leftOut := im.service(&Service{Key: "k", Name: "db", Names: []string{"db.default.svc.west.mesh.example", "db.default.svc.clusterset.local"}, Service: "db", Namespace: "default", Cluster: "west"}, "west")
	if leftOut != "" || !s.Exported || s.ID != (registry.ID{Service: "db", Namespace: "default", Cluster: "west"}) {
		t.Errorf("a service of the cluster set is %+v, left out %q", s, leftOut)
	}
}

// A service of the cluster set has its kind at the other side, too, as a ServiceImport has.
func TestKindOfServicesInTheClusterSet(t *testing.T) {
	im := &importer{Config: &Config{Name: "west", Zones: patterns("*.svc.clusterset.local", "*.svc.west.mesh.internal")}}
	for _, headless := range []bool{false, true} {
		own := &registry.Service{Name: "db", ID: registry.ID{Service: "db", Namespace: "shop", Cluster: "west"}, Exported: true, Exposed: true, Headless: headless}
		table, err := registry.Merge(registry.Snapshot{Services: []*registry.Service{own}})
		if err != nil {
			t.Fatal(err)
		}
		got, leftOut := im.service(describe(table, "west", "db", 0, own), "west")
		if got == nil || !got.Exported || got.Headless != headless || leftOut != "" {
			t.Errorf("headless %v: the other side has %+v, left out %q", headless, got, leftOut)
		}
	}
}

// Gateways that a peer names are none of this machine and of no metadata service.
func TestGatewaysOfPeers(t *testing.T) {
	for _, c := range []struct {
		g    Gateway
		want string // "" where it is taken
	}{
		{Gateway{"gw.west.example:443", []string{"connect-h2"}, 1}, ""},
		{Gateway{"203.0.113.7:443", []string{"sni", "connect-h3", "telepathy"}, 0}, ""},
		{Gateway{"10.0.0.1:443", []string{"connect"}, 0}, ""},
		{Gateway{"127.0.0.1:443", []string{"connect"}, 0}, "loopback"},
		{Gateway{"[::ffff:127.0.0.1]:443", []string{"connect"}, 0}, "loopback"},
		{Gateway{"[::1]:443", []string{"connect"}, 0}, "loopback"},
		{Gateway{"169.254.169.254:80", []string{"connect"}, 0}, "may not be used"},
		{Gateway{"[64:ff9b::7f00:1]:80", []string{"connect"}, 0}, "may not be used"},
		{Gateway{"0.0.0.0:80", []string{"connect"}, 0}, "may not be used"},
		{Gateway{"localhost:443", []string{"connect"}, 0}, "may not be used"},
		{Gateway{"a.localhost.:443", []string{"connect"}, 0}, "may not be used"},
		{Gateway{"gw.west.example", []string{"connect"}, 0}, "not host:port"},
		{Gateway{"gw.west.example:0", []string{"connect"}, 0}, "not host:port"},
		{Gateway{"gw.west.example:443", nil, 0}, "no transport"},
		{Gateway{"gw.west.example:443", []string{"sni", "socks5"}, 0}, "no transport"},
	} {
		g, err := c.g.Registered(hop, false)
		switch {
		case c.want == "" && err != nil, c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)):
			t.Errorf("%v: error %v, want %q", c.g, err, c.want)
		case err == nil:
			for _, h := range g.Transports {
				if h.KeyName != "edge" || !h.TLS && h.Proto != "connect-h3" {
					t.Errorf("%v is asked by %+v, want the key and TLS", c.g, h)
				}
			}
		}
	}
}

// After a partition only what has changed is sent, and the names stay meanwhile.
func TestPartitionKeepsNames(t *testing.T) {
	east, west := newSite(t, "east"), newSite(t, "west")
	a, b := service("a.west.example"), service("b.west.example")
	see := seen([]string{"a.west.example", "b.west.example", "c.west.example"}, "east.example")
	west.set(t, a, b, see)
	l := join(t, east, west)
	var received sync.Mutex
	var lines []string
	l.wrap = func(c net.Conn) net.Conn {
		return &recorder{Conn: c, line: func(s string) { received.Lock(); defer received.Unlock(); lines = append(lines, s) }}
	}
	start(t, east, west)
	east.awaitNames(t, "peer/west", "a.west.example", "b.west.example")
	l.cut(nil)
	east.await(t, "the loss", func() bool { return east.stale["peer/west"] != nil })
	if got := east.lockedNames(); len(got) != 2 {
		t.Errorf("in a partition the names are %q, want both", got)
	}
	west.set(t, a, service("c.west.example"), see)
	received.Lock()
	lines = nil
	received.Unlock()
	l.cut(west)
	east.awaitNames(t, "peer/west", "a.west.example", "c.west.example")
	received.Lock()
	defer received.Unlock()
	if i := slices.IndexFunc(lines, func(s string) bool { return strings.Contains(s, `"snapshot"`) }); i >= 0 {
		t.Errorf("after a partition %s has come, want a change", lines[i])
	}
	if !slices.ContainsFunc(lines, func(s string) bool { return strings.Contains(s, `"removed":["b.west.example"]`) }) {
		t.Errorf("lines are %q, want one that takes b away", lines)
	}
}

// A recorder sees what is written.
type recorder struct {
	net.Conn
	line func(string)
}

func (r *recorder) Write(b []byte) (int, error) {
	r.line(string(b))
	return r.Conn.Write(b)
}

// A peer that has started again sends a snapshot, whatever generation it has.
func TestRestartOfPeer(t *testing.T) {
	east, west := newSite(t, "east"), newSite(t, "west")
	west.set(t, service("a.west.example"), seen([]string{"a.west.example"}, "east.example"))
	l := join(t, east, west)
	start(t, east, west)
	east.awaitNames(t, "peer/west", "a.west.example")
	again := newSite(t, "west")
	again.set(t, service("b.west.example"), seen([]string{"b.west.example"}, "east.example"))
	if err := again.peers.Configure([]Config{configOf("east", false)}); err != nil {
		t.Fatal(err)
	}
	start(t, again)
	l.cut(again)
	east.awaitNames(t, "peer/west", "b.west.example")
}

// A gateway that starts while its peer is away has the names from before.
func TestCatalogIsKeptOverRestart(t *testing.T) {
	state := t.TempDir()
	east, west := newSite(t, "east"), newSite(t, "west")
	west.set(t, service("a.west.example"), seen([]string{"a.west.example"}, "east.example"))
	join(t, east, west)
	c := configOf("west", true)
	c.State = state
	if err := east.peers.Configure([]Config{c}); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() { defer close(done); east.run(ctx) }()
	start(t, west)
	east.awaitNames(t, "peer/west", "a.west.example")
	path := filepath.Join(state, "catalog")
	east.await(t, "the file", func() bool { m, _ := filepath.Glob(path); return len(m) == 1 })
	cancel()
	<-done

	again := newSite(t, "east")
	again.peers.NewTransport = func(*registry.Service, *registry.Endpoint, *registry.Gateway) (tunnel.Transport, error) {
		return &link{}, nil
	}
	if err := again.peers.Configure([]Config{c}); err != nil {
		t.Fatal(err)
	}
	start(t, again)
	again.await(t, "the names of before, as stale", func() bool {
		return slices.Equal(again.names("peer/west"), []string{"a.west.example"}) && again.stale["peer/west"] != nil
	})
	again.mu.Lock()
	defer again.mu.Unlock()
	if n := again.known["peer/west"].Networks; len(n) != 1 || len(n[0].Gateways) != 1 {
		t.Errorf("networks are %+v, want the gateway of the configuration", n)
	}
}

// A peer with several transports is asked by the next one where one is silent.
func TestSilenceLeadsToTheNextTransport(t *testing.T) {
	for name, said := range map[string]string{"from the beginning": "", "after a catalog": hello + "\n" + first + "\n"} {
		t.Run(name, func(t *testing.T) { synctest.Test(t, func(t *testing.T) { testSilence(t, said) }) })
	}
}

// testSilence has the peer say something by its first transport, and nothing after that.
func testSilence(t *testing.T, said string) {
	east, west := newSite(t, "east"), newSite(t, "west")
	west.set(t, service("a.west.example"), seen([]string{"a.west.example"}, "east.example"))
	good := join(t, east, west)
	silent := &silentLink{said: said}
	east.peers.NewTransport = func(_ *registry.Service, _ *registry.Endpoint, g *registry.Gateway) (tunnel.Transport, error) {
		if g.Transports[0].Proto == "connect" {
			return silent, nil
		}
		return good, nil
	}
	c := configOf("west", true)
	other := hop
	other.Proto = "connect"
	c.Gateways[0].Transports = []registry.Hop{other, hop}
	if err := east.peers.Configure([]Config{c}); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	wg.Go(func() { east.run(ctx) })
	time.Sleep(HeartbeatTimeout - time.Second)
	synctest.Wait()
	if got := east.lockedNames(); (len(got) > 0) != (said != "") {
		t.Errorf("names are %q before the heartbeats are missed", got)
	}
	time.Sleep(3 * time.Second)
	synctest.Wait()
	if got := east.lockedNames(); len(got) != 1 {
		t.Errorf("names are %q after %v, want those by the next transport; status %+v", got, HeartbeatTimeout, east.peers.Status())
	}
	// The stream that works stays.
	time.Sleep(10 * HeartbeatTimeout)
	synctest.Wait()
	good.mu.Lock()
	defer good.mu.Unlock()
	if good.dials != 1 || !east.peers.Status()[0].Connected {
		t.Errorf("%d streams, status %+v; want one that stays", good.dials, east.peers.Status())
	}
	cancel()
	_ = east.peers.Configure(nil)
	_ = west.peers.Configure(nil)
	wg.Wait()
}

// A silentLink leads to a gateway that accepts, says something, and then nothing.
type silentLink struct {
	link
	said string
}

func (l *silentLink) Dial(context.Context, *tunnel.Endpoint, *tunnel.Request) (net.Conn, error) {
	a, b := net.Pipe()
	go func() { _, _ = io.Copy(io.Discard, b) }()
	go func() { _, _ = io.WriteString(b, l.said) }()
	return a, nil
}

// A gateway that drains says so, and its peer asks the next one at once.
func TestDrain(t *testing.T) {
	east, west, other := newSite(t, "east"), newSite(t, "west"), newSite(t, "west")
	for _, s := range []*site{west, other} {
		s.set(t, service("a.west.example"), seen([]string{"a.west.example"}, "east.example"))
	}
	l := join(t, east, west)
	if err := other.peers.Configure([]Config{configOf("east", false)}); err != nil {
		t.Fatal(err)
	}
	start(t, east, west, other)
	east.awaitNames(t, "peer/west", "a.west.example")
	l.mu.Lock()
	l.to = other
	l.mu.Unlock()
	west.peers.Drain()
	east.await(t, "the other gateway", func() bool {
		s := east.peers.Status()[0]
		return s.Connected && len(other.peers.Status()) == 1 && other.peers.Status()[0].Streams == 1
	})
}

// A fake is a peer whose lines a test writes.
type fake struct {
	t *testing.T
	c net.Conn
	r *bufio.Reader
}

// fakeWest returns a site and the stream that its peer answers.
func fakeWest(t *testing.T) (*site, *fake) {
	east := newSite(t, "east")
	accepted := make(chan net.Conn, 1)
	east.peers.NewTransport = func(*registry.Service, *registry.Endpoint, *registry.Gateway) (tunnel.Transport, error) {
		return &fakeLink{accepted: accepted}, nil
	}
	if err := east.peers.Configure([]Config{configOf("west", true)}); err != nil {
		t.Fatal(err)
	}
	start(t, east)
	f := &fake{t: t, c: <-accepted}
	f.r = bufio.NewReader(f.c)
	t.Cleanup(func() { _ = f.c.Close() })
	return east, f
}

type fakeLink struct {
	link
	accepted chan net.Conn
}

func (l *fakeLink) Dial(ctx context.Context, _ *tunnel.Endpoint, _ *tunnel.Request) (net.Conn, error) {
	a, b := net.Pipe()
	select {
	case l.accepted <- b:
		return a, nil
	default: // one is enough
		return nil, errors.New("nobody answers")
	}
}

func (f *fake) send(lines ...string) {
	for _, line := range lines {
		_ = f.c.SetWriteDeadline(time.Now().Add(time.Minute))
		if _, err := io.WriteString(f.c, line+"\n"); err != nil {
			return // the other side has refused an earlier line
		}
	}
}

// next returns the next message of a kind.
func (f *fake) next(kind string) *Message {
	f.t.Helper()
	for {
		_ = f.c.SetReadDeadline(time.Now().Add(time.Minute))
		line, err := f.r.ReadBytes('\n')
		if err != nil {
			f.t.Fatalf("no %s has come: %v", kind, err)
		}
		var m Message
		if err := json.Unmarshal(line, &m); err != nil {
			f.t.Fatal(err)
		}
		if m.Kind == kind {
			return &m
		}
	}
}

const (
	hello  = `{"version":1,"kind":"hello","site":"west","instance":"i"}`
	first  = `{"version":1,"kind":"snapshot","generation":5,"services":[{"key":"a","name":"a","names":["a.west.example"],"site":"west"}]}`
	second = `{"version":1,"kind":"change","generation":6,"services":[{"key":"b","name":"b","names":["b.west.example"]}]}`
)

// What breaks the rules ends the stream with an error that says why, and the last good
// catalog stays.
func TestSequencesThatAreRefused(t *testing.T) {
	many := func(n int, key string) string {
		var b strings.Builder
		for i := range n {
			if i > 0 {
				b.WriteString(",")
			}
			fmt.Fprintf(&b, `{"key":"%s%d","name":"","names":["a%d.west.example"]}`, key, i, i)
		}
		return b.String()
	}
	var flood, bytes []string
	for i := range 102 {
		flood = append(flood, fmt.Sprintf(`{"version":1,"kind":"snapshot","generation":6,"more":true,"services":[%s]}`, many(100, fmt.Sprintf("k%d-", i))))
	}
	for i := range 600 {
		bytes = append(bytes, fmt.Sprintf(`{"version":1,"kind":"snapshot","generation":6,"more":true,"services":[{"key":"k%d","names":["a.west.example"],"x":%q}]}`, i, strings.Repeat("x", 60000)))
	}
	for _, c := range []struct {
		name  string
		lines []string
		want  string
	}{
		{"no JSON", []string{"x"}, "not a message"},
		{"a version", []string{`{"version":2,"kind":"heartbeat"}`}, "of version 2"},
		{"no version", []string{`{"kind":"heartbeat"}`}, "of version 0"},
		{"a kind", []string{`{"version":1,"kind":"dance"}`}, "unknown kind"},
		{"a second hello", []string{hello}, "second hello"},
		{"a long line", []string{strings.Repeat("x", MaxLine+1)}, "longer than the limit"},
		{"a repeated generation", []string{`{"version":1,"kind":"change","generation":5}`}, "generation 5 has come after generation 5"},
		{"an old generation", []string{strings.Replace(second, "6", "4", 1)}, "generation 4 has come after generation 5"},
		{"an old snapshot", []string{strings.Replace(first, `"generation":5`, `"generation":4`, 1)}, "generation 4 has come after generation 5"},
		{"no generation", []string{`{"version":1,"kind":"snapshot"}`}, "no generation"},
		{"a change in a snapshot", []string{strings.Replace(first, `"generation":5`, `"generation":6,"more":true`, 1), strings.Replace(second, "6", "7", 1)}, "within a snapshot"},
		{"another generation within", []string{strings.Replace(first, `"generation":5`, `"generation":6,"more":true`, 1), strings.Replace(first, `"generation":5`, `"generation":7`, 1)}, "within a snapshot of generation 6"},
		{"a key twice", []string{`{"version":1,"kind":"snapshot","generation":6,"services":[` + many(1, "k") + "," + many(1, "k") + `]}`}, "is there twice"},
		{"a lost change", []string{`{"version":1,"kind":"heartbeat","generation":9}`}, "no change to that"},
		{"many services", flood, "more than 10000 services"},
		{"many bytes", bytes, "a snapshot has more than 33554432 bytes"},
		{"many gateways", []string{`{"version":1,"kind":"heartbeat","gateways":[` + strings.Repeat(`{},`, MaxGateways) + `{}]}`}, "17 gateways"},
		{"an error", []string{`{"version":1,"kind":"error","error":"no more"}`}, "no more"},
	} {
		t.Run(c.name, func(t *testing.T) {
			east, f := fakeWest(t)
			go f.send(hello)
			f.next(KindSubscribe)
			f.send(first)
			east.awaitNames(t, "peer/west", "a.west.example")
			go f.send(c.lines...)
			if got := f.next(KindError); !strings.Contains(got.Error, c.want) {
				t.Errorf("the peer is told %q, want %q", got.Error, c.want)
			}
			east.await(t, "the end of the stream", func() bool { return east.stale["peer/west"] != nil })
			if got := east.lockedNames(); !slices.Equal(got, []string{"a.west.example"}) {
				t.Errorf("names are %q, want those of the last good catalog", got)
			}
		})
	}
}

// A change adds to what is known, and a heartbeat before the hello is refused.
func TestChange(t *testing.T) {
	east, f := fakeWest(t)
	go f.send(hello)
	f.next(KindSubscribe)
	f.send(first, second)
	east.awaitNames(t, "peer/west", "a.west.example", "b.west.example")
	f.send(`{"version":1,"kind":"change","generation":7,"removed":["a","never"]}`, `{"version":1,"kind":"heartbeat","generation":7,"later":{"fields":1}}`)
	east.awaitNames(t, "peer/west", "b.west.example")

	_, f = fakeWest(t)
	go f.send(`{"version":1,"kind":"heartbeat"}`)
	if got := f.next(KindError); !strings.Contains(got.Error, "where a hello is due") {
		t.Errorf("the peer is told %q", got.Error)
	}
	_, f = fakeWest(t)
	go f.send(strings.Replace(hello, `"west"`, `"east"`, 1))
	if got := f.next(KindError); !strings.Contains(got.Error, `calls itself "east"`) {
		t.Errorf("the peer is told %q", got.Error)
	}
}

// What a peer offers is offered to nobody else, and two sites do not offer each other what
// they have from the other.
func TestNoTransit(t *testing.T) {
	r := registry.Registry{}
	im := &importer{Config: &Config{Name: "west", Zones: patterns("*.west.example")}}
	foreign, _ := im.service(&Service{Key: "k", Names: []string{"a.west.example"}}, "west")
	table, err := registry.Merge(registry.Snapshot{Services: []*registry.Service{foreign, service("own.example")}, Policies: []*policy.Policy{everybody}})
	if err != nil {
		t.Fatal(err)
	}
	c := newCatalog()
	c.update(r.Swap(table), "east", tunnel.Peer{ID: "spiffe://south.example/gw", Method: "mtls"}, netip.Addr{})
	services, _, _, _ := c.since(0)
	if len(services) != 1 || !strings.Contains(string(services[0]), "own.example") {
		t.Errorf("offered are %s, want our own service alone", services)
	}
}

// A policy by address offers nothing to a peer: behind a NAT many have one.
func TestAddressOffersNothing(t *testing.T) {
	for _, c := range []struct {
		source policy.Source
		want   int
	}{
		{policy.Source{CIDRs: []netip.Prefix{netip.MustParsePrefix("0.0.0.0/0")}}, 0},
		{policy.Source{TrustDomains: []string{"west.example"}}, 1},
		{policy.Source{SPIFFE: []string{"spiffe://west.example/gw/*"}}, 1},
		{policy.Source{SPIFFE: []string{"spiffe://west.example/gw/2"}}, 0},
	} {
		p := &policy.Policy{Name: "p", Verb: policy.Catalog, Action: policy.Allow, Rules: []policy.Rule{{Sources: &[]policy.Source{c.source}}}}
		table, err := registry.Merge(registry.Snapshot{Services: []*registry.Service{service("own.example")}, Policies: []*policy.Policy{p}})
		if err != nil {
			t.Fatal(err)
		}
		cat := newCatalog()
		cat.update(table, "east", tunnel.Peer{ID: "spiffe://west.example/gw/1", Method: "mtls", Auth: &tunnel.AuthInfo{TrustDomain: "west.example"}}, netip.MustParseAddr("192.0.2.1"))
		if _, n := cat.state(); n != c.want {
			t.Errorf("by %+v %d services are offered, want %d", c.source, n, c.want)
		}
	}
}

// Peers that could speak for the same name, or have the same id, are refused together.
func TestCheck(t *testing.T) {
	one := func(name, id string, zones ...string) Config {
		return Config{Name: name, IDs: []string{id}, Zones: patterns(zones...)}
	}
	a := one("a", "spiffe://a.example/gw", "*.a.example", "*.svc.clusterset.local")
	for _, c := range []struct {
		b    Config
		want string
	}{
		{one("b", "spiffe://b.example/gw", "*.b.example", "*.svc.clusterset.local"), ""},
		{one("a", "spiffe://b.example/gw", "*.b.example"), "called \"a\""},
		{one("b", "spiffe://b.example/gw", "*.a.example"), "a name has one peer"},
		{one("b", "spiffe://b.example/gw", "*.x.a.example"), "a name has one peer"},
		{one("b", "spiffe://b.example/gw", "*.example"), "a name has one peer"},
		{one("b", "spiffe://a.example/gw", "*.b.example"), "may be that of peer"},
		{one("b", "spiffe://a.example/*", "*.b.example"), "may be that of peer"},
	} {
		err := Check([]Config{a, c.b})
		if c.want == "" && err != nil || c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)) {
			t.Errorf("%+v: %v, want %q", c.b, err, c.want)
		}
	}
}

// FuzzSession: whatever a peer sends, in whatever order, no name outside of its zones comes
// out, and nothing panics.
func FuzzSession(f *testing.F) {
	f.Add([]byte(hello + "\n" + first + "\n" + second + "\n"))
	f.Add([]byte(hello + "\n" + `{"version":1,"kind":"subscribe","generation":3,"instance":"x"}` + "\n" + `{"version":1,"kind":"drain"}` + "\n"))
	f.Add([]byte(hello + "\n" + `{"version":1,"kind":"snapshot","generation":1,"more":true,"services":[{"key":"a","names":["bank.example"]}]}` + "\n" + first + "\n"))
	f.Fuzz(func(t *testing.T, sent []byte) {
		c := configOf("west", false)
		owner := &Peers{Site: "east", Table: func() *registry.Table { return nil }}
		p := &peer{Config: &c, owner: owner, changed: make(chan struct{}, 1), offers: map[string]*catalog{}}
		s, err := p.newSession(tunnel.Peer{ID: "spiffe://west.example/gw/1", Method: "mtls"}, netip.Addr{}, false, "")
		if err != nil {
			t.Fatal(err)
		}
		s.conn = &script{Reader: strings.NewReader(string(sent))}
		s.timeout = time.AfterFunc(time.Hour, func() {})
		defer s.timeout.Stop()
		if err := s.read(); err == nil {
			t.Error("the stream ends without an error")
		} else if strings.Contains(err.Error(), "panic") {
			t.Error(err)
		}
		got := p.received()
		if got == nil {
			return
		}
		if len(got.services) > MaxServices || got.size > MaxCatalog {
			t.Errorf("%d services of %d bytes are taken", len(got.services), got.size)
		}
		for _, svc := range got.services {
			for _, n := range svc.Names {
				if !covers(c.Zones[0], n) {
					t.Errorf("the name %q is taken", n)
				}
			}
		}
	})
}

type script struct {
	net.Conn
	io.Reader
}

func (s *script) Read(b []byte) (int, error)  { return s.Reader.Read(b) }
func (s *script) Write(b []byte) (int, error) { return len(b), nil }
func (s *script) Close() error                { return nil }

// A peer that gets another outside address tells it on the stream that stands, and one that
// has none takes it back. A change by a stream that is not the active one counts for nothing.
func TestPeersAreToldOfOtherGateways(t *testing.T) {
	east, west := newSite(t, "east"), newSite(t, "west")
	west.set(t, service("a.west.example"), seen([]string{"a.west.example"}, "east.example"))
	var own atomic.Pointer[[]Gateway]
	use := func(addresses ...string) {
		var all []Gateway
		for _, a := range addresses {
			all = append(all, Gateway{Address: a, Transports: []string{"connect-h2"}})
		}
		own.Store(&all)
		west.peers.Moved()
	}
	use()
	west.peers.Gateways = func() []Gateway { return *own.Load() }
	join(t, east, west)
	start(t, east, west)
	await := func(want ...string) {
		t.Helper()
		east.await(t, fmt.Sprintf("gateways %q", want), func() bool {
			var got []string
			for _, n := range east.known["peer/west"].Networks {
				for i := range n.Gateways {
					got = append(got, n.Gateways[i].Address.String())
				}
			}
			return slices.Equal(got, want)
		})
	}
	await("gw.west.example:443")
	use("203.0.113.7:443")
	await("203.0.113.7:443")
	use("203.0.113.99:444", "169.254.169.254:80") // the Guard's rules hold for later ones, too
	await("203.0.113.99:444")
	use()
	await("gw.west.example:443")
	east.awaitNames(t, "peer/west", "a.west.example")
}

// While a peer has no gateway that others could dial, a connector may serve what it offers, as
// far as policies let it.
func TestConnectorsServeWhatNobodyCanDial(t *testing.T) {
	east, west := newSite(t, "east"), newSite(t, "west")
	west.set(t, service("a.west.example"), service("b.west.example"), seen([]string{"a.west.example", "b.west.example"}, "east.example"))
	var own atomic.Pointer[[]Gateway]
	own.Store(&[]Gateway{})
	west.peers.Gateways = func() []Gateway { return *own.Load() }
	l := &link{to: east, as: "spiffe://west.example/gw/1"} // west is behind a NAT
	west.peers.NewTransport = func(*registry.Service, *registry.Endpoint, *registry.Gateway) (tunnel.Transport, error) {
		return l, nil
	}
	if err := errors.Join(west.peers.Configure([]Config{configOf("east", true)}), east.peers.Configure([]Config{configOf("west", false)})); err != nil {
		t.Fatal(err)
	}
	start(t, east, west)
	served := func(want ...string) {
		t.Helper()
		east.await(t, fmt.Sprintf("endpoints %q", want), func() bool {
			var got []string
			for _, svc := range east.known["peer/west"].Services {
				for _, ep := range svc.Endpoints {
					got = append(got, ep.Group+ep.Host)
				}
			}
			return slices.Equal(got, want)
		})
	}
	served("peer/west/a.west.example", "peer/west/b.west.example")
	table, err := registry.Merge(east.known["peer/west"], snapshotOf(&policy.Policy{
		Name: "west", Verb: policy.Register, Action: policy.Allow, Targets: policy.Targets{Services: []string{"a.west.example"}},
		Rules: []policy.Rule{{Sources: &[]policy.Source{{SPIFFE: []string{"spiffe://west.example/gw/*"}}}}},
	}))
	if err != nil {
		t.Fatal(err)
	}
	east.table.Swap(table)
	connector := &tunnel.Request{Peer: tunnel.Peer{ID: "spiffe://west.example/gw/1", Method: "mtls"}}
	groups, listed, err := east.table.MayRegister(connector, patterns("a.west.example")[0], 443)
	if err != nil || !listed || !slices.Equal(groups, []string{"peer/west/a.west.example"}) {
		t.Errorf("its connector may serve %q: %v, %v", groups, listed, err)
	}
	if _, _, err := east.table.MayRegister(connector, patterns("b.west.example")[0], 443); err == nil {
		t.Error("its connector serves what no policy gives it")
	}
	own.Store(&[]Gateway{{Address: "203.0.113.7:443", Transports: []string{"connect-h2"}}})
	west.peers.Moved()
	served("a.west.example", "b.west.example")
}
