//go:build !linux

package hostdns

import (
	"context"
	"errors"
	"log/slog"
)

// A Resolved is what systemd-resolved was told.
type Resolved struct{}

// UseResolved fails.
func UseResolved(context.Context, Settings, *slog.Logger) (*Resolved, error) {
	return nil, errors.New("systemd-resolved needs Linux")
}

// Set fails.
func (*Resolved) Set(context.Context, Settings) error { return nil }

// SetDomains does nothing.
func (*Resolved) SetDomains(context.Context, []string) error { return nil }

// Close does nothing.
func (*Resolved) Close() error { return nil }
