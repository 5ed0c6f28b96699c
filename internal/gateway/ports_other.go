//go:build !linux

package gateway

import "culvert.dev/registry"

// ephemeral is known on Linux only.
func ephemeral(registry.PortRange) (system registry.PortRange, clash bool) {
	return system, false
}
