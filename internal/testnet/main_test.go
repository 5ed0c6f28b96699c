package testnet

import (
	"net"
	"strings"
	"testing"
	"time"
)

func TestMain(m *testing.M) { Main(m) }

func TestLeakedNamesWhatIsLeft(t *testing.T) {
	base := openFiles()
	if base == nil {
		LeaveOut(t, "no /proc: descriptors that tests leave open")
		return
	}
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	if left := leaked(base, 0); len(left) != 1 || !strings.Contains(left[0], "socket:") {
		t.Errorf("with a listener open: %q, want one socket", left)
	}
	_ = ln.Close()
	if left := leaked(base, settle); len(left) != 0 {
		t.Errorf("after it was closed: %q, want none", left)
	}
}

func TestEventually(t *testing.T) {
	n := 0
	Eventually(t, 10*time.Second, func() bool { n++; return n == 5 }, "the fifth time")
	f := newFake(t)
	f.run(func() { Eventually(f, time.Millisecond, func() bool { return false }, "pigs %s", "fly") })
	if len(f.errors) != 1 || !strings.Contains(f.errors[0], "not within 1ms: pigs fly") {
		t.Errorf("failures = %q, want one that names what was waited for", f.errors)
	}
}
