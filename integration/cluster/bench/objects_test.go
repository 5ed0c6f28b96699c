package bench

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	gwv1 "sigs.k8s.io/gateway-api/apis/v1"
)

const (
	atOnce     = 24  // writers of the load
	namespaces = 100 // that it is in
	endpoints  = 10  // of each Service
)

// A size is how much there is beside what is changed.
type size struct{ services, routes int }

// load writes services with their endpoints, and routes to the first of them.
func (r *rig) load(s size) (took time.Duration) {
	r.t.Helper()
	began := time.Now()
	r.each(min(namespaces, s.services), func(ctx context.Context, i int) error {
		_, err := r.core.CoreV1().Namespaces().Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: namespace(i)}}, metav1.CreateOptions{})
		return err
	})
	r.each(s.services, func(ctx context.Context, i int) error {
		svc, slice := service(namespace(i), fmt.Sprintf("service-%05d", i)), slice(namespace(i), fmt.Sprintf("service-%05d", i))
		for j := range endpoints {
			slice.Endpoints = append(slice.Endpoints, pod(slice, j, fmt.Sprintf("10.%d.%d.%d", 32+i>>8, i&255, 1+j)))
		}
		if _, err := r.core.CoreV1().Services(svc.Namespace).Create(ctx, svc, metav1.CreateOptions{}); err != nil {
			return err
		}
		_, err := r.core.DiscoveryV1().EndpointSlices(slice.Namespace).Create(ctx, slice, metav1.CreateOptions{})
		return err
	})
	r.each(s.routes, func(ctx context.Context, i int) error {
		return r.putRoute(ctx, route(namespace(i), fmt.Sprintf("route-%05d", i), fmt.Sprintf("r%05d.load.test", i), "all", fmt.Sprintf("service-%05d", i)))
	})
	return time.Since(began)
}

func namespace(i int) string { return fmt.Sprintf("load-%02d", i%namespaces) }

// each calls f for 0 to n-1, several at once.
func (r *rig) each(n int, f func(context.Context, int) error) {
	r.t.Helper()
	var next atomic.Int64
	var wg sync.WaitGroup
	var once sync.Once
	var failed error
	for range atOnce {
		wg.Go(func() {
			for i := int(next.Add(1)) - 1; i < n; i = int(next.Add(1)) - 1 {
				if err := f(r.t.Context(), i); err != nil {
					once.Do(func() { failed = err })
					next.Store(int64(n))
				}
			}
		})
	}
	wg.Wait()
	if failed != nil {
		r.t.Fatal(failed)
	}
}

func service(namespace, name string) *corev1.Service {
	return &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name, Labels: map[string]string{"app.kubernetes.io/name": name}, Annotations: map[string]string{"culvert.dev/expose": "true"}},
		Spec:       corev1.ServiceSpec{Ports: []corev1.ServicePort{{Name: "tls", Port: port}}},
	}
}

func slice(namespace, service string) *discoveryv1.EndpointSlice {
	name, number, tcp := "tls", int32(port), corev1.ProtocolTCP
	return &discoveryv1.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Namespace: namespace, Name: service + "-x7k2p", Labels: map[string]string{discoveryv1.LabelServiceName: service, discoveryv1.LabelManagedBy: "bench"}},
		AddressType: discoveryv1.AddressTypeIPv4,
		Ports:       []discoveryv1.EndpointPort{{Name: &name, Port: &number, Protocol: &tcp}},
	}
}

// pod is an endpoint with all that the controller of Kubernetes writes.
func pod(s *discoveryv1.EndpointSlice, i int, address string) discoveryv1.Endpoint {
	yes, no, node, zone := true, false, fmt.Sprintf("node-%04d", i), fmt.Sprintf("zone-%d", i%3)
	return discoveryv1.Endpoint{
		Addresses:  []string{address},
		Conditions: discoveryv1.EndpointConditions{Ready: &yes, Serving: &yes, Terminating: &no},
		NodeName:   &node, Zone: &zone,
		TargetRef: &corev1.ObjectReference{Kind: "Pod", Namespace: s.Namespace, Name: fmt.Sprintf("%s-%05d", s.Name, i), UID: types.UID(fmt.Sprintf("6ba7b810-9dad-11d1-80b4-%012d", i))},
	}
}

func route(namespace, name, host, gateway, backend string) *gwv1.TLSRoute {
	all, number := gwv1.Namespace(home), gwv1.PortNumber(port)
	return &gwv1.TLSRoute{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name},
		Spec: gwv1.TLSRouteSpec{
			CommonRouteSpec: gwv1.CommonRouteSpec{ParentRefs: []gwv1.ParentReference{{Namespace: &all, Name: gwv1.ObjectName(gateway)}}},
			Hostnames:       []gwv1.Hostname{gwv1.Hostname(host)},
			Rules: []gwv1.TLSRouteRule{{BackendRefs: []gwv1.BackendRef{{
				BackendObjectReference: gwv1.BackendObjectReference{Name: gwv1.ObjectName(backend), Port: &number},
			}}}},
		},
	}
}

func (r *rig) putRoute(ctx context.Context, o *gwv1.TLSRoute) error {
	_, err := r.gw.GatewayV1().TLSRoutes(o.Namespace).Create(ctx, o, metav1.CreateOptions{})
	return err
}

func (r *rig) deleteRoute(name string) {
	if err := r.gw.GatewayV1().TLSRoutes(home).Delete(r.t.Context(), name, metav1.DeleteOptions{}); err != nil && !apierrors.IsNotFound(err) {
		r.t.Fatal(err)
	}
}

// putGateway makes a Gateway with an address of its own.
func (r *rig) putGateway(ctx context.Context, name, address string) error {
	typ, mode, all := gwv1.IPAddressType, gwv1.TLSModePassthrough, gwv1.NamespacesFromAll
	_, err := r.gw.GatewayV1().Gateways(home).Create(ctx, &gwv1.Gateway{
		ObjectMeta: metav1.ObjectMeta{Namespace: home, Name: name},
		Spec: gwv1.GatewaySpec{
			GatewayClassName: "culvert",
			Addresses:        []gwv1.GatewaySpecAddress{{Type: &typ, Value: address}},
			Listeners: []gwv1.Listener{{
				Name: "tls", Port: 443, Protocol: gwv1.TLSProtocolType, TLS: &gwv1.ListenerTLSConfig{Mode: &mode},
				AllowedRoutes: &gwv1.AllowedRoutes{Namespaces: &gwv1.RouteNamespaces{From: &all}},
			}},
		},
	}, metav1.CreateOptions{})
	return err
}

// furnish makes what is changed: services to each of the servers, one that moves
// from one to the other, routes to them, and the Gateway of all.
func (r *rig) furnish() {
	r.t.Helper()
	ctx := r.t.Context()
	must := func(err error) {
		r.t.Helper()
		if err != nil {
			r.t.Fatal(err)
		}
	}
	r.Apply(r.t, "apiVersion: gateway.networking.k8s.io/v1\nkind: GatewayClass\nmetadata: {name: culvert}\nspec: {controllerName: culvert.dev/gateway}\n")
	must(r.putGateway(ctx, "all", r.gateway().Addr().String()))
	for i, name := range []string{"one", "two", "moves"} {
		_, err := r.core.CoreV1().Services(home).Create(ctx, service(home, name), metav1.CreateOptions{})
		must(err)
		s := slice(home, name)
		s.Endpoints = []discoveryv1.Endpoint{pod(s, 0, r.server(i).String())}
		_, err = r.core.DiscoveryV1().EndpointSlices(home).Create(ctx, s, metav1.CreateOptions{})
		must(err)
	}
	must(r.putRoute(ctx, route(home, "one", "one.bench.test", "all", "one")))
	must(r.putRoute(ctx, route(home, "moves", "moves.bench.test", "all", "moves")))
}
