//go:build amd64 || arm64

package poll

import (
	"io"
	"os"
	"slices"
	"testing"
	"time"
)

const patience = 30 * time.Second

// A socket says nothing is under way, or that its peer's window is closed, or
// that all was taken after all.
func TestSendInfo(t *testing.T) {
	a, b := connPair(t)
	look := func(c *Conn) (s sendState) {
		t.Helper()
		if err := c.Control(func(fd int32) error { s, _, _ = sendInfo(fd); return nil }); err != nil {
			t.Fatal(err)
		}
		return s
	}
	becomes := func(when string, want sendState) {
		t.Helper()
		got := sendState(-1)
		for deadline := time.Now().Add(patience); got != want && time.Now().Before(deadline); time.Sleep(time.Millisecond) {
			got = look(a)
		}
		if got != want {
			t.Errorf("%s: state %d, want %d", when, got, want)
		}
	}
	becomes("at first", sendIdle)
	if _, err := a.Write([]byte("x")); err != nil {
		t.Fatal(err)
	}
	becomes("unread and acknowledged", sendIdle)
	n := 0
	for limit := time.Now().Add(patience); look(a) != sending && time.Now().Before(limit); {
		_ = a.SetWriteDeadline(time.Now().Add(100 * time.Millisecond))
		more, err := a.Write(make([]byte, 64<<20))
		if n += more; !os.IsTimeout(err) {
			t.Fatalf("%d bytes went to a peer that does not read: %v", n, err)
		}
	}
	becomes("with the window closed", sending)
	_ = b.SetDeadline(time.Now().Add(patience))
	if _, err := io.CopyN(io.Discard, b, int64(n+1)); err != nil {
		t.Fatal(err)
	}
	becomes("after all was read", sendIdle)
	if got := look(b); got != sendIdle {
		t.Errorf("at the other side: state %d, want %d", got, sendIdle)
	}
}

// A peer is dead that has acknowledged nothing of what was sent again at six looks
// in a row, or answered none of three probes; not one that acknowledges now and then,
// or that has closed its window.
func TestPeerCheck(t *testing.T) {
	const quiet = 6 * time.Second
	type look struct {
		state    sendState
		sinceAck time.Duration
		probes   int
	}
	gone, none, held, late := look{state: retransmitting, sinceAck: quiet}, look{}, look{state: sending, sinceAck: quiet}, look{state: retransmitting, sinceAck: time.Second}
	times := func(n int, l look) []look { return slices.Repeat([]look{l}, n) }
	for _, tt := range []struct {
		name  string
		looks []look
		want  int // at which look it is found, from 1 on; 0 for none
	}{
		{"acknowledges nothing", times(8, gone), 6},
		{"had closed its window, and acknowledges nothing", slices.Concat(times(20, held), times(8, gone)), 25},
		{"acknowledges now and then", slices.Concat(times(5, gone), times(1, late), times(4, gone), times(1, late), times(4, gone)), 0},
		{"has all of it in the end", slices.Concat(times(5, gone), times(1, none), times(5, gone)), 0},
		{"has closed its window", times(100, held), 0},
		{"is sent nothing", times(100, none), 0},
		{"has left two probes unanswered", times(5, look{probes: 2}), 0},
		{"answers no probe", []look{none, {probes: 1}, {probes: 2}, {probes: 3}}, 4},
	} {
		var check PeerCheck
		if got := slices.IndexFunc(tt.looks, func(l look) bool { return check.update(l.state, l.sinceAck, l.probes) }) + 1; got != tt.want {
			t.Errorf("a peer that %s is dead at look %d, want %d", tt.name, got, tt.want)
		}
	}
}
