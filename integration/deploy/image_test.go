package deploy

import (
	"context"
	"debug/elf"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"
)

func dockerfile(t *testing.T) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(root, "deploy", "Dockerfile"))
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// built runs the line of the Dockerfile that builds the program and returns what
// it has built. Go's cache makes it quick where it was done before.
func built(t *testing.T) string {
	t.Helper()
	line := regexp.MustCompile(`(?m)^RUN (CGO_ENABLED=0 .* go build .*)$`).FindStringSubmatch(dockerfile(t))
	if line == nil {
		t.Fatal("the Dockerfile has no line that builds")
	}
	program := filepath.Join(t.TempDir(), "culvert")
	ctx, cancel := context.WithTimeout(t.Context(), 9*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, "sh", "-c", strings.ReplaceAll(line[1], "/out/culvert", program))
	cmd.Dir = root
	cmd.Env = append(os.Environ(), "TARGETOS=linux", "TARGETARCH="+goarch(t), "VERSION=v9.8.7")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%s: %v\n%s", line[1], err, out)
	}
	return program
}

func goarch(t *testing.T) string {
	t.Helper()
	out, err := exec.Command("go", "env", "GOARCH").Output()
	if err != nil {
		t.Fatal(err)
	}
	return strings.TrimSpace(string(out))
}

// The program of the image needs nothing of the system: it starts as nobody in a
// folder that has its configuration, serves, drains and ends.
func TestTheImagesProgramStartsInAnEmptyRoot(t *testing.T) {
	program := built(t)
	f, err := elf.Open(program)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for _, p := range f.Progs {
		if p.Type == elf.PT_INTERP {
			t.Error("it wants an interpreter: it is not static")
		}
	}
	if libs, err := f.ImportedLibraries(); err == nil && len(libs) > 0 {
		t.Errorf("it wants %q", libs)
	}

	text := dockerfile(t)
	entry := regexp.MustCompile(`(?m)^ENTRYPOINT \["(/[^"]+)"\]$`).FindStringSubmatch(text)
	user := regexp.MustCompile(`(?m)^USER (\d+):(\d+)$`).FindStringSubmatch(text)
	if entry == nil || user == nil || user[1] == "0" {
		t.Fatalf("entry point %q, user %q", entry, user)
	}
	empty := t.TempDir()
	in := func(name string) string { return filepath.Join(empty, filepath.FromSlash(name)) }
	data, err := os.ReadFile(program)
	if err != nil {
		t.Fatal(err)
	}
	health, listener := free(t), free(t)
	must(t, os.WriteFile(in(entry[1]), data, 0o755))
	must(t, os.MkdirAll(in("/etc/culvert"), 0o755))
	must(t, os.WriteFile(in("/etc/culvert/culvert.yaml"), fmt.Appendf(nil, "listeners: [{address: %q}]\nservices: [{name: a.example.com, endpoints: [\"192.0.2.1:443\"]}]\ndrain: {delay: 0s, timeout: 1s}\n", listener), 0o644))
	must(t, os.Chmod(empty, 0o755))

	if out := run(t, "unshare", "--user", "--map-user="+user[1], "--map-group="+user[2], "--root="+empty, "--wd=/", entry[1], "version"); !strings.HasPrefix(out, "culvert v9.8.7") {
		t.Errorf("version: %q", out)
	}
	cmd := exec.CommandContext(t.Context(), "unshare", "--user", "--map-user="+user[1], "--map-group="+user[2], "--root="+empty, "--wd=/",
		entry[1], "gateway", "--config=/etc/culvert/culvert.yaml", "--health="+health)
	var log strings.Builder
	cmd.Stderr = &log
	must(t, cmd.Start())
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	ready := until(t, func() bool { return get("http://"+health+"/readyz") == "200 ok\n" })
	must(t, cmd.Process.Signal(syscall.SIGTERM))
	select {
	case err := <-ended:
		if err != nil || !ready {
			t.Errorf("ready: %v, ended: %v\n%s", ready, err, log.String())
		}
	case <-time.After(time.Minute):
		_ = cmd.Process.Kill()
		t.Fatalf("it does not end: %v\n%s", <-ended, log.String())
	}
}

// The certificates of the image are where Go looks for them, and what is left
// out of the context of the build is not what is built.
func TestTheDockerfileCopiesWhatThereIs(t *testing.T) {
	text := dockerfile(t)
	certs := regexp.MustCompile(`(?m)^COPY --from=build (\S+) (\S+)\nCOPY --from=build /out/culvert /culvert$`).FindStringSubmatch(text)
	if certs == nil || certs[1] != "/etc/ssl/certs/ca-certificates.crt" || certs[2] != certs[1] {
		t.Errorf("certificates: %q", certs)
	}
	mod, err := os.ReadFile(filepath.Join(root, "go.mod"))
	must(t, err)
	version := regexp.MustCompile(`(?m)^go (\d+\.\d+)`).FindStringSubmatch(string(mod))
	if !strings.Contains(text, " golang:"+version[1]+" AS build\n") {
		t.Errorf("go.mod is of Go %s, and the image is built by another one", version[1])
	}
	ignored, err := os.ReadFile(filepath.Join(root, ".dockerignore"))
	must(t, err)
	list := run(t, "go", "list", "-C", root, "-deps", "-f", "{{if not .Standard}}{{range .EmbedFiles}}{{$.Dir}}/{{.}}\n{{end}}{{.Dir}}\n{{end}}", "./cmd/culvert")
	top, err := filepath.Abs(root)
	must(t, err)
	for line := range strings.Lines(list) {
		rel, err := filepath.Rel(top, strings.TrimSpace(line))
		if err != nil || strings.HasPrefix(rel, "..") || rel == "." {
			continue
		}
		first, _, _ := strings.Cut(rel, "/")
		if slices.Contains(strings.Fields(string(ignored)), first) || strings.Contains(rel, "testdata") {
			t.Errorf("%s is built, and left out of the context", rel)
		}
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// run returns what a program that works writes to its standard output.
func run(t *testing.T, name string, args ...string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	var stderr strings.Builder
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("%s %q: %v\n%s", name, args, err, stderr.String())
	}
	return string(out)
}

// free is an address of loopback that nobody listens at. The kernel takes none of
// these ports by itself.
func free(t *testing.T) string {
	t.Helper()
	for range 100 {
		ln, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", 5000+rand.IntN(5000)))
		if err == nil {
			defer ln.Close()
			return ln.Addr().String()
		}
	}
	t.Fatal("no port is free")
	return ""
}

// until asks until it is so, for a minute at most.
func until(t *testing.T, is func() bool) bool {
	t.Helper()
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for deadline := time.Now().Add(time.Minute); time.Now().Before(deadline); <-tick.C {
		if is() {
			return true
		}
	}
	return false
}

// get is the status and the body of an answer, or why there is none.
func get(url string) string {
	client := &http.Client{Timeout: 5 * time.Second, Transport: &http.Transport{DisableKeepAlives: true}}
	resp, err := client.Get(url)
	if err != nil {
		return err.Error()
	}
	defer resp.Body.Close()
	body, _ := io.ReadAll(resp.Body)
	return fmt.Sprintf("%d %s", resp.StatusCode, body)
}
