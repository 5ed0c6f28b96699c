package registry

import (
	"cmp"
	"errors"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"time"
)

// staleLogInterval is how often the log says again that a source is lost.
const staleLogInterval = 10 * time.Minute

// freshness remembers which sources are lost. Their last snapshots stay in
// force without a time limit: an old table serves more than none.
type freshness struct {
	mu   sync.Mutex // guards lost
	lost map[snapshotKey]loss
}

// A loss is of a source that does not see what there is.
type loss struct {
	source string
	since  time.Time
	err    error
}

// ErrInvalid is wrapped by an Update's Err if the source was read and its
// content is invalid, as of a file with a mistake. The source itself is
// reachable.
var ErrInvalid = errors.New("invalid content")

// Stale returns which source has been lost for longest, since when and why; ""
// while every source is in touch.
func (r *Registry) Stale() (source string, since time.Time, err error) {
	f := &r.freshness
	f.mu.Lock()
	defer f.mu.Unlock()
	var longest loss
	for _, l := range f.lost {
		if longest.err == nil || l.since.Before(longest.since) || l.since.Equal(longest.since) && l.source < longest.source {
			longest = l
		}
	}
	return longest.source, longest.since, longest.err
}

// observe takes in what a source has said of itself.
func (f *freshness) observe(log *slog.Logger, m *sourceEvent) {
	f.mu.Lock()
	defer f.mu.Unlock()
	k, source, err := snapshotKey{source: m.source}, m.kind, m.err // of all its names
	since := time.Now()
	if m.update != nil {
		k.name, source, err = m.update.Source, m.update.Source, m.update.Err
		if at := m.update.Since; !at.IsZero() && at.Before(since) {
			since = at
		}
	}
	if err != nil {
		if before, ok := f.lost[k]; ok && before.since.Before(since) {
			since = before.since
		}
		if f.lost == nil {
			f.lost = map[snapshotKey]loss{}
		}
		f.lost[k] = loss{cmp.Or(source, "unnamed"), since, err}
		return
	}
	if m.update == nil { // it has nothing more to say
		return
	}
	for _, k := range []snapshotKey{k, {source: m.source}} {
		if l, ok := f.lost[k]; ok {
			delete(f.lost, k)
			log.Info("source recovered", "source", l.source, "after", time.Since(l.since).Round(time.Millisecond))
		}
	}
}

// forget drops what a source that was replaced has said.
func (f *freshness) forget(source int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	maps.DeleteFunc(f.lost, func(k snapshotKey, _ loss) bool { return k.source == source })
}

// isLost reports whether one of the sources has lost sight of what it sent under a name.
func (f *freshness) isLost(sources []int, name string) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return slices.ContainsFunc(sources, func(i int) bool {
		_, lost := f.lost[snapshotKey{i, name}]
		return lost
	})
}

func (f *freshness) logStale(log *slog.Logger) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, l := range f.lost {
		if errors.Is(l.err, ErrInvalid) {
			log.Warn("source has errors; keeping its last snapshot", "source", l.source, "for", time.Since(l.since).Round(time.Second), "err", l.err)
			continue
		}
		log.Warn("source is still failing; keeping its last snapshot", "source", l.source, "for", time.Since(l.since).Round(time.Second), "err", l.err)
	}
}

// sameSlices reports whether s and o are the same slices, and not only equal ones.
func (s *Snapshot) sameSlices(o *Snapshot) bool {
	return same(s.Services, o.Services) && same(s.Networks, o.Networks) && same(s.Listeners, o.Listeners) && same(s.Policies, o.Policies) && same(s.Public, o.Public) && same(s.SetAddresses, o.SetAddresses) && s.GatewayTransport == o.GatewayTransport && s.Mesh == o.Mesh
}

func same[T any](a, b []T) bool {
	return len(a) == len(b) && (len(a) == 0 || &a[0] == &b[0])
}
