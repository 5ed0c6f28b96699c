package tunneltest

import (
	"context"
	"errors"
	"io"
	"net"
	"runtime"
	"syscall"
	"testing"
	"time"

	"culvert.dev/tunnel"
)

// Resting is a carrier of tunnels that are to cost little while nothing moves.
type Resting struct {
	// Serve starts a gateway and a client of it, which has room for 100 tunnels
	// without one more connection if it shares them.
	Serve func(t *testing.T, routes tunnel.Resolver) Served

	Goroutines int   // that a tunnel at rest may have in the gateway
	Bytes      int64 // of heap and stacks, of the gateway's and both ends' together

	// Aborted says whether the client's stream has the carrier's error for an
	// abort; nil means ECONNRESET.
	Aborted func(err error) bool
}

// TestResting checks that a tunnel at rest between a stream and a socket holds no
// more than it should, whether it is new or was used before, and that it then
// carries whatever happens.
func TestResting(t *testing.T, c Resting) {
	const n = 60
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	g := c.Serve(t, everywhere(ln.Addr().String()))
	pair := func() (tunnel.Stream, *net.TCPConn) {
		s := Dial(t, g.Dialer, g.Addr).(tunnel.Stream)
		_ = s.SetDeadline(time.Now().Add(3 * patience))
		c, err := ln.Accept()
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = c.Close() })
		_ = c.SetDeadline(time.Now().Add(3 * patience))
		return s, c.(*net.TCPConn)
	}
	pair() // what a connection takes, and the first tunnel
	goroutines, bytes := runtime.NumGoroutine(), held()
	streams, conns := make([]tunnel.Stream, n), make([]*net.TCPConn, n)
	atRest := func(when string) {
		t.Helper()
		eventually(t, when+" have as few goroutines as they should", func() bool {
			return runtime.NumGoroutine() <= goroutines+n*c.Goroutines+5
		})
		var each int64
		eventually(t, when+" give their memory back", func() bool {
			each = (held() - bytes) / n
			return each <= c.Bytes
		})
		t.Logf("%s: %d bytes each", when, each)
	}
	for i := range streams {
		streams[i], conns[i] = pair()
		rest(streams[i])
	}
	atRest("new tunnels")
	for i, s := range streams {
		exchange(t, s, conns[i])
		exchange(t, conns[i], s)
		rest(s)
	}
	atRest("used tunnels")
	if c.Aborted == nil {
		c.Aborted = func(err error) bool { return errors.Is(err, syscall.ECONNRESET) }
	}
	reset := func(err error) bool { return errors.Is(err, syscall.ECONNRESET) }
	end := func(err error) bool { return err == io.EOF }
	for i, do := range []func(s tunnel.Stream, c *net.TCPConn){
		func(s tunnel.Stream, c *net.TCPConn) { // the client's end, and then the service's
			_ = s.CloseWrite()
			wantRead(t, c, end)
			exchange(t, c, s)
			_ = c.CloseWrite()
			wantRead(t, s, end)
		},
		func(s tunnel.Stream, c *net.TCPConn) {
			_ = c.CloseWrite()
			wantRead(t, s, end)
			exchange(t, s, c)
			_ = s.CloseWrite()
			wantRead(t, c, end)
		},
		func(s tunnel.Stream, c *net.TCPConn) {
			_ = s.(tunnel.Aborter).Abort()
			wantRead(t, c, reset)
		},
		func(s tunnel.Stream, conn *net.TCPConn) {
			_ = conn.SetLinger(0)
			_ = conn.Close()
			wantRead(t, s, c.Aborted)
		},
		func(s tunnel.Stream, c *net.TCPConn) { // in the middle of a message
			_, _ = s.Write([]byte("half"))
			_ = s.(tunnel.Aborter).Abort()
			got, err := io.ReadAll(c)
			if err == nil || len(got) != 0 && string(got) != "half" {
				t.Errorf("got %q, %v, want a reset", got, err)
			}
		},
		func(s tunnel.Stream, c *net.TCPConn) { // more than any buffer
			want := random(1<<20, 3)
			go func() { _, _ = s.Write(want); _ = s.CloseWrite() }()
			if err := receive(c, want); err != nil {
				t.Error(err)
			}
		},
		func(s tunnel.Stream, conn *net.TCPConn) { // by an operator
			killed := g.Relay.EndFunc(tunnel.Killed, func(v *tunnel.Live) bool { return v.In == 4 && v.Out == 4 && !v.HalfClosed })
			if killed == 0 {
				t.Error("no tunnel was there to be killed")
			}
			wantRead(t, s, c.Aborted)
			wantRead(t, conn, reset)
		},
	} {
		do(streams[i], conns[i])
	}
}

// everywhere is a Resolver that leads all to one address.
type everywhere string

func (to everywhere) Resolve(context.Context, *tunnel.Request) (tunnel.Route, error) {
	return RouteTo(string(to)), nil
}

// rest has a client's stream give up what only a Read needs, as a Relay would, where it
// stands on another stream. Any other has nothing to give up, or a goroutine to start.
func rest(s tunnel.Stream) {
	w, waits := s.(tunnel.Waiter)
	if _, layer := s.(interface{ NetConn() net.Conn }); layer && waits {
		w.WaitRead(func() {})
	}
}

// held is how much the process holds, in bytes.
func held() int64 {
	runtime.GC()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc + m.StackInuse)
}

// exchange sends a few bytes from one end to the other.
func exchange(t *testing.T, from, to net.Conn) {
	t.Helper()
	if _, err := io.WriteString(from, "ping"); err != nil {
		t.Fatal(err)
	}
	b := make([]byte, 4)
	if _, err := io.ReadFull(to, b); err != nil || string(b) != "ping" {
		t.Fatalf("got %q, %v, want what was sent", b, err)
	}
}

// wantRead reads an error that is as wanted.
func wantRead(t *testing.T, c net.Conn, want func(error) bool) {
	t.Helper()
	if n, err := c.Read(make([]byte, 1)); n > 0 || !want(err) {
		t.Errorf("read %d bytes and %v, which is not what was done", n, err)
	}
}
