//go:build unix

package command

import (
	"os"
	"syscall"
)

// passedOn are the signals that the program of exec gets.
var passedOn = []os.Signal{syscall.SIGTERM, syscall.SIGHUP, syscall.SIGINT, syscall.SIGQUIT, syscall.SIGUSR1, syscall.SIGUSR2, syscall.SIGALRM}

// passOn passes a signal on. Those of the keyboard go to all processes of a terminal, and so
// have reached the program.
func passOn(p *os.Process, s os.Signal) {
	if s == syscall.SIGINT || s == syscall.SIGQUIT {
		if info, err := os.Stdin.Stat(); err == nil && info.Mode()&os.ModeCharDevice != 0 && info.Name() != "null" {
			return
		}
	}
	_ = p.Signal(s)
}

// exitCode returns the exit code of a program as a shell has it.
func exitCode(p *os.ProcessState) int {
	if w, ok := p.Sys().(syscall.WaitStatus); ok && w.Signaled() {
		return 128 + int(w.Signal())
	}
	return p.ExitCode()
}
