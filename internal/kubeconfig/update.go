package kubeconfig

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
)

// maxSize bounds the file, in bytes.
const maxSize = 8 << 20

// ErrLocked is why a file is not changed that another program changes.
var ErrLocked = errors.New("another program changes it")

// Update merges e into the file at path, which it makes where there is none. The file appears
// at once or not at all, for its owner alone, and stays as it is after an error. Where path is a
// symbolic link, the file that it leads to is changed. Meanwhile it holds the lock that kubectl
// takes, too.
func Update(path string, e *Entry) (err error) {
	if to, err := filepath.EvalSymlinks(path); err == nil {
		path = to
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return err
	}
	lock := path + ".lock"
	held, err := os.OpenFile(lock, os.O_CREATE|os.O_EXCL, 0o600)
	if errors.Is(err, fs.ErrExist) {
		return fmt.Errorf("%s: %w", path, ErrLocked)
	}
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, held.Close(), os.Remove(lock)) }()
	text, err := read(path)
	if err != nil {
		return err
	}
	merged, err := Merge(text, e)
	if err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	return replace(path, merged)
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

// replace has the file at path be text, from one moment to the next.
func replace(path string, text []byte) (err error) {
	f, err := os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+"-*") // with mode 0600
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			_ = os.Remove(f.Name())
		}
	}()
	_, err = f.Write(text)
	if err == nil {
		err = f.Sync()
	}
	if err = errors.Join(err, f.Close()); err != nil {
		return err
	}
	return os.Rename(f.Name(), path)
}
