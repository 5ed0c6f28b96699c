package testnet

import (
	"fmt"
	"runtime"
	"sync"
	"testing"
)

// A fake is a testing.TB that keeps the failures reported to it.
type fake struct {
	testing.TB
	mu     sync.Mutex
	errors []string
}

func newFake(t *testing.T) *fake { return &fake{TB: t} }

func (f *fake) Errorf(format string, args ...any) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.errors = append(f.errors, fmt.Sprintf(format, args...))
}

func (f *fake) Fatalf(format string, args ...any) {
	f.Errorf(format, args...)
	runtime.Goexit()
}

// run calls fn where a Fatalf ends fn only.
func (f *fake) run(fn func()) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		fn()
	}()
	<-done
}
