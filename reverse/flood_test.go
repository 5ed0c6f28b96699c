package reverse

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"culvert.dev/tunnel"
)

// helloOf returns the first line of a connector that registers names.
func helloOf(names ...string) string {
	return `{"version":1,"register":[` + strings.Join(names, ",") + "]}\n"
}

// greet opens a session, and returns what the gateway answers.
func (g *testGateway) greet(t *testing.T, first string) (net.Conn, *welcome) {
	t.Helper()
	c, err := g.Dial(t.Context(), &tunnel.Endpoint{Host: Name.String(), Addr: netip.MustParseAddrPort("0.0.0.0:443")}, nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	_ = c.SetDeadline(time.Now().Add(pollLimit))
	if _, err := io.WriteString(c, first); err != nil {
		t.Fatal(err)
	}
	var w welcome
	if err := readLine(bufio.NewReader(c), &w, maxAnswer); err != nil {
		t.Fatalf("no answer: %v", err)
	}
	return c, &w
}

// A connector that registers as many names as its first line has room for hears of each what
// has become of it, and keeps the session.
func TestMoreNamesThanASessionMayHave(t *testing.T) {
	g := newTestGateway(t)
	g.groups.NamesPerOwner = 1 << 15 // the limit of the session is the only one
	var denied atomic.Bool
	g.groups.Authorize = func(req *tunnel.Request, name tunnel.Pattern, port uint16) ([]string, bool, error) {
		if denied.Load() {
			return nil, false, tunnel.Refusef(tunnel.Denied, "no policy")
		}
		return anything(req, name, port)
	}
	var all []string
	for i := 0; len(helloOf(all...)) < maxLine-20; i++ {
		all = append(all, fmt.Sprintf(`{"name":"n%d.a"}`, i))
	}
	_, w := g.greet(t, helloOf(all...))
	counts := map[tunnel.Reason]int{}
	for _, n := range w.Names {
		counts[n.Reason]++
	}
	if w.Error != "" || len(w.Names) != len(all) || counts[""] != maxNamesOf || counts[tunnel.Overload] != len(all)-maxNamesOf {
		t.Errorf("of %d names %v, error %q; want %d registered, and the others refused with %q", len(all), counts, w.Error, maxNamesOf, tunnel.Overload)
	}
	if first := w.Names[maxNamesOf]; first.Error != errNames.Error() {
		t.Errorf("the error for %v is %q", first.Name, first.Error)
	}
	if n := len(g.groups.List()); n != maxNamesOf {
		t.Errorf("%d names are registered", n)
	}
	// What is decided again leaves out none of them.
	denied.Store(true)
	g.Recheck()
	sessions, _ := g.open()
	for _, x := range sessions {
		x.mu.Lock()
		if len(x.results) != len(all) || x.refused != maxNamesOf {
			t.Errorf("%d results, %d of them decided again; want %d and %d", len(x.results), x.refused, len(all), maxNamesOf)
		}
		x.mu.Unlock()
	}
}

// Names that are all refused, with as long a text as there is, do not cost the session.
func TestAllNamesAreRefused(t *testing.T) {
	for _, c := range []struct {
		name string
		err  error
		want tunnel.Reason
	}{
		{"by policy", tunnel.Refusef(tunnel.Denied, "no policy"), tunnel.Denied},
		{"with a long text", tunnel.Refusef(tunnel.BadRequest, "%s", strings.Repeat(`"<`, 1000)), tunnel.BadRequest},
	} {
		t.Run(c.name, func(t *testing.T) {
			g := newTestGateway(t)
			g.groups.Authorize = func(*tunnel.Request, tunnel.Pattern, uint16) ([]string, bool, error) { return nil, false, c.err }
			client := client(nil, g)
			var names []Registration
			for i := range maxNamesOf {
				names = append(names, named(fmt.Sprintf("name-%d.edge.example", i)))
			}
			client.SetNames(names)
			run(t, client)
			eventually(t, "the session, with all names refused", func() bool {
				s := client.State()
				if len(s) != 1 || !s[0].Connected || len(s[0].Names) != len(names) {
					return false
				}
				for _, n := range s[0].Names {
					if n.Reason != c.want {
						return false
					}
				}
				return true
			})
			if n := len(g.Sessions()); n != 1 {
				t.Errorf("there are %d sessions, want 1", n)
			}
		})
	}
}

// All sessions of an owner together serve so many names, and what they leave is free again.
func TestOwnersHaveALimitOfMemberships(t *testing.T) {
	g := &Groups{Authorize: anything}
	var all []*Membership
	for len(all) < maxMemberships {
		reg := named(fmt.Sprintf("n%d.example", len(all)%DefaultNamesPerOwner))
		m, err := g.Join(by("a"), &fakeSession{}, reg)
		if err != nil {
			t.Fatalf("after %d: %v", len(all), err)
		}
		all = append(all, m)
	}
	if _, err := g.Join(by("a"), &fakeSession{}, named("n1.example")); reasonOf(err) != tunnel.Overload {
		t.Errorf("one more: got %v, want %q", err, tunnel.Overload)
	}
	if _, err := g.Join(by("b"), &fakeSession{}, named("b.example")); err != nil {
		t.Errorf("another owner: %v", err)
	}
	all[0].Leave()
	all[0].Leave()
	if _, err := g.Join(by("a"), &fakeSession{}, named("n1.example")); err != nil {
		t.Errorf("after one has left: %v", err)
	}
	if _, err := g.Join(by("a"), &fakeSession{}, named("n1.example")); reasonOf(err) != tunnel.Overload {
		t.Errorf("and one more: got %v, want %q", err, tunnel.Overload)
	}
}

// A stuckConn is a carrier whose Close waits for a peer that takes nothing, until it is aborted.
type stuckConn struct {
	net.Conn
	once    sync.Once
	aborted chan struct{}
}

func (c *stuckConn) CloseWrite() error { return nil }

func (c *stuckConn) Close() error {
	<-c.aborted
	return c.Conn.Close()
}

func (c *stuckConn) Abort() error {
	c.once.Do(func() { close(c.aborted) })
	return tunnel.Abort(c.Conn)
}

// What ends a session, an operator or a silent path, does not wait for a connector that takes
// nothing: many are ended one after the other.
func TestAStuckConnectorIsEndedAtOnce(t *testing.T) {
	for name, end := range map[string]func(*serverSession){
		"by an operator":   func(x *serverSession) { x.Kill(tunnel.Killed) },
		"by a silent path": func(x *serverSession) { x.carrier.kill() },
	} {
		t.Run(name, func(t *testing.T) {
			g := newTestGateway(t)
			g.wrap = func(c net.Conn) net.Conn {
				stuck := &stuckConn{Conn: c, aborted: make(chan struct{})}
				t.Cleanup(func() { _ = stuck.Abort() }) // before the gateway waits for its sessions
				return stuck
			}
			g.greet(t, helloOf(`{"name":"a.example"}`))
			sessions, _ := g.open()
			for _, x := range sessions {
				x.carrier.heard.Store(clock() + int64(time.Hour)) // or its silence would end it in the end
				go end(x)
			}
			eventually(t, "the session has ended", func() bool { return len(g.outcomes()) == 1 })
		})
	}
}
