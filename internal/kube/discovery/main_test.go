package discovery

import (
	"fmt"
	"log/slog"
	"net/netip"
	"testing"
	"time"

	"culvert.dev/internal/testnet"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"
)

func TestMain(m *testing.M) { testnet.GoroutinesEnd(m) }

var discard = slog.New(slog.DiscardHandler)

var epoch = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)

// svc makes a Service with one port of TCP, 443, and annotations "key", "value", ...
func svc(ns, name string, notes ...string) *corev1.Service {
	s := &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: name, UID: types.UID(ns + "/" + name), CreationTimestamp: metav1.NewTime(epoch)},
		Spec: corev1.ServiceSpec{
			Type: corev1.ServiceTypeClusterIP, ClusterIP: "10.96.0.7", ClusterIPs: []string{"10.96.0.7"},
			IPFamilies: []corev1.IPFamily{corev1.IPv4Protocol},
			Ports:      []corev1.ServicePort{{Name: "https", Port: 443, TargetPort: intstr.FromInt32(443)}},
		},
	}
	for i := 0; i < len(notes); i += 2 {
		metav1.SetMetaDataAnnotation(&s.ObjectMeta, prefix+notes[i], notes[i+1])
	}
	return s
}

func port(name string, number int32, protocol corev1.Protocol) corev1.ServicePort {
	return corev1.ServicePort{Name: name, Port: number, Protocol: protocol}
}

func ptr[T any](v T) *T { return &v }

// eps makes an EndpointSlice of the service with ready endpoints.
func eps(ns, service, name string, addrs ...string) *discoveryv1.EndpointSlice {
	s := &discoveryv1.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Namespace: ns, Name: name, Labels: map[string]string{discoveryv1.LabelServiceName: service}},
		AddressType: discoveryv1.AddressTypeIPv4,
		Ports:       []discoveryv1.EndpointPort{eport("https", 443)},
	}
	for _, a := range addrs {
		s.Endpoints = append(s.Endpoints, ep(a))
		if netip.MustParseAddr(a).Is6() {
			s.AddressType = discoveryv1.AddressTypeIPv6
		}
	}
	return s
}

func eport(name string, number int32) discoveryv1.EndpointPort {
	return discoveryv1.EndpointPort{Name: ptr(name), Port: ptr(number), Protocol: ptr(corev1.ProtocolTCP)}
}

func ep(addr string, change ...func(*discoveryv1.Endpoint)) discoveryv1.Endpoint {
	e := discoveryv1.Endpoint{Addresses: []string{addr}}
	for _, f := range change {
		f(&e)
	}
	return e
}

func conditions(ready, serving, terminating bool) func(*discoveryv1.Endpoint) {
	return func(e *discoveryv1.Endpoint) {
		e.Conditions = discoveryv1.EndpointConditions{Ready: &ready, Serving: &serving, Terminating: &terminating}
	}
}

func hint(zones ...string) func(*discoveryv1.Endpoint) {
	return func(e *discoveryv1.Endpoint) {
		e.Hints = &discoveryv1.EndpointHints{}
		for _, z := range zones {
			e.Hints.ForZones = append(e.Hints.ForZones, discoveryv1.ForZone{Name: z})
		}
	}
}

func zone(z string) func(*discoveryv1.Endpoint) {
	return func(e *discoveryv1.Endpoint) { e.Zone = &z }
}

func pod(uid string) func(*discoveryv1.Endpoint) {
	return func(e *discoveryv1.Endpoint) {
		e.TargetRef = &corev1.ObjectReference{Kind: "Pod", Name: uid, UID: types.UID(uid)}
	}
}

func hostname(h string) func(*discoveryv1.Endpoint) {
	return func(e *discoveryv1.Endpoint) { e.Hostname = &h }
}

func on(node string) func(*discoveryv1.Endpoint) {
	return func(e *discoveryv1.Endpoint) { e.NodeName = &node }
}

func gvkOf(o runtime.Object) (schema.GroupVersionResource, error) {
	switch o.(type) {
	case *corev1.Service:
		return corev1.SchemeGroupVersion.WithResource("services"), nil
	case *corev1.Namespace:
		return corev1.SchemeGroupVersion.WithResource("namespaces"), nil
	case *corev1.Node:
		return corev1.SchemeGroupVersion.WithResource("nodes"), nil
	case *corev1.Secret:
		return corev1.SchemeGroupVersion.WithResource("secrets"), nil
	case *discoveryv1.EndpointSlice:
		return discoveryv1.SchemeGroupVersion.WithResource("endpointslices"), nil
	}
	return schema.GroupVersionResource{}, fmt.Errorf("no resource of %T", o)
}
