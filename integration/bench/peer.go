//go:build linux

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"
)

// A peer is one of the proxies, or none: a direct connection.
type peer struct {
	name    string
	version func(ctx context.Context) string
	command func(r rig) (*exec.Cmd, error) // nil for a direct connection
}

// A rig is what a peer is started with.
type rig struct {
	dir     string // its own, for configuration
	listen  string // address of its listener
	backend uint16 // port of the backend, on eight addresses
	culvert string // path of the binary
}

// target returns where service i is served.
func (r rig) target(i int) string {
	return netip.AddrPortFrom(netip.AddrFrom4(loopback(i)), r.backend).String()
}

func (r rig) write(name, text string) (string, error) {
	path := filepath.Join(r.dir, name)
	return path, os.WriteFile(path, []byte(text), 0o644)
}

// A running is a started peer.
type running struct {
	*peer
	addr netip.AddrPort
	cmd  *exec.Cmd
	log  string
	done chan error
	pids []int
}

// start starts the peer and waits until an echo comes back through it.
func (p *peer) start(ctx context.Context, r rig) (*running, error) {
	if p.command == nil {
		addr, err := netip.ParseAddrPort(r.target(0))
		return &running{peer: p, addr: addr}, err
	}
	var err error
	if r.dir, err = os.MkdirTemp(r.dir, p.name+"-"); err != nil {
		return nil, err
	}
	if r.listen, err = freeAddr(); err != nil {
		return nil, err
	}
	cmd, err := p.command(r)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", p.name, err)
	}
	run := &running{peer: p, cmd: cmd, log: filepath.Join(r.dir, "log"), done: make(chan error, 1)}
	if run.addr, err = netip.ParseAddrPort(r.listen); err != nil {
		return nil, err
	}
	log, err := os.Create(run.log)
	if err != nil {
		return nil, err
	}
	defer log.Close()
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL, Setpgid: true}
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("%s: %w", p.name, err)
	}
	go func() { run.done <- cmd.Wait() }()
	if err := run.ready(ctx); err != nil {
		run.stop()
		text, _ := os.ReadFile(run.log)
		return nil, fmt.Errorf("%s: %w\n%s", p.name, err, text)
	}
	run.pids = family(cmd.Process.Pid)
	return run, nil
}

// freeAddr returns a loopback address with a port that was free a moment ago.
func freeAddr() (string, error) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", err
	}
	defer ln.Close()
	return ln.Addr().String(), nil
}

func (r *running) ready(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	var last error
	for {
		select {
		case <-ctx.Done():
			return fmt.Errorf("not ready: %w", last)
		case err := <-r.done:
			r.done <- err
			return fmt.Errorf("ended at start: %w", errors.Join(err, last))
		case <-tick.C:
		}
		if last = echoThrough(ctx, r.addr.String()); last == nil {
			return nil
		}
	}
}

// echoThrough checks that a hello and an echo pass unchanged, for the last
// service of the table.
func echoThrough(ctx context.Context, addr string) error {
	h, err := hello(serviceName(services - 1))
	if err != nil {
		return err
	}
	var d net.Dialer
	c, err := d.DialContext(ctx, "tcp", addr)
	if err != nil {
		return err
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(time.Second))
	if _, err := c.Write(append(opening(h, cmdEcho, 0), "are you there?"...)); err != nil {
		return err
	}
	got := make([]byte, len("are you there?"))
	if _, err := io.ReadFull(c, got); err != nil {
		return err
	}
	if string(got) != "are you there?" {
		return fmt.Errorf("the echo is %q", got)
	}
	return nil
}

// stop ends the peer with all its processes.
func (r *running) stop() {
	if r.cmd == nil {
		return
	}
	_ = syscall.Kill(-r.cmd.Process.Pid, syscall.SIGKILL)
	<-r.done
	r.done <- nil
}

// peers lists who takes part, in the order of the table.
func peers(culvert string) []*peer {
	return []*peer{
		{"culvert", func(ctx context.Context) string { return firstLine(ctx, culvert, "version") }, culvertCommand},
		{"haproxy", func(ctx context.Context) string { return firstLine(ctx, "haproxy", "-v") }, haproxyCommand},
		{"nginx", func(ctx context.Context) string { return firstLine(ctx, "nginx", "-v") }, nginxCommand},
		{"naive", func(context.Context) string { return "two goroutines and io.Copy" }, naiveCommand},
		{"direct", func(context.Context) string { return "no proxy" }, nil},
	}
}

func firstLine(ctx context.Context, name string, args ...string) string {
	out, err := exec.CommandContext(ctx, name, args...).CombinedOutput()
	if err != nil {
		return err.Error()
	}
	line, _, _ := strings.Cut(string(out), "\n")
	return line
}
