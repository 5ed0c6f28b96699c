package h2

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"syscall"
	"time"

	"golang.org/x/net/http2"

	"culvert.dev/tunnel"
)

// A Stream is one tunnel on a connection. It is a tunnel.Stream that can
// half-close in both directions, and a tunnel.Aborter. Any number of
// goroutines may use it.
//
// At rest it holds no buffer and no goroutine.
type Stream struct {
	c  *conn
	id uint32

	// What follows is guarded by c.mu.

	readable sync.Cond
	waker    func()                 // to be called when a Read would not wait, and then no more; may be nil
	push     func(run [][]byte) int // takes bytes before waker is called; may be nil
	in       buffer
	window   int   // bytes the peer may have on the way or unread here
	credit   int   // bytes of it that the peer may still send
	unacked  int   // bytes read here that the peer was not told of
	taken    int   // bytes read here since began
	lent     int   // bytes of the last Reads: while nobody comes for more, their readers have them still
	moved    int64 // bytes read here in all
	began    int64 // when taken was 0 last, by mux.Clock
	readErr  error // what follows the last byte of in

	writable sync.Cond
	allowed  int                    // bytes that the peer takes; negative after it shrank the window
	pending  []byte                 // bytes of the current Write that were not sent
	source   func(run [][]byte) int // reads what follows them, for a WriteFrom; nil for a Write and where there is nothing
	pulling  bool                   // it is being called
	writeErr error                  // the error of all later Writes
	first    []byte                 // client: sent along with the request; the next Writes begin with it

	// Side by side, so that they take little: there are many streams.
	ended    bool   // the peer has sent its end, or a reset
	kept     bool   // since began the reader has left next to nothing waiting
	writing  bool   // a Write is under way, or begin's bytes are
	begins   bool   // it is begin's bytes
	finish   bool   // the end is to follow
	finished bool   // the end, or a reset, was sent
	closed   bool   // by our own side
	listed   bool   // in one of the connection's lists
	starving bool   // in the one of those that wait for its window
	fresh    bool   // client: head was not read yet
	cost     uint16 // server: of the request, in points, until it is accepted

	next *Stream

	readLimit, writeLimit deadline

	head          *Head          // client: the answer, nil before it
	discardedBody *discardedBody // server: reads the body of a request that is not a CONNECT; nil for none
	cancel        func()         // server: ends the Handler's context
	answered      int64          // server: when the request was refused, by mux.Clock; 0 if not
}

var (
	_ tunnel.Stream        = (*Stream)(nil)
	_ tunnel.AbortDetector = (*Stream)(nil)
	_ tunnel.Aborter       = (*Stream)(nil)
	_ tunnel.Pusher        = (*Stream)(nil)
	_ tunnel.Puller        = (*Stream)(nil)
	_ tunnel.Holder        = (*Stream)(nil)
	_ tunnel.Multiplexed   = (*Stream)(nil)
)

// A ResetError is how a stream ends that the peer aborted, or whose
// connection was lost. It is an ECONNRESET.
type ResetError struct {
	Code http2.ErrCode // as the peer sent it; ErrCodeNo where there was none
	Err  error         // what happened to the connection; nil where only the stream ended
}

func (e *ResetError) Error() string {
	if e.Err != nil {
		return fmt.Sprintf("h2: the connection of the stream ended: %v", e.Err)
	}
	return fmt.Sprintf("h2: the peer reset the stream: %v", e.Code)
}

// Unwrap returns ECONNRESET, and what ended the connection where that was a *tunnel.Panic or an
// alert of TLS: in TLS 1.3 a server refuses the client's certificate after the client's handshake.
func (e *ResetError) Unwrap() []error {
	all := []error{syscall.ECONNRESET}
	if p, ok := errors.AsType[*tunnel.Panic](e.Err); ok {
		all = append(all, p)
	}
	if op, ok := errors.AsType[*net.OpError](e.Err); ok && op.Op == "remote error" {
		all = append(all, op)
	}
	return all
}

// Read implements net.Conn. After an orderly end it returns io.EOF, after a
// reset a *ResetError at once: what was not read by then is lost, as with TCP.
func (s *Stream) Read(p []byte) (int, error) {
	s.c.mu.Lock()
	defer s.c.mu.Unlock()
	s.returned()
	for {
		switch {
		case s.closed:
			return 0, net.ErrClosed
		case s.readLimit.over():
			return 0, os.ErrDeadlineExceeded
		case len(p) == 0:
			return 0, nil
		case s.in.size > 0:
			n := s.c.hand(s, p)
			s.c.tell()
			s.kept = s.kept || s.in.size <= s.window/4
			s.lent += n
			return n, nil
		case s.readErr != nil:
			return 0, s.readErr
		}
		s.readable.Wait()
	}
}

// returned notes that whoever reads has come for more, and so has passed on what
// it had read: only then may the peer send as much again, or what it sends would
// be kept twice for a reader that is stuck. The caller holds c.mu.
func (s *Stream) returned() {
	if n := s.lent; n > 0 && !s.closed {
		s.lent = 0
		s.c.took(s, n)
		s.c.tell()
	}
}

// IsMultiplexed implements tunnel.Multiplexed: a stream has no descriptor, and the one of
// its connection is counted where that was dialed.
func (s *Stream) IsMultiplexed() bool { return true }

// Held implements tunnel.Holder.
func (s *Stream) Held() int {
	s.c.mu.Lock()
	defer s.c.mu.Unlock()
	return s.in.held
}

// WaitRead implements tunnel.Waiter.
func (s *Stream) WaitRead(wake func()) (ready bool) { return s.WaitPush(wake, nil) }

// WaitPush implements tunnel.Pusher.
func (s *Stream) WaitPush(wake func(), push func(run [][]byte) int) (ready bool) {
	s.c.mu.Lock()
	defer s.c.mu.Unlock()
	s.returned()
	if s.closed || s.readLimit.over() || s.in.size > 0 || s.readErr != nil {
		return true
	}
	s.waker, s.push = wake, push
	return false
}

// canRead wakes the readers of s. The caller holds c.mu.
func (s *Stream) canRead() {
	s.readable.Broadcast()
	if wake := s.waker; wake != nil {
		s.waker, s.push = nil, nil
		wake()
	}
}

// begin sends the first bytes of the stream along with the request. The caller holds c.mu.
func (s *Stream) begin(first []byte) {
	if len(first) == 0 {
		return
	}
	s.first = bytes.Clone(first[:min(len(first), maxFirst)])
	s.writing, s.begins, s.pending = true, true, s.first
	s.c.enlist(s)
}

// rest returns what of p begin has not sent. The caller holds c.mu.
func (s *Stream) rest(p []byte) ([]byte, error) {
	n := min(len(p), len(s.first))
	if !bytes.Equal(p[:n], s.first[:n]) {
		return nil, errors.New("h2: the stream does not begin with what was sent along with the request")
	}
	if s.first = s.first[n:]; len(s.first) == 0 {
		s.first = nil
	}
	return p[n:], nil
}

// Write implements net.Conn. It returns when the last byte has been taken by
// the connection, which is when the peer's windows had room for it.
func (s *Stream) Write(p []byte) (int, error) { return s.send(p, nil) }

// WriteFrom implements tunnel.Puller.
func (s *Stream) WriteFrom(p []byte, source func(run [][]byte) int) (int, error) {
	return s.send(p, source)
}

// send is Write, and WriteFrom where there is a source.
func (s *Stream) send(p []byte, source func(run [][]byte) int) (int, error) {
	s.c.mu.Lock()
	defer s.c.mu.Unlock()
	for s.writing && s.writeError() == nil {
		s.writable.Wait()
	}
	if err := s.writeError(); err != nil || len(p) == 0 {
		return 0, err
	}
	size := len(p)
	p, err := s.rest(p)
	switch {
	case err != nil:
		return 0, err
	case len(p) == 0 && source == nil:
		return size, nil
	}
	s.writing, s.pending, s.source = true, p, source
	if s.c.queue(s) && !s.c.writeNow(s) {
		s.c.work.Signal()
	}
	for s.hasMore() || s.pulling {
		if err = s.writeError(); err != nil && !s.pulling {
			break
		}
		s.writable.Wait()
	}
	n := size - len(s.pending)
	s.writing, s.pending, s.source = false, nil, nil
	if s.finish {
		s.c.enlist(s) // an end that waited for a Write which gave up
	}
	s.writable.Broadcast() // to the next Write
	return n, err
}

// hasMore reports whether the current Write has bytes that were not sent, or may have.
// The caller holds c.mu.
func (s *Stream) hasMore() bool { return len(s.pending) > 0 || s.source != nil }

func (s *Stream) writeError() error {
	switch {
	case s.closed:
		return net.ErrClosed
	case s.writeErr != nil:
		return s.writeErr
	case s.finish && !s.writing:
		return fmt.Errorf("h2: write after CloseWrite: %w", io.ErrClosedPipe)
	case s.writeLimit.over():
		return os.ErrDeadlineExceeded
	}
	return nil
}

// Broken returns why what is written from now on can't arrive: the peer has
// reset the stream, or the connection has ended. It implements
// tunnel.AbortDetector.
func (s *Stream) Broken() error {
	s.c.mu.Lock()
	defer s.c.mu.Unlock()
	if s.finish {
		return nil
	}
	if re, ok := errors.AsType[*ResetError](s.writeErr); ok && s.readErr == io.EOF && re.Err == nil && re.Code == http2.ErrCodeCancel {
		return net.ErrClosed
	}
	return s.writeErr
}

// CloseWrite sends END_STREAM after what was written. The other direction
// stays open for as long as the peer likes.
func (s *Stream) CloseWrite() error {
	s.c.mu.Lock()
	defer s.c.mu.Unlock()
	switch {
	case s.closed:
		return net.ErrClosed
	case s.finish:
		return nil
	case s.writeErr != nil:
		return s.writeErr
	}
	s.finish = true
	s.c.enlist(s)
	return nil
}

// Close ends both directions. What was written arrives, and then the end,
// unless a Write is cut short by it: then the peer sees a reset. A peer that
// goes on sending is asked to stop.
func (s *Stream) Close() error {
	s.c.mu.Lock()
	defer s.c.mu.Unlock()
	if s.closed {
		return net.ErrClosed
	}
	cut := s.hasMore() || s.in.size > 0
	s.shut()
	switch {
	case s.finished:
		if !s.ended {
			s.c.reset(s, http2.ErrCodeCancel)
		}
	case cut:
		s.c.reset(s, http2.ErrCodeCancel)
	default:
		s.finish = true
		s.c.enlist(s) // the writer sees closed, and tells a peer that is not done
	}
	return nil
}

// Abort ends both directions with RST_STREAM: CONNECT_ERROR from a proxy (RFC
// 9113 section 8.5), CANCEL from a client.
func (s *Stream) Abort() error {
	s.c.mu.Lock()
	defer s.c.mu.Unlock()
	if s.closed {
		return net.ErrClosed
	}
	s.shut()
	s.c.reset(s, s.c.abortCode)
	return nil
}

// shut is what Close and Abort have in common. The caller holds c.mu.
func (s *Stream) shut() {
	s.closed = true
	s.c.discard(s)
	s.readLimit.stop()
	s.writeLimit.stop()
	s.wake()
}

func (s *Stream) wake() {
	s.canRead()
	s.writable.Broadcast()
}

// LocalAddr returns that of the connection.
func (s *Stream) LocalAddr() net.Addr { return s.c.nc.LocalAddr() }

// RemoteAddr returns that of the connection.
func (s *Stream) RemoteAddr() net.Addr { return s.c.nc.RemoteAddr() }

// SetDeadline implements net.Conn.
func (s *Stream) SetDeadline(t time.Time) error {
	return s.setDeadlines(t, &s.readLimit, &s.writeLimit)
}

// SetReadDeadline implements net.Conn.
func (s *Stream) SetReadDeadline(t time.Time) error { return s.setDeadlines(t, &s.readLimit) }

// SetWriteDeadline implements net.Conn.
func (s *Stream) SetWriteDeadline(t time.Time) error { return s.setDeadlines(t, &s.writeLimit) }

func (s *Stream) setDeadlines(t time.Time, limits ...*deadline) error {
	s.c.mu.Lock()
	defer s.c.mu.Unlock()
	if s.closed {
		return net.ErrClosed
	}
	for _, d := range limits {
		d.set(s, t)
	}
	return nil
}

// A deadline has a timer only while it lies ahead.
type deadline struct {
	at    time.Time
	timer *time.Timer
}

func (d *deadline) set(s *Stream, at time.Time) {
	d.stop()
	d.at = at
	if at.IsZero() {
		return
	}
	if left := time.Until(at); left > 0 {
		d.timer = time.AfterFunc(left, func() {
			s.c.mu.Lock()
			defer s.c.mu.Unlock()
			defer s.c.recovered()
			s.wake()
		})
	}
	s.wake()
}

func (d *deadline) stop() {
	if d.timer != nil {
		d.timer.Stop()
		d.timer = nil
	}
}

func (d *deadline) over() bool { return !d.at.IsZero() && !time.Now().Before(d.at) }
