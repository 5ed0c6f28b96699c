package cluster

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"time"
)

// A Process is a program that the harness runs. Its output goes to a file.
type Process struct {
	Name string
	Log  string // the file with all of its output

	cmd  *exec.Cmd
	done chan struct{} // closed when it has ended; then err is set
	err  error
}

var logSerial atomic.Int64

// startProcess starts a command with its output in a new file of dir. ns is the
// network that it runs in, nil for that of the sandbox.
func startProcess(name, dir string, ns *network, cmd *exec.Cmd) (*Process, error) {
	file := name
	if _, err := os.Stat(filepath.Join(dir, file+".log")); err == nil {
		file = fmt.Sprintf("%s.%d", name, logSerial.Add(1))
	}
	log, err := os.Create(filepath.Join(dir, file+".log"))
	if err != nil {
		return nil, err
	}
	defer log.Close()
	cmd.Stdout, cmd.Stderr = log, log
	if err := ns.do(cmd.Start); err != nil {
		return nil, fmt.Errorf("starting %s: %w", name, err)
	}
	p := &Process{Name: name, Log: log.Name(), cmd: cmd, done: make(chan struct{})}
	go func() {
		p.err = cmd.Wait()
		close(p.done)
	}()
	return p, nil
}

// Pid is the process's number within the sandbox.
func (p *Process) Pid() int { return p.cmd.Process.Pid }

// Signal sends a signal. A process that has ended is no error.
func (p *Process) Signal(s syscall.Signal) error {
	if err := p.cmd.Process.Signal(s); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return err
	}
	return nil
}

// Done is closed when the process has ended.
func (p *Process) Done() <-chan struct{} { return p.done }

// ExitCode is the status it ended with, 128 and the signal's number if one
// ended it, -1 as long as it runs.
func (p *Process) ExitCode() int {
	select {
	case <-p.done:
	default:
		return -1
	}
	status, ok := p.cmd.ProcessState.Sys().(syscall.WaitStatus)
	if ok && status.Signaled() {
		return 128 + int(status.Signal())
	}
	return p.cmd.ProcessState.ExitCode()
}

// Stop sends SIGTERM, and SIGKILL when grace is over, and waits for the end. It
// says whether SIGTERM was enough.
func (p *Process) Stop(grace time.Duration) bool {
	_ = p.Signal(syscall.SIGTERM)
	_ = p.Signal(syscall.SIGCONT) // or a stopped process would not see the first
	timer := time.NewTimer(grace)
	defer timer.Stop()
	select {
	case <-p.done:
		return true
	case <-timer.C:
		p.Kill()
		return false
	}
}

// Kill sends SIGKILL and waits for the end.
func (p *Process) Kill() {
	_ = p.Signal(syscall.SIGKILL)
	<-p.done
}

// Output is what the process has written until now.
func (p *Process) Output() string {
	b, err := os.ReadFile(p.Log)
	if err != nil {
		return err.Error()
	}
	return string(b)
}

// Tail is the last lines of the output.
func (p *Process) Tail(lines int) string {
	all := strings.Split(strings.TrimSuffix(p.Output(), "\n"), "\n")
	return strings.Join(all[max(0, len(all)-lines):], "\n")
}
