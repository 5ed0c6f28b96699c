package h2

import (
	"errors"
	"io"
	"net"
	"syscall"
	"testing"
	"time"

	"culvert.dev/tunnel"
	"culvert.dev/tunnel/tunneltest"
)

// TestWakeRead: what would end a Read wakes who waits for that, once.
func TestWaitRead(t *testing.T) {
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
		if near.WaitRead(func() { t.Errorf("%s: who was replaced was woken", c.name) }) || near.WaitRead(func() { woken <- struct{}{} }) {
			t.Errorf("%s: a Read would not wait, before anything happened", c.name)
		}
		c.do(near, far)
		select {
		case <-woken:
		case <-time.After(patience):
			t.Fatalf("%s: nobody was woken", c.name)
		}
		if !near.WaitRead(func() { t.Errorf("%s: woken for what was known", c.name) }) {
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

// TestResting checks that whole tunnels at rest hold no goroutine and no buffer.
func TestResting(t *testing.T) {
	tunneltest.TestResting(t, tunneltest.Resting{
		Serve: func(t *testing.T, routes tunnel.Resolver) tunneltest.Served {
			g := serve(t, routes, &Protocol{})
			d := newDialer(t, g.Addr)
			d.Idle, d.Parallel = time.Minute, 1
			return g.With(d, "svc:1")
		},
		Bytes: 16 << 10,
	})
}
