package tunnel_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"culvert.dev/internal/testnet"
	"culvert.dev/tunnel"
)

// TestAbortAtEveryOffset has clients leave after each byte of a preamble and
// of a few bytes of payload, in order and by a reset, over the whole data path.
// Before the preamble is whole the service hears nothing of them; after it, it
// gets what was sent and then the end that the client chose.
func TestAbortAtEveryOffset(t *testing.T) {
	payload := []byte("and a few bytes more")
	for _, m := range manners {
		t.Run(m.name, func(t *testing.T) {
			e := newEdge(t)
			preamble := m.preamble(t, "service.test")
			whole := append(bytes.Clone(preamble), payload...)
			for n := range len(whole) + 1 {
				for _, reset := range []bool{false, true} {
					if n == 0 && reset && runtime.GOOS == "linux" {
						continue // the kernel never tells of it: TCP_DEFER_ACCEPT
					}
					o, want := &tunnel.Outcome{}, []tunnel.Reason{tunnel.Done}
					c := e.dial(t)
					_, _ = c.Write(whole[:n])
					leave := func() {
						if reset {
							_ = c.SetLinger(0)
							_ = c.Close()
							return
						}
						_ = c.CloseWrite()
					}
					if n < len(preamble) {
						want = []tunnel.Reason{tunnel.Gone}
						switch {
						case n == 0:
							want = []tunnel.Reason{tunnel.NoHello}
						case reset: // it may overtake the bytes
							want = append(want, tunnel.NoHello)
						}
						leave()
						o = e.outcome(t)
					} else {
						carried := whole[:n]
						if m.yes != "" {
							carried = whole[len(preamble):n]
						}
						s := e.accept(t)
						got := make([]byte, len(carried))
						if k, err := io.ReadFull(s, got); err != nil || !bytes.Equal(got, carried) {
							t.Fatalf("after %d bytes the service got %d, %v; want %d", n, k, err, len(carried))
						}
						if _, err := io.ReadFull(c, make([]byte, len(m.yes))); err != nil {
							t.Fatalf("after %d bytes the client did not hear yes: %v", n, err)
						}
						leave()
						more, err := io.ReadAll(s)
						if errors.Is(err, os.ErrDeadlineExceeded) { // or the next thousand would wait as long
							t.Fatalf("after %d bytes, reset %v: the service heard of no end within %v", n, reset, patience)
						}
						if len(more) > 0 || (err != nil) != reset {
							t.Errorf("after %d bytes, reset %v: the service got %q more and %v", n, reset, more, err)
						}
						_ = s.Close()
						if reset {
							want = []tunnel.Reason{tunnel.Reset}
						}
						if o = e.outcome(t); o.BytesIn != int64(len(carried)) {
							t.Errorf("after %d bytes, reset %v: counted %d bytes in, want %d", n, reset, o.BytesIn, len(carried))
						}
					}
					if !slices.Contains(want, o.Reason) {
						t.Errorf("after %d of %d bytes, reset %v: %s (%v), want %v", n, len(preamble), reset, o.Reason, o.Err, want)
					}
					_ = c.Close()
				}
			}
			_ = e.service.SetDeadline(time.Now())
			if c, err := e.service.Accept(); err == nil {
				t.Errorf("the service was dialed for a client that had not said all: %v", c.RemoteAddr())
			}
			e.close(t)
			e.wantNoFiles(t)
		})
	}
}

// TestServiceAbortsAtEveryOffset has services abort after each byte of their
// answer, over the whole data path: once their client has all of it; at once,
// so that the reset may overtake the answer; and before they have read a thing.
// Their client gets an exact prefix of what was sent, and then a reset and no
// end.
func TestServiceAbortsAtEveryOffset(t *testing.T) {
	answer := []byte("an answer of a few bytes, and of every byte of it there is a first part")
	const heard, atOnce, deaf = "heard", "at once", "deaf"
	for _, m := range manners {
		t.Run(m.name, func(t *testing.T) {
			e := newEdge(t)
			for n := range len(answer) + 1 {
				for _, when := range []string{heard, atOnce, deaf} {
					s := &scene{client: e.dial(t)}
					want := string(answer[:n])
					if when == deaf {
						_, _ = s.client.Write(m.preamble(t, "service.test"))
						s.server = e.accept(t)
						want = m.yes + want
					} else {
						s.enter(t, m, e, "service.test")
					}
					if _, err := s.server.Write(answer[:n]); err != nil {
						t.Fatalf("%s: an answer of %d bytes: %v", when, n, err)
					}
					var got []byte
					if when == heard {
						got = make([]byte, n)
						if k, err := io.ReadFull(s.client, got); err != nil {
							t.Fatalf("%s: the client got %d of %d bytes, %v", when, k, n, err)
						}
					}
					_ = s.server.SetLinger(0)
					_ = s.server.Close()
					rest, err := io.ReadAll(s.client)
					got = append(got, rest...)
					_ = s.client.Close()
					o := e.outcome(t)
					if when == deaf && o.Reason == tunnel.DialFailed {
						// It was gone before its connection was seen to stand:
						// there was no tunnel, and the client was told so.
						if m.yes != "" && strings.HasPrefix(string(got), m.yes) {
							t.Errorf("%s, %d bytes: the client was told yes: %q", when, n, got)
						}
					} else {
						wantReset(t, fmt.Sprintf("%s, %d bytes: the client", when, n), err)
						if !strings.HasPrefix(want, string(got)) || when == heard && len(rest) > 0 {
							t.Errorf("%s: the client got %q, want the beginning of %q", when, got, want)
						}
						if o.Reason != tunnel.Reset || o.Err == nil {
							t.Errorf("%s, %d bytes: told %s (%v), want reset and whose", when, n, o.Reason, o.Err)
						}
						if passed := int64(len(got) - len(want) + n); o.BytesOut < passed || o.BytesOut > int64(n) {
							t.Errorf("%s: counted %d bytes out, of %d that were sent and %d that came", when, o.BytesOut, n, passed)
						}
					}
				}
			}
			e.close(t)
			e.wantNoFiles(t)
		})
	}
}

// A scene is a client in some state, with its service's end where there is
// one.
type scene struct {
	client, server *net.TCPConn
	poured         <-chan error // how the client's writing ended; nil where it did not write
}

// TestDrainInEveryState orders a drain, as the gateway does, while a connection
// is in each of its states. It must be over in time, for the one reason, and
// with resets.
func TestDrainInEveryState(t *testing.T) {
	data := random(64<<20, 23)
	block := func(t *testing.T, from net.Conn) {
		_ = from.SetWriteDeadline(time.Now().Add(100 * time.Millisecond))
		if n, err := from.Write(data); err == nil {
			t.Fatalf("%d bytes did not block", n)
		}
	}
	pour := func(to net.Conn) <-chan error {
		ended := make(chan error, 1)
		go func() {
			for {
				if _, err := to.Write(data[:256<<10]); err != nil {
					ended <- err
					return
				}
			}
		}()
		return ended
	}
	first := make([]byte, 1<<20)
	for _, tt := range []struct {
		name  string
		to    string // "" for a client that does not ask
		state func(t *testing.T, m manner, e *edge, s *scene)
		ended bool // the client has had its end of stream: it can't be shown a reset by a read
		asked bool // the client may be told no in its protocol's words, if they are faster than the reset
	}{
		{name: "silent", state: func(*testing.T, manner, *edge, *scene) {}},
		{name: "sniffing", state: func(t *testing.T, m manner, _ *edge, s *scene) { _, _ = s.client.Write(m.preamble(t, "a.test")[:1]) }},
		{name: "preamble", state: func(t *testing.T, m manner, _ *edge, s *scene) { _, _ = s.client.Write(m.preamble(t, "a.test")[:40]) }},
		{name: "dialing", asked: true, state: func(t *testing.T, m manner, e *edge, s *scene) {
			_, _ = s.client.Write(m.preamble(t, stuck))
			<-e.dialing
		}},
		{name: "idle", to: "a.test", state: func(*testing.T, manner, *edge, *scene) {}},
		{name: "bulk", to: "a.test", state: func(t *testing.T, _ manner, _ *edge, s *scene) {
			s.poured = pour(s.client)
			pour(s.server)
			go func() { _, _ = io.Copy(io.Discard, s.server) }()
			if _, err := io.ReadFull(s.client, first); err != nil {
				t.Error(err)
			}
		}},
		{name: "half-closed by the client", to: "a.test", state: func(t *testing.T, _ manner, _ *edge, s *scene) {
			_ = s.client.CloseWrite()
			_, _ = io.ReadAll(s.server)
		}},
		{name: "half-closed by the service", to: "a.test", ended: true, state: func(t *testing.T, _ manner, _ *edge, s *scene) {
			_ = s.server.CloseWrite()
			_, _ = io.ReadAll(s.client)
		}},
		{name: "blocked", to: "a.test", state: func(t *testing.T, _ manner, _ *edge, s *scene) { block(t, s.client) }},
		{name: "blocked both ways", to: "a.test", state: func(t *testing.T, _ manner, _ *edge, s *scene) { block(t, s.client); block(t, s.server) }},
		{name: "half-closed and blocked", to: "a.test", state: func(t *testing.T, _ manner, _ *edge, s *scene) {
			block(t, s.server)
			_ = s.server.CloseWrite()
		}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			for _, m := range manners {
				e := newEdge(t)
				s := &scene{client: e.dial(t)}
				if tt.to != "" {
					s.enter(t, m, e, tt.to)
				}
				testnet.Eventually(t, patience, func() bool { open, _, _ := e.srv.Account(); return open == 1 }, "the client is there")
				tt.state(t, m, e, s)
				e.drain(t)
				if o := e.outcome(t); o.Reason != tunnel.Drain {
					t.Errorf("%s: told %s (%v), want drain", m.name, o.Reason, o.Err)
				}
				heard, err := io.ReadAll(s.client)
				if err == nil && s.poured != nil {
					err = <-s.poured // a reset is told of once
				}
				switch {
				case tt.asked && m.yes != "" && bytes.HasPrefix(heard, []byte(m.yes)):
					t.Errorf("%s: the client was told yes", m.name)
				case tt.asked && len(heard) > 0, tt.ended:
				default:
					wantReset(t, m.name+": the client", err)
				}
				_ = s.client.Close()
				if s.server != nil {
					_ = s.server.Close()
				}
				e.close(t)
				e.wantNoFiles(t)
			}
		})
	}
}

// enter asks for a tunnel and has both its ends.
func (s *scene) enter(t *testing.T, m manner, e *edge, target string) {
	t.Helper()
	preamble := m.preamble(t, target)
	_, _ = s.client.Write(preamble)
	s.server = e.accept(t)
	if _, err := io.ReadFull(s.client, make([]byte, len(m.yes))); err != nil {
		t.Fatal(err)
	}
	if m.yes == "" {
		if _, err := io.ReadFull(s.server, make([]byte, len(preamble))); err != nil {
			t.Fatal(err)
		}
	}
}

// drain stops e in the gateway's order: no new connections, a time for what is
// left to end by itself, and then aborts.
func (e *edge) drain(t *testing.T) {
	t.Helper()
	const grace, last = 100 * time.Millisecond, 50 * time.Millisecond
	began := time.Now()
	orderly, cancel := context.WithTimeout(t.Context(), grace)
	defer cancel()
	_ = e.srv.Shutdown(orderly)
	if e.relay.Wait(orderly) != nil {
		e.relay.Abort(t.Context(), tunnel.Drain, last)
	}
	if err := e.relay.Wait(t.Context()); err != nil {
		t.Error(err)
	}
	if took := time.Since(began); took > grace+last+testnet.Deadline(time.Second) {
		t.Errorf("the drain took %v, limit %v", took, grace+last)
	}
}
