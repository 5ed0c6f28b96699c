package identity

import (
	"bytes"
	"cmp"
	"crypto/rsa"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"culvert.dev/tunnel"
)

const (
	maxChain = 8    // certificates that a peer may show
	minRSA   = 2048 // bits
)

// An Expectation says what a peer must prove.
type Expectation struct {
	// Usage is what the peer's certificate must be for: x509.ExtKeyUsageClientAuth of a
	// client, x509.ExtKeyUsageServerAuth of a server. Zero means anything.
	Usage x509.ExtKeyUsage

	// TrustDomains are those that the peer may be of; empty means any that has a bundle.
	TrustDomains []string

	// IDs are what the peer may be: ids as tunnel.Peer has them, "spiffe://DOMAIN" for any of
	// a trust domain, or "spiffe://DOMAIN/gw/*" for any below. Empty means anybody.
	IDs []string

	// DNSName, a host name or an address, and SANs say what the peer's certificate must
	// name in place of an identity: the first, or else one of the others, which are host
	// names, addresses, and URIs if they have a "://".
	DNSName string
	SANs    []string
}

// A Verifier verifies the certificates of peers. Nothing else does: every listener that
// asks clients for certificates and every dialer has one. It looks its bundles up at each
// use, so that it need not be replaced when they are. It is safe for concurrent use.
type Verifier struct {
	// Trust has the bundles. A peer with a SPIFFE id is verified by those of its own trust
	// domain and by no other, so that no CA can speak for the domain of another. A peer
	// without one needs a bundle of no trust domain. Where all are of that kind, a SPIFFE
	// id proves nothing, and is a URI as any other.
	Trust []*Trust
	Want  Expectation

	// System has peers verified by the CAs of the system, and not by Trust. Want must
	// then say who they are, as any of these CAs could speak for any trust domain.
	System bool

	Time func() time.Time // nil means time.Now
}

// Verify returns who has shown the chain, whose leaf is the first. The rest of the chain
// proves nothing about the peer. Where Want has a DNSName or SANs, the Peer has no ID.
func (v *Verifier) Verify(chain []*x509.Certificate) (tunnel.Peer, error) {
	p, err := v.verify(chain)
	if err != nil {
		return tunnel.Peer{}, fmt.Errorf("identity: the %s's %w", v.who(), err)
	}
	return p, nil
}

// who is what errors call the peer.
func (v *Verifier) who() string {
	switch v.Want.Usage {
	case x509.ExtKeyUsageClientAuth:
		return "client"
	case x509.ExtKeyUsageServerAuth:
		return "server"
	}
	return "peer"
}

// Client has cfg, which is a client's, verify servers by v in place of its RootCAs.
// Sessions are not resumed: who may come would be decided by what was trusted then.
func (v *Verifier) Client(cfg *tls.Config) {
	cfg.InsecureSkipVerify = true // VerifyConnection verifies
	cfg.ClientSessionCache = nil
	cfg.VerifyConnection = func(cs tls.ConnectionState) error {
		_, err := v.Verify(cs.PeerCertificates)
		return err
	}
}

// verify is Verify. Its errors continue "the client's".
func (v *Verifier) verify(chain []*x509.Certificate) (tunnel.Peer, error) {
	switch n := len(chain); {
	case n == 0:
		return tunnel.Peer{}, errors.New("certificate is missing")
	case n > maxChain:
		return tunnel.Peer{}, fmt.Errorf("chain has %d certificates, limit %d", n, maxChain)
	}
	if len(v.Trust) == 0 && (!v.System || len(v.Want.IDs) == 0 && v.Want.DNSName == "" && len(v.Want.SANs) == 0) {
		return tunnel.Peer{}, errUntrusted
	}
	now := time.Now()
	if v.Time != nil {
		now = v.Time()
	}
	if v.Want.DNSName != "" || len(v.Want.SANs) > 0 {
		return v.byName(chain, now)
	}
	return v.byIdentity(chain, now)
}

// byIdentity verifies a peer by what its leaf says it is.
func (v *Verifier) byIdentity(chain []*x509.Certificate, now time.Time) (tunnel.Peer, error) {
	leaf := chain[0]
	who, err := nameOf(leaf)
	if err != nil {
		return tunnel.Peer{}, err
	}
	if leaf.KeyUsage != 0 && leaf.KeyUsage&x509.KeyUsageDigitalSignature == 0 {
		return tunnel.Peer{}, errors.New("certificate has the wrong key usage: it is not for digital signatures")
	}
	if v.System {
		verified, err := v.chainTo(nil, chain, "", now)
		if err != nil {
			return tunnel.Peer{}, err
		}
		return v.peer(who, verified)
	}
	if who.domain != "" && !v.speaksForDomains() {
		if who, err = withoutDomain(leaf); err != nil {
			return tunnel.Peer{}, err
		}
	}
	if len(v.Want.TrustDomains) > 0 && !slices.Contains(v.Want.TrustDomains, who.domain) {
		return tunnel.Peer{}, notOf(who, v.Want.TrustDomains)
	}
	var missing error
	err = nil
	for _, t := range Members(v.Trust) {
		b, bad := t.Bundle()
		if bad != nil {
			missing = fmt.Errorf("certificate can't be verified: %w", bad)
			continue
		}
		if b.TrustDomain != who.domain {
			continue
		}
		verified, refused := v.chainTo(b, chain, "", now)
		if refused == nil {
			return v.peer(who, verified)
		}
		err = telling(err, refused)
	}
	if err == nil { // there is no bundle
		switch domains := v.domains(); {
		case missing != nil:
		case len(domains) == 0: // of a group without members
			missing = errUntrusted
		default:
			missing = notOf(who, domains)
		}
		return tunnel.Peer{}, missing
	}
	if unknown := (x509.UnknownAuthorityError{}); who.domain != "" && errors.As(err, &unknown) {
		if foreign := v.signers(who.domain, chain, now); len(foreign) > 0 {
			return tunnel.Peer{}, fmt.Errorf("id is of trust domain %q, and its certificate is signed by a CA of %q", who.domain, foreign)
		}
	}
	return tunnel.Peer{}, err
}

// notOf returns the error for a peer of no trust domain that is wanted.
func notOf(who name, want []string) error {
	if who.domain == "" {
		return fmt.Errorf("certificate has no SPIFFE id, want one of %q", want)
	}
	return fmt.Errorf("trust domain is %q, want one of %q", who.domain, want)
}

// speaksForDomains reports whether a trust domain has a bundle, or perhaps one that is
// missing now.
func (v *Verifier) speaksForDomains() bool {
	for _, t := range Members(v.Trust) {
		if b, err := t.Bundle(); err != nil || b.TrustDomain != "" {
			return true
		}
	}
	return false
}

// domains returns the trust domains that have a bundle, for an error.
func (v *Verifier) domains() (all []string) {
	for _, t := range Members(v.Trust) {
		if b, err := t.Bundle(); err == nil && b.TrustDomain != "" && !slices.Contains(all, b.TrustDomain) {
			all = append(all, b.TrustDomain)
		}
	}
	slices.Sort(all)
	return all
}

// peer returns the Peer of a verified chain, if it is wanted.
func (v *Verifier) peer(who name, verified []*x509.Certificate) (tunnel.Peer, error) {
	if len(v.Want.IDs) > 0 && !listed(v.Want.IDs, who.id) {
		return tunnel.Peer{}, fmt.Errorf("id is %q, want one of %q", who.id, v.Want.IDs)
	}
	auth := new(tunnel.AuthInfo)
	if who.domain != "" {
		auth, _ = Principal(who.id) // nameOf has parsed it
	}
	auth.Expires = expiry(verified)
	if !v.System {
		auth.Evidence = &evidence{trust: Members(v.Trust), domain: who.domain, chain: verified}
	}
	return tunnel.Peer{ID: who.id, Method: "mtls", Auth: auth}, nil
}

// expiry returns when the first certificate of a chain expires.
func expiry(chain []*x509.Certificate) time.Time {
	first := chain[0].NotAfter
	for _, c := range chain[1:] {
		if c.NotAfter.Before(first) {
			first = c.NotAfter
		}
	}
	return first
}

// withoutDomain returns the name of a leaf where no CA speaks for a trust domain.
func withoutDomain(leaf *x509.Certificate) (name, error) {
	if len(leaf.URIs) == 1 {
		return other("uri:" + leaf.URIs[0].String())
	}
	return plainName(leaf)
}

// signers returns the trust domains other than one whose CAs have signed a chain, for an
// error. It tries a few.
func (v *Verifier) signers(not string, chain []*x509.Certificate, now time.Time) (domains []string) {
	const most = 16
	all := Members(v.Trust)
	for _, t := range all[:min(len(all), most)] {
		b, err := t.Bundle()
		if err != nil || b.TrustDomain == "" || b.TrustDomain == not || slices.Contains(domains, b.TrustDomain) {
			continue
		}
		if _, err := v.chainTo(b, chain, "", now); err == nil {
			domains = append(domains, b.TrustDomain)
		}
	}
	slices.Sort(domains)
	return domains
}

var errUntrusted = errors.New("certificate can't be verified: no CA is configured")

// byName verifies a peer by the names in its certificate.
func (v *Verifier) byName(chain []*x509.Certificate, now time.Time) (tunnel.Peer, error) {
	found := tunnel.Peer{Method: "mtls"}
	if v.System {
		verified, err := v.chainTo(nil, chain, v.Want.DNSName, now)
		if err == nil {
			found.Auth = &tunnel.AuthInfo{Expires: expiry(verified)}
			err = v.checkSANs(chain[0], "")
		}
		return found, err
	}
	err := errUntrusted
	var refused, unnamed error // of a chain, and of one that a CA has signed
	for _, t := range Members(v.Trust) {
		b, bad := t.Bundle()
		if bad != nil {
			if err == errUntrusted {
				err = fmt.Errorf("certificate can't be verified: %w", bad)
			}
			continue
		}
		verified, bad := v.chainTo(b, chain, v.Want.DNSName, now)
		if bad != nil {
			refused = telling(refused, bad)
			continue
		}
		if unnamed = v.checkSANs(chain[0], b.TrustDomain); unnamed == nil {
			found.Auth = &tunnel.AuthInfo{Expires: expiry(verified)}
			return found, nil
		}
	}
	return tunnel.Peer{}, cmp.Or(unnamed, refused, err)
}

// telling returns which of two refusals of a chain, by bundles in order, says more: that
// its CA is unknown says nothing where another bundle has the CA.
func telling(before, now error) error {
	if unknown := (x509.UnknownAuthorityError{}); before != nil && errors.As(now, &unknown) {
		return before
	}
	return now
}

// chainTo returns a chain from the leaf to a root of b, nil for those of the system, that
// meets all that is asked of it. With a name, the leaf must have it.
func (v *Verifier) chainTo(b *Bundle, shown []*x509.Certificate, dnsName string, now time.Time) ([]*x509.Certificate, error) {
	opts := x509.VerifyOptions{CurrentTime: now, DNSName: dnsName, KeyUsages: []x509.ExtKeyUsage{v.Want.Usage}}
	var p *prepared
	if b != nil {
		p = b.prepare()
		opts.Roots = p.roots
	}
	if len(shown) > 1 {
		opts.Intermediates = x509.NewCertPool()
		for _, c := range shown[1:] {
			opts.Intermediates.AddCert(c)
		}
	}
	chains, err := shown[0].Verify(opts)
	if err != nil {
		return nil, explain(shown, dnsName, now, err)
	}
	for _, chain := range chains {
		if err = strong(chain); err != nil {
			continue
		}
		if p != nil {
			err = p.check(chain, now)
		}
		if err == nil {
			return chain, nil
		}
	}
	return nil, fmt.Errorf("certificate is not accepted: %w", err)
}

// strong refuses keys that are too short.
func strong(chain []*x509.Certificate) error {
	for _, c := range chain {
		if k, ok := c.PublicKey.(*rsa.PublicKey); ok && k.N.BitLen() < minRSA {
			return fmt.Errorf("the RSA key of %q has %d bits, want at least %d", clip(c.Subject.String()), k.N.BitLen(), minRSA)
		}
	}
	return nil
}

// explain says which check of crypto/x509 has failed.
func explain(shown []*x509.Certificate, dnsName string, now time.Time, err error) error {
	for _, c := range shown {
		switch c.SignatureAlgorithm {
		case x509.SHA1WithRSA, x509.ECDSAWithSHA1, x509.MD5WithRSA:
			if !bytes.Equal(c.RawIssuer, c.RawSubject) { // nobody relies on how a root is signed
				return fmt.Errorf("certificate is not accepted: the signature of %q is by %s, which is broken: %w", clip(c.Subject.String()), c.SignatureAlgorithm, err)
			}
		}
	}
	var invalid x509.CertificateInvalidError
	if errors.As(err, &invalid) {
		c := invalid.Cert
		switch {
		case invalid.Reason == x509.Expired && now.Before(c.NotBefore):
			return fmt.Errorf("certificate is not valid yet: that of %q is from %s on: %w", clip(c.Subject.String()), c.NotBefore.UTC().Format(time.RFC3339), err)
		case invalid.Reason == x509.Expired:
			return fmt.Errorf("certificate has expired: that of %q was valid until %s: %w", clip(c.Subject.String()), c.NotAfter.UTC().Format(time.RFC3339), err)
		case invalid.Reason == x509.IncompatibleUsage:
			return fmt.Errorf("certificate has the wrong key usage: %w", err)
		case invalid.Reason == x509.CANotAuthorizedForThisName:
			return fmt.Errorf("certificate has a name that its CA is not permitted: %w", err)
		}
		return fmt.Errorf("certificate is not accepted: %w", err)
	}
	var unknown x509.UnknownAuthorityError
	if errors.As(err, &unknown) {
		return fmt.Errorf("certificate is signed by an unknown CA: %w", err)
	}
	if dnsName != "" {
		return fmt.Errorf("certificate does not have the name %q: %w", clip(dnsName), err)
	}
	return fmt.Errorf("certificate is not accepted: %w", err)
}

// checkSANs returns an error unless the leaf has one of the names that are wanted. A CA of
// a trust domain, which is not "", speaks for no SPIFFE id of another.
func (v *Verifier) checkSANs(leaf *x509.Certificate, domain string) error {
	foreign := ""
	for _, san := range v.Want.SANs {
		switch {
		case !hasSAN(leaf, san):
		case domain == "" || !strings.HasPrefix(san, "spiffe://") || listed([]string{"spiffe://" + domain}, san):
			return nil
		default:
			foreign = san
		}
	}
	switch {
	case len(v.Want.SANs) == 0:
		return nil
	case foreign != "":
		return fmt.Errorf("id is %q, and its certificate is signed by a CA of %q", clip(foreign), domain)
	}
	const most = 10
	has := slices.Clone(leaf.DNSNames)
	for _, u := range leaf.URIs {
		has = append(has, u.String())
	}
	for _, a := range leaf.IPAddresses {
		has = append(has, a.String())
	}
	return fmt.Errorf("certificate has none of the names %q, it has %q", v.Want.SANs, has[:min(len(has), most)])
}

// hasSAN reports whether a certificate has a name, or an address. A URI is compared byte
// by byte, as RFC 3986 section 6.2.1 and SPIFFE do; a DNS name with a wildcard is that
// very name.
func hasSAN(leaf *x509.Certificate, san string) bool {
	switch {
	case strings.Contains(san, "://"):
		for _, u := range leaf.URIs {
			if u.String() == san {
				return true
			}
		}
		return false
	case strings.HasPrefix(san, "*."):
		return slices.ContainsFunc(leaf.DNSNames, func(n string) bool { return strings.EqualFold(n, san) })
	}
	return leaf.VerifyHostname(san) == nil
}
