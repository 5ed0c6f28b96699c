//go:build amd64 || arm64

package tunnel

import (
	"context"
	"errors"
	"io"
	"net"
	"net/netip"
	"os"
	"syscall"
	"testing"
	"time"

	"golang.org/x/net/nettest"
)

// sockPair returns the two ends of one connection, accepted and dialed.
func sockPair(t testing.TB) (accepted, dialed *sock) {
	t.Helper()
	ln, err := Listen(t.Context(), "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	c, err := dialTCP(t.Context(), ln.Addr().(*net.TCPAddr).AddrPort())
	if err != nil {
		t.Fatal(err)
	}
	a, err := ln.Accept()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { a.Close(); c.Close() })
	return a.(*sock), c.(*sock)
}

func TestSockIsAConn(t *testing.T) {
	nettest.TestConn(t, func() (net.Conn, net.Conn, func(), error) {
		a, b := sockPair(t)
		return a, b, func() { a.Close(); b.Close() }, nil
	})
}

func TestSockStaysOutOfThePollerUntilItWaits(t *testing.T) {
	a, b := sockPair(t)
	if _, err := b.Write([]byte("hello")); err != nil {
		t.Fatal(err)
	}
	if n, err := a.Read(make([]byte, 10)); n != 5 || err != nil {
		t.Fatalf("read %d, %v", n, err)
	}
	if a.file != nil || b.file != nil {
		t.Error("a socket that never waited is in the poller")
	}
	_ = a.SetReadDeadline(time.Now().Add(10 * time.Millisecond))
	if _, err := a.Read(make([]byte, 1)); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("a read without data: got %v, want the deadline", err)
	}
	if a.file == nil {
		t.Error("a socket that waited is not in the poller")
	}
}

func TestSockTake(t *testing.T) {
	for _, waited := range []bool{false, true} {
		a, b := sockPair(t)
		if waited {
			_ = a.SetReadDeadline(time.Now().Add(time.Millisecond))
			_, _ = a.Read(make([]byte, 1))
		}
		fd, err := a.take()
		if err != nil {
			t.Fatal(err)
		}
		for what, err := range map[string]error{
			"read":  func() error { _, err := a.Read(make([]byte, 1)); return err }(),
			"write": func() error { _, err := a.Write([]byte("x")); return err }(),
			"close": a.Close(),
		} {
			if !errors.Is(err, net.ErrClosed) {
				t.Errorf("waited %v: %s after take: got %v, want closed", waited, what, err)
			}
		}
		if n, errno := send(fd, []byte("from the descriptor")); n != 19 || errno != 0 {
			t.Errorf("waited %v: the descriptor: %d, %v", waited, n, errno)
		}
		closeFD(fd)
		if got, err := io.ReadAll(b); string(got) != "from the descriptor" || err != nil {
			t.Errorf("waited %v: the peer read %q, %v", waited, got, err)
		}
	}
}

func TestSockEndings(t *testing.T) {
	a, b := sockPair(t)
	_ = a.CloseWrite()
	if n, err := b.Read(make([]byte, 1)); n != 0 || err != io.EOF {
		t.Errorf("after CloseWrite: %d, %v; want EOF itself", n, err)
	}
	_ = b.Abort()
	if _, err := a.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("after Abort: got %v, want a reset", err)
	}
}

func TestSockAddrs(t *testing.T) {
	a, b := sockPair(t)
	if a.LocalAddr().String() != b.RemoteAddr().String() || a.RemoteAddr().String() != b.LocalAddr().String() {
		t.Errorf("addresses don't match: %v %v, %v %v", a.LocalAddr(), a.RemoteAddr(), b.LocalAddr(), b.RemoteAddr())
	}
	if remote, port := a.addrs(); !remote.Addr().IsLoopback() || int(port) != a.LocalAddr().(*net.TCPAddr).Port {
		t.Errorf("addrs: %v, %d", remote, port)
	}
}

func TestSockOverIPv6AndWildcard(t *testing.T) {
	ln, err := Listen(t.Context(), "[::]:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	port := uint16(ln.Addr().(*net.TCPAddr).Port)
	for _, to := range []string{"127.0.0.1", "::1"} {
		addr := netip.AddrPortFrom(netip.MustParseAddr(to), port)
		c, err := dialTCP(t.Context(), addr)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		a, err := ln.Accept()
		if err != nil {
			t.Fatal(err)
		}
		defer a.Close()
		if got := a.LocalAddr().String(); got != addr.String() {
			t.Errorf("accepted at %s, want %s", got, addr)
		}
		if got := a.RemoteAddr().(*net.TCPAddr).AddrPort().Addr(); got != addr.Addr() {
			t.Errorf("from %s, want %s", got, addr.Addr())
		}
	}
}

func TestDialTCPFailures(t *testing.T) {
	ln, err := Listen(t.Context(), "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	addr := ln.Addr().(*net.TCPAddr).AddrPort()
	ln.Close()
	if _, err := dialTCP(t.Context(), addr); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("a closed port: got %v, want refused", err)
	}
	done, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := dialTCP(done, addr); !errors.Is(err, context.Canceled) {
		t.Errorf("a context that is done: got %v", err)
	}
}

// A full backlog answers no SYN: the dial waits until its context ends it.
func TestDialTCPWaitsInThePoller(t *testing.T) {
	fd, err := syscall.Socket(syscall.AF_INET, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer syscall.Close(fd)
	if err := syscall.Bind(fd, &syscall.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Listen(fd, 0); err != nil {
		t.Fatal(err)
	}
	sa, _ := syscall.Getsockname(fd)
	addr := addrPortOf(sa)
	var held []net.Conn
	defer func() {
		for _, c := range held {
			c.Close()
		}
	}()
	for range 8 { // fills the backlog, and then waits
		ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
		c, err := dialTCP(ctx, addr)
		cancel()
		if err != nil {
			if !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("got %v, want the deadline", err)
			}
			return
		}
		held = append(held, c)
	}
	t.Error("no dial had to wait: the test says nothing")
}
