// Package proxyproto speaks the PROXY protocol, versions 1 and 2
// (https://www.haproxy.org/download/3.4/doc/proxy-protocol.txt), by which a
// proxy says in front of a stream whose it is.
//
// Inbound it is a setting of a listener, never detected: ConnHeader reads the
// header of a load balancer, from the address ranges that it trusts and from no
// others.
//
//	tunnel.Listener{
//		Listener: ln, Protocols: ps,
//		ConnHeader: &proxyproto.ConnHeader{From: []netip.Prefix{netip.MustParsePrefix("10.0.0.0/24")}},
//	}
//
// The requests of such a connection have the source that was stated. On a
// listener pinned to Protocol the stated AUTHORITY is also where the stream is
// to go, so that the server may speak first.
//
// Outbound, Dialer tells an endpoint of the client before the client's first
// byte:
//
//	&proxyproto.Dialer{Version: 2, Dialer: &tunnel.NetDialer{Guard: guard}}
//
// What a header says of a certificate (the SSL TLV) and of the caller (an assertion)
// is read for who wants to look at it, and no ConnHeader makes an identity of it: that
// comes from what was verified on this hop, and from nothing that is told.
//
// # Stability
//
// Until version 1.0 a release may change the exported API; CHANGELOG.md lists each
// change. From then on it follows semantic versioning.
package proxyproto
