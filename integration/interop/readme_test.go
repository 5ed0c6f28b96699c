//go:build unix

package interop

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"culvert.dev/internal/testnet"
)

// Every README of an example, that of the project, and the first pages of the
// documentation do what they say: their shell blocks are run in order, in one
// script, in a copy of the folder, and what is said to come out comes out.
func TestReadmesDoWhatTheySay(t *testing.T) {
	root := filepath.Join("..", "..")
	readmes, err := filepath.Glob(filepath.Join(root, "examples", "*", "README.md"))
	must(t, err)
	if len(readmes) < 3 {
		t.Fatalf("%d examples, want at least 3", len(readmes))
	}
	for _, readme := range append(readmes, filepath.Join(root, "README.md"), filepath.Join(root, "docs", "start.md"), filepath.Join(root, "docs", "guides", "gateway.md"), filepath.Join(root, "docs", "guides", "backend-tls.md"), filepath.Join(root, "docs", "guides", "delegation.md"), filepath.Join(root, "docs", "guides", "behind-load-balancer.md"), filepath.Join(root, "docs", "guides", "sites.md"), filepath.Join(root, "docs", "guides", "udp.md"), filepath.Join(root, "docs", "guides", "tls.md"), filepath.Join(root, "docs", "guides", "unix-sockets.md"), filepath.Join(root, "docs", "guides", "ssh.md")) {
		t.Run(strings.TrimPrefix(readme, root+"/"), func(t *testing.T) {
			text, err := os.ReadFile(readme)
			must(t, err)
			script, wants := shell(string(text))
			if len(wants) == 0 {
				t.Fatal("no shell block says what comes out")
			}
			dir := t.TempDir()
			if strings.HasPrefix(readme, filepath.Join(root, "examples")) {
				must(t, os.CopyFS(dir, os.DirFS(filepath.Dir(readme))))
			}
			const end = "interop: the script is at its end"
			cmd := exec.Command(look(t, "bash"), "-c", "set -euo pipefail\n"+script+"\necho '"+end+"'\n")
			cmd.Dir = dir
			cmd.Env = append(environ(), "PATH="+filepath.Dir(culvert)+":"+os.Getenv("PATH"))
			for _, program := range []string{"curl", "openssl", "dig", "nginx", "haproxy", "ncat", "python3"} {
				look(t, program)
			}
			p := startCmd(t, cmd)
			p.says(t, end)
			for _, want := range wants {
				if !strings.Contains(p.output(), want) {
					t.Errorf("the output does not have %q", want)
				}
			}
		})
	}
}

// shell returns the shell blocks of a text, and what their comments of the
// form "# => TEXT" say will come out.
func shell(text string) (script string, wants []string) {
	for _, block := range regexp.MustCompile("(?ms)^```sh\n(.*?)^```").FindAllStringSubmatch(text, -1) {
		script += block[1]
		for _, want := range regexp.MustCompile(`(?m)^ *# => (.*)$`).FindAllStringSubmatch(block[1], -1) {
			wants = append(wants, want[1])
		}
	}
	return script, wants
}

// The commands of make that the README names exist, and so do the files it
// links to.
func TestReadmeLinksAndTargetsExist(t *testing.T) {
	root := filepath.Join("..", "..")
	makefile, err := os.ReadFile(filepath.Join(root, "Makefile"))
	must(t, err)
	for _, name := range []string{"README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/start.md", "docs/guides/gateway.md", "docs/ARCHITECTURE.md"} {
		text, err := os.ReadFile(filepath.Join(root, name))
		must(t, err)
		for _, m := range regexp.MustCompile("(?m)(?:^|`)make ([a-z-]+)").FindAllSubmatch(text, -1) {
			if !strings.Contains(string(makefile), fmt.Sprintf("\n%s:", m[1])) {
				t.Errorf("%s: there is no target %q in the Makefile", name, m[1])
			}
		}
		for _, m := range regexp.MustCompile(`\]\(([^)#:]+)(?:#[^)]*)?\)|<img[^>]* src="([^"]+)"`).FindAllStringSubmatch(string(text), -1) {
			link := m[1] + m[2]
			if _, err := os.Stat(filepath.Join(root, filepath.Dir(name), link)); err != nil {
				t.Errorf("%s links to %s, which is not there", name, link)
			}
		}
	}
}

// The reference has every metric of a gateway, and every field that a tunnel's
// and a refusal's log line have.
func TestReferenceHasEveryMetricAndLogField(t *testing.T) {
	metrics, err := os.ReadFile(filepath.Join("..", "..", "docs", "reference", "metrics.md"))
	must(t, err)
	log, err := os.ReadFile(filepath.Join("..", "..", "docs", "reference", "log.md"))
	must(t, err)
	echo := testnet.Echo(t)
	g := startGateway(t, "--listen", "127.0.0.1:0", "--route", route(echo.Addr()), "--route", "down.example.test=127.0.0.1:"+freePort(t))
	// A tunnel, a refusal with a route and one without a request.
	tunnel := dial(t, g.addr)
	defer tunnel.Close()
	_, err = tunnel.Write([]byte(connectTo(svc + ":443")))
	must(t, err)
	must(t, tunnel.CloseWrite())
	_, err = io.Copy(io.Discard, tunnel)
	must(t, err)
	g.outcome(t, tunnel.LocalAddr().String())
	for _, raw := range [][]byte{hello("down.example.test"), []byte("GET / HTTP/1.1\r\n\r\n")} {
		g.outcome(t, exchange(t, g.addr, raw).source)
	}

	body, err := g.get("/metrics")
	must(t, err)
	registered := regexp.MustCompile(`(?m)^# TYPE (culvert_[a-z_]+) `).FindAllSubmatch(body, -1)
	if len(registered) < 30 {
		t.Errorf("%d metrics, want at least 30", len(registered))
	}
	for _, m := range registered {
		if !strings.Contains(string(metrics), "| `"+string(m[1])+"` |") {
			t.Errorf("the reference does not have the metric %s", m[1])
		}
	}

	for l := range strings.Lines(g.output()) {
		var fields map[string]any
		if json.Unmarshal([]byte(l), &fields) != nil || fields["source"] == nil {
			continue
		}
		for name := range fields {
			if name != "time" && name != "level" && name != "msg" && !strings.Contains(string(log), "| `"+name+"` |") {
				t.Errorf("the reference does not have the log field %q", name)
			}
		}
	}
}
