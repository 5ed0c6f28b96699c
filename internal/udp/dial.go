package udp

import (
	"context"
	"fmt"
	"net"
	"net/netip"

	"culvert.dev/tunnel"
)

// A Dialer connects UDP sockets to addresses that its Guard lets through. It
// says nothing to them, so it can't tell whether anybody is there.
type Dialer struct {
	Guard *tunnel.Guard // nil refuses what tunnel.Forbidden lists
}

// Check returns nil if ep may be dialed.
func (d *Dialer) Check(ep tunnel.Endpoint) error { return d.Guard.CheckUDP(ep.Addr, ep.Named) }

// DialEndpoint returns a socket connected to ep.Addr, which the caller closes.
func (d *Dialer) DialEndpoint(ctx context.Context, ep tunnel.Endpoint) (net.Conn, error) {
	if err := d.Check(ep); err != nil {
		return nil, err
	}
	var nd net.Dialer
	return nd.DialContext(ctx, "udp", ep.Addr.String()) // a literal: what was checked is what is dialed
}

// DialContext dials addr, which must be an IP address and a port.
func (d *Dialer) DialContext(ctx context.Context, network, addr string) (net.Conn, error) {
	ap, err := netip.ParseAddrPort(addr)
	if err != nil {
		return nil, fmt.Errorf("dial %q: an address and a port are needed: %w", addr, err)
	}
	return d.DialEndpoint(ctx, tunnel.Endpoint{Addr: ap})
}
