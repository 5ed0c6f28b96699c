//go:build amd64 || arm64

package relay

import (
	"bytes"
	"io"
	"math/rand/v2"
	"net"
	"runtime"
	"sync"
	"testing"
	"time"
)

const pushPatience = 30 * time.Second

// A pushStream pushes what send is given, as a stream of HTTP/2 does.
type pushStream struct {
	net.Conn
	mu     sync.Mutex // guards what follows
	come   sync.Cond
	in     []byte
	err    error
	wake   func()
	push   func([][]byte) int
	pushed int // bytes that were taken
}

func newPushStream() *pushStream {
	s := &pushStream{}
	s.come.L = &s.mu
	return s
}

func (s *pushStream) Read(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for len(s.in) == 0 && s.err == nil {
		s.come.Wait()
	}
	n := copy(p, s.in)
	if s.in = s.in[n:]; n > 0 {
		return n, nil
	}
	return 0, s.err
}

func (s *pushStream) WaitRead(wake func()) bool { return s.WaitPush(wake, nil) }

func (s *pushStream) WaitPush(wake func(), push func([][]byte) int) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.in) > 0 || s.err != nil {
		return true
	}
	s.wake, s.push = wake, push
	return false
}

// send is for bytes that come, or the end.
func (s *pushStream) send(p []byte, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if push := s.push; push != nil && len(s.in) == 0 && len(p) > 0 {
		s.mu.Unlock()
		n := push(split(p))
		s.mu.Lock()
		p = p[n:]
		s.pushed += n
	}
	s.in = append(s.in, p...)
	if s.err == nil {
		s.err = err
	}
	if len(s.in) > 0 || s.err != nil {
		s.come.Broadcast()
		if wake := s.wake; wake != nil {
			s.wake, s.push = nil, nil
			wake()
		}
	}
}

// split returns p in one to three slices, as frames of HTTP/2 have it.
func split(p []byte) (run [][]byte) {
	for i := rand.IntN(3); i > 0 && len(p) > 1; i-- {
		n := 1 + rand.IntN(len(p)-1)
		run, p = append(run, p[:n]), p[n:]
	}
	return append(run, p)
}

// left returns how many bytes wait, and how many were taken by pushes.
func (s *pushStream) left() (int, int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.in), s.pushed
}

func (s *pushStream) Write(p []byte) (int, error)   { return len(p), nil }
func (s *pushStream) CloseWrite() error             { return nil }
func (s *pushStream) Close() error                  { s.send(nil, net.ErrClosed); return nil }
func (*pushStream) SetReadDeadline(time.Time) error { return nil }

// carrySocket carries between a socket, whose other end it returns, and a stream.
func carrySocket(t *testing.T, s net.Conn, ended chan End) *net.TCPConn {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	c, err := net.Dial("tcp", ln.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	far, err := ln.Accept()
	if err != nil {
		t.Fatal(err)
	}
	loops := &Loops{Budget: noBudget{}}
	r := &Relay{Loops: loops}
	t.Cleanup(func() { r.Close(); loops.Stop() })
	r.Carry(&Tunnel{Client: far, Server: s, Owner: ownerFunc(func(e End) { ended <- e })})
	return c.(*net.TCPConn)
}

// carryPush carries between a socket, whose other end it returns, and a pushStream.
func carryPush(t *testing.T) (near *net.TCPConn, s *pushStream, ended chan End) {
	t.Helper()
	s, ended = newPushStream(), make(chan End, 1)
	return carrySocket(t, s, ended), s, ended
}

// TestPushedBytesKeepTheirOrder: bytes go to the socket by pushes and by Reads, as it has room,
// and arrive in order and all.
func TestPushedBytesKeepTheirOrder(t *testing.T) {
	near, s, ended := carryPush(t)
	const total = 16 << 20
	want := make([]byte, total)
	_, _ = rand.NewChaCha8([32]byte{}).Read(want)
	var sending sync.WaitGroup
	defer sending.Wait()
	sending.Go(func() {
		for rest := want; len(rest) > 0; {
			n := min(len(rest), 1+rand.IntN(16<<10))
			s.send(rest[:n], nil)
			rest = rest[n:]
		}
		s.send(nil, io.EOF)
	})
	for late := time.Now().Add(pushPatience); ; runtime.Gosched() { // until the socket is full
		if waits, _ := s.left(); waits > 0 {
			break
		}
		if time.Now().After(late) {
			t.Fatal("the socket never was full")
		}
	}
	_ = near.SetReadDeadline(time.Now().Add(pushPatience))
	got, err := io.ReadAll(near)
	if err != nil || !bytes.Equal(got, want) {
		t.Fatalf("got %d bytes and %v, want %d as they were sent", len(got), err, total)
	}
	if _, pushed := s.left(); pushed == 0 {
		t.Error("no byte was pushed")
	}
	_ = near.Close()
	if e := <-ended; e.Reason != Done || e.Out != total {
		t.Errorf("ended with %+v, want %d bytes and %v", e, total, Done)
	}
}

// TestMutePeerOfAPusher: the kernel takes little for a peer that reads nothing. It takes all once
// that reads.
func TestMutePeerOfAPusher(t *testing.T) {
	const total, most = 8 << 20, 512 << 10
	near, s, ended := carryPush(t)
	_ = near.SetReadBuffer(16 << 10)
	for range total / most {
		s.send(make([]byte, most), nil)
	}
	was, left := -1, total
	for deadline := time.Now().Add(pushPatience); left != was || left == total; { // until nothing happens
		if time.Now().After(deadline) {
			t.Fatalf("%d of %d bytes are left, and some are still taken", left, total)
		}
		<-time.After(50 * time.Millisecond)
		was = left
		left, _ = s.left()
	}
	if taken := total - was; taken > most {
		t.Errorf("%d bytes are taken for a peer that reads nothing, want %d at most", taken, most)
	}
	s.send(nil, io.EOF)
	if n, err := io.Copy(io.Discard, near); n != total || err != nil {
		t.Errorf("the peer reads %d bytes and %v, want %d", n, err, total)
	}
	_ = near.Close()
	<-ended
}

// TestPushToALostSocket: a socket whose peer has aborted ends the tunnel with a reset,
// although a push is the first to hear of it.
func TestPushToALostSocket(t *testing.T) {
	near, s, ended := carryPush(t)
	s.send([]byte("x"), nil)
	if _, err := io.ReadFull(near, make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
	_ = near.SetLinger(0)
	_ = near.Close()
	late := time.After(pushPatience)
	for {
		s.send([]byte("x"), nil)
		select {
		case e := <-ended:
			if e.Reason != Reset || e.Err == nil {
				t.Errorf("ended with %+v, want %v", e, Reset)
			}
			return
		case <-late:
			t.Fatal("the tunnel does not end")
		default:
		}
	}
}
