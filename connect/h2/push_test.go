package h2

import (
	"bytes"
	"errors"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/net/http2"

	"culvert.dev/internal/testnet"
)

// TestPush: the bytes of a frame are pushed, and those that are not taken are read, in order.
// None is pushed while some wait to be read.
func TestPush(t *testing.T) {
	makePipe := pipes(t, &Protocol{})
	a, b, stop, err := makePipe()
	if err != nil {
		t.Fatal(err)
	}
	defer stop()
	near, far := a.(*Stream), b.(*Stream)
	for _, takes := range []int{0, 1, 3, 5} {
		pushed, woken := make(chan []byte, 10), make(chan struct{}, 10)
		wait := func() bool {
			return near.WaitPush(func() { woken <- struct{}{} }, func(run [][]byte) int {
				p := bytes.Join(run, nil)
				n := min(takes, len(p))
				pushed <- p[:n]
				return n
			})
		}
		if wait() {
			t.Fatalf("takes %d: a Read would not wait, before anything came", takes)
		}
		if _, err := io.WriteString(far, "12345"); err != nil {
			t.Fatal(err)
		}
		var got []byte
		select {
		case got = <-pushed:
		case <-time.After(patience):
			t.Fatalf("takes %d: nothing was pushed", takes)
		}
		if takes < 5 {
			select {
			case <-woken:
			case <-time.After(patience):
				t.Fatalf("takes %d: no wake for the rest", takes)
			}
			if !wait() {
				t.Errorf("takes %d: a Read would wait for the rest", takes)
			}
			rest := make([]byte, 5-takes)
			_ = near.SetReadDeadline(time.Now().Add(patience))
			if _, err := io.ReadFull(near, rest); err != nil {
				t.Fatal(err)
			}
			_ = near.SetReadDeadline(time.Time{})
			got = append(got, rest...)
		}
		if string(got) != "12345" || len(pushed) > 0 {
			t.Errorf("takes %d: got %q, want 12345; %d pushes more", takes, got, len(pushed))
		}
	}
	// The end is for a Read.
	woken := make(chan struct{}, 10)
	if near.WaitPush(func() { woken <- struct{}{} }, func([][]byte) int { t.Error("pushed at the end"); return 0 }) {
		t.Error("a Read would not wait, before the end")
	}
	_ = far.CloseWrite()
	select {
	case <-woken:
	case <-time.After(patience):
		t.Fatal("the end woke nobody")
	}
	if _, err := near.Read(make([]byte, 1)); err != io.EOF {
		t.Errorf("got %v, want io.EOF", err)
	}
}

// TestRunsKeepTheirOrder: frames that come together are pushed together, and however much of them
// is taken, all bytes come in order, some by pushes and the others by Reads.
func TestRunsKeepTheirOrder(t *testing.T) {
	a, b, stop, err := pipes(t, &Protocol{})()
	if err != nil {
		t.Fatal(err)
	}
	defer stop()
	near, far := a.(*Stream), b.(*Stream)
	const total = 8 << 20
	want := make([]byte, total)
	_, _ = rand.NewChaCha8([32]byte{1}).Read(want)
	var sending sync.WaitGroup
	defer sending.Wait()
	sending.Go(func() {
		for rest := want; len(rest) > 0; {
			n := min(len(rest), 1+rand.IntN(60)) // of frames that are not pushed in large numbers
			if rand.IntN(8) > 0 {
				n = min(len(rest), 1+rand.IntN(100<<10))
			}
			if _, err := far.Write(rest[:n]); err != nil {
				t.Error(err)
				break
			}
			rest = rest[n:]
		}
		_ = far.CloseWrite()
	})

	_ = near.SetReadDeadline(time.Now().Add(patience))
	var got []byte // by the reader's goroutine or this one, which waits for the other
	longest, woken := 0, make(chan struct{}, 1)
	var push func(run [][]byte) int
	wake := func() { woken <- struct{}{} }
	push = func(run [][]byte) int {
		longest = max(longest, len(run))
		p := bytes.Join(run, nil)
		if rand.IntN(4) == 0 {
			p = p[:rand.IntN(len(p))]
		}
		got = append(got, p...)
		near.WaitPush(wake, push)
		return len(p)
	}
	buf := make([]byte, 10<<10)
	for {
		for !near.WaitPush(wake, push) {
			<-woken
		}
		n, err := near.Read(buf)
		got = append(got, buf[:n]...)
		if err == io.EOF {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	if !bytes.Equal(got, want) {
		t.Errorf("got %d bytes, want %d as they were sent", len(got), total)
	}
	if longest < 2 {
		t.Errorf("at most %d frames were pushed at once, want some together", longest)
	}
}

// TestSmallFramesAreCollected: of many small frames that come together none is pushed, and their
// bytes come in order.
func TestSmallFramesAreCollected(t *testing.T) {
	ln := testnet.Listen(t)
	var served sync.WaitGroup
	defer served.Wait()
	waits := make(chan struct{})
	served.Go(func() {
		c, err := ln.Accept()
		if err != nil {
			return
		}
		defer c.Close()
		r := newRaw(t, c)
		_, _ = io.ReadFull(c, make([]byte, len(preface)))
		_ = r.fr.WriteSettings()
		f, err := r.next()
		if err != nil {
			t.Errorf("the request: %v", err)
			return
		}
		_ = r.fr.WriteHeaders(http2.HeadersFrameParam{StreamID: f.Header().StreamID, BlockFragment: fieldList(":status", "200"), EndHeaders: true})
		<-waits
		var all bytes.Buffer
		for i := range 50 {
			_ = http2.NewFramer(&all, nil).WriteData(f.Header().StreamID, i == 49, []byte{byte('0' + i)})
		}
		_, _ = c.Write(all.Bytes())
		_, _ = r.next() // until the client ends the connection
	})
	s := open(t, newDialer(t, ln.Addr().String()), "svc:1")
	defer s.Close()
	woken := make(chan struct{}, 100)
	s.WaitPush(func() { woken <- struct{}{} }, func(run [][]byte) int {
		t.Errorf("%d frames were pushed", len(run))
		return 0
	})
	close(waits)
	<-woken
	_ = s.SetReadDeadline(time.Now().Add(patience))
	got, err := io.ReadAll(s)
	if want := "0123456789:;<=>?@ABCDEFGHIJKLMNOPQRSTUVWXYZ[\\]^_`a"; err != nil || string(got) != want {
		t.Errorf("got %q and %v, want %q", got, err, want)
	}
}

// TestPushOpensTheWindow: bytes that are pushed and taken count as read.
func TestPushOpensTheWindow(t *testing.T) {
	a, b, stop, err := pipes(t, &Protocol{})()
	if err != nil {
		t.Fatal(err)
	}
	defer stop()
	near, far := a.(*Stream), b.(*Stream)
	const size = 1 << 10
	pushed := make(chan int, 1)
	var wait func()
	wait = func() {
		near.WaitPush(func() {}, func(run [][]byte) int {
			wait()
			n := len(bytes.Join(run, nil))
			pushed <- n
			return n
		})
	}
	wait()
	_ = far.SetWriteDeadline(time.Now().Add(patience))
	for i := range 4 * streamWindow / size {
		if _, err := far.Write(make([]byte, size)); err != nil {
			t.Fatalf("after %d bytes: %v", i*size, err)
		}
		select {
		case n := <-pushed:
			if n != size {
				t.Fatalf("%d bytes were pushed, want %d", n, size)
			}
		case <-time.After(patience):
			t.Fatalf("nothing was pushed after %d bytes", i*size)
		}
	}
}

// TestStreamEndsDuringPush: what ends a stream while bytes of it are pushed leaves nothing
// behind in the accounts of the connection.
func TestStreamEndsDuringPush(t *testing.T) {
	for name, end := range map[string]func(s *Stream){
		"close": func(s *Stream) { _ = s.Close() },
		"abort": func(s *Stream) { _ = s.Abort() },
		"lost":  func(s *Stream) { s.c.fail(errClosed) },
		"panic": nil,
	} {
		a, b, stop, err := pipes(t, &Protocol{})()
		if err != nil {
			t.Fatal(err)
		}
		near, far := a.(*Stream), b.(*Stream)
		pushed := make(chan struct{})
		near.WaitPush(func() {}, func([][]byte) int {
			defer close(pushed)
			if end == nil {
				panic("in a push")
			}
			end(near)
			return 1
		})
		_, _ = io.WriteString(far, "12345")
		select {
		case <-pushed:
		case <-time.After(patience):
			t.Fatalf("%s: nothing was pushed", name)
		}
		if end == nil {
			_ = near.SetReadDeadline(time.Now().Add(patience))
			if _, err := near.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
				t.Errorf("%s: got %v, want a lost connection", name, err)
			}
		}
		testnet.Eventually(t, patience, func() bool {
			near.c.mu.Lock()
			defer near.c.mu.Unlock()
			return near.c.unread == 0 && near.c.holds == 0 && near.in.size == 0
		}, "nothing is held after: %s", name)
		stop()
	}
}

// TestShortWritesKeepTheirDeadline: a Write of a few bytes ends at its deadline, and its stream
// by Abort, although the peer takes nothing from its socket and its windows are wide.
func TestShortWritesKeepTheirDeadline(t *testing.T) {
	ln := testnet.Listen(t)
	accepted := make(chan net.Conn, 1)
	go func() {
		c, err := ln.Accept()
		if err != nil {
			return
		}
		accepted <- c
		r := newRaw(t, c)
		_, _ = io.ReadFull(c, make([]byte, len(preface)))
		_ = r.fr.WriteSettings(http2.Setting{ID: http2.SettingInitialWindowSize, Val: 1<<31 - 1})
		_ = r.fr.WriteWindowUpdate(0, 1<<31-1-65535)
		for {
			f, err := r.fr.ReadFrame()
			if err != nil {
				return
			}
			if h, ok := f.(*http2.HeadersFrame); ok {
				_ = r.fr.WriteHeaders(http2.HeadersFrameParam{StreamID: h.StreamID, BlockFragment: fieldList(":status", "200"), EndHeaders: true})
				return // and reads no more
			}
		}
	}()
	d := newDialer(t, ln.Addr().String())
	s := open(t, d, "svc:1")
	defer func() { _ = (<-accepted).Close() }()
	var err error
	for range 1 << 20 { // until the sockets are full
		_ = s.SetWriteDeadline(time.Now().Add(100 * time.Millisecond))
		if _, err = s.Write(make([]byte, 100)); err != nil {
			break
		}
	}
	if !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Fatalf("a Write to a peer that takes nothing: %v, want its deadline", err)
	}
	_ = s.SetWriteDeadline(time.Time{})
	wrote := make(chan error, 1)
	go func() { _, err := s.Write(make([]byte, 100)); wrote <- err }()
	_ = s.Abort()
	select {
	case err := <-wrote:
		if err == nil {
			t.Error("a Write after Abort to a peer that takes nothing: no error")
		}
	case <-time.After(writeTimeout / 2):
		t.Error("Abort does not end a Write to a peer that takes nothing")
	}
}
