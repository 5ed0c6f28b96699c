// Package ssh serves stock OpenSSH clients: their channels of the type direct-tcpip are
// requests, so that "ssh -W", "-J", "-L" and "-D" reach services by name.
//
//	p := &ssh.Protocol{}
//	p.Use(&ssh.Config{HostKeys: []cryptossh.Signer{key}, Authority: authority})
//	server := &tunnel.Server{Handler: router}
//	err := server.Serve(ctx, tunnel.Listener{Listener: ln, Protocols: []tunnel.Protocol{p}})
//
// With Protocol.Sessions, "ssh -R NAME:443:localhost:8443" registers a name: a connection is then
// a reverse.Session, and streams to the name are channels of the type forwarded-tcpip.
//
// A client is let in by its public key or by a certificate of a CA, never by a password. Each
// channel is a tunnel of its own, with the identity of the key. A shell prints the names that the
// client serves. Commands and subsystems end at once with a text; agents, X11 and Unix sockets are
// refused.
//
// A Protocol is a tunnel.FirstSpeaker: some clients wait for the server's version. Where it is
// alone at a listener it speaks at once, and beside others after 300 ms without a byte.
//
// SSH can't abort one channel: a tunnel that a service resets ends for the client with
// SSH_MSG_CHANNEL_CLOSE and no SSH_MSG_CHANNEL_EOF before it. The window of a channel is 2 MiB,
// that of golang.org/x/crypto/ssh: one channel carries at most 100 MiB/s at a round trip of
// 20 ms.
//
// # Stability
//
// The API may change in any release. What clients see is RFC 4253 and RFC 4254, and stays.
package ssh
