//go:build linux && netns

package networks

import (
	"context"
	"errors"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"culvert.dev/internal/testnet"
	"culvert.dev/internal/testnet/netns"
)

// A user without rights runs programs that know nothing of the agent: their names and
// connections go to it, nothing else leaves, and the network of the host stays as it is.
func TestExec(t *testing.T) {
	t.Parallel()
	host := netns.New(t, "host")
	isp := netns.New(t, "isp")
	netns.Link(t, host, "192.0.2.1/24", isp, "192.0.2.53/24")
	dir := t.TempDir()
	for d := dir; d != os.TempDir(); d = filepath.Dir(d) {
		if err := os.Chmod(d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	program := filepath.Join(dir, "culvert")
	binary, err := os.ReadFile(culvert)
	if err == nil {
		err = os.WriteFile(program, binary, 0o755)
	}
	config := filepath.Join(dir, "agent.yaml")
	if err == nil {
		err = os.WriteFile(config, []byte(`
listeners: [{address: "127.0.0.1:1080", protocols: [connect, socks5], localUsers: [65534]}]
drain: {delay: 0s, timeout: 1s}
services: [{name: web.shop.test, ports: [80], endpoints: ["127.0.0.1:8080"]}]
`), 0o644)
	}
	if err != nil {
		t.Fatal(err)
	}
	ln, err := host.Listen("tcp", "127.0.0.1:8080")
	if err != nil {
		t.Fatal(err)
	}
	web := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { _, _ = w.Write([]byte("the web at " + r.Host)) })}
	ended := make(chan struct{})
	go func() { defer close(ended); _ = web.Serve(ln) }()
	t.Cleanup(func() { _ = web.Close(); <-ended })

	as := func(uid string, args ...string) *exec.Cmd {
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		t.Cleanup(cancel)
		cmd := host.Command(ctx, "setpriv", append([]string{"--reuid", uid, "--regid", uid, "--clear-groups", program, "exec"}, args...)...)
		cmd.Dir = "/"
		return cmd
	}
	user := func(args ...string) *exec.Cmd { return as("65534", args...) }
	run := func(args ...string) (string, int) {
		t.Helper()
		out, err := user(args...).CombinedOutput()
		var exit *exec.ExitError
		if err != nil && !errors.As(err, &exit) {
			t.Fatal(err)
		}
		if err == nil {
			return string(out), 0
		}
		return string(out), exit.ExitCode()
	}
	if out, code := run("--", "true"); code != 125 || !strings.Contains(out, "start \"culvert agent\"") {
		t.Errorf("without an agent: %d: %s", code, out)
	}
	stop := background(t, host.Command(context.Background(), program, "gateway", "--config", config))
	defer stop()
	testnet.Eventually(t, patience, func() bool {
		c, err := host.Dial(t.Context(), "tcp", "127.0.0.1:1080")
		if err == nil {
			_ = c.Close()
		}
		return err == nil
	}, "the agent listens")
	state := func() string {
		out, err := host.Command(t.Context(), "sh", "-c", "ip route; ip rule; nft list ruleset; cat /etc/resolv.conf").CombinedOutput()
		if err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		return string(out)
	}
	if out, err := as("65533", "--", "true").CombinedOutput(); err == nil || !strings.Contains(string(out), "an agent serves the user that it runs as") {
		t.Errorf("another user: %v: %s", err, out)
	}
	before := state()
	const udp = `import socket
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.settimeout(20)
try:
    s.connect(("192.0.2.53", 123)); s.send(b"x"); s.recv(1)
except OSError as e:
    print("refused", e)`
	for _, test := range []struct {
		name string
		args []string
		code int
		want string
	}{
		{"curl", []string{"curl", "-sS", "http://web.shop.test/"}, 0, "the web at web.shop.test"},
		{"curl by IPv6", []string{"curl", "-6", "-sS", "http://web.shop.test/"}, 0, "the web at web.shop.test"},
		{"python", []string{"/usr/bin/python3", "-c", `import urllib.request; print(urllib.request.urlopen("http://web.shop.test/").read())`}, 0, "the web at web.shop.test"},
		{"another name", []string{"sh", "-c", "curl -sS http://other.shop.test/ || exit 9"}, 9, "other.shop.test:80 refused"},
		{"an address", []string{"sh", "-c", "curl -sS http://192.0.2.53/ || exit 9"}, 9, "no-route"},
		{"localhost of the host", []string{"sh", "-c", "curl -sS http://127.0.0.1:8080/ || exit 9"}, 9, "onnect"},
		{"UDP", []string{"/usr/bin/python3", "-c", udp}, 0, "refused"},
		{"another DNS server", []string{"dig", "+short", "@192.0.2.53", "web.shop.test"}, 0, "198.1"},
		{"DNS by TCP", []string{"dig", "+tcp", "+short", "web.shop.test"}, 0, "198.1"},
		{"the exit code", []string{"sh", "-c", "exit 7"}, 7, ""},
		{"a signal", []string{"sh", "-c", "kill -KILL $$"}, 137, ""},
		{"no rights", []string{"grep", "CapEff", "/proc/self/status"}, 0, "0000000000000000"},
		{"the user", []string{"id", "-u"}, 0, "65534"},
		{"no program", []string{"no-such-program"}, 127, "not found"},
		{"a file that is none", []string{"/etc/passwd"}, 127, "permission denied"},
	} {
		t.Run(test.name, func(t *testing.T) {
			out, code := run(append([]string{"--"}, test.args...)...)
			if code != test.code || !strings.Contains(out, test.want) {
				t.Errorf("exit code %d, want %d, with %q in:\n%s", code, test.code, test.want, out)
			}
		})
	}
	t.Run("TERM is passed on", func(t *testing.T) {
		cmd := user("--", "sh", "-c", `trap "echo got it; exit 3" TERM; echo ready; while :; do sleep 0.1; done`)
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		b := make([]byte, 6)
		if _, err := out.Read(b); err != nil || string(b) != "ready\n" {
			t.Fatalf("%q, %v", b, err)
		}
		_ = cmd.Process.Signal(syscall.SIGTERM) // ip netns exec and setpriv have become culvert
		var rest [100]byte
		n, _ := out.Read(rest[:])
		_ = cmd.Wait()
		if string(rest[:n]) != "got it\n" || cmd.ProcessState.ExitCode() != 3 {
			t.Errorf("%q, exit code %d; want 3", rest[:n], cmd.ProcessState.ExitCode())
		}
	})
	if after := state(); after != before {
		t.Errorf("the host's network was\n%s\nand is\n%s", before, after)
	}

	// Where there can be no namespaces.
	off := func(args ...string) (string, error) {
		script := `echo 0 >/proc/sys/user/max_net_namespaces; exec "$0" exec "$@"`
		out, err := host.Command(t.Context(), "unshare", append([]string{"--user", "--map-root-user", "sh", "-c", script, program}, args...)...).CombinedOutput()
		return string(out), err
	}
	if out, err := off("--", "sh", "-c", "echo $HTTPS_PROXY $ALL_PROXY; exec curl -sS http://web.shop.test/"); err != nil || !strings.Contains(out, "no network of its own") ||
		!strings.Contains(out, "http://127.0.0.1:1080 socks5h://127.0.0.1:1080") || !strings.Contains(out, "the web at") {
		t.Errorf("without namespaces: %v: %s", err, out)
	}
	if out, err := off("--strict", "--", "true"); err == nil || !strings.Contains(out, "make namespaces") {
		t.Errorf("without namespaces, with --strict: %v: %s", err, out)
	}
}
