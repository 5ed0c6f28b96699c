package policy

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"culvert.dev/tunnel"
)

// Check returns why p can't be used, or nil.
func (p *Policy) Check() error {
	switch {
	case p.Invalid != "":
		return errors.New(p.Invalid)
	case p.Tier > Baseline:
		return fmt.Errorf("unknown tier %d", p.Tier)
	case p.Action > Deny:
		return fmt.Errorf("unknown action %d", p.Action)
	case p.Verb > Join:
		return fmt.Errorf("unknown verb %d", p.Verb)
	}
	if err := p.Targets.check(); err != nil {
		return err
	}
	for i := range p.Rules {
		if err := p.Rules[i].check(); err != nil {
			return fmt.Errorf("rule %d: %w", i+1, err)
		}
	}
	return nil
}

func (t *Targets) check() error {
	for _, name := range t.Names {
		if _, err := ParseName(name); err != nil {
			return fmt.Errorf("target name %q: %w", name, err)
		}
	}
	if t.Workloads == nil {
		return nil
	}
	for _, r := range t.Workloads.Requirements {
		switch r.Operator {
		case "In", "NotIn":
			if len(r.Values) == 0 {
				return fmt.Errorf("the label requirement %q %s has no values", r.Key, r.Operator)
			}
		case "Exists", "DoesNotExist":
			if len(r.Values) > 0 {
				return fmt.Errorf("the label requirement %q %s takes no values", r.Key, r.Operator)
			}
		default:
			return fmt.Errorf("the label requirement %q has the unknown operator %q", r.Key, r.Operator)
		}
	}
	return nil
}

// ParseName parses one of Targets.Names: a name, "*.name" for all below, or "*" for
// every name.
func ParseName(s string) (tunnel.Pattern, error) {
	if s == "*" {
		return tunnel.AnyName, nil
	}
	return tunnel.ParsePattern(s)
}

// patternsOf returns names, which have been checked, as patterns.
func patternsOf(names []string) []tunnel.Pattern {
	all := make([]tunnel.Pattern, 0, len(names))
	for _, name := range names {
		if p, err := ParseName(name); err == nil {
			all = append(all, p)
		}
	}
	return all
}

func (r *Rule) check() error {
	if r.Sources != nil {
		for i := range *r.Sources {
			if err := (*r.Sources)[i].check(); err != nil {
				return fmt.Errorf("source %d: %w", i+1, err)
			}
		}
	}
	if r.Ports != nil {
		for _, p := range *r.Ports {
			if p.First == 0 || p.Last != 0 && p.Last < p.First {
				return fmt.Errorf("ports %d to %d are no range", p.First, p.Last)
			}
		}
	}
	if r.Protocols != nil && slices.Contains(*r.Protocols, "") {
		return errors.New("a protocol is empty")
	}
	return nil
}

func (x *Source) check() error {
	lists := []struct {
		field string
		list  []string
	}{
		{"spiffe", x.SPIFFE}, {"namespaces", x.Namespaces}, {"users", x.Users}, {"trustDomains", x.TrustDomains}, {"networks", x.Networks}, {"actors", x.Actors},
	}
	for _, l := range lists {
		if l.list != nil && len(l.list) == 0 {
			return fmt.Errorf("%s is empty", l.field)
		}
		if slices.Contains(l.list, "") {
			return fmt.Errorf("%s has an empty item", l.field)
		}
	}
	for _, id := range x.SPIFFE {
		if err := CheckSPIFFE(id); err != nil {
			return err
		}
	}
	for _, id := range x.Actors {
		if strings.HasPrefix(id, spiffeScheme) {
			if err := CheckSPIFFE(id); err != nil {
				return err
			}
		}
	}
	for _, id := range x.Users {
		if strings.HasPrefix(id, spiffeScheme) {
			return fmt.Errorf("user %q is a SPIFFE id", id)
		}
	}
	if x.ServiceAccounts != nil && len(x.ServiceAccounts) == 0 {
		return errors.New("serviceAccounts is empty")
	}
	for _, a := range x.ServiceAccounts {
		if a.Namespace == "" || a.Name == "" {
			return fmt.Errorf("service account %q/%q has an empty namespace or name", a.Namespace, a.Name)
		}
	}
	if x.Claims != nil && len(x.Claims) == 0 {
		return errors.New("claims is empty")
	}
	for claim, values := range x.Claims {
		if claim == "" || len(values) == 0 {
			return fmt.Errorf("claim %q has no values, or no name", claim)
		}
	}
	if x.CIDRs != nil && len(x.CIDRs) == 0 {
		return errors.New("cidrs is empty")
	}
	for _, p := range x.CIDRs {
		if err := CheckCIDR(p); err != nil {
			return err
		}
	}
	return nil
}

// CheckSPIFFE returns why id can't be one of Source.SPIFFE, or nil.
func CheckSPIFFE(id string) error {
	whole, wild := strings.CutSuffix(id, "/*")
	_, path, ok := cutSPIFFE(whole + "/")
	switch {
	case !ok || strings.Contains(whole, "*"):
		return fmt.Errorf("%q is no SPIFFE id, and none with \"/*\" at its end", id)
	case !wild && path == "/":
		return fmt.Errorf("%q is a trust domain, not the id of a workload: add \"/*\" for all of them", id)
	case strings.HasSuffix(whole, "/"):
		return fmt.Errorf("SPIFFE id %q has an empty last part", id)
	}
	return nil
}

// CheckCIDR returns why p can't be one of Source.CIDRs, or nil.
func CheckCIDR(p netip.Prefix) error {
	switch {
	case !p.IsValid():
		return errors.New("a CIDR is not valid")
	case p != p.Masked():
		return fmt.Errorf("CIDR %s has bits after its prefix: write %s", p, p.Masked())
	case p.Addr().Is4In6():
		return fmt.Errorf("CIDR %s is IPv4 written as IPv6", p)
	}
	return nil
}
