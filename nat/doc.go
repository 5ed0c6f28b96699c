// Package nat makes ports of a gateway behind NAT reachable from outside: it asks the router to
// map them, renews the mappings, and finds out which outside address they have.
//
//	m := &nat.Manager{Log: log}
//	m.Use(nat.Settings{Ports: []nat.Port{{Network: "tcp", Internal: 443}}})
//	return m.Run(ctx)
//
// A Manager asks by the first of three protocols that the router speaks: PCP (RFC 6887),
// NAT-PMP (RFC 6886) and UPnP-IGD, for which FindUPnP is set. It renews each mapping at half of its
// lifetime, makes all of them again when the router has lost them, and deletes them when it stops.
//
// The router says which outside address it has, and STUN servers (RFC 8489) say which one they
// see. If these differ, or the address is not public, there is another NAT outside of the router,
// and a mapping of the router alone cannot be reached.
//
// # Trust
//
// Anybody in the local network can send datagrams. An answer counts only from the address and
// port that was asked, and with PCP and STUN only with the random bytes of the question. A
// router may grant a mapping that leads nowhere. A Manager reports a mapping as verified only after
// Manager.Verify has had somebody outside connect.
//
// # What it does not do
//
// It maps IPv4. It opens no pinholes for IPv6, and punches no holes.
package nat
