package testnet

import (
	"bytes"
	"io"
	"net"
	"sync"
	"sync/atomic"
	"testing"
)

// A Recorder stands in the middle of a path and keeps the bytes that go
// through. It carries an end of stream as one, and a reset as a reset.
type Recorder struct {
	*Server

	mu    sync.Mutex
	flows []*Flow
}

// A Flow is what one connection carried.
type Flow struct {
	Up, Down []byte // from the client and to it
	Err      error  // the dial's, if that failed
}

// NewRecorder starts a Recorder in front of the TCP address target.
func NewRecorder(t testing.TB, target string) *Recorder {
	t.Helper()
	r := &Recorder{}
	r.Server = serve(t, func(_ *Server, c *net.TCPConn) bool {
		r.carry(c, target)
		return false
	})
	return r
}

func (r *Recorder) carry(client *net.TCPConn, target string) {
	f := &Flow{}
	r.mu.Lock()
	r.flows = append(r.flows, f)
	r.mu.Unlock()
	c, err := net.Dial("tcp", target)
	if err != nil {
		r.mu.Lock()
		f.Err = err
		r.mu.Unlock()
		_ = Abort(client)
		return
	}
	server := c.(*net.TCPConn)
	var (
		wg       sync.WaitGroup
		up, down atomic.Bool // the direction has ended in order
	)
	wg.Go(func() { r.pump(server, client, &f.Up, &up, &down) })
	wg.Go(func() { r.pump(client, server, &f.Down, &down, &up) })
	wg.Wait()
	_ = server.Close()
}

// pump moves one direction; ended is set before its end is passed on, and
// other is the same of the opposite direction.
func (r *Recorder) pump(dst, src *net.TCPConn, record *[]byte, ended, other *atomic.Bool) {
	buf := make([]byte, 32<<10)
	for {
		n, err := src.Read(buf)
		if n > 0 { // an empty write would be told of a reset and forget it
			r.mu.Lock()
			*record = append(*record, buf[:n]...)
			r.mu.Unlock()
			if _, werr := dst.Write(buf[:n]); werr != nil {
				err = werr
			}
		}
		switch {
		case err == io.EOF && (other.Load() || !wasReset(src)):
			ended.Store(true)
			_ = dst.CloseWrite()
			return
		case err != nil:
			_, _ = Abort(src), Abort(dst)
			return
		}
	}
}

// Flows returns a copy of what was recorded so far, in the order of the
// accepts.
func (r *Recorder) Flows() []Flow {
	r.mu.Lock()
	defer r.mu.Unlock()
	flows := make([]Flow, len(r.flows))
	for i, f := range r.flows {
		flows[i] = Flow{Up: bytes.Clone(f.Up), Down: bytes.Clone(f.Down), Err: f.Err}
	}
	return flows
}
