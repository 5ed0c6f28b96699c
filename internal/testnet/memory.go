package testnet

import (
	"io"
	"net"
	"os"
	"sync"
	"syscall"
	"time"
)

// A Memory is one end of a connection in memory that ends like one of TCP: it
// can half-close, and a reset loses what was not read. Each direction holds any
// number of bytes, so that no Write waits, unless Hold says otherwise. In a
// bubble of synctest all that waits on it lets time pass.
type Memory struct {
	in, out *direction
}

// Pipe returns the ends of a connection.
func Pipe() (a, b *Memory) {
	one, two := newDirection(), newDirection()
	return &Memory{one, two}, &Memory{two, one}
}

// A direction is what one end writes and the other one reads.
type direction struct {
	mu     sync.Mutex // guards what follows
	change sync.Cond
	buf    []byte
	held   bool  // nothing fits in
	cut    int   // bytes of the next Write that still fit in, before its deadline is over; -1 for none that is cut
	ended  bool  // the writer is done
	reset  bool  // by either end
	left   bool  // the reader is gone
	read   limit // for those that wait to read
	write  limit
}

// A limit is a deadline.
type limit struct {
	timer *time.Timer
	past  bool
}

func newDirection() *direction {
	d := &direction{cut: -1}
	d.change.L = &d.mu
	return d
}

// Read implements net.Conn.
func (m *Memory) Read(p []byte) (int, error) {
	d := m.in
	d.mu.Lock()
	defer d.mu.Unlock()
	for {
		switch {
		case d.left:
			return 0, net.ErrClosed
		case d.reset:
			return 0, &net.OpError{Op: "read", Net: "memory", Err: syscall.ECONNRESET}
		case d.read.past:
			return 0, os.ErrDeadlineExceeded
		case len(d.buf) > 0 || len(p) == 0:
			n := copy(p, d.buf)
			d.buf = d.buf[n:]
			return n, nil
		case d.ended:
			return 0, io.EOF
		}
		d.change.Wait()
	}
}

// Write implements net.Conn.
func (m *Memory) Write(p []byte) (int, error) {
	d := m.out
	d.mu.Lock()
	defer d.mu.Unlock()
	for {
		switch {
		case d.ended:
			return 0, net.ErrClosed
		case d.reset || d.left:
			return 0, &net.OpError{Op: "write", Net: "memory", Err: syscall.ECONNRESET}
		case d.write.past:
			return 0, os.ErrDeadlineExceeded
		case !d.held:
			n := len(p)
			if d.cut >= 0 && d.cut < n {
				n = d.cut
			}
			d.buf = append(d.buf, p[:n]...)
			d.cut = -1
			d.change.Broadcast()
			if n < len(p) {
				return n, os.ErrDeadlineExceeded
			}
			return n, nil
		}
		d.change.Wait()
	}
}

// Hold has Writes wait until it is called with false.
func (m *Memory) Hold(held bool) {
	m.out.mu.Lock()
	defer m.out.mu.Unlock()
	m.out.held = held
	m.out.change.Broadcast()
}

// Cut has the next Write fail as if its deadline came after n bytes.
func (m *Memory) Cut(n int) {
	m.out.mu.Lock()
	defer m.out.mu.Unlock()
	m.out.cut = n
}

// CloseWrite ends what this end sends.
func (m *Memory) CloseWrite() error {
	m.out.mu.Lock()
	defer m.out.mu.Unlock()
	m.out.ended = true
	m.out.change.Broadcast()
	return nil
}

// Close implements net.Conn. With unread input, and more that comes, it is a
// reset, as with TCP.
func (m *Memory) Close() error {
	m.in.mu.Lock()
	m.in.left = true
	unread := len(m.in.buf) > 0
	m.in.change.Broadcast()
	m.in.mu.Unlock()
	m.out.mu.Lock()
	defer m.out.mu.Unlock()
	m.out.reset = m.out.reset || unread
	m.out.ended = true
	m.out.change.Broadcast()
	return nil
}

// Abort resets the connection.
func (m *Memory) Abort() error {
	for _, d := range []*direction{m.in, m.out} {
		d.mu.Lock()
		d.reset = true
		d.left = d.left || d == m.in
		d.ended = d.ended || d == m.out
		d.change.Broadcast()
		d.mu.Unlock()
	}
	return nil
}

// SetReadDeadline implements net.Conn.
func (m *Memory) SetReadDeadline(t time.Time) error { return m.in.set(&m.in.read, t) }

// SetWriteDeadline implements net.Conn.
func (m *Memory) SetWriteDeadline(t time.Time) error { return m.out.set(&m.out.write, t) }

// SetDeadline implements net.Conn.
func (m *Memory) SetDeadline(t time.Time) error {
	_ = m.SetReadDeadline(t)
	return m.SetWriteDeadline(t)
}

func (d *direction) set(l *limit, t time.Time) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if l.timer != nil {
		l.timer.Stop()
		l.timer = nil
	}
	left := time.Until(t)
	if l.past = !t.IsZero() && left <= 0; !t.IsZero() && left > 0 {
		var own *time.Timer
		own = time.AfterFunc(left, func() {
			d.mu.Lock()
			defer d.mu.Unlock()
			if l.timer == own {
				l.past = true
				d.change.Broadcast()
			}
		})
		l.timer = own
	}
	d.change.Broadcast()
	return nil
}

// LocalAddr implements net.Conn.
func (m *Memory) LocalAddr() net.Addr { return memoryAddr{} }

// RemoteAddr implements net.Conn.
func (m *Memory) RemoteAddr() net.Addr { return memoryAddr{} }

type memoryAddr struct{}

func (memoryAddr) Network() string { return "memory" }
func (memoryAddr) String() string  { return "memory" }
