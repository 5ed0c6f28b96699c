package testca

import (
	"fmt"
	"strings"
)

const (
	maxID          = 2048 // bytes of a SPIFFE id, SPIFFE-ID section 2.3
	maxTrustDomain = 255  // bytes of a trust domain, SPIFFE-ID section 2.1
	scheme         = "spiffe://"
)

// CheckTrustDomain returns an error if td can't be a trust domain: 1 to 255
// lower-case letters, digits, dots, hyphens and underscores (SPIFFE-ID section
// 2.1). A port or user part is therefore an error too.
func CheckTrustDomain(td string) error {
	if n := len(td); n == 0 || n > maxTrustDomain {
		return fmt.Errorf("testca: trust domain has %d bytes, want 1 to %d", n, maxTrustDomain)
	}
	for i := range len(td) {
		switch c := td[i]; {
		case 'a' <= c && c <= 'z', '0' <= c && c <= '9', c == '.', c == '-', c == '_':
		case 'A' <= c && c <= 'Z':
			return fmt.Errorf("testca: trust domain %q is not in lower case", td)
		default:
			return fmt.Errorf("testca: trust domain %q has %q at offset %d: want letters, digits, '.', '-' and '_'", td, c, i)
		}
	}
	return nil
}

// SplitID returns the trust domain and the path of a workload's SPIFFE id,
// "spiffe://example.test/ns/demo/sa/echo". The path starts with its slash and
// has at least one segment; no segment is empty, "." or "..", and none holds
// anything but letters, digits, '.', '-' and '_', so there is one spelling
// for each id (SPIFFE-ID sections 2.1 to 2.3).
func SplitID(id string) (trustDomain, path string, err error) {
	if len(id) > maxID {
		return "", "", fmt.Errorf("testca: SPIFFE id has %d bytes, limit %d", len(id), maxID)
	}
	rest, ok := strings.CutPrefix(id, scheme)
	if !ok {
		return "", "", fmt.Errorf("testca: SPIFFE id %q does not start with %q", id, scheme)
	}
	slash := strings.IndexByte(rest, '/')
	if slash < 0 {
		return "", "", fmt.Errorf("testca: SPIFFE id %q names a trust domain and no workload: want a path after it", id)
	}
	trustDomain, path = rest[:slash], rest[slash:]
	if err := CheckTrustDomain(trustDomain); err != nil {
		return "", "", fmt.Errorf("SPIFFE id %q: %w", id, err)
	}
	for segment := range strings.SplitSeq(path[1:], "/") {
		if err := checkSegment(segment); err != nil {
			return "", "", fmt.Errorf("testca: SPIFFE id %q: %w", id, err)
		}
	}
	return trustDomain, path, nil
}

func checkSegment(s string) error {
	switch s {
	case "":
		return fmt.Errorf("empty path segment")
	case ".", "..":
		return fmt.Errorf("path segment %q", s)
	}
	for i := range len(s) {
		switch c := s[i]; {
		case 'a' <= c && c <= 'z', 'A' <= c && c <= 'Z', '0' <= c && c <= '9', c == '.', c == '-', c == '_':
		default:
			return fmt.Errorf("path segment %q has %q: want letters, digits, '.', '-' and '_'", s, c)
		}
	}
	return nil
}
