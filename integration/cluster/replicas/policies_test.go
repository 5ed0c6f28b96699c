package replicas

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

// Policies that deny nobody here. One can't be understood, which the API server does not see.
const policies = `
apiVersion: policy.culvert.dev/v1alpha1
kind: AuthorizationPolicy
metadata: {name: everybody, namespace: shop}
spec:
  enforcementLevel: Network
  action: ALLOW
  targetRefs: [{group: "", kind: Service, name: echo}, {group: gateway.networking.k8s.io, kind: Gateway, name: edge}, {group: "", kind: Namespace}]
  rules: [{}]
---
apiVersion: policy.culvert.dev/v1alpha1
kind: ClusterAuthorizationPolicy
metadata: {name: strangers}
spec:
  enforcementLevel: Network
  tier: Admin
  action: DENY
  targets: {namespaces: [empty]}
  rules: [{sources: [{type: TrustDomain, trustDomain: old.example}]}]
---
apiVersion: policy.culvert.dev/v1alpha1
kind: AuthorizationPolicy
metadata: {name: tried, namespace: shop}
spec:
  enforcementLevel: Network
  action: DENY
  dryRun: true
  targetRefs: [{group: "", kind: Service, name: echo}]
  rules: [{sources: [{type: TrustDomain, trustDomain: old.example}]}]
---
apiVersion: v1
kind: Namespace
metadata: {name: empty}
---
apiVersion: policy.culvert.dev/v1alpha1
kind: AuthorizationPolicy
metadata: {name: wrong, namespace: empty}
spec:
  enforcementLevel: Network
  action: ALLOW
  targetRefs: [{group: "", kind: Namespace}]
  rules: [{sources: [{type: Any, cidrs: [10.0.0.0/40]}]}]
`

// wantedStatus is what becomes of the policies: each ancestor with its conditions, and who wrote them.
var wantedStatus = map[string]string{
	"shop/everybody": "Gateway edge: Accepted=True/Accepted; Namespace shop: Accepted=True/Accepted; Service echo: Accepted=True/Accepted",
	"shop/tried":     "Service echo: Accepted=True/Accepted PartiallyEnforced=True/UnidentifiedCallers",
	"/strangers":     "ClusterAuthorizationPolicy strangers: Accepted=False/TargetNotFound",
	"empty/wrong":    "Namespace empty: Accepted=False/Invalid",
}

// A policyStatus is the status of policies, and the version of each, by name.
type policyStatus struct{ text, version map[string]string }

// policyStatus returns what the API server has.
func (s *site) policyStatus(ctx context.Context) (all policyStatus, err error) {
	all.text, all.version = map[string]string{}, map[string]string{}
	for _, resource := range []string{"authorizationpolicies", "clusterauthorizationpolicies"} {
		list, err := s.Dynamic.Resource(schema.GroupVersionResource{Group: "policy.culvert.dev", Version: "v1alpha1", Resource: resource}).List(ctx, metav1.ListOptions{})
		if err != nil {
			return all, err
		}
		for _, o := range list.Items {
			name := o.GetNamespace() + "/" + o.GetName()
			all.version[name] = o.GetResourceVersion()
			var texts []string
			ancestors, _, _ := unstructured.NestedSlice(o.Object, "status", "ancestors")
			for _, a := range ancestors {
				m, _ := a.(map[string]any)
				ref, _ := m["ancestorRef"].(map[string]any)
				text := fmt.Sprintf("%v %v:", ref["kind"], ref["name"])
				conditions, _ := m["conditions"].([]any)
				for _, c := range conditions {
					c, _ := c.(map[string]any)
					text += fmt.Sprintf(" %v=%v/%v", c["type"], c["status"], c["reason"])
				}
				texts = append(texts, text)
			}
			slices.Sort(texts)
			all.text[name] = strings.Join(texts, "; ")
		}
	}
	return all, nil
}

// policies writes the status of policies: one of each object that a policy is about.
func (s *site) policies(t *testing.T) {
	s.Apply(t, policies)
	s.Wait(t, patience, func(ctx context.Context) error {
		now, err := s.policyStatus(ctx)
		if err == nil && !maps.Equal(now.text, wantedStatus) {
			err = fmt.Errorf("the status is %q, want %q", now.text, wantedStatus)
		}
		s.written = now.version
		return err
	})
}

// policiesRest finds the policies as they were written: whoever has led since, had nothing to add.
func (s *site) policiesRest(t *testing.T) {
	now, err := s.policyStatus(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if !maps.Equal(now.text, wantedStatus) || !maps.Equal(now.version, s.written) {
		t.Errorf("the status is %q of versions %v, want that of versions %v: %q", now.text, now.version, s.written, wantedStatus)
		for _, w := range s.writes(t) {
			if strings.HasSuffix(w.ObjectRef.Resource, "policies") {
				t.Logf("%s: pod %s: %s %s of %s %s", w.At.Format(time.StampMilli), w.pod(), w.Verb, w.ObjectRef.Subresource, w.ObjectRef.Resource, w.ObjectRef.Name)
			}
		}
	}
	events, err := s.Client.CoreV1().Events("empty").List(t.Context(), metav1.ListOptions{FieldSelector: "involvedObject.name=wrong"})
	if err != nil || len(events.Items) != 1 {
		t.Errorf("%d Events of the policy that can't be understood, %v, want 1", len(events.Items), err)
	}
}
