//go:build !linux

package tunnel

import "syscall"

// setUserTimeout does nothing: keepalive finds a dead peer here.
func setUserTimeout(syscall.RawConn) error { return nil }
