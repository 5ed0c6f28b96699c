package reverse

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

// keeper returns Groups with a Keeper that uses the file at path.
func keeper(t *testing.T, path string) (*Groups, *Keeper) {
	t.Helper()
	g := &Groups{Authorize: anything}
	k := &Keeper{Groups: g}
	if err := k.Use(path); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(k.Close)
	return g, k
}

// A name stays its owner's over a restart, whatever the clock says, and is free after the
// time for which it is kept.
func TestNamesAreKeptOverARestart(t *testing.T) {
	path := filepath.Join(t.TempDir(), "connectors.json")
	g, k := keeper(t, path)
	for _, name := range []string{"cam.example", "gone.example"} {
		m, err := g.Join(by("one"), &fakeSession{}, named(name))
		if err != nil {
			t.Fatal(err)
		}
		if name == "gone.example" {
			m.Leave()
		}
	}
	ctx, stop := context.WithCancel(t.Context())
	ran := make(chan error, 1)
	go func() { ran <- k.Run(ctx) }()
	eventually(t, "the file has the names", func() bool {
		b, err := os.ReadFile(path)
		return err == nil && strings.Contains(string(b), "cam.example")
	})
	stop()
	if err := <-ran; err != nil {
		t.Errorf("Run returned %v", err)
	}
	if info, err := os.Stat(path); err != nil {
		t.Error(err)
	} else if info.Mode().Perm()&0o077 != 0 {
		t.Errorf("the mode of the file is %v, want one for its owner alone", info.Mode())
	}
	if err := (&Keeper{Groups: &Groups{}}).Use(path); err == nil {
		t.Error("two processes have the file")
	}
	k.Close()

	again, k2 := keeper(t, path)
	for _, name := range []string{"cam.example", "gone.example"} {
		if _, err := again.Join(by("two"), &fakeSession{}, named(name)); err == nil {
			t.Errorf("%s: another owner got it after a restart", name)
		}
		if _, err := again.Join(by("one"), &fakeSession{}, named(name)); err != nil {
			t.Errorf("%s: its owner after a restart: %v", name, err)
		}
	}
	for _, l := range again.List() {
		if l.Owner != "one" || len(l.Members) != 1 {
			t.Errorf("%s is of %q with %d sessions, want %q and 1", l.Name, l.Owner, len(l.Members), "one")
		}
	}
	k2.Close()

	short := &Groups{Authorize: anything, HoldFor: time.Nanosecond}
	k3 := &Keeper{Groups: short}
	if err := k3.Use(path); err != nil {
		t.Fatal(err)
	}
	defer k3.Close()
	if _, err := short.Join(by("two"), &fakeSession{}, named("cam.example")); err != nil {
		t.Errorf("another owner after the time is over: %v", err)
	}
}

// A clock that was wrong by years before the restart, or is after it, changes nothing: a name is
// kept for as long as it was left, and then it is free.
func TestNamesAreKeptWhateverTheClock(t *testing.T) {
	lasts := func(g *Groups, k *Keeper, path string) {
		t.Helper()
		if err := k.Use(path); err != nil {
			t.Fatal(err)
		}
		defer k.Close()
		join := func(who string) error {
			m, err := g.Join(by(who), &fakeSession{}, named("cam.example"))
			if err == nil {
				m.Leave()
			}
			return err
		}
		time.Sleep(DefaultHoldFor - time.Second)
		if err := join("two"); err == nil {
			t.Error("another owner got it before its time")
		}
		time.Sleep(2 * time.Second)
		if err := join("two"); err != nil {
			t.Errorf("it is not free after its time: %v", err)
		}
	}
	for _, clock := range []string{"behind", "ahead"} {
		t.Run(clock, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "connectors.json")
			write := func() {
				g, k := keeper(t, path)
				m, err := g.Join(by("one"), &fakeSession{}, named("cam.example"))
				if err != nil {
					t.Fatal(err)
				}
				m.Leave()
				if !k.save() {
					t.Fatal("the file is not written")
				}
				k.Close()
			}
			if clock == "behind" { // the clock of synctest begins in the year 2000
				write()
			}
			synctest.Test(t, func(t *testing.T) {
				if clock == "ahead" {
					write()
					time.Sleep(100 * 365 * 24 * time.Hour)
				}
				g := &Groups{Authorize: anything}
				lasts(g, &Keeper{Groups: g}, path)
			})
		})
	}
}

// A file that can't be understood is one line in the log: names are kept from then on.
func TestABrokenFileOfNames(t *testing.T) {
	long := strings.Repeat("a", maxOwner+1)
	for what, content := range map[string]string{
		"empty": "", "half": `{"version": 1, "names": [{"name": "cam.ex`, "another version": `{"version": 2}`, "another type": `{"version": 1, "names": 1}`,
	} {
		path := filepath.Join(t.TempDir(), "connectors.json")
		if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		g := &Groups{Authorize: anything}
		k := &Keeper{Groups: g}
		if err := k.Use(path); err == nil {
			t.Errorf("%s: no error", what)
		}
		if !k.save() {
			t.Errorf("%s: it is not put in order", what)
		}
		if list, err := readKept(path); err != nil || len(list) != 0 {
			t.Errorf("%s: it has %v and %v after that", what, list, err)
		}
		k.Close()
	}
	path := filepath.Join(t.TempDir(), "connectors.json")
	content := `{"version": 1, "names": [{"name": "a.example", "owner": "one", "left": 999999999999}, {"name": "b.example", "owner": "", "left": 9},
		{"name": "c.example", "owner": "` + long + `", "left": 9}, {"name": "d.example", "owner": "one", "left": -1}, {"name": "x.culvert.alt", "owner": "one", "left": 9},
		{"name": "a.example", "owner": "two", "left": 9}, {"name": "*.example", "owner": "two", "left": 9}]}`
	if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
	g, _ := keeper(t, path)
	list := g.List()
	if len(list) != 1 || list[0].Name.String() != "a.example" || list[0].Owner != "one" || time.Until(list[0].Until) > DefaultHoldFor {
		t.Errorf("the names are %+v, want a.example of one for at most %v", list, DefaultHoldFor)
	}
	if _, err := readKept(filepath.Dir(path)); err == nil {
		t.Error("a folder was read as a file")
	}
}
