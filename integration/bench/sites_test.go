//go:build linux

package main

import (
	"context"
	"io"
	"regexp"
	"strings"
	"testing"
)

// A service that is added at one site is reached at another, and fills the table.
func TestSites(t *testing.T) {
	bin := builtCulvert(t)
	withKeys(t)
	s := &suite{rig: rig{dir: t.TempDir(), culvert: bin}, rounds: 1, only: regexp.MustCompile(""), log: io.Discard}
	b, err := s.newSites(options{sites: "^1$"})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), suiteTime)
	defer cancel()
	if err := b.run(ctx); err != nil {
		t.Fatal(err)
	}
	var page strings.Builder
	b.report(&page)
	for _, want := range []string{"## Sites", "| | 1 |", "| a service is added, ms, median | ", "a service is added to 1, ms: "} {
		if !strings.Contains(page.String(), want) {
			t.Errorf("no %q in\n%s", want, page.String())
		}
	}
}
