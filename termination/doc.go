// Package termination ends TLS at the gateway, and has what is inside of it
// served as if it had come in the clear: TLS is the one protocol that can nest.
//
//	one, two := &connect.Protocol{}, &h2.Protocol{}
//	p := &termination.Protocol{
//		Hello: &sni.Protocol{},
//		Inner: []tunnel.Protocol{one, two},
//		ALPN:  []termination.Offer{{"h2", []tunnel.Protocol{two}}, {"http/1.1", []tunnel.Protocol{one}}},
//	}
//	if err := p.Use(&termination.Keys{Certificates: []tls.Certificate{pair}, ClientCAs: pool}); err != nil {
//		return err
//	}
//	srv.Serve(ctx, tunnel.Listener{Listener: ln, Protocols: []tunnel.Protocol{p}})
//
// Whose a connection is, Hello says, which reads the ClientHello of every one
// and serves those that are for others: there is one parser of hellos, and it
// is the same whether TLS ends here or not. A hello for one of the gateway's
// own names ends here, and with All any hello does.
//
// A client certificate is verified by Keys.ClientCAs, and who it says the
// client is becomes the Peer of every request inside (see PeerOf). Where there
// are no ClientCAs, nobody has an identity, whatever certificate they show.
//
// Use may be called at any time: connections that come later have the new
// keys, and those that stand are left alone. No session is ever resumed, so
// there is nothing of old keys to be taken along.
//
// The handshake and the preamble inside have the listener's one deadline
// together, and the handshake no more than MaxHandshake bytes. An end of
// stream is close_notify, in either direction and without the other; an abort
// is a TCP reset. A connection that ends without close_notify was cut.
//
// The package reads no files, and takes no decision by what is inside.
package termination
