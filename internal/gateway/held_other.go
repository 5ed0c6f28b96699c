//go:build !linux

package gateway

import "net/netip"

// boundAddresses returns nil: it is not known, and sockets at one and at all addresses of a
// port do not exclude each other.
func boundAddresses(bool, uint16) []netip.Addr { return nil }
