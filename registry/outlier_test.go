package registry

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"culvert.dev/tunnel"
)

// watched returns endpoints of one service whose failures are counted by rules.
func watched(rules OutlierEjection, n int) (of *outliers, eps []tunnel.Endpoint) {
	of = &outliers{}
	of.use("svc", &rules)
	of.events.Store(&ejectionEvents{})
	for i := range n {
		o := &outlier{of: of, addr: fmt.Sprint(i)}
		eps = append(eps, tunnel.Endpoint{Addr: netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 0, 0, byte(i)}), 443), Load: &tunnel.EndpointLoad{Watcher: o}})
	}
	return of, eps
}

// leftOut returns the indices of the endpoints that are left out now.
func leftOut(eps []tunnel.Endpoint) (out []int) {
	eachEjected(eps, func(i int) { out = append(out, i) })
	slices.Sort(out)
	return out
}

var errTest = errors.New("reset")

func TestOutlierEjection(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		of, eps := watched(OutlierEjection{ConsecutiveFailures: 3, EjectionTime: 10 * time.Second}, 4)
		one := outlierOf(&eps[1])
		want := func(when string, out ...int) {
			t.Helper()
			if got := leftOut(eps); !slices.Equal(got, out) {
				t.Errorf("%s: left out are %v, want %v", when, got, out)
			}
		}
		fail := func(n int) {
			for range n {
				one.Unanswered(errTest)
			}
		}
		fail(2)
		one.Answered()
		fail(2)
		want("after two failures, an answer and two failures")
		fail(1)
		want("after three in a row", 1)
		one.Answered()
		one.reported(nil)
		fail(1)
		time.Sleep(10*time.Second - 1)
		want("until the time is over, whatever earlier tunnels do", 1)
		time.Sleep(time.Nanosecond)
		want("when it is")
		one.try(time.Now())
		want("while one request tries it", 1)
		time.Sleep(retryWindow)
		want("after a trial of which nothing was heard")
		one.try(time.Now())
		fail(1)
		want("after a trial that failed", 1)
		time.Sleep(20*time.Second - 1)
		want("for longer than the first time", 1)
		time.Sleep(time.Nanosecond)
		one.try(time.Now())
		one.Answered()
		want("after a trial that was answered")
		fail(3)
		time.Sleep(30*time.Second - 1)
		want("ejected again soon after that", 1)
		time.Sleep(time.Nanosecond)
		one.try(time.Now())
		one.reported(nil)
		time.Sleep(retryWindow)
		want("after a trial that stands")
		if n := of.out.Load(); n != 0 {
			t.Errorf("%d endpoints are out, want none", n)
		}
		time.Sleep(31 * time.Second)
		one.Answered()
		if one.trouble.Load() {
			t.Error("what was long ago is not forgotten")
		}
		fail(3)
		time.Sleep(10 * time.Second)
		want("as long as the first time, when all was well for a while")
		if e, r := of.events.Load().ejected.Load(), of.events.Load().returned.Load(); e != 4 || r != 2 {
			t.Errorf("counted %d ejections and %d returns, want 4 and 2", e, r)
		}
	})
}

// TestOutlierShare: no more endpoints are left out than the share, and those that were
// ejected first.
func TestOutlierShare(t *testing.T) {
	for _, c := range []struct{ n, percent, want int }{{1, 50, 0}, {2, 50, 1}, {3, 50, 1}, {10, 50, 5}, {10, 10, 1}, {9, 10, 0}, {1, 100, 1}, {4, 100, 4}} {
		synctest.Test(t, func(t *testing.T) {
			_, eps := watched(OutlierEjection{MaxEjectedPercent: c.percent}, c.n)
			var want []int
			for i := len(eps) - 1; i >= 0; i-- {
				for range DefaultConsecutiveFailures {
					outlierOf(&eps[i]).failed(errTest)
				}
				if len(want) < c.want {
					want = append(want, i)
				}
				time.Sleep(time.Second)
			}
			slices.Sort(want)
			if got := leftOut(eps); !slices.Equal(got, want) {
				t.Errorf("of %d endpoints with %d %%: left out are %v, want %v", c.n, c.percent, got, want)
			}
		})
	}
}

// TestOutlierProperties holds the states of many endpoints against what they may be,
// whatever happens to them in whatever order.
func TestOutlierProperties(t *testing.T) {
	for seed := range uint64(200) {
		synctest.Test(t, func(t *testing.T) {
			r := rand.New(rand.NewPCG(seed, 7))
			rules := OutlierEjection{ConsecutiveFailures: 1 + r.IntN(5), EjectionTime: time.Duration(1+r.IntN(20)) * time.Second, MaxEjectedPercent: 1 + r.IntN(100)}
			of, eps := watched(rules, 1+r.IntN(8))
			row := make([]int, len(eps))             // failures since the last answer
			ejectedAt := make([]time.Time, len(eps)) // zero while it may be used without a trial
			trials := make([]time.Time, len(eps))
			for step := range 400 {
				i := r.IntN(len(eps))
				o := outlierOf(&eps[i])
				before := o.now()
				switch r.IntN(8) {
				case 0, 1, 2:
					o.Unanswered(errTest)
					row[i]++
				case 3:
					o.Answered()
					row[i] = 0
				case 4:
					o.reported([]error{nil, errTest}[r.IntN(2)])
					row[i]++ // at most
				case 5:
					o.try(time.Now())
					if before == due {
						if now := time.Now(); now.Sub(trials[i]) < retryWindow && !ejectedAt[i].After(trials[i]) {
							t.Errorf("seed %d, step %d: a second trial of endpoint %d after %v", seed, step, i, now.Sub(trials[i]))
						}
						trials[i] = time.Now()
						if o.now() != onTrial {
							t.Errorf("seed %d, step %d: endpoint %d is due, and no trial began", seed, step, i)
						}
					}
				default:
					time.Sleep(time.Duration(r.Int64N(int64(15 * time.Second))))
				}
				after := o.now()
				switch {
				case before == inUse && after == ejected:
					if row[i] < rules.ConsecutiveFailures {
						t.Errorf("seed %d, step %d: endpoint %d was ejected after %d failures, want %d", seed, step, i, row[i], rules.ConsecutiveFailures)
					}
					ejectedAt[i] = time.Now()
				case (before == due || before == onTrial) && after == ejected:
					ejectedAt[i] = time.Now()
				case before == ejected && after != ejected && time.Since(ejectedAt[i]) < rules.EjectionTime:
					t.Errorf("seed %d, step %d: endpoint %d is back after %v, want %v", seed, step, i, time.Since(ejectedAt[i]), rules.EjectionTime)
				}
				if out := leftOut(eps); len(out) > len(eps)*rules.MaxEjectedPercent/100 {
					t.Errorf("seed %d, step %d: %d of %d are left out, limit %d %%", seed, step, len(out), len(eps), rules.MaxEjectedPercent)
				}
				n := int32(0)
				for i := range eps {
					if outlierOf(&eps[i]).now() != inUse {
						n++
					}
				}
				if got := of.out.Load(); got != n {
					t.Errorf("seed %d, step %d: %d are counted as out, and %d are", seed, step, got, n)
				}
			}
			// Whatever has happened: endpoints that answer are all back after a while.
			time.Sleep(maxEjectionFactor * rules.EjectionTime)
			for i := range eps {
				outlierOf(&eps[i]).try(time.Now())
				outlierOf(&eps[i]).Answered()
			}
			if out := leftOut(eps); len(out) > 0 || of.out.Load() != 0 {
				t.Errorf("seed %d: %v are left out, %d are out, although all answer", seed, out, of.out.Load())
			}
			time.Sleep(failureExpiry)
			for i := range eps {
				if !outlierOf(&eps[i]).forget(time.Now()) {
					t.Errorf("seed %d: endpoint %d is remembered", seed, i)
				}
			}
		})
	}
}

// now returns the state.
func (o *outlier) now() ejectionState {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.state(time.Now())
}

// TestEjectedEndpointsComeLast checks what requests see of an ejection: the endpoint is
// last until its time is over, also across changes of the table, and then one request
// tries it.
func TestEjectedEndpointsComeLast(t *testing.T) {
	for _, policy := range []string{"", RoundRobin, LeastConnections, SourceHash} {
		synctest.Test(t, func(t *testing.T) {
			r := &Registry{}
			swap := func(e *OutlierEjection) {
				s := service(t, "svc.example.com")
				s.Endpoints = nil
				for i := range 4 {
					s.Endpoints = append(s.Endpoints, Endpoint{Addr: netip.AddrFrom4([4]byte{10, 0, 0, byte(i)}), Port: 443})
				}
				s.OutlierEjection, s.LoadBalancing.Policy = e, policy
				table, err := r.Merge(Snapshot{Services: []*Service{s}})
				if err != nil {
					t.Fatal(err)
				}
				r.Swap(table)
			}
			rules := &OutlierEjection{ConsecutiveFailures: 2, EjectionTime: 10 * time.Second}
			swap(rules)
			resolve := func() []tunnel.Endpoint {
				route, err := r.Resolve(t.Context(), &tunnel.Request{Proto: "sni", Name: tunnel.MustParseName("svc.example.com"), Source: netip.MustParseAddrPort("192.0.2.7:1")})
				if err != nil || len(route.Endpoints) != 4 {
					t.Fatalf("%v, %v", route.Endpoints, err)
				}
				return route.Endpoints
			}
			bad := resolve()[0]
			places := func() (first, last int) {
				for range 12 {
					eps := resolve()
					if eps[0].Addr == bad.Addr {
						first++
					}
					if eps[3].Addr == bad.Addr {
						last++
					}
				}
				return first, last
			}
			for range 2 {
				bad.Load.Watcher.Unanswered(errTest)
			}
			if first, last := places(); first != 0 || last != 12 {
				t.Errorf("policy %q: an ejected endpoint is first %d times and last %d of 12", policy, first, last)
			}
			list := r.Ejections()
			if len(list) != 1 || list[0].Endpoint != bad.Addr.String() || list[0].Service != "svc.example.com" || list[0].State != StateEjected || list[0].Err != errTest {
				t.Errorf("ejections are %+v", list)
			}
			swap(rules) // which changes nothing
			if first, last := places(); first != 0 || last != 12 {
				t.Errorf("policy %q: after a reload an ejected endpoint is first %d times and last %d of 12", policy, first, last)
			}
			time.Sleep(10 * time.Second)
			if first, _ := places(); policy != LeastConnections && first != 1 { // nobody has connections
				t.Errorf("policy %q: %d requests of 12 try the endpoint when its time is over, want one", policy, first)
			}
			bad.Load.Watcher.Answered()
			if list := r.Ejections(); len(list) != 0 {
				t.Errorf("policy %q: ejections are %+v after an answer", policy, list)
			}
			for range 2 {
				r.health.report(bad, tunnel.Refusef(tunnel.DialFailed, "refused"))
			}
			if len(r.Ejections()) != 1 || r.Ejected() != 2 {
				t.Errorf("policy %q: after two failed dials ejections are %+v, %d in all; want one and 2", policy, r.Ejections(), r.Ejected())
			}
			r.health.report(bad, nil) // of dials alone it works again
			swap(nil)
			if first, _ := places(); len(r.Ejections()) != 0 || first == 0 && policy == "" {
				t.Errorf("policy %q: without outlierEjection ejections are %+v, and the endpoint is first %d times", policy, r.Ejections(), first)
			}
		})
	}
}
