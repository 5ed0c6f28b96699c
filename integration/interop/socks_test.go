//go:build unix

package interop

import (
	"fmt"
	"net"
	"path/filepath"
	"strings"
	"testing"

	"culvert.dev/internal/testnet"
)

// startSocks starts a gateway of two ports: one that detects TLS, CONNECT and
// SOCKS, and one for SOCKS with a password. services is YAML.
func startSocks(t *testing.T, w *world, services string) *gateway {
	t.Helper()
	return startGateway(t, "--config", w.write(t, "socks.yaml", fmt.Sprintf(`listeners:
  - address: 127.0.0.1:%s
    protocols: [sni, connect, socks5]
  - address: 127.0.0.1:%s
    protocols: [socks5]
    auth: {users: {alice: "%s"}}
admin: 127.0.0.1:%s
services:
%s`, freePort(t), freePort(t), hash(t, "secret"), freePort(t), services)))
}

// hash makes alice's bcrypt hash with the program itself.
func hash(t *testing.T, password string) string {
	t.Helper()
	out, errs, code := runCmd(t, withInput(t, password+"\n", "config", "password", "alice"))
	_, h, ok := strings.Cut(strings.TrimSpace(out), ":")
	if code != 0 || !ok {
		t.Fatalf("culvert config password: exit code %d, %q, %s", code, out, errs)
	}
	return h
}

func service(name, endpoint string, more ...string) string {
	s := fmt.Sprintf("  - name: %s\n    endpoints: [%q]\n", name, endpoint)
	for _, m := range more {
		s += "    " + m + "\n"
	}
	return s
}

// One port takes curl by SNI, by CONNECT and by SOCKS, all to the same mTLS.
func TestCurlBySOCKS(t *testing.T) {
	w := newWorld(t)
	g := startSocks(t, w, service(svc, w.nginx(t)))
	url := "https://" + svc + "/"
	mtls := []string{"-sS", "--cacert", w.ca, "--cert", w.cert, "--key", w.key}
	for _, how := range []struct {
		name string
		args []string
		ok   bool
		says string // of curl, where it is refused
	}{
		{"socks5-hostname", []string{"--socks5-hostname", g.addr, url}, true, ""},
		{"socks5h with a password nobody asks for", []string{"-x", "socks5h://alice:secret@" + g.addr, url}, true, ""},
		{"socks5h with a password", []string{"-x", "socks5h://alice:secret@" + g.addrs[1], url}, true, ""},
		{"connect on the same port", []string{"-x", "http://" + g.addr, url}, true, ""},
		{"no password", []string{"-x", "socks5h://" + g.addrs[1], url}, false, "No authentication method was acceptable"},
		{"a wrong password", []string{"-x", "socks5h://alice:guess@" + g.addrs[1], url}, false, "User was rejected by the SOCKS5 server"},
		{"a name there is not", []string{"--socks5-hostname", g.addr, "https://nobody.example.test/"}, false, "(2)"},
		{"resolved by curl itself", []string{"--resolve", svc + ":443:192.0.2.7", "--socks5", g.addr, url}, false, "(2)"},
		{"an address", []string{"--socks5-hostname", g.addr, "https://192.0.2.7/"}, false, "(2)"},
		{"an IPv6 address", []string{"--socks5-hostname", g.addr, "https://[2001:db8::7]/"}, false, "(2)"},
		{"loopback", []string{"--socks5-hostname", g.addr, "https://127.0.0.1:" + g.admin[strings.LastIndexByte(g.admin, ':')+1:] + "/"}, false, "(2)"},
		{"socks4a", []string{"-x", "socks4a://" + g.addr, url}, false, "(91)"},
	} {
		t.Run(how.name, func(t *testing.T) {
			out, errs, code := command(t, "curl", append(mtls[:len(mtls):len(mtls)], how.args...)...)
			want := "dn=CN=web serial=" + w.serial() + " proto=HTTP/2.0 sni=" + svc + "\n"
			switch {
			case how.ok && (out != want || code != 0):
				t.Errorf("curl: exit code %d, got %q, %s, want %q", code, out, errs, want)
			case !how.ok && (code != 97 || !strings.Contains(errs, how.says)):
				t.Errorf("curl: exit code %d, %s, want 97 and %q", code, errs, how.says)
			}
		})
	}
	g.line(t, "logged a tunnel by SOCKS of alice", func(l line) bool {
		return l.Proto == "socks5" && l.Peer == "alice" && l.Reason == "done" && l.Target == svc+":443" && l.In > 0 && l.Out > 0
	})
	g.line(t, "logged SOCKS4", func(l line) bool { return l.Proto == "socks5" && l.Reason == "unsupported" })
	g.line(t, "logged a wrong password", func(l line) bool {
		return l.Proto == "socks5" && l.Reason == "no-auth" && strings.Contains(l.Err, "the password is wrong")
	})
}

// A VIP and an endpoint are reached by their addresses, and nothing else is.
func TestAddressesBySOCKS(t *testing.T) {
	const page = "HTTP/1.1 200 OK\r\nContent-Length: 6\r\nConnection: close\r\n\r\nplain\n"
	s := testnet.Serve(t, func(c net.Conn) {
		if _, err := c.Read(make([]byte, 4096)); err == nil {
			_, _ = c.Write([]byte(page))
			_ = testnet.CloseWrite(c)
		}
	})
	w := newWorld(t)
	g := startSocks(t, w, service("plain.example.test", s.Addr(), "ports: [80]", `addresses: ["10.96.0.10", "2001:db8::10"]`))
	for _, url := range []string{"http://10.96.0.10/", "http://[2001:db8::10]/", "http://plain.example.test/"} {
		for _, flag := range []string{"--socks5-hostname", "--socks5"} {
			if flag == "--socks5" && strings.Contains(url, "plain") {
				continue // it would have to resolve it
			}
			if out, errs, code := command(t, "curl", "-sS", flag, g.addr, url); out != "plain\n" || code != 0 {
				t.Errorf("curl %s %s: exit code %d, got %q, %s", flag, url, code, out, errs)
			}
		}
	}
	if _, _, code := command(t, "curl", "-sS", "--socks5-hostname", g.addr, "http://10.96.0.11/"); code != 97 {
		t.Errorf("an address next to it: exit code %d, want 97", code)
	}
}

// ncat and socat speak first or let the service speak first.
func TestNetcatsBySOCKS(t *testing.T) {
	w := newWorld(t)
	banner := testnet.Greeting(t, "welcome\n")
	g := startSocks(t, w, service("banner.example.test", banner.Addr()))
	host, port, _ := net.SplitHostPort(g.addr)
	for _, args := range [][]string{
		{"nc.openbsd", "-N", "-X", "5", "-x", g.addr, "banner.example.test", "25"},
		{"ncat", "--proxy", g.addr, "--proxy-type", "socks5", "--proxy-dns", "remote", "banner.example.test", "25"},
		{"ncat", "--proxy", g.addrs[1], "--proxy-type", "socks5", "--proxy-auth", "alice:secret", "--proxy-dns", "remote", "banner.example.test", "25"},
		{"/usr/bin/python3", "-c", fmt.Sprintf(`
import socks
s = socks.socksocket()
s.set_proxy(socks.SOCKS5, %q, %s, rdns=True)
s.connect(("banner.example.test", 25))
s.sendall(b"hello\n")
s.shutdown(1)
data = b""
while True:
    more = s.recv(4096)
    if not more:
        break
    data += more
print(data.decode(), end="")
try:
    n = socks.socksocket()
    n.set_proxy(socks.SOCKS5, %q, %s, rdns=True)
    n.connect(("nobody.example.test", 25))
except socks.ProxyError as e:
    assert "0x02" in str(e), e
else:
    raise SystemExit("a name there is not was reached")
`, host, port, host, port)},
	} {
		cmd := withInput(t, "hello\n")
		cmd.Path, cmd.Args = look(t, args[0]), args
		out, errs, code := runCmd(t, cmd)
		if !strings.HasPrefix(out, "welcome\n") || code != 0 {
			t.Errorf("%s: exit code %d, got %q, %s", args[0], code, out, errs)
		}
	}
}

// ssh reaches a server behind the gateway by its name, through nc.
func TestSSHBySOCKS(t *testing.T) {
	w := newWorld(t)
	dir, port := w.sshd(t, "echo through the gateway")
	g := startSocks(t, w, service("shell.example.test", "127.0.0.1:"+port))
	out, errs, code := command(t, "ssh", "-F", "/dev/null", "-i", filepath.Join(dir, "client"), "-o", "BatchMode=yes",
		"-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null", "-o", "IdentitiesOnly=yes",
		"-o", "ProxyCommand=nc.openbsd -X 5 -x "+g.addr+" %h %p", "shell.example.test", "true")
	if out != "through the gateway\n" || code != 0 {
		t.Errorf("ssh: exit code %d, got %q, %s", code, out, errs)
	}
	g.line(t, "logged a tunnel by SOCKS to port 22", func(l line) bool {
		return l.Proto == "socks5" && l.Target == "shell.example.test:22" && l.In > 0 && l.Out > 0
	})
}
