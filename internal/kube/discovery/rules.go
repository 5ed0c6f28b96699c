package discovery

import (
	"fmt"
	"path"
	"strings"

	"culvert.dev/tunnel"
)

// Rules limit what annotations can do; the administrator sets them. With zero Rules annotations can
// expose any service and claim no name.
type Rules struct {
	// Allow are the services that may be exposed, as "NAMESPACE/NAME" or
	// "NAMESPACE", with the asterisks, question marks and brackets of
	// path.Match. Empty means all. Deny are those that may not, whatever Allow says.
	Allow []string
	Deny  []string

	// Names are those that services may claim by the annotation
	// culvert.dev/names. Empty means none.
	Names []NameRule

	// ExternalNames lets Services of the type ExternalName be exposed. Without it they stay closed,
	// because the author of one can make the gateway dial any host that it reaches.
	ExternalNames bool
}

// A NameRule allows the names at and below Suffix.
type NameRule struct {
	Suffix     tunnel.Name
	Namespaces []string // that may, as patterns; empty means all
}

// Check finds what is malformed in r.
func (r *Rules) Check() error {
	for _, list := range []struct {
		what     string
		patterns []string
	}{{"allow", r.Allow}, {"deny", r.Deny}} {
		for _, p := range list.patterns {
			if _, err := path.Match(p, "x"); err != nil || p == "" || strings.Count(p, "/") > 1 {
				return fmt.Errorf("%s: %q is not a pattern: write NAMESPACE/NAME or NAMESPACE", list.what, p)
			}
		}
	}
	for _, n := range r.Names {
		if n.Suffix.IsZero() {
			return fmt.Errorf("names: a rule has no suffix")
		}
		for _, p := range n.Namespaces {
			if _, err := path.Match(p, "x"); err != nil || p == "" {
				return fmt.Errorf("names: %q is not a pattern of a namespace", p)
			}
		}
	}
	return nil
}

// Refuses returns why a service may not be exposed, or "".
func (r *Rules) Refuses(namespace, name string) string {
	for _, p := range r.Deny {
		if matches(p, namespace, name, true) {
			return fmt.Sprintf("the administrator denies %q", p)
		}
	}
	if len(r.Allow) == 0 {
		return ""
	}
	for _, p := range r.Allow {
		if matches(p, namespace, name, false) {
			return ""
		}
	}
	return "the administrator does not allow it"
}

// matches reports whether a pattern covers a service. It returns broken if the pattern is malformed.
func matches(pattern, namespace, name string, broken bool) bool {
	what := namespace
	if strings.Contains(pattern, "/") {
		what += "/" + name
	}
	ok, err := path.Match(pattern, what)
	return ok || err != nil && broken
}

// claims reports whether a service of namespace may have the name p.
func (r *Rules) claims(namespace string, p tunnel.Pattern) bool {
	for _, rule := range r.Names {
		below := tunnel.Pattern{Suffix: rule.Suffix, Wildcard: true}
		if p.Suffix != rule.Suffix && !below.Matches(p.Suffix) {
			continue
		}
		if len(rule.Namespaces) == 0 {
			return true
		}
		for _, n := range rule.Namespaces {
			if matches(n, namespace, "", false) {
				return true
			}
		}
	}
	return false
}
