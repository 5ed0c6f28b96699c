// Package services_test has a gateway find the services of real clusters, with
// exactly the rights that its documentation names.
package services_test

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"culvert.dev/integration/cluster"
)

func TestMain(m *testing.M) { cluster.Main(m) }

const (
	gate = "127.0.0.1:8080" // where the gateway is, in the sandbox
	soon = time.Minute      // on two cores that others use, too
)

// rights are those that the documentation names, given to an account.
func rights(t *testing.T) string {
	t.Helper()
	doc, err := os.ReadFile("../../../docs/guides/kubernetes-services.md")
	if err != nil {
		t.Fatal(err)
	}
	_, after, _ := strings.Cut(string(doc), "\n## Rights\n")
	_, after, _ = strings.Cut(after, "```yaml\n")
	roles, _, ok := strings.Cut(after, "```")
	if !ok {
		t.Fatal("the documentation names no rights")
	}
	return `
apiVersion: v1
kind: Namespace
metadata: {name: culvert-system}
---
apiVersion: v1
kind: ServiceAccount
metadata: {name: culvert, namespace: culvert-system}
---
` + roles + `
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {name: culvert-discovery}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: culvert-discovery}
subjects: [{kind: ServiceAccount, name: culvert, namespace: culvert-system}]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata: {name: culvert-discovery, namespace: culvert-system}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: Role, name: culvert-discovery}
subjects: [{kind: ServiceAccount, name: culvert, namespace: culvert-system}]
`
}

const more = `
apiVersion: v1
kind: Service
metadata: {name: closed}
spec:
  selector: {app: echo}
  ports: [{name: http, port: 80, targetPort: web}]
---
apiVersion: v1
kind: Service
metadata:
  name: wrong
  annotations: {culvert.dev/expose: "yes"}
spec:
  selector: {app: echo}
  ports: [{name: http, port: 80, targetPort: web}]
`

const export = `
apiVersion: multicluster.x-k8s.io/v1beta1
kind: ServiceExport
metadata: {name: echo}
`

// run starts the gateway of a cluster, with further lines below kubernetes.
func run(t *testing.T, c *cluster.Cluster, lines string) *cluster.Process {
	t.Helper()
	file := filepath.Join(t.TempDir(), "gateway.yaml")
	config := fmt.Sprintf(`
cluster: west
listeners:
  - {address: %q, protocols: [connect]}
vips:
  ranges: [240.0.0.0/4]
  state: %s
kubernetes:
  kubeconfig: %s
  leader: culvert-system/culvert
%s
limits: {connectionRatePerClient: -1, maxPendingPerClient: -1}
`, gate, filepath.Join(t.TempDir(), "vips.json"), c.ServiceAccountKubeconfig(t, "culvert-system", "culvert"), lines)
	if err := os.WriteFile(file, []byte(config), 0o600); err != nil {
		t.Fatal(err)
	}
	p := c.RunCulvert(t, "gateway", "--config", file)
	t.Cleanup(func() {
		if t.Failed() {
			var said strings.Builder
			for line := range strings.Lines(p.Output()) { // but for the questions, which are many
				if !strings.Contains(line, " proto=connect ") {
					said.WriteString(line)
				}
			}
			t.Logf("the gateway said:\n%s", said.String())
		}
	})
	return p
}

// ask asks for a name by CONNECT, and returns which pod answers.
func ask(ctx context.Context, name string) (pod string, err error) {
	conn, err := cluster.Tunnel(ctx, gate, name)
	if err != nil {
		return "", err
	}
	defer conn.Close()
	answer, err := cluster.AskEcho(conn)
	return answer.Pod, err
}

// askAll asks several times for what has n pods, and returns those that answer.
func askAll(ctx context.Context, name string, n int) (pods []string, err error) {
	for range 2 * n {
		pod, err := ask(ctx, name)
		if err != nil {
			return nil, err
		}
		if !slices.Contains(pods, pod) {
			pods = append(pods, pod)
		}
	}
	slices.Sort(pods)
	return pods, nil
}

// wantPods waits until a name leads to the n pods of the cluster, and no other.
func wantPods(t *testing.T, c *cluster.Cluster, name string, n int) {
	t.Helper()
	c.Wait(t, soon, func(ctx context.Context) error {
		pods, err := c.Pods(ctx, "default", "app=echo")
		if err != nil {
			return err
		}
		var want []string
		for _, p := range pods {
			want = append(want, p.Name)
		}
		slices.Sort(want)
		if len(want) != n {
			return fmt.Errorf("there are the pods %q, want %d", want, n)
		}
		got, err := askAll(ctx, name, n)
		if err == nil && !slices.Equal(got, want) {
			err = fmt.Errorf("%s leads to %q, want %q", name, got, want)
		}
		return err
	})
}

// wantRefused waits until a name leads nowhere, and the gateway says why: a
// client hears the same in any case.
func wantRefused(t *testing.T, c *cluster.Cluster, gateway *cluster.Process, name, reason string) {
	t.Helper()
	c.Wait(t, soon, func(ctx context.Context) error {
		pod, err := ask(ctx, name)
		if err == nil || !strings.Contains(err.Error(), "403") {
			return fmt.Errorf("%s leads to %q (%v), want 403", name, pod, err)
		}
		last := ""
		for line := range strings.Lines(gateway.Tail(20)) {
			if strings.Contains(line, "target="+name) {
				last = line
			}
		}
		if !strings.Contains(last, "reason="+reason+" ") {
			return fmt.Errorf("%s is refused for %q, want %s", name, last, reason)
		}
		return nil
	})
}

// enough finds what the gateway was not allowed to do. It is for before an API
// server starts again, as that knows of no roles at first.
func enough(t *testing.T, gateway *cluster.Process) {
	t.Helper()
	for line := range strings.Lines(gateway.Output()) {
		if strings.Contains(line, "forbidden") {
			t.Errorf("the documented rights are not enough: %s", line)
		}
	}
}

func TestServicesAreFoundAndKept(t *testing.T) {
	c := cluster.Start(t, cluster.Options{NoCRDs: true})
	c.Apply(t, rights(t))
	c.RunEcho(t, cluster.Echo{Exposed: true})
	c.Apply(t, more)
	c.WaitReady(t, cluster.PodTime, "default")
	gateway := run(t, c, "  discovery: {}")
	const name = "echo.default.svc.west.mesh.internal:80"
	wantPods(t, c, name, 1)
	wantRefused(t, c, gateway, "closed.default.svc.west.mesh.internal:80", "not-exposed")
	wantRefused(t, c, gateway, "wrong.default.svc.west.mesh.internal:80", "not-exposed")
	wantRefused(t, c, gateway, "nobody.default.svc.west.mesh.internal:80", "no-route")
	c.Scale(t, "default", "echo", 3)
	wantPods(t, c, name, 3)
	c.Wait(t, soon, func(ctx context.Context) error { // which the leader writes
		events, err := c.Client.CoreV1().Events("default").List(ctx, metav1.ListOptions{FieldSelector: "involvedObject.name=wrong"})
		if err == nil && (len(events.Items) != 1 || !strings.Contains(events.Items[0].Message, `culvert.dev/expose: "yes"`)) {
			err = fmt.Errorf("events of the wrong annotation: %v", events.Items)
		}
		return err
	})

	enough(t, gateway)
	c.StopAPIServer(t)
	for range 20 {
		if got, err := askAll(t.Context(), name, 3); err != nil || len(got) != 3 {
			t.Fatalf("without the API server %s leads to %q (%v)", name, got, err)
		}
	}
	c.StartAPIServer(t)
	c.Scale(t, "default", "echo", 1)
	wantPods(t, c, name, 1)

	c.ExpireWatches(t)
	c.Scale(t, "default", "echo", 2)
	wantPods(t, c, name, 2)

	c.Delete(t, "apiVersion: v1\nkind: Service\nmetadata: {name: closed}\n")
	wantRefused(t, c, gateway, "closed.default.svc.west.mesh.internal:80", "no-route")
	patch := `{"metadata":{"annotations":{"culvert.dev/expose":"false"}}}`
	if _, err := c.Client.CoreV1().Services("default").Patch(t.Context(), "echo", "application/merge-patch+json", []byte(patch), metav1.PatchOptions{}); err != nil {
		t.Fatal(err)
	}
	wantRefused(t, c, gateway, name, "not-exposed")
}

func TestTheClusterSet(t *testing.T) {
	west, east := cluster.Start(t, cluster.Options{}), cluster.Start(t, cluster.Options{})
	for _, c := range []*cluster.Cluster{west, east} {
		c.Apply(t, rights(t))
	}
	east.RunEcho(t, cluster.Echo{}) // its export opens it
	east.Apply(t, export)
	east.WaitReady(t, cluster.PodTime, "default")
	kubeconfig, err := os.ReadFile(east.ServiceAccountKubeconfig(t, "culvert-system", "culvert"))
	if err != nil {
		t.Fatal(err)
	}
	secret := fmt.Sprintf(`
apiVersion: v1
kind: Secret
metadata: {name: east, namespace: culvert-system, labels: {culvert.dev/cluster: east}}
stringData:
  kubeconfig: |
    %s
`, strings.ReplaceAll(string(kubeconfig), "\n", "\n    "))
	west.Apply(t, secret)
	gateway := run(t, west, "  discovery: {clusters: culvert-system, exportedTo: [\"*\"]}\n  multiCluster: true")

	const name, mesh = "echo.default.svc.clusterset.local:80", "echo.default.svc.east.mesh.internal:80"
	wantPods(t, east, name, 1)
	wantPods(t, east, mesh, 1)
	for _, c := range []*cluster.Cluster{west, east} {
		wantImport(t, c, "ClusterSetIP [east] Ready")
	}
	wantConditions(t, east, "Valid=True Ready=True Conflict=False")

	west.RunEcho(t, cluster.Echo{Exposed: true, Headless: true})
	west.Apply(t, export)
	for _, c := range []*cluster.Cluster{west, east} {
		wantConditions(t, c, "Valid=True Ready=True Conflict=True")
	}
	wantPods(t, east, name, 1) // the oldest decides
	west.Delete(t, export)
	wantConditions(t, east, "Valid=True Ready=True Conflict=False")

	enough(t, gateway)
	east.StopAPIServer(t)
	for range 10 {
		if _, err := ask(t.Context(), name); err != nil {
			t.Fatalf("without the API server of its cluster %s is refused: %v", name, err)
		}
	}
	wantImport(t, west, "ClusterSetIP [east] Ready")
	east.StartAPIServer(t)

	east.Delete(t, export)
	wantRefused(t, east, gateway, name, "no-route")
	wantRefused(t, east, gateway, mesh, "not-exposed")
	for _, c := range []*cluster.Cluster{west, east} {
		wantImport(t, c, "none")
	}
	west.Delete(t, "apiVersion: v1\nkind: Secret\nmetadata: {name: east, namespace: culvert-system}\n")
	wantRefused(t, west, gateway, mesh, "no-route")
}

func resource(name string) schema.GroupVersionResource {
	return schema.GroupVersionResource{Group: "multicluster.x-k8s.io", Version: "v1beta1", Resource: name}
}

// wantImport waits until the import of echo is "TYPE [CLUSTERS] READY", or "none".
func wantImport(t *testing.T, c *cluster.Cluster, want string) {
	t.Helper()
	c.Wait(t, soon, func(ctx context.Context) error {
		list, err := c.Dynamic.Resource(resource("serviceimports")).Namespace("default").List(ctx, metav1.ListOptions{})
		if err != nil {
			return err
		}
		got := "none"
		for _, i := range list.Items {
			kind, _, _ := unstructured.NestedString(i.Object, "spec", "type")
			ips, _, _ := unstructured.NestedStringSlice(i.Object, "spec", "ips")
			if len(ips) == 0 || !strings.HasPrefix(ips[0], "2") {
				return fmt.Errorf("the import has the addresses %q", ips)
			}
			clusters, _, _ := unstructured.NestedSlice(i.Object, "status", "clusters")
			var names []string
			for _, c := range clusters {
				names = append(names, fmt.Sprint(c.(map[string]any)["cluster"]))
			}
			got = fmt.Sprint(kind, " ", names)
			if cluster.HasCondition(i.Object, "Ready") {
				got += " Ready"
			}
		}
		if got != want {
			return fmt.Errorf("the import is %s, want %s", got, want)
		}
		return nil
	})
}

// wantConditions waits for those of the export of echo.
func wantConditions(t *testing.T, c *cluster.Cluster, want string) {
	t.Helper()
	c.Wait(t, soon, func(ctx context.Context) error {
		e, err := c.Dynamic.Resource(resource("serviceexports")).Namespace("default").Get(ctx, "echo", metav1.GetOptions{})
		if err != nil {
			return err
		}
		conditions, _, _ := unstructured.NestedSlice(e.Object, "status", "conditions")
		var all []string
		for _, c := range conditions {
			m := c.(map[string]any)
			all = append(all, fmt.Sprintf("%s=%s", m["type"], m["status"]))
		}
		if got := strings.Join(all, " "); got != want {
			return fmt.Errorf("the export's conditions are %s, want %s", got, want)
		}
		return nil
	})
}
