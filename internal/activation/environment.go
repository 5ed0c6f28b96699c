package activation

import (
	"fmt"
	"os"
	"strconv"
	"strings"
)

const (
	firstFD = 3    // SD_LISTEN_FDS_START
	maxFDs  = 4096 // sockets that one process is passed
)

// variables are those by which systemd says what it passes.
var variables = [...]string{"LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES", "LISTEN_PIDFDID"}

// FromEnvironment returns the sockets that were passed to this process, and removes the
// environment variables that say so: programs that the process starts get neither the
// sockets nor the variables. It is called once, before other goroutines use the
// environment.
func FromEnvironment() *Sockets {
	names, err := parse(os.LookupEnv, os.Getpid())
	for _, name := range variables {
		_ = os.Unsetenv(name)
	}
	if err == nil {
		err = closeOnExec(len(names))
	}
	return &Sockets{names: names, err: err, used: map[string]bool{}}
}

// parse returns the names of the descriptors that are passed, the first of which is firstFD.
// There are none where the variables are those of another process.
func parse(lookup func(string) (string, bool), pid int) ([]string, error) {
	if owner, ok := lookup("LISTEN_PID"); !ok || owner != strconv.Itoa(pid) {
		return nil, nil
	}
	count, _ := lookup("LISTEN_FDS")
	n, err := strconv.ParseUint(count, 10, 31)
	if err != nil || n > maxFDs {
		return nil, fmt.Errorf("LISTEN_FDS %.40q is not a number of sockets from 0 to %d", count, maxFDs)
	}
	if n == 0 {
		return nil, nil
	}
	all, ok := lookup("LISTEN_FDNAMES")
	if !ok {
		all = strings.Repeat(":unknown", int(n))[1:] // as sd_listen_fds_with_names has it
	}
	if got := uint64(strings.Count(all, ":") + 1); got != n {
		return nil, fmt.Errorf("LISTEN_FDNAMES has %d names for the %d sockets of LISTEN_FDS", got, n)
	}
	return strings.Split(all, ":"), nil
}
