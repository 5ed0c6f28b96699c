package file

import (
	"context"
	"io/fs"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"culvert.dev/internal/background"
	"culvert.dev/registry"
	"github.com/fsnotify/fsnotify"
)

const (
	// quiet is how long a file must be still before it is read: editors and
	// copies write in pieces.
	quiet = 100 * time.Millisecond

	// patience is how long a file that is never still is waited for.
	patience = 500 * time.Millisecond

	// poll is how often the files are looked at where the system reports no
	// changes, and slowPoll where it says that it does: some file systems, of a
	// network most of all, accept a watch and report nothing.
	poll     = 500 * time.Millisecond
	slowPoll = 2 * time.Second
)

// A Source is a configuration file as a registry.Source: it sends the file's
// services and networks at first and whenever they change. The zero value but
// for Path is ready; a Source must not be copied and is run once.
//
// The file may be rewritten, renamed over, or reached through symbolic links
// that are swapped, as a Kubernetes ConfigMap does. A file that is missing or
// wrong changes nothing, and is complained of once; the registry is told that
// what it has may be old.
type Source struct {
	Path string

	// Load reads Path, and returns current itself where it would be the same.
	// Nil means Reload; ReloadRoutes is the other choice.
	Load func(path string, current *Config) (*Config, error)

	// OnConfig is told of every configuration that was accepted, the first one
	// included, before its services take effect. It is called by Run, and returns
	// the sources that the configuration asks for in the place of those of the one
	// before it, or nil where they stay. If OnConfig is nil, parts that need a
	// restart to take effect are logged.
	OnConfig func(*Config) *registry.Group

	// OnError is told of every file that was refused: Errors with all its
	// mistakes, or what the file system said. It is called by Run. May be nil.
	OnError func(error)

	// Log is told of the same. Nil discards.
	Log *slog.Logger

	once   sync.Once
	reload chan struct{}
}

func (s *Source) init() { s.once.Do(func() { s.reload = make(chan struct{}, 1) }) }

// Reload makes Run read the file now, as on SIGHUP. It does not wait.
func (s *Source) Reload() {
	s.init()
	select {
	case s.reload <- struct{}{}:
	default: // one is on its way already
	}
}

// Run implements registry.Source. It returns when ctx is done.
func (s *Source) Run(ctx context.Context, updates chan<- registry.Update) error {
	s.init()
	w := watch{log: s.Log}
	if w.log == nil {
		w.log = slog.New(slog.DiscardHandler)
	}
	w.start()
	defer w.stop()

	var current *Config
	var lost error // the file can't be read, so that current may be old
	ticker := time.NewTicker(poll)
	defer ticker.Stop()
	for forced := true; ; {
		// The watches are set before the file is read, so that no later change
		// is missed.
		w.follow(s.files(current))
		seen := w.stamps()
		var next *Config
		var err error
		background.Do(func() { next, err = s.read(current, forced, w.log) })
		update := registry.Update{Source: s.Path, Err: err}
		if next != nil {
			if s.OnConfig != nil {
				update.Group = s.OnConfig(next)
			} else if current != nil {
				if parts := current.RestartNeeded(next); len(parts) > 0 {
					w.log.Warn("configuration change needs a restart", "file", s.Path, "changed", joinKeys(parts))
				}
			}
			current = next
			w.follow(s.files(current)) // it may name other files than before
		}
		ticker.Reset(w.interval())
		if next != nil || err != nil || lost != nil {
			if err == nil {
				update.Snapshot = current.Snapshot() // which is what it was, where the file is back
			}
			select {
			case updates <- update:
			case <-ctx.Done():
				return ctx.Err()
			}
		}
		lost = err
		if forced, err = s.wait(ctx, &w, seen, ticker.C); err != nil {
			return err
		}
	}
}

func joinKeys(list []Change) string {
	keys := make([]string, len(list))
	for i, c := range list {
		keys[i] = c.Key
	}
	return strings.Join(keys, ", ")
}

// files returns every file the configuration is made of.
func (s *Source) files(c *Config) []string {
	if c == nil {
		return []string{s.Path}
	}
	return c.files
}

// read loads the file and returns what is new, nil for nothing.
func (s *Source) read(current *Config, forced bool, log *slog.Logger) (*Config, error) {
	load := s.Load
	if load == nil {
		load = Reload
	}
	next, err := load(s.Path, current)
	switch {
	case err != nil:
		if s.OnError != nil {
			s.OnError(err)
		}
		log.Error("configuration refused; keeping the previous one", "file", s.Path, "err", err)
		return nil, err
	case next == current:
		if forced {
			log.Info("configuration unchanged", "file", s.Path)
		}
		return nil, nil
	}
	log.Info("configuration read", "file", s.Path, "services", len(next.Services))
	return next, nil
}

// wait returns when the files differ from what was seen and are still again,
// or at once after Reload.
func (s *Source) wait(ctx context.Context, w *watch, seen stamps, tick <-chan time.Time) (forced bool, err error) {
	var still, late <-chan time.Time
	for {
		touched := false
		select {
		case <-ctx.Done():
			return false, ctx.Err()
		case <-s.reload:
			return true, nil
		case <-still:
			return false, nil
		case <-late:
			return false, nil
		case ev := <-w.events:
			// The stamp of a file that is written twice in one tick of the
			// system's clock may be the same, so its name is enough.
			touched = w.bases[filepath.Base(ev.Name)] || w.dirs[ev.Name]
		case <-w.errors: // notices were lost
			touched = true
		case <-tick:
		}
		now := w.stamps()
		if !touched && maps.Equal(now, seen) {
			continue
		}
		seen = now
		still = time.After(quiet)
		if late == nil {
			late = time.After(patience)
		}
	}
}

// A stamp is what the file system says of a file: by it a change is seen
// without reading.
type stamp struct {
	size     int64
	modified int64 // nanoseconds
	mode     fs.FileMode
	real     string // where the symbolic links lead
}

type stamps map[string]stamp

// A watch waits for changes of files. It watches their directories, and those
// that symbolic links lead to: a watch of the file itself would stay with the
// old one when a new one is renamed over it.
type watch struct {
	log     *slog.Logger
	watcher *fsnotify.Watcher // nil if the system has none left
	events  <-chan fsnotify.Event
	errors  <-chan error
	files   []string
	bases   map[string]bool // what files and what they link to are called
	dirs    map[string]bool // that are watched
	blind   bool            // some can't be
}

// interval is how often to look at the files.
func (w *watch) interval() time.Duration {
	if w.watcher == nil || w.blind {
		return poll
	}
	return slowPoll
}

func (w *watch) start() {
	w.dirs = map[string]bool{}
	var err error
	if w.watcher, err = fsnotify.NewWatcher(); err != nil {
		w.log.Warn("cannot watch the configuration file; polling it instead", "every", poll, "err", err)
		return
	}
	w.events, w.errors = w.watcher.Events, w.watcher.Errors
}

func (w *watch) stop() {
	if w.watcher != nil {
		_ = w.watcher.Close()
	}
}

// follow makes files what is watched.
func (w *watch) follow(files []string) {
	w.files = slices.Clone(files)
	w.bases = map[string]bool{}
	want := map[string]bool{}
	add := func(path string) {
		w.bases[filepath.Base(path)] = true
		want[filepath.Dir(path)] = true
	}
	for _, f := range files {
		add(f)
		left := maxLinks
		eachLink(f, &left, add)
	}
	if w.watcher == nil {
		return
	}
	for dir := range w.dirs {
		if !want[dir] {
			_ = w.watcher.Remove(dir)
			delete(w.dirs, dir)
		}
	}
	w.blind = false
	for dir := range want {
		// Also those watched before: a directory that was removed and made
		// again has lost its watch, and adding one twice does no harm.
		if err := w.watcher.Add(dir); err != nil {
			w.blind = true
			continue
		}
		w.dirs[dir] = true
	}
}

// maxLinks is how many symbolic links a path may lead through, as in Linux.
const maxLinks = 40

// eachLink calls add with each symbolic link that path leads through, and with
// where it leads: any of them may be swapped. It follows no more than left.
func eachLink(path string, left *int, add func(string)) {
	path = filepath.Clean(path)
	for at := path; *left > 0 && at != filepath.Dir(at); at = filepath.Dir(at) {
		to, err := os.Readlink(at)
		if err != nil {
			continue
		}
		if !filepath.IsAbs(to) {
			to = filepath.Join(filepath.Dir(at), to)
		}
		*left--
		to += path[len(at):]
		add(at)
		add(to)
		eachLink(to, left, add)
	}
}

// stamps looks at the files.
func (w *watch) stamps() stamps {
	all := make(stamps, len(w.files))
	for _, f := range w.files {
		info, err := os.Stat(f)
		if err != nil {
			all[f] = stamp{size: -1}
			continue
		}
		real, _ := filepath.EvalSymlinks(f)
		all[f] = stamp{size: info.Size(), modified: info.ModTime().UnixNano(), mode: info.Mode(), real: real}
	}
	return all
}
