package background_test

import (
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"culvert.dev/internal/background"
)

func TestDoWaits(t *testing.T) {
	done := false
	background.Do(func() { done = true })
	if !done {
		t.Error("Do returned before its function")
	}
}

func TestDoPassesPanicsOn(t *testing.T) {
	defer func() {
		got, _ := recover().(string)
		if !strings.HasPrefix(got, "a mistake\n") || !strings.Contains(got, "TestDoPassesPanicsOn") {
			t.Errorf("panic %q, want the value and the stack of the function", got)
		}
	}()
	background.Do(func() { panic("a mistake") })
}

// TestExtraProcessor: as long as there is long work, however much, Go has one processor more.
func TestExtraProcessor(t *testing.T) {
	before := runtime.GOMAXPROCS(0)
	background.UseExtraProcessor()
	eventually := func(want int) {
		t.Helper()
		deadline := time.Now().Add(10 * time.Second)
		for runtime.GOMAXPROCS(0) != want {
			if time.Now().After(deadline) {
				t.Fatalf("GOMAXPROCS is %d, want %d", runtime.GOMAXPROCS(0), want)
			}
			runtime.Gosched()
		}
	}
	var running sync.WaitGroup
	first, rest := make(chan struct{}), make(chan struct{})
	running.Go(func() { background.Do(func() { <-first }) })
	for range 3 {
		running.Go(func() { background.Do(func() { <-rest }) })
	}
	eventually(before + 1)
	close(first)
	eventually(before + 1)
	close(rest)
	running.Wait()
	eventually(before)
	for range 100 {
		background.Do(func() {}) // too short
	}
	eventually(before)
}
