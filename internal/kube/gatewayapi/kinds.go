package gatewayapi

import (
	"slices"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
	gwv1 "sigs.k8s.io/gateway-api/apis/v1"
	gwclient "sigs.k8s.io/gateway-api/pkg/client/clientset/versioned"
	typed "sigs.k8s.io/gateway-api/pkg/client/clientset/versioned/typed/apis/v1"
	mcsv1 "sigs.k8s.io/mcs-api/pkg/apis/v1beta1"
	mcsclient "sigs.k8s.io/mcs-api/pkg/client/clientset/versioned"

	"culvert.dev/internal/kube/annotations"
	"culvert.dev/internal/kube/client"
	"culvert.dev/internal/kube/watch"
)

// Clients are of the API groups that are read and written.
type clients struct {
	core kubernetes.Interface
	gw   gwclient.Interface
	mcs  mcsclient.Interface

	pulse       *client.Pulse      // of all of them; nil in tests
	definitions *watch.Definitions // of the cluster's kinds; may be nil

	older          map[string]typed.GatewayV1Interface // of versions before v1: see versions.go
	versions       versions
	versionChanged func(resource, version string) // nil tells nobody
}

// A kind is a resource that is watched.
type kind struct {
	resource schema.GroupResource
	object   runtime.Object
	cluster  bool                                    // it has no namespaces
	optional bool                                    // that it is missing is nothing to warn of
	refers   bool                                    // it matters only if a Result uses it
	in       func(namespace string) *cache.ListWatch // nil for EndpointSlices, which an endpoints.Store watches
}

// from returns what makes the watch.Source of a typed client for a namespace.
func from[L runtime.Object, C watch.Lists[L]](of func(namespace string) C, narrow func(*metav1.ListOptions)) func(string) *cache.ListWatch {
	return func(namespace string) *cache.ListWatch { return watch.Source(of(namespace), narrow) }
}

// kinds are all that are watched, with the client of each.
func (c clients) kinds() []kind {
	gw := func(resource string) schema.GroupResource {
		return schema.GroupResource{Group: gwv1.GroupName, Resource: resource}
	}
	core := func(resource string) schema.GroupResource { return schema.GroupResource{Resource: resource} }
	k := c.core.CoreV1()
	// Certificates are of this type; tokens and passwords, which are not for us, are
	// not even sent.
	certificates := func(o *metav1.ListOptions) { o.FieldSelector = "type=" + string(corev1.SecretTypeTLS) }
	return []kind{
		{resource: gw("gatewayclasses"), object: &gwv1.GatewayClass{}, cluster: true, in: served(c, "gatewayclasses", func(g typed.GatewayV1Interface, _ string) watch.Lists[*gwv1.GatewayClassList] {
			return g.GatewayClasses()
		})},
		{resource: gw("gateways"), object: &gwv1.Gateway{}, in: served(c, "gateways", func(g typed.GatewayV1Interface, ns string) watch.Lists[*gwv1.GatewayList] { return g.Gateways(ns) })},
		{resource: gw("listenersets"), object: &gwv1.ListenerSet{}, in: served(c, "listenersets", func(g typed.GatewayV1Interface, ns string) watch.Lists[*gwv1.ListenerSetList] {
			return g.ListenerSets(ns)
		})},
		{resource: gw("tlsroutes"), object: &gwv1.TLSRoute{}, in: served(c, "tlsroutes", func(g typed.GatewayV1Interface, ns string) watch.Lists[*gwv1.TLSRouteList] { return g.TLSRoutes(ns) })},
		{resource: gw("tcproutes"), object: &gwv1.TCPRoute{}, in: served(c, "tcproutes", func(g typed.GatewayV1Interface, ns string) watch.Lists[*gwv1.TCPRouteList] { return g.TCPRoutes(ns) })},
		{resource: gw("udproutes"), object: &gwv1.UDPRoute{}, in: served(c, "udproutes", func(g typed.GatewayV1Interface, ns string) watch.Lists[*gwv1.UDPRouteList] { return g.UDPRoutes(ns) })},
		{resource: gw("httproutes"), object: &gwv1.HTTPRoute{}, in: served(c, "httproutes", func(g typed.GatewayV1Interface, ns string) watch.Lists[*gwv1.HTTPRouteList] { return g.HTTPRoutes(ns) })},
		{resource: gw("grpcroutes"), object: &gwv1.GRPCRoute{}, in: served(c, "grpcroutes", func(g typed.GatewayV1Interface, ns string) watch.Lists[*gwv1.GRPCRouteList] { return g.GRPCRoutes(ns) }), optional: true},
		{resource: gw("referencegrants"), object: &gwv1.ReferenceGrant{}, in: served(c, "referencegrants", func(g typed.GatewayV1Interface, ns string) watch.Lists[*gwv1.ReferenceGrantList] {
			return g.ReferenceGrants(ns)
		})},
		{resource: gw("backendtlspolicies"), object: &gwv1.BackendTLSPolicy{}, in: served(c, "backendtlspolicies", func(g typed.GatewayV1Interface, ns string) watch.Lists[*gwv1.BackendTLSPolicyList] {
			return g.BackendTLSPolicies(ns)
		})},
		{resource: core("namespaces"), object: &corev1.Namespace{}, cluster: true, refers: true, in: from(func(string) watch.Lists[*corev1.NamespaceList] { return k.Namespaces() }, nil)},
		{resource: core("services"), object: &corev1.Service{}, refers: true, in: from(k.Services, nil)},
		{resource: core("secrets"), object: &corev1.Secret{}, refers: true, in: from(k.Secrets, certificates)},
		{resource: core("configmaps"), object: &corev1.ConfigMap{}, refers: true, in: from(k.ConfigMaps, nil)},
		{resource: discoveryv1.Resource("endpointslices")},
		{
			resource: schema.GroupResource{Group: mcsv1.GroupName, Resource: "serviceimports"}, object: &mcsv1.ServiceImport{}, refers: true, optional: true,
			in: from(c.mcs.MulticlusterV1beta1().ServiceImports, nil),
		},
	}
}

// slim drops what is never looked at, and is most of some objects.
func slim(o any) (any, error) {
	m, err := meta.Accessor(o)
	if err != nil {
		return o, nil // a tombstone: nothing to be dropped
	}
	managed := m.GetManagedFields()
	m.SetManagedFields(nil)
	switch o := o.(type) {
	case *gwv1.ListenerSet:
		if slices.ContainsFunc(managed, func(e metav1.ManagedFieldsEntry) bool { return e.Manager == fieldManager && e.Subresource == "status" }) {
			o.ManagedFields = []metav1.ManagedFieldsEntry{{Manager: fieldManager, Subresource: "status"}} // see isOrphan
		}
	case *corev1.ConfigMap:
		ca, ok := o.Data[caKey]
		o.Data, o.BinaryData = nil, nil
		if ok {
			o.Data = map[string]string{caKey: ca}
		}
	case *corev1.Namespace:
		o.Annotations = annotations.Keep(o.Annotations)
	case *corev1.Service:
		o.Annotations, o.Labels, o.Spec.Selector = annotations.Keep(o.Annotations), nil, nil
	}
	return o, nil
}
