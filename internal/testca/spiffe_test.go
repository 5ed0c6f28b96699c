package testca

import (
	"strings"
	"testing"
)

func TestSplitID(t *testing.T) {
	td, path, err := SplitID("spiffe://example.test/ns/demo/sa/echo-1_a.B")
	if err != nil || td != "example.test" || path != "/ns/demo/sa/echo-1_a.B" {
		t.Errorf("SplitID = %q, %q, %v", td, path, err)
	}
	longest := "spiffe://a/" + strings.Repeat("x", maxID-len("spiffe://a/"))
	if _, _, err := SplitID(longest); err != nil {
		t.Errorf("an id of %d bytes: %v", len(longest), err)
	}
}

func TestSplitIDRefuses(t *testing.T) {
	for name, tt := range map[string]struct{ id, want string }{
		"empty":               {"", "does not start with"},
		"other scheme":        {"https://example.test/a", "does not start with"},
		"scheme in capitals":  {"SPIFFE://example.test/a", "does not start with"},
		"no trust domain":     {"spiffe:///a", "trust domain has 0 bytes"},
		"long trust domain":   {"spiffe://" + strings.Repeat("a", 256) + "/a", "trust domain has 256 bytes"},
		"capital in domain":   {"spiffe://Example.test/a", "not in lower case"},
		"port":                {"spiffe://example.test:443/a", "':'"},
		"user":                {"spiffe://me@example.test/a", "'@'"},
		"escape in domain":    {"spiffe://ex%61mple.test/a", "'%'"},
		"no path":             {"spiffe://example.test", "no workload"},
		"root path":           {"spiffe://example.test/", "empty path segment"},
		"empty segment":       {"spiffe://example.test/a//b", "empty path segment"},
		"slash at the end":    {"spiffe://example.test/a/", "empty path segment"},
		"dot":                 {"spiffe://example.test/a/./b", `path segment "."`},
		"dot dot":             {"spiffe://example.test/../b", `path segment ".."`},
		"query":               {"spiffe://example.test/a?b=c", "'?'"},
		"query after domain":  {"spiffe://example.test?b=c/a", "'?'"},
		"fragment":            {"spiffe://example.test/a#b", "'#'"},
		"escape in path":      {"spiffe://example.test/a%2fb", "'%'"},
		"NUL":                 {"spiffe://example.test/a\x00", "'\\x00'"},
		"not ASCII":           {"spiffe://example.test/\u00e4", "has"},
		"one byte over limit": {"spiffe://a/" + strings.Repeat("x", maxID-len("spiffe://a/")+1), "2049 bytes, limit 2048"},
	} {
		if _, _, err := SplitID(tt.id); err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s: SplitID(%.60q) = %v, want an error with %q", name, tt.id, err, tt.want)
		}
	}
}
