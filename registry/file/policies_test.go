package file

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"culvert.dev/policy"
	"culvert.dev/registry"
	"culvert.dev/tunnel"
)

// What the file says is what the registry decides by.
func TestPolicies(t *testing.T) {
	cfg, err := Load("testdata/good/policies.yaml")
	if err != nil {
		t.Fatal(err)
	}
	m, err := cfg.Mesh.Merge(cfg.Snapshot())
	if err != nil {
		t.Fatal(err)
	}
	r := &registry.Registry{}
	r.Swap(m)
	const api, old = "spiffe://corp.example/ns/shop/sa/api", "spiffe://old.example/ns/shop/sa/api"
	peer := func(id string) tunnel.Peer {
		switch {
		case id == "":
			return tunnel.Peer{}
		case strings.HasPrefix(id, "spiffe://"):
			return tunnel.Peer{ID: id, Method: "mtls"}
		}
		return tunnel.Peer{ID: id, Method: "basic"}
	}
	for _, test := range []struct {
		name, listener, id, from string
		port                     uint16
		want                     string // the policy, with a minus where it denies
	}{
		{"db.shop.example", ":8080", api, "10.1.2.3", 5432, "db"},
		{"db.shop.example", ":8080", api, "192.0.2.1", 5432, "-db"},
		{"db.shop.example", ":8080", "alice", "192.0.2.1", 5432, "db"},
		{"db.shop.example", ":8080", "alice", "192.0.2.1", 8500, "db"},
		{"db.shop.example", ":8080", "alice", "192.0.2.1", 22, "-db"},
		{"db.shop.example", ":443", "", "10.1.2.3", 5432, "-db"},
		{"db.shop.example", ":8443", "", "10.1.2.3", 5432, "db"},
		{"a.pay.example", ":8080", old, "10.1.2.3", 443, "-no-legacy"},
		{"a.pay.example", ":8080", api, "10.1.2.3", 443, ""},
		{"a.pay.example", ":443", "", "10.1.2.3", 443, "-no-legacy"},
		{"a.pay.example", ":8443", "", "10.1.2.3", 443, ""},
		{"a.pay.example", ":443", api, "10.1.2.3", 443, "-nobody"},
	} {
		req := &tunnel.Request{Name: tunnel.MustParseName(test.name), Port: test.port, Proto: "connect", Listener: test.listener, Peer: peer(test.id), Source: netip.AddrPortFrom(netip.MustParseAddr(test.from), 1)}
		route, err := r.Resolve(t.Context(), req)
		got := ""
		if p := route.Policy; p != nil {
			got = p.Policy
			if !p.Allowed {
				got = "-" + got
			}
			if p.Policy != "" && !strings.HasPrefix(p.Origin, "policies.yaml:") {
				t.Errorf("policy %s: got the origin %q, want one with file and line", p.Policy, p.Origin)
			}
		}
		if got != test.want || (err == nil) == strings.HasPrefix(test.want, "-") {
			t.Errorf("%s:%d at %s as %q from %s: got %q, %v, want %q", test.name, test.port, test.listener, test.id, test.from, got, err, test.want)
		}
	}
	for s, set := range m.ServicesWithPolicies() {
		if s == cfg.Services[0] && !set.NamesIdentities() {
			t.Errorf("got the set %+v of db, want one that names identities", set)
		}
	}
}

func TestPolicyWarnings(t *testing.T) {
	cfg, err := Parse("x.yaml", []byte(`
listeners:
  - {address: ":443", protocols: [sni]}
policies:
  - {name: lost, action: allow, targets: {services: [b]}, rules: [{}]}
  - {name: idle, action: deny}
  - {name: by-id, action: allow, rules: [{sources: [{users: [alice]}]}]}
services:
  - {name: a.example, endpoints: ["10.0.0.1:443"]}
`))
	if err != nil {
		t.Fatal(err)
	}
	got := cfg.Warnings.Error()
	for _, want := range []string{
		`x.yaml:5:42: policy "lost" selects no service`,
		`x.yaml:6:5: policy "idle" has no rules, and so denies nobody`,
		`x.yaml:7:41: policy "by-id" names identities, and callers at the listener :443 in line 3 have none`,
	} {
		if !strings.Contains(got, want) {
			t.Errorf("got the warnings\n%s\nwant %q", got, want)
		}
	}
	if n := len(cfg.Warnings); n != 3 {
		t.Errorf("got %d warnings, want 3:\n%s", n, got)
	}
}

// An account that any trust domain may have is reported where clients may be of several.
func TestPolicyWarningsOfTrustDomains(t *testing.T) {
	const rest = `
identity:
  tokens:
    - {issuer: https://west.example, audience: [culvert], kubernetes: true, trustDomain: west.example}
    - {trustDomain: corp.example, audience: [culvert]}
  trust: {corp.example: {bundle: "https://bundle.corp.example/"}}
services:
  - {name: a.example, endpoints: ["10.0.0.1:443"]}
policies:
  - {name: p, action: %s, rules: [{sources: [%s]}]}
`
	const west, corp = "https://west.example", "corp.example"
	const account = "{serviceAccounts: [{namespace: shop, name: api}]}"
	for _, row := range []struct {
		issuers, action, source string
		want                    string
	}{
		{west, "allow", account, ""},
		{west + ", " + corp, "allow", account, `policy "p" allows serviceAccounts of any trust domain, and clients may be of corp.example, west.example; add trustDomains: [corp.example]`},
		{west + ", " + corp, "allow", "{namespaces: [shop]}", `policy "p" allows namespaces of any trust domain`},
		{west + ", " + corp, "allow", "{trustDomains: [west.example], namespaces: [shop]}", ""},
		{west + ", " + corp, "allow", "{users: [alice]}", ""},
		{west + ", " + corp, "deny", account, ""},
	} {
		cfg, err := Parse("x.yaml", []byte("listeners: [{address: \":3128\", protocols: [connect], auth: {issuers: ["+row.issuers+"]}}]"+fmt.Sprintf(rest, row.action, row.source)))
		if err != nil {
			t.Fatal(err)
		}
		got := ""
		for _, w := range cfg.Warnings {
			if strings.Contains(w.Error(), "any trust domain") {
				got += w.Error()
			}
		}
		if row.want == "" && got != "" || !strings.Contains(got, row.want) {
			t.Errorf("%s %s from %s: got the warnings %q, want %q", row.action, row.source, row.issuers, got, row.want)
		}
	}
}

// Services that nobody sees are told, once a policy decides who sees services.
func TestCatalogWarnings(t *testing.T) {
	for policies, want := range map[string]string{
		`[]`: "",
		`[{name: see, verb: catalog, action: allow, targets: {services: [a.example]}, rules: [{}]}]`:                                                                                      `DNS does not answer for "b.example", 1 in all: there are policies with the verb catalog`,
		`[{name: see, verb: catalog, tier: baseline, action: allow, rules: [{}]}]`:                                                                                                        "",
		`[{name: hide, verb: catalog, action: deny, rules: [{sources: [{cidrs: [192.0.2.0/24]}]}]}, {name: see, verb: catalog, tier: baseline, action: allow, rules: [{}]}]`:              `DNS does not answer for "a.example", 2 in all`,
		`[{name: hide, verb: catalog, tier: admin, action: deny, rules: [{sources: [{cidrs: [192.0.2.0/24]}]}]}, {name: see, verb: catalog, tier: baseline, action: allow, rules: [{}]}]`: "",
		`[{name: see, verb: catalog, dryRun: true, action: allow, targets: {services: [a.example]}, rules: [{}]}]`:                                                                        "",
	} {
		cfg, err := Parse("x.yaml", []byte("services: [{name: a.example, endpoints: [\"10.0.0.1:443\"]}, {name: b.example, endpoints: [\"10.0.0.1:443\"]}]\npolicies: "+policies+"\n"))
		if err != nil {
			t.Fatalf("%s: %v", policies, err)
		}
		got := ""
		if cfg.Warnings != nil {
			got = cfg.Warnings.Error()
		}
		if (want == "") != (got == "") || !strings.Contains(got, want) {
			t.Errorf("%s: got the warnings %q, want %q", policies, got, want)
		}
	}
}

// A rule without sources is for peers, too, which is told; and no hint says to write one.
func TestCatalogWarningsWithPeers(t *testing.T) {
	const head = `
cluster: east
identity: {keys: {gw: {certificateFile: gw.crt, keyFile: gw.key}}, trust: {west.example: {caFile: ca.pem}}}
peers: [{name: west, gateways: [{address: "gw.west.example:443", transports: [{protocol: connect-h2, tls: true, key: gw, trust: west.example}]}], ids: ["spiffe://west.example/gw"], zones: ["*.west.example"]}]
services: [{name: a.example, endpoints: ["10.0.0.1:443"]}, {name: b.example, endpoints: ["10.0.0.1:443"]}]
policies: `
	for policies, want := range map[string]string{
		`[{name: see, verb: catalog, tier: baseline, action: allow, rules: [{}]}]`:                                                                                        `policy "see" offers services to every peer`,
		`[{name: see, verb: catalog, action: allow, targets: {services: [a.example]}, rules: [{sources: [{trustDomains: [west.example]}]}]}]`:                             `rules: [{sources: [{cidrs: ["0.0.0.0/0", "::/0"]}]}]}`,
		`[{name: see, verb: catalog, tier: baseline, action: allow, rules: [{sources: [{cidrs: ["0.0.0.0/0", "::/0"]}]}]}]`:                                               "",
		`[{name: see, verb: catalog, tier: baseline, action: allow, rules: [{sources: [{cidrs: ["0.0.0.0/0"]}]}]}, {name: x, verb: connect, action: allow, rules: [{}]}]`: "",
	} {
		cfg, err := Parse("x.yaml", []byte(head+policies+"\n"))
		if err != nil {
			t.Fatalf("%s: %v", policies, err)
		}
		got := ""
		if cfg.Warnings != nil {
			got = cfg.Warnings.Error()
		}
		if (want == "") != (got == "") || !strings.Contains(got, want) {
			t.Errorf("%s: got the warnings %q, want %q", policies, got, want)
		}
	}
}

// An empty list of sources is nobody, and not anybody.
func TestPolicyWithoutSources(t *testing.T) {
	for rules, want := range map[string]bool{"[{sources: []}]": false, "[{}]": true, "[]": false, "[{ports: []}]": false, "[{protocols: []}]": false} {
		cfg, err := Parse("x.yaml", []byte("services: [{name: a.example, endpoints: [\"10.0.0.1:443\"]}]\npolicies:\n  - {name: p, action: allow, rules: "+rules+"}\n"))
		if err != nil {
			t.Fatalf("%s: %v", rules, err)
		}
		set, err := policy.Compile(cfg.Policies, nil)
		if err != nil {
			t.Fatal(err)
		}
		if got := set.Decide(&tunnel.Request{Proto: "connect"}, 443, policy.Connect).Allowed; got != want {
			t.Errorf("rules: %s: got allowed %v, want %v", rules, got, want)
		}
	}
}
