// Package termination terminates TLS at the gateway, and serves the stream inside as
// if it had come in the clear: TLS is the one protocol that can nest.
//
//	one, two := &connect.Protocol{}, &h2.Protocol{}
//	p := &termination.Protocol{Hello: &sni.Protocol{}, Pass: true}
//	if err := p.Use(termination.Item{
//		Keys:  &termination.Keys{Certificates: []*identity.Key{store.Key("edge")}, Trust: []*identity.Trust{store.Trust("corp.example")}},
//		Inner: []tunnel.Protocol{one, two},
//		ALPN:  []termination.Offer{{"h2", []tunnel.Protocol{two}}, {"http/1.1", []tunnel.Protocol{one}}},
//	}, termination.Item{
//		Keys:  &termination.Keys{Certificates: []*identity.Key{store.Key("shop")}, Names: names},
//		Inner: []tunnel.Protocol{termination.Plain{}},
//	}); err != nil {
//		return err
//	}
//	srv.Serve(ctx, tunnel.Listener{Listener: ln, Protocols: []tunnel.Protocol{p}})
//
// Hello reads the ClientHello of every connection, and with Pass it serves those for
// other names: there is one parser of hellos, whether TLS is terminated here or not. The
// name in the hello decides which Item terminates TLS, with its certificates, what it
// asks of clients, and what is inside: further protocols, or the Plain stream for the
// service with that name.
//
// A client certificate is verified by Keys.Trust, and its identity becomes the Peer of
// every request inside (see identity.Verifier). Without, no client has an identity,
// whatever its certificate.
//
// Use may be called at any time, and keys and trust may be replaced at any time: later
// connections have the new ones, and those that are open are not touched. No session is
// ever resumed, so nothing of old keys survives.
//
// The handshake and the preamble inside have the listener's one deadline
// together, and the handshake may have MaxHandshake bytes. The end of a stream is
// close_notify, in each direction by itself; an abort is a TCP reset. A connection
// that ends without close_notify was cut.
//
// The package reads no files, and decides nothing by what is inside.
package termination
