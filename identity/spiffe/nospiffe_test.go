//go:build nospiffe

package spiffe

import (
	"strings"
	"testing"
)

// A program without the Workload API says so.
func TestLeftOut(t *testing.T) {
	s := &Source{Socket: "unix:///agent.sock"}
	if err := s.Run(t.Context()); err == nil || !strings.Contains(err.Error(), "nospiffe") {
		t.Errorf("Run: got error %v, want one that names the tag", err)
	}
	if _, err := s.Token(t.Context(), "", "a"); err == nil || Supported {
		t.Errorf("Token: got error %v and Supported %v, want an error and false", err, Supported)
	}
}
