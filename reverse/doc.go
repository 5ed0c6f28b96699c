// Package reverse reaches services that nobody can dial: hosts behind a NAT, clusters
// without an ingress, laptops. A connector next to such a service opens a session to a gateway
// and registers names on it. Requests for these names come back on the session.
//
// Groups is who serves which name right now. It has no table: members join and leave it by
// the second, and the registry asks it.
//
//	groups := &reverse.Groups{Authorize: table.MayRegister}
//	table.Live = groups.Service     // names that no service of the configuration has
//	upstreams.Group = groups.Transport // endpoints with a group
//
// Whatever can open a stream for a request may be a member: it implements Session, and
// joins with the request by which its connector came, whose Peer owns the name from then on.
//
//	m, err := groups.Join(req, session, reverse.Registration{Name: name, Port: 443})
//	if err != nil {
//		return err // an *tunnel.Error: Denied, or Overload
//	}
//	defer m.Leave()
//
// A connector may keep pool connections to the gateway, too, beside its session: a PoolProtocol
// takes them, by tickets that the session has handed out. A request comes on the session all the
// same, and its bytes then go over a pool connection, which the kernel moves.
package reverse
