package gatewayapi

import (
	"errors"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/watch"
	ktesting "k8s.io/client-go/testing"
	gwv1 "sigs.k8s.io/gateway-api/apis/v1"
)

// everything has a thing to write of each kind.
const everything = `
kind: BackendTLSPolicy
metadata: {namespace: a, name: p}
spec:
  targetRefs: [{group: "", kind: Service, name: web}]
  validation: {hostname: web.example, wellKnownCACertificates: System}
---
kind: ListenerSet
metadata: {namespace: a, name: more}
spec:
  parentRef: {name: edge}
  listeners:
  - {name: more, port: 9001, protocol: TCP}
`

func everyKind() string {
	return edge(passthrough+tcp+udp+"  - {name: web, port: 80, protocol: HTTP}\n", "allowedListeners: {namespaces: {from: Same}}") +
		testRoute("TLSRoute", "tls", "abc.example.com", "{name: web, port: 443}") +
		testRoute("TLSRoute", "tls2", "def.example.com", "{name: web, port: 443}") +
		testRoute("TCPRoute", "tcp", "", "{name: web, port: 443}") +
		testRoute("UDPRoute", "udp", "", "{name: web, port: 53}") +
		testRoute("HTTPRoute", "http", "web.example.com", "{name: web, port: 80}") + testRoute("GRPCRoute", "grpc", "", "{name: web, port: 80}") + "\n---\n" + everything
}

// forbid denies a verb on a resource, "gateways" or "gateways/status", with the words
// of the API server.
func (b *bench) forbid(verb, resource string) {
	plain, sub, _ := strings.Cut(resource, "/")
	for _, f := range []*ktesting.Fake{&b.core.Fake, &b.gw.Fake, &b.mcs.Fake} {
		f.PrependReactor(verb, plain, func(a ktesting.Action) (bool, runtime.Object, error) {
			if a.GetSubresource() != sub {
				return false, nil, nil
			}
			name := ""
			if n, ok := a.(interface{ GetName() string }); ok {
				name = n.GetName()
			}
			return true, nil, apierrors.NewForbidden(schema.GroupResource{Group: a.GetResource().Group, Resource: plain}, name,
				errors.New(`User "culvert" cannot `+verb+` resource "`+resource+`" in the namespace "`+a.GetNamespace()+`"`))
		})
	}
}

// Each right that is not there is said once, by its verb and resource, and for no
// other.
func TestEachDeniedWriteIsSaidByName(t *testing.T) {
	gw := "." + gwv1.GroupName
	for _, tt := range []struct {
		verb, resource string
		want           string
		before         func(*bench) // nil for nothing
	}{
		{"update", "gatewayclasses/status", "gatewayclasses/status" + gw, nil},
		{"update", "gateways/status", "gateways/status" + gw, nil},
		{"update", "listenersets/status", "listenersets/status" + gw, nil},
		{"update", "tlsroutes/status", "tlsroutes/status" + gw, nil},
		{"update", "tcproutes/status", "tcproutes/status" + gw, nil},
		{"update", "udproutes/status", "udproutes/status" + gw, nil},
		{"update", "httproutes/status", "httproutes/status" + gw, nil},
		{"update", "grpcroutes/status", "grpcroutes/status" + gw, nil},
		{"update", "backendtlspolicies/status", "backendtlspolicies/status" + gw, nil},
		{"get", "serviceaccounts", "serviceaccounts", nil},
		{"create", "serviceaccounts", "serviceaccounts", nil},
		{"update", "serviceaccounts", "serviceaccounts", func(b *bench) {
			theirs := &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{
				Namespace: "a", Name: "edge-culvert", Labels: map[string]string{managedBy: fieldManager},
				OwnerReferences: []metav1.OwnerReference{{UID: b.gateway("edge").UID, Name: "edge"}},
			}}
			if _, err := b.core.CoreV1().ServiceAccounts("a").Create(b.t.Context(), theirs, metav1.CreateOptions{}); err != nil {
				b.t.Fatal(err)
			}
		}},
		{"get", "gateways", "gateways" + gw, func(b *bench) { // which is asked for when somebody else was faster
			b.gw.PrependReactor("update", "gateways", func(a ktesting.Action) (bool, runtime.Object, error) {
				return true, nil, apierrors.NewConflict(schema.GroupResource{Resource: "gateways"}, "edge", errors.New("changed"))
			})
		}},
		{"create", "events", "events", func(b *bench) {
			r := b.route("tls")
			r.Spec.Rules[0].BackendRefs[0].Name = "none"
			if _, err := b.gw.GatewayV1().TLSRoutes("a").Update(b.t.Context(), r, metav1.UpdateOptions{}); err != nil {
				b.t.Fatal(err)
			}
		}},
	} {
		t.Run(tt.verb+" "+tt.resource, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := newBench(t, everyKind())
				if tt.before != nil {
					tt.before(b)
				}
				b.forbid(tt.verb, tt.resource)
				defer b.start()()
				calm()
				time.Sleep(10 * time.Minute)
				synctest.Wait()
				want := "may not " + tt.verb + " " + tt.want + ": "
				if n := strings.Count(b.log.String(), want); n != 1 {
					t.Errorf("got %q %d times, want once", want, n)
				}
				if n := strings.Count(b.log.String(), "may not "); n != 1 {
					t.Errorf("got %d lines of what may not be done, want one:\n%s", n, b.log)
				}
				if u := b.last(); u == nil || u.Err != nil || len(u.Listeners) != 5 {
					t.Errorf("got %+v, want that all is served", u)
				}
			})
		})
	}
}

// Where only some namespaces are looked at the rights are given one by one, and are
// missing one by one.
func TestDeniedInOneNamespaceOfTwo(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		in := func(ns string) string {
			return strings.ReplaceAll("\n---\n"+edge(passthrough)+testRoute("TLSRoute", "r", "abc.example.com", "{name: web, port: 443}"), "namespace: a", "namespace: "+ns)
		}
		b := newBench(t, in("a")+in("b"))
		b.c.cfg.Namespaces = []string{"a", "b"}
		b.forbid("update", "gateways/status")
		defer b.start()()
		calm()
		time.Sleep(10 * time.Minute)
		synctest.Wait()
		if n := strings.Count(b.log.String(), "may not update gateways/status."); n != 2 {
			t.Errorf("got %d lines, want one for each namespace:\n%s", n, b.log)
		}
	})
}

// Where there are no rights in namespace default there is no Event of a class, and no
// complaint.
func TestNoEventOfAClassWithoutNamespaceDefault(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t, "kind: GatewayClass\nmetadata: {name: more}\nspec: {controllerName: culvert.dev/gateway, parametersRef: {group: x.example, kind: X, name: x}}\n")
		b.c.cfg.Namespaces = []string{"a"}
		b.forbid("create", "events")
		defer b.start()()
		calm()
		if strings.Contains(b.log.String(), "may not create events") || !strings.Contains(b.log.String(), `object="GatewayClass more"`) {
			t.Errorf("got\n%s", b.log)
		}
	})
}

// What is wrong with a class is an Event in namespace default, and all Events are
// by the controller that is configured.
func TestEventsAreByTheController(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t, "kind: GatewayClass\nmetadata: {name: mine}\nspec: {controllerName: x.example/edge}\n---\n"+
			"kind: GatewayClass\nmetadata: {name: more}\nspec: {controllerName: x.example/edge, parametersRef: {group: x.example, kind: X, name: x}}\n---\n"+
			strings.Replace(edge(passthrough), "gatewayClassName: culvert", "gatewayClassName: mine", 1)+testRoute("TLSRoute", "r", "abc.example.com", "{name: none, port: 443}"))
		b.c.cfg.Controller = "x.example/edge"
		defer b.start()()
		calm()
		got := map[string]corev1.Event{}
		for _, ns := range []string{"default", "a"} {
			l, err := b.core.CoreV1().Events(ns).List(t.Context(), metav1.ListOptions{})
			if err != nil {
				t.Fatal(err)
			}
			for _, e := range l.Items {
				if e.ReportingController != "x.example/edge" {
					t.Errorf("got an Event by %q", e.ReportingController)
				}
				got[ns+" "+e.InvolvedObject.Kind+" "+e.InvolvedObject.Name+" "+e.Reason] = e
			}
		}
		if e, ok := got["default GatewayClass more InvalidParameters"]; !ok || e.InvolvedObject.Namespace != "" || e.InvolvedObject.UID == "" {
			t.Errorf("got %v, want one of the class", got)
		}
		if _, ok := got["a TLSRoute r BackendNotFound"]; !ok || len(got) != 2 {
			t.Errorf("got %v, want one of the class and one of the route", got)
		}
	})
}

// So is each kind that may not be listed or watched.
func TestEachDeniedReadIsSaidByName(t *testing.T) {
	for _, k := range (clients{core: newBench(t).core, gw: newBench(t).gw, mcs: newBench(t).mcs}).kinds() {
		for _, verb := range []string{"list", "watch"} {
			t.Run(verb+" "+k.resource.String(), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					b := newBench(t, everyKind())
					if verb == "watch" {
						for _, f := range []*ktesting.Fake{&b.core.Fake, &b.gw.Fake, &b.mcs.Fake} {
							f.PrependWatchReactor(k.resource.Resource, func(a ktesting.Action) (bool, watch.Interface, error) {
								return true, nil, apierrors.NewForbidden(k.resource, "", errors.New(`User "culvert" cannot watch resource`))
							})
						}
					} else {
						b.forbid(verb, k.resource.Resource)
					}
					defer b.start()()
					calm()
					time.Sleep(10 * time.Minute)
					synctest.Wait()
					want := `reason="may not ` + verb + " " + k.resource.String() + ": "
					if n := strings.Count(b.log.String(), want); n != 1 {
						t.Errorf("got %q %d times, want once", want, n)
					}
					if n := strings.Count(b.log.String(), `msg="cannot read a Kubernetes resource"`); n != 1 {
						t.Errorf("got %d lines of what may not be done, want one:\n%s", n, b.log)
					}
				})
			})
		}
	}
}

// What may not be read is not said to be not there.
func TestWhatMayNotBeRead(t *testing.T) {
	selector := ", allowedRoutes: {namespaces: {from: Selector, selector: {matchLabels: {team: red}}}}}\n"
	terminates := edge(terminate)
	for _, tt := range []struct {
		resource, docs string
		object, reason string
		want           string
		started        bool // not even with the rights that there are
	}{
		{"secrets", terminates + secret, "Gateway a/edge", "InvalidCertificateRef", `Secrets may not be read in namespace "a", and nothing is known of Secret "cert"`, true},
		{"configmaps", edge(terminate, "tls: {frontend: {default: {validation: {caCertificateRefs: [{group: '', kind: ConfigMap, name: ca}]}}}}") + secret + caMap, "Gateway a/edge", "InvalidCACertificateRef", `ConfigMaps may not be read in namespace "a", and nothing is known of ConfigMap "ca"`, true},
		{"namespaces", edge("  - {name: tls, port: 443, protocol: TLS, tls: {mode: Passthrough}"+selector) + testRoute("TLSRoute", "r", "abc.example.com", "{name: web, port: 443}"), "TLSRoute a/r", "NotAllowedByListeners", "Namespaces may not be read, and they are selected by their labels", true},
		{"namespaces", edge(passthrough, "allowedListeners: {namespaces: {from: Selector, selector: {matchLabels: {team: red}}}}") + "\n---\n" + strings.Split(everything, "---\n")[1], "ListenerSet a/more", "NotAllowed", "Namespaces may not be read, and they are selected by their labels", true},
		{"serviceimports", edge(passthrough) + testRoute("TLSRoute", "r", "abc.example.com", "{group: multicluster.x-k8s.io, kind: ServiceImport, name: web, port: 443}"), "TLSRoute a/r", "BackendNotFound", `ServiceImports may not be read in namespace "a", and nothing is known of ServiceImport a/web`, true},
		{"services", edge(passthrough) + testRoute("TLSRoute", "r", "abc.example.com", "{name: web, port: 443}"), "TLSRoute a/r", "BackendNotFound", `Services may not be read in namespace "a", and nothing is known of Service a/web`, false},
		{"endpointslices", edge(passthrough) + testRoute("TLSRoute", "r", "abc.example.com", "{name: web, port: 443}"), "TLSRoute a/r", "BackendNotFound", `EndpointSlices may not be read in namespace "a", and nothing is known of the endpoints of Service a/web`, false},
		{"referencegrants", edge(passthrough) + testRoute("TLSRoute", "r", "abc.example.com", "{name: web, namespace: b, port: 443}"), "TLSRoute a/r", "RefNotPermitted", `ReferenceGrants may not be read in namespace "b", and none lets a TLSRoute of "a" refer to Service "web"`, false},
	} {
		t.Run(tt.resource+" "+tt.object, func(t *testing.T) {
			if tt.started { // through the store, which must find out
				synctest.Test(t, func(t *testing.T) {
					b := newBench(t, tt.docs)
					b.forbid("list", tt.resource)
					defer b.start()()
					calm()
					time.Sleep(time.Minute)
					synctest.Wait()
					saysOf(t, b.c.current.Load().result, tt.object, tt.reason, tt.want)
				})
				return
			}
			// Without these there is a table only where some namespaces may be read.
			w := inputsOf(t, base, tt.docs)
			w.PublicAddresses = addrs("192.0.2.1")
			w.Unread = func(resource, namespace string) bool {
				return resource == tt.resource && strings.Contains(tt.want, `namespace "`+namespace+`"`)
			}
			if tt.resource == "services" {
				clear(w.Objects.(*fixture).services)
			}
			saysOf(t, Translate(w), tt.object, tt.reason, tt.want)
		})
	}
}

func saysOf(t *testing.T, res *Result, object, reason, want string) {
	t.Helper()
	cs := allConditions(res, object)
	if !slices.ContainsFunc(cs, func(c metav1.Condition) bool {
		return c.Status == metav1.ConditionFalse && c.Reason == reason && strings.Contains(c.Message, want)
	}) {
		t.Errorf("got %+v, want %s with %q", cs, reason, want)
	}
}
