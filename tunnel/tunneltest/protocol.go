package tunneltest

import (
	"bytes"
	"context"
	"io"
	"net"
	"net/netip"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"culvert.dev/tunnel"
)

// A Preamble is what a client begins with and what is to be made of it.
type Preamble struct {
	Title string // of the subtest
	Bytes []byte // complete: with the last byte the request can be made, and not before

	// The request.
	Name tunnel.Name
	Addr netip.Addr
	Port uint16
	ALPN []string

	// Passed says that the preamble is the start of the stream, as a
	// ClientHello is; otherwise the stream begins behind it.
	Passed bool

	// Wrap and Unwrap are for protocols that frame what they carry: Wrap makes
	// what the client sends of the stream's bytes, and Unwrap finds those in
	// all that the client has heard, with over when its stream has ended and
	// the connection has not, which may carry others. The client then leaves.
	// Both nil means that bytes are sent as they are.
	Wrap   func(stream []byte) []byte
	Unwrap func(heard []byte) (stream []byte, over bool)
}

// wrap is Wrap where there is one.
func (p *Preamble) wrap(b []byte) []byte {
	if p.Wrap == nil {
		return b
	}
	return p.Wrap(b)
}

// hear reads all that c says, until its end or the stream's.
func (p *Preamble) hear(c net.Conn) (stream []byte, err error) {
	if p.Unwrap == nil {
		return io.ReadAll(c)
	}
	var heard []byte
	for buf := make([]byte, 4096); ; {
		n, err := c.Read(buf)
		heard = append(heard, buf[:n]...)
		stream, over := p.Unwrap(heard)
		if over {
			return stream, c.Close()
		}
		switch {
		case err == io.EOF:
			return stream, nil
		case err != nil:
			return stream, err
		}
	}
}

// TestProtocol checks that p makes the request of each preamble, however it is
// cut; that no prefix is enough and none is too much; that bytes behind the
// preamble are kept; that p leaves the Server's deadline alone; and that every
// refusal ends the connection.
func TestProtocol(t *testing.T, p tunnel.Protocol, preambles ...Preamble) {
	if p.Name() == "" || p.Name() != strings.ToLower(p.Name()) {
		t.Errorf("protocol name %q, want a lower-case word", p.Name())
	}
	before := runtime.NumGoroutine()
	for _, pre := range preambles {
		t.Run(pre.Title, func(t *testing.T) {
			s := &protocolSuite{p, pre}
			t.Run("Sniff", s.sniff)
			t.Run("Whole", func(t *testing.T) { s.request(t, 1<<20) })
			t.Run("ByteByByte", func(t *testing.T) { s.request(t, 1) })
			t.Run("Prefix", s.prefixes)
			t.Run("Deadline", s.deadline)
			t.Run("Refuse", s.refuse)
		})
	}
	wantNoMore(t, before)
}

const (
	early = "early bytes"
	reply = "the service's reply"
)

type protocolSuite struct {
	p   tunnel.Protocol
	pre Preamble
}

// sniff asks of every prefix: a Yes stays one, and there is no No.
func (s *protocolSuite) sniff(t *testing.T) {
	sure := false
	for n := 1; n <= len(s.pre.Bytes); n++ {
		prefix := bytes.Clone(s.pre.Bytes[:n])
		v := s.p.Sniff(prefix)
		if again := s.p.Sniff(prefix); v != again || !bytes.Equal(prefix, s.pre.Bytes[:n]) {
			t.Fatalf("Sniff is not pure: %d bytes, %v and then %v", n, v, again)
		}
		if v == tunnel.No || sure && v != tunnel.Yes {
			t.Fatalf("%d bytes: got %v, after Yes: %v", n, v, sure)
		}
		sure = sure || v == tunnel.Yes
	}
	if len(s.pre.Bytes) > 0 && !sure {
		t.Error("the whole preamble is not recognised")
	}
}

// A watched is the server's end of a connection in memory. It notes deadlines
// that are moved, and can half-close.
type watched struct {
	net.Conn
	mu     sync.Mutex // guards what follows
	moved  int
	closed bool
}

func (w *watched) note() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.moved++
}

func (w *watched) SetDeadline(d time.Time) error     { w.note(); return w.Conn.SetDeadline(d) }
func (w *watched) SetReadDeadline(d time.Time) error { w.note(); return w.Conn.SetReadDeadline(d) }
func (w *watched) CloseWrite() error                 { return w.Close() }

func (w *watched) Close() error {
	w.mu.Lock()
	w.closed = true
	w.mu.Unlock()
	return w.Conn.Close()
}

func (w *watched) state() (moved int, closed bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.moved, w.closed
}

// serve runs ServeConn on one end of a connection whose preamble has the given
// time, and the client on the other. It returns what ServeConn returned and
// how often it called h.
func (s *protocolSuite) serve(t *testing.T, limit time.Duration, client func(net.Conn), h tunnel.HandlerFunc) (calls int, w *watched, err error) {
	t.Helper()
	near, far := net.Pipe()
	w = &watched{Conn: far}
	_ = near.SetDeadline(time.Now().Add(patience))
	_ = far.SetReadDeadline(time.Now().Add(limit))
	var wg sync.WaitGroup
	wg.Go(func() { client(near) })
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	err = s.p.ServeConn(ctx, tunnel.NewConn(w), tunnel.HandlerFunc(func(ctx context.Context, req *tunnel.Request) {
		calls++
		if moved, _ := w.state(); moved > 0 {
			t.Errorf("the read deadline was moved %d times before the request: it is the Server's", moved)
		}
		h(ctx, req)
	}))
	_ = far.Close()
	wg.Wait()
	_ = near.Close()
	return calls, w, err
}

// request sends the preamble and a little more, in chunks, and checks the
// request and the stream.
func (s *protocolSuite) request(t *testing.T, chunk int) {
	var heard []byte
	calls, _, err := s.serve(t, patience, func(c net.Conn) {
		listened := make(chan struct{})
		go func() { // yes may have words
			defer close(listened)
			heard, _ = s.pre.hear(c)
		}()
		for b := append(bytes.Clone(s.pre.Bytes), s.pre.wrap([]byte(early))...); len(b) > 0; {
			n, err := c.Write(b[:min(chunk, len(b))])
			if b = b[n:]; err != nil {
				t.Errorf("with %d bytes to send: %v", len(b), err)
				break
			}
		}
		<-listened
	}, func(_ context.Context, req *tunnel.Request) {
		if req.Name != s.pre.Name || req.Addr != s.pre.Addr || req.Port != s.pre.Port || !slices.Equal(req.ALPN, s.pre.ALPN) || req.Proto != s.p.Name() {
			t.Errorf("request of %s for %q, address %v, port %d, ALPN %q; want %s for %q, %v, %d, %q",
				req.Proto, req.Name, req.Addr, req.Port, req.ALPN, s.p.Name(), s.pre.Name, s.pre.Addr, s.pre.Port, s.pre.ALPN)
		}
		stream, err := req.Accept()
		if err != nil {
			t.Errorf("Accept: %v", err)
			return
		}
		want := []byte(early)
		if s.pre.Passed {
			want = append(bytes.Clone(s.pre.Bytes), early...)
		}
		if err := receive(stream, want); err != nil {
			t.Errorf("the stream's first bytes: %v", err)
		}
		_, _ = stream.Write([]byte(reply))
		_ = stream.Close()
	})
	if err != nil || calls != 1 {
		t.Errorf("ServeConn: %v after %d calls of the handler; want nil after one", err, calls)
	}
	if !bytes.HasSuffix(heard, []byte(reply)) {
		t.Errorf("the client heard %q, want it to end with the service's reply", heard)
	}
}

// prefixes has the client leave after every proper prefix.
func (s *protocolSuite) prefixes(t *testing.T) {
	for n := range len(s.pre.Bytes) {
		calls, _, err := s.serve(t, patience, func(c net.Conn) {
			_, _ = c.Write(s.pre.Bytes[:n])
			_ = c.Close()
		}, func(_ context.Context, req *tunnel.Request) { req.Refuse(io.EOF) })
		want := tunnel.Gone
		if n == 0 {
			want = tunnel.NoHello
		}
		if got := tunnel.ReasonOf(err); got != want || calls != 0 {
			t.Fatalf("client left after %d of %d bytes: got %s, %v, and %d requests; want %s and none", n, len(s.pre.Bytes), got, err, calls, want)
		}
	}
}

// deadline has the client stop before the last byte.
func (s *protocolSuite) deadline(t *testing.T) {
	for _, n := range []int{0, 1, len(s.pre.Bytes) - 1} {
		if n < 0 || n >= len(s.pre.Bytes) {
			continue
		}
		calls, _, err := s.serve(t, 20*time.Millisecond, func(c net.Conn) {
			_, _ = c.Write(s.pre.Bytes[:n])
			_, _ = io.Copy(io.Discard, c)
		}, func(_ context.Context, req *tunnel.Request) { req.Refuse(io.EOF) })
		if got := tunnel.ReasonOf(err); got != tunnel.HelloTimeout || calls != 0 {
			t.Errorf("client stopped after %d bytes: got %s, %v, and %d requests; want %s and none", n, got, err, calls, tunnel.HelloTimeout)
		}
	}
}

// refuse refuses with every reason there is.
func (s *protocolSuite) refuse(t *testing.T) {
	for _, why := range tunnel.Reasons() {
		calls, w, err := s.serve(t, patience, func(c net.Conn) {
			go func() { _, _ = c.Write(s.pre.Bytes) }()
			if _, err := s.pre.hear(c); err != nil {
				t.Errorf("%s: the client waits for its answer: %v", why, err)
			}
		}, func(_ context.Context, req *tunnel.Request) {
			req.Refuse(tunnel.Refusef(why, "refused to see what happens"))
		})
		if _, closed := w.state(); !closed || err != nil || calls != 1 {
			t.Errorf("%s: closed %v, ServeConn %v, %d calls; want it closed, nil and one", why, closed, err, calls)
		}
	}
}
