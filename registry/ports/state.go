package ports

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
)

const (
	// version is that of the file's format.
	version = 1

	// maxState is the largest file that is read, in bytes: every port of two
	// protocols takes a quarter of it.
	maxState = 64 << 20
)

// A State is the file that assignments are kept in:
//
//	{"version": 1, "ports": [
//	  {"protocol": "tcp", "service": "db.example.com", "port": 5432, "assigned": 20017, "since": "2026-01-02T15:04:05Z"}
//	]}
//
// with "gone" besides where the service is gone.
type State struct{ Path string }

// A stateFile is the file's content.
type stateFile struct {
	Version int     `json:"version"`
	Ports   []entry `json:"ports"`
}

type entry struct {
	Protocol string     `json:"protocol"`
	Service  string     `json:"service"`
	Port     uint16     `json:"port,omitempty"`
	Assigned uint16     `json:"assigned"`
	Since    time.Time  `json:"since"`
	Gone     *time.Time `json:"gone,omitempty"`
}

// Load reads the file. One that is not there is empty. One that can't be read
// or understood as a whole is an error: whoever went on without it would give
// services other ports than their clients know.
func (s State) Load() ([]Assignment, error) {
	data, err := s.read()
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read the assigned ports: %w", err)
	}
	all, err := parse(data)
	if err != nil {
		return nil, fmt.Errorf("the assigned ports in %q can't be used: %w", s.Path, err)
	}
	return all, nil
}

func (s State) read() ([]byte, error) {
	info, err := os.Stat(s.Path) // before opening: a FIFO would block
	if err != nil {
		return nil, err
	}
	tooLarge := fmt.Errorf("%q is larger than the limit of %d bytes", s.Path, maxState)
	switch {
	case !info.Mode().IsRegular():
		return nil, fmt.Errorf("%q is not a regular file", s.Path)
	case info.Size() > maxState:
		return nil, tooLarge
	}
	f, err := os.Open(s.Path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, maxState+1))
	if err != nil {
		return nil, err
	}
	if len(data) > maxState {
		return nil, tooLarge
	}
	return data, nil
}

// parse reads the content of a file and takes nothing for granted: two services
// of one port, and what this version does not know, are errors.
func parse(data []byte) ([]Assignment, error) {
	var head struct{ Version *int }
	if err := json.Unmarshal(data, &head); err != nil {
		return nil, syntax(data, err)
	}
	switch {
	case head.Version == nil:
		return nil, errors.New("it tells no version")
	case *head.Version != version:
		return nil, fmt.Errorf("it is of version %d, and this culvert reads version %d", *head.Version, version)
	}
	dec := json.NewDecoder(bytes.NewReader(data))
	dec.DisallowUnknownFields()
	var f stateFile
	if err := dec.Decode(&f); err != nil {
		return nil, syntax(data, err)
	}
	type port struct {
		protocol string
		number   uint16
	}
	keys, ports := map[Key]bool{}, map[port]Key{}
	all := make([]Assignment, 0, len(f.Ports))
	for i, e := range f.Ports {
		a := Assignment{Key: Key{e.Protocol, e.Service, e.Port}, Assigned: e.Assigned, Since: e.Since}
		if e.Gone != nil {
			a.Gone = *e.Gone
		}
		other, twice := ports[port{e.Protocol, e.Assigned}]
		switch {
		case e.Protocol != "tcp" && e.Protocol != "udp":
			return nil, fmt.Errorf("entry %d has the protocol %q, which is not tcp or udp", i+1, e.Protocol)
		case e.Service == "":
			return nil, fmt.Errorf("entry %d names no service", i+1)
		case e.Assigned == 0:
			return nil, fmt.Errorf("entry %d, %s, has no assigned port", i+1, a.Key)
		case keys[a.Key]:
			return nil, fmt.Errorf("entry %d, %s, is there twice", i+1, a.Key)
		case twice:
			return nil, fmt.Errorf("entry %d, %s, has port %d, which is assigned to %s", i+1, a.Key, e.Assigned, other)
		}
		keys[a.Key], ports[port{e.Protocol, e.Assigned}] = true, a.Key
		all = append(all, a)
	}
	return all, nil
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
func (s State) Save(all []Assignment) error {
	f := stateFile{Version: version, Ports: make([]entry, len(all))}
	for i, a := range all {
		f.Ports[i] = entry{a.Protocol, a.Service, a.Port, a.Assigned, a.Since.UTC(), nil}
		if !a.Gone.IsZero() {
			gone := a.Gone.UTC()
			f.Ports[i].Gone = &gone
		}
	}
	data, err := encode(f)
	if err != nil {
		return fmt.Errorf("write the assigned ports: %w", err)
	}
	if err := replace(s.Path, data); err != nil {
		return fmt.Errorf("write the assigned ports: %w", err)
	}
	return nil
}

// encode writes an entry a line, so that people can compare two files.
func encode(f stateFile) ([]byte, error) {
	var b bytes.Buffer
	fmt.Fprintf(&b, "{\"version\": %d, \"ports\": [", f.Version)
	for i := range f.Ports {
		line, err := json.Marshal(&f.Ports[i])
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

// replace puts data in the place of the file at path.
func replace(path string, data []byte) (err error) {
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
	if _, err = tmp.Write(data); err != nil {
		return err
	}
	if err = tmp.Sync(); err != nil {
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
		_ = d.Sync()
		_ = d.Close()
	}
	return nil
}
