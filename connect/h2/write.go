package h2

import (
	"bytes"
	"encoding/binary"
	"errors"
	"os"
	"strings"
	"sync"
	"time"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"

	"culvert.dev/connect"
	"culvert.dev/connect/internal/mux"
)

var (
	batches = sync.Pool{New: func() any { return new([maxBatch]byte) }}
	shorts  = sync.Pool{New: func() any { return new([maxShort]byte) }}
)

// A list is a FIFO queue of streams.
type list struct{ first, last *Stream }

func (l *list) push(s *Stream) {
	s.listed, s.next = true, nil
	if l.last == nil {
		l.first = s
	} else {
		l.last.next = s
	}
	l.last = s
}

func (l *list) pop() *Stream {
	s := l.first
	if l.first = s.next; l.first == nil {
		l.last = nil
	}
	s.listed, s.next = false, nil
	return s
}

// enlist queues s for the writer. The caller holds mu.
func (c *conn) enlist(s *Stream) {
	if c.queue(s) {
		c.work.Signal()
	}
}

// queue is enlist without a word to the writer. It reports whether it changed anything. The
// caller holds mu.
func (c *conn) queue(s *Stream) bool {
	switch {
	case c.err != nil:
		return false
	case s.starving && !s.hasMore():
		c.feed() // its Write has timed out, and an end needs no window
	case s.listed:
		return false
	default:
		c.ready.push(s)
	}
	return true
}

// tell wakes the writer if something waits for that. The caller holds mu.
func (c *conn) tell() {
	if c.later {
		c.later = false
		c.work.Signal()
	}
}

// feed queues the streams that waited for the connection's window. The caller holds
// mu.
func (c *conn) feed() {
	for c.starved.first != nil {
		s := c.starved.pop()
		s.starving = false
		c.ready.push(s)
	}
}

// write is the writer: control frames first, then a frame for each stream in
// turn, as much as fits one write. It holds a buffer only while it writes.
func (c *conn) write() {
	defer close(c.written)
	c.mu.Lock()
	defer c.mu.Unlock()
	defer c.recovered()
	for {
		for c.writing || c.control.Len() == 0 && c.ready.first == nil && c.err == nil && c.broken == nil {
			c.work.Wait()
		}
		ending := c.err != nil
		err := c.broken
		if err == nil {
			buf := batches.Get().(*[maxBatch]byte)
			err = c.batch(buf[:0])
			batches.Put(buf)
		}
		if err != nil {
			c.writeFailed(err)
			return
		}
		if ending && c.control.Len() == 0 {
			return
		}
	}
}

// writeNow writes what is due on the goroutine of a Write of s, if that is the only one and is
// short, or on the reader's where s is nil and no stream has anything to send: to wake the writer
// and to be woken by it takes longer. It is false where the writer is to write it. The caller holds
// mu, which is free meanwhile.
func (c *conn) writeNow(s *Stream) bool {
	size := c.control.Len()
	if s != nil {
		if s.next != nil || s.source != nil {
			return false
		}
		size += len(s.pending) + frameHead
	}
	if c.hasRoom == nil || c.writing || c.err != nil || c.broken != nil || c.ready.first != s || size > maxShort || !c.hasRoom() {
		return false
	}
	buf := shorts.Get().(*[maxShort]byte)
	c.broken = c.batch(buf[:0])
	shorts.Put(buf)
	if c.control.Len() > 0 || c.ready.first != nil || c.err != nil || c.broken != nil {
		c.work.Signal()
	}
	return true
}

// batch makes the next batch in b and writes it. The caller holds mu, which is free meanwhile.
func (c *conn) batch(b []byte) error {
	c.writing = true
	defer func() { c.writing = false }()
	if b = c.fill(b); len(b) == 0 {
		return nil
	}
	if now := mux.Clock(); c.err == nil && (c.due == 0 || now-c.due > int64(writeTimeout/30)) {
		c.due = now
		_ = c.nc.SetWriteDeadline(time.Now().Add(writeTimeout))
	}
	c.mu.Unlock()
	err := c.put(b)
	c.mu.Lock()
	return err
}

// writeFailed ends the connection for err of a write. A client waits a little for the
// reader to end it first: what the peer has sent before it closed, such as a TLS alert,
// says why it did. The caller holds mu.
func (c *conn) writeFailed(err error) {
	if c.err == nil && c.client && !errors.Is(err, os.ErrDeadlineExceeded) {
		c.side.unwritable()
		late := time.AfterFunc(lingerTimeout, func() {
			c.mu.Lock()
			defer c.mu.Unlock()
			defer c.recovered()
			c.failLocked(err)
		})
		defer late.Stop()
		for c.err == nil {
			c.work.Wait()
		}
	}
	c.failLocked(err)
}

// put writes b. It turns a panic of the connection below into an error. The caller
// does not hold mu.
func (c *conn) put(b []byte) (err error) {
	defer func() {
		if v := recover(); v != nil {
			err = c.caught(v)
		}
	}()
	_, err = c.nc.Write(b)
	return err
}

// fill makes the next batch. The caller holds mu, which is free while a source is read.
func (c *conn) fill(b []byte) []byte {
	n := min(c.control.Len(), cap(b))
	b = append(b, c.control.Next(n)...)
	if c.control.Len() > 0 {
		return b
	}
	if c.control.Cap() > 4<<10 {
		c.control = bytes.Buffer{}
	}
	for c.ready.first != nil && cap(b)-len(b) > frameHead+1 {
		b = c.turn(c.ready.pop(), b)
	}
	return b
}

// maxPull is how many frames of a source are read at once: a read of 64 KiB takes less than four of 16.
const maxPull = 4

const frameHead = 9 // bytes, RFC 9113 section 4.1

// turn appends one frame of s, or up to maxPull of its source, and s goes to the end of its list
// where there is more. The caller holds mu, which is free while the source is read.
func (c *conn) turn(s *Stream, b []byte) []byte {
	if s.finished {
		return b
	}
	size, frames := max(0, min(s.allowed, c.allowed)), maxPull // its window may be negative, RFC 9113 section 6.9.2
	if s.source == nil {
		size, frames = min(size, len(s.pending)), 1
	}
	most := min(c.peerMaxFrame, maxSend)
	slots := c.slotsOf(b, min(size, frames*most), most)
	if len(slots) == 0 && s.hasMore() {
		if s.allowed > 0 { // it is the connection that has no room
			c.starved.push(s)
			s.starving = true
		}
		return b // a WINDOW_UPDATE lists it again
	}
	n := c.load(s, slots)
	clear(c.slots[:])
	end := s.finish && !s.hasMore()
	switch {
	case s.finished: // while the source was read
	case end:
		b = c.addFrames(b, s.id, n, most, http2.FlagDataEndStream)
		c.sentEnd(s)
	default:
		b = c.addFrames(b, s.id, n, most, 0)
		if s.hasMore() && !s.listed {
			c.ready.push(s)
		}
	}
	if !s.hasMore() && s.writing {
		if s.begins {
			s.writing, s.begins = false, false
		}
		s.writable.Broadcast()
	}
	return b
}

// slotsOf returns where size bytes go in frames of at most most bytes that are appended to b, or
// as many as there is room for.
func (c *conn) slotsOf(b []byte, size, most int) [][]byte {
	slots := c.slots[:0]
	for at := len(b) + frameHead; size > 0 && at < cap(b); at += frameHead {
		n := min(size, most, cap(b)-at)
		slots = append(slots, b[at:at+n])
		at += n
		size -= n
	}
	return slots
}

// load puts bytes of s into slots, and returns how many, which its windows are charged. The caller
// holds mu, which is free while the source is read.
func (c *conn) load(s *Stream, slots [][]byte) (n int) {
	room := 0
	for _, p := range slots {
		room += len(p)
	}
	s.allowed -= room
	c.allowed -= room
	for len(slots) > 0 && len(s.pending) > 0 {
		m := copy(slots[0], s.pending)
		s.pending = s.pending[m:]
		n += m
		if slots[0] = slots[0][m:]; len(slots[0]) == 0 {
			slots = slots[1:]
		}
	}
	if len(slots) > 0 {
		n += c.pull(s, slots, room-n)
	}
	s.allowed += room - n
	c.allowed += room - n
	return n
}

// pull has the source of s fill slots, which have room bytes, and returns how many it has. The
// caller holds mu, which is free meanwhile.
func (c *conn) pull(s *Stream, slots [][]byte, room int) (n int) {
	source, returned := s.source, false
	s.pulling = true
	c.mu.Unlock()
	defer func() {
		c.mu.Lock()
		s.pulling = false
		switch {
		case s.writeError() != nil: // send has waited to return it
			s.writable.Broadcast()
		case returned && n < room:
			s.source = nil
		}
	}()
	n = source(slots)
	returned = true
	return n
}

// addFrames has n bytes that are in the slots of b become frames of the stream id. The caller
// holds mu.
func (c *conn) addFrames(b []byte, id uint32, n, most int, last http2.Flags) []byte {
	for n > 0 || last != 0 {
		size, flags := min(n, most), http2.Flags(0)
		if n -= size; n == 0 {
			flags, last = last, 0
		}
		b = appendHead(b, size, http2.FrameData, flags, id)
		b = b[:len(b)+size]
		c.meter.sent()
	}
	return b
}

// sentEnd notes END_STREAM. The caller holds mu.
func (c *conn) sentEnd(s *Stream) {
	s.finished = true
	if !s.closed || s.ended {
		c.dropIfDone(s)
		return
	}
	// Nothing reads what the peer goes on to send. A server tells it by NO_ERROR,
	// RFC 9113 section 8.1.
	code := http2.ErrCodeNo
	if c.client {
		code = http2.ErrCodeCancel
	}
	c.reset(s, code)
}

// appendHead appends a frame's head, RFC 9113 section 4.1.
func appendHead(b []byte, length int, t http2.FrameType, flags http2.Flags, id uint32) []byte {
	b = append(b, byte(length>>16), byte(length>>8), byte(length), byte(t), byte(flags))
	return binary.BigEndian.AppendUint32(b, id)
}

// writeHead sends a header block. The caller holds mu.
func (c *conn) writeHead(id uint32, pseudo, fields connect.Fields, end bool) {
	c.encoded.Reset()
	for _, fs := range []connect.Fields{pseudo, fields} {
		for _, f := range fs {
			name := strings.ToLower(f.Name)
			_ = c.enc.WriteField(hpack.HeaderField{Name: name, Value: f.Value, Sensitive: isCredential(name, f.Value)})
		}
	}
	block := c.encoded.Bytes()
	for first := true; first || len(block) > 0; first = false {
		part := block[:min(len(block), maxFrame)]
		block = block[len(part):]
		if first {
			_ = c.fw.WriteHeaders(http2.HeadersFrameParam{StreamID: id, BlockFragment: part, EndStream: end, EndHeaders: len(block) == 0})
		} else {
			_ = c.fw.WriteContinuation(id, len(block) == 0, part)
		}
	}
	if c.encoded.Cap() > 4<<10 {
		c.encoded = bytes.Buffer{}
	}
	c.work.Signal()
}

// isCredential reports whether no part of the connection may keep a field in its tables, RFC 7541
// section 7.1.3: credentials, which may also come in a field that the configuration names.
func isCredential(name, value string) bool {
	return name == "proxy-authorization" || name == "authorization" || strings.HasPrefix(value, "Bearer ") || strings.HasPrefix(value, "Basic ")
}
