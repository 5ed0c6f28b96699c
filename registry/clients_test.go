package registry

import (
	"net/netip"
	"strings"
	"testing"

	"culvert.dev/tunnel"
)

func filterOf(allow, deny string) ClientFilter {
	parse := func(list string) (out []netip.Prefix) {
		for p := range strings.FieldsSeq(list) {
			out = append(out, netip.MustParsePrefix(p))
		}
		return out
	}
	return ClientFilter{Allow: parse(allow), Deny: parse(deny)}
}

func TestClientFilter(t *testing.T) {
	for _, row := range []struct {
		allow, deny string
		client      string
		want        string // in the refusal; "" admits
	}{
		{"", "", "192.0.2.1", ""},
		{"", "", "", ""},
		{"10.0.0.0/8", "", "10.1.2.3", ""},
		{"10.0.0.0/8", "", "::ffff:10.1.2.3", ""},
		{"::ffff:10.0.0.0/104", "", "10.1.2.3", ""},
		{"10.0.0.0/8", "", "192.0.2.1", "none of the allowed ranges"},
		{"10.0.0.0/8", "", "2001:db8::1", "none of the allowed ranges"},
		{"10.0.0.0/8 2001:db8::/32", "", "2001:db8::1", ""},
		{"", "10.0.0.0/8", "10.1.2.3", "a denied range"},
		{"", "10.0.0.0/8", "192.0.2.1", ""},
		{"10.0.0.0/8", "10.9.0.0/16", "10.9.1.1", "a denied range"},
		{"10.9.1.1/32", "10.0.0.0/8", "10.9.1.1", "a denied range"}, // the longer prefix does not win
		{"0.0.0.0/0", "", "192.0.2.1", ""},
		{"0.0.0.0/0", "", "2001:db8::1", "none of the allowed ranges"},
		{"", "fe80::/10", "fe80::1%eth0", "a denied range"},
		{"10.0.0.0/8", "", "", "is not known"},
		{"", "10.0.0.0/8", "", "is not known"},
	} {
		req := &tunnel.Request{}
		if row.client != "" {
			req.Source = netip.AddrPortFrom(netip.MustParseAddr(row.client), 1)
		}
		err := compileClientFilter(filterOf(row.allow, row.deny)).admits(req, "service", "a.test", "x.yaml:1")
		switch {
		case row.want == "" && err != nil, row.want != "" && (err == nil || !strings.Contains(err.Error(), row.want) || err.Reason != tunnel.Denied):
			t.Errorf("allow %q, deny %q, client %q: got %v, want %q", row.allow, row.deny, row.client, err, row.want)
		}
	}
}

// A filter holds whichever way a client asks for the service, and on every kind of
// route.
func TestClientFilterOnEveryRoute(t *testing.T) {
	guarded := filterOf("10.0.0.0/8", "10.9.0.0/16")
	named := service(t, "a.test")
	named.Clients = guarded
	named.Addresses = []netip.Addr{netip.MustParseAddr("198.51.100.1")}
	l := listenerOf("l", 8443)
	bySection := &Section{Name: "section", Host: host(t, "section.test"), Clients: guarded, Rules: []*Rule{ruleOf(t, "r1", nil, backendOf(1, "192.0.2.3:1"))}}
	byRule := &Section{Name: "rule", Host: host(t, "rule.test"), Rules: []*Rule{ruleOf(t, "r2", nil, backendOf(1, "192.0.2.4:1"))}}
	byRule.Rules[0].Clients = guarded
	byService := &Section{Name: "service", Host: host(t, "service.test"), Rules: []*Rule{ruleOf(t, "r3", nil, backendOf(1, "192.0.2.5:1"))}}
	byService.Rules[0].Backends[0].Service.Clients = guarded
	byReference := &Section{Name: "reference", Host: host(t, "reference.test"), Rules: []*Rule{ruleOf(t, "r4", nil, Backend{Weight: 1, Service: &Service{Name: "a", Ports: []uint16{443}}, ServiceName: tunnel.MustParseName("a.test")})}}
	l.Sections = []*Section{bySection, byRule, byService, byReference}

	r := &Registry{}
	table, err := Merge(Snapshot{Services: []*Service{named}, Listeners: []*Listener{l}})
	if err != nil {
		t.Fatal(err)
	}
	r.Swap(table)
	for what, req := range map[string]tunnel.Request{
		"name":      *byName("a.test", 443, 443),
		"address":   *byAddr("198.51.100.1", 443),
		"endpoint":  *byAddr("192.0.2.1", 8443),
		"section":   *confined("section", "section.test"),
		"rule":      *confined("rule", "rule.test"),
		"service":   *confined("service", "service.test"),
		"reference": *confined("reference", "reference.test"),
	} {
		for client, want := range map[string]tunnel.Reason{"10.1.1.1": tunnel.Done, "10.9.1.1": tunnel.Denied, "192.0.2.9": tunnel.Denied} {
			req.Source = netip.AddrPortFrom(netip.MustParseAddr(client), 1)
			if _, err := r.Resolve(t.Context(), &req); tunnel.ReasonOf(err) != want {
				t.Errorf("by %s from %s: got %v, want %s", what, client, err, want)
			}
			if req.ListenerOnly {
				if err := r.Table().PrecheckRoute(&req); tunnel.ReasonOf(err) != want {
					t.Errorf("precheck by %s from %s: got %v, want %s", what, client, err, want)
				}
				if got := r.Table().SectionAdmits(req.Listener, &req); got != (want == tunnel.Done || what != "section") {
					t.Errorf("section %q from %s: admits %t", req.Listener, client, got)
				}
			}
		}
	}
	if n := testing.AllocsPerRun(100, func() {
		req := byName("a.test", 443, 443)
		req.Source = netip.MustParseAddrPort("10.1.1.1:1")
		if _, err := r.Table().findVisible(req); err != nil {
			t.Fatal(err)
		}
	}); n > 1 { // the request
		t.Errorf("%v allocations a lookup, want 1", n)
	}
}

// An endpoint that several services share is reached by the one that admits the client.
func TestSharedEndpointAndClientFilters(t *testing.T) {
	first, second := service(t, "a.test"), service(t, "b.test")
	first.Clients, second.Clients = filterOf("10.0.0.0/8", ""), filterOf("172.16.0.0/12", "")
	table := table(t, first, second)
	for client, want := range map[string]string{"10.0.0.1": "a.test", "172.16.0.1": "b.test", "192.0.2.9": ""} {
		req := byAddr("192.0.2.1", 8443)
		req.Source = netip.AddrPortFrom(netip.MustParseAddr(client), 1)
		f, refusal := table.findVisible(req)
		if (refusal == nil) != (want != "") || refusal == nil && f.entry.Name != want {
			t.Errorf("from %s: got %v, %v; want %q", client, f.entry, refusal, want)
		}
	}
}
