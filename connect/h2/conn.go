package h2

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"

	"culvert.dev/connect"
	"culvert.dev/connect/internal/mux"
	"culvert.dev/tunnel"
)

// Sizes of a connection. The peer may always have connWindow bytes on their
// way, which fills 1 Gbit/s over 100 ms (12.5 MB), whoever reads: what bounds
// memory, and one stream's share, is the window of each stream. It begins at
// streamWindow. It doubles while the reader keeps up and the window is what holds
// the sender, as long as all streams together have grown by no more than maxGrowth.
//
// Over a path shorter than shortPath the window is restWindow from the first
// update on, which is 40 MB/s at least. It grows only for a stream that has moved
// minMovedToGrow: until then, the kernel may have taken it all for a service that
// does not read. Then it grows to busyWindow, however long that takes: many streams
// that share the path are each slow, and small windows would wake both sides for each
// few KiB. It grows beyond for a stream that reads half of it within one round trip, and
// no further than fastest needs over this path: the rest would wait in the socket of a
// receiver that is slower than the path, and the other streams behind it. The round trip
// is measured again each time a window has grown, before one grows further.
const (
	connWindow     = 16 << 20
	streamWindow   = 64 << 10
	restWindow     = 40 << 10
	maxWindow      = 16 << 20
	maxGrowth      = 16 << 20
	shortPath      = time.Millisecond
	busyWindow     = 320 << 10
	fastest        = 5e9 / 8 // bytes per second of a stream
	minMovedToGrow = 512 << 10
	maxProbes      = 32 // PINGs of a connection that measure the round trip while windows grow

	// minScarceHold is how many unread bytes a stream may have however scarce memory is.
	minScarceHold = 2 << 10

	maxFrame        = 16 << 10             // bytes of a frame's payload, RFC 9113 section 4.2: every peer takes as much
	maxSend         = maxFrame - frameHead // bytes of a DATA frame that is sent: with its head it fills a TLS record
	maxList         = connect.MaxList
	maxBlockBytes   = 32 << 10 // bytes of an encoded header list
	maxBlockFrames  = 16       // frames of an encoded header list
	maxControlBytes = 64 << 10 // bytes of control frames that the peer has not taken
)

const (
	maxResets       = 256              // ids of streams that are remembered
	maxBatch        = 128 << 10        // bytes of one write
	maxUnsent       = 32 << 10         // bytes that the kernel takes before it has sent them: a small stream is behind them
	maxShort        = 4 << 10          // bytes of one that the kernel takes at once where it has room
	writeTimeout    = 30 * time.Second // for one write
	lingerTimeout   = time.Second      // for the last frames to arrive, and for the body of a refusal
	requestTimeout  = 5 * time.Second  // for a whole header block, a body that is discarded, or a refusal to be read
	unknownRTT      = 100 * time.Millisecond
	settingsTimeout = 20 * time.Second // for the peer to acknowledge SETTINGS
)

// A side is what a server and a client do differently.
type side interface {
	// headers gets a complete header block. It is called on the reader's
	// goroutine, without mu.
	headers(b *block) error
	// settings is called with mu held when the peer's came.
	settings()
	// peerGoAway is called with mu held: the peer takes no streams after last.
	peerGoAway(last uint32)
	// unwritable is called with mu held when a write has failed, before the connection ends.
	unwritable()
	// dropped is called with mu held when a stream has ended.
	dropped(s *Stream)
}

// A conn is one HTTP/2 connection, of either side.
type conn struct {
	nc        net.Conn
	side      side
	client    bool
	hasRoom   func() bool // reports whether a short write returns at once; nil where that is not known
	abortCode http2.ErrCode

	// The reader's own.
	input      *input
	br         *readBuffer
	fr         *http2.Framer
	dec        *hpack.Decoder
	block      block
	payloads   [][]byte // that have come one behind the other and wait for the last of them
	payloadsOf *Stream

	lastFrame atomic.Int64 // when a frame last came, by mux.Clock
	panicked  atomic.Pointer[tunnel.Panic]

	mu      sync.Mutex // guards what follows
	streams map[uint32]*Stream
	last    uint32 // the highest id of a stream that was begun
	err     error  // why the connection ended; nil before
	meter   meter

	credit  int                  // bytes the peer may still send
	unacked int                  // bytes that came and that the peer was not told of
	grown   int                  // bytes by which windows are larger than streamWindow
	unread  int                  // bytes that came and that nobody has read
	holding tunnel.BufferAccount // their memory
	holds   int                  // bytes of it

	allowed        int  // bytes the peer takes
	initial        int  // of them, per new stream
	peerMaxFrame   int  // bytes of a frame that the peer takes
	peerMaxStreams int  // streams that the peer takes
	peerExtended   bool // the peer takes extended CONNECT, RFC 8441

	fw      *http2.Framer // writes to control
	control bytes.Buffer
	enc     *hpack.Encoder
	encoded bytes.Buffer
	ready   list            // streams that may have something to send
	starved list            // streams that wait for the connection's window
	slots   [maxPull][]byte // of the batch that is being made, for frames of one stream
	work    sync.Cond       // the writer waits here
	writing bool            // a batch is being made or written
	later   bool            // the writer has work, and is told once the reader has no whole frame left
	broken  error           // of a batch that no writer has written, for the writer
	due     int64           // when the deadline of writes was set last, by mux.Clock

	resets            []uint32 // ids of streams that we reset last, at most maxResets: the peer may not know yet
	nreset            int
	rtt               time.Duration // the shortest seen, 0 before
	pinged            int64         // when the PING or SETTINGS that has no answer yet was sent; 0 for none
	pings             uint64        // sent
	probes            int           // of them, while windows grew
	awaitsSettingsAck bool          // our SETTINGS have not been acknowledged

	written chan struct{} // closed when the writer is done
}

func newConn(nc net.Conn, s side, client bool) *conn {
	c := &conn{
		nc: nc, side: s, client: client, hasRoom: tunnel.RoomCheck(nc), abortCode: http2.ErrCodeConnect,
		streams: make(map[uint32]*Stream),
		credit:  connWindow, allowed: 65535, initial: 65535, peerMaxFrame: maxFrame, peerMaxStreams: 100,
		written: make(chan struct{}),
	}
	if client {
		c.abortCode = http2.ErrCodeCancel
	}
	tunnel.LimitUnsent(nc, maxUnsent)
	c.input = &input{conn: nc}
	c.br = newReadBuffer(c.input)
	c.fr = http2.NewFramer(nil, c.br)
	c.fr.SetMaxReadFrameSize(maxFrame)
	c.dec = hpack.NewDecoder(4096, c.block.field)
	c.dec.SetMaxStringLength(maxList)
	c.fw = http2.NewFramer(&c.control, nil)
	c.enc = hpack.NewEncoder(&c.encoded)
	c.enc.SetMaxDynamicTableSizeLimit(0) // tunnels have too few heads for it to be worth its memory
	c.work.L = &c.mu
	c.lastFrame.Store(mux.Clock())
	return c
}

// An input reads from the connection and counts the bytes.
type input struct {
	conn        net.Conn
	n           int64
	hasRequest  atomic.Bool // a request was made: the Server's deadline no longer holds
	ownDeadline atomic.Bool // setTimeout has set the deadline
	ended       atomic.Bool // the connection has ended
}

// setTimeout limits the time until clearTimeout is called.
func (in *input) setTimeout(d time.Duration) {
	in.ownDeadline.Store(true)
	in.deadline(time.Now().Add(d))
}

func (in *input) clearTimeout() {
	if in.ownDeadline.Swap(false) {
		in.deadline(time.Time{})
	}
}

// deadline sets the deadline of the connection, unless it has ended.
func (in *input) deadline(t time.Time) {
	_ = in.conn.SetReadDeadline(t)
	if in.ended.Load() { // it ended meanwhile
		_ = in.conn.SetReadDeadline(time.Unix(1, 0))
	}
}

func (in *input) Read(p []byte) (int, error) {
	for {
		n, err := in.conn.Read(p)
		in.n += int64(n)
		if n == 0 && errors.Is(err, os.ErrDeadlineExceeded) && in.hasRequest.Load() && !in.ownDeadline.Load() && !in.ended.Load() {
			in.deadline(time.Time{})
			continue
		}
		return n, err
	}
}

// A connError ends a connection. The peer is sent its code.
type connError struct {
	code http2.ErrCode
	err  *tunnel.Error
}

func (e *connError) Error() string { return e.err.Error() }
func (e *connError) Unwrap() error { return e.err }

// protocolError returns the error for a peer that violates HTTP/2.
func protocolError(code http2.ErrCode, format string, args ...any) error {
	return &connError{code, tunnel.Refusef(tunnel.BadRequest, "h2: "+format, args...)}
}

// flood returns the error for a peer that sends too much that carries nothing.
func flood(what string) error {
	return &connError{http2.ErrCodeEnhanceYourCalm, tunnel.Refusef(tunnel.Flood, "h2: %s", what)}
}

// errIdle and the like end a connection in order.
var (
	errIdle    = errors.New("h2: nothing to do")
	errDrained = errors.New("h2: drained")
	errClosed  = fmt.Errorf("h2: %w", net.ErrClosed)
	errDead    = errors.New("h2: the peer does not answer a PING")
)

// settingsTimedOut ends a connection whose peer has not acknowledged our SETTINGS
// in time (RFC 9113 section 6.5.3) and reports whether it did. No PING is sent
// before the acknowledgement, so nothing else would find the peer dead. The caller
// holds mu.
func (c *conn) settingsTimedOut(now int64) bool {
	if !c.awaitsSettingsAck || time.Duration(now-c.pinged) < settingsTimeout {
		return false
	}
	c.failLocked(protocolError(http2.ErrCodeSettingsTimeout, "SETTINGS were not acknowledged within %v", settingsTimeout))
	return true
}

// run reads until the connection ends and returns why it ended. By then the
// connection is closed, and none of its goroutines is left but the Handlers'.
func (c *conn) run(first func() error) error {
	go c.write()
	c.fail(c.read(first))
	c.mu.Lock()
	err := c.err // the first reason counts
	c.mu.Unlock()
	<-c.written
	if _, said := errors.AsType[*connError](err); said || errors.Is(err, errDrained) || errors.Is(err, errIdle) {
		c.linger()
	}
	_ = c.nc.Close()
	return err
}

// read reads frames until one of them, or none, ends the connection.
func (c *conn) read(first func() error) (err error) {
	defer func() {
		if v := recover(); v != nil {
			err = c.caught(v)
		}
	}()
	defer c.br.free()
	err = first()
	for err == nil {
		err = c.frame()
	}
	return err
}

// caught returns the error for the panic v of one of the connection's goroutines.
func (c *conn) caught(v any) error {
	p := tunnel.Caught(v)
	c.panicked.CompareAndSwap(nil, p)
	return &connError{http2.ErrCodeInternal, &tunnel.Error{Reason: tunnel.Internal, Err: p}}
}

// recovered is deferred where mu is held: a panic ends the connection.
func (c *conn) recovered() {
	if v := recover(); v != nil {
		c.failLocked(c.caught(v))
	}
}

// linger waits until the last frames have arrived: a close with unread input would
// send a reset, and the peer would lose them.
func (c *conn) linger() {
	w, ok := c.nc.(interface{ CloseWrite() error })
	if !ok || w.CloseWrite() != nil {
		return
	}
	_ = c.nc.SetReadDeadline(time.Now().Add(lingerTimeout))
	_, _ = io.CopyN(io.Discard, c.nc, 1<<20)
}

// fail ends the connection: every stream, and the writer after a GOAWAY.
func (c *conn) fail(err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.failLocked(err)
}

func (c *conn) failLocked(err error) {
	if c.err != nil {
		return
	}
	c.err = err
	c.input.ended.Store(true)
	code := http2.ErrCodeNo
	if ce, ok := errors.AsType[*connError](err); ok {
		code = ce.code
		c.control.Reset() // a peer that floods has not read them
	}
	last := c.last
	if c.client {
		last = 0 // a client takes no stream of the server's
	}
	_ = c.fw.WriteGoAway(last, code, nil)
	for _, s := range c.streams {
		s.cut(&ResetError{Err: err})
		c.drop(s)
	}
	c.ready, c.starved = list{}, list{}
	_ = c.nc.SetWriteDeadline(time.Now().Add(lingerTimeout))
	_ = c.nc.SetReadDeadline(time.Unix(1, 0)) // wakes the reader
	c.work.Signal()
}

// cut ends both directions of s with err. The caller holds c.mu.
func (s *Stream) cut(err error) {
	if s.cancel != nil {
		s.cancel()
	}
	if !s.ended {
		s.ended = true
		s.readErr = err
		s.c.discard(s)
	}
	if s.writeErr == nil {
		s.writeErr = err
	}
	s.finished = true
	s.wake()
}

// drop forgets s, whose both directions have ended. The caller holds mu.
func (c *conn) drop(s *Stream) {
	if c.streams[s.id] != s {
		return
	}
	delete(c.streams, s.id)
	if s.cost == 0 || s.answered != 0 {
		c.meter.ended()
	}
	c.grown -= s.window - streamWindow
	c.side.dropped(s)
}

// dropIfDone drops s if both directions have ended. The caller holds mu.
func (c *conn) dropIfDone(s *Stream) {
	if s.ended && s.finished {
		c.drop(s)
	}
}

// newStream makes the stream id and lists it. The caller holds mu.
func (c *conn) newStream(id uint32) *Stream {
	s := &Stream{c: c, id: id, window: streamWindow, credit: streamWindow, allowed: c.initial}
	s.readable.L, s.writable.L = &c.mu, &c.mu
	c.streams[id] = s
	return s
}

// reset sends RST_STREAM and ends s. The caller holds mu.
func (c *conn) reset(s *Stream, code http2.ErrCode) {
	if c.streams[s.id] != s {
		return
	}
	c.resetID(s.id, code)
	s.cut(&ResetError{Code: code})
	c.drop(s)
}

// resetID sends RST_STREAM for a stream that may never have been. The caller
// holds mu.
func (c *conn) resetID(id uint32, code http2.ErrCode) {
	if len(c.resets) < maxResets {
		c.resets = append(c.resets, id)
	} else {
		c.resets[c.nreset%maxResets] = id
	}
	c.nreset++
	_ = c.fw.WriteRSTStream(id, code)
	c.work.Signal()
}

// wasJustReset reports whether the peer may not know yet that id is over. The
// caller holds mu.
func (c *conn) wasJustReset(id uint32) bool {
	for _, r := range c.resets {
		if r == id {
			return true
		}
	}
	return false
}
