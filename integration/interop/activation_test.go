//go:build linux

package interop

import (
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"culvert.dev/internal/testnet"
)

// echoes reports whether a connection to a listener gets back what it sends.
func echoes(network, address string) bool {
	c, err := net.DialTimeout(network, address, patience)
	if err != nil {
		return false
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(2 * patience))
	if _, err := io.WriteString(c, "ping"); err != nil {
		return false
	}
	got := make([]byte, 4)
	_, err = io.ReadFull(c, got)
	return err == nil && string(got) == "ping"
}

// activate has systemd-socket-activate start culvert at the first connection.
func activate(t *testing.T, names string, listen []string, args ...string) *process {
	t.Helper()
	all := []string{"--fdname=" + names}
	for _, address := range listen {
		all = append(all, "--listen="+address)
	}
	for _, v := range environ() {
		all = append(all, "--setenv="+v)
	}
	p := start(t, "systemd-socket-activate", append(append(all, look(t, "culvert")), args...)...)
	p.await(t, "listened", func() bool { return strings.Count(p.output(), "Listening on") == len(listen) })
	return p
}

// A gateway serves the sockets that systemd passes to it, by their names. A reload that
// takes a listener away and brings it back has it serve again.
func TestSocketsOfSystemd(t *testing.T) {
	t.Parallel()
	echo := testnet.Serve(t, func(c net.Conn) { _, _ = io.Copy(c, c) })
	dir, err := os.MkdirTemp("", "culvert")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	port, socket, config := testnet.FreePort(t), filepath.Join(dir, "s"), filepath.Join(dir, "culvert.yaml")
	write := func(listeners string) {
		t.Helper()
		text := fmt.Sprintf("listeners:\n%s\nlimits: {maxTunnels: 100}\nservices:\n  - {name: echo.test, ports: [7], endpoints: [%q]}\n", listeners, echo.Addr())
		if err := os.WriteFile(config+".new", []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(config+".new", config); err != nil {
			t.Fatal(err)
		}
	}
	const web, local = `  - {address: "fd:web", service: echo.test}`, `  - {address: "fd:local", service: echo.test, localUsers: [own]}`
	write(web + "\n" + local)
	p := activate(t, "web:local", []string{port, socket}, "gateway", "--config", config)
	serves := func() bool { return echoes("tcp", port) && echoes("unix", socket) }
	if !serves() { // the first connection starts it
		t.Fatal("no answer")
	}
	for range 3 {
		for _, listeners := range []string{web, local} {
			closed := strings.Count(p.output(), "closed=1")
			write(listeners)
			p.signal(syscall.SIGHUP)
			p.await(t, "closed a listener", func() bool { return strings.Count(p.output(), "closed=1") > closed })
			if network, address := map[bool]string{true: "tcp", false: "unix"}[listeners == web], map[bool]string{true: port, false: socket}[listeners == web]; !echoes(network, address) {
				t.Fatalf("%s does not answer", address)
			}
			write(web + "\n" + local)
			p.signal(syscall.SIGHUP)
			if !serves() { // clients wait in the queue
				t.Fatal("no answer after the listener came back")
			}
		}
	}
	write(strings.Replace(web, "service:", "peerCredentials: true, service:", 1) + "\n" + local)
	p.signal(syscall.SIGHUP)
	p.await(t, "refused the change", func() bool {
		return strings.Contains(p.output(), "peerCredentials is for Unix sockets") && strings.Contains(p.output(), "what was served before is served on")
	})
	if !serves() {
		t.Fatal("no answer after a change that was refused")
	}
	p.signal(syscall.SIGTERM)
	p.awaitEnd(t)
	if _, err := os.Lstat(socket); err != nil {
		t.Errorf("the file of systemd is gone: %v", err)
	}
}

// An agent takes no socket that other hosts may reach, and none that was not passed.
func TestSocketsOfSystemdAreRefused(t *testing.T) {
	t.Parallel()
	const service = "services: [{name: a.test, ports: [7], endpoints: [\"127.0.0.1:7\"]}]\n"
	for name, c := range map[string]struct{ listen, config, want string }{
		"other hosts": {"0.0.0.0", "listeners: [{address: \"fd:web\", protocols: [connect], localUsers: [own]}]\n", "which other hosts may reach, and localUsers is for loopback"},
		"no user":     {"127.0.0.1", "listeners: [{address: \"fd:web\", protocols: [connect], peerCredentials: true}]\n", "peerCredentials is for Unix sockets"},
		"no name":     {"127.0.0.1", "listeners: [{address: \"fd:wep\", protocols: [connect]}]\n", `socket "wep" of systemd: no socket of this name was passed: the names are "web"`},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			config := filepath.Join(t.TempDir(), "culvert.yaml")
			if err := os.WriteFile(config, []byte(c.config+service), 0o600); err != nil {
				t.Fatal(err)
			}
			_, port, _ := net.SplitHostPort(testnet.FreePort(t))
			p := activate(t, "web", []string{net.JoinHostPort(c.listen, port)}, "gateway", "--config", config)
			_ = echoes("tcp", net.JoinHostPort("127.0.0.1", port))
			p.await(t, "refused", func() bool { return strings.Contains(p.output(), c.want) })
		})
	}
	cmd := exec.Command(look(t, "culvert"), "gateway", "--listen", "fd:web", "--route", "a.test=127.0.0.1:7")
	cmd.Env = environ()
	if out, err := cmd.CombinedOutput(); err == nil || !strings.Contains(string(out), "no sockets were passed to this process") {
		t.Errorf("not started by systemd: %v\n%s", err, out)
	}
}

// An agent is asked at a socket of systemd, and so is a service of its forwards.
func TestAgentAtSocketsOfSystemd(t *testing.T) {
	t.Parallel()
	dir, err := os.MkdirTemp("", "culvert")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	token, port, socket := filepath.Join(dir, "token"), testnet.FreePort(t), filepath.Join(dir, "s")
	if err := os.WriteFile(token, []byte("secret"), 0o600); err != nil {
		t.Fatal(err)
	}
	dead := testnet.FreePort(t) // what the agent answers does not depend on the gateway
	p := activate(t, "agent:db", []string{port, socket}, "agent", "--gateway", dead, "--token-file", token, "--proxy", "fd:agent", "--forward", "fd:db=db.test:5432")
	c, err := net.Dial("tcp", port)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(2 * patience))
	fmt.Fprint(c, "CONNECT a.test:443 HTTP/1.1\r\nHost: a.test:443\r\n\r\n")
	got := make([]byte, len("HTTP/1.1 50"))
	if _, err := io.ReadFull(c, got); err != nil || string(got) != "HTTP/1.1 50" {
		t.Errorf("got %q, %v, want an answer that no gateway is reached", got, err)
	}
	local, err := net.Dial("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	defer local.Close()
	p.await(t, "reported the request for the service of the forward", func() bool { return strings.Contains(p.output(), "db.test") })
}
