//go:build amd64 || arm64

package poll

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

func listen(t testing.TB, addr string) net.Listener {
	t.Helper()
	ln, err := net.Listen("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	return NewListener(ln)
}

// connPair returns the two ends of one connection, accepted and dialed.
func connPair(t testing.TB) (accepted, dialed *Conn) {
	t.Helper()
	ln := listen(t, "127.0.0.1:0")
	defer ln.Close()
	c, err := Dial(t.Context(), ln.Addr().(*net.TCPAddr).AddrPort(), 0, nil)
	if err != nil {
		t.Fatal(err)
	}
	a, err := ln.Accept()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { a.Close(); c.Close() })
	return a.(*Conn), c.(*Conn)
}

func TestConn(t *testing.T) {
	nettest.TestConn(t, func() (net.Conn, net.Conn, func(), error) {
		a, b := connPair(t)
		return a, b, func() { a.Close(); b.Close() }, nil
	})
}

func TestConnStaysOutOfThePollerUntilItWaits(t *testing.T) {
	a, b := connPair(t)
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

func TestTakeFD(t *testing.T) {
	for _, waited := range []bool{false, true} {
		a, b := connPair(t)
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
		if n, errno := Send(fd, []byte("from the descriptor")); n != 19 || errno != 0 {
			t.Errorf("waited %v: the descriptor: %d, %v", waited, n, errno)
		}
		CloseFD(fd)
		if got, err := io.ReadAll(b); string(got) != "from the descriptor" || err != nil {
			t.Errorf("waited %v: the peer read %q, %v", waited, got, err)
		}
	}
}

func TestConnEndings(t *testing.T) {
	a, b := connPair(t)
	_ = a.CloseWrite()
	if n, err := b.Read(make([]byte, 1)); n != 0 || err != io.EOF {
		t.Errorf("after CloseWrite: %d, %v; want EOF itself", n, err)
	}
	_ = b.Abort()
	if _, err := a.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("after Abort: got %v, want a reset", err)
	}
}

func TestConnAddrs(t *testing.T) {
	a, b := connPair(t)
	if a.LocalAddr().String() != b.RemoteAddr().String() || a.RemoteAddr().String() != b.LocalAddr().String() {
		t.Errorf("addresses don't match: %v %v, %v %v", a.LocalAddr(), a.RemoteAddr(), b.LocalAddr(), b.RemoteAddr())
	}
	if remote, port := a.AddrPorts(); !remote.Addr().IsLoopback() || int(port) != a.LocalAddr().(*net.TCPAddr).Port {
		t.Errorf("AddrPorts: %v, %d", remote, port)
	}
}

func TestConnOverIPv6AndWildcard(t *testing.T) {
	ln := listen(t, "[::]:0")
	defer ln.Close()
	port := uint16(ln.Addr().(*net.TCPAddr).Port)
	for _, to := range []string{"127.0.0.1", "::1"} {
		addr := netip.AddrPortFrom(netip.MustParseAddr(to), port)
		c, err := Dial(t.Context(), addr, 0, nil)
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

func TestDialFailures(t *testing.T) {
	ln := listen(t, "127.0.0.1:0")
	defer ln.Close()
	// A connection to somewhere else has the port: no other program listens there.
	holder, err := (&net.Dialer{LocalAddr: &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1)}}).Dial("tcp", ln.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer holder.Close()
	addr := holder.LocalAddr().(*net.TCPAddr).AddrPort()
	if _, err := Dial(t.Context(), addr, 0, nil); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("a closed port: got %v, want refused", err)
	}
	done, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := Dial(done, addr, 0, nil); !errors.Is(err, context.Canceled) {
		t.Errorf("a context that is done: got %v", err)
	}
}

// A full backlog answers no SYN: the dial waits until its context ends it.
func TestDialWaitsInThePoller(t *testing.T) {
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
		c, err := Dial(ctx, addr, 0, nil)
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
