package endpoints

import (
	"fmt"
	goruntime "runtime"
	"testing"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer/protobuf"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/client-go/kubernetes/scheme"
)

// encoded is the i-th EndpointSlice as the API server sends it, with ten endpoints.
func encoded(b *testing.B, i, change int) []byte {
	b.Helper()
	s := sliceOf(fmt.Sprintf("service-%d-abcde", i), fmt.Sprintf("service-%d", i))
	s.UID, s.ResourceVersion, s.Generation, s.GenerateName = types.UID(fmt.Sprintf("%08d-1111-2222-3333-444444444444", i)), fmt.Sprint(i), 7, fmt.Sprintf("service-%d-", i)
	s.Labels["endpointslice.kubernetes.io/managed-by"] = "endpointslice-controller.k8s.io"
	s.Annotations = map[string]string{"endpoints.kubernetes.io/last-change-trigger-time": "2026-01-02T03:04:05Z"}
	s.OwnerReferences = []metav1.OwnerReference{{APIVersion: "v1", Kind: "Service", Name: fmt.Sprintf("service-%d", i), UID: "11111111-2222-3333-4444-555555555555", Controller: ref(true), BlockOwnerDeletion: ref(true)}}
	for j := range 10 {
		s.Endpoints = append(s.Endpoints, discoveryv1.Endpoint{
			Addresses:  []string{fmt.Sprintf("10.%d.%d.%d", i>>8, i&255, 1+j+change)},
			Conditions: discoveryv1.EndpointConditions{Ready: ref(true), Serving: ref(true), Terminating: ref(false)},
			NodeName:   ref(fmt.Sprintf("node-%d", j)), Zone: ref("zone-a"), Hints: &discoveryv1.EndpointHints{ForZones: []discoveryv1.ForZone{{Name: "zone-a"}}},
			TargetRef: &corev1.ObjectReference{Kind: "Pod", Namespace: "a", Name: fmt.Sprintf("service-%d-5d4f6c7b8-%05d", i, j), UID: types.UID(fmt.Sprintf("%08d-1111-2222-3333-%012d", i, j))},
		})
	}
	data, err := runtime.Encode(scheme.Codecs.EncoderForVersion(protobuf.NewSerializer(scheme.Scheme, scheme.Scheme), discoveryv1.SchemeGroupVersion), s)
	if err != nil {
		b.Fatal(err)
	}
	return data
}

// BenchmarkChange is what a change of an EndpointSlice of ten endpoints costs, from the bytes of the
// event to the Store, of which two are told; and what the Store keeps of each.
func BenchmarkChange(b *testing.B) {
	const n = 10_000
	decoder := scheme.Codecs.UniversalDeserializer()
	s := NewStore(Config{Client: fake.NewClientset()})
	told := 0
	for range 2 {
		s.Use(&User{Changed: func(o []Owner) { told += len(o) }})
	}
	receive := func(data []byte) {
		o, _, err := decoder.Decode(data, nil, nil)
		if err != nil {
			b.Fatal(err)
		}
		if o, err := transform(o); err == nil {
			s.Apply([]any{o}, nil)
		}
	}
	var before, after goruntime.MemStats
	goruntime.GC()
	goruntime.ReadMemStats(&before)
	for i := range n {
		receive(encoded(b, i, 0))
	}
	goruntime.GC()
	goruntime.ReadMemStats(&after)
	changes := [][]byte{encoded(b, 1, 1), encoded(b, 1, 2)}
	told = 0
	b.ReportAllocs()
	i := 0
	for b.Loop() {
		receive(changes[i%2])
		i++
	}
	if told != 2*i {
		b.Fatalf("told %d times of %d changes, want twice of each", told, i)
	}
	b.ReportMetric(float64(len(changes[0])), "B-event")
	b.ReportMetric(float64(after.HeapAlloc-before.HeapAlloc)/n, "B-kept/slice")
	goruntime.KeepAlive(s)
}
