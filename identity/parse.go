package identity

import (
	"bytes"
	"crypto/tls"
	"crypto/x509"
	"encoding/asn1"
	"encoding/pem"
	"errors"
	"fmt"
	"strings"
)

const pemBegin = "-----BEGIN "

// ParsePair returns a key of PEM: a certificate, and what it was signed by, and its private
// key. What is written in part only, or of which the parts do not belong together, is an
// error, which quotes neither.
func ParsePair(certificate, key []byte) (*tls.Certificate, error) {
	if err := whole(certificate); err != nil {
		return nil, fmt.Errorf("certificate: %w", err)
	}
	pair, err := tls.X509KeyPair(certificate, key)
	if err != nil {
		return nil, errors.New(strings.TrimPrefix(err.Error(), "tls: "))
	}
	return &pair, nil
}

// whole returns an error if a text in PEM ends within a block.
func whole(text []byte) error {
	blocks := 0
	rest := text
	for {
		block, after := pem.Decode(rest)
		if block == nil {
			break
		}
		blocks++
		rest = after
	}
	if n := bytes.Count(text, []byte(pemBegin)); n != blocks {
		return fmt.Errorf("%d of %d blocks of PEM are whole: it is written in part, or damaged", blocks, n)
	}
	return nil
}

// ParseBundle returns the bundle of a trust domain, or of none where that is "", of CAs in
// PEM and revocation lists in PEM or DER, of which there may be none: of the CAs, and of
// intermediate ones below them. A list in the name of a CA that has not signed it is an
// error.
func ParseBundle(domain string, cas, lists []byte) (*Bundle, error) {
	if domain != "" && !IsTrustDomain(domain) {
		return nil, fmt.Errorf("%q is not a trust domain", clip(domain))
	}
	if err := whole(cas); err != nil {
		return nil, fmt.Errorf("CAs: %w", err)
	}
	b := &Bundle{TrustDomain: domain}
	var err error
	if b.Roots, err = ParseCertificates(string(cas)); err != nil {
		return nil, fmt.Errorf("CAs: %w", err)
	}
	if len(lists) > 0 {
		if b.Revoked, err = parseRevocationLists(lists, b.Roots); err != nil {
			return nil, fmt.Errorf("revocation list: %w", err)
		}
	}
	return b, nil
}

// parseRevocationLists returns revocation lists in PEM or DER, RFC 5280 section 5.
func parseRevocationLists(text []byte, cas []*x509.Certificate) ([]*x509.RevocationList, error) {
	ders := [][]byte{text}
	if bytes.Contains(text, []byte(pemBegin)) {
		if err := whole(text); err != nil {
			return nil, err
		}
		ders = nil
		for block, rest := pem.Decode(text); block != nil; block, rest = pem.Decode(rest) {
			if block.Type != "X509 CRL" {
				return nil, fmt.Errorf("it has %q in PEM, want \"X509 CRL\"", clip(block.Type))
			}
			ders = append(ders, block.Bytes)
		}
	}
	all := make([]*x509.RevocationList, len(ders))
	for i, der := range ders {
		list, err := x509.ParseRevocationList(der)
		if err != nil {
			return nil, fmt.Errorf("it is no list in PEM or DER: %s", strings.TrimPrefix(err.Error(), "x509: "))
		}
		if err := signedByOne(list, cas); err != nil {
			return nil, err
		}
		for _, e := range list.Extensions {
			if e.Id.Equal(deltaCRLIndicator) {
				return nil, errors.New("it is a delta, which has only what has changed since another list")
			}
		}
		all[i] = list
	}
	return all, nil
}

// deltaCRLIndicator is of a list that completes another one, RFC 5280 section 5.2.4.
var deltaCRLIndicator = asn1.ObjectIdentifier{2, 5, 29, 27}

// signedByOne returns an error where a CA has the name of a list's issuer and none with it
// has signed the list. An issuer that is none of the CAs may be an intermediate one: that
// it has signed the list is checked where it has signed a certificate, too.
func signedByOne(list *x509.RevocationList, cas []*x509.Certificate) (err error) {
	for _, ca := range cas {
		if !bytes.Equal(ca.RawSubject, list.RawIssuer) {
			continue
		}
		bad := list.CheckSignatureFrom(ca)
		if bad == nil && len(list.AuthorityKeyId) > 0 && len(ca.SubjectKeyId) > 0 && !bytes.Equal(list.AuthorityKeyId, ca.SubjectKeyId) {
			bad = errors.New("the list names another key of that CA") // so that Verify would pass over it
		}
		if bad == nil {
			return nil
		}
		err = fmt.Errorf("the CA %q has not signed it: %s", clip(list.Issuer.String()), strings.TrimPrefix(bad.Error(), "x509: "))
	}
	return err
}

// Leaf returns the certificate of a key itself, which crypto/tls may not have parsed yet.
func Leaf(c *tls.Certificate) (*x509.Certificate, error) {
	switch {
	case c.Leaf != nil:
		return c.Leaf, nil
	case len(c.Certificate) == 0:
		return nil, errors.New("a certificate is empty")
	}
	return x509.ParseCertificate(c.Certificate[0])
}
