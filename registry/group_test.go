package registry

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"testing/synctest"
	"time"
)

// A groupTest is a Registry whose first source brings Groups.
type groupTest struct {
	*Registry
	file says
}

func startGroups(t *testing.T) groupTest {
	g := groupTest{&Registry{}, make(says)}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- g.Run(ctx, g.file) }()
	t.Cleanup(func() {
		cancel()
		<-done
	})
	return g
}

// replace has sources run in place of those before, with a service of the file's.
func (g groupTest) replace(t *testing.T, name string, sources ...Source) {
	g.file <- Update{Source: "file", Snapshot: Snapshot{Services: []*Service{service(t, name)}, Mesh: &Mesh{Network: name}}, Group: &Group{Sources: sources}}
	time.Sleep(2 * minRebuildInterval)
	synctest.Wait()
}

// say has a source send an update.
func (g groupTest) say(src says, what any) {
	src <- what
	time.Sleep(2 * minRebuildInterval)
	synctest.Wait()
}

// want compares the names that the table has.
func (g groupTest) want(t *testing.T, when, network string, has []string, without ...string) {
	t.Helper()
	if got := g.Table().Mesh().Network; got != network {
		t.Errorf("%s: the gateway is in %q, want %q", when, got, network)
	}
	for _, name := range has {
		if _, err := g.Resolve(t.Context(), byName(name, 443, 443)); err != nil {
			t.Errorf("%s: %s: %v", when, name, err)
		}
	}
	for _, name := range without {
		if _, err := g.Resolve(t.Context(), byName(name, 443, 443)); err == nil {
			t.Errorf("%s: %s is served", when, name)
		}
	}
}

func update(t *testing.T, source string, names ...string) Update {
	u := Update{Source: source}
	for _, n := range names {
		u.Services = append(u.Services, service(t, n))
	}
	return u
}

// A Group takes the place of another in one table, once all of its sources have sent a
// snapshot.
func TestGroupIsReplacedAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := startGroups(t)
		a, b := make(says), make(says)
		g.replace(t, "one.test", a, b)
		if n := g.PendingSources(); n == 0 {
			t.Error("no pending sources at the start")
		}
		g.say(a, update(t, "west", "west.test", "old.test"))
		g.say(b, update(t, "gateway-api", "route.test"))
		g.want(t, "at first", "one.test", []string{"one.test", "west.test", "old.test", "route.test"})
		before := g.Table().Generation()

		c, d := make(says), make(says)
		g.replace(t, "two.test", c, d)
		g.say(c, update(t, "east", "west.test"))
		g.want(t, "before the last source", "one.test", []string{"one.test", "west.test", "old.test", "route.test"}, "two.test")
		if n := g.PendingSources(); n != 0 {
			t.Errorf("%d pending sources while what was known is served, want none", n)
		}
		g.say(d, update(t, "gateway-api", "route.test"))
		g.want(t, "after it", "two.test", []string{"two.test", "west.test", "route.test"}, "one.test", "old.test")
		if n := g.Table().Generation(); n != before+1 {
			t.Errorf("%d tables, want one", n-before)
		}
		g.replace(t, "three.test")
		g.want(t, "without a source", "three.test", []string{"three.test"}, "west.test", "route.test")
	})
}

// What the sources before have sent stays while the new ones can't say what there is,
// each part until a new one knows it.
func TestRetainedUntilItIsKnown(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := startGroups(t)
		a := make(says)
		g.replace(t, "one.test", a)
		first := update(t, "west", "west.test")
		first.More = true
		a <- first
		g.say(a, update(t, "east", "east.test"))
		g.want(t, "at first", "one.test", []string{"west.test", "east.test"})

		b, c := make(says), make(says)
		g.replace(t, "two.test", b, c)
		g.say(b, errors.New("no API server"))
		g.want(t, "without an API server", "one.test", []string{"one.test", "west.test", "east.test"})
		time.Sleep(firstTableTimeout)
		synctest.Wait()
		g.want(t, "after a while", "two.test", []string{"two.test", "west.test", "east.test"}, "one.test")
		if n := g.PendingSources(); n != 0 {
			t.Errorf("%d pending sources while what was known is served, want none", n)
		}
		g.say(c, update(t, "west", "new.test"))
		g.want(t, "when one is known", "two.test", []string{"new.test", "east.test"}, "west.test")
		lost := Update{Source: "east", Err: errors.New("not listed")}
		lost.More = true
		b <- lost
		g.say(b, Update{Source: "clusters"})
		g.want(t, "when one is lost", "two.test", []string{"new.test", "east.test"})
		if source, _, _ := g.Stale(); source != "east" {
			t.Errorf("stale is %q, want east", source)
		}
		g.say(b, Update{Source: "east"})
		g.want(t, "when it is gone", "two.test", []string{"new.test"}, "east.test")
		if source, _, _ := g.Stale(); source != "" {
			t.Errorf("stale is %q, want nothing", source)
		}
	})
}

// A stopgap is in force where nothing is known, and not in the place of what a source before
// has sent.
func TestStopgap(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := startGroups(t)
		stopgap := update(t, "unread", "none.test")
		stopgap.StandsFor = "west"
		a := make(says)
		g.replace(t, "one.test", a)
		g.say(a, stopgap)
		g.want(t, "at the start", "one.test", []string{"none.test"})
		a <- update(t, "west", "west.test")
		g.say(a, Update{Source: "unread"})
		g.want(t, "when it is known", "one.test", []string{"west.test"}, "none.test")

		b := make(says)
		g.replace(t, "two.test", b)
		g.say(b, stopgap)
		time.Sleep(firstTableTimeout)
		synctest.Wait()
		g.want(t, "after a while", "two.test", []string{"west.test"}, "none.test")
		b <- update(t, "west", "new.test")
		g.say(b, Update{Source: "unread"})
		g.want(t, "when the new one is known", "two.test", []string{"new.test"}, "west.test", "none.test")

		g.replace(t, "three.test")
		c := make(says)
		g.replace(t, "four.test", c)
		g.say(c, stopgap)
		g.want(t, "where nothing was known", "three.test", nil, "none.test")
		time.Sleep(firstTableTimeout)
		synctest.Wait()
		g.want(t, "where nothing is known", "four.test", []string{"none.test"}, "new.test")
	})
}

// Groups that come one after the other end the ones before, and neither hold the table
// nor leave anything behind, though their sources never send anything.
func TestGroupsWithoutEnd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := startGroups(t)
		a := make(says)
		g.replace(t, "file0.test", a)
		g.say(a, update(t, "west", "west.test"))
		started, stopped := 0, 0
		for i := range 100 {
			g.file <- Update{Source: "file", Snapshot: Snapshot{Services: []*Service{service(t, fmt.Sprintf("file%d.test", i+1))}}, Group: &Group{
				Sources: []Source{make(says), make(says)},
				Start:   func() (stop func()) { started++; return func() { stopped++ } },
			}}
			time.Sleep(time.Second)
			synctest.Wait()
			g.want(t, "meanwhile", g.Table().Mesh().Network, []string{"west.test"})
		}
		if started != 100 || stopped != 99 {
			t.Errorf("%d groups have begun and %d ended, want 100 and 99", started, stopped)
		}
		// Each hold is of five seconds at the most.
		if n := g.Table().Generation(); n < 15 {
			t.Errorf("%d tables in 100 s, want one every 5 s", n)
		}
		g.replace(t, "last.test", Static{Name: "west", Snapshot: Snapshot{Services: []*Service{service(t, "east.test")}}})
		g.want(t, "at last", "last.test", []string{"last.test", "east.test"}, "west.test")
		if stopped != 100 {
			t.Errorf("%d groups have ended, want 100", stopped)
		}
	})
}
