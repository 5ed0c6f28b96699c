//go:build unix

package command

import (
	"errors"
	"os"
	"syscall"
)

// canPass returns an error unless a socket can be sent over out.
func canPass(out *os.File) error {
	raw, err := out.SyscallConn()
	if err != nil {
		return err
	}
	found := false
	err = raw.Control(func(fd uintptr) {
		name, err := syscall.Getsockname(int(fd))
		_, unix := name.(*syscall.SockaddrUnix)
		found = unix && err == nil
	})
	if err == nil && !found {
		err = errors.New("standard output is no Unix socket, as ssh with ProxyUseFdpass=yes makes it")
	}
	return err
}

// passSocket sends the socket of c over out by SCM_RIGHTS, with one byte, as ssh with
// ProxyUseFdpass=yes reads it. The caller closes c all the same.
//
// The sockets of Go do not block, which is a property of the open file and goes along with it;
// the program that gets this one expects what it would have opened itself.
func passSocket(out *os.File, c syscall.Conn) error {
	to, err := out.SyscallConn()
	if err != nil {
		return err
	}
	from, err := c.SyscallConn()
	if err != nil {
		return err
	}
	var sent error
	send := func(fd uintptr) {
		if sent = os.NewSyscallError("fcntl", syscall.SetNonblock(int(fd), false)); sent != nil {
			return
		}
		if err := to.Control(func(over uintptr) {
			sent = os.NewSyscallError("sendmsg", syscall.Sendmsg(int(over), []byte{0}, syscall.UnixRights(int(fd)), nil, 0))
		}); err != nil {
			sent = err
		}
	}
	if err := from.Control(send); err != nil {
		return err
	}
	return sent
}
