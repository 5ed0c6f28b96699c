package gatewayapi

import (
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	gwv1 "sigs.k8s.io/gateway-api/apis/v1"

	"culvert.dev/registry"
	"culvert.dev/tunnel"
)

// backendsOf are the services of the backends of a snapshot, by their name and port.
func backendsOf(s *registry.Snapshot) map[string]*registry.Service {
	all := map[string]*registry.Service{}
	for _, l := range s.Listeners {
		for _, section := range l.Sections {
			for _, r := range section.Rules {
				for _, b := range r.Backends {
					if b.Service != nil {
						all[fmt.Sprintf("%s:%d", b.Service.Origin, b.Service.Ports[0])] = b.Service
					}
				}
			}
		}
	}
	return all
}

// annotate sets annotations as a cache of the fixture has them.
func annotate(to *metav1.ObjectMeta, notes ...string) {
	for i := 0; i < len(notes); i += 2 {
		metav1.SetMetaDataAnnotation(to, "culvert.dev/"+notes[i], notes[i+1])
	}
}

func TestBackendsHaveAnnotations(t *testing.T) {
	w := inputsOf(t, base, edge(tcp+udp), testRoute("TCPRoute", "r", "", "{name: web, port: 443}, {name: other, port: 443}, {group: multicluster.x-k8s.io, kind: ServiceImport, name: web, port: 80}"), testRoute("UDPRoute", "u", "", "{name: web, port: 53}"), `
kind: ServiceImport
metadata: {namespace: a, name: web}
spec: {type: ClusterSetIP, ports: [{name: p, port: 80, protocol: TCP}]}
`)
	w.memo = newMemo()
	f := w.Objects.(*fixture)
	before := backendsOf(&Translate(w).Snapshot)
	if again := backendsOf(&Translate(w).Snapshot); len(before) != 4 || !maps.Equal(before, again) {
		t.Fatalf("got %v, then %v, want the same four services", before, again)
	}

	annotate(&f.services["a/web"].ObjectMeta, "load-balancing", "sourceHash; stickyFor=30m", "limits-connections", "500", "limits-new-per-second", "50", "limits-connections-per-endpoint", "100", "outlier-ejection", "consecutiveFailures=3")
	annotate(&f.namespaces["a"].ObjectMeta, "load-balancing", "leastConnections", "outlier-ejection", "true")
	annotate(&f.namespaces["b"].ObjectMeta, "limits-connections", "1")
	res := Translate(w)
	after := backendsOf(&res.Snapshot)
	own := registry.Service{
		LoadBalancing:   registry.LoadBalancing{Policy: registry.SourceHash, StickyFor: 30 * time.Minute},
		Limits:          &tunnel.ServiceLimits{Connections: 500, NewPerSecond: 50, ConnectionsPerEndpoint: 100},
		OutlierEjection: &registry.OutlierEjection{ConsecutiveFailures: 3},
	}
	for name, want := range map[string]registry.Service{
		"Service a/web:443":      own,
		"Service a/web:53":       own,
		"Service a/other:443":    {LoadBalancing: registry.LoadBalancing{Policy: registry.LeastConnections}, OutlierEjection: &registry.OutlierEjection{}},
		"ServiceImport a/web:80": {},
	} {
		got := after[name]
		if got == nil {
			t.Errorf("%s: got no service", name)
			continue
		}
		if only := (registry.Service{LoadBalancing: got.LoadBalancing, Limits: got.Limits, OutlierEjection: got.OutlierEjection}); !reflect.DeepEqual(only, want) {
			t.Errorf("%s:\ngot  %+v\nwant %+v", name, only, want)
		}
		if !slices.Equal(got.Endpoints, before[name].Endpoints) {
			t.Errorf("%s: got endpoints %v, want %v as before", name, got.Endpoints, before[name].Endpoints)
		}
	}
	for _, ref := range []ObjectRef{{"Namespace", "", "a"}, {"Service", "a", "web"}} {
		if !res.References[ref] {
			t.Errorf("a change of %v is not heard of", ref)
		}
	}

	// A Namespace that may not be read has no annotations, and its Services are served.
	delete(f.namespaces, "a")
	w.Unread = func(resource, _ string) bool { return resource == "namespaces" }
	if got := backendsOf(&Translate(w).Snapshot)["Service a/other:443"]; got == nil || got.OutlierEjection != nil {
		t.Errorf("without Namespaces: got %+v, want a service without their annotations", got)
	}
}

// A malformed annotation is reported at the route, once for each Service, and the others hold.
func TestMalformedAnnotationsAreReported(t *testing.T) {
	w := inputsOf(t, base, edge(tcp), testRoute("TCPRoute", "r", "", "{name: web, port: 443}, {name: web, port: 80}"))
	f := w.Objects.(*fixture)
	annotate(&f.services["a/web"].ObjectMeta, "load-balancing", "random", "limits-connections", "5")
	annotate(&f.namespaces["a"].ObjectMeta, "outlier-ejection", "no")
	res := Translate(w)
	k := RouteKey{"TCPRoute", key(w.TCPRoutes[0])}
	notes := res.Notes[k]
	if len(notes) != 1 || notes[0].reason != reasonAnnotationIgnored {
		t.Fatalf("got notes %v, want one of an ignored annotation", notes)
	}
	message := ""
	for _, c := range res.Routes[k].Parents[0].Conditions {
		if c.Type == string(gwv1.RouteConditionResolvedRefs) && c.Status == metav1.ConditionTrue {
			message = c.Message
		}
	}
	for _, part := range []string{
		`annotation culvert.dev/load-balancing of Service a/web is ignored: "random": "random" is no policy`,
		`annotation culvert.dev/outlier-ejection of Namespace a is ignored: "no": `,
	} {
		for what, text := range map[string]string{"note": notes[0].message, "condition": message} {
			if strings.Count(text, part) != 1 {
				t.Errorf("the %s is %q, want %q once", what, text, part)
			}
		}
	}
	for origin, s := range backendsOf(&res.Snapshot) {
		if s.Limits == nil || s.Limits.Connections != 5 || s.OutlierEjection != nil {
			t.Errorf("%s: got limits %v and ejection %v, want the well-formed annotations alone", origin, s.Limits, s.OutlierEjection)
		}
	}
}

// The annotations come by the caches, and a change of one is a change of the table.
func TestControllerFollowsAnnotations(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t, edge(tcp), testRoute("TCPRoute", "r", "", "{name: web, port: 443}"))
		stop := b.start()
		defer stop()
		policy := func() string {
			t.Helper()
			calm()
			u := b.last()
			if u == nil {
				t.Fatal("got no update")
			}
			for _, s := range backendsOf(&u.Snapshot) {
				return s.LoadBalancing.Policy
			}
			t.Fatal("the update has no backend")
			return ""
		}
		if got := policy(); got != "" {
			t.Errorf("got policy %q without an annotation, want none", got)
		}
		change := func(value string) {
			t.Helper()
			s, err := b.core.CoreV1().Services("a").Get(t.Context(), "web", metav1.GetOptions{})
			if err == nil {
				s = s.DeepCopy()
				annotate(&s.ObjectMeta, "load-balancing", value)
				_, err = b.core.CoreV1().Services("a").Update(t.Context(), s, metav1.UpdateOptions{})
			}
			if err != nil {
				t.Fatal(err)
			}
		}
		change("leastConnections")
		if got := policy(); got != registry.LeastConnections {
			t.Errorf("got policy %q, want %q", got, registry.LeastConnections)
		}
		change("random")
		if got := policy(); got != "" {
			t.Errorf("got policy %q of a malformed annotation, want none", got)
		}
		events, err := b.core.CoreV1().Events(corev1.NamespaceAll).List(t.Context(), metav1.ListOptions{})
		if err != nil {
			t.Fatal(err)
		}
		found := false
		for _, e := range events.Items {
			found = found || e.Reason == reasonAnnotationIgnored && strings.Contains(e.Message, "culvert.dev/load-balancing")
		}
		if log := b.log.String(); !found && !strings.Contains(log, reasonAnnotationIgnored) {
			t.Errorf("neither an Event nor the log has %s:\n%s", reasonAnnotationIgnored, log)
		}
	})
}

// Backends' endpoints have the zones that EndpointSlices say, and each is there once.
func TestBackendsHaveZones(t *testing.T) {
	slice := func(name, endpoints string) string {
		return "\n---\nkind: EndpointSlice\nmetadata: {namespace: a, name: " + name + ", labels: {kubernetes.io/service-name: s}}\naddressType: IPv4\nports: [{port: 80}]\nendpoints: [" + endpoints + "]\n"
	}
	w := inputsOf(t, base, edge(tcp), testRoute("TCPRoute", "r", "", "{name: s, port: 80}")+"\n---\nkind: Service\nmetadata: {namespace: a, name: s}\nspec: {ports: [{port: 80}]}\n"+
		slice("1", "{addresses: [10.0.0.1], zone: b}, {addresses: [10.0.0.2], zone: b}, {addresses: [10.0.0.3]}, {addresses: [10.0.0.4]}")+
		slice("2", "{addresses: [10.0.0.1], zone: a}, {addresses: [10.0.0.3], zone: a}"))
	w.Zone = "a" // hints are heeded for it, and there are none
	f := w.Objects.(*fixture)
	for range 2 {
		res := Translate(w)
		s := backendsOf(&res.Snapshot)["Service a/s:80"]
		if s == nil {
			t.Fatal("got no service")
		}
		var got []string
		for _, e := range s.Endpoints {
			got = append(got, e.String()+" "+e.Zone)
		}
		if all, want := strings.Join(got, ", "), "10.0.0.1:80 a, 10.0.0.2:80 b, 10.0.0.3:80 a, 10.0.0.4:80 "; all != want {
			t.Errorf("got %q, want %q", all, want)
		}
		// A connection goes to the zone of the gateway.
		reg := &registry.Registry{Mesh: registry.Mesh{TopologyZone: "b"}}
		table, err := reg.Merge(res.Snapshot)
		if err != nil {
			t.Fatal(err)
		}
		reg.Swap(table)
		for range 10 {
			to, err := reg.Resolve(t.Context(), &tunnel.Request{Listener: "gateway/a/edge/tcp"})
			if err != nil {
				t.Fatal(err)
			}
			if first := to.Endpoints[0].Addr.String(); first != "10.0.0.2:80" {
				t.Errorf("got %s first, want 10.0.0.2:80, which is in the gateway's zone", first)
			}
		}
		slices.Reverse(f.slices)
	}
}
