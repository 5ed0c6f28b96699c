package tunnel

import "syscall"

const tcpUserTimeout = 18 // TCP_USER_TIMEOUT, RFC 5482; milliseconds

// setUserTimeout bounds how long sent bytes may stay unacknowledged.
func setUserTimeout(c syscall.RawConn) error {
	var err error
	if cerr := c.Control(func(fd uintptr) {
		err = syscall.SetsockoptInt(int(fd), syscall.IPPROTO_TCP, tcpUserTimeout, int(userTimeout.Milliseconds()))
	}); cerr != nil {
		return cerr
	}
	return err
}
