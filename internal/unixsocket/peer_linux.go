package unixsocket

import (
	"bytes"
	"context"
	"errors"
	"net"
	"os"
	"strconv"
	"sync"
	"syscall"

	"culvert.dev/tunnel"
)

// AbstractSupported reports whether this system has abstract sockets.
const AbstractSupported = true

func listenAbstract(ctx context.Context, name string) (*net.UnixListener, error) {
	ln, err := new(net.ListenConfig).Listen(ctx, "unix", name)
	if errors.Is(err, syscall.EADDRINUSE) {
		return nil, errServed
	}
	if err != nil {
		return nil, err
	}
	return ln.(*net.UnixListener), nil
}

// credentials returns the process that connected c, by SO_PEERCRED, unix(7): as it was
// when it called connect(2).
func credentials(c *net.UnixConn) (p tunnel.Process, ok bool) {
	raw, err := c.SyscallConn()
	if err != nil {
		return p, false
	}
	var u *syscall.Ucred
	if err := raw.Control(func(fd uintptr) {
		u, err = syscall.GetsockoptUcred(int(fd), syscall.SOL_SOCKET, syscall.SO_PEERCRED)
	}); err != nil || u == nil {
		return p, false
	}
	if IsUnmapped(u.Uid) || IsUnmapped(u.Gid) {
		return p, false
	}
	return tunnel.Process{UID: u.Uid, GID: u.Gid, PID: int(u.Pid)}, true
}

// IsUnmapped reports whether id, of a user or a group, stands for all that the user
// namespace of this process has no number for.
func IsUnmapped(id uint32) bool {
	unmapped, is := overflowID()
	return is && id == unmapped
}

// overflowID returns the number that stands for all users, and all groups, that the user
// namespace of this process has no number for. It is false where each has one: the number
// is then a user as any other, often "nobody".
var overflowID = sync.OnceValues(func() (uint32, bool) {
	users, err := os.ReadFile("/proc/self/uid_map")
	groups, groupsErr := os.ReadFile("/proc/self/gid_map")
	if err != nil || groupsErr != nil || mapsAll(users) && mapsAll(groups) {
		return 0, false
	}
	const standard = 65534 // which /proc/sys/kernel/overflowuid and overflowgid may change
	if b, err := os.ReadFile("/proc/sys/kernel/overflowuid"); err == nil {
		if n, err := strconv.ParseUint(string(bytes.TrimSpace(b)), 10, 32); err == nil {
			return uint32(n), true
		}
	}
	return standard, true
})

// mapsAll reports whether a map of user_namespaces(7) has all users or groups: lines of a
// number inside, one outside and a count.
func mapsAll(m []byte) bool {
	fields := bytes.Fields(m)
	return len(fields) == 3 && string(fields[0]) == "0" && string(fields[1]) == "0" && string(fields[2]) == "4294967295"
}
