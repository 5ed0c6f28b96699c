package replicas

import (
	"context"
	"fmt"
	"net/http"
	"net/netip"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"culvert.dev/integration/cluster"
)

// Without an API server everything is served as it was. Who starts again then has
// what was kept, and says that it is old.
func (s *site) apiAway(t *testing.T) {
	victim := s.gateways(t)[0]
	at := address(&victim)
	s.clients.take()
	s.StopAPIServer(t)
	time.Sleep(2 * calm)
	s.wantsNoFailure(t)

	s.lb.refuse(at, true)
	out := time.Now()
	time.Sleep(time.Second) // for those under way
	s.kill(t, &victim)
	deadline := time.Now().Add(patience)
	for {
		code, body := readyz(t.Context(), at)
		if code == http.StatusOK && strings.Contains(body, " old: ") {
			t.Logf("ready: %s", body)
			break
		}
		if time.Now().After(deadline) {
			t.Errorf("/readyz of a replica that has what was kept: %d %q, want 200, and that it is old", code, body)
			break
		}
		time.Sleep(200 * time.Millisecond)
	}
	s.noFailureSince(t, out) // on a busy machine others are still under way

	s.StartAPIServer(t)
	began := time.Now()
	s.Wait(t, patience, func(ctx context.Context) error {
		if code, body := readyz(ctx, at); code != http.StatusOK {
			return fmt.Errorf("/readyz of the new replica: %d %q", code, body)
		}
		return nil
	})
	t.Logf("the new replica is ready after %v", time.Since(began))
	s.lb.refuse(at, false)
	s.WaitReady(t, patience, system)
	s.routed(t, "after", "after.shop.test")
	time.Sleep(calm)
	s.wantsNoFailure(t)
}

// readyz is what a pod says of its readiness, or why it says nothing.
func readyz(ctx context.Context, at netip.Addr) (int, string) {
	status, body, err := cluster.Get(ctx, "http://"+netip.AddrPortFrom(at, 9091).String()+"/readyz")
	if err != nil {
		return 0, err.Error()
	}
	return status, body
}

// A right that is taken is said once by each replica, with its verb and
// resource, and what was known is served.
func (s *site) denied(t *testing.T) {
	s.clients.take()
	role, err := s.Client.RbacV1().ClusterRoles().Get(t.Context(), rights, metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	full := role.DeepCopy()
	found := false
	for i := range role.Rules {
		var rest []string
		for _, r := range role.Rules[i].Resources {
			if found = found || r == "tlsroutes"; r != "tlsroutes" {
				rest = append(rest, r)
			}
		}
		role.Rules[i].Resources = rest
	}
	if !found {
		t.Fatalf("no rule for tlsroutes: %v", role.Rules)
	}
	if _, err := s.Client.RbacV1().ClusterRoles().Update(t.Context(), role, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	s.ExpireWatches(t) // until they end, watches go on
	pods := s.gateways(t)
	said := func(p *corev1.Pod) (n int) {
		for line := range strings.Lines(s.PodLog(p, "")) {
			if strings.Contains(line, "tlsroutes.gateway.networking.k8s.io") && strings.Contains(line, "may not ") {
				n++
			}
		}
		return n
	}
	s.Wait(t, patience, func(context.Context) error {
		for _, p := range pods {
			if said(&p) == 0 {
				return fmt.Errorf("pod %s has not said what it may not", p.Name)
			}
		}
		return nil
	})
	time.Sleep(3 * calm) // it is tried again meanwhile
	for _, p := range pods {
		// Lists and watches are two rights.
		if n := said(&p); n > 2 {
			t.Errorf("pod %s has said %d times that it may not list or watch tlsroutes", p.Name, n)
		}
	}
	s.wantsNoFailure(t)

	now, err := s.Client.RbacV1().ClusterRoles().Get(t.Context(), rights, metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	now.Rules = full.Rules
	if _, err := s.Client.RbacV1().ClusterRoles().Update(t.Context(), now, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	s.Wait(t, patience, func(ctx context.Context) error {
		s.Delete(t, route("leader", "leader.shop.test"))
		_, err := s.clients.once(ctx, "leader.shop.test")
		if err == nil {
			return fmt.Errorf("a route that is gone is still served, after the right was given again")
		}
		return nil
	})
	s.clients.take()
}
