//go:build unix

package alloc

import (
	"bufio"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"culvert.dev/internal/statefile"
)

// One has the file, through every Save, and whatever it is called.
func TestLock(t *testing.T) {
	dir := t.TempDir()
	f := fileAt(filepath.Join(dir, "state.json"))
	first, err := f.Lock()
	if err != nil {
		t.Fatal(err)
	}
	want := fmt.Sprintf("the assigned things in %q can't be used: another process keeps them, and has %q locked", f.Path, f.Path+".lock")
	held := func(f File[testEntry], when string) {
		t.Helper()
		lock, err := f.Lock()
		if err == nil {
			_ = lock.Close()
		}
		if !errors.Is(err, statefile.ErrHeld) {
			t.Errorf("%s: got %v, want ErrHeld", when, err)
		}
	}
	if _, err := f.Lock(); err == nil || err.Error() != want {
		t.Errorf("got  %v\nwant %s", err, want)
	}
	for range 2 {
		if err := f.Save([]testEntry{{"a", timesOf(noon, time.Time{})}}); err != nil {
			t.Fatal(err)
		}
		held(f, "after it was written")
	}
	link := fileAt(filepath.Join(dir, "link.json"))
	if err := os.Symlink("state.json", link.Path); err != nil {
		t.Fatal(err)
	}
	held(link, "by a link")
	if err := first.Close(); err != nil {
		t.Fatal(err)
	}
	second, err := link.Lock()
	if err != nil {
		t.Fatalf("after the first: %v", err)
	}
	held(f, "of who has the link")
	_ = second.Close()

	if info, err := os.Stat(f.Path + ".lock"); err != nil || info.Size() != 0 || info.Mode() != 0o600 {
		t.Errorf("the file of the lock: %v, %v", info, err)
	}
	missing := fileAt(filepath.Join(dir, "missing", "state.json"))
	if _, err := missing.Lock(); !errors.Is(err, fs.ErrNotExist) || errors.Is(err, statefile.ErrHeld) || !strings.HasPrefix(err.Error(), "lock the assigned things: open ") {
		t.Errorf("without its folder: %v", err)
	}
}

// A process that is killed has nothing any more.
func TestLockOfAKilledProcess(t *testing.T) {
	const variable = "LOCK_AND_WAIT"
	if path := os.Getenv(variable); path != "" { // that process
		lock, err := fileAt(path).Lock()
		fmt.Println("locked:", err)
		if err == nil {
			_, _ = bufio.NewReader(os.Stdin).ReadByte()
			_ = lock.Close()
		}
		os.Exit(0)
	}
	f := fileAt(filepath.Join(t.TempDir(), "state.json"))
	cmd := exec.Command(os.Args[0], "-test.run=^TestLockOfAKilledProcess$")
	cmd.Env = append(os.Environ(), variable+"="+f.Path)
	if _, err := cmd.StdinPipe(); err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	line, _ := bufio.NewReader(out).ReadString('\n')
	_, err = f.Lock()
	_ = cmd.Process.Kill()
	_ = cmd.Wait()
	if line != "locked: <nil>\n" || !errors.Is(err, statefile.ErrHeld) {
		t.Errorf("the process said %q; beside it: %v, want ErrHeld", line, err)
	}
	lock, err := f.Lock()
	if err != nil {
		t.Fatalf("after it was killed: %v", err)
	}
	_ = lock.Close()
}
