package tunnel

import (
	"context"
	"net/netip"
)

// A Preface is what every connection of a Listener begins with, before any
// protocol: what a proxy in front says of the client whose connection it
// passes on. It is required there and never guessed elsewhere, for whoever may
// send one may claim to be anybody.
//
// It is part of the preamble: one deadline covers both, and a connection waits
// for both without a goroutine where all its protocols are Judges.
type Preface interface {
	// Trusts reports whether addr, a socket's peer, is a proxy in front. Any
	// other peer is refused as it comes. A proxy in front stands for many
	// clients: what it opens is charged to the client that it names, and no
	// limit on one client is held against the proxy.
	Trusts(addr netip.Addr) bool

	// Len returns the length of the preface that prefix begins with: 0 where
	// that takes more bytes to say, and less than 0 where it is none. It is
	// pure.
	Len(prefix []byte) int

	// Read reads the preface from c, discards it, and tells c of the client
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
	return ln.Preface != nil && ln.Preface.Trusts(addr)
}

// settled is settled for what a connection of ln has sent, its preface
// included.
func (ln *Listener) settled(prefix []byte) bool {
	if ln.Preface == nil {
		return settled(ln.Protocols, prefix)
	}
	switch n := ln.Preface.Len(prefix); {
	case n < 0:
		return true
	case n == 0 || n >= len(prefix): // a protocol is asked about one byte at least
		return false
	default:
		return settled(ln.Protocols, prefix[n:])
	}
}

// readPreface reads the preface where the listener has one, and returns the
// context to serve the connection with.
func (k *slot) readPreface() (context.Context, error) {
	p := k.ln.Preface
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
