package gateway

import (
	"context"
	"io"
	"log/slog"
	"slices"
	"sync/atomic"
	"time"

	"culvert.dev/registry/alloc"
)

// What is here is of all that gives something to services and keeps it on the
// disk: ports, addresses.

// A StateError is a state that can't be read or written.
type StateError struct {
	Of   string // "service ports", "vips"
	What string // it gives: "ports", "addresses"
	err  error
}

func (e *StateError) Error() string { return e.Of + ": " + e.err.Error() }

// Unwrap returns what went wrong.
func (e *StateError) Unwrap() error { return e.err }

// now is when something was given or left, as a state has it.
func now() time.Time { return time.Now().UTC().Truncate(time.Second) }

// Waits before what can't be had is tried again double between these.
const (
	minRetry = time.Second
	maxRetry = 30 * time.Second
)

// A tableWatcher does something for each table.
type tableWatcher struct {
	updates chan struct{} // there is another table; room for one
}

func newTableWatcher() tableWatcher { return tableWatcher{make(chan struct{}, 1)} }

// tableChanged says that there is another table.
func (f *tableWatcher) tableChanged() {
	select {
	case f.updates <- struct{}{}:
	default:
	}
}

// watch calls update for each table until ctx is done, and as long as update
// returns false again after a while. It pauses while stopping.
func (f *tableWatcher) watch(ctx context.Context, stopping *atomic.Bool, update func(ctx context.Context) (whole bool)) {
	retry := time.NewTimer(time.Hour)
	defer retry.Stop()
	for wait := minRetry; ; {
		select {
		case <-ctx.Done():
			return
		case <-f.updates:
			wait = minRetry
		case <-retry.C:
			wait = min(2*wait, maxRetry)
		}
		if stopping.Load() {
			continue
		}
		if update(ctx) {
			retry.Stop()
		} else {
			retry.Reset(wait)
		}
	}
}

// An assignmentFile is what was given, as it is on the disk. That is this process's until
// close.
type assignmentFile[A comparable] struct {
	name      string // "service ports", for the log
	state     alloc.File[A]
	lock      io.Closer
	log       *slog.Logger
	assigned  []A
	saveError string // why the state could not be written last
}

// openAssignmentFile reads what was given, unless another process keeps it. It writes an
// empty state where there is none: better said at the start that it can't be than
// with the first service.
func openAssignmentFile[A comparable](of, what string, log *slog.Logger, state alloc.File[A]) (*assignmentFile[A], error) {
	l := &assignmentFile[A]{name: of, state: state, log: log}
	var err error
	if l.lock, err = state.Lock(); err != nil {
		return nil, &StateError{of, what, err}
	}
	if l.assigned, err = state.Load(); err == nil && l.assigned == nil {
		err = state.Save(nil)
	}
	if err != nil {
		l.close()
		return nil, &StateError{of, what, err}
	}
	return l, nil
}

// close gives the state back. Nothing is saved after it.
func (l *assignmentFile[A]) close() { _ = l.lock.Close() }

// save keeps what is given now. It is false where that can't be written: what is
// not on the disk is not to be promised to anybody.
func (l *assignmentFile[A]) save(next []A) bool {
	if slices.Equal(next, l.assigned) {
		return true
	}
	if err := l.state.Save(next); err != nil {
		if said := err.Error(); said != l.saveError {
			l.saveError = said
			l.log.Error(l.name+": nothing new is assigned", "err", err)
		}
		return false
	}
	l.assigned, l.saveError = next, ""
	return true
}

// maxLogged is how many services without what they want get a line of their own
// in the log at a time.
const maxLogged = 10

// errorLog are problems that the log knows.
type errorLog[K comparable] map[K]string

// logNew passes on what the log does not know yet: the first few one by one, and
// how many more there are.
func (t *errorLog[K]) logNew(n int, at func(i int) (K, error), one, more func(i int)) {
	known := make(errorLog[K], n)
	rest := 0
	for i := range n {
		key, err := at(i)
		known[key] = err.Error()
		switch {
		case (*t)[key] == known[key]:
		case i < maxLogged:
			one(i)
		default:
			rest++
		}
	}
	if rest > 0 {
		more(rest)
	}
	*t = known
}
