package deploy

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"culvert.dev/internal/gateway"
)

func unit(t *testing.T) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(root, "deploy", "systemd", "culvert.service"))
	must(t, err)
	return string(text)
}

// systemd finds nothing wrong with the unit, and little that it exposes.
func TestSystemdReadsTheUnit(t *testing.T) {
	name := filepath.Join(t.TempDir(), "culvert.service")
	// The program is not installed here.
	text := strings.ReplaceAll(unit(t), "/usr/local/bin/culvert", "/bin/true")
	must(t, os.WriteFile(name, []byte(text), 0o644))
	out, err := exec.CommandContext(t.Context(), "systemd-analyze", "verify", "--man=no", name).CombinedOutput()
	if err != nil || len(out) > 0 {
		t.Errorf("verify: %v\n%s", err, out)
	}
	const most = "20" // tenths, of 100
	out, err = exec.CommandContext(t.Context(), "systemd-analyze", "security", "--offline=true", "--threshold="+most, name).CombinedOutput()
	if err != nil {
		t.Errorf("security: %v\n%s", err, out)
	}
	broken := filepath.Join(t.TempDir(), "broken.service")
	must(t, os.WriteFile(broken, []byte(strings.Replace(text, "LimitNOFILE=1048576", "LimitNOFILE=many", 1)), 0o644))
	if out, err := exec.CommandContext(t.Context(), "systemd-analyze", "verify", "--man=no", broken).CombinedOutput(); err == nil && len(out) == 0 {
		t.Error("systemd-analyze takes any unit")
	}
}

// The unit waits longer for the end than a drain takes.
func TestTheUnitWaitsForTheDrain(t *testing.T) {
	m := regexp.MustCompile(`(?m)^TimeoutStopSec=(\d+)$`).FindStringSubmatch(unit(t))
	if m == nil {
		t.Fatal("no TimeoutStopSec")
	}
	seconds, err := strconv.Atoi(m[1])
	must(t, err)
	if got, want := time.Duration(seconds)*time.Second, gateway.DefaultDrainTimeout+10*time.Second; got < want {
		t.Errorf("it waits for %v, want %v at least", got, want)
	}
}
