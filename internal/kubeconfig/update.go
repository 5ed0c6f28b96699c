package kubeconfig

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"time"
)

const (
	maxSize  = 8 << 20               // of a file, in bytes
	maxLinks = 40                    // symbolic links that lead to one another
	lockWait = 50 * time.Millisecond // between two attempts to lock
)

// ErrLocked is why files are not changed that another program changes.
var ErrLocked = errors.New("another program changes it")

// Update merges e into the kubeconfig that the files at paths are, and returns the paths of those
// that have something of e now. Of several files the first one that has an item counts, and keeps
// it. What none has, and the current context, go to the first file that is there, or else to the
// last path. Files that are not there are left out.
//
// A file appears at once or not at all, keeps its mode, and is its owner's alone where it is new.
// All stay as they are after an error. Where a path is a symbolic link, the file that it leads to
// is changed. Meanwhile Update holds the locks that kubectl takes, too, for which it waits until
// ctx is done.
func Update(ctx context.Context, paths []string, e *Entry) (used []string, err error) {
	files, into, err := find(paths)
	if err != nil {
		return nil, err
	}
	if err := os.MkdirAll(filepath.Dir(files[into].target), 0o700); err != nil {
		return nil, err
	}
	unlock, err := lock(ctx, files)
	defer func() { err = errors.Join(err, unlock()) }()
	if err != nil {
		return nil, err
	}
	ds := &documents{}
	for _, f := range files {
		if f.text, err = read(f.target); err != nil {
			return nil, err
		}
		d := &document{path: f.path}
		if d.root, err = parse(f.text); err != nil {
			return nil, fmt.Errorf("%s: %w", f.path, err)
		}
		ds.all = append(ds.all, d)
	}
	ds.into = ds.all[into]
	if err := ds.merge(e); err != nil {
		return nil, err
	}
	return write(files, ds)
}

// A file is one of a kubeconfig.
type file struct {
	path   string
	target string // where path leads to
	text   []byte // which it had
	locked error  // why it is not locked
}

// find returns the files at paths, each once, and the index of the one for new items.
func find(paths []string) (files []*file, into int, err error) {
	into = -1
	for _, path := range paths {
		to, err := target(path)
		if err != nil {
			return nil, 0, err
		}
		if slices.ContainsFunc(files, func(f *file) bool { return f.target == to }) {
			continue
		}
		if _, err := os.Stat(to); err == nil && into < 0 {
			into = len(files)
		}
		files = append(files, &file{path: path, target: to})
	}
	switch {
	case len(files) == 0:
		return nil, 0, errors.New("no file is named")
	case into < 0:
		into = len(files) - 1
	}
	return files, into, nil
}

// target returns where path leads to, absolute, also where nothing is there.
func target(path string) (string, error) {
	path, err := filepath.Abs(path)
	if err != nil {
		return "", err
	}
	for range maxLinks {
		if to, err := filepath.EvalSymlinks(path); err == nil {
			return to, nil
		}
		to, err := os.Readlink(path)
		if err != nil {
			if dir, err := filepath.EvalSymlinks(filepath.Dir(path)); err == nil {
				path = filepath.Join(dir, filepath.Base(path))
			}
			return path, nil
		}
		if !filepath.IsAbs(to) {
			to = filepath.Join(filepath.Dir(path), to)
		}
		path = to
	}
	return "", fmt.Errorf("%s: more than %d symbolic links, the limit", path, maxLinks)
}

// lock locks files as kubectl does: all of them, in the order of their names. kubectl locks a
// symbolic link, not what it leads to; lock has both. A file in a directory that cannot be written
// to, or is not there, has locked set, and is for reading only. The caller unlocks, also after an
// error.
func lock(ctx context.Context, files []*file) (unlock func() error, err error) {
	var held []string
	unlock = func() error {
		var errs []error
		for _, name := range held {
			errs = append(errs, os.Remove(name))
		}
		return errors.Join(errs...)
	}
	of := map[string]*file{} // by the lock of its target
	var names []string
	for _, f := range files {
		dir, err := target(filepath.Dir(f.path)) // as two paths may lead to one lock
		if err != nil {
			return unlock, err
		}
		of[f.target+".lock"] = f
		names = append(names, f.target+".lock", filepath.Join(dir, filepath.Base(f.path))+".lock")
	}
	slices.Sort(names)
	for _, name := range slices.Compact(names) {
		err := lockOne(ctx, name)
		switch f := of[name]; {
		case err == nil:
			held = append(held, name)
		case errors.Is(err, ErrLocked):
			return unlock, err
		case f != nil:
			f.locked = err
		}
	}
	return unlock, nil
}

// lockOne makes the file with that name, which is there while another program has the lock.
func lockOne(ctx context.Context, name string) error {
	for {
		f, err := os.OpenFile(name, os.O_CREATE|os.O_EXCL, 0o600)
		if err == nil {
			return f.Close()
		}
		if !errors.Is(err, fs.ErrExist) {
			return err
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%s is there: %w", name, ErrLocked)
		case <-time.After(lockWait):
		}
	}
}

// read returns what is in the file at path, nothing where there is none.
func read(path string) ([]byte, error) {
	f, err := os.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	defer f.Close()
	text, err := io.ReadAll(io.LimitReader(f, maxSize+1))
	if err == nil && len(text) > maxSize {
		err = fmt.Errorf("%s has more than %d bytes, the limit", path, maxSize)
	}
	return text, err
}

// write replaces the files of which ds has used something, and returns their paths. It writes all
// before it replaces the first one.
func write(files []*file, ds *documents) (used []string, err error) {
	next := map[string]string{} // by target
	defer func() {
		for _, name := range next {
			if err != nil {
				_ = os.Remove(name)
			}
		}
	}()
	for i, d := range ds.all {
		f := files[i]
		if !d.used {
			continue
		}
		used = append(used, f.path)
		text, err := d.encode()
		if err != nil {
			return nil, err
		}
		if bytes.Equal(text, f.text) {
			continue
		}
		if f.locked != nil {
			return nil, fmt.Errorf("lock %s: %w", f.path, f.locked)
		}
		name, err := writeBeside(f.target, text)
		if err != nil {
			return nil, err
		}
		next[f.target] = name
	}
	for to, name := range next {
		if err := os.Rename(name, to); err != nil {
			return nil, err
		}
		delete(next, to)
	}
	return used, nil
}

// writeBeside makes a file with text, in the directory of the one that it is to replace, and with
// that one's mode.
func writeBeside(path string, text []byte) (name string, err error) {
	f, err := os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+"-*") // with mode 0600
	if err != nil {
		return "", err
	}
	defer func() {
		if err != nil {
			_ = os.Remove(f.Name())
		}
	}()
	if info, e := os.Stat(path); e == nil {
		err = f.Chmod(info.Mode().Perm())
	}
	if err == nil {
		_, err = f.Write(text)
	}
	if err == nil {
		err = f.Sync()
	}
	return f.Name(), errors.Join(err, f.Close())
}
