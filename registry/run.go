package registry

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"time"

	"culvert.dev/internal/background"
)

const (
	// minRebuildInterval is the least time between two tables: a source that flaps
	// must not take a core.
	minRebuildInterval = 100 * time.Millisecond

	// firstTableTimeout is how long the first table waits for the first update of
	// every source: a partial table refuses what the gateway in fact serves.
	firstTableTimeout = 5 * time.Second

	// The wait before a source that failed is run again doubles between these.
	minRestart = time.Second
	maxRestart = 30 * time.Second
)

// Run runs the sources and swaps in a table whenever one of them sends an update,
// until ctx is done; then it waits for the sources and returns nil. It may be
// called once.
//
// The last snapshot of a source that fails stays in force, and the source is run again after a
// while. While one fails, Stale reports it, and the log repeats it every 10 minutes. The first
// table waits for the first update of every source, for at most 5 seconds. Tables are made at most
// every 100 ms.
//
// An Update with a Group replaces the Group before it. The last snapshots of the sources that end
// stay in force until the new sources know as much: each until there is one of the same name, and
// the others until every new source has sent a snapshot, and as long as a new source says that it
// has lost sight of that name. No table is made until every new source has sent a snapshot, for at
// most 5 seconds: what came with the Group takes effect together with what the Group brings.
func (r *Registry) Run(ctx context.Context, sources ...Source) error {
	if len(sources) == 0 {
		return errors.New("registry: no source to run")
	}
	l := &tableLoop{
		r: r, log: r.Log, sources: map[int]*sourceState{}, known: map[snapshotKey]Snapshot{}, retained: map[snapshotKey]bool{},
		late: time.NewTimer(firstTableTimeout), groups: make(chan *runningGroup, 1),
	}
	if l.log == nil {
		l.log = slog.New(slog.DiscardHandler)
	}
	defer l.late.Stop()
	r.pendingSources.Store(int32(len(sources)))
	news := make(chan sourceEvent)
	var running sync.WaitGroup
	for i, src := range sources {
		_, supplements := src.(Supplement)
		l.sources[i] = &sourceState{awaited: true, pending: true, supplements: supplements}
		running.Go(func() { runSource(ctx, l.log, i, src, news) })
	}
	l.nextSource = len(sources)
	running.Go(func() { runGroups(ctx, l.log, l.groups, news) })
	defer running.Wait()

	tick := time.NewTimer(0)
	defer tick.Stop()
	wait := true // for tick
	remind := time.NewTicker(staleLogInterval)
	defer remind.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case m := <-news:
			l.observe(&m)
		case <-remind.C:
			r.freshness.logStale(l.log)
		case <-l.late.C:
			for _, s := range l.sources {
				s.awaited = false
			}
		case <-tick.C:
			wait = false
		}
		if l.dirty {
			if wait || l.holds() || l.onlySupplements() {
				continue
			}
			background.Do(func() { r.merge(l.log, l.known) })
			l.dirty, l.merged, wait = false, true, true
			tick.Reset(minRebuildInterval)
		}
		r.pendingSources.Store(l.pending()) // not before the table has it
	}
}

// A tableLoop is what one call of Run knows.
type tableLoop struct {
	r   *Registry
	log *slog.Logger

	sources    map[int]*sourceState // that run
	nextSource int
	group      []int // those of the Group

	known    map[snapshotKey]Snapshot
	retained map[snapshotKey]bool // of known: of sources that have ended
	dirty    bool                 // known differs from the table
	merged   bool                 // there is a table

	late   *time.Timer // when nothing is awaited any more
	groups chan *runningGroup
}

// A Supplement is a Source whose snapshots complete those of others: without any of theirs
// there is no table.
type Supplement interface {
	Source
	Supplements()
}

// A sourceState is what a source has said so far.
type sourceState struct {
	supplements bool // it is a Supplement

	replaces bool // there was a table before it: what is in force may be waited with
	awaited  bool // the next table waits for it
	pending  bool // it is one of PendingSources
	more     bool // its next update belongs to the same table
	knows    bool // it has sent a snapshot
	complete bool // and what belongs to that
}

// holds reports whether no table is to be made now.
func (l *tableLoop) holds() bool {
	for _, s := range l.sources {
		if s.awaited || s.more {
			return true
		}
	}
	return false
}

// onlySupplements reports whether there is nothing to make a first table of.
func (l *tableLoop) onlySupplements() bool {
	for k := range l.known {
		if s := l.sources[k.source]; l.merged || s == nil || !s.supplements {
			return false
		}
	}
	return !l.merged
}

// pending returns the number of PendingSources.
func (l *tableLoop) pending() (n int32) {
	for _, s := range l.sources {
		if s.pending {
			n++
		}
	}
	return n
}

// observe takes in what a source has sent.
func (l *tableLoop) observe(m *sourceEvent) {
	s := l.sources[m.source]
	if s == nil {
		return // it was replaced
	}
	l.r.freshness.observe(l.log, m)
	u := m.update
	stopgap := u != nil && u.StandsFor != "" && s.replaces
	if stopgap && l.retains(u.StandsFor) {
		return
	}
	s.more = u != nil && u.More
	s.knows = s.knows || !stopgap && m.err == nil && (u == nil || u.Err == nil)
	if !s.more {
		s.complete = s.knows
		s.pending = s.pending && !s.complete
		s.awaited = s.awaited && s.replaces && !s.complete
	}
	if u != nil && u.Err == nil {
		l.store(snapshotKey{m.source, u.Source}, u.Snapshot)
	}
	if u != nil && u.Group != nil {
		l.replace(u.Group)
	}
	l.dropRetained()
}

// retains reports whether a snapshot of that name is in force whose source has ended.
func (l *tableLoop) retains(name string) bool {
	for k := range l.retained {
		if k.name == name {
			return true
		}
	}
	return false
}

// store notes a snapshot, which takes the place of one that a replaced source has sent under
// the same name.
func (l *tableLoop) store(k snapshotKey, s Snapshot) {
	if before, ok := l.known[k]; !ok || !before.sameSlices(&s) {
		l.known[k] = s
		l.dirty = true
	}
	if !slices.Contains(l.group, k.source) {
		return
	}
	for old := range l.retained {
		if old.name == k.name {
			l.forget(old)
		}
	}
}

func (l *tableLoop) forget(k snapshotKey) {
	delete(l.known, k)
	delete(l.retained, k)
	l.dirty = true
}

// replace has g run in the place of the Group before it.
func (l *tableLoop) replace(g *Group) {
	if l.merged && !l.holds() { // else the time goes on: changes without end must not hold the table
		l.late.Reset(firstTableTimeout)
	}
	pending := !l.merged
	for _, i := range l.group {
		pending = pending || l.sources[i].pending
		delete(l.sources, i)
		l.r.freshness.forget(i)
	}
	for k, s := range l.known {
		switch {
		case !slices.Contains(l.group, k.source):
		case s.sameSlices(&Snapshot{}):
			delete(l.known, k)
		default:
			l.retained[k] = true
		}
	}
	next := &runningGroup{Group: g}
	l.group = nil
	for range g.Sources {
		i := l.nextSource
		l.nextSource++
		l.sources[i] = &sourceState{replaces: l.merged, awaited: true, pending: pending}
		l.group, next.indices = append(l.group, i), append(next.indices, i)
	}
	select { // one that has not begun never does
	case <-l.groups:
	default:
	}
	l.groups <- next
}

// dropRetained drops what replaced sources have sent, where the new ones know as much.
func (l *tableLoop) dropRetained() {
	if len(l.retained) == 0 {
		return
	}
	for _, i := range l.group {
		if !l.sources[i].complete || l.sources[i].more {
			return
		}
	}
	for k := range l.retained {
		if !l.r.freshness.isLost(l.group, k.name) {
			l.forget(k)
		}
	}
}

// A runningGroup is a Group with the indices of its sources.
type runningGroup struct {
	*Group
	indices []int
}

// runGroups runs each of the groups until there is the next one, or ctx is done.
func runGroups(ctx context.Context, log *slog.Logger, groups <-chan *runningGroup, news chan<- sourceEvent) {
	end := func() {}
	defer func() { end() }()
	for {
		select {
		case <-ctx.Done():
			return
		case g := <-groups:
			end()
			end = g.run(ctx, log, news)
		}
	}
}

// run runs the group until end is called, which waits for its end.
func (g *runningGroup) run(ctx context.Context, log *slog.Logger, news chan<- sourceEvent) (end func()) {
	ctx, cancel := context.WithCancel(ctx)
	stop := func() {}
	if g.Start != nil {
		stop = g.Start()
	}
	var running sync.WaitGroup
	for i, src := range g.Sources {
		running.Go(func() { runSource(ctx, log, g.indices[i], src, news) })
	}
	return func() {
		cancel()
		running.Wait()
		stop()
	}
}

// A snapshotKey identifies the snapshot that one source sent under one name. Keys are
// ordered by precedence.
type snapshotKey struct {
	source int
	name   string
}

// merge swaps in the table of everything known.
func (r *Registry) merge(log *slog.Logger, known map[snapshotKey]Snapshot) {
	keys := slices.SortedFunc(maps.Keys(known), func(a, b snapshotKey) int {
		if a.source != b.source {
			return a.source - b.source
		}
		if a.name < b.name {
			return -1
		}
		return 1
	})
	snapshots := make([]Snapshot, len(keys))
	for i, k := range keys {
		snapshots[i] = known[k]
	}
	t, err := r.Merge(snapshots...)
	if err != nil {
		log.Warn("ignored conflicting definitions", "err", err)
	}
	t = r.Swap(t)
	log.Info("routing table changed", "generation", t.Generation(), "services", t.Len())
}

// A sourceEvent is an update of a source, or the end of its run, with the reason if
// it failed.
type sourceEvent struct {
	source int
	update *Update
	kind   string // of the source, for people
	err    error
}

// runSource runs one source, again after each failure, and passes on its updates.
func runSource(ctx context.Context, log *slog.Logger, i int, src Source, news chan<- sourceEvent) {
	send := func(m sourceEvent) {
		select {
		case news <- m:
		case <-ctx.Done():
		}
	}
	for pause := minRestart; ; pause = min(2*pause, maxRestart) {
		updates := make(chan Update)
		done := make(chan error, 1)
		go func() { done <- runSafely(ctx, src, updates) }()
		var err error
		for ended := false; !ended; {
			select {
			case u := <-updates:
				send(sourceEvent{source: i, update: &u})
				pause = minRestart
			case err = <-done:
				ended = true
			}
		}
		if ctx.Err() != nil {
			return
		}
		send(sourceEvent{source: i, kind: fmt.Sprintf("%T", src), err: err})
		if err == nil {
			return
		}
		log.Error("source failed; keeping its last snapshot", "source", fmt.Sprintf("%T", src), "err", err, "again", pause)
		select {
		case <-time.After(pause):
		case <-ctx.Done():
			return
		}
	}
}

// runSafely turns a panic of a source into an error: a source must not take the
// tunnels down.
func runSafely(ctx context.Context, src Source, updates chan<- Update) (err error) {
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("panic: %v", p)
		}
	}()
	return src.Run(ctx, updates)
}
