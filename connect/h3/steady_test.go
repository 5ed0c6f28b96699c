package h3

import (
	"net"
	"os"
	"syscall"
	"testing"
)

// Only a way that is gone makes a datagram lost, and only once there is a
// connection: a dial to nowhere fails at once.
func TestWhatCountsAsLoss(t *testing.T) {
	for errno, want := range map[syscall.Errno]bool{
		syscall.ENETUNREACH: true, syscall.EHOSTUNREACH: true, syscall.ENETDOWN: true,
		syscall.EMSGSIZE: false, syscall.EBADF: false, syscall.EINVAL: false,
	} {
		err := &net.OpError{Op: "write", Net: "udp", Err: os.NewSyscallError("sendmsg", errno)}
		s := &steady{}
		if s.lost(err) {
			t.Errorf("%v before there is a connection: lost, want the error", errno)
		}
		s.on.Store(true)
		if got := s.lost(err); got != want {
			t.Errorf("%v: lost %v, want %v", errno, got, want)
		}
	}
}
