//go:build amd64 || arm64

package tunnel

import (
	"io"
	"net"
	"syscall"
)

// A perch is a seat in an event loop from which a pump waits for a socket.
type perch struct {
	socket net.Conn
	loop   *loop // nil for a pump that cannot
	at     int32 // the seat, while seated; both guarded by the loop's mu
	seated bool
}

func (p *pump) findPerch(c net.Conn) {
	if isSocket(c) {
		p.socket, p.loop = c, p.ct.relay.loops().pick(nil)
	}
}

func (p *pump) perches() bool { return p.loop != nil }

// settle has the loop wait for the socket. It is false where it cannot.
func (p *pump) settle() bool {
	l := p.loop
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case l.released:
		return false
	case p.state.Load() != parked: // the tunnel was ended, and who did it found nobody seated
		return true
	}
	at, gen := l.seat(p)
	if err := control(p.socket, func(fd int32) error {
		return l.control(syscall.EPOLL_CTL_ADD, fd, syscall.EPOLLIN, at, gen, 0)
	}); err != nil {
		l.vacate(at)
		return false
	}
	p.at, p.seated = at, true
	return true
}

// leave gives up the seat.
func (p *pump) leave() {
	l := p.loop
	if l == nil {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if !p.seated {
		return
	}
	p.seated = false
	l.vacate(p.at)
	// Of a socket that is closed the kernel has seen to it.
	_ = control(p.socket, func(fd int32) error { return l.control(syscall.EPOLL_CTL_DEL, fd, 0, 0, 0, 0) })
}

// fell reports whether the socket was closed, of which a seat hears nothing.
func (p *pump) fell() bool {
	return p.perches() && control(p.socket, func(int32) error { return nil }) != nil
}

// event implements watched.
func (p *pump) event(*loop, int, uint32) bool {
	p.wake()
	return true
}

// copySocket reads into a buffer that it has only while there are bytes.
func (p *pump) copySocket() error {
	raw, err := rawSocket(p.src)
	if err != nil {
		return err
	}
	var (
		buf   *copyBuffer
		n     int
		errno syscall.Errno
	)
	try := func(fd uintptr) bool {
		buf = p.budget.buffer(true)
		for {
			if n, errno = read(int32(fd), *buf); errno != syscall.EINTR {
				break
			}
		}
		if errno == syscall.EAGAIN {
			buf.free()
			return false
		}
		return true
	}
	for {
		switch err := raw.Read(try); {
		case err != nil:
			if s, ok := p.src.(*sock); ok {
				err = s.waitError(err)
			}
			if err = p.awake(err); err != nil {
				return err
			}
			continue
		case errno == 0 && n > 0:
			err = p.write((*buf)[:n], len(*buf))
			buf.free()
			if err != nil {
				return err
			}
			continue
		}
		buf.free()
		if errno != 0 {
			return errno
		}
		return io.EOF
	}
}

// rawSocket returns what waits for c, a socket, in Go's poller.
func rawSocket(c net.Conn) (syscall.RawConn, error) {
	switch c := c.(type) {
	case *sock:
		c.mu.Lock()
		f, err := c.wait()
		c.mu.Unlock()
		if err != nil {
			return nil, err
		}
		raw, err := f.SyscallConn()
		return raw, fileError(err)
	case syscall.Conn:
		return c.SyscallConn()
	}
	return nil, net.ErrClosed
}

// control calls f with the descriptor of c, a socket, unless that is closed.
func control(c net.Conn, f func(fd int32) error) error {
	switch c := c.(type) {
	case *sock:
		return c.control(f)
	case syscall.Conn:
		raw, err := c.SyscallConn()
		if err != nil {
			return err
		}
		var failed error
		if err := raw.Control(func(fd uintptr) { failed = f(int32(fd)) }); err != nil {
			return err
		}
		return failed
	}
	return net.ErrClosed
}
