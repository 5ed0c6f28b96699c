//go:build unix

package snapshot

import (
	"fmt"
	"os"
	"syscall"
)

// untrusted says who else could have written a file, "" for nobody: what is kept
// opens services and names endpoints.
func untrusted(info os.FileInfo) string {
	if mode := info.Mode().Perm(); mode&0o022 != 0 {
		return "may be written by others (mode " + mode.String() + ")"
	}
	if s, ok := info.Sys().(*syscall.Stat_t); ok && s.Uid != 0 && int(s.Uid) != os.Geteuid() {
		return fmt.Sprintf("belongs to user %d, and not to the gateway's, %d", s.Uid, os.Geteuid())
	}
	return ""
}
