// Package sni routes TLS without decrypting it: it reads the server name from
// the ClientHello and leaves every byte where it was.
//
// The parser is pure. Give it the bytes received so far and it answers in one
// of three ways:
//
//	hello, err := sni.Parse(raw)
//	switch {
//	case err == nil:
//		route(hello.Name)              // zero: hello.NameErr says why
//	case errors.Is(err, sni.ErrMore):
//		// read more and ask again
//	default:                               // a *sni.ParseError
//		// this is not a hello, and no further byte can make it one
//	}
//
// A connection that arrives in pieces is better served by a Parser, which goes
// on where it stopped and so looks at every byte once. Both accept a hello
// that is split over any number of TCP segments and TLS records, and both
// refuse at the first field that is wrong, not when the message is complete.
//
// Protocol is the tunnel.Protocol made of it:
//
//	tunnel.Listener{Listener: ln, Protocols: []tunnel.Protocol{&sni.Protocol{}}}
//
// A hello that cannot be read is refused, never routed by guess: two parsers
// that understand one hello differently are how a client gets past a policy.
// For the same reason a list with two names is an error here, and so is an
// extension that occurs twice.
//
// QUIC carries the same hello, in encrypted packets to which everybody has the
// keys. A QUIC reads it from the client's first datagrams, of version 1 and 2,
// in whatever order and pieces they come.
//
// What it does not do: decrypt, terminate, judge versions or cipher suites, or
// open an Encrypted ClientHello. A hello with ECH is routed by its outer name;
// a GREASE one cannot be told from it and must not be.
//
// # Stability
//
// Until version 1.0 a release may change the exported API; CHANGELOG.md lists each
// change. From then on it follows semantic versioning.
package sni
