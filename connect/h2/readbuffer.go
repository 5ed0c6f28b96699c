package h2

import (
	"errors"
	"io"
	"sync"
)

// Sizes of a readBuffer. A whole frame fits the large one.
const (
	restBuffer = 1 << 10
	bulkBuffer = 64 << 10

	maxEmptyReads = 100 // as many as bufio makes
)

var bulkBuffers = sync.Pool{New: func() any { return new([bulkBuffer]byte) }}

// A readBuffer has what has come from a connection and was not used. It is large only while
// there is much to read: there are many connections, and most of them have nothing to say.
type readBuffer struct {
	in   io.Reader
	b    []byte // what was read and not used is b[r:w]
	r, w int
	bulk *[bulkBuffer]byte // that b is of; nil for a small one
	full bool              // the last read was as large as it could be
	err  error             // of the last read
}

func newReadBuffer(in io.Reader) *readBuffer { return &readBuffer{in: in, b: make([]byte, restBuffer)} }

// Buffered returns how many bytes can be had without a read.
func (b *readBuffer) Buffered() int { return b.w - b.r }

// grow makes b large.
func (b *readBuffer) grow() {
	bulk := bulkBuffers.Get().(*[bulkBuffer]byte)
	b.w = copy(bulk[:], b.b[b.r:b.w])
	b.r, b.bulk, b.b = 0, bulk, bulk[:]
}

// free gives a large buffer up. What is in it is lost.
func (b *readBuffer) free() {
	if b.bulk != nil {
		bulkBuffers.Put(b.bulk)
	}
	b.bulk, b.b, b.r, b.w = nil, nil, 0, 0
}

// fill reads once, so that b has n bytes or more than before. There is less than that in it.
func (b *readBuffer) fill(n int) error {
	if b.err != nil {
		return b.err
	}
	if b.r == b.w {
		b.r, b.w = 0, 0
		if b.bulk != nil && !b.full {
			b.free()
			b.b = make([]byte, restBuffer)
		}
	}
	switch {
	case b.bulk == nil && (b.full || n > len(b.b)):
		b.grow()
	case b.r > 0 && (b.r+n > len(b.b) || len(b.b)-b.w < len(b.b)/2):
		b.w = copy(b.b, b.b[b.r:b.w])
		b.r = 0
	}
	for range maxEmptyReads {
		m, err := b.in.Read(b.b[b.w:])
		b.full = m == len(b.b)-b.w || m >= maxFrame // TLS may give no more than a record at once
		b.w += m
		b.err = err
		switch {
		case m > 0:
			return nil
		case err != nil:
			return err
		}
	}
	return io.ErrNoProgress
}

// Peek returns the next n bytes, at most a frame with its head and padding. They are good
// until the next call of any other method.
func (b *readBuffer) Peek(n int) ([]byte, error) {
	if n > bulkBuffer {
		return nil, errors.New("h2: a look at more bytes than a buffer has")
	}
	for b.Buffered() < n {
		if err := b.fill(n); err != nil {
			return b.b[b.r:b.w], err
		}
	}
	return b.b[b.r : b.r+n], nil
}

// Discard drops the next n bytes.
func (b *readBuffer) Discard(n int) (done int, err error) {
	for {
		some := min(n-done, b.Buffered())
		b.r += some
		if done += some; done == n {
			return n, nil
		}
		if err := b.fill(1); err != nil {
			return done, err
		}
	}
}

// Read implements io.Reader.
func (b *readBuffer) Read(p []byte) (int, error) {
	if len(p) == 0 {
		return 0, nil
	}
	if b.Buffered() == 0 {
		if err := b.fill(1); err != nil {
			return 0, err
		}
	}
	n := copy(p, b.b[b.r:b.w])
	b.r += n
	return n, nil
}

// ReadByte implements io.ByteReader.
func (b *readBuffer) ReadByte() (byte, error) {
	var one [1]byte
	_, err := io.ReadFull(b, one[:])
	return one[0], err
}
