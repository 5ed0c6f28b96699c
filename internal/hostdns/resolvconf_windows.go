package hostdns

import (
	"errors"
	"log/slog"
	"os/exec"
)

var errWindows = errors.New("this system has no resolv.conf")

// Saved returns path: nothing is in its place.
func Saved(path string) string { return path }

// A ResolvConf is a resolv.conf with the server of this process in front of the others.
type ResolvConf struct{}

// UseResolvConf fails.
func UseResolvConf(string, Settings, *exec.Cmd, *slog.Logger) (*ResolvConf, error) {
	return nil, errWindows
}

// Close does nothing.
func (*ResolvConf) Close() error { return nil }

// Restore fails.
func Restore(string) error { return errWindows }
