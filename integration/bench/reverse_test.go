//go:build linux

package main

import (
	"context"
	"io"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"
)

// What need not be built from other modules gives a service that nobody can dial an address,
// and fills the table.
func TestReverse(t *testing.T) {
	bin := builtCulvert(t)
	withKeys(t)
	s := &suite{
		rig: rig{dir: t.TempDir(), culvert: bin}, rounds: 1, slice: 300 * time.Millisecond, settle: 10 * time.Millisecond,
		tunnels: 16, only: regexp.MustCompile(""), log: io.Discard,
	}
	b, err := s.newReverse(options{culvert: bin, reverse: "culvert|sshd"})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), suiteTime)
	defer cancel()
	if err := b.run(ctx); err != nil {
		t.Fatal(err)
	}
	if len(b.trouble) > 0 {
		t.Errorf("trouble: %q", b.trouble)
	}
	for _, row := range reverseRows() {
		for _, p := range b.pairings {
			if row.id == "idle" && p.holds == "" {
				continue
			}
			if v, _, ok := b.results.median(row.id, p.name); !ok || v <= 0 && row.id != "idle" { // few sessions may need no more pages
				t.Errorf("%s: %s is %v, %v; want more than 0", p.name, row.title, v, ok)
			}
		}
	}
	var page strings.Builder
	b.report(ctx, &page)
	for _, want := range []string{"## Reverse sessions", "| | culvert | culvert-pool | sshd | culvert-ssh |", "round trip, ms: ", "ssh -R, connection and first byte, ms: "} {
		if !strings.Contains(page.String(), want) {
			t.Errorf("no %q in\n%s", want, page.String())
		}
	}
}

// -reverse chooses by name, and says what is missing.
func TestReverseChoice(t *testing.T) {
	s := &suite{only: regexp.MustCompile("")}
	for pattern, want := range map[string]int{"culvert": 3, "^culvert$|sshd": 2, "none": 0} {
		b, err := s.newReverse(options{culvert: "bin/culvert", reverse: pattern})
		if err != nil || len(b.pairings) != want || len(b.peers) != want {
			t.Errorf("-reverse %q: error %v, else %d programs, want %d", pattern, err, len(b.pairings), want)
		}
	}
	for pattern, want := range map[string]string{"(": "-reverse", "chisel": "chisel takes part and is not there"} {
		if _, err := s.newReverse(options{culvert: filepath.Join(t.TempDir(), "culvert"), reverse: pattern}); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("-reverse %q: error %v, want one with %q", pattern, err, want)
		}
	}
}
