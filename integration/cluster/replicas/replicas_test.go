package replicas

import (
	"context"
	"encoding/json"
	"fmt"
	"net/netip"
	"os"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"culvert.dev/integration/cluster"
	"culvert.dev/internal/testca"
)

func TestMain(m *testing.M) { cluster.Main(m) }

const (
	system       = "culvert-system"
	rights       = system + ":culvert" // the ClusterRole
	name         = "echo.shop.test"
	port         = 8443
	patience     = 90 * time.Second // until what must come has come, on a busy machine
	calm         = 4 * time.Second  // without a failure, is without failures
	drainTimeout = 20 * time.Second // of a drain
	noticed      = 3 * time.Second  // until a replica that was killed is, on a busy machine
)

// A site is a cluster with a gateway of two replicas, clients that come all the
// time, and a load balancer between.
type site struct {
	*cluster.Cluster
	lb      *balancer
	clients *clients
	audit   string
	written map[string]string // the versions of policies, by name
}

// Replicas come and go, and so does the API server: no connection fails that
// need not.
func TestReplicas(t *testing.T) {
	s := start(t)
	s.clients.load(t, 4)
	t.Run("policies", s.policies)
	t.Run("rollout", s.rollout)
	t.Run("a pod is killed", s.killed)
	t.Run("the leader goes", s.leaderGoes)
	t.Run("the API server is away", s.apiAway)
	t.Run("a right is taken", s.denied)
	t.Run("events", s.events)
	t.Run("policies rest", s.policiesRest)
	t.Run("one writes", s.oneWrites)
}

func start(t *testing.T) *site {
	ca, err := testca.New("replicas.test", nil)
	if err != nil {
		t.Fatal(err)
	}
	audit, flags := audited(t)
	s := &site{Cluster: cluster.Start(t, cluster.Options{APIServerFlags: flags}), audit: audit}
	s.Apply(t, cluster.Manifests(t, fmt.Sprintf(`
gatewayAPI: {enabled: true}
authorizationPolicies: {enabled: true}
discovery: {deny: [shop/denied]}
drain: {delay: 4, timeout: %d}
gateway: {service: {type: ClusterIP, ports: [{name: tls, port: %d}]}}
`, int(drainTimeout.Seconds()), port)))
	s.RunEcho(t, cluster.Echo{Namespace: "shop", CA: ca, Hosts: []string{name, "leader.shop.test", "after.shop.test"}})
	s.Apply(t, edge+"\n---"+route("echo", name))
	s.WaitReady(t, patience, "shop")
	s.WaitReady(t, patience, system)
	s.lb = balance(t, s.Cluster, system, "culvert", port)
	s.clients = newClients(t, ca, s.lb, name)
	s.Wait(t, patience, func(ctx context.Context) error {
		if got := len(s.lb.targets()); got != 2 {
			return fmt.Errorf("the load balancer has %d pods, want 2", got)
		}
		_, err := s.clients.once(ctx, name)
		return err
	})
	t.Cleanup(func() {
		if !t.Failed() {
			return
		}
		for _, p := range s.gateways(t) {
			t.Logf("pod %s:\n%s", p.Name, s.PodLog(&p, ""))
		}
	})
	return s
}

const edge = `
apiVersion: gateway.networking.k8s.io/v1
kind: Gateway
metadata: {name: edge, namespace: shop}
spec:
  gatewayClassName: culvert
  listeners: [{name: tls, port: 8443, protocol: TLS, tls: {mode: Passthrough}}]
`

func route(object, host string) string {
	return fmt.Sprintf(`
apiVersion: gateway.networking.k8s.io/v1
kind: TLSRoute
metadata: {name: %s, namespace: shop}
spec:
  parentRefs: [{name: edge}]
  hostnames: [%s]
  rules: [{backendRefs: [{name: echo, port: 443}]}]
`, object, host)
}

// gateways are the pods of the gateway that are not being deleted.
func (s *site) gateways(t *testing.T) []corev1.Pod {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), answerTime)
	defer cancel()
	pods, err := s.Pods(ctx, system, "app.kubernetes.io/component=gateway")
	if err != nil {
		t.Errorf("pods of the gateway: %v", err)
	}
	return pods
}

func address(p *corev1.Pod) netip.Addr { return netip.MustParseAddr(p.Status.PodIP).Unmap() }

// wantsNoFailure fails the test for each connection that has failed, and unless
// each of the pods that are balanced to has served some.
func (s *site) wantsNoFailure(t *testing.T) {
	t.Helper()
	made, failed := s.clients.take()
	for _, f := range failed {
		t.Errorf("%s: a connection by pod %s failed: %v", f.began.Format(time.TimeOnly), f.pod, f.err)
	}
	for _, a := range s.lb.targets() {
		if made[a] == 0 {
			t.Errorf("pod %s has served none of %v", a, made)
		}
	}
	t.Logf("connections served, by pod: %v", made)
}

// A rollout replaces both pods. New connections don't notice, and tunnels have
// until the last fifth of the timeout.
func (s *site) rollout(t *testing.T) {
	s.clients.take()
	tunnels := s.clients.tunnels(t, 4)
	patch := fmt.Sprintf(`{"spec":{"template":{"metadata":{"annotations":{"kubectl.kubernetes.io/restartedAt":%q}}}}}`, time.Now().Format(time.RFC3339))
	if _, err := s.Client.AppsV1().Deployments(system).Patch(t.Context(), "culvert", types.StrategicMergePatchType, []byte(patch), metav1.PatchOptions{}); err != nil {
		t.Fatal(err)
	}
	s.Wait(t, 2*patience, func(ctx context.Context) error {
		d, err := s.Client.AppsV1().Deployments(system).Get(ctx, "culvert", metav1.GetOptions{})
		if err == nil && !rolledOut(d) {
			err = fmt.Errorf("the rollout is at %+v", d.Status)
		}
		return err
	})
	for _, u := range tunnels {
		select {
		case <-u.ended:
		case <-time.After(patience):
			t.Errorf("a tunnel by pod %s stands %v after the pod was told to end", u.pod, patience)
			continue
		}
		told := s.lb.terminating(u.pod)
		if told.IsZero() {
			t.Errorf("a tunnel by pod %s ended, and the pod did not: %v", u.pod, u.err)
		} else if had := u.at.Sub(told); had < drainTimeout*4/5-6*time.Second {
			t.Errorf("a tunnel by pod %s had %v after the pod was told to end, want %v: %v", u.pod, had, drainTimeout*4/5, u.err)
		}
	}
	time.Sleep(calm)
	s.wantsNoFailure(t)
}

func rolledOut(d *appsv1.Deployment) bool {
	return d.Status.ObservedGeneration == d.Generation && d.Status.Replicas == 2 && d.Status.UpdatedReplicas == 2 && d.Status.AvailableReplicas == 2
}

// kill ends the gateway of a pod without a warning.
func (s *site) kill(t *testing.T, p *corev1.Pod) {
	t.Helper()
	pid := s.process(t, p)
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
}

// process finds the gateway of a pod by the network that it is in.
func (s *site) process(t *testing.T, p *corev1.Pod) int {
	t.Helper()
	var network string
	err := s.InPod(t, p, func() (err error) {
		network, err = os.Readlink("/proc/thread-self/ns/net")
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	all, err := os.ReadDir("/proc")
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range all {
		pid, err := strconv.Atoi(e.Name())
		if err != nil || pid == os.Getpid() {
			continue
		}
		if in, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/net", pid)); err == nil && in == network {
			return pid
		}
	}
	t.Fatalf("pod %s has no process", p.Name)
	return 0
}

// restarted waits until the gateway of a pod that was killed is started again by its kubelet, and
// ready in its place. What the API server says right after the kill is of the one before.
func (s *site) restarted(t *testing.T, p *corev1.Pod) {
	t.Helper()
	before := p.Status.ContainerStatuses[0].RestartCount
	s.Wait(t, patience, func(ctx context.Context) error {
		now, err := s.Client.CoreV1().Pods(system).Get(ctx, p.Name, metav1.GetOptions{})
		if err == nil && (now.Status.ContainerStatuses[0].RestartCount <= before || !cluster.Ready(now)) {
			err = fmt.Errorf("pod %s is not started again", p.Name)
		}
		return err
	})
	s.WaitReady(t, patience, system)
}

// What a killed pod had is lost, and nothing else.
func (s *site) killed(t *testing.T) {
	s.clients.take()
	tunnels := s.clients.tunnels(t, 4)
	victim := &s.gateways(t)[0]
	at := address(victim)
	s.kill(t, victim)
	s.restarted(t, victim)
	time.Sleep(delay + calm)
	made, failed := s.clients.take()
	for _, f := range failed {
		if f.pod != at {
			t.Errorf("%s: a connection by pod %s failed, which was not killed: %v", f.began.Format(time.TimeOnly), f.pod, f.err)
		}
	}
	t.Logf("%d connections failed, %v were served", len(failed), made)
	for _, u := range tunnels {
		if u.stands() == (u.pod == at) {
			t.Errorf("a tunnel by pod %s stands: %v; the pod killed is %s", u.pod, u.stands(), at)
		}
	}
	time.Sleep(calm)
	s.wantsNoFailure(t)
}

// leader is the pod that holds the lease.
func (s *site) leader(ctx context.Context) (string, error) {
	l, err := s.Client.CoordinationV1().Leases(system).Get(ctx, "culvert", metav1.GetOptions{})
	if err != nil {
		return "", err
	}
	if l.Spec.HolderIdentity == nil || *l.Spec.HolderIdentity == "" {
		return "", fmt.Errorf("the lease is held by nobody")
	}
	pod, _, _ := strings.Cut(*l.Spec.HolderIdentity, "_")
	return pod, nil
}

// The other replica writes what has become of objects, and nobody is served worse. The one
// that goes gives the lease back when it is told to, and the other asks for it every 4 to 9 seconds.
func (s *site) leaderGoes(t *testing.T) {
	s.clients.take()
	old, err := s.leader(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	if err := s.Client.CoreV1().Pods(system).Delete(t.Context(), old, metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	s.Wait(t, patience, func(ctx context.Context) error {
		now, err := s.leader(ctx)
		if err == nil && now == old {
			err = fmt.Errorf("pod %s, which drains, still leads", old)
		}
		return err
	})
	t.Logf("another leads after %v", time.Since(began))
	s.routed(t, "leader", "leader.shop.test")
	s.WaitReady(t, patience, system)
	time.Sleep(delay + calm)
	s.wantsNoFailure(t)
}

// routed makes a route and waits until its status says that it is accepted, and
// each pod serves it.
func (s *site) routed(t *testing.T, object, host string) {
	t.Helper()
	s.Apply(t, route(object, host))
	s.Wait(t, patience, func(ctx context.Context) error {
		conditions, err := s.routeConditions(ctx, object)
		if err == nil && conditions["Accepted"] != "True" {
			err = fmt.Errorf("route %s: %v", object, conditions)
		}
		return err
	})
	s.Wait(t, patience, func(ctx context.Context) error {
		for range 2 * len(s.lb.targets()) {
			if pod, err := s.clients.once(ctx, host); err != nil {
				return fmt.Errorf("%s by pod %s: %w", host, pod, err)
			}
		}
		return nil
	})
}

func (s *site) routeConditions(ctx context.Context, object string) (map[string]string, error) {
	var out struct {
		Status struct {
			Parents []struct {
				Conditions []metav1.Condition `json:"conditions"`
			} `json:"parents"`
		} `json:"status"`
	}
	raw, err := s.Client.Discovery().RESTClient().Get().AbsPath("/apis/gateway.networking.k8s.io/v1/namespaces/shop/tlsroutes/" + object).DoRaw(ctx)
	if err == nil {
		err = json.Unmarshal(raw, &out)
	}
	conditions := map[string]string{}
	for _, p := range out.Status.Parents {
		for _, c := range p.Conditions {
			conditions[c.Type] = string(c.Status)
		}
	}
	return conditions, err
}
