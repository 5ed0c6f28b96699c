//go:build linux

package reliability

import (
	"bufio"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"

	"culvert.dev/internal/testnet"
)

// A cgroup limits what its processes take, by either version's files.
type cgroup struct {
	t   *testing.T
	dir string
	v2  bool
}

// A setting is a file of a cgroup, and what is written there.
type setting struct{ file, value string }

// newCgroup makes one below that of the test with a limit on memory, or returns nil
// where it may not.
func newCgroup(t *testing.T, limit int64) *cgroup {
	t.Helper()
	bytes := strconv.FormatInt(limit, 10)
	return cgroupOf(t, "memory", setting{"memory.limit_in_bytes", bytes}, setting{"memory.max", bytes})
}

// cgroupOf makes one of a controller, with a setting for each version.
func cgroupOf(t *testing.T, controller string, v1, v2 setting) *cgroup {
	t.Helper()
	text, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(text)) {
		f := strings.SplitN(strings.TrimSpace(line), ":", 3)
		for _, try := range []cgroup{
			{t: t, dir: filepath.Join("/sys/fs/cgroup", controller, f[2])},
			{t: t, dir: filepath.Join("/sys/fs/cgroup", f[2]), v2: true},
		} {
			if try.v2 != (f[0] == "0") || !try.v2 && f[1] != controller {
				continue
			}
			g, set := try, v1
			if g.v2 {
				set = v2
			}
			g.dir = filepath.Join(g.dir, fmt.Sprintf("culvert-%s-%d", controller, os.Getpid()))
			if os.Mkdir(g.dir, 0o755) != nil {
				continue
			}
			if os.WriteFile(g.file(set.file), []byte(set.value), 0) != nil {
				_ = os.Remove(g.dir)
				continue
			}
			t.Cleanup(func() {
				testnet.Eventually(t, patience, func() bool { return os.Remove(g.dir) == nil }, "the cgroup is empty")
			})
			return &g
		}
	}
	return nil
}

// wrap is a command that runs a program in the group.
func (g *cgroup) wrap() []string {
	return []string{"sh", "-c", `echo $$ > "` + g.file("cgroup.procs") + `" && exec "$0" "$@"`}
}

func (g *cgroup) file(name string) string { return filepath.Join(g.dir, name) }

// ballast starts a process of the group that takes as many MiB as it is told
// to, until it is dropped.
func (g *cgroup) ballast() (eat func(mib int), drop func()) {
	g.t.Helper()
	self, err := os.Executable()
	if err != nil {
		g.t.Fatal(err)
	}
	cmd := exec.Command(self)
	cmd.Env = append(os.Environ(), roleVar+"=ballast")
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		g.t.Fatal(err)
	}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		g.t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		g.t.Fatal(err)
	}
	drop = sync.OnceFunc(func() {
		_ = in.Close()
		_ = cmd.Wait()
	})
	g.t.Cleanup(drop)
	if err := os.WriteFile(g.file("cgroup.procs"), []byte(strconv.Itoa(cmd.Process.Pid)), 0); err != nil {
		g.t.Fatal(err)
	}
	out := bufio.NewReader(stdout)
	return func(mib int) {
		g.t.Helper()
		if _, err := fmt.Fprintln(in, mib); err != nil {
			g.t.Fatalf("ballast: %v", err)
		}
		if _, err := out.ReadString('\n'); err != nil {
			g.t.Fatalf("ballast: %v: was it killed?", err)
		}
	}, drop
}

// number reads a file that version 1 calls memory.v1 and version 2 memory.v2.
func (g *cgroup) number(v1, v2 string) (n int64) {
	name := v1
	if g.v2 {
		name = v2
	}
	text, _ := os.ReadFile(g.file("memory." + name))
	n, _ = strconv.ParseInt(strings.TrimSpace(string(text)), 10, 64)
	return n
}

// kills is how many processes of the group were killed for want of memory.
func (g *cgroup) kills() (n int64) {
	g.t.Helper()
	name := "memory.oom_control"
	if g.v2 {
		name = "memory.events"
	}
	text, err := os.ReadFile(g.file(name))
	if err != nil {
		g.t.Fatal(err)
	}
	_, after, _ := strings.Cut("\n"+string(text), "\noom_kill ")
	_, _ = fmt.Sscan(after, &n)
	return n
}
