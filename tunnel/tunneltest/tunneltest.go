// Package tunneltest holds the conformance suites that every carrier of
// package tunnel passes: what a Stream, a Dialer and a Protocol promise, as
// tests. It is imported by tests only.
//
//	func TestStream(t *testing.T) {
//		tunneltest.TestStream(t, func() (a, b tunnel.Stream, stop func(), err error) {
//			...
//		}, tunneltest.Options{})
//	}
//
// The suites know nothing of the carrier: what it can't do is said in Options,
// and is then tested to be refused as the interface says.
//
// Serve starts a whole gateway around Protocols, for tests of what only shows
// behind the Server's detection and in front of the Router and the Relay:
//
//	g := tunneltest.Serve(t, tunneltest.Setup{
//		Protocols: []tunnel.Protocol{&Protocol{}},
//		Resolver:  tunneltest.Table{"svc.test:443": testnet.Echo(t).Addr()},
//	})
//	... // a client of g.Addr
//	if o := g.Outcome(t); o.Reason != tunnel.Done {
package tunneltest

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"runtime"
	"sync"
	"testing"
	"time"

	"golang.org/x/net/nettest"

	"culvert.dev/tunnel"
)

// Options says what a carrier can't do and how much is tested. The zero value
// is a carrier that can do all, in the usual amount.
type Options struct {
	NoHalfClose bool // CloseWrite answers errors.ErrUnsupported
	NoAbort     bool // an abort looks like an end of stream
	Streams     int  // open at once; 0 means 100
	Bytes       int  // sent each way; 0 means 8 MiB
}

// MakePipe makes the two ends of one stream. What is written to a is read from
// b, and the other way round. stop closes both and all that was made for them.
type MakePipe func() (a, b tunnel.Stream, stop func(), err error)

// patience bounds every wait that would otherwise be for ever.
const patience = time.Minute

// TestStream checks that the streams of makePipe keep the promises of
// tunnel.Stream and net.Conn. All that stop leaves behind is a failure.
func TestStream(t *testing.T, makePipe MakePipe, opts Options) {
	if opts.Streams == 0 {
		opts.Streams = 100
	}
	if opts.Bytes == 0 {
		opts.Bytes = 8 << 20
	}
	s := &streamSuite{makePipe, opts}
	s.warm(t)
	before := runtime.NumGoroutine()
	t.Run("NetConn", s.netConn)
	t.Run("Bulk", s.bulk)
	t.Run("HalfClose", s.halfClose)
	t.Run("Close", s.close)
	t.Run("Abort", s.abort)
	t.Run("Deadline", s.deadline)
	t.Run("WaitRead", s.waitRead)
	t.Run("Concurrent", s.concurrent)
	wantNoMore(t, before)
}

// wantNoMore waits for the goroutines that were started since to end.
func wantNoMore(t *testing.T, before int) {
	t.Helper()
	for deadline := time.Now().Add(patience); runtime.NumGoroutine() > before; time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			stacks := make([]byte, 64<<10)
			t.Errorf("%d goroutines, %d before:\n%s", runtime.NumGoroutine(), before, stacks[:runtime.Stack(stacks, true)])
			return
		}
	}
}

type streamSuite struct {
	makePipe MakePipe
	opts     Options
}

// pipe makes a pipe that ends with the test.
func (s *streamSuite) pipe(t *testing.T) (a, b tunnel.Stream, stop func()) {
	t.Helper()
	a, b, stop, err := s.makePipe()
	if err != nil {
		t.Fatalf("make pipe: %v", err)
	}
	for _, c := range []net.Conn{a, b} {
		if err := c.SetDeadline(time.Now().Add(patience)); err != nil {
			t.Errorf("set deadline: %v", err)
		}
	}
	return a, b, stop
}

// warm uses one stream, so that what its carrier starts with the first and
// keeps is not counted as left behind.
func (s *streamSuite) warm(t *testing.T) {
	t.Helper()
	a, b, stop := s.pipe(t)
	defer stop()
	go func() { _, _ = a.Write([]byte("warm")) }()
	if err := receive(b, []byte("warm")); err != nil {
		t.Error(err)
	}
}

// eachEnd runs f with the ends in either order, on fresh pipes.
func (s *streamSuite) eachEnd(t *testing.T, f func(t *testing.T, near, far tunnel.Stream)) {
	for _, order := range []string{"first", "second"} {
		t.Run(order, func(t *testing.T) {
			a, b, stop := s.pipe(t)
			defer stop()
			if order == "second" {
				a, b = b, a
			}
			f(t, a, b)
		})
	}
}

// netConn is the general behaviour of a net.Conn: reads and writes at once,
// deadlines in the past, present and future, and Close.
func (s *streamSuite) netConn(t *testing.T) {
	nettest.TestConn(t, func() (c1, c2 net.Conn, stop func(), err error) { return s.makePipe() })
}

// random returns n bytes that are the same for the same seed.
func random(n int, seed byte) []byte {
	b := make([]byte, n)
	_, _ = rand.NewChaCha8([32]byte{seed}).Read(b)
	return b
}

// receive reads as many bytes as want has and compares.
func receive(c io.Reader, want []byte) error {
	got := make([]byte, len(want))
	n, err := io.ReadFull(c, got)
	switch {
	case !bytes.Equal(got[:n], want[:n]):
		return fmt.Errorf("the %d bytes received are not the ones that were sent", n)
	case err != nil:
		return fmt.Errorf("after %d of %d bytes: %w", n, len(want), err)
	}
	return nil
}

// wantEnd reads the end of the stream.
func wantEnd(t *testing.T, c net.Conn) {
	t.Helper()
	if n, err := c.Read(make([]byte, 1)); n != 0 || err != io.EOF {
		t.Errorf("at the end: read %d bytes and %v, want io.EOF", n, err)
	}
}

func (s *streamSuite) bulk(t *testing.T) {
	a, b, stop := s.pipe(t)
	defer stop()
	up, down := random(s.opts.Bytes, 1), random(s.opts.Bytes, 2)
	var wg sync.WaitGroup
	send := func(c net.Conn, data []byte) {
		if n, err := c.Write(data); n != len(data) || err != nil {
			t.Errorf("wrote %d of %d bytes: %v", n, len(data), err)
		}
	}
	wg.Go(func() { send(a, up) })
	wg.Go(func() { send(b, down) })
	wg.Go(func() {
		if err := receive(a, down); err != nil {
			t.Error(err)
		}
	})
	if err := receive(b, up); err != nil {
		t.Error(err)
	}
	wg.Wait()
}

// halfClose ends one direction: all that was sent before arrives, then the
// end, and the other direction goes on as long as it likes.
func (s *streamSuite) halfClose(t *testing.T) {
	question, answer := random(100<<10, 3), random(1<<20, 4)
	s.eachEnd(t, func(t *testing.T, near, far tunnel.Stream) {
		if s.opts.NoHalfClose {
			if err := near.CloseWrite(); !errors.Is(err, errors.ErrUnsupported) {
				t.Errorf("CloseWrite: %v, want errors.ErrUnsupported", err)
			}
			go func() { _, _ = near.Write([]byte("still open")) }()
			if err := receive(far, []byte("still open")); err != nil {
				t.Errorf("after a CloseWrite that was refused: %v", err)
			}
			return
		}
		go func() {
			_, _ = near.Write(question)
			if err := near.CloseWrite(); err != nil {
				t.Errorf("CloseWrite: %v", err)
			}
		}()
		if err := receive(far, question); err != nil {
			t.Errorf("question: %v", err)
		}
		wantEnd(t, far)
		if _, err := near.Write([]byte("x")); err == nil {
			t.Error("a write after CloseWrite worked")
		}
		go func() { _, _ = far.Write(answer); _ = far.CloseWrite() }()
		if err := receive(near, answer); err != nil {
			t.Errorf("answer, after the question's end: %v", err)
		}
		wantEnd(t, near)
	})
}

// close closes an end with nothing unread: the other one reads all and then
// the end.
func (s *streamSuite) close(t *testing.T) {
	data := random(100<<10, 5)
	s.eachEnd(t, func(t *testing.T, near, far tunnel.Stream) {
		go func() { _, _ = near.Write(data); _ = near.Close() }()
		if err := receive(far, data); err != nil {
			t.Error(err)
		}
		wantEnd(t, far)
		if _, err := near.Read(make([]byte, 1)); err == nil {
			t.Error("a read after Close worked")
		}
		_ = near.Close() // again: must do no harm
	})
}

// abort ends a stream in the middle: what arrives is the beginning of what
// was sent, and then an error that is not the end of the stream.
func (s *streamSuite) abort(t *testing.T) {
	data := random(64<<10, 6)
	s.eachEnd(t, func(t *testing.T, near, far tunnel.Stream) {
		written := make(chan struct{})
		go func() { defer close(written); _, _ = near.Write(data) }()
		if err := receive(far, data[:1000]); err != nil {
			t.Error(err)
		}
		_ = tunnel.Abort(near)
		<-written
		rest, err := io.ReadAll(far)
		if !bytes.HasPrefix(data[1000:], rest) {
			t.Error("bytes that were not sent arrived before the abort")
		}
		if err == nil && !s.opts.NoAbort {
			t.Error("the abort arrived as an end of stream")
		}
		if ne := net.Error(nil); errors.As(err, &ne) && ne.Timeout() {
			t.Errorf("the abort did not arrive: %v", err)
		}
	})
}

// deadline lets a read time out and then has the stream go on as before.
func (s *streamSuite) deadline(t *testing.T) {
	s.eachEnd(t, func(t *testing.T, near, far tunnel.Stream) {
		_ = near.SetReadDeadline(time.Now().Add(10 * time.Millisecond))
		_, err := near.Read(make([]byte, 1))
		if ne := net.Error(nil); !errors.As(err, &ne) || !ne.Timeout() {
			t.Errorf("read at its deadline: %v, want a timeout", err)
		}
		_ = near.SetReadDeadline(time.Now().Add(patience))
		go func() { _, _ = far.Write([]byte("later")) }()
		if err := receive(near, []byte("later")); err != nil {
			t.Errorf("read after a deadline: %v", err)
		}
	})
}

// waitRead reads from a tunnel.Waiter only what that has said is there. One that stands
// on another stream need not say so.
func (s *streamSuite) waitRead(t *testing.T) {
	s.eachEnd(t, func(t *testing.T, near, far tunnel.Stream) {
		w, ok := near.(tunnel.Waiter)
		if !ok {
			return
		}
		_, layer := near.(interface{ NetConn() net.Conn })
		await := func(what string, do func()) {
			t.Helper()
			woken := make(chan struct{}, 10)
			ready := w.WaitRead(func() { woken <- struct{}{} })
			do()
			if ready || layer {
				return
			}
			select {
			case <-woken:
			case <-time.After(patience):
				t.Errorf("%s did not wake the reader", what)
			}
		}
		await("a byte", func() { go func() { _, _ = far.Write([]byte("x")) }() })
		if err := receive(near, []byte("x")); err != nil {
			t.Error(err)
		}
		if s.opts.NoHalfClose {
			return
		}
		await("the end of the stream", func() { _ = far.CloseWrite() })
		if n, err := near.Read(make([]byte, 1)); n != 0 || err != io.EOF {
			t.Errorf("read %d bytes and %v, want the end of the stream", n, err)
		}
	})
}

// concurrent has many streams open at once, each with its own bytes: of more
// than 100, each has the fewer.
func (s *streamSuite) concurrent(t *testing.T) {
	size := min(max(32<<10*100/s.opts.Streams, 4<<10), 32<<10)
	data := random(size+s.opts.Streams, 7)
	long := patience * time.Duration(1+s.opts.Streams/250) // a machine may be busy with other tests
	var wg, open sync.WaitGroup
	open.Add(s.opts.Streams)
	for i := range s.opts.Streams {
		wg.Go(func() {
			a, b, stop, err := s.makePipe()
			open.Done()
			if err != nil {
				t.Errorf("stream %d: %v", i, err)
				return
			}
			defer stop()
			open.Wait() // none is closed before all are open
			_, _ = a.SetDeadline(time.Now().Add(long)), b.SetDeadline(time.Now().Add(long))
			own := data[i : i+size]
			go func() { _, _ = a.Write(own) }()
			if err := receive(b, own); err != nil {
				t.Errorf("stream %d: %v", i, err)
			}
			go func() { _, _ = b.Write(own[:100]) }()
			if err := receive(a, own[:100]); err != nil {
				t.Errorf("stream %d, back: %v", i, err)
			}
		})
	}
	wg.Wait()
}
