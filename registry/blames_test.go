package registry_test

import (
	"context"
	"fmt"
	"net"
	"os"
	"syscall"
	"testing"

	"culvert.dev/registry"
	"culvert.dev/tunnel"
)

// An endpoint is passed over for what is its own fault, and not for what this
// gateway lacks or a client did.
func TestWhoIsBlamedForADial(t *testing.T) {
	call := func(errno syscall.Errno) error {
		return &net.OpError{Op: "dial", Net: "tcp", Err: os.NewSyscallError("connect", errno)}
	}
	for _, tt := range []struct {
		err  error
		want bool
	}{
		{call(syscall.ECONNREFUSED), true},
		{call(syscall.EHOSTUNREACH), true},
		{&tunnel.Error{Reason: tunnel.DialTimeout, Err: context.DeadlineExceeded}, true},
		{call(syscall.EADDRNOTAVAIL), false},
		{call(syscall.EAGAIN), false},
		{call(syscall.EMFILE), false},
		{call(syscall.ENFILE), false},
		{call(syscall.ENOBUFS), false},
		{context.Canceled, false},
		{&tunnel.Error{Reason: tunnel.Overload, Err: os.ErrInvalid}, false},
		{&tunnel.Error{Reason: tunnel.Prohibited, Err: os.ErrInvalid}, false},
	} {
		for _, err := range []error{tt.err, fmt.Errorf("dial: %w", tt.err)} {
			if got := registry.IsEndpointError(err); got != tt.want {
				t.Errorf("%v: blamed %v, want %v", err, got, tt.want)
			}
		}
	}
}
