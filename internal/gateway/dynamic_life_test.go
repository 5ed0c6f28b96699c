package gateway

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"culvert.dev/internal/testnet"
	"culvert.dev/internal/udp"
	"culvert.dev/registry"
	"culvert.dev/tunnel"
)

// Listeners come and go; the tunnels that came by one stand, and one that stays
// keeps its socket while what it leads to changes.
func TestFrontsFollowTheTable(t *testing.T) {
	e := newEdge(t)
	base := e.loops.Budget.Used()
	a, b := greeter(t, "a"), greeter(t, "b")
	one, two := e.listener("one", registry.TCP, section("one", "", to(a))), e.listener("two", registry.TCP, section("two", "", to(b)))
	e.have(one, two)
	if n := e.loops.Budget.Used() - base; n != 2 {
		t.Errorf("%d descriptors are counted, want 2", n)
	}
	if e.inbound.guard.Check(netip.AddrPortFrom(e.addr, one.Port), true) == nil {
		t.Error("the guard does not know the listener")
	}
	toOne, toTwo := e.greeted(e.at(one.Port), "a"), e.greeted(e.at(two.Port), "b")
	socket := e.inbound.open["one"].stream
	e.have(with(one, section("other", "", to(b))))
	if e.inbound.open["one"].stream != socket {
		t.Error("a listener that stays was opened again")
	}
	if !refused(e.at(two.Port)) {
		t.Error("a listener that is gone accepts")
	}
	if got := e.plainly(one.Port); got != "b" {
		t.Errorf("the listener leads to %s, want what it has now", got)
	}
	e.still(toOne)
	e.still(toTwo)
	if e.inbound.guard.Check(netip.AddrPortFrom(e.addr, two.Port), true) != nil {
		t.Error("the guard still knows a listener that is gone")
	}

	// Another name or another protocol is another listener, at the same port.
	renamed, changed := *one, *two
	renamed.Name, changed.Protocol = "uno", registry.HTTP
	e.have(&renamed, &changed)
	if got := e.plainly(one.Port); got != "a" {
		t.Errorf("got %s", got)
	}
	e.have(&renamed, two)
	if got := e.plainly(two.Port); got != "b" {
		t.Errorf("got %s", got)
	}
	for name, err := range e.ListenerErrors() {
		if err != nil {
			t.Errorf("listener %s: %v", name, err)
		}
	}
	e.still(toOne)
	e.still(toTwo)
	e.have()
	if !refused(e.at(one.Port)) || len(e.ListenerErrors()) != 0 {
		t.Error("listeners are open and should not be")
	}
	_, _ = toOne.Close(), toTwo.Close()
	testnet.Eventually(t, soon, func() bool { return e.loops.Budget.Used() == base }, "every descriptor is given back")
}

// A port that is taken is said, with who has it, and had once it is free.
func TestFrontPortsThatAreTaken(t *testing.T) {
	t.Parallel()
	e := newEdge(t)
	<-e.ListenersChanged() // the first table
	ep := greeter(t, "h")
	taken := e.listener("taken", registry.TCP, section("taken", "", to(ep)))
	other, err := net.Listen("tcp", e.at(taken.Port))
	if err != nil {
		t.Fatal(err)
	}
	fine := e.listener("fine", registry.TCP, section("fine", "", to(ep)))
	wild := &registry.Listener{Name: "wild", Protocol: registry.TCP, Port: fine.Port}
	again := with(fine)
	again.Name = "again"
	namesake := e.listener("fine", registry.TCP)
	nowhere := &registry.Listener{Name: "nowhere", Protocol: registry.TCP, Address: netip.MustParseAddr("192.0.2.1"), Port: 4711}
	strange := e.listener("strange", "sctp")
	e.have(fine, taken, wild, again, namesake, nowhere, strange)
	errs := e.ListenerErrors()
	for name, want := range map[string]string{
		"taken": "another process has it", "wild": `listener "fine" has the port at other addresses`, "again": `listener "fine"`,
		"nowhere": "192.0.2.1:4711", "strange": `protocol "sctp"`,
	} {
		if errs[name] == nil || !strings.Contains(errs[name].Error(), want) {
			t.Errorf("%s: got %v, want %q", name, errs[name], want)
		}
	}
	if err, tried := errs["fine"]; !tried || err != nil || len(errs) != 6 {
		t.Errorf("got %v", errs)
	}
	select {
	case <-e.ListenersChanged():
	case <-time.After(soon):
		t.Error("nobody is told")
	}
	if got := e.plainly(fine.Port); got != "h" {
		t.Errorf("the one that works: got %s", got)
	}
	states := map[string]int{}
	for _, s := range e.Status().SourceListeners {
		states[s.State]++
	}
	if states[ListenerOpen] != 1 || states[ListenerFailed] != 3 || states[ListenerRefused] != 3 {
		t.Errorf("status: %v", states)
	}
	_ = other.Close()
	select { // it is tried again by itself
	case <-e.ListenersChanged():
	case <-time.After(soon):
		t.Error("nobody is told that the port was free")
	}
	if got := e.plainly(taken.Port); got != "h" {
		t.Errorf("the port that is free now: got %s", got)
	}
}

// A listener that is named after another Gateway, as the first of several that share it
// goes or comes, keeps its socket, and what is open stands; the log has the new name.
func TestFrontsChangeTheirNames(t *testing.T) {
	e := newEdge(t)
	backend := func(name string) registry.Endpoint {
		return tlsBackend(t, &tls.Config{Certificates: []tls.Certificate{e.issue(name).TLS}}, name[:1])
	}
	a, b := section("gateway/x/a/tls", "a.test", to(backend("a.test"))), section("gateway/x/b/tls", "b.test", to(backend("b.test")))
	shared := e.listener("x/a/tls/443", registry.TLS, a, b)
	e.have(shared)
	socket := e.inbound.open[shared.Name].stream
	kept, err := e.dialTLS(shared.Port, "b.test")
	if err != nil {
		t.Fatal(err)
	}
	hears(kept, 1)
	select {
	case <-e.ListenersChanged():
	default:
	}
	alone := with(shared, b)
	alone.Name = "x/b/tls/443"
	e.have(alone)
	if o := e.inbound.open[alone.Name]; o == nil || o.stream != socket || len(e.inbound.open) != 1 {
		t.Fatal("the socket was closed")
	}
	select {
	case <-e.ListenersChanged():
	default:
		t.Error("nobody is told of the name")
	}
	if errs := e.ListenerErrors(); len(errs) != 1 || errs[alone.Name] != nil {
		t.Errorf("got %v", errs)
	}
	works(t, kept)
	if got := e.asked(alone.Port, "a.test"); got != "cut" {
		t.Errorf("the Gateway that is gone: got %s", got)
	}
	if got := e.asked(alone.Port, "b.test"); got != "b" {
		t.Errorf("the one that stays: got %s", got)
	}
	e.logs("listener=x/b/tls/443 ", "target=a.test", "reason=no-route")

	// Two that change their names with each other.
	other := e.listener("x/c/tls/444", registry.TLS, a)
	e.have(alone, other)
	one, two := *alone, *other
	one.Name, two.Name = other.Name, alone.Name
	e.have(&one, &two)
	if o := e.inbound.open[one.Name]; o == nil || o.stream != socket || e.asked(one.Port, "b.test") != "b" || e.asked(two.Port, "a.test") != "a" {
		t.Error("the names went with the sockets")
	}
	works(t, kept)
}

// Of UDP another name is another listener: no session goes on to where the first one led.
func TestFrontUDPThatChangesItsName(t *testing.T) {
	t.Parallel()
	e := newEdge(t)
	one := e.listener("one", registry.UDP, section("one", "", to(udpEcho(t, "a"))))
	e.have(one)
	c := e.dialUDP(one.Port)
	if got := query(c, soon); got != "a?" {
		t.Fatalf("got %s", got)
	}
	two := with(one, section("two", "", to(udpEcho(t, "b"))))
	two.Name = "two"
	e.have(two)
	testnet.Eventually(t, soon, func() bool { return query(c, time.Second) == "b?" }, "the client is led to the second")
}

// What the configuration has stays its own.
func TestFrontsStealNothing(t *testing.T) {
	e := newEdge(t)
	ep := greeter(t, "f")
	fixed := &registry.Service{Name: "f.test", Names: []tunnel.Pattern{pattern("f.test")}, Ports: []uint16{1}, Endpoints: []registry.Endpoint{ep}, Exposed: true}
	port := e.port()
	r := launch(t, Config{Listeners: []Listener{{Address: e.at(port), Protocols: []tunnel.Protocol{&tunnel.Fixed{To: tunnel.MustParseName("f.test"), Port: 1}}}}}, fixed)
	other := &edge{running: r, addr: e.addr, next: e.next, ca: e.ca}
	l := other.listener("mine", registry.TCP, section("mine", "", to(greeter(t, "x"))))
	l.Port = port
	other.say(registry.Snapshot{Services: []*registry.Service{fixed}, Listeners: []*registry.Listener{l}})
	if err := r.ListenerErrors()["mine"]; err == nil || !strings.Contains(err.Error(), "the configured listener "+e.at(port)+" has it") {
		t.Errorf("got %v", err)
	}
	if got := other.plainly(port); got != "f" {
		t.Errorf("the configured listener: got %s", got)
	}
}

// udpEcho answers with its name and what it got.
func udpEcho(t *testing.T, name string) registry.Endpoint {
	t.Helper()
	c, err := net.ListenUDP("udp", net.UDPAddrFromAddrPort(netip.MustParseAddrPort("127.0.0.1:0")))
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	wg.Go(func() {
		b := make([]byte, 2048)
		for {
			n, from, err := c.ReadFromUDPAddrPort(b)
			if err != nil {
				return
			}
			_, _ = c.WriteToUDPAddrPort(append([]byte(name), b[:n]...), from)
		}
	})
	t.Cleanup(func() { _ = c.Close(); wg.Wait() })
	ap := c.LocalAddr().(*net.UDPAddr).AddrPort()
	return registry.Endpoint{Addr: ap.Addr(), Port: ap.Port()}
}

// query sends a datagram until an answer comes, or for as long as patience.
func query(c net.Conn, patience time.Duration) string {
	b := make([]byte, 64)
	for end := time.Now().Add(patience); time.Now().Before(end); {
		_, _ = c.Write([]byte("?"))
		_ = c.SetReadDeadline(time.Now().Add(200 * time.Millisecond))
		if n, err := c.Read(b); err == nil {
			return string(b[:n])
		}
	}
	return "silence"
}

func (e *edge) dialUDP(port uint16) net.Conn {
	e.t.Helper()
	c, err := net.Dial("udp", e.at(port))
	if err != nil {
		e.t.Fatal(err)
	}
	e.t.Cleanup(func() { _ = c.Close() })
	return c
}

// Datagrams: by sessions, whose share is by weight, and which end with their
// listener and no other one.
func TestFrontUDP(t *testing.T) {
	t.Parallel()
	e := newEdge(t)
	base := e.loops.Budget.Used()
	backend := func(hello string, w uint32) registry.Backend {
		return registry.Backend{Weight: w, Service: &registry.Service{Name: hello, Endpoints: []registry.Endpoint{udpEcho(t, hello)}}}
	}
	one := e.listener("one", registry.UDP, section("one", "", ruled("r", nil, backend("a", 3), backend("b", 1))))
	two := e.listener("two", registry.UDP, section("two", "", ruled("s", nil, backend("c", 1))))
	broken := e.listener("broken", registry.UDP, section("broken", "", ruled("t", nil, registry.Backend{Weight: 1, Broken: "gone"})))
	same := &registry.Listener{Name: "same", Protocol: registry.TCP, Address: e.addr, Port: one.Port, Sections: []*registry.Section{section("same", "", to(greeter(t, "t")))}}
	e.have(one, two, broken, same)
	got := map[string]int{}
	for range 40 {
		got[query(e.dialUDP(one.Port), soon)]++
	}
	if got["a?"] < 29 || got["a?"] > 31 || got["a?"]+got["b?"] != 40 {
		t.Errorf("got %v", got)
	}
	if got := e.plainly(one.Port); got != "t" {
		t.Errorf("TCP at the same port: got %s", got)
	}
	if got := query(e.dialUDP(broken.Port), 300*time.Millisecond); got != "silence" {
		t.Errorf("a broken backend: got %s", got)
	}
	e.logs("proto=udp listener=broken ", "reason=no-endpoint")

	stays, goes := e.dialUDP(two.Port), e.dialUDP(one.Port)
	if query(stays, soon) != "c?" || query(goes, soon) == "silence" {
		t.Error("a session does not work")
	}
	e.have(with(two, section("two", "", ruled("s", nil, backend("d", 1)))))
	if got := query(stays, soon); got != "c?" {
		t.Errorf("a session that stands: got %s, want where it was", got)
	}
	if got := query(e.dialUDP(two.Port), soon); got != "d?" {
		t.Errorf("a session after the change: got %s", got)
	}
	if got := query(goes, 300*time.Millisecond); got != "silence" {
		t.Errorf("a session of a listener that is gone: got %s", got)
	}
	testnet.Eventually(t, soon, func() bool {
		c, err := net.ListenUDP("udp", net.UDPAddrFromAddrPort(netip.AddrPortFrom(e.addr, one.Port)))
		if err == nil {
			_ = c.Close()
		}
		return err == nil
	}, "the port is free")
	e.have()
	testnet.Eventually(t, soon, func() bool { return e.loops.Budget.Used() == base }, "every descriptor is given back")
}

// Listeners come and go, and sections change, while clients ask all the time:
// none that is there all along fails once.
func TestFrontsUnderTraffic(t *testing.T) {
	t.Parallel()
	e := newEdge(t)
	ends := []*registry.TLSTermination{e.ends("a.test"), e.ends("a.test")}
	passed := tlsBackend(t, &tls.Config{Certificates: []tls.Certificate{e.issue("p.test").TLS}}, "p")
	ep, dgram := greeter(t, "h"), udpEcho(t, "u")
	sections := func(i int) []*registry.Section {
		end, pass := section("end", "a.test", to(ep, "a.test")), section("pass", "*.test", to(passed, "p.test"))
		end.TLS = ends[i%2]
		return []*registry.Section{end, pass}
	}
	mixed := e.listener("mixed", registry.TLS)
	tcp := e.listener("tcp", registry.TCP, section("tcp", "", to(ep)))
	dg := e.listener("udp", registry.UDP, section("udp", "", to(dgram)))
	comes := e.listener("comes", registry.TCP, section("comes", "", to(ep)))
	comesUDP := e.listener("comes-udp", registry.UDP, section("comes-udp", "", to(dgram)))
	e.have(with(mixed, sections(0)...), tcp, dg)
	session := e.dialUDP(dg.Port)

	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	var clients sync.WaitGroup
	var asked atomic.Int64
	client := func(what, want string, ask func() string) {
		clients.Go(func() {
			for ctx.Err() == nil {
				if got := ask(); got != want {
					t.Errorf("%s: got %s, want %s", what, got, want)
					return
				}
				asked.Add(1)
			}
		})
	}
	client("ended", "h", func() string { return e.asked(mixed.Port, "a.test") })
	client("passed", "p", func() string { return e.asked(mixed.Port, "p.test") })
	client("tcp", "h", func() string { return e.plainly(tcp.Port) })
	client("udp", "u?", func() string { return query(session, soon) })
	clients.Go(func() { // who asks what is not always there
		for ctx.Err() == nil {
			_ = e.plainly(comes.Port)
			_ = query(e.dialUDP(comesUDP.Port), 10*time.Millisecond)
		}
	})
	for i := range 20 {
		all := []*registry.Listener{with(mixed, sections(i)...), tcp, dg}
		if i%2 == 0 {
			all = append(all, comes, comesUDP)
		}
		e.have(all...)
	}
	n := asked.Load()
	testnet.Eventually(t, soon, func() bool { return asked.Load() > n+20 }, "clients are served after the last change")
	stop()
	clients.Wait()
}

// Thousands of rules are one map.
func TestFrontManyRules(t *testing.T) {
	e := newEdge(t)
	passed := tlsBackend(t, &tls.Config{Certificates: []tls.Certificate{e.issue("*.many.test").TLS}}, "m")
	backend := registry.Backend{Weight: 1, Service: &registry.Service{Name: "m", Endpoints: []registry.Endpoint{passed}}}
	s := section("many", "*.many.test")
	const n = 5000
	for i := range n {
		name := fmt.Sprintf("r%d.many.test", i)
		s.Rules = append(s.Rules, ruled(name, []string{name}, backend))
	}
	l := e.listener("many", registry.TLS, s)
	e.have(l)
	for _, i := range []int{0, 1, 777, n - 1} {
		if got := e.asked(l.Port, fmt.Sprintf("r%d.many.test", i)); got != "m" {
			t.Errorf("rule %d: got %s", i, got)
		}
	}
	if got := e.asked(l.Port, fmt.Sprintf("r%d.many.test", n)); got != "cut" {
		t.Errorf("no rule: got %s", got)
	}
}

// A drain takes the listeners of sources as all others.
func TestFrontsDrain(t *testing.T) {
	t.Parallel()
	e := newEdge(t)
	l, dg := e.listener("tcp", registry.TCP, section("tcp", "", to(greeter(t, "h")))), e.listener("udp", registry.UDP, section("udp", "", to(udpEcho(t, "u"))))
	e.have(l, dg)
	c, session := e.greeted(e.at(l.Port), "h"), e.dialUDP(dg.Port)
	if got := query(session, soon); got != "u?" {
		t.Errorf("got %s", got)
	}
	done := make(chan struct{})
	go func() { e.end(); close(done) }()
	_ = c.SetReadDeadline(time.Now().Add(soon))
	if _, err := c.Read(make([]byte, 1)); err == nil || errors.Is(err, io.EOF) {
		t.Errorf("a tunnel that is aborted ends with %v", err)
	}
	<-done
	if _, err := net.Dial("tcp", e.at(l.Port)); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("after the end: %v", err)
	}
	if conn, err := udp.Listen(t.Context(), e.at(dg.Port)); err != nil {
		t.Error(err)
	} else {
		_ = conn.Close()
	}
}

// Each listener takes a descriptor of those for clients, and there is none left
// for more than those.
func TestFrontsTakeDescriptors(t *testing.T) {
	e := newEdge(t)
	budget := e.loops.Budget
	const reservedForRefusals = 32
	budget.Limit = budget.Used() + reservedForRefusals + 1
	ep := greeter(t, "h")
	one, two := e.listener("one", registry.TCP, section("one", "", to(ep))), e.listener("two", registry.UDP, section("two", "", to(ep)))
	e.have(one, two)
	if errs := e.ListenerErrors(); errs["one"] != nil || errs["two"] == nil || !strings.Contains(errs["two"].Error(), "every descriptor") {
		t.Errorf("got %v", errs)
	}
	e.have(two)
	if errs := e.ListenerErrors(); errs["two"] != nil || len(errs) != 1 {
		t.Errorf("after the first has gone: %v", errs)
	}
}
