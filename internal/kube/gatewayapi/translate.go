package gatewayapi

import (
	"cmp"
	"crypto/tls"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	gwv1 "sigs.k8s.io/gateway-api/apis/v1"
	mcsv1 "sigs.k8s.io/mcs-api/pkg/apis/v1beta1"

	"culvert.dev/internal/kube/endpoints"
)

// Translate returns what follows from its inputs: the listeners of the table, and the status of
// every object that is ours. It reads no clock and does no I/O: equal inputs give equal results.
func Translate(in *Inputs) *Result {
	m := in.memo
	if m == nil {
		m = newMemo()
	}
	t := &translator{
		in: in,
		res: &Result{
			Classes:      map[string]ClassStatus{},
			Classless:    map[string]string{},
			Gateways:     map[types.NamespacedName]gwv1.GatewayStatus{},
			ListenerSets: map[types.NamespacedName]gwv1.ListenerSetStatus{},
			Routes:       make(map[RouteKey]RouteStatus, len(in.TLSRoutes)+len(in.TCPRoutes)+len(in.UDPRoutes)+len(in.HTTPRoutes)+len(in.GRPCRoutes)),
			Notes:        map[RouteKey][]note{},
			Causes:       map[causeKey]*cause{},
			Policies:     map[types.NamespacedName][]gwv1.PolicyAncestorStatus{},
			Accounts:     map[types.NamespacedName]*corev1.ServiceAccount{},
			Keys:         map[string]*tls.Certificate{},
			References:   make(map[ObjectRef]bool, m.references),
		},
		controller: gwv1.GatewayController(cmp.Or(in.Controller, DefaultController)),
		classes:    map[string]*class{},
		gateways:   map[types.NamespacedName]*gateway{},
		foreign:    map[types.NamespacedName]bool{},
		unheld:     map[types.NamespacedName]bool{},
		sets:       map[types.NamespacedName]*listenerSet{},
		backends:   make(map[backendKey]*backend, len(m.reached)),
		memo:       m,
	}
	t.readClasses()
	t.readGrants()
	t.readPolicies()
	t.readGateways()
	t.readListenerSets()
	for _, g := range t.order {
		g.findConflicts()
		t.resolveTLS(g)
		findOverlaps(g.all())
	}
	t.assignAddresses()
	t.findOwn()
	t.attachRoutes()
	t.emit()
	t.noteShadowed()
	t.writeStatus()
	m.forget()
	m.references = len(t.res.References)
	return t.res
}

// A translator is the state of one call of Translate.
type translator struct {
	in         *Inputs
	res        *Result
	memo       *memo
	controller gwv1.GatewayController

	classes  map[string]*class                     // all of them
	gateways map[types.NamespacedName]*gateway     // that are ours
	order    []*gateway                            // the same, oldest first
	foreign  map[types.NamespacedName]bool         // Gateways that are not, and may be another instance's of our name
	unheld   map[types.NamespacedName]bool         // ListenerSets of those
	sets     map[types.NamespacedName]*listenerSet // of our gateways
	orphans  []*gwv1.ListenerSet                   // that were of one, which is gone
	grants   map[string][]*gwv1.ReferenceGrant     // by namespace
	policies map[targetKey][]*targeting            // by what they are for, oldest first
	all      []*policy
	backends map[backendKey]*backend
	own      own    // where we are
	shares   shares // which listeners have which ports

	front *publicService // that clients come by; nil if none, or if its addresses are not known
	unled string         // why it gives no address; "" if it does, or there is none
}

// The next ones look for objects, and remember that.

func (t *translator) namespace(name string) *corev1.Namespace {
	t.res.References[ObjectRef{"Namespace", "", name}] = true
	return t.in.Objects.Namespace(name)
}

func (t *translator) service(namespace, name string) *corev1.Service {
	t.res.References[ObjectRef{"Service", namespace, name}] = true
	return t.in.Objects.Service(namespace, name)
}

func (t *translator) secret(namespace, name string) *corev1.Secret {
	t.res.References[ObjectRef{"Secret", namespace, name}] = true
	return t.in.Objects.Secret(namespace, name)
}

func (t *translator) configMap(namespace, name string) *corev1.ConfigMap {
	t.res.References[ObjectRef{"ConfigMap", namespace, name}] = true
	return t.in.Objects.ConfigMap(namespace, name)
}

func (t *translator) serviceImport(namespace, name string) *mcsv1.ServiceImport {
	t.res.References[ObjectRef{"ServiceImport", namespace, name}] = true
	return t.in.Objects.Import(namespace, name)
}

func (t *translator) slices(o endpoints.Owner) []*endpoints.Slice {
	t.res.References[slicesOf(o)] = true
	return t.in.Objects.Slices(o)
}

// byName orders as NAMESPACE/NAME does: "a-b/c" is before "a/c". It makes no
// string where thousands are sorted.
func byName(namespace, name, otherNamespace, otherName string) int {
	if namespace == otherNamespace {
		return strings.Compare(name, otherName)
	}
	if strings.HasPrefix(namespace, otherNamespace) || strings.HasPrefix(otherNamespace, namespace) {
		return strings.Compare(namespace+"/", otherNamespace+"/")
	}
	return strings.Compare(namespace, otherNamespace)
}

// sorted returns a copy of objects by age and then by name, the order in which Gateway API resolves
// conflicts. The sort keys are looked up once for each object: there may be thousands.
func sorted[T metav1.Object](objects []T) []T {
	type aged struct {
		second          int64
		namespace, name string
		object          T
	}
	all := make([]aged, len(objects))
	for i, o := range objects {
		all[i] = aged{o.GetCreationTimestamp().Unix(), o.GetNamespace(), o.GetName(), o}
	}
	slices.SortFunc(all, func(a, b aged) int {
		if a.second != b.second {
			return cmp.Compare(a.second, b.second)
		}
		return byName(a.namespace, a.name, b.namespace, b.name)
	})
	out := make([]T, len(all))
	for i := range all {
		out[i] = all[i].object
	}
	return out
}

func key(o metav1.Object) types.NamespacedName {
	return types.NamespacedName{Namespace: o.GetNamespace(), Name: o.GetName()}
}

// condition returns a condition of Gateway API; a reason with the status False says why not.
func condition(kind string, status bool, reason, message string) metav1.Condition {
	c := metav1.Condition{Type: kind, Status: metav1.ConditionFalse, Reason: reason, Message: truncate(message)}
	if status {
		c.Status = metav1.ConditionTrue
	}
	return c
}

// truncate keeps messages far below the limit of the API: they are for people.
func truncate(s string) string {
	const limit = 1024
	if len(s) <= limit {
		return s
	}
	return strings.ToValidUTF8(s[:limit], "") + "…"
}

// observe puts a generation to conditions.
func observe(generation int64, cs []metav1.Condition) []metav1.Condition {
	for i := range cs {
		cs[i].ObservedGeneration = generation
	}
	return cs
}
