package kubeconfig

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

// update merges e into files, for whose locks it does not wait.
func update(t *testing.T, e *Entry, paths ...string) ([]string, error) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	return Update(ctx, paths, e)
}

func write1(t *testing.T, path, text string, mode fs.FileMode) {
	t.Helper()
	if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o700), os.WriteFile(path, []byte(text), 0o600), os.Chmod(path, mode)); err != nil {
		t.Fatal(err)
	}
}

func content(t *testing.T, path string) string {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// onlyFiles fails where something else is left in a directory, such as locks and temporary files.
func onlyFiles(t *testing.T, dir string, want ...string) {
	t.Helper()
	all, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, e := range all {
		got = append(got, e.Name())
	}
	if !slices.Equal(got, want) {
		t.Errorf("%s has %q, want %q", dir, got, want)
	}
}

// The file is changed as a whole or not at all, and keeps its mode; a new one is its owner's.
func TestUpdate(t *testing.T) {
	dir := t.TempDir()
	real, link, dangling := filepath.Join(dir, "real", "config"), filepath.Join(dir, "link"), filepath.Join(dir, "dangling")
	mode := func(path string, want fs.FileMode) {
		t.Helper()
		if info, err := os.Stat(path); err != nil || filepath.Separator == '/' && info.Mode() != want {
			t.Errorf("%v, %v, want mode %o", info, err, want)
		}
	}
	if used, err := update(t, entry(), real); err != nil || !slices.Equal(used, []string{real}) {
		t.Fatal(used, err)
	}
	mode(real, 0o600)
	write1(t, real, before, 0o640)
	if err := errors.Join(os.Symlink(filepath.Join("real", "config"), link), os.Symlink(filepath.Join("real", "new"), dangling)); err != nil {
		t.Fatal(err)
	}
	if _, err := update(t, entry(), link); err != nil {
		t.Fatal(err)
	}
	mode(real, 0o640)
	if _, err := update(t, entry(), dangling); err != nil {
		t.Fatal(err)
	}
	mode(filepath.Join(dir, "real", "new"), 0o600)
	for _, l := range []string{link, dangling} {
		if info, err := os.Lstat(l); err != nil || info.Mode().Type() != fs.ModeSymlink {
			t.Errorf("the link %s: %v, %v", l, info, err)
		}
	}
	good := content(t, real)
	if !strings.Contains(good, "west") || !strings.Contains(good, "cellar") {
		t.Errorf("%s", good)
	}
	if _, err := update(t, &Entry{Name: "home", Server: "https://other.example"}, real); err == nil {
		t.Error("another cluster was replaced")
	}
	// kubectl locks the name that it was given; a link is locked by both.
	for _, lock := range []string{link, real} {
		write1(t, lock+".lock", "", 0o600)
		if _, err := update(t, &Entry{Name: "north", Server: "https://north.example"}, link); !errors.Is(err, ErrLocked) || !strings.Contains(err.Error(), lock+".lock") {
			t.Errorf("while %s is locked: %v", lock, err)
		}
		if err := os.Remove(lock + ".lock"); err != nil {
			t.Fatal(err)
		}
	}
	if got := content(t, real); got != good {
		t.Errorf("after errors:\n%s", got)
	}
	onlyFiles(t, dir, "dangling", "link", "real")
	onlyFiles(t, filepath.Join(dir, "real"), "config", "new")
}

const (
	first = `current-context: ""
clusters: [{name: west, cluster: {server: "https://old.example"}}]
users: [{name: me, user: {token: first}}]
`
	second = `current-context: home
clusters: [{name: west, cluster: {server: "https://never.seen"}}, {name: east, cluster: {server: "https://east.example"}}]
contexts: [{name: west, context: {cluster: west, user: me}}] # kept
users: [{name: west, user: {tokenFile: second}}, {name: you, user: {token: second}}]
`
)

// Of several files the first that has an item keeps it; what is new, and the current context, go
// to the first one that is there.
func TestUpdateOfSeveralFiles(t *testing.T) {
	dir := t.TempDir()
	missing, a, b := filepath.Join(dir, "none", "config"), filepath.Join(dir, "a"), filepath.Join(dir, "b")
	write1(t, a, first, 0o600)
	write1(t, b, second, 0o600)
	paths := []string{missing, a, filepath.Join(dir, "x", "..", "a"), b}

	// A cluster that a has, a context and a user that b has.
	e := entry()
	e.Replace = true
	used, err := update(t, e, paths...)
	if err != nil || !slices.Equal(used, []string{a, b}) {
		t.Fatal(used, err)
	}
	textA, textB := content(t, a), content(t, b)
	for _, want := range []string{"https://kube.west.example:443", "current-context: west", "token: first"} {
		if !strings.Contains(textA, want) {
			t.Errorf("%q is not in the first file:\n%s", want, textA)
		}
	}
	for _, want := range []string{"https://never.seen", "current-context: home", "# kept", "client-certificate: /me.pem", "token: second"} {
		if !strings.Contains(textB, want) {
			t.Errorf("%q is not in the second file:\n%s", want, textB)
		}
	}
	if strings.Contains(textA, "contexts") || strings.Contains(textA, "name: west, user") {
		t.Errorf("items of the second file are in the first one:\n%s", textA)
	}

	// What is new, with the user of the second file, does not touch that one.
	if used, err = update(t, &Entry{Name: "north", Server: "https://north.example", User: "you", Current: true}, paths...); err != nil || !slices.Equal(used, []string{a}) {
		t.Fatal(used, err)
	}
	if textA = content(t, a); !strings.Contains(textA, "current-context: north") || !strings.Contains(textA, "user: you") || content(t, b) != textB {
		t.Errorf("got\n%s\nand\n%s", textA, content(t, b))
	}
	// An error leaves both.
	if _, err = update(t, &Entry{Name: "east", Server: "https://other.example"}, paths...); err == nil || !strings.HasPrefix(err.Error(), b+": ") {
		t.Errorf("a cluster of the second file: %v", err)
	}
	write1(t, b, "a: [", 0o600)
	if _, err = update(t, &Entry{Name: "south", Server: "https://other.example"}, paths...); err == nil || !strings.Contains(err.Error(), b) {
		t.Errorf("with a bad file: %v", err)
	}
	if content(t, a) != textA {
		t.Errorf("after errors:\n%s", content(t, a))
	}
	onlyFiles(t, dir, "a", "b")

	// Where none is there the last one is made.
	if used, err = update(t, entry(), missing, filepath.Join(dir, "last")); err != nil || !slices.Equal(used, []string{filepath.Join(dir, "last")}) {
		t.Error(used, err)
	}
	onlyFiles(t, dir, "a", "b", "last")
}

// Writers at once wait for one another, and lose nothing.
func TestUpdateAtOnce(t *testing.T) {
	dir := t.TempDir()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	write1(t, filepath.Join(dir, "a"), "", 0o600)
	write1(t, filepath.Join(dir, "b"), "", 0o600)
	const n = 8
	done := make(chan error, n)
	for i := range n {
		paths := []string{filepath.Join(dir, "a"), filepath.Join(dir, "b")}
		if i%2 == 1 {
			slices.Reverse(paths)
		}
		go func() {
			_, err := Update(ctx, paths, &Entry{Name: fmt.Sprintf("c%d", i), Server: "https://kube.example"})
			done <- err
		}()
	}
	for range n {
		if err := <-done; err != nil {
			t.Error(err)
		}
	}
	both := content(t, filepath.Join(dir, "a")) + content(t, filepath.Join(dir, "b"))
	for i := range n {
		if !strings.Contains(both, fmt.Sprintf("name: c%d\n", i)) {
			t.Errorf("c%d is lost:\n%s", i, both)
		}
	}
}
