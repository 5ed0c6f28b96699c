package termination

import (
	"crypto/tls"
	"strings"

	"culvert.dev/tunnel"
)

const (
	maxChain = 8    // certificates that a client may show
	maxID    = 2048 // bytes of a SPIFFE id, SPIFFE-ID section 2.3
	maxOther = 512  // bytes of another identity
	spiffe   = "spiffe://"
)

// refuse returns the error for a client that is not admitted.
func refuse(format string, args ...any) error {
	return tunnel.Refusef(tunnel.NoAuth, "termination: "+format, args...)
}

// PeerOf returns the identity of a client by the leaf of its verified chain, and the
// zero Peer for one whose certificate was not verified. The ID is
//
//	spiffe://example.org/ns/a/sa/b   of a certificate with a SPIFFE id
//	uri:https://example.org/a        with another URI
//	dns:a.example.org                with no URI: its first DNS name
//	subject:CN=a,O=b                 with neither
//
// so that no subject can pass for a SPIFFE id. PeerOf refuses a certificate with
// several URIs, of which different parsers could pick different ones
// (CVE-2022-40716), and one with a malformed SPIFFE id. The handshake has checked by
// Keys.Trust whether its CA may speak for the trust domain. Errors have the Reason
// NoAuth.
func PeerOf(cs *tls.ConnectionState) (tunnel.Peer, error) { return peerOf(cs, nil) }

// peerOf is PeerOf; unless t is nil, it also refuses all but SPIFFE ids that a
// CA of their own trust domain has signed.
func peerOf(cs *tls.ConnectionState, t trust) (tunnel.Peer, error) {
	if len(cs.VerifiedChains) == 0 {
		return tunnel.Peer{}, nil
	}
	if n := len(cs.PeerCertificates); n > maxChain {
		return tunnel.Peer{}, refuse("the client shows %d certificates, limit %d", n, maxChain)
	}
	// Only the leaf is the client's: its other certificates prove nothing about it.
	leaf := cs.VerifiedChains[0][0]
	id := ""
	switch {
	case len(leaf.URIs) > 1:
		return tunnel.Peer{}, refuse("the client's certificate has %d URIs, want one", len(leaf.URIs))
	case len(leaf.URIs) == 1:
		id = leaf.URIs[0].String()
		if !strings.EqualFold(leaf.URIs[0].Scheme, "spiffe") {
			id = "uri:" + id
			break
		}
		td, err := trustDomain(id)
		if err != nil {
			return tunnel.Peer{}, err
		}
		if err := t.check(td, cs.VerifiedChains); err != nil {
			return tunnel.Peer{}, err
		}
		return tunnel.Peer{ID: id, Method: "mtls"}, nil
	case len(leaf.DNSNames) > 0:
		id = "dns:" + leaf.DNSNames[0]
	default:
		id = "subject:" + leaf.Subject.String()
	}
	switch {
	case t != nil:
		return tunnel.Peer{}, refuse("the client's certificate has no SPIFFE id, want one of %q", t.domains())
	case len(id) > maxOther:
		return tunnel.Peer{}, refuse("the client's name has %d bytes, limit %d", len(id), maxOther)
	}
	return tunnel.Peer{ID: id, Method: "mtls"}, nil
}

// trustDomain returns that of a workload's SPIFFE id, SPIFFE-ID section 2: of
// each id there is one spelling.
func trustDomain(id string) (string, error) {
	rest, ok := strings.CutPrefix(id, spiffe)
	td, path, _ := strings.Cut(rest, "/")
	if !ok || len(id) > maxID || !isTrustDomain(td) || path == "" {
		return "", refuse("%q is not the SPIFFE id of a workload", id[:min(len(id), 80)])
	}
	for segment := range strings.SplitSeq(path, "/") {
		if segment == "" || segment == "." || segment == ".." || strings.ContainsFunc(segment, func(r rune) bool {
			return !('a' <= r && r <= 'z' || 'A' <= r && r <= 'Z' || '0' <= r && r <= '9' || strings.ContainsRune("-._", r))
		}) {
			return "", refuse("SPIFFE id %q has a segment that none may have", id[:min(len(id), 80)])
		}
	}
	return td, nil
}

// isTrustDomain reports whether s may be a trust domain, section 2.1.
func isTrustDomain(s string) bool {
	return s != "" && len(s) <= 255 && !strings.ContainsFunc(s, func(r rune) bool {
		return !('a' <= r && r <= 'z' || '0' <= r && r <= '9' || strings.ContainsRune("-._", r))
	})
}
