//go:build amd64 || arm64

package relay

import (
	"fmt"
	"sync/atomic"
	"syscall"
	"time"

	"culvert.dev/tunnel/internal/poll"
)

// A socketTunnel is a tunnel between two sockets: sides[0] is the client's socket, sides[1] the
// service's. It belongs to its loop's goroutine once adopted.
type socketTunnel struct {
	relay      *Relay
	owner      Owner
	sides      [2]side
	born       int64 // clock of its beginning
	moved      int64 // clock of the last byte or end; see touch
	idle, half milliseconds
	token      poll.Token
	phase      uint32 // for the list, atomic: see listedTunnel
	broken     uint16 // the errno of what went wrong before the loop had it
	unchecked  bool   // its peers are not to be checked until something moves
	gone       bool
}

// milliseconds is a limit in half the space; 0 means none.
type milliseconds int32

// millis rounds up, and down to 24 days.
func millis(d time.Duration) milliseconds {
	return milliseconds(min((d+time.Millisecond-1)/time.Millisecond, 1<<31-1))
}

func (m milliseconds) limit() time.Duration { return time.Duration(m) * time.Millisecond }

// over tells of f's end. Its sockets are closed.
func (f *socketTunnel) over(e End) {
	f.owner.Ended(e)
	f.relay.sockets.flows.Done()
}

// A side is one socket of a socketTunnel, and the direction that goes into it.
type side struct {
	fd        int32
	events    uint32   // what epoll is asked for
	out       *backlog // what the other side sent and this socket has not taken; nil for nothing
	taken     int64    // bytes this socket has taken; see took
	eof       bool     // it has sent its end of stream
	shut      bool     // it was sent the other side's end of stream
	bulk      bool     // what it sends is moved in turns, not by events
	calm      uint8    // calm turns in a row
	late      int16    // bytes meant for it after its own end, counted to a little over maxLateBytes
	check     poll.PeerCheck
	keepAlive bool // keepalive is set
}

// A backlog holds the bytes that back-pressure keeps here: in memory, or in a
// pipe if they came by splice.
type backlog struct {
	bytes []byte
	held  int // bytes that were made room for, whatever is left of them
	pipe  poll.Pipe
	n     int // bytes in the pipe
}

// A bulkDirection is what side from of f sends, moved in turns.
type bulkDirection struct {
	f    *socketTunnel
	from int
}

// HandleEvent implements poll.Handler.
func (f *socketTunnel) HandleEvent(l *poll.Loop, side int, events uint32) bool {
	if !f.gone {
		loopOf(l).handle(f, side, events)
	}
	return true
}

// handle answers one event of side i of f.
func (l *loop) handle(f *socketTunnel, i int, events uint32) {
	s, p := &f.sides[i], &f.sides[1-i]
	if events&poll.Out != 0 && s.out != nil {
		l.flush(f, i)
		if f.gone {
			return
		}
	}
	if events&(poll.In|poll.Hup|poll.Err) != 0 && !s.bulk {
		l.pump(f, i)
	}
	if events&poll.Err != 0 && !f.gone && (s.eof || p.out != nil || s.bulk) {
		if errno := poll.SocketError(s.fd); errno != 0 {
			l.fail(f, i, errno)
		}
	}
}

// pump moves what side i sends, by read and write.
func (l *loop) pump(f *socketTunnel, i int) {
	s, p := &f.sides[i], &f.sides[1-i]
	if s.eof || p.out != nil {
		l.arm(f)
		return
	}
	n, errno := poll.Read(s.fd, l.buf[:readLimit(l.budget, len(l.buf))])
	switch {
	case errno == syscall.EAGAIN || errno == syscall.EINTR:
		return // level-triggered: it comes again
	case errno != 0:
		l.fail(f, i, errno)
		return
	case n == 0:
		l.finish(f, i)
		return
	}
	l.touch(f)
	if i == 1 {
		f.owner.Answered()
	}
	if errno := l.offer(f, 1-i, l.buf[:n]); errno != 0 {
		p.missed(n)
		l.fail(f, 1-i, errno)
		return
	}
	if p.eof {
		p.missed(n)
	}
	if n == len(l.buf) && !s.bulk {
		s.bulk, s.calm = true, 0
		l.turns = append(l.turns, bulkDirection{f, i})
		l.arm(f)
	} else if p.out != nil {
		l.arm(f)
	}
}

// offer gives p to side i's socket and keeps what it does not take.
func (l *loop) offer(f *socketTunnel, i int, p []byte) syscall.Errno {
	s := &f.sides[i]
	for len(p) > 0 {
		n, errno := poll.Send(s.fd, p)
		switch errno {
		case 0:
			s.addTaken(n)
			p = p[n:]
		case syscall.EINTR:
		case syscall.EAGAIN:
			s.out = &backlog{bytes: append([]byte(nil), p...), held: len(p)}
			l.budget.AddBuffered(len(p))
			return 0
		default:
			return errno
		}
	}
	return 0
}

// flush gives side i its backlog. When that is gone the other side is read
// again, and not before, so that its end of stream waits behind the backlog, too.
func (l *loop) flush(f *socketTunnel, i int) {
	s := &f.sides[i]
	if errno := l.drain(f, s); errno != 0 {
		l.fail(f, i, errno)
		return
	}
	if s.out == nil {
		l.arm(f)
	}
}

// drain moves s's backlog into its socket, as far as that takes it.
func (l *loop) drain(f *socketTunnel, s *side) syscall.Errno {
	o := s.out
	for o != nil {
		var n int
		var errno syscall.Errno
		if o.n > 0 {
			n, errno = poll.Splice(o.pipe.R, s.fd, o.n)
		} else {
			n, errno = poll.Send(s.fd, o.bytes)
		}
		switch errno {
		case 0:
		case syscall.EINTR:
			continue
		case syscall.EAGAIN:
			return 0
		default:
			return errno
		}
		l.touch(f)
		s.addTaken(n)
		switch {
		case o.n > n:
			o.n -= n
		case o.n > 0:
			l.pipes = append(l.pipes, o.pipe)
			s.out, o = nil, nil
		case len(o.bytes) > n:
			o.bytes = o.bytes[n:]
		default:
			l.budget.AddBuffered(-o.held)
			s.out, o = nil, nil
		}
	}
	return 0
}

// finish passes on that side i has ended its stream: all it sent is with the
// other side, or it would not have been read. The second end is the tunnel's,
// and closing a socket says it too, unless something was sent to one that had
// ended: that may have been reset by then, which a close would not tell.
func (l *loop) finish(f *socketTunnel, i int) {
	s, p := &f.sides[i], &f.sides[1-i]
	if i == 1 && !p.eof {
		f.owner.ServiceEnded(nil)
	}
	s.eof, s.bulk = true, false
	l.touch(f)
	f.setHalfClosed()
	l.reschedule(f)
	p.shut = true
	if !s.shut || p.late > 0 {
		// A side that is not connected any more has closed altogether. Where its
		// own end is still to be read, that tells how.
		errno := poll.ShutdownWrite(p.fd)
		if errno == syscall.ENOTCONN && !p.eof {
			errno = 0
		}
		if errno != 0 {
			l.fail(f, 1-i, errno)
			return
		}
	}
	if s.shut {
		l.end(f, Done, nil)
		return
	}
	l.arm(f)
}

// bulk gives every bulk direction its turn.
func (l *loop) bulk() {
	kept := l.turns[:0]
	for _, t := range l.turns {
		if !t.f.gone && t.f.sides[t.from].bulk {
			l.take(t.f, t.from)
		}
		if !t.f.gone && t.f.sides[t.from].bulk {
			kept = append(kept, t)
		}
	}
	clear(l.turns[len(kept):])
	l.turns = kept
	l.turned = clock()
}

// take is one turn of bulk: what side i sends goes through a pipe to the
// other side.
func (l *loop) take(f *socketTunnel, i int) {
	s, p := &f.sides[i], &f.sides[1-i]
	before := p.taken
	for p.taken-before < bulkTurn {
		if errno := l.drain(f, p); errno != 0 {
			l.fail(f, 1-i, errno)
			return
		}
		if p.out != nil {
			break
		}
		pp, ok := l.pipe()
		if !ok {
			s.calm = calmTurns // without a pipe, events and the loop's own buffer do
			break
		}
		n, errno := poll.Splice(s.fd, pp.W, pipeSize)
		if n > 0 && errno == 0 {
			l.touch(f)
			if p.eof {
				p.missed(n)
			}
			p.out = &backlog{pipe: pp, n: n}
			continue
		}
		l.pipes = append(l.pipes, pp)
		switch {
		case errno == 0:
			l.finish(f, i)
			return
		case errno == syscall.EINTR:
			continue
		case errno != syscall.EAGAIN:
			l.fail(f, i, errno)
			return
		}
		break
	}
	if p.taken-before >= bulkCalm {
		s.calm = 0
	} else if s.calm++; s.calm >= calmTurns {
		s.bulk = false
		l.arm(f)
	}
}

// pipe returns an empty pipe, or false at the limit of pipes.
func (l *loop) pipe() (poll.Pipe, bool) {
	if n := len(l.pipes); n > 0 {
		p := l.pipes[n-1]
		l.pipes = l.pipes[:n-1]
		return p, true
	}
	if l.npipes >= maxPipes || !l.budget.Take(2) {
		return poll.Pipe{}, false
	}
	p, err := poll.NewPipe(pipeSize)
	if err != nil {
		l.budget.Give(2)
		return poll.Pipe{}, false
	}
	l.npipes++
	return p, true
}

// wants is what epoll is to watch on side i: input, unless it ended, its
// backlog at the other side is not gone or bulk polls it; output while it has
// a backlog of its own. With nothing to watch it is edge-triggered, or a socket
// that is closed both ways would wake the loop for ever.
func (f *socketTunnel) wants(i int) uint32 {
	s, p := &f.sides[i], &f.sides[1-i]
	var w uint32
	if !s.eof && p.out == nil && !s.bulk {
		w |= poll.In
	}
	if s.out != nil && !p.bulk {
		w |= poll.Out
	}
	if w == 0 {
		w = poll.EdgeTriggered
	}
	return w
}

// arm tells epoll what changed.
func (l *loop) arm(f *socketTunnel) {
	for i := range f.sides {
		s := &f.sides[i]
		if w := f.wants(i); w != s.events {
			s.events = w
			_ = l.Rewatch(s.fd, w, f.token, i)
		}
	}
}

// missed counts n bytes that s may not have read.
func (s *side) missed(n int) {
	if s.late <= maxLateBytes {
		s.late += int16(min(n, maxLateBytes+1))
	}
}

// fail ends f because side i reported errno. Where it had ended its own stream
// in order and no more than maxLateBytes came after that, this is how it closes
// altogether: the other side gets its reset, and nobody need investigate. Its
// end may be there and not read yet.
func (l *loop) fail(f *socketTunnel, i int, errno syscall.Errno) {
	s, p := &f.sides[i], &f.sides[1-i]
	ended := s.eof && p.shut || !s.eof && errno == syscall.EPIPE && poll.AtEOF(s.fd)
	if ended && s.out == nil && s.late <= maxLateBytes {
		if i == 1 && !s.eof && !p.eof && f.broken == 0 {
			f.owner.ServiceEnded(nil)
		}
		l.close(f, Done, nil, true)
		return
	}
	if errno == syscall.ENOTCONN {
		errno = syscall.ECONNRESET // which is what ended the connection
	}
	err := sideError(i, errno)
	if i == 1 && !s.eof && !p.eof && f.broken == 0 { // else adopt has said so, or it is not the service's
		f.owner.ServiceEnded(err)
	}
	l.end(f, Reset, err)
}

// sideError returns what side i reported.
func sideError(i int, errno syscall.Errno) error { return fmt.Errorf("%s: %w", sideNames[i], errno) }

// end closes f, in order for Done and with resets for any other reason.
func (l *loop) end(f *socketTunnel, why Reason, err error) { l.close(f, why, err, why != Done) }

// close closes f, with resets or in order.
func (l *loop) close(f *socketTunnel, why Reason, err error, reset bool) {
	if f.gone {
		return
	}
	f.gone = true
	f.setOver()
	for i := range f.sides {
		s := &f.sides[i]
		if s.out != nil && s.out.n > 0 { // a pipe with bytes in it is of no use to anyone
			s.out.pipe.Close()
			l.npipes--
			l.budget.Give(2)
		}
		if s.out != nil {
			l.budget.AddBuffered(-s.out.held)
		}
		s.out = nil
		if reset {
			poll.ResetFD(s.fd)
		} else {
			poll.CloseFD(s.fd)
		}
	}
	l.Lock()
	l.remove(f)
	l.Unlock()
	f.over(End{Reason: why, Err: err, In: f.sides[1].taken, Out: f.sides[0].taken})
}

// A socketTunnel belongs to its loop, but for what the list shows: that the loop
// writes, and the list reads, atomically. The loop itself reads it plainly, as
// nobody else writes.

// The phases of a socketTunnel.
const (
	phaseOpen uint32 = iota
	phaseHalf        // one side has ended its stream
	phaseOver
)

// touch notes that something moved at the given clock.
func (f *socketTunnel) touch(now int64) { atomic.StoreInt64(&f.moved, now) }

// addTaken counts n bytes that s's socket has taken.
func (s *side) addTaken(n int) { atomic.StoreInt64(&s.taken, s.taken+int64(n)) }

// setHalfClosed notes that a side has ended its stream. When the other one does, the
// tunnel is over.
func (f *socketTunnel) setHalfClosed() { atomic.StoreUint32(&f.phase, phaseHalf) }

// setOver takes f off the lists that are being read.
func (f *socketTunnel) setOver() { atomic.StoreUint32(&f.phase, phaseOver) }
