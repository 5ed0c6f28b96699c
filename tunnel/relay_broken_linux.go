//go:build amd64 || arm64

package tunnel

import (
	"net"
	"syscall"
)

// broken returns, and takes away, the error that c's socket holds for whoever
// uses it next, nil if there is none. c may be TLS over the socket.
func broken(c net.Conn) error {
	for {
		over, ok := c.(interface{ NetConn() net.Conn })
		if !ok {
			break
		}
		c = over.NetConn()
	}
	var errno syscall.Errno
	switch c := c.(type) {
	case *sock:
		_ = c.control(func(fd int32) error { errno = socketError(fd); return nil })
	case syscall.Conn:
		if raw, err := c.SyscallConn(); err == nil {
			_ = raw.Control(func(fd uintptr) { errno = socketError(int32(fd)) })
		}
	}
	if errno == 0 {
		return nil
	}
	return errno
}
