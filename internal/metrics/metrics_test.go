package metrics

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/prometheus/client_golang/prometheus/testutil"

	"culvert.dev/tunnel"
)

func endpoint(addr string) tunnel.Endpoint {
	return tunnel.Endpoint{Addr: netip.MustParseAddrPort(addr)}
}

// carried is a tunnel of the named service that ended in order.
func carried(service string) *tunnel.Outcome {
	return &tunnel.Outcome{
		ID: 1, Proto: "sni", Listener: ":443", Target: "a.example.com:443", Service: service, Endpoint: "192.0.2.1:443",
		Attempts: []tunnel.Attempt{{Endpoint: endpoint("192.0.2.1:443"), Took: 3 * time.Millisecond}},
		Reason:   tunnel.Done, Waited: 2 * time.Millisecond, Dialed: 3 * time.Millisecond, Lasted: 30 * time.Second,
		BytesIn: 100, BytesOut: 2000,
	}
}

// refused is a connection that ended without a request.
func refused(r tunnel.Reason) *tunnel.Outcome {
	return &tunnel.Outcome{Proto: "sni", Listener: ":443", Reason: r, Err: errors.New("no"), Lasted: time.Second}
}

func fill(m *Metrics) {
	m.BuildInfo("v1.2.3")
	m.Observe(carried("orders"))
	m.Observe(carried("orders"))
	retried := carried("orders")
	retried.Proto, retried.Reason, retried.Lasted = "connect", tunnel.Reset, time.Hour
	retried.Attempts = []tunnel.Attempt{
		{Endpoint: endpoint("192.0.2.9:443"), Took: 3 * time.Second, Err: context.DeadlineExceeded},
		{Endpoint: endpoint("192.0.2.1:443"), Took: time.Millisecond},
	}
	m.Observe(retried)
	m.Observe(&tunnel.Outcome{
		ID: 3, Proto: "connect", Target: "b.example.com:443", Service: "stock", Waited: time.Second,
		Attempts: []tunnel.Attempt{{Endpoint: endpoint("192.0.2.7:1"), Took: time.Millisecond, Err: tunnel.Refusef(tunnel.DialFailed, "refused")}},
		Reason:   tunnel.DialFailed, Err: errors.New("refused"),
	})
	m.Observe(&tunnel.Outcome{ID: 4, Proto: "connect", Target: "evil.example.net:443", Reason: tunnel.NoRoute, Err: errors.New("no route")})
	m.Observe(refused(tunnel.BadHello))
	m.Observe(refused(tunnel.NoHello))
	m.Observe(refused(tunnel.NoHello))
}

// The names and label sets are what dashboards and alerts are built on: a
// change here is a change for operators.
func TestExposition(t *testing.T) {
	m := New()
	fill(m)
	want, err := os.Open("testdata/exposition.txt")
	if err != nil {
		t.Fatal(err)
	}
	defer want.Close()
	err = testutil.GatherAndCompare(m.registry, want,
		"culvert_requests_total", "culvert_connections_refused_total", "culvert_tunnel_bytes_total",
		"culvert_dial_failures_total", "culvert_dial_duration_seconds", "culvert_tunnel_duration_seconds", "culvert_preamble_wait_seconds")
	if err != nil {
		t.Error(err)
	}
}

func TestLint(t *testing.T) {
	m := New()
	fill(m)
	m.OpenTunnels(func() map[string]int { return map[string]int{"orders": 3} }, func() map[string]tunnel.ServiceBytes { return nil })
	m.Counter("culvert_log_lines_dropped_total", "Log lines dropped.", func() float64 { return 1 })
	problems, err := testutil.GatherAndLint(m.registry)
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range problems {
		t.Errorf("%s: %s", p.Metric, p.Text)
	}
}

// The scrape is what an operator gets, our own metrics and the runtime's.
func TestHandler(t *testing.T) {
	m := New()
	fill(m)
	m.OpenTunnels(func() map[string]int { return map[string]int{"orders": 7} }, func() map[string]tunnel.ServiceBytes { return nil })
	m.Counter("culvert_log_lines_dropped_total", "Log lines dropped.", func() float64 { return 5 })
	m.Gauges("culvert_checked", "Addresses.", "state", map[string]func() float64{"up": func() float64 { return 3 }, "down": func() float64 { return 4 }})
	m.Counters("culvert_checks_total", "Probes.", "result", map[string]func() float64{"passed": func() float64 { return 8 }, "failed": func() float64 { return 9 }})
	w := httptest.NewRecorder()
	m.Handler().ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/metrics", nil))
	if w.Code != http.StatusOK {
		t.Fatalf("status %d: %s", w.Code, w.Body)
	}
	for _, want := range []string{
		`culvert_build_info{goversion="go`, `version="v1.2.3"} 1`,
		"culvert_tunnels_open{service=\"orders\"} 7\n", "culvert_tunnels_open{service=\"\"} 0\n", `culvert_checked{state="up"} 3`, `culvert_checked{state="down"} 4`,
		`culvert_checks_total{result="passed"} 8`, `culvert_checks_total{result="failed"} 9`, "culvert_log_lines_dropped_total 5\n",
		`culvert_requests_total{proto="sni",reason="done",service="orders"} 2`,
		"go_goroutines ",
	} {
		if !strings.Contains(w.Body.String(), want) {
			t.Errorf("the scrape has no %s", want)
		}
	}
}

func TestNamesThatAreTakenPanic(t *testing.T) {
	m := New()
	defer func() {
		if recover() == nil {
			t.Error("no panic for a name that is taken")
		}
	}()
	m.Gauge("culvert_requests_total", "x", func() float64 { return 0 })
}

// What a client says never becomes a label, and what is not a known reason is
// none.
func TestLabelsAreAClosedSet(t *testing.T) {
	evil := "evil\n\x1b[31m\xff\"} 1\nfake_metric{x=\"" + strings.Repeat("A", 300)
	m := New()
	m.Observe(&tunnel.Outcome{ID: 1, Proto: "sni", Target: evil, ALPN: []string{evil}, Peer: tunnel.Peer{ID: evil}, Listener: evil,
		Endpoint: evil, Pattern: evil, Reason: tunnel.NoRoute, Err: errors.New(evil)})
	m.Observe(&tunnel.Outcome{ID: 2, Proto: "sni", Reason: tunnel.Reason(evil)})
	m.Observe(&tunnel.Outcome{Proto: evil, Reason: tunnel.Reason(evil)})
	m.Observe(&tunnel.Outcome{ID: 3, Proto: "sni", Reason: tunnel.DialFailed, Attempts: []tunnel.Attempt{{Err: &tunnel.Error{Reason: tunnel.Reason(evil), Err: io.EOF}}}})
	text := scrape(t, m)
	if strings.Contains(text, "evil") || strings.Contains(text, "fake") {
		t.Errorf("a client's text is in the scrape:\n%s", text)
	}
	for _, want := range []string{
		`culvert_requests_total{proto="sni",reason="",service=""} 1`,
		`culvert_connections_refused_total{reason=""} 1`,
		`culvert_dial_failures_total{reason="",service=""} 1`,
	} {
		if !strings.Contains(text, want) {
			t.Errorf("the scrape has no %s:\n%s", want, text)
		}
	}

	// A service or protocol with such a name comes from our own side; it is
	// escaped and clipped, and must not panic.
	m.Observe(carried(evil))
	m.Observe(&tunnel.Outcome{ID: 2, Proto: evil, Reason: tunnel.NoRoute})
	m.BuildInfo(evil)
	text = scrape(t, m)
	if strings.Contains(text, "\nfake_metric") || !utf8.ValidString(text) || strings.Contains(text, strings.Repeat("A", 254)) {
		t.Errorf("a label value is not escaped or not clipped:\n%s", text)
	}
}

func scrape(t *testing.T, m *Metrics) string {
	t.Helper()
	w := httptest.NewRecorder()
	m.Handler().ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/metrics", nil))
	if w.Code != http.StatusOK {
		t.Fatalf("status %d: %s", w.Code, w.Body)
	}
	var ours []string
	for line := range strings.Lines(w.Body.String()) {
		if !strings.HasPrefix(line, "go_") && !strings.HasPrefix(line, "process_") && !strings.HasPrefix(line, "#") {
			ours = append(ours, line)
		}
	}
	return strings.Join(ours, "")
}

func TestServicesAreCapped(t *testing.T) {
	m := New()
	for i := range MaxServices {
		m.Observe(carried(fmt.Sprintf("s%d", i)))
	}
	m.Observe(&tunnel.Outcome{ID: 1, Proto: "sni", Reason: tunnel.NoRoute}) // "" is not one of them
	if got := testutil.ToFloat64(m.requests.WithLabelValues("sni", "s9999", "done")); got != 1 {
		t.Errorf("at the cap: requests of the last service = %v, want 1", got)
	}
	series := testutil.CollectAndCount(&m.open, "culvert_tunnel_bytes_total")
	for i := range 50 {
		m.Observe(carried(fmt.Sprintf("late%d", i)))
	}
	m.Observe(carried("s9999"))
	if got := testutil.ToFloat64(m.requests.WithLabelValues("sni", otherName, "done")); got != 50 {
		t.Errorf("over the cap: requests of %q = %v, want 50", otherName, got)
	}
	if got := testutil.ToFloat64(m.requests.WithLabelValues("sni", "s9999", "done")); got != 2 {
		t.Errorf("over the cap: requests of a known service = %v, want 2", got)
	}
	if got := testutil.CollectAndCount(&m.open, "culvert_tunnel_bytes_total"); got != series+2 {
		t.Errorf("over the cap: %d series of bytes, want %d: in and out of %q", got, series+2, otherName)
	}
	if n := len(m.children.services); n != MaxServices+2 {
		t.Errorf("over the cap: %d services are remembered, want %d", n, MaxServices+2)
	}

	// The table shrinks, and there is room again.
	m.Forget(func(s string) bool { return s == "s7" })
	m.Observe(carried("fresh"))
	text := scrape(t, m)
	for _, want := range []string{`service="s7"`, `service="fresh"`, `service="other"`, `service=""`} {
		if !strings.Contains(text, want) {
			t.Errorf("after Forget there is no %s", want)
		}
	}
	if strings.Contains(text, `service="s8"`) {
		t.Error("after Forget there is still a series of a service that went")
	}
}

// Dials for which the host has no port are told apart from those that an endpoint
// refuses.
func TestDialsWithoutAPort(t *testing.T) {
	m := New()
	refused := &tunnel.Error{Reason: tunnel.DialFailed, Err: os.NewSyscallError("connect", syscall.ECONNREFUSED)}
	portless := &tunnel.Error{Reason: tunnel.Overload, Err: fmt.Errorf("dial: %w", os.NewSyscallError("connect", syscall.EADDRNOTAVAIL))}
	m.Observe(&tunnel.Outcome{ID: 1, Proto: "sni", Reason: tunnel.Overload, Attempts: []tunnel.Attempt{{Err: refused}, {Err: portless}, {Err: portless}}})
	if text := scrape(t, m); !strings.Contains(text, "culvert_dials_without_port_total 2\n") {
		t.Errorf("want two of three dials counted:\n%s", text)
	}
}

func TestForgetDropsFailedDials(t *testing.T) {
	m := New()
	fill(m)
	m.Forget(func(s string) bool { return s == "orders" })
	text := scrape(t, m)
	if strings.Contains(text, "stock") || !strings.Contains(text, `culvert_dial_failures_total{reason="dial-timeout",service="orders"} 1`) {
		t.Errorf("want orders kept and stock gone:\n%s", text)
	}
	fill(m)
	if !strings.Contains(scrape(t, m), `culvert_dial_failures_total{reason="dial-failed",service="stock"} 1`) {
		t.Error("a forgotten service that comes back does not count from zero")
	}
}

func TestProtocolsAreCapped(t *testing.T) {
	m := New()
	for i := range maxProtos + 10 {
		m.Observe(&tunnel.Outcome{ID: 1, Proto: fmt.Sprintf("p%d", i), Reason: tunnel.NoRoute})
	}
	if got := testutil.CollectAndCount(m.requests); got != maxProtos+1 {
		t.Errorf("%d series, want %d and one for the rest", got, maxProtos)
	}
	if got := testutil.ToFloat64(m.requests.WithLabelValues("", "", "no-route")); got != 10 {
		t.Errorf("requests of other protocols = %v, want 10", got)
	}
}

// Observe, Forget and a scrape at once: for the race detector.
func TestAtOnce(t *testing.T) {
	m := New()
	var wg sync.WaitGroup
	for i := range 4 {
		wg.Go(func() {
			for j := range 200 {
				m.Observe(carried(fmt.Sprintf("s%d", (i*j)%17)))
				m.Observe(refused(tunnel.BadPreamble))
			}
		})
	}
	wg.Go(func() {
		for range 20 {
			m.Forget(func(s string) bool { return s != "s3" })
			_ = testutil.CollectAndCount(m.requests)
		}
	})
	wg.Wait()
	if got := testutil.ToFloat64(m.refused.WithLabelValues("bad-preamble")); got != 800 {
		t.Errorf("refused = %v, want 800", got)
	}
}

func TestObserveAllocates(t *testing.T) {
	m := New()
	o := carried("orders")
	m.Observe(o)
	if got := testing.AllocsPerRun(100, func() { m.Observe(o) }); got > 0 {
		t.Errorf("Observe allocates %v times for a known service, want 0", got)
	}
	r := refused(tunnel.BadHello)
	if got := testing.AllocsPerRun(100, func() { m.Observe(r) }); got > 1 {
		t.Errorf("Observe allocates %v times for a refused connection, want at most 1", got)
	}
}

func BenchmarkObserve(b *testing.B) {
	m := New()
	o := carried("orders")
	b.ReportAllocs()
	for b.Loop() {
		m.Observe(o)
	}
}

func BenchmarkObserveRefused(b *testing.B) {
	m := New()
	o := refused(tunnel.BadHello)
	b.ReportAllocs()
	for b.Loop() {
		m.Observe(o)
	}
}

func BenchmarkObserveParallel(b *testing.B) {
	m := New()
	b.ReportAllocs()
	b.RunParallel(func(pb *testing.PB) {
		o := carried("orders")
		for pb.Next() {
			m.Observe(o)
		}
	})
}

// Decisions are counted by policy, of which there are a bounded number.
func TestPolicyDecisions(t *testing.T) {
	m := New()
	o := carried("orders")
	o.Policy = &tunnel.PolicyDecision{Allowed: true, Policy: "db", DryRun: &tunnel.PolicyDecision{Policy: "planned"}}
	m.Observe(o)
	m.Observe(o)
	for _, want := range []struct {
		policy, action, dryRun string
		n                      float64
	}{{"db", "allow", "false", 2}, {"planned", "deny", "true", 2}, {"planned", "deny", "false", 0}} {
		if got := testutil.ToFloat64(m.policies.WithLabelValues(want.policy, want.action, want.dryRun)); got != want.n {
			t.Errorf("%+v: got %v", want, got)
		}
	}
	for i := range 2 * maxPolicies {
		o.Policy = &tunnel.PolicyDecision{Policy: fmt.Sprint("p", i)}
		m.Observe(o)
	}
	if got := testutil.CollectAndCount(m.policies); got > maxPolicies+10 {
		t.Errorf("got %d time series, want about %d at most", got, maxPolicies)
	}
	if got := testutil.ToFloat64(m.policies.WithLabelValues(otherName, "deny", "false")); got != maxPolicies+2 {
		t.Errorf("got %v decisions of other policies, want %d", got, maxPolicies+2)
	}
}
