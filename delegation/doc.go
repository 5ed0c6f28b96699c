// Package delegation tells a service, verifiably, who calls it through a gateway that
// ends TLS.
//
// The gateway authenticates the caller and then opens a TLS session of its own to the
// service. In it the gateway sends an Assertion: a JWS, RFC 7515, that names the caller,
// the service, and the gateways on the way. It is signed with the gateway's key and bound
// to that one session by RFC 9266, so that nobody can use it anywhere else.
//
// A service has a Verifier, which says which gateways may call on behalf of others. The
// zero Verifier trusts nobody.
//
//	v := &delegation.Verifier{
//		Audience: []string{"spiffe://corp.example/ns/shop/sa/api"},
//		Gateways: []delegation.Gateway{{ID: "spiffe://corp.example/ns/edge/sa/gw", Roots: roots}},
//	}
//
// An Assertion travels in one of two places. In front of any protocol it is a value of
// type 0xE1 in a PROXY header of version 2, inside TLS. Verifier.Listener reads that:
//
//	ln = v.Listener(tls.NewListener(ln, config)) // config.ClientAuth is tls.RequireAnyClientCert
//	c, err := ln.Accept()
//	a, err := c.(*delegation.Conn).Assertion()
//
// In HTTP it is the header field Culvert-Peer. Verifier.Middleware reads that:
//
//	http.Handle("/", v.Middleware(handler)) // and in handler: delegation.FromContext(r.Context())
//
// A service that ends TLS itself and accepts nobody but its gateways needs no signature:
// the session says who speaks, and what it states by other means is as good as that. An
// Assertion is for those behind: a program beside a sidecar, a further gateway, an audit.
//
// Two forms of that are fields that other proxies write and read, too:
// X-Forwarded-Client-Cert of Envoy, and Client-Cert of RFC 9440. Forwarding is how a gateway
// sets them, after it has removed those of its client; Verifier.XFCC and ParseClientCert are
// how a service reads them.
//
// The package does not decide who may call. It depends on the standard library and on
// go-jose alone.
//
// # Stability
//
// Until version 1.0 a release may change the exported API; CHANGELOG.md lists each
// change. From then on it follows semantic versioning.
package delegation
