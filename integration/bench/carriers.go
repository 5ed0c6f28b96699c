//go:build linux

package main

import (
	"cmp"
	"context"
	"fmt"
	"os/exec"
	"strings"

	"culvert.dev/connect"
	"culvert.dev/connect/h2"
	"culvert.dev/connect/h3"
	"culvert.dev/connect/hbone"
	"culvert.dev/connect/socks5"
	"culvert.dev/connect/ws"
	"culvert.dev/tunnel"
)

// A carrier is a way to a service through a proxy, and a row of the table of
// carriers.
type carrier struct {
	name   string
	prefix string                           // of the names of its services
	dial   func(proxy string) tunnel.Dialer // nil where the hello says where to
	shared bool                             // its tunnels share connections
	single bool                             // it carries datagrams one by one, and no streams
	most   int                              // idle tunnels that are weighed; 0 for as many as of others

	// rival is the nearest thing that HAProxy does, or by says who; nil for
	// nothing like it.
	rival func(r rig) (*exec.Cmd, error)
	by    string
}

// rivalName is who else does it.
func (c *carrier) rivalName() string { return cmp.Or(c.by, "haproxy") }

// carriers lists them. Whoever adds one adds a row here, and its protocol to
// carriersConfig.
func carriers() []carrier {
	return []carrier{
		{name: "sni", prefix: "svc", rival: haproxyCommand(haproxyPipe)},
		{name: "proxyProtocol out", prefix: "prx"},
		{name: "proxyProtocol in", prefix: "svc",
			dial: func(to string) tunnel.Dialer { return behindProxy(by(to, proxiedHost)) }},
		{name: "port per service", prefix: "svc",
			dial: func(to string) tunnel.Dialer { return toPort(by(to, ownHost)) }},
		{name: "connect", prefix: "svc", rival: haproxyHTTP(""),
			dial: func(to string) tunnel.Dialer { return &connect.Dialer{Proxy: to} }},
		{name: "socks5", prefix: "svc",
			dial: func(to string) tunnel.Dialer { return &socks5.Dialer{Proxy: to} }},
		{name: "websocket", prefix: "svc",
			dial: func(to string) tunnel.Dialer { return &ws.Dialer{URL: "ws://" + to} }},
		{name: "connect-h2", prefix: "svc", shared: true, rival: haproxyHTTP("proto h2"),
			dial: func(to string) tunnel.Dialer { return oneConnection(to) }},
		{name: "websocket over h2", prefix: "svc", shared: true,
			dial: func(to string) tunnel.Dialer { return overHTTP2(to) }},
		{name: "hbone", prefix: "svc", shared: true,
			dial: func(to string) tunnel.Dialer { return &hbone.Dialer{Gateway: apart(to), TLS: toProxy()} }},
		{name: "connect-h3", prefix: "svc", shared: true,
			dial: func(to string) tunnel.Dialer { return &h3.Dialer{Proxy: to, TLS: toProxy(), Parallel: 1} }},
		{name: "quic passthrough", prefix: "svc", most: 400, rival: nginxDatagrams, by: "nginx",
			dial: func(to string) tunnel.Dialer { return toQUIC(by(to, byNameHost)) }},
		{name: "udp", prefix: "svc", single: true, rival: nginxDatagrams, by: "nginx",
			dial: func(to string) tunnel.Dialer { return toUDP(by(to, udpHost)) }},
	}
}

// oneConnection puts all tunnels on one connection, as long as it takes more.
func oneConnection(to string) *h2.Dialer { return &h2.Dialer{Proxy: to, Parallel: 1} }

// A webSockets shares the connections of a pool between WebSockets.
type webSockets struct {
	ws.Dialer
	pool *h2.Dialer
}

func overHTTP2(to string) *webSockets {
	d := &webSockets{pool: oneConnection(to)}
	d.URL = "ws://" + to
	d.Extended = d.pool.Open
	return d
}

func (d *webSockets) Close() error { return d.pool.Close() }

// service is what the carrier asks for service i by.
func (c *carrier) service(i int) string { return c.prefix + strings.TrimPrefix(serviceName(i), "svc") }

// find returns the carrier of that name.
func find(name string) (*carrier, error) {
	if way, ok := strings.CutPrefix(name, lossPrefix); ok {
		return findLossWay(way)
	}
	for _, c := range carriers() {
		if c.name == name {
			return &c, nil
		}
	}
	for _, k := range policyKinds() {
		if k.name == name {
			return &k.carrier, nil
		}
	}
	for _, k := range tlsKinds() {
		if k.name == name {
			k.prefix = "svc"
			return &k.carrier, nil
		}
	}
	return nil, fmt.Errorf("no such carrier: %q", name)
}

// contestants are culvert with each carrier, and what HAProxy has to compare.
func contestants(chosen func(line, proxy string) bool) []*peer {
	var all []*peer
	for _, c := range carriers() {
		ready := func(ctx context.Context, addr string) error {
			return (&caller{carrier: &c, to: addr}).echo(ctx)
		}
		if chosen(c.name, us) {
			all = append(all, &peer{name: c.name, carrier: &c, ready: ready, command: carriersCommand, collect: collectCulvert, tunnels: c.most})
		}
		if line := c.name + ", " + c.rivalName(); c.rival != nil && chosen(line, c.rivalName()) {
			all = append(all, &peer{name: line, carrier: &c, ready: ready, command: c.rival, tunnels: c.most})
		}
	}
	return all
}

func carriersCommand(r rig) (*exec.Cmd, error) {
	file, err := carriersConfig(r)
	if err != nil {
		return nil, err
	}
	return exec.Command(r.culvert, "gateway", "--config", file), nil
}

// carriersConfig has every way in on one port, but for TLS that ends there and what can't be told apart, and each
// service a second time with a PROXY header.
func carriersConfig(r rig) (string, error) {
	var b strings.Builder
	fmt.Fprintf(&b, `listeners:
  - address: %s
    protocols: [sni, connect, connect-h2, socks5, websocket]
  - address: %s
    tls: {protocols: [hbone], certificateFile: %[3]s, keyFile: %[4]s, clientCAFile: %[5]s}
  - address: udp://%[1]s
    tls: {certificateFile: %[3]s, keyFile: %[4]s}
  - address: %[7]s
    protocols: [sni]
    proxyProtocol: {from: [127.0.0.0/8]}
  - address: %[8]s
    service: %[9]s
  - address: udp://%[10]s
  - address: udp://%[11]s
    service: udp.bench.test
admin: %[6]s
limits: {udpIdleTimeout: 1h, maxTunnels: 0, maxPendingConnections: -1, maxPendingPerClient: -1, maxConnectionsPerClient: -1, connectionRatePerClient: -1, firstByteTimeout: 60s, handshakeTimeout: 60s}
log: {level: error}
services:
  - {name: udp.bench.test, endpoints: ["%[12]s:%[14]d"]}
  - {name: %[15]s, endpoints: ["%[13]s:%[14]d"]}
`, r.listen, apart(r.listen), keyFile("bench.crt"), keyFile("bench.key"), keyFile("ca.crt"), r.admin,
		by(r.listen, proxiedHost), by(r.listen, ownHost), serviceName(0), by(r.listen, byNameHost), by(r.listen, udpHost), echoHost, quicHost, r.backend, quicName)
	for i := range services {
		for prefix, more := range map[string]string{"svc": "", "prx": "    proxyProtocol: v2\n"} {
			c := carrier{prefix: prefix}
			fmt.Fprintf(&b, "  - name: %s\n    endpoints: [\"%s\"]\n%s", c.service(i), r.target(i), more)
		}
	}
	return r.write("culvert.yaml", b.String())
}

// haproxyHTTP passes on CONNECT, to services that answer it themselves:
// HAProxy is no proxy in HTTP's sense. The option is one of its listener.
func haproxyHTTP(option string) func(r rig) (*exec.Cmd, error) {
	return func(r rig) (*exec.Cmd, error) {
		var b strings.Builder
		fmt.Fprintf(&b, `global
	nbthread 2
	maxconn 8500
defaults
	mode http
	timeout connect 5s
	timeout client 1h
	timeout server 1h
	timeout tunnel 1h
frontend http
	bind %s %s
`, r.listen, option)
		for i := range services {
			fmt.Fprintf(&b, "\tuse_backend b%d if { hdr(host),lower -m beg %s }\n", i, serviceName(i))
		}
		for i := range services {
			fmt.Fprintf(&b, "backend b%d\n\tserver s %s\n", i, r.target(i))
		}
		file, err := r.write("haproxy.cfg", b.String())
		if err != nil {
			return nil, err
		}
		return exec.Command("haproxy", "-db", "-q", "-f", file), nil
	}
}

// carrierSteps are what is done with each carrier. The ids are those of
// carrierRows.
func carrierSteps() []step {
	var all []step
	for _, n := range []int{1, 64} {
		all = append(all, step{name: fmt.Sprintf("trips%d", n), run: func(ctx context.Context, s *suite, p *running) (map[string]float64, error) {
			r, cpu, err := s.measure(ctx, p, job{Op: "trips", N: n})
			return map[string]float64{
				fmt.Sprintf("trips%d", n):    float64(r.Count) / r.Took.Seconds(),
				fmt.Sprintf("p99trips%d", n): micros(r.P99),
				fmt.Sprintf("cputrips%d", n): micros(cpu) / float64(r.Count),
			}, err
		}})
		for _, way := range []string{"up", "down"} {
			id := fmt.Sprintf("%s%d", way, n)
			all = append(all, step{name: id, streams: true, run: func(ctx context.Context, s *suite, p *running) (map[string]float64, error) {
				r, cpu, err := s.measure(ctx, p, job{Op: way, N: n})
				return map[string]float64{
					id:         float64(r.Bytes) / 1e6 / r.Took.Seconds(),
					"cpu" + id: cpu.Seconds() / (float64(r.Bytes) / 1e9),
				}, err
			}})
		}
	}
	return append(all,
		step{name: "idle", run: func(ctx context.Context, s *suite, p *running) (map[string]float64, error) {
			kib, _, err := s.weigh(ctx, p.peer, "hold", s.tunnels)
			return map[string]float64{"idlemem": kib}, err
		}},
		// Last: what is stalled is only let go when a proxy ends.
		step{name: "beside", shared: true, run: func(ctx context.Context, s *suite, p *running) (map[string]float64, error) {
			// A process of its own, as it is no use to anybody after this.
			fresh, err := p.start(ctx, s.rig)
			if err != nil {
				return nil, err
			}
			defer fresh.stop()
			r, err := s.do(ctx, fresh, job{Op: "beside", N: 1, Time: s.slice})
			if r.Errors > 0 {
				s.trouble = append(s.trouble, fmt.Sprintf("%s: beside a stalled stream: %s", p.name, r.Err))
			}
			return map[string]float64{"beside": micros(r.P99)}, err
		}},
	)
}

// carrierRows are the columns of the table of carriers.
func carrierRows() []row {
	return []row{
		{id: "trips1", title: "trips/s, 1"},
		{id: "trips64", title: "trips/s, 64"},
		{id: "p99trips1", title: "p99 us, 1"},
		{id: "p99trips64", title: "p99 us, 64"},
		{id: "cputrips64", title: "CPU us a trip, 64", digit: 1},
		{id: "up1", title: "up MB/s, 1"},
		{id: "up64", title: "up MB/s, 64"},
		{id: "down1", title: "down MB/s, 1"},
		{id: "down64", title: "down MB/s, 64"},
		{id: "cpuup1", title: "CPU s/GB up, 1", digit: 2},
		{id: "cpuup64", title: "CPU s/GB up, 64", digit: 2},
		{id: "cpudown1", title: "CPU s/GB down, 1", digit: 2},
		{id: "cpudown64", title: "CPU s/GB down, 64", digit: 2},
		{id: "idlemem", title: "KiB an idle tunnel", digit: 2},
		{id: "beside", title: "p99 us beside a stalled one"},
	}
}
