package tunnel_test

import (
	"context"
	"io"
	"net"
	"testing"
	"testing/synctest"
	"time"

	"culvert.dev/tunnel"
)

// A capital is a layer whose bytes are those below, without the highest bit.
type capital struct{ net.Conn }

func (c capital) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	for i := range p[:n] {
		p[i] &^= 0x80
	}
	return n, err
}

func (c capital) CloseWrite() error { return nil }

// nesting is a protocol of one byte, '^', with others inside.
func nesting(inner ...tunnel.Protocol) *lineProtocol {
	return &lineProtocol{name: "nest", magic: "^", serve: func(ctx context.Context, c *tunnel.Conn, h tunnel.Handler) error {
		if len(c.Buffered()) == 0 {
			if err := c.Fill(1); err != nil {
				return tunnel.PreambleError(c, err)
			}
		}
		c.Discard(1)
		return tunnel.ServeInner(ctx, c.Nest(capital{c}, tunnel.EndedTLS{ServerName: tunnel.MustParseName("a.test"), Peer: tunnel.Peer{ID: "alice", Method: "test"}}), inner, h)
	}}
}

// high sets the highest bit, as what is inside has it.
func high(s string) []byte {
	b := []byte(s)
	for i := range b {
		b[i] |= 0x80
	}
	return b
}

// What is inside has the place, the source, the start and the deadline of what
// it came in.
func TestNest(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		start := time.Now()
		var got *tunnel.Request
		var stream tunnel.Stream
		srv := &tunnel.Server{Handler: tunnel.HandlerFunc(func(_ context.Context, req *tunnel.Request) {
			got = req
			stream, _ = req.Accept()
		})}
		g := serve(t, srv, nesting(&lineProtocol{name: "one", magic: "A"}, &lineProtocol{name: "two", magic: "B"}))
		client, accepted := g.dial("198.51.100.7:1000")
		time.Sleep(time.Second)
		_, _ = client.Write(append([]byte("^"), high("Bee\nrest")...))
		synctest.Wait()
		if got == nil || got.Proto != "two" || got.ALPN[0] != "Bee" {
			t.Fatalf("request %+v, want one of two for Bee", got)
		}
		if got.Source.String() != "198.51.100.7:1000" || got.LocalPort != 443 || got.Listener != listenAddr.String() || !got.Start.Equal(start) || got.Peer.ID != "alice" {
			t.Errorf("request %+v, want it to be of the connection that it came in, and alice's", got)
		}
		if got.TLS == nil || got.TLS.ServerName.String() != "a.test" || got.RequireTLS {
			t.Errorf("request %+v of %+v, want it inside of TLS for a.test", got, got.TLS)
		}
		rest := make([]byte, 4)
		if _, err := io.ReadFull(stream, rest); err != nil || string(rest) != "rest" {
			t.Errorf("read %q and %v, want what follows the preamble", rest, err)
		}
		// It was handed on: the Server leaves it, and what it came in.
		wantAlive(t, "handed on", accepted)
		if open, half, waiting := g.srv.Account(); half != 0 || waiting != 0 || open != 0 {
			t.Errorf("%d open, %d half-open, %d waiting; want none", open, half, waiting)
		}
		_, _ = stream.Close(), client.Close()

		for _, tt := range []struct {
			send string
			why  tunnel.Reason
		}{
			{"", tunnel.NoHello},
			{"B", tunnel.Gone},
			{"X", tunnel.BadPreamble},
		} {
			client, accepted := g.dial("198.51.100.7:1000")
			go func() { // nobody may read all of it
				_, _ = client.Write(append([]byte("^"), high(tt.send)...))
				if tt.why != tunnel.BadPreamble {
					_ = client.Close()
				}
			}()
			synctest.Wait()
			if accepted.ending() == "open" {
				t.Errorf("%q inside: the connection is open", tt.send)
			}
			g.wantReasons(t, tt.why)
			_ = client.Close()
		}

		// One deadline for both.
		client, accepted = g.dial("198.51.100.7:1000")
		_, _ = client.Write([]byte("^"))
		time.Sleep(tunnel.DefaultHandshakeTimeout - time.Second)
		_, _ = client.Write(high("B"))
		synctest.Wait()
		wantAlive(t, "in time", accepted)
		time.Sleep(time.Second + 200*time.Millisecond)
		synctest.Wait()
		if accepted.ending() == "open" {
			t.Error("the time inside did not count from the beginning")
		}
		g.wantReasons(t, tunnel.HelloTimeout)
		_ = client.Close()
		g.stop(t)
	})
}

// A last answer inside has its time, whatever the deadline of the preamble.
func TestNestedCloseWithMessage(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		refuse := &lineProtocol{name: "refuse", serve: func(_ context.Context, c *tunnel.Conn, _ tunnel.Handler) error {
			_ = c.Fill(1)
			time.Sleep(tunnel.DefaultHandshakeTimeout - 200*time.Millisecond)
			c.CloseWithMessage([]byte("no"))
			return tunnel.Refusef(tunnel.Denied, "no")
		}}
		g := serve(t, &tunnel.Server{}, nesting(refuse))
		client, accepted := g.dial("198.51.100.7:1000")
		_, _ = client.Write([]byte("^!"))
		got := make([]byte, 2)
		if _, err := io.ReadFull(client, got); err != nil || string(got) != "no" {
			t.Errorf("heard %q and %v, want the answer", got, err)
		}
		time.Sleep(500 * time.Millisecond)
		wantAlive(t, "while the answer is on its way", accepted)
		time.Sleep(time.Second)
		_ = client.Close()
		synctest.Wait()
		g.wantReasons(t, tunnel.Denied)
		g.stop(t)
	})
}
