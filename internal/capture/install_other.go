//go:build !linux

package capture

import (
	"errors"
	"net/netip"
)

// Errors of other systems, which do not come here.
var (
	ErrNotPermitted = errors.New("the process may not capture")
	ErrOwned        = errors.New("another process captures")
)

// ErrUnsupported is the error of Install where this system cannot capture.
var ErrUnsupported = errors.New("capture needs Linux; use the proxy settings of the program, or a forward")

// Show fails.
func Show() ([]Status, error) { return nil, ErrUnsupported }

// A Capture is one that can't be.
type Capture struct{}

// Install fails.
func Install(Rules) (*Capture, error) { return nil, ErrUnsupported }

// Remove fails.
func Remove(Rules) error { return ErrUnsupported }

// SetVIPs fails.
func (*Capture) SetVIPs([]netip.Addr) error { return ErrUnsupported }

// Update fails.
func (*Capture) Update(Rules) error { return ErrUnsupported }

// Refresh fails.
func (*Capture) Refresh() error { return ErrUnsupported }

// Close does nothing.
func (*Capture) Close() error { return nil }
