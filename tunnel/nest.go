package tunnel

import (
	"context"
	"net"
)

// Nest returns the Conn of what is carried inside of c: TLS that was ended
// here. inner is a layer upon c, and closing it closes c. The two are one
// connection to the Server, with one place, one deadline for the whole
// preamble and one source; peer is who was proved to be calling.
func (c *Conn) Nest(inner net.Conn, peer Peer) *Conn {
	return &Conn{Conn: inner, Listener: c.Listener, Peer: peer, outer: c, accepted: c.accepted, source: c.source, local: c.local}
}

// hand notes that c belongs to whoever has it as a Stream, and with it what it
// is carried in.
func (c *Conn) hand() {
	for ; c != nil; c = c.outer {
		c.handed = true
	}
}

// ServeInner finds out which of the protocols c speaks and has it serve c, as
// the Server does with a connection that it accepted. It is for a Conn made by
// Nest.
func ServeInner(ctx context.Context, c *Conn, protocols []Protocol, h Handler) error {
	p, err := detect(c, protocols)
	if err != nil {
		return err
	}
	return p.ServeConn(ctx, c, h)
}
