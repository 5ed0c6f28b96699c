package gateway

import (
	"fmt"
	"net"
	"net/netip"
	"strings"
	"testing"

	wire "github.com/miekg/dns"

	"culvert.dev/dns"
	"culvert.dev/internal/testnet"
	"culvert.dev/policy"
	"culvert.dev/registry"
	"culvert.dev/tunnel"
)

// seeing is a policy that lets callers see what is selected.
func seeing(name string, targets policy.Targets, sources ...policy.Source) *policy.Policy {
	return &policy.Policy{Name: name, Verb: policy.Catalog, Targets: targets, Rules: []policy.Rule{{Sources: &sources}}}
}

// A catalogRig is a gateway that answers by DNS.
type catalogRig struct {
	*running
	at       map[string]string // addresses by network
	services []*registry.Service
}

func startCatalog(t *testing.T, deferIdentity bool) *catalogRig {
	t.Helper()
	r := &catalogRig{at: map[string]string{}}
	shop := func(pattern tunnel.Pattern, ep string) *registry.Service {
		to := netip.MustParseAddr(ep)
		return &registry.Service{
			Name: pattern.String(), Names: []tunnel.Pattern{pattern}, Ports: []uint16{5432}, Exposed: true, Endpoints: []registry.Endpoint{{Addr: to, Port: 5432}},
			NamedPorts: []registry.NamedPort{{Name: "pg", Protocol: "tcp", Port: 5432}},
		}
	}
	exact := func(name, ep string) *registry.Service {
		return shop(tunnel.Pattern{Suffix: tunnel.MustParseName(name)}, ep)
	}
	pods := exact("pods.shop.test", "192.0.2.4")
	pods.Headless, pods.Endpoints[0].Name = true, "pod-0"
	r.services = []*registry.Service{
		exact("all.shop.test", "192.0.2.1"), exact("db.shop.test", "192.0.2.2"),
		shop(tunnel.Pattern{Suffix: tunnel.MustParseName("w.shop.test"), Wildcard: true}, "192.0.2.3"), pods,
		exact("id.shop.test", "192.0.2.5"), exact("deep.below.shop.test", "192.0.2.6"),
	}
	r.running = launch(t, Config{DNS: &DNS{
		Server: &dns.Server{Zones: []string{"shop.test"}}, DeferIdentity: deferIdentity,
		Listeners: []DNSListener{{Transport: dns.UDP, Address: "127.0.0.1:0"}, {Transport: dns.TCP, Address: "127.0.0.1:0"}},
	}}, r.services...)
	for _, l := range r.Status().DNS.Listeners {
		network, addr, _ := strings.Cut(l.Address, "://")
		r.at[network] = addr
	}
	return r
}

// ask returns what a client at an address hears: the response code, how many records, and
// the type of the first one in the section that they are in.
func (r *catalogRig) ask(network, from, name string, typ uint16) string {
	r.t.Helper()
	var local net.Addr = &net.UDPAddr{IP: net.ParseIP(from)}
	if network == "tcp" {
		local = &net.TCPAddr{IP: net.ParseIP(from)}
	}
	c := &wire.Client{Net: network, Timeout: soon, Dialer: &net.Dialer{LocalAddr: local, Timeout: soon}}
	res, _, err := c.Exchange(new(wire.Msg).SetQuestion(name+".", typ), r.at[network])
	if err != nil {
		r.t.Fatalf("%s by %s: %v", name, network, err)
	}
	said := wire.RcodeToString[res.Rcode]
	switch {
	case len(res.Answer) > 0:
		said += fmt.Sprintf(", %d %s", len(res.Answer), wire.TypeToString[res.Answer[0].Header().Rrtype])
	case len(res.Ns) > 0:
		said += ", " + wire.TypeToString[res.Ns[0].Header().Rrtype]
	}
	return said
}

// set gives the gateway other policies and waits until it has them.
func (r *catalogRig) set(policies ...*policy.Policy) {
	r.t.Helper()
	before := r.registry.Table().Generation()
	r.feed <- registry.Snapshot{Services: r.services, Policies: policies}
	testnet.Eventually(r.t, soon, func() bool { return r.registry.Table().Generation() > before }, "there is a new table")
}

// A client that no policy lets see a service hears of no name of it, by any type, and no
// name that has only such services below it exists.
func TestDNSHidesWhatPolicyDoesNotShow(t *testing.T) {
	const friend, stranger = "127.0.0.2", "127.0.0.3"
	one := policy.Source{CIDRs: []netip.Prefix{netip.MustParsePrefix(friend + "/32")}}
	of := func(names ...string) policy.Targets { return policy.Targets{Names: names} }
	baseline := &policy.Policy{Name: "see-all", Tier: policy.Baseline, Verb: policy.Catalog, Targets: of("all.shop.test"), Rules: []policy.Rule{{}}}
	policies := []*policy.Policy{
		baseline, seeing("db", of("db.shop.test"), one), seeing("wild", of("*.w.shop.test"), one), seeing("pods", of("pods.shop.test"), one),
		seeing("deep", of("deep.below.shop.test"), one), seeing("id", of("id.shop.test"), policy.Source{Users: []string{"alice"}}),
	}
	const none = "NXDOMAIN, SOA"
	rows := []struct {
		name      string
		typ       uint16
		seen, not string
	}{
		{"all.shop.test", wire.TypeA, "NOERROR, 1 A", "NOERROR, 1 A"},
		{"db.shop.test", wire.TypeA, "NOERROR, 1 A", none},
		{"db.shop.test", wire.TypeAAAA, "NOERROR, SOA", none},
		{"db.shop.test", wire.TypeHTTPS, "NOERROR, SOA", none},
		{"_5432._https.db.shop.test", wire.TypeHTTPS, "NOERROR, 1 HTTPS", none},
		{"_pg._tcp.db.shop.test", wire.TypeSRV, "NOERROR, 1 SRV", none},
		{"_tcp.db.shop.test", wire.TypeSRV, "NOERROR, SOA", none},
		{"x.w.shop.test", wire.TypeA, "NOERROR, 1 A", none},
		{"w.shop.test", wire.TypeA, "NOERROR, SOA", none},
		{"below.shop.test", wire.TypeA, "NOERROR, SOA", none},
		{"pods.shop.test", wire.TypeA, "NOERROR, 1 A", none},
		{"pod-0.pods.shop.test", wire.TypeA, "NOERROR, 1 A", none},
		{"4.2.0.192.in-addr.arpa", wire.TypePTR, "NOERROR, 1 PTR", "REFUSED"}, // which is no zone of ours
		{"shop.test", wire.TypeSOA, "NOERROR, 1 SOA", "NOERROR, 1 SOA"},
		{"none.shop.test", wire.TypeA, none, none},
	}
	r := startCatalog(t, false)
	// Without a policy about it everybody sees all.
	for _, row := range rows {
		if got := r.ask("udp", stranger, row.name, row.typ); got != row.seen {
			t.Errorf("without policies, %s %s: got %s, want %s", row.name, wire.TypeToString[row.typ], got, row.seen)
		}
	}
	r.set(policies...)
	for _, network := range []string{"udp", "tcp"} {
		for _, row := range rows {
			for from, want := range map[string]string{friend: row.seen, stranger: row.not} {
				if got := r.ask(network, from, row.name, row.typ); got != want {
					t.Errorf("by %s from %s, %s %s: got %s, want %s", network, from, row.name, wire.TypeToString[row.typ], got, want)
				}
			}
		}
		if got := r.ask(network, friend, "id.shop.test", wire.TypeA); got != none {
			t.Errorf("what only an identity may see: got %s, want %s", got, none)
		}
	}
	// ANY is as any other type.
	if got := r.ask("tcp", stranger, "db.shop.test", wire.TypeANY); got != none {
		t.Errorf("ANY: got %s, want %s", got, none)
	}
	// A policy in dry run hides nothing, and the next question is answered by the policies
	// of its moment.
	dry := *policies[1]
	dry.DryRun = true
	r.set(&dry)
	if got := r.ask("udp", stranger, "db.shop.test", wire.TypeA); got != "NOERROR, 1 A" {
		t.Errorf("a policy in dry run: got %s", got)
	}
	r.set(policies[1])
	for name, want := range map[string]string{"db.shop.test": "NOERROR, 1 A", "all.shop.test": none} {
		if got := r.ask("udp", friend, name, wire.TypeA); got != want {
			t.Errorf("with one policy, %s: got %s, want %s", name, got, want)
		}
	}
	// The listing of what DNS answers agrees.
	for from, want := range map[string]tunnel.Reason{friend: "", stranger: tunnel.Denied} {
		res, err := ResolveFrom(r.names, "db.shop.test", from)
		if err != nil {
			t.Fatal(err)
		}
		if v := res.Views[0]; v.Reason != want || (want == "") != (len(v.DNS) == 1) {
			t.Errorf("resolve from %s: got reason %q and DNS %v, want %q", from, v.Reason, v.DNS, want)
		}
	}
	// A policy that cannot be understood hides what it selects.
	broken := *baseline
	broken.Invalid = "of a later version"
	r.set(policies[1], &broken)
	if got := r.ask("udp", friend, "all.shop.test", wire.TypeA); got != none {
		t.Errorf("a policy that cannot be understood: got %s, want %s", got, none)
	}
}

// Where identities are left to the services, clients of DNS see what only some may use.
func TestDNSDefersIdentity(t *testing.T) {
	r := startCatalog(t, true)
	r.set(seeing("id", policy.Targets{Names: []string{"id.shop.test"}}, policy.Source{Users: []string{"alice"}, CIDRs: []netip.Prefix{netip.MustParsePrefix("127.0.0.2/32")}}))
	for from, want := range map[string]string{"127.0.0.2": "NOERROR, 1 A", "127.0.0.3": "NXDOMAIN, SOA"} {
		if got := r.ask("udp", from, "id.shop.test", wire.TypeA); got != want {
			t.Errorf("from %s: got %s, want %s", from, got, want)
		}
	}
}
