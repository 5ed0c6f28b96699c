// Package tunnel is culvert's vocabulary and its data path: it accepts a
// connection, finds out where its client wants to go, decides, dials, and
// carries bytes until both ends are done.
//
// One connection, top to bottom:
//
//	Server        accepts, sets the deadline for the first bytes, detects
//	 Protocol     reads the preamble and makes a Request
//	  Router      resolves, allows, dials, says yes: the only place that decides
//	   Relay      owns both ends from then on and reports one Outcome
//
// A gateway in ten lines:
//
//	relay := &tunnel.Relay{}
//	router := &tunnel.Router{Resolver: table, Dialer: &tunnel.NetDialer{Guard: guard}, Relay: relay}
//	srv := &tunnel.Server{Handler: router}
//	ln, err := net.Listen("tcp", ":443")
//	if err != nil {
//		return err
//	}
//	return srv.Serve(ctx, tunnel.Listener{Listener: ln, Protocols: []tunnel.Protocol{&sni.Protocol{}}})
//
// On Linux connections wait in event loops (see Loops), which are in
// tunnel/internal/poll with the sockets and the system calls. Elsewhere each waits
// on a goroutine. What carries the bytes of tunnels is in tunnel/internal/relay.
//
// The package stands on the standard library alone. It does not parse any
// protocol's preamble, does not know where names come from and does not
// decrypt: those are the packages sni, connect and registry.
//
// # Stability
//
// Until version 1.0 a release may change the exported API; CHANGELOG.md lists each
// change. From then on it follows semantic versioning.
package tunnel
