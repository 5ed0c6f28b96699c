// Package connect lets a client name the destination of its stream by HTTP CONNECT (RFC
// 9110 section 9.3.6) over HTTP/1.x: Protocol is the proxy, Dialer the client.
//
// The proxy:
//
//	p := &connect.Protocol{
//		Auth: &connect.BasicAuth{Verify: connect.Passwords(map[string]string{"alice": secret})},
//		Via:  "gateway-7f3a",
//	}
//	srv.Serve(ctx, tunnel.Listener{Listener: ln, Protocols: []tunnel.Protocol{p}})
//
// The client, which is a tunnel.Dialer and fits http.Transport too:
//
//	d := &connect.Dialer{Proxy: "gw.example.com:443", Authorization: connect.BasicCredentials("alice", secret)}
//	conn, err := d.DialContext(ctx, "tcp", "db.example.com:5432")
//
// One CONNECT is read per connection. Its head is parsed strictly (ParseHead
// lists the choices) because a head that two programs read differently is how
// requests are smuggled. The client gets a 200 only after the Handler has a
// connection to the service, and what it sent behind its head stays in order
// in the tunnel.Conn until then. A refused client gets the status and the
// Proxy-Status (RFC 9209) that Answer gives for the Reason, and its
// connection is closed: bytes behind a refused head are never read as another
// request.
//
// ParseAuthority, Answer and Authenticator know nothing of HTTP/1.x: the other carriers
// of CONNECT use them, too. A Service decides about the requests of HTTP/2 and HTTP/3.
//
// The package forwards no plain requests (absolute-form GET is answered 405),
// keeps no connection for a second request, does not resolve names and does
// not decide which client may reach what: that is the Handler.
//
// # Stability
//
// Until version 1.0 a release may change the exported API; CHANGELOG.md lists each
// change. From then on it follows semantic versioning.
package connect
