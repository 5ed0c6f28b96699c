//go:build amd64 || arm64

package tunnel

import (
	"sync"
	"syscall"
)

// A lobby is where connections wait until what they have sent is worth a
// goroutine: a connection there is its slot, its socket and the bytes it has
// sent, and no stack. It reads, asks the protocols' Complete, and lets the
// connection out when that says yes, when the client is gone, when its time is
// up, or after a number of reads, since each asks from the first byte again.
//
// Nothing is decided here: a connection that is let out is served as if its
// bytes had just come.
type lobby struct {
	once sync.Once
	ep   int
	wake int32
	wg   sync.WaitGroup

	mu     sync.Mutex // guards what follows and the connections that wait
	guests []*guest
	free   []int32
	open   bool
}

// maxReads is how often a connection is read before it gets a goroutine.
const maxReads = 16

// A guest is one connection in the lobby.
type guest struct {
	k         *slot
	sock      *sock
	protocols []Protocol
	leave     func()
	reads     int
	at        int32
}

// hold keeps k until it should be served and then calls leave on some
// goroutine; leave must not block. It is false, with nothing changed, where k
// should be served at once.
func (l *lobby) hold(k *slot, protocols []Protocol, leave func()) bool {
	s, ok := k.Conn.Conn.(*sock)
	if !ok || !judgeable(protocols) {
		return false
	}
	g := &guest{k: k, sock: s, protocols: protocols, leave: leave}
	if g.ready() {
		return false
	}
	l.once.Do(l.start)
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.open {
		return false
	}
	if n := len(l.free); n > 0 {
		g.at = l.free[n-1]
		l.free = l.free[:n-1]
	} else {
		g.at = int32(len(l.guests))
		l.guests = append(l.guests, nil)
	}
	if err := s.control(func(fd int32) error {
		return epollControl(l.ep, syscall.EPOLL_CTL_ADD, fd, syscall.EPOLLIN, g.at, fd)
	}); err != nil {
		l.free = append(l.free, g.at)
		return false
	}
	l.guests[g.at] = g
	k.guest = g
	return true
}

// ready reads what there is and reports whether g should be served.
func (g *guest) ready() bool {
	more, err := g.k.fillNow(g.sock)
	if err != nil {
		return true // whoever serves it will meet the same end
	}
	if !more {
		return false
	}
	g.reads++
	return g.reads >= maxReads || settled(g.protocols, g.k.buf)
}

// run lets connections out as their bytes come.
func (l *lobby) run() {
	defer l.wg.Done()
	events := make([]syscall.EpollEvent, maxEvents)
	var leaving []*guest
	for {
		n := epollWait(l.ep, events, -1)
		l.mu.Lock()
		for _, ev := range events[:n] {
			if ev.Fd == wakeKey {
				continue
			}
			// The descriptor in the event tells a guest from an older one of its place.
			if g := l.guests[ev.Fd]; g != nil && g.sock.is(ev.Pad) && g.ready() {
				l.remove(g)
				leaving = append(leaving, g)
			}
		}
		open := l.open
		l.mu.Unlock()
		for i, g := range leaving {
			g.leave()
			leaving[i] = nil
		}
		leaving = leaving[:0]
		if !open {
			return
		}
	}
}

// out lets k out if it is here: its time is up, or the server closes.
func (l *lobby) out(k *slot) {
	l.mu.Lock()
	g := k.guest
	if g != nil {
		l.remove(g)
	}
	l.mu.Unlock()
	if g != nil {
		g.leave()
	}
}

// remove takes g off the list and out of the epoll set. The caller holds mu.
func (l *lobby) remove(g *guest) {
	g.k.guest = nil
	l.guests[g.at] = nil
	l.free = append(l.free, g.at)
	_ = g.sock.control(func(fd int32) error { return epollControl(l.ep, syscall.EPOLL_CTL_DEL, fd, 0, 0, 0) })
}

func (l *lobby) start() {
	ep, err := syscall.EpollCreate1(syscall.EPOLL_CLOEXEC)
	if err != nil {
		return
	}
	l.ep = ep
	if l.wake, err = newEventFD(); err == nil {
		err = epollControl(ep, syscall.EPOLL_CTL_ADD, l.wake, syscall.EPOLLIN|epollET, wakeKey, 0)
	}
	if err != nil {
		_ = syscall.Close(ep)
		return
	}
	l.open = true
	l.wg.Add(1)
	go l.run()
}

// close stops the lobby, which is empty by then.
func (l *lobby) close() {
	l.once.Do(func() {})
	l.mu.Lock()
	open := l.open
	l.open = false
	if open {
		_, _ = syscall.Write(int(l.wake), []byte{1, 0, 0, 0, 0, 0, 0, 0})
	}
	l.mu.Unlock()
	l.wg.Wait()
	if open {
		closeFD(l.wake)
		_ = syscall.Close(l.ep)
	}
}

// fillNow reads what there is without waiting.
func (c *Conn) fillNow(s *sock) (more bool, err error) {
	before := len(c.buf)
	p := scratch.Get().(*[scratchSize]byte)
	defer scratch.Put(p)
	n, err := s.readNow(p[:])
	c.buf = append(c.buf, p[:n]...)
	if before == 0 && n > 0 {
		c.markBegun()
	}
	return n > 0, err
}
