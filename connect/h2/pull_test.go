package h2

import (
	"bytes"
	"errors"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"culvert.dev/internal/testnet"
)

// fillFrom returns what moves up to most bytes of *rest into the slices of a source.
func fillFrom(rest *[]byte, most int) func(run [][]byte) int {
	return func(run [][]byte) (n int) {
		for _, p := range run {
			m := copy(p, (*rest)[:min(len(*rest), most-n)])
			*rest = (*rest)[m:]
			n += m
		}
		return n
	}
}

// TestWriteFrom: the bytes of a WriteFrom and of its source arrive in order, however much the
// source has each time, in windows that others share.
func TestWriteFrom(t *testing.T) {
	makePipe := pipes(t, &Protocol{})
	const total = 4 << 20
	var all sync.WaitGroup
	defer all.Wait()
	for i := range 5 {
		a, b, stop, err := makePipe()
		if err != nil {
			t.Fatal(err)
		}
		all.Go(func() {
			defer stop()
			near, far := a.(*Stream), b.(*Stream)
			want := make([]byte, total)
			_, _ = rand.NewChaCha8([32]byte{byte(i)}).Read(want)
			var sending sync.WaitGroup
			defer sending.Wait()
			sending.Go(func() {
				defer func() { _ = far.CloseWrite() }()
				for rest := want; len(rest) > 0; {
					first := rest[:min(len(rest), 1+rand.IntN(5<<10))]
					rest = rest[len(first):]
					pulls := rand.IntN(4)
					n, err := far.WriteFrom(first, func(run [][]byte) int {
						most := 100 << 10 // as much as there is room for
						if pulls--; pulls < 0 {
							most = rand.IntN(5 << 10)
						}
						return fillFrom(&rest, most)(run)
					})
					if n != len(first) || err != nil {
						t.Errorf("WriteFrom returned %d and %v, want %d", n, err, len(first))
						return
					}
				}
			})
			_ = near.SetReadDeadline(time.Now().Add(patience))
			got, err := io.ReadAll(near)
			if err != nil || !bytes.Equal(got, want) {
				t.Errorf("got %d bytes and %v, want %d as they were sent", len(got), err, total)
			}
		})
	}
}

// TestSourceOfNothing: a source without bytes sends no frame and takes no part of the windows.
func TestSourceOfNothing(t *testing.T) {
	a, b, stop, err := pipes(t, &Protocol{})()
	if err != nil {
		t.Fatal(err)
	}
	defer stop()
	near, far := a.(*Stream), b.(*Stream)
	_ = far.SetWriteDeadline(time.Now().Add(patience))
	_ = near.SetReadDeadline(time.Now().Add(patience))
	buf := make([]byte, 10)
	for i := range 2 * connWindow / streamWindow { // each has room for more than a window
		if n, err := far.WriteFrom([]byte("x"), func([][]byte) int { return 0 }); n != 1 || err != nil {
			t.Fatalf("WriteFrom %d returned %d and %v, want 1", i, n, err)
		}
		if n, err := near.Read(buf); n != 1 || err != nil {
			t.Fatalf("Read %d returned %d and %v, want 1", i, n, err)
		}
	}
	for _, s := range []*Stream{near, far} {
		s.c.mu.Lock()
		if s == far && s.allowed > streamWindow || s.allowed < 0 {
			t.Errorf("%d bytes may be sent, want at most %d", s.allowed, streamWindow)
		}
		s.c.mu.Unlock()
	}
}

// TestStreamEndsDuringPull: what ends a stream while its source is read ends the WriteFrom, after
// which the source is not called again.
func TestStreamEndsDuringPull(t *testing.T) {
	for name, tt := range map[string]struct {
		end  func(s *Stream)
		want error
	}{
		"close":                   {func(s *Stream) { _ = s.Close() }, net.ErrClosed},
		"abort":                   {func(s *Stream) { _ = s.Abort() }, net.ErrClosed},
		"lost":                    {func(s *Stream) { s.c.fail(errClosed) }, &ResetError{}},
		"deadline":                {func(s *Stream) { _ = s.SetWriteDeadline(time.Unix(1, 0)) }, os.ErrDeadlineExceeded},
		"panic":                   {func(*Stream) { panic("in a source") }, &ResetError{}},
		"lost with the last byte": {func(s *Stream) { s.c.fail(errClosed) }, &ResetError{}},
	} {
		a, b, stop, err := pipes(t, &Protocol{})()
		if err != nil {
			t.Fatal(err)
		}
		near, far := b.(*Stream), a.(*Stream) // a client has nobody to tell of a panic
		go func() { _, _ = io.Copy(io.Discard, near) }()
		var over, inside atomic.Bool
		done := make(chan error, 1)
		go func() {
			_, err := far.WriteFrom([]byte("x"), func(run [][]byte) int {
				if over.Load() {
					t.Errorf("%s: the source is read after the end", name)
				}
				inside.Store(true)
				defer inside.Store(false)
				tt.end(far)
				for range 100 { // while WriteFrom might return
					runtime.Gosched()
				}
				if strings.HasSuffix(name, "last byte") {
					return 1
				}
				n := 0
				for _, p := range run {
					n += len(p)
				}
				return n // there is more
			})
			if over.Store(true); inside.Load() {
				t.Errorf("%s: WriteFrom returned while the source was read", name)
			}
			done <- err
		}()
		select {
		case err := <-done:
			if _, reset := errors.AsType[*ResetError](tt.want); reset {
				if _, ok := errors.AsType[*ResetError](err); !ok {
					t.Errorf("%s: got %v, want a reset", name, err)
				}
			} else if !errors.Is(err, tt.want) {
				t.Errorf("%s: got %v, want %v", name, err, tt.want)
			}
		case <-time.After(patience):
			t.Fatalf("%s: WriteFrom goes on", name)
		}
		stop()
	}
}

// TestSourceWaitsForTheWindow: a source is read when the peer's window has room for the bytes, and
// the WriteFrom of a stream that is not read ends with the stream.
func TestSourceWaitsForTheWindow(t *testing.T) {
	a, b, stop, err := pipes(t, &Protocol{})()
	if err != nil {
		t.Fatal(err)
	}
	defer stop()
	near, far := a.(*Stream), b.(*Stream)
	var read atomic.Int64
	done := make(chan error, 1)
	go func() {
		_, err := far.WriteFrom([]byte("x"), func(run [][]byte) int {
			n := 0
			for _, p := range run {
				n += len(p)
			}
			read.Add(int64(n))
			return n
		})
		done <- err
	}()
	testnet.Eventually(t, patience, func() bool {
		near.c.mu.Lock()
		defer near.c.mu.Unlock()
		return near.in.size == streamWindow
	}, "the window is full")
	if n := 1 + read.Load(); n != streamWindow {
		t.Errorf("%d bytes were read for a window of %d", n, streamWindow)
	}
	_ = far.Close()
	select {
	case err := <-done:
		if !errors.Is(err, net.ErrClosed) {
			t.Errorf("got %v, want %v", err, net.ErrClosed)
		}
	case <-time.After(patience):
		t.Fatal("WriteFrom waits after Close")
	}
}
