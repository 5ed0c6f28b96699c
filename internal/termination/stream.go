package termination

import (
	"crypto/tls"
	"errors"
	"io"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"culvert.dev/internal/records"
	"culvert.dev/tunnel"
)

// MaxHandshake limits the bytes that a client may send until its handshake is
// complete: a hello of 64 KiB in small records, and a chain of certificates.
const MaxHandshake = 160 << 10

var errTooLong = errors.New("more than a handshake may have")

// A tlsTransport is the connection below a tls.Conn. It limits the handshake, and it
// keeps the rest of a record that a write could not finish before its deadline:
// crypto/tls would give up the connection, since half a record was sent.
type tlsTransport struct {
	net.Conn

	// count, if set, is told how many bytes of the handshake have come, and may refuse more.
	count func(read int) error

	batch records.Batch
	input records.Input

	mu   sync.Mutex // guards what follows
	left int        // bytes that may still come; negative means any number
	read int        // bytes that came, while they are counted
	gone bool       // a read or write failed
	cut  bool       // the connection has ended
	late bool       // a write was not finished in time
	rest []byte     // what it could not send: at most one batch
}

// carry lifts the limit of the handshake.
func (b *tlsTransport) carry() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.left = -1
}

func (b *tlsTransport) received() int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.read
}

// broken reports whether the connection itself has failed.
func (b *tlsTransport) broken() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.gone
}

func (b *tlsTransport) Read(p []byte) (int, error) {
	b.mu.Lock()
	left := b.left
	b.mu.Unlock()
	switch {
	case left < 0:
		return b.input.Read(p, b.readSocket)
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
	if b.count != nil && err == nil {
		err = b.count(b.read)
	}
	return n, err
}

// readSocket is Read after the handshake, without the Input.
func (b *tlsTransport) readSocket(p []byte) (int, error) {
	n, err := b.Conn.Read(p)
	if n == 0 && err == io.EOF {
		b.mu.Lock()
		defer b.mu.Unlock()
		b.cut = true
	}
	return n, err
}

// NetConn returns the socket: the Relay sets its keepalive.
func (b *tlsTransport) NetConn() net.Conn {
	if c, ok := b.Conn.(*tunnel.Conn); ok {
		return c.Conn
	}
	return b.Conn
}

// Write implements net.Conn.
func (b *tlsTransport) Write(p []byte) (int, error) { return b.batch.Write(p, b.write) }

// write must not be called twice at once.
func (b *tlsTransport) write(p []byte) (int, error) {
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

// keep stores rest for the next Write if err is that of a deadline, and returns n,
// which counts rest as written.
func (b *tlsTransport) keep(rest []byte, n int, err error) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if err != nil && !errors.Is(err, os.ErrDeadlineExceeded) {
		return 0, err
	}
	b.rest = rest
	b.late = b.late || err != nil
	return n, nil
}

// wasLate reports whether a write since the last call was not finished in time.
func (b *tlsTransport) wasLate() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	late := b.late
	b.late = false
	return late
}

// SetWriteDeadline does nothing. Only crypto/tls calls it, to give a close_notify five
// seconds, and a slow reader should get the end all the same.
func (b *tlsTransport) SetWriteDeadline(time.Time) error { return nil }

// wasCut reports whether the connection ended.
func (b *tlsTransport) wasCut() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.cut
}

// CloseWrite half-closes the connection.
func (b *tlsTransport) CloseWrite() error {
	if w, ok := b.Conn.(interface{ CloseWrite() error }); ok {
		return w.CloseWrite()
	}
	return errors.ErrUnsupported
}

func (b *tlsTransport) Abort() error { return tunnel.Abort(b.Conn) }

// A stream is the stream inside TLS. Other writes may follow one that its deadline
// has ended: what that one has counted as written arrives first.
type stream struct {
	*tls.Conn
	transport *tlsTransport
	peer      string // "client" or "service"

	reading sync.Mutex // held by Read
	writing sync.Mutex
	writes  atomic.Int32 // calls of Write

	mu    sync.Mutex // guards what follows
	limit time.Time  // the write deadline
	ended bool       // CloseWrite was called
}

var (
	_ tunnel.Stream  = (*stream)(nil)
	_ tunnel.Aborter = (*stream)(nil)
)

// A cutError is the end of a connection that the peer, "client" or "service", has
// closed without close_notify.
type cutError string

func (peer cutError) Error() string { return "the " + string(peer) + " ended TLS without close_notify" }
func (cutError) Unwrap() error      { return io.ErrUnexpectedEOF }

// Read returns io.EOF only for close_notify. crypto/tls also does so for a TCP FIN
// between two records, which anybody on the path can forge.
func (s *stream) Read(p []byte) (int, error) {
	s.reading.Lock()
	defer s.reading.Unlock()
	n, err := s.transport.input.Fill(p, s.Conn.Read)
	if (err == io.EOF || err == io.ErrUnexpectedEOF) && s.transport.wasCut() {
		err = cutError(s.peer)
	}
	return n, err
}

const closeNotifyTimeout = time.Second // for close_notify to be written

func (s *stream) Write(p []byte) (int, error) {
	s.writes.Add(1)
	defer s.writes.Add(-1)
	s.writing.Lock()
	defer s.writing.Unlock()
	done := 0
	for first := true; first || done < len(p); first = false {
		if err := s.writable(); err != nil {
			return done, err
		}
		part := p[done:min(done+records.Size, len(p))]
		if len(part) > records.MaxRecord {
			s.transport.batch.Gather()
		}
		n, err := s.Conn.Write(part)
		if ferr := s.transport.batch.Flush(s.transport.write); ferr != nil {
			return done, ferr
		}
		if done += n; err != nil {
			return done, err
		}
		if s.transport.wasLate() {
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
	if err == nil && s.transport.wasLate() {
		err = os.ErrDeadlineExceeded
	}
	return err
}

// Close closes the connection, after a close_notify if that can be written in time. It ends a
// Write that is under way.
func (s *stream) Close() error {
	if s.writes.Load() > 0 {
		err := s.transport.Conn.Close()
		_ = s.Conn.Close()
		return err
	}
	_ = s.transport.Conn.SetWriteDeadline(time.Now().Add(closeNotifyTimeout))
	return s.Conn.Close()
}

// Abort resets the connection, without close_notify.
func (s *stream) Abort() error { return s.transport.Abort() }

func (s *stream) SetDeadline(t time.Time) error {
	s.setWriteLimit(t)
	return s.transport.Conn.SetDeadline(t)
}

func (s *stream) SetWriteDeadline(t time.Time) error {
	s.setWriteLimit(t)
	return s.transport.Conn.SetWriteDeadline(t)
}

func (s *stream) setWriteLimit(t time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.limit = t
}
