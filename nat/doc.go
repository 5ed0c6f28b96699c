// Package nat has the ports of a gateway behind NAT reached from outside: it asks the
// router to map them, keeps the mappings, and finds out which outside address they have.
//
//	m := &nat.Manager{Log: log}
//	m.Use(nat.Settings{Ports: []nat.Port{{Network: "tcp", Internal: 443}}})
//	return m.Run(ctx)
//
// A Manager asks by the first of three protocols that the router speaks: PCP (RFC 6887),
// NAT-PMP (RFC 6886) and UPnP-IGD, which is given to it as a Finder. It renews each mapping at
// half of its lifetime, makes all of them again when the router has lost them, and deletes them
// when it stops.
//
// An outside address is what the router says, compared with what STUN servers (RFC 8489) see.
// Where they differ, or the address is none of the internet, there is another NAT outside of
// the router, and no mapping of the router alone is reached.
//
// # Whom it believes
//
// Anybody in the local network can send datagrams. An answer counts only from the address and
// port that was asked, and with PCP and STUN only with the random bytes of the question. A
// mapping is a wish that the router grants: whether it works is known when somebody outside has
// connected, so that a Manager reports a mapping as verified only after Settings.Verify.
//
// # What it does not do
//
// It maps IPv4. It opens no pinholes for IPv6, and punches no holes.
package nat
