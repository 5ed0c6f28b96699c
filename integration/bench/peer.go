//go:build linux

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"time"
)

// A peer is one of the proxies, or none: a direct connection.
type peer struct {
	name    string
	version func(ctx context.Context) string
	command func(r rig) (*exec.Cmd, error) // nil for a direct connection

	// connector is a second process, started once the first one listens at apart(r.listen);
	// nil for none.
	connector func(r rig) (*exec.Cmd, error)

	collect func(ctx context.Context, r *running) error // makes it collect its garbage; nil if it has none
	tunnels int                                         // the most it can hold; 0 for as many as are asked for
	bulk    bool                                        // takes part only where bulk is measured
	trips   bool                                        // takes part only where round trips are
	logs    bool                                        // takes part only where new connections and what rests are

	carrier *carrier                                     // how it is asked, for a caller; nil for the hello alone
	ready   func(ctx context.Context, addr string) error // whether it carries; nil asks by a hello
}

// A rig is what a peer is started with.
type rig struct {
	dir     string // its own, for configuration
	listen  string // address of its listener
	admin   string // address of its admin port, for a peer that has one
	backend uint16 // port of the backend, on eight addresses
	culvert string // path of the binary
	routes  int    // in culvert's table; the others have what they usually have
	origin  string // address of the resolver that DNS servers forward to
	syslog  string // address of a local syslog

	programs string // folder of what is built to measure beside

	tlsService string // address of a service inside TLS
	late       bool   // policies admit lateCaller, too
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
	rig  rig
	addr netip.AddrPort
	cmd  *exec.Cmd
	far  *exec.Cmd // the connector; nil for none
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
	if r.dir, err = os.MkdirTemp(r.dir, "peer-"); err != nil {
		return nil, err
	}
	if r.listen, err = freeAddr(); err != nil {
		return nil, err
	}
	if r.admin, err = freeAddr(); err != nil {
		return nil, err
	}
	if r.routes == 0 {
		r.routes = services
	}
	cmd, err := p.command(r)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", p.name, err)
	}
	run := &running{peer: p, rig: r, cmd: cmd, log: filepath.Join(r.dir, "log"), done: make(chan error, 1)}
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
	if p.connector != nil {
		err = run.connect(ctx, log)
	}
	if err == nil {
		err = run.await(ctx)
	}
	if err != nil {
		run.stop()
		text, _ := os.ReadFile(run.log)
		return nil, fmt.Errorf("%s: %w\n%s", p.name, err, text)
	}
	run.pids = family(cmd.Process.Pid)
	if run.far != nil {
		run.pids = append(run.pids, family(run.far.Process.Pid)...)
	}
	return run, nil
}

// connect starts the connector.
func (r *running) connect(ctx context.Context, log *os.File) error {
	first := *r.peer
	first.ready = func(ctx context.Context, addr string) error { return listens(ctx, apart(addr)) }
	if err := (&running{peer: &first, rig: r.rig, addr: r.addr, done: r.done}).await(ctx); err != nil {
		return err
	}
	cmd, err := r.connector(r.rig)
	if err != nil {
		return err
	}
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL, Setpgid: true}
	if err := cmd.Start(); err != nil {
		return err
	}
	r.far = cmd
	return nil
}

// lastPort counts the ports that freeAddr has tried.
var lastPort atomic.Int32

// freeAddr returns a loopback address whose port is free, of TCP and of UDP. No two calls
// return the same, and the kernel takes none of them for an outgoing connection: they are
// below its range.
func freeAddr() (string, error) {
	const first, ports = 20000, 10000 // those of testnet.FreePort are below
	var err error
	for range ports {
		addr := fmt.Sprintf("127.0.0.1:%d", first+(os.Getpid()*131+int(lastPort.Add(1)))%ports)
		var ln net.Listener
		if ln, err = net.Listen("tcp", addr); err != nil {
			continue
		}
		var pc net.PacketConn
		if pc, err = net.ListenPacket("udp", addr); err == nil {
			_ = pc.Close()
		}
		_ = ln.Close()
		if err == nil {
			return addr, nil
		}
	}
	return "", err
}

// await waits until r carries.
func (r *running) await(ctx context.Context) error {
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
		var err error
		if r.ready != nil {
			err = r.ready(ctx, r.addr.String())
		} else {
			err = echoThrough(ctx, r.addr.String(), serviceName(r.rig.routes-1))
		}
		if err == nil {
			return nil
		}
		if last == nil || ctx.Err() == nil { // the end of the time says nothing of the cause
			last = err
		}
	}
}

// echoThrough checks that a hello for name and an echo pass unchanged.
func echoThrough(ctx context.Context, addr, name string) error {
	h, err := hello(name)
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
	if r.far != nil {
		_ = syscall.Kill(-r.far.Process.Pid, syscall.SIGKILL)
		_ = r.far.Wait()
	}
	_ = syscall.Kill(-r.cmd.Process.Pid, syscall.SIGKILL)
	<-r.done
	r.done <- nil
}

// peers lists who takes part, in the order of the table.
func peers(culvert string) []*peer {
	haproxy := func(ctx context.Context) string { return firstLine(ctx, "haproxy", "-v") }
	return []*peer{
		{
			name: "culvert", command: culvertCommand, collect: collectCulvert,
			version: func(ctx context.Context) string { return firstLine(ctx, culvert, "version") },
		},
		{name: "haproxy", command: haproxyCommand(haproxyPipe), version: haproxy},
		{
			name: usDefault, command: culvertDefaultsCommand, logs: true,
			version: func(context.Context) string {
				return "the same culvert with its default settings: an access log, and limits"
			},
		},
		{
			name: themLogging, command: haproxyLoggingCommand, logs: true,
			version: func(context.Context) string { return "the same HAProxy with option tcplog, to a local syslog" },
		},
		{
			name: "haproxy-default", command: haproxyCommand(0), bulk: true,
			version: func(context.Context) string { return "the same HAProxy with pipes of the default size, for bulk" },
		},
		{
			name: "nginx", command: nginxCommand,
			version: func(ctx context.Context) string { return firstLine(ctx, "nginx", "-v") },
		},
		{
			// Six descriptors a tunnel, of 20,000 that a process often may have.
			name: "naive", command: naiveCommand, collect: collectNaive, tunnels: 3000,
			version: func(context.Context) string { return "two goroutines and io.Copy" },
		},
		{
			name: "bare", command: bareCommand, collect: collectNaive, bulk: true,
			version: func(context.Context) string { return "nothing but splice(2), for bulk: the floor" },
		},
		{
			name: "floor", command: floorCommand, trips: true,
			version: func(context.Context) string {
				return "nothing but epoll_wait(2), read(2) and write(2), for round trips: the floor"
			},
		},
		{name: "direct", version: func(context.Context) string { return "no proxy" }},
	}
}

// collectCulvert asks for a heap profile, which begins with a collection.
func collectCulvert(ctx context.Context, r *running) error {
	_, err := fetch(ctx, "http://"+r.rig.admin+"/debug/pprof/heap?gc=1")
	return err
}

func collectNaive(_ context.Context, r *running) error {
	return r.cmd.Process.Signal(syscall.SIGUSR1)
}

// fetch gets what is at url.
func fetch(ctx context.Context, url string) ([]byte, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return nil, err
	}
	// Nothing is kept: a peer's descriptors are counted.
	req.Close = true
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err == nil && resp.StatusCode != http.StatusOK {
		err = fmt.Errorf("GET %s: %s: %s", url, resp.Status, body)
	}
	return body, err
}

func firstLine(ctx context.Context, name string, args ...string) string {
	out, err := exec.CommandContext(ctx, name, args...).CombinedOutput()
	if err != nil {
		return err.Error()
	}
	line, _, _ := strings.Cut(string(out), "\n")
	return line
}
