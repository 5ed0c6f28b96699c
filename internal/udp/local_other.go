//go:build !linux

package udp

import (
	"net"
	"net/netip"
)

const oobSize = 0

// askLocal is false: a gateway with several addresses listens on each of them.
func askLocal(*net.UDPConn, bool) bool { return false }

func parseLocal([]byte) netip.Addr { return netip.Addr{} }

func appendLocal(b []byte, _ netip.Addr, _ bool) []byte { return b }

func dontFragment(*net.UDPConn) {}
