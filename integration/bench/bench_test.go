//go:build linux

package main

import (
	"context"
	"io"
	"os"
	"regexp"
	"strings"
	"testing"
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

// The whole suite runs, over what needs no other program, and fills every
// row. How fast it was is not looked at.
func TestSuite(t *testing.T) {
	all := peers("culvert")
	s := &suite{
		rig:     rig{dir: t.TempDir()},
		peers:   all[len(all)-2:], // naive and direct
		rounds:  2,
		slice:   30 * time.Millisecond,
		settle:  10 * time.Millisecond,
		tunnels: 100,
		half:    50,
		only:    regexp.MustCompile(""),
		log:     io.Discard,
		results: make(results),
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if err := s.run(ctx); err != nil {
		t.Fatal(err)
	}
	if len(s.trouble) > 0 {
		t.Errorf("trouble: %q", s.trouble)
	}
	for _, row := range rows() {
		if n := len(s.results[row.id]["naive"]); n != s.rounds {
			t.Errorf("%s: %d values, want %d", row.id, n, s.rounds)
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
	if got, want := strings.Count(b.String(), "\n"), len(rows())+4; got != want {
		t.Errorf("the table has %d lines, want %d:\n%s", got, want, b.String())
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
	r.add("conns64", "culvert", 79)
	r.add("conns64", "haproxy", 100)
	r.add("conns64", "naive", 70)
	r.add("cpuup1", "culvert", 0.5)
	r.add("cpuup1", "haproxy", 1)
	r.add("cpuup1", "naive", 0.4)
	r.add("idlemem", "culvert", 12.5)
	r.add("idlefds", "culvert", 2)
	r.add("halffds", "culvert", 1)
	r.add("halffds", "naive", 1)
	var b strings.Builder
	if short := r.judge(&b); short != 3 {
		t.Errorf("%d fall short, want 3", short)
	}
	for _, want := range []string{
		"SHORT  new connections/s, 64 workers: 0.79 of haproxy's, at least 0.80\n",
		"PASS   new connections/s, 64 workers: 1.13 of a naive proxy's\n",
		"PASS   CPU per GB, upload, 1 flow, s: 0.50 of haproxy's, at most 0.50\n",
		"SHORT  CPU per GB, upload, 1 flow, s: 1.25 of a naive proxy's\n",
		"SHORT  memory per idle tunnel (PSS), KiB: 12.50, at most 12\n",
		"PASS   descriptors per idle tunnel: 2.00, at most 2\n",
	} {
		if !strings.Contains(b.String(), want) {
			t.Errorf("no line %q in\n%s", want, b.String())
		}
	}
	if strings.Count(b.String(), "\n") != 6 {
		t.Errorf("want 6 lines:\n%s", b.String())
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
