package udp

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"

	"culvert.dev/tunnel"
)

// A Dialer connects UDP sockets to addresses that its Guard lets through. It
// says nothing to them, so it can't tell whether anybody is there.
type Dialer struct {
	Guard *tunnel.Guard // nil refuses what tunnel.Forbidden lists

	// DontFragment has what is too large for the path be lost, and not be sent in several
	// packets.
	DontFragment bool

	Sockets tunnel.Sockets // opens the sockets
}

// Check returns nil if ep may be dialed.
func (d *Dialer) Check(ep tunnel.Endpoint) error { return d.Guard.CheckUDP(ep.Addr, ep.Named) }

// DialEndpoint returns a tunnel.DatagramConn connected to ep.Addr, which the caller closes.
func (d *Dialer) DialEndpoint(ctx context.Context, ep tunnel.Endpoint) (net.Conn, error) {
	if err := d.Check(ep); err != nil {
		return nil, err
	}
	c, err := d.Sockets.DialContext(ctx, "udp", ep.Addr.String()) // a literal: what was checked is what is dialed
	if err != nil {
		return nil, err
	}
	u := c.(*net.UDPConn) // as the network is "udp"
	if d.DontFragment {
		dontFragment(u)
	}
	s, err := newSocket(u)
	if err != nil {
		_ = u.Close()
		return nil, err
	}
	return s, nil
}

var _ tunnel.DatagramConn = (*socket)(nil)

// ReceiveDatagrams implements tunnel.DatagramConn. A router that cannot reach the peer for
// a moment causes other errors than a host whose port is closed: some of them in turn end
// it.
func (s *socket) ReceiveDatagrams(deliver func(b []byte)) error {
	soft := 0
	for {
		b, n, err := s.receive()
		switch {
		case err == nil:
			soft = 0
			deliver(b[:n])
			buffers.Put(b)
			continue
		case errors.Is(err, net.ErrClosed):
			return net.ErrClosed
		}
		if soft++; isRefused(err) || soft > maxSoftErrors {
			return err
		}
	}
}

// maxSoftErrors is how many errors in turn a socket outlives.
const maxSoftErrors = 16

// DialContext dials addr, which must be an IP address and a port.
func (d *Dialer) DialContext(ctx context.Context, network, addr string) (net.Conn, error) {
	ap, err := netip.ParseAddrPort(addr)
	if err != nil {
		return nil, fmt.Errorf("dial %q: an address and a port are needed: %w", addr, err)
	}
	return d.DialEndpoint(ctx, tunnel.Endpoint{Addr: ap})
}
