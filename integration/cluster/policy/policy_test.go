// Package policy_test has a gateway enforce the AuthorizationPolicies of a real cluster, with exactly
// the rights that the chart gives it.
package policy_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/yaml"

	"culvert.dev/integration/cluster"
)

func TestMain(m *testing.M) { cluster.Main(m) }

const soon = 30 * time.Second // on two cores that others use, too

var (
	ofNamespace = schema.GroupVersionResource{Group: "policy.culvert.dev", Version: "v1alpha1", Resource: "authorizationpolicies"}
	ofCluster   = schema.GroupVersionResource{Group: "policy.culvert.dev", Version: "v1alpha1", Resource: "clusterauthorizationpolicies"}
)

// install applies what the chart makes for an enforcing gateway, but for its pods and what is around
// them: the account, its rights and the CRDs.
func install(t *testing.T, c *cluster.Cluster) {
	t.Helper()
	all, err := os.ReadFile("../../../deploy/kustomize/overlays/authorization/manifests.yaml")
	if err != nil {
		t.Fatal(err)
	}
	var some []string
	for text := range strings.SplitSeq(string(all), "\n---\n") {
		var o struct{ Kind string }
		if err := yaml.Unmarshal([]byte(text), &o); err != nil {
			t.Fatal(err)
		}
		switch o.Kind {
		case "Namespace", "ServiceAccount", "CustomResourceDefinition", "ClusterRole", "ClusterRoleBinding", "Role", "RoleBinding":
			some = append(some, text)
		}
	}
	c.Apply(t, strings.Join(some, "\n---\n"))
}

// create creates an object of a spec in YAML, after the lines that all have.
func create(ctx context.Context, c *cluster.Cluster, res schema.GroupVersionResource, name, spec string) error {
	kind, meta := "AuthorizationPolicy", map[string]any{"name": name, "namespace": "default"}
	if res == ofCluster {
		kind, meta = "ClusterAuthorizationPolicy", map[string]any{"name": name}
	}
	var fields map[string]any
	if err := yaml.Unmarshal([]byte("enforcementLevel: Network\n"+spec), &fields); err != nil {
		return err
	}
	u := &unstructured.Unstructured{Object: map[string]any{"apiVersion": "policy.culvert.dev/v1alpha1", "kind": kind, "metadata": meta, "spec": fields}}
	_, err := c.Dynamic.Resource(res).Namespace(u.GetNamespace()).Create(ctx, u, metav1.CreateOptions{})
	return err
}

// The API server takes what is well-formed and refuses, in words that help, what is not.
func testAdmission(t *testing.T, c *cluster.Cluster) {
	const target = "action: ALLOW\ntargetRefs: [{group: '', kind: Service, name: db}]\n"
	for name, tt := range map[string]struct {
		res       schema.GroupVersionResource
		spec, why string // why is "" for what is taken
	}{
		"proposal": {ofNamespace, "action: ALLOW\ntargetRefs: [{group: '', kind: Pod, selector: {matchLabels: {app: db}}}]\nrules: [{sources: [{type: ServiceAccount, serviceAccount: {name: api}}], networkAttributes: {ports: [443]}}]\n", ""},
		"nobody":   {ofNamespace, target + "rules: [{sources: []}]\n", ""},
		"sources":  {ofNamespace, target + "rules: [{sources: [{type: SPIFFE, spiffe: 'spiffe://corp.example/ns/edge/*', cidrs: [10.0.0.0/8]}, {type: User, user: alice, claims: {groups: [a]}}, {type: TrustDomain, trustDomain: old.example}, {type: Any, networks: [office]}]}]\n", ""},
		"cluster":  {ofCluster, "action: DENY\ntier: Admin\ntargets: {namespaceSelector: {matchLabels: {team: a}}}\n", ""},

		"action":              {ofNamespace, strings.Replace(target, "ALLOW", "AUDIT", 1), `Unsupported value: "AUDIT"`},
		"no-action":           {ofNamespace, "targetRefs: [{group: '', kind: Service, name: db}]\n", "spec.action: Required value"},
		"no-target":           {ofNamespace, "action: ALLOW\n", "spec.targetRefs: Required value"},
		"no-targets":          {ofNamespace, "action: ALLOW\ntargetRefs: []\n", "should have at least 1 items"},
		"kind":                {ofNamespace, "action: ALLOW\ntargetRefs: [{group: apps, kind: Deployment, name: db}]\n", "a target is a Pod, Service or Namespace"},
		"pod-by-name":         {ofNamespace, "action: ALLOW\ntargetRefs: [{group: '', kind: Pod, name: db}]\n", "Pods are selected by selector"},
		"selector-of-service": {ofNamespace, "action: ALLOW\ntargetRefs: [{group: '', kind: Service, name: db, selector: {}}]\n", "Pods are selected by selector, and nothing else is"},
		"service-unnamed":     {ofNamespace, "action: ALLOW\ntargetRefs: [{group: '', kind: Service}]\n", "name is needed"},
		"section":             {ofNamespace, "action: ALLOW\ntargetRefs: [{group: '', kind: Service, name: db, sectionName: a}]\n", "sectionName is for a Gateway or ListenerSet"},
		"source-type":         {ofNamespace, target + "rules: [{sources: [{type: Cat}]}]\n", `Unsupported value: "Cat"`},
		"source-empty":        {ofNamespace, target + "rules: [{sources: [{type: SPIFFE}]}]\n", "spiffe is for the type SPIFFE, which needs it"},
		"source-mixed":        {ofNamespace, target + "rules: [{sources: [{type: Any, user: alice}]}]\n", "user is for the type User, which needs it"},
		"spiffe":              {ofNamespace, target + "rules: [{sources: [{type: SPIFFE, spiffe: 'spiffe://corp.example'}]}]\n", "spiffe is spiffe://TRUST-DOMAIN/PATH"},
		"cidrs":               {ofNamespace, target + "rules: [{sources: [{type: Any, cidrs: []}]}]\n", "should have at least 1 items"},
		"port":                {ofNamespace, target + "rules: [{networkAttributes: {ports: [70000]}}]\n", "should be less than or equal to 65535"},
		"tier":                {ofCluster, "action: ALLOW\n", "spec.tier: Required value"},
		"namespaces-twice":    {ofCluster, "action: ALLOW\ntier: Admin\ntargets: {namespaces: [a], namespaceSelector: {}}\n", "namespaces and namespaceSelector exclude each other"},
	} {
		err := create(t.Context(), c, tt.res, name, tt.spec)
		switch {
		case tt.why == "" && err != nil:
			t.Errorf("%s: refused: %v", name, err)
		case tt.why != "" && (err == nil || !strings.Contains(err.Error(), tt.why)):
			t.Errorf("%s: got error %v, want one with %q", name, err, tt.why)
		}
		if err == nil {
			_ = c.Dynamic.Resource(tt.res).Namespace(map[bool]string{true: "", false: "default"}[tt.res == ofCluster]).Delete(t.Context(), name, metav1.DeleteOptions{})
		}
	}
}

// run starts a gateway out of the cluster, whose admin socket it returns.
func run(t *testing.T, c *cluster.Cluster) *cluster.Process {
	t.Helper()
	dir := t.TempDir()
	config := filepath.Join(dir, "gateway.yaml")
	text := fmt.Sprintf(`
cluster: west
admin: unix:%s/admin.sock
listeners:
  - {address: "127.0.0.1:8080", protocols: [connect]}
kubernetes:
  kubeconfig: %s
  leader: culvert-system/culvert
  discovery: {}
  authorizationPolicies: {trustDomains: [corp.example]}
`, dir, c.ServiceAccountKubeconfig(t, "culvert-system", "culvert"))
	if err := os.WriteFile(config, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	p := c.RunCulvert(t, "gateway", "--config", config)
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("the gateway said:\n%s", p.Tail(40))
		}
	})
	return p
}

// waitStatus waits for the condition Accepted of an object's first ancestor: "True/Accepted".
func waitStatus(t *testing.T, c *cluster.Cluster, res schema.GroupVersionResource, name, want string) {
	t.Helper()
	c.Wait(t, soon, func(ctx context.Context) error {
		namespace := "default"
		if res == ofCluster {
			namespace = ""
		}
		o, err := c.Dynamic.Resource(res).Namespace(namespace).Get(ctx, name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		ancestors, _, _ := unstructured.NestedSlice(o.Object, "status", "ancestors")
		if len(ancestors) == 0 {
			return errors.New("there is no status")
		}
		conditions, _, _ := unstructured.NestedSlice(ancestors[0].(map[string]any), "conditions")
		var got []string
		for _, one := range conditions {
			m := one.(map[string]any)
			got = append(got, fmt.Sprintf("%v=%v/%v", m["type"], m["status"], m["reason"]))
			if m["observedGeneration"] != o.GetGeneration() {
				return fmt.Errorf("%s: of generation %v, not %d", name, m["observedGeneration"], o.GetGeneration())
			}
		}
		if text := strings.Join(got, " "); text != want {
			return fmt.Errorf("%s: status %q, want %q", name, text, want)
		}
		return nil
	})
}

func TestPolicies(t *testing.T) {
	c := cluster.Start(t, cluster.Options{})
	install(t, c)
	testAdmission(t, c)
}
