package file

import (
	"os"
	"path/filepath"
	"testing"

	"culvert.dev/internal/testnet"
)

func TestMain(m *testing.M) { testnet.GoroutinesEnd(m) }

// openUp lets others into dir, a t.TempDir, whose parent is the owner's alone.
func openUp(t *testing.T, dir string) {
	t.Helper()
	for _, d := range []string{dir, filepath.Dir(dir)} {
		if err := os.Chmod(d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
}
