package tunnel

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

// TestNewPerSecond checks the rate: as many as a second gives may begin at once, and the
// rest evenly.
func TestNewPerSecond(t *testing.T) {
	for _, perSecond := range []int{1, 3, 50, 1000} {
		synctest.Test(t, func(t *testing.T) {
			var loads serviceLoads
			limits := &ServiceLimits{NewPerSecond: perSecond}
			take := func() bool {
				s, err := loads.take(loadKey{route: "svc"}, limits)
				s.leave()
				return err == nil
			}
			n := 0
			for take() {
				n++
			}
			if n != perSecond {
				t.Errorf("%d of %d a second began at once", n, perSecond)
			}
			each := time.Second/time.Duration(perSecond) + time.Microsecond
			for range 3 {
				time.Sleep(each)
				if !take() || take() {
					t.Errorf("%d a second: want one more after %v, and no second one", perSecond, each)
				}
			}
			time.Sleep(time.Hour)
			n = 0
			for take() {
				n++
			}
			if n != perSecond {
				t.Errorf("after an hour %d of %d a second began at once", n, perSecond)
			}
			if err := loads.find(loadKey{route: "svc"}).check(limits); err == nil || err.Reason != Overload || !strings.Contains(err.Error(), "limits.newPerSecond") {
				t.Errorf("check says %v", err)
			}
		})
	}
}

// TestServiceLoadsLeak hammers the counts: no service ever has more than its limit, every
// connection is given back once, and services that come and go are forgotten.
func TestServiceLoadsLeak(t *testing.T) {
	const services, workers, rounds, most = 4, 8, 3000, 3
	var loads serviceLoads
	limits := &ServiceLimits{Connections: most}
	var held [services]atomic.Int64
	var refused atomic.Int64
	var wg sync.WaitGroup
	for w := range workers {
		wg.Go(func() {
			r := rand.New(rand.NewPCG(uint64(w), 1))
			for i := range rounds {
				at := r.IntN(services)
				k := loadKey{route: fmt.Sprint("svc", at)}
				if r.IntN(2) == 0 { // by a rule
					k = loadKey{route: fmt.Sprint("rule", r.IntN(2)), backend: k.route}
				}
				if r.IntN(8) == 0 { // of a service that nobody asks for again
					one, _ := loads.take(loadKey{route: fmt.Sprint("once", w, i), backend: fmt.Sprint("backend", w, i)}, nil)
					one.leave()
				}
				s, err := loads.take(k, limits)
				if err != nil {
					if ReasonOf(err) != Overload || !strings.Contains(err.Error(), fmt.Sprintf("service svc%d: limits.connections: 3 ", at)) {
						t.Errorf("refused with %v", err)
					}
					refused.Add(1)
					continue
				}
				if n := held[at].Add(1); n > most {
					t.Errorf("service %d has %d connections, limit %d", at, n, most)
				}
				if r.IntN(2) == 0 {
					loads.opened(s)
					loads.closed(s)
				}
				held[at].Add(-1)
				s.leave()
			}
		})
	}
	wg.Wait()
	for k, s := range loads.loads {
		if n := s.connections.Load(); n != 0 {
			t.Errorf("%v has %d connections at the end, want none", k, n)
		}
		if n := s.open.Load(); n != 0 {
			t.Errorf("%v has %d open tunnels at the end, want none", k, n)
		}
	}
	loads.forget()
	if n := len(loads.loads); n != 0 {
		t.Errorf("%d services are remembered, want none", n)
	}
	if loads.all.Load() != 0 {
		t.Errorf("%d tunnels are open", loads.all.Load())
	}
}

// TestServicesAreForgotten checks that the memory for services is bounded by those in use.
func TestServicesAreForgotten(t *testing.T) {
	var loads serviceLoads
	stays, err := loads.take(loadKey{"rule", "backend"}, nil)
	if err != nil {
		t.Fatal(err)
	}
	for i := range 20 * minLoads {
		s, err := loads.take(loadKey{route: fmt.Sprint(i)}, nil)
		if err != nil {
			t.Fatal(err)
		}
		s.leave()
		if n := len(loads.loads); n > minLoads {
			t.Fatalf("%d services are remembered, want %d at most", n, minLoads)
		}
	}
	again, err := loads.take(loadKey{"rule", "backend"}, &ServiceLimits{Connections: 1})
	if ReasonOf(err) != Overload {
		t.Errorf("a connection was forgotten: a second one of one is %v, %v", again, err)
	}
	stays.leave()
	if s, err := loads.take(loadKey{route: "backend"}, &ServiceLimits{Connections: 1}); err != nil {
		t.Errorf("after the end of the only one: %v", err)
	} else {
		s.leave()
	}
}

func BenchmarkServiceLoad(b *testing.B) {
	for name, limits := range map[string]*ServiceLimits{"none": nil, "connections": {Connections: 1000}, "both": {Connections: 1000, NewPerSecond: 1_000_000_000}} {
		b.Run(name, func(b *testing.B) {
			var loads serviceLoads
			k := loadKey{route: "orders.example.com"}
			b.ReportAllocs()
			for b.Loop() {
				s, err := loads.take(k, limits)
				if err != nil {
					b.Fatal(err)
				}
				loads.opened(s)
				loads.closed(s)
				s.leave()
			}
		})
	}
}
