package admin

import (
	"context"
	"fmt"
	"net"

	"culvert.dev/internal/unixsocket"
)

// SocketPath returns the path of an admin address of the form unix:PATH.
func SocketPath(addr string) (path string, ok bool) { return unixsocket.Path(addr) }

// Listen opens the admin port at addr, HOST:PORT or unix:PATH, which CheckAddr
// has found good. A socket's file is for its owner only.
func Listen(ctx context.Context, addr string) (net.Listener, error) {
	if path, ok := SocketPath(addr); ok {
		ln, err := unixsocket.Listen(ctx, unixsocket.Config{Path: path})
		if err != nil {
			return nil, fmt.Errorf("admin port: %w", err)
		}
		return ln, nil
	}
	ln, err := new(net.ListenConfig).Listen(ctx, "tcp", addr)
	if err != nil {
		return nil, fmt.Errorf("admin port: %w", err)
	}
	return ln, nil
}
