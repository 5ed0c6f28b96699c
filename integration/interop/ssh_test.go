//go:build unix

package interop

import (
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"golang.org/x/sys/cpu"

	"culvert.dev/internal/testnet"
)

// An sshWorld is a gateway with the protocol ssh, where alice may register names below
// edge.example.test, and a service that only she can dial.
type sshWorld struct {
	*world
	*gateway
	host, port string // of the gateway's listener
	hidden     string // the service's address
	hostKey    string // fingerprint
}

func newSSHWorld(t *testing.T) *sshWorld {
	t.Helper()
	w := &sshWorld{world: newWorld(t)}
	for _, name := range []string{"host.key", "alice"} {
		if _, errs, code := command(t, "ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", name, "-f", filepath.Join(w.dir, name)); code != 0 {
			t.Fatalf("ssh-keygen: %s", errs)
		}
	}
	out, errs, code := command(t, "ssh-keygen", "-l", "-f", filepath.Join(w.dir, "host.key.pub"))
	if w.hostKey = regexp.MustCompile(`SHA256:\S+`).FindString(out); code != 0 || w.hostKey == "" {
		t.Fatalf("ssh-keygen -l: %q, %s", out, errs)
	}
	key, err := os.ReadFile(filepath.Join(w.dir, "alice.pub"))
	must(t, err)
	w.write(t, "authorized_keys", string(key))
	w.hidden = w.serveHTTPS(t, http.HandlerFunc(whoami))
	w.gateway = startGateway(t, "--config", w.write(t, "culvert.yaml", fmt.Sprintf(`
listeners:
  - address: 127.0.0.1:%s
    protocols: [sni, socks5, ssh]
    ssh: {hostKeyFile: host.key, authorizedKeysFile: authorized_keys}
admin: 127.0.0.1:%s
policies:
  - name: edge
    verb: register
    action: allow
    targets: {names: [%s, "*.edge.example.test"]}
    rules: [{sources: [{users: [alice]}]}]
services:
  - {name: echo.example.test, ports: [7], endpoints: [%q]}
`, freePort(t), freePort(t), svc, testnet.Echo(t).Addr())))
	w.host, w.port, err = net.SplitHostPort(w.gateway.addr)
	must(t, err)
	return w
}

// ssh returns the arguments of an OpenSSH client of alice.
func (w *sshWorld) ssh(args ...string) []string {
	return append([]string{"-F", "/dev/null", "-i", filepath.Join(w.dir, "alice"), "-p", w.port, "-l", "anybody",
		"-o", "BatchMode=yes", "-o", "IdentitiesOnly=yes", "-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null"}, args...)
}

// reach asks the hidden service by its name, at the gateway, with the client's certificate.
func (w *sshWorld) reach(t *testing.T) (stdout string, code int) {
	t.Helper()
	stdout, _, code = command(t, "curl", "-sS", "--cacert", w.ca, "--cert", w.cert, "--key", w.key,
		"--resolve", svc+":"+w.port+":"+w.host, "https://"+svc+":"+w.port+"/")
	return stdout, code
}

// serves waits until the hidden service is reached by its name.
func (w *sshWorld) serves(t *testing.T, p *process) {
	t.Helper()
	w.registered(t, p, svc)
	if out, code := w.reach(t); code != 0 || !strings.HasPrefix(out, "you are "+clientID) {
		t.Errorf("%s: curl: exit code %d, got %q", p.name, code, out)
	}
}

// registered waits until a session has a name.
func (w *sshWorld) registered(t *testing.T, p *process, name string) {
	t.Helper()
	p.await(t, "registered "+name, func() bool { return w.count(name) == 1 })
}

// count returns how many sessions serve a name.
func (w *sshWorld) count(name string) (n int) {
	var list struct {
		Names []struct {
			Name     string
			Sessions int
		}
	}
	if err := w.ask("/connectors", &list); err != nil {
		return -1
	}
	for _, one := range list.Names {
		if one.Name == name {
			n += one.Sessions
		}
	}
	return n
}

// left waits until no session serves the name any more.
func (w *sshWorld) left(t *testing.T, name string) {
	t.Helper()
	w.await(t, "lost the name "+name, func() bool { return w.count(name) == 0 })
}

// Stock clients of SSH give a service that nobody can dial a name, and callers reach it with
// a certificate of their own, end to end.
func TestSSHServesNames(t *testing.T) {
	t.Parallel()
	w := newSSHWorld(t)
	forward := svc + ":443:" + w.hidden
	convert := func(name string, args ...string) {
		t.Helper()
		if out, errs, code := command(t, name, args...); code != 0 {
			t.Fatalf("%s: exit code %d, %s%s", name, code, out, errs)
		}
	}
	host, port, err := net.SplitHostPort(w.hidden)
	must(t, err)
	alice := filepath.Join(w.dir, "alice")
	convert("puttygen", alice, "-O", "private", "-o", alice+".ppk")
	convert("dropbearconvert", "openssh", "dropbear", alice, alice+".dropbear")
	for _, args := range [][]string{
		append([]string{"ssh"}, w.ssh("-N", "-o", "ExitOnForwardFailure=yes", "-o", "ServerAliveInterval=1", "-R", forward, w.host)...),
		append([]string{"autossh", "-M", "0"}, w.ssh("-N", "-o", "ExitOnForwardFailure=yes", "-R", forward, w.host)...),
		{"dbclient", "-y", "-y", "-N", "-i", alice + ".dropbear", "-p", w.port, "-R", forward, "anybody@" + w.host},
		{"plink", "-batch", "-N", "-i", alice + ".ppk", "-hostkey", w.hostKey, "-P", w.port, "-R", forward, "anybody@" + w.host},
		{"/usr/bin/python3", "testdata/reverse_ssh.py", w.host, w.port, alice, w.hostKey, svc, host, port}, // paramiko
	} {
		t.Run(filepath.Base(args[0]), func(t *testing.T) {
			p := start(t, args[0], args[1:]...)
			w.serves(t, p)
			p.signal(15)
			p.awaitEnd(t)
			w.left(t, svc)
			if out, code := w.reach(t); code == 0 {
				t.Errorf("a name whose connection has ended leads to %q", out)
			}
		})
	}
}

// A name that policy does not give ends ssh with its own code, and the gateway says why to
// people who look.
func TestSSHRefusesNames(t *testing.T) {
	w := newSSHWorld(t)
	for _, bind := range []string{"other.example.test:443", "443", "*:443"} {
		_, errs, code := command(t, "ssh", w.ssh("-N", "-o", "ExitOnForwardFailure=yes", "-R", bind+":"+w.hidden, w.host)...)
		if code != 255 || !strings.Contains(errs, "remote port forwarding failed for listen port 443") {
			t.Errorf("-R %s: exit code %d, %s; want 255", bind, code, errs)
		}
	}
	p := start(t, "ssh", w.ssh("-R", "other.example.test:443:"+w.hidden, "-R", "cam.edge.example.test:0:"+w.hidden, w.host)...)
	p.says(t, "other.example.test:443 is refused: denied: no policy of the gateway lets you register it")
	p.says(t, "Allocated port ")
	port := regexp.MustCompile(`Allocated port (\d+)`).FindStringSubmatch(p.output())[1]
	p.says(t, "cam.edge.example.test:"+port+" is registered")
	out, errs, code := command(t, "curl", "-sS", "--cacert", w.ca, "--cert", w.cert, "--key", w.key, "--connect-to", svc+":443:cam.edge.example.test:"+port,
		"--proxy", "socks5h://"+w.gateway.addr, "https://"+svc+"/")
	if code != 0 || !strings.HasPrefix(out, "you are "+clientID) {
		t.Errorf("-R NAME:0: curl: exit code %d, got %q, %s", code, out, errs)
	}
}

// One connection of OpenSSH adds and cancels names, and carries streams in both directions.
func TestSSHSharesAConnection(t *testing.T) {
	w := newSSHWorld(t)
	control := filepath.Join(t.TempDir(), "c")
	master := start(t, "ssh", w.ssh("-N", "-M", "-S", control, w.host)...)
	mux := func(op string, args ...string) {
		t.Helper()
		args = append([]string{"-F", "/dev/null", "-S", control, "-O", op}, append(args, w.host)...)
		if out, errs, code := command(t, "ssh", args...); code != 0 {
			t.Fatalf("ssh -O %s: exit code %d, %s%s", op, code, out, errs)
		}
	}
	master.await(t, "made its control socket", func() bool {
		_, err := os.Stat(control)
		return err == nil
	})
	mux("forward", "-R", svc+":443:"+w.hidden)
	w.serves(t, master)
	cmd := withInput(t, "hello\n")
	cmd.Path = look(t, "ssh")
	cmd.Args = []string{"ssh", "-F", "/dev/null", "-S", control, "-W", "echo.example.test:7", w.host}
	if out, errs, code := runCmd(t, cmd); out != "hello\n" || code != 0 {
		t.Errorf("-W: exit code %d, got %q, %s", code, out, errs)
	}
	mux("cancel", "-R", svc+":443:"+w.hidden)
	w.left(t, svc)
	mux("forward", "-R", svc+":443:"+w.hidden)
	w.serves(t, master)
	mux("exit")
	master.awaitEnd(t)
	w.left(t, svc)
}

// Behind a gateway as jump host there is an ordinary sshd, whose name is one of -R itself.
func TestSSHJumpsToAName(t *testing.T) {
	w := newSSHWorld(t)
	keys, port := w.sshd(t, "echo through the gateway")
	p := start(t, "ssh", w.ssh("-N", "-R", "shell.edge.example.test:22:127.0.0.1:"+port, w.host)...)
	w.registered(t, p, "shell.edge.example.test")
	config := w.write(t, "ssh_config", fmt.Sprintf(`
Host gw
  HostName %s
  Port %s
  IdentityFile %s
Host shell.edge.example.test
  ProxyJump gw
  IdentityFile %s
Host *
  BatchMode yes
  IdentitiesOnly yes
  StrictHostKeyChecking no
  UserKnownHostsFile /dev/null
`, w.host, w.port, filepath.Join(w.dir, "alice"), filepath.Join(keys, "client")))
	out, errs, code := command(t, "ssh", "-F", config, "shell.edge.example.test", "true")
	if out != "through the gateway\n" || code != 0 {
		t.Errorf("-J: exit code %d, got %q, %s", code, out, errs)
	}
}

// Local ports and SOCKS of OpenSSH lead to services, with a certificate from end to end.
func TestSSHForwardsLocally(t *testing.T) {
	w := newSSHWorld(t)
	served := start(t, "ssh", w.ssh("-N", "-R", svc+":443:"+w.hidden, w.host)...)
	w.registered(t, served, svc)
	local, socks := "127.0.0.1:"+freePort(t), "127.0.0.1:"+freePort(t)
	p := start(t, "ssh", w.ssh("-N", "-L", local+":"+svc+":443", "-D", socks, w.host)...)
	p.listens(t, local)
	p.listens(t, socks)
	for _, by := range [][]string{{"--connect-to", svc + ":443:" + local}, {"--proxy", "socks5h://" + socks}} {
		out, errs, code := command(t, "curl", append([]string{"-sS", "--cacert", w.ca, "--cert", w.cert, "--key", w.key, "https://" + svc + "/"}, by...)...)
		if code != 0 || !strings.HasPrefix(out, "you are "+clientID) {
			t.Errorf("curl %s: exit code %d, got %q, %s", by[0], code, out, errs)
		}
	}
	out, errs, code := command(t, "curl", "-sS", "--proxy", "socks5h://"+socks, "https://nobody.example.test/")
	if code == 0 {
		t.Errorf("a name that is none: got %q, %s", out, errs)
	}
}

// OpenSSH puts AES-GCM last and gets it: its order is not what counts here, but its choice is.
func TestSSHCiphers(t *testing.T) {
	w := newSSHWorld(t)
	for _, tt := range []struct{ name, only, want string }{
		{"those of OpenSSH", "", "aes128-gcm@openssh.com"},
		{"no GCM", "chacha20-poly1305@openssh.com,aes256-ctr", "aes256-ctr"},
		{"ChaCha20 alone", "chacha20-poly1305@openssh.com", "chacha20-poly1305@openssh.com"},
	} {
		args := []string{"-v", "-W", "echo.example.test:7", w.host}
		if tt.only != "" {
			args = append([]string{"-c", tt.only}, args...)
		}
		cmd := withInput(t, "hello\n")
		cmd.Path, cmd.Args = look(t, "ssh"), append([]string{"ssh"}, w.ssh(args...)...)
		out, errs, code := runCmd(t, cmd)
		if code != 0 || out != "hello\n" {
			t.Errorf("%s: exit code %d, got %q, %s", tt.name, code, out, errs)
		}
		if want := "client->server cipher: " + tt.want; fastAES && !strings.Contains(errs, want) {
			t.Errorf("%s: no %q in\n%s", tt.name, want, errs)
		}
	}
}

// fastAES is whether the processor has instructions for AES and GCM, without which ChaCha20
// costs less.
var fastAES = cpu.X86.HasAES && cpu.X86.HasPCLMULQDQ || cpu.ARM64.HasAES && cpu.ARM64.HasPMULL

// ssh-audit finds no algorithm that is known to be weak.
func TestSSHAudit(t *testing.T) {
	w := newSSHWorld(t)
	out, errs, code := command(t, "ssh-audit", "--batch", "--no-colors", "-p", w.port, w.host)
	if !strings.Contains(out, "curve25519-sha256") || !strings.Contains(out, "aes128-gcm@openssh.com") {
		t.Fatalf("ssh-audit: exit code %d, %s%s", code, out, errs)
	}
	for line := range strings.Lines(out) {
		if strings.Contains(line, "[fail]") || strings.Contains(line, "[warn]") && !strings.Contains(line, "unknown algorithm") {
			t.Errorf("ssh-audit: %s", line)
		}
	}
}
