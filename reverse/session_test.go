package reverse

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"culvert.dev/tunnel"
)

// pollLimit is how long a test waits for what must come.
const pollLimit = time.Minute

// eventually waits until ok returns true.
func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	deadline := time.Now().Add(pollLimit)
	for !ok() {
		if time.Now().After(deadline) {
			t.Fatalf("%s: not after %v", what, pollLimit)
		}
		<-time.After(5 * time.Millisecond)
	}
}

// A testGateway takes sessions over TCP on loopback, from an owner.
type testGateway struct {
	*Server
	groups  *Groups
	owner   string
	relay   *tunnel.Relay
	mu      sync.Mutex
	ends    []tunnel.Outcome
	serving sync.WaitGroup
	ctx     context.Context
	pair    func(context.Context) (near, far net.Conn, err error) // nil means over TCP
	wrap    func(net.Conn) net.Conn                               // of the gateway's end; may be nil
	first   []byte                                                // that requests of ask begin with
}

func newTestGateway(t *testing.T) *testGateway {
	t.Helper()
	g := &testGateway{groups: &Groups{Authorize: anything}, owner: "spiffe://corp.example/edge", relay: &tunnel.Relay{}}
	ctx, stop := context.WithCancel(context.Background())
	g.ctx = ctx
	g.Server = &Server{Groups: g.groups, Router: &tunnel.Router{Relay: g.relay, Observe: func(o *tunnel.Outcome) {
		g.mu.Lock()
		defer g.mu.Unlock()
		g.ends = append(g.ends, *o)
	}}}
	t.Cleanup(func() {
		stop()
		g.serving.Wait()
		_ = g.relay.Close()
	})
	return g
}

// outcomes returns the reasons of the sessions that have ended.
func (g *testGateway) outcomes() (all []tunnel.Reason) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, o := range g.ends {
		all = append(all, o.Reason)
	}
	return all
}

// Dial implements tunnel.Transport: it is how connectors reach g.
func (g *testGateway) Dial(ctx context.Context, ep *tunnel.Endpoint, _ *tunnel.Request) (net.Conn, error) {
	if g.ctx.Err() != nil {
		return nil, errors.New("the gateway is gone")
	}
	pair := g.pair
	if pair == nil {
		pair = tcpPair
	}
	near, far, err := pair(ctx)
	if err != nil {
		return nil, err
	}
	refused := make(chan error, 1)
	accepted := make(chan struct{})
	req := by(g.owner)
	req.Name, req.Port, req.Start = tunnel.MustParseName(ep.Host), ep.Addr.Port(), time.Now()
	req.Source = netip.MustParseAddrPort("127.0.0.1:1")
	req.Refuse = func(err error) { refused <- err }
	req.Accept = func() (tunnel.Stream, error) {
		close(accepted)
		if g.wrap != nil {
			far = g.wrap(far)
		}
		return far.(tunnel.Stream), nil
	}
	g.serving.Go(func() { g.ServeTunnel(g.ctx, req) })
	select {
	case err := <-refused:
		_ = near.Close()
		_ = far.Close()
		return nil, err
	case <-accepted:
		return near, nil
	}
}

func (*testGateway) Check(*tunnel.Endpoint) error { return nil }

func (*testGateway) Info() tunnel.TransportInfo { return tunnel.TransportInfo{} }

func tcpPair(ctx context.Context) (near, far net.Conn, err error) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, nil, err
	}
	defer ln.Close()
	c, err := new(net.Dialer).DialContext(ctx, "tcp", ln.Addr().String())
	if err != nil {
		return nil, nil, err
	}
	s, err := ln.Accept()
	if err != nil {
		_ = c.Close()
		return nil, nil, err
	}
	return c, s, nil
}

// echo answers each request with its name, and then with what comes.
var echo = tunnel.HandlerFunc(func(_ context.Context, req *tunnel.Request) {
	s, err := req.Accept()
	if err != nil {
		return
	}
	defer s.Close()
	_, _ = io.WriteString(s, req.Target()+"\n")
	_, _ = io.Copy(s, s)
})

// run runs c until the test ends, or stop is called.
func run(t *testing.T, c *Client) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = c.Run(ctx)
	}()
	stop = func() {
		cancel()
		<-done
	}
	t.Cleanup(stop)
	return stop
}

// client returns a Client with a session to each gateway.
func client(names []Registration, gateways ...*testGateway) *Client {
	c := &Client{Handler: echo}
	for i, g := range gateways {
		c.Gateways = append(c.Gateways, Gateway{Name: "gw" + string(rune('1'+i)), Transport: g})
	}
	c.SetNames(names)
	return c
}

// dial opens a stream to name on g, and returns it with the line that the connector has
// sent.
func (g *testGateway) dial(t *testing.T, name string, port uint16) (net.Conn, string, error) {
	t.Helper()
	n := tunnel.MustParseName(name)
	s := g.groups.Service(n)
	if s == nil {
		return nil, "", errors.New("no such name")
	}
	ctx, cancel := context.WithTimeout(t.Context(), pollLimit)
	defer cancel()
	c, err := g.groups.Transport(s.Endpoints[0].Group, false).Dial(ctx, &tunnel.Endpoint{Addr: netip.AddrPortFrom(netip.Addr{}, port)}, &tunnel.Request{Name: n, Port: port})
	if err != nil {
		return nil, "", err
	}
	_ = c.SetDeadline(time.Now().Add(pollLimit))
	line, err := bufio.NewReaderSize(io.LimitReader(c, int64(len(name)+7)), 16).ReadString('\n')
	return c, strings.TrimSpace(line), err
}

func (g *testGateway) members(name string) int {
	for _, l := range g.groups.List() {
		if l.Name.String() == name {
			return len(l.Members)
		}
	}
	return 0
}

func TestAConnectorServesItsNames(t *testing.T) {
	g := newTestGateway(t)
	c := client([]Registration{named("cam.edge.example"), named("*.sites.example")}, g)
	stop := run(t, c)
	eventually(t, "the names are registered", func() bool { return g.members("*.sites.example") == 1 })
	for name, port := range map[string]uint16{"cam.edge.example": 443, "a.b.sites.example": 8443} {
		conn, line, err := g.dial(t, name, port)
		want := net.JoinHostPort(name, map[bool]string{true: "443", false: "8443"}[port == 443])
		if err != nil || line != want {
			t.Fatalf("%s: got %q and %v, want %q", name, line, err, want)
		}
		if _, err := io.WriteString(conn, "hello"); err != nil {
			t.Fatal(err)
		}
		if err := conn.(tunnel.Stream).CloseWrite(); err != nil {
			t.Fatal(err)
		}
		if got, err := io.ReadAll(conn); string(got) != "hello" || err != nil {
			t.Errorf("%s: got %q and %v back", name, got, err)
		}
		_ = conn.Close()
	}
	if list := g.Sessions(); len(list) != 1 || list[0].Owner != g.owner || len(list[0].Names) != 2 || list[0].In == 0 || list[0].Out == 0 {
		t.Errorf("the sessions are %+v", list)
	}
	if state := c.State(); len(state) != 1 || !state[0].Connected || state[0].Replica != g.Replica() {
		t.Errorf("the state is %+v", state)
	}
	c.SetNames([]Registration{named("other.edge.example")})
	eventually(t, "other names are registered", func() bool { return g.members("other.edge.example") == 1 && g.members("cam.edge.example") == 0 })
	stop()
	eventually(t, "the session has left", func() bool { return g.members("other.edge.example") == 0 && len(g.Sessions()) == 0 })
}

// A connector that loses its gateway connects again, with all names.
func TestAConnectorComesBack(t *testing.T) {
	g := newTestGateway(t)
	run(t, client([]Registration{named("cam.edge.example")}, g))
	for range 3 {
		eventually(t, "the name is registered", func() bool { return g.members("cam.edge.example") == 1 && len(g.Sessions()) == 1 })
		before := g.Sessions()[0].ID
		g.relay.EndRecords(tunnel.Killed, func(tunnel.Record) bool { return true })
		eventually(t, "another session is there", func() bool {
			list := g.Sessions()
			return len(list) == 1 && list[0].ID != before && g.members("cam.edge.example") == 1
		})
	}
}

// Of two gateways that drain or go one after the other, there is always one that reaches
// the connector.
func TestDrainMovesToAnotherGateway(t *testing.T) {
	first, second := newTestGateway(t), newTestGateway(t)
	c := client([]Registration{named("cam.edge.example")}, first, second)
	run(t, c)
	both := func() bool { return first.members("cam.edge.example") == 1 && second.members("cam.edge.example") == 1 }
	eventually(t, "both have a session", both)
	conn, _, err := first.dial(t, "cam.edge.example", 443)
	if err != nil {
		t.Fatal(err)
	}
	first.Drain()
	eventually(t, "the session drains", func() bool { s := c.State()[0]; return s.Error != "" || s.Draining })
	if _, err := io.WriteString(conn, "x"); err != nil {
		t.Errorf("a stream of a session that drains: %v", err)
	}
	if _, err := conn.Read(make([]byte, 1)); err != nil {
		t.Errorf("a stream of a session that drains: %v", err)
	}
	if n := len(first.Sessions()); n != 1 {
		t.Errorf("a session with a stream has ended: %d are open", n)
	}
	_ = conn.Close()
	eventually(t, "the session has ended with its last stream", func() bool { return len(first.Sessions()) == 0 })
	if got := first.outcomes(); !slices.Contains(got, tunnel.Done) || slices.Contains(got, tunnel.Reset) {
		t.Errorf("the session ended with %q, want %q", got, tunnel.Done)
	}
	if _, line, err := second.dial(t, "cam.edge.example", 443); err != nil || line != "cam.edge.example:443" {
		t.Errorf("the second gateway: got %q and %v", line, err)
	}
}

// A connector that drains tells its gateways, which use other connectors for what is new.
func TestAConnectorDrains(t *testing.T) {
	g := newTestGateway(t)
	c := client([]Registration{named("cam.edge.example")}, g)
	run(t, c)
	eventually(t, "the name is registered", func() bool { return g.members("cam.edge.example") == 1 })
	conn, _, err := g.dial(t, "cam.edge.example", 443)
	if err != nil {
		t.Fatal(err)
	}
	c.Drain()
	eventually(t, "the gateway knows", func() bool { l := g.Sessions(); return len(l) == 1 && l[0].Draining })
	if _, err := io.WriteString(conn, "x"); err != nil {
		t.Fatal(err)
	}
	_ = conn.Close()
	eventually(t, "the session has ended", func() bool { return len(g.Sessions()) == 0 })
}

// One session for each replica: where a balancer leads to the same one again, no name joins.
func TestOneSessionForEachReplica(t *testing.T) {
	g := newTestGateway(t)
	c := client([]Registration{named("cam.edge.example")}, g, g)
	run(t, c)
	eventually(t, "one slot has led to the same replica", func() bool {
		s := c.State()
		return len(s) == 2 && s[0].Connected != s[1].Connected && strings.Contains(s[0].Error+s[1].Error, "led to a replica")
	})
	eventually(t, "the name has one session", func() bool { return g.members("cam.edge.example") == 1 })
}

// A dyingConn is the gateway's end of a path. Once the path is dead, nothing arrives, not even
// an end, and writes are lost or do not return.
type dyingConn struct {
	net.Conn
	after  int // writes; 0 means that die is called
	stuck  bool
	writes atomic.Int32
	once   sync.Once
	dead   chan struct{}
	closed sync.Once
	gone   chan struct{} // closed by Close
}

func (c *dyingConn) die() { c.once.Do(func() { close(c.dead) }) }

func (c *dyingConn) isDead() bool {
	select {
	case <-c.dead:
		return true
	default:
		return false
	}
}

func (c *dyingConn) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	if c.isDead() {
		<-c.gone
		return 0, net.ErrClosed
	}
	return n, err
}

func (c *dyingConn) Write(b []byte) (int, error) {
	switch {
	case !c.isDead():
		n, err := c.Conn.Write(b)
		if int(c.writes.Add(1)) == c.after {
			c.die()
		}
		return n, err
	case c.stuck:
		<-c.gone
		return 0, net.ErrClosed
	}
	return len(b), nil
}

func (c *dyingConn) Close() error {
	c.closed.Do(func() { close(c.gone) })
	if c.isDead() {
		return nil
	}
	return c.Conn.Close()
}

func (c *dyingConn) CloseWrite() error { return nil }

// A path that dies without a FIN is found by both sides within 10 s, which then do without it:
// whatever the session was about to do, and also where writes do not return.
func TestDeadPathsAreFound(t *testing.T) {
	for _, test := range []struct {
		name  string
		after int
		stuck bool
	}{
		{"writes are lost", 0, false},
		{"writes do not return", 0, true},
		{"after the welcome", 1, false},
		{"after the welcome, and writes do not return", 1, true},
	} {
		t.Run(test.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				g := newTestGateway(t)
				g.pair = func(context.Context) (near, far net.Conn, err error) {
					near, far = net.Pipe()
					return near, far, nil
				}
				var mu sync.Mutex
				var paths []*dyingConn
				g.wrap = func(c net.Conn) net.Conn {
					mu.Lock()
					defer mu.Unlock()
					d := &dyingConn{Conn: c, stuck: test.stuck, dead: make(chan struct{}), gone: make(chan struct{})}
					if len(paths) == 0 { // the next path works
						d.after = test.after
					}
					paths = append(paths, d)
					return d
				}
				c := client([]Registration{named("cam.edge.example")}, g)
				stop := run(t, c)
				synctest.Wait()
				first := g.Sessions()
				if len(first) != 1 {
					t.Fatalf("the sessions are %+v, want one", first)
				}
				if test.after == 0 {
					paths[0].die()
				} else if !paths[0].isDead() {
					t.Fatal("the path has not died")
				}
				died := time.Now()
				for !slices.Contains(g.outcomes(), tunnel.Idle) && time.Since(died) < time.Minute {
					time.Sleep(100 * time.Millisecond)
				}
				if took := time.Since(died); took >= 10*time.Second {
					t.Errorf("the gateway has found it after %v, want less than 10s; the outcomes are %q", took, g.outcomes())
				}
				for time.Since(died) < time.Minute {
					if l := g.Sessions(); len(l) == 1 && l[0].ID != first[0].ID && g.members("cam.edge.example") == 1 {
						break
					}
					time.Sleep(100 * time.Millisecond)
				}
				if took := time.Since(died); took >= 10*time.Second {
					t.Errorf("the connector was back after %v, want less than 10s; its state is %+v", took, c.State())
				}
				if _, line, err := g.dial(t, "cam.edge.example", 443); err != nil || line != "cam.edge.example:443" {
					t.Errorf("after that: got %q and %v", line, err)
				}
				stop()
				_ = paths[0].Conn.Close()
			})
		})
	}
}

// What opens a session and is not what the protocol has is refused.
func TestBadHellos(t *testing.T) {
	valid := func(pad int) string {
		b, err := json.Marshal(hello{Version: version, Connector: strings.Repeat("x", pad)})
		if err != nil {
			t.Fatal(err)
		}
		return string(b) + "\n"
	}
	exact := strings.Repeat("x", maxLine-len(valid(0)))
	for _, c := range []struct {
		name, line string
		want       tunnel.Reason
	}{
		{"no JSON", "GET / HTTP/1.1\r\n", tunnel.BadRequest},
		{"another version", `{"version":2}` + "\n", tunnel.Unsupported},
		{"64 KiB", valid(len(exact)), tunnel.Done},
		{"64 KiB and a byte", valid(len(exact) + 1), tunnel.TooLarge},
		{"a name that is none", `{"version":1,"register":[{"name":"a b"}]}` + "\n", tunnel.BadRequest},
		{"the end", "", tunnel.Done},
	} {
		t.Run(c.name, func(t *testing.T) {
			g := newTestGateway(t)
			conn, err := g.Dial(t.Context(), &tunnel.Endpoint{Host: Name.String(), Addr: netip.MustParseAddrPort("0.0.0.0:443")}, nil)
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
			_ = conn.SetDeadline(time.Now().Add(pollLimit))
			_, _ = io.WriteString(conn, c.line)
			var answer []byte
			if c.line != "" {
				r := bufio.NewReader(conn)
				answer, _ = r.ReadBytes('\n')
			}
			_ = conn.Close()
			eventually(t, "the session has ended", func() bool { return len(g.outcomes()) == 1 })
			got := g.outcomes()[0]
			if c.want == tunnel.Done && got == tunnel.Reset { // the connection was closed
				got = tunnel.Done
			}
			if got != c.want {
				t.Errorf("the session ended with %q, want %q", got, c.want)
			}
			if refused := bytes.Contains(answer, []byte(`"error"`)); refused != (c.want != tunnel.Done) && c.line != "" {
				t.Errorf("the answer is %q", answer)
			}
		})
	}
}

// Names that are refused do not end the session.
func TestRefusedNamesLeaveTheSession(t *testing.T) {
	g := newTestGateway(t)
	if _, err := g.groups.Join(by("another"), &fakeSession{}, named("taken.example")); err != nil {
		t.Fatal(err)
	}
	c := client([]Registration{named("taken.example"), named("free.example")}, g)
	run(t, c)
	eventually(t, "the free name is registered", func() bool { return g.members("free.example") == 1 })
	eventually(t, "the connector knows", func() bool { return len(c.State()[0].Names) == 2 })
	names := c.State()[0].Names
	if names[0].Reason != tunnel.Denied || names[1].Reason != "" {
		t.Errorf("the results are %+v, want that the first is denied", names)
	}
}

// A name that policies no longer permit is taken from open sessions, which are told, and a name
// that they permit by now is given to them.
func TestNamesFollowPolicies(t *testing.T) {
	g := newTestGateway(t)
	var denied atomic.Pointer[string]
	deny := func(name string) {
		denied.Store(&name)
		g.Recheck()
	}
	g.groups.Authorize = func(req *tunnel.Request, name tunnel.Pattern, port uint16) ([]string, bool, error) {
		if d := denied.Load(); d != nil && *d == name.String() {
			return nil, false, tunnel.Refusef(tunnel.Denied, "not %q", name)
		}
		return anything(req, name, port)
	}
	c := client([]Registration{named("a.example"), named("b.example")}, g)
	run(t, c)
	eventually(t, "both names are registered", func() bool { return g.members("a.example") == 1 && g.members("b.example") == 1 })
	told := func(a, b tunnel.Reason) func() bool {
		return func() bool {
			names := c.State()[0].Names
			return len(names) == 2 && names[0].Reason == a && names[1].Reason == b
		}
	}
	eventually(t, "the connector has both", told("", ""))
	deny("a.example")
	if n, m := g.members("a.example"), g.members("b.example"); n != 0 || m != 1 {
		t.Errorf("a name that is denied has %d members and the other %d, want 0 and 1", n, m)
	}
	eventually(t, "the connector knows that it has lost a name", told(tunnel.Denied, ""))
	deny("b.example")
	if n, m := g.members("a.example"), g.members("b.example"); n != 1 || m != 0 {
		t.Errorf("a name that is permitted again has %d members and the other %d, want 1 and 0", n, m)
	}
	eventually(t, "the connector knows that it has it again", told("", tunnel.Denied))
	c2, got, err := g.dial(t, "a.example", 443)
	if err == nil {
		_ = c2.Close()
	}
	if err != nil || !strings.Contains(got, "a.example") {
		t.Errorf("a request to it: %q and %v, want an answer", got, err)
	}
}

// A heldConn holds its second Write, the first after the welcome, until release is closed.
type heldConn struct {
	net.Conn
	writes  atomic.Int32
	release chan struct{}
}

func (c *heldConn) Write(b []byte) (int, error) {
	if c.writes.Add(1) == 2 {
		<-c.release
	}
	return c.Conn.Write(b)
}

func (c *heldConn) CloseWrite() error { return nil }

// A name that is lost before the control stream is open is told of once it is.
func TestNamesLostWhileASessionOpens(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newTestGateway(t)
		g.pair = func(context.Context) (near, far net.Conn, err error) {
			near, far = net.Pipe()
			return near, far, nil
		}
		release := make(chan struct{})
		g.wrap = func(c net.Conn) net.Conn { return &heldConn{Conn: c, release: release} }
		var denied atomic.Bool
		g.groups.Authorize = func(req *tunnel.Request, name tunnel.Pattern, port uint16) ([]string, bool, error) {
			if denied.Load() {
				return nil, false, tunnel.Refusef(tunnel.Denied, "not %q", name)
			}
			return anything(req, name, port)
		}
		c := client([]Registration{named("a.example")}, g)
		stop := run(t, c)
		synctest.Wait()
		state := func() tunnel.Reason {
			if l := c.State(); len(l) == 1 && len(l[0].Names) == 1 {
				return l[0].Names[0].Reason
			}
			return "no session"
		}
		if got := state(); got != "" {
			t.Fatalf("the name is %q, want that it is registered", got)
		}
		denied.Store(true)
		g.Recheck()
		synctest.Wait() // the control stream is not open
		close(release)
		synctest.Wait()
		if got := state(); got != tunnel.Denied {
			t.Errorf("the connector believes that the name is %q, want %q", got, tunnel.Denied)
		}
		stop()
	})
}

// No owner has more sessions than the limit.
func TestSessionsHaveALimit(t *testing.T) {
	g := newTestGateway(t)
	g.SessionsPerOwner = 1
	run(t, client([]Registration{named("a.example")}, g))
	eventually(t, "a session is there", func() bool { return len(g.Sessions()) == 1 })
	_, err := g.Dial(t.Context(), &tunnel.Endpoint{Host: Name.String(), Addr: netip.MustParseAddrPort("0.0.0.0:443")}, nil)
	if reasonOf(err) != tunnel.Overload {
		t.Errorf("a second session: got %v, want %q", err, tunnel.Overload)
	}
}

// A panickingTransport panics at its first calls of Dial.
type panickingTransport struct {
	*testGateway
	left atomic.Int32
}

// Dial implements tunnel.Transport.
func (p *panickingTransport) Dial(ctx context.Context, ep *tunnel.Endpoint, req *tunnel.Request) (net.Conn, error) {
	if p.left.Add(-1) >= 0 {
		panic("out of order")
	}
	return p.testGateway.Dial(ctx, ep, req)
}

// A panic while a session is opened costs that attempt: others follow.
func TestAPanicEndsOneAttempt(t *testing.T) {
	g := newTestGateway(t)
	c := client([]Registration{named("cam.edge.example")}, g)
	transport := &panickingTransport{testGateway: g}
	transport.left.Store(2)
	c.Gateways[0].Transport = transport
	var told atomic.Int32
	c.Changed = func() {
		if told.Add(1) == 1 { // the session is open by then
			panic("out of order")
		}
	}
	run(t, c)
	eventually(t, "a session is open in spite of three panics", func() bool {
		s := c.State()
		return told.Load() > 1 && len(s) == 1 && s[0].Connected && g.members("cam.edge.example") == 1
	})
	if n := transport.left.Load(); n > -2 {
		t.Errorf("%d attempts were made, want at least 4", 2-n)
	}
}

// What a client's TLS begins with goes to the connector along with the request, where it is
// passed on as it is, and arrives once.
func TestFirstBytesArriveOnce(t *testing.T) {
	g := newTestGateway(t)
	c := client([]Registration{named("cam.edge.example")}, g)
	h := &requests{}
	c.Handler = h
	run(t, c)
	eventually(t, "the connector serves the name", func() bool { return g.members("cam.edge.example") == 1 })
	g.first = []byte("a ClientHello")
	for _, test := range []struct {
		hello uint32
		added bool
		text  string
	}{
		{1, false, "a ClientHello and more"},
		{1, true, "PROXY and a ClientHello"}, // what the gateway adds comes first
		{0, false, "something else"},         // not what passes through
	} {
		conn, err := g.ask(t.Context(), "cam.edge.example", test.hello, test.added)
		if err != nil {
			t.Fatal(err)
		}
		echoes(t, conn, test.text)
		_ = conn.Close()
	}
}

// A refusingTransport notes when it is asked, and has no connection.
type refusingTransport struct {
	mu    sync.Mutex
	asked []time.Time
}

func (r *refusingTransport) Dial(context.Context, *tunnel.Endpoint, *tunnel.Request) (net.Conn, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.asked = append(r.asked, time.Now())
	return nil, errors.New("connection refused")
}

func (*refusingTransport) Check(*tunnel.Endpoint) error { return nil }

func (*refusingTransport) Info() tunnel.TransportInfo { return tunnel.TransportInfo{} }

// The connectors of a gateway that is away do not come all at once: each waits for a random part
// of a time that doubles up to a limit.
func TestConnectorsComeBackWithJitter(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const many = 200
		var all []*refusingTransport
		c := &Client{}
		for range many {
			r := &refusingTransport{}
			all = append(all, r)
			c.Gateways = append(c.Gateways, Gateway{Name: "gw", Transport: r})
		}
		stop := run(t, c)
		time.Sleep(10 * time.Minute)
		stop()
		for nth, most := range []time.Duration{500 * time.Millisecond, time.Second, 2 * time.Second, 4 * time.Second, 8 * time.Second, 16 * time.Second, 30 * time.Second, 30 * time.Second} {
			low, high, tenths := 0, 0, map[int]bool{}
			for _, r := range all {
				if len(r.asked) < nth+2 {
					t.Fatalf("a connector has tried %d times in ten minutes", len(r.asked))
				}
				waited := r.asked[nth+1].Sub(r.asked[nth])
				if waited < most/4 || waited >= most {
					t.Errorf("attempt %d comes after %v, want %v to %v", nth+2, waited, most/4, most)
				}
				if waited < most*5/8 {
					low++
				} else {
					high++
				}
				tenths[int(10*waited/most)] = true
			}
			if low < many/4 || high < many/4 || len(tenths) < 7 {
				t.Errorf("attempt %d: %d connectors come in the first half of the time and %d in the second", nth+2, low, high)
			}
		}
	})
}

// A stream that is not read fills its own window, at both ends, and nothing else: other streams of
// the session go on, in either direction, and what waits comes once it is read.
func TestUnreadStreamsAreAlone(t *testing.T) {
	g := newTestGateway(t)
	run(t, client([]Registration{named("cam.example")}, g))
	eventually(t, "a session", func() bool { return g.members("cam.example") == 1 })
	open := func() net.Conn {
		c, _, err := g.dial(t, "cam.example", 443)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = c.Close() })
		return c
	}
	block := bytes.Repeat([]byte("0123456789abcdef"), 4<<10)
	stuck, sent := make([]net.Conn, 3), make([]int, 3)
	for i := range stuck {
		stuck[i] = open()
		for {
			_ = stuck[i].SetWriteDeadline(time.Now().Add(time.Second))
			n, err := stuck[i].Write(block)
			if sent[i] += n; errors.Is(err, os.ErrDeadlineExceeded) {
				break
			}
			if err != nil || sent[i] > 256<<20 {
				t.Fatalf("a stream that is not read has taken %d bytes, %v", sent[i], err)
			}
		}
	}
	other := open()
	for i := range 200 {
		want := block[i : i+64]
		got := make([]byte, len(want))
		if _, err := other.Write(want); err != nil {
			t.Fatalf("round trip %d: %v", i, err)
		}
		if _, err := io.ReadFull(other, got); err != nil || !bytes.Equal(got, want) {
			t.Fatalf("round trip %d: got %q, %v", i, got, err)
		}
	}
	for i, c := range stuck {
		if _, err := io.CopyN(io.Discard, c, int64(sent[i])); err != nil {
			t.Errorf("of %d bytes that waited: %v", sent[i], err)
		}
	}
}
