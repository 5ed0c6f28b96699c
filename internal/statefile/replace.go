package statefile

import (
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
)

// toDisk returns when the disk has a file, or the names in a folder. A test looks at
// what it is called with.
var toDisk = (*os.File).Sync

// Replace writes a file anew, by write: after a crash at any moment there is the old content or the
// new one, whole. If write or any other step fails, the file is unchanged. Only its owner may read
// or write it. Of several processes only one may replace a file: see Lock.
func Replace(path string, write func(io.Writer) error) (err error) {
	// A link is followed: its target is replaced, and not the link.
	if real, err := filepath.EvalSymlinks(path); err == nil {
		path = real
	}
	// One name, so that those who are killed here leave one file at the most; and
	// a new file, whatever has the name.
	name := path + ".new"
	if err := os.Remove(name); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	tmp, err := os.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			_ = tmp.Close()
			_ = os.Remove(name)
		}
	}()
	if err = write(tmp); err != nil {
		return err
	}
	if err = toDisk(tmp); err != nil {
		return err
	}
	if err = tmp.Close(); err != nil {
		return err
	}
	if err = os.Rename(name, path); err != nil {
		return err
	}
	// The name is on the disk when the folder is. Not every system can do it.
	if d, err := os.Open(filepath.Dir(path)); err == nil {
		_ = toDisk(d)
		_ = d.Close()
	}
	return nil
}
