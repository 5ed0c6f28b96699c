package discovery

import (
	"context"
	"fmt"
	"runtime"
	"testing"
	"time"

	"culvert.dev/registry"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/types"
)

// world makes n exposed services with ten endpoints each, as the API has them,
// with all that is not used.
func world(n int) (services, slices []any) {
	for i := range n {
		s := svc(fmt.Sprintf("ns-%d", i%100), fmt.Sprintf("service-%d", i), "expose", "true")
		bulk(s.GetAnnotations())
		services = append(services, s)
		slices = append(slices, tenOf(i, 0))
	}
	return services, slices
}

func bulk(notes map[string]string) {
	notes["kubectl.kubernetes.io/last-applied-configuration"] = string(make([]byte, 1500))
}

func tenOf(i, change int) *discoveryv1.EndpointSlice {
	s := eps(fmt.Sprintf("ns-%d", i%100), fmt.Sprintf("service-%d", i), fmt.Sprintf("service-%d-abcde", i))
	for j := range 10 {
		s.Endpoints = append(s.Endpoints, ep(fmt.Sprintf("10.%d.%d.%d", i>>8, i&255, 1+j+change), on(fmt.Sprintf("node-%d", j)), hint("zone-a"), func(e *discoveryv1.Endpoint) {
			e.TargetRef = &corev1.ObjectReference{Kind: "Pod", Namespace: s.Namespace, Name: fmt.Sprintf("service-%d-5d4f6c7b8-%05d", i, j), UID: types.UID(fmt.Sprintf("%08d-1111-2222-3333-%012d", i, j))}
		}))
	}
	return s
}

func heap() uint64 {
	var m runtime.MemStats
	runtime.GC()
	runtime.GC()
	runtime.ReadMemStats(&m)
	return m.HeapAlloc
}

// What 10,000 services with 100,000 endpoints take, and how long it is from the
// change of one EndpointSlice to the Update, and to the registry's table.
func BenchmarkDiscovery(b *testing.B) {
	const n = 10_000
	before := heap()
	services, slices := world(n)
	objects := heap()
	r, stores := fresh(&Source{})
	begin := time.Now()
	stores["services"].replace(services)
	stores["endpointslices"].replace(slices)
	first := known(r)
	r.modified = false
	took := time.Since(begin)
	services, slices = nil, nil // what they point to is garbage but for what was kept
	kept := heap()
	table, err := registry.Mesh{}.Merge(first)
	if err != nil || table.Len() != n {
		b.Fatalf("%d services, %v", table.Len(), err)
	}
	b.ResetTimer()
	for i := range b.N {
		stores["endpointslices"].add(tenOf(i%n, 1+i%2))
		_, modified, _ := r.settle()
		if s := r.take(); !modified || len(s.Services) != n {
			b.Fatal("no update")
		}
	}
	b.ReportMetric(float64(objects-before)/1e6, "MB-of-API-objects")
	b.ReportMetric(float64(kept-before)/1e6, "MB-kept-with-the-snapshot")
	b.ReportMetric(took.Seconds()*1000, "ms-at-start")
	runtime.KeepAlive(stores)
	runtime.KeepAlive(first)
	runtime.KeepAlive(table)
}

// The same through a Registry: from the change to the table.
func BenchmarkChangeToTable(b *testing.B) {
	const n = 10_000
	services, slices := world(n)
	r, stores := fresh(&Source{})
	r.src.init()
	stores["services"].replace(services)
	stores["endpointslices"].replace(slices)
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	changed := make(chan struct{}, 1)
	reg := &registry.Registry{OnTable: func() {
		select {
		case changed <- struct{}{}:
		default:
		}
	}}
	done := make(chan error, 1)
	go func() { done <- reg.Run(ctx, looped{r}) }()
	<-changed
	var all time.Duration
	b.ResetTimer()
	for i := range b.N {
		b.StopTimer()
		time.Sleep(2 * updateInterval) // when nothing has changed for a while
		b.StartTimer()
		begin := time.Now()
		stores["endpointslices"].add(tenOf(i%n, 1+i/n%2))
		<-changed
		all += time.Since(begin)
	}
	b.ReportMetric(all.Seconds()*1000/float64(b.N), "ms-to-the-table")
	cancel()
	<-done
}

type looped struct{ *run }

func (l looped) Run(ctx context.Context, updates chan<- registry.Update) error {
	return l.loop(ctx, updates)
}
