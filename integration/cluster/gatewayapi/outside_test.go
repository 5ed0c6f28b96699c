package gatewayapi_test

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"

	"culvert.dev/integration/cluster"
	"culvert.dev/internal/testca"
)

// A gateway on a machine that reaches no pod, with the configuration that the
// documentation has for it, serves its Gateways by way of a gateway in the cluster. What that may not have, as annotations say, it does not get.
func TestRoutesFromAMachineThatReachesNoPod(t *testing.T) {
	const name, outer = "db.shop.example.com", "203.0.113.8"
	c := cluster.Start(t, cluster.Options{GatewayAddresses: 1})
	inner := c.GatewayAddresses[0]
	ca, err := testca.New("mesh.test", nil)
	if err != nil {
		t.Fatal(err)
	}
	c.RunEcho(t, cluster.Echo{Name: "web", Exposed: true})
	c.RunEcho(t, cluster.Echo{Name: "db", Exposed: true, CA: ca, Hosts: []string{name}})
	c.Apply(t, cluster.Manifests(t, fmt.Sprintf(`
cluster: west
gateway:
  replicas: 1
  hostNetwork: true
  listeners: [{address: "%s:443", protocols: [sni, connect-h2]}]
  service: {enabled: false}
`, inner)))
	c.Apply(t, cluster.Manifests(t, "{fullnameOverride: outside, cluster: west, gateway: {enabled: false}, gatewayAPI: {enabled: true}}"))
	c.Apply(t, fmt.Sprintf(`
apiVersion: v1
kind: Service
metadata: {name: entrance, namespace: culvert-system, annotations: {culvert.dev/gateway: west, culvert.dev/gateway-transports: "sni,connect-h2"}}
spec:
  ports: [{name: tls, port: 443}]
  externalIPs: [%q]
---
apiVersion: gateway.networking.k8s.io/v1
kind: Gateway
metadata: {name: edge}
spec:
  gatewayClassName: culvert
  listeners:
  - {name: tls, port: 443, protocol: TLS, tls: {mode: Passthrough}}
  - {name: tcp, port: 8000, protocol: TCP}
---
apiVersion: gateway.networking.k8s.io/v1
kind: TLSRoute
metadata: {name: db}
spec:
  parentRefs: [{name: edge, sectionName: tls}]
  hostnames: [%s]
  rules: [{backendRefs: [{name: db, port: 443}]}]
---
apiVersion: gateway.networking.k8s.io/v1
kind: TCPRoute
metadata: {name: web}
spec:
  parentRefs: [{name: edge, sectionName: tcp}]
  rules: [{backendRefs: [{name: web, port: 80}]}]
`, inner.String(), name))
	c.WaitReady(t, 2*cluster.PodTime, "culvert-system")
	c.WaitReady(t, cluster.PodTime, "default")

	m := c.NewMachine(t)
	file := filepath.Join(t.TempDir(), "culvert.yaml")
	doc, err := os.ReadFile("../../../docs/guides/kubernetes.md")
	if err != nil {
		t.Fatal(err)
	}
	_, config, _ := strings.Cut(string(doc), "\n### Out of the cluster\n")
	_, config, _ = strings.Cut(config, "```yaml\n")
	config, _, ok := strings.Cut(config, "```")
	if !ok {
		t.Fatal("the documentation has no configuration for a gateway out of the cluster")
	}
	config = strings.NewReplacer("/etc/culvert/kubeconfig", c.ServiceAccountKubeconfig(t, "culvert-system", "outside"), "10.0.0.5", m.Addr.String()).Replace(config)
	if err := os.WriteFile(file, []byte(config), 0o600); err != nil {
		t.Fatal(err)
	}
	p := m.RunCulvert(t, "gateway", "--config", file)
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("culvert's last words:\n%s", p.Tail(40))
		}
	})
	b := &bench{Cluster: c, t: t, culvert: p}
	if got := b.address("edge"); got != outer {
		t.Errorf("the Gateway's status has the address %s, want %s", got, outer)
	}
	pods, err := c.Pods(t.Context(), "default", "app=web")
	if err != nil || len(pods) != 1 {
		t.Fatalf("pods of web: %v, %v", pods, err)
	}
	if err := m.Do(func() error {
		conn, err := net.DialTimeout("tcp", net.JoinHostPort(pods[0].Status.PodIP, "3000"), time.Second)
		if err == nil {
			conn.Close()
		}
		return err
	}); err == nil {
		t.Fatal("the machine reaches a pod")
	}

	pair, err := ca.Issue(testca.Options{SPIFFEID: "spiffe://mesh.test/ns/shop/sa/client", Usage: testca.ClientOnly})
	if err != nil {
		t.Fatal(err)
	}
	dials := map[string]func(context.Context) (net.Conn, error){
		"web": func(ctx context.Context) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "tcp", netip.AddrPortFrom(m.Addr, 8000).String())
		},
		"db": func(ctx context.Context) (net.Conn, error) {
			return (&tls.Dialer{Config: pair.ClientConfig(name)}).DialContext(ctx, "tcp", netip.AddrPortFrom(m.Addr, 443).String())
		},
	}
	ask := func(ctx context.Context, service string) error {
		ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
		defer cancel()
		conn, err := dials[service](ctx)
		if err != nil {
			return err
		}
		defer conn.Close()
		_, err = cluster.AskEcho(conn)
		return err
	}
	for service := range dials {
		b.Wait(t, settled, func(ctx context.Context) error { return ask(ctx, service) })
	}

	// It is the gateway in the cluster that they come by, and that decides.
	patch := []byte(`{"metadata":{"annotations":{"culvert.dev/expose":"false"}}}`)
	if _, err := c.Client.CoreV1().Services("default").Patch(t.Context(), "web", types.MergePatchType, patch, metav1.PatchOptions{}); err != nil {
		t.Fatal(err)
	}
	b.Wait(t, settled, func(ctx context.Context) error {
		if ask(ctx, "web") == nil {
			return errors.New("web is still served, though it is not exposed")
		}
		return nil
	})
	if err := ask(t.Context(), "db"); err != nil {
		t.Errorf("db beside it: %v", err)
	}
	o, err := b.object(t.Context(), "tlsroutes", "db")
	if err != nil {
		t.Fatal(err)
	}
	parents, _, _ := unstructured.NestedSlice(o.Object, "status", "parents")
	if len(parents) != 1 || condition(parents[0].(map[string]any)["conditions"].([]any), "ResolvedRefs", o.GetGeneration()) != "True/ResolvedRefs" {
		t.Errorf("parents of the route are %v, want one with ResolvedRefs", parents)
	}
}
