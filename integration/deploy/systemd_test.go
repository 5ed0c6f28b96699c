package deploy

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"culvert.dev/internal/gateway"
)

// units are that of a gateway, of a connector, and of the agent of a host.
var units = []string{"culvert.service", "culvert-connector.service", "culvert-agent-host.service"}

func unit(t *testing.T, name string) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(root, "deploy", "systemd", name))
	must(t, err)
	return string(text)
}

// systemd finds nothing wrong with the units, and little that they expose.
func TestSystemdReadsTheUnits(t *testing.T) {
	for _, name := range units {
		t.Run(name, func(t *testing.T) { readsUnit(t, name) })
	}
}

func readsUnit(t *testing.T, file string) {
	name := filepath.Join(t.TempDir(), file)
	// The program is not installed here.
	text := strings.ReplaceAll(unit(t, file), "/usr/local/bin/culvert", "/bin/true")
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
	must(t, os.WriteFile(broken, []byte(strings.Replace(text, "LimitNOFILE=", "LimitNOFILE=many", 1)), 0o644))
	if out, err := exec.CommandContext(t.Context(), "systemd-analyze", "verify", "--man=no", broken).CombinedOutput(); err == nil && len(out) == 0 {
		t.Error("systemd-analyze takes any unit")
	}
}

// agentUnit is that of the agent of a user, which the user's own systemd runs.
const agentUnit = "culvert-agent.service"

// The systemd of a user finds nothing wrong with the unit of the agent.
func TestSystemdOfAUserReadsTheUnitOfTheAgent(t *testing.T) {
	verify := func(text string) (string, error) {
		name := filepath.Join(t.TempDir(), agentUnit)
		must(t, os.WriteFile(name, []byte(text), 0o644))
		cmd := exec.CommandContext(t.Context(), "systemd-analyze", "verify", "--user", "--man=no", name)
		cmd.Env = append(os.Environ(), "XDG_RUNTIME_DIR="+t.TempDir(), "HOME="+t.TempDir())
		out, err := cmd.CombinedOutput()
		return string(out), err
	}
	text := strings.ReplaceAll(unit(t, agentUnit), "/usr/local/bin/culvert", "/bin/true") // it is not installed here
	if out, err := verify(text); err != nil || out != "" {
		t.Errorf("verify: %v\n%s", err, out)
	}
	if out, err := verify(strings.Replace(text, "LimitNOFILE=", "LimitNOFILE=many", 1)); err == nil && out == "" {
		t.Error("systemd-analyze takes any unit")
	}
}

// The systemd of a user finds nothing wrong with the agent that it starts by a socket.
func TestSystemdOfAUserReadsTheSocketOfTheAgent(t *testing.T) {
	const socket, dropIn = "culvert-agent.socket", "culvert-agent.service.d/socket.conf"
	verify := func(change func(name, text string) string) (string, error) {
		dir := t.TempDir()
		must(t, os.Mkdir(filepath.Join(dir, filepath.Dir(dropIn)), 0o755))
		for _, name := range []string{agentUnit, socket, dropIn} {
			text := strings.ReplaceAll(unit(t, name), "/usr/local/bin/culvert", "/bin/true") // it is not installed here
			must(t, os.WriteFile(filepath.Join(dir, name), []byte(change(name, text)), 0o644))
		}
		cmd := exec.CommandContext(t.Context(), "systemd-analyze", "verify", "--user", "--man=no", filepath.Join(dir, socket), filepath.Join(dir, agentUnit))
		cmd.Env = append(os.Environ(), "XDG_RUNTIME_DIR="+t.TempDir(), "HOME="+t.TempDir())
		out, err := cmd.CombinedOutput()
		return string(out), err
	}
	if out, err := verify(func(_, text string) string { return text }); err != nil || out != "" {
		t.Errorf("verify: %v\n%s", err, out)
	}
	for broken, key := range map[string]string{socket: "ListenStream=", dropIn: "ExecStart=/"} {
		out, err := verify(func(name, text string) string {
			if name == broken {
				return strings.Replace(text, key, "No"+key, 1)
			}
			return text
		})
		if err == nil && out == "" {
			t.Errorf("systemd-analyze takes any %s", broken)
		}
	}
}

// The units wait longer for the end than a drain takes.
func TestTheUnitsWaitForTheDrain(t *testing.T) {
	for _, name := range append(slices.Clone(units), agentUnit) {
		m := regexp.MustCompile(`(?m)^TimeoutStopSec=(\d+)$`).FindStringSubmatch(unit(t, name))
		if m == nil {
			t.Fatalf("%s has no TimeoutStopSec", name)
		}
		seconds, err := strconv.Atoi(m[1])
		must(t, err)
		if got, want := time.Duration(seconds)*time.Second, gateway.DefaultDrainTimeout+10*time.Second; got < want {
			t.Errorf("%s waits for %v, want %v at least", name, got, want)
		}
	}
}
