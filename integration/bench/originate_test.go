//go:build linux

package main

import (
	"context"
	"io"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"
)

// Every proxy speaks TLS to the service by each of the ways, and fills the table.
func TestOriginations(t *testing.T) {
	bin := filepath.Join(t.TempDir(), "culvert")
	build := exec.Command("go", "build", "-o", bin, "./cmd/culvert")
	build.Dir = "../.."
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("build: %v\n%s", err, out)
	}
	t.Setenv(keysVar, "") // which makeKeys sets, and the test puts back
	if err := makeKeys(filepath.Join(t.TempDir(), "keys")); err != nil {
		t.Fatal(err)
	}
	s := &suite{
		rig:    rig{dir: t.TempDir(), culvert: bin},
		rounds: 1,
		slice:  50 * time.Millisecond,
		only:   regexp.MustCompile(""),
		log:    io.Discard,
	}
	b, err := s.newOriginations(options{})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute)
	defer cancel()
	if err := b.run(ctx); err != nil {
		t.Fatal(err)
	}
	for _, kind := range b.kinds {
		if len(kind.suite.trouble) > 0 {
			t.Errorf("%s: trouble: %q", kind.name, kind.suite.trouble)
		}
		for _, row := range originationRows() {
			for _, p := range kind.suite.peers {
				if v, _, ok := kind.suite.results.median(row.id, p.name); !ok || v <= 0 && !costs(row.id) {
					t.Errorf("%s, %s: %s is %v, want more than 0", kind.name, p.name, row.title, v)
				}
			}
		}
	}
	var page strings.Builder
	b.report(&page)
	if want := "| | culvert | haproxy | nginx |"; strings.Count(page.String(), want) != len(originations()) {
		t.Errorf("the page has not %d tables that begin with %q:\n%s", len(originations()), want, page.String())
	}
}
