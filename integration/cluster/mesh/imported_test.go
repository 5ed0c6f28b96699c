package mesh_test

import (
	"context"
	"fmt"
	"net/netip"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"culvert.dev/integration/cluster"
	"culvert.dev/internal/testca"
)

var serviceImports = schema.GroupVersionResource{Group: "multicluster.x-k8s.io", Version: "v1beta1", Resource: "serviceimports"}

// A pod of the west that has nothing of culvert reaches a service of the east by the address that
// its ServiceImport has: a ClusterIP, which kube-proxy leads to the gateway's pods.
func TestImportedServiceHasAClusterIP(t *testing.T) {
	ca, err := testca.New("mesh.test", nil)
	if err != nil {
		t.Fatal(err)
	}
	west := &side{Cluster: cluster.Start(t, cluster.Options{Name: "west", Proxy: true}), inside: true}
	east := start(t, "east", true)
	east.RunEcho(t, cluster.Echo{Namespace: "shop", Name: "web", CA: ca, Hosts: []string{name}})
	east.RunEcho(t, cluster.Echo{Namespace: "shop", Name: "closed", CA: ca, Hosts: []string{name}})
	east.Apply(t, export+`---
apiVersion: multicluster.x-k8s.io/v1beta1
kind: ServiceExport
metadata: {name: closed, namespace: shop}
`)
	east.annotate(t, "shop", "closed", "culvert.dev/networks", "east")
	east.run(t)
	east.annotate(t, "culvert-system", "entrance", "culvert.dev/gateway-transports", "sni,connect")

	west.Apply(t, cluster.Manifests(t, fmt.Sprintf(`
cluster: west
discovery: {clusters: culvert-system}
multiCluster: {enabled: true, importedServices: {enabled: true, ports: 20000-20099}}
gateway:
  replicas: 2
  service: {type: ClusterIP, ports: [{name: tls, port: 8443}]}
  listeners: [{address: ":8443"}]
  config: {networks: [{name: west, cidrs: [%q]}]}
dns: {enabled: true, replicas: 1, config: {networks: [{name: west, cidrs: [%[1]q]}]}}
`, west.PodCIDR)))
	west.knows(t, east)
	west.Apply(t, client)
	west.WaitReady(t, patience, "shop")
	west.WaitReady(t, patience, "culvert-system")
	t.Cleanup(func() {
		if t.Failed() {
			for _, p := range west.gateways(t) {
				log := west.PodLog(&p, "")
				t.Logf("pod %s:\n%s", p.Name, log[:min(len(log), 8000)])
			}
		}
	})
	pod := west.pods(t, "app=client")[0]
	c := newCaller(t, ca, west, &pod)

	web, closed := west.imported(t, "web"), west.imported(t, "closed")
	c.wants(t, "by the address of the ServiceImport", func() (string, error) { return c.call(t.Context(), web) })
	dns := west.dns(t)
	west.Wait(t, patience, func(ctx context.Context) error {
		at, err := c.lookup(ctx, dns)
		if err == nil && at != web {
			err = fmt.Errorf("a pod finds %s at %s, want %s", name, at, web)
		}
		return err
	})
	// The first calls may come before kube-proxy knows an endpoint: the gateways hear of none of these.
	west.Wait(t, patience, func(ctx context.Context) error {
		if got, err := c.call(ctx, closed); err == nil {
			t.Fatalf("a service that is not for the west answers: %s", got)
		}
		for _, p := range west.gateways(t) {
			if log := west.PodLog(&p, ""); strings.Contains(log, "not-exposed") && strings.Contains(log, "closed.shop.svc.clusterset.local") {
				return nil
			}
		}
		return fmt.Errorf("no gateway logs that it has refused")
	})

	// It goes on while a replica is gone, and the address stays when all of them were replaced.
	now := int64(0)
	for _, p := range west.gateways(t) {
		if err := west.Client.CoreV1().Pods("culvert-system").Delete(t.Context(), p.Name, metav1.DeleteOptions{GracePeriodSeconds: &now}); err != nil {
			t.Fatal(err)
		}
		for range 3 {
			c.wants(t, "after a replica was killed", func() (string, error) { return c.call(t.Context(), web) })
		}
		west.WaitReady(t, patience, "culvert-system")
	}
	if again := west.imported(t, "web"); again != web {
		t.Errorf("the address is %s, and was %s", again, web)
	}

	// What is no longer exported is no longer there.
	east.Delete(t, export)
	west.Wait(t, patience, func(ctx context.Context) error {
		l, err := west.Client.CoreV1().Services("culvert-system").List(ctx, metav1.ListOptions{LabelSelector: "app.kubernetes.io/managed-by=culvert"})
		if err == nil && len(l.Items) != 1 {
			err = fmt.Errorf("%d Services of imports are left, want that of the other one", len(l.Items))
		}
		return err
	})
	if got, err := c.call(t.Context(), web); err == nil {
		t.Errorf("the service is still reached: %s", got)
	}
}

// gateways are the pods of the gateway.
func (s *side) gateways(t *testing.T) []corev1.Pod {
	t.Helper()
	pods, err := s.Pods(context.WithoutCancel(t.Context()), "culvert-system", "app.kubernetes.io/component=gateway")
	if err != nil {
		t.Error(err)
	}
	return pods
}

// dns is the address of the DNS servers.
func (s *side) dns(t *testing.T) netip.Addr {
	t.Helper()
	svc, err := s.Client.CoreV1().Services("culvert-system").Get(t.Context(), "culvert-dns", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return netip.MustParseAddr(svc.Spec.ClusterIP)
}

// annotate sets an annotation of a Service.
func (s *side) annotate(t *testing.T, namespace, service, key, value string) {
	t.Helper()
	svc, err := s.Client.CoreV1().Services(namespace).Get(t.Context(), service, metav1.GetOptions{})
	if err == nil {
		metav1.SetMetaDataAnnotation(&svc.ObjectMeta, key, value)
		_, err = s.Client.CoreV1().Services(namespace).Update(t.Context(), svc, metav1.UpdateOptions{})
	}
	if err != nil {
		t.Fatal(err)
	}
}

// imported waits until a ServiceImport has the ClusterIP of a Service, and returns that.
func (s *side) imported(t *testing.T, name string) (at netip.Addr) {
	t.Helper()
	s.Wait(t, patience, func(ctx context.Context) error {
		i, err := s.Dynamic.Resource(serviceImports).Namespace("shop").Get(ctx, name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		ips, _, _ := unstructured.NestedStringSlice(i.Object, "spec", "ips")
		_, service, _ := strings.Cut(i.GetAnnotations()["culvert.dev/imported-service"], "/")
		if len(ips) == 0 || service == "" {
			return fmt.Errorf("the ServiceImport %s has addresses %v of the Service %q", name, ips, service)
		}
		svc, err := s.Client.CoreV1().Services("culvert-system").Get(ctx, service, metav1.GetOptions{})
		if err != nil {
			return err
		}
		if ips[0] != svc.Spec.ClusterIP {
			return fmt.Errorf("the ServiceImport %s is at %v, its Service at %s", name, ips, svc.Spec.ClusterIP)
		}
		at = netip.MustParseAddr(ips[0])
		return nil
	})
	return at
}
