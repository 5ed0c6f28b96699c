package tunnel

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"

	"culvert.dev/tunnel/internal/poll"
)

// OriginalDestination returns the address that the client of c connected to, where a rule of
// this host has led the connection here instead: a redirect, or TPROXY to a listener of
// ListenTransparent. It is false for a connection that was made to this address. It works on
// Linux; elsewhere it is false.
func OriginalDestination(c net.Conn) (netip.AddrPort, bool) {
	if conn, ok := c.(*Conn); ok {
		c = conn.Conn
	}
	return poll.OriginalDestination(c)
}

// ListenTransparent is Listen for a socket to which TPROXY hands connections. It needs
// CAP_NET_ADMIN, and Linux.
func ListenTransparent(ctx context.Context, addr string) (net.Listener, error) {
	lc := net.ListenConfig{KeepAlive: -1, Control: poll.Transparent}
	ln, err := lc.Listen(ctx, "tcp", addr)
	if err != nil {
		return nil, fmt.Errorf("listen on %s for captured connections: %w", addr, err)
	}
	return poll.NewListener(ln), nil
}

// FillNow appends what has arrived, up to limit bytes in all. It does not wait. Where it
// cannot know without waiting, it appends nothing.
func (c *Conn) FillNow(limit int) error {
	s, ok := c.Conn.(interface {
		ReadNow(p []byte) (int, error)
	})
	if !ok || len(c.buf) >= limit {
		return nil
	}
	p := make([]byte, min(4096, limit-len(c.buf)))
	n, err := s.ReadNow(p)
	if n > 0 {
		c.buf = append(c.buf, p[:n]...)
		c.markBegun()
	}
	if errors.Is(err, io.EOF) {
		return nil // the tunnel finds it, too
	}
	return err
}
