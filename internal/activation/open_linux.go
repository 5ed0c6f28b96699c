package activation

import (
	"errors"
	"fmt"
	"net"
	"os"
	"syscall"
)

// closeOnExec keeps n descriptors from programs that this process starts.
func closeOnExec(n int) error {
	for fd := firstFD; fd < firstFD+n; fd++ {
		if _, _, errno := syscall.Syscall(syscall.SYS_FCNTL, uintptr(fd), syscall.F_SETFD, syscall.FD_CLOEXEC); errno != 0 {
			return fmt.Errorf("descriptor %d: %w", fd, errno)
		}
	}
	return nil
}

// open returns a listener at a duplicate of a descriptor.
func open(fd int, name string) (net.Listener, error) {
	kind, err := syscall.GetsockoptInt(fd, syscall.SOL_SOCKET, syscall.SO_TYPE)
	if err != nil {
		return nil, fmt.Errorf("it is not a socket: %w", err)
	}
	if kind != syscall.SOCK_STREAM {
		return nil, errors.New("it is not a stream socket: write ListenStream in the socket unit")
	}
	if accepts, err := syscall.GetsockoptInt(fd, syscall.SOL_SOCKET, syscall.SO_ACCEPTCONN); err != nil || accepts == 0 {
		return nil, errors.New("it accepts no connections: leave Accept=yes out of the socket unit")
	}
	dup, _, errno := syscall.Syscall(syscall.SYS_FCNTL, uintptr(fd), syscall.F_DUPFD_CLOEXEC, 0)
	if errno != 0 {
		return nil, os.NewSyscallError("fcntl", errno)
	}
	f := os.NewFile(dup, name)
	defer f.Close() // FileListener has a duplicate
	ln, err := net.FileListener(f)
	if err != nil {
		return nil, err
	}
	switch ln.(type) {
	case *net.TCPListener, *net.UnixListener:
		return ln, nil
	}
	_ = ln.Close()
	return nil, errors.New("it is a socket of neither TCP nor Unix")
}
