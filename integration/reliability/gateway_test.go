//go:build linux

package reliability

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"culvert.dev/internal/testnet"
)

// Options say how a gateway is started. The zero value is the defaults.
type options struct {
	Services  string   // the lines below "services:"
	Listener  string   // more keys of the listener: `, refusal: close`
	Listeners string   // more of them: lines below "listeners:"
	More      string   // more keys of the configuration
	Text      bool     // log text, not JSON
	Wrap      []string // a command that runs the gateway
	Flags     []string // instead of --config; ADDR and ADMIN stand for the addresses
	Race      bool     // use the program built with the race detector
	Stderr    *os.File // where the log goes instead of to logged
	IP        string   // in place of one of loopback
	Dial      dialing  // how its ports are reached, where not from here
}

type dialing func(ctx context.Context, network, addr string) (net.Conn, error)

// A gateway is the real program, running.
type gateway struct {
	t      *testing.T
	opts   options
	ip     string
	addr   string // of the listener
	admin  string
	config string      // path of the file
	keys   *tls.Config // of a client of its trust domain; nil where none was made
	cmd    *exec.Cmd
	http   *http.Client

	exited chan struct{}
	code   int  // after exited
	killed bool // by SIGKILL, on purpose

	mu    sync.Mutex // guards lines
	lines []string   // of the log
}

var started atomic.Int32

// start runs a gateway until the test ends, and checks then that it ended
// well.
func start(t *testing.T, o options) *gateway {
	t.Helper()
	g := prepare(t, o)
	g.begin()
	return g
}

// begin starts the process and waits until it is ready.
func (g *gateway) begin() {
	g.t.Helper()
	g.run()
	testnet.Eventually(g.t, 2*patience, func() bool {
		g.alive()
		status, _, err := g.get("/readyz")
		return err == nil && status == http.StatusOK
	}, "the gateway is ready")
}

// prepare writes the configuration of a gateway and does not start it.
func prepare(t *testing.T, o options) *gateway {
	t.Helper()
	// An address of its own: no other gateway, of this run or another, can
	// have its ports, which are below those the system gives to clients.
	pid, n := os.Getpid(), started.Add(1)
	g := &gateway{t: t, opts: o, exited: make(chan struct{})}
	g.ip = fmt.Sprintf("127.%d.%d.%d", 64+pid>>8&63, pid&255, n)
	g.admin = g.ip + ":9090" // which is for loopback only
	if o.IP != "" {
		g.ip = o.IP
	}
	g.addr = g.ip + ":8443"
	g.config = filepath.Join(t.TempDir(), "culvert.yaml")
	g.http = &http.Client{Timeout: patience, Transport: &http.Transport{DialContext: o.Dial, DisableKeepAlives: true, DisableCompression: true}} // or what compresses answers would be in what is weighed
	g.write(g.yaml(o.Services))
	return g
}

// yaml is the configuration with the given services.
func (g *gateway) yaml(services string) string {
	format := "json"
	if g.opts.Text {
		format = "text"
	}
	return fmt.Sprintf("listeners:\n  - {address: \"%s\"%s}\n%sadmin: %s\nlog: {format: %s}\n%s\nservices:\n%s\n",
		g.addr, g.opts.Listener, g.opts.Listeners, g.admin, format, g.opts.More, strings.TrimRight(services, "\n"))
}

// write puts text in the place of the configuration, by rename.
func (g *gateway) write(text string) {
	g.t.Helper()
	tmp := g.config + ".new"
	if err := os.WriteFile(tmp, []byte(text), 0o600); err != nil {
		g.t.Fatal(err)
	}
	if err := os.Rename(tmp, g.config); err != nil {
		g.t.Fatal(err)
	}
}

// service is a line below "services:".
func service(name string, endpoints ...string) string {
	return fmt.Sprintf("  - {name: \"%s\", endpoints: [\"%s\"]}\n", name, strings.Join(endpoints, `", "`))
}

// run starts the process.
func (g *gateway) run() {
	t := g.t
	t.Helper()
	get := program
	if g.opts.Race {
		get = raceProgram
	}
	bin, err := get()
	if err != nil {
		t.Fatal(err)
	}
	args := append(append([]string(nil), g.opts.Wrap...), bin, "gateway")
	for _, f := range g.opts.Flags {
		args = append(args, strings.NewReplacer("ADDR", g.addr, "ADMIN", g.admin).Replace(f))
	}
	if g.opts.Flags == nil {
		args = append(args, "--config", g.config)
	}
	g.cmd = exec.Command(args[0], args[1:]...)
	var read sync.WaitGroup
	out := g.opts.Stderr
	if out == nil {
		r, w, err := os.Pipe()
		if err != nil {
			t.Fatal(err)
		}
		defer w.Close()
		out = w
		read.Go(func() { g.collect(r) })
	}
	g.cmd.Stderr = out
	if err := g.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() {
		_ = g.cmd.Wait()
		read.Wait()
		g.code = g.cmd.ProcessState.ExitCode()
		close(g.exited)
	}()
	t.Cleanup(g.stop)
}

func (g *gateway) collect(r *os.File) {
	defer r.Close()
	s := bufio.NewScanner(r)
	s.Buffer(nil, 1<<20)
	for s.Scan() {
		g.mu.Lock()
		g.lines = append(g.lines, s.Text())
		g.mu.Unlock()
	}
}

// stop ends the gateway at once, if it has not ended, and looks at what it
// left.
func (g *gateway) stop() {
	// The first SIGTERM asks for a drain and the second for an end. Two that
	// are sent at once may arrive as one, and a third may find the program
	// past minding it.
	for _, wait := range []time.Duration{50 * time.Millisecond, patience / 2, patience / 2} {
		if !g.ended() {
			g.signal(syscall.SIGTERM)
			select {
			case <-g.exited:
			case <-time.After(wait):
			}
		}
	}
	if !g.ended() {
		g.t.Error("the gateway did not end on SIGTERM; its goroutines follow")
		g.signal(syscall.SIGQUIT)
		select {
		case <-g.exited:
		case <-time.After(patience):
			g.signal(syscall.SIGKILL)
			<-g.exited
		}
	}
	if g.code != 0 && !g.killed {
		g.t.Errorf("the gateway's exit code is %d, want 0", g.code)
	}
	bad := g.code != 0 && !g.killed && g.t.Failed()
	for _, l := range g.logged() {
		for _, sign := range []string{"DATA RACE", "panic", "fatal error"} {
			if strings.Contains(l, sign) {
				bad = true
				g.t.Errorf("the gateway's log has a line with %q", sign)
			}
		}
	}
	if lines := g.logged(); bad {
		g.t.Logf("the end of the log:\n%s", strings.Join(lines[max(0, len(lines)-60):], "\n"))
	}
}

// awaitExit waits until the process has ended, which it was told to.
func (g *gateway) awaitExit() {
	g.t.Helper()
	select {
	case <-g.exited:
	case <-time.After(2 * patience):
		g.t.Fatal("the gateway did not end")
	}
}

func (g *gateway) ended() bool {
	select {
	case <-g.exited:
		return true
	default:
		return false
	}
}

// alive ends the test if the gateway is not there any more.
func (g *gateway) alive() {
	g.t.Helper()
	if g.ended() {
		g.t.Fatalf("the gateway ended with exit code %d:\n%s", g.code, strings.Join(g.logged(), "\n"))
	}
}

func (g *gateway) signal(s syscall.Signal) { _ = g.cmd.Process.Signal(s) }

// logged returns the lines of the log so far.
func (g *gateway) logged() []string {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.lines[:len(g.lines):len(g.lines)]
}

// entries returns the lines of the log that match, decoded.
func (g *gateway) entries(match func(entry) bool) []entry {
	g.t.Helper()
	var es []entry
	for _, l := range g.logged() {
		var e entry
		if err := json.Unmarshal([]byte(l), &e); err != nil {
			g.t.Errorf("a line of the log is not JSON: %q", l)
			continue
		}
		if match(e) {
			es = append(es, e)
		}
	}
	return es
}

// An entry is one line of the log.
type entry map[string]any

func (e entry) str(key string) string { s, _ := e[key].(string); return s }

// get asks the admin port.
func (g *gateway) get(path string) (status int, body string, err error) {
	resp, err := g.http.Get("http://" + g.admin + path)
	if err != nil {
		return 0, "", err
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	return resp.StatusCode, string(b), err
}

// metrics returns every time series and its value.
func (g *gateway) metrics() map[string]float64 {
	g.t.Helper()
	status, body, err := g.get("/metrics")
	if err != nil || status != http.StatusOK {
		g.t.Fatalf("/metrics: %d, %v", status, err)
	}
	m := make(map[string]float64)
	for line := range strings.Lines(body) {
		if i := strings.LastIndexByte(line, ' '); i > 0 && line[0] != '#' {
			var v float64
			if _, err := fmt.Sscan(line[i+1:], &v); err == nil {
				m[line[:i]] = v
			}
		}
	}
	return m
}

// metric returns the sum of all time series of a name whose labels contain
// each of parts.
func (g *gateway) metric(name string, parts ...string) float64 {
	g.t.Helper()
	return sum(g.metrics(), name, parts...)
}

func sum(m map[string]float64, name string, parts ...string) (total float64) {
next:
	for series, v := range m {
		base, labels, _ := strings.Cut(series, "{")
		if base != name {
			continue
		}
		for _, p := range parts {
			if !strings.Contains(labels, p) {
				continue next
			}
		}
		total += v
	}
	return total
}

// collectGarbage makes the gateway's memory comparable. The heap's profile
// with a collection first is the one thing that asks the runtime for it.
func (g *gateway) collectGarbage() {
	g.t.Helper()
	for range 2 { // a second one frees what finalizers and pools held
		if status, _, err := g.get("/debug/pprof/heap?gc=1"); err != nil || status != http.StatusOK {
			g.t.Fatalf("collect garbage: %d, %v", status, err)
		}
	}
}

func (g *gateway) proc(name string) string {
	return fmt.Sprintf("/proc/%d/%s", g.cmd.Process.Pid, name)
}

// descriptors is how many the process has open.
func (g *gateway) descriptors() int {
	g.t.Helper()
	entries, err := os.ReadDir(g.proc("fd"))
	if err != nil {
		g.t.Fatal(err)
	}
	return len(entries)
}

// rss is the process's resident memory in bytes.
func (g *gateway) rss() int64 { return g.kilobytes("status", "VmRSS:") << 10 }

// pss is the same with shared pages counted in parts.
func (g *gateway) pss() int64 { return g.kilobytes("smaps_rollup", "Pss:") << 10 }

func (g *gateway) kilobytes(file, key string) (n int64) {
	g.t.Helper()
	b, err := os.ReadFile(g.proc(file))
	if err != nil {
		g.t.Fatal(err)
	}
	_, rest, _ := bytes.Cut(b, []byte("\n"+key))
	if _, err := fmt.Sscan(string(rest), &n); err != nil {
		g.t.Fatalf("%s of %s: %v", key, file, err)
	}
	return n
}

// cpu is the processor time the process has used.
func (g *gateway) cpu() time.Duration {
	g.t.Helper()
	b, err := os.ReadFile(g.proc("stat"))
	if err != nil {
		g.t.Fatal(err)
	}
	// The fields after the command's name, which may have spaces in it.
	f := strings.Fields(string(b[bytes.LastIndexByte(b, ')')+1:]))
	var user, system int64
	if _, err := fmt.Sscan(f[11]+" "+f[12], &user, &system); err != nil {
		g.t.Fatal(err)
	}
	const tick = time.Second / 100 // USER_HZ
	return time.Duration(user+system) * tick
}

// dial connects to the listener from the n-th source address.
func (g *gateway) dial(n int) (*net.TCPConn, error) { return dialFrom(n, g.addr) }

// mustDial is dial that ends the test where it fails, and closes with it.
func (g *gateway) mustDial(n int) *net.TCPConn {
	g.t.Helper()
	c, err := g.dial(n)
	if err != nil {
		g.t.Fatal(err)
	}
	g.t.Cleanup(func() { _ = c.Close() })
	return c
}
