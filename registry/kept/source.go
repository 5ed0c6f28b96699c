package kept

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

	"culvert.dev/registry"
	"culvert.dev/registry/alloc"
)

const (
	// Patience is how long a source may say nothing before what is kept of it is
	// in force. It is less than a Registry waits with its first table.
	Patience = 3 * time.Second

	// debounce is from news to their writing.
	debounce = time.Second

	// share is how many times as long as the last writing took passes before the
	// next one: news without end take a tenth of a core at the most.
	share = 10

	// again is from a writing that failed to the next one.
	again = 10 * time.Second
)

// A Source is a registry.Source that keeps what another one says. Source and Path
// are needed. It must not be copied, nor changed once it runs.
type Source struct {
	Source registry.Source
	Path   string // of the file, in a folder that may be written to

	// Settings is all that what the source says depends on beside what it looks
	// at. What was kept by others is ignored: who has forbidden something since
	// must not find it served.
	Settings string

	// Names returns the names that Source has something to say under; nil as long
	// as that is not known. It is asked when Source has said something, and what
	// is kept by other names goes. Nil means that nothing goes by itself.
	Names func() []string

	// Log is told of a file that can't be read or written, once. Nil discards.
	Log *slog.Logger

	mu    sync.Mutex // guards the following
	known map[string]*said

	// Of Run alone, and left as they are for one that comes after another.
	read bool             // what is kept is in known, where there was any
	old  map[string]*said // what of it the source has not said anything to
	told bool             // old was passed on
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

	r := &run{Source: s, log: log, out: updates, loaded: make(chan map[string]*said, 1), dirty: make(chan struct{}, 1)}
	in := make(chan registry.Update)
	ended := make(chan error, 1)
	running.Go(func() { ended <- r.inner(ctx, in) })
	running.Go(func() { r.write(ctx) })
	if s.read {
		r.loaded = nil
		r.changed() // what was said shortly before the last run ended
	} else {
		running.Go(func() { r.load(ctx) })
	}
	late := time.NewTimer(Patience)
	defer late.Stop()
	for {
		var err error
		select {
		case <-ctx.Done():
			return ctx.Err()
		case all := <-r.loaded:
			r.take(all)
		case u := <-in:
			err = r.hear(ctx, u)
		case <-late.C:
			err = r.tell(ctx, fmt.Errorf("it has said nothing for %v since the start", Patience))
		case why := <-ended:
			if why == nil {
				return r.rest(ctx)
			}
			if err = r.tell(ctx, why); err == nil {
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
	log    *slog.Logger
	out    chan<- registry.Update
	loaded chan map[string]*said // what was in the file; nil when that is known
	dirty  chan struct{}         // has one if there is something to be written

	lock io.Closer // of the writer, as is the next
	bad  string    // why nothing can be written, as it was said
}

// inner runs the source. A panic of it is its failure.
func (r *run) inner(ctx context.Context, in chan<- registry.Update) (err error) {
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

// hear passes on what the source says, and remembers it.
func (r *run) hear(ctx context.Context, u registry.Update) error {
	if u.Err != nil {
		if err := r.tell(ctx, u.Err); err != nil {
			return err
		}
		if s := r.old[u.Source]; s != nil && u.Since.IsZero() {
			u.Since = s.at
		}
		return r.send(ctx, u)
	}
	delete(r.old, u.Source)
	r.mu.Lock()
	if r.known == nil {
		r.known = map[string]*said{}
	}
	r.known[u.Source] = &said{u.Snapshot, time.Now()}
	r.mu.Unlock()
	if err := r.send(ctx, u); err != nil {
		return err
	}
	r.changed()
	return r.forget(ctx)
}

// forget lets go what the source has nothing more to say to.
func (r *run) forget(ctx context.Context) error {
	names, all := r.names()
	if all {
		return nil
	}
	r.mu.Lock()
	for name := range r.known {
		if !slices.Contains(names, name) {
			delete(r.known, name)
		}
	}
	r.mu.Unlock()
	for _, name := range slices.Sorted(maps.Keys(r.old)) {
		if slices.Contains(names, name) {
			continue
		}
		delete(r.old, name)
		if r.told {
			if err := r.send(ctx, registry.Update{Source: name}); err != nil {
				return err
			}
		}
	}
	return nil
}

func (r *run) names() (names []string, all bool) {
	if r.Names == nil {
		return nil, true
	}
	names = r.Names()
	return names, names == nil
}

// tell passes on what is kept, and why it may be old. It does so once.
func (r *run) tell(ctx context.Context, why error) error {
	if err := r.wait(ctx); err != nil {
		return err
	}
	if r.told {
		return nil
	}
	r.told = true
	for _, name := range slices.Sorted(maps.Keys(r.old)) {
		s := r.old[name]
		r.log.Warn("source is unavailable; using its saved snapshot", "source", name, "of", s.at.Format(time.RFC3339), "services", len(s.Services), "listeners", len(s.Listeners), "err", why)
		if err := r.send(ctx, registry.Update{Source: name, Snapshot: s.Snapshot}); err != nil {
			return err
		}
		if err := r.send(ctx, registry.Update{Source: name, Err: why, Since: s.at}); err != nil {
			return err
		}
	}
	return nil
}

// wait waits until it is known what was in the file.
func (r *run) wait(ctx context.Context) error {
	if r.loaded == nil {
		return nil
	}
	select {
	case all := <-r.loaded:
		r.take(all)
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// load reads the file.
func (r *run) load(ctx context.Context) {
	begin := time.Now()
	all, err := load(ctx, r.Path, r.Settings)
	switch {
	case ctx.Err() != nil:
		return
	case err != nil:
		r.log.Error("ignored an unusable saved snapshot", "path", r.Path, "err", err)
	case all != nil:
		r.log.Debug("saved snapshots loaded", "path", r.Path, "sources", len(all), "took", time.Since(begin))
	}
	r.loaded <- all
}

// take takes in what the file has, but for what is known better.
func (r *run) take(all map[string]*said) {
	r.loaded, r.read, r.old = nil, true, map[string]*said{}
	names, any := r.names()
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.known == nil {
		r.known = map[string]*said{}
	}
	for name, s := range all {
		if r.known[name] == nil && (any || slices.Contains(names, name)) {
			r.known[name], r.old[name] = s, s
		}
	}
	if len(r.known) > len(r.old) {
		r.changed() // the source was faster
	}
}

// changed has what is known written.
func (r *run) changed() {
	if !r.read {
		return // who wrote now would lose what is not read yet
	}
	r.kick()
}

func (r *run) kick() {
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
	wait := debounce
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
		err := r.save(ctx)
		if ctx.Err() != nil {
			return
		}
		r.say(ctx, err)
		wait = max(debounce, share*time.Since(begin))
		if err != nil {
			wait = again
			r.kick()
		}
	}
}

// rest is for a source that has nothing more to say: the writer goes on.
func (r *run) rest(ctx context.Context) error {
	if err := r.wait(ctx); err != nil {
		return err
	}
	<-ctx.Done()
	return ctx.Err()
}

func (r *run) save(ctx context.Context) error {
	if r.lock == nil {
		lock, err := alloc.Lock(r.Path, "kept state")
		if err != nil {
			return err
		}
		r.lock = lock
	}
	r.mu.Lock()
	all := maps.Clone(r.known)
	r.mu.Unlock()
	return alloc.Replace(r.Path, func(w io.Writer) error { return encode(ctx, w, r.Settings, all, MaxSize) })
}

// say says once what is wrong with the file, and that it is not any more.
func (r *run) say(ctx context.Context, err error) {
	switch {
	case err == nil && r.bad != "":
		r.log.Info("snapshot saved again", "path", r.Path)
		r.bad = ""
	case err != nil && r.bad == "":
		r.bad = err.Error()
		level := slog.LevelError
		if errors.Is(err, alloc.ErrHeld) {
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
