package tunnel

import (
	"context"
	"net/netip"
)

// A ConnHeader is the header that every connection of a Listener begins with,
// before any protocol: a proxy in front says there whose connection it passes
// on. A listener that has one requires it, and no other listener looks for it,
// because a client that may send one can claim any address.
//
// The header is part of the preamble: one deadline covers both, and a connection
// waits for both without a goroutine where all its protocols are
// PreambleDetectors.
type ConnHeader interface {
	// Trusts reports whether addr, a socket's peer, is a proxy in front. Any
	// other peer is refused as it comes. A proxy in front stands for many
	// clients: what it opens is charged to the client that it names, and no
	// limit on one client is held against the proxy.
	Trusts(addr netip.Addr) bool

	// Len returns the length of the header that prefix begins with: 0 where
	// that takes more bytes to say, and less than 0 where prefix begins with
	// none. It is pure.
	Len(prefix []byte) int

	// Read reads the header from c, discards it, and tells c of the client
	// with SetSource. The context it returns is the connection's from then
	// on. Its error is an *Error, after it has ended c.
	Read(ctx context.Context, c *Conn) (context.Context, error)
}

// SetSource says whose connection c is in truth. The requests made of it and
// their Outcomes have this source, and the connection is charged to it.
func (c *Conn) SetSource(source netip.AddrPort) {
	c.source = netip.AddrPortFrom(source.Addr().Unmap(), source.Port())
}

// fronted reports whether addr is a proxy in front of ln.
func (ln *Listener) fronted(addr netip.Addr) bool {
	return ln.ConnHeader != nil && ln.ConnHeader.Trusts(addr)
}

// hasPreamble reports whether a connection of ln that has sent prefix can be
// served without waiting, its ConnHeader included.
func (ln *Listener) hasPreamble(prefix []byte) bool {
	if ln.ConnHeader == nil {
		return hasPreamble(ln.Protocols, prefix)
	}
	switch n := ln.ConnHeader.Len(prefix); {
	case n < 0:
		return true
	case n == 0 || n >= len(prefix): // a protocol is asked about one byte at least
		return false
	default:
		return hasPreamble(ln.Protocols, prefix[n:])
	}
}

// readConnHeader reads the header where the listener has one, and returns the
// context to serve the connection with.
func (k *slot) readConnHeader() (context.Context, error) {
	p := k.ln.ConnHeader
	if p == nil {
		return &k.ctx, nil
	}
	peer := k.Conn.source
	ctx, err := p.Read(&k.ctx, &k.Conn)
	if err != nil || k.Conn.source == peer {
		return ctx, err
	}
	if err := k.charge(k.Conn.source.Addr()); err != nil {
		_ = k.Abort()
		return nil, err
	}
	return ctx, nil
}
