// Package join makes two sites peers by a token that works once.
//
// The administrator of one site has its gateway Invite another one, and gives the token to
// the other's, whose gateway calls Join. That opens TLS 1.3 to the gateway in the token,
// verifies its public key by the token before it sends anything, and asks for
// join.culvert.alt. It sends the secret of the token, the bundle of its own trust domain and
// its certificate, which has to verify with that bundle, and proves that it has the key by
// a signature over the TLS session. Then each side stores the other: its name, its trust
// domain and bundle, its zones and its gateways.
//
// A gateway stores the SHA-256 of the secret alone. The mark that a token is used is on disk
// before the answer is sent.
//
// The package is not stable yet.
package join
