package testnet

import (
	"runtime"
	"testing"
	"time"
)

// slow is the time that no input may take a parser.
const slow = 100 * time.Millisecond

// Bounded calls f and checks that it allocates no more than limit bytes and
// takes no longer than 100 ms, whatever it was given. Where one is over, it
// calls f again, up to four times, and the least counts: other goroutines
// allocate too, and a machine may be busy. So f has to do the same each time.
//
// A limit that is not 0 is exceeded by a quarter of it and 8 KiB: growing slices
// and what the runtime rounds up to are no amplification.
func Bounded(t testing.TB, limit int, f func()) {
	t.Helper()
	if limit > 0 {
		limit += limit/4 + 8<<10
	}
	bytes, took := ^uint64(0), time.Duration(1<<63-1)
	for range 5 {
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		start := time.Now()
		f()
		took = min(took, time.Since(start))
		runtime.ReadMemStats(&after)
		if bytes = min(bytes, after.TotalAlloc-before.TotalAlloc); bytes <= uint64(limit) && took <= slow {
			return
		}
	}
	if bytes > uint64(limit) {
		t.Errorf("%d bytes were allocated, want at most %d", bytes, limit)
	}
	if took > slow {
		t.Errorf("took %v, want at most %v", took, slow)
	}
}
