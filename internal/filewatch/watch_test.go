package filewatch

import (
	"context"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"culvert.dev/internal/testnet"
)

func write(t *testing.T, path, content string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// relink makes path a symbolic link to another file, as Kubernetes and certbot do.
func relink(t *testing.T, to, path string) {
	t.Helper()
	must(t, os.Symlink(to, path+".new"))
	must(t, os.Rename(path+".new", path))
}

// wait returns what Wait reports.
func wait(t *testing.T, w *Watch) []string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), testnet.Deadline(10*time.Second))
	defer cancel()
	changed, _, err := w.Wait(ctx, nil)
	if err != nil {
		t.Fatalf("no change was seen: %v", err)
	}
	return changed
}

// Every way in which files are replaced is seen, with the system's notices and without,
// and again after that; what has not changed is not reported.
func TestChanges(t *testing.T) {
	for name, change := range map[string]struct {
		prepare, change func(t *testing.T, dir string)
	}{
		"rewritten": {
			func(t *testing.T, dir string) { write(t, dir+"/a/tls.crt", "1") },
			func(t *testing.T, dir string) { write(t, dir+"/a/tls.crt", "22") },
		},
		"renamed over": {
			func(t *testing.T, dir string) { write(t, dir+"/a/tls.crt", "1") },
			func(t *testing.T, dir string) {
				write(t, dir+"/a/.new", "2")
				must(t, os.Rename(dir+"/a/.new", dir+"/a/tls.crt"))
			},
		},
		"gone": {
			func(t *testing.T, dir string) { write(t, dir+"/a/tls.crt", "1") },
			func(t *testing.T, dir string) { must(t, os.Remove(dir+"/a/tls.crt")) },
		},
		"made": {
			func(t *testing.T, dir string) { must(t, os.Mkdir(dir+"/a", 0o700)) },
			func(t *testing.T, dir string) { write(t, dir+"/a/tls.crt", "1") },
		},
		"with its directory": {
			func(t *testing.T, dir string) {},
			func(t *testing.T, dir string) { write(t, dir+"/a/tls.crt", "1") },
		},
		"a volume of Kubernetes": {
			func(t *testing.T, dir string) {
				write(t, dir+"/a/..1/tls.crt", "1")
				must(t, os.Symlink("..1", dir+"/a/..data"))
				must(t, os.Symlink("..data/tls.crt", dir+"/a/tls.crt"))
			},
			func(t *testing.T, dir string) {
				write(t, dir+"/a/..2/tls.crt", "2")
				relink(t, "..2", dir+"/a/..data")
				must(t, os.RemoveAll(dir+"/a/..1"))
			},
		},
		"a certificate of certbot": {
			func(t *testing.T, dir string) {
				write(t, dir+"/archive/1.pem", "1")
				must(t, os.Mkdir(dir+"/a", 0o700))
				must(t, os.Symlink("../archive/1.pem", dir+"/a/tls.crt"))
			},
			func(t *testing.T, dir string) {
				write(t, dir+"/archive/2.pem", "2")
				relink(t, "../archive/2.pem", dir+"/a/tls.crt")
			},
		},
		"what a link leads to": {
			func(t *testing.T, dir string) {
				write(t, dir+"/real/x", "1")
				must(t, os.Mkdir(dir+"/a", 0o700))
				must(t, os.Symlink("../real/x", dir+"/a/tls.crt"))
			},
			func(t *testing.T, dir string) { write(t, dir+"/real/x", "22") },
		},
	} {
		for _, how := range []string{"notices", "none"} {
			t.Run(name+"/"+how, func(t *testing.T) {
				t.Parallel()
				dir := t.TempDir()
				change.prepare(t, dir)
				write(t, dir+"/b/tls.crt", "another")
				w := New(nil)
				defer w.Close()
				if how == "none" {
					w.Close()
				}
				path := filepath.Join(dir, "a", "tls.crt")
				w.Follow([]string{path, filepath.Join(dir, "b", "tls.crt")}, false)
				change.change(t, dir)
				if got := wait(t, w); !slices.Equal(got, []string{path}) {
					t.Fatalf("changed: got %q, want %q", got, path)
				}
				must(t, os.RemoveAll(path))
				write(t, path, strings.Repeat("x", 99))
				if got := wait(t, w); !slices.Equal(got, []string{path}) {
					t.Fatalf("changed again: got %q, want %q", got, path)
				}
			})
		}
	}
}

// A file that was read before it was followed is reported; one that is no longer followed
// is not, and leaves no watch behind.
func TestFollow(t *testing.T) {
	dir := t.TempDir()
	a, b := filepath.Join(dir, "a"), filepath.Join(dir, "sub", "b")
	write(t, a, "1")
	write(t, b, "1")
	w := New(nil)
	defer w.Close()
	w.Follow([]string{a, b}, true)
	if got := wait(t, w); !slices.Equal(got, []string{a, b}) {
		t.Errorf("read before: got %q, want both", got)
	}
	w.Follow([]string{a}, true)
	write(t, b, "22")
	write(t, a, "22")
	if got := wait(t, w); !slices.Equal(got, []string{a}) {
		t.Errorf("one is no longer followed: got %q, want %q", got, a)
	}
	w.Follow(nil, true)
	if len(w.files)+len(w.paths)+len(w.bases)+len(w.dirs)+len(w.blind)+len(w.touched) > 0 || w.watcher != nil && len(w.watcher.WatchList()) > 0 {
		t.Errorf("nothing is followed, and the Watch has %v", w)
	}
	now := make(chan struct{}, 1)
	now <- struct{}{}
	if _, forced, err := w.Wait(t.Context(), now); !forced || err != nil {
		t.Errorf("asked to return now: got %v, %v, want true", forced, err)
	}
}

// A directory that was moved away and back is watched again.
func TestDirectoryMoves(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "a", "tls.crt")
	write(t, path, "1")
	w := New(nil)
	defer w.Close()
	w.Follow([]string{path}, false)
	must(t, os.Rename(dir+"/a", dir+"/b"))
	wait(t, w)
	must(t, os.Rename(dir+"/b", dir+"/a"))
	wait(t, w)
	if len(w.blind) > 0 || w.watcher != nil && !slices.Contains(w.watcher.WatchList(), filepath.Dir(path)) {
		t.Errorf("the directory is back, and not watched: %v", w.blind)
	}
}
