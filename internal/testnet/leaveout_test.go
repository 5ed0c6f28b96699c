package testnet

import (
	"os"
	"path/filepath"
	"testing"
)

func TestWhatIsLeftOutIsRecorded(t *testing.T) {
	path := filepath.Join(t.TempDir(), "left-out")
	t.Setenv(leftOutVar, path)
	LeaveOut(t, "no moon: the tests of tides")
	LeaveOut(t, "no sun: the tests of days")
	got, err := os.ReadFile(path)
	if want := "no moon: the tests of tides\nno sun: the tests of days\n"; err != nil || string(got) != want {
		t.Errorf("the file has %q, %v; want %q", got, err, want)
	}
}
