package command

import "syscall"

// hangup is never sent on Windows: the files are read again when they change.
const hangup = syscall.SIGHUP

// outliveReaders has nothing to do: there is no SIGPIPE.
func outliveReaders() {}
