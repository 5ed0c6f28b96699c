//go:build linux

package main

import (
	"context"
	_ "embed"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"time"
)

// Addresses that no host has: those of a net lead to the agent, to redsocks, and to what stands
// in its place.
const (
	capturedNet, redirectedNet, plainNet, floorNet = "10.76.0.0/16", "10.77.0.0/16", "10.78.0.0/16", "10.79.0.0/16"
	capturedTo, redirectedTo, plainTo, floorTo     = "10.76.0.1:443", "10.77.0.1:443", "10.78.0.1:443", "10.79.0.1:443"
)

// An agentWay is how a program reaches a service, and a column of the table.
type agentWay struct {
	name    string
	program string // that has to be installed; "" for culvert itself
	version func(ctx context.Context) string

	start func(b *agentBench, r rig) (*exec.Cmd, error) // what stands beside the program; nil for nothing
	as    string                                        // the way of which that is, where it is not its own
	gate  bool                                          // it goes by the gateway
	wrap  func(b *agentBench) ([]string, error)         // what the program is started by
	proxy func(b *agentBench, beside string) string     // what the program asks by CONNECT; nil for nothing
	to    func(b *agentBench) string                    // what the program asks for
}

func besides(_ *agentBench, beside string) string { return beside }

func byName(*agentBench) string { return serviceName(0) + ":443" }

// agentWays lists them.
func agentWays() []agentWay {
	says := func(text string) func(context.Context) string { return func(context.Context) string { return text } }
	return []agentWay{
		{name: "direct", version: says("no proxy"), to: func(b *agentBench) string { return b.rig.target(0) }},
		{
			name: "gateway", gate: true, version: says("the program asks the gateway by CONNECT, without TLS"),
			proxy: func(b *agentBench, _ string) string { return b.gateway }, to: byName,
		},
		{
			name: "agent", gate: true, version: says("the program asks the agent by CONNECT, and the agent asks the gateway by connect-h2 inside of TLS"),
			start: (*agentBench).agent, proxy: besides, to: byName,
		},
		{
			name: "in-its-place", gate: true, version: says("a gateway in the place of the agent, which asks the other one in the same way"),
			start: (*agentBench).inItsPlace, proxy: besides, to: byName,
		},
		{
			name: "captured", gate: true, version: says("the program knows nothing of the agent, which captures its connections"),
			as: "agent", to: func(*agentBench) string { return capturedTo },
		},
		{
			name: "captured-plain", gate: true, version: says("the same capture, by a gateway that asks the other one by CONNECT without TLS, as redsocks does"),
			start: (*agentBench).capturedPlain, to: func(*agentBench) string { return plainTo },
		},
		{
			name: "captured-floor", gate: true, version: says("what that costs in Go and the kernel alone: the original destination, a CONNECT and two goroutines; no names, limits or policies"),
			start: (*agentBench).capturedFloor, to: func(*agentBench) string { return floorTo },
		},
		{
			name: "redsocks", program: "redsocks", gate: true, version: func(ctx context.Context) string {
				return firstLine(ctx, "redsocks", "-v") + ": a rule of nftables leads to it, and it asks the gateway by CONNECT, without TLS"
			},
			start: (*agentBench).redsocks, to: func(*agentBench) string { return redirectedTo },
		},
		{
			name: "proxychains", program: "proxychains4", gate: true, version: says("proxychains4: a library in the program, which asks the gateway by CONNECT, without TLS"),
			wrap: (*agentBench).proxychains,
			to:   func(*agentBench) string { return redirectedTo },
		},
	}
}

// gatewayConfig is a gateway that is asked at r.listen without TLS, and at apart(r.listen) with it.
func (b *agentBench) gatewayConfig(r rig) (*exec.Cmd, error) {
	file, err := r.write("gateway.yaml", fmt.Sprintf(`listeners:
  - {address: "%s", protocols: [connect]}
%s  - {address: "%s", tls: {protocols: [connect-h2, connect], certificateFile: %s, keyFile: %s, clientCAFile: {bench.test: %s}}}
admin: %s
limits: {maxPendingConnections: -1, maxPendingPerClient: -1, maxConnectionsPerClient: -1, connectionRatePerClient: -1}
log: {level: error}
services:
  - {name: %s, ports: [443], addresses: [10.76.0.1, 10.77.0.1, 10.79.0.1], endpoints: ["%s"]}
`, r.listen, b.outside, apart(r.listen), keyFile("bench.crt"), keyFile("bench.key"), keyFile("ca.crt"), r.admin, serviceName(0), r.target(0)))
	return exec.Command(r.culvert, "gateway", "--config", file), err
}

// agent is an agent with its defaults, but for the log and what a gateway offers.
func (b *agentBench) agent(r rig) (*exec.Cmd, error) {
	return agentCommand(r, apart(b.gateway), "  capture: {cidrs: ["+capturedNet+"]}\n")
}

// agentCommand is an agent of a gateway, with more in its part of the file.
func agentCommand(r rig, gateway, more string) (*exec.Cmd, error) {
	file, err := r.write("agent.yaml", fmt.Sprintf(`agent:
  gateway: "%s"
  certificateFile: %s
  keyFile: %s
  caFile: %s
  serverName: %s
  transports: [connect-h2]
  catalog: false
  names: [%s]
  proxy: "%s"
%slog: {level: error}
services:
  - {name: %[6]s, ports: [443], addresses: [10.76.0.1], endpoints: [{address: "%[6]s:443", network: gateways}]}
`, gateway, keyFile("bench.crt"), keyFile("bench.key"), keyFile("ca.crt"), quicName, serviceName(0), r.listen, more))
	return exec.Command(r.culvert, "agent", "--config", file), err
}

// inItsPlace does by a gateway what the agent does.
func (b *agentBench) inItsPlace(r rig) (*exec.Cmd, error) {
	file, err := r.write("place.yaml", fmt.Sprintf(`listeners: [{address: "%s", protocols: [connect]}]
admin: %s
limits: {maxPendingConnections: -1, maxPendingPerClient: -1, maxConnectionsPerClient: -1, connectionRatePerClient: -1}
log: {level: error}
services:
  - name: %s
    ports: [443]
    endpoints: ["%[3]s:443"]
    via: [{connect-h2: "https://%s", serverName: %s, certificateFile: %s, keyFile: %s, caFile: %s}]
`, r.listen, r.admin, serviceName(0), apart(b.gateway), quicName, keyFile("bench.crt"), keyFile("bench.key"), keyFile("ca.crt")))
	return exec.Command(r.culvert, "gateway", "--config", file), err
}

// capturedPlain does by culvert what redsocks does.
func (b *agentBench) capturedPlain(r rig) (*exec.Cmd, error) {
	if err := redirect("plain", plainNet, r.listen); err != nil {
		return nil, err
	}
	file, err := r.write("plain.yaml", fmt.Sprintf(`listeners: [{address: "%s", protocols: [captured]}]
admin: %s
limits: {maxPendingConnections: -1, maxPendingPerClient: -1, maxConnectionsPerClient: -1, connectionRatePerClient: -1}
log: {level: error}
services:
  - name: %s
    ports: [443]
    addresses: [10.78.0.1]
    endpoints: ["%[3]s:443"]
    via: [{connect: "%s"}]
`, r.listen, r.admin, serviceName(0), b.gateway))
	return exec.Command(r.culvert, "gateway", "--config", file), err
}

// capturedFloor does no more than it has to.
func (b *agentBench) capturedFloor(r rig) (*exec.Cmd, error) {
	if err := redirect("floor", floorNet, r.listen); err != nil {
		return nil, err
	}
	config, err := json.Marshal(naiveConfig{Reverse: "captured", Listen: r.listen, At: b.gateway})
	if err != nil {
		return nil, err
	}
	file, err := r.write("captured-floor.json", string(config))
	if err != nil {
		return nil, err
	}
	self, err := os.Executable()
	return exec.Command(self, "-role", "naive", "-naive-config", file), err
}

// redirect leads connections to a net to a listener on loopback.
func redirect(name, net, listen string) error {
	rules := fmt.Sprintf("table inet bench-%s { chain out { type nat hook output priority -100; ip daddr %s tcp dport 443 redirect to :%d; }; }",
		name, net, netip.MustParseAddrPort(listen).Port())
	if out, err := exec.Command("nft", rules).CombinedOutput(); err != nil {
		return fmt.Errorf("nft: %w: %s", err, out)
	}
	return nil
}

func (b *agentBench) redsocks(r rig) (*exec.Cmd, error) {
	host, port, err := net.SplitHostPort(r.listen)
	if err != nil {
		return nil, err
	}
	to, toPort, err := net.SplitHostPort(b.gateway)
	if err != nil {
		return nil, err
	}
	file, err := r.write("redsocks.conf", fmt.Sprintf(`base { log_debug = off; log_info = off; log = "stderr"; daemon = off; redirector = iptables; }
redsocks { local_ip = %s; local_port = %s; ip = %s; port = %s; type = http-connect; }
`, host, port, to, toPort))
	if err != nil {
		return nil, err
	}
	if err := redirect("redsocks", redirectedNet, r.listen); err != nil {
		return nil, err
	}
	return exec.Command("redsocks", "-c", file), nil
}

// proxychains is what a program is started by, for its library to be in it.
func (b *agentBench) proxychains() ([]string, error) {
	host, port, err := net.SplitHostPort(b.gateway)
	if err != nil {
		return nil, err
	}
	file, err := b.rig.write("proxychains.conf", fmt.Sprintf("strict_chain\nquiet_mode\n[ProxyList]\nhttp %s %s\n", host, port))
	return []string{"proxychains4", "-q", "-f", file}, err
}

//go:embed agent_load.py
var agentLoad string

// An agentJob is what the program does.
type agentJob struct {
	Op      string        `json:"op"` // "conns", "trips", "down"
	To      string        `json:"to"`
	Proxy   string        `json:"proxy"`   // asked by CONNECT; "" for none
	Opening string        `json:"opening"` // base64
	Time    time.Duration `json:"time"`
}

// An agentReport is what came of it.
type agentReport struct {
	Count int           `json:"count"`
	Bytes uint64        `json:"bytes"`
	Took  time.Duration `json:"took"`
	P50   time.Duration `json:"p50"` // of a connection, or a round trip
	Err   string        `json:"err"`
}

// A program does jobs.
type program struct{ *helper }

// startProgram starts the program, by wrap if there is one.
func startProgram(r rig, wrap []string) (*program, error) {
	file, err := r.write("load.py", agentLoad)
	if err != nil {
		return nil, err
	}
	args := append(wrap, "/usr/bin/python3", file)
	h, err := startCommand(exec.Command(args[0], args[1:]...))
	if err != nil {
		return nil, err
	}
	return &program{h}, nil
}

// do does a job of the service with the smallest number.
func (p *program) do(ctx context.Context, j agentJob) (r agentReport, err error) {
	h, err := hello(serviceName(0))
	if err != nil {
		return r, err
	}
	cmd, arg := byte(cmdEcho), uint64(0)
	if j.Op == "down" {
		cmd, arg = cmdDownload, uint64(j.Time.Milliseconds())
	}
	j.Opening = base64.StdEncoding.EncodeToString(opening(h, cmd, arg))
	line, err := json.Marshal(j)
	if err != nil {
		return r, err
	}
	if err := ctx.Err(); err != nil {
		return r, err
	}
	if _, err := p.in.Write(append(line, '\n')); err != nil {
		return r, fmt.Errorf("the program is gone: %w", err)
	}
	answer, err := p.out.ReadBytes('\n')
	if err != nil {
		return r, fmt.Errorf("the program is gone: %w", err)
	}
	if err := json.Unmarshal(answer, &r); err != nil {
		return r, fmt.Errorf("the program said %q: %w", answer, err)
	}
	if r.Err == "" && r.Count == 0 && r.Bytes == 0 {
		r.Err = "nothing was done"
	}
	if r.Err != "" {
		err = fmt.Errorf("%s: %s", j.Op, r.Err)
	}
	return r, err
}
