//go:build !linux

package nat

import (
	"context"
	"errors"
	"net/netip"
)

// DefaultRoute returns the way to the internet by router, which has to be told on this system.
func DefaultRoute(ctx context.Context, router netip.Addr) (Route, error) {
	if !router.IsValid() {
		return Route{}, errors.New("the default route is found on Linux only")
	}
	local, err := localTowards(ctx, router)
	return Route{Router: router, Local: local}, err
}
