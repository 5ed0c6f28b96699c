package leases

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"culvert.dev/registry"
)

const (
	// version is that of the files' format.
	version = 1

	// MaxSize is the largest file that is read, in bytes.
	MaxSize = 64 << 20
)

// A File keeps what was assigned, as one JSON object with a version and a list:
//
//	{"version": 1, "ports": [
//	  {"service": "db.example.com", "assigned": 20017, "since": "2026-01-02T15:04:05Z"}
//	]}
//
// It is one process's alone: who is to Save it has the Lock.
type File struct {
	Path string
	What string // is in it, for errors: "assigned ports"
	List string // the key of the list: "ports"
}

// Times are the last fields of an entry.
type Times struct {
	Since time.Time  `json:"since"`
	Gone  *time.Time `json:"gone,omitempty"`
}

// TimesOf returns the fields for a Lease's times; zero for gone means that it is
// not.
func TimesOf(since, gone time.Time) Times {
	t := Times{Since: since.UTC()}
	if !gone.IsZero() {
		gone = gone.UTC()
		t.Gone = &gone
	}
	return t
}

// Left returns Gone, zero where it is not said.
func (t Times) Left() time.Time {
	if t.Gone == nil {
		return time.Time{}
	}
	return *t.Gone
}

// Load reads the file and returns what parse finds in it. One that is not there
// is empty: parse is not called. One that can't be read or understood as a whole
// is an error: whoever went on without it would give services other places than
// their clients know.
func Load[A any](f File, parse func(data []byte) ([]A, error)) ([]A, error) {
	data, err := f.read()
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read the %s: %w", f.What, err)
	}
	all, err := parse(data)
	if err != nil {
		return nil, fmt.Errorf("the %s in %q can't be used: %w", f.What, f.Path, err)
	}
	return all, nil
}

func (f File) read() ([]byte, error) {
	info, err := os.Stat(f.Path) // before opening: a FIFO would block
	if err != nil {
		return nil, err
	}
	tooLarge := fmt.Errorf("%q is larger than the limit of %d bytes", f.Path, MaxSize)
	switch {
	case !info.Mode().IsRegular():
		return nil, fmt.Errorf("%q is not a regular file", f.Path)
	case info.Size() > MaxSize:
		return nil, tooLarge
	}
	file, err := os.Open(f.Path)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	data, err := io.ReadAll(io.LimitReader(file, MaxSize+1))
	if err != nil {
		return nil, err
	}
	if len(data) > MaxSize {
		return nil, tooLarge
	}
	return data, nil
}

// Parse decodes the content of a file into to, a pointer to a struct with the
// fields Version and that of the list, and takes nothing for granted: another
// version, and what this one does not know, are errors.
func Parse(data []byte, to any) error {
	var head struct{ Version *int }
	if err := json.Unmarshal(data, &head); err != nil {
		return syntax(data, err)
	}
	switch {
	case head.Version == nil:
		return errors.New("it tells no version")
	case *head.Version != version:
		return fmt.Errorf("it is of version %d, and this culvert reads version %d", *head.Version, version)
	}
	dec := json.NewDecoder(bytes.NewReader(data))
	dec.DisallowUnknownFields()
	if err := dec.Decode(to); err != nil {
		return syntax(data, err)
	}
	return nil
}

// syntax says where in data an error is.
func syntax(data []byte, err error) error {
	if len(bytes.TrimSpace(data)) == 0 {
		return errors.New("it is empty")
	}
	var se *json.SyntaxError
	var te *json.UnmarshalTypeError
	var offset int64
	switch {
	case errors.As(err, &se):
		offset = se.Offset
	case errors.As(err, &te):
		offset = te.Offset
	default:
		return err
	}
	line := 1 + bytes.Count(data[:min(offset, int64(len(data)))], []byte("\n"))
	return fmt.Errorf("line %d: %w", line, err)
}

// Save writes the file anew: after a crash at any moment there is the old one
// or the new one, whole. Only its owner may read or write it.
func Save[E any](f File, entries []E) error {
	data, err := Encode(f.List, entries)
	switch {
	case err != nil:
	case len(data) > MaxSize: // and could not be read again
		err = fmt.Errorf("%d entries take %d bytes, limit %d", len(entries), len(data), MaxSize)
	default:
		err = Replace(f.Path, func(w io.Writer) error {
			_, err := w.Write(data)
			return err
		})
	}
	if err != nil {
		return fmt.Errorf("write the %s: %w", f.What, err)
	}
	return nil
}

// Encode returns the content of a file. It has an entry a line, so that people
// can compare two files.
func Encode[E any](list string, entries []E) ([]byte, error) {
	var b bytes.Buffer
	fmt.Fprintf(&b, "{\"version\": %d, %q: [", version, list)
	for i := range entries {
		registry.Yield(i)
		line, err := json.Marshal(&entries[i])
		if err != nil {
			return nil, err
		}
		if i > 0 {
			b.WriteByte(',')
		}
		b.WriteString("\n  ")
		b.Write(line)
	}
	b.WriteString("\n]}\n")
	return b.Bytes(), nil
}

// toDisk returns when the disk has a file, or the names in a folder. A test looks at
// what it is called with.
var toDisk = (*os.File).Sync

// Replace puts what write writes in the place of the file at path, as Save does.
// Where write fails, or anything else does, the file is what it was. Of several
// processes only one may do it: see Lock.
func Replace(path string, write func(io.Writer) error) (err error) {
	// A link is followed: what it leads to is replaced, and not the link.
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
