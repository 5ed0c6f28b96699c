package replicas

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"culvert.dev/integration/cluster"
)

// What is refused, each for another reason. NOTE is what has nothing to do with it.
const refused = `
apiVersion: gateway.networking.k8s.io/v1
kind: TLSRoute
metadata: {name: stranger, namespace: shop, annotations: {note: "NOTE"}}
spec:
  parentRefs: [{name: edge, sectionName: none}]
  hostnames: [stranger.shop.test]
  rules: [{backendRefs: [{name: echo, port: 443}]}]
---
apiVersion: gateway.networking.k8s.io/v1
kind: Gateway
metadata: {name: late, namespace: shop, annotations: {note: "NOTE"}}
spec:
  gatewayClassName: culvert
  listeners: [{name: health, port: 9091, protocol: TCP}]
---
apiVersion: gateway.networking.k8s.io/v1
kind: Gateway
metadata: {name: uncertain, namespace: shop, annotations: {note: "NOTE"}}
spec:
  gatewayClassName: culvert
  listeners: [{name: tls, port: 9443, protocol: TLS, tls: {mode: Terminate, certificateRefs: [{name: none}]}}]
---
apiVersion: v1
kind: Service
metadata: {name: denied, namespace: shop, annotations: {culvert.dev/expose: "true", note: "NOTE"}}
spec: {ports: [{port: 80}]}
---
apiVersion: v1
kind: Service
metadata: {name: wrong, namespace: shop, annotations: {culvert.dev/expose: "perhaps", note: "NOTE"}}
spec: {ports: [{port: 80}]}
`

// Each refusal is an Event of its object: of one writer, and once, however often
// the object changes in what has nothing to do with it, and whoever leads.
func (s *site) events(t *testing.T) {
	apply := func(note string) { s.Apply(t, strings.ReplaceAll(refused, "NOTE", note)) }
	apply("first")
	var before []string
	s.Wait(t, patience, func(ctx context.Context) error {
		all, err := s.eventsOf(ctx)
		if err != nil {
			return err
		}
		before = all
		for _, want := range []string{"TLSRoute/stranger NoMatchingParent: ", "Gateway/late PortUnavailable: listener health: ", "Gateway/uncertain InvalidCertificateRef: listener tls: ", "Service/denied ", "Service/wrong "} {
			if !slices.ContainsFunc(all, func(e string) bool { return strings.HasPrefix(e, want) }) {
				return fmt.Errorf("no Event of %s among %q", want, all)
			}
		}
		return nil
	})
	for i := range 20 {
		apply(fmt.Sprint("change ", i))
	}
	old, err := s.leader(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Client.CoreV1().Pods(system).Delete(t.Context(), old, metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	s.Wait(t, 2*time.Minute, func(ctx context.Context) error { // the pod is told only when what plays kubelet is in touch again
		if now, err := s.leader(ctx); err != nil || now == old {
			return fmt.Errorf("led by %q: %v", now, err)
		}
		return nil
	})
	s.WaitReady(t, patience, system)
	time.Sleep(2 * calm) // for the new leader to say it again, if it does
	after, err := s.eventsOf(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	seen := map[string]bool{}
	for _, e := range after {
		if seen[e] {
			t.Errorf("said twice: %s", e)
		}
		seen[e] = true
	}
	for _, p := range s.gateways(t) {
		s.status(t, &p)
	}
	t.Logf("events:\n%s", strings.Join(after, "\n"))
	if len(after) > len(before)+1 { // a listener may have been pending before
		t.Errorf("%d Events after changes of no matter, %d before", len(after), len(before))
	}
}

// status has each replica say the same of Gateways, and who leads.
func (s *site) status(t *testing.T, p *corev1.Pod) {
	t.Helper()
	admin := fmt.Sprintf("unix:/proc/%d/root/run/culvert/admin.sock", s.process(t, p))
	for _, args := range [][]string{nil, {"-o", "json"}} {
		out, err := exec.CommandContext(t.Context(), cluster.Program("culvert"), append([]string{"status", "--kube", "--admin", admin}, args...)...).CombinedOutput()
		if err != nil {
			t.Errorf("culvert status of pod %s: %v\n%s", p.Name, err, out)
			return
		}
		for _, want := range []string{"shop/edge", "shop/late", "PortUnavailable", "TLSRoute shop/stranger", "Service shop/denied", "culvert-system/culvert"} {
			if !strings.Contains(string(out), want) {
				t.Errorf("culvert status %q of pod %s lacks %q:\n%s", args, p.Name, want, out)
			}
		}
		if args == nil {
			t.Logf("pod %s:\n%s", p.Name, out)
			continue
		}
		var got struct {
			Clusters []struct{ Known bool }
			Lease    struct {
				Leads        bool
				Self, Holder string
			}
		}
		if err := json.Unmarshal(out, &got); err != nil {
			t.Fatal(err)
		}
		leader, err := s.leader(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if l := got.Lease; l.Leads != (p.Name == leader) || !strings.HasPrefix(l.Holder, leader+"_") || !strings.HasPrefix(l.Self, p.Name+"_") || len(got.Clusters) != 1 || !got.Clusters[0].Known {
			t.Errorf("pod %s says %+v, and pod %s leads", p.Name, got, leader)
		}
	}
}

// eventsOf are the Events of the namespace that are ours, in one line each.
func (s *site) eventsOf(ctx context.Context) (all []string, err error) {
	list, err := s.Client.CoreV1().Events("shop").List(ctx, metav1.ListOptions{})
	if err != nil {
		return nil, err
	}
	for _, e := range list.Items {
		if e.Source.Component == "culvert" && e.Type == corev1.EventTypeWarning {
			all = append(all, fmt.Sprintf("%s/%s %s: %s", e.InvolvedObject.Kind, e.InvolvedObject.Name, e.Reason, e.Message))
		}
	}
	slices.Sort(all)
	return all, nil
}

// audited returns flags of an API server that writes down what gateways write.
func audited(t *testing.T) (file string, flags []string) {
	t.Helper()
	dir := t.TempDir()
	policy := filepath.Join(dir, "policy.yaml")
	if err := os.WriteFile(policy, []byte(`apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
rules:
  - level: Metadata
    verbs: [create, update, patch]
    users: ["system:serviceaccount:culvert-system:culvert"]
  - level: None
`), 0o600); err != nil {
		t.Fatal(err)
	}
	file = filepath.Join(dir, "audit.log")
	return file, []string{"--audit-policy-file=" + policy, "--audit-log-path=" + file}
}

// A written is a request that wrote, or would have.
type written struct {
	Verb string `json:"verb"`
	User struct {
		Extra map[string][]string `json:"extra"`
	} `json:"user"`
	ObjectRef struct {
		Resource    string `json:"resource"`
		Subresource string `json:"subresource"`
		Name        string `json:"name"`
	} `json:"objectRef"`
	ResponseStatus struct {
		Code int `json:"code"`
	} `json:"responseStatus"`
	At time.Time `json:"requestReceivedTimestamp"`
}

// writes returns what gateways have written, in the order in which they did.
func (s *site) writes(t *testing.T) (all []written) {
	t.Helper()
	f, err := os.Open(s.audit)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	lines := bufio.NewScanner(f)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		var w written
		if json.Unmarshal(lines.Bytes(), &w) == nil && w.ResponseStatus.Code < 300 {
			all = append(all, w)
		}
	}
	slices.SortFunc(all, func(a, b written) int { return a.At.Compare(b.At) })
	return all
}

func (w *written) pod() string {
	return strings.Join(w.User.Extra["authentication.kubernetes.io/pod-name"], "")
}

// Whoever wrote had the lease then.
func (s *site) oneWrites(t *testing.T) {
	holder, count := "", map[string]int{}
	for _, w := range s.writes(t) {
		switch pod := w.pod(); {
		case w.ObjectRef.Resource == "leases":
			holder = pod
		case pod != holder:
			t.Errorf("%s: pod %q wrote %s %s, and pod %q led", w.At.Format(time.TimeOnly), pod, w.ObjectRef.Resource, w.ObjectRef.Name, holder)
		default:
			count[pod]++
		}
	}
	if len(count) < 2 {
		t.Errorf("got writes by %v, want some of at least two pods", count)
	}
	t.Logf("writes, by pod: %v", count)
}
