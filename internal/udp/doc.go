// Package udp carries datagrams from clients to services: those of a port per
// service, and QUIC by the name in its hello, which stays encrypted for
// everybody but its two ends.
//
//	conn, err := udp.Listen(ctx, ":443")
//	if err != nil {
//		return err
//	}
//	s := &udp.Server{Router: router, Dialer: &udp.Dialer{Guard: guard}}
//	return s.Serve(ctx, udp.Listener{Conn: conn, Open: func() udp.Opening { return new(sni.QUIC) }})
//
// UDP has no connections, so a Server makes sessions: the datagrams between one
// client and one service. Each session is routed and authorized as streams are, by a tunnel.Router, once for each session, and a session ends
// with one Outcome. It has a socket of its own to the service, so that the
// service tells clients apart; it ends when nothing has come for a while, as
// nobody says when UDP is over.
//
// # QUIC
//
// A QUIC session is known by its client's address and by connection ids (RFC
// 9000 section 5.1): the one that the client makes up, and those that the
// service announces in the long headers of its handshake. A client whose
// address changes under it, as NAT does that, is found again by them. It gets
// another socket to the same endpoint, so that the service sees the change and
// validates the new address itself (section 9.3): nothing of the session goes
// there that the service did not send there. Who may not use the service from
// the new address is not let through.
//
// What can't be followed is a client that moves on purpose: it takes an id that
// the service gave it encrypted, in NEW_CONNECTION_ID, and that nobody between
// has seen.
//
// Each Initial that goes to a service has been read, also late ones, so that
// no session can be used to ask the same endpoint for another name.
//
// # What is not proven
//
// The source of a datagram is what somebody wrote there. Until its client has
// shown that it hears the answers, a session is short-lived and counts as half
// open. What a Server says by itself, a refusal or a Version Negotiation, is
// shorter than what it answers. What services say is passed on: QUIC servers
// keep to three times what they got, and another service that answers little
// with much does so through a gateway too.
//
// # What it does not do
//
// It changes no datagram, keeps no order, mends no loss, and passes no ECN
// marks. It does not end QUIC: names of the gateway's own are handed to a
// Local, which a QUIC library reads like a socket.
package udp
