package identity

import (
	"bytes"
	"crypto/x509"
	"encoding/hex"
	"encoding/pem"
	"errors"
	"fmt"
	"iter"
	"sync"
	"sync/atomic"
	"time"
)

// ParseCertificates returns the certificates of a text in PEM, of which there is at least
// one. What crypto/x509 cannot read is left out, as x509.CertPool does.
func ParseCertificates(text string) ([]*x509.Certificate, error) {
	var all []*x509.Certificate
	for block, rest := pem.Decode([]byte(text)); block != nil; block, rest = pem.Decode(rest) {
		if block.Type != "CERTIFICATE" || len(block.Headers) > 0 {
			continue
		}
		if c, err := x509.ParseCertificate(block.Bytes); err == nil {
			all = append(all, c)
		}
	}
	if len(all) == 0 {
		return nil, errors.New("there is no certificate in PEM")
	}
	return all, nil
}

// A prepared has what a Bundle's certificates are verified with.
type prepared struct {
	once  sync.Once
	roots *x509.CertPool
	all   []*x509.Certificate       // of roots
	lists map[string][]*revocations // by the issuer's name, in DER
}

// prepare returns what is made of b at its first use.
func (b *Bundle) prepare() *prepared {
	p := &b.prepared
	p.once.Do(func() {
		p.roots, p.all = x509.NewCertPool(), b.Roots
		for _, c := range b.Roots {
			p.roots.AddCert(c)
		}
		for _, list := range b.Revoked {
			if p.lists == nil {
				p.lists = make(map[string][]*revocations)
			}
			issuer := string(list.RawIssuer)
			p.lists[issuer] = append(p.lists[issuer], newRevocations(list))
		}
	})
	return p
}

// A revocations is a revocation list, RFC 5280 section 5.
type revocations struct {
	list    *x509.RevocationList
	serials map[string]struct{}

	// signer is the public key, in DER, by which the signature was checked last.
	signer atomic.Pointer[[]byte]
}

// removeFromCRL is the reason by which a delta takes a certificate off the list.
const removeFromCRL = 8

func newRevocations(list *x509.RevocationList) *revocations {
	r := &revocations{list: list, serials: make(map[string]struct{}, len(list.RevokedCertificateEntries))}
	for _, e := range list.RevokedCertificateEntries {
		if e.ReasonCode != removeFromCRL {
			r.serials[string(e.SerialNumber.Bytes())] = struct{}{}
		}
	}
	return r
}

// signedBy returns an error unless a CA, whose name the list has, has signed it.
func (r *revocations) signedBy(ca *x509.Certificate) error {
	if key := r.signer.Load(); key != nil && bytes.Equal(*key, ca.RawSubjectPublicKeyInfo) {
		return nil
	}
	if err := r.list.CheckSignatureFrom(ca); err != nil {
		return err
	}
	r.signer.Store(&ca.RawSubjectPublicKeyInfo)
	return nil
}

// check returns why a verified chain can't be relied on: one of its certificates is on
// the list of its issuer, or the newest list of an issuer is out of date, so that nobody
// knows what was revoked since. An issuer without a list revokes nothing.
func (p *prepared) check(chain []*x509.Certificate, now time.Time) error {
	if p.lists == nil {
		return nil
	}
	for i, c := range chain[:len(chain)-1] {
		ca := chain[i+1]
		var newest *x509.RevocationList
		for r, err := range p.listsOf(c, ca) {
			if err != nil {
				return fmt.Errorf("the revocation list of the CA %q has no valid signature: %w", clip(ca.Subject.String()), err)
			}
			if r.has(c) {
				return errRevoked(c, ca)
			}
			if newest == nil || r.list.ThisUpdate.After(newest.ThisUpdate) {
				newest = r.list
			}
		}
		if newest != nil && !newest.NextUpdate.IsZero() && now.After(newest.NextUpdate) {
			return fmt.Errorf("the revocation list of the CA %q is out of date since %s", clip(ca.Subject.String()), newest.NextUpdate.UTC().Format(time.RFC3339))
		}
	}
	return nil
}

// listsOf yields the lists for c, which ca has signed, each with an error unless ca has
// signed that, too.
func (p *prepared) listsOf(c, ca *x509.Certificate) iter.Seq2[*revocations, error] {
	return func(yield func(*revocations, error) bool) {
		for _, r := range p.lists[string(c.RawIssuer)] {
			if id := r.list.AuthorityKeyId; len(id) > 0 && len(ca.SubjectKeyId) > 0 && !bytes.Equal(id, ca.SubjectKeyId) {
				continue // it is of another key of a CA with that name
			}
			if !yield(r, r.signedBy(ca)) {
				return
			}
		}
	}
}

// has reports whether c, a certificate of the list's CA, is on the list.
func (r *revocations) has(c *x509.Certificate) bool {
	_, has := r.serials[string(c.SerialNumber.Bytes())]
	return has
}

func errRevoked(c, ca *x509.Certificate) error {
	return fmt.Errorf("the certificate with the serial number %s is on the revocation list of the CA %q", clip(hex.EncodeToString(c.SerialNumber.Bytes())), clip(ca.Subject.String()))
}
