//go:build unix

package command

import (
	"os/signal"
	"syscall"
)

// hangup is the signal that asks for the files to be read again.
const hangup = syscall.SIGHUP

// outliveReaders makes a write to a standard error that nobody reads any more
// an error like any other. By default it ends a Go program.
func outliveReaders() { signal.Ignore(syscall.SIGPIPE) }
