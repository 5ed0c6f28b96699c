//go:build amd64 || arm64

package poll

import (
	"errors"
	"io"
	"net"
	"net/netip"
	"os"
	"sync"
	"syscall"
	"time"
)

// A Conn is a TCP socket that is not in Go's poller until somebody has to wait
// for it. Most connections never wait before a tunnel begins: the preamble has
// come with the handshake, and a service nearby accepts at once. Each saves four
// system calls and a goroutine switch or two, and goes to an event loop as it is.
//
// It is a net.Conn with half-close and may be used by many goroutines.
type Conn struct {
	// Task is what the connection was accepted or dialed for. Before anybody
	// waits for the connection, the Task hands off its Loop. It is nil for none
	// and set before the Conn is used.
	Task *Task

	local, remote netip.AddrPort // local's address may be unspecified, its port is right

	mu          sync.Mutex // guards what follows; held over system calls that don't block
	fd          int32      // -1 once closed or taken
	file        *os.File   // in Go's poller; nil until somebody had to wait
	read, write time.Time  // deadlines, for the file to come
}

func newConn(fd int32, local, remote netip.AddrPort) *Conn {
	return &Conn{fd: fd, local: local, remote: remote}
}

// wait returns the file to wait with, and sees to it that no loop waits too.
// The caller holds mu.
func (c *Conn) wait() (*os.File, error) {
	if c.fd < 0 {
		return nil, net.ErrClosed
	}
	if c.Task != nil {
		c.Task.HandOff()
	}
	if c.file == nil {
		c.file = os.NewFile(uintptr(c.fd), "tcp") // non-blocking, so it goes to the poller
		if !c.read.IsZero() {
			_ = c.file.SetReadDeadline(c.read)
		}
		if !c.write.IsZero() {
			_ = c.file.SetWriteDeadline(c.write)
		}
	}
	return c.file, nil
}

// attempt makes one system call that doesn't block. It returns the file to go
// on with where the call would have had to wait.
func (c *Conn) attempt(deadline *time.Time, call func(fd int32) (int, syscall.Errno)) (n int, errno syscall.Errno, f *os.File, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.fd < 0 {
		return 0, 0, nil, net.ErrClosed
	}
	if c.file != nil { // which may have to wait
		f, err = c.wait()
		return 0, 0, f, err
	}
	if !deadline.IsZero() && !time.Now().Before(*deadline) {
		return 0, 0, nil, os.ErrDeadlineExceeded
	}
	if n, errno = call(c.fd); errno == syscall.EAGAIN || errno == syscall.EINTR {
		f, err = c.wait()
		return 0, 0, f, err
	}
	return n, errno, nil, nil
}

func (c *Conn) Read(p []byte) (int, error) {
	if len(p) == 0 {
		return 0, nil
	}
	n, errno, f, err := c.attempt(&c.read, func(fd int32) (int, syscall.Errno) { return Read(fd, p) })
	switch {
	case err != nil:
		return 0, err
	case f != nil:
		n, err := f.Read(p)
		return n, fileError(err)
	case errno != 0:
		return 0, errno
	case n == 0:
		return 0, io.EOF
	}
	return n, nil
}

func (c *Conn) Write(p []byte) (int, error) {
	if len(p) == 0 {
		return 0, nil
	}
	n, errno, f, err := c.attempt(&c.write, func(fd int32) (int, syscall.Errno) { return Send(fd, p) })
	switch {
	case err != nil:
		return 0, err
	case errno != 0:
		return 0, errno
	case f == nil && n == len(p):
		return n, nil
	case f == nil:
		c.mu.Lock()
		f, err = c.wait()
		c.mu.Unlock()
		if err != nil {
			return n, err
		}
	}
	m, err := f.Write(p[n:])
	return n + m, fileError(err)
}

// Fill waits without a buffer, reads once and appends to buf, up to limit bytes in
// all: while it waits, a connection holds no more memory than the bytes it has
// sent.
func (c *Conn) Fill(buf []byte, limit int) ([]byte, error) {
	var result error
	once := func(fd int32) bool {
		p := NewScratch()
		defer p.Free()
		n, errno := Read(fd, p[:min(len(p), limit-len(buf))])
		switch {
		case errno == syscall.EAGAIN || errno == syscall.EINTR:
			return false
		case errno != 0:
			result = errno
		case n == 0:
			result = io.EOF
		default:
			buf = append(buf, p[:n]...)
		}
		return true
	}
	done := false
	_, _, f, err := c.attempt(&c.read, func(fd int32) (int, syscall.Errno) {
		if done = once(fd); done {
			return 0, 0
		}
		return 0, syscall.EAGAIN
	})
	switch {
	case err != nil:
		return buf, err
	case f == nil:
		return buf, result
	}
	raw, err := f.SyscallConn()
	if err != nil {
		return buf, fileError(err)
	}
	if err := raw.Read(func(fd uintptr) bool { return once(int32(fd)) }); err != nil {
		return buf, c.waitError(err)
	}
	return buf, result
}

// ReadNow reads what has arrived: 0 bytes where nothing has, and io.EOF at the end.
// It never waits and disregards the deadline.
func (c *Conn) ReadNow(p []byte) (n int, err error) {
	err = c.Control(func(fd int32) error {
		var errno syscall.Errno
		switch n, errno = Read(fd, p); {
		case errno == syscall.EAGAIN || errno == syscall.EINTR:
			n = 0
		case errno != 0:
			n = 0
			return errno
		case n == 0:
			return io.EOF
		}
		return nil
	})
	return n, err
}

// take gives up the socket: a descriptor that is the caller's, and that Go's
// poller does not know.
func (c *Conn) take() (int32, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	fd := c.fd
	if fd < 0 {
		return -1, net.ErrClosed
	}
	if c.file != nil {
		dup, _, errno := syscall.RawSyscall(syscall.SYS_FCNTL, uintptr(fd), fDupCloexec, 0)
		if errno != 0 {
			return -1, errno
		}
		_ = c.file.Close()
		fd = int32(dup)
	}
	c.fd, c.file = -1, nil
	return fd, nil
}

func (c *Conn) Close() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.fd < 0 {
		return net.ErrClosed
	}
	if c.file != nil {
		_ = c.file.Close()
	} else {
		CloseFD(c.fd)
	}
	c.fd, c.file = -1, nil
	return nil
}

// Abort closes the socket with a reset.
func (c *Conn) Abort() error {
	_ = c.SetLinger(0)
	return c.Close()
}

// SetLinger is that of net.TCPConn.
func (c *Conn) SetLinger(sec int) error {
	return c.Control(func(fd int32) error {
		l := syscall.Linger{Onoff: 1, Linger: int32(sec)}
		if sec < 0 {
			l = syscall.Linger{}
		}
		return syscall.SetsockoptLinger(int(fd), syscall.SOL_SOCKET, syscall.SO_LINGER, &l)
	})
}

func (c *Conn) CloseWrite() error {
	return c.Control(func(fd int32) error {
		if errno := ShutdownWrite(fd); errno != 0 {
			return errno
		}
		return nil
	})
}

// SetKeepAliveConfig is that of net.TCPConn.
func (c *Conn) SetKeepAliveConfig(cfg net.KeepAliveConfig) error {
	return c.Control(func(fd int32) error { SetKeepAlive(fd, cfg); return nil })
}

// Control calls f with the descriptor, unless that is closed. f must not block.
func (c *Conn) Control(f func(fd int32) error) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.fd < 0 {
		return net.ErrClosed
	}
	return f(c.fd)
}

func (c *Conn) LocalAddr() net.Addr {
	local := c.local
	if local.Addr().IsUnspecified() || !local.IsValid() {
		_ = c.Control(func(fd int32) error {
			sa, err := syscall.Getsockname(int(fd))
			local = addrPortOf(sa)
			return err
		})
	}
	return net.TCPAddrFromAddrPort(local)
}

// AddrPorts returns the addresses without asking the kernel or making a net.Addr.
func (c *Conn) AddrPorts() (remote netip.AddrPort, localPort uint16) { return c.remote, c.local.Port() }

func (c *Conn) RemoteAddr() net.Addr { return net.TCPAddrFromAddrPort(c.remote) }

func (c *Conn) SetDeadline(t time.Time) error {
	return errors.Join(c.SetReadDeadline(t), c.SetWriteDeadline(t))
}

func (c *Conn) SetReadDeadline(t time.Time) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.read = t
	switch {
	case c.fd < 0:
		return net.ErrClosed
	case c.file != nil:
		return fileError(c.file.SetReadDeadline(t))
	}
	return nil
}

func (c *Conn) SetWriteDeadline(t time.Time) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.write = t
	switch {
	case c.fd < 0:
		return net.ErrClosed
	case c.file != nil:
		return fileError(c.file.SetWriteDeadline(t))
	}
	return nil
}

// fileError turns an error of package os into that of package net.
func fileError(err error) error {
	if pe, ok := err.(*os.PathError); ok {
		err = pe.Err // the path is one we made up
	}
	if errors.Is(err, os.ErrClosed) {
		return net.ErrClosed
	}
	return err
}

// Scratch is memory that reads go to before their length is known.
type Scratch [4 << 10]byte // most preambles are smaller

var scratch = sync.Pool{New: func() any { return new(Scratch) }}

// NewScratch returns a Scratch from a pool. Its content is undefined.
func NewScratch() *Scratch { return scratch.Get().(*Scratch) }

// Free returns s to the pool.
func (s *Scratch) Free() { scratch.Put(s) }
