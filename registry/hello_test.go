package registry

import (
	"fmt"
	"testing"

	"culvert.dev/tunnel"
)

func helloOf(name string, alpn ...string) *tunnel.Request {
	req := &tunnel.Request{Proto: "sni", ALPN: alpn, LocalPort: 443}
	if name != "" {
		req.Name = tunnel.MustParseName(name)
	}
	return req
}

// reasonOf is tunnel.ReasonOf for a refusal that may be nil.
func reasonOf(refusal *tunnel.Error) tunnel.Reason {
	if refusal == nil {
		return tunnel.Done
	}
	return refusal.Reason
}

// TestHelloMatch: the most specific name that a service has, there the client's first
// protocol that one lists, then the service without protocols; a wildcard and the
// catch-all come after.
func TestHelloMatch(t *testing.T) {
	make := func(label, name string, m HelloMatch) *Service {
		s := service(t, "x.test")
		s.Name, s.Match = label, m
		switch name {
		case "":
			s.Names = nil
		case "*":
			s.Names = []tunnel.Pattern{tunnel.AnyName}
		default:
			s.Names = patterns(t, name)
		}
		return s
	}
	tab := table(t,
		make("shop", "shop.test", HelloMatch{}),
		make("acme", "shop.test", HelloMatch{ALPN: []string{"acme-tls/1"}}),
		make("h2", "shop.test", HelloMatch{ALPN: []string{"h2", "h3"}}),
		make("wild h2", "*.test", HelloMatch{ALPN: []string{"h2"}}),
		make("wild", "*.test", HelloMatch{}),
		make("only h2", "only.shop.test", HelloMatch{ALPN: []string{"h2"}}),
		make("deep", "*.deep.test", HelloMatch{}),
		make("any", "*", HelloMatch{NoSNI: true}),
		make("any db", "*", HelloMatch{ALPN: []string{"postgresql"}, NoSNI: true}),
	)
	for _, row := range []struct {
		name string
		alpn []string
		want string
	}{
		{"shop.test", nil, "shop"},
		{"shop.test", []string{"http/1.1"}, "shop"},
		{"shop.test", []string{"acme-tls/1"}, "acme"},
		{"shop.test", []string{"http/1.1", "h3", "acme-tls/1"}, "h2"},
		{"shop.test", []string{"acme-tls/1", "h2"}, "acme"},
		{"a.test", []string{"h2"}, "wild h2"},
		{"a.test", []string{"acme-tls/1"}, "wild"},
		{"only.shop.test", []string{"h2"}, "only h2"},
		{"only.shop.test", []string{"http/1.1"}, "wild"},
		{"a.deep.test", []string{"h2"}, "deep"},
		{"a.other", nil, "any"},
		{"other", []string{"postgresql"}, "any db"},
		{"", nil, "any"},
		{"", []string{"h2"}, "any"},
		{"", []string{"h2", "postgresql"}, "any db"},
	} {
		f, err := tab.findVisible(helloOf(row.name, row.alpn...))
		if err != nil || f.entry.Name != row.want {
			t.Errorf("%q with %q: got %v, %v; want %s", row.name, row.alpn, f.entry, err, row.want)
		}
	}
	// Requests that came otherwise than by TLS know no ALPN, and no client without a name.
	byConnect := byName("shop.test", 443, 443)
	byConnect.Proto = "connect"
	if f, err := tab.findVisible(byConnect); err != nil || f.entry.Name != "shop" {
		t.Errorf("by CONNECT: got %v, %v; want shop", f.entry, err)
	}
	if _, err := tab.findVisible(&tunnel.Request{Proto: "connect"}); tunnel.ReasonOf(err) != tunnel.NoRoute {
		t.Errorf("CONNECT without a name: got %v, want %s", err, tunnel.NoRoute)
	}
	// What a client offers beyond the limit is not looked at, so a name where that would
	// decide refuses it.
	var many []string
	for i := range tunnel.MaxALPN {
		many = append(many, fmt.Sprint("x", i))
	}
	for name, want := range map[string]tunnel.Reason{"shop.test": tunnel.TooLarge, "a.deep.test": tunnel.Done} {
		_, refusal := tab.findVisible(helloOf(name, many...))
		if got := reasonOf(refusal); got != want {
			t.Errorf("%s with %d protocols: got %v, want %s", name, len(many), refusal, want)
		}
	}
	many[3] = "h2"
	if f, err := tab.findVisible(helloOf("shop.test", many...)); err != nil || f.entry.Name != "h2" {
		t.Errorf("h2 among %d protocols: got %v, %v; want h2", len(many), f.entry, err)
	}
	if n := testing.AllocsPerRun(100, func() {
		req := tunnel.Request{Proto: "sni", Name: tunnel.MustParseName("a.test"), ALPN: []string{"h2", "http/1.1"}}
		if _, err := tab.findVisible(&req); err != nil {
			t.Fatal(err)
		}
	}); n > 1 {
		t.Errorf("%v allocations a lookup, want none of its own", n)
	}
}

// TestNoCatchAll: without a service for them, unknown names and clients without a name
// are refused as ever.
func TestNoCatchAll(t *testing.T) {
	tab := table(t, service(t, "a.test"))
	for name, want := range map[string]tunnel.Reason{"b.test": tunnel.NoRoute, "": tunnel.NoSNI} {
		if _, err := tab.findVisible(helloOf(name, "h2")); tunnel.ReasonOf(err) != want {
			t.Errorf("%q: got %v, want %s", name, err, want)
		}
	}
}

// TestTwoCatchAlls: the first keeps it, and the other is a conflict.
func TestTwoCatchAlls(t *testing.T) {
	first, second := service(t, "a.test"), service(t, "b.test")
	for _, s := range []*Service{first, second} {
		s.Names, s.Match = []tunnel.Pattern{tunnel.AnyName}, HelloMatch{NoSNI: true}
	}
	tab, err := Merge(Snapshot{Services: []*Service{first, second}})
	if conflicts, ok := err.(Conflicts); !ok || len(conflicts) != 2 {
		t.Errorf("got %v, want conflicts for the name and for clients without one", err)
	}
	for _, name := range []string{"x.test", ""} {
		if f, refusal := tab.findVisible(helloOf(name)); refusal != nil || f.entry.Name != "a.test" {
			t.Errorf("%q: got %v, %v; want the first", name, f.entry, refusal)
		}
	}
}
