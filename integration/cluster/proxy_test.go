package cluster_test

import (
	"context"
	"fmt"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"culvert.dev/integration/cluster"
)

func TestServicesLeadToTheirPods(t *testing.T) {
	c := cluster.Start(t, cluster.Options{NoCRDs: true, Proxy: true})
	c.RunEcho(t, cluster.Echo{Replicas: 2})
	c.Apply(t, `
apiVersion: v1
kind: Service
metadata: {name: entrance}
spec:
  type: NodePort
  selector: {app: echo}
  externalIPs: [192.0.2.7]
  ports: [{name: http, port: 81, targetPort: 3000, nodePort: 30080}]
`)
	want := waitEndpoints(t, c, 2, "")
	service := func(name string) *corev1.Service {
		s, err := c.Client.CoreV1().Services("default").Get(t.Context(), name, metav1.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	pods, err := c.Pods(t.Context(), "default", "app=echo")
	if err != nil {
		t.Fatal(err)
	}
	clusterIP := service("echo").Spec.ClusterIP + ":80"
	node := nodeAddress(t, c) + ":30080"
	for _, addr := range []string{clusterIP, service("entrance").Spec.ClusterIP + ":81", "192.0.2.7:81", node} {
		for _, from := range []*corev1.Pod{nil, &pods[0]} {
			seen := map[string]bool{}
			c.Wait(t, cluster.PodTime, func(context.Context) error {
				return c.InPod(t, from, func() error {
					pod, err := podOf(addr)
					if err != nil {
						return fmt.Errorf("%s: %w", addr, err)
					}
					if want[pod] == "" {
						return fmt.Errorf("pod %q answers at %s, want one of %v", pod, addr, want)
					}
					if seen[pod] = true; len(seen) < len(want) {
						return fmt.Errorf("at %s only %v answers", addr, seen)
					}
					return nil
				})
			})
		}
	}
	// A service without endpoints refuses at once.
	c.Scale(t, "default", "echo", 0)
	waitEndpoints(t, c, 0, "")
	c.Wait(t, cluster.PodTime, func(context.Context) error {
		if _, err := podOf(clusterIP); err == nil {
			return fmt.Errorf("%s answers without a pod", clusterIP)
		}
		return nil
	})
}

func nodeAddress(t *testing.T, c *cluster.Cluster) string {
	t.Helper()
	list, err := c.Client.CoreV1().Nodes().List(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return list.Items[0].Status.Addresses[0].Address
}
