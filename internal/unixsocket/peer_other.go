//go:build !linux && !darwin

package unixsocket

import (
	"net"

	"culvert.dev/tunnel"
)

// credentials are not known here.
func credentials(*net.UnixConn) (tunnel.Process, bool) { return tunnel.Process{}, false }
