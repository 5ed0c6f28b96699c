//go:build !linux

package poll

import (
	"errors"
	"net"
	"net/netip"
	"syscall"
)

var errCapture = errors.New("capture needs Linux")

// OriginalDestination knows nothing here.
func OriginalDestination(net.Conn) (netip.AddrPort, bool) { return netip.AddrPort{}, false }

// Transparent fails.
func Transparent(string, string, syscall.RawConn) error { return errCapture }

// SetMark returns a function that fails.
func SetMark(uint32) func(network, address string, c syscall.RawConn) error {
	return func(string, string, syscall.RawConn) error { return errCapture }
}
