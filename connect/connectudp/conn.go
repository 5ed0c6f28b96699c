package connectudp

import (
	"errors"
	"io"
	"sync"
	"sync/atomic"

	"culvert.dev/connect"
	"culvert.dev/tunnel"
)

const (
	// maxQueued is how many bytes of capsules may wait for the stream's windows, beside
	// those that are being written. What comes then is lost.
	maxQueued = 128 << 10

	scarceQueued = 8 << 10 // in place of maxQueued while memory is short

	keptQueue = 4 << 10 // bytes of memory that a Conn at rest keeps for its queue, at most

	// minPayload is the largest datagram that arrives on every path. RFC 9000 section 14
	// requires 1,200 bytes; implementations of QUIC begin with up to 1,280.
	minPayload = 1280
)

// A Conn carries datagrams on the stream of a CONNECT-UDP request. It is a
// tunnel.DatagramConn. Close and Abort are those of the stream; Read and Write are, too,
// and not to be called.
//
// At rest it holds the goroutine of ReceiveDatagrams and no other.
type Conn struct {
	tunnel.Stream
	frames  connect.DatagramStream // the Stream, if it has DATAGRAM frames; nil if not
	dropped *atomic.Uint64
	budget  *tunnel.Budget // counts what waits; nil means no limit

	mu      sync.Mutex // guards what follows
	queue   []byte     // capsules that wait for the writer, counted by the budget
	spare   []byte     // memory for the next queue
	writing bool       // there is a writer
	err     error      // of the stream, when it took no more
}

var (
	_ tunnel.DatagramConn = (*Conn)(nil)
	_ tunnel.Stream       = (*Conn)(nil)
	_ tunnel.Aborter      = (*Conn)(nil)
	_ tunnel.Multiplexed  = (*Conn)(nil)
)

// newConn returns the Conn on s, which it owns. Lost datagrams are counted in dropped.
// Either of dropped and budget may be nil.
func newConn(s tunnel.Stream, dropped *atomic.Uint64, budget *tunnel.Budget) *Conn {
	if dropped == nil {
		dropped = new(atomic.Uint64)
	}
	c := &Conn{Stream: s, dropped: dropped, budget: budget}
	c.frames, _ = s.(connect.DatagramStream)
	return c
}

// Abort implements tunnel.Aborter.
func (c *Conn) Abort() error { return tunnel.Abort(c.Stream) }

// IsMultiplexed implements tunnel.Multiplexed.
func (c *Conn) IsMultiplexed() bool {
	m, ok := c.Stream.(tunnel.Multiplexed)
	return ok && m.IsMultiplexed()
}

// SendDatagram implements tunnel.DatagramConn: it never waits, and returns nil for what is
// lost. The error is that of a stream that takes no more.
func (c *Conn) SendDatagram(b []byte) error {
	if len(b) > maxPayload {
		c.dropped.Add(1)
		return nil
	}
	if c.frames != nil {
		switch err := c.frames.SendDatagram([]byte{contextUDP}, b); {
		case err == nil:
			return nil
		case !errors.Is(err, errors.ErrUnsupported): // the queue is full
			c.dropped.Add(1)
			return nil
		}
	}
	return c.sendCapsule(b)
}

// tooLarge is called with a datagram, and its context, that no DATAGRAM frame can hold on
// this path.
func (c *Conn) tooLarge(b []byte) {
	if b = b[1:]; len(b) > minPayload {
		c.dropped.Add(1)
		return
	}
	_ = c.sendCapsule(b)
}

// sendCapsule queues b for the stream.
func (c *Conn) sendCapsule(b []byte) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	before, most := len(c.queue), maxQueued
	if c.budget.MemoryShort() {
		most = scarceQueued
	}
	switch {
	case c.err != nil:
		return c.err
	case before+maxHead+len(b) > most:
		c.dropped.Add(1)
		return nil
	}
	c.queue = appendCapsule(c.queue, b)
	c.budget.AddBuffered(len(c.queue) - before)
	if !c.writing {
		c.writing = true
		go c.write()
	}
	return nil
}

// write writes the queue to the stream, and ends when it is empty.
func (c *Conn) write() {
	var b []byte // that are being written
	defer func() {
		if v := recover(); v != nil {
			c.mu.Lock()
			c.err = tunnel.Caught(v)
			c.budget.AddBuffered(-len(b) - len(c.queue))
			c.queue, c.spare = nil, nil
			c.mu.Unlock()
			_ = c.Abort()
		}
	}()
	for {
		c.mu.Lock()
		if len(c.queue) == 0 || c.err != nil {
			c.writing = false
			c.budget.AddBuffered(-len(c.queue)) // of a stream that takes no more
			if c.queue, c.spare = c.queue[:0], nil; cap(c.queue) > keptQueue {
				c.queue = nil
			}
			c.mu.Unlock()
			return
		}
		b = c.queue
		c.queue = c.spare[:0]
		c.mu.Unlock()
		_, err := c.Stream.Write(b)
		c.mu.Lock()
		c.budget.AddBuffered(-len(b))
		c.spare = b
		if err != nil {
			c.err = err
		}
		c.mu.Unlock()
	}
}

// ReceiveDatagrams implements tunnel.DatagramConn. At the end of the stream it returns
// io.EOF, and net.ErrClosed after Close.
func (c *Conn) ReceiveDatagrams(deliver func(b []byte)) error {
	if c.frames != nil {
		c.frames.HandleDatagrams(func(b []byte) {
			payload, ok, err := parseDatagram(b)
			switch {
			case err != nil:
				_ = c.Abort()
			case ok:
				deliver(payload)
			}
		}, c.tooLarge)
	}
	capsules := newCapsuleReader(c.Stream)
	for {
		b, err := capsules.next()
		if err != nil {
			return c.endOf(err)
		}
		deliver(b)
	}
}

// endOf returns err, the end of what c receives, after it has aborted a stream whose peer
// broke the rules.
func (c *Conn) endOf(err error) error {
	if _, wrong := errors.AsType[capsuleError](err); wrong {
		_ = c.Abort()
	}
	if errors.Is(err, io.ErrUnexpectedEOF) {
		_ = c.Abort()
		return capsuleError("the stream ended inside of a capsule")
	}
	return err
}
