package admin

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"culvert.dev/tunnel"
)

// newLog returns an AccessLog and what it wrote.
func newLog(newHandler func(io.Writer, *slog.HandlerOptions) slog.Handler) (*AccessLog, *buffer) {
	var b buffer
	opts := &slog.HandlerOptions{Level: slog.LevelDebug, ReplaceAttr: func(groups []string, a slog.Attr) slog.Attr {
		if a.Key == slog.TimeKey && len(groups) == 0 {
			return slog.Attr{}
		}
		return a
	}}
	return &AccessLog{Log: slog.New(newHandler(&b, opts))}, &b
}

func textHandler(w io.Writer, o *slog.HandlerOptions) slog.Handler { return slog.NewTextHandler(w, o) }
func jsonHandler(w io.Writer, o *slog.HandlerOptions) slog.Handler { return slog.NewJSONHandler(w, o) }

// A buffer is a bytes.Buffer for several goroutines.
type buffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (b *buffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.Write(p)
}

func (b *buffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.String()
}

func carried() *tunnel.Outcome {
	ep := tunnel.Endpoint{Addr: netip.MustParseAddrPort("192.0.2.1:8443"), Host: "orders.internal"}
	return &tunnel.Outcome{
		ID: 7, Proto: "connect", Listener: ":443", Source: netip.MustParseAddrPort("198.51.100.4:5555"),
		Peer: tunnel.Peer{ID: "alice", Method: "basic"}, Target: "orders.example.com:443", ALPN: []string{"h2", "http/1.1"},
		Service: "orders", Pattern: "orders.example.com", Endpoint: ep.String(),
		Attempts: []tunnel.Attempt{{Endpoint: ep, Took: time.Millisecond}},
		Reason:   tunnel.Done, Waited: 2 * time.Millisecond, Dialed: 3*time.Millisecond + 4, Lasted: 90 * time.Second, BytesIn: 10, BytesOut: 20,
	}
}

func TestAccessLogLines(t *testing.T) {
	with := func(f func(o *tunnel.Outcome)) *tunnel.Outcome {
		o := carried()
		f(o)
		return o
	}
	refused := func(r tunnel.Reason, err string) *tunnel.Outcome {
		return &tunnel.Outcome{Proto: "sni", Listener: ":443", Source: netip.MustParseAddrPort("[2001:db8::1]:5"), Reason: r, Err: errors.New(err), Lasted: time.Second}
	}
	first := tunnel.Endpoint{Addr: netip.MustParseAddrPort("192.0.2.9:8443")}
	second := tunnel.Endpoint{Addr: netip.MustParseAddrPort("192.0.2.1:8443"), Host: "orders.internal"}
	for _, tt := range []struct {
		name string
		o    *tunnel.Outcome
		want string
	}{
		{"tunnel", carried(),
			`level=INFO msg=tunnel id=7 proto=connect listener=:443 source=198.51.100.4:5555 target=orders.example.com:443 service=orders endpoint="orders.internal (192.0.2.1:8443)" reason=done peer=alice peer_method=basic alpn=h2,http/1.1 bytes_in=10 bytes_out=20 waited=2ms dialed=3ms lasted=1m30s`},
		{"tunnel of a token beside a certificate", with(func(o *tunnel.Outcome) {
			*o = tunnel.Outcome{ID: 8, Proto: "connect", Endpoint: "192.0.2.1:1", Reason: tunnel.Done, Peer: tunnel.Peer{ID: "alice", Method: "jwt"}.WithActor(tunnel.Peer{ID: "spiffe://a.example/gw", Method: "mtls"})}
		}), `level=INFO msg=tunnel id=8 proto=connect endpoint=192.0.2.1:1 reason=done peer=alice peer_method=jwt actor=spiffe://a.example/gw actor_method=mtls bytes_in=0 bytes_out=0`},
		{"tunnel that was reset", with(func(o *tunnel.Outcome) {
			*o = tunnel.Outcome{ID: 8, Proto: "sni", Endpoint: "192.0.2.1:1", Reason: tunnel.Reset, Err: errors.New("the service: connection reset by peer")}
		}), `level=INFO msg=tunnel id=8 proto=sni endpoint=192.0.2.1:1 reason=reset err="the service: connection reset by peer" bytes_in=0 bytes_out=0`},
		{"tunnel by the second address", with(func(o *tunnel.Outcome) {
			*o = tunnel.Outcome{ID: 8, Endpoint: second.String(), Reason: tunnel.Done, Attempts: []tunnel.Attempt{
				{Endpoint: first, Took: 3 * time.Second, Err: tunnel.Refusef(tunnel.DialTimeout, "dial %s: i/o timeout", first)},
				{Endpoint: second, Took: time.Millisecond},
			}}
		}), `level=INFO msg=tunnel id=8 endpoint="orders.internal (192.0.2.1:8443)" reason=done attempts="[192.0.2.9:8443 after 3s: i/o timeout orders.internal (192.0.2.1:8443) after 1ms: ok]" bytes_in=0 bytes_out=0`},
		{"no endpoint answered", &tunnel.Outcome{ID: 9, Proto: "sni", Target: "a.example.com", Service: "a", Reason: tunnel.DialFailed, Err: errors.New("service a: none of 1 endpoints answered"),
			Attempts: []tunnel.Attempt{{Endpoint: first, Took: time.Millisecond, Err: errors.New("connection refused")}}},
			`level=WARN msg=refused id=9 proto=sni target=a.example.com service=a reason=dial-failed err="service a: none of 1 endpoints answered" attempts="[192.0.2.9:8443 after 1ms: connection refused]"`},
		{"no route", &tunnel.Outcome{ID: 10, Target: "a.example.com", Reason: tunnel.NoRoute, Err: errors.New("no service has it")},
			`level=INFO msg=refused id=10 target=a.example.com reason=no-route err="no service has it"`},
		{"address a client asked for", &tunnel.Outcome{ID: 11, Target: "169.254.169.254:80", Reason: tunnel.Prohibited, Err: errors.New("x")},
			`level=INFO msg=refused id=11 target=169.254.169.254:80 reason=prohibited err=x`},
		{"address a route leads to", &tunnel.Outcome{ID: 11, Service: "a", Reason: tunnel.Prohibited, Err: errors.New("x")},
			`level=WARN msg=refused id=11 service=a reason=prohibited err=x`},
		{"bad hello", refused(tunnel.BadHello, "sni: x"), `level=INFO msg=refused proto=sni listener=:443 source=[2001:db8::1]:5 reason=bad-hello err="sni: x" lasted=1s`},
		{"panic", refused(tunnel.Internal, "x"), `level=WARN msg=refused proto=sni listener=:443 source=[2001:db8::1]:5 reason=internal err=x lasted=1s`},
		{"overload", refused(tunnel.Overload, "x"), `level=WARN msg=refused proto=sni listener=:443 source=[2001:db8::1]:5 reason=overload err=x lasted=1s`},
		{"no byte", refused(tunnel.NoHello, "EOF"), `level=DEBUG msg=left proto=sni listener=:443 source=[2001:db8::1]:5 reason=no-hello err=EOF lasted=1s`},
		{"left", refused(tunnel.Gone, "EOF"), `level=INFO msg=left proto=sni listener=:443 source=[2001:db8::1]:5 reason=gone err=EOF lasted=1s`},
	} {
		t.Run(tt.name, func(t *testing.T) {
			l, out := newLog(textHandler)
			l.Observe(tt.o)
			l.Flush()
			if got := out.String(); got != tt.want+"\n" {
				t.Errorf("got  %swant %s", got, tt.want)
			}
		})
	}
}

func TestAccessLogWithoutLog(t *testing.T) {
	l := &AccessLog{}
	l.Observe(carried())
	l.Observe(&tunnel.Outcome{Reason: tunnel.Overload})
	l.Flush()
}

// N24: nothing a client sends breaks a line or reaches a terminal, and nothing
// makes a line long.
func TestAccessLogEscapes(t *testing.T) {
	evil := []string{
		"a\r\nlevel=INFO msg=tunnel reason=done",
		"a\nb", "a\rb", "a\vb\fc", "a\x00b", "\x1b[2J\x1b]0;x\x07", "\x7f\x08\x08",
		"\u009b31m", "a\u0085b", "a\u2028b\u2029c",
		"safe\u202egnp.exe", "\u2066\u2067\u2068\u2069\u200e\u200f\u061c",
		"a\xffb\xc3", "\xed\xa0\x80", "\xf5\x80\x80\x80", `a" msg="b`, "a=b c=d", `{"a":1}`, "\u200b\ufeff\u00ad",
		strings.Repeat("\x1b", 70_000), strings.Repeat("a", 70_000), strings.Repeat("\u202e", 70_000),
	}
	handlers := map[string]func(io.Writer, *slog.HandlerOptions) slog.Handler{"text": textHandler, "json": jsonHandler}
	fields := map[string]func(o *tunnel.Outcome, s string){
		"target":   func(o *tunnel.Outcome, s string) { o.Target = s },
		"peer":     func(o *tunnel.Outcome, s string) { o.Peer.ID = s },
		"method":   func(o *tunnel.Outcome, s string) { o.Peer.Method = s },
		"alpn":     func(o *tunnel.Outcome, s string) { o.ALPN = []string{"h2", s, s} },
		"err":      func(o *tunnel.Outcome, s string) { o.Err = errors.New(s) },
		"proto":    func(o *tunnel.Outcome, s string) { o.Proto = s },
		"listener": func(o *tunnel.Outcome, s string) { o.Listener = s },
		"service":  func(o *tunnel.Outcome, s string) { o.Service = s },
		"endpoint": func(o *tunnel.Outcome, s string) { o.Endpoint = s },
		"reason":   func(o *tunnel.Outcome, s string) { o.Reason = tunnel.Reason(s) },
		"source": func(o *tunnel.Outcome, s string) {
			o.Source = netip.AddrPortFrom(netip.MustParseAddr("fe80::1").WithZone(s), 1)
		},
		"attempts": func(o *tunnel.Outcome, s string) {
			for range 50 {
				o.Attempts = append(o.Attempts, tunnel.Attempt{Endpoint: tunnel.Endpoint{Host: s}, Err: errors.New(s)})
			}
		},
	}
	for handler, newHandler := range handlers {
		for field, set := range fields {
			t.Run(handler+"/"+field, func(t *testing.T) {
				for _, s := range evil {
					l, out := newLog(newHandler)
					o := carried()
					set(o, s)
					l.Observe(o)
					line, ended := strings.CutSuffix(out.String(), "\n")
					if !ended || line == "" {
						t.Fatalf("%.40q: no line: %q", s, line)
					}
					safe(t, line)
					most := 4 << 10
					if field == "attempts" {
						most = 32 << 10
					}
					if len(line) > most {
						t.Errorf("%.40q: a line of %d bytes, limit %d", s, len(line), most)
					}
					if handler == "json" {
						var v map[string]any
						if err := json.Unmarshal([]byte(line), &v); err != nil {
							t.Errorf("%.40q: %v: %s", s, err, line)
						}
						if v["msg"] != "tunnel" && v["msg"] != "refused" {
							t.Errorf("%.40q: msg is %v", s, v["msg"])
						}
					}
				}
			})
		}
	}
}

// A name of the greatest length keeps its port.
func TestAccessLogClips(t *testing.T) {
	l, out := newLog(textHandler)
	label := strings.Repeat("a", 63)
	name := label + "." + label + "." + label + "." + label[:61]
	o := carried()
	o.Target = name + ":65535"
	l.Observe(o)
	if !strings.Contains(out.String(), "target="+name+":65535 ") {
		t.Errorf("a target of %d bytes was cut: %s", len(o.Target), out)
	}
	o.Peer.ID = strings.Repeat("p", 254)
	l.Observe(o)
	if !strings.Contains(out.String(), "peer="+strings.Repeat("p", 250)+"... ") {
		t.Errorf("an identity of 254 bytes was not cut to 253: %s", out)
	}
}

func TestOverloadIsSampled(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, out := newLog(textHandler)
		flood := func(n int) {
			for i := range n {
				l.Observe(&tunnel.Outcome{ID: uint64(i + 1), Reason: tunnel.Overload, Err: fmt.Errorf("full")})
			}
		}
		lines := func() (refused, summaries int) {
			return strings.Count(out.String(), "msg=refused "), strings.Count(out.String(), "msg=\"refusals not logged\"")
		}
		check := func(when string, refused, summaries int) {
			t.Helper()
			if r, s := lines(); r != refused || s != summaries {
				t.Fatalf("%s: %d lines and %d summaries, want %d and %d:\n%s", when, r, s, refused, summaries, out)
			}
		}
		flood(10)
		check("at the limit", 10, 0)
		flood(90)
		check("over the limit", 10, 0)
		l.Observe(carried())
		if !strings.Contains(out.String(), "msg=tunnel") {
			t.Error("a tunnel's line is sampled too")
		}
		time.Sleep(time.Second)
		synctest.Wait()
		check("a second later", 10, 1)
		if !strings.Contains(out.String(), "reason=overload suppressed=90") {
			t.Errorf("want suppressed=90:\n%s", out)
		}
		flood(4)
		time.Sleep(2 * time.Second)
		synctest.Wait()
		check("a quiet second", 14, 1)
		flood(13)
		l.Flush()
		check("flushed", 24, 2)
		if !strings.Contains(out.String(), "suppressed=3\n") {
			t.Errorf("want suppressed=3:\n%s", out)
		}
		time.Sleep(2 * time.Second)
		synctest.Wait()
		check("after the flush", 24, 2)
	})
}

func BenchmarkAccessLog(b *testing.B) {
	l := &AccessLog{Log: slog.New(slog.NewTextHandler(io.Discard, nil))}
	o := carried()
	b.ReportAllocs()
	for b.Loop() {
		l.Observe(o)
	}
}

// The policy that has decided is in the line, and what those in dry run would have done.
func TestAccessLogPolicy(t *testing.T) {
	o := carried()
	o.Policy = &tunnel.PolicyDecision{Allowed: true, Policy: "db", Origin: "culvert.yaml:12", Admitted: 2, Endpoints: 5, DryRun: &tunnel.PolicyDecision{Policy: "planned"}}
	l, b := newLog(textHandler)
	l.Observe(o)
	if want := ` policy=db policy_origin=culvert.yaml:12 policy_endpoints="2 of 5" policy_dry_run="denied by planned" `; !strings.Contains(b.String(), want) {
		t.Errorf("got %s, want it to have %s", b, want)
	}
	o.Policy = &tunnel.PolicyDecision{Allowed: true, DryRun: &tunnel.PolicyDecision{Policy: "planned", Allowed: true}}
	l, b = newLog(textHandler)
	l.Observe(o)
	if want := ` policy_dry_run="allowed by planned" `; !strings.Contains(b.String(), want) || strings.Contains(b.String(), "policy=") {
		t.Errorf("got %s, want it to have %s, and no policy", b, want)
	}
}
