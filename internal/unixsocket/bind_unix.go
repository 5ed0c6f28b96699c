//go:build unix

package unixsocket

import (
	"fmt"
	"io/fs"
	"net"
	"os"
	"os/user"
	"strconv"
	"sync"
	"syscall"
)

const supported = true

// backlog is how many connections wait to be accepted. The system lowers it to its own
// limit. Where it is full, connect(2) fails at once for clients that do not block.
const backlog = 4096

var maskMu sync.Mutex // one at a time: the mask is the process's

// bind listens at path. The file has its mode from the beginning, and its group before the
// first connection: a mode that is set after the file is made comes too late for who
// connects at once, and would be that of another file if the path were changed meanwhile.
// A file that another goroutine makes in that moment may lose permission bits.
func bind(path string, mode fs.FileMode, gid int) (*net.UnixListener, error) {
	syscall.ForkLock.RLock()
	fd, err := syscall.Socket(syscall.AF_UNIX, syscall.SOCK_STREAM, 0)
	if err == nil {
		syscall.CloseOnExec(fd)
	}
	syscall.ForkLock.RUnlock()
	if err != nil {
		return nil, os.NewSyscallError("socket", err)
	}
	f := os.NewFile(uintptr(fd), path)
	defer f.Close() // FileListener has a duplicate
	if err := bindWithMode(fd, path, mode); err != nil {
		return nil, os.NewSyscallError("bind", err)
	}
	made, err := os.Lstat(path)
	if err != nil {
		return nil, err
	}
	ln, err := listen(f, fd, path, gid)
	if err != nil {
		if now, statErr := os.Lstat(path); statErr == nil && os.SameFile(now, made) {
			_ = os.Remove(path)
		}
		return nil, err
	}
	return ln, nil
}

func bindWithMode(fd int, path string, mode fs.FileMode) error {
	maskMu.Lock()
	defer maskMu.Unlock()
	old := syscall.Umask(int(0o777 &^ mode.Perm()))
	defer syscall.Umask(old)
	return syscall.Bind(fd, &syscall.SockaddrUnix{Name: path})
}

// listen gives the file of a bound socket its group, and accepts connections from then on.
func listen(f *os.File, fd int, path string, gid int) (*net.UnixListener, error) {
	if gid >= 0 {
		if err := os.Lchown(path, -1, gid); err != nil {
			return nil, fmt.Errorf("cannot give the file to group %d, which only root and its members can: %w", gid, err)
		}
	}
	if err := syscall.Listen(fd, backlog); err != nil {
		return nil, os.NewSyscallError("listen", err)
	}
	ln, err := net.FileListener(f)
	if err != nil {
		return nil, err
	}
	return ln.(*net.UnixListener), nil
}

// lookupGroup returns the number of a group.
func lookupGroup(group string) (int, error) {
	if n, err := strconv.ParseUint(group, 10, 31); err == nil {
		return int(n), nil
	}
	g, err := user.LookupGroup(group)
	if err != nil {
		return 0, fmt.Errorf("there is no group %q", group)
	}
	return strconv.Atoi(g.Gid)
}
