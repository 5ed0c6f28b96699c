package command

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strings"
	"syscall"
	"testing"
)

// What keeps a listener from being opened comes with what to do about it.
func TestListenErrorsHaveHints(t *testing.T) {
	at := func(network string, errno syscall.Errno) error {
		addr := net.Addr(net.TCPAddrFromAddrPort(netip.MustParseAddrPort("192.0.2.1:443")))
		if network == "udp" {
			addr = net.UDPAddrFromAddrPort(netip.MustParseAddrPort("192.0.2.1:443"))
		}
		return fmt.Errorf("listen on :443: %w", &net.OpError{Op: "listen", Net: network, Addr: addr, Err: os.NewSyscallError("bind", errno)})
	}
	for _, row := range []struct {
		err  error
		hint string
	}{
		{at("tcp", syscall.EADDRINUSE), "find who has it with: ss -ltnp 'sport = :443'"},
		{at("udp", syscall.EADDRINUSE), "find who has it with: ss -lunp 'sport = :443'"},
		{at("tcp", syscall.EACCES), "ports below 1024 need root or CAP_NET_BIND_SERVICE; sudo setcap cap_net_bind_service=+ep culvert, or use :8443"},
		{at("tcp", syscall.EADDRNOTAVAIL), `this machine does not have the address; write ":443" for all of them`},
		{at("tcp", syscall.EMFILE), ""},
		{errors.New("listen on :443: something else"), ""},
	} {
		got := listenError(row.err)
		hint := ""
		if ce, ok := errors.AsType[*cliError](got); ok {
			hint = ce.hint
		}
		if hint != row.hint || !strings.HasPrefix(got.Error(), row.err.Error()) {
			t.Errorf("%v: got %q with the hint %q, want %q", row.err, got, hint, row.hint)
		}
	}
}
