package tunnel

import "syscall"

const (
	tcpKeepIdle     = 4 // seconds
	tcpKeepInterval = 5
	tcpKeepCount    = 6
)

// keepFD is keep for a descriptor.
func keepFD(fd int32) {
	_ = syscall.SetsockoptInt(int(fd), syscall.SOL_SOCKET, syscall.SO_KEEPALIVE, 1)
	_ = syscall.SetsockoptInt(int(fd), syscall.IPPROTO_TCP, tcpKeepIdle, int(keepAlive.Idle.Seconds()))
	_ = syscall.SetsockoptInt(int(fd), syscall.IPPROTO_TCP, tcpKeepInterval, int(keepAlive.Interval.Seconds()))
	_ = syscall.SetsockoptInt(int(fd), syscall.IPPROTO_TCP, tcpKeepCount, keepAlive.Count)
}
