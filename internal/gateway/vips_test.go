package gateway

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"culvert.dev/connect"
	"culvert.dev/connect/socks5"
	"culvert.dev/internal/testnet"
	"culvert.dev/registry"
	"culvert.dev/registry/alloc"
	"culvert.dev/tunnel"
)

// A vipSite is where gateways with addresses for services run, one after the
// other.
type vipSite struct {
	t   *testing.T
	cfg VIPs
}

func newVIPSite(t *testing.T, ranges ...string) *vipSite {
	s := &vipSite{t: t, cfg: VIPs{State: filepath.Join(t.TempDir(), "vips.json")}}
	for _, r := range ranges {
		s.cfg.Ranges = append(s.cfg.Ranges, netip.MustParsePrefix(r))
	}
	return s
}

func (s *vipSite) config() Config {
	cfg := s.cfg
	return Config{
		VIPs:      &cfg,
		Listeners: []Listener{{Address: "127.0.0.1:0", Protocols: []tunnel.Protocol{&connect.Protocol{}, &socks5.Protocol{}}}},
	}
}

func (s *vipSite) start(services ...*registry.Service) *running {
	s.t.Helper()
	return launch(s.t, s.config(), services...)
}

func withVIP(name string, ep registry.Endpoint, ports ...uint16) *registry.Service {
	s := published(name, ep, ports...)
	s.Publish, s.VIP = false, true
	return s
}

// vips returns what the table has, "V4 V6" by service.
func (r *running) vips() map[string]string {
	t := r.registry.Table()
	all := map[string]string{}
	i := 0
	for s := range t.Services() {
		if v4, v6 := t.VIPs(i); v4.IsValid() || v6.IsValid() {
			all[s.Name] = fmt.Sprint(v4, " ", v6)
		}
		i++
	}
	return all
}

// tell gives the gateway other services and waits until what is wanted of their
// addresses is so.
func (r *running) tell(want func(map[string]string) bool, services ...*registry.Service) map[string]string {
	r.t.Helper()
	before := r.registry.Table().Generation()
	r.feed <- registry.Snapshot{Services: services}
	testnet.Eventually(r.t, soon, func() bool { return r.registry.Table().Generation() > before && want(r.vips()) }, "the services have their addresses")
	return r.vips()
}

func number(n int) func(map[string]string) bool {
	return func(all map[string]string) bool { return len(all) == n }
}

// by asks for an address by a protocol and wants the service's greeting.
func (r *running) by(proto, addr string, port int, want string) error {
	r.t.Helper()
	at := r.Addrs()[0].String()
	var d tunnel.Dialer = &connect.Dialer{Proxy: at}
	if proto == "socks5" {
		d = &socks5.Dialer{Proxy: at}
	}
	ctx, cancel := context.WithTimeout(r.t.Context(), soon)
	defer cancel()
	c, err := d.DialContext(ctx, "tcp", net.JoinHostPort(addr, fmt.Sprint(port)))
	if err != nil {
		return err
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(soon))
	got := make([]byte, len(want))
	if _, err := io.ReadFull(c, got); err != nil || string(got) != want {
		return fmt.Errorf("got %q, %w, want %q", got, err, want)
	}
	return nil
}

// A service is reached at its addresses for as long as it is there, by whatever
// names an address; they are the same when it is back, and after a restart.
func TestVIPsFollowTheTable(t *testing.T) {
	s := newVIPSite(t, "240.0.0.0/4", "fd12:3456:789a::/64")
	db, mail := withVIP("db.test", greeter(t, "db"), 5432), withVIP("mail.test", greeter(t, "mail"))
	r := s.start(db, mail)
	first := r.vips()
	if len(first) != 2 {
		t.Fatalf("addresses %v", first)
	}
	try := func(r *running) {
		t.Helper()
		for name, port := range map[string]int{"db.test": 5432, "mail.test": 25} {
			for _, addr := range strings.Fields(first[name]) {
				for _, proto := range []string{"connect", "socks5"} {
					if err := r.by(proto, addr, port, strings.TrimSuffix(name, ".test")); err != nil {
						t.Errorf("%s at %s by %s: %v", name, addr, proto, err)
					}
				}
			}
		}
	}
	try(r)
	v4, _, _ := strings.Cut(first["db.test"], " ")
	if err := r.by("connect", v4, 80, "db"); tunnel.ReasonOf(err) != tunnel.NoRoute {
		t.Errorf("another port: got %v", err)
	}
	if err := r.by("connect", "240.0.0.1", 5432, "db"); tunnel.ReasonOf(err) != tunnel.NoRoute {
		t.Errorf("an address that is nobody's: got %v", err)
	}
	if st := r.Status().VIPs; st.Services != 2 || st.Missing != 0 || st.Problems != nil || !slices.Equal(st.Ranges, []string{"240.0.0.0/4", "fd12:3456:789a::/64"}) {
		t.Errorf("status %+v", st)
	}
	x := Explain(t.Context(), r.router, r.cfg.Listeners, Query{Host: v4, Port: 5432, Listener: r.cfg.Listeners[0].Address})
	if x.Reason != "" || x.Service != "db.test" || x.Pattern != "vip" {
		t.Errorf("explain: %+v", x)
	}

	r.tell(number(1), mail)
	if err := r.by("connect", v4, 5432, "db"); tunnel.ReasonOf(err) != tunnel.NoRoute {
		t.Errorf("a service that is gone: got %v", err)
	}
	testnet.Eventually(t, soon, func() bool { return r.Status().VIPs.Kept == 2 }, "both addresses are kept")
	db.Names = append([]tunnel.Pattern{{Suffix: tunnel.MustParseName("database.test")}}, db.Names...) // what it had before is found by its other name
	if got := r.tell(number(2), withVIP("web.test", greeter(t, "web")), mail); got["web.test"] == first["db.test"] {
		t.Errorf("the addresses of who is gone are another's at once: %v", got)
	}
	if got := r.tell(number(3), withVIP("web.test", greeter(t, "web")), mail, db); got["db.test"] != first["db.test"] || got["mail.test"] != first["mail.test"] {
		t.Errorf("back: got %v, and had %v", got, first)
	}
	try(r)
	r.end()
	again := s.start(db, withVIP("a.test", greeter(t, "a")), mail)
	if got := again.vips(); got["db.test"] != first["db.test"] || got["mail.test"] != first["mail.test"] || got["a.test"] == "" {
		t.Errorf("after a restart: got %v, and had %v", got, first)
	}
	try(again)
}

// An address tells nobody of a service who may not have it.
func TestVIPsOfPrivateServices(t *testing.T) {
	s := newVIPSite(t, "240.0.0.0/4")
	ep := greeter(t, "hello")
	some, none := withVIP("some.test", ep), withVIP("none.test", ep)
	some.ExposedTo, none.Exposed = []string{"elsewhere"}, false
	r := s.start(some, none)
	all := r.vips()
	if len(all) != 1 {
		t.Fatalf("addresses %v, want that of some.test", all)
	}
	v4, _, _ := strings.Cut(all["some.test"], " ")
	for _, proto := range []string{"connect", "socks5"} {
		if err := r.by(proto, v4, 443, "hello"); err == nil {
			t.Errorf("%s: some.test is reached", proto)
		}
	}
	testnet.Eventually(t, soon, func() bool { return strings.Count(r.log.String(), "reason=not-exposed ") == 2 }, "both are refused as not exposed")
}

// The gateway behind is asked for the name: it has other addresses, if any.
func TestVIPsThroughAGateway(t *testing.T) {
	far := start(t, "far", &registry.Service{
		Name: "far", Names: []tunnel.Pattern{{Suffix: tunnel.MustParseName("db.test")}}, Exposed: true, Endpoints: []registry.Endpoint{greeter(t, "far")},
	})
	s := newVIPSite(t, "240.0.0.0/4")
	db := withVIP("db.test", registry.Endpoint{}, 5432)
	db.Endpoints, db.Via = nil, []registry.Hop{byConnect(far)}
	r := s.start(db)
	v4, _, _ := strings.Cut(r.vips()["db.test"], " ")
	if err := r.by("connect", v4, 5432, "far"); err != nil {
		t.Error(err)
	}
}

// Services for which there is no address are named; the others have theirs.
func TestVIPsExhausted(t *testing.T) {
	s := newVIPSite(t, "10.9.0.0/30", "fd12:3456:789a::/64")
	ep := greeter(t, "hello")
	r := s.start(withVIP("a.test", ep), withVIP("b.test", ep), withVIP("c.test", ep))
	all := r.vips()
	if len(all) != 3 || !strings.HasPrefix(all["c.test"], "invalid IP fd12:") {
		t.Errorf("got %v", all)
	}
	want := "no address is free in 10.9.0.0/30: 2 of 2 are other services'"
	if log := r.log.String(); !strings.Contains(log, `msg="service has no virtual IP" service=c.test family=IPv4 err="`+want) {
		t.Error("the log does not say who has no address")
	}
	if st := r.Status().VIPs; st.Missing != 1 || st.Services != 3 || len(st.Problems) != 1 || st.Problems[0] != "c.test has no IPv4 address: "+want {
		t.Errorf("status %+v", st)
	}
	// A network that has all of a range takes its addresses; others stay.
	before := r.vips()
	r.feed <- registry.Snapshot{
		Services: []*registry.Service{withVIP("a.test", ep), withVIP("b.test", ep)},
		Networks: []registry.Network{{Name: "ten", CIDRs: []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8")}}},
	}
	testnet.Eventually(t, soon, func() bool {
		now := r.vips()
		return strings.HasPrefix(now["a.test"], "invalid IP ") && strings.HasSuffix(before["a.test"], strings.Fields(now["a.test"])[2])
	}, "a network has taken the range")
}

// Who has an address that somebody lists gets another one, and is named.
func TestVIPsGiveWay(t *testing.T) {
	s := newVIPSite(t, "240.0.0.0/4")
	ep := greeter(t, "hello")
	r := s.start(withVIP("a.test", ep), withVIP("b.test", ep))
	before := r.vips()
	v4, _, _ := strings.Cut(before["a.test"], " ")
	lists := published("lists.test", greeter(t, "lists"))
	lists.Addresses = []netip.Addr{netip.MustParseAddr(v4)}
	now := r.tell(func(all map[string]string) bool { return all["a.test"] != "" && all["a.test"] != before["a.test"] }, withVIP("a.test", ep), withVIP("b.test", ep), lists)
	if now["b.test"] != before["b.test"] {
		t.Errorf("b.test has %s, and had %s", now["b.test"], before["b.test"])
	}
	if err := r.by("connect", v4, 443, "lists"); err != nil {
		t.Errorf("who lists the address: %v", err)
	}
	testnet.Eventually(t, soon, func() bool { return strings.Contains(r.log.String(), " service=a.test was="+v4+" now=") }, "the log names who has moved")
}

// A state that can't be understood ends the start, and stays as it is.
func TestVIPsOfABrokenState(t *testing.T) {
	s := newVIPSite(t, "240.0.0.0/4")
	const broken = `{"version": 1, "vips": [{"serv`
	if err := os.WriteFile(s.cfg.State, []byte(broken), 0o600); err != nil {
		t.Fatal(err)
	}
	try := func() error {
		cfg := s.config()
		cfg.Sources = []registry.Source{make(feed)}
		g, err := New(t.Context(), cfg)
		if err == nil {
			g.Close()
		}
		return err
	}
	var se *StateError
	if err := try(); !errors.As(err, &se) || se.What != "addresses" || !strings.HasPrefix(err.Error(), "vips: the assigned VIPs in ") {
		t.Errorf("got %v, want a StateError", err)
	}
	if _, err := ForecastVIPs(s.cfg, nil); !errors.As(err, &se) {
		t.Errorf("a forecast: got %v, want a StateError", err)
	}
	if data, _ := os.ReadFile(s.cfg.State); string(data) != broken {
		t.Errorf("the state is %q now", data)
	}
	s.cfg.State = filepath.Join(t.TempDir(), "missing", "vips.json")
	if err := try(); !errors.As(err, &se) {
		t.Errorf("a state that can't be written: %v", err)
	}
	s.cfg.Ranges = []netip.Prefix{netip.MustParsePrefix("127.0.0.0/8")}
	if err := try(); err == nil || !strings.Contains(err.Error(), "loopback") {
		t.Errorf("a range of loopback: %v", err)
	}
}

// Two gateways never have one state, whichever it is, and who could not start
// has given back all that it had.
func TestStatesAreOneGatewaysAlone(t *testing.T) {
	s, p := newVIPSite(t, "240.0.0.0/4"), newSite(t, 2)
	both := func() (*Gateway, error) {
		cfg := s.config()
		cfg.Sources, cfg.ServicePorts = []registry.Source{make(feed)}, &p.cfg
		return New(t.Context(), cfg)
	}
	r := s.start(withVIP("a.test", greeter(t, "a")))
	for range 2 { // the second time the ports would be held if the first had kept them
		var se *StateError
		g, err := both()
		if err == nil {
			g.Close()
		}
		if !errors.As(err, &se) || se.Of != "vips" || !strings.Contains(err.Error(), "another process keeps them") {
			t.Errorf("a second gateway: got %v, want a StateError of the VIPs", err)
		}
	}
	r.end()
	g, err := both()
	if err != nil {
		t.Fatalf("after the first: %v", err)
	}
	g.Close()
	if g, err = both(); err != nil {
		t.Fatalf("after one that was never run: %v", err)
	}
	g.Close()
}

// What can't be kept is not given: a new service gets its addresses when the
// state can be written, and those that have theirs don't notice.
func TestVIPsWhenTheStateCannotBeWritten(t *testing.T) {
	t.Parallel()
	s := newVIPSite(t, "240.0.0.0/4", "fd12:3456:789a::/64")
	folder := filepath.Join(t.TempDir(), "state")
	if err := os.Mkdir(folder, 0o700); err != nil {
		t.Fatal(err)
	}
	s.cfg.State = filepath.Join(folder, "vips.json")
	a, b := withVIP("a.test", greeter(t, "a")), withVIP("b.test", greeter(t, "b"))
	r := s.start(a)
	had := r.vips()["a.test"]
	if err := os.Rename(folder, folder+".away"); err != nil {
		t.Fatal(err)
	}
	r.feed <- registry.Snapshot{Services: []*registry.Service{a, b}}
	testnet.Eventually(t, soon, func() bool { return r.Status().VIPs.Missing == 2 }, "b.test has no address")
	if got := r.vips(); len(got) != 1 || got["a.test"] != had {
		t.Errorf("got %v, want a.test with %s", got, had)
	}
	v4, _, _ := strings.Cut(had, " ")
	if err := r.by("connect", v4, 443, "a"); err != nil {
		t.Error(err)
	}
	if err := os.Rename(folder+".away", folder); err != nil {
		t.Fatal(err)
	}
	testnet.Eventually(t, soon, func() bool { return len(r.vips()) == 2 }, "b.test gets its addresses")
	want := r.vips()
	r.end()
	if got := s.start(a, b).vips(); fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("after a restart: got %v, want %v", got, want)
	}
}

// What a forecast says is what a gateway does.
func TestForecastVIPs(t *testing.T) {
	s := newVIPSite(t, "10.9.0.0/24", "fd12:3456:789a::/64")
	services := []*registry.Service{withVIP("a.test", greeter(t, "a")), withVIP("b.test", greeter(t, "b"))}
	tab, err := registry.Merge(registry.Snapshot{Services: services})
	if err != nil {
		t.Fatal(err)
	}
	want, err := ForecastVIPs(s.cfg, tab)
	if err != nil || len(want) != 2 {
		t.Fatalf("got %v, %v", want, err)
	}
	if _, err := os.Stat(s.cfg.State); err == nil {
		t.Error("a forecast has written the state")
	}
	r := s.start(services...)
	got := slices.Clone(r.registry.Table().AllVIPs())
	for _, list := range [][]registry.VIP{got, want} {
		slices.SortFunc(list, func(a, b registry.VIP) int { return strings.Compare(a.Key, b.Key) })
	}
	if !slices.Equal(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
}

// Services come and go by chance, the gateway is restarted now and then: a
// service that is there is always at its addresses, and what the disk has is
// what the table says.
func TestVIPsByChance(t *testing.T) {
	t.Parallel()
	s := newVIPSite(t, "10.9.0.0/24", "fd12:3456:789a::/120")
	rnd := rand.New(rand.NewPCG(1, 2))
	ep := greeter(t, "hello")
	var all []*registry.Service
	for i := range 40 {
		all = append(all, withVIP(fmt.Sprintf("s%d.test", i), ep))
	}
	at := map[string]string{}
	var r *running
	for round := range 12 {
		services := slices.DeleteFunc(slices.Clone(all), func(*registry.Service) bool { return rnd.IntN(3) == 0 })
		if round%4 == 0 {
			if r != nil {
				r.end()
			}
			r = s.start(services...)
		} else {
			r.tell(number(len(services)), services...)
		}
		got := r.vips()
		for _, one := range services {
			if was, ok := at[one.Name]; got[one.Name] == "" || ok && was != got[one.Name] {
				t.Errorf("round %d: %s has %q, and had %q", round, one.Name, got[one.Name], was)
			}
			at[one.Name] = got[one.Name]
		}
		kept, err := alloc.VIPFile(s.cfg.State).Load()
		if err != nil {
			t.Fatal(err)
		}
		for _, v := range alloc.AssignedVIPs(kept) {
			if has, ok := got[v.Key]; ok && has != fmt.Sprint(v.V4, " ", v.V6) {
				t.Errorf("round %d: the disk has %+v, and the table %s", round, v, has)
			}
		}
	}
	taken := map[string]string{}
	for name, has := range at {
		for _, addr := range strings.Fields(has) {
			if other, ok := taken[addr]; ok {
				t.Errorf("%s and %s share %s", name, other, addr)
			}
			taken[addr] = name
		}
	}
}
