package leases

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
)

// ErrHeld is that another process keeps a file.
var ErrHeld = errors.New("another process keeps them")

// Lock makes the file this process's, until what it returns is closed or the
// process has ended, in whatever way. Where another has it, Lock returns an error
// that is ErrHeld at once. The caller closes what it gets.
//
// It is for those who Save: Load needs no Lock, so that what is kept can be
// looked at meanwhile.
//
// What is locked is an empty file beside the other, PATH.lock. The file itself
// is another one after each Save, and with it the lock would be gone. It is left
// behind: who removes it may remove what somebody has just opened to lock it, and
// the next one would lock a file of its own.
//
// On Windows and where there is flock(2), that is. On other systems nobody is
// kept apart.
func (f File) Lock() (io.Closer, error) {
	path := f.Path + ".lock"
	// As replace does, or two links to one file would be two locks.
	if real, err := filepath.EvalSymlinks(f.Path); err == nil {
		path = real + ".lock"
	}
	// Not inherited by children, of which none outlives us with the lock.
	file, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, fmt.Errorf("lock the %s: %w", f.What, err)
	}
	if err := lock(file); err != nil {
		_ = file.Close()
		if errors.Is(err, ErrHeld) {
			return nil, fmt.Errorf("the %s in %q can't be used: %w, and has %q locked", f.What, f.Path, err, path)
		}
		return nil, fmt.Errorf("lock the %s: %q: %w", f.What, path, err)
	}
	return file, nil
}
