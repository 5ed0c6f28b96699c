//go:build linux

package main

import (
	"context"
	"crypto/tls"
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"regexp"
	"time"

	"culvert.dev/tunnel"
)

// An origination is TLS that a proxy speaks to a service, and a table of its own.
type origination struct {
	carrier
	title   string
	culvert string // keys of its listener, beside the address
	ends    bool   // TLS of clients, too
	nginx   string // of its listen, after the address, and of its server
}

// originations lists them.
func originations() []origination {
	return []origination{
		{
			carrier: carrier{name: "originated", dial: func(to string) tunnel.Dialer { return toPort(to) }},
			title:   "Originated: the client speaks no TLS, and the proxy speaks it to the service.",
			culvert: "service: " + serviceName(0) + ":443",
			nginx:   "reuseport backlog=4096;",
		},
		{
			carrier: carrier{name: "re-encrypted", dial: toTLS},
			title:   "Re-encrypted: TLS of the client ends at the proxy, by the same certificate, and the proxy speaks TLS to the service.",
			culvert: fmt.Sprintf("tls: {certificateFile: %s, keyFile: %s, names: [%s], protocols: [tcp]}", keyFile("bench.crt"), keyFile("bench.key"), quicName),
			ends:    true,
			nginx: fmt.Sprintf("ssl reuseport backlog=4096; ssl_certificate %s; ssl_certificate_key %s; ssl_protocols TLSv1.2 TLSv1.3; ssl_session_tickets off; ssl_conf_command Ciphersuites TLS_AES_128_GCM_SHA256;",
				keyFile("bench.crt"), keyFile("bench.key")),
		},
	}
}

// toTLS dials what ends TLS.
func toTLS(to string) tunnel.Dialer {
	config := toProxy()
	config.ServerName = quicName
	return dialFunc(func(ctx context.Context) (net.Conn, error) {
		return (&tls.Dialer{Config: config}).DialContext(ctx, "tcp", to)
	})
}

// An originationBench measures TLS to services.
type originationBench struct {
	*suite
	kinds []originationPart
}

type originationPart struct {
	origination
	suite *suite
}

// newOriginations is the part of the suite about them, for those that o names.
func (s *suite) newOriginations(o options) (*originationBench, error) {
	re, err := regexp.Compile(o.originate)
	if err != nil {
		return nil, fmt.Errorf("-originate: %w", err)
	}
	only, err := regexp.Compile(o.only)
	if err != nil {
		return nil, fmt.Errorf("-only: %w", err)
	}
	b := &originationBench{suite: s}
	for _, kind := range originations() {
		if !re.MatchString(kind.name) {
			continue
		}
		part := *s
		part.steps, part.role, part.results, part.trouble, part.live = originationSteps(), "carry", make(results), nil, nil
		part.peers = nil
		for _, p := range kind.peers() {
			if only.MatchString(p.name) {
				part.peers = append(part.peers, p)
			}
		}
		b.kinds = append(b.kinds, originationPart{kind, &part})
	}
	return b, nil
}

func (b *originationBench) run(ctx context.Context) error {
	for _, kind := range b.kinds {
		services, err := startHelper("tlsservice")
		if err != nil {
			return err
		}
		if _, err = fmt.Fscanln(services.out, &kind.suite.rig.tlsService); err == nil {
			err = kind.suite.run(ctx)
		}
		services.stop()
		if err != nil {
			return fmt.Errorf("%s: %w", kind.name, err)
		}
	}
	return nil
}

const originationPreface = `
## TLS to services

Each connection to the service is a full handshake of TLS 1.3 with ECDSA P-256, X25519 and AES-128-GCM in which the proxy verifies the
service's certificate; no session is resumed. culvert also offers a post-quantum key share (X25519MLKEM768), which the others do not have
and the service does not take: an eighth of culvert's CPU per connection. The service and the load generator are Go programs, whose cost
is in no figure but takes the cores. Each cell: median, median ratio to haproxy in the same round, half the range.
`

// report writes the tables.
func (b *originationBench) report(w io.Writer) {
	if len(b.kinds) > 0 {
		_, _ = io.WriteString(w, originationPreface)
	}
	for _, kind := range b.kinds {
		fmt.Fprintf(w, "\n%s\n\n", kind.title)
		var names []string
		for _, p := range kind.suite.peers {
			names = append(names, p.name)
		}
		kind.suite.results.table(w, names, "haproxy", originationRows())
		for _, t := range kind.suite.trouble {
			fmt.Fprintf(w, "\nTROUBLE  %s\n", t)
		}
	}
}

// originationSteps are what is done. The ids are those of originationRows.
func originationSteps() []step {
	all := []step{{name: "conns64", run: func(ctx context.Context, s *suite, p *running) (map[string]float64, error) {
		r, cpu, err := s.measure(ctx, p, job{Op: "conns", N: 64})
		return map[string]float64{"conns64": float64(r.Count) / r.Took.Seconds(), "cpuconns64": micros(cpu) / float64(r.Count)}, err
	}}}
	for _, way := range []string{"up", "down"} {
		for _, n := range []int{1, 16} {
			id := fmt.Sprintf("%s%d", way, n)
			all = append(all, step{name: id, run: func(ctx context.Context, s *suite, p *running) (map[string]float64, error) {
				r, cpu, err := s.measure(ctx, p, job{Op: way, N: n})
				return map[string]float64{id: float64(r.Bytes) / 1e6 / r.Took.Seconds(), "cpu" + id: cpu.Seconds() / (float64(r.Bytes) / 1e9)}, err
			}})
		}
	}
	return all
}

// originationRows are the lines of a table.
func originationRows() []row {
	return []row{
		{id: "conns64", title: "full handshakes/s, 64 workers", more: true},
		{id: "cpuconns64", title: "CPU per connection, 64 workers, us", digit: 1},
		{id: "up1", title: "upload, 1 flow, MB/s", more: true},
		{id: "up16", title: "upload, 16 flows, MB/s", more: true},
		{id: "down1", title: "download, 1 flow, MB/s", more: true},
		{id: "down16", title: "download, 16 flows, MB/s", more: true},
		{id: "cpuup1", title: "CPU per GB, upload, 1 flow, s", digit: 3},
		{id: "cpuup16", title: "CPU per GB, upload, 16 flows, s", digit: 3},
		{id: "cpudown1", title: "CPU per GB, download, 1 flow, s", digit: 3},
		{id: "cpudown16", title: "CPU per GB, download, 16 flows, s", digit: 3},
	}
}

// peers are who does it.
func (o *origination) peers() []*peer {
	o.prefix = "svc"
	ready := func(ctx context.Context, addr string) error {
		return (&caller{carrier: &o.carrier, to: addr}).echo(ctx)
	}
	return []*peer{
		{name: us, carrier: &o.carrier, ready: ready, command: o.culvertCommand, collect: collectCulvert},
		{name: "haproxy", carrier: &o.carrier, ready: ready, command: o.haproxyCommand},
		{name: "nginx", carrier: &o.carrier, ready: ready, command: o.nginxCommand},
	}
}

func (o *origination) culvertCommand(r rig) (*exec.Cmd, error) {
	file, err := r.write("culvert.yaml", fmt.Sprintf(`listeners:
  - {address: "%s", %s}
admin: %s
limits: {maxPendingConnections: -1, firstByteTimeout: 60s, handshakeTimeout: 60s}
log: {level: error}
services:
  - names: [%s, %[5]s]
    ports: [443]
    endpoints: ["%[6]s"]
    tls: {serverName: %[5]s, caFile: %[7]s}
`, r.listen, o.culvert, r.admin, serviceName(0), quicName, r.tlsService, keyFile("ca.crt")))
	if err != nil {
		return nil, err
	}
	return exec.Command(r.culvert, "gateway", "--config", file), nil
}

func (o *origination) haproxyCommand(r rig) (*exec.Cmd, error) {
	options := ""
	if o.ends {
		var both []byte // HAProxy wants the key in the same file
		for _, name := range []string{"bench.crt", "bench.key"} {
			pem, err := os.ReadFile(keyFile(name))
			if err != nil {
				return nil, err
			}
			both = append(both, pem...)
		}
		file, err := r.write("both.pem", string(both))
		if err != nil {
			return nil, err
		}
		options = "ssl crt " + file
	}
	file, err := r.write("haproxy.cfg", fmt.Sprintf(`global
	nbthread 2
	maxconn 8500
	ssl-default-bind-ciphersuites TLS_AES_128_GCM_SHA256
	ssl-default-server-ciphersuites TLS_AES_128_GCM_SHA256
defaults
	mode tcp
	timeout connect 5s
	timeout client 1h
	timeout server 1h
listen services
	bind %s %s
	server s %s ssl verify required ca-file %s sni str(%[5]s) verifyhost %[5]s no-ssl-reuse
`, r.listen, options, r.tlsService, keyFile("ca.crt"), quicName))
	if err != nil {
		return nil, err
	}
	return exec.Command("haproxy", "-db", "-q", "-f", file), nil
}

func (o *origination) nginxCommand(r rig) (*exec.Cmd, error) {
	file, err := r.write("nginx.conf", fmt.Sprintf(`load_module %s;
daemon off;
user root;
pid %s/pid;
error_log stderr error;
worker_processes 2;
worker_rlimit_nofile 20000;
events {
	worker_connections 16384;
}
stream {
	proxy_timeout 1h;
	proxy_half_close on;
	server {
		listen %s %s
		proxy_pass %s;
		proxy_ssl on;
		proxy_ssl_verify on;
		proxy_ssl_trusted_certificate %s;
		proxy_ssl_name %s;
		proxy_ssl_server_name on;
		proxy_ssl_session_reuse off;
		proxy_ssl_protocols TLSv1.2 TLSv1.3;
	}
}
`, nginxModule, r.dir, r.listen, o.nginx, r.tlsService, keyFile("ca.crt"), quicName))
	if err != nil {
		return nil, err
	}
	return exec.Command("nginx", "-p", r.dir, "-c", file), nil
}

// tlsServiceMain is a service inside TLS, as backendMain is one without. It prints its
// address and serves until its standard input ends.
func tlsServiceMain() error {
	pair, err := tls.LoadX509KeyPair(keyFile("bench.crt"), keyFile("bench.key"))
	if err != nil {
		return err
	}
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	config := &tls.Config{
		Certificates: []tls.Certificate{pair}, MinVersion: tls.VersionTLS13, CurvePreferences: []tls.CurveID{tls.X25519},
		SessionTicketsDisabled: true, DynamicRecordSizingDisabled: true,
	}
	go func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			go serveInside(tls.Server(c, config))
		}
	}()
	fmt.Println(ln.Addr())
	_, err = io.Copy(io.Discard, os.Stdin)
	return err
}

// serveInside does what the client's opening says.
func serveInside(c *tls.Conn) {
	defer c.Close()
	head := make([]byte, 5)
	if _, err := io.ReadFull(c, head); err != nil {
		return
	}
	rest := make([]byte, helloLen(head)-len(head)+commandLen)
	if _, err := io.ReadFull(c, rest); err != nil {
		return
	}
	command := rest[len(rest)-commandLen:]
	switch buf := make([]byte, 64<<10); command[0] {
	case cmdEcho:
		for {
			n, err := c.Read(buf)
			if err == nil {
				_, err = c.Write(buf[:n])
			}
			if err != nil {
				return
			}
		}
	case cmdUpload:
		count := uint64(0)
		for {
			n, err := c.Read(buf)
			if count += uint64(n); err != nil {
				break
			}
		}
		_, _ = c.Write(binary.BigEndian.AppendUint64(nil, count))
	case cmdDownload:
		until := time.Now().Add(time.Duration(binary.BigEndian.Uint64(command[8:])) * time.Millisecond)
		for time.Now().Before(until) {
			if _, err := c.Write(buf); err != nil {
				return
			}
		}
		_ = c.CloseWrite()
		_, _ = io.Copy(io.Discard, c)
	default:
		fmt.Fprintf(os.Stderr, "bench: the TLS service got the command %q: a proxy changed the stream\n", command[0])
	}
}
