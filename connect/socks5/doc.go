// Package socks5 lets a client say where its stream should go by SOCKS
// version 5 (RFC 1928), with a user name and a password where they are wanted
// (RFC 1929): Protocol is the proxy that hears it, Dialer the client that says
// it.
//
// The proxy:
//
//	p := &socks5.Protocol{Verify: connect.Passwords(map[string]string{"alice": secret})}
//	srv.Serve(ctx, tunnel.Listener{Listener: ln, Protocols: []tunnel.Protocol{p}})
//
// The client, which is a tunnel.Dialer and fits http.Transport too:
//
//	d := &socks5.Dialer{Proxy: "gw.example.com:1080", User: "alice", Password: secret}
//	conn, err := d.DialContext(ctx, "tcp", "db.example.com:5432")
//
// A client says which ways of proving who it is it knows, is told which one to
// use, proves it, and asks for one destination: a name, or an IPv4 or IPv6
// address. It is accepted only after the Handler has a connection to the service;
// what it sent behind its request stays in order in the tunnel.Conn until then.
// A refused client gets the reply that ReplyFor gives for the Reason, and its
// connection is closed: bytes behind a refusal are never read.
//
// Only CONNECT is done. BIND and UDP ASSOCIATE are refused, and so is SOCKS4,
// in its own words. The package does not resolve names and does not decide who
// may reach what: that is the Handler.
//
// # Stability
//
// Until version 1.0 a release may change the exported API; CHANGELOG.md lists each
// change. From then on it follows semantic versioning.
package socks5
