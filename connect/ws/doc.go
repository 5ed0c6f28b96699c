// Package ws lets a client name the destination of its stream by a WebSocket
// handshake (RFC 6455), and carries the stream in binary messages: for
// gateways behind a load balancer that lets only HTTP through. Protocol is the
// server, Dialer the client, Stream what both have after the handshake.
//
// The server, on one port with CONNECT:
//
//	srv.Serve(ctx, tunnel.Listener{Listener: ln, Protocols: []tunnel.Protocol{&ws.Protocol{}, &connect.Protocol{}}})
//
// The client, which is a tunnel.Dialer:
//
//	d := &ws.Dialer{URL: "wss://lb.example.com/", Authorization: connect.BearerCredentials(token)}
//	conn, err := d.DialContext(ctx, "tcp", "db.example.com:5432")
//
// # The handshake
//
// The destination stands in the path, GET /.culvert/tunnel/db.example.com:5432,
// or in the field Culvert-Target with the bare path. 101 is sent when the
// Handler has a connection to the service; until then every no is an HTTP
// answer: that of connect.Answer, 401 in place of 407, 426 for another version
// and 404 for another path. A request with an Origin, which browsers send and
// nobody else, is refused unless that is listed. Cookies mean nothing.
//
// # The ends of a stream
//
// A close frame ends both directions of a WebSocket, and a tunnel has two ends.
// Peers that agree on the subprotocol culvert.v1 say the end of one direction
// by a binary message of no bytes; control frames may still follow it, data is
// not delivered. With any other peer CloseWrite is errors.ErrUnsupported, and
// messages of no bytes mean nothing.
//
//	the end of a direction    82 00, or masked 82 80 kk kk kk kk
//	Close: an orderly end     close code 1000
//	Abort                     close code 1011, or 1001 in a drain, if it can be sent at once, and a TCP reset
//
// A close frame with code 1000 or without a code, as pages send it, is an orderly
// end. Everything else is an abort: another code, and a connection that
// ends without a close frame, as it does when a load balancer in between passes
// on a reset.
//
// # Why the framing is our own
//
// A tunnel needs half-close, a reset that stays one, deadlines that leave the
// stream whole, and frames that are passed on as they arrive and are never
// held. The well-kept libraries read and write whole messages for applications,
// close both directions together, and have a goroutine or a context for each
// call. What is left of RFC 6455 without text, compression and extensions is
// one header, which frame.go parses, and the closing handshake.
//
// # Silence
//
// Both sides send a ping where they have sent nothing for 20 seconds, so that
// load balancers see bytes in both directions. A ping is no byte of the stream:
// the limits of a Relay for idle and half-closed tunnels count without them.
//
// The package speaks no HTTP/2. What a WebSocket is there (RFC 8441) is behind
// two seams: Protocol.AdmitList and Dialer.Extended. It offers no
// compression.
//
// # Stability
//
// Until version 1.0 a release may change the exported API; CHANGELOG.md lists each
// change. From then on it follows semantic versioning.
package ws
