package discovery

import (
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"culvert.dev/registry"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	apiwatch "k8s.io/apimachinery/pkg/watch"
)

const moment = time.Second // more than it takes where nothing is wrong

func TestNothingIsSaidBeforeEverythingIsListed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, svc("shop", "web", "expose", "true"), eps("shop", "web", "web-1", "10.1.0.1"))
		r.setFail(func(verb, resource, _ string) error {
			if resource == "endpointslices" {
				return errRefused
			}
			return nil
		})
		r.start(&Source{Client: r.api, Cluster: "west", Log: r.logger()})
		if u := r.one(moment); u.Err == nil || u.Source != "cluster/west" || u.Services != nil {
			t.Fatalf("update %+v, want an error alone", u)
		}
		r.none(time.Minute)
		r.setFail(nil)
		u := r.one(20 * time.Second)
		if want := "web.shop.west to everyone at [10.1.0.1]"; u.Err != nil || listing(u.Snapshot) != want {
			t.Fatalf("update %v, %s; want %s", u.Err, listing(u.Snapshot), want)
		}
		if len(u.Networks) != 1 || u.Networks[0].Name != "west" {
			t.Errorf("networks %v, want that of the cluster", u.Networks)
		}
	})
}

func TestAChangeTouchesOneService(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, svc("shop", "a", "expose", "true"), eps("shop", "a", "a-1", "10.1.0.1"), svc("shop", "b", "expose", "true"), eps("shop", "b", "b-1", "10.1.0.2"), svc("shop", "closed"))
		r.start(&Source{Client: r.api, Cluster: "west"})
		first := r.one(moment)
		if want := "a.shop.west to everyone at [10.1.0.1]; b.shop.west to everyone at [10.1.0.2]; closed.shop.west to nobody at []"; listing(first.Snapshot) != want {
			t.Fatalf("got  %s\nwant %s", listing(first.Snapshot), want)
		}
		r.put(eps("shop", "b", "b-1", "10.1.0.2", "10.1.0.3"))
		second := r.one(moment)
		if got := written(second.Services[1].Endpoints); got != "10.1.0.2, 10.1.0.3" {
			t.Errorf("endpoints %s", got)
		}
		for i := range first.Services {
			if same := first.Services[i] == second.Services[i]; same != (i != 1) {
				t.Errorf("service %s has the same pointer: %v", first.Services[i].Name, same)
			}
		}
		if written(first.Services[1].Endpoints) != "10.1.0.2" {
			t.Error("what was sent before has changed")
		}

		touched := svc("shop", "a", "expose", "true") // what changes often, and is not used
		touched.ResourceVersion, touched.Labels = "9", map[string]string{"x": "y"}
		r.put(touched)
		r.put(eps("shop", "closed", "closed-1", "10.1.0.9"))
		r.none(moment)

		r.remove(svc("shop", "a"))
		if got := listing(r.one(moment).Snapshot); strings.Contains(got, "a.shop") {
			t.Errorf("after it is gone: %s", got)
		}
	})
}

func TestChangesAreGathered(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, svc("shop", "web", "expose", "true"))
		r.start(&Source{Client: r.api, Cluster: "west"})
		r.one(moment)
		var all []registry.Update
		for i := range 1000 {
			r.put(eps("shop", "web", "web-1", fmt.Sprintf("10.1.%d.%d", i/250, 1+i%250)))
			all = append(all, r.after(time.Millisecond)...)
		}
		all = append(all, r.after(moment)...)
		if n := len(all); n < 8 || n > 11 {
			t.Fatalf("%d updates in a second, want about 10", n)
		}
		if got := written(all[len(all)-1].Services[0].Endpoints); got != "10.1.3.250" {
			t.Errorf("the last one says %s", got)
		}
	})
}

func TestTheLossOfTheAPIEmptiesNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, svc("shop", "web", "expose", "true"), eps("shop", "web", "web-1", "10.1.0.1"))
		r.start(&Source{Client: r.api, Cluster: "west", Log: r.logger()})
		first := r.one(moment)

		r.setFail(func(_, _, _ string) error { return errRefused })
		u := r.one(10 * time.Second)
		if u.Err == nil || !strings.Contains(u.Err.Error(), "connection refused") {
			t.Fatalf("update %+v, want one that says why", u)
		}
		r.none(time.Hour)
		r.setFail(nil)
		u = r.one(20 * time.Second)
		if u.Err != nil || len(u.Services) != len(first.Services) || &u.Services[0] != &first.Services[0] {
			t.Errorf("update %+v, want the very slices that there were", u)
		}

		r.setFail(func(_, _, _ string) error { return errors.New("i/o timeout") }) // after which client-go lists again
		r.one(10 * time.Second)
		r.put(eps("shop", "web", "web-1", "10.1.0.2"))
		r.setFail(nil)
		list := r.after(30 * time.Second)
		if u = list[len(list)-1]; u.Err != nil || written(u.Services[0].Endpoints) != "10.1.0.2" {
			t.Errorf("update %v %s, want what has changed meanwhile", u.Err, listing(u.Snapshot))
		}
		if n := r.logged("API server is unreachable"); n != 2 {
			t.Errorf("the log says %d times that it is out of touch, want 2", n)
		}
	})
}

func TestAWatchThatHasExpiredIsNoLoss(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, svc("shop", "web", "expose", "true"), eps("shop", "web", "web-1", "10.1.0.1"))
		r.start(&Source{Client: r.api, Cluster: "west"})
		r.one(moment)
		r.mu.Lock()
		lists, slices := r.lists, r.byResource["endpointslices"].(*apiwatch.RaceFreeFakeWatcher)
		r.mu.Unlock()
		gone := apierrors.NewResourceExpired("too old resource version").Status()
		slices.Error(&gone) // which is how the API server says 410
		r.put(eps("shop", "web", "web-1", "10.1.0.2"))
		u := r.one(20 * time.Second)
		if u.Err != nil || written(u.Services[0].Endpoints) != "10.1.0.2" {
			t.Errorf("update %v %s", u.Err, listing(u.Snapshot))
		}
		r.mu.Lock()
		defer r.mu.Unlock()
		if r.lists <= lists {
			t.Error("nothing was listed again")
		}
	})
}

func TestDenied(t *testing.T) {
	deny := func(what string) func(verb, resource, namespace string) error {
		return func(verb, resource, namespace string) error {
			if resource == what || resource+"/"+namespace == what {
				return denied(verb, resource)
			}
			return nil
		}
	}
	objects := func(r *rig) {
		r.put(&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "shop", Annotations: map[string]string{prefix + noteNetworks: "a"}}})
		r.put(svc("shop", "web", "expose", "true"))
		r.put(eps("shop", "web", "web-1", "10.1.0.1"))
		r.put(svc("stock", "db", "expose", "true", "networks", "b"))
		r.put(eps("stock", "db", "db-1", "10.1.0.2"))
		gate := door(corev1.ServiceTypeNodePort)
		r.put(gate)
		r.put(worker("node-1", "10.0.0.1", true))
	}
	const all = "door.culvert-system.west to nobody at []; web.shop.west to a at [10.1.0.1]; db.stock.west to b at [10.1.0.2]"
	for _, tt := range []struct {
		name       string
		namespaces []string
		deny       string
		want       string // "" for an error
		gateways   string
		log        []string
		granted    string // when it is allowed
	}{
		{"nodes", nil, "nodes", all, "", []string{"may not list nodes", "verb=list", "resource=nodes", "namespace=(all)", `without="gateways at the ports of nodes"`}, all},
		{"namespaces", nil, "namespaces", "door.culvert-system.west to nobody at []; web.shop.west to nobody at []; db.stock.west to b at [10.1.0.2]", "10.0.0.1:30443", []string{"may not list namespaces", "what annotations of namespaces say"}, all},
		{"services", nil, "services", "", "", []string{"may not list services", "resource=services"}, all},
		{"slices", nil, "endpointslices", "", "", []string{"may not list endpointslices.discovery.k8s.io"}, all},
		{"one namespace of two", []string{"shop", "stock"}, "services/shop", "db.stock.west to b at [10.1.0.2]", "", []string{"may not list services", "namespace=shop"}, "web.shop.west to a at [10.1.0.1]; db.stock.west to b at [10.1.0.2]"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := newRig(t)
				objects(r)
				r.setFail(deny(tt.deny))
				r.start(&Source{Client: r.api, Cluster: "west", Namespaces: tt.namespaces, Log: r.logger()})
				r.none(moment) // once is not believed
				u := r.one(10 * time.Second)
				if (u.Err == nil) != (tt.want != "") || listing(u.Snapshot) != tt.want {
					t.Errorf("update %v\n%s\nwant\n%s", u.Err, listing(u.Snapshot), tt.want)
				}
				if u.Err == nil && ways(u.Networks[0].Gateways) != tt.gateways {
					t.Errorf("gateways %s, want %s", ways(u.Networks[0].Gateways), tt.gateways)
				}
				r.none(time.Hour)
				if n := r.logged(append(tt.log, "cannot read a Kubernetes resource")...); n != 1 {
					t.Errorf("the log has %d lines with %q, want 1:\n%s", n, tt.log, r.log.String())
				}
				r.setFail(nil)
				list := r.after(time.Minute)
				if len(list) == 0 {
					t.Fatal("nothing comes of the permission")
				}
				if u = list[len(list)-1]; u.Err != nil || listing(u.Snapshot) != tt.granted {
					t.Errorf("with the permission: %v\n%s\nwant\n%s", u.Err, listing(u.Snapshot), tt.granted)
				}
			})
		})
	}
}

// An API server that has just started may deny everything for a moment.
func TestDeniedForAMoment(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, svc("shop", "web", "expose", "true"), eps("shop", "web", "web-1", "10.1.0.1"))
		r.setFail(func(verb, resource, _ string) error { return denied(verb, resource) })
		r.start(&Source{Client: r.api, Cluster: "west", Log: r.logger()})
		r.none(moment)
		r.setFail(nil)
		if got, want := listing(r.one(10*time.Second).Snapshot), "web.shop.west to everyone at [10.1.0.1]"; got != want {
			t.Errorf("got %s, want %s", got, want)
		}
		if r.log.Len() > 0 {
			t.Errorf("the log says\n%s", r.log.String())
		}
	})
}

// A permission that is taken away while we run is a loss, and narrows nothing
// that is known.
func TestDeniedLater(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, svc("shop", "web", "expose", "true"), eps("shop", "web", "web-1", "10.1.0.1"))
		r.put(&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "shop", Annotations: map[string]string{prefix + noteNetworks: "a"}}})
		r.start(&Source{Client: r.api, Cluster: "west", Log: r.logger()})
		r.one(moment)
		r.setFail(func(verb, resource, _ string) error {
			if resource == "namespaces" {
				return denied(verb, resource)
			}
			return nil
		})
		r.none(time.Minute)
		r.put(eps("shop", "web", "web-1", "10.1.0.2"))
		if got, want := listing(r.one(moment).Snapshot), "web.shop.west to a at [10.1.0.2]"; got != want {
			t.Errorf("got %s, want %s", got, want)
		}
		r.setFail(func(verb, resource, _ string) error { return denied(verb, resource) })
		if u := r.one(time.Minute); u.Err == nil {
			t.Errorf("update %s, want an error", listing(u.Snapshot))
		}
	})
}

func TestASuddenNothingIsDoubted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		web := svc("shop", "web", "expose", "true")
		r := newRig(t, web, eps("shop", "web", "web-1", "10.1.0.1"))
		src := &Source{Client: r.api, Cluster: "west", Log: r.logger()}
		r.start(src)
		r.one(moment)

		// The watch says that it is gone, and the list that it is not.
		w := r.watchOf("services")
		w.Delete(web)
		u := r.one(moment)
		if u.Err == nil || !strings.Contains(u.Err.Error(), "but the API server lists some") {
			t.Fatalf("update %+v, want that it is doubted", u)
		}
		r.none(time.Minute)

		r.remove(web) // now it is
		u = r.one(time.Minute)
		if u.Err != nil || len(u.Services) != 0 {
			t.Errorf("update %v %s, want nothing", u.Err, listing(u.Snapshot))
		}
		if n := r.logged("all objects of a Kubernetes resource vanished"); n == 0 || n > 100 {
			t.Errorf("the log says it %d times", n)
		}
	})
}

func TestExportsAtAnyTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, svc("shop", "web", "expose", "true"), eps("shop", "web", "web-1", "10.1.0.1"), svc("stock", "db"), eps("stock", "db", "db-1", "10.1.0.2"))
		src := &Source{Client: r.api, Cluster: "west", ClusterSet: []string{"east"}, Log: r.logger()}
		src.SetExports(map[types.NamespacedName]bool{{Namespace: "stock", Name: "db"}: true})
		r.start(src)
		want := func(want string) registry.Update {
			t.Helper()
			u := r.one(moment)
			if got := listing(u.Snapshot); got != want {
				t.Errorf("got  %s\nwant %s", got, want)
			}
			return u
		}
		if u := want("web.shop.west to everyone at [10.1.0.1]; db.stock.west to east at [10.1.0.2]"); !u.Services[1].Exported || u.Services[0].Exported {
			t.Error("not the one that is exported is exported")
		}
		src.SetExports(nil)
		want("web.shop.west to everyone at [10.1.0.1]; db.stock.west to nobody at []")
	})
}

func TestSetAddressesAtAnyTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, svc("shop", "web", "import", "shop/web"))
		src := &Source{Client: r.api, Cluster: "west", Network: "pods", Log: r.logger()}
		r.start(src)
		if u := r.one(moment); len(u.SetAddresses) != 0 {
			t.Errorf("at first %v", u.SetAddresses)
		}
		src.SetAddresses(map[types.NamespacedName][]netip.Addr{{Namespace: "shop", Name: "web"}: {netip.MustParseAddr("10.96.0.9")}, {Namespace: "shop", Name: "db"}: nil})
		if got, want := fmt.Sprint(r.one(moment).SetAddresses), "[{web.shop.svc.clusterset.local pods [10.96.0.9]}]"; got != want {
			t.Errorf("got %s, want %s", got, want)
		}
		if n := r.logged("Kubernetes object refused"); n != 0 { // the annotation is our own
			t.Errorf("%d objects are refused", n)
		}
	})
}

func TestAwaitExports(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, svc("shop", "web"), eps("shop", "web", "web-1", "10.1.0.1"))
		src := &Source{Client: r.api, Cluster: "west", ClusterSet: []string{"east"}, AwaitExports: true}
		r.start(src)
		r.none(time.Minute)
		src.SetExports(map[types.NamespacedName]bool{{Namespace: "shop", Name: "web"}: true})
		if got, want := listing(r.one(moment).Snapshot), "web.shop.west to east at [10.1.0.1]"; got != want {
			t.Errorf("got %s, want %s", got, want)
		}
	})
}

func TestRunAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, svc("shop", "web", "expose", "true"), svc("stock", "db"))
		src := &Source{Client: r.api, Cluster: "west", ClusterSet: []string{"east"}, Rules: Rules{Deny: []string{"shop"}}}
		src.SetExports(map[types.NamespacedName]bool{{Namespace: "stock", Name: "db"}: true})
		r.start(src)
		first := listing(r.one(moment).Snapshot)
		r.cancel()
		r.none(moment)
		r.start(src)
		if again := listing(r.one(moment).Snapshot); again != first || again != "web.shop.west to nobody at []; db.stock.west to east at []" {
			t.Errorf("at first %s, then %s", first, again)
		}
	})
}

func TestWhatIsRefusedIsSaidOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		bad := svc("shop", "web", "expose", "maybe")
		r := newRig(t, bad, svc("shop", "good", "expose", "true"), eps("shop", "good", "good-1", "10.1.0.1"))
		r.put(&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "shop", UID: "ns-uid", Annotations: map[string]string{prefix + noteVIP: "2"}}})
		var leads atomic.Bool
		leads.Store(true)
		r.start(&Source{Client: r.api, Cluster: "west", Log: r.logger(), Events: leads.Load})
		if got, want := listing(r.one(moment).Snapshot), "good.shop.west to everyone at [10.1.0.1]; web.shop.west to nobody at []"; got != want {
			t.Errorf("got %s, want %s", got, want)
		}
		for i := range 5 {
			r.put(eps("shop", "web", "web-1", fmt.Sprintf("10.1.0.%d", i)))
			r.none(moment)
		}
		line := []string{`object="Service shop/web"`, "annotation=culvert.dev/expose", "value=maybe"}
		if n := r.logged(line...); n != 1 {
			t.Errorf("the log has it %d times, want once:\n%s", n, r.log.String())
		}
		if n := r.logged(`object="Namespace shop"`, "annotation=culvert.dev/vip"); n != 1 {
			t.Errorf("the log has the namespace's %d times, want once:\n%s", n, r.log.String())
		}
		events := r.events()
		if len(events) != 2 {
			t.Fatalf("%d events, want 2: %v", len(events), events)
		}
		for _, e := range events {
			switch {
			case e.InvolvedObject.Kind == "Service" && e.Namespace == "shop" && e.InvolvedObject.Name == "web" && e.InvolvedObject.UID == bad.UID &&
				e.Type == "Warning" && e.Message == `annotation culvert.dev/expose: "maybe": write "true" or "false"; the service is not exposed`:
			case e.InvolvedObject.Kind == "Namespace" && e.Namespace == "default" && e.InvolvedObject.UID == "ns-uid":
			default:
				t.Errorf("event %+v", e)
			}
		}

		r.put(svc("shop", "web")) // mended, and broken again, where nobody leads
		r.none(moment)
		leads.Store(false)
		r.put(bad)
		r.put(svc("shop", "other", "vip", "maybe"))
		r.one(time.Minute)
		if n := r.logged(line...); n != 2 {
			t.Errorf("the log has it %d times, want twice", n)
		}
		if n := len(r.events()); n != 2 {
			t.Errorf("%d events of who does not lead, want 2", n)
		}
		r.put(svc("shop", "other")) // what has been mended when somebody does needs no Event
		r.none(moment)
		leads.Store(true)
		r.none(time.Minute)
		if n := len(r.events()); n != 2 { // the one that is there says it still
			t.Errorf("%d events of who leads now, want 2", n)
		}
		r.put(svc("shop", "other", "vip", "perhaps"))
		r.none(time.Minute)
		if n := len(r.events()); n != 3 {
			t.Errorf("%d events after a new mistake, want 3", n)
		}
	})
}

func TestEventsAreFew(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		for i := range 500 {
			r.put(svc("shop", fmt.Sprintf("s%d", i), "expose", "maybe"))
		}
		r.start(&Source{Client: r.api, Cluster: "west", Log: r.logger(), Events: func() bool { return true }})
		r.one(moment)
		r.none(5 * time.Minute)
		if n := len(r.events()); n == 0 || n > maxEvents+1 {
			t.Errorf("%d events at once, limit %d", n, maxEvents)
		}
		if n := r.logged("value=maybe"); n != 500 {
			t.Errorf("the log has %d of 500", n)
		}
	})
}

func TestSourceIsChecked(t *testing.T) {
	r := newRig(t)
	for _, tt := range []struct {
		src  *Source
		want string
	}{
		{&Source{Cluster: "west"}, "no client"},
		{&Source{Client: r.api}, `cluster "" is not one label`},
		{&Source{Client: r.api, Cluster: "a.b"}, `cluster "a.b" is not one label`},
		{&Source{Client: r.api, Cluster: "west", Prefer: "ipv5"}, `prefer "ipv5"`},
		{&Source{Client: r.api, Cluster: "west", Rules: Rules{Deny: []string{"["}}}, "is not a pattern"},
	} {
		if err := tt.src.Run(t.Context(), nil); err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("got %v, want an error with %q", err, tt.want)
		}
	}
}
