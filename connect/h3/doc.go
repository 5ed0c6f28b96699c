// Package h3 carries tunnels over HTTP/3: CONNECT of RFC 9114 section 4.4,
// many on one QUIC connection. Server is the proxy, Dialer the client.
//
// The proxy, on a UDP socket:
//
//	s := &h3.Server{TLS: &tls.Config{Certificates: certs}, Via: "gateway-7f3a"}
//	err := s.Serve(ctx, pc, handler)
//
// The client, which keeps its connections to the proxy:
//
//	d := &h3.Dialer{Proxy: "gw.example.com:443"}
//	defer d.Close()
//	conn, err := d.DialContext(ctx, "tcp", "db.example.com:5432")
//
// A Stream half-closes in both directions (FIN) and aborts in both
// (RESET_STREAM and STOP_SENDING), so an end is never taken for an abort or an
// abort for an end. A connection goes on when its client's address changes.
//
// QUIC and QPACK are quic-go's; the frames on the streams are this package's
// own. Its http3 package answers malformed requests without reporting them,
// takes header fields in an http.Header, which knows neither their order nor
// their number, and takes trailers where a tunnel must have none. What a header
// list may hold is package connect's business, for HTTP/2 and HTTP/3 alike.
//
// A connection has about five goroutines, and its streams none once they are
// tunnels. What a stream has not read counts against the window of its
// connection, so that one that was fast and then stopped holds as much of it as
// it had grown to; the window is sized for three of the largest. The streams
// that are slow from the start hold up no other.
//
// Frames that carry nothing cost their sender points, as in HTTP/2. A peer that runs out
// of them is a flood, and its connection ends with H3_EXCESSIVE_LOAD.
//
// DialRawQUIC and ServeRawQUIC are QUIC without HTTP, for probing and showing a
// service behind a gateway that passes QUIC on: no other package has quic-go.
//
// There is no 0-RTT, no resumption, no server push, no QPACK dynamic table, no
// datagram and no priority, and 405 is answered to what is not a CONNECT.
//
// # Stability
//
// Until version 1.0 a release may change the exported API; CHANGELOG.md lists each
// change. From then on it follows semantic versioning.
package h3
