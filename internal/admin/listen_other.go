//go:build !unix

package admin

import (
	"context"
	"errors"
	"net"
)

// sockets is false: the mode of a file does not say here who may connect.
const sockets = false

func listenPrivately(context.Context, string) (*net.UnixListener, error) {
	return nil, errors.ErrUnsupported
}
