package policy

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	dynamicfake "k8s.io/client-go/dynamic/fake"
	"k8s.io/client-go/kubernetes/fake"
	metadatafake "k8s.io/client-go/metadata/fake"
	ktesting "k8s.io/client-go/testing"
	"sigs.k8s.io/yaml"

	"culvert.dev/internal/kube/watch"
	"culvert.dev/registry"
)

// A site is an API server with a Source, in a bubble of synctest.
type site struct {
	t        *testing.T
	policies *dynamicfake.FakeDynamicClient
	core     *fake.Clientset
	metadata *metadatafake.FakeMetadataClient
	source   *Source

	mu      sync.Mutex // guards the rest
	fail    func(verb, resource string) error
	writes  int
	gets    int
	updates []registry.Update
	uses    map[string]registry.PolicyUse
}

func newSite(t *testing.T) *site {
	s := &site{t: t, core: fake.NewSimpleClientset()}
	s.policies = dynamicfake.NewSimpleDynamicClientWithCustomListKinds(runtime.NewScheme(), map[schema.GroupVersionResource]string{
		resource: kind + "List", clusterResource: clusterKind + "List",
	})
	scheme := metadatafake.NewTestScheme()
	if err := metav1.AddMetaToScheme(scheme); err != nil {
		t.Fatal(err)
	}
	s.metadata = metadatafake.NewSimpleMetadataClient(scheme, &metav1.PartialObjectMetadata{
		TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Namespace"}, ObjectMeta: metav1.ObjectMeta{Name: "shop", Labels: map[string]string{"team": "a"}},
	}, definition(resource), definition(clusterResource))
	s.policies.PrependReactor("*", "*", func(a ktesting.Action) (bool, runtime.Object, error) {
		s.mu.Lock()
		defer s.mu.Unlock()
		if a.GetVerb() == "update" {
			s.writes++
			a.(ktesting.UpdateAction).GetObject().(metav1.Object).SetResourceVersion(fmt.Sprint("written", s.writes))
		}
		if a.GetVerb() == "get" {
			s.gets++
		}
		if s.fail != nil {
			if err := s.fail(a.GetVerb(), a.GetResource().Resource); err != nil {
				return true, nil, err
			}
		}
		return false, nil, nil
	})
	s.source = &Source{dynamic: s.policies, core: s.core, metadata: s.metadata, cfg: Config{
		Settings: Settings{Cluster: "west", TrustDomains: []string{"corp.example"}},
		Uses: func() map[string]registry.PolicyUse {
			s.mu.Lock()
			defer s.mu.Unlock()
			return s.uses
		},
	}}
	return s
}

// definition is that of a kind.
func definition(res schema.GroupVersionResource) *metav1.PartialObjectMetadata {
	return &metav1.PartialObjectMetadata{
		TypeMeta:   metav1.TypeMeta{APIVersion: "apiextensions.k8s.io/v1", Kind: "CustomResourceDefinition"},
		ObjectMeta: metav1.ObjectMeta{Name: res.GroupResource().String()},
	}
}

// run runs src until the test is over.
func (s *site) run(src registry.Source) {
	ctx, cancel := context.WithCancel(context.Background())
	updates := make(chan registry.Update)
	var running sync.WaitGroup
	running.Go(func() {
		if err := src.Run(ctx, updates); !errors.Is(err, context.Canceled) {
			s.t.Errorf("Run: %v", err)
		}
	})
	running.Go(func() {
		for {
			select {
			case u := <-updates:
				s.locked(func() { s.updates = append(s.updates, u) })
			case <-ctx.Done():
				return
			}
		}
	})
	s.t.Cleanup(func() { cancel(); running.Wait() })
	s.settle()
}

func (s *site) locked(f func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	f()
}

// settle waits until everything is done that follows from the last change.
func (s *site) settle() {
	time.Sleep(3 * time.Second)
	synctest.Wait()
}

func (s *site) setFail(f func(verb, resource string) error) { s.locked(func() { s.fail = f }) }

// apply creates or replaces an object.
func (s *site) apply(text string, generation int64) {
	s.t.Helper()
	u := &unstructured.Unstructured{}
	if err := yaml.Unmarshal([]byte(text), &u.Object); err != nil {
		s.t.Fatal(err)
	}
	u.SetUID(types.UID(u.GetKind() + u.GetName()))
	u.SetGeneration(generation)
	u.SetResourceVersion(fmt.Sprint(generation))
	res := resource
	if u.GetKind() == clusterKind {
		res = clusterResource
	}
	err := s.policies.Tracker().Create(res, u, u.GetNamespace())
	if apierrors.IsAlreadyExists(err) {
		err = s.policies.Tracker().Update(res, u, u.GetNamespace())
	}
	if err != nil {
		s.t.Fatal(err)
	}
}

// told returns the names of the policies of each source as last sent, "!" before one that denies
// because it is invalid, and the error of the last Update.
func (s *site) told() string {
	var last map[string]string = map[string]string{}
	s.locked(func() {
		for _, u := range s.updates {
			var names []string
			for _, p := range u.Policies {
				n := p.Name
				if p.Invalid != "" {
					n = "!" + n
				}
				names = append(names, n)
			}
			text := strings.Join(names, ",")
			if u.Err != nil {
				before, _, _ := strings.Cut(last[u.Source], " err:")
				text = before + " err: " + u.Err.Error()
			}
			last[u.Source] = text
		}
	})
	var out []string
	for name, text := range last {
		out = append(out, name+"="+text)
	}
	slices.Sort(out)
	return strings.Join(out, " ")
}

// conditions returns the conditions of an object's ancestors.
func (s *site) conditions(res schema.GroupVersionResource, namespace, name string) string {
	s.t.Helper()
	u, err := s.policies.Resource(res).Namespace(namespace).Get(context.Background(), name, metav1.GetOptions{})
	if err != nil {
		s.t.Fatal(err)
	}
	o, err := objectOf(u)
	if err != nil {
		s.t.Fatal(err)
	}
	var out []string
	for _, a := range o.Status.Ancestors {
		text := fmt.Sprintf("%s/%s", *a.AncestorRef.Kind, a.AncestorRef.Name)
		for _, c := range a.Conditions {
			text += fmt.Sprintf(" %s=%s/%s@%d", c.Type, c.Status, c.Reason, c.ObservedGeneration)
		}
		out = append(out, text)
	}
	return strings.Join(out, "; ")
}

const (
	allowAPI  = "  action: ALLOW\n  targetRefs: [{group: '', kind: Service, name: db}]\n  rules: [{sources: [{type: ServiceAccount, serviceAccount: {name: api}}]}]\n"
	broken    = "  action: AUDIT\n  targetRefs: [{group: '', kind: Service, name: db}]\n"
	denyTrust = "  action: DENY\n  tier: Admin\n  rules: [{sources: [{type: TrustDomain, trustDomain: old.example}]}]\n"
)

func TestSource(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newSite(t)
		s.apply(ofNamespace(allowAPI), 1)
		s.apply(ofCluster(denyTrust), 1)
		s.run(s.source)
		if got, want := s.told(), "policies=no-legacy,shop/db"; got != want {
			t.Fatalf("told %q, want %q", got, want)
		}
		if got, want := s.conditions(resource, "shop", "db"), "Service/db Accepted=True/Accepted@1"; got != want {
			t.Errorf("status %q, want %q", got, want)
		}
		if got, want := s.conditions(clusterResource, "", "no-legacy"), "ClusterAuthorizationPolicy/no-legacy Accepted=True/Accepted@1"; got != want {
			t.Errorf("status %q, want %q", got, want)
		}
		sent, writes, gets := len(s.updates), s.writes, s.gets
		s.settle()
		if len(s.updates) != sent || s.writes != writes || s.gets != gets {
			t.Errorf("without a change: %d more updates, %d more writes and %d more reads", len(s.updates)-sent, s.writes-writes, s.gets-gets)
		}

		s.apply(ofNamespace(broken), 2)
		s.settle()
		if got, want := s.told(), "policies=no-legacy,!shop/db"; got != want {
			t.Errorf("told %q, want %q", got, want)
		}
		if got, want := s.conditions(resource, "shop", "db"), "Service/db Accepted=False/Invalid@2"; got != want {
			t.Errorf("status %q, want %q", got, want)
		}
		events, err := s.core.CoreV1().Events("shop").List(t.Context(), metav1.ListOptions{})
		if err != nil || len(events.Items) != 1 || !strings.Contains(events.Items[0].Message, `action "AUDIT" is not known`) {
			t.Errorf("events %+v, %v, want one that says what is wrong", events.Items, err)
		}
	})
}

// The table knows what a policy selects, and where nobody's identity is known.
func TestUses(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newSite(t)
		s.apply(ofNamespace(allowAPI), 1)
		s.run(s.source)
		for _, tt := range []struct {
			is   registry.PolicyUse
			want string
		}{
			{registry.PolicyUse{Services: 0}, "Service/db Accepted=False/TargetNotFound@1"},
			{registry.PolicyUse{Services: 2}, "Service/db Accepted=True/Accepted@1"},
			{registry.PolicyUse{Services: 2, Unidentified: 1}, "Service/db Accepted=True/Accepted@1 PartiallyEnforced=True/UnidentifiedCallers@1"},
		} {
			s.locked(func() { s.uses = map[string]registry.PolicyUse{"AuthorizationPolicy shop/db": tt.is} })
			s.settle()
			if got := s.conditions(resource, "shop", "db"); got != tt.want {
				t.Errorf("%+v: status %q, want %q", tt.is, got, tt.want)
			}
		}
		writes, gets := s.writes, s.gets
		s.settle()
		if s.writes != writes || s.gets != gets {
			t.Errorf("without a change: %d more writes and %d more reads", s.writes-writes, s.gets-gets)
		}
		// As for another replica, whose table does not have it yet.
		s.locked(func() { s.uses = map[string]registry.PolicyUse{} })
		s.settle()
		if got, want := s.conditions(resource, "shop", "db"), "Service/db Accepted=True/Accepted@1 PartiallyEnforced=True/UnidentifiedCallers@1"; got != want || s.writes != writes {
			t.Errorf("before the table has it: status %q after %d more writes, want %q", got, s.writes-writes, want)
		}
		s.apply(ofNamespace(broken), 2)
		s.settle()
		if got, want := s.conditions(resource, "shop", "db"), "Service/db Accepted=False/Invalid@2"; got != want {
			t.Errorf("status %q, want %q", got, want)
		}
		s.apply(ofNamespace(allowAPI), 3)
		s.settle()
		if got, want := s.conditions(resource, "shop", "db"), "Service/db Accepted=True/Accepted@3"; got != want {
			t.Errorf("status %q, want %q", got, want)
		}
	})
}

// Before policies have been read for the first time, everything is denied; afterwards the last ones
// count for as long as they can't be read.
func TestUnreadable(t *testing.T) {
	missing := apierrors.NewNotFound(schema.GroupResource{}, "")
	forbidden := apierrors.NewForbidden(resource.GroupResource(), "", errors.New("no role"))
	for name, failure := range map[string]error{"no CRD": missing, "no permission": forbidden} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := newSite(t)
				s.apply(ofNamespace(allowAPI), 1)
				deny := func(string, string) error { return failure }
				s.setFail(func(verb, resource string) error {
					if resource == clusterResource.Resource {
						return failure
					}
					return nil
				})
				s.run(Guard(s.source))
				for range 10 {
					s.settle()
				}
				if got := s.told(); !strings.Contains(got, "policies/unread=!policies/unread") || !strings.Contains(got, "policies= err: ") {
					t.Fatalf("told %q, want a policy that denies everything, and why", got)
				}
				s.setFail(nil)
				for range 200 { // pauses grow to minutes
					s.settle()
				}
				if got, want := s.told(), "policies/unread= policies=shop/db"; got != want {
					t.Fatalf("told %q, want %q", got, want)
				}
				s.setFail(deny)
				for range 10 {
					s.settle()
				}
				if got := s.told(); !strings.HasPrefix(got, "policies/unread= policies=shop/db") {
					t.Errorf("told %q, want the last policies", got)
				}
			})
		})
	}
}

// Whoever removes the definition does not say that everything is allowed.
func TestDefinitionRemoved(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newSite(t)
		s.apply(ofNamespace(allowAPI), 1)
		s.apply(strings.Replace(ofNamespace(allowAPI), "name: db}", "name: web}", 1), 1)
		s.run(s.source)
		remove := func(name string) {
			t.Helper()
			if err := s.policies.Tracker().Delete(resource, "shop", name); err != nil {
				t.Fatal(err)
			}
			s.settle()
		}
		remove("web")
		if got, want := s.told(), "policies=shop/db"; got != want {
			t.Fatalf("one is deleted: told %q, want %q", got, want)
		}
		s.apply(strings.Replace(ofNamespace(allowAPI), "name: db}", "name: web}", 1), 2)
		s.settle()
		going := definition(resource)
		going.DeletionTimestamp = &metav1.Time{Time: time.Now()}
		if err := s.metadata.Tracker().Update(watch.CustomResourceDefinitions, going, ""); err != nil {
			t.Fatal(err)
		}
		remove("web")
		if got, want := s.told(), "policies=shop/db,shop/web err: the CustomResourceDefinition authorizationpolicies.policy.culvert.dev is being removed"; !strings.HasPrefix(got, want) {
			t.Errorf("the definition is being removed: told %q, want %q", got, want)
		}
	})
}

// A sourceFunc is a registry.Source made of a function.
type sourceFunc func(ctx context.Context, updates chan<- registry.Update) error

func (f sourceFunc) Run(ctx context.Context, updates chan<- registry.Update) error {
	return f(ctx, updates)
}

// A source that panics ends alone, and what it had sent stays in force when it is run again.
func TestGuardOfAFailingSource(t *testing.T) {
	g := Guard(sourceFunc(func(_ context.Context, updates chan<- registry.Update) error {
		updates <- registry.Update{Source: Name}
		panic("planned")
	}))
	for run, want := range []string{Name + "/unread " + Name + " " + Name + "/unread", Name} {
		updates := make(chan registry.Update, 8)
		if err := g.Run(t.Context(), updates); err == nil || !strings.Contains(err.Error(), "planned") {
			t.Errorf("run %d: got error %v, want the panic", run, err)
		}
		close(updates)
		var got []string
		for u := range updates {
			got = append(got, u.Source)
		}
		if text := strings.Join(got, " "); text != want {
			t.Errorf("run %d: sent %q, want %q", run, text, want)
		}
	}
}

// What others wrote of a policy stays.
func TestForeignStatus(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newSite(t)
		s.apply(ofNamespace(allowAPI)+`status:
  ancestors:
    - ancestorRef: {group: "", kind: Service, name: db}
      controllerName: other.example/x
      conditions: [{type: Accepted, status: "True", reason: Accepted, message: "", lastTransitionTime: "2026-01-01T00:00:00Z", observedGeneration: 1}]
    - ancestorRef: {group: "", kind: Service, name: gone}
      controllerName: culvert.dev/policy
      conditions: [{type: Accepted, status: "True", reason: Accepted, message: "", lastTransitionTime: "2026-01-01T00:00:00Z", observedGeneration: 1}]
`, 1)
		s.run(s.source)
		if got, want := s.conditions(resource, "shop", "db"), "Service/db Accepted=True/Accepted@1; Service/db Accepted=True/Accepted@1"; got != want {
			t.Errorf("status %q, want %q", got, want)
		}
	})
}

// A replica that does not lead writes nothing.
func TestOnlyTheLeaderWrites(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newSite(t)
		leads := false
		s.source.cfg.Leads = func() (l bool) { s.locked(func() { l = leads }); return l }
		s.apply(ofNamespace(allowAPI), 1)
		s.run(s.source)
		if s.writes != 0 {
			t.Errorf("%d writes, want none", s.writes)
		}
		s.locked(func() { leads = true })
		s.settle()
		if s.writes != 1 {
			t.Errorf("%d writes of the leader, want 1", s.writes)
		}
	})
}
