//go:build unix

package interop

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"culvert.dev/internal/testnet"
)

// look finds a program, or fails the test.
func look(t *testing.T, name string) string {
	t.Helper()
	if name == "culvert" {
		return culvert
	}
	path, err := exec.LookPath(name)
	if err != nil {
		t.Fatalf("%s is not installed: run make peers", name)
	}
	return path
}

// environ is what programs are started with: none of the proxies and
// certificates that may be configured here.
func environ() []string {
	env := []string{"LC_ALL=C", "GORACE=atexit_sleep_ms=0"}
	for _, name := range []string{"PATH", "HOME", "TMPDIR"} {
		if v, ok := os.LookupEnv(name); ok {
			env = append(env, name+"="+v)
		}
	}
	return env
}

// A process is a program that runs beside the test.
type process struct {
	name  string
	cmd   *exec.Cmd
	stdin io.WriteCloser
	ended chan struct{} // closed when it has been waited for
	err   error         // of the wait, once ended is closed

	mu       sync.Mutex // guards what follows
	out, all bytes.Buffer
}

// A sink is standard output or standard error of a process.
type sink struct {
	p      *process
	stdout bool
}

func (s sink) Write(b []byte) (int, error) {
	s.p.mu.Lock()
	defer s.p.mu.Unlock()
	if s.stdout {
		s.p.out.Write(b)
	}
	return s.p.all.Write(b)
}

// start starts a program. It and its children are killed at the end of the
// test, and what it said is shown if the test failed. The standard input
// stays open until the end, or until the test closes it.
func start(t *testing.T, name string, args ...string) *process {
	t.Helper()
	cmd := exec.Command(look(t, name), args...)
	cmd.Env = environ()
	return startCmd(t, cmd)
}

func startCmd(t *testing.T, cmd *exec.Cmd) *process {
	t.Helper()
	p := &process{name: cmd.Args[0], cmd: cmd, ended: make(chan struct{})}
	cmd.Stdout, cmd.Stderr = sink{p, true}, sink{p, false}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.WaitDelay = time.Second
	stdin, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	p.stdin = stdin
	if err := cmd.Start(); err != nil {
		t.Fatalf("start %s: %v", p.name, err)
	}
	go func() {
		p.err = cmd.Wait()
		close(p.ended)
	}()
	t.Cleanup(func() {
		p.signal(syscall.SIGKILL)
		<-p.ended
		if t.Failed() {
			t.Logf("%s said:\n%s", p.name, p.output())
		}
	})
	return p
}

// signal sends sig to the program and its children.
func (p *process) signal(sig syscall.Signal) { _ = syscall.Kill(-p.cmd.Process.Pid, sig) }

// stdout returns what the program wrote so far to standard output.
func (p *process) stdout() []byte {
	p.mu.Lock()
	defer p.mu.Unlock()
	return bytes.Clone(p.out.Bytes())
}

// output returns all that the program wrote so far.
func (p *process) output() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.all.String()
}

func (p *process) over() bool {
	select {
	case <-p.ended:
		return true
	default:
		return false
	}
}

// awaitEnd waits until the program has ended, which it was told to.
func (p *process) awaitEnd(t *testing.T) {
	t.Helper()
	select {
	case <-p.ended:
	case <-time.After(3 * patience):
		t.Fatalf("%s did not end", p.name)
	}
}

// await waits until cond is true, and fails the test if that takes too long
// or the program ends first.
func (p *process) await(t *testing.T, what string, cond func() bool) {
	t.Helper()
	ok := false
	testnet.Eventually(t, patience, func() bool {
		over := p.over() // before cond: its last words may be what is waited for
		ok = cond()
		return ok || over
	}, "%s: %s", p.name, what)
	if !ok {
		t.Fatalf("%s ended (%v) and had not %s", p.name, p.err, what)
	}
}

// says waits until the program has written text.
func (p *process) says(t *testing.T, text string) {
	t.Helper()
	p.await(t, fmt.Sprintf("said %q", text), func() bool { return strings.Contains(p.output(), text) })
}

// listens waits until addr accepts connections.
func (p *process) listens(t *testing.T, addr string) {
	t.Helper()
	p.await(t, "listened at "+addr, func() bool {
		c, err := net.DialTimeout("tcp", addr, time.Second)
		if err == nil {
			_ = c.Close()
		}
		return err == nil
	})
}

// command runs a program to its end and returns its output and exit code.
func command(t *testing.T, name string, args ...string) (stdout, stderr string, code int) {
	t.Helper()
	cmd := exec.Command(look(t, name), args...)
	cmd.Env = environ()
	return runCmd(t, cmd)
}

// inside returns a command of a client program: in the network of those.
func (w *world) inside(t *testing.T, name string, args ...string) *exec.Cmd {
	t.Helper()
	all := append(append(w.within[:len(w.within):len(w.within)], look(t, name)), args...)
	cmd := exec.Command(all[0], all[1:]...)
	cmd.Env = environ()
	return cmd
}

func runCmd(t *testing.T, cmd *exec.Cmd) (stdout, stderr string, code int) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 2*patience)
	defer cancel()
	limited := exec.CommandContext(ctx, cmd.Path, cmd.Args[1:]...)
	limited.Dir, limited.Env, limited.Stdin = cmd.Dir, cmd.Env, cmd.Stdin
	limited.WaitDelay = time.Second
	var out, errs bytes.Buffer
	limited.Stdout, limited.Stderr = &out, &errs
	err := limited.Run()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) || ctx.Err() != nil {
		t.Fatalf("%s: %v\n%s%s", limited, err, out.String(), errs.String())
	}
	return out.String(), errs.String(), limited.ProcessState.ExitCode()
}

// freePort returns a port of loopback that is the test's own until its end.
func freePort(t *testing.T) string {
	t.Helper()
	_, port, err := net.SplitHostPort(testnet.FreePort(t))
	if err != nil {
		t.Fatal(err)
	}
	return port
}

// withInput is culvert with something on its standard input.
func withInput(t *testing.T, input string, args ...string) *exec.Cmd {
	t.Helper()
	cmd := exec.Command(look(t, "culvert"), args...)
	cmd.Env, cmd.Stdin = environ(), strings.NewReader(input)
	return cmd
}
