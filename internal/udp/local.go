package udp

import (
	"bytes"
	"crypto/rand"
	"encoding/binary"
	"hash/maphash"
	"net"
	"net/netip"
	"os"
	"sync"
	"sync/atomic"
	"time"
)

const (
	localQueue = 1024    // datagrams that a Local holds
	localBytes = 4 << 20 // of them all
)

// LocalIDLen is how long a Local's connection ids are, in bytes.
const LocalIDLen = 12

// A Local is the part of a Listener's traffic that ends here: the connections to the
// gateway's own names, and datagrams that belong to no session. It is a
// net.PacketConn for a QUIC library, which gets clients at their own addresses and
// follows them when they move. Make one with NewLocal.
//
// The library should take its connection ids from NewID: its packets are recognized
// by them wherever they come from, also those of a client that has sessions with
// services from the same socket.
type Local struct {
	conn  *net.UDPConn
	seed  maphash.Seed
	queue chan localDatagram
	size  atomic.Int64 // bytes in queue
	done  chan struct{}
	close sync.Once
	read  deadline

	mu       sync.Mutex // guards door
	listener *activeListener
}

type localDatagram struct {
	b    []byte
	from netip.AddrPort
}

var _ net.PacketConn = (*Local)(nil)

// NewLocal makes a Local for the Listener whose Conn is c. Closing it leaves
// c open.
func NewLocal(c *net.UDPConn) *Local {
	return &Local{conn: c, seed: maphash.MakeSeed(), queue: make(chan localDatagram, localQueue), done: make(chan struct{}), read: deadline{passed: make(chan struct{})}}
}

// NewID returns a connection id of LocalIDLen bytes. Only this Local can tell it from
// a random one.
func (l *Local) NewID() []byte {
	id := make([]byte, LocalIDLen)
	_, _ = rand.Read(id) // which never fails
	copy(id[localRandom:], l.mark(id))
	return id
}

// localRandom is the number of random bytes of an id; the rest is its mark.
const localRandom = 6

func (l *Local) mark(id []byte) []byte {
	return binary.BigEndian.AppendUint64(nil, maphash.Bytes(l.seed, id[:localRandom]))[:LocalIDLen-localRandom]
}

// owns reports whether NewID has made id, but for chance.
func (l *Local) owns(id []byte) bool {
	return len(id) == LocalIDLen && bytes.Equal(id[localRandom:], l.mark(id))
}

func (l *Local) attach(d *activeListener) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.listener = d
}

// push queues a copy of b, unless too much is waiting.
func (l *Local) push(b []byte, from netip.AddrPort) {
	if l.size.Add(int64(len(b))) > localBytes {
		l.size.Add(int64(-len(b)))
		return
	}
	select {
	case l.queue <- localDatagram{append([]byte(nil), b...), from}:
	default:
		l.size.Add(int64(-len(b)))
	}
}

// ReadFrom returns the next datagram. What b has no room for is lost.
func (l *Local) ReadFrom(b []byte) (n int, addr net.Addr, err error) {
	passed := l.read.wait()
	select {
	case <-l.done:
		return 0, nil, net.ErrClosed
	case <-passed:
		return 0, nil, os.ErrDeadlineExceeded
	default:
	}
	select {
	case <-l.done:
		return 0, nil, net.ErrClosed
	case <-passed:
		return 0, nil, os.ErrDeadlineExceeded
	case d := <-l.queue:
		l.size.Add(int64(-len(d.b)))
		return copy(b, d.b), net.UDPAddrFromAddrPort(d.from), nil
	}
}

// WriteTo sends a datagram to a client, from the listener's socket.
func (l *Local) WriteTo(b []byte, addr net.Addr) (int, error) {
	select {
	case <-l.done:
		return 0, net.ErrClosed
	default:
	}
	ua, ok := addr.(*net.UDPAddr)
	if !ok {
		return 0, &net.OpError{Op: "write", Net: "udp", Addr: addr, Err: net.InvalidAddrError("not an address of UDP")}
	}
	to := ua.AddrPort()
	to = netip.AddrPortFrom(to.Addr().Unmap(), to.Port())
	l.mu.Lock()
	d := l.listener
	l.mu.Unlock()
	if d == nil {
		return l.conn.WriteToUDPAddrPort(b, to)
	}
	if err := d.wire.send(b, to, d.answerOf(b, to)); err != nil {
		return 0, err
	}
	return len(b), nil
}

// answerOf returns the address that a Local's client wrote to. It notes the id that b
// gives to the client, and a 1-RTT packet to a client that has written to such an id:
// the Local has got the client's end of the handshake.
func (d *activeListener) answerOf(b []byte, to netip.AddrPort) netip.Addr {
	d.s.mu.Lock()
	defer d.s.mu.Unlock()
	c, ok := d.answers[to]
	if !ok {
		return netip.Addr{}
	}
	version, _, scid, long := readHeader(b)
	for _, p := range d.byAddr[c] {
		k := p.session
		if k.state != local {
			continue
		}
		switch {
		case long && version != 0:
			k.ids.heard, k.ids.size = string(scid), len(scid)
			k.ids.add(k, scid)
		case !long && k.usesServiceID.Load():
			k.proven()
		}
		break
	}
	return c.local
}

// Close ends reading and writing. The socket is the Server's to close.
func (l *Local) Close() error {
	l.close.Do(func() { close(l.done) })
	return nil
}

// LocalAddr returns the listener's address.
func (l *Local) LocalAddr() net.Addr { return l.conn.LocalAddr() }

// SetDeadline sets the read deadline: writes do not wait.
func (l *Local) SetDeadline(t time.Time) error { return l.SetReadDeadline(t) }

// SetReadDeadline ends a ReadFrom that waits at t; the zero time is none.
func (l *Local) SetReadDeadline(t time.Time) error {
	l.read.set(t)
	return nil
}

// SetWriteDeadline does nothing: writes do not wait.
func (l *Local) SetWriteDeadline(time.Time) error { return nil }

// SetReadBuffer and SetWriteBuffer are for libraries that ask: the listener's
// socket is as it is, and the queue in front of a Local too.
func (l *Local) SetReadBuffer(int) error { return nil }

// SetWriteBuffer does nothing.
func (l *Local) SetWriteBuffer(int) error { return nil }

// A deadline is a channel that is closed at a time that may change.
type deadline struct {
	mu     sync.Mutex // guards what follows
	timer  *time.Timer
	passed chan struct{}
	gone   bool // passed is closed
}

func (d *deadline) wait() <-chan struct{} {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.passed
}

func (d *deadline) set(t time.Time) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.timer != nil {
		d.timer.Stop()
		d.timer = nil
	}
	if d.gone {
		d.passed, d.gone = make(chan struct{}), false
	}
	if t.IsZero() {
		return
	}
	if wait := time.Until(t); wait > 0 {
		passed := d.passed
		d.timer = time.AfterFunc(wait, func() {
			d.mu.Lock()
			defer d.mu.Unlock()
			if d.passed == passed && !d.gone {
				d.gone = true
				close(passed)
			}
		})
		return
	}
	d.gone = true
	close(d.passed)
}
