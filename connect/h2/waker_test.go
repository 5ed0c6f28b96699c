package h2

import (
	"errors"
	"io"
	"net"
	"runtime"
	"syscall"
	"testing"
	"time"

	"culvert.dev/internal/testnet"
	"culvert.dev/tunnel"
	"culvert.dev/tunnel/tunneltest"
)

// TestWakeRead: what would end a Read wakes who waits for that, once.
func TestWakeRead(t *testing.T) {
	makePipe := pipes(t, &Protocol{})
	for _, c := range []struct {
		name string
		do   func(near, far *Stream)
		want error // of the Read; nil for a byte
	}{
		{"bytes", func(_, far *Stream) { _, _ = far.Write([]byte{7}) }, nil},
		{"the end", func(_, far *Stream) { _ = far.CloseWrite() }, io.EOF},
		{"a reset", func(_, far *Stream) { _ = far.Abort() }, syscall.ECONNRESET},
		{"our own close", func(near, _ *Stream) { _ = near.Close() }, net.ErrClosed},
		{"our own abort", func(near, _ *Stream) { _ = near.Abort() }, net.ErrClosed},
		{"the end of the connection", func(_, far *Stream) { _ = far.c.nc.Close() }, syscall.ECONNRESET},
	} {
		a, b, stop, err := makePipe()
		if err != nil {
			t.Fatal(err)
		}
		near, far := a.(*Stream), b.(*Stream)
		woken := make(chan struct{}, 10)
		if near.WakeRead(func() { t.Errorf("%s: who was replaced was woken", c.name) }) || near.WakeRead(func() { woken <- struct{}{} }) {
			t.Errorf("%s: a Read would not wait, before anything happened", c.name)
		}
		c.do(near, far)
		select {
		case <-woken:
		case <-time.After(patience):
			t.Fatalf("%s: nobody was woken", c.name)
		}
		if !near.WakeRead(func() { t.Errorf("%s: woken for what was known", c.name) }) {
			t.Errorf("%s: a Read would still wait", c.name)
		}
		_ = near.SetReadDeadline(time.Now().Add(patience))
		if _, err := near.Read(make([]byte, 1)); !errors.Is(err, c.want) {
			t.Errorf("%s: got %v, want %v", c.name, err, c.want)
		}
		stop()
		if len(woken) > 0 {
			t.Errorf("%s: woken %d times more", c.name, len(woken))
		}
	}
}

// TestIdleTunnelsHoldNoGoroutine: a tunnel at rest, between a stream and a
// socket, has none of the gateway's; and whatever happens then is carried.
func TestIdleTunnelsHoldNoGoroutine(t *testing.T) {
	const n = 60
	ln := testnet.Listen(t)
	g := serve(t, tunneltest.Table{"svc:1": ln.Addr().String()}, &Protocol{})
	d := newDialer(t, g.Addr)
	d.Idle, d.Parallel = time.Minute, 1
	pair := func() (*Stream, *net.TCPConn) {
		s := open(t, d, "svc:1")
		c, err := ln.Accept()
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = c.Close() })
		_ = c.SetDeadline(time.Now().Add(patience))
		return s, c.(*net.TCPConn)
	}
	pair()
	base := runtime.NumGoroutine()
	streams, conns := make([]*Stream, n), make([]*net.TCPConn, n)
	atRest := func(when string) {
		t.Helper()
		testnet.Eventually(t, patience, func() bool { return runtime.NumGoroutine() <= base+5 }, "%s", "no goroutine for "+when)
	}
	for i := range streams {
		streams[i], conns[i] = pair()
	}
	atRest("new tunnels")
	for i, s := range streams {
		exchange(t, s, conns[i])
		exchange(t, conns[i], s)
	}
	atRest("used tunnels")
	for i, s := range streams {
		c := conns[i]
		switch i {
		case 0: // the client's end, and then the service's
			_ = s.CloseWrite()
			wantRead(t, c, io.EOF)
			exchange(t, c, s)
			_ = c.CloseWrite()
			wantRead(t, s, io.EOF)
		case 1:
			_ = c.CloseWrite()
			wantRead(t, s, io.EOF)
			exchange(t, s, c)
			_ = s.CloseWrite()
			wantRead(t, c, io.EOF)
		case 2:
			_ = s.Abort()
			wantRead(t, c, syscall.ECONNRESET)
		case 3:
			_ = c.SetLinger(0)
			_ = c.Close()
			wantRead(t, s, syscall.ECONNRESET)
		case 4: // in the middle of a message
			_, _ = s.Write([]byte("half"))
			_ = s.Abort()
			got, err := io.ReadAll(c)
			if err == nil || len(got) != 0 && string(got) != "half" {
				t.Errorf("got %q, %v, want a reset", got, err)
			}
		case 5: // by an operator
			killed := g.Relay.EndFunc(tunnel.Killed, func(v *tunnel.Live) bool { return v.In == 4 && v.Out == 4 && !v.HalfClosed })
			if i == 5 && killed == 0 {
				t.Error("no tunnel was there to be killed")
			}
			wantRead(t, s, syscall.ECONNRESET)
			wantRead(t, c, syscall.ECONNRESET)
			return
		}
	}
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

// wantRead reads nothing but err.
func wantRead(t *testing.T, c net.Conn, want error) {
	t.Helper()
	if n, err := c.Read(make([]byte, 1)); n > 0 || !errors.Is(err, want) {
		t.Errorf("read %d bytes and %v, want %v", n, err, want)
	}
}
