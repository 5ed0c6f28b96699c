//go:build amd64 || arm64

package tunnel

import (
	"net"
	"syscall"
	"time"
)

// The lobby is where connections wait until what they have sent is worth a
// look: a connection there is its slot, its socket and the bytes it has sent,
// and no stack. A loop reads, asks the protocols' HasPreamble, and lets the
// connection out when that says yes, when the client is gone, when its time is
// up, or after a number of reads, since each asks from the first byte again.
//
// Nothing is decided here: a connection that is let out is served as if its
// bytes had just come.

// maxReads is how often a connection is read before it is served anyway.
const maxReads = 16

// A guest is one connection in the lobby.
type guest struct {
	k       *slot
	sock    *sock
	reads   int
	at, gen int32 // its seat
}

// receive serves k, or has it wait in the lobby until it should be; told is
// when the kernel was told to keep those who say nothing. It is false where the
// loop is another goroutine's afterwards.
func (l *loop) receive(k *slot, s *sock, told time.Time) bool {
	g := &guest{k: k, sock: s}
	if g.ready() {
		return l.serve(k)
	}
	if len(k.buf) == 0 {
		k.server.deferred(k, told)
	}
	if !l.hold(g) {
		return l.serve(k)
	}
	return true
}

// hold seats g. It is false where it should be served at once.
func (l *loop) hold(g *guest) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.released || g.k.evicted.Load() { // out came first
		return false
	}
	g.at, g.gen = l.seat(g)
	if err := g.sock.control(func(fd int32) error {
		return l.control(syscall.EPOLL_CTL_ADD, fd, syscall.EPOLLIN, g.at, g.gen, 0)
	}); err != nil {
		l.vacate(g.at)
		return false
	}
	g.k.guest = g
	return true
}

// ready reads what there is and reports whether g should be served.
func (g *guest) ready() bool {
	p := scratch.Get().(*[scratchSize]byte)
	n, err := g.sock.readNow(p[:])
	k := g.k
	if n > 0 && len(k.buf) == 0 {
		k.markBegun()
		if k.ln.hasPreamble(p[:n]) { // as nearly all are: the bytes stay where they are
			k.buf, k.scratch = p[:n:n], p
			return true
		}
	}
	k.buf = append(k.buf, p[:n]...)
	scratch.Put(p)
	if n > 0 {
		g.reads++
	}
	// After an error, whoever serves it will meet the same end.
	return err != nil || n > 0 && (g.reads >= maxReads || k.ln.hasPreamble(k.buf))
}

// giveScratch gives back the memory that the preamble of c's connection stood
// in, or of the one below, unless bytes are left there. The caller has passed on
// what it had of them, and nobody uses c yet.
func giveScratch(c net.Conn) {
	if s, ok := below(c).(*sock); ok && s.slot != nil && s.slot.scratch != nil && len(s.slot.buf) == 0 {
		scratch.Put(s.slot.scratch)
		s.slot.scratch = nil
	}
}

// event implements watched.
func (g *guest) event(l *loop, _ int, _ uint32) bool {
	l.mu.Lock()
	out := g.k.guest == g && g.ready()
	if out {
		l.dismiss(g)
	}
	l.mu.Unlock()
	return !out || l.serve(g.k)
}

// leaveLobby lets k out if it is there: its time is up, or the server closes.
func (k *slot) leaveLobby() {
	l := k.loop
	if l == nil {
		return
	}
	l.mu.Lock()
	g := k.guest
	if g != nil {
		l.dismiss(g)
	}
	l.mu.Unlock()
	if g != nil {
		go k.server.serve(k)
	}
}

// dismiss gives up g's seat. The caller holds mu.
func (l *loop) dismiss(g *guest) {
	g.k.guest = nil
	l.vacate(g.at)
	_ = g.sock.control(func(fd int32) error { return l.control(syscall.EPOLL_CTL_DEL, fd, 0, 0, 0, 0) })
}
