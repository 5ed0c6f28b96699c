package tunnel_test

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"culvert.dev/tunnel"
)

// lineHeader is a line "from ADDRESS". It trusts one host.
type lineHeader struct{ trusted string }

type headerKey struct{}

func (p *lineHeader) Trusts(addr netip.Addr) bool { return addr.String() == p.trusted }

func (p *lineHeader) Len(prefix []byte) int {
	const word = "from "
	switch {
	case string(prefix[:min(len(prefix), len(word))]) != word[:min(len(prefix), len(word))]:
		return -1
	default:
		return bytes.IndexByte(prefix, '\n') + 1
	}
}

func (p *lineHeader) Read(ctx context.Context, c *tunnel.Conn) (context.Context, error) {
	for {
		switch n := p.Len(c.Buffered()); {
		case n < 0:
			_ = c.Abort()
			return ctx, tunnel.Refusef(tunnel.BadPreamble, "no header")
		case n > 0:
			said := strings.TrimSpace(string(c.Buffered()[len("from "):n]))
			c.Discard(n)
			if source, err := netip.ParseAddrPort(said); err == nil {
				c.SetSource(source)
			}
			return context.WithValue(ctx, headerKey{}, said), nil
		}
		if err := c.Fill(maxLine); err != nil {
			_ = c.Abort()
			return ctx, tunnel.PreambleError(c, err)
		}
	}
}

// serveFronted is serve with a ConnHeader.
func serveFronted(t *testing.T, srv *tunnel.Server, p tunnel.ConnHeader, protocols ...tunnel.Protocol) *gateway {
	t.Helper()
	g := &gateway{srv: srv, ln: newMemListener(), served: make(chan error, 1), budget: &tunnel.Budget{Limit: 1 << 20}}
	srv.Budget, srv.Observe = g.budget, g.told.observe
	go func() {
		g.served <- srv.Serve(t.Context(), tunnel.Listener{Listener: g.ln, Protocols: protocols, ConnHeader: p})
	}()
	return g
}

// asked is a Handler that notes requests, and what the header said.
type asked struct {
	mu   sync.Mutex
	said []string
}

func (a *asked) ServeTunnel(ctx context.Context, req *tunnel.Request) {
	a.mu.Lock()
	said, _ := ctx.Value(headerKey{}).(string)
	a.said = append(a.said, fmt.Sprintf("%s from %s, %q", req.ALPN, req.Source, said))
	a.mu.Unlock()
	acceptAndClose(ctx, req)
}

func TestConnHeader(t *testing.T) {
	other := &lineProtocol{name: "other", magic: "other"}
	this := &lineProtocol{name: "this", magic: "this"}
	for _, row := range []struct {
		name   string
		from   string
		in     string
		want   string        // the request; "" means none
		reason tunnel.Reason // where there is none
		source string        // of the outcome
		ending string
	}{
		{"stated", "192.0.2.9:1", "from 198.51.100.7:7\nthis one\n", `[this one] from 198.51.100.7:7, "198.51.100.7:7"`, "", "", "closed"},
		{"stated as a mapped address", "192.0.2.9:1", "from [::ffff:198.51.100.7]:7\nthis one\n", `[this one] from 198.51.100.7:7, "[::ffff:198.51.100.7]:7"`, "", "", "closed"},
		{"not stated", "192.0.2.9:1", "from nobody\nother one\n", `[other one] from 192.0.2.9:1, "nobody"`, "", "", "closed"},
		{"untrusted", "192.0.2.8:1", "from 198.51.100.7:7\nthis one\n", "", tunnel.Denied, "192.0.2.8:1", "aborted"},
		{"missing", "192.0.2.9:1", "this one\n", "", tunnel.BadPreamble, "192.0.2.9:1", "aborted"},
		{"cut short", "192.0.2.9:1", "from 198.51.100.7", "", tunnel.Gone, "192.0.2.9:1", "aborted"},
		{"nothing behind it", "192.0.2.9:1", "from 198.51.100.7:7\n", "", tunnel.NoHello, "198.51.100.7:7", "aborted"},
		{"nobody's behind it", "192.0.2.9:1", "from 198.51.100.7:7\nwhose?\n", "", tunnel.BadPreamble, "198.51.100.7:7", "aborted"},
		{"twice", "192.0.2.9:1", "from 198.51.100.7:7\nfrom 198.51.100.8:8\nthis one\n", "", tunnel.BadPreamble, "198.51.100.7:7", "aborted"},
	} {
		t.Run(row.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var a asked
				g := serveFronted(t, &tunnel.Server{Handler: &a}, &lineHeader{"192.0.2.9"}, this, other)
				client, accepted := g.dial(row.from)
				synctest.Wait()
				if early := accepted.ending() != "open"; early != (row.reason == tunnel.Denied) {
					t.Errorf("before a byte came, the connection is %s", accepted.ending())
				}
				_, _ = io.WriteString(client, row.in)
				synctest.Wait()
				_ = client.Close()
				synctest.Wait()
				if row.want != "" && !slices.Equal(a.said, []string{row.want}) || row.want == "" && len(a.said) > 0 {
					t.Errorf("got requests %q, want %q", a.said, row.want)
				}
				if got := accepted.ending(); got != row.ending {
					t.Errorf("the connection is %s, want %s", got, row.ending)
				}
				all := g.told.all()
				if row.reason == "" && len(all) > 0 || row.reason != "" && (len(all) != 1 || all[0].Reason != row.reason || all[0].Source.String() != row.source) {
					t.Errorf("got outcomes %+v, want %q from %s", all, row.reason, row.source)
				}
				g.stop(t)
			})
		})
	}
}

// The header and what follows share one deadline, which no byte prolongs.
func TestConnHeaderDeadline(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := serveFronted(t, &tunnel.Server{Handler: tunnel.HandlerFunc(acceptAndClose)}, &lineHeader{"192.0.2.9"}, line)
		start := time.Now()
		client, _ := g.dial("192.0.2.9:1")
		var wg sync.WaitGroup
		wg.Go(func() {
			for b := range bytes.SplitAfterSeq([]byte("f/rom 198.51.100/.7:7\n/s/l/o/w/./././././."), []byte("/")) {
				time.Sleep(450 * time.Millisecond)
				if _, err := client.Write(bytes.TrimSuffix(b, []byte("/"))); err != nil {
					return
				}
			}
		})
		wantEnd(t, client)
		// The first byte came after 450 ms, and the preamble has 5 s from there.
		if took := time.Since(start); took < 5450*time.Millisecond || took > 5600*time.Millisecond {
			t.Errorf("it took %v, want 5.45 s", took)
		}
		wg.Wait()
		g.stop(t)
		g.wantReasons(t, tunnel.HelloTimeout)
	})
}

// The limits on one source are not held against a proxy in front, and all
// others are.
func TestConnHeaderLimits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		limits := tunnel.Limits{MaxPendingPerClient: 2, MaxConnectionsPerClient: 2, ConnectionRatePerClient: 2, MaxPendingConnections: 5}
		g := serveFronted(t, &tunnel.Server{Limits: limits, Handler: tunnel.HandlerFunc(acceptAndClose)}, &lineHeader{"192.0.2.9"}, line)
		var clients []net.Conn
		var conns []*fakeConn
		for range 6 {
			client, accepted := g.dial("192.0.2.9:1")
			clients, conns = append(clients, client), append(conns, accepted)
			synctest.Wait()
		}
		if conns[0].ending() == "open" {
			t.Error("the sixth unfinished preamble made no room for itself")
		}
		for _, c := range conns[1:] {
			wantAlive(t, "behind a trusted proxy", c)
		}
		for _, c := range clients {
			_ = c.Close()
		}
		synctest.Wait()
		g.stop(t)
		g.wantReasons(t, tunnel.Overload, tunnel.NoHello, tunnel.NoHello, tunnel.NoHello, tunnel.NoHello, tunnel.NoHello)
	})
}

// What comes by a proxy in front is charged to the client that it names, and
// the proxy's own address is held to no limit.
func TestServerChargesClientOfConnHeader(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		relay := &tunnel.Relay{}
		defer relay.Close()
		budget := &tunnel.Budget{Limit: 100}
		dialer := &fakeDialer{}
		router := &tunnel.Router{Resolver: routeTo("192.0.2.9:80"), Dialer: dialer, Relay: relay, Budget: budget, Limits: tunnel.Limits{MaxConnectionsPerClient: 2}, Observe: func(*tunnel.Outcome) {}}
		g := serveFronted(t, &tunnel.Server{Handler: router, Limits: tunnel.Limits{MaxConnectionsPerClient: 2}, Budget: budget}, &lineHeader{"198.51.100.7"}, line)
		var clients []net.Conn
		enter := func(client string) *fakeConn {
			c, accepted := g.dial("198.51.100.7:1")
			clients = append(clients, c)
			go func() { _, _ = io.WriteString(c, "from "+client+"\nname\n") }()
			synctest.Wait()
			return accepted
		}
		for _, tt := range []struct {
			client string
			ok     bool
		}{
			{"203.0.113.1:5", true}, {"203.0.113.1:5", true}, {"203.0.113.1:5", false}, {"203.0.113.2:5", true}, {"203.0.113.2:5", true}, {"203.0.113.2:5", false},
			{"-", true}, {"-", true}, {"-", true}, // the proxy for itself
		} {
			if got := enter(tt.client).ending(); (got == "open") != tt.ok {
				t.Errorf("a connection of %s is %s, want it to stand: %v", tt.client, got, tt.ok)
			}
		}
		for _, c := range clients {
			_ = c.Close()
		}
		dialer.closeAll()
		time.Sleep(2 * time.Minute)
		synctest.Wait()
		if err := budget.Clients().Idle(); err != nil {
			t.Error(err)
		}
		g.stop(t)
	})
}

// onBehalf is a Protocol whose line names the client of the request, as proxies in front do in a
// request of HTTP.
type onBehalf struct{ *lineProtocol }

func (p onBehalf) ServeConn(ctx context.Context, c *tunnel.Conn, h tunnel.Handler) error {
	return p.lineProtocol.ServeConn(ctx, c, tunnel.HandlerFunc(func(ctx context.Context, req *tunnel.Request) {
		if source, err := netip.ParseAddrPort(req.ALPN[0]); err == nil {
			req.Source = source
		}
		h.ServeTunnel(ctx, req)
	}))
}

// What comes by a proxy that names the client in each request is charged to that client. Nobody
// else may connect, and the proxy itself is held to no limit on one client.
func TestServerChargesClientOfRequest(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		relay := &tunnel.Relay{}
		defer relay.Close()
		budget := &tunnel.Budget{Limit: 100}
		dialer := &fakeDialer{}
		limits := tunnel.Limits{MaxConnectionsPerClient: 2, MaxPendingPerClient: 2, ConnectionRatePerClient: 3}
		router := &tunnel.Router{Resolver: routeTo("192.0.2.9:80"), Dialer: dialer, Relay: relay, Budget: budget, Limits: limits, Observe: func(*tunnel.Outcome) {}}
		g := &gateway{srv: &tunnel.Server{Handler: router, Limits: limits, Budget: budget}, ln: newMemListener(), served: make(chan error, 1), budget: budget}
		g.srv.Observe = g.told.observe
		go func() {
			g.served <- g.srv.Serve(t.Context(), tunnel.Listener{Listener: g.ln, Protocols: []tunnel.Protocol{onBehalf{line}}, Proxies: []netip.Prefix{netip.MustParsePrefix("198.51.100.0/24")}})
		}()
		var clients []net.Conn
		enter := func(from, says string) *fakeConn {
			c, accepted := g.dial(from)
			clients = append(clients, c)
			go func() { _, _ = io.WriteString(c, says+"\n") }()
			synctest.Wait()
			return accepted
		}
		const proxy = "198.51.100.7:1"
		for _, tt := range []struct {
			from, client string
			ok           bool
		}{
			{proxy, "203.0.113.1:5", true}, {proxy, "203.0.113.1:5", true}, {proxy, "203.0.113.1:6", false},
			{proxy, "203.0.113.2:0", true}, {proxy, "203.0.113.2:0", true}, {proxy, "203.0.113.2:0", false},
			{proxy, "name", true}, {proxy, "name", true}, {proxy, "name", true}, {proxy, "name", true}, // for itself
			{"203.0.113.3:5", "203.0.113.4:5", false},
		} {
			if got := enter(tt.from, tt.client).ending(); (got == "open") != tt.ok {
				t.Errorf("from %s for %s: the connection is %s, want it to stand: %v", tt.from, tt.client, got, tt.ok)
			}
		}
		for _, c := range clients {
			_ = c.Close()
		}
		dialer.closeAll()
		time.Sleep(2 * time.Minute)
		synctest.Wait()
		enter(proxy, "203.0.113.1:5")
		enter(proxy, "203.0.113.1:5")
		_ = clients[len(clients)-1].Close()
		_ = clients[len(clients)-2].Close()
		dialer.closeAll()
		synctest.Wait()
		enter(proxy, "203.0.113.1:5")
		if got := enter(proxy, "203.0.113.1:5").ending(); got == "open" {
			t.Error("a client's fourth tunnel in a second stands, want the rate held against it")
		}
		for _, c := range clients {
			_ = c.Close()
		}
		dialer.closeAll()
		time.Sleep(2 * time.Minute)
		synctest.Wait()
		if err := budget.Clients().Idle(); err != nil {
			t.Error(err)
		}
		g.stop(t)
		g.wantReasons(t, tunnel.Denied)
	})
}
