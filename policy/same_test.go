package policy

import "testing"

func TestSame(t *testing.T) {
	set := func(change func(*Policy), more ...*Policy) *Set {
		p := &Policy{Name: "db", Origin: "culvert.yaml:12", Rules: []Rule{{Sources: &[]Source{{Users: []string{"alice"}}}}}}
		change(p)
		s, _ := Compile(append(more, p), nil)
		return s
	}
	as := func(*Policy) {}
	other := &Policy{Name: "another", Action: Deny}
	for _, c := range []struct {
		name string
		a, b *Set
		want bool
	}{
		{"none and none", nil, nil, true},
		{"none and one", nil, set(as), false},
		{"none and one in dry run", nil, set(func(p *Policy) { p.DryRun = true }), true},
		{"the same, made twice", set(as), set(as), true},
		{"another origin", set(as), set(func(p *Policy) { p.Origin = "culvert.yaml:13" }), true},
		{"another action", set(as), set(func(p *Policy) { p.Action = Deny }), false},
		{"no longer in dry run", set(func(p *Policy) { p.DryRun = true }), set(as), false},
		{"another user", set(as), set(func(p *Policy) { p.Rules = []Rule{{Sources: &[]Source{{Users: []string{"bob"}}}}} }), false},
		{"anybody", set(as), set(func(p *Policy) { p.Rules = []Rule{{}} }), false},
		{"nobody in place of anybody", set(func(p *Policy) { p.Rules = []Rule{{Sources: &[]Source{}}} }), set(func(p *Policy) { p.Rules = []Rule{{}} }), false},
		{"one more", set(as), set(as, other), false},
	} {
		if got, back := c.a.Same(c.b), c.b.Same(c.a); got != c.want || back != c.want {
			t.Errorf("%s: got %v and %v, want %v", c.name, got, back, c.want)
		}
	}
}
