package gateway

import (
	"context"
	"io"
	"log/slog"
	"slices"
	"sync/atomic"
	"time"

	"culvert.dev/internal/background"
	"culvert.dev/registry/alloc"
)

// What ports and addresses of services have in common: both are assigned by the
// table, and kept in a file.

// A StateError is the error of a state file that can't be read or written.
type StateError struct {
	Of   string // "service ports", "vips"
	What string // is in the file: "ports", "addresses"
	err  error
}

func (e *StateError) Error() string { return e.Of + ": " + e.err.Error() }

// Unwrap returns what went wrong.
func (e *StateError) Unwrap() error { return e.err }

// now is the time with the precision of a state file.
func now() time.Time { return time.Now().UTC().Truncate(time.Second) }

// The wait before what failed is tried again doubles between these.
const (
	minRetry = time.Second
	maxRetry = 30 * time.Second
)

// A tableWatcher calls a function for each table.
type tableWatcher struct {
	updates chan struct{} // holds one if there is another table
}

func newTableWatcher() tableWatcher { return tableWatcher{make(chan struct{}, 1)} }

// tableChanged reports that there is another table. It does not block.
func (f *tableWatcher) tableChanged() {
	select {
	case f.updates <- struct{}{}:
	default:
	}
}

// watch calls update for each table until ctx is done, and again after a while as
// long as update returns false. It pauses while stopping.
func (f *tableWatcher) watch(ctx context.Context, stopping *atomic.Bool, update func(ctx context.Context) (complete bool)) {
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
		var complete bool
		background.Do(func() { complete = update(ctx) })
		if complete {
			retry.Stop()
		} else {
			retry.Reset(wait)
		}
	}
}

// An assignmentFile is what was assigned, as it is on the disk. It is locked for this
// process until close.
type assignmentFile[A comparable] struct {
	name      string // "service ports", for the log
	state     alloc.File[A]
	lock      io.Closer
	log       *slog.Logger
	assigned  []A
	saveError string // why the state could not be written last
}

// openAssignmentFile locks and reads a file. It writes an empty one where there is
// none: an error at the start is better than one with the first service.
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

// close unlocks the file. Nothing is saved after it.
func (l *assignmentFile[A]) close() { _ = l.lock.Close() }

// save writes what is assigned now. It is false where that fails: what is not on the
// disk must not be promised to a client.
func (l *assignmentFile[A]) save(next []A) bool {
	if slices.Equal(next, l.assigned) {
		return true
	}
	if err := l.state.Save(next); err != nil {
		if text := err.Error(); text != l.saveError {
			l.saveError = text
			l.log.Error(l.name+": nothing new is assigned", "err", err)
		}
		return false
	}
	l.assigned, l.saveError = next, ""
	return true
}

// maxLogged is how many errors get a line of their own in the log at a time.
const maxLogged = 10

// An errorLog has the errors that were logged, by what they are of.
type errorLog[K comparable] map[K]string

// logNew logs errors that were not logged before: the first few one by one, and how
// many more there are.
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
