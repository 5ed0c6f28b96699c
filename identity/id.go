package identity

import (
	"crypto/x509"
	"errors"
	"fmt"
	"slices"
	"strings"

	"culvert.dev/tunnel"
)

const (
	maxID    = 2048 // bytes of a SPIFFE id, SPIFFE-ID section 2.3
	maxOther = 512  // bytes of another identity
	maxShown = 80   // bytes of a peer's text in an error
	scheme   = "spiffe://"
)

// ParseSPIFFEID returns the trust domain and the path of a workload's SPIFFE id,
// SPIFFE-ID section 2: "corp.example" and "/ns/shop/sa/api". Of each id there is one
// spelling. An id without a path is a trust domain's and no workload's.
func ParseSPIFFEID(id string) (domain, path string, err error) {
	rest, ok := strings.CutPrefix(id, scheme)
	at := strings.IndexByte(rest, '/')
	switch {
	case len(id) > maxID:
		return "", "", fmt.Errorf("the SPIFFE id %q... has %d bytes, limit %d", clip(id), len(id), maxID)
	case !ok:
		return "", "", fmt.Errorf("%q is not a SPIFFE id", clip(id))
	case at < 0 && IsTrustDomain(rest):
		return "", "", fmt.Errorf("the SPIFFE id %q has no path", clip(id))
	case at < 0 || !IsTrustDomain(rest[:at]):
		return "", "", fmt.Errorf("%q is not a SPIFFE id: its trust domain is malformed", clip(id))
	}
	domain, path = rest[:at], rest[at:]
	for segment := range strings.SplitSeq(path[1:], "/") {
		if segment == "" || segment == "." || segment == ".." || strings.ContainsFunc(segment, func(r rune) bool {
			return !('a' <= r && r <= 'z' || 'A' <= r && r <= 'Z' || '0' <= r && r <= '9' || strings.ContainsRune("-._", r))
		}) {
			return "", "", fmt.Errorf("the SPIFFE id %q has a malformed path", clip(id))
		}
	}
	return domain, path, nil
}

// IsTrustDomain reports whether s may be a trust domain, SPIFFE-ID section 2.1.
func IsTrustDomain(s string) bool {
	return s != "" && len(s) <= 255 && !strings.ContainsFunc(s, func(r rune) bool {
		return !('a' <= r && r <= 'z' || '0' <= r && r <= '9' || strings.ContainsRune("-._", r))
	})
}

// Principal returns what a SPIFFE id says of its workload. Istio's form,
// "spiffe://DOMAIN/ns/NAMESPACE/sa/ACCOUNT", has a namespace and a service account, and no
// other form has.
func Principal(id string) (*tunnel.AuthInfo, error) {
	domain, path, err := ParseSPIFFEID(id)
	if err != nil {
		return nil, err
	}
	a := &tunnel.AuthInfo{TrustDomain: domain}
	rest, ok := strings.CutPrefix(path, "/ns/")
	namespace, rest, _ := strings.Cut(rest, "/")
	account, found := strings.CutPrefix(rest, "sa/")
	if ok && found && account != "" && !strings.Contains(account, "/") {
		a.Namespace, a.ServiceAccount = namespace, account
	}
	return a, nil
}

// linkerd returns the SPIFFE id of the workload that Linkerd calls
// "ACCOUNT.NAMESPACE.serviceaccount.identity.CONTROLNAMESPACE.DOMAIN", and its trust
// domain. It reports false for any other name.
func linkerd(name string) (id, domain string, ok bool) {
	account, rest, _ := strings.Cut(name, ".")
	namespace, rest, _ := strings.Cut(rest, ".")
	rest, ok = strings.CutPrefix(rest, "serviceaccount.identity.")
	control, domain, more := strings.Cut(rest, ".")
	if !ok || !more || control == "" {
		return "", "", false
	}
	id = scheme + domain + "/ns/" + namespace + "/sa/" + account
	_, _, err := ParseSPIFFEID(id)
	return id, domain, err == nil
}

// A name is what a leaf says it is.
type name struct {
	id     string // as tunnel.Peer has it
	domain string // the trust domain of a workload's id; "" for others
}

// nameOf reads the name of a leaf, which nobody has verified yet. A certificate with
// several URIs has none: different parsers could pick different ones (CVE-2022-40716).
func nameOf(leaf *x509.Certificate) (name, error) {
	switch {
	case len(leaf.URIs) > 1:
		return name{}, fmt.Errorf("certificate has %d URIs, want one", len(leaf.URIs))
	case len(leaf.URIs) == 1:
		id := leaf.URIs[0].String()
		if !strings.EqualFold(leaf.URIs[0].Scheme, "spiffe") {
			return other("uri:" + id)
		}
		domain, _, err := ParseSPIFFEID(id)
		switch {
		case err != nil:
			return name{}, fmt.Errorf("certificate has a malformed id: %w", err)
		case leaf.IsCA, leaf.KeyUsage&(x509.KeyUsageCertSign|x509.KeyUsageCRLSign) != 0: // X509-SVID sections 4.1 and 4.3
			return name{}, errors.New("certificate is that of a CA, which can't be a workload's")
		}
		return name{id, domain}, nil
	case len(leaf.DNSNames) == 1:
		if id, domain, ok := linkerd(leaf.DNSNames[0]); ok {
			return name{id, domain}, nil
		}
	}
	return plainName(leaf)
}

// plainName is the name of a leaf that has no URI.
func plainName(leaf *x509.Certificate) (name, error) {
	if len(leaf.DNSNames) > 0 {
		return other("dns:" + leaf.DNSNames[0])
	}
	return other("subject:" + leaf.Subject.String())
}

// other bounds an identity that is no SPIFFE id.
func other(id string) (name, error) {
	if len(id) > maxOther {
		return name{}, fmt.Errorf("certificate has a name of %d bytes, limit %d", len(id), maxOther)
	}
	return name{id: id}, nil
}

// listed reports whether ids has id, its trust domain as "spiffe://DOMAIN", or ids that it is
// one of: "spiffe://DOMAIN/gw/*".
func listed(ids []string, id string) bool {
	return slices.ContainsFunc(ids, func(want string) bool {
		if below, ok := strings.CutSuffix(want, "/*"); ok {
			return strings.HasPrefix(id, below) && len(id) > len(below)+1 && id[len(below)] == '/'
		}
		return id == want || strings.Count(want, "/") == 2 && strings.HasPrefix(id, want) && strings.HasPrefix(id[len(want):], "/")
	})
}

// clip shortens a peer's text for an error.
func clip(s string) string { return s[:min(len(s), maxShown)] }
