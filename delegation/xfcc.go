package delegation

import (
	"crypto/sha256"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/asn1"
	"encoding/hex"
	"encoding/pem"
	"fmt"
	"net/url"
	"slices"
	"strings"
	"unicode/utf8"
)

// XFCCField is the field of a request by which Envoy and other proxies tell of clients'
// certificates.
const XFCCField = "X-Forwarded-Client-Cert"

// Limits of XFCC.
const (
	MaxXFCC         = 32 << 10 // bytes of all its fields in a request
	MaxXFCCElements = 16       // proxies on the way

	maxPairs = 64 // of one element
)

// An XFCC is one element of the field X-Forwarded-Client-Cert: what one proxy says of its
// client's certificate. The element of the proxy that is next to the reader is the last one.
// https://www.envoyproxy.io/docs/envoy/latest/configuration/http/http_conn_man/headers#x-forwarded-client-cert
//
// It proves nothing. A reader believes it in a TLS session with a proxy whose certificate it
// has verified, and of such a proxy alone: see Verifier.XFCC.
type XFCC struct {
	By      []string // what the proxy is called: the URIs of its certificate
	Hash    []byte   // SHA-256 of the client's certificate, 32 bytes; nil where it does not say
	Cert    []byte   // the certificate, DER
	Chain   [][]byte // the certificate and those of CAs, DER, the client's first
	Subject string   // its subject, RFC 2253
	URI     []string // its names
	DNS     []string
}

// NewXFCC returns what the gateway that is called by says of a client with that verified
// certificate. It has no Cert and no Chain. No name has a byte in it that ends a name, even
// in quotes, for readers that look for a text in the field: in Subject it is hexadecimal, and
// others with such a byte are left out.
func NewXFCC(by string, leaf *x509.Certificate) XFCC {
	sum := sha256.Sum256(leaf.Raw)
	x := XFCC{By: []string{by}, Hash: sum[:], Subject: subjectOf(leaf)}
	for _, u := range leaf.URIs {
		if s := u.String(); isPlain(s) {
			x.URI = append(x.URI, s)
		}
	}
	for _, s := range leaf.DNSNames {
		if isPlain(s) {
			x.DNS = append(x.DNS, s)
		}
	}
	return x
}

// isPlain reports whether a name has no byte in it that ends a name.
func isPlain(s string) bool {
	return s != "" && !strings.ContainsFunc(s, func(r rune) bool { return r <= 0x20 || r > 0x7e || strings.ContainsRune(",;\"\\", r) })
}

// subjectOf returns the subject of a certificate as RFC 2253 has it, "" if it is empty or
// can't be read. Bytes that are escaped, and those that are not printable ASCII, are a
// backslash and two hexadecimal digits.
func subjectOf(leaf *x509.Certificate) string {
	var name pkix.RDNSequence
	if _, err := asn1.Unmarshal(leaf.RawSubject, &name); err != nil {
		return ""
	}
	s := name.String()
	var b strings.Builder
	for i := 0; i < len(s); i++ {
		c := s[i]
		if c == '\\' && i+1 < len(s) {
			i++ // to what it escapes
			fmt.Fprintf(&b, `\%02X`, s[i])
		} else if c < 0x20 || c > 0x7e {
			fmt.Fprintf(&b, `\%02X`, c)
		} else {
			b.WriteByte(c)
		}
	}
	return b.String()
}

// checkXFCC returns why s is no value to write: a quote, or a backslash in front of another
// or at the end, is read in two ways.
func checkXFCC(s string) error {
	if strings.ContainsFunc(s, func(r rune) bool { return r < 0x20 || r > 0x7e }) || strings.Contains(s, `"`) || strings.Contains(s, `\\`) || strings.HasSuffix(s, `\`) {
		return refusef(Malformed, "%q cannot be written in the field %s", clip(s), XFCCField)
	}
	return nil
}

// FormatXFCC returns the value of a field with these elements.
func FormatXFCC(elements ...XFCC) (string, error) {
	if len(elements) > MaxXFCCElements {
		return "", refusef(TooManyActors, "the field %s has %d elements, limit %d", XFCCField, len(elements), MaxXFCCElements)
	}
	var b strings.Builder
	for i := range elements {
		if i > 0 {
			b.WriteByte(',')
		}
		if err := elements[i].write(&b); err != nil {
			return "", err
		}
	}
	if b.Len() > MaxXFCC {
		return "", refusef(TooLarge, "the field %s has %d bytes, limit %d", XFCCField, b.Len(), MaxXFCC)
	}
	return b.String(), nil
}

// write appends x to b.
func (x *XFCC) write(b *strings.Builder) error {
	begin := b.Len()
	pair := func(key, value string, quoted bool) {
		if b.Len() > begin {
			b.WriteByte(';')
		}
		b.WriteString(key)
		b.WriteByte('=')
		if quoted || strings.ContainsAny(value, ",;= ") {
			value = `"` + value + `"`
		}
		b.WriteString(value)
	}
	for _, list := range [][]string{x.By, {x.Subject}, x.URI, x.DNS} {
		for _, s := range list {
			if err := checkXFCC(s); err != nil {
				return err
			}
		}
	}
	for _, s := range x.By {
		pair("By", s, false)
	}
	if x.Hash != nil {
		if len(x.Hash) != sha256.Size {
			return refusef(Malformed, "the hash of the caller's certificate has %d bytes, want %d", len(x.Hash), sha256.Size)
		}
		pair("Hash", hex.EncodeToString(x.Hash), false)
	}
	if x.Cert != nil {
		pair("Cert", escapePEM(x.Cert), true)
	}
	if len(x.Chain) > 0 {
		pair("Chain", escapePEM(x.Chain...), true)
	}
	if x.Subject != "" {
		pair("Subject", x.Subject, true) // which is always quoted
	}
	for _, s := range x.URI {
		pair("URI", s, false)
	}
	for _, s := range x.DNS {
		pair("DNS", s, false)
	}
	if b.Len() == begin {
		return refusef(Malformed, "an element of the field %s is empty", XFCCField)
	}
	return nil
}

// escapePEM returns certificates as PEM, encoded as in a URL: "+" is no space.
func escapePEM(certs ...[]byte) string {
	var b []byte
	for _, der := range certs {
		b = append(b, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})...)
	}
	return url.PathEscape(string(b))
}

// ParseXFCC parses the values of all fields X-Forwarded-Client-Cert of a request, which are
// one list. Keys that are not known are left out. It is an *Error where two readers may see
// two things: see XFCC.
func ParseXFCC(values ...string) (elements []XFCC, err error) {
	total := 0
	for _, s := range values {
		total += len(s)
	}
	if total > MaxXFCC {
		return nil, refusef(TooLarge, "the fields %s have %d bytes, limit %d", XFCCField, total, MaxXFCC)
	}
	for _, s := range values {
		for more := true; more; {
			if len(elements) == MaxXFCCElements {
				return nil, refusef(TooManyActors, "the field %s has more than %d elements", XFCCField, MaxXFCCElements)
			}
			var x XFCC
			if s, more, err = x.parse(s); err != nil {
				return nil, err
			}
			elements = append(elements, x)
		}
	}
	return elements, nil
}

// parse reads the element that s begins with, and returns what is behind its comma. more
// tells whether it has one.
func (x *XFCC) parse(s string) (rest string, more bool, err error) {
	for range maxPairs {
		key, after, ok := strings.Cut(s, "=")
		if key = strings.Trim(key, " \t"); !ok || key == "" || strings.ContainsAny(key, `,;" `+"\t") {
			return "", false, refusef(Malformed, "the field %s has %q where a key is due", XFCCField, clip(s))
		}
		value, after, err := xfccValue(after)
		if err != nil {
			return "", false, err
		}
		if err := x.set(key, value); err != nil {
			return "", false, err
		}
		switch {
		case after == "":
			return "", false, nil
		case after[0] == ',':
			return after[1:], true, nil
		}
		s = after[1:] // of a semicolon
	}
	return "", false, refusef(TooLarge, "an element of the field %s has more than %d keys", XFCCField, maxPairs)
}

// xfccValue returns the value that s begins with, and what is behind it: nothing, or what
// begins with a comma or a semicolon.
func xfccValue(s string) (value, rest string, err error) {
	malformed := func(what string) error { return refusef(Malformed, "the field %s %s", XFCCField, what) }
	s = strings.TrimLeft(s, " \t")
	if !strings.HasPrefix(s, `"`) {
		end := strings.IndexAny(s, ",;")
		if end < 0 {
			end = len(s)
		}
		value = strings.TrimRight(s[:end], " \t")
		if strings.Contains(value, `"`) {
			return "", "", malformed("has a quote inside of a value without")
		}
		return value, s[end:], checkRead(value)
	}
	var b strings.Builder
	for i := 1; i < len(s); i++ {
		switch c := s[i]; {
		case c == '\\' && i+1 < len(s) && s[i+1] == '"':
			if s[i-1] == '\\' {
				return "", "", malformed("has several backslashes in front of a quote, which are read in two ways")
			}
			b.WriteByte('"')
			i++
		case c == '"':
			rest = strings.TrimLeft(s[i+1:], " \t")
			if rest != "" && rest[0] != ',' && rest[0] != ';' {
				return "", "", malformed("has text behind a quote")
			}
			return b.String(), rest, checkRead(b.String())
		default:
			b.WriteByte(c)
		}
	}
	return "", "", malformed("has a quote that does not end")
}

// checkRead returns why nobody writes such a value.
func checkRead(s string) error {
	if !utf8.ValidString(s) || strings.ContainsFunc(s, func(r rune) bool { return r < 0x20 || r == 0x7f }) {
		return refusef(Malformed, "the field %s has bytes that no name has: %q", XFCCField, clip(s))
	}
	return nil
}

// set sets one key, in whatever case it is written.
func (x *XFCC) set(key, value string) (err error) {
	once := func(again bool) error {
		if again {
			return refusef(Malformed, "the field %s has the key %q twice in one element", XFCCField, clip(key))
		}
		return nil
	}
	switch strings.ToLower(key) {
	case "by":
		if value != "" { // of a proxy whose certificate has no URI
			x.By = append(x.By, value)
		}
	case "hash":
		if err := once(x.Hash != nil); err != nil {
			return err
		}
		if x.Hash, err = hex.DecodeString(value); err != nil || len(x.Hash) != sha256.Size {
			return refusef(Malformed, "the field %s has the hash %q, which is no SHA-256", XFCCField, clip(value))
		}
	case "cert":
		if err := once(x.Cert != nil); err != nil {
			return err
		}
		certs, err := unescapePEM(value)
		if err == nil && len(certs) != 1 {
			err = refusef(Malformed, "the field %s has %d certificates for one", XFCCField, len(certs))
		}
		if err != nil {
			return err
		}
		x.Cert = certs[0]
	case "chain":
		if err := once(x.Chain != nil); err != nil {
			return err
		}
		x.Chain, err = unescapePEM(value)
		return err
	case "subject":
		if err := once(x.Subject != ""); err != nil {
			return err
		}
		x.Subject = value
	case "uri":
		if value != "" { // of a certificate without
			x.URI = append(x.URI, value)
		}
	case "dns":
		if value != "" {
			x.DNS = append(x.DNS, value)
		}
	}
	return nil
}

// unescapePEM reverses escapePEM. There is at least one certificate.
func unescapePEM(s string) (certs [][]byte, err error) {
	text, err := url.PathUnescape(s)
	if err != nil {
		return nil, refusef(Malformed, "the field %s has a certificate that is not encoded as in a URL", XFCCField)
	}
	for rest := []byte(text); ; {
		rest = []byte(strings.TrimLeft(string(rest), " \t\r\n"))
		if len(rest) == 0 && len(certs) > 0 {
			return certs, nil
		}
		var block *pem.Block
		if strings.HasPrefix(string(rest), "-----BEGIN CERTIFICATE-----") {
			block, rest = pem.Decode(rest)
		}
		if block == nil || len(block.Bytes) == 0 || len(block.Headers) > 0 {
			return nil, refusef(Malformed, "the field %s has a certificate that is no PEM", XFCCField)
		}
		certs = append(certs, block.Bytes)
	}
}

// matches reports whether what x says of the certificate itself goes together.
func (x *XFCC) matches() bool {
	cert := x.Cert
	if cert == nil && len(x.Chain) > 0 {
		cert = x.Chain[0]
	}
	sum := sha256.Sum256(cert)
	return cert == nil || (x.Hash == nil || slices.Equal(sum[:], x.Hash)) && (len(x.Chain) == 0 || slices.Equal(x.Chain[0], cert))
}
