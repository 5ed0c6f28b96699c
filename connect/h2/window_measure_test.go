//go:build measure

package h2

import (
	"io"
	"net"
	"sync"
	"testing"
	"time"

	"culvert.dev/internal/testnet"
)

// TestFillsALongPath: both ways a stream moves as much as TCP alone does over a
// path that holds as many bytes as 1 Gbit/s and 100 ms, once its window has
// grown. The path is four times as long and has a quarter of the rate, so that
// it is the slowest part, whatever else the machine does.
func TestFillsALongPath(t *testing.T) {
	const (
		fills  = 0.7 // the part of the path that a stream has to fill
		oneWay = 200 * time.Millisecond
		rate   = 12_500_000 / 2 / 0.2 // bytes a second
		timed  = 24 << 20
	)
	path := func(addr string) string { return slowPath(t, addr, oneWay, rate) }
	// steady is how many bytes a second come once warmUp have.
	steady := func(from, to net.Conn, warmUp int64) float64 {
		var written sync.WaitGroup
		defer written.Wait()
		written.Go(func() { _, _ = from.Write(make([]byte, warmUp+timed)) })
		defer from.Close()
		_ = to.SetReadDeadline(time.Now().Add(patience))
		if _, err := io.CopyN(io.Discard, to, warmUp); err != nil {
			t.Error(err)
		}
		began := time.Now()
		if _, err := io.CopyN(io.Discard, to, timed); err != nil {
			t.Error(err)
		}
		return timed / time.Since(began).Seconds()
	}
	alone := func(up bool) float64 {
		ln := testnet.Listen(t)
		near := testnet.Connect(t, path(ln.Addr().String()))
		far, err := ln.Accept()
		if err != nil {
			t.Fatal(err)
		}
		defer far.Close()
		if up {
			return steady(near, far, 4<<20)
		}
		return steady(far, near, 4<<20)
	}
	stream := func(up bool) float64 {
		a, b, stop, err := pipesOver(t, &Protocol{}, path)()
		if err != nil {
			t.Fatal(err)
		}
		defer stop()
		if up {
			return steady(a, b, 96<<20)
		}
		return steady(b, a, 96<<20)
	}
	for _, up := range []bool{true, false} {
		var got, raw float64
		for range 3 { // the machine may be busy with something else at one moment
			got, raw = stream(up), min(alone(up), rate)
			if t.Failed() || got >= fills*raw {
				break
			}
		}
		t.Logf("up %v: %.1f MB/s, TCP alone %.1f MB/s", up, got/1e6, raw/1e6)
		if got < fills*raw {
			t.Errorf("up %v: %.1f MB/s, want at least %v of what TCP alone moves there, %.1f MB/s", up, got/1e6, fills, raw/1e6)
		}
	}
}

// slowPath leads to addr over TCP, as slow does. It returns its address.
func slowPath(t *testing.T, addr string, delay time.Duration, rate int) string {
	return testnet.Service(t, func(near net.Conn) {
		far, err := net.Dial("tcp", addr)
		if err != nil {
			t.Error(err)
			return
		}
		defer far.Close()
		slow(near, far, delay, rate)
	})
}
