package h3

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"github.com/quic-go/quic-go"
	"github.com/quic-go/quic-go/quicvarint"

	"culvert.dev/connect/internal/mux"
	"culvert.dev/tunnel"
)

// Sizes of a connection, in bytes. A stream's window begins at streamWindow and
// doubles while its reader keeps up and the window is what holds the sender, up
// to maxStream, which fills 1 Gbit/s over 100 ms (12.5 MB). What is not read
// counts against the window of the connection: the streams that a connection
// may have all hold streamWindow there, and those that grew and then stalled
// what they grew to.
const (
	streamWindow = 32 << 10
	maxStream    = 12 << 20
	connWindow   = 4 << 20
	maxWindow    = 48 << 20

	maxSection      = 32 << 10 // an encoded header list
	maxSettings     = 4 << 10  // a SETTINGS frame
	maxControlFrame = 4 << 10  // any other frame on a control stream
)

const (
	uniStreams  = 8               // at once, of the peer's; RFC 9114 section 6.2 asks for 3 at least
	headTimeout = 5 * time.Second // for the whole head of a request or an answer
)

// quicConfig is what both sides' connections have in common.
func quicConfig() *quic.Config {
	return &quic.Config{
		HandshakeIdleTimeout:           handshakeTimeout,
		InitialStreamReceiveWindow:     streamWindow,
		MaxStreamReceiveWindow:         maxStream,
		InitialConnectionReceiveWindow: connWindow,
		MaxConnectionReceiveWindow:     maxWindow,
		MaxIncomingUniStreams:          uniStreams,
		RequireStreamCreditRelease:     true,
	}
}

const handshakeTimeout = 5 * time.Second // without a packet; the whole handshake may take twice as long

// A side is what a server and a client do differently.
type side interface {
	// peerGoAway handles a GOAWAY with the number id.
	peerGoAway(id uint64) *connError
	// isServer reports whether the peer is a client.
	isServer() bool
}

// A conn is one HTTP/3 connection, of either side.
type conn struct {
	qc      *quic.Conn
	side    side
	running sync.WaitGroup // readers of unidirectional streams
	path    pathWatch      // of the ticks alone
	read    atomic.Uint64  // bytes of streams of tunnels, see unread

	datagrams     datagrams
	peerExtended  atomic.Bool // the peer takes extended CONNECT
	peerDatagrams atomic.Bool // both sides take DATAGRAM frames

	mu       sync.Mutex    // guards what follows
	settings chan struct{} // closed when the peer's settings have come; see settingsArrived
	control  *quic.SendStream
	meter    mux.Meter
	err      error                   // why we ended the connection; nil before, and where the peer did
	critical [streamDecoder + 1]bool // types of unidirectional streams that came
}

// A connError ends a connection. The peer is sent its code.
type connError struct {
	code ErrCode
	err  *tunnel.Error
}

func (e *connError) Error() string { return fmt.Sprintf("%v (%v)", e.err, e.code) }
func (e *connError) Unwrap() error { return e.err }

// wrong returns the error for a peer that violates HTTP/3.
func wrong(code ErrCode, format string, args ...any) *connError {
	return &connError{code, refuse(tunnel.BadRequest, format, args...)}
}

// errIdle and the like end a connection in order.
var (
	errIdle    = errors.New("h3: nothing to do")
	errDrained = errors.New("h3: drained")
	errClosed  = fmt.Errorf("h3: %w", net.ErrClosed)
)

// begin opens the control stream and sends the settings: those of both sides, and more,
// which are names and values.
func (c *conn) begin(more ...uint64) error {
	s, err := c.qc.OpenUniStream()
	if err != nil {
		return err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.control = s
	_, err = s.Write(appendSettings(quicvarint.Append(nil, streamControl), more...))
	return err
}

// sendGoAway sends GOAWAY: streams from id on are rejected.
func (c *conn) sendGoAway(id uint64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.control == nil {
		return
	}
	// A peer that does not read its control stream must not hold us up.
	_ = c.control.SetWriteDeadline(time.Now().Add(time.Second))
	b := appendFrameHead(nil, frameGoAway, uint64(quicvarint.Len(id)))
	_, _ = c.control.Write(quicvarint.Append(b, id))
}

// fail ends the connection. The first reason counts.
func (c *conn) fail(err error) {
	c.mu.Lock()
	first := c.err == nil
	if first {
		c.err = err
	}
	c.mu.Unlock()
	if !first {
		return
	}
	code, text := NoError, ""
	if ce, ok := errors.AsType[*connError](err); ok {
		code, text = ce.code, ce.err.Error()
	}
	_ = c.qc.CloseWithError(quic.ApplicationErrorCode(code), text)
}

// recovered is deferred in a goroutine of the connection, whose panic ends the
// connection.
func (c *conn) recovered() {
	if v := recover(); v != nil {
		c.fail(&connError{InternalError, &tunnel.Error{Reason: tunnel.Internal, Err: tunnel.Caught(v)}})
	}
}

// background runs f in a goroutine of the connection, whose panic ends the
// connection.
func (c *conn) background(f func()) {
	c.running.Go(func() {
		defer c.recovered()
		f()
	})
}

// cause returns why the connection ended, or nil before.
func (c *conn) cause() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.err != nil {
		return c.err
	}
	return context.Cause(c.qc.Context())
}

// charge spends points of the meter.
func (c *conn) charge(cost float64, what string) *connError {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.meter.Spend(cost) {
		return nil
	}
	return &connError{ExcessiveLoad, refuse(tunnel.Flood, "too many %s", what)}
}

func (c *conn) giveBack(cost float64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.meter.GiveBack(cost)
}

// acceptUni reads the peer's unidirectional streams until the connection ends.
func (c *conn) acceptUni() {
	defer c.recovered()
	for {
		s, err := c.qc.AcceptUniStream(c.qc.Context())
		if err != nil {
			return
		}
		c.background(func() {
			if err := c.readUni(s); err != nil {
				c.fail(err)
			}
			s.ReleaseStreamCredit()
		})
	}
}

// readUni reads one of them.
func (c *conn) readUni(s *quic.ReceiveStream) *connError {
	f := &frameReader{r: s}
	kind, err := f.number()
	if err != nil { // reset, or ended: RFC 9114 section 6.2 has that be nothing
		return c.charge(mux.CostReset, "streams without a type")
	}
	if kind > streamDecoder {
		s.CancelRead(quic.StreamErrorCode(StreamCreation)) // section 9: an extension
		return c.charge(mux.CostReset, "streams of unknown types")
	}
	if kind == streamPush {
		if c.side.isServer() {
			return wrong(StreamCreation, "a push stream of a client")
		}
		return wrong(IDError, "a push stream, and none was allowed")
	}
	c.mu.Lock()
	twice := c.critical[kind]
	c.critical[kind] = true
	c.mu.Unlock()
	if twice {
		return wrong(StreamCreation, "a second stream of type %d", kind)
	}
	switch kind {
	case streamControl:
		return c.readControl(f)
	case streamEncoder:
		return c.readEncoder(f)
	}
	return c.readDecoder(f)
}

// number reads a number that stands before any frame: the type of a stream.
func (f *frameReader) number() (uint64, error) {
	for {
		n, size, err := quicvarint.Parse(f.ahead[:f.to])
		if err == nil {
			f.from += size
			return n, nil
		}
		if f.end {
			return 0, io.ErrUnexpectedEOF
		}
		got, err := f.r.Read(f.ahead[f.to : f.to+1])
		f.to += got
		if err == io.EOF {
			f.end = true
		} else if err != nil && got == 0 {
			return 0, err
		}
	}
}

// ended returns the error for the end of a stream that must not end before the
// connection does.
func (c *conn) ended(what string, err error) *connError {
	if se, reset := errors.AsType[*quic.StreamError](err); err == io.EOF || reset && se.Remote {
		return wrong(ClosedCritical, "the %s stream ended", what)
	}
	if err == io.ErrUnexpectedEOF {
		return wrong(FrameError, "the %s stream ended inside of a frame", what)
	}
	return nil // the connection is gone
}

// readControl reads the control stream, RFC 9114 section 6.2.1.
func (c *conn) readControl(f *frameReader) *connError {
	first := true
	for {
		t, err := f.next()
		if err != nil {
			return c.ended("control", err)
		}
		switch {
		case first && t != frameSettings:
			return wrong(MissingSettings, "the control stream begins with a frame of type %#x, not SETTINGS", t)
		case !first && t == frameSettings, t == frameData, t == frameHeaders, t == framePushPromise, isHTTP2(t),
			!c.side.isServer() && (t == frameMaxPushID || t == framePriorityUpdate || t == framePriorityPush):
			return wrong(FrameUnexpected, "a frame of type %#x on the control stream", t)
		}
		most := uint64(maxControlFrame)
		if first {
			most = maxSettings
		}
		if f.left > most {
			return &connError{ExcessiveLoad, refuse(tunnel.TooLarge, "a frame of type %#x and %d bytes on the control stream, limit %d", t, f.left, most)}
		}
		b, err := f.payload()
		if err != nil {
			return c.ended("control", err)
		}
		if ce := c.controlFrame(t, b); ce != nil {
			return ce
		}
		if ce := c.charge(mux.CostFrame, "frames on the control stream"); !first && ce != nil {
			return ce
		}
		first = false
	}
}

func (c *conn) controlFrame(t uint64, b []byte) *connError {
	switch t {
	case frameSettings:
		p, ce := readSettings(b)
		if ce != nil {
			return ce
		}
		return c.applySettings(p)
	case frameGoAway, frameCancelPush, frameMaxPushID:
		id, err := parseID(b)
		if err != nil {
			return wrong(FrameError, "a frame of type %#x with %d bytes that are %w", t, len(b), err)
		}
		switch t {
		case frameGoAway:
			return c.side.peerGoAway(id)
		case frameCancelPush:
			return wrong(IDError, "CANCEL_PUSH of %d, which was never allowed or promised", id)
		}
	case framePriorityPush:
		return wrong(IDError, "a priority for a push that was never promised") // RFC 9218 section 7.2
	}
	return nil
}

// readEncoder reads the encoder stream. There is no dynamic table, so a peer may
// only set its capacity to 0, RFC 9204 section 4.3.1.
func (c *conn) readEncoder(f *frameReader) *connError {
	var b [64]byte
	for {
		n, err := f.rest(b[:])
		for _, instruction := range b[:n] {
			if instruction != 0x20 {
				return wrong(EncoderStream, "an instruction for the dynamic table, which has no room")
			}
		}
		if err != nil {
			return c.ended("QPACK encoder", err)
		}
		if ce := c.charge(mux.CostFrame, "instructions on the encoder stream"); ce != nil {
			return ce
		}
	}
}

// readDecoder reads the decoder stream, on which a peer may cancel each request.
func (c *conn) readDecoder(f *frameReader) *connError {
	var b [64]byte
	for {
		if _, err := f.rest(b[:]); err != nil {
			return c.ended("QPACK decoder", err)
		}
	}
}

// rest reads bytes that are no frames.
func (f *frameReader) rest(p []byte) (int, error) {
	if f.from < f.to {
		n := copy(p, f.ahead[f.from:f.to])
		f.from += n
		return n, nil
	}
	if f.end {
		return 0, io.EOF
	}
	return f.r.Read(p)
}

// roundTrip returns the smoothed round-trip time.
func (c *conn) roundTrip() time.Duration { return c.qc.ConnectionStats().SmoothedRTT }
