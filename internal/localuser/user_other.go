//go:build !linux

package localuser

import (
	"errors"
	"net/netip"
)

// Supported reports whether User works on this system.
const Supported = false

// User returns errors.ErrUnsupported.
func User(_, _ netip.AddrPort) (uid uint32, err error) { return 0, errors.ErrUnsupported }
