package gatewayapi

import (
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	ktesting "k8s.io/client-go/testing"
	gwv1 "sigs.k8s.io/gateway-api/apis/v1"

	"culvert.dev/internal/kube/client"
	"culvert.dev/registry"
)

func TestControllerServesAndWrites(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t, edge(passthrough)+testRoute("TLSRoute", "r", "abc.example.com", "{name: web, port: 443}"))
		stop := b.start()
		defer stop()
		calm()
		u := b.last()
		if u == nil || u.Err != nil || u.Source != "gateway-api" || len(u.Listeners) != 1 || len(u.Listeners[0].Sections[0].Rules) != 1 {
			t.Fatalf("got update %+v\n%s", u, b.log)
		}
		g := b.gateway("edge")
		for _, kind := range []string{"Accepted", "Programmed"} {
			if !has(g.Status.Conditions, kind, "True", kind) {
				t.Errorf("got %+v, want %s", g.Status.Conditions, kind)
			}
		}
		if len(g.Status.Addresses) != 1 || g.Status.Listeners[0].AttachedRoutes != 1 {
			t.Errorf("got %+v", g.Status)
		}
		if p := b.route("r").Status.Parents; len(p) != 1 || !has(p[0].Conditions, "Accepted", "True", "Accepted") {
			t.Errorf("got %+v", p)
		}
		cls, err := b.gw.GatewayV1().GatewayClasses().Get(t.Context(), "culvert", metav1.GetOptions{})
		if err != nil || !has(cls.Status.Conditions, "Accepted", "True", "Accepted") || len(cls.Status.SupportedFeatures) == 0 {
			t.Errorf("got %+v, %v", cls.Status, err)
		}
		sa, err := b.core.CoreV1().ServiceAccounts("a").List(t.Context(), metav1.ListOptions{LabelSelector: "gateway.networking.k8s.io/gateway-name=edge"})
		if err != nil || len(sa.Items) != 1 {
			t.Errorf("got %v, %v, want one ServiceAccount", sa, err)
		}

		// At rest nothing is asked of the API server, and nothing sent.
		before, _ := b.requests()
		time.Sleep(time.Hour)
		if after, _ := b.requests(); after != before {
			t.Errorf("got %d requests in an idle hour, want none", after-before)
		}
		if u := b.last(); u != nil {
			t.Errorf("got an update without a change: %+v", u)
		}

		// A change of what nobody uses is nothing, either.
		if _, err := b.core.CoreV1().ConfigMaps("a").Create(t.Context(), &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "x", Namespace: "a"}}, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
		calm()
		if u := b.last(); u != nil {
			t.Errorf("got an update for an object without use: %+v", u)
		}

		// The route is deleted, and then the Gateway.
		if err := b.gw.GatewayV1().TLSRoutes("a").Delete(t.Context(), "r", metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
		calm()
		if u := b.last(); u == nil || len(u.Listeners[0].Sections[0].Rules) != 0 {
			t.Errorf("got %+v, want no rule", u)
		}
		if n := b.gateway("edge").Status.Listeners[0].AttachedRoutes; n != 0 {
			t.Errorf("got %d attached routes, want none", n)
		}
	})
}

func TestControllerKeepsForeignStatus(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t, edge(passthrough)+testRoute("TLSRoute", "r", "abc.example.com", "{name: web, port: 443}"))
		foreign := metav1.Condition{Type: "special.io/SomeField", Status: "True", Reason: "Because", LastTransitionTime: metav1.NewTime(time.Unix(1, 0)), ObservedGeneration: 3}
		g := b.gateway("edge")
		g.Status.Conditions = []metav1.Condition{foreign}
		g.Status.Listeners = []gwv1.ListenerStatus{{Name: "tls", Conditions: []metav1.Condition{foreign}}}
		if _, err := b.gw.GatewayV1().Gateways("a").UpdateStatus(t.Context(), g, metav1.UpdateOptions{}); err != nil {
			t.Fatal(err)
		}
		r := b.route("r")
		r.Status.Parents = []gwv1.RouteParentStatus{
			{ParentRef: gwv1.ParentReference{Name: "else"}, ControllerName: "other.example/x", Conditions: []metav1.Condition{foreign}},
			{ParentRef: gwv1.ParentReference{Name: "gone"}, ControllerName: DefaultController, Conditions: []metav1.Condition{foreign}},
			{ParentRef: gwv1.ParentReference{Name: "edge"}, ControllerName: DefaultController, Conditions: []metav1.Condition{foreign}},
		}
		if _, err := b.gw.GatewayV1().TLSRoutes("a").UpdateStatus(t.Context(), r, metav1.UpdateOptions{}); err != nil {
			t.Fatal(err)
		}
		defer b.start()()
		calm()
		g = b.gateway("edge")
		if !equality.Semantic.DeepEqual(g.Status.Conditions[0], foreign) || !equality.Semantic.DeepEqual(g.Status.Listeners[0].Conditions[0], foreign) {
			t.Errorf("got %+v, %+v, want the foreign condition first in both", g.Status.Conditions, g.Status.Listeners[0].Conditions)
		}
		ps := b.route("r").Status.Parents
		if len(ps) != 2 || ps[0].ControllerName != "other.example/x" || !equality.Semantic.DeepEqual(ps[0].Conditions, []metav1.Condition{foreign}) {
			t.Fatalf("got parents %+v, want the other controller's, and ours without the one that is gone", ps)
		}
		if !equality.Semantic.DeepEqual(ps[1].Conditions[0], foreign) || !has(ps[1].Conditions, "Accepted", "True", "Accepted") {
			t.Errorf("got %+v, want the foreign condition and ours", ps[1].Conditions)
		}
	})
}

func TestControllerRetriesConflicts(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t, edge(passthrough))
		var tries atomic.Int32
		b.gw.PrependReactor("update", "gateways", func(a ktesting.Action) (bool, runtime.Object, error) {
			if a.GetSubresource() != "status" {
				return false, nil, nil
			}
			if tries.Add(1) <= 2 {
				return true, nil, apierrors.NewConflict(schema.GroupResource{Resource: "gateways"}, "edge", errors.New("changed"))
			}
			return false, nil, nil
		})
		defer b.start()()
		calm()
		if n := tries.Load(); n != 3 || !has(b.gateway("edge").Status.Conditions, "Programmed", "True", "Programmed") {
			t.Errorf("got %d tries, %+v, want the third to work", n, b.gateway("edge").Status.Conditions)
		}
	})
}

func TestControllerSaysWhatIsForbidden(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t, edge(passthrough)+testRoute("TLSRoute", "r", "abc.example.com", "{name: web, port: 443}"))
		var forbidden atomic.Bool
		forbidden.Store(true)
		deny := func(a ktesting.Action) (bool, runtime.Object, error) {
			res := schema.GroupResource{Group: a.GetResource().Group, Resource: a.GetResource().Resource}
			return forbidden.Load(), nil, apierrors.NewForbidden(res, "", fmt.Errorf("cannot %s", a.GetVerb()))
		}
		b.gw.PrependReactor("list", "httproutes", deny)
		b.gw.PrependReactor("update", "tlsroutes", deny)
		b.core.PrependReactor("get", "serviceaccounts", deny)
		b.core.PrependReactor("create", "events", deny)
		missing := func(a ktesting.Action) (bool, runtime.Object, error) {
			return true, nil, apierrors.NewGenericServerResponse(404, "list", schema.GroupResource{Resource: "serviceimports"}, "", "", 0, true)
		}
		b.mcs.PrependReactor("list", "serviceimports", missing)
		defer b.start()()
		calm()
		time.Sleep(10 * time.Minute)
		if u := b.last(); u == nil || len(u.Listeners) != 1 {
			t.Fatalf("got %+v, want that the rest is served", u)
		}
		for _, want := range []string{
			"may not list httproutes.gateway.networking.k8s.io",
			"may not update tlsroutes/status.gateway.networking.k8s.io",
			"may not get serviceaccounts",
			"can't list serviceimports.multicluster.x-k8s.io",
		} {
			if n := strings.Count(b.log.String(), want); n != 1 {
				t.Errorf("got %q %d times, want once:\n%s", want, n, b.log)
			}
		}
		forbidden.Store(false)
		time.Sleep(2 * time.Minute)
		if p := b.route("r").Status.Parents; len(p) != 1 {
			t.Errorf("got %+v after the right was given, want a parent", p)
		}
	})
}

func TestControllerLeads(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t, edge(passthrough))
		var mu sync.Mutex
		leads := false
		b.c.cfg.Leads = func() bool {
			mu.Lock()
			defer mu.Unlock()
			return leads
		}
		defer b.start()()
		calm()
		if _, writes := b.requests(); writes != 0 {
			t.Errorf("got %d writes of one that does not lead, want none", writes)
		}
		if u := b.last(); u == nil || len(u.Listeners) != 1 {
			t.Errorf("got %+v, want that it serves", u)
		}
		mu.Lock()
		leads = true
		mu.Unlock()
		calm()
		if !has(b.gateway("edge").Status.Conditions, "Programmed", "True", "Programmed") {
			t.Errorf("got %+v of one that leads", b.gateway("edge").Status.Conditions)
		}
	})
}

func TestControllerWaitsForSockets(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t, edge(passthrough))
		p := &plane{news: make(chan struct{}, 1)}
		b.c.cfg.Plane = p
		defer b.start()()
		calm()
		if !has(b.gateway("edge").Status.Conditions, "Programmed", "False", "Pending") {
			t.Errorf("got %+v before the socket is open", b.gateway("edge").Status.Conditions)
		}
		p.set(map[string]error{"a/edge/tls/443": errors.New("address already in use")})
		calm()
		if !has(b.gateway("edge").Status.Listeners[0].Conditions, "Programmed", "False", "PortUnavailable") {
			t.Errorf("got %+v", b.gateway("edge").Status.Listeners[0].Conditions)
		}
		p.set(map[string]error{"a/edge/tls/443": nil})
		calm()
		if !has(b.gateway("edge").Status.Conditions, "Programmed", "True", "Programmed") {
			t.Errorf("got %+v once it is open", b.gateway("edge").Status.Conditions)
		}
	})
}

func TestControllerSaysThatItIsStale(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t, edge(passthrough))
		b.c.pulse = client.NewPulse()
		defer b.start()()
		calm()
		before := b.last()
		beat := pulseBeater(b.c.pulse)
		beat(errors.New("connection refused"))
		time.Sleep(time.Second)
		if u := b.last(); u != nil {
			t.Errorf("got %+v within a second", u)
		}
		calm()
		if u := b.last(); u == nil || u.Err == nil {
			t.Fatalf("got %+v, want an error", u)
		}
		beat(nil)
		calm()
		if u := b.last(); u == nil || u.Err != nil || &u.Listeners[0] != &before.Listeners[0] {
			t.Errorf("got %+v, want the very slice that was there before", u)
		}
	})
}

func TestControllerTellsOperators(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t, edge(passthrough)+testRoute("TLSRoute", "r", "abc.example.com", "{name: none, port: 443}"))
		stop := b.start()
		calm()
		events := func() []corev1.Event {
			l, err := b.core.CoreV1().Events("a").List(t.Context(), metav1.ListOptions{})
			if err != nil {
				t.Fatal(err)
			}
			return l.Items
		}
		es := events()
		if len(es) != 1 || es[0].Reason != "BackendNotFound" || es[0].InvolvedObject.Kind != "TLSRoute" || es[0].InvolvedObject.Name != "r" || es[0].Type != "Warning" {
			t.Fatalf("got %+v, want one of the route", es)
		}
		// Neither a second time nor by a second replica.
		stop()
		stop = b.start()
		calm()
		r := b.route("r")
		r.Status.Parents = nil
		if _, err := b.gw.GatewayV1().TLSRoutes("a").UpdateStatus(t.Context(), r, metav1.UpdateOptions{}); err != nil {
			t.Fatal(err)
		}
		calm()
		if len(b.route("r").Status.Parents) != 1 {
			t.Error("status that somebody took away is not written again")
		}
		if es := events(); len(es) != 1 {
			t.Errorf("got %d events, want one", len(es))
		}
		stop()
	})
}

func TestControllerKeepsAccountsInLine(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t, edge(passthrough, "infrastructure: {labels: {key: value}, annotations: {note: here}}"))
		defer b.start()()
		calm()
		account := func() *corev1.ServiceAccount {
			l, err := b.core.CoreV1().ServiceAccounts("a").List(t.Context(), metav1.ListOptions{})
			if err != nil || len(l.Items) != 1 {
				t.Fatalf("got %+v, %v, want one", l, err)
			}
			return &l.Items[0]
		}
		a := account()
		if a.Labels["key"] != "value" || a.Annotations["note"] != "here" {
			t.Fatalf("got %v, %v", a.Labels, a.Annotations)
		}
		a.Labels["theirs"] = "stays"
		if _, err := b.core.CoreV1().ServiceAccounts("a").Update(t.Context(), a, metav1.UpdateOptions{}); err != nil {
			t.Fatal(err)
		}
		g := b.gateway("edge")
		g.Spec.Infrastructure.Labels = map[gwv1.LabelKey]gwv1.LabelValue{"other": "one"}
		g.Spec.Infrastructure.Annotations = nil
		if _, err := b.gw.GatewayV1().Gateways("a").Update(t.Context(), g, metav1.UpdateOptions{}); err != nil {
			t.Fatal(err)
		}
		calm()
		a = account()
		if _, stale := a.Labels["key"]; stale || a.Labels["other"] != "one" || a.Labels["theirs"] != "stays" || a.Annotations["note"] != "" {
			t.Errorf("got %v, %v", a.Labels, a.Annotations)
		}
	})
}

func TestControllerLeavesAccountsOfOthersAlone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t, edge(passthrough))
		theirs := &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: "a", Name: "edge-culvert"}}
		if _, err := b.core.CoreV1().ServiceAccounts("a").Create(t.Context(), theirs, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
		defer b.start()()
		calm()
		a, err := b.core.CoreV1().ServiceAccounts("a").Get(t.Context(), "edge-culvert", metav1.GetOptions{})
		if err != nil || len(a.Labels) != 0 {
			t.Errorf("got %+v, %v, want it untouched", a, err)
		}
		if !strings.Contains(b.log.String(), "leaving it unchanged") {
			t.Errorf("nobody hears of it:\n%s", b.log)
		}
	})
}

// Of two controllers of one class each keeps to what the other has written, and
// neither writes for ever.
func TestTwoControllersSettle(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t, edge(passthrough)+testRoute("TLSRoute", "r", "abc.example.com", "{name: web, port: 443}"))
		second := *b
		second.c, second.updates = &Controller{cfg: b.c.cfg, clients: b.c.clients, memo: newMemo()}, make(chan registry.Update, 100)
		defer b.start()()
		defer second.start()()
		calm()
		_, before := b.requests()
		time.Sleep(time.Minute)
		if _, after := b.requests(); after != before || before > 20 {
			t.Errorf("got %d writes and then %d, want few and then none", before, after-before)
		}
		if !has(b.gateway("edge").Status.Conditions, "Programmed", "True", "Programmed") {
			t.Errorf("got %+v", b.gateway("edge").Status.Conditions)
		}
	})
}
