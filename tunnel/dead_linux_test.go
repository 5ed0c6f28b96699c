//go:build amd64 || arm64

package tunnel_test

import (
	"io"
	"net"
	"os"
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
