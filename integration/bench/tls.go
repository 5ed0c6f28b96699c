//go:build linux

package main

import (
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"

	"culvert.dev/tunnel"
)

// A tlsKind is one of the ways in which a proxy takes part in TLS, and a table of its own.
type tlsKind struct {
	carrier
	title string

	terminated bool // TLS of the client ends at the proxy
	originated bool // the proxy speaks TLS to the service
	identity   bool // the service is told whose certificate the client has
}

// tlsKinds lists them.
func tlsKinds() []tlsKind {
	return []tlsKind{
		{
			carrier:    carrier{name: "terminated", dial: toTLS},
			title:      "Terminated: TLS of the client ends at the proxy, and the service speaks none.",
			terminated: true,
		},
		{
			carrier:    carrier{name: "originated", dial: func(to string) tunnel.Dialer { return toPort(to) }},
			title:      "Originated: the client speaks no TLS, and the proxy speaks it to the service.",
			originated: true,
		},
		{
			carrier:    carrier{name: "re-encrypted", dial: toTLS},
			title:      "Re-encrypted: TLS of the client ends at the proxy, by the same certificate, and the proxy speaks TLS to the service.",
			terminated: true,
			originated: true,
		},
		{
			carrier:    carrier{name: "identity", dial: toTLS},
			title:      identityTitle,
			terminated: true,
			originated: true,
			identity:   true,
		},
	}
}

const identityTitle = `Re-encrypted, with identity: clients show a certificate to the proxy, and the proxy one to the service, and both are verified.
HAProxy tells the service by send-proxy-v2-ssl, before TLS; culvert inside of it, in the same header with the client's certificate and an assertion that it
signs for each connection, and without the assertion in the second column.`

// toTLS dials what ends TLS. It fails if the proxy has chosen other keys or another cipher
// than the others: their figures could not be compared.
func toTLS(to string) tunnel.Dialer {
	config := toProxy()
	config.ServerName = quicName
	config.CurvePreferences = []tls.CurveID{tls.X25519} // all of them have it
	config.VerifyConnection = func(cs tls.ConnectionState) error {
		if cs.Version != tls.VersionTLS13 || cs.CipherSuite != tls.TLS_AES_128_GCM_SHA256 || cs.CurveID != tls.X25519 || cs.DidResume {
			return fmt.Errorf("bench: got %s with %s and %s, resumed: %t; want a full handshake of TLS 1.3 with TLS_AES_128_GCM_SHA256 and X25519",
				tls.VersionName(cs.Version), tls.CipherSuiteName(cs.CipherSuite), cs.CurveID, cs.DidResume)
		}
		return nil
	}
	return dialFunc(func(ctx context.Context) (net.Conn, error) {
		return (&tls.Dialer{Config: config}).DialContext(ctx, "tcp", to)
	})
}

// A tlsBench measures TLS that the proxies take part in.
type tlsBench struct {
	*suite
	kinds []tlsPart
}

type tlsPart struct {
	tlsKind
	suite *suite
}

// newTLS is the part of the suite about TLS, for the kinds that o names.
func (s *suite) newTLS(o options) (*tlsBench, error) {
	re, err := regexp.Compile(o.tls)
	if err != nil {
		return nil, fmt.Errorf("-tls: %w", err)
	}
	only, err := regexp.Compile(o.only)
	if err != nil {
		return nil, fmt.Errorf("-only: %w", err)
	}
	b := &tlsBench{suite: s}
	for _, kind := range tlsKinds() {
		if !re.MatchString(kind.name) {
			continue
		}
		part := *s
		part.steps, part.role, part.results, part.trouble, part.live = tlsSteps(), "carry", make(results), nil, nil
		part.peers = nil
		for _, p := range kind.peers() {
			if only.MatchString(p.name) {
				part.peers = append(part.peers, p)
			}
		}
		b.kinds = append(b.kinds, tlsPart{kind, &part})
	}
	return b, nil
}

func (b *tlsBench) run(ctx context.Context) error {
	if len(b.kinds) == 0 {
		return nil
	}
	addrs := make(map[string]string) // of the services, by role
	for _, kind := range b.kinds {
		role := "tlsservice"
		if kind.identity {
			role = "identityservice"
		}
		if addrs[role] == "" {
			service, err := startHelper(role)
			if err != nil {
				return err
			}
			defer service.stop()
			var addr string
			if _, err := fmt.Fscanln(service.out, &addr); err != nil {
				return fmt.Errorf("the TLS service's address: %w", err)
			}
			addrs[role] = addr
		}
		kind.suite.rig.tlsService = addrs[role]
		if err := kind.suite.run(ctx); err != nil {
			return fmt.Errorf("%s: %w", kind.name, err)
		}
	}
	return nil
}

const tlsPreface = `
## TLS at the proxy

Each TLS connection, from the client and to the service, is a full handshake of TLS 1.3 with ECDSA P-256, X25519 and AES-128-GCM; no
session is resumed, and no proxy sends tickets. Where the proxy speaks TLS to the service, it verifies the service's certificate, and culvert also offers a
post-quantum key share (X25519MLKEM768), which the others do not have and the service does not take: an eighth of culvert's CPU per
originated connection. The load generator and the service are programs of their own, whose cost is in no figure but takes the cores.
Each cell: median, median ratio to haproxy in the same round, half the range.
`

// report writes the tables.
func (b *tlsBench) report(w io.Writer) {
	if len(b.kinds) > 0 {
		_, _ = io.WriteString(w, tlsPreface)
	}
	for _, kind := range b.kinds {
		fmt.Fprintf(w, "\n%s\n\n", kind.title)
		var names []string
		for _, p := range kind.suite.peers {
			names = append(names, p.name)
		}
		kind.suite.results.table(w, names, "haproxy", tlsRows())
		for _, t := range kind.suite.trouble {
			fmt.Fprintf(w, "\nTROUBLE  %s\n", t)
		}
	}
}

// tlsSteps are what is done. The ids are those of tlsRows.
func tlsSteps() []step {
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

// tlsRows are the lines of a table.
func tlsRows() []row {
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
func (k *tlsKind) peers() []*peer {
	k.prefix = "svc"
	ready := func(ctx context.Context, addr string) error {
		return (&caller{carrier: &k.carrier, to: addr}).echo(ctx)
	}
	if k.identity {
		by := func(forward string) func(rig) (*exec.Cmd, error) {
			return func(r rig) (*exec.Cmd, error) { return k.culvert(r, forward) }
		}
		return []*peer{
			{name: us, carrier: &k.carrier, ready: ready, command: by("{assertion: true}"), collect: collectCulvert},
			{name: us + "-header", carrier: &k.carrier, ready: ready, command: by("{}"), collect: collectCulvert},
			{name: "haproxy", carrier: &k.carrier, ready: ready, command: k.haproxyCommand},
		}
	}
	return []*peer{
		{name: us, carrier: &k.carrier, ready: ready, command: k.culvertCommand, collect: collectCulvert},
		{name: "haproxy", carrier: &k.carrier, ready: ready, command: k.haproxyCommand},
		{name: "nginx", carrier: &k.carrier, ready: ready, command: k.nginxCommand},
	}
}

// endpoint is the address of the service.
func (k *tlsKind) endpoint(r rig) string {
	if k.originated {
		return r.tlsService
	}
	return r.target(0)
}

func (k *tlsKind) culvertCommand(r rig) (*exec.Cmd, error) { return k.culvert(r, "") }

// culvert is the gateway, which tells the service who calls as forward says, if it does.
func (k *tlsKind) culvert(r rig, forward string) (*exec.Cmd, error) {
	listener, service := "service: "+serviceName(0)+":443", ""
	if k.terminated {
		clients := ""
		if k.identity {
			clients = ", clientCAFile: " + keyFile("ca.crt")
		}
		listener = fmt.Sprintf("tls: {certificateFile: %s, keyFile: %s, names: [%s], protocols: [tcp]%s}", keyFile("bench.crt"), keyFile("bench.key"), quicName, clients)
	}
	if k.originated {
		own, identity := "", ""
		if k.identity {
			own = fmt.Sprintf(", certificateFile: %s, keyFile: %s", keyFile("bench.crt"), keyFile("bench.key"))
			identity = "\n    forwardIdentity: " + forward
		}
		service = fmt.Sprintf("tls: {serverName: %s, caFile: %s%s}%s", quicName, keyFile("ca.crt"), own, identity)
	}
	file, err := r.write("culvert.yaml", fmt.Sprintf(`listeners:
  - {address: "%s", %s}
admin: %s
limits: {maxPendingConnections: -1, firstByteTimeout: 60s, handshakeTimeout: 60s}
log: {level: error}
services:
  - names: [%s, %s]
    ports: [443]
    endpoints: ["%s"]
    %s
`, r.listen, listener, r.admin, serviceName(0), quicName, k.endpoint(r), service))
	if err != nil {
		return nil, err
	}
	return exec.Command(r.culvert, "gateway", "--config", file), nil
}

func (k *tlsKind) haproxyCommand(r rig) (*exec.Cmd, error) {
	bind, server := "", ""
	if k.terminated {
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
		bind = "ssl crt " + file
		if k.identity {
			bind += " verify required ca-file " + keyFile("ca.crt")
		}
	}
	if k.originated {
		server = fmt.Sprintf("ssl verify required ca-file %s sni str(%s) verifyhost %[2]s no-ssl-reuse", keyFile("ca.crt"), quicName)
		if k.identity {
			server += " send-proxy-v2-ssl crt " + filepath.Join(r.dir, "both.pem")
		}
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
	server s %s %s
`, r.listen, bind, k.endpoint(r), server))
	if err != nil {
		return nil, err
	}
	// HAProxy 2.6 has no setting for it, and OpenSSL sends two tickets of TLS 1.3 even with
	// no-tls-tickets.
	openssl, err := r.write("openssl.cnf", `openssl_conf = all
[all]
ssl_conf = ssl
[ssl]
system_default = tickets
[tickets]
NumTickets = 0
`)
	if err != nil {
		return nil, err
	}
	cmd := exec.Command("haproxy", "-db", "-q", "-f", file)
	cmd.Env = append(os.Environ(), "OPENSSL_CONF="+openssl)
	return cmd, nil
}

func (k *tlsKind) nginxCommand(r rig) (*exec.Cmd, error) {
	listen, client, service := "", "", ""
	if k.terminated {
		listen = "ssl "
		client = fmt.Sprintf("ssl_certificate %s; ssl_certificate_key %s; ssl_protocols TLSv1.2 TLSv1.3; ssl_conf_command NumTickets 0; ssl_conf_command Ciphersuites TLS_AES_128_GCM_SHA256;",
			keyFile("bench.crt"), keyFile("bench.key"))
	}
	if k.originated {
		service = fmt.Sprintf("proxy_ssl on; proxy_ssl_verify on; proxy_ssl_trusted_certificate %s; proxy_ssl_name %s; proxy_ssl_server_name on; proxy_ssl_session_reuse off; proxy_ssl_protocols TLSv1.2 TLSv1.3;",
			keyFile("ca.crt"), quicName)
	}
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
		listen %s %sreuseport backlog=4096;
		%s
		proxy_pass %s;
		%s
	}
}
`, nginxModule, r.dir, r.listen, listen, client, k.endpoint(r), service))
	if err != nil {
		return nil, err
	}
	return exec.Command("nginx", "-p", r.dir, "-c", file), nil
}
