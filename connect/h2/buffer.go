package h2

import "sync"

// A buffer holds the bytes of a stream that have come and were not read. It
// takes memory in chunks that fit what comes, so that a byte does not hold
// sixteen thousand, and none while it is empty.
type buffer struct {
	first, last *chunk
	size        int
	held        int // bytes of memory
}

type chunk struct {
	b    []byte // all of it
	r, w int    // read and written up to here
	next *chunk
}

const (
	smallChunk  = 1 << 10
	middleChunk = 4 << 10
	largeChunk  = 16 << 10
)

var largeChunks = sync.Pool{New: func() any { return &chunk{b: make([]byte, largeChunk)} }}

func newChunk(n int) *chunk {
	switch {
	case n <= smallChunk:
		return &chunk{b: make([]byte, smallChunk)}
	case n <= middleChunk:
		return &chunk{b: make([]byte, middleChunk)}
	}
	return largeChunks.Get().(*chunk)
}

func (c *chunk) free() {
	if len(c.b) == largeChunk {
		c.r, c.w, c.next = 0, 0, nil
		largeChunks.Put(c)
	}
}

// write appends a copy of p.
func (b *buffer) write(p []byte) {
	b.size += len(p)
	for len(p) > 0 {
		if b.last == nil || b.last.w == len(b.last.b) {
			c := newChunk(len(p))
			b.held += len(c.b)
			if b.last == nil {
				b.first = c
			} else {
				b.last.next = c
			}
			b.last = c
		}
		n := copy(b.last.b[b.last.w:], p)
		b.last.w += n
		p = p[n:]
	}
}

// read takes bytes from the front.
func (b *buffer) read(p []byte) int {
	n := 0
	for b.first != nil && n < len(p) {
		c := b.first
		m := copy(p[n:], c.b[c.r:c.w])
		c.r += m
		n += m
		if c.r == c.w {
			if b.first = c.next; b.first == nil {
				b.last = nil
			}
			b.held -= len(c.b)
			c.free()
		}
	}
	b.size -= n
	return n
}

// drop frees all.
func (b *buffer) drop() {
	for c := b.first; c != nil; {
		next := c.next
		c.free()
		c = next
	}
	*b = buffer{}
}
