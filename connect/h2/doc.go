// Package h2 carries tunnels over HTTP/2: CONNECT of RFC 9113 section 8.5,
// many on one connection. Protocol is the proxy, Dialer the client.
//
// The proxy, which shares its port with others by the preface of HTTP/2:
//
//	p := &h2.Protocol{Via: "gateway-7f3a"}
//	srv.Serve(ctx, tunnel.Listener{Listener: ln, Protocols: []tunnel.Protocol{&sni.Protocol{}, &connect.Protocol{}, p}})
//
// The client, which keeps its connections to the proxy:
//
//	d := &h2.Dialer{Proxy: "gw.example.com:443", TLS: &tls.Config{}}
//	defer d.Close()
//	conn, err := d.DialContext(ctx, "tcp", "db.example.com:5432")
//
// A Stream half-closes in both directions (END_STREAM) and aborts in both
// (RST_STREAM), so an end is never taken for an abort or an abort for an end.
// Go's net/http can't do the first, which is why this package speaks HTTP/2 by
// itself, on golang.org/x/net/http2's Framer.
//
// A connection has two goroutines, one that reads and one that writes, and
// its streams none. A stream at rest holds no buffer. Streams take turns at
// writing, a frame each; and since the connection's window is opened again as
// soon as bytes come, one that nobody reads holds up no other: it stops at its
// own window. That starts at 64 KiB and doubles as long as its reader keeps up
// and the path is longer than it, up to 16 MiB, and 16 MiB for all streams of a
// connection together.
//
// Every frame that carries nothing costs its sender points. A peer that runs out of them
// is a flood, and its connection ends with GOAWAY and ENHANCE_YOUR_CALM.
//
// The package ends no TLS: ServeConn takes any connection. It pushes nothing,
// obeys no priorities, and answers 405 to what is not a CONNECT.
//
// # Stability
//
// Until version 1.0 a release may change the exported API; CHANGELOG.md lists each
// change. From then on it follows semantic versioning.
package h2
