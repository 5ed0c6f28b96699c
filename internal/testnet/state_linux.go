package testnet

import (
	"net"
	"syscall"
)

// wasReset reports whether c, which read as ended and has not been half-closed
// by us, was in truth reset. The kernel tells of a reset once; if a write on
// another goroutine heard it, a read gets an end of stream.
func wasReset(c *net.TCPConn) bool {
	const closed = 7 // TCP_CLOSE; after a FIN it would be CLOSE_WAIT
	rc, err := c.SyscallConn()
	if err != nil {
		return true
	}
	state := byte(closed)
	_ = rc.Control(func(fd uintptr) {
		// The state is the first byte of struct tcp_info.
		if v, err := syscall.GetsockoptInet4Addr(int(fd), syscall.IPPROTO_TCP, syscall.TCP_INFO); err == nil {
			state = v[0]
		}
	})
	return state == closed
}
