package admin

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/netip"
	"net/url"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"culvert.dev/tunnel"
)

func refusedBy(source, target string, reason tunnel.Reason) *tunnel.Outcome {
	return &tunnel.Outcome{
		Proto: "sni", Listener: ":443", Source: netip.MustParseAddrPort(source), Target: target, Reason: reason,
		Err: fmt.Errorf("no service is called %q", target),
	}
}

// summary is a short form of what a list has.
func summary(list Refusals) string {
	var lines []string
	for _, r := range list.Refusals {
		lines = append(lines, fmt.Sprintf("%d %s %s %s %s", r.Count, r.Reason, r.Listener, r.Source, r.Target))
	}
	return strings.Join(lines, "\n")
}

func TestRefusalsAreCounted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var l RefusalLog
		begin := time.Now().UTC()
		l.Observe(refusedBy("192.0.2.7:1000", "a.example.com", tunnel.NoRoute))
		time.Sleep(time.Minute)
		l.Observe(refusedBy("192.0.2.8:1000", "a.example.com", tunnel.NoRoute))
		l.Observe(refusedBy("192.0.2.7:1001", "b.example.com", tunnel.NoRoute))
		l.Observe(refusedBy("192.0.2.7:1002", "a.example.com", tunnel.NotExposed))
		again := refusedBy("[::ffff:192.0.2.7]:1003", "a.example.com", tunnel.NoRoute)
		again.Proto, again.Service, again.Err = "connect", "a", errors.New("another error")
		l.Observe(again)
		got := l.List(&RefusalFilter{})
		const want = `2 no-route :443 192.0.2.7 a.example.com
1 not-exposed :443 192.0.2.7 a.example.com
1 no-route :443 192.0.2.7 b.example.com
1 no-route :443 192.0.2.8 a.example.com`
		if summary(got) != want || got.Dropped != 0 {
			t.Fatalf("%d dropped and\n%s\nwant none and\n%s", got.Dropped, summary(got), want)
		}
		first := got.Refusals[0]
		if first.Proto != "connect" || first.Service != "a" || first.Error != "another error" || !first.First.Equal(begin) || !first.Last.Equal(begin.Add(time.Minute)) {
			t.Errorf("got %+v, want the protocol, service and error of the last, and both times", first)
		}
	})
}

func TestOnlyRefusalsAreKept(t *testing.T) {
	var l RefusalLog
	l.Observe(carried())
	l.Observe(&tunnel.Outcome{Reason: tunnel.NoHello})
	l.Observe(&tunnel.Outcome{Reason: tunnel.Gone})
	if got := l.List(&RefusalFilter{}); len(got.Refusals) > 0 || got.Refusals == nil {
		t.Errorf("got %#v, want an empty list", got.Refusals)
	}
	l.Observe(&tunnel.Outcome{Reason: tunnel.Overload})
	if got := summary(l.List(&RefusalFilter{})); got != "1 overload   " {
		t.Errorf("got %q, want one of a client whose address is not known", got)
	}
}

// A client can't fill the log, nor drop what is known of others.
func TestOneClientHasItsPart(t *testing.T) {
	for _, source := range []func(i int) string{
		func(int) string { return "192.0.2.7:1000" },
		func(i int) string { return fmt.Sprintf("[2001:db8::%x]:1000", i+1) },
	} {
		var l RefusalLog
		l.Observe(refusedBy("198.51.100.1:1000", "a.example.com", tunnel.NoRoute))
		const n = 10_000
		for i := range n {
			l.Observe(refusedBy(source(i), fmt.Sprintf("%d.example.com", i), tunnel.NoRoute))
		}
		got := l.List(&RefusalFilter{})
		if len(got.Refusals) != maxRefusalsEach+1 || got.Dropped != n-maxRefusalsEach {
			t.Errorf("%d kept and %d dropped, want %d and %d", len(got.Refusals), got.Dropped, maxRefusalsEach+1, n-maxRefusalsEach)
		}
		if newest, oldest := got.Refusals[0].Target, got.Refusals[maxRefusalsEach].Target; newest != "9999.example.com" || oldest != "a.example.com" {
			t.Errorf("the newest is of %s and the oldest of %s", newest, oldest)
		}
	}
}

func TestRefusalLogIsBounded(t *testing.T) {
	var l RefusalLog
	long := strings.Repeat("\x1b", 70_000)
	const n = 2 * maxRefusedClients
	for i := range n {
		o := refusedBy(netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 0, byte(i >> 8), byte(i)}), 1).String(), long, tunnel.NoRoute)
		o.Listener, o.Err = long, errors.New(long)
		l.Observe(o)
		l.Observe(o)
	}
	got := l.List(&RefusalFilter{})
	if len(got.Refusals) != maxRefusedClients || len(l.clients) != maxRefusedClients || l.recent.Len() != maxRefusedClients || got.Dropped != 2*(n-maxRefusedClients) {
		t.Errorf("%d refusals of %d clients, %d dropped; want %d of as many, and %d", len(got.Refusals), len(l.clients), got.Dropped, maxRefusedClients, 2*(n-maxRefusedClients))
	}
	for _, r := range got.Refusals {
		safe(t, r.Target+r.Listener+r.Error)
		if len(r.Target) > maxTarget || len(r.Listener) > maxField || len(r.Error) > maxRefusalError {
			t.Fatalf("texts of %d, %d and %d bytes", len(r.Target), len(r.Listener), len(r.Error))
		}
	}
	if r := got.Refusals[0]; r.Source != "10.0.1.255" || got.Refusals[maxRefusedClients-1].Source != "10.0.1.0" {
		t.Errorf("the newest is of %s, and the oldest of %s", r.Source, got.Refusals[maxRefusedClients-1].Source)
	}
}

func TestRefusalLogIsConcurrent(t *testing.T) {
	var l RefusalLog
	var wg sync.WaitGroup
	for i := range 8 {
		wg.Go(func() {
			for range 1000 {
				l.Observe(refusedBy(fmt.Sprintf("192.0.2.%d:1", i), "a.example.com", tunnel.NoRoute))
				l.List(&RefusalFilter{Limit: 1})
			}
		})
	}
	wg.Wait()
	for _, r := range l.List(&RefusalFilter{}).Refusals {
		if r.Count != 1000 {
			t.Errorf("%s: %d, want 1000", r.Source, r.Count)
		}
	}
}

func TestRefusalsAreServed(t *testing.T) {
	a := full()
	if r := ask(a, http.MethodGet, "/refusals", byTCP); r.StatusCode != http.StatusNotFound {
		t.Errorf("without a log: %d, want 404", r.StatusCode)
	}
	a.Refusals = new(RefusalLog)
	a.Refusals.Observe(refusedBy("192.0.2.7:1000", "a.example.com:443", tunnel.NoRoute))
	a.Refusals.Observe(refusedBy("[2001:db8::1]:1000", "b.example.com\u202e", tunnel.NotExposed))
	const both = "b.example.com\\u202e a.example.com:443"
	for query, want := range map[string]string{
		"": both, "?limit=1": "b.example.com\\u202e", "?reason=no-route": "a.example.com:443", "?reason=denied": "",
		"?target=A.example.com.": "a.example.com:443", "?target=a.example.com:443": "a.example.com:443", "?target=a.example.com:444": "",
		"?source=2001:db8::/32": "b.example.com\\u202e", "?source=192.0.2.7": "a.example.com:443", "?listener=:443": both, "?listener=:80": "",
	} {
		r := ask(a, http.MethodGet, "/refusals"+query, byTCP)
		text := body(t, r)
		var list Refusals
		if err := json.Unmarshal([]byte(text), &list); err != nil || r.StatusCode != http.StatusOK {
			t.Fatalf("%s: %d, %v: %s", query, r.StatusCode, err, text)
		}
		var got []string
		for _, r := range list.Refusals {
			got = append(got, r.Target)
		}
		if strings.Join(got, " ") != want {
			t.Errorf("%s: %q, want %q", query, got, want)
		}
	}
	for _, query := range []string{"?reason=", "?limit=0", "?source=office", "?color=red", "?reason=a&reason=b", "?%zz"} {
		if r := ask(a, http.MethodGet, "/refusals"+query, byTCP); r.StatusCode != http.StatusBadRequest {
			t.Errorf("%s: %d, want 400", query, r.StatusCode)
		}
	}
	if r := ask(a, http.MethodDelete, "/refusals", byTCP); r.StatusCode != http.StatusMethodNotAllowed {
		t.Errorf("DELETE: %d, want 405", r.StatusCode)
	}
}

func TestRefusalFilterTakesFewWords(t *testing.T) {
	if _, err := ParseRefusalFilter(url.Values{"id": {"1"}}); err == nil || !strings.Contains(err.Error(), "the filters are reason, target, source, listener, limit") {
		t.Errorf("got %v, want an error that names the filters", err)
	}
}

func BenchmarkRefusalLog(b *testing.B) {
	var l RefusalLog
	var sources [1024]netip.AddrPort
	for i := range sources {
		sources[i] = netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 0, byte(i >> 8), byte(i)}), 1)
	}
	o := refusedBy("192.0.2.7:1000", "a.example.com", tunnel.NoRoute)
	for _, clients := range []int{1, len(sources)} {
		b.Run(fmt.Sprintf("clients=%d", clients), func(b *testing.B) {
			b.ReportAllocs()
			for i := 0; b.Loop(); i++ {
				o.Source = sources[i%clients]
				l.Observe(o)
			}
		})
	}
}
