// Package background runs long computations, such as the building of a large table, so that they do
// not delay connections: on threads of low priority, and with a processor more for the Go scheduler.
//
// A goroutine that computes without a pause keeps its thread for up to ten milliseconds, and with it
// a CPU that an event loop may be waiting for. The kernel gives the CPU to the loop at once if the
// other thread has a lower priority. That needs no call inside the computation
// (docs/internals/adr/0010).
package background

import (
	"fmt"
	"runtime"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"time"
)

// Do calls f on a thread of low priority and waits for it. A panic of f becomes a panic of Do, whose
// value is a string with the stack of f. On systems other than Linux the priority is the usual one.
//
// It costs a new thread, some 50 µs. f should not hold a lock that an event loop takes: on a busy
// machine it may be a while before f runs on.
func Do(f func()) {
	done := make(chan any)
	go func() {
		var panicked any
		defer func() { done <- panicked }()
		defer func() {
			if p := recover(); p != nil {
				panicked = fmt.Sprintf("%v\n\n%s", p, debug.Stack())
			}
		}()
		if extraProcessor.Load() {
			add := time.AfterFunc(longWork, func() { changeProcessorUsers(1) })
			defer func() {
				if !add.Stop() {
					time.AfterFunc(processorLinger, func() { changeProcessorUsers(-1) })
				}
			}()
		}
		onLowPriority(f)
	}()
	if p := <-done; p != nil {
		panic(p)
	}
}

// To change the number of processors stops all goroutines for a moment, and waits for the end of a
// garbage collection.
const (
	// longWork is how long Do runs before it adds a processor: not for the table of a small
	// configuration.
	longWork = 2 * time.Millisecond

	// processorLinger is how long the processor stays afterwards: a table follows the file that was
	// read, and others may follow.
	processorLinger = time.Second
)

var (
	extraProcessor atomic.Bool

	processorMu    sync.Mutex
	processorUsers int // calls of Do that take long
)

// UseExtraProcessor makes Do raise GOMAXPROCS by one while it runs for long. Without that the
// goroutines of connections wait until f has used up its ten milliseconds. It is for the program to
// call, because GOMAXPROCS is a setting of the whole process.
func UseExtraProcessor() { extraProcessor.Store(true) }

// changeProcessorUsers changes the number of users of the extra processor, which is there as long as
// there is one. The two changes of a user may come in any order.
func changeProcessorUsers(by int) {
	processorMu.Lock()
	defer processorMu.Unlock()
	before := min(max(processorUsers, 0), 1)
	processorUsers += by
	if after := min(max(processorUsers, 0), 1); after != before {
		runtime.GOMAXPROCS(runtime.GOMAXPROCS(0) + after - before)
	}
}
