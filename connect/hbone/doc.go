// Package hbone speaks HBONE, as Istio's ambient mesh does: CONNECT over
// HTTP/2 over mutual TLS, many tunnels on a connection. There is no
// specification; docs/internals/protocols/hbone.md says which bytes are meant.
//
// The server is a tunnel.Protocol for the inside of TLS that somebody else has
// ended, with a client certificate (see package termination):
//
//	p := &termination.Protocol{Hello: &sni.Protocol{Nameless: true}}
//	err := p.Use(termination.Item{
//		Keys:  keys,
//		Any:   true, // an HBONE client sends no server name
//		Inner: []tunnel.Protocol{&hbone.Protocol{Via: "gateway-7f3a"}}, ALPN: []termination.Offer{{Name: "h2"}},
//	})
//
// A Dialer reaches its destinations through such a server, a Double those that
// are behind two: the first one ends its own connection and passes on another,
// which it can't read, to whichever endpoint it likes.
//
//	d := &hbone.Dialer{Gateway: "gw.west.example.com:15008", TLS: keys, Verifier: verifier}
//	defer d.Close()
//	conn, err := d.DialContext(ctx, "tcp", "db.default.svc.cluster.local:5432")
//
// A caller's certificate is its identity. Its header fields (baggage, forwarded,
// traceparent) are for logs and for the next hop; where they are
// malformed or too long, it is as if they were not there.
//
// # Stability
//
// Until version 1.0 a release may change the exported API; CHANGELOG.md lists each
// change. From then on it follows semantic versioning.
package hbone
