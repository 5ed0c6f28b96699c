package ws

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"culvert.dev/tunnel"
)

// DefaultPing is that of Options: below the minute after which load balancers
// end silent connections.
const DefaultPing = 20 * time.Second

const (
	readBuffer     = 4 << 10  // bytes; larger reads go around it
	bulkReadBuffer = 64 << 10 // bytes, for frames that readBuffer does not hold
	maxEmptyFrames = 100      // frames without data in a second; more where nobody read for longer
	maxMissedPings = 3        // pings in a row that a peer may leave unanswered
)

// A Side is the role in a WebSocket: clients mask what they send.
type Side bool

// The two sides.
const (
	Client Side = false
	Server Side = true
)

// Options are the limits of a Stream. A message may have any length: it is
// handed on as it arrives, and nothing is held in memory for it.
type Options struct {
	// Ping is the time without a frame sent until a ping is. A peer of Subprotocol
	// that is silent for three times as long, while it is read from, counts as dead.
	// 0 means DefaultPing; a negative value disables pings.
	Ping time.Duration
}

// A Stream is the byte stream in a WebSocket's binary messages: see the
// package comment for how it ends. It is a tunnel.Stream and may be used by
// many goroutines.
type Stream struct {
	rwc        io.ReadWriteCloser
	conn       net.Conn // rwc where it is one
	side       Side
	halfCloses bool // an empty message is the end of the stream
	ping       time.Duration

	rmu     sync.Mutex // guards what Read uses, to the blank line
	from    io.Reader
	br      *bufio.Reader // of from; nil at rest
	left    uint64        // of the current frame's payload
	key     [4]byte       // of the current frame
	pos     int           // in the current frame, modulo 4
	final   bool          // the current frame is its message's last
	message bool          // a message is not complete
	empty   bool          // no byte of the message has come so far
	rerr    error         // the error of all later Reads
	meter   meter

	wmu       sync.Mutex // guards what Write uses, to the blank line
	owed      []byte     // the rest of a frame that was begun
	ended     bool       // the end of the stream was sent
	closeSent bool

	pongs         pongs        // that are owed
	reply         atomic.Int32 // code of the close frame that is owed; 0 for none
	answering     atomic.Bool
	sent          atomic.Int64 // when a frame was last sent, nanoseconds after born
	lastRead      atomic.Int64 // when a frame last came
	reading       atomic.Int64 // since when a Read waits, or who rests between two; -1 where nobody does
	born          time.Time
	closed        atomic.Bool                  // by Close or Abort
	peer          atomic.Pointer[error]        // why nothing can be written any more
	closeReceived atomic.Bool                  // the peer's close frame has come
	unsent        atomic.Pointer[error]        // why the connection has taken no more
	pingTimedOut  atomic.Bool                  // the peer left too many pings without an answer
	panicked      atomic.Pointer[tunnel.Panic] // of a goroutine of the stream's own

	dmu    sync.Mutex // held while deadlines are set; guards pinger
	pinger *time.Timer
}

var (
	_ tunnel.Stream        = (*Stream)(nil)
	_ tunnel.Aborter       = (*Stream)(nil)
	_ tunnel.ReasonAborter = (*Stream)(nil)
	_ tunnel.AbortDetector = (*Stream)(nil)
	_ tunnel.Waiter        = (*Stream)(nil)
)

// NewStream returns the stream in rwc, on which the handshake is over. It owns
// rwc. The subprotocol is what the handshake chose, "" for none: with
// Subprotocol the stream can half-close. rwc may be any carrier of bytes,
// such as a stream of HTTP/2 (RFC 8441); where it is no net.Conn, the Stream
// has no deadlines.
func NewStream(rwc io.ReadWriteCloser, side Side, subprotocol string, o Options) *Stream {
	return newStream(rwc, nil, side, subprotocol, o)
}

// newStream is NewStream where early has been read from rwc already.
func newStream(rwc io.ReadWriteCloser, early []byte, side Side, subprotocol string, o Options) *Stream {
	s := &Stream{rwc: rwc, side: side, halfCloses: subprotocol == Subprotocol, ping: o.Ping, born: time.Now()}
	s.meter.since = s.born
	s.conn, _ = rwc.(net.Conn)
	s.reading.Store(-1)
	if s.from = rwc; len(early) > 0 {
		s.from = io.MultiReader(bytes.NewReader(early), rwc)
	}
	if s.ping == 0 {
		s.ping = DefaultPing
	}
	if s.ping > 0 {
		s.schedulePing(s.ping)
	}
	return s
}

// errCut is the error of a Read where the connection ends before the stream does.
var errCut = fmt.Errorf("ws: the connection ended without a close frame: %w", io.ErrUnexpectedEOF)

// A closeError is a close frame as an error.
type closeError struct {
	code   int
	reason string
}

func (e *closeError) Error() string {
	return fmt.Sprintf("ws: the peer closed with code %d, %q", e.code, e.reason)
}

// orderly reports whether the peer meant the end of the stream. Pages close
// without a code.
func (e *closeError) orderly() bool { return e.code == codeNormal || e.code == codeNone }

// Read returns what the peer has sent. The end of the stream is io.EOF; a
// connection that ends before it, and a peer that breaks the protocol, are
// errors.
func (s *Stream) Read(p []byte) (int, error) {
	s.rmu.Lock()
	defer s.rmu.Unlock()
	n, err := s.read(p)
	if err != nil && s.closed.Load() {
		err = net.ErrClosed
	}
	return n, err
}

// read fills p with what is there, from as many frames as there are: the fewer and the
// larger the Writes that follow, the better.
func (s *Stream) read(p []byte) (int, error) {
	if s.closed.Load() {
		return 0, net.ErrClosed
	}
	s.buffer()
	n, err := s.readFrame(p)
	for err == nil && n > 0 && n < len(p) && s.dataBuffered() {
		var m int
		m, err = s.readFrame(p[n:])
		n += m
	}
	if s.br.Size() > readBuffer && s.br.Buffered() == 0 {
		s.freeBuffer() // the Write that follows may take long
	}
	if n > 0 {
		return n, nil // an error that follows is kept, as none of a wait
	}
	return 0, err
}

// readFrame reads from one frame, and waits for the first byte.
func (s *Stream) readFrame(p []byte) (int, error) {
	for {
		if s.rerr != nil {
			return 0, s.rerr
		}
		if len(p) == 0 {
			return 0, nil
		}
		if s.left == 0 {
			if err := s.next(); err != nil {
				return 0, s.failed(err)
			}
			continue
		}
		if s.br.Buffered() == 0 && s.br.Size() == readBuffer && s.left > readBuffer && len(p) > readBuffer {
			s.freeBuffer()
			s.br = bulkReaders.Get().(*bufio.Reader)
			s.br.Reset(s.from)
		}
		s.noteWaiting()
		n, err := s.br.Read(p[:min(uint64(len(p)), s.left)])
		s.noteRead(n > 0)
		if n > 0 {
			mask(p[:n], s.key, s.pos)
			s.pos = (s.pos + n) & 3
			if s.left -= uint64(n); s.left == 0 {
				s.frameEnd()
			}
			return n, nil
		}
		if err != nil {
			return 0, s.failed(err)
		}
	}
}

// dataBuffered reports whether a byte of data is in the buffer, for which nobody waits.
func (s *Stream) dataBuffered() bool {
	if s.left > 0 {
		return s.br.Buffered() > 0
	}
	b, _ := s.br.Peek(min(maxHeader, s.br.Buffered()))
	h, err := parseHeader(b, s.side == Server)
	return err == nil && h.opcode < opClose && h.length > 0 && s.br.Buffered() > h.size
}

var readers, bulkReaders = newReaders(readBuffer), newReaders(bulkReadBuffer)

func newReaders(size int) *sync.Pool {
	return &sync.Pool{New: func() any { return bufio.NewReaderSize(nil, size) }}
}

// buffer gets br where there is none. The caller holds rmu.
func (s *Stream) buffer() {
	if s.br == nil {
		s.br = readers.Get().(*bufio.Reader)
		s.br.Reset(s.from)
	}
}

// freeBuffer gives br up, in which nothing is. The caller holds rmu.
func (s *Stream) freeBuffer() {
	s.br.Reset(nil)
	if s.br.Size() > readBuffer {
		bulkReaders.Put(s.br)
	} else {
		readers.Put(s.br)
	}
	s.br = nil
}

// WaitRead implements tunnel.Waiter: the buffer is given up, if nothing is in it, and the
// peer may not be silent for longer than while a Read waits. A part of a frame that is
// left in it is nothing that a Read would return.
func (s *Stream) WaitRead(func()) (ready bool) {
	s.rmu.Lock()
	defer s.rmu.Unlock()
	if s.br != nil && s.br.Buffered() == 0 {
		s.freeBuffer()
	}
	if s.ping > 0 {
		s.reading.Store(int64(time.Since(s.born)))
	}
	return false
}

// noteWaiting and noteRead note how long the peer has been silent.
func (s *Stream) noteWaiting() {
	if s.ping > 0 && s.br.Buffered() == 0 {
		s.reading.Store(int64(time.Since(s.born)))
	}
}

func (s *Stream) noteRead(any bool) {
	if s.ping > 0 {
		s.reading.Store(-1)
		if any {
			s.lastRead.Store(int64(time.Since(s.born)))
		}
	}
}

// peek is bufio's Peek, which loses nothing where it fails.
func (s *Stream) peek(n int) ([]byte, error) {
	if s.br.Buffered() >= n {
		return s.br.Peek(n)
	}
	s.noteWaiting()
	b, err := s.br.Peek(n)
	s.noteRead(err == nil)
	return b, err
}

// failed returns the error of Read for err, and keeps it if it is final.
func (s *Stream) failed(err error) error {
	var ne net.Error
	var v *violation
	switch {
	case s.panicked.Load() != nil:
		err = s.panicked.Load()
	case s.pingTimedOut.Load():
		err = fmt.Errorf("ws: no answer to %d pings: %w", maxMissedPings, os.ErrDeadlineExceeded)
	case errors.As(err, &v):
		s.answer(v.code)
	case errors.Is(err, io.EOF) && s.rerr == nil:
		err = errCut
	case errors.As(err, &ne) && ne.Timeout():
		return err // the caller's deadline: nothing is lost
	}
	if s.rerr == nil {
		s.rerr = err
	}
	s.over(s.rerr)
	return s.rerr
}

// next reads up to the payload of the next frame with data, and handles what
// has none. It leaves the stream as it was where it has to wait for more and
// cannot.
func (s *Stream) next() error {
	h, err := s.header()
	if err != nil {
		return err
	}
	if h.opcode >= opClose {
		return s.control(h)
	}
	switch {
	case h.length == 0 && !s.meter.allow(time.Now()):
		return errFlood
	case h.opcode == opContinuation && !s.message:
		return violated(codeProtocol, "continuation of no message")
	case h.opcode == opBinary && s.message:
		return violated(codeProtocol, "message inside of another")
	}
	if !s.message {
		s.message, s.empty = true, true
	}
	_, _ = s.br.Discard(h.size)
	s.left, s.key, s.pos, s.final = h.length, h.key, 0, h.fin
	if s.left > 0 {
		s.empty = false
		return nil
	}
	end := s.final && s.empty
	s.frameEnd()
	if end && s.halfCloses {
		s.rerr = io.EOF
	}
	return nil
}

func (s *Stream) frameEnd() {
	if s.final {
		s.message = false
	}
}

// header returns the next header, which stays buffered.
func (s *Stream) header() (header, error) {
	b, _ := s.br.Peek(min(maxHeader, s.br.Buffered()))
	for {
		h, err := parseHeader(b, s.side == Server)
		if err != errMore {
			return h, err
		}
		if _, err = s.peek(len(b) + 1); err != nil {
			return header{}, err
		}
		b, _ = s.br.Peek(min(maxHeader, s.br.Buffered()))
	}
}

// control reads and handles a control frame.
func (s *Stream) control(h header) error {
	b, err := s.peek(h.size + int(h.length))
	if err != nil {
		return err
	}
	if !s.meter.allow(time.Now()) {
		return errFlood
	}
	payload := bytes.Clone(b[h.size:])
	_, _ = s.br.Discard(len(b))
	mask(payload, h.key, 0)
	switch h.opcode {
	case opPing:
		s.pongs.add(payload)
		s.answer(0)
	case opClose:
		code, reason, err := parseClose(payload)
		if err != nil {
			return err
		}
		gone := &closeError{code, reason}
		if s.rerr = gone; gone.orderly() {
			s.rerr = io.EOF
		}
		s.over(gone)
		s.closeReceived.Store(true)
		s.answer(code)
	}
	return nil
}

// maxPongs is how many answers to pings may wait to be sent, of at most 125
// bytes each.
const maxPongs = 32

// pongs are answers to pings that wait to be sent. A peer that pings and does not
// read makes nobody keep all of its pings: of more than maxPongs the last ones are
// answered, as RFC 6455 section 5.5.3 allows.
type pongs struct {
	mu   sync.Mutex
	list [][]byte
}

func (p *pongs) add(payload []byte) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.list) == maxPongs {
		p.list = slices.Delete(p.list, 0, 1)
	}
	p.list = append(p.list, payload)
}

// take returns all of them, in the order of the pings.
func (p *pongs) take() [][]byte {
	p.mu.Lock()
	defer p.mu.Unlock()
	list := p.list
	p.list = nil
	return list
}

func (p *pongs) empty() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.list) == 0
}

// over makes all later writes fail with err. The first reason counts.
func (s *Stream) over(err error) {
	err = fmt.Errorf("ws: nothing can be sent: %w", err)
	s.peer.CompareAndSwap(nil, &err)
}

// A meter counts frames that cost work and carry nothing. Those of a peer that
// was not read from come all at once: there may be one more of them for each
// second that has passed.
type meter struct {
	since time.Time // when n was 0; at first, when the stream began
	n     int
	late  int // that may have waited
}

var errFlood = violated(codePolicy, "more than %d frames without data in a second", maxEmptyFrames)

func (m *meter) allow(now time.Time) bool {
	if age := now.Sub(m.since); age >= time.Second {
		m.since, m.n, m.late = now, 0, int(age/time.Second)
	}
	m.n++
	return m.n <= maxEmptyFrames+m.late
}
