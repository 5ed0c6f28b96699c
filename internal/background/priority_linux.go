package background

import (
	"runtime"
	"syscall"
)

// nice is the nice value of the threads. Where such a thread and a usual one want the same CPU, the
// kernel gives it a third of the other's time. With 19 it would be a seventieth, and on a machine that
// is always busy a reload would take that much longer.
const nice = 5

// onLowPriority calls f on a thread of low priority. It must be the last call of its goroutine, which
// stays locked to the thread.
func onLowPriority(f func()) {
	runtime.LockOSThread()
	if syscall.Gettid() == syscall.Getpid() {
		// The priority of a thread cannot be raised again, so the thread has to end, and the main
		// thread cannot. While it is held here, another goroutine gets another thread.
		defer runtime.UnlockOSThread()
		Do(f)
		return
	}
	_ = syscall.Setpriority(syscall.PRIO_PROCESS, 0, nice) // of this thread alone; without it f just runs
	f()
}
