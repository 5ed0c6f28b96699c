//go:build unix

package interop

import (
	"crypto/sha256"
	"crypto/tls"
	"encoding/base64"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"culvert.dev/internal/testca"
)

// The recipes of the guide to the agent do what it says: real programs reach services through an
// agent and a gateway, with TLS and a client certificate from end to end.
func TestRecipesOfTheAgent(t *testing.T) {
	guide, err := os.ReadFile("../../docs/guides/agent.md")
	must(t, err)
	w := newWorld(t)
	s := w.shop(t)
	db, redis := freePort(t), freePort(t)
	_, agent, at := w.agentOf(t, s.services, fmt.Sprintf("%s: db.shop.example, %s: cache.shop.example", db, redis))
	_, socks, _ := net.SplitHostPort(at[0])
	here := strings.NewReplacer("127.0.0.1:1080", at[0], "1080", socks, "5432", db, "6379", redis)

	w.programs(t, string(guide), here, s, at[0])
	// A client of a registry in Go, as Docker is, with what HTTPS_PROXY makes of its Transport.
	t.Run("Go", func(t *testing.T) {
		t.Parallel()
		for _, proxy := range []string{"http://" + at[0], "socks5://" + at[0]} {
			to, err := url.Parse(proxy)
			must(t, err)
			transport := &http.Transport{Proxy: http.ProxyURL(to), TLSClientConfig: w.client.ClientConfig("")}
			defer transport.CloseIdleConnections()
			answer, err := (&http.Client{Transport: transport, Timeout: patience}).Get("https://orders.shop.example/v2/")
			if err != nil {
				t.Errorf("by %s: %v", proxy, err)
				continue
			}
			body, err := io.ReadAll(answer.Body)
			_ = answer.Body.Close()
			if answer.Header.Get("Docker-Distribution-Api-Version") != "registry/2.0" || string(body) != "{}" || err != nil {
				t.Errorf("by %s: %s, %q, %v", proxy, answer.Status, body, err)
			}
		}
	})
	// Content of an unknown length.
	post := exec.Command(look(t, "curl"), "-sS", "--proxy", "http://"+at[0], "-T", "-", "http://plain.shop.example/")
	post.Env, post.Stdin = environ(), strings.NewReader(strings.Repeat("0123456789", 100_000))
	if out, errs, code := runCmd(t, post); out != "plain plain.shop.example, 1000000 bytes, [chunked] <nil>\n" || code != 0 {
		t.Errorf("content in chunks: exit code %d, got %q, %s", code, out, errs)
	}
	// What there is not is refused with its reason, to programs that show it.
	out, errs, code := command(t, "curl", "-sS", "-v", "--proxy", "http://"+at[0], "https://nobody.shop.example/")
	if code == 0 || !strings.Contains(errs, "no-route") {
		t.Errorf("a name that is not there: exit code %d, %s%s", code, out, errs)
	}
	agent.line(t, "refused nobody.shop.example", func(l line) bool { return l.Target == "nobody.shop.example:443" && l.Reason == "no-route" })
}

// A shop is the services of the recipes, in the network of the gateway.
type shop struct {
	services string // of the gateway's configuration
	keys     string // the folder with the key that SSH lets in
	wiki     *httptest.Server
	redis    []string // arguments of redis-cli, in the network of the gateway
}

func (w *world) shop(t *testing.T) *shop {
	t.Helper()
	names := []string{"orders.shop.example", "cache.shop.example", "wiki.shop.example"}
	pair := issue(t, w.authority, w.dir, "shop", testca.Options{SPIFFEID: "spiffe://example.test/ns/shop/sa/svc", DNSNames: names, Usage: testca.ServerOnly})
	orders := httptest.NewUnstartedServer(w.orders(t))
	orders.TLS, orders.EnableHTTP2 = pair.ServerConfig(), true
	orders.StartTLS()
	t.Cleanup(orders.Close)
	wiki := httptest.NewUnstartedServer(http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) { fmt.Fprintf(rw, "<p>served %s to %s", r.Host, r.Proto) }))
	wiki.TLS = &tls.Config{Certificates: []tls.Certificate{pair.TLS}} // a browser without a person has no certificate to choose
	wiki.StartTLS()
	t.Cleanup(wiki.Close)
	plain := httptest.NewServer(http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		n, err := io.Copy(io.Discard, r.Body)
		fmt.Fprintf(rw, "plain %s, %d bytes, %v %v\n", r.Host, n, r.TransferEncoding, err)
	}))
	t.Cleanup(plain.Close)
	cache := "127.0.0.1:" + freePort(t)
	_, port, _ := net.SplitHostPort(cache)
	start(t, "redis-server", "--port", "0", "--tls-port", port, "--bind", "127.0.0.1", "--save", "", "--dir", w.dir,
		"--tls-cert-file", filepath.Join(w.dir, "shop.crt"), "--tls-key-file", filepath.Join(w.dir, "shop.key"), "--tls-ca-cert-file", w.ca).listens(t, cache)
	keys, shell := w.sshd(t, "")
	db, at := w.postgres(t), orders.Listener.Addr().String()
	s := &shop{keys: keys, wiki: wiki, redis: []string{"-h", "127.0.0.1", "-p", port}}
	for name, at := range map[string]string{
		names[0]: at, names[1]: cache, names[2]: wiki.Listener.Addr().String(), "page.shop.example": at,
		"plain.shop.example": plain.Listener.Addr().String(), "db.shop.example": db, "build.shop.example": "127.0.0.1:" + shell,
	} {
		s.services += fmt.Sprintf("  - {name: %s, endpoints: [%q]}\n", name, at)
	}
	s.services += fmt.Sprintf("  - {name: page-db.shop.example, startTLS: postgres, endpoints: [%q]}\n", db) // for agents that speak TLS with it
	return s
}

// programs runs the recipes of the guide, of which here replaces the agent's addresses by those
// of this one. Its entry for CONNECT and SOCKS5 is at.
func (w *world) programs(t *testing.T, guide string, here *strings.Replacer, s *shop, at string) {
	const me = "you are " + clientID
	for name, want := range map[string][]string{
		"curl":                 {me + " by HTTP/2.0", me + " by HTTP/2.0", "plain plain.shop.example"},
		"git":                  {"in a repository"},
		"psql":                 {"/CN=web"},
		"JDBC":                 {"/CN=web"},
		"Redis":                {"OK"},
		"Python":               {me + " by HTTP/1.1", me + " by HTTP/1.0"},
		"Node":                 {me + " by HTTP/1.1"},
		"Java":                 {me + " by HTTP/2.0"},
		"Registries of images": {"{}"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			out := w.recipe(t, here.Replace(section(t, guide, name)))
			for _, want := range want {
				_, rest, found := strings.Cut(out, want)
				if !found {
					t.Errorf("want %q in the rest of the output: %q", want, out)
				}
				out = rest
			}
		})
	}
	t.Run("Browsers", func(t *testing.T) {
		t.Parallel()
		const pac = "--proxy-pac-url=http://127.0.0.1:1080/proxy.pac"
		if !strings.Contains(guide, "chromium "+pac+" https://wiki.shop.example/") {
			t.Error("the guide has another command")
		}
		pin := sha256.Sum256(s.wiki.Certificate().RawSubjectPublicKeyInfo)
		out, errs := w.browse(t, "--ignore-certificate-errors-spki-list="+base64.StdEncoding.EncodeToString(pin[:]), here.Replace(pac), "https://wiki.shop.example/")
		if want := "served wiki.shop.example to HTTP/"; !strings.Contains(out, want) {
			t.Errorf("got %q, want %q in it\n%s", out, want, errs)
		}
	})
	t.Run("SSH", func(t *testing.T) {
		t.Parallel()
		_, config, _ := strings.Cut(guide, "# ~/.ssh/config\n")
		config, _, found := strings.Cut(config, "```")
		if !found {
			t.Fatal("the guide has no configuration of ssh")
		}
		config = strings.ReplaceAll(config, "culvert connect", culvert+" connect --agent "+at)
		path := w.write(t, "ssh_config", config+"IdentityFile "+filepath.Join(s.keys, "client")+"\nIdentitiesOnly yes\nBatchMode yes\nStrictHostKeyChecking no\nUserKnownHostsFile /dev/null\n")
		if out, errs, code := runCmd(t, w.inside(t, "ssh", "-F", path, "build.shop.example", "echo by ssh")); out != "by ssh\n" || code != 0 {
			t.Errorf("exit code %d, got %q, %s", code, out, errs)
		}
		clone := filepath.Join(t.TempDir(), "clone")
		git := w.inside(t, "git", "clone", "-q", "ssh://build.shop.example"+filepath.Join(w.dir, "served", "site.git"), clone)
		git.Env = append(git.Env, "GIT_SSH_COMMAND=ssh -F "+path)
		if out, errs, code := runCmd(t, git); code != 0 {
			t.Errorf("git clone: exit code %d, %s%s", code, out, errs)
		}
		if out, _, _ := command(t, "git", "-C", clone, "log", "--format=%s"); out != "in a repository\n" {
			t.Errorf("the clone has %q", out)
		}
	})
}

// orders says whom it serves, and has a repository of git and the first page of a registry of images.
func (w *world) orders(t *testing.T) http.Handler {
	t.Helper()
	work, bare := filepath.Join(w.dir, "site"), filepath.Join(w.dir, "served", "site.git")
	for _, args := range [][]string{
		{"init", "-q", work},
		{"-C", work, "-c", "user.name=a", "-c", "user.email=a@example.test", "commit", "-q", "--allow-empty", "-m", "in a repository"},
		{"clone", "-q", "--bare", work, bare},
		{"-C", bare, "update-server-info"},
	} {
		if out, errs, code := command(t, "git", args...); code != 0 {
			t.Fatalf("git %q: exit code %d, %s%s", args, code, out, errs)
		}
	}
	mux := http.NewServeMux()
	mux.HandleFunc("/", whoami)
	files := http.FileServer(http.Dir(filepath.Join(w.dir, "served")))
	mux.HandleFunc("/site.git/", func(rw http.ResponseWriter, r *http.Request) { // for the client alone
		if id, err := testca.PeerID(r.TLS.PeerCertificates[0]); err != nil || id != clientID {
			http.Error(rw, fmt.Sprintf("%q, %v", id, err), http.StatusForbidden)
			return
		}
		files.ServeHTTP(rw, r)
	})
	mux.HandleFunc("/v2/", func(rw http.ResponseWriter, _ *http.Request) {
		rw.Header().Set("Docker-Distribution-Api-Version", "registry/2.0")
		_, _ = io.WriteString(rw, "{}")
	})
	return mux
}

// section returns the shell blocks of a section of a guide.
func section(t *testing.T, guide, name string) (script string) {
	t.Helper()
	_, text, found := strings.Cut(guide, "\n### "+name+"\n")
	if !found {
		t.Fatalf("the guide has no section %q", name)
	}
	text, _, _ = strings.Cut(text, "\n### ")
	for _, block := range regexp.MustCompile("(?ms)^```sh\n(.*?)^```").FindAllStringSubmatch(text, -1) {
		script += block[1]
	}
	return script
}

// recipe runs a script in a folder of its own, with the files of the guide, and returns what it
// has written to standard output.
func (w *world) recipe(t *testing.T, script string) string {
	t.Helper()
	return w.script(t, t.TempDir(), nil, script)
}

// script is recipe in a folder, and with more variables.
func (w *world) script(t *testing.T, dir string, env []string, script string) string {
	t.Helper()
	for name, of := range map[string]string{
		"ca.pem": w.ca, "me.pem": w.cert, "me.key": w.key, "Query.java": "testdata/Query.java", "postgresql.jar": "/usr/share/java/postgresql.jar",
	} {
		b, err := os.ReadFile(of)
		must(t, err)
		must(t, os.WriteFile(filepath.Join(dir, name), b, 0o600))
	}
	cmd := w.inside(t, "/bin/sh", "-e", "-c", script)
	cmd.Dir = dir
	cmd.Env = append(environ(), "HOME="+dir, "PATH=/usr/bin:/bin", "GIT_CONFIG_NOSYSTEM=1", "GIT_TERMINAL_PROMPT=0", "JDK_JAVA_OPTIONS=-XX:TieredStopAtLevel=1")
	cmd.Env = append(cmd.Env, env...)
	out, errs, code := runCmd(t, cmd)
	if code != 0 {
		t.Errorf("exit code %d, %s\n%s", code, out, errs)
	}
	return out
}
