package testnet

import (
	"io"
	"net"
	"testing"
	"time"
)

// Deadlines, without which a test could hang.
const (
	clientTime  = time.Minute      // a client's connection
	serviceTime = 90 * time.Second // a service's, which is to outlast its clients
)

// Service starts a server as Serve does and returns its address. Reads and
// writes of its connections fail after 90 s, so that a handler's test ends.
func Service(t testing.TB, handle func(net.Conn)) string {
	t.Helper()
	return Serve(t, func(c net.Conn) {
		_ = c.SetDeadline(time.Now().Add(serviceTime))
		handle(c)
	}).Addr()
}

// Listen listens on loopback. The listener is closed with the test, if not
// before.
func Listen(t testing.TB) net.Listener {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatalf("testnet: %v", err)
	}
	t.Cleanup(func() { _ = ln.Close() })
	return ln
}

// ClosedPort returns an address where nobody listens. A connection to somewhere
// else has its port until the end of the test, so that no other program takes it.
func ClosedPort(t testing.TB) string {
	t.Helper()
	d := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1)}, Timeout: clientTime}
	c, err := d.Dial("tcp", Listen(t).Addr().String())
	if err != nil {
		t.Fatalf("testnet: %v", err)
	}
	t.Cleanup(func() { _ = c.Close() })
	return c.LocalAddr().String()
}

// ClosedUDPPort returns an address where nobody receives datagrams. A socket that
// hears one other address only has its port until the end of the test.
func ClosedUDPPort(t testing.TB) string {
	t.Helper()
	there, err := net.ListenUDP("udp", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatalf("testnet: %v", err)
	}
	t.Cleanup(func() { _ = there.Close() })
	c, err := net.DialUDP("udp", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)}, there.LocalAddr().(*net.UDPAddr))
	if err != nil {
		t.Fatalf("testnet: %v", err)
	}
	t.Cleanup(func() { _ = c.Close() })
	return c.LocalAddr().String()
}

// Connect connects to addr. The connection may be used for 30 s, and is closed
// with the test.
func Connect(t testing.TB, addr string) *net.TCPConn {
	t.Helper()
	c, err := net.DialTimeout("tcp", addr, clientTime)
	if err != nil {
		t.Fatalf("testnet: %v", err)
	}
	t.Cleanup(func() { _ = c.Close() })
	_ = c.SetDeadline(time.Now().Add(clientTime))
	return c.(*net.TCPConn)
}

// Ping writes s to an echo and reads the same.
func Ping(t testing.TB, c net.Conn, s string) {
	t.Helper()
	if _, err := io.WriteString(c, s); err != nil {
		t.Fatal(err)
	}
	got := make([]byte, len(s))
	if _, err := io.ReadFull(c, got); err != nil || string(got) != s {
		t.Fatalf("got %q and %v back, want %q", got, err, s)
	}
}
