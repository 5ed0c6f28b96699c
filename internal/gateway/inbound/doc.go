// Package inbound makes what clients speak to a gateway: the protocols of a
// registry.Listener, with its keys and its credentials. It opens the sockets of UDP,
// which its HTTP/3 needs; package gateway opens those of TCP.
//
//	b := &inbound.Builder{CurrentVia: via, Table: reg.Table}
//	l, err := b.New(table, listener)
//	if err != nil {
//		return err
//	}
//	srv.Serve(ctx, tunnel.Listener{Listener: ln, Current: l.Current})
//
// Use replaces what a Listener serves: connections to come have it, and those that are
// open are not touched. Keys and credentials change in place. Where the protocols
// change, sessions of many streams are asked to end with their last stream.
package inbound
