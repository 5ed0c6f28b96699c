package reverse

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"strings"
	"testing"
	"time"

	"culvert.dev/tunnel"
)

// longNames returns so many names, which are longer together than a line.
func longNames(from, n int) (all []Registration) {
	for i := range n {
		label := strings.Repeat("a", 60)
		all = append(all, named(fmt.Sprintf("n%d.%s.%s.edge.example", from+i, label, label)))
	}
	return all
}

// A connector with more names than a line holds has all of them, takes up changes without
// losing any that stay, and comes back with all of them.
func TestNamesOfSeveralLines(t *testing.T) {
	g := newTestGateway(t)
	g.groups.NamesPerOwner = 4 * maxNamesOf
	c := client(nil, g)
	list := longNames(0, maxNamesOf)
	if b, err := json.Marshal(list); err != nil || len(b) < 2*maxLine {
		t.Fatalf("the names are %d bytes, %v", len(b), err)
	}
	c.SetNames(list)
	stop := run(t, c)
	defer stop()
	registered := func(want []Registration) func() bool {
		return func() bool {
			s := c.State()
			if len(s) != 1 || len(s[0].Names) != len(want) {
				return false
			}
			sessions := map[tunnel.Pattern]int{}
			for _, l := range g.groups.List() {
				sessions[l.Name] = len(l.Members)
			}
			for i, n := range s[0].Names {
				if n.Reason != "" || n.Name != want[i].Name || sessions[n.Name] != 1 {
					return false
				}
			}
			return true
		}
	}
	eventually(t, "all names are registered", registered(list))
	since := map[tunnel.Pattern]time.Time{}
	for _, l := range g.groups.List() {
		since[l.Name] = l.Members[0].Since
	}
	next := append(longNames(maxNamesOf, maxNamesOf/2), list[maxNamesOf/2:]...)
	c.SetNames(next)
	eventually(t, "the other names are registered", registered(next))
	kept := 0
	for _, l := range g.groups.List() {
		if at, was := since[l.Name]; was && len(l.Members) > 0 {
			if kept++; l.Members[0].Since != at {
				t.Errorf("%q, which is in both lists, has left meanwhile", l.Name)
			}
		}
	}
	if kept != maxNamesOf/2 {
		t.Errorf("%d names of the first list are there, want %d", kept, maxNamesOf/2)
	}
	open, _ := g.open()
	for _, x := range open {
		_ = x.carrier.Close()
	}
	eventually(t, "another session has all names", registered(next))
	c.SetNames(list[:1])
	eventually(t, "one name is left", registered(list[:1]))
}

// What no session may have is not sent, and the state of the session says so.
func TestNamesThatAreNotSent(t *testing.T) {
	g := newTestGateway(t)
	g.groups.NamesPerOwner = 4 * maxNamesOf
	c := client(nil, g)
	huge := named("huge.example")
	for range maxAllow {
		huge.Allow = append(huge.Allow, strings.Repeat("x", maxLine/maxAllow))
	}
	c.SetNames(append([]Registration{huge}, longNames(0, maxNamesOf+2)...))
	defer run(t, c)()
	eventually(t, "the names that may be are registered", func() bool {
		s := c.State()
		if len(s) != 1 || len(s[0].Names) != maxNamesOf+3 {
			return false
		}
		counts := map[tunnel.Reason]int{}
		for _, n := range s[0].Names {
			counts[n.Reason]++
		}
		return counts[""] == maxNamesOf && counts[tunnel.Overload] == 2 && counts[tunnel.TooLarge] == 1
	})
	if n := len(g.Sessions()); n != 1 {
		t.Errorf("%d sessions, want 1", n)
	}
}

// Each line of a list has a limit, and all of them together are the list.
func TestListsAreCut(t *testing.T) {
	list := longNames(0, maxNamesOf)
	var got []Registration
	lines := 0
	pipe, far := net.Pipe()
	defer pipe.Close()
	go func() {
		defer far.Close()
		_ = (&controlStream{conn: far}).sendList(list)
	}()
	text, err := io.ReadAll(pipe)
	if err != nil {
		t.Fatal(err)
	}
	in := bufio.NewReader(bytes.NewReader(text))
	for more := true; more; lines++ {
		var c control
		if err := readJSON(in, &c); err != nil {
			t.Fatalf("line %d: %v", lines, err)
		}
		if len(c.Register) == 0 {
			t.Fatalf("line %d has no name", lines)
		}
		got, more = append(got, c.Register...), c.More
	}
	if len(got) != len(list) || lines < 3 || lines > 5 {
		t.Fatalf("%d of %d names came in %d lines", len(got), len(list), lines)
	}
	for i := range got {
		if !got[i].equal(&list[i]) {
			t.Fatalf("name %d is %q, want %q", i, got[i].Name, list[i].Name)
		}
	}
}

// Lists that come in several lines are bounded, for each session and for its owner.
func TestListsHaveLimits(t *testing.T) {
	s := &Server{Groups: &Groups{Authorize: anything}}
	session := func(owner string) *serverSession { return &serverSession{server: s, req: by(owner)} }
	take := func(x *serverSession, list []Registration, more bool) (int, bool, error) {
		got, complete, err := x.takeList(&control{Register: list, More: more})
		return len(got), complete, err
	}
	t.Run("in parts", func(t *testing.T) {
		x := session("a")
		for range 3 {
			if n, complete, err := take(x, longNames(0, 100), true); n != 0 || complete || err != nil {
				t.Errorf("a part: %d names, complete %v, %v", n, complete, err)
			}
		}
		if n, complete, err := take(x, longNames(0, 1), false); n != 301 || !complete || err != nil {
			t.Errorf("the last part: %d names, complete %v, %v", n, complete, err)
		}
		if n, complete, err := take(x, longNames(0, 1), false); n != 1 || !complete || err != nil {
			t.Errorf("the next list: %d names, complete %v, %v", n, complete, err)
		}
	})
	t.Run("names", func(t *testing.T) {
		x := session("b")
		if _, _, err := take(x, longNames(0, maxNamesOf), true); err != nil {
			t.Errorf("at the limit: %v", err)
		}
		if _, _, err := take(x, longNames(0, 1), false); reasonOf(err) != tunnel.TooLarge {
			t.Errorf("over the limit: got %v, want %q", err, tunnel.TooLarge)
		}
	})
	large := func(bytes int) []Registration {
		reg := named("large.example")
		reg.Allow = []string{""}
		reg.Allow[0] = strings.Repeat("x", bytes-reg.bytes())
		return []Registration{reg}
	}
	t.Run("bytes", func(t *testing.T) {
		x := session("c")
		if _, _, err := take(x, large(maxListBytes), true); err != nil {
			t.Errorf("at the limit: %v", err)
		}
		if _, _, err := take(x, longNames(0, 1), false); reasonOf(err) != tunnel.TooLarge {
			t.Errorf("over the limit: got %v, want %q", err, tunnel.TooLarge)
		}
	})
	t.Run("bytes of the owner", func(t *testing.T) {
		var all []*serverSession
		for range maxOwnerLists / maxListBytes {
			all = append(all, session("d"))
			if _, _, err := take(all[len(all)-1], large(maxListBytes), false); err != nil {
				t.Fatalf("session %d: %v", len(all), err)
			}
		}
		if _, _, err := take(session("d"), longNames(0, 1), true); reasonOf(err) != tunnel.Overload {
			t.Errorf("one more: got %v, want %q", err, tunnel.Overload)
		}
		if _, _, err := take(session("e"), longNames(0, 1), false); err != nil {
			t.Errorf("another owner: %v", err)
		}
		if _, _, err := take(all[0], longNames(0, 1), false); err != nil {
			t.Errorf("a shorter list: %v", err)
		}
		if _, _, err := take(session("d"), longNames(0, 1), false); err != nil {
			t.Errorf("after that: %v", err)
		}
		s.mu.Lock()
		for _, x := range all {
			s.unhold(x)
		}
		left := s.lists["d"]
		s.mu.Unlock()
		if want := listBytes(longNames(0, 1)); left != want {
			t.Errorf("%d bytes are held of the owner, want %d", left, want)
		}
	})
}

// Each limit of names holds where the others are far.
func TestEachLimitOfNames(t *testing.T) {
	join := func(t *testing.T, g *Groups, owner string, reg Registration, want string) {
		t.Helper()
		_, err := g.Join(by(owner), &fakeSession{}, reg)
		if want == "" && err != nil || want != "" && (err == nil || !strings.Contains(err.Error(), want)) {
			t.Fatalf("got %v, want %q", err, want)
		}
	}
	t.Run("sessions of a name", func(t *testing.T) {
		g := &Groups{Authorize: anything}
		for range maxMembers {
			join(t, g, "a", named("one.example"), "")
		}
		join(t, g, "a", named("one.example"), fmt.Sprintf(`"one.example" has %d sessions, the limit`, maxMembers))
		join(t, g, "a", named("two.example"), "")
	})
	t.Run("names of all owners", func(t *testing.T) {
		g := &Groups{Authorize: anything}
		join(t, g, "a", named("first.example"), "")
		for i := len(g.names); i < maxNames-1; i++ { // as hold does it, but not in order
			name := named(fmt.Sprintf("n%d.example", i)).Name
			g.names[name] = &heldName{name: name, owner: "a", until: time.Now().Add(time.Hour)}
		}
		join(t, g, "b", named("one.example"), "")
		join(t, g, "b", named("two.example"), fmt.Sprintf("%d names are registered, the limit", maxNames))
		join(t, g, "b", named("one.example"), "")
	})
	long := strings.Repeat("x", maxText)
	for _, c := range []struct {
		name, want string
		reg        Registration
	}{
		{"ids", "", Registration{Allow: ids(maxAllow)}},
		{"more ids", "allow has 65 ids, limit 64", Registration{Allow: ids(maxAllow + 1)}},
		{"an id", "", Registration{Allow: []string{long}}},
		{"a longer id", "an id in allow has 257 bytes, limit 256", Registration{Allow: []string{long + "x"}}},
		{"a group", "", Registration{Group: long}},
		{"a longer group", "is not a name", Registration{Group: long + "x"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			c.reg.Name = named("a.example").Name
			join(t, &Groups{Authorize: anything}, "a", c.reg, c.want)
		})
	}
}

func ids(n int) (all []string) {
	for i := range n {
		all = append(all, fmt.Sprintf("id-%d", i))
	}
	return all
}
