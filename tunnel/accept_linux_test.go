//go:build amd64 || arm64

package tunnel

import (
	"bytes"
	"context"
	"io"
	"net"
	"runtime"
	"sync"
	"testing"
	"time"
)

// lineDetector is a protocol of one line that the client has to send; it notes
// how much of it had come when it was served.
type lineDetector struct {
	mu  sync.Mutex
	had []int
}

func (*lineDetector) Name() string { return "line" }

func (*lineDetector) Sniff(p []byte) Verdict {
	if p[0] == 'L' {
		return Yes
	}
	return No
}

func (*lineDetector) HasPreamble(p []byte) bool { return bytes.IndexByte(p, '\n') >= 0 }

func (l *lineDetector) ServeConn(_ context.Context, c *Conn, _ Handler) error {
	l.mu.Lock()
	l.had = append(l.had, len(c.Buffered()))
	l.mu.Unlock()
	for bytes.IndexByte(c.Buffered(), '\n') < 0 {
		if err := c.Fill(1 << 10); err != nil {
			return PreambleError(c, err)
		}
	}
	c.CloseWithMessage(append([]byte("you said "), c.Buffered()...))
	return nil
}

// other makes the listener one of two protocols.
type otherJudge struct{ lineDetector }

func (*otherJudge) Sniff(p []byte) Verdict { return No }

type pendingRig struct {
	srv   *Server
	proto *lineDetector
	addr  string
	told  chan Reason
}

func newPendingRig(t *testing.T, l Limits) *pendingRig {
	t.Helper()
	r := &pendingRig{proto: &lineDetector{}, told: make(chan Reason, 1000)}
	r.srv = &Server{Limits: l, Observe: func(o *Outcome) { r.told <- o.Reason }}
	ln, err := Listen(t.Context(), "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	r.addr = ln.Addr().String()
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = r.srv.Serve(context.WithoutCancel(t.Context()), Listener{Listener: ln, Protocols: []Protocol{&otherJudge{}, r.proto}})
	}()
	t.Cleanup(func() {
		_ = r.srv.Close()
		<-done
		_ = r.srv.Shutdown(context.WithoutCancel(t.Context()))
	})
	return r
}

func (r *pendingRig) dial(t *testing.T) net.Conn {
	t.Helper()
	c, err := net.Dial("tcp", r.addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	_ = c.SetDeadline(time.Now().Add(20 * time.Second))
	return c
}

// pending returns how many connections wait.
func (r *pendingRig) pending() int {
	n := 0
	for _, l := range r.srv.own.engine().Running() {
		l.Lock()
		for _, w := range l.Handlers() {
			if _, ok := w.(*pendingConn); ok {
				n++
			}
		}
		l.Unlock()
	}
	return n
}

func (r *pendingRig) await(t *testing.T, n int) {
	t.Helper()
	for deadline := time.Now().Add(10 * time.Second); r.pending() != n; time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("%d connections wait, want %d", r.pending(), n)
		}
	}
}

func TestPendingConnsHoldNoGoroutine(t *testing.T) {
	r := newPendingRig(t, Limits{})
	r.dial(t)
	r.await(t, 1) // the loop's own goroutine runs
	before := runtime.NumGoroutine()
	var conns []net.Conn
	for range 100 {
		c := r.dial(t)
		_, _ = io.WriteString(c, "Li")
		conns = append(conns, c)
	}
	r.await(t, 101)
	if n := runtime.NumGoroutine() - before; n > 5 {
		t.Errorf("%d goroutines for 100 connections that wait", n)
	}
	for _, c := range conns {
		_, _ = io.WriteString(c, "ne\n")
		if got, err := io.ReadAll(c); string(got) != "you said Line\n" || err != nil {
			t.Fatalf("got %q, %v", got, err)
		}
	}
	r.await(t, 1)
	r.proto.mu.Lock()
	defer r.proto.mu.Unlock()
	for _, had := range r.proto.had {
		if had != len("Line\n") {
			t.Errorf("served with %d bytes, want the whole line", had)
		}
	}
}

func TestPendingConnsAreServed(t *testing.T) {
	for _, tc := range []struct {
		what string
		do   func(t *testing.T, r *pendingRig, c net.Conn)
		want Reason
	}{
		{"a client that sends nothing", func(*testing.T, *pendingRig, net.Conn) {}, HelloTimeout},
		{"half a line and no more", func(_ *testing.T, _ *pendingRig, c net.Conn) { _, _ = io.WriteString(c, "Li") }, HelloTimeout},
		{"a client that leaves", func(_ *testing.T, _ *pendingRig, c net.Conn) { c.Close() }, NoHello},
		{"a client that leaves in the middle", func(t *testing.T, r *pendingRig, c net.Conn) {
			_, _ = io.WriteString(c, "Li")
			r.await(t, 1)
			c.Close()
		}, Gone},
		{"bytes of no protocol", func(_ *testing.T, _ *pendingRig, c net.Conn) { _, _ = io.WriteString(c, "?") }, BadPreamble},
		{"a server that closes", func(t *testing.T, r *pendingRig, c net.Conn) {
			r.await(t, 1)
			_ = r.srv.Close()
		}, Drain},
	} {
		t.Run(tc.what, func(t *testing.T) {
			limit := time.Minute
			if tc.want == HelloTimeout {
				limit = 300 * time.Millisecond
			}
			r := newPendingRig(t, Limits{FirstByteTimeout: limit, HandshakeTimeout: limit})
			tc.do(t, r, r.dial(t))
			select {
			case got := <-r.told:
				if got != tc.want {
					t.Errorf("got %s, want %s", got, tc.want)
				}
			case <-time.After(20 * time.Second):
				t.Fatal("nothing was told")
			}
			r.await(t, 0)
		})
	}
}

func TestSlowPreambleGetsAGoroutine(t *testing.T) {
	r := newPendingRig(t, Limits{})
	c := r.dial(t)
	line := "L" + string(bytes.Repeat([]byte("i"), 5*maxReads)) + "\n"
	for _, b := range []byte(line) {
		_, _ = c.Write([]byte{b})
		time.Sleep(time.Millisecond) // so that it is read by itself
	}
	if got, err := io.ReadAll(c); string(got) != "you said "+line || err != nil {
		t.Fatalf("got %q, %v", got, err)
	}
	r.proto.mu.Lock()
	defer r.proto.mu.Unlock()
	if had := r.proto.had[0]; had >= len(line) {
		t.Errorf("the drip was pending to its end: %d reads", had)
	}
}

func TestOldestPendingConnIsEvicted(t *testing.T) {
	r := newPendingRig(t, Limits{MaxPendingConnections: 3})
	for range 3 {
		r.dial(t)
	}
	r.await(t, 3)
	c := r.dial(t)
	if got := <-r.told; got != Overload {
		t.Errorf("the oldest ended with %s, want overload", got)
	}
	_, _ = io.WriteString(c, "Line\n")
	if got, err := io.ReadAll(c); string(got) != "you said Line\n" || err != nil {
		t.Errorf("the newest got %q, %v", got, err)
	}
}
