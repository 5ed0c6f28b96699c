package h2

import (
	"context"
	"errors"
	"net"
	"sync"
	"testing"

	"culvert.dev/internal/testnet"
	"culvert.dev/tunnel"
	"culvert.dev/tunnel/tunneltest"
)

// A pausing dialer has connections on which nothing comes while they are paused.
type pausing struct {
	mu    sync.Mutex // guards what follows
	conns []*silentConn
	err   error // of further dials
}

type silentConn struct {
	net.Conn
	mu     sync.Mutex
	resume chan struct{} // nil while it is not paused
}

// DialContext implements tunnel.Dialer.
func (p *pausing) DialContext(ctx context.Context, network, addr string) (net.Conn, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.err != nil {
		return nil, p.err
	}
	c, err := new(net.Dialer).DialContext(ctx, network, addr)
	if err != nil {
		return nil, err
	}
	one := &silentConn{Conn: c}
	p.conns = append(p.conns, one)
	return one, nil
}

func (p *pausing) dials() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.conns)
}

// pause pauses a connection.
func (c *silentConn) pause() (resume func()) {
	c.mu.Lock()
	defer c.mu.Unlock()
	paused := make(chan struct{})
	c.resume = paused
	return sync.OnceFunc(func() { close(paused) })
}

func (c *silentConn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	c.mu.Lock()
	resume := c.resume
	c.mu.Unlock()
	if resume != nil && err == nil {
		<-resume
	}
	return n, err
}

// A request on a connection that has become silent goes to a new one, and so do those that
// follow. Where no new one can be made, the answer is waited for.
func TestSilentConnection(t *testing.T) {
	g := serve(t, tunneltest.Table{"svc:1": testnet.Echo(t).Addr()}, &Protocol{})
	way := &pausing{}
	d := &Dialer{Proxy: g.Addr, Dialer: way}
	defer d.Close()
	dial := func() error {
		ctx, cancel := context.WithTimeout(t.Context(), patience/2)
		defer cancel()
		c, err := d.DialContext(ctx, "tcp", "svc:1")
		if err == nil {
			_ = c.Close()
		}
		return err
	}
	if err := dial(); err != nil {
		t.Fatal(err)
	}
	resume := way.conns[0].pause()
	defer resume()
	for range 3 {
		if err := dial(); err != nil {
			t.Errorf("the first connection is silent: %v", err)
		}
	}
	if n := way.dials(); n != 2 {
		t.Errorf("%d connections were made, want 2", n)
	}

	// The second one is silent, and no third one can be made.
	unreachable := errors.New("the network is down")
	way.mu.Lock()
	way.err = unreachable
	way.mu.Unlock()
	again := way.conns[1].pause()
	defer again()
	answered := make(chan error, 1)
	go func() { answered <- dial() }()
	testnet.Eventually(t, patience, func() bool { return d.Conns() == 0 }, "the connection is left")
	again()
	if err := <-answered; err != nil {
		t.Errorf("a request that is answered late: %v", err)
	}
	if err := dial(); !errors.Is(err, unreachable) || tunnel.ReasonOf(err) != tunnel.DialFailed {
		t.Errorf("a request without a connection: got %v, want %v", err, unreachable)
	}
}
