package bench

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"
	gwv1 "sigs.k8s.io/gateway-api/apis/v1"
)

const (
	namespaces = 100 // that it is in
	endpoints  = 10  // of each Service
)

// A size is how much there is beside what is changed.
type size struct{ services, routes int }

// load makes services with their endpoints, and routes to the first of them.
func (r *rig) load(s size) (took time.Duration) {
	r.t.Helper()
	began := time.Now()
	for i := range min(namespaces, s.services) {
		if _, err := r.core.CoreV1().Namespaces().Create(r.t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: namespace(i)}}, metav1.CreateOptions{}); err != nil {
			r.t.Fatal(err)
		}
	}
	created := metav1.NewTime(time.Now().Truncate(time.Second))
	name := func(i int) string { return fmt.Sprintf("service-%05d", i) }
	stamp := func(kind, version string, i int, t *metav1.TypeMeta, m *metav1.ObjectMeta) {
		t.Kind, t.APIVersion = kind, version
		m.CreationTimestamp, m.Generation, m.UID = created, 1, types.UID(fmt.Sprintf("6ba7b8%02d-9dad-11d1-80b4-%012d", len(kind), i))
	}
	family := corev1.IPFamilyPolicySingleStack
	// Who owns the address of a Service is known before it is there, or the API
	// server would write that down itself.
	r.store("ipaddresses/", s.services, func(i int) (string, any) {
		a := &networkingv1.IPAddress{
			ObjectMeta: metav1.ObjectMeta{Name: clusterIP(i), Labels: map[string]string{networkingv1.LabelIPAddressFamily: "IPv4", networkingv1.LabelManagedBy: "ipallocator.k8s.io"}},
			Spec:       networkingv1.IPAddressSpec{ParentRef: &networkingv1.ParentReference{Resource: "services", Namespace: namespace(i), Name: name(i)}},
		}
		stamp("IPAddress", "networking.k8s.io/v1", i, &a.TypeMeta, &a.ObjectMeta)
		return a.Name, a
	})
	r.store("services/specs/", s.services, func(i int) (string, any) {
		svc := service(namespace(i), name(i))
		stamp("Service", "v1", i, &svc.TypeMeta, &svc.ObjectMeta)
		svc.Spec.Type, svc.Spec.SessionAffinity = corev1.ServiceTypeClusterIP, corev1.ServiceAffinityNone
		svc.Spec.ClusterIP, svc.Spec.ClusterIPs = clusterIP(i), []string{clusterIP(i)}
		svc.Spec.IPFamilies, svc.Spec.IPFamilyPolicy = []corev1.IPFamily{corev1.IPv4Protocol}, &family
		svc.Spec.Ports[0].Protocol, svc.Spec.Ports[0].TargetPort = corev1.ProtocolTCP, intstr.FromInt32(port)
		return svc.Namespace + "/" + svc.Name, svc
	})
	r.store("endpointslices/", s.services, func(i int) (string, any) {
		slice := slice(namespace(i), name(i))
		stamp("EndpointSlice", "discovery.k8s.io/v1", i, &slice.TypeMeta, &slice.ObjectMeta)
		for j := range endpoints {
			slice.Endpoints = append(slice.Endpoints, pod(slice, j, fmt.Sprintf("10.%d.%d.%d", 32+i>>8, i&255, 1+j)))
		}
		return slice.Namespace + "/" + slice.Name, slice
	})
	r.store("gateway.networking.k8s.io/tlsroutes/", s.routes, func(i int) (string, any) {
		o := route(namespace(i), fmt.Sprintf("route-%05d", i), fmt.Sprintf("r%05d.load.test", i), "all", name(i))
		stamp("TLSRoute", "gateway.networking.k8s.io/v1", i, &o.TypeMeta, &o.ObjectMeta)
		return o.Namespace + "/" + o.Name, o
	})
	// The API server knows all of it.
	for range 300 {
		list, err := r.gw.GatewayV1().TLSRoutes("").List(r.t.Context(), metav1.ListOptions{ResourceVersion: "0"})
		if err != nil {
			r.t.Fatal(err)
		}
		if len(list.Items) >= s.routes {
			return time.Since(began)
		}
		time.Sleep(100 * time.Millisecond)
	}
	r.t.Fatal("the API server does not see the routes")
	return 0
}

func clusterIP(i int) string { return fmt.Sprintf("10.96.%d.%d", 64+i>>7, 1+i&127) }

// store writes objects to etcd, as the API server keeps them: by its requests it
// would take minutes. An object is decoded as JSON as well as in protobuf.
func (r *rig) store(prefix string, n int, object func(i int) (name string, o any)) {
	r.t.Helper()
	type put struct {
		Key   []byte `json:"key"`
		Value []byte `json:"value"`
	}
	type op struct {
		Put put `json:"request_put"`
	}
	const most = 100 // of one transaction; etcd takes 128
	for at := 0; at < n; at += most {
		var tx struct {
			Success []op `json:"success"`
		}
		for i := at; i < min(n, at+most); i++ {
			name, o := object(i)
			value, err := json.Marshal(o)
			if err != nil {
				r.t.Fatal(err)
			}
			tx.Success = append(tx.Success, op{put{[]byte("/registry/" + prefix + name), value}})
		}
		body, err := json.Marshal(tx)
		if err != nil {
			r.t.Fatal(err)
		}
		req, err := http.NewRequestWithContext(r.t.Context(), http.MethodPost, r.Etcd()+"/v3/kv/txn", bytes.NewReader(body))
		if err != nil {
			r.t.Fatal(err)
		}
		req.Close = true
		res, err := http.DefaultClient.Do(req)
		if err != nil {
			r.t.Fatal(err)
		}
		answer, _ := io.ReadAll(res.Body)
		res.Body.Close()
		if res.StatusCode != http.StatusOK || !bytes.Contains(answer, []byte(`"succeeded":true`)) {
			r.t.Fatalf("etcd: %s: %.200s", res.Status, answer)
		}
	}
}

func namespace(i int) string { return fmt.Sprintf("load-%02d", i%namespaces) }

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
