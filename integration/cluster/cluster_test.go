package cluster_test

import (
	"context"
	"fmt"
	"net"
	"testing"
	"time"

	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"culvert.dev/integration/cluster"
)

func TestMain(m *testing.M) { cluster.Main(m) }

// endpoints are the ready ones of the service, address by pod.
func endpoints(ctx context.Context, c *cluster.Cluster, service string) (map[string]string, error) {
	slices, err := c.Client.DiscoveryV1().EndpointSlices("default").List(ctx, metav1.ListOptions{LabelSelector: discoveryv1.LabelServiceName + "=" + service})
	if err != nil {
		return nil, err
	}
	found := map[string]string{}
	for _, s := range slices.Items {
		for _, e := range s.Endpoints {
			if e.Conditions.Ready != nil && *e.Conditions.Ready {
				found[e.TargetRef.Name] = net.JoinHostPort(e.Addresses[0], fmt.Sprint(*s.Ports[0].Port))
			}
		}
	}
	return found, nil
}

// waitEndpoints waits for so many, none of which may be the unwanted one.
func waitEndpoints(t *testing.T, c *cluster.Cluster, want int, unwanted string) map[string]string {
	t.Helper()
	var found map[string]string
	c.Wait(t, cluster.PodTime, func(ctx context.Context) (err error) {
		found, err = endpoints(ctx, c, "echo")
		if err == nil && (len(found) != want || found[unwanted] != "") {
			err = fmt.Errorf("endpoints of echo are %v, want %d without %q", found, want, unwanted)
		}
		return err
	})
	return found
}

// podOf asks an echo server for its pod, on the caller's thread.
func podOf(addr string) (string, error) {
	conn, err := net.DialTimeout("tcp", addr, 20*time.Second)
	if err != nil {
		return "", err
	}
	defer conn.Close()
	answer, err := cluster.AskEcho(conn)
	return answer.Pod, err
}

func wantPods(t *testing.T, endpoints map[string]string) {
	t.Helper()
	for pod, addr := range endpoints {
		got, err := podOf(addr)
		if err != nil || got != pod {
			t.Errorf("pod at %s says it is %q (%v), want %q", addr, got, err, pod)
		}
	}
}

func TestPodsAreReachedAndReplaced(t *testing.T) {
	c := cluster.Start(t, cluster.Options{})
	c.RunEcho(t, cluster.Echo{Replicas: 2})
	before := waitEndpoints(t, c, 2, "")
	wantPods(t, before)

	var victim string
	for victim = range before {
	}
	if err := c.Client.CoreV1().Pods("default").Delete(t.Context(), victim, metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	after := waitEndpoints(t, c, 2, victim)
	wantPods(t, after)
	c.Wait(t, cluster.PodTime, func(ctx context.Context) error {
		_, err := c.Client.CoreV1().Pods("default").Get(ctx, victim, metav1.GetOptions{})
		if apierrors.IsNotFound(err) {
			return nil
		}
		return fmt.Errorf("pod %s is still there (%v)", victim, err)
	})
	if _, err := podOf(before[victim]); err == nil {
		t.Errorf("the deleted pod still answers at %s", before[victim])
	}
}

func TestAPIServerComesBack(t *testing.T) {
	c := cluster.Start(t, cluster.Options{NoCRDs: true})
	c.RunEcho(t, cluster.Echo{Replicas: 2})
	before := waitEndpoints(t, c, 2, "")
	c.StopAPIServer(t)
	if _, err := endpoints(t.Context(), c, "echo"); err == nil {
		t.Fatal("the API server answers after it was stopped")
	}
	wantPods(t, before)
	c.StartAPIServer(t)
	if after := waitEndpoints(t, c, 2, ""); fmt.Sprint(after) != fmt.Sprint(before) {
		t.Errorf("endpoints after the restart are %v, want %v", after, before)
	}
	// The controllers and the harness itself go on.
	c.Scale(t, "default", "echo", 3)
	wantPods(t, waitEndpoints(t, c, 3, ""))
}

func TestWatchesExpire(t *testing.T) {
	c := cluster.Start(t, cluster.Options{NoCRDs: true})
	c.RunEcho(t, cluster.Echo{Replicas: 2})
	waitEndpoints(t, c, 2, "")
	pods := c.Client.CoreV1().Pods("default")
	list, err := pods.List(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	c.ExpireWatches(t)
	w, err := pods.Watch(t.Context(), metav1.ListOptions{ResourceVersion: list.ResourceVersion})
	if err == nil {
		defer w.Stop()
		err = apierrors.FromObject((<-w.ResultChan()).Object)
	}
	if !apierrors.IsResourceExpired(err) && !apierrors.IsGone(err) {
		t.Errorf("a watch from before is answered with %v, want 410 Gone", err)
	}
	c.Scale(t, "default", "echo", 3)
	wantPods(t, waitEndpoints(t, c, 3, ""))
}

func TestClustersAreApartUnlessConnected(t *testing.T) {
	a := cluster.Start(t, cluster.Options{NoCRDs: true})
	b := cluster.Start(t, cluster.Options{NoCRDs: true})
	if a.APIServer == b.APIServer || a.PodCIDR == b.PodCIDR || a.ServiceCIDR == b.ServiceCIDR {
		t.Fatalf("two clusters share addresses: %s %s %s", a.APIServer, a.PodCIDR, a.ServiceCIDR)
	}
	a.RunEcho(t, cluster.Echo{Replicas: 2})
	b.RunEcho(t, cluster.Echo{Replicas: 2})
	wantPods(t, waitEndpoints(t, a, 2, ""))
	there := waitEndpoints(t, b, 2, "")
	wantPods(t, there)

	pods, err := a.Pods(t.Context(), "default", "app=echo")
	if err != nil || len(pods) != 2 {
		t.Fatalf("pods of %s: %v, %v", a.Name, pods, err)
	}
	var addr string
	for _, addr = range there {
	}
	dial := func(within time.Duration) error {
		return a.InPod(t, &pods[0], func() error {
			conn, err := net.DialTimeout("tcp", addr, within)
			if err == nil {
				conn.Close()
			}
			return err
		})
	}
	if err := dial(500 * time.Millisecond); err == nil {
		t.Errorf("a pod of %s reaches %s of %s, which is not connected", a.Name, addr, b.Name)
	}
	cluster.Connect(t, a, b)
	if err := dial(20 * time.Second); err != nil {
		t.Errorf("a pod of %s does not reach %s of %s, which is connected: %v", a.Name, addr, b.Name, err)
	}
	cluster.Disconnect(t, a, b)
	if err := dial(500 * time.Millisecond); err == nil {
		t.Errorf("a pod of %s reaches %s of %s after Disconnect", a.Name, addr, b.Name)
	}
}
