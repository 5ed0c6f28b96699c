//go:build unix

package interop

import (
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

// OpenSSH and what uses it reach a server by "culvert connect": through an agent at a port or a
// Unix socket, whose connection is carried or handed over, and through a gateway without one.
func TestSSHByConnect(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	keys, port := w.sshd(t, "")
	gw, agent, at := w.agentOf(t, fmt.Sprintf("  - {name: %s, ports: [22], endpoints: [\"127.0.0.1:%s\"]}\n", svc, port), "")
	options := []string{"-F", "/dev/null", "-i", filepath.Join(keys, "client"), "-o", "BatchMode=yes", "-o", "IdentitiesOnly=yes",
		"-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null", "-o", "LogLevel=ERROR",
		"-o", "KexAlgorithms=curve25519-sha256"} // which takes a hundredth of the time of the default's
	direct := fmt.Sprintf("--gateway %s --cert %s --key %s --ca %s", gw.addr, w.cert, w.key, w.ca)
	type way struct{ name, flags, fdpass string }
	ways := []way{{"a port", "--agent " + at[0], "no"}, {"a socket", "--agent " + at[1], "no"}, {"no agent", direct, "no"},
		{"a port, handed over", "--fdpass --agent " + at[0], "yes"}, {"a socket, handed over", "--fdpass --agent " + at[1], "yes"}}
	with := func(way way) []string {
		return append([]string{"-o", "ProxyUseFdpass=" + way.fdpass, "-o", "ProxyCommand=" + culvert + " connect " + way.flags + " %h %p"}, options...)
	}
	const large = 3 << 20
	repository := filepath.Join(w.dir, "repository.git")
	for _, args := range [][]string{{"init", "-q", "--bare", "-b", "main", repository}, {"init", "-q", "-b", "main", filepath.Join(w.dir, "work")},
		{"-C", filepath.Join(w.dir, "work"), "-c", "user.name=a", "-c", "user.email=a@example.test", "commit", "-q", "--allow-empty", "-m", "through the agent"},
		{"-C", filepath.Join(w.dir, "work"), "push", "-q", repository, "main"}} {
		if out, errs, code := command(t, "git", args...); code != 0 {
			t.Fatalf("git %q: exit code %d, %s%s", args, code, out, errs)
		}
	}
	content := w.write(t, "large", strings.Repeat("0123456789abcdef", large/16))
	t.Run("each way", func(t *testing.T) {
		for _, way := range ways {
			t.Run(way.name, func(t *testing.T) {
				t.Parallel()
				ssh := func(args ...string) (string, string, int) { return command(t, "ssh", append(with(way), args...)...) }
				if out, errs, code := ssh(svc, "echo to $0; exit 7"); code != 7 || !strings.HasPrefix(out, "to ") || errs != "" {
					t.Errorf("exit code %d, got %q, %q; want 7", code, out, errs)
				}
				cmd := exec.Command(look(t, "ssh"), append(with(way), svc, "cat | wc -c")...)
				cmd.Env, cmd.Stdin = environ(), strings.NewReader(strings.Repeat("x", large))
				if out, errs, code := runCmd(t, cmd); strings.TrimSpace(out) != strconv.Itoa(large) || code != 0 {
					t.Errorf("standard input: exit code %d, got %q, %s", code, out, errs)
				}
				copied := filepath.Join(t.TempDir(), "copied")
				if out, errs, code := command(t, "scp", append(with(way), content, svc+":"+copied)...); code != 0 {
					t.Errorf("scp: exit code %d, %s%s", code, out, errs)
				}
				if got, err := os.ReadFile(copied); err != nil || len(got) != large {
					t.Errorf("scp copied %d bytes, %v; want %d", len(got), err, large)
				}
				clone := filepath.Join(t.TempDir(), "clone")
				cmd = exec.Command(look(t, "git"), "clone", "-q", "ssh://"+svc+repository, clone)
				var quoted []string
				for _, arg := range with(way) {
					quoted = append(quoted, "'"+arg+"'")
				}
				cmd.Env = append(environ(), "GIT_SSH_COMMAND=ssh "+strings.Join(quoted, " "))
				if out, errs, code := runCmd(t, cmd); code != 0 {
					t.Errorf("git clone: exit code %d, %s%s", code, out, errs)
				}
				if out, _, _ := command(t, "git", "-C", clone, "log", "--format=%s"); out != "through the agent\n" {
					t.Errorf("the clone has %q", out)
				}
				if out, errs, code := ssh("nobody.example.test", "true"); code != 255 || out != "" || !strings.Contains(errs, "no-route") {
					t.Errorf("a name that is not there: exit code %d, got %q, %q; want 255, and no-route", code, out, errs)
				}
			})
		}
	})

	// Of many, none leaves a process while it runs, and none a connection after it.
	const many = 50
	var wg sync.WaitGroup
	shells := make([]*process, many)
	for i := range shells {
		wg.Go(func() {
			cmd := exec.Command(look(t, "ssh"), append(with(ways[3+i%2]), svc, "echo begun; cat")...)
			cmd.Env = environ()
			shells[i] = startCmd(t, cmd)
			testnet.Eventually(t, 5*patience, func() bool { return strings.Contains(shells[i].output(), "begun") || shells[i].over() }, "ssh %d begins", i)
		})
	}
	wg.Wait()
	if t.Failed() {
		return
	}
	if left := running("connect"); len(left) > 0 {
		t.Errorf("%d processes stay beside %d of ssh: %q", len(left), many, left[0])
	}
	for i, p := range shells {
		fmt.Fprintf(p.stdin, "still here %d\n", i)
	}
	for i, p := range shells { // each of which reads and writes its connection
		p.says(t, fmt.Sprintf("still here %d\n", i))
		_ = p.stdin.Close()
		p.awaitEnd(t)
		if p.err != nil {
			t.Errorf("ssh %d: %v", i, p.err)
		}
	}
	for _, g := range []*gateway{agent, gw} {
		testnet.Eventually(t, patience, func() bool {
			var list []any
			return g.ask("/tunnels", &list) == nil && len(list) == 0
		}, "no tunnel is left")
	}
}

// running returns the command lines of processes of culvert with a subcommand.
func running(subcommand string) (lines []string) {
	all, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, name := range all {
		if line, err := os.ReadFile(name); err == nil && strings.HasPrefix(string(line), culvert+"\x00"+subcommand+"\x00") {
			lines = append(lines, strings.ReplaceAll(string(line), "\x00", " "))
		}
	}
	return lines
}
