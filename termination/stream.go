package termination

import (
	"crypto/tls"
	"errors"
	"io"
	"net"
	"os"
	"sync"
	"time"

	"culvert.dev/tunnel"
)

// MaxHandshake is how much a client may send until its handshake is complete,
// in bytes: a hello of 64 KiB in small records, and a chain of certificates.
const MaxHandshake = 160 << 10

var errTooLong = errors.New("more than a handshake may have")

// A below is what a tls.Conn is put upon: it bounds the handshake, and it takes
// on what a write at its deadline could not send. crypto/tls would give up the
// connection: half a record can't be taken back.
type below struct {
	net.Conn

	mu   sync.Mutex // guards what follows
	left int        // bytes that may still come; negative means any number
	read int        // bytes that came, while they are counted
	gone bool       // a read or write failed
	cut  bool       // the connection's own end came
	late bool       // a write could not be finished in time
	rest []byte     // what it could not send: at most one chunk
}

// carry ends the handshake's limit.
func (b *below) carry() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.left = -1
}

func (b *below) taken() int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.read
}

// broken reports whether it was the connection that failed, and not what came
// over it.
func (b *below) broken() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.gone
}

func (b *below) Read(p []byte) (int, error) {
	b.mu.Lock()
	left := b.left
	b.mu.Unlock()
	switch {
	case left < 0:
		n, err := b.Conn.Read(p)
		if n == 0 && err == io.EOF {
			b.mu.Lock()
			defer b.mu.Unlock()
			b.cut = true
		}
		return n, err
	case left == 0:
		return 0, errTooLong
	}
	n, err := b.Conn.Read(p[:min(len(p), left)])
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.left >= 0 {
		b.left -= n
	}
	b.read += n
	b.gone = b.gone || err != nil
	return n, err
}

// NetConn returns the socket, whose keepalive the Relay sets.
func (b *below) NetConn() net.Conn {
	if c, ok := b.Conn.(*tunnel.Conn); ok {
		return c.Conn
	}
	return b.Conn
}

// Write is called by one at a time.
func (b *below) Write(p []byte) (int, error) {
	b.mu.Lock()
	carrying, rest := b.left < 0, b.rest
	b.mu.Unlock()
	if !carrying {
		n, err := b.Conn.Write(p)
		b.mu.Lock()
		defer b.mu.Unlock()
		b.gone = b.gone || err != nil
		return n, err
	}
	if len(rest) > 0 {
		n, err := b.Conn.Write(rest)
		rest = rest[n:]
		if err != nil {
			return b.keep(append(rest, p...), len(p), err)
		}
		b.keep(nil, 0, nil)
	}
	n, err := b.Conn.Write(p)
	if err != nil {
		return b.keep(append([]byte(nil), p[n:]...), len(p), err)
	}
	return n, nil
}

// keep takes on rest where err says that the time was up. n is what the caller
// is told it has written.
func (b *below) keep(rest []byte, n int, err error) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if err != nil && !errors.Is(err, os.ErrDeadlineExceeded) {
		return 0, err
	}
	b.rest = rest
	b.late = b.late || err != nil
	return n, nil
}

// wasLate reports whether a write since the last call could not be finished.
func (b *below) wasLate() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	late := b.late
	b.late = false
	return late
}

// SetWriteDeadline does nothing. Only crypto/tls calls it: it gives a
// close_notify five seconds, and who reads slowly is to see the end all the
// same.
func (b *below) SetWriteDeadline(time.Time) error { return nil }

// wasCut reports whether the connection ended.
func (b *below) wasCut() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.cut
}

// CloseWrite and Abort are the connection's.
func (b *below) CloseWrite() error {
	if w, ok := b.Conn.(interface{ CloseWrite() error }); ok {
		return w.CloseWrite()
	}
	return errors.ErrUnsupported
}

func (b *below) Abort() error {
	if a, ok := b.Conn.(tunnel.Aborter); ok {
		return a.Abort()
	}
	if l, ok := b.Conn.(interface{ SetLinger(int) error }); ok {
		_ = l.SetLinger(0)
	}
	return b.Conn.Close()
}

// A stream is what is inside of TLS. A write that its deadline ended may be
// followed by others: what it says it has written arrives first.
type stream struct {
	*tls.Conn
	below *below
	other string // who is at the other end: "client" or "service"

	writing sync.Mutex

	mu    sync.Mutex // guards what follows
	limit time.Time  // of writes
	ended bool       // CloseWrite was called
}

var (
	_ tunnel.Stream  = (*stream)(nil)
	_ tunnel.Aborter = (*stream)(nil)
)

// A cutError is the end of a connection that somebody, the client or the
// service, has left without a word in TLS.
type cutError string

func (who cutError) Error() string { return "the " + string(who) + " ended TLS without close_notify" }
func (cutError) Unwrap() error     { return io.ErrUnexpectedEOF }

// Read gives io.EOF for close_notify alone. crypto/tls takes a TCP FIN between
// two records for an end, too, and anybody on the way can send that.
func (s *stream) Read(p []byte) (int, error) {
	n, err := s.Conn.Read(p)
	if (err == io.EOF || err == io.ErrUnexpectedEOF) && s.below.wasCut() {
		err = cutError(s.other)
	}
	return n, err
}

const (
	chunk   = 16 << 10    // bytes; what a record holds
	closing = time.Second // for a close_notify to leave
)

func (s *stream) Write(p []byte) (int, error) {
	s.writing.Lock()
	defer s.writing.Unlock()
	done := 0
	for first := true; first || done < len(p); first = false {
		if err := s.writable(); err != nil {
			return done, err
		}
		n, err := s.Conn.Write(p[done:min(done+chunk, len(p))])
		if done += n; err != nil {
			return done, err
		}
		if s.below.wasLate() {
			return done, os.ErrDeadlineExceeded
		}
	}
	return done, nil
}

func (s *stream) writable() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.ended && !s.limit.IsZero() && !time.Now().Before(s.limit) {
		return os.ErrDeadlineExceeded
	}
	return nil
}

// CloseWrite sends close_notify, after all that was written.
func (s *stream) CloseWrite() error {
	s.mu.Lock()
	s.ended = true
	s.mu.Unlock()
	err := s.Conn.CloseWrite()
	if err == nil && s.below.wasLate() {
		err = os.ErrDeadlineExceeded
	}
	return err
}

// Close closes the connection, with a close_notify if that can be sent soon.
func (s *stream) Close() error {
	_ = s.below.Conn.SetWriteDeadline(time.Now().Add(closing))
	return s.Conn.Close()
}

// Abort cuts the connection below TLS: what is missing is a close_notify.
func (s *stream) Abort() error { return s.below.Abort() }

func (s *stream) SetDeadline(t time.Time) error {
	s.limits(t)
	return s.below.Conn.SetDeadline(t)
}

func (s *stream) SetWriteDeadline(t time.Time) error {
	s.limits(t)
	return s.below.Conn.SetWriteDeadline(t)
}

func (s *stream) limits(t time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.limit = t
}
