// Package enroll gives devices their identity: a certificate that is valid for hours, which a
// small registration authority in a gateway signs for its own trust domain.
//
// An Authority makes a token for a device. Join uses it there: it makes a key, opens TLS 1.3
// to the gateway of the token, verifies its public key by the token, and asks for
// enroll.culvert.alt. It sends the secret of the token and a certificate signing request, of
// which the authority takes the key alone: the names are those of the invitation. A Renewer
// asks for the next certificate at half of the life of the last one, by mutual TLS with that.
//
//	m, err := enroll.Join(ctx, dialer, token, "cam-7", "/var/lib/culvert")
//	r := &enroll.Renewer{Dir: "/var/lib/culvert", Dialer: dialer, Log: log}
//	err = r.Run(ctx)
//
// The files in the folder are followed by package identity/files. Both messages are one line
// of JSON.
//
// A gateway keeps the SHA-256 of a token's secret alone. That a token is used, and which
// certificates a device has, is on disk before the answer is sent.
//
// The package is not stable yet.
package enroll
