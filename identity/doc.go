// Package identity knows who is who: the keys that this gateway shows, the bundles that
// it verifies others by, and whom a chain of certificates names.
//
//	v := &identity.Verifier{Trust: []*identity.Trust{store.Trust("corp.example")}, Want: identity.Expectation{Usage: x509.ExtKeyUsageClientAuth}}
//	peer, err := v.Verify(chain)
//
// Keys and bundles have names, under which listeners and next hops refer to them. A
// bundle belongs to one trust domain, so that no CA can speak for the domain of another.
//
// The Verifier is the only one of peers. The ID that it finds is
//
//	spiffe://example.org/ns/a/sa/b   of a certificate with a SPIFFE id of a trust domain that has a bundle
//	uri:https://example.org/a        with another URI
//	dns:a.example.org                with no URI: its first DNS name
//	subject:CN=a,O=b                 with neither
//
// so that no subject can pass for a SPIFFE id. The last three need a bundle of no trust
// domain. Linkerd's names have the SPIFFE id that Istio would write.
//
// The package is not stable yet.
package identity
