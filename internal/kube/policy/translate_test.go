package policy

import (
	"net/netip"
	"reflect"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/labels"
	"sigs.k8s.io/yaml"

	"culvert.dev/policy"
)

// parse decodes an object as the API server sends it.
func parse(t testing.TB, text string) *object {
	t.Helper()
	u := &unstructured.Unstructured{}
	if err := yaml.Unmarshal([]byte(text), &u.Object); err != nil {
		t.Fatal(err)
	}
	o, err := decode(u)
	if err != nil {
		t.Fatal(err)
	}
	return o.(*object)
}

// ofNamespace is an AuthorizationPolicy shop/db with that spec, indented by two.
func ofNamespace(spec string) string {
	return "apiVersion: policy.culvert.dev/v1alpha1\nkind: AuthorizationPolicy\nmetadata: {namespace: shop, name: db}\nspec:\n  enforcementLevel: Network\n" + spec
}

// ofCluster is a ClusterAuthorizationPolicy no-legacy with that spec.
func ofCluster(spec string) string {
	return "apiVersion: policy.culvert.dev/v1alpha1\nkind: ClusterAuthorizationPolicy\nmetadata: {name: no-legacy}\nspec:\n  enforcementLevel: Network\n" + spec
}

func newTranslator() *translator {
	return &translator{
		Settings:   Settings{Cluster: "west", TrustDomains: []string{"corp.example"}},
		namespaces: map[string]labels.Set{"shop": {"team": "a"}, "stock": {"team": "a"}, "edge": {"team": "b"}},
	}
}

func TestTranslate(t *testing.T) {
	pods := policy.Targets{Namespaces: []string{"shop"}, Workloads: &policy.Selector{Labels: map[string]string{"app": "db"}}}
	anybody, nobody := (*[]policy.Source)(nil), &[]policy.Source{}
	from := func(s ...policy.Source) *[]policy.Source { return &s }
	for _, tt := range []struct {
		name, text string
		want       []policy.Policy // without Origin
	}{
		{
			"the example of the proposal",
			ofNamespace(`  action: ALLOW
  targetRefs: [{group: "", kind: Pod, selector: {matchLabels: {app: db}}}]
  rules:
    - sources: [{type: ServiceAccount, serviceAccount: {namespace: front, name: api}}]
      networkAttributes: {ports: [5432]}
`),
			[]policy.Policy{{Name: "shop/db", Targets: pods, Rules: []policy.Rule{{
				Sources: from(policy.Source{ServiceAccounts: []policy.ServiceAccount{{Namespace: "front", Name: "api"}}, TrustDomains: []string{"corp.example"}}),
				Ports:   &[]policy.PortRange{{First: 5432}},
			}}}},
		},
		{
			"any ServiceAccount of the policy's own namespace",
			ofNamespace("  action: DENY\n  targetRefs: [{group: '', kind: Pod, selector: {matchLabels: {app: db}}}]\n  rules: [{sources: [{type: ServiceAccount, serviceAccount: {name: '*'}}]}]\n"),
			[]policy.Policy{{Name: "shop/db", Action: policy.Deny, Targets: pods, Rules: []policy.Rule{{
				Sources: from(policy.Source{Namespaces: []string{"shop"}, TrustDomains: []string{"corp.example"}}),
			}}}},
		},
		{
			"sources that are left out, and none",
			ofNamespace("  action: ALLOW\n  dryRun: true\n  targetRefs: [{group: '', kind: Namespace}]\n  rules: [{}, {sources: []}]\n"),
			[]policy.Policy{{Name: "shop/db", DryRun: true, Targets: policy.Targets{Namespaces: []string{"shop"}}, Rules: []policy.Rule{{Sources: anybody}, {Sources: nobody}}}},
		},
		{
			"several targets",
			ofNamespace(`  action: ALLOW
  verb: Register
  targetRefs:
    - {group: "", kind: Service, name: db}
    - {group: gateway.networking.k8s.io, kind: Gateway, name: edge}
    - {group: gateway.networking.k8s.io, kind: Gateway, name: edge, sectionName: tls}
    - {group: gateway.networking.k8s.io, kind: TLSRoute, name: web}
`),
			[]policy.Policy{
				{Name: "shop/db[0]", Verb: policy.Register, Targets: policy.Targets{Services: []string{"shop/db", "db.shop.west"}}},
				{Name: "shop/db[1]", Verb: policy.Register, Targets: policy.Targets{Listeners: []string{"gateway/shop/edge/*"}}},
				{Name: "shop/db[2]", Verb: policy.Register, Targets: policy.Targets{Listeners: []string{"gateway/shop/edge/tls"}}},
				{Name: "shop/db[3]", Verb: policy.Register, Targets: policy.Targets{Routes: []string{"tlsroute/shop/web"}}},
			},
		},
		{
			"all types of sources, on further conditions",
			ofNamespace(`  action: ALLOW
  targetRefs: [{group: "", kind: Namespace, name: shop}]
  rules:
    - sources:
        - {type: SPIFFE, spiffe: "spiffe://corp.example/ns/edge/*", cidrs: [10.1.2.3/8]}
        - {type: TrustDomain, trustDomain: old.example, actors: ["spiffe://corp.example/gw"]}
        - {type: User, user: alice, claims: {groups: [admins]}}
        - {type: Any, networks: [office]}
`),
			[]policy.Policy{{Name: "shop/db", Targets: policy.Targets{Namespaces: []string{"shop"}}, Rules: []policy.Rule{{Sources: from(
				policy.Source{SPIFFE: []string{"spiffe://corp.example/ns/edge/*"}, CIDRs: []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8")}},
				policy.Source{TrustDomains: []string{"old.example"}, Actors: []string{"spiffe://corp.example/gw"}},
				policy.Source{Users: []string{"alice"}, Claims: map[string][]string{"groups": {"admins"}}},
				policy.Source{Networks: []string{"office"}},
			)}}}},
		},
		{
			"of the cluster, for everything",
			ofCluster("  action: DENY\n  tier: Admin\n  rules: [{sources: [{type: TrustDomain, trustDomain: old.example}]}]\n"),
			[]policy.Policy{{Name: "no-legacy", Tier: policy.Admin, Action: policy.Deny, Rules: []policy.Rule{{Sources: from(policy.Source{TrustDomains: []string{"old.example"}})}}}},
		},
		{
			"of the cluster, for some",
			ofCluster("  action: ALLOW\n  tier: Baseline\n  targets: {names: ['*.pay.example'], namespaceSelector: {matchLabels: {team: a}}, podSelector: {matchExpressions: [{key: gw, operator: DoesNotExist}]}}\n"),
			[]policy.Policy{{Name: "no-legacy", Tier: policy.Baseline, Targets: policy.Targets{
				Names: []string{"*.pay.example"}, Namespaces: []string{"shop", "stock"},
				Workloads: &policy.Selector{Requirements: []policy.LabelRequirement{{Key: "gw", Operator: "DoesNotExist"}}},
			}}},
		},
		{
			"a selector that no namespace matches",
			ofCluster("  action: DENY\n  tier: Admin\n  targets: {namespaceSelector: {matchLabels: {team: c}}}\n"),
			[]policy.Policy{{Name: "no-legacy", Tier: policy.Admin, Action: policy.Deny, Targets: policy.Targets{Namespaces: []string{}}}},
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			o := parse(t, tt.text)
			got := newTranslator().translate(o)
			if got.err != nil {
				t.Fatal(got.err)
			}
			if len(got.policies) != len(tt.want) {
				t.Fatalf("got %d policies, want %d", len(got.policies), len(tt.want))
			}
			for i, p := range got.policies {
				want := tt.want[i]
				want.Origin = o.String()
				if !reflect.DeepEqual(*p, want) {
					t.Errorf("policy %d:\n got %+v\nwant %+v", i, *p, want)
				}
			}
		})
	}
}

// What can't be understood denies what it selects, as far as that is known, and says why.
func TestTranslateInvalid(t *testing.T) {
	const target = "  targetRefs: [{group: '', kind: Service, name: db}]\n"
	service, namespace, everything := []string{"shop/db", "db.shop.west"}, policy.Targets{Namespaces: []string{"shop"}}, policy.Targets{}
	for _, tt := range []struct {
		name, text, why string
		targets         policy.Targets
	}{
		{"level", strings.Replace(ofNamespace("  action: ALLOW\n"+target), "Network", "Application", 1), `enforcementLevel "Application" is not supported`, policy.Targets{Services: service}},
		{"action", ofNamespace("  action: AUDIT\n" + target), `action "AUDIT" is not known`, policy.Targets{Services: service}},
		{"verb", ofNamespace("  action: ALLOW\n  verb: Dance\n" + target), `verb "Dance" is not known`, policy.Targets{Services: service}},
		{"tier of a namespace", ofNamespace("  action: ALLOW\n  tier: Admin\n" + target), `tier "Admin" is not one of a AuthorizationPolicy`, policy.Targets{Services: service}},
		{"no tier of the cluster", ofCluster("  action: ALLOW\n"), `tier "" is not one`, everything},
		{"no target", ofNamespace("  action: ALLOW\n"), "targetRefs: there is none", namespace},
		{"unknown kind", ofNamespace("  action: ALLOW\n  targetRefs: [{group: apps, kind: Deployment, name: db}]\n"), `kind "Deployment" of group "apps" can't be a target`, namespace},
		{"Pod by name", ofNamespace("  action: ALLOW\n  targetRefs: [{group: '', kind: Pod, name: db}]\n"), "a Pod is selected by a selector", namespace},
		{"selector of a Service", ofNamespace("  action: ALLOW\n  targetRefs: [{group: '', kind: Service, name: db, selector: {}}]\n"), "a selector is for Pods alone", namespace},
		{"another namespace", ofNamespace("  action: ALLOW\n  targetRefs: [{group: '', kind: Namespace, name: stock}]\n"), `the Namespace "stock" is not the policy's own`, namespace},
		{"section of a Service", ofNamespace("  action: ALLOW\n  targetRefs: [{group: '', kind: Service, name: db, sectionName: a}]\n"), "a sectionName is for", namespace},
		{"selector", ofNamespace("  action: ALLOW\n  targetRefs: [{group: '', kind: Pod, selector: {matchExpressions: [{key: a, operator: Near}]}}]\n"), `"Near" is not a valid label selector operator`, namespace},
		{"source type", ofNamespace("  action: ALLOW\n" + target + "  rules: [{sources: [{type: Cat}]}]\n"), `type "Cat" is not known`, policy.Targets{Services: service}},
		{"source without its field", ofNamespace("  action: ALLOW\n" + target + "  rules: [{sources: [{type: SPIFFE}]}]\n"), "type SPIFFE needs spiffe", policy.Targets{Services: service}},
		{"a field of another type", ofNamespace("  action: ALLOW\n" + target + "  rules: [{sources: [{type: Any, user: alice}]}]\n"), "user is for type User alone", policy.Targets{Services: service}},
		{"SPIFFE id", ofNamespace("  action: ALLOW\n" + target + "  rules: [{sources: [{type: SPIFFE, spiffe: corp.example/a}]}]\n"), "does not begin with spiffe://", policy.Targets{Services: service}},
		{"CIDR", ofNamespace("  action: ALLOW\n" + target + "  rules: [{sources: [{type: Any, cidrs: [10.0.0.0]}]}]\n"), `"10.0.0.0" is not a CIDR`, policy.Targets{Services: service}},
		{"port", ofNamespace("  action: ALLOW\n" + target + "  rules: [{networkAttributes: {ports: [70000]}}]\n"), "70000 is not a port", policy.Targets{Services: service}},
		{"account without a namespace", ofCluster("  action: ALLOW\n  tier: Admin\n  rules: [{sources: [{type: ServiceAccount, serviceAccount: {name: a}}]}]\n"), "serviceAccount needs a namespace", everything},
		{"two ways to say the namespaces", ofCluster("  action: ALLOW\n  tier: Admin\n  targets: {namespaces: [a], namespaceSelector: {}}\n"), "exclude each other", everything},
		{"a name", ofCluster("  action: ALLOW\n  tier: Admin\n  targets: {names: ['a..b']}\n"), "targets.names", everything},
		{"a field of another shape", ofNamespace("  action: [ALLOW]\n" + target), "its fields cannot be read", namespace},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got := newTranslator().translate(parse(t, tt.text))
			if got.err == nil || !strings.Contains(got.err.Error(), tt.why) {
				t.Fatalf("got error %v, want one with %q", got.err, tt.why)
			}
			if len(got.policies) != 1 {
				t.Fatalf("got %d policies, want 1", len(got.policies))
			}
			if p := got.policies[0]; p.Invalid == "" || len(p.Rules) > 0 || !reflect.DeepEqual(p.Targets, tt.targets) {
				t.Errorf("got %+v, want an invalid policy of targets %+v", *p, tt.targets)
			}
		})
	}
}

// Without Namespaces nobody knows which of them a policy is about.
func TestNamespacesUnreadable(t *testing.T) {
	tr := newTranslator()
	tr.namespaces = nil
	got := tr.translate(parse(t, ofCluster("  action: DENY\n  tier: Admin\n  targets: {namespaceSelector: {matchLabels: {team: a}}}\n")))
	if got.err == nil || got.policies[0].Invalid == "" || got.policies[0].Targets.Namespaces != nil {
		t.Errorf("got %+v, %v, want a policy that denies everywhere", got.policies[0], got.err)
	}
	if got := tr.translate(parse(t, ofCluster("  action: DENY\n  tier: Admin\n"))); got.err != nil {
		t.Errorf("without a selector: %v", got.err)
	}
}
