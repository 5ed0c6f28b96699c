package proxyproto

import (
	"context"
	"net/netip"
	"slices"

	"culvert.dev/tunnel"
)

// A ConnHeader is the header that every connection of a listener begins with.
//
// A sender can claim any client address, so a connection from outside of From
// is reset at once, and no listener takes connections both with and without a
// header.
type ConnHeader struct {
	// From are the ranges of the proxies in front. The limits on one source are
	// not held against them: those on all sources are, and what one client may
	// have is theirs to limit. If it is empty, no address is trusted.
	From []netip.Prefix
}

var _ tunnel.ConnHeader = (*ConnHeader)(nil)

// Trusts implements tunnel.ConnHeader.
func (p *ConnHeader) Trusts(addr netip.Addr) bool {
	addr = addr.Unmap().WithZone("")
	return slices.ContainsFunc(p.From, func(r netip.Prefix) bool { return r.Contains(addr) })
}

// Len implements tunnel.ConnHeader.
func (*ConnHeader) Len(prefix []byte) int {
	_, n, err := Parse(prefix)
	switch err {
	case nil:
		return n
	case ErrMore:
		return 0
	}
	return -1
}

// Read implements tunnel.ConnHeader. The header is in the context it returns: see
// FromContext. A connection that does not begin with one is reset.
func (*ConnHeader) Read(ctx context.Context, c *tunnel.Conn) (context.Context, error) {
	h, err := readHeader(c)
	if err != nil {
		return ctx, err
	}
	h.forget() // nobody decides by them, and they would be kept with the connection
	if h.Source.IsValid() {
		c.SetSource(h.Source)
	}
	return context.WithValue(ctx, headerKey{}, h), nil
}

// readHeader reads the header that c begins with, and discards it. A connection that does
// not begin with one is reset.
func readHeader(c *tunnel.Conn) (*Header, error) {
	for {
		h, n, err := Parse(c.Buffered())
		switch err {
		case nil:
			c.Discard(n)
			return &h, nil
		case ErrMore:
			if err := c.Fill(headV2 + maxV2); err != nil {
				_ = c.Abort()
				return nil, tunnel.PreambleError(c, err)
			}
		default:
			_ = c.Abort()
			return nil, &tunnel.Error{Reason: tunnel.BadPreamble, Err: err}
		}
	}
}

// forget drops what is said of the caller.
func (h *Header) forget() { h.SSL, h.Assertion, h.Caller = nil, "", "" }

type headerKey struct{}

// FromContext returns the header of a connection whose ConnHeader was read, nil
// for any other.
func FromContext(ctx context.Context) *Header {
	h, _ := ctx.Value(headerKey{}).(*Header)
	return h
}
