package testnet

import (
	"bytes"
	"context"
	"io"
	"net"
	"strings"
	"sync"
	"testing"
	"time"
)

func TestChaosOverPlainTCP(t *testing.T) {
	dial := NewBackend(t).Direct()
	for seed := range uint64(60) {
		p := Random(seed, 2<<20)
		r := Run(t.Context(), t, dial, p)
		if p.Abort == Neither && (r.Up != p.Up || r.Down != p.Down) {
			t.Errorf("seed %d: %d and %d bytes arrived, want %d and %d", seed, r.Up, r.Down, p.Up, p.Down)
		}
	}
}

func TestChaosThroughRecorder(t *testing.T) {
	b := NewBackend(t)
	rec := NewRecorder(t, b.Addr())
	dial := b.Through(dialTo(rec.Addr()), []byte("a preamble"))
	for seed := range uint64(40) {
		Run(t.Context(), t, dial, Random(seed, 1<<20))
	}
}

func TestChaosAtOnce(t *testing.T) {
	dial := NewBackend(t).Direct()
	var wg sync.WaitGroup
	for seed := range uint64(16) {
		wg.Go(func() { Run(t.Context(), t, dial, Random(seed, 256<<10)) })
	}
	wg.Wait()
}

func dialTo(addr string) func(context.Context) (net.Conn, error) {
	return func(ctx context.Context) (net.Conn, error) {
		var d net.Dialer
		return d.DialContext(ctx, "tcp", addr)
	}
}

// through makes a Dial whose client end reaches the Backend by way of a
// relay with a fault: up changes what the client sends.
func through(t *testing.T, carry func(client, server *net.TCPConn)) Dial {
	b := NewBackend(t)
	s := Serve(t, func(c net.Conn) {
		server, err := net.Dial("tcp", b.Addr())
		if err != nil {
			t.Error(err)
			return
		}
		defer server.Close()
		carry(c.(*countedConn).tcp, server.(*net.TCPConn))
	})
	return b.Through(dialTo(s.Addr()), nil)
}

// pipe is a relay that hides resets, like most.
func pipe(up func([]byte) []byte) func(client, server *net.TCPConn) {
	return func(client, server *net.TCPConn) {
		var wg sync.WaitGroup
		copyTo := func(dst, src *net.TCPConn, change func([]byte) []byte) {
			buf := make([]byte, 64<<10)
			for {
				n, err := src.Read(buf)
				_, werr := dst.Write(change(buf[:n]))
				if err != nil || werr != nil {
					_ = dst.CloseWrite()
					return
				}
			}
		}
		wg.Go(func() { copyTo(server, client, up) })
		wg.Go(func() { copyTo(client, server, func(p []byte) []byte { return p }) })
		wg.Wait()
	}
}

func TestChaosFindsFaults(t *testing.T) {
	// Each fault strikes once, well after the token.
	once := func(at int64, change func([]byte) []byte) func([]byte) []byte {
		var n int64
		return func(p []byte) []byte {
			before := n
			n += int64(len(p))
			if before <= at && at < n && len(p) > 1 {
				return change(p)
			}
			return p
		}
	}
	plan := Plan{Seed: 3, Up: 1 << 20, Down: 1 << 20, MaxChunk: 64 << 10, Timeout: 20 * time.Second}
	over := make(chan struct{})
	for _, tt := range []struct {
		name  string
		carry func(client, server *net.TCPConn)
		plan  func(*Plan)
		want  string
	}{
		{"a byte changed", pipe(once(5000, func(p []byte) []byte { p[len(p)/2]++; return p })), nil, "server: wrong bytes at offset"},
		{"a byte lost", pipe(once(5000, func(p []byte) []byte { return p[1:] })), nil, "1 bytes were lost"},
		{"a byte too many", pipe(once(5000, func(p []byte) []byte { return append(p, 0) })), nil, "server: wrong bytes"},
		{"a chunk twice", pipe(once(5000, func(p []byte) []byte { return append(bytes.Clone(p), p...) })), nil, "bytes ago"},
		{"tail lost", pipe(once(1<<20, func([]byte) []byte { return nil })), nil, "the stream ended after"},
		{"a client's reset hidden", pipe(func(p []byte) []byte { return p }), func(p *Plan) { p.Abort, p.AbortAfter, p.Down = ClientSide, 700000, 0 }, "looks whole"},
		{"a server's reset hidden", pipe(func(p []byte) []byte { return p }), func(p *Plan) { p.Abort, p.AbortAfter, p.Up = ServerSide, 700000, 0 }, "looks whole"},
		{"stuck", func(client, server *net.TCPConn) {
			_, _ = io.CopyN(server, client, 100<<10)
			<-over
		}, func(p *Plan) { p.Timeout = 300 * time.Millisecond }, "not done after 300ms"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			p := plan
			if tt.plan != nil {
				tt.plan(&p)
			}
			f := newFake(t)
			Run(t.Context(), f, through(t, tt.carry), p)
			if tt.name == "stuck" {
				close(over)
			}
			if !strings.Contains(strings.Join(f.errors, "\n"), tt.want) {
				t.Errorf("failures = %q, want %q among them", f.errors, tt.want)
			}
		})
	}
}

func TestRandomPlansVary(t *testing.T) {
	seen := map[Side]int{}
	for seed := range uint64(200) {
		p := Random(seed, 1<<20)
		seen[p.Abort]++
		if p != Random(seed, 1<<20) {
			t.Fatalf("seed %d makes two plans", seed)
		}
		if p.Up < 1 || p.Up > 1<<20 || p.Down < 1 || p.Down > 1<<20 || p.MaxChunk < 1 || p.MaxChunk > 1<<20 {
			t.Errorf("seed %d: %+v is out of bounds", seed, p)
		}
	}
	for _, side := range []Side{Neither, ClientSide, ServerSide} {
		if seen[side] < 20 {
			t.Errorf("%d of 200 plans abort on the side %v, want more", seen[side], side)
		}
	}
}
