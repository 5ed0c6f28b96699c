package snapshot

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"time"

	"culvert.dev/internal/background"
	"culvert.dev/internal/statefile"
	"culvert.dev/registry"
)

const (
	// FirstUpdateTimeout is how long a source may send nothing before its saved
	// snapshots are used. It is less than a Registry waits with its first table.
	FirstUpdateTimeout = 3 * time.Second

	// saveDelay is the time from an update to its saving, for several updates to be
	// saved together.
	saveDelay = time.Second

	// maxSaveShare is the pause after a save, as a multiple of the time that it took:
	// updates without end take a tenth of a core at the most.
	maxSaveShare = 10

	// saveRetryInterval is the time from a save that failed to the next one.
	saveRetryInterval = 10 * time.Second
)

// A Source is a registry.Source that saves the snapshots of another one. Source and
// Path are required. It must not be copied, nor changed once it runs.
type Source struct {
	Source registry.Source
	Path   string // of the file, in a folder that may be written to

	// Settings is all the configuration that the source's snapshots depend on. A file
	// that was written with other settings is ignored: what they have forbidden since
	// must not be served.
	Settings string

	// Names returns the names under which Source sends updates; nil as long as that
	// is not known. It is called after each update, and saved snapshots of other
	// names are dropped. Nil means that none is dropped.
	Names func() []string

	// Log receives, once, that the file can't be read or written. Nil discards.
	Log *slog.Logger

	mu      sync.Mutex // guards the following
	current map[string]*savedSnapshot

	// Used by Run only. A later Run continues with them.
	loaded   bool                      // the file is in current, if there was one
	stale    map[string]*savedSnapshot // what of the file the source has not updated
	fellBack bool                      // stale was sent
}

// Run implements registry.Source: it runs Source.
func (s *Source) Run(ctx context.Context, updates chan<- registry.Update) error {
	log := s.Log
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	ctx, cancel := context.WithCancel(ctx)
	var running sync.WaitGroup
	defer running.Wait()
	defer cancel()

	r := &run{Source: s, log: log, out: updates, loading: make(chan map[string]*savedSnapshot, 1), dirty: make(chan struct{}, 1)}
	in := make(chan registry.Update)
	ended := make(chan error, 1)
	running.Go(func() { ended <- r.runSource(ctx, in) })
	running.Go(func() { r.write(ctx) })
	if s.loaded {
		r.loading = nil
		r.requestSave() // what was said shortly before the last run ended
	} else {
		running.Go(func() { r.load(ctx) })
	}
	late := time.NewTimer(FirstUpdateTimeout)
	defer late.Stop()
	for {
		var err error
		select {
		case <-ctx.Done():
			return ctx.Err()
		case all := <-r.loading:
			r.adopt(all)
		case u := <-in:
			err = r.observe(ctx, u)
		case <-late.C:
			err = r.fallBack(ctx, fmt.Errorf("no update for %v since the start", FirstUpdateTimeout))
		case why := <-ended:
			if why == nil {
				return r.keepSaving(ctx)
			}
			if err = r.fallBack(ctx, why); err == nil {
				err = why
			}
		}
		if err != nil {
			return err
		}
	}
}

// A run is one call of Run.
type run struct {
	*Source
	log     *slog.Logger
	out     chan<- registry.Update
	loading chan map[string]*savedSnapshot // receives what was in the file; nil afterwards
	dirty   chan struct{}                  // holds one if there is something to save

	lock      io.Closer // of the writer, as is saveError
	saveError string    // why nothing can be saved, as it was logged
}

// runSource runs the source. It turns a panic into an error.
func (r *run) runSource(ctx context.Context, in chan<- registry.Update) (err error) {
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("panic: %v", p)
		}
	}()
	return r.Source.Source.Run(ctx, in)
}

func (r *run) send(ctx context.Context, u registry.Update) error {
	select {
	case r.out <- u:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// observe passes on an update of the source, and remembers it.
func (r *run) observe(ctx context.Context, u registry.Update) error {
	if u.Err != nil {
		if err := r.fallBack(ctx, u.Err); err != nil {
			return err
		}
		if s := r.stale[u.Source]; s != nil && u.Since.IsZero() {
			u.Since = s.time
		}
		return r.send(ctx, u)
	}
	delete(r.stale, u.Source)
	r.mu.Lock()
	if r.current == nil {
		r.current = map[string]*savedSnapshot{}
	}
	r.current[u.Source] = &savedSnapshot{u.Snapshot, time.Now()}
	r.mu.Unlock()
	if err := r.send(ctx, u); err != nil {
		return err
	}
	r.requestSave()
	return r.dropRemoved(ctx)
}

// dropRemoved drops the names that the source no longer uses.
func (r *run) dropRemoved(ctx context.Context) error {
	names, all := r.currentNames()
	if all {
		return nil
	}
	r.mu.Lock()
	for name := range r.current {
		if !slices.Contains(names, name) {
			delete(r.current, name)
		}
	}
	r.mu.Unlock()
	for _, name := range slices.Sorted(maps.Keys(r.stale)) {
		if slices.Contains(names, name) {
			continue
		}
		delete(r.stale, name)
		if r.fellBack {
			if err := r.send(ctx, registry.Update{Source: name}); err != nil {
				return err
			}
		}
	}
	return nil
}

func (r *run) currentNames() (currentNames []string, all bool) {
	if r.Names == nil {
		return nil, true
	}
	currentNames = r.Names()
	return currentNames, currentNames == nil
}

// fallBack sends the saved snapshots, and why they may be old. It does so once.
func (r *run) fallBack(ctx context.Context, why error) error {
	if err := r.awaitFile(ctx); err != nil {
		return err
	}
	if r.fellBack {
		return nil
	}
	r.fellBack = true
	names := slices.Sorted(maps.Keys(r.stale))
	for i, name := range names {
		s := r.stale[name]
		r.log.Warn("source is unavailable; using its saved snapshot", "source", name, "of", s.time.Format(time.RFC3339), "services", len(s.Services), "listeners", len(s.Listeners), "err", why)
		if err := r.send(ctx, registry.Update{Source: name, Snapshot: s.Snapshot, More: true}); err != nil {
			return err
		}
		if err := r.send(ctx, registry.Update{Source: name, Err: why, Since: s.time, More: i < len(names)-1}); err != nil {
			return err
		}
	}
	return nil
}

// awaitFile waits until the file has been read.
func (r *run) awaitFile(ctx context.Context) error {
	if r.loading == nil {
		return nil
	}
	select {
	case all := <-r.loading:
		r.adopt(all)
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// load reads the file.
func (r *run) load(ctx context.Context) {
	begin := time.Now()
	var all map[string]*savedSnapshot
	var err error
	background.Do(func() { all, err = load(ctx, r.Path, r.Settings) })
	switch {
	case ctx.Err() != nil:
		return
	case err != nil:
		r.log.Error("ignored an unusable saved snapshot", "path", r.Path, "err", err)
	case all != nil:
		r.log.Debug("saved snapshots loaded", "path", r.Path, "sources", len(all), "took", time.Since(begin))
	}
	r.loading <- all
}

// adopt takes over the content of the file, except for names that the source has
// updated meanwhile.
func (r *run) adopt(all map[string]*savedSnapshot) {
	r.loading, r.loaded, r.stale = nil, true, map[string]*savedSnapshot{}
	names, any := r.currentNames()
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.current == nil {
		r.current = map[string]*savedSnapshot{}
	}
	for name, s := range all {
		if r.current[name] == nil && (any || slices.Contains(names, name)) {
			r.current[name], r.stale[name] = s, s
		}
	}
	if len(r.current) > len(r.stale) {
		r.requestSave() // the source was faster
	}
}

// requestSave wakes the writer.
func (r *run) requestSave() {
	if !r.loaded {
		return // a save now would lose what is not read yet
	}
	r.wakeWriter()
}

func (r *run) wakeWriter() {
	select {
	case r.dirty <- struct{}{}:
	default:
	}
}

// write writes what has changed, until ctx is done.
func (r *run) write(ctx context.Context) {
	defer func() {
		if r.lock != nil {
			_ = r.lock.Close()
		}
	}()
	wait := saveDelay
	for {
		select {
		case <-ctx.Done():
			return
		case <-r.dirty:
		}
		if !sleep(ctx, wait) {
			return
		}
		select { // what came meanwhile is in this one
		case <-r.dirty:
		default:
		}
		begin := time.Now()
		var err error
		background.Do(func() { err = r.save(ctx) })
		if ctx.Err() != nil {
			return
		}
		r.logSave(ctx, err)
		wait = max(saveDelay, maxSaveShare*time.Since(begin))
		if err != nil {
			wait = saveRetryInterval
			r.wakeWriter()
		}
	}
}

// keepSaving waits for the end of ctx after the source has ended: the writer goes on.
func (r *run) keepSaving(ctx context.Context) error {
	if err := r.awaitFile(ctx); err != nil {
		return err
	}
	<-ctx.Done()
	return ctx.Err()
}

func (r *run) save(ctx context.Context) error {
	if r.lock == nil {
		lock, err := statefile.Lock(r.Path, "saved snapshot")
		if err != nil {
			return err
		}
		r.lock = lock
	}
	r.mu.Lock()
	all := maps.Clone(r.current)
	r.mu.Unlock()
	return statefile.Replace(r.Path, func(w io.Writer) error { return encode(ctx, w, r.Settings, all, MaxSize) })
}

// logSave logs once that the file can't be saved, and once that it can again.
func (r *run) logSave(ctx context.Context, err error) {
	switch {
	case err == nil && r.saveError != "":
		r.log.Info("snapshot saved again", "path", r.Path)
		r.saveError = ""
	case err != nil && r.saveError == "":
		r.saveError = err.Error()
		level := slog.LevelError
		if errors.Is(err, statefile.ErrHeld) {
			level = slog.LevelWarn
		}
		r.log.Log(ctx, level, "cannot save a snapshot; a restart would use an older one or none", "path", r.Path, "err", err)
	}
}

func sleep(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}
