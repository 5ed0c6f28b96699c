//go:build amd64 || arm64

package relay

import (
	"bytes"
	"errors"
	"math/rand/v2"
	"net"
	"sync"
	"syscall"
	"testing"
	"time"
)

// A pullStream takes what a source has, as a stream of HTTP/2 does. Nothing comes from it before
// its Close.
type pullStream struct {
	net.Conn
	mu     sync.Mutex
	got    []byte
	pulled int // bytes that came from a source
	ended  bool
	before func() // called before a source; nil for nothing
	closed chan struct{}
	once   sync.Once
}

func (s *pullStream) Read([]byte) (int, error) { <-s.closed; return 0, net.ErrClosed }

func (s *pullStream) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.got = append(s.got, p...)
	return len(p), nil
}

func (s *pullStream) WriteFrom(p []byte, source func(run [][]byte) int) (int, error) {
	n, err := s.Write(p)
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			run := make([][]byte, 1+rand.IntN(4))
			all := make([]byte, 0, 64<<10)
			for i := range run {
				run[i] = make([]byte, 1+rand.IntN(16<<10))
			}
			if s.before != nil {
				s.before()
			}
			m := source(run)
			for _, b := range run {
				all = append(all, b...)
			}
			_, _ = s.Write(all[:m])
			s.mu.Lock()
			s.pulled += m
			s.mu.Unlock()
			if m < len(all) {
				return
			}
		}
	}()
	<-done
	return n, err
}

func (s *pullStream) CloseWrite() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ended = true
	return nil
}

func (s *pullStream) Close() error                  { s.once.Do(func() { close(s.closed) }); return nil }
func (*pullStream) SetReadDeadline(time.Time) error { return nil }

// carryPull carries from a socket, whose other end it returns, to a pullStream.
func carryPull(t *testing.T, before func()) (near *net.TCPConn, s *pullStream, ended chan End) {
	t.Helper()
	s, ended = &pullStream{before: before, closed: make(chan struct{})}, make(chan End, 1)
	return carrySocket(t, s, ended), s, ended
}

// TestPulledBytesKeepTheirOrder: what comes from a socket is pulled where it is much, and arrives
// in order and all, and then the end.
func TestPulledBytesKeepTheirOrder(t *testing.T) {
	near, s, ended := carryPull(t, nil)
	const total = 16 << 20
	want := make([]byte, total)
	_, _ = rand.NewChaCha8([32]byte{}).Read(want)
	_ = near.SetWriteDeadline(time.Now().Add(pushPatience))
	for rest := want; len(rest) > 0; {
		n := min(len(rest), 1+rand.IntN(100<<10))
		if _, err := near.Write(rest[:n]); err != nil {
			t.Fatal(err)
		}
		rest = rest[n:]
	}
	_ = near.CloseWrite()
	for late := time.Now().Add(pushPatience); ; time.Sleep(time.Millisecond) {
		s.mu.Lock()
		over, got, pulled := s.ended, len(s.got), s.pulled
		s.mu.Unlock()
		if over {
			if pulled == 0 {
				t.Error("no byte was pulled")
			}
			break
		}
		if time.Now().After(late) {
			t.Fatalf("no end after %d bytes", got)
		}
	}
	if !bytes.Equal(s.got, want) {
		t.Errorf("got %d bytes, want %d as they were sent", len(s.got), total)
	}
	_ = s.Close()
	if e := <-ended; e.Reason != Done || e.In != total {
		t.Errorf("ended with %+v, want %d bytes and %v", e, total, Done)
	}
}

// TestPullFromALostSocket: a socket that is reset while it is pulled from ends the tunnel with a
// reset, and not with the end of the stream: the kernel says so once.
func TestPullFromALostSocket(t *testing.T) {
	client := make(chan *net.TCPConn, 1)
	reset := sync.OnceFunc(func() {
		c := <-client
		_ = c.SetLinger(0)
		_ = c.Close()
	})
	near, s, ended := carryPull(t, reset)
	client <- near
	if _, err := near.Write(make([]byte, shortRead)); err != nil {
		t.Fatal(err)
	}
	select {
	case e := <-ended:
		if e.Reason != Reset || !errors.Is(e.Err, syscall.ECONNRESET) {
			t.Errorf("ended with %+v, want %v", e, Reset)
		}
	case <-time.After(pushPatience):
		t.Fatal("the tunnel does not end")
	}
	if s.ended {
		t.Error("the stream was ended in order")
	}
}
