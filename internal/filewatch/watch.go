// Package filewatch waits for changes of files: that they are rewritten, renamed over, or
// reached through symbolic links that are swapped, as Kubernetes does with the directories
// of ConfigMaps and Secrets, and certbot with those of certificates.
//
//	w := filewatch.New(log)
//	defer w.Close()
//	w.Follow([]string{"/etc/culvert/edge.pem"}, false)
//	for {
//		// read the files
//		changed, _, err := w.Wait(ctx, nil)
//		...
//	}
//
// The system's notices are used where there are any, and all files are looked at now and
// then all the same: some file systems, of a network most of all, accept a watch and report
// nothing. Package filewatch reads no file.
package filewatch

import (
	"context"
	"io/fs"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/fsnotify/fsnotify"
)

const (
	// quiet is how long files must be still before they are reported: editors and
	// copies write in pieces.
	quiet = 100 * time.Millisecond

	// patience is how long files that are never still are waited for.
	patience = 500 * time.Millisecond

	// poll is how often the files are looked at where the system reports no changes,
	// and slowPoll where it says that it does.
	poll     = 500 * time.Millisecond
	slowPoll = 2 * time.Second

	// share bounds what looking at many files costs: at most one part in share of the
	// time goes into it.
	share = 50

	// maxLinks is how many symbolic links a path may lead through, as in Linux.
	maxLinks = 40
)

// A Watch waits for changes of files. It watches their directories, and those that symbolic
// links lead to: a watch of a file itself would stay with the old one when a new one is
// renamed over it. Its methods are called by one goroutine.
type Watch struct {
	log     *slog.Logger
	watcher *fsnotify.Watcher // nil if the system has none left
	events  <-chan fsnotify.Event
	errors  <-chan error

	files map[string]*file
	paths map[string]map[*file]bool // by a path whose change concerns them
	bases map[string]map[*file]bool // by the last element of such a path
	dirs  map[string]int            // that should be watched: how many paths are in it
	blind map[string]bool           // of dirs, those that can't be

	touched map[*file]bool // that have changed, or may have, and were not reported yet
	took    time.Duration  // the last look at all files
}

// A file is one that is followed.
type file struct {
	name  string
	stamp stamp
	paths []string // itself, and the links that it is reached by
}

// A stamp is what the file system says of a file: by it a change is seen without reading.
type stamp struct {
	info     fs.FileInfo // nil where there is no such file
	modified int64       // nanoseconds
}

func (s stamp) equal(o stamp) bool {
	if s.info == nil || o.info == nil {
		return s.info == o.info
	}
	return s.modified == o.modified && s.info.Size() == o.info.Size() && s.info.Mode() == o.info.Mode() && os.SameFile(s.info, o.info)
}

// stampOf looks at a file.
func stampOf(name string) stamp {
	info, err := os.Stat(name)
	if err != nil {
		return stamp{}
	}
	return stamp{info, info.ModTime().UnixNano()}
}

// New returns a Watch of no file. A nil log discards.
func New(log *slog.Logger) *Watch {
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	w := &Watch{
		log: log, files: map[string]*file{}, paths: map[string]map[*file]bool{}, bases: map[string]map[*file]bool{},
		dirs: map[string]int{}, blind: map[string]bool{}, touched: map[*file]bool{},
	}
	var err error
	if w.watcher, err = fsnotify.NewWatcher(); err != nil {
		w.watcher = nil
		w.log.Warn("cannot watch files; polling them instead", "every", poll, "err", err)
		return w
	}
	w.events, w.errors = w.watcher.Events, w.watcher.Errors
	return w
}

// Close gives back what the Watch has of the system.
func (w *Watch) Close() {
	if w.watcher != nil {
		_ = w.watcher.Close()
		w.watcher, w.events, w.errors = nil, nil, nil
	}
}

// Follow makes names the files that are followed. Where read is true, the new ones of them
// were read before they were followed, so that a change may have been missed: the next Wait
// reports them.
func (w *Watch) Follow(names []string, read bool) {
	want := make(map[string]bool, len(names))
	for _, name := range names {
		want[name] = true
		if w.files[name] != nil {
			continue
		}
		f := &file{name: name}
		w.files[name] = f
		w.look(f)
		if read {
			w.touched[f] = true
		}
	}
	for name, f := range w.files {
		if !want[name] {
			w.setPaths(f, nil)
			delete(w.files, name)
			delete(w.touched, f)
		}
	}
}

// look watches the directories that f is reached by now, and then looks at it, so that no
// later change is missed.
func (w *Watch) look(f *file) {
	paths := []string{filepath.Clean(f.name)}
	left := maxLinks
	eachLink(f.name, &left, func(path string) {
		if !slices.Contains(paths, path) {
			paths = append(paths, path)
		}
	})
	w.setPaths(f, paths)
	f.stamp = stampOf(f.name)
}

// setPaths makes paths those whose change concerns f.
func (w *Watch) setPaths(f *file, paths []string) {
	for _, p := range paths {
		if slices.Contains(f.paths, p) {
			// A directory that was removed and made again has lost its watch, and adding
			// one twice does no harm.
			w.watchDir(filepath.Dir(p))
			continue
		}
		put(w.paths, p, f)
		put(w.bases, filepath.Base(p), f)
		w.dirs[filepath.Dir(p)]++
		w.watchDir(filepath.Dir(p))
	}
	for _, p := range f.paths {
		if slices.Contains(paths, p) {
			continue
		}
		take(w.paths, p, f)
		base := filepath.Base(p)
		if !slices.ContainsFunc(paths, func(other string) bool { return filepath.Base(other) == base }) {
			take(w.bases, base, f)
		}
		dir := filepath.Dir(p)
		if w.dirs[dir]--; w.dirs[dir] > 0 {
			continue
		}
		delete(w.dirs, dir)
		delete(w.blind, dir)
		if w.watcher != nil {
			_ = w.watcher.Remove(dir)
		}
	}
	f.paths = paths
}

// watchDir has the system report what happens in a directory.
func (w *Watch) watchDir(dir string) {
	if w.watcher == nil {
		return
	}
	if err := w.watcher.Add(dir); err != nil {
		w.blind[dir] = true
		return
	}
	delete(w.blind, dir)
}

func put(m map[string]map[*file]bool, key string, f *file) {
	if m[key] == nil {
		m[key] = map[*file]bool{}
	}
	m[key][f] = true
}

func take(m map[string]map[*file]bool, key string, f *file) {
	delete(m[key], f)
	if len(m[key]) == 0 {
		delete(m, key)
	}
}

// eachLink calls add with each symbolic link that path leads through, and with where it
// leads: any of them may be swapped. It follows no more than left.
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

// interval is how often to look at all files.
func (w *Watch) interval() time.Duration {
	every := slowPoll
	if w.watcher == nil || len(w.blind) > 0 {
		every = poll
	}
	return max(every, share*w.took)
}

// Wait returns the files that have changed since they were followed, or reported by Wait
// last, once they are still. It returns at once when now has something, with what has
// changed so far. Its error is that of ctx.
func (w *Watch) Wait(ctx context.Context, now <-chan struct{}) (changed []string, forced bool, err error) {
	var still, late <-chan time.Time
	wait := func() {
		still = time.After(quiet)
		if late == nil {
			late = time.After(patience)
		}
	}
	if len(w.touched) > 0 {
		wait()
	}
	tick := time.NewTimer(w.interval())
	defer tick.Stop()
	for {
		before, seen := len(w.touched), false
		select {
		case <-ctx.Done():
			return nil, false, ctx.Err()
		case <-now:
			return w.report(), true, nil
		case <-still:
			return w.report(), false, nil
		case <-late:
			return w.report(), false, nil
		case ev := <-w.events:
			seen = w.notice(ev.Name)
		case <-w.errors: // notices were lost
			w.lookAtAll()
		case <-tick.C:
			w.lookAtAll()
			tick.Reset(w.interval())
		}
		if seen || len(w.touched) > before {
			wait()
		}
	}
}

// notice notes that something has happened to a path, and reports whether that concerns a
// file. The stamp of a file that is written twice in one tick of the system's clock may be
// the same, so the path is enough.
func (w *Watch) notice(path string) bool {
	of := w.paths[path]
	if of == nil && w.dirs[path] > 0 { // a directory itself, which may have lost its watch
		for _, f := range w.files {
			if slices.ContainsFunc(f.paths, func(p string) bool { return filepath.Dir(p) == path }) {
				w.touched[f] = true
			}
		}
		return true
	}
	if of == nil {
		// The system may call a directory by another of its names.
		of = w.bases[filepath.Base(path)]
	}
	maps.Copy(w.touched, of)
	return len(of) > 0
}

// lookAtAll notes files whose stamps are others.
func (w *Watch) lookAtAll() {
	begun := time.Now()
	for _, f := range w.files {
		if s := stampOf(f.name); !s.equal(f.stamp) {
			f.stamp = s
			w.touched[f] = true
		}
	}
	w.took = time.Since(begun)
}

// report returns the files that were touched. Whatever is done to them from now on, the
// next Wait reports.
func (w *Watch) report() []string {
	names := make([]string, 0, len(w.touched))
	for f := range w.touched {
		w.look(f)
		names = append(names, f.name)
	}
	clear(w.touched)
	slices.Sort(names)
	return names
}
