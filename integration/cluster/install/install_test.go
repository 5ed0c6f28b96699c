package install

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"culvert.dev/integration/cluster"
)

// Every variant is taken by a real API server, strictly and without a warning.
func TestAnAPIServerTakesEveryVariant(t *testing.T) {
	c := cluster.Start(t, cluster.Options{})
	features := []string{
		"gateway.kind=DaemonSet", "dns.enabled=true", "namespaces=[default, kube-system]", "gatewayAPI.enabled=true", "multiCluster.enabled=true",
		"gateway.hostNetwork=true", "discovery.clusters=kube-public", "gateway.service.type=ClusterIP",
	}
	// One alone, and all but one.
	variants := [][]string{nil, features}
	for i, f := range features {
		variants = append(variants, []string{f}, slices.Concat(features[:i:i], features[i+1:]))
	}
	for i, v := range variants {
		var args []string
		for _, set := range v {
			args = append(args, "--set", set)
		}
		ns := fmt.Sprintf("variant-%d", i)
		docs := cluster.Manifests(t, "", append(args, "--namespace", ns)...)
		namespace, rest, _ := strings.Cut(docs, "\n---\n")
		apply(t, c, namespace, metav1.ApplyOptions{})
		apply(t, c, rest, metav1.ApplyOptions{DryRun: []string{metav1.DryRunAll}})
		if t.Failed() {
			t.Fatalf("with %q", v)
		}
	}
}

// What Gateway API has to say to a controller, with something of each kind that it
// writes.
const gateways = `
apiVersion: gateway.networking.k8s.io/v1
kind: Gateway
metadata: {name: gateway, namespace: default}
spec:
  gatewayClassName: culvert
  infrastructure: {labels: {team: network}}
  allowedListeners: {namespaces: {from: Same}}
  listeners:
  - {name: tls, port: 8443, protocol: TLS, tls: {mode: Passthrough}}
  - {name: tcp, port: 8080, protocol: TCP}
  - {name: udp, port: 8053, protocol: UDP}
  - {name: http, port: 8081, protocol: HTTP}
---
apiVersion: gateway.networking.k8s.io/v1
kind: ListenerSet
metadata: {name: set, namespace: default}
spec:
  parentRef: {name: gateway}
  listeners: [{name: more, port: 9443, protocol: TLS, tls: {mode: Passthrough}}]
---
apiVersion: gateway.networking.k8s.io/v1
kind: TLSRoute
metadata: {name: tls, namespace: default}
spec:
  parentRefs: [{name: gateway, sectionName: tls}]
  hostnames: [echo.example.com]
  rules: [{backendRefs: [{name: echo, port: 80}]}]
---
apiVersion: gateway.networking.k8s.io/v1
kind: TCPRoute
metadata: {name: tcp, namespace: default}
spec:
  parentRefs: [{name: gateway, sectionName: tcp}]
  rules: [{backendRefs: [{name: echo, port: 80}]}]
---
apiVersion: gateway.networking.k8s.io/v1
kind: UDPRoute
metadata: {name: udp, namespace: default}
spec:
  parentRefs: [{name: gateway, sectionName: udp}]
  rules: [{backendRefs: [{name: echo, port: 80}]}]
---
apiVersion: gateway.networking.k8s.io/v1
kind: HTTPRoute
metadata: {name: http, namespace: default}
spec:
  parentRefs: [{name: gateway, sectionName: http}]
  rules: [{backendRefs: [{name: echo, port: 80}]}]
---
apiVersion: gateway.networking.k8s.io/v1
kind: GRPCRoute
metadata: {name: grpc, namespace: default}
spec:
  parentRefs: [{name: gateway, sectionName: http}]
  rules: [{backendRefs: [{name: echo, port: 80}]}]
---
apiVersion: gateway.networking.k8s.io/v1
kind: BackendTLSPolicy
metadata: {name: policy, namespace: default}
spec:
  targetRefs: [{group: "", kind: Service, name: echo}]
  validation: {hostname: echo.example.com, wellKnownCACertificates: System}
`

// wantEcho waits until a gateway leads a name to the pods of echo.
func wantEcho(t *testing.T, c *cluster.Cluster, gateway, name string) {
	t.Helper()
	c.Wait(t, cluster.PodTime, func(ctx context.Context) error {
		conn, err := cluster.Tunnel(ctx, gateway, name)
		if err != nil {
			return err
		}
		defer conn.Close()
		answer, err := cluster.AskEcho(conn)
		if err == nil && !strings.HasPrefix(answer.Pod, "echo-") {
			err = fmt.Errorf("what answers is %+v, want a pod of echo", answer)
		}
		return err
	})
}

// What is installed runs, in a namespace whose Pod Security is "restricted",
// serves a service of the cluster, and does nothing that it may not.
func TestWhatIsInstalledRuns(t *testing.T) {
	a, flags := newAudit(t)
	c := cluster.Start(t, cluster.Options{APIServerFlags: flags})
	apply(t, c, cluster.Installed(t, "--profile", "dns"), metav1.ApplyOptions{})
	c.RunEcho(t, cluster.Echo{Exposed: true})
	c.WaitReady(t, 2*cluster.PodTime, "culvert-system")
	c.WaitReady(t, cluster.PodTime, "default")
	pods, err := c.Pods(t.Context(), "culvert-system", "app.kubernetes.io/component=gateway")
	if err != nil || len(pods) != 2 {
		t.Fatalf("%d pods of gateways, %v", len(pods), err)
	}
	for _, p := range pods {
		wantEcho(t, c, net.JoinHostPort(p.Status.PodIP, "443"), "echo.default.svc.local.mesh.internal:80")
		// What others reach of it is its health, and nothing else.
		health := "http://" + net.JoinHostPort(p.Status.PodIP, "9091")
		for path, want := range map[string]int{"/healthz": 200, "/readyz": 200, "/metrics": 200, "/tunnels": 404, "/debug/pprof/": 404} {
			if got, _, err := cluster.Get(t.Context(), health+path); got != want {
				t.Errorf("%s of pod %s: %d (%v), want %d", path, p.Name, got, err, want)
			}
		}
	}
	c.Apply(t, badService)
	nothingUnused(t, c, a, "culvert")
	nothingUnused(t, c, a, "culvert-dns")
	nothingForbidden(t, c, a, "culvert")
	nothingForbidden(t, c, a, "culvert-dns")
}

// nothingForbidden looks at all that the account has asked for, which must be
// something, and at the logs of the pods.
func nothingForbidden(t *testing.T, c *cluster.Cluster, a *audit, account string) {
	t.Helper()
	denied, done := forbidden(a.of(t, "culvert-system", account))
	if len(denied) > 0 {
		t.Errorf("%s was forbidden to %q", account, denied)
	}
	if len(done) < 4 {
		t.Errorf("%s did no more than %q", account, done)
	}
	t.Logf("%s did %q", account, done)
	pods, err := c.Pods(t.Context(), "culvert-system", "")
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range pods {
		for line := range strings.Lines(c.PodLog(&p, "")) {
			if strings.Contains(line, "may not ") || strings.Contains(line, "forbidden") {
				t.Errorf("pod %s: %s", p.Name, line)
			}
		}
	}
}

// With Gateway API, in the whole cluster and in namespaces, every status is
// written with the rights that are given for it, and no right is given for nothing.
func TestTheRightsForGatewayAPIAreEnough(t *testing.T) {
	for _, sets := range [][]string{
		{"gatewayAPI.enabled=true", "multiCluster.enabled=true"},
		{"gatewayAPI.enabled=true", "namespaces=[default, culvert-system]"},
		{"gatewayAPI.enabled=true", "discovery.enabled=false"},
	} {
		t.Run(strings.Join(sets, "+"), func(t *testing.T) {
			a, flags := newAudit(t)
			c := cluster.Start(t, cluster.Options{APIServerFlags: flags})
			var args []string
			for _, s := range sets {
				args = append(args, "--set", s)
			}
			apply(t, c, cluster.Manifests(t, "", args...), metav1.ApplyOptions{})
			c.RunEcho(t, cluster.Echo{Exposed: true})
			c.Apply(t, gateways)
			c.WaitReady(t, 2*cluster.PodTime, "culvert-system")
			const group = "gateway.networking.k8s.io"
			for resource, name := range map[string]string{
				"gatewayclasses": "culvert", "gateways": "gateway", "listenersets": "set", "tlsroutes": "tls", "tcproutes": "tcp", "udproutes": "udp", "httproutes": "http", "grpcroutes": "grpc", "backendtlspolicies": "policy",
			} {
				c.Wait(t, cluster.PodTime, func(ctx context.Context) error {
					r := c.Dynamic.Resource(schema.GroupVersionResource{Group: group, Version: "v1", Resource: resource})
					get := r.Get
					if resource != "gatewayclasses" {
						get = r.Namespace("default").Get
					}
					o, err := get(ctx, name, metav1.GetOptions{})
					if err == nil && !hasStatus(o) {
						err = fmt.Errorf("%s %s has no status: %v", resource, name, o.Object["status"])
					}
					return err
				})
			}
			c.Wait(t, cluster.PodTime, func(ctx context.Context) error {
				list, err := c.Client.CoreV1().ServiceAccounts("default").List(ctx, metav1.ListOptions{LabelSelector: "team=network"})
				if err == nil && len(list.Items) == 0 {
					err = errors.New("no ServiceAccount has the labels of the Gateway's infrastructure")
				}
				return err
			})
			c.Apply(t, strings.ReplaceAll(gateways, "team: network", "team: another")+"\n---"+badRoute)
			if slices.Contains(sets, "multiCluster.enabled=true") {
				share(t, c)
			}
			nothingUnused(t, c, a, "culvert")
			nothingForbidden(t, c, a, "culvert")
		})
	}
}

// hasStatus reports whether somebody of ours has written the object's status.
func hasStatus(o *unstructured.Unstructured) bool {
	for _, at := range []string{"parents", "ancestors"} {
		if list, _, _ := unstructured.NestedSlice(o.Object, "status", at); len(list) > 0 {
			return true
		}
	}
	conditions, _, _ := unstructured.NestedSlice(o.Object, "status", "conditions")
	for _, c := range conditions {
		c, _ := c.(map[string]any)
		if c["observedGeneration"] == o.GetGeneration() && c["reason"] != "Pending" {
			return true
		}
	}
	return false
}
