package reverse

import (
	"bytes"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"culvert.dev/tunnel"
)

// A logText is what was logged.
type logText struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *logText) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

// count returns how often text was logged.
func (l *logText) count(text string) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return strings.Count(l.b.String(), text)
}

// logTo has what g logs noted.
func (g *testGateway) logTo(l *logText) {
	g.groups.Log = slog.New(slog.NewTextHandler(l, nil))
	g.Log = g.groups.Log
}

// Two connectors of one owner with one name share its requests. The log says so once, the list of
// names has their number, and the second connector knows. A connector whose old session is
// not gone yet is no second one.
func TestSharedNamesAreSeen(t *testing.T) {
	g, logged := newTestGateway(t), &logText{}
	g.logTo(logged)
	one := client([]Registration{named("cam.example"), named("door.example")}, g)
	run(t, one)
	eventually(t, "the first connector", func() bool { return g.members("cam.example") == 1 })
	sessions, _ := g.open()
	again := &fakeSession{}
	m, err := g.groups.join(by(g.owner), again, sessions[0].connector, named("cam.example"))
	if err != nil {
		t.Fatal(err)
	}
	connectors := func(name string) int {
		for _, l := range g.groups.List() {
			if l.Name.String() == name {
				return l.Connectors
			}
		}
		return 0
	}
	if n := connectors("cam.example"); n != 1 || g.groups.isShared(m) {
		t.Errorf("another session of the same connector: %d connectors, want 1", n)
	}
	m.Leave()
	const line = "name has several connectors, which share its requests"
	if n := logged.count(line); n != 0 {
		t.Errorf("the log has %d lines about one connector", n)
	}
	two := client([]Registration{named("cam.example")}, g)
	run(t, two)
	eventually(t, "the second connector", func() bool { return g.members("cam.example") == 2 })
	eventually(t, "it knows", func() bool { s := two.State(); return len(s) == 1 && len(s[0].Names) == 1 && s[0].Names[0].Shared })
	if s := one.State(); s[0].Names[0].Shared {
		t.Errorf("the first one was told %+v", s[0].Names)
	}
	if n := logged.count(`level=INFO msg="` + line + `" name=cam.example connectors=2 owner=` + g.owner); n != 1 {
		t.Errorf("the log has %d lines about the second one, want 1", n)
	}
	if n, m := connectors("cam.example"), connectors("door.example"); n != 2 || m != 1 {
		t.Errorf("the list has %d and %d connectors, want 2 and 1", n, m)
	}
}

// Many names that are shared, or refused, are a few lines each.
func TestManySharedNamesAreAFewLines(t *testing.T) {
	g, logged := newTestGateway(t), &logText{}
	g.logTo(logged)
	var list []Registration
	for _, name := range []string{"a.example", "b.example", "c.example", "d.example", "e.example"} {
		list = append(list, named(name))
	}
	run(t, client(list, g))
	eventually(t, "the first connector", func() bool { return g.members("e.example") == 1 })
	run(t, client(list, g))
	eventually(t, "the second connector", func() bool { return g.members("e.example") == 2 })
	eventually(t, "a line about the others", func() bool {
		return logged.count(`msg="more names have several connectors, which share their requests" names=2`) == 1
	})
	if n := logged.count("name has several connectors"); n != maxLogged {
		t.Errorf("%d names are logged, want %d", n, maxLogged)
	}
}

// A name that a connector does not get is an Outcome with its Reason, as any refused request, and
// is listed with the session. One that policies give back is logged, as it was when they took it.
func TestRefusedNamesAreTold(t *testing.T) {
	g, logged := newTestGateway(t), &logText{}
	g.logTo(logged)
	var denied atomic.Bool
	g.groups.Authorize = func(req *tunnel.Request, name tunnel.Pattern, port uint16) ([]string, bool, error) {
		if name.String() != "mine.example" || denied.Load() {
			return nil, false, tunnel.Refusef(tunnel.Denied, "not %q", name)
		}
		return anything(req, name, port)
	}
	withPort := named("no.example")
	withPort.Port = 443
	run(t, client([]Registration{named("mine.example"), withPort, named("*.no.example"), named("three.example"), named("four.example")}, g))
	eventually(t, "the session", func() bool { return len(g.Sessions()) == 1 && len(g.Sessions()[0].Refused) == 4 })
	eventually(t, "the rest is logged", func() bool { return logged.count(`msg="more names refused to a connector" names=1`) == 1 })
	g.mu.Lock()
	var targets []string
	for _, o := range g.ends {
		if o.Reason == tunnel.Denied && o.Peer.ID == g.owner {
			targets = append(targets, o.Target)
		}
	}
	g.mu.Unlock()
	if got, want := strings.Join(targets, " "), "no.example:443 *.no.example three.example"; got != want {
		t.Errorf("the Outcomes are of %q, want %q", got, want)
	}
	if n := logged.count("level=WARN"); n != 0 {
		t.Errorf("%d lines of the log are warnings", n)
	}
	if r := g.Sessions()[0].Refused[0]; r.Name.String() != "no.example" || r.Port != 443 || r.Reason != tunnel.Denied {
		t.Errorf("the session has %+v", r)
	}

	denied.Store(true)
	g.Recheck()
	if n := logged.count(`level=WARN msg="name is no longer registered" name=mine.example`); n != 1 {
		t.Errorf("the log has %d lines about the name that is lost, want 1", n)
	}
	if n := len(g.Sessions()[0].Refused); n != 5 {
		t.Errorf("the session has %d refused names, want 5", n)
	}
	denied.Store(false)
	g.Recheck()
	if n := logged.count(`level=INFO msg="name is now registered" name=mine.example`); n != 1 {
		t.Errorf("the log has %d lines about the name that is back, want 1", n)
	}
}

// Where no connector is there, the error names the name, or the group of the configuration.
func TestNoSessionSaysOfWhat(t *testing.T) {
	for group, want := range map[string]string{"@cam.example": `no connector has a session for "cam.example"`, "cam": `no connector has a session for group "cam"`} {
		if err := (groupTransport{groups: &Groups{}, name: group}).errNoSession(); !strings.Contains(err.Error(), want) || tunnel.ReasonOf(err) != tunnel.DialFailed {
			t.Errorf("group %q: %v, want %q", group, err, want)
		}
	}
}
