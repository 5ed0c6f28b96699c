//go:build linux

package main

import (
	"context"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"time"
)

// A pairing is two programs that give a service that nobody can dial an address or a name:
// one that clients reach, and one that connects to it.
type pairing struct {
	name    string
	program string // built by "make bench" and found in rig.programs; "" for what is installed
	version func(ctx context.Context, folder string) string

	gateway   func(r rig) (*exec.Cmd, error) // clients reach it at r.listen, and connectors at apart(r.listen)
	connector func(r rig) (*exec.Cmd, error)
	collect   func(ctx context.Context, r *running) error

	// holds has so many idle sessions with a gateway: sessions of this job of the
	// connectors' process. "" where none are weighed.
	holds    string
	sessions int
}

// pairings lists them, the first one as what the others are compared with.
func pairings() []pairing {
	return []pairing{
		{
			name: us, version: func(ctx context.Context, _ string) string { return "HTTP/2 inside of TLS 1.3, its default" },
			gateway: reverseGateway, connector: reverseConnector(0), collect: collectCulvert, holds: "reverse", sessions: 1000,
		},
		{
			name: us + "-pool", version: func(context.Context, string) string { return "the same with `poolConnections: 5`" },
			gateway: reverseGateway, connector: reverseConnector(5), collect: collectCulvert,
		},
		{
			name: "frp", program: "frps", version: func(ctx context.Context, folder string) string {
				return firstLine(ctx, filepath.Join(folder, "frps"), "-v") + ", its default: yamux inside of TLS"
			},
			gateway: frps(true), connector: frpc(true),
		},
		{
			name: "frp-nomux", program: "frps", version: func(context.Context, string) string {
				return "the same frp without multiplexing and without TLS, and five connections in reserve"
			},
			gateway: frps(false), connector: frpc(false),
		},
		{
			name: "tls-floor", version: func(context.Context, string) string {
				return "what the bytes cost in crypto/tls and the kernel alone: no multiplexing, a TLS connection in reserve for each client"
			},
			gateway: tlsFloorCommand("gateway"), connector: tlsFloorCommand("connector"),
		},
		{
			name: "mux-floor", version: func(context.Context, string) string {
				return "what streams on one connection of crypto/tls cost at least: frames of an id and a length, no windows, names or limits"
			},
			gateway: tlsFloorCommand("mux-gateway"), connector: tlsFloorCommand("mux-connector"),
		},
		{
			name: "two-hops", version: func(ctx context.Context, _ string) string {
				return firstLine(ctx, "haproxy", "-v") + ", two of them in a row that splice: no session, no TLS, no NAT, and what two programs cost at least"
			},
			gateway: twoHops, connector: firstHop,
		},
		{
			name: "chisel", program: "chisel", version: func(context.Context, string) string { return "1.10.1: SSH in a WebSocket" },
			gateway: func(r rig) (*exec.Cmd, error) {
				host, port, err := net.SplitHostPort(apart(r.listen))
				return exec.Command(filepath.Join(r.programs, "chisel"), "server", "--host", host, "--port", port, "--reverse"), err
			},
			connector: func(r rig) (*exec.Cmd, error) {
				return exec.Command(filepath.Join(r.programs, "chisel"), "client", "--max-retry-interval", "1s", "http://"+apart(r.listen), "R:"+r.listen+":"+r.target(0)), nil
			},
		},
		{
			name: "sshd", version: func(ctx context.Context, _ string) string { return firstLine(ctx, "ssh", "-V") + ", ssh -R" },
			gateway: sshd, connector: func(r rig) (*exec.Cmd, error) { return sshReverse(r, r.listen+":"+r.target(0)), nil },
			holds: "ssh", sessions: 200,
		},
		{
			name: us + "-ssh", version: func(context.Context, string) string { return "the same ssh -R, to culvert" },
			gateway: reverseGateway, connector: func(r rig) (*exec.Cmd, error) {
				return sshReverse(r, serviceName(0)+":443:"+r.target(0)), nil
			},
			collect: collectCulvert, holds: "ssh", sessions: 1000,
		},
		{
			name: "ssh-floor", version: func(context.Context, string) string {
				return "the same ssh -R, to golang.org/x/crypto/ssh alone: no names, limits or policies"
			},
			gateway: tlsFloorCommand("ssh"), connector: func(r rig) (*exec.Cmd, error) { return sshReverse(r, r.listen+":"+r.target(0)), nil },
		},
	}
}

// reverseGateway takes sessions by TLS with a client certificate, and by SSH, on one port.
func reverseGateway(r rig) (*exec.Cmd, error) {
	file, err := r.write("culvert.yaml", fmt.Sprintf(`listeners:
  - {address: "%s", protocols: [sni]}
  - address: "%s"
    protocols: [ssh, sni, reverse-pool]
    ssh: {hostKeyFile: %s, authorizedKeysFile: %s}
    tls: [{names: [%s], protocols: [connect], certificateFile: %s, keyFile: %s, clientCAFile: {bench.test: %s}}]
admin: %s
limits: {maxPendingConnections: -1, maxPendingPerClient: -1, maxConnectionsPerClient: -1, connectionRatePerClient: -1, firstByteTimeout: 60s, handshakeTimeout: 60s}
log: {level: error}
policies:
  - name: connectors
    verb: register
    action: allow
    targets: {names: [%s]}
    rules: [{sources: [{spiffe: [%s]}, {users: [bench]}]}]
services: []
`, r.listen, apart(r.listen), keyFile("ssh"), keyFile("authorized_keys"), quicName, keyFile("bench.crt"), keyFile("bench.key"), keyFile("ca.crt"),
		r.admin, serviceName(0), identity))
	if err != nil {
		return nil, err
	}
	return exec.Command(r.culvert, "gateway", "--config", file), nil
}

func reverseConnector(pool int) func(r rig) (*exec.Cmd, error) {
	return func(r rig) (*exec.Cmd, error) {
		file, err := r.write("connector.yaml", fmt.Sprintf(`admin: %s
log: {level: error}
reverse:
  to: [%s]
  poolConnections: %d
  serverName: %s
  certificateFile: %s
  keyFile: %s
  caFile: %s
  expose:
    - {name: %s, to: "%s"}
`, apart(r.admin), apart(r.listen), pool, quicName, keyFile("bench.crt"), keyFile("bench.key"), keyFile("ca.crt"), serviceName(0), r.target(0)))
		if err != nil {
			return nil, err
		}
		return exec.Command(r.culvert, "gateway", "--config", file), nil
	}
}

func frps(mux bool) func(r rig) (*exec.Cmd, error) {
	return func(r rig) (*exec.Cmd, error) {
		bind, port, err := net.SplitHostPort(apart(r.listen))
		if err != nil {
			return nil, err
		}
		open, _, err := net.SplitHostPort(r.listen)
		if err != nil {
			return nil, err
		}
		file, err := r.write("frps.toml", fmt.Sprintf("bindAddr = %q\nbindPort = %s\nproxyBindAddr = %q\ntransport.tcpMux = %t\nlog.level = \"error\"\n", bind, port, open, mux))
		return exec.Command(filepath.Join(r.programs, "frps"), "-c", file), err
	}
}

func frpc(mux bool) func(r rig) (*exec.Cmd, error) {
	return func(r rig) (*exec.Cmd, error) {
		gateway, port, err := net.SplitHostPort(apart(r.listen))
		if err != nil {
			return nil, err
		}
		host, local, err := net.SplitHostPort(r.target(0))
		if err != nil {
			return nil, err
		}
		transport := ""
		if !mux {
			transport = "transport.tcpMux = false\ntransport.tls.enable = false\ntransport.poolCount = 5\n"
		}
		file, err := r.write("frpc.toml", fmt.Sprintf("serverAddr = %q\nserverPort = %[2]s\nloginFailExit = false\nlog.level = \"error\"\n%s\n[[proxies]]\nname = \"bench\"\ntype = \"tcp\"\nlocalIP = %q\nlocalPort = %s\nremotePort = %[2]s\n",
			gateway, port, transport, host, local))
		return exec.Command(filepath.Join(r.programs, "frpc"), "-c", file), err
	}
}

func sshd(r rig) (*exec.Cmd, error) {
	program, err := exec.LookPath("sshd")
	if err != nil {
		return nil, err
	}
	if err := os.MkdirAll("/run/sshd", 0o755); err != nil { // which Debian's sshd needs
		return nil, err
	}
	_, port, err := net.SplitHostPort(apart(r.listen))
	if err != nil {
		return nil, err
	}
	file, err := r.write("sshd_config", fmt.Sprintf(`ListenAddress 127.0.0.2
Port %s
HostKey %s
AuthorizedKeysFile %s
PidFile none
StrictModes no
UsePAM no
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin yes
AllowTcpForwarding yes
GatewayPorts clientspecified
MaxStartups 2000
MaxSessions 1000
LogLevel ERROR
`, port, keyFile("ssh"), keyFile("authorized_keys")))
	return exec.Command(program, "-D", "-e", "-f", file), err
}

// sshReverse is a stock client of SSH that forwards what comes as ssh -R says.
func sshReverse(r rig, forward string) *exec.Cmd {
	_, port, _ := net.SplitHostPort(apart(r.listen))
	return exec.Command("ssh", "-F", "/dev/null", "-N", "-T", "-i", keyFile("ssh"), "-p", port, "-o", "BatchMode=yes", "-o", "IdentitiesOnly=yes",
		"-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null", "-o", "LogLevel=ERROR", "-o", "ExitOnForwardFailure=yes",
		"-R", forward, "127.0.0.2")
}

// A reverseBench measures reverse sessions beside those of other programs.
type reverseBench struct {
	*suite
	pairings []pairing
	idle     bool
}

// newReverse is the part of the suite about reverse sessions, for the programs that o names.
// They are found in the folder beside culvert that "make bench" builds them into.
func (s *suite) newReverse(o options) (*reverseBench, error) {
	re, err := regexp.Compile(o.reverse)
	if err != nil {
		return nil, fmt.Errorf("-reverse: %w", err)
	}
	part := *s
	part.steps, part.role, part.results, part.trouble, part.live, part.peers = reverseSteps(), "load", make(results), nil, nil, nil
	part.slice, part.rig.routes, part.names = min(s.slice, time.Second), 1, 1
	if part.rig.programs, err = filepath.Abs(filepath.Join(filepath.Dir(o.culvert), "peers")); err != nil {
		return nil, err
	}
	b := &reverseBench{suite: &part, idle: s.only.MatchString("idle")}
	for _, p := range pairings() {
		if !re.MatchString(p.name) {
			continue
		}
		if p.program != "" {
			if _, err := exec.LookPath(filepath.Join(part.rig.programs, p.program)); err != nil {
				return nil, fmt.Errorf("%s takes part and is not there (\"make bench\" builds it; leave it out with -reverse): %w", p.name, err)
			}
		}
		b.pairings = append(b.pairings, p)
		part.peers = append(part.peers, &peer{name: p.name, command: p.gateway, connector: p.connector, collect: p.collect})
	}
	return b, nil
}

func (b *reverseBench) run(ctx context.Context) error {
	if len(b.pairings) == 0 {
		return nil
	}
	if err := makeSSHKeys(); err != nil {
		return err
	}
	if slices.ContainsFunc(reverseSteps(), func(st step) bool { return b.only.MatchString(st.name) }) {
		if err := b.suite.run(ctx); err != nil {
			return fmt.Errorf("reverse sessions: %w", err)
		}
	}
	for _, p := range b.pairings {
		if p.holds == "" || !b.idle {
			continue
		}
		fmt.Fprintf(b.log, "idle sessions: %s\n", p.name)
		kib, err := b.weighSessions(ctx, p)
		if err != nil {
			return fmt.Errorf("idle sessions: %s: %w", p.name, err)
		}
		b.results.add("idle", p.name, kib)
	}
	return nil
}

// weighSessions returns the memory in KiB that the gateway of p needs for each idle session:
// the slope from a quarter of them to all.
func (b *reverseBench) weighSessions(ctx context.Context, p pairing) (float64, error) {
	gateway := &peer{name: p.name, command: p.gateway, collect: p.collect, ready: func(ctx context.Context, addr string) error {
		return listens(ctx, apart(addr))
	}}
	run, err := gateway.start(ctx, b.rig)
	if err != nil {
		return 0, err
	}
	defer run.stop()
	helper, err := startHelper("connectors")
	if err != nil {
		return 0, err
	}
	defer helper.stop()
	connectors := &generator{helper: helper}
	var mem [2]float64
	n := b.sessions(p)
	for i, more := range []int{n / 4, n - n/4} {
		if _, err := connectors.do(ctx, job{Op: p.holds, To: run.addr, N: more}); err != nil {
			return 0, err
		}
		run.pids = family(run.cmd.Process.Pid) // sshd has a process for each
		if mem[i], _, err = b.settled(ctx, run); err != nil {
			return 0, err
		}
	}
	return (mem[1] - mem[0]) / float64(n-n/4), nil
}

// sessions is how many are weighed: fewer in a short run.
func (b *reverseBench) sessions(p pairing) int { return min(p.sessions, b.tunnels) }

// listens returns nil where something accepts connections at addr.
func listens(ctx context.Context, addr string) error {
	c, err := new(net.Dialer).DialContext(ctx, "tcp", addr)
	if err == nil {
		_ = c.Close()
	}
	return err
}

// reverseSteps are what is done with each of them. The ids are those of reverseRows.
func reverseSteps() []step {
	const mib, gib = 1 << 20, 1 << 30
	all := []step{
		{name: "open", run: func(ctx context.Context, s *suite, p *running) (map[string]float64, error) {
			r, _, err := s.measure(ctx, p, job{Op: "conns", N: 1})
			return map[string]float64{"open": r.Took.Seconds() * 1e3 / float64(r.Count)}, err
		}},
		{name: "trips", run: func(ctx context.Context, s *suite, p *running) (map[string]float64, error) {
			r, _, err := s.measure(ctx, p, job{Op: "trips", N: 1})
			return map[string]float64{"trip": r.Took.Seconds() * 1e3 / float64(r.Count)}, err
		}},
	}
	for _, n := range []int{1, 16} {
		id := fmt.Sprintf("down%d", n)
		all = append(all, step{name: id, run: func(ctx context.Context, s *suite, p *running) (map[string]float64, error) {
			r, cpu, err := s.measure(ctx, p, job{Op: "down", N: n})
			if err != nil {
				return nil, err
			}
			values := map[string]float64{id: float64(r.Bytes) / mib / r.Took.Seconds(), "cpu" + id: cpu.Seconds() / (float64(r.Bytes) / gib)}
			if n > 1 {
				kib, err := pss(p.pids)
				if err != nil {
					return nil, err
				}
				values["mem"] = kib / 1024
			}
			return values, nil
		}})
	}
	return append(all, step{name: "beside", run: func(ctx context.Context, s *suite, p *running) (map[string]float64, error) {
		r, _, err := s.measure(ctx, p, job{Op: "beside", N: 1})
		return map[string]float64{"beside": float64(r.P99) / 1e6}, err
	}})
}

// reverseRows are the lines of the table.
func reverseRows() []row {
	return []row{
		{id: "down1", title: "download, 1 stream, MiB/s", more: true, than: "frp", ratio: 1.15},
		{id: "down16", title: "download, 16 streams, MiB/s", more: true, than: "frp", ratio: 1.3},
		{id: "cpudown1", title: "CPU per GiB of both, 1 stream, s", digit: 2, limit: 2.1},
		{id: "cpudown16", title: "CPU per GiB of both, 16 streams, s", digit: 2},
		{id: "mem", title: "memory of both (PSS), after 16 streams, MiB", digit: 1},
		{id: "open", title: "connection and first byte, ms", digit: 3, limit: 0.4},
		{id: "trip", title: "round trip, ms", digit: 3, than: "sshd", ratio: 1},
		{id: "beside", title: "p99 of round trips beside a download, ms", digit: 2, limit: 5},
		{id: "idle", title: "memory of the gateway for an idle session (PSS), KiB", digit: 1, limit: 60},
	}
}

// poolRows are the targets of pool connections.
func poolRows() []row {
	return []row{
		{id: "down1", title: "pool connections, download, 1 stream, MiB/s", more: true, than: "frp-nomux", ratio: 1.2},
		{id: "cpudown1", title: "pool connections, CPU per GiB of both, 1 stream, s", digit: 2, limit: 0.6},
	}
}

// sshRows are the targets of SSH.
func sshRows() []row {
	return []row{
		{id: "cpudown1", title: "ssh -R, CPU per GiB of both, 1 stream, s", digit: 2, than: "sshd", ratio: 1},
		{id: "open", title: "ssh -R, connection and first byte, ms", digit: 3, limit: 2},
		{id: "idle", title: "ssh -R, memory of the gateway for an idle session (PSS), KiB", digit: 1, limit: 150},
	}
}

const reversePreface = `
## Reverse sessions

Two programs of a kind give a service that nobody can dial an address: one that clients reach, and one that connects to it. CPU and memory are of
both. **Connection and first byte** is a TCP connection to the first, 64 bytes to the service and back, and the end. **Beside a download** is a round
trip of 64 bytes on a stream while another one takes all it can. **An idle session** is one of %d with a gateway (sshd: 200), each with a name or a
port; their clients are one process, which is not weighed. Each cell: median, median ratio to frp in the same round, half the range.

`

// report writes the table.
func (b *reverseBench) report(ctx context.Context, w io.Writer) {
	if len(b.pairings) == 0 {
		return
	}
	fmt.Fprintf(w, reversePreface, min(1000, b.tunnels))
	var names []string
	for _, p := range b.pairings {
		names = append(names, p.name)
		fmt.Fprintf(w, "- %s: %s\n", p.name, p.version(ctx, b.rig.programs))
	}
	fmt.Fprintln(w)
	b.results.table(w, names, "frp", reverseRows())
	fmt.Fprint(w, "\n```\n")
	b.results.judgeRows(w, us, reverseRows())
	b.results.judgeRows(w, us+"-pool", poolRows())
	b.results.judgeRows(w, us+"-ssh", sshRows())
	fmt.Fprint(w, "```\n")
	for _, t := range b.trouble {
		fmt.Fprintf(w, "\nTROUBLE  %s\n", t)
	}
}
