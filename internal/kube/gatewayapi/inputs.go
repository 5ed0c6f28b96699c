package gatewayapi

import (
	"crypto/tls"
	"net/netip"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	gwv1 "sigs.k8s.io/gateway-api/apis/v1"
	mcsv1 "sigs.k8s.io/mcs-api/pkg/apis/v1beta1"

	"culvert.dev/internal/kube/endpoints"
	"culvert.dev/registry"
)

// Inputs have everything that Translate depends on. Neither they nor the objects are changed.
type Inputs struct {
	Settings

	Classes      []*gwv1.GatewayClass
	Gateways     []*gwv1.Gateway
	ListenerSets []*gwv1.ListenerSet
	TLSRoutes    []*gwv1.TLSRoute
	TCPRoutes    []*gwv1.TCPRoute
	UDPRoutes    []*gwv1.UDPRoute
	HTTPRoutes   []*gwv1.HTTPRoute
	GRPCRoutes   []*gwv1.GRPCRoute
	Grants       []*gwv1.ReferenceGrant
	Policies     []*gwv1.BackendTLSPolicy

	// PoliciesUnread are the namespaces whose BackendTLSPolicies may not be read. Routes to backends
	// there are refused, because a policy might ask for TLS.
	PoliciesUnread []string

	Objects Objects // that those refer to

	// Unread reports whether objects of a resource, such as "secrets", may not be read in a
	// namespace, so that it is not known whether there are any. The namespace of resources without
	// namespaces is "". Nil means that everything may be read.
	Unread func(resource, namespace string) bool

	// Plane has the listeners that are open, with a nil error, and those that could not be opened, by
	// registry.Listener.Name. The state of others is not known yet. A nil Plane means that all are
	// open.
	Plane map[string]error

	// Bundle is the version of the CRDs, from their annotation; "" is unknown.
	Bundle string

	// Versions has the versions in which kinds are read, by resource, if that is not v1: "v1alpha2",
	// or "none" if the API server does not have the kind.
	Versions map[string]string

	// Now is the time, for messages about certificates, and to drop certificates whose Secret is gone.
	// Zero is unknown.
	Now time.Time

	memo *memo // may be nil
}

// Objects finds the objects that others refer to. Its methods return nil if there is no object of
// that name.
type Objects interface {
	Namespace(name string) *corev1.Namespace
	Service(namespace, name string) *corev1.Service
	Secret(namespace, name string) *corev1.Secret
	ConfigMap(namespace, name string) *corev1.ConfigMap
	Import(namespace, name string) *mcsv1.ServiceImport
	// Slices returns the Slices of an owner, in no order. They are the same ones as before if nothing
	// of them has changed.
	Slices(endpoints.Owner) []*endpoints.Slice
	// Nodes returns all Nodes of the cluster, in a new slice. It is false if they are not known yet.
	Nodes() ([]*corev1.Node, bool)
}

// Settings are those of this process.
type Settings struct {
	Controller string // of the classes that are served; "" means DefaultController
	Class      string // the only class that is served; "" means all of Controller

	// Addresses are those that Gateways are given. Without any, or with an
	// unspecified one ("::"), every Gateway listens on all addresses of the
	// machine, as one does in a pod, and says that it is at PublicAddresses or
	// those of PublicService.
	Addresses       []Address
	PublicAddresses []netip.Addr
	PublicService   types.NamespacedName // its LoadBalancer's addresses and external IPs, or else those of nodes, or its cluster IPs

	// Zone is the one that this process is in: backends' endpoints that hints name for
	// it come first, as internal/kube/endpoints says; "" ignores hints. Prefer is one of that
	// package's, and "" means each Service's first family: one address of each pod.
	Zone, Prefer string

	// Network is the one that the endpoints of Services are in; "" means that of their
	// addresses, or our own. From another one they are reached by way of its gateways,
	// which are asked for the Service's name in Mesh, as one of Cluster. Where slices of a
	// ServiceImport lead is not said: those are of other clusters.
	Network, Cluster string
	Mesh             registry.Mesh

	// InfrastructureKeys are DOMAIN/NAME, with * and ?, of labels and annotations of
	// infrastructure that ServiceAccounts of Gateways may have, beside those without a domain.
	InfrastructureKeys []string

	// Namespaces are the only ones that are looked at; empty means all.
	Namespaces []string

	// Refuses returns why the administrator refuses that a Service or ServiceImport is exposed, or
	// "". Nil refuses none.
	Refuses func(namespace, name string) string
}

// An Address is one that listeners may have.
type Address struct {
	Bind   netip.Addr // of this machine
	Public netip.Addr // that clients use for it; zero means Bind
}

// DefaultController is spec.controllerName of the GatewayClasses that are ours.
const DefaultController = "culvert.dev/gateway"

// A Result is what follows from Inputs. Conditions in it have no lastTransitionTime, which the
// writer adds.
type Result struct {
	Snapshot registry.Snapshot

	Classes      map[string]ClassStatus
	Gateways     map[types.NamespacedName]gwv1.GatewayStatus
	ListenerSets map[types.NamespacedName]gwv1.ListenerSetStatus
	Routes       map[RouteKey]RouteStatus // of each route, even of those that have none of our parents
	Notes        map[RouteKey][]note      // of objects of any kind, that no condition is False for: see shadowed.go, validity.go
	Policies     map[types.NamespacedName][]gwv1.PolicyAncestorStatus
	Accounts     map[types.NamespacedName]*corev1.ServiceAccount // to be there, for each Gateway

	Causes map[causeKey]*cause // that routes are refused for: see refusals.go

	// Keys are the certificates, with their private keys, that the Snapshot names: those of
	// Secrets, that Gateways show to clients or to backends. Nobody changes them.
	Keys map[string]*tls.Certificate

	// Classless says of GatewayClasses that are gone, or have gone wrong, what has
	// become of the Gateways that name them.
	Classless map[string]string

	// Until is when it is to be made again, though nothing has changed but the time;
	// zero is never.
	Until time.Time

	// References are the objects that it looked for, whether they exist or not: changes of other
	// objects do not matter.
	References map[ObjectRef]bool
}

// An ObjectRef is an object that a Result depends on.
type ObjectRef struct{ Kind, Namespace, Name string }

// A RouteKey is a route's kind and name.
type RouteKey struct {
	Kind string
	types.NamespacedName
}

// A ClassStatus is that of a GatewayClass.
type ClassStatus struct {
	Conditions []metav1.Condition
	Features   []gwv1.SupportedFeature
}

// A RouteStatus has a route's parents of ours, as wanted.
type RouteStatus struct {
	Parents []gwv1.RouteParentStatus
	// Others reports whether an entry that has our controller's name, and is of
	// a parent that the route does not name to us, is to be left alone: because
	// another instance may have written it.
	Others func(gwv1.ParentReference) bool
}
