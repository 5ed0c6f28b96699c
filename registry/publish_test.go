package registry

import (
	"fmt"
	"slices"
	"testing"

	"culvert.dev/tunnel"
)

func TestParsePortRange(t *testing.T) {
	for s, want := range map[string]PortRange{"20000-20999": {20000, 20999}, "443": {443, 443}, "1-65535": {1, 65535}, "7-7": {7, 7}} {
		got, err := ParsePortRange(s)
		if got != want || err != nil {
			t.Errorf("%q: got %v, %v", s, got, err)
		}
		if back, err := ParsePortRange(got.String()); back != got || err != nil {
			t.Errorf("%q: its text %q is %v, %v", s, got, back, err)
		}
	}
	for _, s := range []string{"", "-", "1-", "-1", "0-9", "00-9", "1-2-3", "9-1", "1-65536", "a-b", "1 - 2", "+1-2", "0x10-0x20", "1–9"} {
		if got, err := ParsePortRange(s); err == nil {
			t.Errorf("%q: got %v, want an error", s, got)
		}
	}
	if n := (PortRange{1, 65535}).Len(); n != 65535 {
		t.Errorf("length of every port: %d", n)
	}
}

func publishedService(t *testing.T, name string, ports ...uint16) *Service {
	s := service(t, name, ports...)
	s.Publish = true
	return s
}

// said is a list of Published as text, in its order.
func said(list []Published) []string {
	var out []string
	for _, p := range list {
		text := fmt.Sprintf("%s %s=%s:%d", p.Protocol, p.Service, p.Name, p.Port)
		if p.Assigned != 0 {
			text += fmt.Sprintf("@%d", p.Assigned)
		}
		out = append(out, text)
	}
	return out
}

func wantSaid(t *testing.T, what string, got []Published, want ...string) {
	t.Helper()
	if !slices.Equal(said(got), want) {
		t.Errorf("%s: got %q, want %q", what, said(got), want)
	}
}

func TestPublishable(t *testing.T) {
	private, unwanted := publishedService(t, "private.test"), publishedService(t, "unwanted.test")
	private.Exposed, unwanted.Publish = false, false
	wild := publishedService(t, "*.wild.test")
	both := publishedService(t, "*.both.test", 25)
	both.Names = append(both.Names, patterns(t, "mail.both.test", "other.both.test")...)
	late := publishedService(t, "one.test", 443, 8443) // 443 is the first's
	late.Name = "late"
	late.Names = append(late.Names, patterns(t, "late.test")...)
	hidden := publishedService(t, "one.test", 443) // all of it is
	hidden.Name = "hidden"
	tab, _ := Merge(Snapshot{Services: []*Service{
		publishedService(t, "one.test", 443), publishedService(t, "any.test"), publishedService(t, "two.test", 5432, 25),
		private, unwanted, wild, both,
	}}, Snapshot{Services: []*Service{late, hidden}})
	wantSaid(t, "publishable", tab.Publishable(),
		"tcp one.test=one.test:443", "tcp any.test=any.test:0", "tcp two.test=two.test:5432", "tcp two.test=two.test:25",
		"tcp *.both.test=mail.both.test:25", "tcp late=late.test:443", "tcp late=one.test:8443")
	// What is publishable leads to its service, and to no other.
	for _, p := range tab.Publishable() {
		f, err := tab.findVisible(&tunnel.Request{Name: p.Name, Port: p.Port})
		if err != nil || f.entry.Name != p.Service {
			t.Errorf("%v leads to %v, %v", p, f.entry, err)
		}
	}
	var none *Table
	if none.Publishable() != nil || none.Published() != nil || none.PublishedAs(tunnel.MustParseName("a.test")) != nil {
		t.Error("the nil table publishes something")
	}
}

// What is published stays as tables change, as long as the service does.
func TestPublish(t *testing.T) {
	told := 0
	r := &Registry{OnTable: func() { told++ }}
	if r.Publish(nil) != nil {
		t.Error("published before there was a table")
	}
	a, b := publishedService(t, "a.test", 1, 2), publishedService(t, "b.test")
	r.Swap(table(t, a, b))
	all := r.Table().Publishable()
	all[0].Assigned, all[1].Assigned, all[2].Assigned = 20003, 20001, 20002
	first := r.Table()
	second := r.Publish(append(all, Published{Protocol: "tcp", Service: "gone", Name: tunnel.MustParseName("gone.test"), Assigned: 20009}))
	if second != r.Table() || second.Generation() != 2 || told != 1 {
		t.Errorf("generation %d, told %d times", second.Generation(), told)
	}
	wantSaid(t, "before", first.Published())
	want := []string{"tcp a.test=a.test:2@20001", "tcp b.test=b.test:0@20002", "tcp a.test=a.test:1@20003"}
	wantSaid(t, "published", second.Published(), want...)
	wantSaid(t, "published as a.test", second.PublishedAs(tunnel.MustParseName("a.test")), want[0], want[2])
	if r.Publish(second.Published()) != second {
		t.Error("the same again is another table")
	}
	if f, err := second.findVisible(byName("b.test", 1, 1)); err != nil || f.entry.Name != "b.test" {
		t.Errorf("the table resolves no longer: %v, %v", f.entry, err)
	}

	a.Ports = []uint16{2}
	b.Exposed = false
	third := r.Swap(table(t, b, a, publishedService(t, "c.test")))
	wantSaid(t, "after a change", third.Published(), want[0])
	if third.Generation() != 3 || told != 2 {
		t.Errorf("generation %d, told %d times", third.Generation(), told)
	}
	r.Publish(nil)
	wantSaid(t, "in the end", r.Table().Published())
	if r.Table().PublishedAs(tunnel.MustParseName("a.test")) != nil {
		t.Error("still published by name")
	}
}

// Services keep their turn when something is published.
func TestPublishKeepsTurns(t *testing.T) {
	var r Registry
	r.Swap(table(t, publishedService(t, "a.test")))
	before := r.current.Load()
	before.turns[0].Add(7)
	list := r.Table().Publishable()
	list[0].Assigned = 20000
	r.Publish(list)
	if got := r.current.Load().turns[0].Load(); got != 7 {
		t.Errorf("turn %d, want 7", got)
	}
}
