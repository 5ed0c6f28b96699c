//go:build amd64 || arm64

package relay

import (
	"io"
	"net"
	"syscall"

	"culvert.dev/tunnel/internal/poll"
)

// A poller has an event loop wait for the socket of a pump.
type poller struct {
	socket  net.Conn
	loop    *loop      // nil where there is none
	token   poll.Token // while watched; both guarded by the loop's lock
	watched bool
}

func (p *pump) initPoller(c net.Conn) {
	if poll.IsPollable(c) {
		p.socket, p.loop = c, p.ct.relay.Loops.pick(nil)
	}
}

func (p *pump) pollable() bool { return p.loop != nil }

// watchSocket has the loop wait for the socket. It is false where it cannot.
func (p *pump) watchSocket() bool {
	l := p.loop
	l.Lock()
	defer l.Unlock()
	switch {
	case l.Stopped():
		return false
	case p.state.Load() != parked: // the tunnel was ended, and nothing was watched then
		return true
	}
	token := l.Register(p)
	if err := poll.Control(p.socket, func(fd int32) error { return l.Watch(fd, poll.In, token, 0) }); err != nil {
		l.Unregister(token)
		return false
	}
	p.token, p.watched = token, true
	return true
}

// unwatchSocket ends watchSocket.
func (p *pump) unwatchSocket() {
	l := p.loop
	if l == nil {
		return
	}
	l.Lock()
	defer l.Unlock()
	if !p.watched {
		return
	}
	p.watched = false
	l.Unregister(p.token)
	_ = poll.Control(p.socket, l.Unwatch)
}

// socketClosed reports whether the socket was closed, of which a loop hears nothing.
func (p *pump) socketClosed() bool {
	return p.pollable() && poll.Control(p.socket, func(int32) error { return nil }) != nil
}

// HandleEvent implements poll.Handler.
func (p *pump) HandleEvent(*poll.Loop, int, uint32) bool {
	p.wake()
	return true
}

// initPush has the source push, where bytes go to a socket: to send them there takes less than
// to copy them and to begin a goroutine for them.
func (p *pump) initPush() {
	if poll.IsSocket(p.dst) {
		p.pushFunc = p.push
	}
}

// push passes on what the socket takes of a run at once, on the goroutine of the source. It takes
// nothing where p is not parked.
func (p *pump) push(run [][]byte) (n int) {
	if !p.state.CompareAndSwap(parked, moving) {
		return 0
	}
	err := guard(func() (err error) {
		n, err = p.sendNow(run)
		return err
	})
	if p.failed = err; err != nil || !p.park() {
		go p.run(nil)
	}
	return n
}

// sendNow is write without waiting: what the socket does not take is left.
func (p *pump) sendNow(run [][]byte) (n int, err error) {
	ct := p.ct
	if p == &ct.pumps[1] {
		ct.owner.Answered()
	}
	ct.writing.Add(1)
	defer ct.writing.Add(-1)
	var errno syscall.Errno
	_ = poll.Control(p.dst, func(fd int32) error { // closed: Read says so, too
		n, errno = poll.SendAll(fd, run)
		return nil
	})
	if errno != 0 {
		n = 0
	}
	now := clock()
	ct.moved.Store(now)
	p.moved.Store(now)
	p.n.Add(int64(n))
	if errno != 0 && errno != syscall.EAGAIN && errno != syscall.EINTR {
		ct.lost.Store(true)
		return 0, &lostError{errno}
	}
	return n, nil
}

// pullFrom is write for the first bytes of many: the other side takes what follows from the socket
// by itself. It ends once there is nothing more to read now.
func (p *pump) pullFrom(first []byte, into puller) error {
	var lost error
	source := func(run [][]byte) (n int) {
		lost = guard(func() (err error) { // on a goroutine of all the other side's streams
			n, err = p.readNow(run)
			return err
		})
		return n
	}
	if err := p.give(len(first), func() (int, error) { return into.WriteFrom(first, source) }); err != nil {
		return err
	}
	return lost
}

// readNow reads what has come: nothing where nothing has, and where the next read says why.
func (p *pump) readNow(run [][]byte) (n int, err error) {
	var errno syscall.Errno
	closed := poll.Control(p.src, func(fd int32) error {
		n, errno = poll.ReadAll(fd, run)
		return nil
	})
	switch {
	case closed != nil || errno == syscall.EAGAIN || errno == syscall.EINTR || errno == 0 && n == 0:
		return 0, nil
	case errno != 0:
		return 0, errno // which the kernel says once
	}
	now := clock()
	p.ct.moved.Store(now)
	p.moved.Store(now)
	p.n.Add(int64(n))
	return n, nil
}

// copySocket reads into a buffer that it has only while there are bytes.
func (p *pump) copySocket() error {
	raw, err := poll.RawConn(p.src)
	if err != nil {
		return err
	}
	into, pulls := p.dst.(puller)
	var (
		buf   *copyBuffer
		n     int
		errno syscall.Errno
	)
	try := func(fd uintptr) bool {
		buf = newBuffer(p.budget, !pulls)
		for {
			if n, errno = poll.Read(int32(fd), *buf); errno != syscall.EINTR {
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
			if err = p.afterRead(err); err != nil {
				return err
			}
			continue
		case errno == 0 && n > 0:
			if pulls && n == len(*buf) {
				err = p.pullFrom(*buf, into)
			} else {
				err = p.write((*buf)[:n], len(*buf))
			}
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
