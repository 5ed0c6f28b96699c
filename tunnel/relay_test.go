package tunnel_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"io"
	"math/rand/v2"
	"net"
	"runtime"
	"sync"
	"syscall"
	"testing"
	"time"

	"culvert.dev/tunnel"
)

// A path is one of the ways the Relay carries: tests of its behaviour run
// over each and expect the same.
type path struct {
	name string
	wrap func(net.Conn) net.Conn
}

var paths = []path{
	{"kernel", func(c net.Conn) net.Conn { return c }},
	{"copy", func(c net.Conn) net.Conn { return opaque{c.(*net.TCPConn)} }},
}

// opaque hides that a connection is TCP.
type opaque struct{ tcp *net.TCPConn }

func (o opaque) Read(p []byte) (int, error)         { return o.tcp.Read(p) }
func (o opaque) Write(p []byte) (int, error)        { return o.tcp.Write(p) }
func (o opaque) Close() error                       { return o.tcp.Close() }
func (o opaque) CloseWrite() error                  { return o.tcp.CloseWrite() }
func (o opaque) LocalAddr() net.Addr                { return o.tcp.LocalAddr() }
func (o opaque) RemoteAddr() net.Addr               { return o.tcp.RemoteAddr() }
func (o opaque) SetDeadline(t time.Time) error      { return o.tcp.SetDeadline(t) }
func (o opaque) SetReadDeadline(t time.Time) error  { return o.tcp.SetReadDeadline(t) }
func (o opaque) SetWriteDeadline(t time.Time) error { return o.tcp.SetWriteDeadline(t) }
func (o opaque) NetConn() net.Conn                  { return o.tcp }
func (o opaque) Abort() error                       { _ = o.tcp.SetLinger(0); return o.tcp.Close() }

// patience bounds every wait of a test that would otherwise hang.
const patience = time.Minute

// tcpPair returns two ends of one loopback connection.
func tcpPair(t testing.TB) (a, b *net.TCPConn) {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	got := make(chan net.Conn, 1)
	go func() {
		c, err := ln.Accept()
		if err != nil {
			close(got)
			return
		}
		got <- c
	}()
	c, err := net.Dial("tcp", ln.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	s, ok := <-got
	if !ok {
		t.Fatal("accept failed")
	}
	for _, c := range []net.Conn{c, s} {
		_ = c.SetDeadline(time.Now().Add(patience))
	}
	t.Cleanup(func() { c.Close(); s.Close() })
	return c.(*net.TCPConn), s.(*net.TCPConn)
}

// A carried tunnel: client and server are the outer ends, end tells how it ended.
type carried struct {
	client, server *net.TCPConn
	end            chan tunnel.End
}

func carry(t testing.TB, r *tunnel.Relay, p path, mod func(*tunnel.Tunnel)) carried {
	t.Helper()
	client, in := tcpPair(t)
	out, server := tcpPair(t)
	c := carried{client: client, server: server, end: make(chan tunnel.End, 1)}
	_ = in.SetDeadline(time.Time{})
	_ = out.SetDeadline(time.Time{})
	tun := tunnel.Tunnel{Client: p.wrap(in), Server: p.wrap(out), Ended: func(e tunnel.End) { c.end <- e }}
	if mod != nil {
		mod(&tun)
	}
	r.Carry(tun)
	return c
}

func (c carried) wait(t testing.TB) tunnel.End {
	t.Helper()
	select {
	case e := <-c.end:
		return e
	case <-time.After(patience):
		t.Fatal("the tunnel did not end")
		panic("unreachable")
	}
}

func eachPath(t *testing.T, f func(t *testing.T, r *tunnel.Relay, p path)) {
	for _, p := range paths {
		t.Run(p.name, func(t *testing.T) {
			r := &tunnel.Relay{}
			defer r.Close()
			f(t, r, p)
		})
	}
}

func random(n int, seed uint64) []byte {
	b := make([]byte, n)
	rng := rand.NewChaCha8([32]byte{byte(seed)})
	_, _ = rng.Read(b)
	return b
}

func wantReset(t *testing.T, who string, err error) {
	t.Helper()
	if !errors.Is(err, syscall.ECONNRESET) && !errors.Is(err, syscall.EPIPE) {
		t.Errorf("%s: got %v, want a reset", who, err)
	}
}

func TestRelayCarriesBothWaysAndCounts(t *testing.T) {
	eachPath(t, func(t *testing.T, r *tunnel.Relay, p path) {
		up, down := random(9<<20+17, 1), random(7<<20+3, 2)
		c := carry(t, r, p, nil)
		var wg sync.WaitGroup
		send := func(c *net.TCPConn, b []byte) {
			defer wg.Done()
			if _, err := c.Write(b); err != nil {
				t.Error(err)
			}
			_ = c.CloseWrite()
		}
		wg.Add(2)
		go send(c.client, up)
		go send(c.server, down)
		var gotDown []byte
		var derr error
		wg.Add(1)
		go func() { defer wg.Done(); gotDown, derr = io.ReadAll(c.client) }()
		gotUp, err := io.ReadAll(c.server)
		wg.Wait()
		if err != nil || derr != nil {
			t.Fatal(err, derr)
		}
		if sha256.Sum256(gotUp) != sha256.Sum256(up) || sha256.Sum256(gotDown) != sha256.Sum256(down) {
			t.Error("bytes were changed on the way")
		}
		e := c.wait(t)
		if e.Reason != tunnel.Done || e.Err != nil || e.In != int64(len(up)) || e.Out != int64(len(down)) {
			t.Errorf("end: got %+v, want done, in %d, out %d", e, len(up), len(down))
		}
	})
}

func TestRelayHalfCloseEitherWay(t *testing.T) {
	eachPath(t, func(t *testing.T, r *tunnel.Relay, p path) {
		for _, clientFirst := range []bool{true, false} {
			c := carry(t, r, p, nil)
			first, second := c.client, c.server
			if !clientFirst {
				first, second = second, first
			}
			_, _ = first.Write([]byte("question"))
			_ = first.CloseWrite()
			if got, err := io.ReadAll(second); string(got) != "question" || err != nil {
				t.Fatalf("clientFirst %v: got %q, %v", clientFirst, got, err)
			}
			reply := random(1<<20, 3)
			go func() { _, _ = second.Write(reply); _ = second.CloseWrite() }()
			if got, err := io.ReadAll(first); !bytes.Equal(got, reply) || err != nil {
				t.Errorf("clientFirst %v: reply of %d bytes, %v; want %d", clientFirst, len(got), err, len(reply))
			}
			if e := c.wait(t); e.Reason != tunnel.Done {
				t.Errorf("clientFirst %v: ended with %+v, want done", clientFirst, e)
			}
		}
	})
}

func TestRelayResetIsReset(t *testing.T) {
	eachPath(t, func(t *testing.T, r *tunnel.Relay, p path) {
		for _, sent := range []int{0, 1, 64 << 10} {
			for _, byClient := range []bool{true, false} {
				c := carry(t, r, p, nil)
				from, to := c.client, c.server
				if !byClient {
					from, to = to, from
				}
				data := random(sent, 4)
				_, _ = from.Write(data)
				got := make([]byte, sent/2)
				if _, err := io.ReadFull(to, got); err != nil {
					t.Fatal(err)
				}
				_ = from.SetLinger(0)
				_ = from.Close()
				rest, err := io.ReadAll(to)
				wantReset(t, "the other end", err)
				if got = append(got, rest...); !bytes.HasPrefix(data, got) {
					t.Errorf("%d bytes received are not a prefix of the %d sent", len(got), sent)
				}
				if e := c.wait(t); e.Reason != tunnel.Reset || e.Err == nil {
					t.Errorf("sent %d, byClient %v: ended with %+v, want reset with an error", sent, byClient, e)
				}
			}
		}
	})
}

func TestRelayPassesEarlyBytesFirst(t *testing.T) {
	eachPath(t, func(t *testing.T, r *tunnel.Relay, p path) {
		client, in := tcpPair(t)
		out, server := tcpPair(t)
		_, _ = client.Write([]byte("early"))
		conn := tunnel.NewConn(p.wrap(in))
		if err := conn.Fill(100); err != nil {
			t.Fatal(err)
		}
		end := make(chan tunnel.End, 1)
		r.Carry(tunnel.Tunnel{Client: conn, Server: p.wrap(out), Ended: func(e tunnel.End) { end <- e }})
		_, _ = client.Write([]byte(" late"))
		_ = client.CloseWrite()
		if got, err := io.ReadAll(server); string(got) != "early late" || err != nil {
			t.Errorf("got %q, %v", got, err)
		}
		_ = server.Close()
		if e := <-end; e.In != 10 {
			t.Errorf("counted %d bytes, want 10", e.In)
		}
	})
}

func TestRelayLimits(t *testing.T) {
	eachPath(t, func(t *testing.T, r *tunnel.Relay, p path) {
		c := carry(t, r, p, func(t *tunnel.Tunnel) { t.IdleTimeout, t.HalfClosedTimeout = time.Hour, 200*time.Millisecond })
		open := carry(t, r, p, func(t *tunnel.Tunnel) { t.IdleTimeout, t.HalfClosedTimeout = -1, 200*time.Millisecond })
		idle := carry(t, r, p, func(t *tunnel.Tunnel) { t.IdleTimeout = 300 * time.Millisecond })
		_ = c.client.CloseWrite()
		if _, err := io.ReadAll(c.server); err != nil {
			t.Fatal(err)
		}
		if e := c.wait(t); e.Reason != tunnel.HalfClosed {
			t.Errorf("half-closed and silent: got %+v", e)
		}
		_, err := c.client.Read(make([]byte, 1))
		wantReset(t, "half-closed client", err)
		if e := idle.wait(t); e.Reason != tunnel.Idle {
			t.Errorf("idle: got %+v", e)
		}
		_, err = idle.server.Read(make([]byte, 1))
		wantReset(t, "idle server", err)
		// The one that is open both ways is none of the half-closed limit's business.
		_, _ = open.client.Write([]byte("x"))
		if _, err := io.ReadFull(open.server, make([]byte, 1)); err != nil {
			t.Errorf("an open tunnel: %v", err)
		}
	})
}

func TestRelayHalfClosedButBusyLives(t *testing.T) {
	eachPath(t, func(t *testing.T, r *tunnel.Relay, p path) {
		c := carry(t, r, p, func(t *tunnel.Tunnel) { t.HalfClosedTimeout = time.Second })
		_ = c.client.CloseWrite()
		tick := time.NewTicker(100 * time.Millisecond)
		defer tick.Stop()
		for range 22 { // twice the limit in all
			<-tick.C
			if _, err := c.server.Write([]byte("x")); err != nil {
				t.Fatal(err)
			}
			if _, err := io.ReadFull(c.client, make([]byte, 1)); err != nil {
				t.Fatal(err)
			}
		}
		_ = c.server.CloseWrite()
		if e := c.wait(t); e.Reason != tunnel.Done {
			t.Errorf("got %+v, want done", e)
		}
	})
}

func TestRelayBackPressure(t *testing.T) {
	eachPath(t, func(t *testing.T, r *tunnel.Relay, p path) {
		c := carry(t, r, p, nil)
		// Nobody reads at the server's end: what the client can write is bounded
		// by the sockets' buffers and the Relay's, whatever the kernel lets those be.
		_ = c.client.SetWriteDeadline(time.Now().Add(500 * time.Millisecond))
		chunk, wrote, sum := random(1<<20, 5), int64(0), sha256.New()
		var err error
		for wrote < 1<<30 && err == nil {
			var n int
			n, err = c.client.Write(chunk)
			sum.Write(chunk[:n])
			wrote += int64(n)
		}
		var ne net.Error
		if !errors.As(err, &ne) || !ne.Timeout() {
			t.Fatalf("wrote %d bytes, %v: want the write to block", wrote, err)
		}
		// And all of it arrives once someone does.
		_ = c.client.CloseWrite()
		got := sha256.New()
		n, err := io.Copy(got, c.server)
		if err != nil || n != wrote || !bytes.Equal(got.Sum(nil), sum.Sum(nil)) {
			t.Errorf("got %d bytes, %v; want the %d that were written, unchanged", n, err, wrote)
		}
	})
}

func TestRelayResetWhileBlocked(t *testing.T) {
	data := random(32<<20, 6)
	eachPath(t, func(t *testing.T, r *tunnel.Relay, p path) {
		for _, byClient := range []bool{true, false} {
			c := carryNarrow(t, r, p)
			_ = c.client.SetWriteDeadline(time.Now().Add(100 * time.Millisecond))
			if n, err := c.client.Write(data); err == nil {
				t.Fatalf("%d bytes did not block", n)
			}
			if runtime.GOOS != "linux" && byClient {
				_ = c.server.Close() // a goroutine that is blocked writing hears of the reader's end only
			}
			who := c.client
			if !byClient {
				who = c.server
			}
			_ = who.SetLinger(0)
			_ = who.Close()
			if e := c.wait(t); e.Reason != tunnel.Reset {
				t.Errorf("byClient %v: got %+v, want reset", byClient, e)
			}
		}
	})
}

func TestRelayAbortIsReset(t *testing.T) {
	eachPath(t, func(t *testing.T, r *tunnel.Relay, p path) {
		var all []carried
		for range 10 {
			all = append(all, carry(t, r, p, nil))
		}
		if r.Open() != 10 {
			t.Errorf("open: got %d, want 10", r.Open())
		}
		r.Abort(context.Background(), tunnel.Drain, 50*time.Millisecond)
		for _, c := range all {
			if e := c.wait(t); e.Reason != tunnel.Drain {
				t.Errorf("got %+v, want drain", e)
			}
			_, err := c.client.Read(make([]byte, 1))
			wantReset(t, "client", err)
			_, err = c.server.Read(make([]byte, 1))
			wantReset(t, "server", err)
		}
		if err := r.Wait(context.Background()); err != nil || r.Open() != 0 {
			t.Errorf("after the abort: %v, %d open", err, r.Open())
		}
	})
}

// loops returns event loops with a budget for their pipes.
func loops(t *testing.T, b *tunnel.Budget) *tunnel.Loops {
	l := &tunnel.Loops{Budget: b}
	t.Cleanup(func() { l.Close() })
	return l
}
