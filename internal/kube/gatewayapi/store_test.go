package gatewayapi

import (
	"log/slog"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/client-go/tools/cache"
	gwv1 "sigs.k8s.io/gateway-api/apis/v1"
	gwfake "sigs.k8s.io/gateway-api/pkg/client/clientset/versioned/fake"
	mcsfake "sigs.k8s.io/mcs-api/pkg/client/clientset/versioned/fake"

	"culvert.dev/internal/kube/endpoints"
)

// Of ten thousand Services those that no route leads to can change without
// anything being done.
func TestStoreHearsOfWhatIsUsed(t *testing.T) {
	heard := 0
	s := newStore(clients{core: fake.NewClientset(), gw: gwfake.NewSimpleClientset(), mcs: mcsfake.NewSimpleClientset()}, Settings{}, nil, slog.New(slog.DiscardHandler), func() { heard++ })
	s.references.Store(&map[ObjectRef]bool{{"Service", "a", "web"}: true, slicesOf(endpoints.OfImport("a", "far")): true})
	meta := func(name string) metav1.ObjectMeta { return metav1.ObjectMeta{Namespace: "a", Name: name} }
	for _, tt := range []struct {
		name, kind string
		object     metav1.Object
		looking    bool
		want       int
	}{
		{"a Service in use", "services", &corev1.Service{ObjectMeta: meta("web")}, false, 1},
		{"another", "services", &corev1.Service{ObjectMeta: meta("other")}, false, 0},
		{"another, while it is looked for", "services", &corev1.Service{ObjectMeta: meta("other")}, true, 1},
		{"a ConfigMap", "configmaps", &corev1.ConfigMap{ObjectMeta: meta("web")}, false, 0},
		{"a route", "tlsroutes", &gwv1.TLSRoute{ObjectMeta: meta("x")}, false, 1},
	} {
		heard = 0
		s.translating.Store(tt.looking)
		changed := s.observer(s.kinds[tt.kind].kind)
		changed(nil, tt.object)
		changed(tt.object, nil)
		if heard != 2*tt.want {
			t.Errorf("%s: heard %d times, want %d", tt.name, heard, 2*tt.want)
		}
	}
	for _, tt := range []struct {
		name    string
		owner   endpoints.Owner
		looking bool
		want    int
	}{
		{"slices in use", endpoints.OfImport("a", "far"), false, 1},
		{"slices of a Service of that name", endpoints.OfService("a", "far"), false, 0},
		{"slices of a Service of that name, while it is looked for", endpoints.OfService("a", "far"), true, 1},
	} {
		heard = 0
		s.translating.Store(tt.looking)
		if s.slicesChanged([]endpoints.Owner{endpoints.OfService("b", "far"), tt.owner}); heard != tt.want {
			t.Errorf("%s: heard %d times, want %d", tt.name, heard, tt.want)
		}
	}
}

// The Service of public addresses may lie where nothing else is looked at.
func TestStoreLooksWhereItIsTold(t *testing.T) {
	s := newStore(clients{core: fake.NewClientset(), gw: gwfake.NewSimpleClientset(), mcs: mcsfake.NewSimpleClientset()},
		Settings{Namespaces: []string{"a", "b"}, PublicService: types.NamespacedName{Namespace: "c", Name: "lb"}}, nil, slog.New(slog.DiscardHandler), func() {})
	for resource, want := range map[string]int{"services": 3, "secrets": 2, "gateways": 2, "gatewayclasses": 1, "namespaces": 1} {
		if got := len(s.kinds[resource].watches); got != want {
			t.Errorf("%s are watched %d times, want %d", resource, got, want)
		}
	}
}

func TestSlim(t *testing.T) {
	m := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{ManagedFields: []metav1.ManagedFieldsEntry{{}}}, Data: map[string]string{"ca.crt": "x", "other": "y"}}
	if _, err := slim(m); err != nil || len(m.Data) != 1 || m.Data["ca.crt"] != "x" || m.ManagedFields != nil {
		t.Errorf("got %+v, %v", m, err)
	}
	if o, err := slim(cache.DeletedFinalStateUnknown{}); err != nil || o == nil {
		t.Errorf("got %v, %v of a tombstone", o, err)
	}
}

// The annotations of a Service may be long, and most are of no use here.
func TestSlimKeepsAnnotationsInUse(t *testing.T) {
	all := map[string]string{"culvert.dev/load-balancing": "leastConnections", "culvert.dev/expose": "true", "kubectl.kubernetes.io/last-applied-configuration": "{}"}
	for _, o := range []metav1.Object{
		&corev1.Service{ObjectMeta: metav1.ObjectMeta{Annotations: all, Labels: map[string]string{"app": "web"}}},
		&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Annotations: all}},
	} {
		if _, err := slim(o); err != nil || len(o.GetAnnotations()) != 1 || o.GetAnnotations()["culvert.dev/load-balancing"] != "leastConnections" {
			t.Errorf("%T: got %v, %v, want the annotation of load balancing alone", o, o.GetAnnotations(), err)
		}
	}
}
