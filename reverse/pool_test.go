package reverse

import (
	"context"
	"errors"
	"io"
	"net"
	"net/netip"
	"reflect"
	"runtime"
	"slices"
	"sync"
	"syscall"
	"testing"
	"time"

	"culvert.dev/tunnel"
)

// A poolGateway is a testGateway that takes pool connections, too.
type poolGateway struct {
	*testGateway
	addr   string
	server *tunnel.Server

	mu       sync.Mutex
	outcomes []tunnel.Outcome // of connections that were no pool connections
}

func newPoolGateway(t *testing.T) *poolGateway {
	t.Helper()
	g := &poolGateway{testGateway: newTestGateway(t)}
	g.server = &tunnel.Server{Handler: g.Pool(), Observe: func(o *tunnel.Outcome) {
		g.mu.Lock()
		defer g.mu.Unlock()
		g.outcomes = append(g.outcomes, *o)
	}}
	ln, err := tunnel.Listen(t.Context(), "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	g.addr = ln.Addr().String()
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = g.server.Serve(g.ctx, tunnel.Listener{Listener: ln, Protocols: []tunnel.Protocol{new(PoolProtocol)}})
	}()
	t.Cleanup(func() {
		g.Drain()
		_ = g.server.Close()
		<-done
		ctx, cancel := context.WithTimeout(context.Background(), pollLimit)
		defer cancel()
		if err := g.server.Shutdown(ctx); err != nil {
			t.Error(err)
		}
	})
	return g
}

// idle is how many pool connections wait at g.
func (g *poolGateway) idle() (n int) {
	for _, s := range g.Sessions() {
		n += s.Pool
	}
	return n
}

// pooled returns a Client with pool connections to g.
func pooled(g *poolGateway, n int, names ...Registration) *Client {
	c := client(names, g.testGateway)
	c.Budget = &tunnel.Budget{Limit: 1 << 10}
	c.Gateways[0].Pool = n
	c.Gateways[0].DialPool = func(ctx context.Context) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "tcp", g.addr)
	}
	return c
}

// ask opens a stream for a request whose ClientHello passes through, or not.
func (g *testGateway) ask(ctx context.Context, name string, hello uint32, added bool) (net.Conn, error) {
	n := tunnel.MustParseName(name)
	return g.groups.Transport(liveGroup(tunnel.Pattern{Suffix: n}), added).Dial(ctx, &tunnel.Endpoint{Addr: netip.AddrPortFrom(netip.Addr{}, 443)},
		&tunnel.Request{Name: n, Port: 443, Hello: hello, FirstBytes: g.first, Source: netip.MustParseAddrPort("192.0.2.7:1234"), Unverified: &tunnel.UnverifiedHeaders{Trace: "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}})
}

// requests is a Handler that keeps what is asked for, and echoes.
type requests struct {
	mu  sync.Mutex
	all []tunnel.Request
}

func (r *requests) ServeTunnel(ctx context.Context, req *tunnel.Request) {
	r.mu.Lock()
	r.all = append(r.all, *req)
	r.mu.Unlock()
	s, err := req.Accept()
	if err != nil {
		return
	}
	defer s.Close()
	_, _ = io.Copy(s, s)
}

func echoes(t *testing.T, c net.Conn, text string) {
	t.Helper()
	_ = c.SetDeadline(time.Now().Add(pollLimit))
	if _, err := io.WriteString(c, text); err != nil {
		t.Fatal(err)
	}
	if err := c.(tunnel.Stream).CloseWrite(); err != nil {
		t.Fatal(err)
	}
	if got, err := io.ReadAll(c); string(got) != text || err != nil {
		t.Errorf("got %q and %v back, want %q", got, err, text)
	}
}

// What a client says reaches the connector over a pool connection, as the request does by the
// session. A connection that is taken is replaced.
func TestPoolConnectionsCarryRequests(t *testing.T) {
	g := newPoolGateway(t)
	c := pooled(g, 3, named("cam.edge.example"))
	h := &requests{}
	c.Handler = h
	run(t, c)
	for i := range 5 {
		eventually(t, "the pool is full", func() bool { return g.idle() == 3 && c.State()[0].Pool == 3 })
		conn, err := g.ask(t.Context(), "cam.edge.example", 1, false)
		if err != nil {
			t.Fatal(err)
		}
		if _, ok := conn.(*poolStream); !ok {
			t.Fatalf("request %d: its stream is a %T", i, conn)
		}
		if got := g.Sessions()[0].Streams; got != 1 {
			t.Errorf("request %d: the session has %d streams, want 1", i, got)
		}
		echoes(t, conn, "hello")
		_ = conn.Close()
	}
	eventually(t, "no stream is left", func() bool { return g.Sessions()[0].Streams == 0 && c.State()[0].Streams == 0 })
	other, err := g.ask(t.Context(), "cam.edge.example", 0, false)
	if err != nil {
		t.Fatal(err)
	}
	_ = other.Close()
	h.mu.Lock()
	defer h.mu.Unlock()
	over, by := h.all[0], h.all[len(h.all)-1]
	if u := over.Unverified; u == nil || u.Forwarded != `for="192.0.2.7:1234"` || u.Trace == "" {
		t.Errorf("the connector hears %+v of the caller, want its address and its trace", u)
	}
	if over.Target() != by.Target() || over.Source != by.Source || !reflect.DeepEqual(over.Unverified, by.Unverified) || over.Peer != by.Peer || over.Proto != by.Proto || over.Listener != by.Listener {
		t.Errorf("by a pool connection the request is %+v (%+v), and by a stream %+v (%+v)", over, over.Unverified, by, by.Unverified)
	}
	if !over.RequireTLS || by.RequireTLS {
		t.Errorf("TLS is required of what comes by a pool connection: %t, by a stream: %t", over.RequireTLS, by.RequireTLS)
	}
	if used := c.Budget.Used(); used > 3 {
		t.Errorf("%d descriptors are taken, want those of the 3 that wait", used)
	}
}

// Nothing but TLS that passes through goes over a pool connection, unless its name is insecure.
func TestPoolConnectionsAreForTLS(t *testing.T) {
	g := newPoolGateway(t)
	insecure := named("plain.edge.example")
	insecure.Insecure = true
	c := pooled(g, 2, named("cam.edge.example"), insecure)
	h := &requests{}
	c.Handler = h
	run(t, c)
	for _, tc := range []struct {
		name  string
		hello uint32
		added bool
		want  bool
	}{
		{"cam.edge.example", 1, false, true},
		{"cam.edge.example", 0, false, false},
		{"cam.edge.example", 1, true, false},
		{"plain.edge.example", 0, false, true},
		{"plain.edge.example", 0, true, false},
	} {
		eventually(t, "the pool is full", func() bool { return g.idle() == 2 && c.State()[0].Pool == 2 })
		conn, err := g.ask(t.Context(), tc.name, tc.hello, tc.added)
		if err != nil {
			t.Fatal(err)
		}
		if _, got := conn.(*poolStream); got != tc.want {
			t.Errorf("%+v: its stream is a %T", tc, conn)
		}
		echoes(t, conn, "hello")
		_ = conn.Close()
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.all[3].RequireTLS {
		t.Error("TLS is required for a name that is insecure")
	}
}

// dialPool opens a connection that begins with a ticket, and reports whether the gateway has
// closed it.
func dialPool(t *testing.T, g *poolGateway, from, preamble string) (c net.Conn, closed func() bool) {
	t.Helper()
	d := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(from)}}
	c, err := d.DialContext(t.Context(), "tcp", g.addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	if _, err := io.WriteString(c, preamble); err != nil {
		t.Fatal(err)
	}
	return c, func() bool {
		_ = c.SetReadDeadline(time.Now().Add(pollLimit))
		n, err := c.Read(make([]byte, 1))
		return n == 0 && err != nil
	}
}

// A ticket is good for one connection, from the address of its session, for a while and while
// the session is there.
func TestTicketsArePersonal(t *testing.T) {
	g := newPoolGateway(t)
	stop := run(t, client([]Registration{named("cam.edge.example")}, g.testGateway))
	eventually(t, "the session is there", func() bool { return g.members("cam.edge.example") == 1 })
	var x *serverSession
	g.Server.mu.Lock()
	for x = range g.Server.sessions {
	}
	g.Server.mu.Unlock()
	issue := func(n int) (all []string) {
		for _, one := range g.issue(x, n) {
			all = append(all, poolPrefix+string(one.Ticket))
		}
		return all
	}

	tickets := issue(1000)
	if len(tickets) != MaxPool {
		t.Fatalf("the gateway has issued %d tickets, the limit is %d", len(tickets), MaxPool)
	}
	if more := issue(1); more != nil {
		t.Errorf("with %d tickets out it has issued another one", MaxPool)
	}
	_, closed := dialPool(t, g, "127.0.0.1", tickets[0])
	eventually(t, "the first one waits", func() bool { return g.idle() == 1 })

	for what, preamble := range map[string]string{
		"a ticket that was used":     tickets[0],
		"no ticket of the gateway's": poolPrefix + string(make([]byte, 32)),
		"what is no preamble":        "\x00culvert-pool/2\n" + string(make([]byte, 32)),
	} {
		if _, closed := dialPool(t, g, "127.0.0.1", preamble); !closed() {
			t.Errorf("a connection with %s is open", what)
		}
	}
	if _, closed := dialPool(t, g, "127.0.0.2", tickets[1]); !closed() {
		t.Error("a connection from another address than its session's is open")
	}
	if _, closed := dialPool(t, g, "127.0.0.1", tickets[1]); !closed() {
		t.Error("a ticket that came from elsewhere is good a second time")
	}

	// What the connector says before a request ends the connection.
	if _, closed := dialPool(t, g, "127.0.0.1", tickets[2]+"x"); !closed() {
		t.Error("a connection on which the connector speaks first is open")
	}

	g.Server.mu.Lock()
	for sum, one := range g.Server.tickets {
		one.until = time.Now().Add(-time.Second)
		g.Server.tickets[sum] = one
	}
	g.Server.mu.Unlock()
	if _, closed := dialPool(t, g, "127.0.0.1", tickets[3]); !closed() {
		t.Error("a connection with a ticket that has expired is open")
	}
	fresh := issue(MaxPool)
	if len(fresh) != MaxPool-1 { // one connection waits
		t.Errorf("the gateway has issued %d tickets once those before had expired, want %d", len(fresh), MaxPool-1)
	}
	if g.idle() != 1 {
		t.Errorf("%d connections wait, want the first one", g.idle())
	}
	stop()
	if !closed() {
		t.Error("a pool connection outlives its session")
	}
	if _, closed := dialPool(t, g, "127.0.0.1", fresh[0]); !closed() {
		t.Error("a ticket outlives its session")
	}
	eventually(t, "no ticket is left", func() bool {
		g.Server.mu.Lock()
		defer g.Server.mu.Unlock()
		return len(g.Server.tickets) == 0
	})
}

// Connections that are half of a preamble, or that nobody may have, are not in the way of others.
func TestAFloodOfPoolConnections(t *testing.T) {
	g := newPoolGateway(t)
	c := pooled(g, 2, named("cam.edge.example"))
	run(t, c)
	eventually(t, "the pool is full", func() bool { return g.idle() == 2 })
	for i := range 100 {
		dialPool(t, g, "127.0.0.1", (poolPrefix + string(make([]byte, 32)))[:i%49])
	}
	for range 10 {
		eventually(t, "the pool is full", func() bool { return g.idle() == 2 })
		conn, err := g.ask(t.Context(), "cam.edge.example", 1, false)
		if err != nil {
			t.Fatal(err)
		}
		if _, ok := conn.(*poolStream); !ok {
			t.Errorf("its stream is a %T", conn)
		}
		_ = conn.Close()
	}
}

// Pool connections that die are replaced, and requests do without those that have.
func TestPoolConnectionsThatDie(t *testing.T) {
	g := newPoolGateway(t)
	c := pooled(g, 4, named("cam.edge.example"))
	var mu sync.Mutex
	var open []net.Conn
	dial := c.Gateways[0].DialPool
	c.Gateways[0].DialPool = func(ctx context.Context) (net.Conn, error) {
		conn, err := dial(ctx)
		mu.Lock()
		defer mu.Unlock()
		open = append(open, conn)
		return conn, err
	}
	run(t, c)
	for range 2 {
		eventually(t, "the pool is full", func() bool { return g.idle() == 4 && c.State()[0].Pool == 4 })
		mu.Lock()
		for _, conn := range open { // as kill -9 does
			_ = tunnel.Abort(conn)
		}
		open = nil
		mu.Unlock()
		conn, err := g.ask(t.Context(), "cam.edge.example", 1, false)
		if err != nil {
			t.Fatal(err)
		}
		_ = conn.SetDeadline(time.Now().Add(pollLimit))
		if err := echoed(conn, "hello"); err != nil {
			t.Errorf("a request as its pool connections have died: %v", err)
		}
		_ = conn.Close()
	}
}

func echoed(c net.Conn, text string) error {
	if _, err := io.WriteString(c, text); err != nil {
		return err
	}
	if err := c.(tunnel.Stream).CloseWrite(); err != nil {
		return err
	}
	got, err := io.ReadAll(c)
	if err != nil {
		return err
	}
	if want := "cam.edge.example:443\n" + text; string(got) != want {
		return errors.New("got " + string(got))
	}
	return nil
}

// A tunnel over a pool connection ends with the session, as one on a stream does, and a session
// that drains waits for both.
func TestPoolConnectionsAndTheEndOfTheSession(t *testing.T) {
	service, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer service.Close()
	go func() {
		for {
			c, err := service.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				_, _ = io.Copy(c, c)
			}()
		}
	}()
	for _, hello := range []uint32{0, 1} {
		g := newPoolGateway(t)
		insecure := named("cam.edge.example")
		insecure.Insecure = true
		c := pooled(g, 2, insecure)
		relay := &tunnel.Relay{}
		defer relay.Close()
		c.Handler = &tunnel.Router{Relay: relay, Resolver: fixedRoute(service.Addr().String()), Dialer: new(net.Dialer)}
		if hello == 0 {
			c.Gateways[0].Pool = 0
		}
		run(t, c)
		eventually(t, "the pool is full", func() bool {
			return len(g.Sessions()) == 1 && g.idle() == c.Gateways[0].Pool && g.members("cam.edge.example") == 1
		})

		// At the gateway, too, a Router carries.
		near, far, err := tcpPair(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		defer near.Close()
		req := by("client")
		req.Name, req.Port, req.Hello, req.Start = tunnel.MustParseName("cam.edge.example"), 443, hello, time.Now()
		req.Accept = func() (tunnel.Stream, error) { return far.(tunnel.Stream), nil }
		req.Refuse = func(err error) { t.Error(err); _ = far.Close() }
		router := &tunnel.Router{Relay: g.relay, Resolver: groupRoute{g.groups.Transport("@cam.edge.example", false)}}
		router.ServeTunnel(t.Context(), req)
		one := make([]byte, 5)
		_ = near.SetDeadline(time.Now().Add(pollLimit))
		trip := func() error {
			if _, err := io.WriteString(near, "hello"); err != nil {
				return err
			}
			_, err := io.ReadFull(near, one)
			return err
		}
		if err := trip(); err != nil {
			t.Fatal(err)
		}
		if got := c.State()[0].Streams; got != 1 {
			t.Errorf("hello %d: the connector has %d streams, want 1", hello, got)
		}
		c.Drain()
		eventually(t, "the gateway knows", func() bool { return slices.ContainsFunc(g.Sessions(), func(s SessionInfo) bool { return s.Draining }) })
		for range 10 { // longer than the connector waits for another stream
			<-time.After(drainTick)
			if err := trip(); err != nil {
				t.Fatalf("hello %d: a stream of a session that drains: %v", hello, err)
			}
		}
		if len(g.Sessions()) != 1 {
			t.Errorf("hello %d: the session ended before its stream", hello)
		}
		g.relay.EndRecords(tunnel.Killed, func(r tunnel.Record) bool { return r.Service().Service == Name.String() })
		if _, err := io.ReadFull(near, one); err == nil {
			t.Errorf("hello %d: the tunnel outlives its session", hello)
		}
		eventually(t, "nothing is left", func() bool { return relay.Open() == 0 && g.relay.Open() == 0 && c.Budget.Used() == 0 })
	}
}

type fixedRoute string

func (f fixedRoute) Resolve(context.Context, *tunnel.Request) (tunnel.Route, error) {
	return tunnel.Route{Service: "service", Endpoints: []tunnel.Endpoint{{Addr: netip.MustParseAddrPort(string(f)), Named: true}}}, nil
}

type groupRoute struct{ tunnel.Transport }

func (r groupRoute) Resolve(context.Context, *tunnel.Request) (tunnel.Route, error) {
	return tunnel.Route{Service: "service", Endpoints: []tunnel.Endpoint{{Addr: netip.MustParseAddrPort("0.0.0.0:443"), Transport: r.Transport}}}, nil
}

// FuzzPoolProtocol has a stranger begin a pool connection.
func FuzzPoolProtocol(f *testing.F) {
	valid := ticket{1}
	f.Add([]byte(poolPrefix + string(valid[:])))
	f.Add([]byte(poolPrefix + string(make([]byte, 32)) + "more"))
	f.Add([]byte(poolPrefix))
	f.Add([]byte("\x00culvert-pool/1"))
	f.Add([]byte("\x00\x00\x00\x08\x04\xd2\x16\x2f"))
	p := new(PoolProtocol)
	f.Fuzz(func(t *testing.T, b []byte) {
		verdict := p.Sniff(b)
		for n := range min(len(b), len(poolPrefix)) {
			if before := p.Sniff(b[:n]); verdict != tunnel.No && before == tunnel.No || before == tunnel.Yes {
				t.Fatalf("of %d bytes the verdict is %v, and then %v", n, before, verdict)
			}
		}
		near, far := net.Pipe()
		defer near.Close()
		asked := 0
		done := make(chan error)
		go func() {
			done <- p.ServeConn(t.Context(), tunnel.NewConn(far), tunnel.HandlerFunc(func(ctx context.Context, req *tunnel.Request) {
				asked++
				if got := ctx.Value(ticketKey{}).(ticket); string(got[:]) != string(b[len(poolPrefix):poolPreamble]) || req.Name != PoolName {
					t.Errorf("of %q came the ticket %x for %q", b, got, req.Name)
				}
				_ = far.Close()
			}))
		}()
		_, _ = near.Write(b)
		_ = near.Close()
		err := <-done
		if want := verdict == tunnel.Yes && len(b) >= poolPreamble; (asked == 1) != want || (err == nil) != want {
			t.Errorf("%q was asked for %d times, and the error is %v", b, asked, err)
		}
	})
}

// A request that gets a pool connection while the session ends does not keep it.
func TestPoolConnectionOfASessionThatHasEnded(t *testing.T) {
	near, far, err := tcpPair(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer far.Close()
	x := &serverSession{server: &Server{}}
	x.endPool()
	st := x.newPoolStream(near)
	_ = far.SetDeadline(time.Now().Add(pollLimit))
	if _, err := far.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("the connection ends with %v, want a reset", err)
	}
	if _, err := st.Write([]byte("x")); err == nil {
		t.Error("the request may still write")
	}
	_ = st.Close()
	if n := x.Streams(); n != -1 { // Open has counted it before
		t.Errorf("the session has %d streams, want one less than before", n)
	}
}

// A lateConn is a connection whose first Write waits.
type lateConn struct {
	net.Conn
	once sync.Once
	wait func()
}

func (c *lateConn) Write(b []byte) (int, error) {
	c.once.Do(c.wait)
	return c.Conn.Write(b)
}

func (c *lateConn) CloseWrite() error { return c.Conn.(tunnel.Stream).CloseWrite() }

// What requests take while another pool connection is opened is replaced, too.
func TestPoolConnectionsTakenMeanwhile(t *testing.T) {
	g := newPoolGateway(t)
	c := pooled(g, 2, named("cam.edge.example"))
	c.Handler = &requests{}
	dial, dials, held := c.Gateways[0].DialPool, make(chan struct{}, 100), make(chan struct{})
	release := sync.OnceFunc(func() { close(held) })
	c.Gateways[0].DialPool = func(ctx context.Context) (net.Conn, error) {
		conn, err := dial(ctx)
		if err != nil {
			return nil, err
		}
		dials <- struct{}{}
		if len(dials) != 2 {
			return conn, nil
		}
		return &lateConn{Conn: conn, wait: func() { <-held }}, nil
	}
	run(t, c)
	defer release()
	eventually(t, "one waits, and one is held", func() bool { return g.idle() == 1 && c.State()[0].Pool == 2 })
	conn, err := g.ask(t.Context(), "cam.edge.example", 1, false)
	if err != nil {
		t.Fatal(err)
	}
	echoes(t, conn, "hello")
	_ = conn.Close()
	eventually(t, "the connector has seen it", func() bool { return c.State()[0].Pool == 1 })
	for range 100 {
		runtime.Gosched() // it looks for what is missing
	}
	release()
	eventually(t, "the pool is full", func() bool { return g.idle() == 2 && c.State()[0].Pool == 2 })
}
