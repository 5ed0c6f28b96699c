package tunnel_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"sync"
	"testing"
	"time"

	"culvert.dev/tunnel"
)

// transfer sends data from one end and checks what arrives at the other,
// without ending the stream.
func transfer(from, to net.Conn, data []byte) error {
	sent := make(chan error, 1)
	go func() {
		_, err := from.Write(data)
		sent <- err
	}()
	h := sha256.New()
	_, err := io.CopyN(h, to, int64(len(data)))
	if want := sha256.Sum256(data); err == nil && !bytes.Equal(h.Sum(nil), want[:]) {
		err = errors.New("bytes were changed on the way")
	}
	return errors.Join(err, <-sent)
}

// bothWays transfers data in both directions at once.
func bothWays(c carried, up, down []byte) error {
	back := make(chan error, 1)
	go func() { back <- transfer(c.server, c.client, down) }()
	return errors.Join(transfer(c.client, c.server, up), <-back)
}

// carryNarrow is carry over sockets whose buffers are small: the kernel's own
// grow to 32 MiB each where it is set up so, and a write that is to block would
// take long to.
func carryNarrow(t testing.TB, r *tunnel.Relay, p path) carried {
	t.Helper()
	const small = 64 << 10
	c := carry(t, r, p, func(tun *tunnel.Tunnel) {
		for _, c := range []net.Conn{tun.Client, tun.Server} {
			if o, ok := c.(opaque); ok {
				c = o.tcp
			}
			_, _ = c.(*net.TCPConn).SetReadBuffer(small), c.(*net.TCPConn).SetWriteBuffer(small)
		}
	})
	_, _ = c.client.SetReadBuffer(small), c.server.SetReadBuffer(small)
	return c
}

// finish ends both directions in order and waits for the end.
func (c carried) finish(t *testing.T) tunnel.End {
	t.Helper()
	_, _ = c.client.CloseWrite(), c.server.CloseWrite()
	for _, conn := range []*net.TCPConn{c.client, c.server} {
		if n, err := io.Copy(io.Discard, conn); n != 0 || err != nil {
			t.Errorf("at the end: %d more bytes, %v", n, err)
		}
		_ = conn.Close()
	}
	return c.wait(t)
}

func TestRelayManyBulkFlows(t *testing.T) {
	const flows, size = 16, 4 << 20
	data := random(size+flows, 10)
	shop := newSocketShop(t)
	eachPath(t, func(t *testing.T, r *tunnel.Relay, p path) {
		var wg sync.WaitGroup
		for i := range flows {
			c, err := shop.tunnel(r, p, nil)
			if err != nil {
				t.Fatal(err)
			}
			wg.Go(func() {
				if err := bothWays(c, data[i:i+size], data[flows-i:flows-i+size]); err != nil {
					t.Errorf("flow %d: %v", i, err)
				}
				if e := c.finish(t); e.Reason != tunnel.Done || e.In != size || e.Out != size {
					t.Errorf("flow %d: %+v", i, e)
				}
			})
		}
		wg.Wait()
	})
}

// TestRelayBulkThenIdleThenBulk changes pace: bulk, single bytes, a pause.
func TestRelayBulkThenIdleThenBulk(t *testing.T) {
	data := random(6<<20, 11)
	eachPath(t, func(t *testing.T, r *tunnel.Relay, p path) {
		c := carry(t, r, p, nil)
		for range 3 {
			if err := bothWays(c, data, data[:3<<20]); err != nil {
				t.Fatal(err)
			}
			for i := range 50 {
				if err := bothWays(c, data[i:i+1], data[i+1:i+2]); err != nil {
					t.Fatal(err)
				}
			}
			time.Sleep(20 * time.Millisecond) // the pause is the input
		}
		if e := c.finish(t); e.Reason != tunnel.Done || e.In != 3*(6<<20+50) || e.Out != 3*(3<<20+50) {
			t.Errorf("got %+v", e)
		}
	})
}

// TestRelayWithoutPipes has a Budget that no pipe fits into.
func TestRelayWithoutPipes(t *testing.T) {
	data := random(8<<20, 12)
	for _, p := range paths {
		budget := &tunnel.Budget{Limit: 1}
		r := &tunnel.Relay{Loops: loops(t, budget)}
		c := carry(t, r, p, nil)
		if err := bothWays(c, data, data); err != nil {
			t.Errorf("%s: %v", p.name, err)
		}
		if n := budget.Used(); n != 0 {
			t.Errorf("%s: %d descriptors taken", p.name, n)
		}
		if e := c.finish(t); e.Reason != tunnel.Done || e.In != 8<<20 || e.Out != 8<<20 {
			t.Errorf("%s: %+v", p.name, e)
		}
		_ = r.Close()
	}
}

func TestRelayPingPong(t *testing.T) {
	eachPath(t, func(t *testing.T, r *tunnel.Relay, p path) {
		c := carry(t, r, p, nil)
		const turns = 10000
		served := make(chan error, 1)
		go func() {
			b := make([]byte, 1)
			for range turns {
				if _, err := io.ReadFull(c.server, b); err != nil {
					served <- err
					return
				}
				b[0]++
				if _, err := c.server.Write(b); err != nil {
					served <- err
					return
				}
			}
			served <- nil
		}()
		b := make([]byte, 1)
		for i := range turns {
			b[0] = byte(i)
			if _, err := c.client.Write(b); err != nil {
				t.Fatal(err)
			}
			if _, err := io.ReadFull(c.client, b); err != nil || b[0] != byte(i+1) {
				t.Fatalf("turn %d: got %d, %v; want %d", i, b[0], err, byte(i+1))
			}
		}
		if err := <-served; err != nil {
			t.Fatal(err)
		}
		if e := c.finish(t); e.Reason != tunnel.Done || e.In != turns || e.Out != turns {
			t.Errorf("got %+v", e)
		}
	})
}

// TestRelaySlowReader has one direction stuck behind a slow reader while the
// other runs at full speed.
func TestRelaySlowReader(t *testing.T) {
	data := random(24<<20, 14)
	eachPath(t, func(t *testing.T, r *tunnel.Relay, p path) {
		c := carryNarrow(t, r, p)
		written := make(chan error, 1)
		go func() {
			_, err := c.client.Write(data) // more than the sockets on the way hold
			_ = c.client.CloseWrite()      // waits behind the backlog
			written <- err
		}()
		var got bytes.Buffer
		stop := make(chan struct{})
		slow := make(chan error, 1)
		go func() {
			b := make([]byte, 1000)
			for {
				select {
				case <-stop:
					_, err := io.Copy(&got, c.server)
					slow <- err
					return
				default:
				}
				n, err := c.server.Read(b)
				if err != nil {
					slow <- err
					return
				}
				got.Write(b[:n])
				time.Sleep(time.Millisecond)
			}
		}()
		for range 3 {
			if err := transfer(c.server, c.client, data[:8<<20]); err != nil {
				t.Fatal(err)
			}
		}
		if len(written) > 0 {
			t.Error("24 MiB went to a slow reader at once")
		}
		close(stop)
		if err := errors.Join(<-written, <-slow); err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(got.Bytes(), data) {
			t.Errorf("the slow reader got %d bytes, or other ones", got.Len())
		}
		if e := c.finish(t); e.Reason != tunnel.Done {
			t.Errorf("got %+v", e)
		}
	})
}

// TestRelayEndWaitsBehindBacklog ends a stream of which much is still on its
// way, with the other direction ended before.
func TestRelayEndWaitsBehindBacklog(t *testing.T) {
	data := random(64<<20, 15)
	eachPath(t, func(t *testing.T, r *tunnel.Relay, p path) {
		for _, byClient := range []bool{true, false} {
			c := carryNarrow(t, r, p)
			from, to := c.client, c.server
			if !byClient {
				from, to = to, from
			}
			_ = to.CloseWrite()
			if _, err := io.ReadAll(from); err != nil {
				t.Fatal(err)
			}
			_ = from.SetWriteDeadline(time.Now().Add(100 * time.Millisecond))
			n, err := from.Write(data)
			if !errors.Is(err, os.ErrDeadlineExceeded) {
				t.Fatalf("wrote %d bytes, %v; want it to block", n, err)
			}
			_ = from.CloseWrite()
			got, err := io.ReadAll(to)
			if err != nil || !bytes.Equal(got, data[:n]) {
				t.Errorf("byClient %v: got %d bytes, %v; want all %d and the end", byClient, len(got), err, n)
			}
			_, _ = from.Close(), to.Close()
			if e := c.wait(t); e.Reason != tunnel.Done || e.In+e.Out != int64(n) {
				t.Errorf("byClient %v: %+v, want done with %d bytes", byClient, e, n)
			}
		}
	})
}

// TestRelayAtOnce calls everything beside everything: for the race detector.
func TestRelayAtOnce(t *testing.T) {
	shop := newSocketShop(t)
	for range 20 {
		r := &tunnel.Relay{}
		var carries, others sync.WaitGroup
		ends := make(chan tunnel.End, 64)
		for i := range 8 {
			carries.Go(func() {
				c, err := shop.tunnel(r, paths[i%2], func(tun *tunnel.Tunnel) { tun.Ended = func(e tunnel.End) { ends <- e } })
				if err != nil {
					t.Error(err)
					return
				}
				_, _ = io.WriteString(c.client, "x")
				if rand.IntN(2) == 0 {
					_ = c.client.SetLinger(0)
				}
				_ = c.client.Close()
				_, _ = io.Copy(io.Discard, c.server)
				_ = c.server.Close()
			})
		}
		others.Go(func() { r.Abort(t.Context(), tunnel.Killed, 5*time.Millisecond) })
		others.Go(func() { _ = r.Open() })
		others.Go(func() {
			ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
			defer cancel()
			_ = r.Wait(ctx)
		})
		carries.Wait()
		// An Abort that takes its time meets a Close.
		others.Go(func() { r.Abort(t.Context(), tunnel.Killed, 20*time.Millisecond) })
		_ = r.Close()
		others.Wait()
		if n := len(ends); n != 8 || r.Open() != 0 {
			t.Errorf("%d ends told of 8 tunnels, %d open", n, r.Open())
		}
	}
}

// TestRelayCarriesTheDead hands over connections that are closed already.
func TestRelayCarriesTheDead(t *testing.T) {
	eachPath(t, func(t *testing.T, r *tunnel.Relay, p path) {
		for _, which := range []string{"client", "server", "both"} {
			c := carry(t, r, p, func(tun *tunnel.Tunnel) {
				if which != "server" {
					_ = tun.Client.Close()
				}
				if which != "client" {
					_ = tun.Server.Close()
				}
			})
			_, _ = c.client.Close(), c.server.Close()
			c.wait(t)
		}
		if err := r.Wait(t.Context()); err != nil || r.Open() != 0 {
			t.Errorf("%v, %d open", err, r.Open())
		}
	})
}
