package gateway

import (
	"os"
	"syscall"
	"testing"
)

// Of what the process may open, some is kept back for the gateway itself.
func TestDescriptorsAreKeptBack(t *testing.T) {
	var lim syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &lim); err != nil {
		t.Fatal(err)
	}
	const asked = 500
	set := lim
	set.Cur = min(asked, lim.Max)
	if err := syscall.Setrlimit(syscall.RLIMIT_NOFILE, &set); err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := syscall.Setrlimit(syscall.RLIMIT_NOFILE, &lim); err != nil {
			t.Error(err)
		}
	}()
	open, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	const least = 50 // for the admin port, DNS and reading the configuration again
	if most, got := int64(set.Cur)-int64(len(open))-least, descriptors().Limit; got > most || got < most-100 {
		t.Errorf("of %d descriptors, %d open, clients get %d, want %d at most and not many less", set.Cur, len(open), got, most)
	}
}
