package connect

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"syscall"
	"testing"
	"time"

	"golang.org/x/net/nettest"

	"culvert.dev/internal/testnet"
	"culvert.dev/tunnel"
)

// The stream behind early bytes is a stream in every respect.
func TestStream(t *testing.T) {
	pair := func(t *testing.T) (*stream, *net.TCPConn) {
		ln := testnet.Listen(t)
		out := testnet.Connect(t, ln.Addr().String())
		in, err := ln.Accept()
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = in.Close() })
		return newStream(out, []byte("early")).(*stream), in.(*net.TCPConn)
	}
	t.Run("unwrap", func(t *testing.T) {
		s, _ := pair(t)
		_, _ = s.Read(make([]byte, 2))
		if c, early := s.Unwrap(); c != s.Conn || string(early) != "rly" {
			t.Errorf("got %v and %q, want the connection and %q", c, early, "rly")
		}
	})
	t.Run("close", func(t *testing.T) {
		s, _ := pair(t)
		_ = s.Close()
		if n, err := s.Read(make([]byte, 2)); n != 0 || !errors.Is(err, net.ErrClosed) {
			t.Errorf("got %d, %v after Close, want net.ErrClosed", n, err)
		}
	})
	t.Run("abort", func(t *testing.T) {
		s, peer := pair(t)
		_ = s.Abort()
		if _, err := peer.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
			t.Errorf("got %v, want a reset", err)
		}
	})
	t.Run("no half-close", func(t *testing.T) {
		a, b := net.Pipe()
		defer b.Close()
		s := newStream(a, nil).(tunnel.Stream)
		defer s.Close()
		if err := s.CloseWrite(); !errors.Is(err, errors.ErrUnsupported) {
			t.Errorf("got %v, want errors.ErrUnsupported", err)
		}
	})
	t.Run("nothing in front", func(t *testing.T) {
		s, _ := pair(t)
		if c := newStream(s.Conn, nil); c != s.Conn {
			t.Errorf("got %T, want the connection itself", c)
		}
	})
}

// TestConn runs the suite for net.Conn over dialer, protocol and carrier: as
// the connection itself and as a stream whose early bytes have been read.
func TestConn(t *testing.T) {
	for name, greet := range map[string]string{"plain": "", "early": "early"} {
		t.Run(name, func(t *testing.T) {
			nettest.TestConn(t, func() (c1, c2 net.Conn, stop func(), err error) {
				ln, err := net.Listen("tcp", "127.0.0.1:0")
				if err != nil {
					return nil, nil, nil, err
				}
				defer ln.Close()
				accepted := make(chan net.Conn, 1)
				go func() {
					defer close(accepted)
					c, err := ln.Accept()
					if err != nil {
						return
					}
					_ = (&Protocol{}).ServeConn(t.Context(), tunnel.NewConn(c), tunnel.HandlerFunc(func(_ context.Context, req *tunnel.Request) {
						if greet != "" {
							accepted <- answerWith(c, established+greet)
							return
						}
						if s, err := req.Accept(); err == nil {
							accepted <- s
						}
					}))
				}()
				c1, err = (&Dialer{Proxy: ln.Addr().String()}).DialContext(t.Context(), "tcp", "svc.test:443")
				if err != nil {
					return nil, nil, nil, err
				}
				if greet != "" {
					if _, ok := c1.(*stream); !ok {
						return nil, nil, nil, errors.New("no early bytes")
					}
					if _, err := io.ReadFull(c1, make([]byte, len(greet))); err != nil {
						return nil, nil, nil, err
					}
				}
				c2 = <-accepted
				return c1, c2, func() { _, _ = c1.Close(), c2.Close() }, nil
			})
		})
	}
}

func answerWith(c net.Conn, s string) net.Conn {
	_, _ = io.WriteString(c, s)
	return c
}

// A server that speaks first, and bytes in both directions at once.
func TestServerSpeaksFirst(t *testing.T) {
	r := &router{table: map[string]string{"ssh.test:22": testnet.Greeting(t, "SSH-2.0-x\r\n").Addr()}}
	c, err := (&Dialer{Proxy: serve(t, &Protocol{}, r).addr}).DialContext(t.Context(), "tcp", "ssh.test:22")
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(patience))
	sent := bytes.Repeat([]byte("culvert "), 1<<17)
	go func() {
		_, _ = c.Write(sent)
		_ = c.(tunnel.Stream).CloseWrite()
	}()
	got, err := io.ReadAll(c)
	if want := append([]byte("SSH-2.0-x\r\n"), sent...); err != nil || !bytes.Equal(got, want) {
		t.Errorf("got %d bytes, %v, want %d: the banner and what was sent", len(got), err, len(want))
	}
}
