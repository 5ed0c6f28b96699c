// Package records has the TLS records that one Write makes leave in few system calls, and a
// Read return as many as have come. crypto/tls takes a system call or two for each record: of
// 16 KiB, and of little more than 1 KiB at the beginning of a connection.
package records

import (
	"crypto/tls"
	"net"
	"sync"
	"sync/atomic"
	"time"
)

const (
	// MaxRecord is how many bytes a record may carry, RFC 8446 section 5.1.
	MaxRecord = 16 << 10

	// Size is how many bytes are to be written to a tls.Conn between Gather and Flush, at
	// most.
	Size = 64 << 10

	// inputSize is how many bytes are read at once while there is much to read.
	inputSize = 64 << 10

	overhead = 4 << 10 // bytes, of the heads and tags of Size bytes in the smallest records
)

var buffers = sync.Pool{New: func() any { return new([Size + overhead]byte) }}

// A Batch stands between a tls.Conn and its connection: the records between Gather and Flush
// are written at once. The zero value is ready for use.
type Batch struct {
	mu     sync.Mutex // held over writes, so that records do not mix
	buf    *[Size + overhead]byte
	gather []byte // in buf
	err    error  // of a Flush: what follows half a record can't be read
}

// Gather keeps what is written until Flush.
func (b *Batch) Gather() {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.buf == nil {
		b.buf = buffers.Get().(*[Size + overhead]byte)
		b.gather = b.buf[:0]
	}
}

// Write keeps p, or has write write it.
func (b *Batch) Write(p []byte, write func([]byte) (int, error)) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	switch {
	case b.err != nil:
		return 0, b.err
	case b.buf == nil:
		return write(p)
	}
	b.gather = append(b.gather, p...)
	return len(p), nil
}

// Flush has write write what was kept. After an error no Write does anything but to return
// it.
func (b *Batch) Flush(write func([]byte) (int, error)) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.buf == nil {
		return b.err
	}
	if b.err == nil && len(b.gather) > 0 {
		_, b.err = write(b.gather)
	}
	buffers.Put(b.buf)
	b.buf, b.gather = nil, nil
	return b.err
}

var inputs = sync.Pool{New: func() any { return new([inputSize]byte) }}

// An Input stands between a tls.Conn and its connection, too. It reads more than the tls.Conn
// asks for while there is much to read, and has no buffer otherwise. Its methods must not be
// called at the same time. The zero value is ready for use.
type Input struct {
	buf   *[inputSize]byte // nil while there is little to read
	r, w  int              // buf[r:w] was read and not used
	full  bool             // the last read was as large as it could be
	now   bool             // Read is not to wait
	room  int              // bytes that may be read for the caller of Fill; where large
	large bool             // the caller of Fill is a relay
	err   error            // of the last read, for the next one
}

// Read has read read into p, or into a buffer of the Input's.
func (in *Input) Read(p []byte, read func([]byte) (int, error)) (int, error) {
	if in.r == in.w {
		if in.now {
			return 0, errNotNow{}
		}
		if err := in.err; err != nil {
			in.err = nil
			return 0, err
		}
		most := in.most()
		if !in.full || most <= len(p) {
			in.free()
			n, err := read(p)
			in.full = n == len(p) && n >= 1<<10
			in.room -= n
			return n, err
		}
		if in.buf == nil {
			in.buf = inputs.Get().(*[inputSize]byte)
		}
		n, err := read(in.buf[:most])
		in.r, in.w, in.full = 0, n, n > most/4
		in.room -= n
		if n == 0 {
			in.free()
			return 0, err
		}
		in.err = err
	}
	n := copy(p, in.buf[in.r:in.w])
	in.r += n
	return n, nil
}

// most returns how many bytes to read. A caller with a large buffer is a relay, which may be
// stuck after it: what is read for it fits there, and nothing is left here. A caller with a
// small one reads frames.
func (in *Input) most() int {
	if in.large {
		return min(in.room, inputSize)
	}
	return inputSize
}

func (in *Input) free() {
	if in.buf != nil {
		inputs.Put(in.buf)
		in.buf = nil
	}
	in.r, in.w = 0, 0
}

// Fill has read, which is the Read of the tls.Conn above, fill p as far as that is possible
// without waiting.
func (in *Input) Fill(p []byte, read func([]byte) (int, error)) (n int, err error) {
	in.room, in.large = len(p)-maxRaw, len(p) >= 2*MaxRecord
	n, err = read(p)
	if n < minFill {
		return n, err
	}
	in.now = true
	defer func() {
		in.now = false
		if in.r == in.w {
			in.free()
		}
	}()
	for n < len(p) && err == nil {
		var more int
		more, err = read(p[n:])
		n += more
	}
	return n, nil // crypto/tls returns an error of its own again
}

// maxRaw is how many bytes of a record the tls.Conn may have read already.
const maxRaw = MaxRecord + 512

// minFill is how many bytes there are in the first record of many.
const minFill = 1 << 10

// An errNotNow is what a tls.Conn reads where it would have to wait. It takes it for one that
// the next Read need not have.
type errNotNow struct{}

func (errNotNow) Error() string   { return "records: nothing more has come" }
func (errNotNow) Timeout() bool   { return true }
func (errNotNow) Temporary() bool { return true }

// A Conn is a tls.Conn with a Batch and an Input.
type Conn struct {
	*tls.Conn
	reading sync.Mutex // held by Read
	below   *transport
	mu      sync.Mutex   // held by Write
	writing atomic.Int32 // calls of Write
}

// Client is tls.Client.
func Client(c net.Conn, config *tls.Config) *Conn {
	below := &transport{Conn: c}
	return &Conn{Conn: tls.Client(below, config), below: below}
}

// Write implements net.Conn.
func (c *Conn) Write(p []byte) (done int, err error) {
	c.writing.Add(1)
	defer c.writing.Add(-1)
	if len(p) <= MaxRecord {
		return c.Conn.Write(p)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for done < len(p) && err == nil {
		var n int
		c.below.batch.Gather()
		n, err = c.Conn.Write(p[done:min(done+Size, len(p))])
		if ferr := c.below.batch.Flush(c.below.Conn.Write); ferr != nil {
			return done, ferr
		}
		done += n
	}
	return done, err
}

// Read implements net.Conn.
func (c *Conn) Read(p []byte) (int, error) {
	c.reading.Lock()
	defer c.reading.Unlock()
	return c.below.input.Fill(p, c.Conn.Read)
}

// closeNotifyTimeout is how long Close waits for a close_notify to be written. crypto/tls gives
// it 5 seconds.
const closeNotifyTimeout = time.Second

// Close implements net.Conn. As that of a tls.Conn, it ends a Write that is under way. At a
// peer that takes nothing it waits for closeNotifyTimeout.
func (c *Conn) Close() error {
	if c.writing.Load() == 0 {
		c.below.closing.Store(true)
		_ = c.below.Conn.SetWriteDeadline(time.Now().Add(closeNotifyTimeout)) // also of a CloseWrite that is under way
		return c.Conn.Close()
	}
	err := c.below.Conn.Close()
	_ = c.Conn.Close()
	return err
}

// NetConn returns what Client was given.
func (c *Conn) NetConn() net.Conn { return c.below.Conn }

// A transport is what the tls.Conn of a Conn writes to.
type transport struct {
	net.Conn
	batch   Batch
	input   Input
	closing atomic.Bool // Close has set the write deadline
}

func (t *transport) Read(p []byte) (int, error) { return t.input.Read(p, t.Conn.Read) }

// SetWriteDeadline implements net.Conn.
func (t *transport) SetWriteDeadline(d time.Time) error {
	if t.closing.Load() {
		return nil
	}
	return t.Conn.SetWriteDeadline(d)
}

func (t *transport) Write(p []byte) (int, error) { return t.batch.Write(p, t.Conn.Write) }
