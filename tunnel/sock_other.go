//go:build !linux || !(amd64 || arm64)

package tunnel

import (
	"context"
	"net"
	"net/netip"
)

// Elsewhere connections are net's own.

func listenSocks(ln net.Listener) net.Listener { return ln }

func dialTCP(ctx context.Context, addr netip.AddrPort) (net.Conn, error) {
	return (&net.Dialer{KeepAlive: -1}).DialContext(ctx, "tcp", addr.String())
}
