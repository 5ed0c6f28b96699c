package ws

import (
	"errors"
	"io"
	"sync/atomic"
	"testing"

	"culvert.dev/tunnel"
)

// A faultyCarrier panics in each Write once it is told to.
type faultyCarrier struct {
	io.Reader
	closed chan struct{}
	over   atomic.Bool
}

func (f *faultyCarrier) Write([]byte) (int, error) { panic("a fault") }

func (f *faultyCarrier) Close() error {
	if !f.over.Swap(true) {
		close(f.closed)
	}
	return nil
}

// TestPanicInAnAnswer: a panic where a ping is answered ends the stream, and the
// Read says why.
func TestPanicInAnAnswer(t *testing.T) {
	r, w := io.Pipe()
	f := &faultyCarrier{Reader: r, closed: make(chan struct{})}
	s := NewStream(f, Server, Subprotocol, Options{Ping: -1})
	go func() {
		_, _ = w.Write(frame(0x89, true, []byte("ping")))
		<-f.closed
		_ = w.Close()
	}()
	_, err := s.Read(make([]byte, 1))
	if p, ok := errors.AsType[*tunnel.Panic](err); !ok || p.Value != "a fault" {
		t.Errorf("got %v, want the panic", err)
	}
	_ = s.Close() // which panics in a goroutine of its own
}
