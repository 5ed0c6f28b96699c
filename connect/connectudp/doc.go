// Package connectudp carries UDP datagrams through an HTTP proxy: CONNECT-UDP, RFC 9298,
// by extended CONNECT over HTTP/2 and HTTP/3.
//
//	udp := &connectudp.Protocol{Dialer: &udp.Dialer{Guard: guard}}
//	p := &h2.Protocol{Extended: []connect.ExtendedService{udp}}
//
// The client side is a Dialer, which asks a proxy by the Open of an h2.Dialer or an
// h3.Dialer:
//
//	proxy := &h2.Dialer{Proxy: "gw.example.com:443", TLS: cfg}
//	d := &connectudp.Dialer{Proxy: proxy.Proxy, Open: proxy.Open}
//	c, err := d.DialContext(ctx, "udp", "dns.example.com:53")
//
// The request names its target in the path: "/.well-known/masque/udp/HOST/PORT/". Behind
// the 200 the stream is a Conn. Over HTTP/3 a datagram goes in a QUIC DATAGRAM frame if
// both sides have said that they take them, and otherwise in a capsule on the stream (RFC
// 9297 section 3.5), as always over HTTP/2.
//
// # Loss
//
// Nothing waits for a slow side: what does not fit in the queue of a Conn is lost, and
// counted. A datagram that is too large for a DATAGRAM frame on this path is lost, too,
// as an IP packet would be that must not be fragmented: a client that searches for the
// path's MTU depends on it (RFC 9298 section 6). Up to 1,280 bytes always arrive, which is
// what implementations of QUIC begin with: they go in a capsule then.
//
// # What it does not do
//
// It reads no capsule but DATAGRAM and no context but 0: others are passed over, as the
// RFC requires. There is no 0-RTT, no CONNECT-UDP over HTTP/1.1, and no listening for
// datagrams of others.
package connectudp
