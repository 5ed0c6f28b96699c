package endpoints

import (
	"reflect"
	"testing"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	mcsv1 "sigs.k8s.io/mcs-api/pkg/apis/v1beta1"
)

func ref[T any](v T) *T { return &v }

// sliceOf makes an EndpointSlice of a Service, with one endpoint for each address.
func sliceOf(name, service string, addresses ...string) *discoveryv1.EndpointSlice {
	s := &discoveryv1.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Namespace: "a", Name: name, Labels: map[string]string{discoveryv1.LabelServiceName: service}},
		AddressType: discoveryv1.AddressTypeIPv4,
		Ports:       []discoveryv1.EndpointPort{{Name: ref("tls"), Port: ref(int32(443)), Protocol: ref(corev1.ProtocolTCP)}},
	}
	for _, a := range addresses {
		s.Endpoints = append(s.Endpoints, discoveryv1.Endpoint{Addresses: []string{a}})
	}
	return s
}

func TestSliceOf(t *testing.T) {
	s := sliceOf("web-1", "web", "10.0.0.1", "169.254.169.254", "127.0.0.1", "huh", "10.0.0.2")
	s.Labels[mcsv1.LabelServiceName] = "far"
	s.Endpoints = append(s.Endpoints, discoveryv1.Endpoint{})
	s.Ports = append(s.Ports,
		discoveryv1.EndpointPort{}, discoveryv1.EndpointPort{Port: ref(int32(70_000))}, discoveryv1.EndpointPort{Protocol: ref(corev1.Protocol("")), Port: ref(int32(1))},
		discoveryv1.EndpointPort{Name: ref("dns"), Port: ref(int32(53)), Protocol: ref(corev1.ProtocolUDP)})
	got := SliceOf(s)
	if want := []Owner{OfService("a", "web"), OfImport("a", "far")}; !reflect.DeepEqual(got.Owners, want) {
		t.Errorf("got owners %v, want %v", got.Owners, want)
	}
	if want := []Port{{"tls", "TCP", 443}, {"", "TCP", 0}, {"", "TCP", 1}, {"dns", "UDP", 53}}; !reflect.DeepEqual(got.Ports, want) {
		t.Errorf("got ports %v, want %v", got.Ports, want)
	}
	if len(got.Endpoints) != 2 || got.Endpoints[0].Addr.String() != "10.0.0.1" || got.Endpoints[1].Addr.String() != "10.0.0.2" {
		t.Errorf("got endpoints %+v, want the two that can be dialed", got.Endpoints)
	}
	if want := `EndpointSlice web-1: "127.0.0.1" is never dialed: loopback`; got.Skipped != want || got.Skips != 3 {
		t.Errorf("got %d that are skipped, %q, want 3, %q", got.Skips, got.Skipped, want)
	}

	s.AddressType = discoveryv1.AddressTypeFQDN
	if got := SliceOf(s); len(got.Endpoints) != 0 || got.Skips != 5 || len(got.Ports) != 4 {
		t.Errorf("got %+v of names, want the ports alone", got)
	}
	s.Labels = map[string]string{"x": "y"}
	if got := SliceOf(s); got != nil {
		t.Errorf("got %+v of an EndpointSlice that belongs to nothing, want nil", got)
	}
}
