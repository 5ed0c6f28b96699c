// Package unixsocket listens at Unix sockets, whose clients are processes of the same
// machine.
//
//	ln, err := unixsocket.Listen(ctx, unixsocket.Config{Path: "/run/culvert/proxy.sock", Mode: 0o660, Group: "web"})
//
// A socket has a file with an owner, a group and permission bits: who may write to the
// file may connect. The path "@name" is an abstract socket of Linux, which has no file and
// is open to every process in the network namespace.
//
// The connections are tunnel.LocalConns: each knows the process that connected it, where
// the system tells.
package unixsocket
