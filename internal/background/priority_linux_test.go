package background_test

import (
	"fmt"
	"os"
	"syscall"
	"testing"
	"time"

	"culvert.dev/internal/background"
)

// priority returns what the system call does: 20 less the nice value.
func priority(t *testing.T, tid int) int {
	t.Helper()
	p, err := syscall.Getpriority(syscall.PRIO_PROCESS, tid)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func TestLowPriority(t *testing.T) {
	usual := priority(t, os.Getpid())
	for range 20 { // with luck one of them begins on the main thread
		var got, tid int
		background.Do(func() { got, tid = priority(t, 0), syscall.Gettid() })
		if got >= usual {
			t.Fatalf("priority %d in Do, and %d elsewhere: want less", got, usual)
		}
		if tid == os.Getpid() {
			t.Fatal("the main thread has a low priority, and it never ends")
		}
		// The thread must end, as nothing can make it a usual one again.
		deadline := time.Now().Add(10 * time.Second)
		for {
			if _, err := os.Stat(fmt.Sprintf("/proc/self/task/%d", tid)); err != nil {
				break
			}
			if time.Now().After(deadline) {
				t.Fatalf("thread %d of low priority is still there", tid)
			}
		}
	}
}
