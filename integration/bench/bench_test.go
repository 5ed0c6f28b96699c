//go:build linux

package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

// TestMain lets the test program play the roles of the benchmark's own
// processes.
func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == "-role" {
		main()
		return
	}
	os.Exit(m.Run())
}

// built is culvert beside the test binary, where "go test" removes it: one for
// all tests.
var built = sync.OnceValues(func() (string, error) {
	self, err := os.Executable()
	if err != nil {
		return "", err
	}
	bin := filepath.Join(filepath.Dir(self), "culvert")
	build := exec.Command("go", "build", "-ldflags", "-s -w", "-o", bin, "./cmd/culvert")
	build.Dir, build.Env = "../..", append(os.Environ(), "CGO_ENABLED=0") // as the image, and as what else the suites build
	if out, err := build.CombinedOutput(); err != nil {
		return "", fmt.Errorf("build: %w\n%s", err, out)
	}
	return bin, nil
})

func builtCulvert(t *testing.T) string {
	t.Helper()
	bin, err := built()
	if err != nil {
		t.Fatal(err)
	}
	return bin
}

// suiteTime is what a part of the suite may take on a machine that does much else.
const suiteTime = 8 * time.Minute

// withKeys makes the keys of the benchmark for one test.
func withKeys(t *testing.T) {
	t.Helper()
	t.Setenv(keysVar, "") // which makeKeys sets, and the test puts back
	if err := makeKeys(filepath.Join(t.TempDir(), "keys")); err != nil {
		t.Fatal(err)
	}
}

// The whole suite runs, over what needs no other program, and fills every
// row. How fast it was is not looked at.
func TestSuite(t *testing.T) {
	chosen, err := choose(options{only: "^(naive|bare|floor|direct)$"})
	if err != nil {
		t.Fatal(err)
	}
	s := &suite{
		rig:     rig{dir: t.TempDir()},
		peers:   chosen,
		rounds:  2,
		slice:   30 * time.Millisecond,
		settle:  10 * time.Millisecond,
		tunnels: 100,
		half:    48,
		only:    regexp.MustCompile(""),
		log:     io.Discard,
		steps:   steps(),
		role:    "load",
		results: make(results),
	}
	ctx, cancel := context.WithTimeout(t.Context(), suiteTime)
	defer cancel()
	if err := s.run(ctx); err != nil {
		t.Fatal(err)
	}
	if len(s.trouble) > 0 {
		t.Errorf("trouble: %q", s.trouble)
	}
	if n := len(s.results["up16"]["bare"]); n != s.rounds {
		t.Errorf("bare's upload: %d values, want %d", n, s.rounds)
	}
	if n, other := len(s.results["cputrips1"]["floor"]), len(s.results["conns1"]["floor"]); n != s.rounds || other != 0 {
		t.Errorf("the floor's round trips: %d values, want %d; and %d of its connections, want none", n, s.rounds, other)
	}
	for _, row := range rows() {
		if row.own {
			continue
		}
		want := s.rounds
		if row.id == "rest" { // once
			want = 1
		}
		if n := len(s.results[row.id]["naive"]); n != want {
			t.Errorf("%s: %d values, want %d", row.id, n, want)
		}
		if v, _, _ := s.results.median(row.id, "naive"); v <= 0 && !costs(row.id) {
			t.Errorf("%s: %v, want more than 0", row.id, v)
		}
	}
	if v, _, _ := s.results.median("idlefds", "naive"); v < 2 {
		t.Errorf("%v descriptors for each idle tunnel, want at least the two sockets", v)
	}
	var b strings.Builder
	s.results.print(&b, []string{"naive", "direct"})
	if got, want := strings.Count(b.String(), "\n"), len(s.results)+4; got != want {
		t.Errorf("the table has %d lines, want %d:\n%s", got, want, b.String())
	}
}

// What is measured of culvert alone fills its rows, and so does a profile its
// folder.
func TestCulvertAlone(t *testing.T) {
	bin := builtCulvert(t)
	s := &suite{
		rig:     rig{dir: t.TempDir(), culvert: bin},
		peers:   peers(bin)[:1],
		rounds:  1,
		slice:   30 * time.Millisecond,
		settle:  10 * time.Millisecond,
		tunnels: 100,
		half:    48,
		routes:  300,
		only:    regexp.MustCompile("idle|half|routes|reload"),
		log:     io.Discard,
		steps:   steps(),
		role:    "load",
		results: make(results),
	}
	ctx, cancel := context.WithTimeout(t.Context(), suiteTime)
	defer cancel()
	if err := s.run(ctx); err != nil {
		t.Fatal(err)
	}
	if len(s.trouble) > 0 {
		t.Errorf("trouble: %q", s.trouble)
	}
	for _, row := range rows() {
		if strings.HasPrefix(row.id, "line") {
			continue // a difference, between two that do not both take part
		}
		if v, _, ok := s.results.median(row.id, us); row.own && (!ok || v <= 0) {
			t.Errorf("%s: %v, want more than 0", row.id, v)
		}
	}
	var page strings.Builder
	s.report(ctx, &page, options{measure: "idle"}, &suite{})
	for _, want := range []string{"# Benchmarks\n", "- culvert: culvert ", "| reload of", "PASS   descriptors per idle tunnel: 2.00", `-measure "idle"`} {
		if !strings.Contains(page.String(), want) {
			t.Errorf("no %q in the page:\n%s", want, page.String())
		}
	}
	s.only = regexp.MustCompile("trips64")
	var many strings.Builder
	if err := s.scale(ctx, 2, &many); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"| tunnels held | 200 in", "| descriptors of the gateways for each | 2.00 |"} {
		if !strings.Contains(many.String(), want) {
			t.Errorf("no %q in\n%s", want, many.String())
		}
	}
	folder := t.TempDir()
	var top strings.Builder
	if err := s.profile(ctx, folder, &top); err != nil {
		t.Fatal(err)
	}
	for _, kind := range []string{"cpu", "allocs"} {
		if info, err := os.Stat(filepath.Join(folder, "trips64."+kind+".pprof")); err != nil || info.Size() == 0 {
			t.Errorf("the %s profile: %v", kind, err)
		}
	}
	if !strings.Contains(top.String(), "flat%") {
		t.Errorf("no top in\n%s", top.String())
	}
}

// Every carrier does every step, and each fills its columns.
func TestCarriers(t *testing.T) {
	bin := builtCulvert(t)
	s := &suite{
		rig: rig{dir: t.TempDir(), culvert: bin}, rounds: 1, slice: 200 * time.Millisecond, settle: 10 * time.Millisecond,
		tunnels: 150, only: regexp.MustCompile(""), log: io.Discard, results: make(results),
	}
	withKeys(t)
	ways, err := s.carriers(options{only: "culvert"})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), suiteTime)
	defer cancel()
	if err := ways.run(ctx); err != nil {
		t.Fatal(err)
	}
	if len(ways.trouble) > 0 {
		t.Errorf("trouble: %q", ways.trouble)
	}
	var names []string
	for _, c := range carriers() {
		names = append(names, c.name)
		for _, column := range carrierRows() {
			v, _, ok := ways.results.median(column.id, c.name)
			want := column.id != "beside" || c.shared
			if c.single && (strings.Contains(column.id, "up") || strings.Contains(column.id, "down")) {
				want = false
			}
			if ok != want || want && v <= 0 && !costs(column.id) {
				t.Errorf("%s: %s: %v, %v; want a value: %v", c.name, column.id, v, ok, want)
			}
		}
	}
	var page strings.Builder
	ways.reportCarriers(&page)
	for _, want := range append(names, "## Carriers") {
		if !strings.Contains(page.String(), "| "+want+" |") && !strings.Contains(page.String(), "\n"+want+"\n") {
			t.Errorf("no %q in\n%s", want, page.String())
		}
	}
	if ways, err = s.carriers(options{carrier: "^connect$"}); err != nil || len(ways.peers) != 1 || ways.peers[0].name != "connect" {
		t.Errorf("-carrier ^connect$: %v, %v, want that line alone", ways, err)
	}
}

// An opener asks for the service it is told to and changes nothing else.
func TestOpener(t *testing.T) {
	h, err := hello(serviceName(0))
	if err != nil {
		t.Fatal(err)
	}
	o, err := newOpener(bytes.Clone(h))
	if err != nil {
		t.Fatal(err)
	}
	for _, i := range []int{0, 7, 99_999, 123_456, 3} {
		p := o.to(i)
		if name, err := serverName(p[5:]); name != serviceName(i) || err != nil {
			t.Errorf("serverName = %q, %v; want %q", name, err, serviceName(i))
		}
	}
	if !bytes.Equal(o.to(0), h) {
		t.Error("the opening for service 0 is not what it was made of")
	}
	if _, err := newOpener([]byte("no name in here")); err == nil {
		t.Error("an opener of a hello without the name, and no error")
	}
}

func TestHellos(t *testing.T) {
	p, err := hello("svc7.bench.test")
	if err != nil {
		t.Fatal(err)
	}
	if name, err := serverName(p[5:]); name != "svc7.bench.test" || err != nil {
		t.Errorf("serverName = %q, %v; want svc7.bench.test", name, err)
	}
	for n := range len(p) - 5 {
		_, _ = serverName(p[5 : 5+n]) // must not panic
	}
	p, err = hello512("svc99.bench.test")
	if err != nil {
		t.Fatal(err)
	}
	if len(p) != 512 {
		t.Errorf("the padded hello has %d bytes, want 512", len(p))
	}
}

func TestMedianAndRatio(t *testing.T) {
	r := results{}
	for i, v := range []float64{10, 400, 20, 30, 40} {
		r.add("x", "us", v)
		r.add("x", "them", 10*float64(i+1))
	}
	if v, spread, _ := r.median("x", "us"); v != 30 || spread != 6.5 {
		t.Errorf("median = %v ±%v, want 30 ±6.5", v, spread)
	}
	if got, _ := r.ratio("x", "us", "them"); got != 0.8 { // of 1, 20, 0.67, 0.75, 0.8
		t.Errorf("ratio = %v, want 0.8", got)
	}
	if _, ok := r.ratio("x", "us", "nobody"); ok {
		t.Error("there is a ratio to nobody")
	}
}

func TestJudge(t *testing.T) {
	r := results{}
	r.add("conns64", "culvert", 99)
	r.add("conns64", "haproxy", 100)
	r.add("cpuup1", "culvert", 0.404) // rounded as printed
	r.add("cpuup1", "haproxy", 1)
	r.add("trips64", "culvert", 1) // no target
	r.add("trips64", "haproxy", 100)
	r.add("idlemem", "culvert", 0.51)
	r.add("idlefds", "culvert", 2.0004)
	r.add("few", "culvert", 1000)
	r.add("many", "culvert", 940)
	var b strings.Builder
	const want = `SHORT  new connections/s, 64 workers: 0.99 of haproxy's, at least 1.00
PASS   CPU per GB, upload, 1 flow, s: 0.40 of haproxy's, at most 0.40
SHORT  memory per idle tunnel (PSS), KiB: 0.51, at most 0.5
PASS   descriptors per idle tunnel: 2.00, at most 2
SHORT  new connections/s, 64 workers, 100,000 routes: 0.94 of that with 10 routes, at least 0.95
`
	if short := r.judge(&b); short != 3 || b.String() != want {
		t.Errorf("%d fall short, want 3; got\n%s\nwant\n%s", short, b.String(), want)
	}
}

func TestNumber(t *testing.T) {
	for _, tt := range []struct {
		v      float64
		digits int
		want   string
	}{{0, 0, "0"}, {999, 0, "999"}, {1000, 0, "1,000"}, {1234567.891, 2, "1,234,567.89"}, {-123, 0, "-123"}, {-1234, 1, "-1,234.0"}} {
		if got := number(tt.v, tt.digits); got != tt.want {
			t.Errorf("number(%v, %d) = %q, want %q", tt.v, tt.digits, got, tt.want)
		}
	}
}

func TestChoose(t *testing.T) {
	if _, err := choose(options{culvert: "/does/not/exist"}); err == nil || !strings.Contains(err.Error(), "-only") {
		t.Errorf("without a culvert binary: %v, want an error that names -only", err)
	}
	got, err := choose(options{culvert: "/does/not/exist", only: "naive|direct"})
	if err != nil || len(got) != 2 {
		t.Errorf("choose = %d peers, %v; want 2", len(got), err)
	}
	if _, err := choose(options{only: "squid"}); err == nil {
		t.Error("nobody to measure, and no error")
	}
}

// The part about DNS servers runs, over those that need not be built, and fills
// their rows.
func TestDNSServers(t *testing.T) {
	s := &suite{rig: rig{dir: t.TempDir()}, rounds: 1, slice: time.Second, log: io.Discard}
	b, err := s.newDNS(options{dns: "unbound|dnsmasq"})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), suiteTime)
	defer cancel()
	if err := b.run(ctx); err != nil {
		t.Fatal(err)
	}
	var page bytes.Buffer
	b.report(ctx, &page)
	for _, row := range dnsRows() {
		for _, p := range b.peers {
			least := 1e-9
			if strings.HasPrefix(row.id, "lost") {
				least = 0
			}
			if v, _, ok := b.results.median(row.id, p.name); !row.own && (!ok || v < least) {
				t.Errorf("%s of %s: %v, %v\n%s", row.title, p.name, v, ok, page.String())
			}
		}
	}
}

// Some of what is measured of DNS servers can be asked for, or none of it.
func TestDNSMeasures(t *testing.T) {
	for measure, want := range map[string]string{"": "local cached paced many", "paced": "paced", "local|many": "local many", "trips": ""} {
		s := &suite{rig: rig{dir: t.TempDir()}, only: regexp.MustCompile(measure), log: io.Discard}
		b, err := s.newDNS(options{dns: "unbound"})
		if err != nil {
			t.Fatal(err)
		}
		got := strings.Join(slices.DeleteFunc(slices.Clone(dnsSteps), func(step string) bool { return !b.measures(step) }), " ")
		if got != want || (len(b.peers) > 0) != (want != "") {
			t.Errorf("-measure %q: %q of %d servers, want %q", measure, got, len(b.peers), want)
		}
	}
}

func TestCores(t *testing.T) {
	for list, want := range map[string]string{"0-1": "0 1", "3": "3", "0-2,5,7-8": "0 1 2 5 7 8", "": "0", "x": "0"} {
		if got := strings.Join(coresOf(list), " "); got != want {
			t.Errorf("cores %q: %q, want %q", list, got, want)
		}
	}
}

// The target is judged by the worst of the answers and by what is lost.
func TestJudgePaced(t *testing.T) {
	b := &dnsBench{suite: &suite{results: make(results)}}
	var page bytes.Buffer
	if b.judgePaced(&page); page.Len() > 0 {
		t.Errorf("nothing was measured: %s", page.String())
	}
	b.results.add("p99pacedlocal", us, 4999)
	b.results.add("lostpacedlocal", us, 0)
	b.results.add("p99pacedcached", us, 900)
	b.results.add("lostpacedcached", us, 2.5)
	b.judgePaced(&page)
	const want = "\n```\n" +
		"PASS   own names on one core, p99, us: 4,999.0, at most 5000; none lost: 0.0 of 100,000 are\n" +
		"SHORT  cached names of others on one core, p99, us: 900.0, at most 5000; none lost: 2.5 of 100,000 are\n```\n"
	if page.String() != want {
		t.Errorf("got\n%swant\n%s", page.String(), want)
	}
}

// A peer that never becomes ready is reported with the reason, not with the end of the
// time that it had.
func TestAwaitReportsTheReason(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		calls := 0
		r := &running{done: make(chan error, 1), peer: &peer{ready: func(ctx context.Context, _ string) error {
			if calls++; calls < 3 {
				return errors.New("another cipher")
			}
			<-ctx.Done()
			return ctx.Err()
		}}}
		if err := r.await(t.Context()); err == nil || !strings.Contains(err.Error(), "another cipher") {
			t.Errorf("error %v, want one with %q", err, "another cipher")
		}
	})
}
