package invitation

import (
	"encoding/json"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"

	"culvert.dev/internal/statefile"
)

const maxFile = 64 << 20 // bytes

// A File keeps a value in a folder, as JSON that only the user of the process may read. It is locked
// for one process at a time.
type File struct {
	Path string
	lock io.Closer
}

// Open makes the folder, locks the file of that name in it, and returns the content, nil if there is
// no file yet. what describes the file in errors. Close unlocks it.
func Open(folder, name, what string) (*File, []byte, error) {
	if err := os.MkdirAll(folder, 0o700); err != nil {
		return nil, nil, err
	}
	f := &File{Path: filepath.Join(folder, name)}
	var err error
	if f.lock, err = statefile.Lock(f.Path, what); err != nil {
		return nil, nil, err
	}
	data, err := readAll(f.Path)
	if err != nil {
		f.Close()
		return nil, nil, err
	}
	return f, data, nil
}

func readAll(path string) ([]byte, error) {
	in, err := os.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	defer in.Close()
	return io.ReadAll(io.LimitReader(in, maxFile))
}

// Save puts v in the file. It is on the disk when Save returns.
func (f *File) Save(v any) error {
	return statefile.Replace(f.Path, func(w io.Writer) error { return json.NewEncoder(w).Encode(v) })
}

// Close unlocks the file.
func (f *File) Close() { _ = f.lock.Close() }
