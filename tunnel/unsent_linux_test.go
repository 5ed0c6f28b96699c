//go:build amd64 || arm64

package tunnel_test

import (
	"errors"
	"net"
	"os"
	"testing"
	"time"

	"culvert.dev/internal/testnet"
	"culvert.dev/tunnel"
)

// TestLimitUnsent: the kernel takes little of what a peer that reads nothing has no room for.
func TestLimitUnsent(t *testing.T) {
	const limit = 16 << 10
	ln := testnet.Listen(t)
	c, err := net.Dial("tcp", ln.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	far, err := ln.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer far.Close()
	_ = far.(*net.TCPConn).SetReadBuffer(16 << 10)
	near := tunnel.NewConn(c)
	tunnel.LimitUnsent(near, limit)
	_ = near.SetWriteDeadline(time.Now().Add(time.Second))
	n, err := near.Write(make([]byte, 32<<20))
	if !errors.Is(err, os.ErrDeadlineExceeded) || n > 512<<10 {
		t.Errorf("%d bytes and %v, want a timeout after few more than %d", n, err, limit)
	}
	if tunnel.RoomCheck(near)() {
		t.Error("there is room in a socket that took no more")
	}
}
