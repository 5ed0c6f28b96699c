package delegation

import (
	"crypto/x509"
	"net/http"
	"net/url"
	"slices"
	"strings"
)

// callerFields are those in which a request states who has made it, in lower case.
var callerFields = [...]string{"culvert-peer", "x-forwarded-client-cert", "client-cert", "client-cert-chain"}

// IsCallerField reports whether some server may read the field with that name as one that
// states who a caller is: Culvert-Peer, X-Forwarded-Client-Cert, Client-Cert or
// Client-Cert-Chain, in any case, and with "_" in place of "-".
func IsCallerField(name string) bool { return slices.Contains(callerFields[:], foldField(name)) }

// foldField returns the name that servers may take a field's name for.
func foldField(name string) string { return strings.ToLower(strings.ReplaceAll(name, "_", "-")) }

// RemoveCallerFields removes the fields from h that IsCallerField names. A gateway does so
// with what clients send, trailers included, in front of everything else.
func RemoveCallerFields(h http.Header) {
	for name := range h {
		if IsCallerField(name) {
			delete(h, name)
		}
	}
}

// An XFCCMode says what a request that a gateway passes on has in X-Forwarded-Client-Cert.
type XFCCMode string

// Modes of X-Forwarded-Client-Cert. What the client itself has sent is removed in each.
const (
	XFCCNone          XFCCMode = "none"          // nothing; "" is the same
	XFCCSanitizeSet   XFCCMode = "sanitizeSet"   // the client's certificate
	XFCCAppendForward XFCCMode = "appendForward" // Caller.Before, and then the client's certificate
)

// A Forwarding says by which fields of a request a gateway tells the next server of a
// certificate that it has verified. The zero Forwarding removes those of the client, and sets
// none.
//
// They prove nothing by themselves: they are for a TLS session in which the gateway shows a
// certificate to a server that believes gateways alone.
type Forwarding struct {
	XFCC       XFCCMode
	ClientCert bool // Client-Cert, and Client-Cert-Chain if there is one: RFC 9440
}

// A Caller is what a gateway knows of the client of a request.
type Caller struct {
	By    string              // what the gateway is called: the first By of its element in XFCC
	Chain []*x509.Certificate // the client's, verified, its own first; nil for none

	// ID is the client's SPIFFE id, if a CA of its trust domain has signed it; "" for none.
	// A CA can write any id into a certificate. One with another SPIFFE id is told of without
	// its URIs, and not in Client-Cert.
	ID string

	// Before are clients of gateways on the way, the farthest first: what they state is believed by this gateway.
	// The last one is stated by its own client.
	Before []XFCC
}

// Set removes the fields from h that state a caller, whoever has set them, Culvert-Peer too,
// and then sets those about c. A client without a certificate has none. Where there is an
// error h has none.
func (f Forwarding) Set(h http.Header, c *Caller) error {
	RemoveCallerFields(h)
	if len(c.Chain) == 0 {
		return nil
	}
	own := NewXFCC(c.By, c.Chain[0])
	foreign := slices.ContainsFunc(c.Chain[0].URIs, func(u *url.URL) bool { return strings.EqualFold(u.Scheme, "spiffe") && u.String() != c.ID })
	if foreign {
		own.URI = nil
	}
	var xfcc, cert, chain string
	var err error
	switch f.XFCC {
	case XFCCSanitizeSet:
		xfcc, err = FormatXFCC(own)
	case XFCCAppendForward:
		xfcc, err = FormatXFCC(append(slices.Clone(c.Before), own)...)
	case XFCCNone, "":
	default:
		err = refusef(Malformed, "there is no mode %q of the field %s", clip(string(f.XFCC)), XFCCField)
	}
	if err == nil && f.ClientCert && !foreign {
		cert, chain, err = FormatClientCert(c.Chain)
	}
	if err != nil {
		return err
	}
	for _, field := range [][2]string{{XFCCField, xfcc}, {ClientCertField, cert}, {ClientCertChainField, chain}} {
		if field[1] != "" {
			h[field[0]] = []string{field[1]}
		}
	}
	return nil
}

// XFCC returns what a gateway of v says of its client in X-Forwarded-Client-Cert: the last
// element, which has the gateway's id in By, is what that gateway has verified; those in front of it are
// what it believes of others. It is an *Error where the request did not come by a TLS session in
// which one of the gateways has shown its certificate, where it has no such field, and where
// the gateway may not name a caller of that trust domain.
//
// Unlike an assertion the field is for nobody else: it says no more than that the session is
// the gateway's.
func (v *Verifier) XFCC(r *http.Request) ([]XFCC, error) {
	if r.TLS == nil || len(r.TLS.PeerCertificates) == 0 {
		return nil, refusef(NoBinding, "the request came by no TLS session in which a gateway has shown its certificate")
	}
	var values []string
	for name, all := range r.Header {
		switch {
		case foldField(name) != "x-forwarded-client-cert":
		case name != XFCCField:
			return nil, refusef(Malformed, "the field %q is not spelled %q", clip(name), XFCCField)
		default:
			values = all
		}
	}
	if len(values) == 0 {
		return nil, refusef(Missing, "the request has no field %s", XFCCField)
	}
	var gateway *Gateway
	err := error(refusef(UnknownGateway, "the request came by a TLS session of none of the gateways that may call on behalf of others"))
	for i := range v.Gateways {
		g := &v.Gateways[i]
		if v.Identify == nil && !names(r.TLS.PeerCertificates[0], g.ID) {
			continue
		}
		if _, err = v.keyOf(g, r.TLS.PeerCertificates, "in the TLS session"); err == nil {
			gateway = g
			break
		}
	}
	if gateway == nil {
		return nil, err
	}
	elements, err := ParseXFCC(values...)
	if err != nil {
		return nil, err
	}
	if by := elements[len(elements)-1].By; !slices.Contains(by, gateway.ID) {
		return nil, refusef(UnknownGateway, "the field %s is by %.200q, and the TLS session is of %q", XFCCField, by, gateway.ID)
	}
	for i := range elements {
		x := &elements[i]
		if !x.matches() {
			return nil, refusef(Malformed, "the field %s has a certificate and the hash of another", XFCCField)
		}
		if len(gateway.TrustDomains) == 0 {
			continue
		}
		if len(x.URI) == 0 || slices.ContainsFunc(x.URI, func(id string) bool { return !slices.Contains(gateway.TrustDomains, trustDomain(id)) }) {
			return nil, refusef(NotDelegated, "%q may name callers of the trust domains %q, and the caller is %.200q", gateway.ID, gateway.TrustDomains, x.URI)
		}
	}
	return elements, nil
}
