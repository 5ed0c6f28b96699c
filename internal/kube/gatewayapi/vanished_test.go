package gatewayapi

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	ktesting "k8s.io/client-go/testing"

	"culvert.dev/registry"
)

// whole has an object of each kind that a table can be made of, and none that it
// could do without.
const whole = `
kind: ListenerSet
metadata: {namespace: a, name: more}
spec:
  parentRef: {name: edge}
  listeners: [{name: set, port: 9001, protocol: TCP}]
---
kind: ReferenceGrant
metadata: {namespace: b, name: g}
spec:
  from: [{group: gateway.networking.k8s.io, kind: TCPRoute, namespace: a}]
  to: [{group: '', kind: Service}]
---
kind: BackendTLSPolicy
metadata: {namespace: a, name: p}
spec:
  targetRefs: [{group: '', kind: Service, name: web}]
  validation: {hostname: abc.example.com, caCertificateRefs: [{group: '', kind: ConfigMap, name: ca}]}
---
kind: ServiceImport
metadata: {namespace: a, name: far}
spec: {type: ClusterSetIP, ips: [10.42.0.1], ports: [{name: p, port: 80, protocol: TCP}]}
`

func wholeBench(t *testing.T) *bench {
	return newBench(t, edge(terminate+udp+"  - {name: tcp, port: 9000, protocol: TCP, allowedRoutes: {namespaces: {from: Selector, selector: {matchLabels: {team: red}}}}}\n",
		"allowedListeners: {namespaces: {from: Same}}"),
		secret, caMap, whole,
		testRoute("TLSRoute", "r", "abc.example.com", "{name: web, port: 443}"),
		testRoute("TCPRoute", "t", "", "{name: web, namespace: b, port: 443}", "{name: edge, sectionName: tcp}"),
		testRoute("UDPRoute", "u", "", "{name: web, port: 53}"),
		testRoute("TCPRoute", "i", "", "{group: multicluster.x-k8s.io, kind: ServiceImport, name: far, port: 80}", "{kind: ListenerSet, name: more}"))
}

// A server is one of the fake ones.
type server interface {
	PrependReactor(verb, resource string, f ktesting.ReactionFunc)
	Tracker() ktesting.ObjectTracker
}

// of is the one that has a kind.
func (b *bench) of(k kind) server {
	switch k.resource.Group {
	case "gateway.networking.k8s.io":
		return b.gw
	case "multicluster.x-k8s.io":
		return b.mcs
	}
	return b.core
}

func (k kind) gvr() schema.GroupVersionResource {
	version := "v1"
	if k.resource.Group == "multicluster.x-k8s.io" {
		version = "v1beta1"
	}
	return k.resource.WithVersion(version)
}

// all are the updates since they were last asked for.
func (b *bench) all() (us []registry.Update) {
	for {
		select {
		case u := <-b.updates:
			us = append(us, u)
		default:
			return us
		}
	}
}

// snapshots counts those that are no errors.
func snapshots(us []registry.Update) (n int) {
	for _, u := range us {
		if u.Err == nil {
			n++
		}
	}
	return n
}

// deny forbids to list a kind, in a namespace or for "" anywhere.
func (b *bench) deny(k kind, namespace string) (allow func()) {
	var denied atomic.Bool
	denied.Store(true)
	for _, verb := range []string{"list", "watch"} {
		b.of(k).PrependReactor(verb, k.resource.Resource, func(a ktesting.Action) (bool, runtime.Object, error) {
			if !denied.Load() || namespace != "" && a.GetNamespace() != namespace {
				return false, nil, nil
			}
			return true, nil, apierrors.NewForbidden(k.resource, "", fmt.Errorf("cannot %s", verb))
		})
	}
	return func() { denied.Store(false) }
}

// A start with a role that lacks something has nothing less to serve, but nothing to
// say: what others said before stays in force.
func TestControllerWaitsForItsRights(t *testing.T) {
	for _, k := range wholeBench(t).c.clients.kinds() {
		resource := k.resource.Resource
		without := []string{"secrets", "configmaps", "namespaces", "serviceimports", "httproutes", "grpcroutes"}
		if slices.Contains(needed, resource) == slices.Contains(without, resource) {
			t.Errorf("%s are either needed or not", resource)
		}
		t.Run(resource, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := wholeBench(t)
				allow := b.deny(k, "")
				defer b.start()()
				time.Sleep(time.Minute)
				synctest.Wait()
				us := b.all()
				_, writes := b.requests()
				want := "may not list " + k.resource.String() + ": "
				if slices.Contains(without, resource) {
					if snapshots(us) != len(us) || len(us) == 0 || len(us[len(us)-1].Listeners) == 0 {
						t.Errorf("got %+v, want that the rest is served", us)
					}
					return
				}
				if len(us) != 1 || us[0].Err == nil || !strings.Contains(us[0].Err.Error(), want) || writes != 0 {
					t.Fatalf("got %+v and %d writes, want one error that says %q, and no status", us, writes, want)
				}
				if r := b.c.Report(); r.Known || r.Lost == nil || !strings.Contains(r.Error, want) {
					t.Errorf("got report %+v, want why nothing is known", r)
				}
				if n := strings.Count(b.log.String(), "may not list "); n > 2 {
					t.Errorf("it is said %d times:\n%s", n, b.log)
				}
				allow()
				time.Sleep(2 * time.Minute)
				synctest.Wait()
				us = b.all()
				if len(us) == 0 || us[len(us)-1].Err != nil || len(us[len(us)-1].Listeners) != 4 {
					t.Fatalf("got %+v with all rights, want four listeners", us)
				}
				if !has(b.gateway("edge").Status.Conditions, "Programmed", "True", "Programmed") {
					t.Errorf("got %+v with all rights", b.gateway("edge").Status.Conditions)
				}
				if r := b.c.Report(); !r.Known || r.Lost != nil {
					t.Errorf("got report %+v with all rights", r)
				}
			})
		})
	}
}

// That somebody took away rights in his namespace is no matter of the others, but
// what would have to be spoken TLS with there is not spoken with at all.
func TestControllerWithoutRightsInANamespace(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := wholeBench(t)
		b.c.cfg.Namespaces = []string{"a", "b"}
		for _, k := range b.c.clients.kinds() {
			if k.resource.Resource == "backendtlspolicies" {
				b.deny(k, "a")
			}
		}
		defer b.start()()
		calm()
		u := b.last()
		if u == nil || u.Err != nil {
			t.Fatalf("got %+v, want that the rest is served\n%s", u, b.log)
		}
		broken := map[string]string{}
		for _, l := range u.Listeners {
			for _, s := range l.Sections {
				for _, r := range s.Rules {
					broken[r.Name] = r.Backends[0].Broken
				}
			}
		}
		if !strings.Contains(broken["tlsroute/a/r"], "BackendTLSPolicies of namespace a may not be read") || broken["tcproute/a/t"] != "" || broken["udproute/a/u"] != "" {
			t.Errorf("got %q, want that only TLS to namespace a is refused", broken)
		}
	})
	runRows(t, []row{
		{"TCP", edge(tcp) + testRoute("TCPRoute", "r", "", "{name: web, port: 443}"), unread, "rule gateway/a/edge/tcp tcproute/a/r [] 1:broken"},
		{"where TLS ends", edge(terminate) + secret + testRoute("TLSRoute", "r", "abc.example.com", "{name: web, port: 443}"), unread, "rule gateway/a/edge/tls tlsroute/a/r [abc.example.com] 1:broken"},
		{"what passes", edge(passthrough) + testRoute("TLSRoute", "r", "abc.example.com", "{name: web, port: 443}"), unread, "rule gateway/a/edge/tls tlsroute/a/r [abc.example.com] 1:a/web(10.244.0.1:8443)"},
		{"UDP", edge(udp) + testRoute("UDPRoute", "r", "", "{name: web, port: 53}"), unread, "rule gateway/a/edge/udp udproute/a/r [] 1:a/web(10.244.0.1:5353)"},
	})
}

func unread(w *Inputs) { w.PoliciesUnread = []string{"a"} }

// An API server that lists nothing for a moment, as one does that has lost its
// store, empties no table: whatever the kind is.
func TestControllerDoesNotBelieveInASuddenEnd(t *testing.T) {
	kinds := map[string]kind{}
	for _, k := range wholeBench(t).c.clients.kinds() {
		if r := k.resource.Resource; r != "httproutes" && r != "grpcroutes" { // nothing is served by them
			kinds[k.resource.Resource] = k
		}
	}
	for _, resource := range slices.Sorted(maps.Keys(kinds)) {
		t.Run(resource, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b, k := wholeBench(t), kinds[resource]
				defer b.start()()
				calm()
				if us := b.all(); snapshots(us) == 0 || us[len(us)-1].Err != nil {
					t.Fatalf("got %+v\n%s", us, b.log)
				}
				before := b.c.Report()
				lists := b.vanish(k)
				requests, _ := b.requests()
				time.Sleep(time.Minute)
				synctest.Wait()
				if us := b.all(); snapshots(us) != 0 || len(us) == 0 || !strings.Contains(us[0].Err.Error(), "all "+k.resource.String()+" were reported gone") {
					t.Fatalf("got %+v while the API server has some, want an error alone", us)
				}
				if got := b.c.Report(); len(got.Gateways) != 1 || len(got.Refusals) != len(before.Refusals) || got.Lost == nil {
					t.Errorf("got %+v, want what was before, and that it is old", got)
				}
				if now, _ := b.requests(); now-requests < 2 || now-requests > 10 {
					t.Errorf("got %d requests a minute, want some and few", now-requests)
				}
				lists.answer.Store(&answer{err: errors.New("etcdserver: no leader")})
				time.Sleep(time.Minute)
				synctest.Wait()
				if us := b.all(); snapshots(us) != 0 || len(us) == 0 || !strings.Contains(us[0].Err.Error(), "no leader") {
					t.Fatalf("got %+v while the API server can't tell, want an error alone", us)
				}
				lists.answer.Store(nil)
				time.Sleep(time.Minute)
				synctest.Wait()
				if us := b.all(); snapshots(us) == 0 || us[len(us)-1].Err != nil {
					t.Errorf("got %+v once there are none, want another table", us)
				}
				if got := b.c.Report(); got.Lost != nil {
					t.Errorf("got %+v in the end, want that it is known again", got)
				}
			})
		})
	}
}

// What the API server has again is served again without a word more, and what is of a CRD
// that has gone is gone.
func TestControllerAfterASuddenEnd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := wholeBench(t)
		defer b.start()()
		calm()
		us := b.all()
		before := us[len(us)-1]
		var k kind
		for _, k = range b.c.clients.kinds() {
			if k.resource.Resource == "backendtlspolicies" {
				break
			}
		}
		lists := b.vanish(k)
		calm()
		b.all()
		for _, o := range lists.objects {
			m, err := meta.Accessor(o)
			if err != nil {
				t.Fatal(err)
			}
			if err := b.gw.Tracker().Create(k.gvr(), o, m.GetNamespace()); err != nil {
				t.Fatal(err)
			}
		}
		calm()
		if us := b.all(); len(us) != 1 || us[0].Err != nil || &us[0].Listeners[0] != &before.Listeners[0] {
			t.Errorf("got %+v, want the very table of before", us)
		}

		lists = b.vanish(k)
		lists.answer.Store(&answer{err: apierrors.NewGenericServerResponse(404, "list", k.resource, "", "", 0, true)})
		time.Sleep(time.Minute)
		synctest.Wait()
		if us := b.all(); len(us) == 0 || us[len(us)-1].Err != nil {
			t.Errorf("got %+v without the CRD, want another table", us)
		}
	})
}

// A vanished kind is one whose objects watches have seen go, though lists have them.
type vanished struct {
	objects []runtime.Object
	answer  atomic.Pointer[answer] // to lists; nil is the truth
}

type answer struct {
	list runtime.Object
	err  error
}

func (b *bench) vanish(k kind) *vanished {
	b.t.Helper()
	s := b.of(k)
	var list runtime.Object
	var err error
	if k.in != nil {
		list, err = k.in("").ListWithContext(b.t.Context(), metav1.ListOptions{})
	} else {
		list, err = b.core.DiscoveryV1().EndpointSlices("").List(b.t.Context(), metav1.ListOptions{})
	}
	if err != nil {
		b.t.Fatal(err)
	}
	v := &vanished{}
	v.answer.Store(&answer{list: list.DeepCopyObject()})
	s.PrependReactor("list", k.resource.Resource, func(ktesting.Action) (bool, runtime.Object, error) {
		if a := v.answer.Load(); a != nil {
			return true, a.list, a.err
		}
		return false, nil, nil
	})
	if v.objects, err = meta.ExtractList(list); err != nil || len(v.objects) == 0 {
		b.t.Fatalf("got %d %s, %v", len(v.objects), k.resource, err)
	}
	for _, o := range v.objects {
		m, err := meta.Accessor(o)
		if err != nil {
			b.t.Fatal(err)
		}
		if err := s.Tracker().Delete(k.gvr(), m.GetNamespace(), m.GetName()); err != nil {
			b.t.Fatal(err)
		}
	}
	return v
}
