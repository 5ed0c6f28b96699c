package ws

import (
	"bytes"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"time"

	"culvert.dev/connect"
	"culvert.dev/tunnel"
)

// maxFrame limits the bytes of one frame and message: it is what the Relay writes at
// once.
const maxFrame = 64 << 10

var frames = sync.Pool{New: func() any { return new([maxHeader + maxFrame]byte) }}

// Write sends p in binary messages. A frame that a deadline cuts short counts as
// written; its rest is sent before the next frame.
func (s *Stream) Write(p []byte) (n int, err error) {
	s.wmu.Lock()
	defer s.wmu.Unlock()
	for first := true; first || len(p) > 0; first = false {
		if err := s.writable(); err != nil || len(p) == 0 { // an empty message would be an end
			return n, err
		}
		part := p[:min(len(p), maxFrame)]
		begun, err := s.send(opBinary, part)
		if begun {
			n += len(part)
		}
		if err != nil {
			if s.closed.Load() {
				err = net.ErrClosed
			}
			return n, err
		}
		p = p[len(part):]
	}
	return n, nil
}

// writable returns why nothing can be written any more, or nil. The caller holds wmu.
func (s *Stream) writable() error {
	switch why := s.peer.Load(); {
	case s.closed.Load():
		return net.ErrClosed
	case s.ended:
		return fmt.Errorf("ws: write after the end of the stream: %w", io.ErrClosedPipe)
	case why != nil:
		return *why
	case s.closeSent:
		return fmt.Errorf("ws: write after a close frame: %w", io.ErrClosedPipe)
	}
	return nil
}

// send sends one frame, after the rest of the frame before it. It reports whether
// any of the frame was sent: then its rest is owed. The caller holds wmu.
func (s *Stream) send(opcode byte, payload []byte) (begun bool, err error) {
	if err := s.flushOwed(); err != nil {
		return false, err
	}
	var key *[4]byte
	if s.side == Client {
		key = new([4]byte)
		_, _ = rand.Read(key[:]) // never fails
	}
	buf := frames.Get().(*[maxHeader + maxFrame]byte)
	defer frames.Put(buf)
	b := appendHeader(buf[:0], opcode, len(payload), key)
	at := len(b)
	b = append(b, payload...)
	if key != nil {
		mask(b[at:], *key, 0)
	}
	n, err := s.put(b)
	if n > 0 && n < len(b) {
		s.owed = bytes.Clone(b[n:])
	}
	if n > 0 && s.ping > 0 {
		s.sent.Store(int64(time.Since(s.born)))
	}
	return n > 0, err
}

// flushOwed sends the rest of a frame. The caller holds wmu.
func (s *Stream) flushOwed() error {
	if len(s.owed) == 0 {
		return nil
	}
	n, err := s.put(s.owed)
	if s.owed = s.owed[n:]; len(s.owed) == 0 {
		s.owed = nil
	}
	return err
}

// put writes b to the connection, and keeps why that takes no more.
func (s *Stream) put(b []byte) (int, error) {
	n, err := s.rwc.Write(b)
	if err != nil && !errors.Is(err, os.ErrDeadlineExceeded) {
		s.unsent.CompareAndSwap(nil, &err)
	}
	return n, err
}

// Broken implements tunnel.AbortDetector. A ping or pong may be the first to hear that the
// connection was reset, and the socket tells that once.
func (s *Stream) Broken() error {
	if err := s.unsent.Load(); err != nil && !s.closed.Load() && s.peer.Load() == nil {
		return *err
	}
	return nil
}

// answer has the pongs sent that are owed, and a close frame if code is not 0. It
// does not wait: a Read must not wait for a peer that does not read.
func (s *Stream) answer(code int) {
	if code != 0 {
		s.reply.CompareAndSwap(0, int32(code))
	}
	if s.answering.CompareAndSwap(false, true) {
		go s.sendRepliesLoop()
	}
}

// sendRepliesLoop sends replies until none is owed. It ends with the connection at the
// latest.
func (s *Stream) sendRepliesLoop() {
	defer s.recovered()
	for {
		code, done := s.sendReplies()
		if done {
			_ = s.rwc.Close() // the server closes first, section 7.1.1, and the client waits for it
			return
		}
		s.answering.Store(false)
		if s.pongs.empty() && int(s.reply.Load()) == code || !s.answering.CompareAndSwap(false, true) {
			return
		}
	}
}

// recovered is deferred in a goroutine of the stream: its panic ends the stream and
// is the error of the next Read.
func (s *Stream) recovered() {
	if v := recover(); v != nil {
		s.panicked.Store(tunnel.Caught(v))
		_ = connect.Abort(s.rwc)
	}
}

// sendReplies sends the pongs and the close frame that are owed, and returns the code
// of that. It reports done where nothing is left but to close the connection.
func (s *Stream) sendReplies() (code int, done bool) {
	s.wmu.Lock()
	defer s.wmu.Unlock()
	for _, payload := range s.pongs.take() {
		if !s.closeSent {
			_, _ = s.send(opPong, payload)
		}
	}
	code = int(s.reply.Load())
	if code != 0 && !s.closeSent {
		s.closeSent, _ = s.send(opClose, closePayload(code))
	}
	return code, s.closeSent && len(s.owed) == 0 && s.side == Server && s.closeReceived.Load()
}

// keepAlive sends a ping if nothing was sent for a while, and aborts the stream of a
// culvert.v1 peer that is silent for too long: such a peer sends pings of its own,
// whether or not it reads. Any other peer may only be slow, and is left to the
// keepalive of TCP.
func (s *Stream) keepAlive() {
	defer s.recovered()
	if s.closed.Load() || s.peer.Load() != nil {
		return
	}
	now := time.Since(s.born)
	if since := time.Duration(s.reading.Load()); s.halfCloses && since >= 0 && now-max(since, time.Duration(s.lastRead.Load())) >= maxMissedPings*s.ping {
		s.pingTimedOut.Store(true)
		_ = connect.Abort(s.rwc) // the Read returns why
		return
	}
	quiet := now - time.Duration(s.sent.Load())
	due := quiet >= s.ping
	if due {
		quiet = 0
	}
	s.schedulePing(s.ping - quiet) // first: what follows may wait for the peer
	if !due || !s.wmu.TryLock() {  // a Write is under way
		return
	}
	defer s.wmu.Unlock()
	if !s.closeSent && !s.closed.Load() {
		_, _ = s.send(opPing, nil)
	}
}

// schedulePing has keepAlive called after d, unless the stream is closed.
func (s *Stream) schedulePing(d time.Duration) {
	s.dmu.Lock()
	defer s.dmu.Unlock()
	switch {
	case s.closed.Load():
	case s.pinger == nil:
		s.pinger = time.AfterFunc(d, s.keepAlive)
	default:
		s.pinger.Reset(d)
	}
}
