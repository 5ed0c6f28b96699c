package file

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"culvert.dev/internal/testnet"
	"culvert.dev/registry"
	"culvert.dev/tunnel"
)

// config is a small file whose services all lead to one port.
func config(port int, names ...string) string {
	var b strings.Builder
	b.WriteString("listeners:\n  - address: :443\nservices:\n")
	for _, n := range names {
		fmt.Fprintf(&b, "  - {name: %s, endpoints: [\"192.0.2.1:%d\", \"192.0.2.2:%d\"]}\n", n, port, port)
	}
	if len(names) == 0 {
		return "services: []\n"
	}
	return b.String()
}

func write(t testing.TB, path, content string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
}

// replace writes a file as careful programs do.
func replace(t testing.TB, path, content string) {
	t.Helper()
	write(t, path+".tmp", content)
	if err := os.Rename(path+".tmp", path); err != nil {
		t.Fatal(err)
	}
}

// A followed is a registry that follows a file.
type followed struct {
	*registry.Registry
	src *Source

	mu   sync.Mutex // guards what follows
	errs []error
	log  bytes.Buffer
}

func (f *followed) Write(p []byte) (int, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.log.Write(p)
}

func (f *followed) logged(s string) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return strings.Contains(f.log.String(), s)
}

func (f *followed) errors() []error {
	f.mu.Lock()
	defer f.mu.Unlock()
	return append([]error(nil), f.errs...)
}

func follow(t testing.TB, path string) *followed {
	t.Helper()
	f := &followed{Registry: &registry.Registry{}}
	f.src = &Source{Path: path, Log: slog.New(slog.NewTextHandler(f, nil)), OnError: func(err error) {
		f.mu.Lock()
		defer f.mu.Unlock()
		f.errs = append(f.errs, err)
	}}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- f.Run(ctx, f.src) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("Run: %v", err)
		}
	})
	return f
}

func (f *followed) serves(name string) bool {
	_, err := f.Resolve(context.Background(), &tunnel.Request{Name: tunnel.MustParseName(name), LocalPort: 443})
	return err == nil
}

// reloadTimeout is how long a test waits for a change, which takes effect within
// a second.
var reloadTimeout = testnet.Deadline(time.Second)

// Every way a file is changed is seen.
func TestSourceFollows(t *testing.T) {
	path := filepath.Join(t.TempDir(), "culvert.yaml")
	write(t, path, config(1, "a.test"))
	f := follow(t, path)
	testnet.Eventually(t, reloadTimeout, func() bool { return f.serves("a.test") }, "first read")

	becomes := func(how, name, gone string) {
		t.Helper()
		testnet.Eventually(t, reloadTimeout, func() bool { return f.serves(name) }, "%s", how)
		if f.serves(gone) {
			t.Errorf("%s: %s is still served", how, gone)
		}
	}
	replace(t, path, config(1, "b.test"))
	becomes("a rename", "b.test", "a.test")

	write(t, path, config(1, "c.test"))
	becomes("a write in place", "c.test", "b.test")

	if err := os.Rename(path, path+"~"); err != nil { // as vim does
		t.Fatal(err)
	}
	write(t, path, config(1, "d.test"))
	becomes("a backup and a new file", "d.test", "c.test")

	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	testnet.Eventually(t, reloadTimeout, func() bool { return len(f.errors()) == 1 }, "an error for the missing file")
	if !f.serves("d.test") {
		t.Error("a missing file took the table away")
	}
	write(t, path, config(1, "e.test"))
	becomes("a file that came back", "e.test", "d.test")

	before := f.Table().Generation()
	write(t, path, config(1, "e.test"))
	f.src.Reload()
	testnet.Eventually(t, reloadTimeout, func() bool { return f.logged("configuration unchanged") }, "Reload")
	if got := f.Table().Generation(); got != before {
		t.Errorf("the same content made generation %d of %d", got, before)
	}
}

// A ConfigMap volume: culvert.yaml -> ..data/culvert.yaml, ..data -> a folder
// of the day, which is swapped by a rename.
func TestSourceFollowsConfigMap(t *testing.T) {
	dir := t.TempDir()
	day := func(n int, names ...string) {
		t.Helper()
		folder := fmt.Sprintf("..day%d", n)
		if err := os.Mkdir(filepath.Join(dir, folder), 0o700); err != nil {
			t.Fatal(err)
		}
		write(t, filepath.Join(dir, folder, "culvert.yaml"), config(1, names...))
		if err := os.Symlink(folder, filepath.Join(dir, "..data_tmp")); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(filepath.Join(dir, "..data_tmp"), filepath.Join(dir, "..data")); err != nil {
			t.Fatal(err)
		}
		if n > 1 {
			if err := os.RemoveAll(filepath.Join(dir, fmt.Sprintf("..day%d", n-1))); err != nil {
				t.Fatal(err)
			}
		}
	}
	day(1, "day1.test")
	path := filepath.Join(dir, "culvert.yaml")
	if err := os.Symlink("..data/culvert.yaml", path); err != nil {
		t.Fatal(err)
	}
	f := follow(t, path)
	testnet.Eventually(t, reloadTimeout, func() bool { return f.serves("day1.test") }, "first read")
	for n := 2; n < 5; n++ {
		name := fmt.Sprintf("day%d.test", n)
		day(n, name)
		testnet.Eventually(t, reloadTimeout, func() bool { return f.serves(name) }, "day %d", n)
		if f.serves(fmt.Sprintf("day%d.test", n-1)) {
			t.Errorf("day %d: the day before is still served", n)
		}
	}
	if errs := f.errors(); len(errs) > 0 {
		t.Errorf("errors: %v", errs)
	}
}

func TestBadFileKeepsTheTable(t *testing.T) {
	path := filepath.Join(t.TempDir(), "culvert.yaml")
	write(t, path, config(1, "a.test"))
	f := follow(t, path)
	testnet.Eventually(t, reloadTimeout, func() bool { return f.serves("a.test") }, "first read")
	for i, bad := range []string{"services:\n  - nmae: b.test\n", "", "services: [", config(1, "a.test", "b.test", "b.test")} {
		replace(t, path, bad)
		testnet.Eventually(t, reloadTimeout, func() bool { return len(f.errors()) == i+1 }, "an error")
		var e *Error
		if err := f.errors()[i]; !errors.As(err, &e) || e.File != path || e.Line < 1 {
			t.Errorf("bad file %d: %v, want file:line:column", i, err)
		}
		if !f.serves("a.test") || f.Table().Len() != 1 || f.Table().Generation() != 1 {
			t.Errorf("bad file %d changed the table: %d services", i, f.Table().Len())
		}
		if !f.logged("configuration refused; keeping the previous one") {
			t.Error("the log does not tell of it")
		}
	}
	replace(t, path, config(1, "b.test"))
	testnet.Eventually(t, reloadTimeout, func() bool { return f.serves("b.test") }, "the good file after it")
	if n := len(f.errors()); n != 4 {
		t.Errorf("%d errors, want one for each bad file", n)
	}
}

func TestChangesThatNeedARestart(t *testing.T) {
	path := filepath.Join(t.TempDir(), "culvert.yaml")
	write(t, path, config(1, "a.test")+"servicePorts: {range: 4000, state: a.json}\n")
	f := follow(t, path)
	testnet.Eventually(t, reloadTimeout, func() bool { return f.serves("a.test") }, "first read")
	replace(t, path, strings.ReplaceAll(config(1, "b.test"), ":443", ":8443")+"cluster: west\nservicePorts: {range: 4000, state: b.json}\n")
	testnet.Eventually(t, reloadTimeout, func() bool { return f.serves("b.test") }, "second read")
	if !f.logged(`change needs a restart" file=` + path + ` changed=servicePorts.state`) {
		t.Errorf("no warning:\n%s", f.log.String())
	}
}

func TestOnConfig(t *testing.T) {
	path := filepath.Join(t.TempDir(), "routes.txt")
	write(t, path, "a.test 192.0.2.1:1\n")
	got := make(chan *Config, 10)
	src := &Source{Path: path, Load: ReloadRoutes, OnConfig: func(c *Config) *registry.Group { got <- c; return nil }}
	var reg registry.Registry
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- reg.Run(ctx, src) }()
	for _, name := range []string{"a.test", "b.test"} {
		replace(t, path, name+" 192.0.2.1:1\n")
		for c := range got {
			if c.Services[0].Name == name {
				break
			}
		}
	}
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
}

// Credentials are part of the configuration: new ones are taken up.
func TestSourceFollowsAuthFiles(t *testing.T) {
	dir := private(t, "testdata/good")
	var tokens atomic.Int64
	src := &Source{Path: filepath.Join(dir, "full.yaml"), OnConfig: func(c *Config) *registry.Group {
		tokens.Store(int64(len(c.Listeners[0].Auth.Tokens)))
		return nil
	}}
	var reg registry.Registry
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- reg.Run(ctx, src) }()
	testnet.Eventually(t, reloadTimeout, func() bool { return tokens.Load() == 1 }, "one token")
	replace(t, filepath.Join(dir, "tokens.txt"), "ci:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08\ncd:0f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08\n")
	testnet.Eventually(t, reloadTimeout, func() bool { return tokens.Load() == 2 }, "two tokens")
	cancel()
	<-done
}

// A storm of reloads with lookups under way: what is in every version is
// always served, by endpoints of one version, and versions only go forward.
func TestReloadStorm(t *testing.T) {
	const services = 40
	names := make([]string, services)
	for i := range names {
		names[i] = fmt.Sprintf("s%d.test", i)
	}
	version := func(n int) string { return config(n, append(names, fmt.Sprintf("v%d.test", n))...) }
	path := filepath.Join(t.TempDir(), "culvert.yaml")
	write(t, path, version(1))
	f := follow(t, path)
	testnet.Eventually(t, reloadTimeout, func() bool { return f.serves("v1.test") }, "first read")

	var (
		stop     atomic.Bool
		lookups  atomic.Int64
		versions sync.Map
		wg       sync.WaitGroup
	)
	for w := range 3 {
		wg.Go(func() {
			last, lastPort := uint64(0), uint16(0)
			for i := w; !stop.Load(); i++ {
				if n := f.Table().Len(); n != services+1 {
					t.Errorf("a table of %d services, want %d", n, services+1)
					return
				}
				route, err := f.Resolve(context.Background(), &tunnel.Request{Name: tunnel.MustParseName(names[i%services]), LocalPort: 443})
				if err != nil {
					t.Errorf("lookup in the storm: %v", err)
					return
				}
				port := route.Endpoints[0].Addr.Port()
				if route.Endpoints[1].Addr.Port() != port {
					t.Errorf("endpoints of versions %d and %d in one route", port, route.Endpoints[1].Addr.Port())
				}
				if route.Generation < last || route.Generation == last && port != lastPort && lastPort != 0 || port < lastPort {
					t.Errorf("generation %d version %d after generation %d version %d", route.Generation, port, last, lastPort)
				}
				last, lastPort = route.Generation, port
				versions.Store(port, true)
				lookups.Add(1)
				if i%100 == 0 {
					<-time.After(time.Millisecond) // leave the machine to the reloads
				}
			}
		})
	}
	pace := time.NewTicker(20 * time.Millisecond)
	defer pace.Stop()
	for n := 2; n <= 101; n++ {
		switch n % 3 {
		case 0:
			replace(t, path, version(n))
		case 1:
			write(t, path, "services:\n  - {name: half") // an editor at work
			write(t, path, version(n))
		case 2:
			replace(t, path, version(n))
			f.src.Reload()
		}
		<-pace.C
	}
	testnet.Eventually(t, reloadTimeout, func() bool { return f.serves("v101.test") }, "the last version")
	if f.serves("v100.test") {
		t.Error("a removed route is still served")
	}
	stop.Store(true)
	wg.Wait()
	seen := 0
	versions.Range(func(any, any) bool { seen++; return true })
	if seen < 5 || lookups.Load() < 1000 {
		t.Errorf("%d versions were seen by %d lookups: the storm was no storm", seen, lookups.Load())
	}
}

// A route that is removed is gone within a second (and nothing else is).
func TestRemovedRouteIsGone(t *testing.T) {
	path := filepath.Join(t.TempDir(), "culvert.yaml")
	write(t, path, config(1, "a.test", "b.test"))
	f := follow(t, path)
	testnet.Eventually(t, reloadTimeout, func() bool { return f.serves("b.test") }, "first read")
	replace(t, path, config(1, "a.test"))
	testnet.Eventually(t, reloadTimeout, func() bool { return !f.serves("b.test") }, "b.test is gone")
	if !f.serves("a.test") {
		t.Error("a.test is gone, too")
	}
	replace(t, path, config(1))
	testnet.Eventually(t, reloadTimeout, func() bool { return !f.serves("a.test") }, "an explicitly empty list")
}

// A file that is gone or broken leaves the table as it is, and says so until it
// can be read again. The same file again is no new table.
func TestSourceSaysWhenItIsLost(t *testing.T) {
	path := filepath.Join(t.TempDir(), "culvert.yaml")
	write(t, path, config(1, "a.test"))
	f := follow(t, path)
	stale := func(want string) func() bool {
		return func() bool {
			source, since, err := f.Stale()
			if want == "" {
				return source == "" && since.IsZero() && err == nil
			}
			return source == path && !since.IsZero() && err != nil && strings.Contains(err.Error(), want)
		}
	}
	testnet.Eventually(t, reloadTimeout, func() bool { return f.serves("a.test") }, "the first table")
	if !stale("")() {
		t.Error("stale from the start")
	}
	if err := os.Rename(path, path+".away"); err != nil {
		t.Fatal(err)
	}
	testnet.Eventually(t, reloadTimeout, stale("no such file"), "that the file is gone")
	write(t, path, "services: [{}]\n")
	testnet.Eventually(t, reloadTimeout, stale("a service needs a name"), "that the file is refused")
	if err := os.Rename(path+".away", path); err != nil {
		t.Fatal(err)
	}
	testnet.Eventually(t, reloadTimeout, stale(""), "that the file is back")
	if !f.serves("a.test") {
		t.Error("a.test is not served any more")
	}
	if n := f.Table().Generation(); n != 1 {
		t.Errorf("generation %d, want 1: nothing has changed", n)
	}
}
