package snapshot

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"culvert.dev/registry"
)

// says is a source that says what it is given, and ends by errors.
type says chan any

func (s says) Run(ctx context.Context, updates chan<- registry.Update) error {
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case what := <-s:
			switch what := what.(type) {
			case string:
				panic(what)
			case error:
				return what
			case registry.Update:
				select {
				case updates <- what:
				case <-ctx.Done():
				}
			}
		}
	}
}

// A rig runs a Source, and hears it.
type rig struct {
	t    *testing.T
	src  says
	stop func() error

	mu  sync.Mutex // guards the rest
	got []registry.Update
	log bytes.Buffer
}

func (r *rig) Write(b []byte) (int, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.log.Write(b)
}

func (r *rig) logged() string {
	synctest.Wait()
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.log.String()
}

func startRig(t *testing.T, path string, change ...func(*Source)) *rig {
	r := &rig{t: t, src: make(says)}
	s := &Source{Source: r.src, Path: path, Log: slog.New(slog.NewTextHandler(r, nil))}
	for _, f := range change {
		f(s)
	}
	ctx, cancel := context.WithCancel(t.Context())
	out, done := make(chan registry.Update), make(chan error, 1)
	heard := make(chan struct{})
	go func() { done <- s.Run(ctx, out); close(out) }()
	go func() {
		defer close(heard)
		for u := range out {
			r.mu.Lock()
			r.got = append(r.got, u)
			r.mu.Unlock()
		}
	}()
	r.stop = func() error {
		cancel()
		<-heard
		return <-done
	}
	return r
}

// want is what was sent since the last time: "name service service", "name !err age".
func (r *rig) want(want ...string) {
	r.t.Helper()
	synctest.Wait()
	r.mu.Lock()
	defer r.mu.Unlock()
	var got []string
	for _, u := range r.got {
		text := u.Source
		for _, s := range u.Services {
			text += " " + s.Name
		}
		if u.Err != nil {
			text += " !" + u.Err.Error()
		}
		if !u.Since.IsZero() {
			text += " " + time.Since(u.Since).String()
		}
		got = append(got, text)
	}
	r.got = nil
	if !reflect.DeepEqual(got, want) {
		r.t.Errorf("got  %q\nwant %q", got, want)
	}
}

func update(source string, services ...string) registry.Update {
	u := registry.Update{Source: source}
	for _, name := range services {
		u.Services = append(u.Services, &registry.Service{Name: name})
	}
	return u
}

var errAway = errors.New("away")

// What was said is said again by the next process, where its source is away.
func TestKeptIsSaidFirst(t *testing.T) {
	path := filepath.Join(t.TempDir(), "state")
	synctest.Test(t, func(t *testing.T) {
		r := startRig(t, path)
		r.src <- update("west", "old")
		r.src <- update("west", "a", "b")
		r.src <- registry.Update{Source: "west", Err: errAway}
		r.want("west old", "west a b", "west !away")
		time.Sleep(saveDelay)
		synctest.Wait()
		if err := r.stop(); err != context.Canceled {
			t.Errorf("Run: %v", err)
		}
		if info, err := os.Stat(path); err != nil || info.Mode().Perm() != 0o600 {
			t.Errorf("the file is %v, %v", info, err)
		}

		time.Sleep(time.Hour - saveDelay)
		r = startRig(t, path)
		r.want() // the source has the first word
		r.src <- registry.Update{Source: "west", Err: errAway}
		r.want("west a b", "west !away 1h0m0s", "west !away 1h0m0s")
		time.Sleep(time.Minute)
		r.src <- registry.Update{Source: "west", Err: errAway}
		r.want("west !away 1h1m0s")
		r.src <- update("west", "c")
		r.src <- registry.Update{Source: "west", Err: errAway}
		r.want("west c", "west !away") // not of what was kept any more
		r.stop()
	})
}

// A source that says nothing is waited for, and one that speaks is not.
func TestFirstUpdateTimeout(t *testing.T) {
	path := filepath.Join(t.TempDir(), "state")
	synctest.Test(t, func(t *testing.T) {
		r := startRig(t, path)
		r.src <- update("west", "a")
		time.Sleep(saveDelay)
		synctest.Wait()
		r.stop()

		r = startRig(t, path)
		time.Sleep(FirstUpdateTimeout - 1)
		r.want()
		time.Sleep(time.Nanosecond)
		r.want("west a", "west !no update for 3s since the start 4s")
		r.src <- update("west", "b")
		r.want("west b")
		r.stop()
	})
}

// A source that fails before it has said anything, by an error or a panic, and is
// run again.
func TestASourceThatFails(t *testing.T) {
	for _, fail := range []any{errAway, "away"} {
		path := filepath.Join(t.TempDir(), "state")
		synctest.Test(t, func(t *testing.T) {
			r := startRig(t, path)
			r.src <- update("west", "a")
			time.Sleep(saveDelay)
			synctest.Wait()
			r.stop()

			src := make(says)
			s := &Source{Source: src, Path: path}
			for i := range 2 {
				out, done := make(chan registry.Update), make(chan error, 1)
				go func() { done <- s.Run(t.Context(), out); close(out) }()
				src <- fail
				n := 0
				for range out {
					n++
				}
				if err := <-done; err == nil || !strings.Contains(err.Error(), "away") || n != 2-2*i {
					t.Errorf("run %d: %d updates, %v", i, n, err)
				}
			}
		})
	}
}

// What is kept of one name stands as long as nothing is known of it, and goes when
// the source has nothing to say to it any more.
func TestNames(t *testing.T) {
	path := filepath.Join(t.TempDir(), "state")
	synctest.Test(t, func(t *testing.T) {
		var mu sync.Mutex
		var names []string
		known := func(s *Source) {
			s.Names = func() []string {
				mu.Lock()
				defer mu.Unlock()
				return names
			}
		}
		set := func(all ...string) {
			mu.Lock()
			defer mu.Unlock()
			names = all
		}
		set("clusters/x", "east", "north", "west")
		r := startRig(t, path, known)
		for _, name := range []string{"clusters/x", "east", "north", "west"} {
			r.src <- update(name, name)
		}
		time.Sleep(saveDelay)
		synctest.Wait()
		r.stop()

		set()
		r = startRig(t, path, known)
		r.src <- registry.Update{Source: "clusters/x", Err: errAway}
		r.want("clusters/x clusters/x", "clusters/x !away 1s", "east east", "east !away 1s", "north north", "north !away 1s", "west west", "west !away 1s", "clusters/x !away 1s")
		set("clusters/x", "east", "west")
		r.src <- update("clusters/x")
		r.want("clusters/x", "north") // which is gone
		r.src <- registry.Update{Source: "east", Err: errAway}
		r.want("east !away 1s") // and still served
		time.Sleep(saveDelay)
		synctest.Wait()
		r.stop()

		r = startRig(t, path, known) // north is gone from the file, too
		r.src <- update("clusters/x")
		r.src <- update("west", "new")
		time.Sleep(FirstUpdateTimeout)
		r.want("clusters/x", "west new", "east east", "east !no update for 3s since the start 5s")
		r.stop()

		set("other")
		r = startRig(t, path, known) // none of it is this source's
		r.src <- registry.Update{Source: "other", Err: errAway}
		r.want("other !away")
		r.stop()
	})
}

// What can't be read is said, ignored, and written anew.
func TestABrokenFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "state")
	if err := os.WriteFile(path, []byte("{}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	synctest.Test(t, func(t *testing.T) {
		r := startRig(t, path)
		if log := r.logged(); !strings.Contains(log, "it is not a snapshot that culvert has saved") {
			t.Errorf("the log says %q", log)
		}
		r.src <- registry.Update{Source: "west", Err: errAway}
		r.want("west !away")
		r.src <- update("west", "a")
		time.Sleep(saveDelay)
		synctest.Wait()
		r.stop()
		r = startRig(t, path, func(s *Source) { s.Settings = "others" })
		if log := r.logged(); !strings.Contains(log, "other settings") {
			t.Errorf("the log says %q", log)
		}
		r.stop()
		if all, err := load(t.Context(), path, ""); err != nil || len(all) != 1 {
			t.Errorf("the file has %v, %v", all, err)
		}
	})
}

// A disk that can't be written to is said once, and tried again.
func TestADiskThatFails(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "later")
	path := filepath.Join(dir, "state")
	synctest.Test(t, func(t *testing.T) {
		r := startRig(t, path)
		for i := range 100 {
			r.src <- update("west", fmt.Sprint(i))
			time.Sleep(saveDelay)
		}
		if n := strings.Count(r.logged(), "cannot save a snapshot"); n != 1 {
			t.Errorf("it is said %d times:\n%s", n, r.logged())
		}
		if err := os.Mkdir(dir, 0o700); err != nil {
			t.Fatal(err)
		}
		time.Sleep(saveRetryInterval + saveDelay)
		if log := r.logged(); !strings.Contains(log, "saved again") {
			t.Errorf("the log says %q", log)
		}
		r.stop()
		if all, err := load(t.Context(), path, ""); err != nil || all["west"].Services[0].Name != "99" {
			t.Errorf("the file has %v, %v", all, err)
		}
	})
}

// Of two with one file the first writes, and the other one when that has ended.
func TestTwoProcesses(t *testing.T) {
	path := filepath.Join(t.TempDir(), "state")
	synctest.Test(t, func(t *testing.T) {
		one, two := startRig(t, path), startRig(t, path)
		one.src <- update("west", "one")
		time.Sleep(saveDelay)
		two.src <- update("west", "two")
		time.Sleep(saveDelay)
		if log := two.logged(); !strings.Contains(log, "another process keeps them") {
			t.Errorf("the log says %q", log)
		}
		if all, _ := load(t.Context(), path, ""); all["west"] == nil || all["west"].Services[0].Name != "one" {
			t.Errorf("the file has %v", all)
		}
		one.stop()
		time.Sleep(saveRetryInterval + saveDelay)
		synctest.Wait()
		two.stop()
		if all, _ := load(t.Context(), path, ""); all["west"] == nil || all["west"].Services[0].Name != "two" {
			t.Errorf("the file has %v", all)
		}
	})
}

// A source that ends well goes on being kept.
func TestASourceThatHasSaidAll(t *testing.T) {
	path := filepath.Join(t.TempDir(), "state")
	synctest.Test(t, func(t *testing.T) {
		r := startRig(t, path, func(s *Source) { s.Source = registry.Static{Name: "west", Snapshot: update("", "a").Snapshot} })
		time.Sleep(saveDelay)
		r.want("west a")
		r.stop()
		if all, err := load(t.Context(), path, ""); err != nil || len(all) != 1 {
			t.Errorf("the file has %v, %v", all, err)
		}
	})
}

// With a registry there is a table, and it says how old it is.
func TestARegistryIsStale(t *testing.T) {
	path := filepath.Join(t.TempDir(), "state")
	synctest.Test(t, func(t *testing.T) {
		r := startRig(t, path)
		r.src <- update("west", "a")
		time.Sleep(time.Hour)
		r.stop()

		var reg registry.Registry
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		src := make(says)
		go func() { done <- reg.Run(ctx, &Source{Source: src, Path: path}) }()
		src <- registry.Update{Source: "west", Err: errAway}
		time.Sleep(time.Second)
		synctest.Wait()
		source, since, err := reg.Stale()
		if reg.Table().Len() != 1 || source != "west" || err != errAway || time.Since(since) != time.Hour+time.Second {
			t.Errorf("%d services of %q since %v: %v", reg.Table().Len(), source, time.Since(since), err)
		}
		src <- update("west", "a", "b")
		time.Sleep(time.Second)
		if source, _, err := reg.Stale(); err != nil || reg.Table().Len() != 2 {
			t.Errorf("%d services, stale is %q, %v", reg.Table().Len(), source, err)
		}
		cancel()
		<-done
	})
}
