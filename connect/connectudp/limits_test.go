package connectudp

import (
	"bytes"
	"errors"
	"io"
	"runtime"
	"sync/atomic"
	"testing"

	"culvert.dev/internal/testnet"
	"culvert.dev/tunnel"
)

// A watchedStream is a stream in memory that notes that it was aborted. Its DATAGRAM frames
// are those that a test delivers.
type watchedStream struct {
	*pipeStream
	aborted atomic.Bool
	deliver chan func([]byte)
}

func newWatched() (s *watchedStream, far *pipeStream) {
	near, far := newPipe()
	return &watchedStream{pipeStream: near, deliver: make(chan func([]byte), 1)}, far
}

func (s *watchedStream) Abort() error {
	s.aborted.Store(true)
	return s.pipeStream.Abort()
}

func (*watchedStream) IsMultiplexed() bool { return true }

func (s *watchedStream) HandleDatagrams(deliver, _ func([]byte)) { s.deliver <- deliver }

func (s *watchedStream) SendDatagram(_, _ []byte) error { return errors.ErrUnsupported }

// TestFrames: a DATAGRAM frame of context 0 is delivered, one of another context is passed
// over, and one that breaks the rules aborts the stream.
func TestFrames(t *testing.T) {
	for _, test := range []struct {
		title   string
		frame   []byte
		want    string // "" for nothing
		aborted bool
	}{
		{"a payload", []byte{0, 'x'}, "x", false},
		{"a context in two bytes", []byte{0x40, 0, 'x'}, "x", false},
		{"another context", []byte{2, 'x'}, "", false},
		{"another context, larger than a payload", append([]byte{2}, make([]byte, maxPayload+1)...), "", false},
		{"nothing", nil, "", true},
		{"half a context", []byte{0x40}, "", true},
		{"larger than a payload", make([]byte, 1+maxPayload+1), "", true},
	} {
		s, _ := newWatched()
		r := receive(t, newConn(s, nil, nil))
		(<-s.deliver)(test.frame)
		if got := s.aborted.Load(); got != test.aborted {
			t.Errorf("%s: the stream was aborted: %t, want %t", test.title, got, test.aborted)
		}
		got := ""
		select {
		case got = <-r.datagrams:
		default:
		}
		if got != test.want {
			t.Errorf("%s: got %q, want %q", test.title, got, test.want)
		}
	}
}

// TestEndOfStream: the end of the stream is in order behind a capsule, and inside of one or
// after one that breaks the rules the stream is aborted.
func TestEndOfStream(t *testing.T) {
	wrong := errors.New("a capsuleError")
	for _, test := range []struct {
		title   string
		sent    []byte
		err     error
		aborted bool
	}{
		{"at once", nil, io.EOF, false},
		{"behind a capsule", appendCapsule(nil, []byte("one")), io.EOF, false},
		{"inside of a capsule", appendCapsule(nil, []byte("one"))[:3], wrong, true},
		{"inside of another type", capsule(7, 1, 2, 3)[:3], wrong, true},
		{"a datagram without a context", capsule(0), wrong, true},
		{"a datagram over the limit", appendCapsule(nil, make([]byte, maxPayload+1)), wrong, true},
	} {
		s, far := newWatched()
		r := receive(t, newConn(s, nil, nil))
		_, _ = far.Write(test.sent)
		_ = far.CloseWrite()
		err := <-r.ended
		if _, is := errors.AsType[capsuleError](err); is {
			err = wrong
		}
		if err != test.err || s.aborted.Load() != test.aborted {
			t.Errorf("%s: got %v, aborted %t; want %v, %t", test.title, err, s.aborted.Load(), test.err, test.aborted)
		}
	}
	s, _ := newWatched()
	r := receive(t, newConn(s, nil, nil))
	_ = r.Close()
	if err := <-r.ended; err == nil || err == io.EOF || s.aborted.Load() {
		t.Errorf("after Close: got %v, aborted %t; want an error, and false", err, s.aborted.Load())
	}
}

// TestLargestDatagram: what is larger than a UDP payload can be is lost, and the largest
// one arrives.
func TestLargestDatagram(t *testing.T) {
	s, far := newWatched()
	var dropped atomic.Uint64
	c := newConn(s, &dropped, nil)
	defer c.Close()
	for range 2 {
		if err := c.SendDatagram(make([]byte, maxPayload+1)); err != nil {
			t.Fatal(err)
		}
	}
	if n := dropped.Load(); n != 2 {
		t.Errorf("%d datagrams are lost, want 2", n)
	}
	if err := c.SendDatagram(make([]byte, maxPayload)); err != nil {
		t.Fatal(err)
	}
	if b, err := newCapsuleReader(far).next(); err != nil || len(b) != maxPayload {
		t.Errorf("got %d bytes and %v, want %d", len(b), err, maxPayload)
	}
	if !c.IsMultiplexed() || newConn(connStream{}, nil, nil).IsMultiplexed() {
		t.Error("a Conn is multiplexed where its stream is, and nowhere else")
	}
}

// TestBytesBeingWritten: bytes are counted until the stream has taken them.
func TestBytesBeingWritten(t *testing.T) {
	s, far := newWatched()
	budget := &tunnel.Budget{}
	c := newConn(s, nil, budget)
	defer c.Close()
	payload := make([]byte, 100)
	want := int64(len(appendCapsule(nil, payload)))
	if err := c.SendDatagram(payload); err != nil {
		t.Fatal(err)
	}
	testnet.Eventually(t, patience, func() bool {
		c.mu.Lock()
		defer c.mu.Unlock()
		return len(c.queue) == 0
	}, "the writer has taken the queue")
	if n := budget.Buffered(); n != want {
		t.Errorf("%d bytes are counted while the stream takes none, want %d", n, want)
	}
	if err := c.SendDatagram(payload); err != nil {
		t.Fatal(err)
	}
	if n := budget.Buffered(); n != 2*want {
		t.Errorf("%d bytes are counted with a second datagram, want %d", n, 2*want)
	}
	r := newCapsuleReader(far)
	for range 2 {
		if _, err := r.next(); err != nil {
			t.Fatal(err)
		}
	}
	testnet.Eventually(t, patience, func() bool { return budget.Buffered() == 0 }, "nothing is counted once all was taken")
}

// TestMemoryOfReader: memory is taken for bytes that have come, in steps, and that of a
// large datagram is not kept.
func TestMemoryOfReader(t *testing.T) {
	const readers = 50
	announced := append(append([]byte{0}, appendNumber(nil, maxPayload)...), make([]byte, 100)...)
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	for range readers {
		if _, err := newCapsuleReader(bytes.NewReader(announced)).next(); err != io.ErrUnexpectedEOF {
			t.Fatal(err)
		}
	}
	runtime.ReadMemStats(&after)
	if taken := (after.TotalAlloc - before.TotalAlloc) / readers; taken > 16<<10 {
		t.Errorf("%d bytes of memory for a datagram of which 100 bytes have come, want less than 16 KiB", taken)
	}
	in := appendCapsule(appendCapsule(nil, make([]byte, 60000)), []byte("small"))
	r := newCapsuleReader(bytes.NewReader(in))
	if b, err := r.next(); err != nil || len(b) != 60000 || cap(r.kept) > keptPayload {
		t.Errorf("got %d bytes and %v, and %d bytes of memory are kept, want at most %d", len(b), err, cap(r.kept), keptPayload)
	}
	if b, err := r.next(); err != nil || string(b) != "small" || cap(r.kept) == 0 {
		t.Errorf("got %q and %v, and %d bytes of memory are kept, want some", b, err, cap(r.kept))
	}
}
