package alloc

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"time"

	"culvert.dev/internal/statefile"
)

const (
	// fileVersion is the version of the format.
	fileVersion = 1

	// MaxFileSize is the largest file that is read, in bytes.
	MaxFileSize = 64 << 20
)

// A File stores the assignments, as one JSON object with a version and a list:
//
//	{"version": 1, "ports": [
//	  {"service": "db.example.com", "assigned": 20017, "since": "2026-01-02T15:04:05Z"}
//	]}
//
// It belongs to one process: only the one that has the Lock may Save. PortFile and
// VIPFile make one.
type File[A any] struct {
	Path string

	what  string // is in it, for errors: "assigned ports"
	list  string // the key of the list: "ports"
	parse func(data []byte) ([]A, error)
	entry func(A) any // of the list
}

// Lock locks the file for this process until the caller closes the returned
// Closer. The error is statefile.ErrHeld at once where another process has it.
func (f File[A]) Lock() (io.Closer, error) { return statefile.Lock(f.Path, f.what) }

// times are the last fields of an entry.
type times struct {
	Since time.Time  `json:"since"`
	Gone  *time.Time `json:"gone,omitempty"`
}

// timesOf returns the fields for a Lease's times; zero for gone means that it is
// not.
func timesOf(since, gone time.Time) times {
	t := times{Since: since.UTC()}
	if !gone.IsZero() {
		gone = gone.UTC()
		t.Gone = &gone
	}
	return t
}

// gone returns Gone, zero where it is not said.
func (t times) gone() time.Time {
	if t.Gone == nil {
		return time.Time{}
	}
	return *t.Gone
}

// Load reads the file. One that is not there is empty. One that cannot be read or
// understood as a whole is an error: a gateway that went on without it would give
// services other places than their clients know.
func (f File[A]) Load() ([]A, error) {
	data, err := readFile(f.Path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read the %s: %w", f.what, err)
	}
	all, err := f.parse(data)
	if err != nil {
		return nil, fmt.Errorf("the %s in %q can't be used: %w", f.what, f.Path, err)
	}
	return all, nil
}

func readFile(path string) ([]byte, error) {
	info, err := os.Stat(path) // before opening: a FIFO would block
	if err != nil {
		return nil, err
	}
	tooLarge := fmt.Errorf("%q is larger than the limit of %d bytes", path, MaxFileSize)
	switch {
	case !info.Mode().IsRegular():
		return nil, fmt.Errorf("%q is not a regular file", path)
	case info.Size() > MaxFileSize:
		return nil, tooLarge
	}
	file, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	data, err := io.ReadAll(io.LimitReader(file, MaxFileSize+1))
	if err != nil {
		return nil, err
	}
	if len(data) > MaxFileSize {
		return nil, tooLarge
	}
	return data, nil
}

// parseFile decodes the content of a file into to, a pointer to a struct with the
// fields Version and that of the list, and takes nothing for granted: another
// version, and what this one does not know, are errors.
func parseFile(data []byte, to any) error {
	var head struct{ Version *int }
	if err := json.Unmarshal(data, &head); err != nil {
		return syntax(data, err)
	}
	switch {
	case head.Version == nil:
		return errors.New("it has no version")
	case *head.Version != fileVersion:
		return fmt.Errorf("it is of version %d, and this culvert reads version %d", *head.Version, fileVersion)
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

// Save writes the file anew: after a crash at any moment there is the old one or
// the new one, whole. Only its owner may read or write it.
func (f File[A]) Save(all []A) error {
	data, err := f.encode(all)
	switch {
	case err != nil:
	case len(data) > MaxFileSize: // and could not be read again
		err = fmt.Errorf("%d entries take %d bytes, limit %d", len(all), len(data), MaxFileSize)
	default:
		err = statefile.Replace(f.Path, func(w io.Writer) error {
			_, err := w.Write(data)
			return err
		})
	}
	if err != nil {
		return fmt.Errorf("write the %s: %w", f.what, err)
	}
	return nil
}

// encode returns the content of a file. Each entry has a line, so that people can
// compare two files.
func (f File[A]) encode(all []A) ([]byte, error) {
	var b bytes.Buffer
	fmt.Fprintf(&b, "{\"version\": %d, %q: [", fileVersion, f.list)
	for i, a := range all {
		line, err := json.Marshal(f.entry(a))
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
