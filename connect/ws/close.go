package ws

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"net"
	"time"

	"culvert.dev/connect"
	"culvert.dev/tunnel"
)

const (
	closeTimeout     = 2 * time.Second       // for a close frame to be written, and then for its answer
	immediateTimeout = 10 * time.Millisecond // for a close frame that is written while the caller waits
)

// CloseWrite implements tunnel.Stream by an empty message. A peer that has not
// agreed on Subprotocol would not know it: then it is errors.ErrUnsupported.
func (s *Stream) CloseWrite() error {
	if !s.halfCloses {
		return fmt.Errorf("ws: the peer does not speak %s: %w", Subprotocol, errors.ErrUnsupported)
	}
	s.wmu.Lock()
	defer s.wmu.Unlock()
	if gone := (*closeError)(nil); s.ended || s.peer.Load() != nil && errors.As(*s.peer.Load(), &gone) && gone.orderly() {
		return nil // nothing is left to be said
	}
	if err := s.writable(); err != nil {
		return err
	}
	begun, err := s.send(opBinary, nil)
	s.ended = begun
	return err
}

// Close ends both directions of the stream in order. It does not wait for the peer:
// a close frame that cannot be written at once is written in the background, within
// two seconds, and its answer is awaited there for as long. Then the connection is
// closed. The peer of a program that ends right after Close gets the close frame.
func (s *Stream) Close() error {
	if !s.markClosed() {
		return nil
	}
	s.unblock()
	if s.conn != nil && s.wmu.TryLock() {
		_ = s.conn.SetWriteDeadline(time.Now().Add(immediateTimeout))
		_ = s.sendClose(codeNormal)
		s.wmu.Unlock()
	}
	go s.closeHandshake(codeNormal)
	return nil
}

// sendClose sends a close frame, unless one was sent, after the rest of the frame
// before it. The caller holds wmu.
func (s *Stream) sendClose(code int) (err error) {
	if !s.closeSent {
		s.closeSent, err = s.send(opClose, closePayload(code))
	}
	if err == nil {
		err = s.flushOwed()
	}
	return err
}

// codes are the close codes of aborts by Reason; that of all others is codeInternal.
var codes = map[tunnel.Reason]int{
	tunnel.Drain:   codeGoingAway,
	tunnel.Revoked: codePolicy,
}

// Abort is AbortWithReason no Reason that there are words for: with close code 1011.
func (s *Stream) Abort() error { return s.AbortWithReason("") }

// AbortWithReason ends the stream with a reset, after the close code for why if that can be
// written at once. A peer that broke a rule has the time to read the code for that.
// AbortWithReason implements tunnel.ReasonAborter.
func (s *Stream) AbortWithReason(why tunnel.Reason) error {
	if !s.markClosed() {
		return nil
	}
	if code := int(s.reply.Load()); code != 0 {
		s.unblock()
		go s.closeHandshake(code)
		return nil
	}
	if s.wmu.TryLock() {
		if !s.closeSent && len(s.owed) == 0 {
			s.closeSent = true
			if s.conn != nil {
				_ = s.conn.SetWriteDeadline(time.Now().Add(immediateTimeout))
				_, _ = s.send(opClose, closePayload(cmp.Or(codes[why], codeInternal)))
			}
		}
		s.wmu.Unlock()
	}
	return connect.Abort(s.rwc)
}

// markClosed marks the stream as closed and reports whether it was open.
func (s *Stream) markClosed() bool {
	s.dmu.Lock()
	defer s.dmu.Unlock()
	if s.closed.Swap(true) {
		return false
	}
	if s.pinger != nil {
		s.pinger.Stop()
	}
	return true
}

// unblock ends every Read and Write that waits.
func (s *Stream) unblock() {
	if s.conn != nil {
		_ = s.conn.SetDeadline(time.Unix(1, 0))
	}
}

// closeHandshake performs the closing handshake, section 7.1.1, and closes the
// connection.
func (s *Stream) closeHandshake(code int) {
	defer s.recovered()
	defer s.rwc.Close()
	// A connection without deadlines is closed while it is in use.
	if s.conn == nil {
		defer time.AfterFunc(2*closeTimeout, func() { _ = s.rwc.Close() }).Stop()
	}
	if s.sendLastClose(code) != nil {
		return
	}
	s.rmu.Lock()
	defer s.rmu.Unlock()
	if s.conn != nil {
		_ = s.conn.SetReadDeadline(time.Now().Add(closeTimeout))
	}
	s.drain()
}

// sendLastClose is sendClose within closeTimeout.
func (s *Stream) sendLastClose(code int) error {
	s.wmu.Lock()
	defer s.wmu.Unlock()
	if s.conn != nil {
		_ = s.conn.SetWriteDeadline(time.Now().Add(closeTimeout))
	}
	return s.sendClose(code)
}

// drain reads to the peer's close frame. A close with unread input would send
// a reset, which could overtake what the peer has not read yet.
func (s *Stream) drain() {
	s.buffer()
	var v *violation
	if errors.As(s.rerr, &v) {
		// The peer's bytes cannot be read as frames. It gets the close frame.
		if w, ok := s.rwc.(tunnel.Stream); ok {
			_ = w.CloseWrite()
		}
		_, _ = io.Copy(io.Discard, s.br)
		return
	}
	if s.peer.Load() != nil {
		return // the close frame has come, or the connection is gone
	}
	s.rerr = nil // frames follow the end of the stream
	for s.rerr == nil {
		if s.left > 0 {
			n, err := s.br.Discard(int(min(s.left, 1<<20)))
			if s.left -= uint64(n); s.left == 0 {
				s.frameEnd()
			}
			if err != nil {
				return
			}
			continue
		}
		if s.next() != nil {
			return
		}
		if s.rerr == io.EOF && s.peer.Load() == nil {
			s.rerr = nil
		}
	}
}

// NetConn returns the connection below, for what looks at its socket. It is
// nil where there is none.
func (s *Stream) NetConn() net.Conn {
	if c, ok := s.conn.(*tunnel.Conn); ok {
		return c.Conn
	}
	return s.conn
}

// SetDeadline implements net.Conn.
func (s *Stream) SetDeadline(t time.Time) error { return s.setDeadline(net.Conn.SetDeadline, t) }

// SetReadDeadline implements net.Conn.
func (s *Stream) SetReadDeadline(t time.Time) error {
	return s.setDeadline(net.Conn.SetReadDeadline, t)
}

// SetWriteDeadline implements net.Conn. It holds for pings and pongs too.
func (s *Stream) SetWriteDeadline(t time.Time) error {
	return s.setDeadline(net.Conn.SetWriteDeadline, t)
}

func (s *Stream) setDeadline(set func(net.Conn, time.Time) error, t time.Time) error {
	s.dmu.Lock()
	defer s.dmu.Unlock()
	switch {
	case s.closed.Load():
		return net.ErrClosed
	case s.conn == nil:
		return fmt.Errorf("ws: the carrier has no deadlines: %w", errors.ErrUnsupported)
	}
	return set(s.conn, t)
}

// LocalAddr implements net.Conn.
func (s *Stream) LocalAddr() net.Addr {
	if s.conn == nil {
		return unknown{}
	}
	return s.conn.LocalAddr()
}

// RemoteAddr implements net.Conn.
func (s *Stream) RemoteAddr() net.Addr {
	if s.conn == nil {
		return unknown{}
	}
	return s.conn.RemoteAddr()
}

// unknown is the address of what is no net.Conn.
type unknown struct{}

func (unknown) Network() string { return "websocket" }
func (unknown) String() string  { return "unknown" }
