package termination

import (
	"crypto/x509"
	"errors"
	"fmt"
	"maps"
	"slices"
)

// A trust has the CAs of each trust domain. They speak for it and for no other.
type trust map[string][]*x509.Certificate

// newTrust returns the trust of k, which is nil where any identity is accepted, and
// all CAs that may have signed a client's certificate. These are nil where no client
// is asked for one.
func newTrust(k *Keys) (trust, *x509.CertPool, error) {
	switch {
	case k.Trust == nil:
		return nil, k.ClientCAs, nil
	case k.ClientCAs != nil:
		return nil, nil, errors.New("termination: ClientCAs beside Trust: which trust domain they speak for is not known")
	case len(k.Trust) == 0:
		return nil, nil, errors.New("termination: Trust has no trust domain")
	}
	t, all := make(trust, len(k.Trust)), x509.NewCertPool()
	for domain, cas := range k.Trust {
		if !isTrustDomain(domain) {
			return nil, nil, fmt.Errorf("termination: %q is not a trust domain", domain)
		}
		if len(cas) == 0 {
			return nil, nil, fmt.Errorf("termination: trust domain %q has no CA to verify certificates by", domain)
		}
		t[domain] = slices.Clone(cas)
		for _, ca := range cas {
			all.AddCert(ca)
		}
	}
	return t, all, nil
}

// check refuses an id whose trust domain t does not have, or whose certificate was
// signed by a CA of another one. A nil trust accepts all.
func (t trust) check(domain string, chains [][]*x509.Certificate) error {
	if t == nil {
		return nil
	}
	cas, ok := t[domain]
	if !ok {
		return refuse("the client's trust domain is %q, want one of %q", domain, t.domains())
	}
	for _, chain := range chains {
		if slices.ContainsFunc(cas, chain[len(chain)-1].Equal) {
			return nil
		}
	}
	return refuse("the client's id is of trust domain %q, and its certificate is signed by a CA of %q", domain, t.of(chains))
}

// of returns the trust domains for which the CAs at the ends of chains speak.
func (t trust) of(chains [][]*x509.Certificate) []string {
	var domains []string
	for _, domain := range t.domains() {
		if slices.ContainsFunc(chains, func(chain []*x509.Certificate) bool {
			return slices.ContainsFunc(t[domain], chain[len(chain)-1].Equal)
		}) {
			domains = append(domains, domain)
		}
	}
	return domains
}

func (t trust) domains() []string { return slices.Sorted(maps.Keys(t)) }
