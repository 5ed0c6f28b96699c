package statefile

import (
	"errors"
	"io"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"testing"
)

// What was written is on the disk before it takes the place of the old file, and
// the name after it: a machine that loses its power has the one or the other. Where
// the disk does not take it, the old file stays.
func TestReplaceSyncs(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "state")
	content := func() string { b, _ := os.ReadFile(path); return string(b) }
	write := func(text string) func(io.Writer) error {
		return func(w io.Writer) error { _, err := io.WriteString(w, text); return err }
	}
	real := toDisk
	if reflect.ValueOf(real).Pointer() != reflect.ValueOf((*os.File).Sync).Pointer() {
		t.Error("files are not synced by the system")
	}
	defer func() { toDisk = real }()
	var synced []string
	toDisk = func(f *os.File) error {
		info, err := f.Stat()
		if err != nil {
			return err
		}
		if info.IsDir() {
			synced = append(synced, "the folder, and the file is "+content())
			return nil
		}
		b, err := os.ReadFile(f.Name())
		synced = append(synced, string(b)+", and the file is "+content())
		return err
	}
	for _, text := range []string{"old", "new"} {
		if err := Replace(path, write(text)); err != nil {
			t.Fatal(err)
		}
	}
	want := []string{"old, and the file is ", "the folder, and the file is old", "new, and the file is old", "the folder, and the file is new"}
	if !slices.Equal(synced, want) {
		t.Errorf("synced were %q, want %q", synced, want)
	}
	full := errors.New("no space left")
	toDisk = func(*os.File) error { return full }
	if err := Replace(path, write("lost")); !errors.Is(err, full) || content() != "new" {
		t.Errorf("where the disk is full: %v and %q, want the old content", err, content())
	}
	if left, _ := filepath.Glob(path + ".*"); len(left) > 0 {
		t.Errorf("left over: %q", left)
	}
}

// TestReplaceFails checks that the file stays as it is if its new content cannot be written.
func TestReplaceFails(t *testing.T) {
	path := filepath.Join(t.TempDir(), "state")
	if err := os.WriteFile(path, []byte("old"), 0o600); err != nil {
		t.Fatal(err)
	}
	full := errors.New("no space left")
	if err := Replace(path, func(w io.Writer) error {
		_, _ = w.Write([]byte("new"))
		return full
	}); err != full {
		t.Errorf("got %v, want %v", err, full)
	}
	if data, err := os.ReadFile(path); string(data) != "old" {
		t.Errorf("the file has %q, %v", data, err)
	}
	if all, err := os.ReadDir(filepath.Dir(path)); len(all) != 1 {
		t.Errorf("there are %v, %v", all, err)
	}
}
