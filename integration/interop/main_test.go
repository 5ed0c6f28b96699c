//go:build unix

package interop

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"go.uber.org/goleak"

	"culvert.dev/internal/testnet"
)

// culvert is the path of the binary under test, and buildDir where programs are
// built.
var culvert, buildDir string

func TestMain(m *testing.M) {
	testnet.Parallel(4)
	os.Exit(run(m))
}

func run(m *testing.M) int {
	dir, err := os.MkdirTemp("", "culvert-interop-")
	if err != nil {
		fmt.Fprintln(os.Stderr, "interop:", err)
		return 1
	}
	defer os.RemoveAll(dir)
	buildDir = dir
	if culvert, err = build(dir); err != nil {
		fmt.Fprintln(os.Stderr, "interop:", err)
		return 1
	}
	code := m.Run()
	if code == 0 {
		// A library of step-ca's begins one as it is loaded.
		if err := goleak.Find(goleak.IgnoreAnyFunction("github.com/golang/glog.(*fileSink).flushDaemon")); err != nil {
			fmt.Fprintln(os.Stderr, "interop: goroutines left after the tests:", err)
			code = 1
		}
	}
	return code
}

// build builds culvert into dir, with the race detector if the tests have it:
// what it finds in the gateway fails the test that started the gateway.
func build(dir string) (string, error) {
	if path := os.Getenv("CULVERT"); path != "" {
		return filepath.Abs(path)
	}
	path := filepath.Join(dir, "culvert")
	args := []string{"build", "-tags", buildTags, "-ldflags", "-s -w", "-o", path}
	env := append(os.Environ(), "CGO_ENABLED=0") // as the image, and as what else the suites build
	if raceEnabled {
		args, env = append(args, "-race"), nil
	}
	cmd := exec.Command("go", append(args, "./cmd/culvert")...)
	cmd.Dir, cmd.Env = filepath.Join("..", ".."), env
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("build culvert: %w\n%s", err, out)
	}
	return path, nil
}

// patience is how long anything may take that is expected to happen.
const patience = time.Minute
