//go:build unix

package hostdns

import (
	"errors"
	"io"
	"log/slog"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"culvert.dev/internal/testnet"
)

const patience = 30 * time.Second

// The test binary is the process that brings the file back, and one that replaces it and waits
// to be killed.
func TestMain(m *testing.M) {
	switch path := os.Getenv("HOSTDNS_PATH"); {
	case path == "":
		testnet.Main(m)
	case len(os.Args) > 1 && os.Args[1] == "restore":
		if err := Restore(path); err != nil {
			os.Exit(1)
		}
	default:
		if _, err := UseResolvConf(path, settings, restorer(path), discard()); err != nil {
			os.Exit(1)
		}
		_, _ = os.Stdout.WriteString("replaced\n")
		_, _ = io.Copy(io.Discard, os.Stdin)
	}
}

var settings = Settings{Server: netip.MustParseAddrPort("127.0.0.54:53")}

func discard() *slog.Logger { return slog.New(slog.DiscardHandler) }

func restorer(path string) *exec.Cmd {
	cmd := exec.Command(os.Args[0], "restore")
	cmd.Env = append(os.Environ(), "HOSTDNS_PATH="+path)
	return cmd
}

const before = "; of the network\nsearch corp.example\nnameserver 192.0.2.1\nnameserver 192.0.2.2\nnameserver 192.0.2.3\noptions ndots:2\n\n"

// file returns a resolv.conf, and a link to one.
func files(t *testing.T) map[string]string {
	t.Helper()
	dir := t.TempDir()
	all := map[string]string{"file": filepath.Join(dir, "resolv.conf"), "link": filepath.Join(dir, "linked")}
	if err := os.WriteFile(all["file"], []byte(before), 0o604); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(all["file"], 0o604); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("resolv.conf", all["link"]); err != nil {
		t.Fatal(err)
	}
	return all
}

func identity(t *testing.T, path string) string {
	t.Helper()
	info, err := os.Lstat(path)
	if err != nil {
		t.Fatal(err)
	}
	target, _ := os.Readlink(path)
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return strings.Join([]string{info.Mode().String(), target, string(text)}, " ")
}

func alone(t *testing.T, path string) {
	t.Helper()
	left, err := filepath.Glob(path + ".*")
	if err != nil || len(left) > 0 {
		t.Errorf("left beside it: %v, %v", left, err)
	}
}

// The file names the server first, and is as before when the agent ends.
func TestResolvConf(t *testing.T) {
	for kind, path := range files(t) {
		was := identity(t, path)
		r, err := UseResolvConf(path, settings, restorer(path), discard())
		if err != nil {
			t.Fatal(err)
		}
		text, err := os.ReadFile(path)
		if err != nil || !strings.Contains(string(text), "\nnameserver 127.0.0.54\nsearch corp.example\nnameserver 192.0.2.1\nnameserver 192.0.2.2\noptions ndots:2\n") {
			t.Errorf("%s: %v:\n%s", kind, err, text)
		}
		if saved, err := os.ReadFile(Saved(path)); err != nil || string(saved) != before {
			t.Errorf("%s: saved: %q, %v", kind, saved, err)
		}
		if _, err := UseResolvConf(path, settings, restorer(path), discard()); err == nil || !strings.Contains(err.Error(), "another agent") {
			t.Errorf("%s: a second agent: %v", kind, err)
		}
		for range 2 {
			if err := r.Close(); err != nil {
				t.Errorf("%s: %v", kind, err)
			}
		}
		if is := identity(t, path); is != was {
			t.Errorf("%s: got %q, want %q", kind, is, was)
		}
		alone(t, path)
	}
}

// It is as before when the agent is killed, and when the process is that brings it back.
func TestResolvConfKilled(t *testing.T) {
	for kind, path := range files(t) {
		was := identity(t, path)
		agent := exec.Command(os.Args[0])
		agent.Env = append(os.Environ(), "HOSTDNS_PATH="+path)
		in, err := agent.StdinPipe()
		if err != nil {
			t.Fatal(err)
		}
		defer in.Close()
		out, err := agent.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := agent.Start(); err != nil {
			t.Fatal(err)
		}
		if _, err := io.ReadFull(out, make([]byte, len("replaced\n"))); err != nil {
			t.Fatal(err)
		}
		if err := agent.Process.Kill(); err != nil {
			t.Fatal(err)
		}
		_ = agent.Wait()
		testnet.Eventually(t, patience, func() bool { _, err := os.Lstat(Saved(path)); return err != nil }, "%s: the file is back", kind)
		if is := identity(t, path); is != was {
			t.Errorf("%s: got %q, want %q", kind, is, was)
		}
		alone(t, path)

		r, err := UseResolvConf(path, settings, restorer(path), discard())
		if err != nil {
			t.Fatal(err)
		}
		if err := r.cmd.Process.Signal(syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
		<-r.ended
		if err := r.Close(); err != nil {
			t.Error(err)
		}
		if is := identity(t, path); is != was {
			t.Errorf("%s without the other process: got %q, want %q", kind, is, was)
		}
	}
}

// What a crash of both has left is mended by the next agent.
func TestResolvConfMended(t *testing.T) {
	for kind, path := range files(t) {
		was := identity(t, path)
		own, err := replace(path, contentFor(path, &settings, []byte(before)))
		if err != nil {
			t.Fatal(err)
		}
		_ = own.Close()
		r, err := UseResolvConf(path, settings, restorer(path), discard())
		if err != nil {
			t.Fatal(err)
		}
		if saved, err := os.ReadFile(Saved(path)); err != nil || string(saved) != before {
			t.Errorf("%s: saved: %q, %v", kind, saved, err)
		}
		if err := r.Close(); err != nil {
			t.Error(err)
		}
		if is := identity(t, path); is != was {
			t.Errorf("%s: got %q, want %q", kind, is, was)
		}
	}
}

// What another program has written meanwhile stays, also after a crash.
func TestResolvConfChanged(t *testing.T) {
	const dhcp = "nameserver 192.0.2.99\n"
	for kind, path := range files(t) {
		r, err := UseResolvConf(path, settings, restorer(path), discard())
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(dhcp), 0o644); err != nil {
			t.Fatal(err)
		}
		if err := r.Close(); err != nil {
			t.Error(err)
		}
		if text, err := os.ReadFile(path); err != nil || string(text) != dhcp {
			t.Errorf("%s: %q, %v", kind, text, err)
		}
		alone(t, path)

		own, err := replace(path, contentFor(path, &settings, []byte(dhcp)))
		if err != nil {
			t.Fatal(err)
		}
		_ = own.Close()
		if err := os.WriteFile(path, []byte(dhcp+"\n"), 0o644); err != nil {
			t.Fatal(err)
		}
		if err := mend(path, discard()); err != nil {
			t.Error(err)
		}
		if text, err := os.ReadFile(path); err != nil || string(text) != dhcp+"\n" {
			t.Errorf("%s after a crash: %q, %v", kind, text, err)
		}
		alone(t, path)
	}
}

// A file that systemd-resolved writes is left to it, and a port has no place in any.
func TestResolvConfRefused(t *testing.T) {
	path := files(t)["file"]
	if err := os.WriteFile(path, []byte("# a stub\nnameserver 127.0.0.53\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	if _, err := UseResolvConf(path, settings, restorer(path), discard()); err == nil || !strings.Contains(err.Error(), "use install: systemd-resolved") {
		t.Errorf("the stub of systemd-resolved: %v", err)
	}
	if _, err := UseResolvConf(path, Settings{Server: netip.MustParseAddrPort("127.0.0.1:5354")}, restorer(path), discard()); err == nil || !strings.Contains(err.Error(), "no ports") {
		t.Errorf("another port: %v", err)
	}
	if _, err := UseResolvConf(path+"x", settings, restorer(path), discard()); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("no file: %v", err)
	}
	if err := os.WriteFile(path, []byte(before), 0o644); err != nil {
		t.Fatal(err)
	}
	was := identity(t, path)
	if _, err := UseResolvConf(path, settings, exec.Command("/no/such/program"), discard()); err == nil || !strings.Contains(err.Error(), "start the process") {
		t.Errorf("no program: %v", err)
	}
	if is := identity(t, path); is != was {
		t.Errorf("got %q, want %q", is, was)
	}
	alone(t, path)
}
