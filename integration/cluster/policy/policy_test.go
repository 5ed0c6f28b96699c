// Package policy_test has a gateway enforce the AuthorizationPolicies of a real cluster, with exactly
// the rights that the chart gives it.
package policy_test

import (
	"bufio"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/yaml"

	"culvert.dev/integration/cluster"
	"culvert.dev/internal/testca"
)

func TestMain(m *testing.M) { cluster.Main(m) }

const soon = time.Minute // on two cores that others use, too

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

const gate = "127.0.0.1:8443" // where the gateway is, in the sandbox

// A bench is a cluster with a gateway out of it, which ends TLS with client certificates of two
// trust domains.
type bench struct {
	*cluster.Cluster
	t       *testing.T
	config  string
	gateway *cluster.Process
	cas     map[string]*testca.CA // by trust domain
	callers map[string]*tls.Config
}

func start(t *testing.T) *bench {
	t.Helper()
	b := &bench{Cluster: cluster.Start(t, cluster.Options{}), t: t, cas: map[string]*testca.CA{}, callers: map[string]*tls.Config{}}
	install(t, b.Cluster)
	dir := t.TempDir()
	for _, domain := range []string{"corp.example", "partner.example"} {
		ca, err := testca.New(domain, time.Now)
		if err != nil {
			t.Fatal(err)
		}
		b.cas[domain] = ca
		if err := os.WriteFile(filepath.Join(dir, domain+".pem"), ca.CertPEM, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	own, err := b.cas["corp.example"].Issue(testca.Options{SPIFFEID: "spiffe://corp.example/ns/edge/sa/gw", DNSNames: []string{"gw.example"}})
	if err != nil {
		t.Fatal(err)
	}
	if err := own.Save(dir, "gw"); err != nil {
		t.Fatal(err)
	}
	b.config = filepath.Join(dir, "gateway.yaml")
	text := fmt.Sprintf(`
cluster: west
listeners:
  - address: %q
    tls:
      certificateFile: gw.crt
      keyFile: gw.key
      protocols: [connect]
      clientCAFile: {corp.example: corp.example.pem, partner.example: partner.example.pem}
kubernetes:
  kubeconfig: %s
  leader: culvert-system/culvert
  discovery: {}
  authorizationPolicies: {trustDomains: [corp.example]}
`, gate, b.ServiceAccountKubeconfig(t, "culvert-system", "culvert"))
	if err := os.WriteFile(b.config, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	b.run()
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("the gateway said:\n%s", b.gateway.Tail(40))
		}
	})
	return b
}

func (b *bench) run() {
	b.t.Helper()
	b.gateway = b.RunCulvert(b.t, "gateway", "--config", b.config)
}

// caller returns how a workload connects that has a SPIFFE id.
func (b *bench) caller(id string) *tls.Config {
	b.t.Helper()
	if c := b.callers[id]; c != nil {
		return c
	}
	domain, _, _ := strings.Cut(strings.TrimPrefix(id, "spiffe://"), "/")
	pair, err := b.cas[domain].Issue(testca.Options{SPIFFEID: id})
	if err != nil {
		b.t.Fatal(err)
	}
	cert, err := tls.X509KeyPair(pair.CertPEM, pair.KeyPEM)
	if err != nil {
		b.t.Fatal(err)
	}
	b.callers[id] = &tls.Config{RootCAs: b.cas["corp.example"].Pool(), ServerName: "gw.example", Certificates: []tls.Certificate{cert}}
	return b.callers[id]
}

// open asks the gateway for the echo by CONNECT, as the workload with that id.
func (b *bench) open(ctx context.Context, id string) (net.Conn, error) {
	const target = "echo.default.svc.west.mesh.internal:80"
	ctx, cancel := context.WithTimeout(ctx, 20*time.Second)
	defer cancel()
	conn, err := (&tls.Dialer{Config: b.caller(id)}).DialContext(ctx, "tcp", gate)
	if err != nil {
		return nil, err
	}
	_ = conn.SetDeadline(time.Now().Add(20 * time.Second))
	fmt.Fprintf(conn, "CONNECT %[1]s HTTP/1.1\r\nHost: %[1]s\r\n\r\n", target)
	res, err := http.ReadResponse(bufio.NewReaderSize(conn, 16), &http.Request{Method: http.MethodConnect})
	if err == nil && res.StatusCode != http.StatusOK {
		err = fmt.Errorf("%d %s", res.StatusCode, res.Header.Get("Proxy-Status"))
	}
	if err != nil {
		conn.Close()
		return nil, err
	}
	return conn, nil
}

// ask returns the pod that a workload gets, or "403" and the like.
func (b *bench) ask(ctx context.Context, id string) (string, error) {
	conn, err := b.open(ctx, id)
	if err != nil {
		return "", err
	}
	defer conn.Close()
	e, err := cluster.AskEcho(conn)
	return e.Pod, err
}

// wantAllowed and wantDenied wait until a workload is served, and until it is refused by a policy.
func (b *bench) wantAllowed(step, id string) {
	b.t.Helper()
	b.Wait(b.t, soon, func(ctx context.Context) error {
		if _, err := b.ask(ctx, id); err != nil {
			return fmt.Errorf("%s: %s: %w, want a pod", step, id, err)
		}
		return nil
	})
}

func (b *bench) wantDenied(step, id string) {
	b.t.Helper()
	b.Wait(b.t, soon, func(ctx context.Context) error {
		pod, err := b.ask(ctx, id)
		if err == nil || !strings.HasPrefix(err.Error(), "403") {
			return fmt.Errorf("%s: %s gets %q (%v), want 403", step, id, pod, err)
		}
		return nil
	})
}

// wantPods waits until the pods that a workload gets are these.
func (b *bench) wantPods(step, id string, want ...string) {
	b.t.Helper()
	slices.Sort(want)
	b.Wait(b.t, soon, func(ctx context.Context) error {
		var got []string
		for range 8 {
			pod, err := b.ask(ctx, id)
			if err != nil {
				return err
			}
			if !slices.Contains(got, pod) {
				got = append(got, pod)
			}
		}
		if slices.Sort(got); !slices.Equal(got, want) {
			return fmt.Errorf("%s: %s gets the pods %q, want %q", step, id, got, want)
		}
		return nil
	})
}

// put creates or replaces a policy.
func (b *bench) put(res schema.GroupVersionResource, name, spec string) {
	b.t.Helper()
	b.remove(res, name)
	if err := create(b.t.Context(), b.Cluster, res, name, spec); err != nil {
		b.t.Fatal(err)
	}
}

func (b *bench) remove(res schema.GroupVersionResource, name string) {
	b.t.Helper()
	namespace := "default"
	if res == ofCluster {
		namespace = ""
	}
	if err := b.Dynamic.Resource(res).Namespace(namespace).Delete(b.t.Context(), name, metav1.DeleteOptions{}); err != nil && !apierrors.IsNotFound(err) {
		b.t.Fatal(err)
	}
}

// label sets a label of a pod.
func (b *bench) label(pod, key, value string) {
	b.t.Helper()
	patch := fmt.Sprintf(`{"metadata":{"labels":{%q:%q}}}`, key, value)
	if _, err := b.Client.CoreV1().Pods("default").Patch(b.t.Context(), pod, types.MergePatchType, []byte(patch), metav1.PatchOptions{}); err != nil {
		b.t.Fatal(err)
	}
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

// What people write is enforced, by the identity of the caller, as they change it.
func TestPolicies(t *testing.T) {
	b := start(t)
	testAdmission(t, b.Cluster)
	b.RunEcho(t, cluster.Echo{Exposed: true, Replicas: 2})
	b.WaitReady(t, cluster.PodTime, "default")
	const (
		api, job  = "spiffe://corp.example/ns/front/sa/api", "spiffe://corp.example/ns/front/sa/job"
		stranger  = "spiffe://partner.example/ns/front/sa/api"
		toEcho    = "action: ALLOW\ntargetRefs: [{group: '', kind: Service, name: echo}]\n"
		toPods    = "targetRefs: [{group: '', kind: Pod, selector: {matchLabels: {role: quarantine}}}]\n"
		fromFront = "rules: [{sources: [{type: ServiceAccount, serviceAccount: {namespace: front, name: '*'}}]}]\n"
	)
	b.wantAllowed("without a policy", api)
	b.wantAllowed("without a policy", stranger)

	b.put(ofNamespace, "echo", toEcho+"rules: [{sources: [{type: ServiceAccount, serviceAccount: {namespace: front, name: api}}]}]\n")
	b.wantDenied("another account", job)
	b.wantDenied("the same account of another trust domain", stranger)
	b.wantAllowed("the account", api)
	waitStatus(t, b.Cluster, ofNamespace, "echo", "Accepted=True/Accepted")

	// A tunnel that stands ends once its caller may not have it any more, and others stay.
	standing, err := b.open(t.Context(), api)
	if err != nil {
		t.Fatal(err)
	}
	defer standing.Close()
	b.put(ofNamespace, "echo", toEcho+"rules: [{sources: [{type: ServiceAccount, serviceAccount: {namespace: front, name: job}}]}]\n")
	b.wantDenied("not any more", api)
	b.wantAllowed("from now on", job)
	_ = standing.SetReadDeadline(time.Now().Add(soon))
	if n, err := standing.Read(make([]byte, 1)); err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("the tunnel of a caller that is denied now: read %d bytes, %v, want its end", n, err)
	}

	b.put(ofNamespace, "nothing", "action: ALLOW\ntargetRefs: [{group: '', kind: Service, name: nothing}]\n")
	waitStatus(t, b.Cluster, ofNamespace, "nothing", "Accepted=False/TargetNotFound")
	b.remove(ofNamespace, "nothing")

	b.put(ofNamespace, "echo", toEcho+"dryRun: true\nrules: [{sources: []}]\n")
	b.wantAllowed("in dry run", stranger)
	b.put(ofNamespace, "echo", toEcho+fromFront)
	b.wantAllowed("any account of the namespace", job)
	b.wantDenied("any account of the namespace", stranger)
	b.put(ofCluster, "no-jobs", "tier: Admin\naction: DENY\nrules: [{sources: [{type: SPIFFE, spiffe: '"+job+"'}]}]\n")
	b.wantDenied("by the administrator", job)
	b.wantAllowed("by the administrator", api)
	waitStatus(t, b.Cluster, ofCluster, "no-jobs", "Accepted=True/Accepted")
	b.remove(ofCluster, "no-jobs")
	b.wantAllowed("not any more", job)

	pods, err := b.Pods(t.Context(), "default", "app=echo")
	if err != nil || len(pods) != 2 {
		t.Fatalf("%d pods, %v, want 2", len(pods), err)
	}
	first, second := pods[0].Name, pods[1].Name
	b.put(ofNamespace, "quarantine", "action: DENY\n"+toPods+"rules: [{}]\n")
	b.wantPods("none in quarantine", api, first, second)
	b.label(first, "role", "quarantine")
	b.wantPods("one in quarantine", api, second)
	b.label(second, "role", "quarantine")
	b.wantDenied("both in quarantine", api)
	b.label(first, "role", "free")
	b.wantPods("the other one in quarantine", api, first)
	b.remove(ofNamespace, "quarantine")

	// Without the definitions nobody knows what is forbidden: the last policies stay in force, and a
	// gateway that begins then serves nobody.
	b.put(ofNamespace, "echo", toEcho+"rules: []\n")
	b.wantDenied("nobody", api)
	const definition = "apiVersion: apiextensions.k8s.io/v1\nkind: CustomResourceDefinition\nmetadata: {name: authorizationpolicies.policy.culvert.dev}\n"
	b.Delete(t, definition)
	b.Wait(t, soon, func(context.Context) error {
		if !strings.Contains(b.gateway.Output(), "policies of Kubernetes cannot be read") {
			return errors.New("the gateway has not noticed that the definition is gone")
		}
		return nil
	})
	for range 50 {
		if pod, err := b.ask(t.Context(), api); err == nil {
			t.Fatalf("without the definition %s gets %q", api, pod)
		}
	}
	b.gateway.Stop(10 * time.Second)
	b.run()
	b.wantDenied("after a start without the definition", api)
	install(t, b.Cluster)
	b.wantAllowed("once there is a definition again, and no policy", api)
}
