package testnet

import (
	"errors"
	"io"
	"net"
	"os"
	"syscall"
	"testing"
	"testing/synctest"
	"time"
)

// TestPipe: bytes in order, half-closes, deadlines, resets and closes.
func TestPipe(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a, b := Pipe()
		_, _ = a.Write([]byte("hello"))
		_ = a.CloseWrite()
		if got, err := io.ReadAll(b); string(got) != "hello" || err != nil {
			t.Errorf("got %q and %v", got, err)
		}
		_ = a.SetReadDeadline(time.Now().Add(time.Second))
		if _, err := a.Read(make([]byte, 1)); !errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("a read after its deadline: %v", err)
		}
		_ = a.SetReadDeadline(time.Time{})
		_, _ = b.Write([]byte("back"))
		buf := make([]byte, 10)
		if n, err := a.Read(buf); string(buf[:n]) != "back" || err != nil {
			t.Errorf("got %q and %v", buf[:n], err)
		}
		_ = a.Close()
		if _, err := b.Write([]byte("x")); !errors.Is(err, syscall.ECONNRESET) {
			t.Errorf("a write to who is gone: %v", err)
		}
		if _, err := a.Read(buf); !errors.Is(err, net.ErrClosed) {
			t.Errorf("a read after Close: %v", err)
		}

		a, b = Pipe()
		b.Cut(2)
		if n, err := b.Write([]byte("hello")); n != 2 || !errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("a write that is cut: %d, %v", n, err)
		}
		b.Hold(true)
		_ = b.SetWriteDeadline(time.Now().Add(time.Second))
		if n, err := b.Write([]byte("hello")); n != 0 || !errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("a write that is held: %d, %v", n, err)
		}
		_ = b.Abort()
		if _, err := a.Read(buf); !errors.Is(err, syscall.ECONNRESET) {
			t.Errorf("a read after a reset: %v", err)
		}

		a, b = Pipe()
		_, _ = a.Write([]byte("unread"))
		_ = b.Close()
		if _, err := a.Read(buf); !errors.Is(err, syscall.ECONNRESET) {
			t.Errorf("a read from who has closed with unread bytes: %v", err)
		}
	})
}
