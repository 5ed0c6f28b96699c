//go:build !linux

package unixsocket

import (
	"context"
	"errors"
	"net"
)

// AbstractSupported reports whether this system has abstract sockets.
const AbstractSupported = false

func listenAbstract(context.Context, string) (*net.UnixListener, error) {
	return nil, errors.New("only Linux has abstract sockets")
}
