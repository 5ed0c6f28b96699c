//go:build amd64 || arm64

package tunnel_test

import (
	"io"
	"net"
	"os"
	"slices"
	"testing"
	"time"

	"culvert.dev/tunnel"
)

// A socket says nothing is under way, or that its peer's window is closed, or
// that all was taken after all.
func TestUnderWay(t *testing.T) {
	a, b := tcpPair(t)
	defer a.Close()
	defer b.Close()
	look := func(c *net.TCPConn) string {
		t.Helper()
		raw, err := c.SyscallConn()
		if err != nil {
			t.Fatal(err)
		}
		var what string
		if err := raw.Control(func(fd uintptr) { what = tunnel.UnderWay(int32(fd)) }); err != nil {
			t.Fatal(err)
		}
		return what
	}
	becomes := func(when, want string) {
		t.Helper()
		got := ""
		for deadline := time.Now().Add(patience); got != want && time.Now().Before(deadline); time.Sleep(time.Millisecond) {
			got = look(a)
		}
		if got != want {
			t.Errorf("%s: %s, want %s", when, got, want)
		}
	}
	becomes("at first", "nothing")
	if _, err := a.Write([]byte("x")); err != nil {
		t.Fatal(err)
	}
	becomes("unread and acknowledged", "nothing")
	n := 0
	for limit := time.Now().Add(patience); look(a) != "waiting" && time.Now().Before(limit); {
		_ = a.SetWriteDeadline(time.Now().Add(100 * time.Millisecond))
		more, err := a.Write(make([]byte, 64<<20))
		if n += more; !os.IsTimeout(err) {
			t.Fatalf("%d bytes went to a peer that does not read: %v", n, err)
		}
	}
	becomes("with the window closed", "waiting")
	_ = b.SetDeadline(time.Now().Add(patience))
	if _, err := io.CopyN(io.Discard, b, int64(n+1)); err != nil {
		t.Fatal(err)
	}
	becomes("after all was read", "nothing")
	if got := look(b); got != "nothing" {
		t.Errorf("at the other side: %s, want nothing", got)
	}
}

// A peer is dead that has acknowledged nothing of what was sent again at six looks
// in a row, or answered none of three probes; not one that acknowledges now and then,
// or that has closed its window.
func TestWhoIsDead(t *testing.T) {
	const quiet = 6 * time.Second
	gone, none, held, late := tunnel.Look{Under: "unanswered", Quiet: quiet}, tunnel.Look{Under: "nothing"},
		tunnel.Look{Under: "waiting", Quiet: quiet}, tunnel.Look{Under: "unanswered", Quiet: time.Second}
	times := func(n int, l tunnel.Look) []tunnel.Look { return slices.Repeat([]tunnel.Look{l}, n) }
	for _, tt := range []struct {
		name  string
		looks []tunnel.Look
		want  int // at which look it is found, from 1 on; 0 for none
	}{
		{"acknowledges nothing", times(8, gone), 6},
		{"had closed its window, and acknowledges nothing", slices.Concat(times(20, held), times(8, gone)), 25},
		{"acknowledges now and then", slices.Concat(times(5, gone), times(1, late), times(4, gone), times(1, late), times(4, gone)), 0},
		{"has all of it in the end", slices.Concat(times(5, gone), times(1, none), times(5, gone)), 0},
		{"has closed its window", times(100, held), 0},
		{"is sent nothing", times(100, none), 0},
		{"has left two probes unanswered", times(5, tunnel.Look{Under: "nothing", Probes: 2}), 0},
		{"answers no probe", []tunnel.Look{none, {Under: "nothing", Probes: 1}, {Under: "nothing", Probes: 2}, {Under: "nothing", Probes: 3}}, 4},
	} {
		if got := slices.Index(tunnel.Judges(tt.looks...), true) + 1; got != tt.want {
			t.Errorf("a peer that %s is dead at look %d, want %d", tt.name, got, tt.want)
		}
	}
}
