package alloc

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

type testEntry struct {
	Service string `json:"service"`
	times
}

type testContent struct {
	Version  int         `json:"version"`
	Services []testEntry `json:"services"`
}

func fileAt(path string) File[testEntry] {
	parse := func(data []byte) ([]testEntry, error) {
		var c testContent
		err := parseFile(data, &c)
		return c.Services, err
	}
	return File[testEntry]{Path: path, what: "assigned things", list: "services", parse: parse, entry: func(e testEntry) any { return &e }}
}

func TestFileSaysWhatItIsOf(t *testing.T) {
	f := fileAt(filepath.Join(t.TempDir(), "state.json"))
	parsed, parse := 0, f.parse
	f.parse = func(data []byte) ([]testEntry, error) {
		parsed++
		return parse(data)
	}
	if all, err := f.Load(); all != nil || err != nil || parsed != 0 {
		t.Errorf("without a file: %v, %v, parsed %d times", all, err, parsed)
	}
	gone := noon.Add(time.Hour)
	if err := f.Save([]testEntry{{"a", timesOf(noon, time.Time{})}, {"b", timesOf(noon, gone)}}); err != nil {
		t.Fatal(err)
	}
	if all, err := f.Load(); err != nil || len(all) != 2 || !all[0].gone().IsZero() || !all[1].gone().Equal(gone) || !all[1].Since.Equal(noon) {
		t.Errorf("got %+v, %v", all, err)
	}
	if err := os.WriteFile(f.Path, []byte(`{"version": 3}`), 0o600); err != nil {
		t.Fatal(err)
	}
	want := fmt.Sprintf("the assigned things in %q can't be used: it is of version 3, and this culvert reads version 1", f.Path)
	if all, err := f.Load(); all != nil || err == nil || err.Error() != want {
		t.Errorf("got %v, %v\nwant %s", all, err, want)
	}
	if err := fileAt(t.TempDir()).Save([]testEntry{}); err == nil || !strings.HasPrefix(err.Error(), "write the assigned things: ") {
		t.Errorf("a folder: got %v", err)
	}
}

// What could not be read again is not written.
func TestFileDoesNotOutgrowItsReader(t *testing.T) {
	f := fileAt(filepath.Join(t.TempDir(), "state.json"))
	few := []testEntry{{"a", timesOf(noon, time.Time{})}}
	if err := f.Save(few); err != nil {
		t.Fatal(err)
	}
	many := make([]testEntry, 9)
	for i := range many {
		many[i].Service = strings.Repeat("a", MaxFileSize/8)
	}
	if err := f.Save(many); err == nil || !strings.Contains(err.Error(), "write the assigned things: 9 entries take ") {
		t.Errorf("got %v, want an error that says what 9 entries take", err)
	}
	if all, err := f.Load(); err != nil || len(all) != 1 {
		t.Errorf("what was there before: %v, %v", all, err)
	}
}

// writerEnv is the path that a process started by the test below writes to.
const writerEnv = "CULVERT_TEST_ALLOC_WRITER"

// A process that is killed while it writes leaves a file that is whole.
func TestFileSurvivesKills(t *testing.T) {
	const rounds, entries = 12, 2000
	if path := os.Getenv(writerEnv); path != "" {
		for n := 0; ; n++ { // until it is killed
			list := make([]testEntry, entries)
			for i := range list {
				list[i] = testEntry{fmt.Sprintf("s%d-%d", n, i), timesOf(noon, time.Time{})}
			}
			if err := fileAt(path).Save(list); err != nil {
				fmt.Fprintln(os.Stderr, err)
				os.Exit(1)
			}
			fmt.Println("saved") // the reader counts them
		}
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "state.json")
	for round := range rounds {
		cmd := exec.Command(self, "-test.run", "^TestFileSurvivesKills$")
		cmd.Env = append(os.Environ(), writerEnv+"="+path)
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		// After one that is done it is in the middle of the next, each time
		// somewhere else.
		if _, err := out.Read(make([]byte, 6*(1+round%3))); err != nil {
			t.Fatal(err)
		}
		pause := time.NewTimer(time.Duration(round) * 300 * time.Microsecond)
		<-pause.C
		if err := cmd.Process.Kill(); err != nil {
			t.Fatal(err)
		}
		_ = cmd.Wait()
		all, err := fileAt(path).Load()
		if err != nil {
			t.Fatalf("round %d: %v", round, err)
		}
		if len(all) != entries || all[0].Service[:2] != all[entries-1].Service[:2] {
			t.Fatalf("round %d: %d entries, from %v to the last", round, len(all), all[:1])
		}
		files, err := os.ReadDir(filepath.Dir(path))
		if err != nil || len(files) > 2 {
			t.Errorf("round %d: %v, %v, want the state and at most what was begun", round, files, err)
		}
	}
}
