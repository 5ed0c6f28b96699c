package gateway

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"culvert.dev/internal/testnet"
	"culvert.dev/registry"
	"culvert.dev/registry/alloc"
	"culvert.dev/tunnel"
)

// A port is opened when its service comes and closed when it goes; the tunnels
// that came by it stand, and it is the same one when the service is back, and
// after a restart.
func TestServicePortsFollowTheTable(t *testing.T) {
	s := newSite(t, 20)
	mail, db, web := published("mail.test", greeter(t, "220 mail\r\n"), 25), published("db.test", greeter(t, "J\x00\x00\x00\x0a8.0")), published("web.test", greeter(t, "web"))
	r := s.start(mail, db)
	mailAddr, dbAddr := r.address("mail.test"), r.address("db.test")
	toMail, toDB := r.greeted(mailAddr, "220 mail\r\n"), r.greeted(dbAddr, "J\x00\x00\x00\x0a8.0")
	if n := r.loops.Budget.Used(); n < 2 {
		t.Errorf("%d descriptors are counted, want the two ports among them", n)
	}
	if got := r.registry.Table().PublishedAs(tunnel.MustParseName("mail.test")); len(got) != 1 || fmt.Sprint(got[0].Assigned) != mailAddr[strings.LastIndex(mailAddr, ":")+1:] {
		t.Errorf("the table says %v of mail.test, which is at %s", got, mailAddr)
	}

	r.change(db, web)
	if !refused(mailAddr) {
		t.Error("the port of a service that is gone accepts")
	}
	if got := r.registry.Table().PublishedAs(tunnel.MustParseName("mail.test")); got != nil {
		t.Errorf("the table says %v of a service that is gone", got)
	}
	if got := r.said()["mail.test:25"]; !strings.HasPrefix(got, PortKept) {
		t.Errorf("mail.test: %q, want its port to be kept", got)
	}
	if addr := netip.MustParseAddrPort(mailAddr); r.said()["web.test:0"] == fmt.Sprintf("%s %d", PortOpen, addr.Port()) || r.ports.guard.Check(addr, true) != nil {
		t.Error("the port is another's at once, or still ours to the guard")
	}
	r.greeted(r.address("web.test"), "web")
	r.still(toMail)
	r.still(toDB)

	r.change(mail, db, web)
	if got := r.address("mail.test"); got != mailAddr {
		t.Errorf("mail.test came back at %s, and was at %s", got, mailAddr)
	}
	r.greeted(mailAddr, "220 mail\r\n")
	r.still(toMail)
	before := r.said()
	r.end()
	if !refused(dbAddr) {
		t.Error("a port is open after the end")
	}
	if r.loops.Budget.Used() != 0 {
		t.Errorf("%d descriptors are counted after the end", r.loops.Budget.Used())
	}

	again := s.start(web, published("a.test", greeter(t, "a")), mail, db)
	after := again.said()
	delete(after, "a.test:0")
	if fmt.Sprint(before) != fmt.Sprint(after) {
		t.Errorf("after a restart: got %v, want %v", after, before)
	}
	again.greeted(mailAddr, "220 mail\r\n")
}

// A service that begins to tell its port, or no longer does, stays where it is,
// and so does who is waiting there; whether the state can be written or not.
func TestServicePortsOfAServiceThatTellsItsPort(t *testing.T) {
	t.Parallel()
	s := newSite(t, 20)
	ep := greeter(t, "hello")
	r := s.start(published("a.test", ep))
	addr := r.address("a.test")
	c := r.greeted(addr, "hello")
	r.change(published("a.test", ep, 25))
	if got := r.address("a.test"); got != addr || len(r.said()) != 1 {
		t.Errorf("a.test is at %s of %v, and was at %s", got, r.said(), addr)
	}
	_ = r.greeted(addr, "hello").Close()
	testnet.Eventually(t, soon, func() bool { return strings.Contains(r.log.String(), "target=a.test:25 ") }, "the new port is asked for")
	r.still(c)
	away := filepath.Dir(s.cfg.State)
	if err := os.Rename(away, away+".away"); err != nil {
		t.Fatal(err)
	}
	r.change(published("a.test", ep))
	if got := r.address("a.test"); got != addr {
		t.Errorf("without a state: a.test is at %s, and was at %s", got, addr)
	}
	_ = r.greeted(addr, "hello").Close()
	r.still(c)
	if err := os.Rename(away+".away", away); err != nil {
		t.Fatal(err)
	}
	testnet.Eventually(t, soon, func() bool {
		all, err := alloc.PortFile(s.cfg.State).Load()
		return err == nil && len(all) == 1 && all[0].Port == 0
	}, "the state is written when it can be")
}

// The outcome of a tunnel names the port it came by, and explain knows it.
func TestServicePortsAreExplained(t *testing.T) {
	s := newSite(t, 5)
	r := s.start(published("mail.test", greeter(t, "hello"), 25))
	addr := r.address("mail.test")
	c := r.greeted(addr, "hello")
	_ = c.Close()
	testnet.Eventually(t, soon, func() bool {
		return strings.Contains(r.log.String(), "msg=tunnel") || strings.Contains(r.log.String(), "listener="+addr)
	}, "the tunnel is logged")
	for _, want := range []string{"listener=" + addr, "proto=tcp", "target=mail.test:25", "service=mail.test"} {
		if !strings.Contains(r.log.String(), want) {
			t.Errorf("the log lacks %q", want)
		}
	}
	x := Explain(t.Context(), r.router, r.ports.listeners(), Query{Host: "any", Listener: addr})
	if x.Reason != "" || x.Proto != "tcp" || x.Service != "mail.test" || x.Pattern != "mail.test:25" {
		t.Errorf("explain: %+v", x)
	}
}

// Whoever may not have the service is cut off, before anything is dialed.
func TestServicePortsOfPrivateServices(t *testing.T) {
	s := newSite(t, 5)
	dialed := testnet.Discard(t)
	ep := registry.Endpoint{Addr: dialed.AddrPort().Addr(), Port: dialed.AddrPort().Port()}
	some, none := published("some.test", ep), published("none.test", ep)
	some.ExposedTo, none.Exposed = []string{"elsewhere"}, false
	r := s.start(some, none)
	if _, ok := r.said()["none.test:0"]; ok {
		t.Errorf("a private service has a port: %v", r.said())
	}
	r.wantReset(r.address("some.test"), tunnel.NotExposed)
	if dialed.Accepted() != 0 {
		t.Error("the service was dialed")
	}
}

// The number of an assigned port means nothing, though a service of the same
// name may have that very port.
func TestServicePortsAreNotPortsOfServices(t *testing.T) {
	s := newSite(t, 1)
	listed := published("a.test", greeter(t, "listed"), s.cfg.Range.First)
	listed.Publish = false
	rest := published("a.test", greeter(t, "rest"))
	rest.Name = "rest"
	r := s.start(listed, rest)
	r.greeted(r.address("a.test"), "rest")
}

// A new service passes over a port that another process has; one that had it
// before waits for it, and everybody is told.
func TestServicePortsHeldByOthers(t *testing.T) {
	t.Parallel()
	s := newSite(t, 5)
	a, b := published("a.test", greeter(t, "a")), published("b.test", greeter(t, "b"))
	plan := alloc.PortPlan{Range: s.cfg.Range, Now: time.Now()}
	would, _ := plan.Assign([]alloc.PortKey{{Protocol: "tcp", Service: "a.test"}}, nil)
	hold := func(addr string) net.Listener {
		ln, err := net.Listen("tcp", addr)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = ln.Close() })
		return ln
	}
	first := hold(s.cfg.listenAddress(would[0].Assigned))
	r := s.start(a)
	addr := r.address("a.test")
	if addr == first.Addr().String() {
		t.Fatalf("a.test has the port of another process, %s", addr)
	}
	r.greeted(addr, "a")
	r.end()

	second := hold(addr)
	r = s.start(b, a)
	r.greeted(r.address("b.test"), "b")
	status := r.Status().ServicePorts.Ports[0]
	if status.Name != "a.test" || status.State != PortHeld || status.Address != addr || !strings.Contains(status.Problem, "another process has the port") {
		t.Errorf("a port that is held: %+v", status)
	}
	if got := r.registry.Table().PublishedAs(tunnel.MustParseName("a.test")); got != nil {
		t.Errorf("the table says %v of a service whose port is held", got)
	}
	if log := r.log.String(); !strings.Contains(log, `msg="service has no port" service="tcp a.test"`) {
		t.Error("the log does not say whose port is held")
	}
	r.change(a, b, published("c.test", greeter(t, "c")))
	_ = second.Close()
	testnet.Eventually(t, soon, func() bool { return r.said()["a.test:0"] == "open "+addr[strings.LastIndex(addr, ":")+1:] }, "the port is taken when it is free")
	r.greeted(addr, "a")
	if n := strings.Count(r.log.String(), "service has no port"); n != 1 {
		t.Errorf("the log says %d times that a port is held", n)
	}
}

// Services for which there is no port are named; the others have theirs, and
// what is left for one that is gone is nobody else's.
func TestServicePortsExhausted(t *testing.T) {
	s := newSite(t, 2)
	ep := greeter(t, "hello")
	r := s.start(published("a.test", ep), published("b.test", ep), published("c.test", ep, 1, 2))
	got := r.said()
	if got["c.test:1"] != "full 0" || got["c.test:2"] != "full 0" || !strings.HasPrefix(got["a.test:0"], PortOpen) || !strings.HasPrefix(got["b.test:0"], PortOpen) {
		t.Errorf("got %v", got)
	}
	for _, want := range []string{`service="tcp c.test:1"`, `service="tcp c.test:2"`, fmt.Sprintf("no tcp port is free in %s: 2 of 2 are other services'", s.cfg.Range), "open=2 without=2"} {
		if !strings.Contains(r.log.String(), want) {
			t.Errorf("the log lacks %q", want)
		}
	}
	r.change(published("b.test", ep), published("c.test", ep, 1, 2))
	if got := r.said(); got["c.test:1"] != "full 0" || !strings.HasPrefix(got["a.test:0"], PortKept) {
		t.Errorf("with a.test gone: got %v", got)
	}
}

// A state that can't be understood ends the start, and stays as it is.
func TestServicePortsOfABrokenState(t *testing.T) {
	s := newSite(t, 2)
	const broken = `{"version": 1, "ports": [{"proto`
	if err := os.WriteFile(s.cfg.State, []byte(broken), 0o600); err != nil {
		t.Fatal(err)
	}
	cfg := Config{Sources: []registry.Source{make(feed)}, ServicePorts: &s.cfg, Listeners: []Listener{{Address: s.cfg.Address.String() + ":0", Protocols: []tunnel.Protocol{&tunnel.Fixed{}}}}}
	_, err := New(t.Context(), cfg)
	var se *StateError
	if !errors.As(err, &se) || !strings.Contains(err.Error(), "unexpected end of JSON") {
		t.Errorf("got %v, want a StateError", err)
	}
	if data, _ := os.ReadFile(s.cfg.State); string(data) != broken {
		t.Errorf("the state is %q now", data)
	}
	s.cfg.State = filepath.Join(t.TempDir(), "missing", "ports.json")
	if _, err := New(t.Context(), cfg); !errors.As(err, &se) {
		t.Errorf("a state that can't be written: %v", err)
	}
}

// What can't be kept is not given: a new service gets a port when the state can
// be written, and those that have theirs don't notice.
func TestServicePortsWhenTheStateCannotBeWritten(t *testing.T) {
	t.Parallel()
	s := newSite(t, 9)
	folder := filepath.Join(t.TempDir(), "state")
	if err := os.Mkdir(folder, 0o700); err != nil {
		t.Fatal(err)
	}
	s.cfg.State = filepath.Join(folder, "ports.json")
	ep := greeter(t, "hello")
	r := s.start(published("a.test", ep))
	addr := r.address("a.test")
	if err := os.Rename(folder, folder+".away"); err != nil {
		t.Fatal(err)
	}
	r.change(published("a.test", ep), published("b.test", ep))
	if got := r.said()["b.test:0"]; got != "failed 0" {
		t.Errorf("b.test: got %q, want none", got)
	}
	r.greeted(addr, "hello")
	if err := os.Rename(folder+".away", folder); err != nil {
		t.Fatal(err)
	}
	testnet.Eventually(t, soon, func() bool { return strings.HasPrefix(r.said()["b.test:0"], PortOpen) }, "b.test gets its port")
	want := r.said()
	r.end()
	if got := s.start(published("a.test", ep), published("b.test", ep)).said(); fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("after a restart: got %v, want %v", got, want)
	}
}

// Services come and go by chance, the gateway is restarted now and then: a
// service that stays is always at its port, and answers there.
func TestServicePortsByChance(t *testing.T) {
	t.Parallel()
	s := newSite(t, 40)
	rnd := rand.New(rand.NewPCG(1, 2))
	var all []*registry.Service
	for i := range 12 {
		all = append(all, published(fmt.Sprintf("s%d.test", i), greeter(t, fmt.Sprintf("hello %02d", i))))
	}
	at := map[string]string{}
	var r *running
	for round := range 8 {
		services := slices.DeleteFunc(slices.Clone(all), func(*registry.Service) bool { return rnd.IntN(3) == 0 })
		if round%4 == 0 {
			if r != nil {
				r.end()
			}
			r = s.start(services...)
		} else {
			r.change(services...)
		}
		for _, one := range services {
			addr := r.address(one.Name)
			if was, ok := at[one.Name]; ok && was != addr {
				t.Errorf("round %d: %s is at %s, and was at %s", round, one.Name, addr, was)
			}
			at[one.Name] = addr
			var n int
			_, _ = fmt.Sscanf(one.Name, "s%d.test", &n)
			_ = r.greeted(addr, fmt.Sprintf("hello %02d", n)).Close()
		}
	}
}

// A thousand ports open and close at once; each costs a descriptor and a
// goroutine, and nothing is left of them.
func TestAThousandServicePorts(t *testing.T) {
	const n = 1000
	s := newSite(t, n)
	ep := greeter(t, "hello")
	var all []*registry.Service
	for i := range n {
		all = append(all, published(fmt.Sprintf("s%d.test", i), ep))
	}
	r := s.start(all[0])
	goroutines, descriptors := runtime.NumGoroutine(), r.loops.Budget.Used()
	r.change(all...)
	for name, state := range r.said() {
		if !strings.HasPrefix(state, PortOpen) {
			t.Fatalf("%s: %s", name, state)
		}
	}
	if got := r.loops.Budget.Used() - descriptors; got != n-1 {
		t.Errorf("%d descriptors are counted for %d ports", got, n-1)
	}
	if got := runtime.NumGoroutine() - goroutines; got > n+10 {
		t.Errorf("%d goroutines for %d ports", got, n-1)
	}
	c := r.greeted(r.address("s7.test"), "hello")
	_ = r.greeted(r.address("s999.test"), "hello").Close()
	r.change(all[0])
	r.still(c)
	testnet.Eventually(t, soon, func() bool {
		return runtime.NumGoroutine() < goroutines+10 && r.loops.Budget.Used() <= descriptors+2
	}, "the ports are given back")
}
