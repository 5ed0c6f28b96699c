package tunnel_test

import (
	"errors"
	"io"
	"net"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"culvert.dev/tunnel"
)

// A memStream is one end of an in-memory stream that records how it was
// ended. It half-closes if it can.
type memStream struct {
	net.Conn  // its Write side is out
	out       *io.PipeWriter
	in        *io.PipeReader
	canHalf   bool
	mu        sync.Mutex
	log       []string
	closeOnce sync.Once
}

func memPair(canHalf bool) (a, b *memStream) {
	ar, bw := io.Pipe()
	br, aw := io.Pipe()
	return &memStream{in: ar, out: aw, canHalf: canHalf}, &memStream{in: br, out: bw, canHalf: true}
}

func (s *memStream) note(what string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.log = append(s.log, what)
}

func (s *memStream) endings() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return strings.Join(s.log, " ")
}

var errAborted = errors.New("aborted by the other end")

func (s *memStream) Read(p []byte) (int, error)  { return s.in.Read(p) }
func (s *memStream) Write(p []byte) (int, error) { return s.out.Write(p) }

func (s *memStream) CloseWrite() error {
	if !s.canHalf {
		return errors.ErrUnsupported
	}
	s.note("half")
	return s.out.Close()
}

func (s *memStream) end(what string, err error) error {
	s.closeOnce.Do(func() {
		s.note(what)
		_ = s.out.CloseWithError(err)
		_ = s.in.CloseWithError(net.ErrClosed)
	})
	return nil
}

func (s *memStream) Close() error { return s.end("close", io.EOF) }
func (s *memStream) Abort() error { return s.end("abort", errAborted) }

// carryMem carries between two in-memory streams in a bubble.
func carryMem(t *testing.T, r *tunnel.Relay, halfClient, halfServer bool, mod func(*tunnel.Tunnel)) (client, server, in, out *memStream, end chan tunnel.End) {
	t.Helper()
	client, in = memPair(true)
	server, out = memPair(true)
	in.canHalf, out.canHalf = halfClient, halfServer
	end = make(chan tunnel.End, 2)
	tun := tunnel.Tunnel{Client: in, Server: out, Ended: func(e tunnel.End) { end <- e }}
	if mod != nil {
		mod(&tun)
	}
	r.Carry(tun)
	return client, server, in, out, end
}

// TestRelayLimitsByDefault walks through the limits of a tunnel, in time that
// is not real.
func TestRelayLimitsByDefault(t *testing.T) {
	type ends struct{ client, server *memStream }
	for _, tt := range []struct {
		name    string
		idle    time.Duration // the Relay's
		half    time.Duration // the Relay's
		tunnel  tunnel.Tunnel
		noHalf  bool // the service's carrier can't half-close
		do      func(e ends)
		want    tunnel.Reason
		after   time.Duration
		endings string // of our end towards the service
	}{
		{name: "idle", want: tunnel.Idle, after: time.Hour, endings: "abort"},
		{name: "relay's idle", idle: time.Minute, want: tunnel.Idle, after: time.Minute, endings: "abort"},
		{name: "tunnel's idle", idle: time.Minute, tunnel: tunnel.Tunnel{IdleTimeout: 2 * time.Minute}, want: tunnel.Idle, after: 2 * time.Minute, endings: "abort"},
		{name: "bytes re-arm", do: func(e ends) {
			for range 10 {
				time.Sleep(59 * time.Minute)
				_, _ = io.WriteString(e.client, "x")
				_, _ = io.ReadFull(e.server, make([]byte, 1))
			}
		}, want: tunnel.Idle, after: 10*59*time.Minute + time.Hour, endings: "abort"},
		{name: "half-closed", do: func(e ends) { time.Sleep(30 * time.Minute); _ = e.client.CloseWrite() }, want: tunnel.HalfClosed, after: 31 * time.Minute, endings: "half abort"},
		{name: "half-closed by the service", do: func(e ends) { _ = e.server.CloseWrite() }, want: tunnel.HalfClosed, after: time.Minute, endings: "abort"},
		{name: "half-closed and busy", do: func(e ends) {
			_ = e.client.CloseWrite()
			for range 100 {
				time.Sleep(59 * time.Second)
				_, _ = io.WriteString(e.server, "x")
				_, _ = io.ReadFull(e.client, make([]byte, 1))
			}
			_ = e.server.CloseWrite()
		}, want: tunnel.Done, after: 100 * 59 * time.Second, endings: "half close"},
		{name: "no limit half-closed", half: -1, do: func(e ends) { _ = e.client.CloseWrite() }, want: tunnel.Idle, after: time.Hour, endings: "half abort"},
		{name: "no limit at all", half: -1, idle: -1, do: func(e ends) {
			_ = e.client.CloseWrite()
			time.Sleep(5 * time.Hour)
			_ = e.server.CloseWrite()
		}, want: tunnel.Done, after: 5 * time.Hour, endings: "half close"},
		{name: "lingers without half-close", noHalf: true, do: func(e ends) {
			_ = e.client.CloseWrite()
			time.Sleep(9 * time.Second)
			_, _ = io.WriteString(e.server, "x") // a reply re-arms it
			_, _ = io.ReadFull(e.client, make([]byte, 1))
		}, want: tunnel.Done, after: 19 * time.Second, endings: "close"},
		{name: "does not cut a reply short", noHalf: true, do: func(e ends) {
			_ = e.client.CloseWrite()
			_, _ = io.WriteString(e.server, "a reply that nobody reads")
		}, want: tunnel.HalfClosed, after: time.Minute, endings: "abort"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := &tunnel.Relay{Limits: tunnel.Limits{IdleTimeout: tt.idle, HalfClosedTimeout: tt.half}}
				defer r.Close()
				start := time.Now()
				client, server, _, out, end := carryMem(t, r, true, !tt.noHalf, func(tun *tunnel.Tunnel) {
					tun.IdleTimeout, tun.HalfClosedTimeout = tt.tunnel.IdleTimeout, tt.tunnel.HalfClosedTimeout
				})
				if tt.do != nil {
					tt.do(ends{client, server})
				}
				e := <-end
				// A sweep a second finds what is over.
				if got := time.Since(start); e.Reason != tt.want || got < tt.after || got > tt.after+2*time.Second {
					t.Errorf("%s after %v, want %s after %v", e.Reason, got, tt.want, tt.after)
				}
				if out.endings() != tt.endings {
					t.Errorf("the service's stream saw %q, want %q", out.endings(), tt.endings)
				}
				if err := r.Wait(t.Context()); err != nil || len(end) != 0 {
					t.Errorf("afterwards: %v, %d more ends", err, len(end))
				}
			})
		})
	}
}

// A torn is a socket that was reset: its writer is told, a moment late, and
// its reader then finds an end of stream.
type torn struct {
	*memStream
	reset chan struct{}
}

func (s *torn) Read([]byte) (int, error) { <-s.reset; return 0, io.EOF }

func (s *torn) Write([]byte) (int, error) {
	close(s.reset)
	time.Sleep(2 * time.Millisecond) // the time it takes a goroutine to run
	return 0, syscall.ECONNRESET
}

func TestRelayResetHeardByWriterOnly(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := &tunnel.Relay{}
		defer r.Close()
		client, in := memPair(true)
		_, out := memPair(true)
		end := make(chan tunnel.End, 1)
		r.Carry(tunnel.Tunnel{Client: in, Server: &torn{memStream: out, reset: make(chan struct{})}, Ended: func(e tunnel.End) { end <- e }})
		_, _ = io.WriteString(client, "x")
		if _, err := io.ReadAll(client); err != errAborted {
			t.Errorf("the client read %v, want the abort", err)
		}
		if e := <-end; e.Reason != tunnel.Reset || !strings.Contains(e.Err.Error(), "reset") || in.endings() != "abort" {
			t.Errorf("ended with %+v, the client's stream saw %q; want a reset and no end of stream", e, in.endings())
		}
	})
}

// A layered stream knows that it is broken, and what it stands on does not.
type layered struct {
	*memStream
	broken atomic.Bool
}

func (l *layered) NetConn() net.Conn { return l.memStream }

func (l *layered) Broken() error {
	if l.broken.Load() {
		return syscall.ECONNRESET
	}
	return nil
}

// TestRelayBrokenBehindWrite: a tunnel ends whose client is gone while its bytes wait for a
// service that does not read.
func TestRelayBrokenBehindWrite(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := &tunnel.Relay{}
		defer r.Close()
		client, in := memPair(true)
		_, out := memPair(true)
		from, end := &layered{memStream: in}, make(chan tunnel.End, 1)
		r.Carry(tunnel.Tunnel{Client: from, Server: out, Ended: func(e tunnel.End) { end <- e }})
		_, _ = io.WriteString(client, "x")
		time.Sleep(time.Minute)
		select {
		case e := <-end:
			t.Fatalf("ended with %+v while the client was there", e)
		default:
		}
		from.broken.Store(true)
		if e := <-end; e.Reason != tunnel.Reset {
			t.Errorf("ended with %+v, want a reset", e)
		}
	})
}

// TestRelayHalfCloseDuringBlockedWrite checks that the end of one direction
// does not wait for the other.
func TestRelayHalfCloseDuringBlockedWrite(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := &tunnel.Relay{}
		defer r.Close()
		client, server, _, _, end := carryMem(t, r, true, true, nil)
		go func() { _, _ = io.WriteString(server, "unread"); _ = server.CloseWrite() }()
		synctest.Wait()
		start := time.Now()
		_ = client.CloseWrite()
		if _, err := io.ReadAll(server); err != nil || time.Since(start) > 20*time.Millisecond {
			t.Errorf("the end took %v, %v", time.Since(start), err)
		}
		if got, err := io.ReadAll(client); string(got) != "unread" || err != nil {
			t.Errorf("got %q, %v", got, err)
		}
		if e := <-end; e.Reason != tunnel.Done {
			t.Errorf("got %+v", e)
		}
	})
}

// TestRelayCopyErrors checks which failures of a stream are its routine end.
func TestRelayCopyErrors(t *testing.T) {
	for _, tt := range []struct {
		err  error
		want tunnel.Reason
	}{
		{io.EOF, tunnel.Done},
		{net.ErrClosed, tunnel.Done},
		{io.ErrUnexpectedEOF, tunnel.Reset},
		{syscall.ECONNRESET, tunnel.Reset},
		{os.ErrDeadlineExceeded, tunnel.Reset},
	} {
		synctest.Test(t, func(t *testing.T) {
			r := &tunnel.Relay{}
			defer r.Close()
			client, server, in, _, end := carryMem(t, r, true, true, nil)
			_ = client.out.CloseWithError(tt.err)
			synctest.Wait()
			if tt.want == tunnel.Done {
				_ = server.CloseWrite()
			}
			if e := <-end; e.Reason != tt.want || (e.Err == nil) != (tt.want == tunnel.Done) {
				t.Errorf("%v: ended with %+v, want %s", tt.err, e, tt.want)
			}
			if last := in.endings(); tt.want == tunnel.Reset && last != "abort" {
				t.Errorf("%v: the client's stream saw %q, want an abort alone", tt.err, last)
			}
		})
	}
}

// wrapper is a Stream that has read ahead.
type wrapper struct {
	net.Conn
	early []byte
}

func (w *wrapper) Unwrap() (net.Conn, []byte) { return w.Conn, w.early }
func (w *wrapper) CloseWrite() error          { return errors.ErrUnsupported }

func TestRelayUnwrapsInOrder(t *testing.T) {
	eachPath(t, func(t *testing.T, r *tunnel.Relay, p path) {
		c := carry(t, r, p, func(tun *tunnel.Tunnel) {
			tun.Client = &wrapper{&wrapper{&wrapper{tun.Client, []byte("3 ")}, []byte("2 ")}, []byte("1 ")}
			tun.Server = &wrapper{&wrapper{tun.Server, []byte("b ")}, []byte("a ")}
		})
		_, _ = io.WriteString(c.client, "4")
		_, _ = io.WriteString(c.server, "c")
		_, _ = c.client.CloseWrite(), c.server.CloseWrite()
		if got, err := io.ReadAll(c.server); string(got) != "1 2 3 4" || err != nil {
			t.Errorf("service got %q, %v", got, err)
		}
		if got, err := io.ReadAll(c.client); string(got) != "a b c" || err != nil {
			t.Errorf("client got %q, %v", got, err)
		}
		if e := c.wait(t); e.In != 7 || e.Out != 5 {
			t.Errorf("counted %d in, %d out; want 7 and 5", e.In, e.Out)
		}
	})
}

// TestRelayEarlyBytesBeyondTheSocket hands over more than a socket takes.
func TestRelayEarlyBytesBeyondTheSocket(t *testing.T) {
	early := random(8<<20, 9)
	eachPath(t, func(t *testing.T, r *tunnel.Relay, p path) {
		c := carry(t, r, p, func(tun *tunnel.Tunnel) { tun.Client = &wrapper{tun.Client, slices.Clone(early)} })
		_, _ = io.WriteString(c.client, "late")
		_ = c.client.CloseWrite()
		_, _ = io.WriteString(c.server, "meanwhile") // the other direction is not held up
		if _, err := io.ReadFull(c.client, make([]byte, 9)); err != nil {
			t.Error(err)
		}
		got, err := io.ReadAll(c.server)
		if err != nil || len(got) != len(early)+4 || !slices.Equal(got[:len(early)], early) {
			t.Errorf("got %d bytes, %v; want %d", len(got), err, len(early)+4)
		}
		_ = c.server.Close()
		if e := c.wait(t); e.Reason != tunnel.Done || e.In != int64(len(early)+4) {
			t.Errorf("got %+v", e)
		}
	})
}

// TestRelayShorterLimitThanOthers checks that a new tunnel's limit holds
// beside older ones that need no looking after for long.
func TestRelayShorterLimitThanOthers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := &tunnel.Relay{}
		defer r.Close()
		carryMem(t, r, true, true, nil)
		time.Sleep(1100 * time.Millisecond)
		start := time.Now()
		_, _, _, _, end := carryMem(t, r, true, true, func(tun *tunnel.Tunnel) { tun.IdleTimeout = 100 * time.Millisecond })
		if e := <-end; e.Reason != tunnel.Idle || time.Since(start) > 130*time.Millisecond {
			t.Errorf("%s after %v, want idle after 100 ms and a quarter at most", e.Reason, time.Since(start))
		}
	})
}
