//go:build linux

package main

import (
	"context"
	"io"
	"regexp"
	"strings"
	"testing"
	"time"
)

// Culvert and HAProxy decide by each kind of policies, fill the tables, and refuse whom the
// policies do not admit.
func TestPolicies(t *testing.T) {
	bin := builtCulvert(t)
	withKeys(t)
	s := &suite{
		rig:    rig{dir: t.TempDir(), culvert: bin},
		rounds: 1,
		slice:  50 * time.Millisecond,
		only:   regexp.MustCompile(""),
		log:    io.Discard,
	}
	b, err := s.newPolicies(options{policy: "policies", only: "culvert|haproxy"})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), suiteTime)
	defer cancel()
	if err := b.run(ctx); err != nil {
		t.Fatal(err)
	}
	if len(b.kinds) != 3 {
		t.Fatalf("got %d kinds of policies, want 3", len(b.kinds))
	}
	for _, kind := range b.kinds {
		if len(kind.suite.trouble) > 0 {
			t.Errorf("%s: trouble: %q", kind.name, kind.suite.trouble)
		}
		for _, row := range policyRows() {
			for _, p := range kind.suite.peers {
				if row.id == "admit" && (kind.name != policyAddress || strings.HasSuffix(p.name, ", none")) {
					continue
				}
				if v, _, ok := kind.suite.results.median(row.id, p.name); !ok || v <= 0 && !costs(row.id) {
					t.Errorf("%s, %s: %s is %v, want more than 0", kind.name, p.name, row.title, v)
				}
			}
		}
	}
	var page strings.Builder
	b.report(&page)
	if got := page.String(); strings.Count(got, "\n| new connections/s") != 3 || !strings.Contains(got, "| culvert, none | culvert, 10 | culvert, 10,000 | haproxy, none |") {
		t.Errorf("got the page %s", got)
	}
}

func TestReadBenchmarks(t *testing.T) {
	const good = `goos: linux
BenchmarkDecide/1-2         	10	        30.1 ns/op	       0 B/op	       0 allocs/op
BenchmarkDecide/10-2        	10	       129.4 ns/op	       0 B/op	       0 allocs/op
BenchmarkDecide/10000-2     	10	       700 ns/op	       0 B/op	       0 allocs/op
BenchmarkVerify/direct-2    	10	     49167 ns/op	    5000 B/op	      36 allocs/op
BenchmarkVerify/direct_by_crypto/x509_alone-2 	10	     45898 ns/op	    5000 B/op	      35 allocs/op
BenchmarkES256 	10	     59222 ns/op	    5000 B/op	     175 allocs/op
BenchmarkRepeated-2         	10	       390 ns/op	      16 B/op	       1 allocs/op
PASS
`
	got, err := readBenchmarks([]byte(good))
	if err != nil {
		t.Fatal(err)
	}
	if got[0].ns != 129.4 || got[1].ns != 700 || got[4].allocations != 175 {
		t.Errorf("got %+v", got)
	}
	var page strings.Builder
	(&policyBench{decisions: got}).report(&page)
	for _, want := range []string{"| a decision, 10 rules | 129 | 0 | 300 |", "| a decision, 10,000 rules | 700 | 0 | 600, missed |", "| the same by crypto/x509 alone | 45,898 | 35 |  |"} {
		if !strings.Contains(page.String(), want) {
			t.Errorf("got no line %s in %s", want, page.String())
		}
	}
	if _, err := readBenchmarks([]byte(strings.Replace(good, "BenchmarkES256", "BenchmarkES384", 1))); err == nil {
		t.Error("got no error where a benchmark is missing")
	}
}
