package unixsocket

import (
	"net"

	"culvert.dev/tunnel"
	"golang.org/x/sys/unix"
)

// credentials returns the process that connected c, by LOCAL_PEERCRED and LOCAL_PEERPID,
// unix(4): as it was when it called connect(2).
func credentials(c *net.UnixConn) (p tunnel.Process, ok bool) {
	raw, err := c.SyscallConn()
	if err != nil {
		return p, false
	}
	if err := raw.Control(func(fd uintptr) {
		u, err := unix.GetsockoptXucred(int(fd), unix.SOL_LOCAL, unix.LOCAL_PEERCRED)
		if err != nil || u.Ngroups < 1 {
			return
		}
		p, ok = tunnel.Process{UID: u.Uid, GID: u.Groups[0]}, true
		if pid, err := unix.GetsockoptInt(int(fd), unix.SOL_LOCAL, unix.LOCAL_PEERPID); err == nil {
			p.PID = pid
		}
	}); err != nil {
		return tunnel.Process{}, false
	}
	return p, ok
}
