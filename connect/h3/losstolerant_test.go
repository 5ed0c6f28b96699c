package h3

import (
	"io"
	"net"
	"os"
	"sync/atomic"
	"syscall"
	"testing"

	"culvert.dev/internal/testnet"
	"culvert.dev/tunnel/tunneltest"
)

// Only a way that is gone makes a datagram lost, and only once there is a
// connection: a dial to nowhere fails at once.
func TestWhatCountsAsLoss(t *testing.T) {
	for errno, want := range map[syscall.Errno]bool{
		syscall.ENETUNREACH: true, syscall.EHOSTUNREACH: true, syscall.ENETDOWN: true,
		syscall.EMSGSIZE: false, syscall.EBADF: false, syscall.EINVAL: false,
	} {
		err := &net.OpError{Op: "write", Net: "udp", Err: os.NewSyscallError("sendmsg", errno)}
		s := &lossTolerant{}
		if s.lost(err) {
			t.Errorf("%v before there is a connection: lost, want the error", errno)
		}
		s.on.Store(true)
		if got := s.lost(err); got != want {
			t.Errorf("%v: lost %v, want %v", errno, got, want)
		}
	}
}

// A cut socket can't send while its link is down.
type cut struct {
	net.PacketConn
	down atomic.Bool
	lost atomic.Int64
}

func (c *cut) WriteTo(b []byte, to net.Addr) (int, error) {
	if c.down.Load() {
		c.lost.Add(1)
		return 0, &net.OpError{Op: "write", Net: "udp", Err: os.NewSyscallError("sendto", syscall.ENETUNREACH)}
	}
	return c.PacketConn.WriteTo(b, to)
}

// A server whose own link goes down loses what it sends meanwhile, and no tunnel.
func TestServersLinkGoesDown(t *testing.T) {
	pc := &cut{PacketConn: socket(t)}
	g := serveAt(t, tunneltest.Table{"svc:1": testnet.Echo(t).Addr()}, &Server{}, pc)
	c := open(t, newDialer(t, g.addr), "svc:1")
	defer c.Close()
	echo := func(s string) {
		t.Helper()
		b := make([]byte, len(s))
		if _, err := io.ReadFull(c, b); err != nil || string(b) != s {
			t.Fatalf("got %q (%v), want %q", b, err, s)
		}
	}
	send := func(s string) {
		t.Helper()
		if _, err := io.WriteString(c, s); err != nil {
			t.Fatal(err)
		}
	}
	send("before")
	echo("before")
	pc.down.Store(true)
	send("meanwhile")
	testnet.Eventually(t, testTimeout, func() bool { return pc.lost.Load() > 1 }, "the server sends while its link is down")
	pc.down.Store(false)
	echo("meanwhile")
	send("after")
	echo("after")
}

// A whole socket is of the kind that QUIC knows all about.
func TestServerSocket(t *testing.T) {
	s, ok := serverSocket(socket(t)).(*lossTolerant)
	if !ok || !s.on.Load() {
		t.Errorf("a socket of the server is %v, and counts errors as loss: want a lossTolerant that does", s)
	}
}
