package upstream

import (
	"bufio"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"culvert.dev/connect"
	"culvert.dev/connect/socks5"
	"culvert.dev/registry"
	"culvert.dev/tunnel"
)

// A fakeCarrier is a transport whose handshake and answer come after a time.
type fakeCarrier struct {
	mu        sync.Mutex
	handshake time.Duration // negative for never
	refused   error         // of the handshake, after that time
	answer    time.Duration // negative for never
	answerErr error
	stale     bool // it keeps a connection by which no answer comes, so that only a probe makes handshakes

	handshakes, requests int
}

func (f *fakeCarrier) Check(*tunnel.Endpoint) error { return nil }
func (f *fakeCarrier) Info() tunnel.TransportInfo   { return tunnel.TransportInfo{} }

// wait waits for d, or until ctx ends.
func wait(ctx context.Context, d time.Duration) error {
	if d < 0 {
		<-ctx.Done()
		return ctx.Err()
	}
	select {
	case <-time.After(d):
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (f *fakeCarrier) Dial(ctx context.Context, _ *tunnel.Endpoint, _ *tunnel.Request) (net.Conn, error) {
	return f.dial(ctx, false)
}

// probe is a fallbackCarrier's.
func (f *fakeCarrier) probe(ctx context.Context) error {
	return handshake(ctx, freshCarrier{f}, &probeEndpoint)
}

// A freshCarrier has no connection yet.
type freshCarrier struct{ *fakeCarrier }

func (f freshCarrier) Dial(ctx context.Context, _ *tunnel.Endpoint, _ *tunnel.Request) (net.Conn, error) {
	return f.dial(ctx, true)
}

func (f *fakeCarrier) dial(ctx context.Context, fresh bool) (net.Conn, error) {
	f.mu.Lock()
	handshake, refused, answer, answerErr := f.handshake, f.refused, f.answer, f.answerErr
	if f.stale && !fresh {
		handshake, refused, answer = 0, nil, -1
	} else {
		f.handshakes++
	}
	f.mu.Unlock()
	if err := wait(ctx, handshake); err != nil {
		return nil, err
	}
	if refused != nil {
		return nil, tunnel.Refusef(tunnel.DialFailed, "fake: %w", refused)
	}
	if err := tunnel.HandshakeDone(ctx); err != nil {
		return nil, err
	}
	f.mu.Lock()
	f.requests++
	f.mu.Unlock()
	if err := wait(ctx, answer); err != nil {
		return nil, err
	}
	if answerErr != nil {
		return nil, answerErr
	}
	return openConn{}, nil
}

// An openConn can be closed, and nothing else.
type openConn struct{ net.Conn }

func (openConn) Close() error { return nil }

// counts returns how many handshakes it has begun, and how many requests it has sent.
func (f *fakeCarrier) counts() (handshakes, requests int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.handshakes, f.requests
}

// begun is the first of counts.
func (f *fakeCarrier) begun() int { n, _ := f.counts(); return n }

// sent is the second of counts.
func (f *fakeCarrier) sent() int { _, n := f.counts(); return n }

// set changes what the carrier does from now on.
func (f *fakeCarrier) set(to *fakeCarrier) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.handshake, f.refused, f.answer, f.answerErr, f.stale = to.handshake, to.refused, to.answer, to.answerErr, to.stale
}

// A fallbackTest dials by fake carriers that are called a, b and so on, or connect-h3
// where it is the first.
type fallbackTest struct {
	*testing.T
	f     *FallbackDialer
	fakes []*fakeCarrier
}

func newFallbackTest(t *testing.T, first string, n int) *fallbackTest {
	ft := &fallbackTest{T: t}
	var carriers []fallbackCarrier
	for i := range n {
		name := string(rune('a' + i))
		if i == 0 {
			name = first
		}
		ft.fakes = append(ft.fakes, &fakeCarrier{})
		carriers = append(carriers, fallbackCarrier{Transport: ft.fakes[i], name: name, probe: ft.fakes[i].probe})
	}
	ft.f = newFallbackDialer("gw.test:443", carriers...)
	t.Cleanup(func() { _ = ft.f.probes.Close() })
	return ft
}

// dial returns the carriers that a request was sent by, "-" for none, and how long the
// dial took.
func (ft *fallbackTest) dial() (by string, took time.Duration, err error) {
	ft.Helper()
	ctx, cancel := context.WithTimeout(ft.Context(), 5*time.Second)
	defer cancel()
	before := make([]int, len(ft.fakes))
	for i, fake := range ft.fakes {
		before[i] = fake.sent()
	}
	begin := time.Now()
	_, err = ft.f.Dial(ctx, &tunnel.Endpoint{Host: "shop.test"}, &tunnel.Request{})
	took = time.Since(begin)
	synctest.Wait()
	var sent []string
	for i, fake := range ft.fakes {
		for range fake.sent() - before[i] {
			sent = append(sent, ft.f.carriers[i].name)
		}
	}
	return cmp.Or(strings.Join(sent, " "), "-"), took, err
}

// want dials and compares.
func (ft *fallbackTest) want(what, by string, took time.Duration) {
	ft.Helper()
	got, lasted, err := ft.dial()
	if got != by || lasted != took || err == nil && by == "-" {
		ft.Errorf("%s: the request went by %s in %v, error %v, want by %s in %v", what, got, lasted, err, by, took)
	}
}

// down returns the names of the carriers that are down.
func (ft *fallbackTest) down() string {
	var names []string
	for _, s := range ft.f.States() {
		if s.Down {
			names = append(names, s.Carrier)
		}
	}
	return strings.Join(names, " ")
}

func (ft *fallbackTest) wantDown(what, want string) {
	ft.Helper()
	if got := ft.down(); got != want {
		ft.Errorf("%s: down are %q, want %q", what, got, want)
	}
}

const ms = time.Millisecond

var errReset = fmt.Errorf("read: %w", syscall.ECONNRESET)

// The first carrier that is ready sends the request, alone.
func TestFallbackRace(t *testing.T) {
	hangs := &fakeCarrier{handshake: -1}
	resets := &fakeCarrier{handshake: 5 * ms, refused: errReset}
	after := func(d time.Duration) *fakeCarrier { return &fakeCarrier{handshake: d} }
	for name, row := range map[string]struct {
		fakes   []*fakeCarrier
		by      string
		took    time.Duration
		started int
	}{
		"the first":                         {[]*fakeCarrier{after(299 * ms), after(0)}, "a", 299 * ms, 1},
		"the first hangs":                   {[]*fakeCarrier{hangs, after(10 * ms)}, "b", 310 * ms, 2},
		"two hang":                          {[]*fakeCarrier{hangs, hangs, after(10 * ms)}, "c", 610 * ms, 3},
		"the first is late, the second too": {[]*fakeCarrier{after(400 * ms), after(200 * ms)}, "a", 400 * ms, 2},
		"the first is reset":                {[]*fakeCarrier{resets, after(10 * ms)}, "b", 15 * ms, 2},
		"both are ready at once":            {[]*fakeCarrier{after(350 * ms), after(0)}, "b", 300 * ms, 2},
		"all fail":                          {[]*fakeCarrier{resets, resets}, "-", 10 * ms, 2},
		"all hang":                          {[]*fakeCarrier{hangs, hangs}, "-", 5 * time.Second, 2},
		"a slow answer starts no other":     {[]*fakeCarrier{{answer: 900 * ms}, after(0)}, "a", 900 * ms, 1},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				ft := newFallbackTest(t, "a", len(row.fakes))
				for i, fake := range row.fakes {
					ft.fakes[i].set(fake)
				}
				ft.want(name, row.by, row.took)
				started := 0
				for _, fake := range ft.fakes {
					started += fake.begun()
				}
				if started != row.started {
					t.Errorf("%d carriers were started, want %d", started, row.started)
				}
			})
		})
	}
}

// One failure is no reason to prefer another carrier, and two within ten seconds are.
func TestFallbackSwitches(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ft := newFallbackTest(t, "a", 2)
		ft.fakes[0].set(&fakeCarrier{handshake: 5 * ms, refused: errReset})
		ft.want("the first failure", "b", 5*ms)
		ft.wantDown("after one failure", "")
		time.Sleep(failureWindow + time.Second)
		ft.want("a failure much later", "b", 5*ms)
		ft.wantDown("after two failures far apart", "")
		time.Sleep(time.Second)
		ft.want("a second failure", "b", 5*ms)
		ft.wantDown("after two failures", "a")
		ft.want("the next", "b", 0)
	})
}

// Many dials that fail by one event count once.
func TestFallbackCountsEventsOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ft := newFallbackTest(t, "a", 2)
		ft.fakes[0].set(&fakeCarrier{handshake: 5 * ms, refused: errReset})
		var wg sync.WaitGroup
		for i := range 10 {
			wg.Go(func() {
				time.Sleep(time.Duration(i) * ms / 10)
				_, _ = ft.f.Dial(t.Context(), &tunnel.Endpoint{}, &tunnel.Request{})
			})
		}
		wg.Wait()
		ft.wantDown("after ten dials at once", "")
	})
}

// What a request says of the carrier that sent it. It is sent again only where the gateway
// has not answered.
func TestFallbackAnswers(t *testing.T) {
	for name, row := range map[string]struct {
		fake     *fakeCarrier
		times    int
		by, down string
	}{
		"a request that is reset":          {&fakeCarrier{answerErr: errReset}, 1, "a b", ""},
		"two that are reset":               {&fakeCarrier{answerErr: errReset}, 2, "a b", "a"},
		"final refusals":                   {&fakeCarrier{answerErr: tunnel.HopRefusedf(tunnel.Denied, "denied")}, 3, "a", ""},
		"endpoints that are down":          {&fakeCarrier{answerErr: tunnel.HopRefusedf(tunnel.DialFailed, "no endpoint answers")}, 3, "a", ""},
		"the carrier's credentials":        {&fakeCarrier{answerErr: tunnel.HopRefusedf(tunnel.NoAuth, "who are you")}, 1, "a", "a"},
		"a carrier that is not spoken":     {&fakeCarrier{answerErr: tunnel.HopRefusedf(tunnel.BadMethod, "CONNECT only")}, 1, "a b", "a"},
		"this gateway's guard":             {&fakeCarrier{answerErr: tunnel.Refusef(tunnel.Prohibited, "prohibited")}, 3, "a", ""},
		"this gateway's lack of resources": {&fakeCarrier{answerErr: tunnel.Refusef(tunnel.Overload, "full")}, 3, "a", ""},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				ft := newFallbackTest(t, "a", 2)
				ft.fakes[0].set(row.fake)
				final := row.by == "a"
				for range row.times {
					if by, _, err := ft.dial(); by != row.by || final != errors.Is(err, row.fake.answerErr) {
						t.Errorf("the request went by %s, error %v, want by %s, error %v: %v", by, err, row.by, row.fake.answerErr, final)
					}
					time.Sleep(time.Second)
				}
				if final && ft.fakes[1].begun() != 0 {
					t.Error("the other carrier was dialed")
				}
				ft.wantDown("afterwards", row.down)
			})
		})
	}
}

// A request that is not answered goes by another carrier where its own no longer makes
// handshakes and another one does. A gateway that takes its time is waited for.
func TestFallbackSilence(t *testing.T) {
	never := time.Duration(-1)
	for name, row := range map[string]struct {
		first string
		fakes []*fakeCarrier
		by    string
		took  time.Duration
		down  string
	}{
		"UDP no longer arrives":      {"connect-h3", []*fakeCarrier{{stale: true, handshake: never}, {handshake: 10 * ms}}, "connect-h3 b", 1320 * ms, "connect-h3"},
		"TCP no longer arrives":      {"a", []*fakeCarrier{{stale: true, handshake: never}, {handshake: 10 * ms}}, "a b", 1320 * ms, ""},
		"it is reset":                {"a", []*fakeCarrier{{stale: true, handshake: 5 * ms, refused: errReset}, {handshake: 10 * ms}}, "a b", 1020 * ms, ""},
		"it is reset late":           {"a", []*fakeCarrier{{stale: true, handshake: 50 * ms, refused: errReset}, {handshake: 10 * ms}}, "a b", 1060 * ms, ""},
		"only the last is left":      {"connect-h3", []*fakeCarrier{{stale: true, handshake: never}, {handshake: ms, refused: errReset}, {handshake: 10 * ms}}, "connect-h3 c", 1321 * ms, "connect-h3"},
		"a slow one is left":         {"a", []*fakeCarrier{{handshake: 400 * ms}, {stale: true, handshake: never}}, "a b", 2400 * ms, ""},
		"the slow one is the last":   {"a", []*fakeCarrier{{handshake: 400 * ms}, {stale: true, handshake: never}, {handshake: ms, refused: errReset}}, "a b", 2401 * ms, ""},
		"the gateway takes its time": {"a", []*fakeCarrier{{handshake: 20 * ms, answer: 3 * time.Second}, {}}, "a", 3020 * ms, ""},
		"so it does on a long way":   {"a", []*fakeCarrier{{handshake: 250 * ms, answer: 3 * time.Second}, {handshake: 10 * ms}}, "a", 3250 * ms, ""},
		"it answers meanwhile":       {"a", []*fakeCarrier{{answer: 1200 * ms}, {}}, "a", 1200 * ms, ""},
		"no carrier is left":         {"a", []*fakeCarrier{{stale: true, handshake: never}, {handshake: never}}, "a", 5 * time.Second, ""},
		"all others are reset":       {"a", []*fakeCarrier{{stale: true, handshake: never}, {handshake: ms, refused: errReset}}, "a", 5 * time.Second, ""},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				ft := newFallbackTest(t, row.first, len(row.fakes))
				for i, fake := range row.fakes {
					ft.fakes[i].set(fake)
				}
				ft.want(name, row.by, row.took)
				ft.wantDown(name, row.down)
			})
		})
	}
}

// A client that gives up says nothing of the carrier.
func TestFallbackCanceled(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ft := newFallbackTest(t, "a", 2)
		ft.fakes[0].set(&fakeCarrier{handshake: -1})
		for range 3 {
			ctx, cancel := context.WithCancel(t.Context())
			time.AfterFunc(100*ms, cancel)
			if _, err := ft.f.Dial(ctx, &tunnel.Endpoint{}, &tunnel.Request{}); !errors.Is(err, context.Canceled) {
				t.Errorf("got error %v, want %v", err, context.Canceled)
			}
		}
		ft.wantDown("after clients that gave up", "")
	})
}

// A refusal, and silence by UDP while TCP answers, count at once.
func TestFallbackAtOnce(t *testing.T) {
	for name, row := range map[string]struct {
		first string
		fake  *fakeCarrier
		took  time.Duration
		down  string
	}{
		"refused":       {"a", &fakeCarrier{handshake: ms, refused: syscall.ECONNREFUSED}, ms, "a"},
		"UDP is silent": {"connect-h3", &fakeCarrier{handshake: -1}, 300 * ms, "connect-h3"},
		"TCP is silent": {"a", &fakeCarrier{handshake: -1}, 300 * ms, ""},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				ft := newFallbackTest(t, row.first, 2)
				ft.fakes[0].set(row.fake)
				ft.want(name, "b", row.took)
				ft.wantDown(name, row.down)
			})
		})
	}
}

// A carrier that is down is probed after ten seconds, and then ever less often. The
// probes send no request. One that succeeds brings the carrier back.
func TestFallbackProbes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ft := newFallbackTest(t, "a", 2)
		refuses := &fakeCarrier{refused: syscall.ECONNREFUSED}
		ft.fakes[0].set(refuses)
		ft.want("the refusal", "b", 0)
		begin, seen := time.Now(), ft.fakes[0].begun()
		var at []string
		for time.Since(begin) < 40*time.Minute {
			time.Sleep(time.Second)
			ft.want("while a is down", "b", 0)
			if n := ft.fakes[0].begun(); n != seen {
				if n != seen+1 {
					t.Fatalf("%d probes at once, want 1", n-seen)
				}
				seen = n
				at = append(at, time.Since(begin).String())
			}
		}
		if got, want := strings.Join(at, " "), "10s 30s 1m10s 2m30s 5m10s 10m30s 20m30s 30m30s"; got != want {
			t.Errorf("probes at %s, want %s", got, want)
		}
		ft.fakes[0].set(&fakeCarrier{})
		time.Sleep(maxRetryInterval)
		ft.want("after the probe", "a", 0)
		if n := ft.fakes[0].sent(); n != 1 {
			t.Errorf("%d requests by a, want 1: a probe sends none", n)
		}

		// It is down again soon, and so it is probed as rarely as before.
		ft.fakes[0].set(refuses)
		ft.want("the second refusal", "b", 0)
		if s := ft.f.States()[0]; !s.Down || time.Until(s.RetryAt) != maxRetryInterval || !errors.Is(s.Err, syscall.ECONNREFUSED) {
			t.Errorf("the state is %+v, want down and a probe in %v", s, maxRetryInterval)
		}
	})
}

// A carrier is probed though nobody asks for anything, and by new connections alone: one
// that it has kept says nothing.
func TestFallbackProbesByItself(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ft := newFallbackTest(t, "a", 2)
		ft.fakes[0].set(&fakeCarrier{refused: syscall.ECONNREFUSED})
		ft.want("the refusal", "b", 0)
		ft.fakes[0].set(&fakeCarrier{stale: true, refused: syscall.ECONNREFUSED})
		time.Sleep(minRetryInterval + time.Second)
		ft.wantDown("after a probe that failed", "a")
		ft.fakes[0].set(&fakeCarrier{})
		time.Sleep(2 * minRetryInterval)
		ft.wantDown("after a probe that succeeded", "")
	})
}

// A FallbackDialer that is not used any more makes no more probes.
func TestFallbackIsForgotten(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		fake := &fakeCarrier{refused: syscall.ECONNREFUSED}
		func() {
			f := newFallbackDialer("gw.test:443", fallbackCarrier{Transport: fake, name: "a", probe: fake.probe})
			if _, err := f.Dial(t.Context(), &tunnel.Endpoint{}, &tunnel.Request{}); err == nil {
				t.Fatal("a carrier that refuses has dialed")
			}
		}()
		synctest.Wait()
		runtime.GC()
		time.Sleep(time.Hour)
		if fake.begun() != 2 {
			t.Errorf("%d handshakes, want the dial's, and that of the probe which finds out whether the gateway is away", fake.begun())
		}
	})
}

// A probe makes a connection of its own, beside those that carriers keep.
func TestProbeHasItsOwnConnection(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var serving sync.WaitGroup
	var accepted atomic.Int32
	serving.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			accepted.Add(1)
			serving.Go(func() {
				defer c.Close()
				_, _ = c.Write([]byte("\x00\x00\x00\x04\x00\x00\x00\x00\x00")) // SETTINGS, RFC 9113 section 6.5
				_, _ = io.Copy(io.Discard, c)
			})
		}
	})
	defer serving.Wait()
	defer l.Close()
	up := &Transports{Direct: &tunnel.NetDialer{}}
	defer up.Close()
	hop := registry.Hop{Proto: "connect-h2", Addresses: []string{l.Addr().String()}}
	kept, err := up.NextHop([]registry.Hop{hop})
	if err != nil {
		t.Fatal(err)
	}
	for i, want := range []int32{1, 1, 2, 3} {
		err := error(nil)
		if i < 2 {
			err = handshake(t.Context(), kept, &probeEndpoint)
		} else {
			err = up.prober(hop)(t.Context())
		}
		if got := accepted.Load(); err != nil || got != want {
			t.Errorf("handshake %d: %d connections, error %v, want %d", i, got, err, want)
		}
	}
}

// A probe that fails says nothing of the carriers in use, and one that hangs ends.
func TestFallbackProbeHangs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ft := newFallbackTest(t, "connect-h3", 2)
		ft.fakes[0].set(&fakeCarrier{handshake: -1})
		ft.want("silence", "b", 300*ms)
		time.Sleep(minRetryInterval)
		for range 5 {
			ft.want("while a probe runs", "b", 0)
			time.Sleep(time.Second)
		}
		if n := ft.fakes[0].begun(); n != 2 {
			t.Errorf("%d handshakes, want the dial's and one probe's", n)
		}
		time.Sleep(probeTimeout)
		ft.wantDown("after a probe", "connect-h3")
		if s := ft.f.States()[0]; !errors.Is(s.Err, context.DeadlineExceeded) {
			t.Errorf("the carrier is down by %v, want by %v", s.Err, context.DeadlineExceeded)
		}
	})
}

// Where all carriers are down, they are tried all the same, and the one that works is up.
func TestFallbackAllDown(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ft := newFallbackTest(t, "a", 2)
		for _, fake := range ft.fakes {
			fake.set(&fakeCarrier{refused: syscall.ECONNREFUSED})
		}
		ft.want("no carrier", "-", 0)
		ft.wantDown("after it", "a b")
		ft.fakes[1].set(&fakeCarrier{})
		ft.want("one works", "b", 0)
		ft.wantDown("after that", "a")
	})
}

// A gateway that takes TCP connections and answers the requests of HTTP/1.1 alone is
// asked by those, once, though it lists another first.
func TestFallbackOfGateway(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	var requests atomic.Int32
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				r := bufio.NewReader(c)
				req, err := http.ReadRequest(r)
				if err == nil && req.Method == http.MethodConnect {
					requests.Add(1)
					_, _ = io.WriteString(c, "HTTP/1.1 200 OK\r\n\r\n")
				}
				_, _ = io.Copy(io.Discard, r)
			}()
		}
	}()
	up := &Transports{Direct: &tunnel.NetDialer{}}
	defer up.Close()
	at := netip.MustParseAddrPort(l.Addr().String())
	ep := registry.Endpoint{Addr: at.Addr(), Port: at.Port()}
	g := &registry.Gateway{Transports: registry.HopsBy("connect-h2", "connect")}
	transport, err := up.New(&registry.Service{}, &ep, g)
	if err != nil {
		t.Fatal(err)
	}
	if again, err := up.New(&registry.Service{Name: "another"}, &ep, g); err != nil || again != transport {
		t.Errorf("another service has the transport %p, error %v, want the same, %p", again, err, transport)
	}
	if got, want := transport.Info().Hops, []string{"connect-h2 " + at.String() + " or connect " + at.String()}; !slices.Equal(got, want) {
		t.Errorf("the hops are %q, want %q", got, want)
	}
	for range 3 {
		c, err := transport.Dial(t.Context(), &tunnel.Endpoint{Host: "shop.test", Addr: netip.AddrPortFrom(netip.Addr{}, 443)}, &tunnel.Request{})
		if err != nil {
			t.Fatal(err)
		}
		_ = c.Close()
	}
	if n := requests.Load(); n != 3 {
		t.Errorf("the gateway got %d requests, want 3", n)
	}
	if states := up.States(); len(states) != 2 || states[0].Gateway != at.String() {
		t.Fatalf("the states are %+v, want those of two carriers to %s", states, at)
	}
	if s := up.States()[0]; s.Carrier != "connect-h2" || !s.Down {
		t.Errorf("the state of the first carrier is %+v, want connect-h2, down", s)
	}
}

// Carriers send nothing of the request where the end of their handshake is refused.
func TestCarriersAwaitHandshake(t *testing.T) {
	for name, row := range map[string]struct {
		dialer func(proxy string) tunnel.Dialer
		answer string // of the proxy to the handshake
		want   string // what the proxy gets
	}{
		"connect": {func(p string) tunnel.Dialer { return &connect.Dialer{Proxy: p} }, "", ""},
		"socks5":  {func(p string) tunnel.Dialer { return &socks5.Dialer{Proxy: p} }, "\x05\x00", "\x05\x01\x00"},
	} {
		t.Run(name, func(t *testing.T) {
			l, err := net.Listen("tcp", "127.0.0.1:0")
			if err != nil {
				t.Fatal(err)
			}
			defer l.Close()
			got := make(chan string, 1)
			go func() {
				c, err := l.Accept()
				if err != nil {
					got <- err.Error()
					return
				}
				defer c.Close()
				_, _ = io.WriteString(c, row.answer)
				b, _ := io.ReadAll(c)
				got <- string(b)
			}()
			ctx := tunnel.WithHandshakeDone(t.Context(), func() error { return errProbe })
			if _, err := row.dialer(l.Addr().String()).DialContext(ctx, "tcp", "shop.test:443"); !errors.Is(err, errProbe) {
				t.Errorf("got error %v, want %v", err, errProbe)
			}
			if b := <-got; b != row.want {
				t.Errorf("the proxy got %q, want %q", b, row.want)
			}
		})
	}
}
