package relay

import (
	"errors"
	"fmt"
	"log/slog"
	"runtime/debug"
	"sync"
	"time"
)

// A Panic is the error that a panic becomes in a goroutine that serves one
// connection or one tunnel: that ends, and nothing else. Whoever reports the end
// logs the stack.
type Panic struct {
	Value any
	Stack []byte
}

// Caught makes a Panic of what recover has returned, in the deferred function
// that called it.
func Caught(v any) *Panic {
	if p, ok := v.(*Panic); ok {
		return p // it has come from another goroutine
	}
	return &Panic{v, debug.Stack()}
}

func (p *Panic) Error() string { return fmt.Sprintf("panic: %v", p.Value) }

// A PanicLog logs panics, and a stack once a minute at most: an attacker who
// found the input may send it often.
type PanicLog struct {
	mu   sync.Mutex
	last time.Time
}

// Log logs p, unless to is nil.
func (l *PanicLog) Log(to *slog.Logger, p *Panic) {
	l.mu.Lock()
	quiet := !l.last.IsZero() && time.Since(l.last) < time.Minute
	if !quiet {
		l.last = time.Now()
	}
	l.mu.Unlock()
	switch {
	case to == nil:
	case quiet:
		to.Error("panic in a connection, its stack was logged less than a minute ago", "panic", p.Value)
	default:
		to.Error("panic in a connection", "panic", p.Value, "stack", string(p.Stack))
	}
}

// caught reports whether err is of a panic, and logs that.
func (r *Relay) caught(err error) (*Panic, bool) {
	if lost, ok := errors.AsType[*lostError](err); ok {
		err = lost.err
	}
	p, ok := errors.AsType[*Panic](err)
	if ok {
		r.panics.Log(r.Log, p)
	}
	return p, ok
}

// guard calls f, and makes an error of its panic.
func guard(f func() error) (err error) {
	defer func() {
		if v := recover(); v != nil {
			err = Caught(v)
		}
	}()
	return f()
}
