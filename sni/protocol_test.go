package sni

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"culvert.dev/tunnel"
)

const patience = 30 * time.Second // no test waits this long unless it fails

// A visit is one connection of a client to a Protocol, over loopback.
type visit struct {
	*net.TCPConn
	served chan error // what ServeConn returned
}

// call connects to a Protocol whose first bytes must come before the deadline.
func call(t *testing.T, p *Protocol, h tunnel.Handler, deadline time.Duration) *visit {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	c, err := net.Dial("tcp", ln.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	s, err := ln.Accept()
	if err != nil {
		t.Fatal(err)
	}
	_ = c.SetDeadline(time.Now().Add(patience))
	_ = s.SetDeadline(time.Now().Add(deadline))
	v := &visit{c.(*net.TCPConn), make(chan error, 1)}
	done := make(chan struct{})
	go func() {
		defer close(done)
		err := p.ServeConn(t.Context(), tunnel.NewConn(s), h)
		s.Close() // no handler here keeps the stream for longer
		v.served <- err
	}()
	t.Cleanup(func() {
		c.Close()
		<-done
	})
	return v
}

// hears returns all the client reads, and how the stream ended.
func (v *visit) hears(t *testing.T) (heard []byte, reset bool) {
	t.Helper()
	heard, err := io.ReadAll(v)
	switch {
	case err == nil:
	case errors.Is(err, syscall.ECONNRESET):
		reset = true
	default:
		t.Fatalf("reading the answer: %v", err)
	}
	return heard, reset
}

func (v *visit) reason(t *testing.T) tunnel.Reason {
	t.Helper()
	select {
	case err := <-v.served:
		if err == nil {
			t.Fatal("ServeConn = nil, want an error")
		}
		return tunnel.ReasonOf(err)
	case <-time.After(patience):
		t.Fatal("ServeConn does not return")
		return ""
	}
}

// unasked fails the test when it is called.
func unasked(t *testing.T) tunnel.Handler {
	return tunnel.HandlerFunc(func(_ context.Context, req *tunnel.Request) {
		t.Errorf("the handler is asked for %q", req.Target())
		req.Refuse(errors.New("unasked"))
	})
}

func alert(a Alert) []byte { return []byte{21, 3, 3, 0, 2, 2, byte(a)} }

// What cannot be read is answered with its alert, or with nothing.
func TestServeBadInput(t *testing.T) {
	type row struct {
		name   string
		raw    []byte
		reason tunnel.Reason
		alert  Alert
	}
	var rows []row
	for _, c := range illegals() {
		rows = append(rows, row{c.name, c.raw, c.reason, c.alert})
	}
	for _, c := range nameless() {
		rows = append(rows, row{c.name, c.raw, tunnel.NoSNI, UnrecognizedName})
	}
	for _, c := range rows {
		t.Run(c.name, func(t *testing.T) {
			for _, p := range []*Protocol{{}, {Refusal: RefuseClose}} {
				v := call(t, p, unasked(t), patience)
				// The client may hear the answer while it still sends.
				if _, err := v.Write(c.raw); err != nil && p.Refusal == RefuseAlert && c.alert != 0 {
					t.Errorf("write: %v", err)
				}
				var want []byte
				if p.Refusal == RefuseAlert && c.alert != 0 {
					want = alert(c.alert)
				}
				heard, reset := v.hears(t)
				if c.name == "HTTP" && p.Refusal == RefuseAlert {
					if !strings.HasPrefix(string(heard), "HTTP/1.1 400 Bad Request\r\n") || reset {
						t.Errorf("heard %q, reset %t, want 400", heard, reset)
					}
				} else if !bytes.Equal(heard, want) || reset != (want == nil) {
					t.Errorf("refusal %d: heard % x, reset %t, want % x", p.Refusal, heard, reset, want)
				}
				v.Close()
				if got := v.reason(t); got != c.reason {
					t.Errorf("reason %s, want %s", got, c.reason)
				}
			}
		})
	}
}

// An HTTP client is told what to do differently, in a response it can read.
func TestServeHTTP(t *testing.T) {
	for _, head := range []string{
		"GET / HTTP/1.1\r\nHost: svc.example.test\r\n\r\n",
		"CONNECT svc.example.test:443 HTTP/1.0\r\n\r\n",
		"POST /" + strings.Repeat("x", 2000) + " HTTP/1.1\r\n\r\n",
	} {
		for _, size := range []int{1, 7, 1 << 20} {
			v := call(t, &Protocol{}, unasked(t), patience)
			for _, b := range chunks([]byte(head), []int{size}) {
				if _, err := v.Write(b); err != nil {
					t.Fatal(err)
				}
			}
			heard, reset := v.hears(t)
			if reset {
				t.Errorf("%.20q: reset", head)
			}
			resp, err := http.ReadResponse(bufio.NewReader(bytes.NewReader(heard)), nil)
			if err != nil {
				t.Fatalf("%.20q: heard %q: %v", head, heard, err)
			}
			body, err := io.ReadAll(resp.Body)
			resp.Body.Close()
			if resp.StatusCode != 400 || !resp.Close || string(body) != "TLS expected\n" || err != nil {
				t.Errorf("%.20q: status %d, close %t, body %q (%v), want 400, true, TLS expected", head, resp.StatusCode, resp.Close, body, err)
			}
			v.Close()
			if got := v.reason(t); got != tunnel.BadPreamble {
				t.Errorf("%.20q: reason %s, want bad-preamble", head, got)
			}
		}
	}
}

func TestRequestLine(t *testing.T) {
	for s, want := range map[string]tunnel.Verdict{
		"": tunnel.More, "G": tunnel.More, "GET": tunnel.More, "GET ": tunnel.More, "GET /": tunnel.More,
		"GET / ": tunnel.More, "GET / HTTP/1": tunnel.More, "GET / HTTP/1.": tunnel.Yes, "GET / HTTP/1.1\r\n": tunnel.Yes,
		"GET / HTTP/2": tunnel.No, "PRI * HTTP/2.0\r\n": tunnel.No, "GET /\r\n": tunnel.No, "GET / x": tunnel.No,
		"SSH-2.0-OpenSSH": tunnel.No, "get / HTTP/1.1": tunnel.No, " / HTTP/1.1": tunnel.No, "\x16\x03": tunnel.No,
		"PROXY TCP4 192.0.2.1": tunnel.No, "EHLO me\r\n": tunnel.No, "GET /\x80": tunnel.No,
		strings.Repeat("A", 30): tunnel.No,
	} {
		if got := requestLine([]byte(s)); got != want {
			t.Errorf("requestLine(%q) = %d, want %d", s, got, want)
		}
	}
}

// A request line without an end is worth neither an answer nor memory.
func TestServeHTTPTooLong(t *testing.T) {
	v := call(t, &Protocol{}, unasked(t), patience)
	_, _ = v.Write([]byte("GET /" + strings.Repeat("x", maxLine)))
	if heard, reset := v.hears(t); len(heard) > 0 || !reset {
		t.Errorf("heard %q, reset %t, want a reset", heard, reset)
	}
	if got := v.reason(t); got != tunnel.BadPreamble {
		t.Errorf("reason %s, want bad-preamble", got)
	}
}

// A client that has not finished in time is left without an answer.
func TestServeTimeout(t *testing.T) {
	raw := one(hello(sniExt(svc)))
	for name, sent := range map[string][]byte{
		"nothing":           nil,
		"a byte":            raw[:1],
		"half a hello":      raw[:len(raw)/2],
		"all but one byte":  raw[:len(raw)-1],
		"half an HTTP line": []byte("GET / HT"),
	} {
		v := call(t, &Protocol{}, unasked(t), 50*time.Millisecond)
		if _, err := v.Write(sent); err != nil {
			t.Fatal(err)
		}
		if heard, _ := v.hears(t); len(heard) > 0 {
			t.Errorf("%s: heard % x, want nothing", name, heard)
		}
		if got := v.reason(t); got != tunnel.HelloTimeout {
			t.Errorf("%s: reason %s, want hello-timeout", name, got)
		}
	}
}

// The deadline is the Server's: a byte does not move it.
func TestServeDripTimesOut(t *testing.T) {
	v := call(t, &Protocol{}, unasked(t), 100*time.Millisecond)
	raw := one(sized(1 << 14))
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	start := time.Now()
	for i := range raw {
		<-tick.C
		if _, err := v.Write(raw[i : i+1]); err != nil {
			break
		}
	}
	if got := v.reason(t); got != tunnel.HelloTimeout {
		t.Errorf("reason %s, want hello-timeout", got)
	}
	if d := time.Since(start); d > patience/2 {
		t.Errorf("served for %v", d)
	}
}

func TestServeGone(t *testing.T) {
	raw := one(hello(sniExt(svc)))
	for _, c := range []struct {
		name  string
		sent  []byte
		reset bool
		want  tunnel.Reason
	}{
		{"left without a byte", nil, false, tunnel.NoHello},
		{"reset without a byte", nil, true, tunnel.NoHello},
		{"left after a byte", raw[:1], false, tunnel.Gone},
		{"left in the hello", raw[:40], false, tunnel.Gone},
		{"left in an HTTP line", []byte("GET / "), false, tunnel.Gone},
	} {
		v := call(t, &Protocol{}, unasked(t), patience)
		if _, err := v.Write(c.sent); err != nil {
			t.Fatal(err)
		}
		if c.reset {
			_ = v.SetLinger(0)
			_ = v.Close()
		} else {
			_ = v.CloseWrite()
			if heard, _ := v.hears(t); len(heard) > 0 {
				t.Errorf("%s: heard % x, want nothing", c.name, heard)
			}
		}
		if got := v.reason(t); got != c.want {
			t.Errorf("%s: reason %s, want %s", c.name, got, c.want)
		}
	}
}

// Every legal hello, in its segments and in single bytes, makes one request
// and reaches the server unchanged, with what follows it.
func TestServeLegal(t *testing.T) {
	cases := legals()
	for name, raw := range fixtures(t) {
		if h, err := Parse(raw); err == nil && h.NameErr == nil {
			cases = append(cases, legal{name, raw, h.Name.String(), nil})
		}
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			cuts := [][]int{c.cuts}
			if len(c.raw) < 4<<10 {
				cuts = append(cuts, []int{1}, []int{5, 1448})
			}
			for _, cut := range cuts {
				sent := join(c.raw, []byte("and what follows"))
				asked := 0
				v := call(t, &Protocol{}, tunnel.HandlerFunc(func(_ context.Context, req *tunnel.Request) {
					asked++
					if req.Proto != "sni" || req.Name.String() != c.want || req.Port != 0 {
						t.Errorf("request %s for %q port %d, want sni, %q, 0", req.Proto, req.Name, req.Port, c.want)
					}
					s, err := req.Accept()
					if err != nil {
						t.Error(err)
						return
					}
					got, err := io.ReadAll(s)
					if err != nil || !bytes.Equal(got, sent) {
						t.Errorf("the server gets %d bytes (%v), want the %d that were sent", len(got), err, len(sent))
					}
					_, _ = s.Write([]byte("yes"))
				}), patience)
				_ = v.SetNoDelay(true)
				for _, b := range chunks(sent, cut) {
					if _, err := v.Write(b); err != nil {
						t.Fatal(err)
					}
				}
				_ = v.CloseWrite()
				if heard, _ := v.hears(t); string(heard) != "yes" {
					t.Errorf("heard %q, want yes", heard)
				}
				if err := <-v.served; err != nil || asked != 1 {
					t.Errorf("ServeConn = %v, asked %d times, want nil, once", err, asked)
				}
			}
		})
	}
}

func TestServeRequestFields(t *testing.T) {
	v := call(t, &Protocol{}, tunnel.HandlerFunc(func(_ context.Context, req *tunnel.Request) {
		if want := []string{"h2", "http/1.1"}; !slices.Equal(req.ALPN, want) {
			t.Errorf("ALPN %q, want %q", req.ALPN, want)
		}
		if !req.Source.IsValid() || req.LocalPort == 0 || req.Start.IsZero() {
			t.Errorf("source %v, local port %d, start %v, want all of them", req.Source, req.LocalPort, req.Start)
		}
		req.Refuse(tunnel.Refusef(tunnel.NoRoute, "no route"))
	}), patience)
	if _, err := v.Write(one(chromium(svc))); err != nil {
		t.Fatal(err)
	}
	if heard, _ := v.hears(t); !bytes.Equal(heard, alert(UnrecognizedName)) {
		t.Errorf("heard % x, want unrecognized_name", heard)
	}
}

// A tunnel does not hold a list of protocols of any length.
func TestServeManyProtocols(t *testing.T) {
	all := make([]string, 1000)
	for i := range all {
		all[i] = strconv.Itoa(i)
	}
	raw := one(hello(alpnExt(all...), sniExt(svc)))
	if h := mustParse(t, raw); !slices.Equal(h.ALPN(), all) {
		t.Errorf("the hello has %d protocols, want %d", len(h.ALPN()), len(all))
	}
	v := call(t, &Protocol{}, tunnel.HandlerFunc(func(_ context.Context, req *tunnel.Request) {
		if !slices.Equal(req.ALPN, all[:tunnel.MaxALPN]) {
			t.Errorf("the request has %q, want %q", req.ALPN, all[:tunnel.MaxALPN])
		}
		req.Refuse(tunnel.Refusef(tunnel.NoRoute, "no route"))
	}), patience)
	if _, err := v.Write(raw); err != nil {
		t.Fatal(err)
	}
	if heard, _ := v.hears(t); !bytes.Equal(heard, alert(UnrecognizedName)) {
		t.Errorf("heard % x, want unrecognized_name", heard)
	}
}

// alerts is the promise of what a client hears for each Reason.
var alerts = map[tunnel.Reason]Alert{
	tunnel.NoSNI:       UnrecognizedName,
	tunnel.NoRoute:     UnrecognizedName,
	tunnel.NotExposed:  UnrecognizedName,
	tunnel.Denied:      AccessDenied,
	tunnel.Prohibited:  AccessDenied,
	tunnel.NoAuth:      AccessDenied,
	tunnel.Insecure:    InsufficientSecurity,
	tunnel.BadHello:    DecodeError,
	tunnel.Overload:    InternalError,
	tunnel.Flood:       InternalError,
	tunnel.Loop:        InternalError,
	tunnel.NoEndpoint:  InternalError,
	tunnel.LookupError: InternalError,
	tunnel.LookupTime:  InternalError,
	tunnel.DialFailed:  InternalError,
	tunnel.DialTimeout: InternalError,
	tunnel.Unsupported: InternalError,
	tunnel.Internal:    InternalError,
	tunnel.Drain:       InternalError,

	// Nobody is there, or nobody who speaks TLS.
	tunnel.NoHello:      0,
	tunnel.HelloTimeout: 0,
	tunnel.BadPreamble:  0,
	tunnel.Gone:         0,

	// Not of this protocol, or not of a refusal.
	tunnel.BadRequest: InternalError,
	tunnel.BadMethod:  InternalError,
	tunnel.TooLarge:   InternalError,
	tunnel.Done:       InternalError,
	tunnel.Reset:      InternalError,
	tunnel.Idle:       InternalError,
	tunnel.HalfClosed: InternalError,
	tunnel.Killed:     InternalError,
	tunnel.Revoked:    InternalError,
}

func TestRefuse(t *testing.T) {
	for _, reason := range tunnel.Reasons() {
		a, ok := alerts[reason]
		if !ok {
			t.Errorf("%s has no alert", reason)
			continue
		}
		for _, p := range []*Protocol{{}, {Refusal: RefuseClose}} {
			v := call(t, p, tunnel.HandlerFunc(func(_ context.Context, req *tunnel.Request) {
				req.Refuse(tunnel.Refusef(reason, "no"))
			}), patience)
			// More than the hello: unread bytes must not turn the answer into a reset.
			if _, err := v.Write(join(one(hello(sniExt(svc))), make([]byte, 100<<10))); err != nil && p.Refusal == RefuseAlert && a != 0 {
				t.Fatal(err)
			}
			want, wantReset := alert(a), false
			if a == 0 || p.Refusal == RefuseClose {
				want, wantReset = nil, true
			}
			if heard, reset := v.hears(t); !bytes.Equal(heard, want) || reset != wantReset {
				t.Errorf("%s, refusal %d: heard % x, reset %t, want % x, %t", reason, p.Refusal, heard, reset, want, wantReset)
			}
			v.Close()
			if err := <-v.served; err != nil {
				t.Errorf("%s: ServeConn = %v, want nil: the handler was asked", reason, err)
			}
		}
	}
}

// An error without a Reason is the gateway's own.
func TestRefuseUnknown(t *testing.T) {
	if got := AlertFor(errors.New("surprise")); got != InternalError {
		t.Errorf("alert %d, want %d", got, InternalError)
	}
}

// A TLS client makes a readable error of a refusal.
func TestRefuseIsReadable(t *testing.T) {
	v := call(t, &Protocol{}, tunnel.HandlerFunc(func(_ context.Context, req *tunnel.Request) {
		req.Refuse(tunnel.Refusef(tunnel.NotExposed, "private"))
	}), patience)
	err := tls.Client(v, &tls.Config{ServerName: svc}).Handshake()
	if err == nil || !strings.Contains(err.Error(), "unrecognized name") {
		t.Errorf("crypto/tls says %v, want unrecognized name", err)
	}
}

func TestSniff(t *testing.T) {
	var p Protocol
	for s, want := range map[string]tunnel.Verdict{
		"\x16": tunnel.More, "\x16\x03": tunnel.Yes, "\x16\x03\x01\x02\x00\x01": tunnel.Yes, "\x16\x02": tunnel.No,
		"\x14\x03": tunnel.Yes, "\x15\x03": tunnel.Yes, "\x17\x03": tunnel.Yes, "\x14": tunnel.More, "\x18\x03": tunnel.No, "\x13\x03": tunnel.No,
		"\x80": tunnel.More, "\x80\x2e": tunnel.More, "\x80\x2e\x01": tunnel.More, "\x80\x2e\x01\x00": tunnel.More,
		"\x80\x2e\x01\x00\x02": tunnel.Yes, "\x80\x2e\x01\x03\x01": tunnel.Yes, "\x80\x2e\x04": tunnel.No, "\x80\x2e\x01\x00\x03": tunnel.No,
		"G": tunnel.No, "CONNECT a:1 HTTP/1.1": tunnel.No, "SSH-2.0": tunnel.No, "\x05\x01\x00": tunnel.No, "\x00": tunnel.No,
	} {
		if got := p.Sniff([]byte(s)); got != want {
			t.Errorf("Sniff(%q) = %d, want %d", s, got, want)
		}
	}
	if p.Name() != "sni" {
		t.Errorf("Name() = %q, want sni", p.Name())
	}
}
