package ssh

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"syscall"
	"time"

	"golang.org/x/crypto/ssh"

	"culvert.dev/tunnel"
)

const (
	leastRead = 1 << 10 // bytes that an idle stream has room for
	mostRead  = 64 << 10
	linger    = 10 * time.Second // for the client to take the last bytes, after Close

	// How far apart the library reports the end of a channel's bytes and of the channel, and
	// that and the end of the connection.
	eofBeforeClose = 5 * time.Millisecond
	closeBeforeEnd = 100 * time.Millisecond
)

// windowSize is the window of a channel in golang.org/x/crypto/ssh: what it may keep of one
// that is not read.
const windowSize = 2 << 20

// errClosedByClient is what writes to a closed channel end with.
var errClosedByClient = fmt.Errorf("ssh: the client has closed the channel: %w", syscall.ECONNRESET)

// errAborted is what a stream ends with whose client is gone.
var errAborted = fmt.Errorf("ssh: the connection has ended: %w", syscall.ECONNRESET)

// A stream is one channel as a tunnel.Stream. A channel of golang.org/x/crypto/ssh knows no
// deadlines, and a read or write of it may wait for as long as the client likes. Each is
// therefore made by a goroutine of its own, of which there is one for each direction at
// most; one that reads waits with room for a few bytes.
type stream struct {
	s  *session
	ch ssh.Channel

	mu      sync.Mutex // guards what follows
	changed sync.Cond

	// Reading.
	reading  bool   // a goroutine is in ch.Read
	in       []byte // read and not taken
	inBuffer *[]byte
	size     int // of the next buffer
	readErr  error
	wake     func()
	deadline [2]deadline // of reads and of writes
	backlog  backlog

	// Writing.
	writing   bool    // a goroutine is in write
	out       *[]byte // not sent yet; nil for nothing
	writeErr  error
	half      bool // CloseWrite was called
	sentEOF   bool
	closed    bool // Close or Abort was called
	sentClose bool
	gone      bool // the client has closed the channel, or the connection has ended
}

var (
	_ tunnel.Stream        = (*stream)(nil)
	_ tunnel.Aborter       = (*stream)(nil)
	_ tunnel.AbortDetector = (*stream)(nil)
	_ tunnel.Waiter        = (*stream)(nil)
	_ tunnel.Multiplexed   = (*stream)(nil)
	_ tunnel.Holder        = (*stream)(nil)
)

// A deadline is one direction's.
type deadline struct {
	at    time.Time
	timer *time.Timer
}

func newStream(s *session, ch ssh.Channel) *stream {
	st := &stream{s: s, ch: ch, size: leastRead}
	st.changed.L = &st.mu
	return st
}

// Read implements net.Conn.
func (st *stream) Read(p []byte) (int, error) {
	st.mu.Lock()
	defer st.mu.Unlock()
	for {
		switch {
		case st.closed:
			return 0, net.ErrClosed
		case st.deadline[0].over():
			return 0, os.ErrDeadlineExceeded
		case len(st.in) > 0:
			n := copy(p, st.in)
			if st.in = st.in[n:]; len(st.in) == 0 {
				st.freeIn()
			}
			return n, nil
		case st.readErr != nil:
			return 0, st.readErr
		case len(p) == 0:
			return 0, nil
		}
		st.beginRead()
		st.changed.Wait()
	}
}

// WaitRead implements tunnel.Waiter.
func (st *stream) WaitRead(wake func()) bool {
	st.mu.Lock()
	defer st.mu.Unlock()
	if st.closed || len(st.in) > 0 || st.readErr != nil {
		return true
	}
	st.wake = wake
	st.beginRead()
	return false
}

// beginRead has a goroutine read, unless one does. The caller holds mu.
func (st *stream) beginRead() {
	if !st.reading {
		st.reading = true
		if st.size == mostRead {
			b := newBuffer()
			go st.read((*b)[:mostRead], b)
			return
		}
		go st.read(make([]byte, st.size), nil)
	}
}

// read reads from the channel into p, which is of a buffer or, for nil, of none.
func (st *stream) read(p []byte, of *[]byte) {
	defer st.recovered()
	n, err := st.ch.Read(p)
	if err == io.EOF {
		err = st.endOfStream()
	}
	st.mu.Lock()
	defer st.mu.Unlock()
	st.reading = false
	if st.in, st.inBuffer = p[:n], of; n == 0 || st.closed {
		st.freeIn()
	}
	if err != nil && st.readErr == nil {
		st.readErr = err
	}
	st.backlog.read(n, n < len(p), st.s.conn.arrived.Load())
	switch {
	case n == len(p):
		st.size = min(2*st.size, mostRead)
	case n <= len(p)/4:
		st.size = max(st.size/2, leastRead)
	}
	st.notify()
}

// endOfStream returns the error of a stream whose channel has no more to read: io.EOF where
// the client has said so, and errAborted where the connection has ended. The library does
// not tell these apart.
func (st *stream) endOfStream() error {
	if st.s.conn.failed.Load() {
		return errAborted
	}
	// It has said so, it has closed the channel, or all channels end with the connection.
	// The library tells of the end of what there is to read first.
	if !st.s.endsWithin(eofBeforeClose) && !st.isGone() {
		return io.EOF
	}
	if st.s.endsWithin(closeBeforeEnd) {
		return errAborted
	}
	return io.EOF
}

func (st *stream) isGone() bool {
	st.mu.Lock()
	defer st.mu.Unlock()
	return st.gone
}

// Write implements net.Conn. It returns once the bytes are on their way to the client, of
// which there are mostWrite at most.
func (st *stream) Write(p []byte) (n int, err error) {
	st.mu.Lock()
	defer st.mu.Unlock()
	for {
		switch {
		case st.closed || st.half:
			return n, net.ErrClosed
		case st.deadline[1].over():
			return n, os.ErrDeadlineExceeded
		case st.writeErr != nil:
			return n, st.writeErr
		case len(p) == 0:
			return n, nil
		}
		if st.out == nil {
			st.out = newBuffer()
		}
		if m := min(mostRead-len(*st.out), len(p)); m > 0 {
			*st.out = append(*st.out, p[:m]...)
			n, p = n+m, p[m:]
			st.beginWrite()
			continue
		}
		st.changed.Wait()
	}
}

// beginWrite has a goroutine send what there is to send, unless one does. The caller holds mu.
func (st *stream) beginWrite() {
	if !st.writing {
		st.writing = true
		go st.write()
	}
}

// write sends what is to be sent, and then the end of the stream or of the channel.
func (st *stream) write() {
	defer st.recovered()
	st.mu.Lock()
	for {
		switch {
		case st.out != nil && st.writeErr == nil:
			b := st.out
			st.out = nil
			st.changed.Broadcast() // there is room
			st.mu.Unlock()
			_, err := st.ch.Write(*b)
			freeBuffer(b)
			st.mu.Lock()
			if err != nil && st.writeErr == nil {
				st.writeErr = errClosedByClient
				st.changed.Broadcast()
			}
		case st.half && !st.sentEOF && st.writeErr == nil:
			st.sentEOF = true
			st.mu.Unlock()
			_ = st.ch.CloseWrite()
			st.mu.Lock()
		case st.closed && !st.sentClose:
			st.sentClose = true
			st.mu.Unlock()
			_ = st.ch.Close()
			st.mu.Lock()
		default:
			st.writing = false
			st.mu.Unlock()
			return
		}
	}
}

// CloseWrite implements tunnel.Stream.
func (st *stream) CloseWrite() error {
	st.mu.Lock()
	defer st.mu.Unlock()
	switch {
	case st.closed:
		return net.ErrClosed
	case st.writeErr != nil:
		return st.writeErr
	case !st.half:
		st.half = true
		st.changed.Broadcast()
		st.beginWrite()
	}
	return nil
}

// Close implements net.Conn. What was written is still sent, for as long as linger.
func (st *stream) Close() error {
	st.mu.Lock()
	defer st.mu.Unlock()
	if st.closed {
		return net.ErrClosed
	}
	if st.closed = true; st.out != nil || st.writing {
		time.AfterFunc(linger, st.closeChannel)
	}
	st.beginWrite()
	st.stop()
	return nil
}

// Abort implements tunnel.Aborter.
func (st *stream) Abort() error {
	st.mu.Lock()
	defer st.mu.Unlock()
	if st.closed {
		return net.ErrClosed
	}
	st.closed, st.sentClose, st.out = true, true, nil
	st.stop()
	go st.closeChannel()
	return nil
}

// closeChannel sends the close of the channel, which may wait for a client that reads
// nothing.
func (st *stream) closeChannel() {
	defer st.recovered()
	_ = st.ch.Close()
}

// stop wakes everybody and forgets what nobody will read. The caller holds mu.
func (st *stream) stop() {
	st.freeIn()
	for i := range st.deadline {
		st.deadline[i].stop()
	}
	st.notify()
}

// freeIn forgets what was read. The caller holds mu.
func (st *stream) freeIn() {
	st.in = nil
	if st.inBuffer != nil {
		freeBuffer(st.inBuffer)
		st.inBuffer = nil
	}
}

// notify wakes those who wait. The caller holds mu.
func (st *stream) notify() {
	st.changed.Broadcast()
	if wake := st.wake; wake != nil {
		st.wake = nil
		wake()
	}
}

// peerClosed notes that the client has closed the channel, or that the connection has ended.
func (st *stream) peerClosed() {
	st.mu.Lock()
	defer st.mu.Unlock()
	st.gone = true
	if st.writeErr == nil {
		st.writeErr = errClosedByClient
	}
	st.notify()
}

// Broken implements tunnel.AbortDetector.
func (st *stream) Broken() error {
	if st.s.conn.failed.Load() {
		return errAborted
	}
	st.mu.Lock()
	defer st.mu.Unlock()
	if st.gone && !st.half {
		return fmt.Errorf("ssh: the client has closed the channel: %w", net.ErrClosed)
	}
	return nil
}

// recovered ends the connection whose goroutine panicked, and no other.
func (st *stream) recovered() {
	if v := recover(); v != nil {
		st.s.caught(v)
	}
}

// IsMultiplexed implements tunnel.Multiplexed.
func (*stream) IsMultiplexed() bool { return true }

// Held implements tunnel.Holder.
func (st *stream) Held() int {
	st.mu.Lock()
	defer st.mu.Unlock()
	n := len(st.in) + st.unread()
	if st.out != nil {
		n += cap(*st.out)
	}
	return n
}

// unread is how much the library may hold of the channel. The caller holds mu.
func (st *stream) unread() int {
	if st.reading {
		return 0
	}
	return st.backlog.most(st.s.conn.arrived.Load())
}

// LocalAddr and RemoteAddr are those of the connection.
func (st *stream) LocalAddr() net.Addr  { return st.s.conn.LocalAddr() }
func (st *stream) RemoteAddr() net.Addr { return st.s.conn.RemoteAddr() }

// SetDeadline implements net.Conn.
func (st *stream) SetDeadline(t time.Time) error {
	return errors.Join(st.SetReadDeadline(t), st.SetWriteDeadline(t))
}

// SetReadDeadline implements net.Conn.
func (st *stream) SetReadDeadline(t time.Time) error { return st.setDeadline(0, t) }

// SetWriteDeadline implements net.Conn.
func (st *stream) SetWriteDeadline(t time.Time) error { return st.setDeadline(1, t) }

func (st *stream) setDeadline(which int, t time.Time) error {
	st.mu.Lock()
	defer st.mu.Unlock()
	if st.closed {
		return net.ErrClosed
	}
	d := &st.deadline[which]
	d.stop()
	d.at = t
	if left := time.Until(t); !t.IsZero() && left > 0 {
		d.timer = time.AfterFunc(left, func() {
			st.mu.Lock()
			defer st.mu.Unlock()
			st.changed.Broadcast()
		})
	}
	st.changed.Broadcast()
	return nil
}

func (d *deadline) over() bool { return !d.at.IsZero() && !time.Now().Before(d.at) }

func (d *deadline) stop() {
	if d.timer != nil {
		d.timer.Stop()
		d.timer = nil
	}
}

// A backlog bounds what the library holds of a channel that is not read: no more than has
// come on the connection since a read found less than it had room for, less what was read
// since.
type backlog struct {
	since int64 // what had come on the connection then
	taken int64
}

// read notes a read of n bytes, which has emptied the channel or not.
func (b *backlog) read(n int, emptied bool, arrived int64) {
	if emptied {
		*b = backlog{since: arrived}
		return
	}
	b.taken += int64(n)
}

// most is the bound, in bytes.
func (b *backlog) most(arrived int64) int {
	return int(min(max(arrived-b.since-b.taken, 0), windowSize))
}

// buffers are of streams that move much. Idle ones have none.
var buffers = sync.Pool{New: func() any { b := make([]byte, 0, mostRead); return &b }}

func newBuffer() *[]byte { return buffers.Get().(*[]byte) }

func freeBuffer(b *[]byte) {
	*b = (*b)[:0]
	buffers.Put(b)
}
