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

// A File keeps a value in a folder, as JSON that the user of the process alone may read. One
// process has it at a time.
type File struct {
	Path string
	lock io.Closer
}

// Open locks the file with a name in a folder, which it makes, and returns the content, nil
// where there is no file yet. Errors call it what. Close unlocks it.
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
