package tunneltest

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"runtime"
	"testing"
	"time"

	"culvert.dev/tunnel"
)

// A Dialer is a tunnel.Dialer under test and what is known of it.
type Dialer struct {
	tunnel.Dialer

	// Addr is the address that reaches the backend given to the setup.
	Addr string

	// Preamble is what the backend gets ahead of the stream, from a carrier
	// that passes on what it reads; nil means nothing.
	Preamble []byte

	// Refused are addresses that can't be reached, each with the Reason of the
	// error that says so.
	Refused map[string]tunnel.Reason
}

// TestDialer checks a Dialer: setup makes it, with all that stands between it
// and backend, which the suite accepts from. What setup starts, it ends with
// t.Cleanup.
func TestDialer(t *testing.T, setup func(t *testing.T, backend net.Listener) Dialer, opts Options) {
	start := func(t *testing.T) (Dialer, net.Listener) {
		t.Helper()
		ln, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = ln.Close() })
		return setup(t, ln), ln
	}
	before := runtime.NumGoroutine()
	t.Run("Stream", func(t *testing.T) {
		d, ln := start(t)
		turn := make(chan struct{}, 1) // one dial at a time, so that the ends belong together
		TestStream(t, func() (a, b tunnel.Stream, stop func(), err error) {
			turn <- struct{}{}
			defer func() { <-turn }()
			return connect(t.Context(), d, ln)
		}, opts)
	})
	t.Run("EitherSpeaksFirst", func(t *testing.T) {
		d, ln := start(t)
		for _, first := range []string{"client", "backend", "both"} {
			a, b, stop, err := connect(t.Context(), d, ln)
			if err != nil {
				t.Fatal(err)
			}
			_, _ = a.SetDeadline(time.Now().Add(patience)), b.SetDeadline(time.Now().Add(patience))
			if first != "backend" {
				_, _ = a.Write([]byte("hello"))
			}
			if first != "client" {
				_, _ = b.Write([]byte("welcome"))
				if err := receive(a, []byte("welcome")); err != nil {
					t.Errorf("%s first: client: %v", first, err)
				}
			}
			if first != "backend" {
				if err := receive(b, []byte("hello")); err != nil {
					t.Errorf("%s first: backend: %v", first, err)
				}
			}
			stop()
		}
	})
	t.Run("NotReused", func(t *testing.T) {
		d, ln := start(t)
		notReused(t, d, ln)
	})
	t.Run("Refused", func(t *testing.T) {
		d, _ := start(t)
		for addr, want := range d.Refused {
			ctx, cancel := context.WithTimeout(t.Context(), patience)
			c, err := d.DialContext(ctx, "tcp", addr)
			cancel()
			if err == nil {
				_ = c.Close()
			}
			var e *tunnel.Error
			if !errors.As(err, &e) || e.Reason != want {
				t.Errorf("dial %s: got %v, want a *tunnel.Error with reason %s", addr, err, want)
			}
			if err != nil && c != nil {
				t.Errorf("dial %s: a connection and an error", addr)
			}
		}
	})
	t.Run("Context", func(t *testing.T) {
		d, ln := start(t)
		ctx, cancel := context.WithCancel(t.Context())
		a, b, stop, err := connect(ctx, d, ln)
		if err != nil {
			t.Fatal(err)
		}
		defer stop()
		cancel() // is no business of a connection that stands
		_, _ = a.SetDeadline(time.Now().Add(patience)), b.SetDeadline(time.Now().Add(patience))
		_, _ = a.Write([]byte("after the context's end"))
		if err := receive(b, []byte("after the context's end")); err != nil {
			t.Error(err)
		}
		if c, err := d.DialContext(ctx, "tcp", d.Addr); err == nil {
			_ = c.Close()
			t.Error("a dial with a context that has ended worked")
		}
	})
	wantNoMore(t, before)
}

// notReused is must-never N29: each dial has a connection of the backend's to
// itself, from its beginning to its end, whoever shares the way there.
func notReused(t *testing.T, d Dialer, ln net.Listener) {
	var ends []tunnel.Stream
	for i := range 4 {
		a, b, stop, err := connect(t.Context(), d, ln) // accepts one for each dial
		if err != nil {
			t.Fatal(err)
		}
		defer stop()
		_, _ = a.SetDeadline(time.Now().Add(patience)), b.SetDeadline(time.Now().Add(patience))
		_, _ = a.Write([]byte{byte(i)})
		if err := receive(b, []byte{byte(i)}); err != nil {
			t.Errorf("tunnel %d: %v", i, err)
		}
		if ends = append(ends, b); i%2 == 0 {
			continue
		}
		_ = a.Close() // ends the backend's connection, for nobody else to have
		if _, err := b.Read(make([]byte, 1)); err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("tunnel %d was closed, and its backend read %v", i, err)
		}
	}
	for i, b := range ends {
		if i%2 == 0 { // got nothing that was another's
			_ = b.SetReadDeadline(time.Now().Add(10 * time.Millisecond))
			if n, err := b.Read(make([]byte, 1)); n > 0 || !errors.Is(err, os.ErrDeadlineExceeded) {
				t.Errorf("tunnel %d: its backend read %d bytes more and %v", i, n, err)
			}
		}
	}
}

// connect dials through d and accepts at ln.
func connect(ctx context.Context, d Dialer, ln net.Listener) (a, b tunnel.Stream, stop func(), err error) {
	accepted := make(chan net.Conn, 1)
	go func() {
		if l, ok := ln.(*net.TCPListener); ok {
			_ = l.SetDeadline(time.Now().Add(patience))
		}
		c, err := ln.Accept()
		if err != nil {
			c = nil
		}
		accepted <- c
	}()
	near, err := d.DialContext(ctx, "tcp", d.Addr)
	if err != nil {
		if l, ok := ln.(*net.TCPListener); ok {
			_ = l.SetDeadline(time.Unix(1, 0)) // wakes the Accept
		}
		if c := <-accepted; c != nil {
			_ = c.Close()
		}
		return nil, nil, nil, err
	}
	far := <-accepted
	if far == nil {
		_ = near.Close()
		return nil, nil, nil, errors.New("the dial worked, and the backend saw no connection")
	}
	if err := receive(far, d.Preamble); err != nil {
		_, _ = near.Close(), far.Close()
		return nil, nil, nil, fmt.Errorf("the preamble: %w", err)
	}
	return stream(near), stream(far), func() { _, _ = near.Close(), far.Close() }, nil
}

// stream makes a Stream of c, whose CloseWrite is c's where it has one.
func stream(c net.Conn) tunnel.Stream {
	if s, ok := c.(tunnel.Stream); ok {
		return s
	}
	return noHalfClose{c}
}

type noHalfClose struct{ net.Conn }

func (noHalfClose) CloseWrite() error { return errors.ErrUnsupported }
