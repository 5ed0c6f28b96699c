package h2

import (
	"encoding/binary"
	"errors"
	"io"
	"time"

	"golang.org/x/net/http2"

	"culvert.dev/connect/internal/mux"
	"culvert.dev/tunnel"
)

// frame reads one frame and does what it says. An error ends the connection.
func (c *conn) frame() error {
	if !c.hasFrame() {
		c.tellNow()
	}
	h, err := c.fr.ReadFrameHeader()
	if err != nil {
		return c.readError(err)
	}
	if h.Type == http2.FrameData {
		err = c.data(h)
	} else {
		var f http2.Frame
		if f, err = c.fr.ReadFrameForHeader(h); err == nil {
			err = c.other(f)
		}
	}
	c.lastFrame.Store(mux.Clock())
	if err == nil {
		return nil
	}
	if se, ok := errors.AsType[http2.StreamError](err); ok {
		return c.streamError(h.Type, se.StreamID, se.Code)
	}
	return c.readError(err)
}

// readError gives the errors of the Framer the form of ours.
func (c *conn) readError(err error) error {
	if errors.Is(err, http2.ErrFrameTooLarge) {
		return protocolError(http2.ErrCodeFrameSize, "a frame of more than %d bytes", maxFrame)
	}
	if code, ok := errors.AsType[http2.ConnectionError](err); ok {
		if detail := c.fr.ErrorDetail(); detail != nil {
			return protocolError(http2.ErrCode(code), "%w", detail)
		}
		return protocolError(http2.ErrCode(code), "%v", http2.ErrCode(code))
	}
	return err
}

// streamError resets a stream on which the peer broke the rules. That costs the
// peer as much as a reset of its own.
func (c *conn) streamError(t http2.FrameType, id uint32, code http2.ErrCode) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.streamErrorLocked(t, id, code)
}

// streamErrorLocked is streamError for a caller that holds mu.
func (c *conn) streamErrorLocked(t http2.FrameType, id uint32, code http2.ErrCode) error {
	s := c.streams[id]
	switch {
	case s != nil:
		c.reset(s, code)
	case t == http2.FrameWindowUpdate && !c.wasOpened(id):
		return protocolError(http2.ErrCodeProtocol, "%v on stream %d, which was never opened", t, id) // RFC 9113 section 5.1
	default:
		c.resetID(id, code)
	}
	return c.charge(costReset, "too many stream errors")
}

// charge spends points of the meter. The caller holds mu.
func (c *conn) charge(cost float64, what string) error {
	if !c.meter.Spend(cost) {
		return flood(what)
	}
	if c.control.Len() > maxControlBytes {
		return flood("answers are not read")
	}
	return nil
}

// wasOpened reports whether the stream id was ever opened. The caller holds mu.
func (c *conn) wasOpened(id uint32) bool {
	return id%2 == 1 && id <= c.last // even ones are a server's, which begins none
}

// data reads a DATA frame, RFC 9113 section 6.1. It does not use the Framer, which
// would copy the bytes once more.
func (c *conn) data(h http2.FrameHeader) error {
	if h.StreamID == 0 {
		return protocolError(http2.ErrCodeProtocol, "DATA on stream 0")
	}
	padding := 0
	body := int(h.Length)
	if h.Flags.Has(http2.FlagDataPadded) {
		if body == 0 {
			return protocolError(http2.ErrCodeFrameSize, "padded DATA without a length of padding")
		}
		b, err := c.br.ReadByte()
		if err != nil {
			return err
		}
		if body--; int(b) > body {
			return protocolError(http2.ErrCodeProtocol, "more padding than frame")
		}
		padding = int(b)
		body -= padding
	}
	p, err := c.br.Peek(body) // waits until all of it is there
	if err != nil {
		return unexpectedEOF(err)
	}
	if err = c.dataOf(h, p, c.moreOf(h.StreamID, body+padding)); err != nil {
		return err
	}
	_, err = c.br.Discard(body + padding)
	return unexpectedEOF(err)
}

// tellNow has what waits for the reader written, by the writer where it takes long.
func (c *conn) tellNow() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.later && c.writeNow(nil) {
		c.later = false
	}
	c.tell()
}

// hasFrame reports whether the next frame is buffered as a whole.
func (c *conn) hasFrame() bool {
	have := c.br.Buffered() - frameHead
	if have < 0 {
		return false
	}
	h, _ := c.br.Peek(frameHead)
	return int(h[0])<<16|int(h[1])<<8|int(h[2]) <= have
}

// moreOf reports whether the next frame is DATA of the stream id as well and is buffered
// as a whole, behind the skip bytes that are left of the present one.
func (c *conn) moreOf(id uint32, skip int) bool {
	have := c.br.Buffered() - skip - frameHead
	if have < 0 {
		return false
	}
	b, _ := c.br.Peek(skip + frameHead)
	h := b[skip:]
	length := int(h[0])<<16 | int(h[1])<<8 | int(h[2])
	return http2.FrameType(h[3]) == http2.FrameData && length <= have && binary.BigEndian.Uint32(h[5:])&(1<<31-1) == id
}

// unexpectedEOF turns the end of the stream within a frame into its own error.
func unexpectedEOF(err error) error {
	if errors.Is(err, io.EOF) {
		return io.ErrUnexpectedEOF
	}
	return err
}

// dataOf handles the payload p of a DATA frame, without its padding. Where there is more, p stays
// as it is until the next frame was handled, which is of the same stream.
func (c *conn) dataOf(h http2.FrameHeader, p []byte, more bool) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	size := int(h.Length)
	if c.credit -= size; c.credit < 0 {
		return protocolError(http2.ErrCodeFlowControl, "more DATA than the connection's window of %d bytes", connWindow)
	}
	c.unacked += size
	c.replenish()
	end := h.Flags.Has(http2.FlagDataEndStream)
	if len(p) == 0 && !end {
		if err := c.charge(costEmpty, "too many empty DATA frames"); err != nil {
			return err
		}
	}
	s := c.streams[h.StreamID]
	switch {
	case s == nil && !c.wasOpened(h.StreamID):
		return protocolError(http2.ErrCodeProtocol, "DATA on stream %d, which was never opened", h.StreamID)
	case s == nil && c.wasJustReset(h.StreamID):
		return nil // it was on its way
	case s == nil:
		c.resetID(h.StreamID, http2.ErrCodeStreamClosed)
		return c.charge(costReset, "too much DATA on streams that are closed")
	case s.ended:
		c.reset(s, http2.ErrCodeStreamClosed)
		return c.charge(costReset, "too much DATA on streams that are closed")
	case c.client && (s.head == nil || s.head.Status/100 == 1):
		c.reset(s, http2.ErrCodeProtocol)
		return nil
	}
	if s.credit -= size; s.credit < 0 {
		c.reset(s, http2.ErrCodeFlowControl)
		return c.charge(costReset, "too much DATA for the windows of streams")
	}
	switch {
	case s.discardedBody != nil:
		return s.discardedBody.data(s, len(p), end)
	case !s.closed:
		c.took(s, size-len(p)) // nobody reads padding
		c.arrived(s, p, !more || end)
		if s.ended || c.overfull(s) { // meanwhile
			return nil
		}
	}
	if end {
		c.ended(s)
	}
	return nil
}

// ended notes END_STREAM from the peer. The caller holds mu.
func (c *conn) ended(s *Stream) {
	s.ended = true
	s.readErr = io.EOF
	s.canRead()
	c.dropIfDone(s)
}

// other handles any frame but DATA.
func (c *conn) other(f http2.Frame) error {
	switch f := f.(type) {
	case *http2.HeadersFrame:
		return c.headers(f)
	case *http2.ContinuationFrame:
		return c.continuation(f)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	h := f.Header()
	id := h.StreamID
	switch f := f.(type) {
	case *http2.SettingsFrame:
		return c.peerSettings(f)
	case *http2.PingFrame:
		return c.ping(f)
	case *http2.WindowUpdateFrame:
		return c.windowUpdate(id, int(f.Increment))
	case *http2.RSTStreamFrame:
		return c.peerReset(id, f.ErrCode)
	case *http2.GoAwayFrame:
		c.side.peerGoAway(f.LastStreamID)
		return c.charge(costFrame, "too many GOAWAY frames")
	case *http2.PriorityFrame:
		if f.StreamDep == id {
			return c.streamErrorLocked(h.Type, id, http2.ErrCodeProtocol) // RFC 7540 section 5.3.1
		}
		return c.charge(costFrame, "too many PRIORITY frames")
	case *http2.PushPromiseFrame:
		return protocolError(http2.ErrCodeProtocol, "PUSH_PROMISE, which is not wanted")
	}
	return c.charge(costFrame, "too many frames of unknown types") // RFC 9113 section 4.1: ignored
}

func (c *conn) peerSettings(f *http2.SettingsFrame) error {
	if f.IsAck() {
		if c.awaitsSettingsAck {
			c.awaitsSettingsAck = false
			c.noteAck()
		}
		return c.charge(costFrame, "too many SETTINGS frames")
	}
	before := c.initial
	err := f.ForeachSetting(func(s http2.Setting) error {
		if err := s.Valid(); err != nil {
			return err
		}
		switch s.ID {
		case http2.SettingInitialWindowSize:
			c.initial = int(s.Val)
		case http2.SettingMaxFrameSize:
			c.peerMaxFrame = int(s.Val)
		case http2.SettingMaxConcurrentStreams:
			c.peerMaxStreams = int(min(s.Val, 1<<20))
		case http2.SettingEnableConnectProtocol:
			c.peerExtended = s.Val == 1
		}
		return nil
	})
	if err != nil {
		return err
	}
	for _, s := range c.streams { // RFC 9113 section 6.9.2
		if s.allowed += c.initial - before; s.allowed > 1<<31-1 {
			return protocolError(http2.ErrCodeFlowControl, "a window of more than %d bytes", 1<<31-1)
		}
		if s.allowed > 0 && s.hasMore() {
			c.enlist(s)
		}
	}
	_ = c.fw.WriteSettingsAck()
	c.work.Signal()
	c.side.settings()
	return c.charge(costSettings, "too many SETTINGS frames")
}

func (c *conn) ping(f *http2.PingFrame) error {
	if f.IsAck() {
		if c.pinged != 0 && !c.awaitsSettingsAck {
			c.noteAck()
		}
		return c.charge(costFrame, "too many PING frames")
	}
	_ = c.fw.WritePing(true, f.Data)
	c.work.Signal()
	return c.charge(costFrame, "too many PING frames")
}

// noteAck notes the answer to the PING or SETTINGS that was sent last.
func (c *conn) noteAck() {
	took := time.Duration(mux.Clock() - c.pinged)
	if c.pinged != 0 && (c.rtt == 0 || took < c.rtt) {
		c.rtt = max(took, 1)
	}
	c.pinged = 0
}

// sendPing sends a PING, unless one has no answer yet. The caller holds mu.
func (c *conn) sendPing() {
	if c.pinged != 0 {
		return
	}
	c.pinged = mux.Clock()
	c.pings++
	_ = c.fw.WritePing(false, [8]byte{'c', 'u', 'l', 'v', 'e', 'r', 't', byte(c.pings)})
	c.work.Signal()
}

func (c *conn) windowUpdate(id uint32, n int) error {
	if !c.meter.update() {
		return flood("too many WINDOW_UPDATE frames")
	}
	if id == 0 {
		if c.allowed += n; c.allowed > 1<<31-1 {
			return protocolError(http2.ErrCodeFlowControl, "a window of more than %d bytes", 1<<31-1)
		}
		c.feed()
		c.work.Signal()
		return nil
	}
	s := c.streams[id]
	if s == nil {
		if !c.wasOpened(id) {
			return protocolError(http2.ErrCodeProtocol, "WINDOW_UPDATE on stream %d, which was never opened", id)
		}
		return nil
	}
	if s.allowed += n; s.allowed > 1<<31-1 {
		c.reset(s, http2.ErrCodeFlowControl)
		return c.charge(costReset, "too many stream errors")
	}
	if s.allowed > 0 && s.hasMore() && c.queue(s) {
		c.later = true
	}
	return nil
}

func (c *conn) peerReset(id uint32, code http2.ErrCode) error {
	s := c.streams[id]
	if s == nil {
		if !c.wasOpened(id) {
			return protocolError(http2.ErrCodeProtocol, "RST_STREAM on stream %d, which was never opened", id)
		}
		if !c.meter.late() {
			return flood("too many RST_STREAM frames")
		}
		return nil
	}
	s.cut(&ResetError{Code: code})
	c.drop(s)
	if s.cost == 0 { // an abort is one of a tunnel's ends
		return nil
	}
	return c.charge(costReset, "too many RST_STREAM frames")
}

func (c *conn) headers(f *http2.HeadersFrame) error {
	if f.HasPriority() && f.Priority.StreamDep == f.StreamID {
		// The block is read all the same: the next one is decoded with its table.
		c.block.wrong = "a stream that depends on itself"
	}
	c.block.id, c.block.end = f.StreamID, f.StreamEnded()
	return c.part(f.HeaderBlockFragment(), f.HeadersEnded())
}

func (c *conn) continuation(f *http2.ContinuationFrame) error {
	return c.part(f.HeaderBlockFragment(), f.HeadersEnded())
}

// part handles one frame of a header block. The Framer ensures that no other
// frame comes before the last one of a block.
func (c *conn) part(p []byte, last bool) error {
	b := &c.block
	b.parts++
	b.size += len(p)
	if b.parts > maxBlockFrames || b.size > maxBlockBytes {
		return &connError{http2.ErrCodeEnhanceYourCalm, refuse(tunnel.TooLarge, "a header block of more than %d bytes or %d frames", maxBlockBytes, maxBlockFrames)}
	}
	if len(p) == 0 {
		c.mu.Lock()
		err := c.charge(costEmpty, "too many empty CONTINUATION frames")
		c.mu.Unlock()
		if err != nil {
			return err
		}
	}
	c.dec.SetEmitEnabled(!b.Full())
	if _, err := c.dec.Write(p); err != nil {
		return protocolError(http2.ErrCodeCompression, "header block: %w", err)
	}
	if !last {
		if b.parts == 1 && c.input.hasRequest.Load() {
			c.input.setTimeout(requestTimeout)
		}
		return nil
	}
	if b.parts > 1 {
		c.input.clearTimeout()
	}
	if err := c.dec.Close(); err != nil {
		return protocolError(http2.ErrCodeCompression, "header block: %w", err)
	}
	if b.Full() {
		c.mu.Lock()
		err := c.charge(costList+b.cost(), "too many header lists that are malformed or over a limit")
		c.mu.Unlock()
		if err != nil {
			return err
		}
	}
	err := c.side.headers(b)
	b.reset()
	return err
}
