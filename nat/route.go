package nat

import (
	"context"
	"fmt"
	"net"
	"net/netip"
)

// localTowards returns the address that this host has towards another one. Nothing is sent.
func localTowards(ctx context.Context, to netip.Addr) (netip.Addr, error) {
	c, err := new(net.Dialer).DialContext(ctx, "udp", netip.AddrPortFrom(to, routerPort).String())
	if err != nil {
		return netip.Addr{}, fmt.Errorf("no way to the router %s: %w", to, err)
	}
	defer c.Close()
	return addrOf(c.LocalAddr()), nil
}
