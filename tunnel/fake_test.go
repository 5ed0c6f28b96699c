package tunnel_test

import (
	"bytes"
	"context"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"culvert.dev/tunnel"
)

// A fakeConn is one end of an in-memory connection with addresses of our
// choice. It tells an abort from an orderly close.
type fakeConn struct {
	net.Conn
	local, remote net.Addr

	mu      sync.Mutex // guards what follows
	aborted bool
	closed  bool
}

func (c *fakeConn) LocalAddr() net.Addr  { return c.local }
func (c *fakeConn) RemoteAddr() net.Addr { return c.remote }

// Read says net.ErrClosed after our own Close, as sockets do.
func (c *fakeConn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	if err == io.ErrClosedPipe {
		err = net.ErrClosed
	}
	return n, err
}

func (c *fakeConn) Close() error {
	c.mu.Lock()
	c.closed = true
	c.mu.Unlock()
	return c.Conn.Close()
}

func (c *fakeConn) Abort() error {
	c.mu.Lock()
	c.aborted = c.aborted || !c.closed
	c.mu.Unlock()
	return c.Close()
}

func (c *fakeConn) ending() string {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case c.aborted:
		return "aborted"
	case c.closed:
		return "closed"
	}
	return "open"
}

var listenAddr = &net.TCPAddr{IP: net.IPv4(192, 0, 2, 1), Port: 443}

// fakePair returns a client's end and the accepted end of a connection from
// the given address.
func fakePair(from string) (client net.Conn, accepted *fakeConn) {
	a, b := net.Pipe()
	return a, &fakeConn{Conn: b, local: listenAddr, remote: net.TCPAddrFromAddrPort(netip.MustParseAddrPort(from))}
}

// A memListener accepts what it is given.
type memListener struct {
	conns chan any // net.Conn or error
	done  chan struct{}
	once  sync.Once
	calls atomic.Int64
}

func newMemListener() *memListener {
	return &memListener{conns: make(chan any), done: make(chan struct{})}
}

func (l *memListener) Accept() (net.Conn, error) {
	l.calls.Add(1)
	select {
	case <-l.done:
		return nil, net.ErrClosed
	default:
	}
	select {
	case v := <-l.conns:
		if err, ok := v.(error); ok {
			return nil, err
		}
		return v.(net.Conn), nil
	case <-l.done:
		return nil, net.ErrClosed
	}
}

func (l *memListener) Close() error   { l.once.Do(func() { close(l.done) }); return nil }
func (l *memListener) Addr() net.Addr { return listenAddr }

// A lineProtocol is one whose connections begin with magic and whose preamble
// is a line. What it calls the handler with is the line.
type lineProtocol struct {
	name, magic string
	serve       func(context.Context, *tunnel.Conn, tunnel.Handler) error // nil reads a line
	sniff       func([]byte) tunnel.Verdict                               // nil compares with magic
}

func (p *lineProtocol) Name() string { return p.name }

func (p *lineProtocol) Sniff(prefix []byte) tunnel.Verdict {
	switch {
	case p.sniff != nil:
		return p.sniff(prefix)
	case bytes.HasPrefix(prefix, []byte(p.magic)):
		return tunnel.Yes
	case strings.HasPrefix(p.magic, string(prefix)):
		return tunnel.More
	}
	return tunnel.No
}

const maxLine = 1024

func (p *lineProtocol) ServeConn(ctx context.Context, c *tunnel.Conn, h tunnel.Handler) error {
	if p.serve != nil {
		return p.serve(ctx, c, h)
	}
	for {
		if line, _, ok := bytes.Cut(c.Buffered(), []byte("\n")); ok {
			req := c.NewRequest(p.name)
			req.ALPN = []string{string(line)}
			c.Discard(len(line) + 1)
			h.ServeTunnel(ctx, req)
			return nil
		}
		if err := c.Fill(maxLine); err != nil {
			return tunnel.PreambleError(c, err)
		}
	}
}

var line = &lineProtocol{name: "line"}

// An eavesdropper collects Outcomes.
type eavesdropper struct {
	mu   sync.Mutex // guards what follows
	list []tunnel.Outcome
}

func (e *eavesdropper) observe(o *tunnel.Outcome) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.list = append(e.list, *o)
}

func (e *eavesdropper) all() []tunnel.Outcome {
	e.mu.Lock()
	defer e.mu.Unlock()
	return slices.Clone(e.list)
}

// reasons returns what was told since the last call, in no order.
func (e *eavesdropper) reasons() []tunnel.Reason {
	e.mu.Lock()
	defer e.mu.Unlock()
	var rs []tunnel.Reason
	for _, o := range e.list {
		rs = append(rs, o.Reason)
	}
	e.list = nil
	slices.Sort(rs)
	return rs
}

// A gateway is a Server on a memListener.
type gateway struct {
	srv    *tunnel.Server
	ln     *memListener
	budget *tunnel.Budget
	told   eavesdropper
	log    lockedBuffer
	served chan error
}

// serve starts srv, with what it lacks added: a handler that accepts and
// closes, and protocols that read a line.
func serve(t *testing.T, srv *tunnel.Server, protocols ...tunnel.Protocol) *gateway {
	t.Helper()
	g := &gateway{srv: srv, ln: newMemListener(), served: make(chan error, 1)}
	if len(protocols) == 0 {
		protocols = []tunnel.Protocol{line}
	}
	if srv.Handler == nil {
		srv.Handler = tunnel.HandlerFunc(acceptAndClose)
	}
	if srv.Budget == nil {
		srv.Budget = &tunnel.Budget{Limit: 1 << 20}
	}
	g.budget = srv.Budget
	srv.Observe = g.told.observe
	srv.Log = slog.New(slog.NewTextHandler(&g.log, nil))
	go func() { g.served <- srv.Serve(t.Context(), tunnel.Listener{Listener: g.ln, Protocols: protocols}) }()
	return g
}

func acceptAndClose(_ context.Context, req *tunnel.Request) {
	c, err := req.Accept()
	if err == nil {
		_ = c.Close()
	}
}

// dial hands the server a connection from the given address.
func (g *gateway) dial(from string) (client net.Conn, accepted *fakeConn) {
	client, accepted = fakePair(from)
	g.ln.conns <- accepted
	return client, accepted
}

// stop shuts the server down and checks that everything was given back.
func (g *gateway) stop(t *testing.T) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	if err := g.srv.Shutdown(ctx); err != nil {
		t.Errorf("shutdown: %v", err)
	}
	if err := <-g.served; err != tunnel.ErrServerClosed {
		t.Errorf("serve returned %v, want ErrServerClosed", err)
	}
	if open, half, waiting := g.srv.Account(); open != 0 || half != 0 || waiting != 0 || g.budget.Used() != 0 {
		t.Errorf("afterwards: %d open, %d half-open, %d waiting, %d descriptors; want none", open, half, waiting, g.budget.Used())
	}
}

// wantReasons checks what was told since the last look.
func (g *gateway) wantReasons(t *testing.T, want ...tunnel.Reason) {
	t.Helper()
	slices.Sort(want)
	if got := g.told.reasons(); !slices.Equal(got, want) {
		t.Errorf("outcomes: got %q, want %q", got, want)
	}
}

// wantAlive checks that the server has not closed its end of client's connection.
func wantAlive(t *testing.T, who string, accepted *fakeConn) {
	t.Helper()
	if got := accepted.ending(); got != "open" {
		t.Errorf("%s: connection is %s, want open", who, got)
	}
}

// wantEnd waits for the end of what c receives.
func wantEnd(t *testing.T, c net.Conn) {
	t.Helper()
	if n, err := io.Copy(io.Discard, c); n != 0 || err != nil {
		t.Errorf("client received %d bytes and %v, want the end", n, err)
	}
}

type lockedBuffer struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (b *lockedBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.buf.Len() > 8<<20 { // in simulated time it would be for ever
		panic("the log has no end: " + string(p))
	}
	return b.buf.Write(p)
}

func (b *lockedBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.String()
}
