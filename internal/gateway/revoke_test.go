package gateway

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	"culvert.dev/connect"
	"culvert.dev/internal/testnet"
	"culvert.dev/policy"
	"culvert.dev/registry"
	"culvert.dev/reverse"
	"culvert.dev/tunnel"
)

// A changingSource sends what it is given.
type changingSource chan registry.Snapshot

func (c changingSource) Run(ctx context.Context, updates chan<- registry.Update) error {
	for {
		select {
		case <-ctx.Done():
			return nil
		case s := <-c:
			select {
			case updates <- registry.Update{Source: "test", Snapshot: s}:
			case <-ctx.Done():
				return nil
			}
		}
	}
}

// denying is a policy that denies a client's address what is selected.
func denying(from string, targets policy.Targets) *policy.Policy {
	return &policy.Policy{Name: "no-" + from, Action: policy.Deny, Targets: targets,
		Rules: []policy.Rule{{Sources: &[]policy.Source{{CIDRs: []netip.Prefix{netip.MustParsePrefix(from + "/32")}}}}}}
}

// TestTunnelsEndWhenPolicyDeniesThem has two clients of two services: once a policy denies
// one of the clients one of the services, its tunnels there end and no others.
func TestTunnelsEndWhenPolicyDeniesThem(t *testing.T) {
	const each = 20
	echo := testnet.Echo(t)
	to := netip.MustParseAddrPort(echo.Addr())
	var services []*registry.Service
	for _, name := range []string{"one", "two"} {
		services = append(services, &registry.Service{
			Name: name, Names: []tunnel.Pattern{{Suffix: tunnel.MustParseName(name + ".test")}}, Ports: []uint16{443}, Exposed: true,
			Endpoints: []registry.Endpoint{{Addr: to.Addr(), Port: to.Port()}},
		})
	}
	source := make(changingSource, 1)
	source <- registry.Snapshot{Services: services}
	var log lockedBuffer
	addr, g := startGateway(t, Config{
		Listeners: []Listener{{Address: "127.0.0.1:0", Protocols: []tunnel.Protocol{&connect.Protocol{}}}},
		Sources:   []registry.Source{source},
		Log:       slog.New(slog.NewTextHandler(&log, nil)),
	})
	testnet.Eventually(t, patience, func() bool { return g.registry.Table().Len() == 2 }, "the services are there")
	open := func(from, service string) (net.Conn, int) {
		t.Helper()
		d := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(from)}}
		c, err := d.DialContext(t.Context(), "tcp", addr)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = c.Close() })
		_ = c.SetDeadline(time.Now().Add(patience))
		fmt.Fprintf(c, "CONNECT %s.test:443 HTTP/1.1\r\nHost: %[1]s.test:443\r\n\r\n", service)
		answer, err := http.ReadResponse(bufio.NewReaderSize(c, 16), &http.Request{Method: "CONNECT"})
		if err != nil {
			t.Fatal(err)
		}
		return c, answer.StatusCode
	}
	type opened struct {
		net.Conn
		from, service string
	}
	var all []opened
	for _, from := range []string{"127.0.0.2", "127.0.0.3"} {
		for _, service := range []string{"one", "two"} {
			for range each {
				c, status := open(from, service)
				if status != http.StatusOK {
					t.Fatalf("got %d", status)
				}
				all = append(all, opened{c, from, service})
			}
		}
	}
	testnet.Eventually(t, patience, func() bool { return g.relay.Open() == 4*each }, "all tunnels stand")
	start := time.Now()
	source <- registry.Snapshot{Services: services, Policies: []*policy.Policy{denying("127.0.0.2", policy.Targets{Services: []string{"one"}})}}
	testnet.Eventually(t, patience, func() bool {
		return g.relay.Open() == 3*each && strings.Count(log.String(), " reason=revoked ") == each
	}, "the denied tunnels have ended")
	t.Logf("%d of %d tunnels were revoked in %v", each, 4*each, time.Since(start))
	for _, c := range all {
		_, err := io.WriteString(c, "x")
		if err == nil {
			_, err = io.ReadFull(c, make([]byte, 1))
		}
		if denied := c.from == "127.0.0.2" && c.service == "one"; denied != (err != nil) {
			t.Errorf("the tunnel of %s to %s: %v, denied: %v", c.from, c.service, err, denied)
		}
	}
	if _, status := open("127.0.0.2", "one"); status != http.StatusForbidden {
		t.Errorf("a new request gets %d, want 403", status)
	}
}

// policyWorld is a Registry and a Router, with services and sessions of many callers.
type policyWorld struct {
	registry registry.Registry
	router   tunnel.Router
	revoker  *revoker
	services []*registry.Service
	policies []*policy.Policy
}

func newPolicyWorld(t testing.TB, services int) *policyWorld {
	t.Helper()
	w := &policyWorld{}
	for i := range services {
		name := fmt.Sprintf("s%d", i)
		w.services = append(w.services, &registry.Service{
			Name: name, Names: []tunnel.Pattern{{Suffix: tunnel.MustParseName(name + ".test")}}, Ports: []uint16{443}, Exposed: true,
			Endpoints: []registry.Endpoint{{Addr: netip.MustParseAddr("192.0.2.1"), Port: 443}},
		})
		w.policies = append(w.policies, &policy.Policy{Name: name, Targets: policy.Targets{Services: []string{name}}, Rules: []policy.Rule{{}}})
	}
	w.router = tunnel.Router{Resolver: &w.registry, Relay: &tunnel.Relay{}}
	w.revoker = newRevoker(&w.router, &reverse.Server{Groups: &reverse.Groups{}}, nil, slog.New(slog.DiscardHandler))
	w.registry.OnSwap = w.revoker.swapped
	t.Cleanup(func() { _ = w.router.Relay.Close() })
	return w
}

// swap makes a table with some policies more current.
func (w *policyWorld) swap(t testing.TB, more ...*policy.Policy) {
	t.Helper()
	table, err := w.registry.Merge(registry.Snapshot{Services: w.services, Policies: append(more, w.policies...)})
	if err != nil {
		t.Fatal(err)
	}
	w.registry.Swap(table)
}

// noSocket dials what carries nothing.
type noSocket struct{}

func (noSocket) DialContext(context.Context, string, string) (net.Conn, error) { return noConn{}, nil }

type noConn struct{ net.Conn }

func (noConn) Close() error { return nil }

type noCarrier struct{ s *tunnel.Session }

func (noCarrier) Progress() (in, out int64, moved time.Time) { return }
func (c noCarrier) Kill(why tunnel.Reason)                   { c.s.End(tunnel.End{Reason: why}) }

// open opens a session. It is false where that was denied.
func (w *policyWorld) open(t testing.TB, caller string, service int) bool {
	s, err := w.router.Open(t.Context(), &tunnel.Request{
		Proto: "connect-udp", Listener: ":443", Name: w.services[service].Names[0].Suffix, Port: 443, Datagrams: noSocket{},
		Source: netip.MustParseAddrPort("198.51.100.7:1000"), Peer: tunnel.Peer{ID: caller, Method: "mtls"},
	})
	if err != nil {
		if tunnel.ReasonOf(err) != tunnel.Denied {
			t.Errorf("%s, service %d: %v", caller, service, err)
		}
		return false
	}
	s.Carry(noCarrier{s})
	s.Recheck()
	return true
}

// against is a policy that denies a caller everything.
func against(caller string) *policy.Policy {
	return &policy.Policy{Name: "against-" + caller, Tier: policy.Admin, Action: policy.Deny, Rules: []policy.Rule{{Sources: &[]policy.Source{{Users: []string{caller}}}}}}
}

// TestNoTunnelOutlivesAChangeOfPolicies swaps tables all the time while callers come. At
// the end none stands that the last table denies, even if the last two tables but one
// are the same: each change counts.
func TestNoTunnelOutlivesAChangeOfPolicies(t *testing.T) {
	const callers, services, each = 4, 8, 300
	w := newPolicyWorld(t, services)
	w.swap(t, against("caller-0"))
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	var running, opening sync.WaitGroup
	running.Go(func() { _ = w.revoker.run(ctx) })
	done := make(chan struct{})
	running.Go(func() {
		for i := 0; ; i++ {
			select {
			case <-done:
				w.swap(t, against("caller-0"))
				return
			default:
				w.swap(t, against(fmt.Sprintf("caller-%d", i%callers)))
			}
		}
	})
	for i := range callers {
		opening.Go(func() {
			for n := range each {
				w.open(t, fmt.Sprintf("caller-%d", i), (n+i)%services)
			}
		})
	}
	opening.Wait()
	close(done)
	standing := func(caller string) (n int) {
		for l := range w.router.Relay.List() {
			if l.Peer.ID == caller {
				n++
			}
		}
		return n
	}
	testnet.Eventually(t, patience, func() bool {
		w.revoker.mu.Lock()
		idle := len(w.revoker.pending) == 0
		w.revoker.mu.Unlock()
		return idle && standing("caller-0") == 0 && w.registry.Recheck(&tunnel.Request{Proto: "connect-udp", Name: w.services[0].Names[0].Suffix, Port: 443,
			Peer: tunnel.Peer{ID: "caller-0", Method: "mtls"}}, &tunnel.Route{Service: "s0"}) != nil
	}, "no tunnel of the denied caller stands")
	stop()
	running.Wait()
	for l := range w.router.Relay.List() {
		w.router.Relay.End(l.ID, tunnel.Killed)
	}
}

// TestEveryTableCounts opens a tunnel by a table that is between two alike, which deny it,
// before anybody has looked at the changes.
func TestEveryTableCounts(t *testing.T) {
	w := newPolicyWorld(t, 2)
	w.swap(t, against("alice"))
	w.revoker.revoke()
	w.swap(t)
	if !w.open(t, "alice", 0) || !w.open(t, "bob", 0) {
		t.Fatal("the table in between denies a tunnel")
	}
	w.swap(t, against("alice"))
	w.revoker.revoke()
	if n := w.router.Relay.Open(); n != 1 {
		t.Errorf("%d tunnels stand, want bob's alone", n)
	}
	w.swap(t, against("alice"), against("carol")) // which changes nothing for him
	w.revoker.revoke()
	if n := w.router.Relay.EndRecords(tunnel.Killed, func(rec tunnel.Record) bool { return rec.Peer().ID == "bob" }); n != 1 {
		t.Errorf("bob has %d tunnels, want 1", n)
	}
}

// BenchmarkRevoke denies one caller, who has 1 in 1,000 of 100,000 tunnels to 1,000
// services, each with a policy of its own.
func BenchmarkRevoke(b *testing.B) {
	const tunnels, callers, services = 100_000, 1000, 1000
	w := newPolicyWorld(b, services)
	w.swap(b)
	w.revoker.revoke()
	for i := range tunnels {
		if !w.open(b, fmt.Sprintf("caller-%d", i%callers), (i/callers)%services) {
			b.Fatal("denied")
		}
	}
	b.ResetTimer()
	for i := range b.N {
		caller := fmt.Sprintf("caller-%d", i%callers)
		before := w.router.Relay.Open()
		w.swap(b, against(caller)) // with its compilation
		w.revoker.revoke()
		if got := before - w.router.Relay.Open(); got != tunnels/callers {
			b.Fatalf("%d tunnels ended, want %d", got, tunnels/callers)
		}
		b.StopTimer()
		w.swap(b)
		w.revoker.revoke()
		for n := range tunnels / callers {
			w.open(b, caller, n%services)
		}
		b.StartTimer()
	}
}
