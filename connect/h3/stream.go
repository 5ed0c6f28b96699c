package h3

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"syscall"
	"time"

	"github.com/quic-go/quic-go"

	"culvert.dev/connect/internal/mux"
	"culvert.dev/tunnel"
)

// A quicStream is the *quic.Stream below a Stream.
type quicStream interface {
	io.ReadWriteCloser
	Peek(p []byte) (int, error) // waits for len(p) bytes and takes none
	StreamID() quic.StreamID
	Context() context.Context // ends with the direction that is written
	CancelRead(quic.StreamErrorCode)
	CancelWrite(quic.StreamErrorCode)
	SetReadDeadline(time.Time) error
	SetWriteDeadline(time.Time) error
}

// A Stream is one tunnel on a connection. It is a tunnel.Stream that can
// half-close in both directions, and a tunnel.Aborter. Any number of
// goroutines may use it.
//
// At rest it holds no buffer and no goroutine of this package.
type Stream struct {
	c  *conn
	qs quicStream

	inbox *inbox // of its datagrams; nil for a plain CONNECT
	ended func() // called once, by Close or Abort

	reading sync.Mutex // held by Read; guards the rest of this block
	in      frameReader
	cameAt  time.Time // when a Read last found something
	broken  error     // what ended in for good; nil before
	refusal bool      // it is no tunnel but an answer, which may have trailers

	writing  sync.Mutex // held by Write and CloseWrite; guards the rest of this block
	owed     int        // bytes of a frame that were announced and not written
	head     [maxFrameHead]byte
	headLeft int // of them, at the end of head, that were not written
	finished bool

	mu     sync.Mutex // guards what follows, and deadlines against Close
	closed bool
	lost   error // what the connection did to it, before anybody asked: see cut
}

var (
	_ tunnel.Stream        = (*Stream)(nil)
	_ tunnel.AbortDetector = (*Stream)(nil)
	_ tunnel.Aborter       = (*Stream)(nil)
	_ tunnel.Waiter        = (*Stream)(nil)
)

func newStream(c *conn, qs quicStream) *Stream {
	s := &Stream{c: c, qs: qs, ended: func() {}}
	s.in.r = (*streamReader)(s)
	return s
}

// A ResetError is how a stream ends that the peer aborted, or whose
// connection was lost. It is an ECONNRESET.
type ResetError struct {
	Code ErrCode // as the peer sent it; 0 where there was none
	Err  error   // what happened to the connection; nil where only the stream ended
}

func (e *ResetError) Error() string {
	if e.Err != nil {
		return fmt.Sprintf("h3: the connection of the stream ended: %v", e.Err)
	}
	return fmt.Sprintf("h3: the peer reset the stream: %v", e.Code)
}

// Unwrap returns ECONNRESET.
func (e *ResetError) Unwrap() error { return syscall.ECONNRESET }

// translate makes of an error of the stream below what users of a Stream
// understand.
func (s *Stream) translate(err error) error {
	s.mu.Lock()
	closed, lost := s.closed, s.lost
	s.mu.Unlock()
	se, reset := errors.AsType[*quic.StreamError](err)
	switch {
	case err == nil:
		return nil
	case closed:
		return net.ErrClosed
	case errors.Is(err, os.ErrDeadlineExceeded):
		return os.ErrDeadlineExceeded
	case lost != nil:
		return lost
	case reset:
		return &ResetError{Code: ErrCode(se.ErrorCode)}
	}
	return &ResetError{Err: err}
}

// Broken returns why what is written from now on can't arrive: the peer wants
// no more of the stream, or the connection has ended. It implements
// tunnel.AbortDetector.
func (s *Stream) Broken() error {
	if !s.writing.TryLock() {
		return nil // a Write finds out by itself
	}
	defer s.writing.Unlock()
	if ctx := s.qs.Context(); !s.finished && ctx.Err() != nil {
		err := s.translate(context.Cause(ctx))
		if re, ok := errors.AsType[*ResetError](err); ok && re.Err == nil && re.Code == RequestCancelled && !s.isReset() {
			return net.ErrClosed
		}
		return err
	}
	return nil
}

// isReset reports whether the peer, which wants no more of the stream, has reset
// its own direction as well, or the connection has ended. It is false while
// a Read is under way, which finds out.
func (s *Stream) isReset() bool {
	if !s.reading.TryLock() {
		return false
	}
	defer s.reading.Unlock()
	if s.c != nil && s.c.qc != nil && s.c.qc.Context().Err() != nil {
		return true
	}
	_ = s.qs.SetReadDeadline(time.Unix(1, 0)) // or it would wait for a byte
	_, err := s.qs.Peek(make([]byte, 1))
	_ = s.qs.SetReadDeadline(time.Time{})
	_, reset := errors.AsType[*quic.StreamError](err)
	return reset
}

// Read implements net.Conn. After an orderly end it returns io.EOF, after a
// reset a *ResetError at once: what was not read by then is lost, as with TCP.
func (s *Stream) Read(p []byte) (int, error) {
	s.reading.Lock()
	defer s.reading.Unlock()
	if s.isClosed() {
		return 0, net.ErrClosed
	}
	if len(p) == 0 {
		return 0, nil
	}
	for s.broken == nil {
		if s.in.skip { // a deadline came in the middle of such a frame
			if err := s.in.pass(p); err != nil {
				return 0, s.failed(err)
			}
		}
		if s.in.left > 0 {
			n, err := s.in.read(p)
			if err != nil {
				return 0, s.failed(err)
			}
			s.cameAt = time.Now()
			return n, nil
		}
		if err := s.nextData(p); err != nil {
			return 0, s.failed(err)
		}
	}
	return 0, s.broken
}

// readAgain is how long after bytes a Read, which holds a goroutine and a buffer, is
// better than a wait, which takes a new goroutine.
const readAgain = time.Second

// WaitRead implements tunnel.Waiter: a small goroutine waits for the stream below.
func (s *Stream) WaitRead(wake func()) (ready bool) {
	s.reading.Lock()
	defer s.reading.Unlock()
	if s.in.from < s.in.to || s.broken != nil || time.Since(s.cameAt) < readAgain {
		return true
	}
	go func() {
		defer s.c.recovered()
		defer wake()
		var b [1]byte
		_, _ = s.qs.Peek(b[:]) // what fails now will fail the Read
	}()
	return false
}

// nextData goes on to the next DATA frame that has something. The caller holds
// reading. What is to be skipped is read into scratch.
func (s *Stream) nextData(scratch []byte) error {
	t, err := s.in.next()
	switch {
	case err != nil:
		return err
	case t == frameData:
		if s.in.left > 0 {
			return nil
		}
		return s.charge(mux.CostEmpty, "empty DATA frames")
	case t == frameHeaders && s.refusal:
		return io.EOF
	case t == frameHeaders, t == frameSettings, t == frameGoAway, t == frameCancelPush, t == framePushPromise,
		t == frameMaxPushID, t == framePriorityUpdate, t == framePriorityPush, isHTTP2(t):
		// Nothing follows a CONNECT but DATA and extensions, RFC 9114 section 4.4.
		return wrong(FrameUnexpected, "a frame of type %#x in a tunnel", t)
	}
	if err := s.charge(mux.CostFrame, "frames of unknown types"); err != nil {
		return err
	}
	return s.in.pass(scratch)
}

// charge is that of the connection, as an error that may be nil.
func (s *Stream) charge(cost float64, what string) error {
	if ce := s.c.charge(cost, what); ce != nil {
		return ce
	}
	return nil
}

// failed notes why reading can't go on, and ends the connection of a peer that
// broke the rules. The caller holds reading.
func (s *Stream) failed(err error) error {
	switch {
	case errors.Is(err, os.ErrDeadlineExceeded):
		return s.translate(err) // and can go on
	case err == io.ErrUnexpectedEOF:
		err = wrong(FrameError, "a stream ended inside of a frame") // section 7.1
	case err == io.EOF:
		s.broken = io.EOF
		if s.isClosed() {
			return net.ErrClosed
		}
		return io.EOF
	}
	if ce, ok := errors.AsType[*connError](err); ok {
		s.c.fail(ce)
		err = &ResetError{Err: ce}
	}
	err = s.translate(err)
	s.broken = err
	return err
}

// Sizes of what is written, in bytes.
const (
	maxFrame   = 1 << 20 // of one DATA frame
	firstBytes = 1200    // of a frame that are sent together with its head
)

type firstBuffer [maxFrameHead + firstBytes]byte

var firstBuffers = sync.Pool{New: func() any { return new(firstBuffer) }}

// Write implements net.Conn. It returns when the last byte has been taken by
// the connection, which is when the peer's windows had room for it.
//
// One that was cut short by its deadline leaves a frame unfinished, which the
// next Write goes on with. To end the stream there is to abort it.
func (s *Stream) Write(p []byte) (int, error) {
	s.writing.Lock()
	defer s.writing.Unlock()
	if err := s.writable(); err != nil {
		return 0, err
	}
	if len(p) == 0 {
		return 0, nil
	}
	n := 0
	for n < len(p) {
		if s.owed == 0 {
			s.announce(min(len(p)-n, maxFrame))
		}
		m, err := s.writeOwed(p[n : n+min(s.owed, len(p)-n)])
		n += m
		if err != nil {
			return n, s.translate(err)
		}
	}
	return n, nil
}

func (s *Stream) writable() error {
	switch {
	case s.isClosed():
		return net.ErrClosed
	case s.finished:
		return fmt.Errorf("h3: write after CloseWrite: %w", io.ErrClosedPipe)
	}
	return nil
}

// announce begins a DATA frame of n bytes. The caller holds writing.
func (s *Stream) announce(n int) {
	var head [maxFrameHead]byte
	b := appendFrameHead(head[:0], frameData, uint64(n))
	s.headLeft = copy(s.head[maxFrameHead-len(b):], b)
	s.owed = n
}

// writeOwed writes p, the next bytes of a frame, and its head before them. It
// returns how many of p were written. The caller holds writing.
func (s *Stream) writeOwed(p []byte) (int, error) {
	n := 0
	if s.headLeft > 0 {
		buf := firstBuffers.Get().(*firstBuffer)
		b := append(buf[:0], s.head[maxFrameHead-s.headLeft:]...)
		b = append(b, p[:min(len(p), firstBytes)]...)
		m, err := s.qs.Write(b)
		firstBuffers.Put(buf)
		head := min(m, s.headLeft)
		s.headLeft -= head
		n = m - head
		s.owed -= n
		if err != nil {
			return n, err
		}
	}
	if n < len(p) {
		m, err := s.qs.Write(p[n:])
		n += m
		s.owed -= m
		return n, err
	}
	return n, nil
}

// CloseWrite sends the end of the stream after what was written. The other
// direction stays open for as long as the peer likes.
func (s *Stream) CloseWrite() error {
	s.writing.Lock()
	defer s.writing.Unlock()
	switch {
	case s.isClosed():
		return net.ErrClosed
	case s.finished:
		return nil
	case s.owed > 0:
		s.finished = true
		s.qs.CancelWrite(quic.StreamErrorCode(s.abortCode()))
		return fmt.Errorf("h3: end of a stream whose last write was cut short: %w", os.ErrDeadlineExceeded)
	}
	s.finished = true
	return s.translate(s.qs.Close())
}

// Close ends both directions. What was written arrives, and then the end,
// unless a Write is cut short by it: then the peer sees a reset. A peer that
// goes on sending is asked to stop.
func (s *Stream) Close() error {
	if !s.shut() {
		return net.ErrClosed
	}
	_ = s.qs.SetWriteDeadline(time.Unix(1, 0)) // wakes a Write
	s.writing.Lock()
	switch {
	case s.finished:
	case s.owed > 0:
		s.qs.CancelWrite(quic.StreamErrorCode(s.abortCode()))
	default:
		_ = s.qs.Close()
	}
	s.finished = true
	s.writing.Unlock()
	code := NoError // RFC 9114 section 4.1
	if !s.c.side.isServer() {
		code = RequestCancelled
	}
	s.qs.CancelRead(quic.StreamErrorCode(code))
	s.ended()
	return nil
}

// Abort ends both directions with a reset: H3_CONNECT_ERROR from a proxy (RFC
// 9114 section 4.4), H3_REQUEST_CANCELLED from a client.
func (s *Stream) Abort() error {
	if !s.shut() {
		return net.ErrClosed
	}
	s.reset(s.abortCode())
	s.ended()
	return nil
}

// reset resets the stream below.
func (s *Stream) reset(code ErrCode) {
	s.qs.CancelWrite(quic.StreamErrorCode(code))
	s.qs.CancelRead(quic.StreamErrorCode(code))
}

// cut ends both directions with err: what the other side of the connection said
// of many streams at once.
func (s *Stream) cut(err error) {
	s.mu.Lock()
	if s.lost == nil {
		s.lost = err
	}
	s.mu.Unlock()
	s.reset(RequestCancelled)
}

func (s *Stream) abortCode() ErrCode {
	if s.c.side.isServer() {
		return ConnectError
	}
	return RequestCancelled
}

func (s *Stream) isClosed() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.closed
}

// shut is false where the stream was closed before.
func (s *Stream) shut() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	first := !s.closed
	s.closed = true
	if first {
		s.forgetDatagrams()
	}
	return first
}

// LocalAddr returns that of the connection.
func (s *Stream) LocalAddr() net.Addr { return s.c.qc.LocalAddr() }

// RemoteAddr returns that of the connection, which a client may change.
func (s *Stream) RemoteAddr() net.Addr { return s.c.qc.RemoteAddr() }

// SetDeadline implements net.Conn.
func (s *Stream) SetDeadline(t time.Time) error {
	return s.setDeadlines(t, s.qs.SetReadDeadline, s.qs.SetWriteDeadline)
}

// SetReadDeadline implements net.Conn.
func (s *Stream) SetReadDeadline(t time.Time) error { return s.setDeadlines(t, s.qs.SetReadDeadline) }

// SetWriteDeadline implements net.Conn.
func (s *Stream) SetWriteDeadline(t time.Time) error {
	return s.setDeadlines(t, s.qs.SetWriteDeadline)
}

func (s *Stream) setDeadlines(t time.Time, set ...func(time.Time) error) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return net.ErrClosed
	}
	for _, f := range set {
		if err := f(t); err != nil {
			return err
		}
	}
	return nil
}
