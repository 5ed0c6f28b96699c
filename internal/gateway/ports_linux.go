package gateway

import (
	"fmt"
	"os"
	"strings"

	"culvert.dev/registry"
)

// ephemeral returns the ports that the kernel gives to outgoing connections by
// itself and that r is in the way of. It is false where there are none.
func ephemeral(r registry.PortRange) (system registry.PortRange, clash bool) {
	text, err := os.ReadFile("/proc/sys/net/ipv4/ip_local_port_range")
	if err != nil {
		return system, false
	}
	if _, err := fmt.Sscan(string(text), &system.First, &system.Last); err != nil {
		return system, false
	}
	if r.Last < system.First || system.Last < r.First {
		return system, false
	}
	// Reserved ports are not assigned.
	reserved, err := os.ReadFile("/proc/sys/net/ipv4/ip_local_reserved_ports")
	if err != nil {
		return system, true
	}
	for part := range strings.SplitSeq(strings.TrimSpace(string(reserved)), ",") {
		if whole, err := registry.ParsePortRange(part); err == nil && whole.Contains(r.First) && whole.Contains(r.Last) {
			return system, false
		}
	}
	return system, true
}
