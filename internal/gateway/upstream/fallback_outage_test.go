package upstream

import (
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"culvert.dev/tunnel"
)

// TestGatewayUnreachable has a gateway away for six hours: requests are refused at once, with
// what was tried, trials go on, and the first one that works has requests pass again.
func TestGatewayUnreachable(t *testing.T) {
	for _, c := range []struct {
		name  string
		away  *fakeCarrier
		first time.Duration // of the request that finds it out
		trial time.Duration // of the request that starts a trial
	}{
		{"silent", &fakeCarrier{handshake: -1}, 5 * time.Second, trialWait},
		{"cannot be looked up", &fakeCarrier{refused: &tunnel.Error{Reason: tunnel.LookupError, Err: syscall.ENETUNREACH}}, 0, 0},
		{"refuses", &fakeCarrier{refused: syscall.ECONNREFUSED}, 0, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				ft := newFallbackTest(t, "connect-h3", 2)
				ft.want("a gateway that works", "connect-h3", 0)
				for _, fake := range ft.fakes {
					fake.set(c.away)
				}
				ft.want("the first request", "-", c.first)
				for _, after := range []time.Duration{time.Second, time.Minute, 6 * time.Hour} {
					time.Sleep(after)
					ft.want("a request that starts a trial", "-", c.trial)
					ft.want("a request after it", "-", 0)
				}
				_, _, err := ft.dial()
				if tunnel.ReasonOf(err) == "" || !strings.Contains(err.Error(), `"gw.test:443" is unreachable for 6h1m`) {
					t.Errorf("error %v, reason %q, want the gateway and how long it is away", err, tunnel.ReasonOf(err))
				}
				for _, fake := range ft.fakes {
					fake.set(&fakeCarrier{})
				}
				time.Sleep(trialInterval)
				ft.want("a request that finds it back", "connect-h3", 0)
				ft.want("the next one", "connect-h3", 0)
				time.Sleep(2 * probeTimeout) // in which the other trials end
			})
		})
	}
}

// TestUnreachableTrials has many requests for a gateway that is away: one trial a second.
func TestUnreachableTrials(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ft := newFallbackTest(t, "a", 2)
		for _, fake := range ft.fakes {
			fake.set(&fakeCarrier{refused: syscall.ECONNREFUSED})
		}
		ft.want("the first request", "-", 0)
		before := ft.fakes[0].begun()
		var wg sync.WaitGroup
		for range 10 {
			for range 1000 {
				wg.Go(func() {
					if _, err := ft.f.Dial(t.Context(), &tunnel.Endpoint{Host: "shop.test"}, &tunnel.Request{}); err == nil {
						t.Error("a request has passed")
					}
				})
			}
			wg.Wait()
			time.Sleep(trialInterval)
		}
		// The carriers are down, too, and are probed for that at most twice.
		if n := ft.fakes[0].begun() - before; n < 10 || n > 12 {
			t.Errorf("10000 requests in 10 s have made %d trials, want 10", n)
		}
	})
}

// TestBusyGatewayIsReachable has a gateway that completes handshakes and refuses: no outage.
func TestBusyGatewayIsReachable(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ft := newFallbackTest(t, "a", 2)
		for _, fake := range ft.fakes {
			fake.set(&fakeCarrier{answerErr: &tunnel.Error{Reason: tunnel.Overload, BehindHop: true, Err: errReset}})
		}
		ft.want("the first request", "a", 0)
		ft.want("the second one", "a", 0)
		if ft.f.outage != nil {
			t.Error("a gateway that answers is unreachable")
		}
	})
}

// TestOnlyCarrierUnreachable has a gateway with one carrier away: its outage is seen and ends as
// that of a gateway with several does. What is said behind the gateway is none.
func TestOnlyCarrierUnreachable(t *testing.T) {
	unconnected := &tunnel.Error{Reason: tunnel.DialTimeout, Unconnected: true, Err: syscall.ETIMEDOUT}
	for _, c := range []struct {
		name   string
		away   *fakeCarrier
		first  time.Duration // of the request that finds it out
		probed time.Duration // after which that is known
		trial  time.Duration // of the request that starts a trial
	}{
		{"makes no connection", &fakeCarrier{refused: unconnected}, 0, 0, 0},
		{"cannot be looked up", &fakeCarrier{refused: &tunnel.Error{Reason: tunnel.LookupError, Err: syscall.ENETUNREACH}}, 0, 0, 0},
		{"refuses handshakes", &fakeCarrier{refused: syscall.ECONNRESET}, 0, 0, 0},
		{"is silent", &fakeCarrier{handshake: -1}, 5 * time.Second, probeTimeout, trialWait},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				ft := newFallbackTest(t, "a", 1)
				ft.want("a gateway that works", "a", 0)
				ft.fakes[0].set(c.away)
				ft.want("the first request", "-", c.first)
				time.Sleep(c.probed)
				synctest.Wait()
				if s := ft.f.States(); len(s) != 1 || !s[0].Down || s[0].Err == nil {
					t.Errorf("the states are %+v, want one that is down, and why", s)
				}
				if hops := ft.f.Info().Hops; len(hops) != 1 || !strings.HasSuffix(hops[0], " (down)") {
					t.Errorf("the hops are %q, want one that is down", hops)
				}
				ft.want("a request that starts a trial", "-", c.trial)
				before := ft.fakes[0].begun()
				for range 1000 {
					ft.want("a request after it", "-", 0)
				}
				if n := ft.fakes[0].begun() - before; n > 1 {
					t.Errorf("1000 requests have made %d handshakes, want none but a trial", n)
				}
				ft.fakes[0].set(&fakeCarrier{})
				time.Sleep(trialInterval)
				ft.want("a request that finds it back", "a", 0)
				if s := ft.f.States(); s[0].Down {
					t.Errorf("the states are %+v, want one that is up", s)
				}
				time.Sleep(2 * probeTimeout)
			})
		})
	}
	for name, behind := range map[string]*fakeCarrier{
		"the gateway refuses":         {answerErr: tunnel.HopRefusedf(tunnel.DialFailed, "502")},
		"the service does not answer": {answer: -1},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				ft := newFallbackTest(t, "a", 1)
				ft.fakes[0].set(behind)
				for range 3 {
					if by, _, err := ft.dial(); by != "a" || err == nil {
						t.Errorf("the request went by %s with error %v, want by a, with one", by, err)
					}
					time.Sleep(time.Second)
				}
				if s := ft.f.States(); s[0].Down {
					t.Errorf("the states are %+v, want one that is up", s)
				}
			})
		})
	}
}
