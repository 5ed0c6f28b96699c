package admin

import (
	"bytes"
	"errors"
	"io"
	"log/slog"
	"net/netip"
	"regexp"
	"testing"
	"time"

	"culvert.dev/tunnel"
)

var lineTime = regexp.MustCompile(`^(time=\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}(Z|[+-]\d\d:\d\d) |\{"time":"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{1,9})?(Z|[+-]\d\d:\d\d)",)`)

// sameAsSlog compares o's line by a Handler with that of log/slog's own.
func sameAsSlog(t *testing.T, o *tunnel.Outcome) {
	t.Helper()
	for _, asJSON := range []bool{false, true} {
		var fast, slow bytes.Buffer
		line := func(h slog.Handler, b *bytes.Buffer) string {
			(&AccessLog{Log: slog.New(h)}).Observe(o)
			if !lineTime.Match(b.Bytes()) {
				t.Fatalf("the line begins with no time: %q", b)
			}
			return lineTime.ReplaceAllString(b.String(), "")
		}
		got := line(NewHandler(&fast, asJSON, slog.LevelDebug), &fast)
		want := line(NewHandler(&slow, asJSON, slog.LevelDebug).handler(), &slow)
		if got != want {
			t.Errorf("JSON %v:\ngot  %qwant %q", asJSON, got, want)
		}
	}
}

func FuzzHandler(f *testing.F) {
	f.Add("orders.example.com:443", "alice", "h2", "", int64(3*time.Millisecond), []byte{192, 0, 2, 1})
	f.Add("a b\n\"\x1b=", "\u202e\u2028\xff", "a,b", "dial: \\ <refused> &", int64(-1), []byte{254, 128, 15: 1})
	f.Add("", " ", "=", "\x7f", int64(59*time.Second+999_999_999), []byte(nil))
	for d := int64(1); d < int64(48*time.Hour); d = d*7 + 3 {
		f.Add("é", "\u00a0", "", "x", d, []byte{10, 0, 0, 1})
	}
	f.Fuzz(func(t *testing.T, target, peer, alpn, fault string, d int64, ip []byte) {
		addr, _ := netip.AddrFromSlice(ip)
		o := &tunnel.Outcome{
			ID: uint64(d), Proto: "sni", Listener: ":443", Source: netip.AddrPortFrom(addr, uint16(d)), Target: target, Service: peer,
			Peer: tunnel.Peer{ID: peer, Method: alpn}, ALPN: []string{alpn}, Endpoint: target, Reason: tunnel.Done,
			Unverified: &tunnel.UnverifiedHeaders{Trace: alpn, Baggage: fault, Forwarded: peer},
			Waited:     time.Duration(d), Dialed: time.Duration(d) / 1000, Lasted: time.Duration(d) * 1000, BytesIn: d, BytesOut: -d,
		}
		if fault != "" {
			o.Err = errors.New(fault)
			o.Attempts = []tunnel.Attempt{{Endpoint: tunnel.Endpoint{Host: target}, Took: time.Duration(d), Err: o.Err}, {}}
			o.ALPN = append(o.ALPN, peer)
		}
		if len(peer) > 3 && addr.Is6() {
			o.Source = netip.AddrPortFrom(addr.WithZone(peer), 1)
		}
		sameAsSlog(t, o)
		o.Reason = tunnel.NoRoute
		sameAsSlog(t, o)
	})
}

// A Handler keeps to its level, and passes on what is no Outcome.
func TestHandlerLevel(t *testing.T) {
	var b bytes.Buffer
	log := slog.New(NewHandler(&b, false, slog.LevelWarn))
	l := &AccessLog{Log: log}
	l.Observe(carried())
	log.Info("one")
	if b.Len() > 0 {
		t.Errorf("at level warn an info line was written: %s", &b)
	}
	l.Observe(&tunnel.Outcome{Reason: tunnel.Internal})
	log.Warn("two")
	if n := bytes.Count(b.Bytes(), []byte("\n")); n != 2 {
		t.Errorf("%d lines of level warn, want 2:\n%s", n, &b)
	}
}

func TestHandlerAllocatesNothing(t *testing.T) {
	for _, asJSON := range []bool{false, true} {
		l, o := &AccessLog{Log: slog.New(NewHandler(io.Discard, asJSON, slog.LevelInfo))}, carried()
		o.ALPN = []string{"h2"}
		if n := testing.AllocsPerRun(1000, func() { l.Observe(o) }); n > 0 {
			t.Errorf("JSON %v: %v allocations a line, want none", asJSON, n)
		}
	}
}

func BenchmarkHandler(b *testing.B) {
	for name, asJSON := range map[string]bool{"text": false, "json": true} {
		b.Run(name, func(b *testing.B) {
			l, o := &AccessLog{Log: slog.New(NewHandler(io.Discard, asJSON, slog.LevelInfo))}, carried()
			b.ReportAllocs()
			for b.Loop() {
				l.Observe(o)
			}
		})
	}
}
