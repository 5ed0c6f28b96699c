package poll

import (
	"context"
	"net"
	"net/netip"
)

// dialNet is Dial by package net.
func dialNet(ctx context.Context, addr netip.AddrPort, mark uint32) (net.Conn, error) {
	d := net.Dialer{KeepAlive: -1}
	if mark != 0 {
		d.Control = SetMark(mark)
	}
	return d.DialContext(ctx, "tcp", addr.String())
}
