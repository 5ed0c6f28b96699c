package testnet

import (
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"net"
	"os"
	"runtime"
	"sort"
	"strconv"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"
)

// settle is how long goroutines and descriptors may take to go after the last
// test.
const settle = 30 * time.Second

// Main runs a package's tests and exits. It fails the run if goroutines are
// left, or descriptors that were not open before (where /proc shows them).
func Main(m *testing.M) {
	warmUp()
	base := openFiles()
	code := run(m)
	if code == 0 {
		if left := leaked(base, settle); len(left) > 0 {
			fmt.Fprintf(os.Stderr, "testnet: %d descriptors left after the tests: %s\n", len(left), strings.Join(left, ", "))
			code = 1
		}
	}
	os.Exit(code)
}

// GoroutinesEnd runs a package's tests and exits, as Main does, and looks for
// goroutines only.
func GoroutinesEnd(m *testing.M) {
	warmUp() // for tests that count descriptors, which may be the first
	os.Exit(run(m))
}

// Parallel sets how many parallel tests run at once, unless a flag did. A package whose tests
// wait and compute little calls it before they run: the default is one for each processor.
func Parallel(n int) {
	flag.Parse()
	given := false
	flag.Visit(func(f *flag.Flag) { given = given || f.Name == "test.parallel" })
	if given {
		return
	}
	if err := flag.Set("test.parallel", strconv.Itoa(n)); err != nil {
		panic(err)
	}
}

// run runs the tests. goleak by itself waits for less than half a second.
func run(m *testing.M) (code int) {
	if code = m.Run(); code != 0 {
		return code
	}
	var err error
	if poll(settle, func() bool { err = goleak.Find(); return err == nil }) {
		return 0
	}
	fmt.Fprintln(os.Stderr, "testnet: goroutines left after the tests:", err)
	return 1
}

// warmUp makes the runtime open the descriptors that it opens once, on first
// use, and keeps: those of its poller.
func warmUp() {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err == nil {
		_ = ln.Close()
	}
}

// OpenFiles returns how many descriptors the process has open, and false
// where that can't be told.
func OpenFiles() (int, bool) {
	files := openFiles()
	return len(files), files != nil
}

// openFiles maps each open descriptor to what it is, nil where there is no
// /proc.
func openFiles() map[string]string {
	const dir = "/proc/self/fd"
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	files := make(map[string]string, len(entries))
	for _, e := range entries {
		// The descriptor of the directory itself is closed by now.
		if target, err := os.Readlink(dir + "/" + e.Name()); err == nil {
			files[e.Name()] = target
		}
	}
	return files
}

// leaked polls until no descriptor is open but those of base, for at most d,
// and returns the others.
func leaked(base map[string]string, d time.Duration) []string {
	if base == nil {
		return nil
	}
	var left []string
	poll(d, func() bool {
		// The net package keeps the pipes that io.Copy splices with in a
		// sync.Pool: they close when they are collected.
		runtime.GC()
		left = left[:0]
		for fd, target := range openFiles() {
			if base[fd] != target {
				left = append(left, fd+" "+target)
			}
		}
		return len(left) == 0
	})
	sort.Strings(left)
	return left
}

// Eventually polls cond until it is true and fails the test at once if that
// takes longer than d. The optional message says what was waited for, in
// Printf's form; it is evaluated at the end, so pass pointers or Stringers for
// what changes.
func Eventually(t testing.TB, d time.Duration, cond func() bool, format string, args ...any) {
	t.Helper()
	if !poll(d, cond) {
		t.Fatalf("not within %v: %s", d, fmt.Sprintf(format, args...))
	}
}

// poll reports whether cond became true within d. It looks often at first.
func poll(d time.Duration, cond func() bool) bool {
	const shortest, longest = 100 * time.Microsecond, 20 * time.Millisecond
	deadline := time.Now().Add(d)
	for pause := shortest; ; pause = min(2*pause, longest) {
		if cond() {
			return true
		}
		if !time.Now().Before(deadline) {
			return false
		}
		time.Sleep(pause)
	}
}
