package tunnel

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"os"
	"syscall"
	"testing"
)

// What a dial failed for, and whose lack it was: a gateway without ports or
// descriptors is overloaded, and has nothing to say about the endpoint.
func TestReasonsOfDialErrors(t *testing.T) {
	ep := Endpoint{Addr: netip.MustParseAddrPort("192.0.2.1:443")}
	call := func(errno syscall.Errno) error {
		return &net.OpError{Op: "dial", Net: "tcp", Err: os.NewSyscallError("connect", errno)}
	}
	for _, tt := range []struct {
		err  error
		want Reason
	}{
		{call(syscall.EADDRNOTAVAIL), Overload},
		{call(syscall.EAGAIN), Overload},
		{call(syscall.EMFILE), Overload},
		{call(syscall.ENFILE), Overload},
		{call(syscall.ECONNREFUSED), DialFailed},
		{call(syscall.EHOSTUNREACH), DialFailed},
		{call(syscall.ETIMEDOUT), DialTimeout},
		{context.DeadlineExceeded, DialTimeout},
		{fmt.Errorf("it: %w", &Error{Reason: Prohibited}), Prohibited},
	} {
		if got := ReasonOf(dialError(ep, tt.err)); got != tt.want {
			t.Errorf("%v: %s, want %s", tt.err, got, tt.want)
		}
	}
}
