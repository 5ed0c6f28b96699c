package delegation

import (
	"crypto/x509"
	"encoding/base64"
	"net/http"
	"strings"
)

// The fields of RFC 9440, by which a proxy tells of a client's certificate. See
// FormatClientCert and ParseClientCert.
const (
	ClientCertField      = "Client-Cert"       // section 2.2
	ClientCertChainField = "Client-Cert-Chain" // section 2.3
)

// Limits of the fields of RFC 9440.
const (
	MaxClientCert      = 32 << 10 // bytes of all of them in a request
	maxClientCertChain = 10       // certificates of CAs
)

// FormatClientCert returns the values of Client-Cert and Client-Cert-Chain for a chain of
// certificates, the client's first. CAs that have signed themselves are left out: a reader
// has those that it trusts. chain is "" where there is no other one.
func FormatClientCert(certs []*x509.Certificate) (cert, chain string, err error) {
	if len(certs) == 0 {
		return "", "", refusef(Missing, "there is no certificate for the field %s", ClientCertField)
	}
	var items []string
	for _, c := range certs[1:] {
		if string(c.RawIssuer) != string(c.RawSubject) {
			items = append(items, formatBytes(c.Raw))
		}
	}
	cert, chain = formatBytes(certs[0].Raw), strings.Join(items, ", ")
	switch n := len(cert) + len(chain); {
	case n > MaxClientCert:
		return "", "", refusef(TooLarge, "the fields %s and %s have %d bytes, limit %d", ClientCertField, ClientCertChainField, n, MaxClientCert)
	case len(items) > maxClientCertChain:
		return "", "", refusef(TooLarge, "the field %s has %d certificates, limit %d", ClientCertChainField, len(items), maxClientCertChain)
	}
	return cert, chain, nil
}

// ParseClientCert returns the chain of certificates in the fields of a request, the client's
// first, none where there is no such field. They are parsed and not verified: whoever may
// connect can write them. It is an *Error where they are malformed, where a field that must
// be there once is there twice, and where a name has another spelling that some servers take
// for the same.
//
// Read the fields of a proxy alone that removes those of its clients, in a TLS session in
// which it has shown its certificate.
func ParseClientCert(h http.Header) ([]*x509.Certificate, error) {
	var leaf, rest []string
	total := 0
	for name, values := range h {
		switch folded := foldField(name); {
		case folded != "client-cert" && folded != "client-cert-chain":
			continue
		case name == ClientCertField:
			leaf = values
		case name == ClientCertChainField:
			rest = values
		default:
			return nil, refusef(Malformed, "the field %q is not spelled %q or %q", clip(name), ClientCertField, ClientCertChainField)
		}
		for _, v := range values {
			total += len(v)
		}
	}
	switch {
	case len(leaf) == 0 && len(rest) == 0:
		return nil, nil
	case len(leaf) != 1:
		return nil, refusef(Malformed, "the request has %d fields %s, want one", len(leaf), ClientCertField)
	case total > MaxClientCert:
		return nil, refusef(TooLarge, "the fields %s and %s have %d bytes, limit %d", ClientCertField, ClientCertChainField, total, MaxClientCert)
	}
	items := []string{strings.Trim(leaf[0], " ")}
	if len(rest) > 0 {
		items = append(items, strings.Split(strings.Join(rest, ","), ",")...)
	}
	if n := len(items) - 1; n > maxClientCertChain {
		return nil, refusef(TooLarge, "the field %s has %d certificates, limit %d", ClientCertChainField, n, maxClientCertChain)
	}
	certs := make([]*x509.Certificate, len(items))
	for i, item := range items {
		der, ok := parseBytes(strings.Trim(item, " \t"))
		if !ok {
			return nil, refusef(Malformed, "certificate %d of the fields %s and %s is no byte sequence", i+1, ClientCertField, ClientCertChainField)
		}
		var err error
		if certs[i], err = x509.ParseCertificate(der); err != nil {
			return nil, refusef(Malformed, "certificate %d of the fields %s and %s can't be parsed: %w", i+1, ClientCertField, ClientCertChainField, err)
		}
	}
	return certs, nil
}

// formatBytes returns b as a byte sequence of RFC 8941 section 3.3.5.
func formatBytes(b []byte) string { return ":" + base64.StdEncoding.EncodeToString(b) + ":" }

// parseBytes reverses formatBytes. Parameters, which RFC 9440 does not have, are refused.
func parseBytes(s string) ([]byte, bool) {
	if len(s) < 2 || s[0] != ':' || s[len(s)-1] != ':' || strings.ContainsAny(s, "\r\n") {
		return nil, false
	}
	b, err := base64.StdEncoding.Strict().DecodeString(s[1 : len(s)-1])
	return b, err == nil && len(b) > 0
}
