//go:build unix

package snapshot

import (
	"os"
	"strings"
	"syscall"
	"testing"
	"time"
)

// A stat is a file's owner and mode.
type stat struct {
	mode  os.FileMode
	owner int
}

func (s stat) Name() string       { return "kept" }
func (s stat) Size() int64        { return 0 }
func (s stat) Mode() os.FileMode  { return s.mode }
func (s stat) ModTime() time.Time { return time.Time{} }
func (s stat) IsDir() bool        { return false }
func (s stat) Sys() any           { return &syscall.Stat_t{Uid: uint32(s.owner)} }

func TestUntrusted(t *testing.T) {
	self := os.Geteuid()
	for _, tt := range []struct {
		stat
		want string
	}{
		{stat{0o600, self}, ""},
		{stat{0o644, 0}, ""},
		{stat{0o600, self + 1}, "belongs to user"},
		{stat{0o660, self}, "written by others"},
		{stat{0o602, 0}, "written by others"},
	} {
		if why := untrusted(tt.stat); (why == "") != (tt.want == "") || !strings.Contains(why, tt.want) {
			t.Errorf("mode %o of user %d: %q, want %q", tt.mode, tt.owner, why, tt.want)
		}
	}
}
