//go:build unix

package interop

import (
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// Programs in other languages, each by SNI and by CONNECT, to a Go server that
// says whom it saw.
func TestClientsInOtherLanguages(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	g := startGateway(t, "--listen", "127.0.0.1:0", "--route", route(w.serveHTTPS(t, http.HandlerFunc(whoami))))
	for _, c := range []struct {
		name    string
		command []string
	}{
		{"Python", []string{"python3", "testdata/client.py"}},
		{"Node", []string{"node", "testdata/client.js"}},
		// Compiled in memory; -Xshare and the client compiler make that fast.
		{"Java", []string{"java", "-Xshare:auto", "-XX:TieredStopAtLevel=1", "testdata/Client.java"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			args := append(c.command[1:], g.addr, svc, w.ca, w.cert, w.key)
			out, errs, code := command(t, c.command[0], args...)
			for _, how := range []string{"sni", "connect"} {
				if want := how + ": you are " + clientID + " by HTTP/1"; !strings.Contains(out, want) {
					t.Errorf("%s: exit code %d, want %q in\n%s%s", c.name, code, want, out, errs)
				}
			}
		})
	}
}

func TestGnuTLS(t *testing.T) {
	w := newWorld(t)
	g := startGateway(t, "--listen", "127.0.0.1:0", "--route", route(w.serveHTTPS(t, http.HandlerFunc(whoami))))
	_, port, _ := net.SplitHostPort(g.addr)
	for _, version := range []string{"TLS1.2", "TLS1.3"} {
		t.Run(version, func(t *testing.T) {
			p := start(t, "gnutls-cli", "--x509cafile", w.ca, "--x509certfile", w.cert, "--x509keyfile", w.key,
				"--sni-hostname", svc, "--verify-hostname", svc, "--priority", "NORMAL:-VERS-ALL:+VERS-"+version, "-p", port, "127.0.0.1")
			// Kept open: at the end of its input it leaves, answered or not.
			_, err := io.WriteString(p.stdin, "GET / HTTP/1.0\r\nHost: "+svc+"\r\n\r\n")
			must(t, err)
			p.says(t, "you are "+clientID+" by HTTP/1.0, "+strings.Replace(version, "TLS", "TLS ", 1))
		})
	}
}

// A repository served as files, cloned through the proxy by git's own client.
func TestGitCloneThroughTheProxy(t *testing.T) {
	w := newWorld(t)
	git := func(args ...string) string {
		t.Helper()
		cmd := exec.Command(look(t, "git"), args...)
		cmd.Dir = w.dir
		cmd.Env = append(environ(), "HOME="+w.dir, "GIT_CONFIG_NOSYSTEM=1", "GIT_TERMINAL_PROMPT=0",
			"GIT_AUTHOR_NAME=a", "GIT_AUTHOR_EMAIL=a@example.test", "GIT_COMMITTER_NAME=a", "GIT_COMMITTER_EMAIL=a@example.test")
		out, errs, code := runCmd(t, cmd)
		if code != 0 {
			t.Fatalf("git %q: exit code %d\n%s%s", args, code, out, errs)
		}
		return out
	}
	git("init", "-q", "work")
	w.write(t, "work/hello.txt", "through the tunnel\n")
	git("-C", "work", "add", "hello.txt")
	git("-C", "work", "commit", "-q", "-m", "hello")
	git("clone", "-q", "--bare", "work", "repo.git")
	git("-C", "repo.git", "update-server-info")

	g := startGateway(t, "--listen", "127.0.0.1:0", "--route", route(w.serveHTTPS(t, http.FileServer(http.Dir(w.dir)))))
	git("-c", "http.proxy=http://"+g.addr, "-c", "http.sslCAInfo="+w.ca, "-c", "http.sslCert="+w.cert, "-c", "http.sslKey="+w.key,
		"clone", "-q", "https://"+svc+"/repo.git", "clone")
	got, err := os.ReadFile(filepath.Join(w.dir, "clone", "hello.txt"))
	if err != nil || string(got) != "through the tunnel\n" {
		t.Errorf("clone: got %q, %v", got, err)
	}
	if want := git("-C", "work", "rev-parse", "HEAD"); git("-C", "clone", "rev-parse", "HEAD") != want {
		t.Error("the clone's HEAD is another")
	}
}

func TestGoTransportWithProxy(t *testing.T) {
	w := newWorld(t)
	g := startGateway(t, "--listen", "127.0.0.1:0", "--route", route(w.serveHTTPS(t, http.HandlerFunc(whoami))))
	for _, h2 := range []bool{false, true} {
		t.Run(fmt.Sprintf("http2=%v", h2), func(t *testing.T) {
			tr := &http.Transport{
				Proxy:             http.ProxyURL(&url.URL{Scheme: "http", Host: g.addr}),
				TLSClientConfig:   w.client.ClientConfig(""),
				ForceAttemptHTTP2: h2,
			}
			defer tr.CloseIdleConnections()
			client := &http.Client{Transport: tr, Timeout: patience}
			resp, err := client.Get("https://" + svc + "/")
			if err != nil {
				t.Fatal(err)
			}
			defer resp.Body.Close()
			body, err := io.ReadAll(resp.Body)
			want := "you are " + clientID + " by HTTP/1.1, TLS 1.3\n"
			if h2 {
				want = "you are " + clientID + " by HTTP/2.0, TLS 1.3\n"
			}
			if err != nil || string(body) != want {
				t.Errorf("got %q, %v, want %q", body, err, want)
			}
			// The word of the refusal reaches whoever reads the error.
			if resp, err := client.Get("https://nobody.example.test/"); err == nil {
				resp.Body.Close()
				t.Error("a name without a service was reached")
			} else if !strings.Contains(err.Error(), "Forbidden") {
				t.Errorf("refusal: got %v, want the status text of 403", err)
			}
		})
	}
}
