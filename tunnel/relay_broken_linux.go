//go:build amd64 || arm64

package tunnel

import (
	"net"
	"syscall"
)

// broken returns, and takes away, the error that c's socket holds for whoever
// uses it next, nil if there is none. c may be TLS over the socket.
func broken(c net.Conn) error {
	var errno syscall.Errno
	_ = control(below(c), func(fd int32) error { errno = socketError(fd); return nil })
	if errno == 0 {
		return nil
	}
	return errno
}
