package statefile

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
)

// ErrHeld is the error of a file that another process has locked.
var ErrHeld = errors.New("another process keeps them")

// Lock locks the file at path for this process, until the caller closes the returned Closer or the
// process ends, in whatever way. Where another process has it, Lock returns ErrHeld at once. The
// word what names the content in errors.
//
// It is for processes that write: reading needs no Lock, so that people can look
// at the file meanwhile.
//
// The lock is on an empty file beside the other, PATH.lock. Each Replace makes
// PATH another file, and a lock on it would be lost. PATH.lock
// stays: a process that removed it could remove the one that another has just
// opened to lock it, and the next one would lock a file of its own.
//
// It works on Windows and where there is flock(2). On other systems nothing keeps
// processes apart.
func Lock(path, what string) (io.Closer, error) {
	name := path + ".lock"
	// As Replace does, or two links to one file would be two locks.
	if real, err := filepath.EvalSymlinks(path); err == nil {
		name = real + ".lock"
	}
	// Not inherited by children, of which none outlives us with the lock.
	file, err := os.OpenFile(name, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, fmt.Errorf("lock the %s: %w", what, err)
	}
	if err := lock(file); err != nil {
		_ = file.Close()
		if errors.Is(err, ErrHeld) {
			return nil, fmt.Errorf("the %s in %q can't be used: %w, and has %q locked", what, path, err, name)
		}
		return nil, fmt.Errorf("lock the %s: %q: %w", what, name, err)
	}
	return file, nil
}
