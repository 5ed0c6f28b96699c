package reverse

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"testing"
	"testing/synctest"
	"time"

	"culvert.dev/policy"
	"culvert.dev/registry"
	"culvert.dev/tunnel"
)

// fakeSession is a Session that answers with the error, or counts what it opens.
type fakeSession struct {
	err     error
	streams int
	weak    bool
	asked   []string
}

func (s *fakeSession) Open(_ context.Context, _ *tunnel.Request, reg *Registration) (net.Conn, error) {
	s.asked = append(s.asked, reg.Name.String())
	if s.err != nil {
		return nil, s.err
	}
	s.streams++
	c, _ := net.Pipe()
	return c, nil
}

func (s *fakeSession) Streams() int { return s.streams }

func (s *fakeSession) Security() tunnel.Security {
	if s.weak {
		return tunnel.Plain
	}
	return tunnel.Mutual
}

// by is a request of a connector with an id.
func by(id string) *tunnel.Request {
	req := &tunnel.Request{Proto: "connect", Source: netip.MustParseAddrPort("192.0.2.1:1234")}
	if id != "" {
		req.Peer = tunnel.Peer{ID: id, Method: "mtls"}
	}
	return req
}

// named registers a name, or a wildcard.
func named(name string) Registration {
	p, err := tunnel.ParsePattern(name)
	if err != nil {
		panic(err)
	}
	return Registration{Name: p}
}

// anything permits every name, as a LiveService.
func anything(*tunnel.Request, tunnel.Pattern, uint16) ([]string, bool, error) {
	return nil, false, nil
}

func reasonOf(err error) tunnel.Reason {
	if err == nil {
		return ""
	}
	return tunnel.ReasonOf(err)
}

func TestNamesHaveOneOwner(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := &Groups{Authorize: anything}
		first, err := g.Join(by("a"), &fakeSession{}, named("cam.edge.example"))
		if err != nil {
			t.Fatal(err)
		}
		refused := func(owner, name string) {
			t.Helper()
			if _, err := g.Join(by(owner), &fakeSession{}, named(name)); reasonOf(err) != tunnel.Denied {
				t.Errorf("%s joined %s: got %v, want a denial", owner, name, err)
			}
		}
		refused("", "other.edge.example")
		refused("b", "cam.edge.example")
		refused("b", "*.edge.example")
		refused("b", "*.example")
		second, err := g.Join(by("a"), &fakeSession{}, named("cam.edge.example"))
		if err != nil {
			t.Errorf("the same owner: %v", err)
		}
		wild, err := g.Join(by("a"), &fakeSession{}, named("*.edge.example"))
		if err != nil {
			t.Fatal(err)
		}
		refused("b", "x.edge.example")
		refused("b", "*.y.edge.example")
		wild.Leave()
		first.Leave()
		first.Leave()
		second.Leave()
		refused("b", "cam.edge.example")
		time.Sleep(DefaultHoldFor - time.Second)
		refused("b", "cam.edge.example")
		if g.Service(tunnel.MustParseName("cam.edge.example")) == nil {
			t.Error("the name does not resolve while it is held")
		}
		time.Sleep(2 * time.Second)
		if g.Service(tunnel.MustParseName("cam.edge.example")) != nil {
			t.Error("the name resolves after its time")
		}
		m, err := g.Join(by("b"), &fakeSession{}, named("cam.edge.example"))
		if err != nil {
			t.Fatalf("after the time: %v", err)
		}
		if list := g.List(); len(list) != 1 || list[0].Owner != "b" || len(list[0].Members) != 1 {
			t.Errorf("the list is %+v", list)
		}
		m.Leave()
	})
}

func TestOwnersHaveALimit(t *testing.T) {
	g := &Groups{Authorize: anything, NamesPerOwner: 2}
	for _, c := range []struct {
		owner, name string
		want        tunnel.Reason
	}{
		{"a", "one.example", ""}, {"a", "two.example", ""}, {"a", "two.example", ""},
		{"a", "three.example", tunnel.Overload}, {"b", "three.example", ""},
		{"a", "x.culvert.alt", tunnel.BadRequest}, {"a", "culvert.alt", tunnel.BadRequest}, {"a", "*.culvert.alt", tunnel.BadRequest},
	} {
		if _, err := g.Join(by(c.owner), &fakeSession{}, named(c.name)); reasonOf(err) != c.want {
			t.Errorf("%s joined %s: got %v, want %q", c.owner, c.name, err, c.want)
		}
	}
}

func TestNobodyRegistersWithoutPermission(t *testing.T) {
	if _, err := new(Groups).Join(by("a"), &fakeSession{}, named("a.example")); reasonOf(err) != tunnel.Denied {
		t.Errorf("got %v, want a denial", err)
	}
}

// A table decides by its policies with the verb register, and keeps the names of its
// services to the groups that these have.
func TestTheTableDecidesWhoServesAName(t *testing.T) {
	allow := func(name string, names []string, ids ...string) *policy.Policy {
		sources := []policy.Source{}
		for _, id := range ids {
			sources = append(sources, policy.Source{Users: []string{id}})
		}
		return &policy.Policy{Name: name, Verb: policy.Register, Targets: policy.Targets{Names: names}, Rules: []policy.Rule{{Sources: &sources}}}
	}
	g := new(Groups)
	r := &registry.Registry{
		Live: g.Service,
		NewTransport: func(_ *registry.Service, ep *registry.Endpoint, _ *registry.Gateway) (tunnel.Transport, error) {
			return g.Transport(ep.Group, false), nil
		},
	}
	g.Authorize = r.MayRegister
	pattern := func(s string) []tunnel.Pattern { return []tunnel.Pattern{named(s).Name} }
	table, err := r.Merge(registry.Snapshot{
		Services: []*registry.Service{
			{Name: "web", Names: pattern("web.edge.example"), Exposed: true, Endpoints: []registry.Endpoint{{Addr: netip.MustParseAddr("192.0.2.7"), Port: 443}}},
			{Name: "cam", Names: pattern("cam.edge.example"), Exposed: true, Endpoints: []registry.Endpoint{{Group: "cam"}}},
			{Name: "all", Names: []tunnel.Pattern{tunnel.AnyName}, Exposed: true, Endpoints: []registry.Endpoint{{Addr: netip.MustParseAddr("192.0.2.8"), Port: 443}}},
		},
		Policies: []*policy.Policy{
			allow("edge", []string{"*.edge.example"}, "a"),
			allow("part", []string{"one.part.example"}, "a"),
			{Name: "secret", Action: policy.Deny, Tier: policy.Admin, Targets: policy.Targets{Names: []string{"secret.edge.example"}}, Rules: []policy.Rule{{}}},
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	r.Swap(table)
	for _, c := range []struct {
		owner, name, group string
		want               tunnel.Reason
	}{
		{"b", "live.edge.example", "", tunnel.Denied},
		{"a", "live.example", "", tunnel.Denied},
		{"a", "web.edge.example", "", tunnel.Denied},
		{"a", "cam.edge.example", "other", tunnel.Denied},
		{"a", "*.part.example", "", tunnel.Denied},
		{"a", "one.part.example", "", ""},
		{"a", "cam.edge.example", "cam", ""},
		{"a", "cam.edge.example", "", ""},
		{"a", "live.edge.example", "", ""},
		{"a", "secret.edge.example", "", ""}, // to register it, not to connect
	} {
		reg := named(c.name)
		reg.Group = c.group
		if _, err := g.Join(by(c.owner), &fakeSession{}, reg); reasonOf(err) != c.want {
			t.Errorf("%s joined %s in group %q: got %v, want %q", c.owner, c.name, c.group, err, c.want)
		}
	}
	// A deny that is about a part of the catch-all's names denies all of them.
	for _, c := range []struct {
		name, service string
		want          tunnel.Reason
	}{
		{"web.edge.example", "web", ""}, {"cam.edge.example", "cam", ""}, {"live.edge.example", "live.edge.example", ""},
		{"secret.edge.example", "secret.edge.example", tunnel.Denied}, {"nobody.edge.example", "all", tunnel.Denied}, {"reverse.culvert.alt", "", tunnel.NoRoute},
	} {
		route, err := r.Resolve(t.Context(), &tunnel.Request{Proto: "sni", Name: tunnel.MustParseName(c.name), LocalPort: 443})
		if reasonOf(err) != c.want || route.Service != c.service {
			t.Errorf("%s: got service %q and %v, want %q and %q", c.name, route.Service, err, c.service, c.want)
		}
	}
}

func TestStreamsGoToTheLeastLoadedSession(t *testing.T) {
	g := &Groups{Authorize: anything}
	light, heavy, broken := &fakeSession{weak: true}, &fakeSession{}, &fakeSession{err: ErrEnded}
	join := func(s *fakeSession, weight uint16) *Membership {
		reg := named("a.example")
		reg.Weight = weight
		m, err := g.Join(by("a"), s, reg)
		if err != nil {
			t.Fatal(err)
		}
		return m
	}
	join(broken, 1)
	lightMember := join(light, 1)
	join(heavy, 3)
	tr := g.Transport("@a.example", false)
	dial := func(want error) {
		t.Helper()
		c, err := tr.Dial(t.Context(), &tunnel.Endpoint{}, by("caller"))
		if !errors.Is(err, want) {
			t.Fatalf("got %v, want %v", err, want)
		}
		if err == nil {
			_ = c.Close()
		}
	}
	for range 40 {
		dial(nil)
	}
	if light.streams < 9 || light.streams > 11 || heavy.streams < 29 || len(broken.asked) == 0 {
		t.Errorf("the sessions have %d and %d streams, want 10 and 30; the broken one was asked %d times", light.streams, heavy.streams, len(broken.asked))
	}
	if got := tr.Info().Security; got != tunnel.Plain {
		t.Errorf("the security is %v, want that of the weakest session", got)
	}
	lightMember.Drain()
	before := light.streams
	for range 10 {
		dial(nil)
	}
	if light.streams != before {
		t.Errorf("a session that drains got %d streams", light.streams-before)
	}
	heavy.err = &tunnel.Error{Reason: tunnel.Denied, Err: errors.New("no"), Final: true}
	broken.asked = nil
	broken.streams = 1000
	dial(heavy.err)
	if len(broken.asked) != 0 {
		t.Error("another session was asked after a final refusal")
	}
	if err := g.Transport("@b.example", false).Check(&tunnel.Endpoint{}); reasonOf(err) != tunnel.DialFailed {
		t.Errorf("a group without sessions: got %v, want %q", err, tunnel.DialFailed)
	}
}
