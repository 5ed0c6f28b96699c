package gateway

import (
	"math"
	"os"
	"syscall"

	"culvert.dev/tunnel"
)

// descriptors returns the budget for connections: what the process may open,
// without what it has open and what is reserved.
func descriptors() *tunnel.Budget {
	var lim syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &lim); err != nil {
		return &tunnel.Budget{Limit: math.MaxInt64}
	}
	open := int64(16)
	if fds, err := os.ReadDir("/proc/self/fd"); err == nil {
		open = int64(len(fds))
	}
	return &tunnel.Budget{Limit: max(int64(min(lim.Cur, 1<<30))-open-reservedDescriptors, 16)}
}
