package h2

import (
	"runtime"
	"testing"
	"unsafe"

	"culvert.dev/internal/testnet"
	"culvert.dev/tunnel"
	"culvert.dev/tunnel/tunneltest"
)

// TestIdleStreamsHoldLittle: a stream at rest is its struct and its place in
// a map, on either side: no goroutine and no buffer.
func TestIdleStreamsHoldLittle(t *testing.T) {
	const n = 500
	makePipe := pipes(t, &Protocol{Streams: n + 1})
	_, _, stop, err := makePipe() // what a connection takes
	if err != nil {
		t.Fatal(err)
	}
	defer stop()
	measure := func() (heap uint64, goroutines int) {
		runtime.GC()
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return m.HeapAlloc, runtime.NumGoroutine()
	}
	heap, goroutines := measure()
	ends := make([]tunnel.Stream, 0, 2*n)
	for range n {
		a, b, stop, err := makePipe()
		if err != nil {
			t.Fatal(err)
		}
		defer stop()
		go func() { _, _ = a.Write([]byte("hello")) }() // has been used
		if _, err := b.Read(make([]byte, 5)); err != nil {
			t.Fatal(err)
		}
		ends = append(ends, a, b)
	}
	conns := 0
	testnet.Eventually(t, patience, func() bool {
		_, now := measure()
		conns = (now - goroutines) / 4 // a reader and a writer on either side
		return now-goroutines < 30
	}, "the writers are done")
	after, _ := measure()
	each := (int64(after) - int64(heap)) / (2 * n)
	t.Logf("%d bytes a stream and side, of them %d the struct; %d more connections", each, unsafe.Sizeof(Stream{}), conns)
	if each > 2<<10 {
		t.Errorf("%d bytes for each stream and side", each)
	}
	runtime.KeepAlive(ends)
}

func BenchmarkBulk(b *testing.B) {
	g := serve(b, tunneltest.Table{"svc:1": testnet.Echo(b).Addr()}, &Protocol{})
	s := open(b, newDialer(b, g.Addr), "svc:1")
	buf := make([]byte, 64<<10)
	b.SetBytes(int64(len(buf)))
	go func() {
		for range b.N {
			if _, err := s.Write(buf); err != nil {
				return
			}
		}
		_ = s.CloseWrite()
	}()
	in := make([]byte, 64<<10)
	for {
		if _, err := s.Read(in); err != nil {
			break
		}
	}
}
