//go:build unix

package command

import "syscall"

// hangup is the signal that asks for the files to be read again.
const hangup = syscall.SIGHUP
