package gatewayapi

import (
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	ktesting "k8s.io/client-go/testing"
	gwv1 "sigs.k8s.io/gateway-api/apis/v1"
)

func TestOwnWrites(t *testing.T) {
	route := func(change func(*gwv1.TLSRoute)) *gwv1.TLSRoute {
		r := &gwv1.TLSRoute{ObjectMeta: metav1.ObjectMeta{UID: "r", Generation: 1, ResourceVersion: "2"}}
		r.Status.Parents = []gwv1.RouteParentStatus{{ControllerName: DefaultController, Conditions: []metav1.Condition{{
			Type: "Accepted", Status: "True", LastTransitionTime: metav1.NewTime(time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)),
		}}}}
		change(r)
		return r
	}
	before := route(func(r *gwv1.TLSRoute) { r.ResourceVersion, r.Status.Parents = "1", nil })
	for _, tt := range []struct {
		name   string
		change func(*gwv1.TLSRoute)
		want   bool
	}{
		{"the status that was written", func(*gwv1.TLSRoute) {}, true},
		{"the same by another", func(r *gwv1.TLSRoute) { r.ResourceVersion = "3" }, true},
		{"another generation", func(r *gwv1.TLSRoute) { r.Generation = 2 }, false},
		{"an annotation", func(r *gwv1.TLSRoute) { r.Annotations = map[string]string{"x": "y"} }, false},
		{"a label", func(r *gwv1.TLSRoute) { r.Labels = map[string]string{"x": "y"} }, false},
		{"a status that was removed", func(r *gwv1.TLSRoute) { r.Status.Parents = nil }, false},
		{"a condition that was changed", func(r *gwv1.TLSRoute) { r.Status.Parents[0].Conditions[0].Status = "False" }, false},
		{"another of the same name", func(r *gwv1.TLSRoute) { r.UID = "s" }, false},
	} {
		var w ownWrites
		if w.isOwn(before, route(tt.change)) {
			t.Errorf("%s: taken for our own before anything was written", tt.name)
		}
		// What is written has a time of the clock; the API server has whole seconds.
		w.record(route(func(r *gwv1.TLSRoute) {
			c := &r.Status.Parents[0].Conditions[0]
			c.LastTransitionTime = metav1.NewTime(c.LastTransitionTime.Add(123 * time.Millisecond).Local())
		}))
		if got := w.isOwn(before, route(tt.change)); got != tt.want {
			t.Errorf("%s: got %t, want %t", tt.name, got, tt.want)
		}
		w.forget("r")
		if w.isOwn(before, route(tt.change)) {
			t.Errorf("%s: taken for our own after the object was gone", tt.name)
		}
	}
}

// A translation that begins while a status is written, and wants the one of before, is made again.
func TestStatusOvertakenByATranslation(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t, edge(passthrough)+testRoute("TLSRoute", "r", "abc.example.com", "{name: web, port: 443}"))
		p := &plane{news: make(chan struct{}, 1)}
		b.c.cfg.Plane = p
		var hold atomic.Bool
		release := make(chan struct{})
		b.gw.PrependReactor("update", "tlsroutes", func(ktesting.Action) (bool, runtime.Object, error) {
			if hold.Swap(false) {
				<-release
			}
			return false, nil, nil
		})
		defer b.start()()
		calm()
		resolved := func(status, reason string) bool {
			ps := b.route("r").Status.Parents
			return len(ps) == 1 && has(ps[0].Conditions, "ResolvedRefs", status, reason)
		}
		if !resolved("True", "ResolvedRefs") {
			t.Fatalf("got %+v at first", b.route("r").Status)
		}
		hold.Store(true)
		web, err := b.core.CoreV1().Services("a").Get(t.Context(), "web", metav1.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		if err := b.core.CoreV1().Services("a").Delete(t.Context(), "web", metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
		calm() // that the Service is gone is being written
		if _, err := b.core.CoreV1().Services("a").Create(t.Context(), web, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
		calm() // the status is wanted as it was
		translations := p.asked.Load()
		close(release)
		calm()
		if !resolved("True", "ResolvedRefs") {
			t.Errorf("got %+v, want the status of the Service that is back", b.route("r").Status)
		}
		if n := p.asked.Load() - translations; n != 1 {
			t.Errorf("got %d translations after the write, want one", n)
		}
	})
}

// A write of status causes no translation, and status that another program removes or changes causes
// one, and is written again.
func TestOwnStatusCausesNoTranslation(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t, everyKind())
		p := &plane{news: make(chan struct{}, 1)}
		var leads atomic.Bool
		b.c.cfg.Plane, b.c.cfg.Leads = p, leads.Load
		defer b.start()()
		calm()
		translations := p.asked.Load()
		if _, writes := b.requests(); translations == 0 || writes != 0 {
			t.Fatalf("got %d translations and %d writes of one that does not lead, want some and none", translations, writes)
		}
		leads.Store(true)
		calm()
		if _, writes := b.requests(); writes < 10 || len(b.route("tls").Status.Parents) != 1 {
			t.Fatalf("got %d writes, want one for each object", writes)
		}
		if n := p.asked.Load() - translations; n != 0 {
			t.Errorf("got %d translations because of our own status, want none", n)
		}
		for _, tt := range []struct {
			name   string
			change func(*gwv1.TLSRoute)
			writes int
		}{
			{"removed", func(r *gwv1.TLSRoute) { r.Status.Parents = nil }, 1},
			{"removed again", func(r *gwv1.TLSRoute) { r.Status.Parents = nil }, 1},
			{"changed", func(r *gwv1.TLSRoute) { r.Status.Parents[0].Conditions[0].Status = "Unknown" }, 1},
			{"of another controller", func(r *gwv1.TLSRoute) {
				r.Status.Parents = append(r.Status.Parents, gwv1.RouteParentStatus{ParentRef: gwv1.ParentReference{Name: "x"}, ControllerName: "other.example/x"})
			}, 0},
		} {
			translations = p.asked.Load()
			r := b.route("tls")
			tt.change(r)
			_, before := b.requests()
			if _, err := b.gw.GatewayV1().TLSRoutes("a").UpdateStatus(t.Context(), r, metav1.UpdateOptions{}); err != nil {
				t.Fatal(err)
			}
			calm()
			if n := p.asked.Load() - translations; n != 1 {
				t.Errorf("%s: got %d translations, want one", tt.name, n)
			}
			if _, after := b.requests(); after-before-1 != tt.writes { // one is of the test
				t.Errorf("%s: got %d writes, want %d", tt.name, after-before-1, tt.writes)
			}
			if ps := b.route("tls").Status.Parents; len(ps) == 0 || !has(ps[0].Conditions, "Accepted", "True", "Accepted") {
				t.Errorf("%s: got %+v, want our own status", tt.name, ps)
			}
		}
	})
}
