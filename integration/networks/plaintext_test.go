//go:build linux && netns

package networks

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"culvert.dev/connect"
	"culvert.dev/connect/h2"
	"culvert.dev/connect/socks5"
	"culvert.dev/connect/ws"
	"culvert.dev/internal/testca"
	"culvert.dev/internal/testnet"
	"culvert.dev/internal/testnet/netns"
	"culvert.dev/tunnel"
)

// A border is two networks, each with a gateway and nothing but a wire between them. What
// clients of the western gateway send to the service in the east begins with secret.
type border struct {
	t          *testing.T
	dir        string
	west, east *netns.NS
	client     *tls.Config // for the western gateway
	seen       atomic.Int64
}

const (
	secret      = "PLAINTEXT, which nobody in between may read: "
	westGateway = "10.31.0.1"
	eastGateway = "10.31.0.2"
	eastService = "svc.example.test"
)

// newBorder starts the service and the eastern gateway, which takes every carrier, in the
// clear and by TLS.
func newBorder(t *testing.T) *border {
	b := &border{t: t, dir: t.TempDir(), west: netns.New(t, "west"), east: netns.New(t, "east")}
	wire := netns.NewWire(t, b.west, westGateway+"/24", b.east, eastGateway+"/24")
	wire.Watch(func(packet []byte) {
		if bytes.Contains(packet, []byte(secret)) {
			b.seen.Add(1)
		}
	})

	ca, err := testca.New("example.test", nil)
	b.must(err)
	b.must(ca.Save(b.dir))
	for _, name := range []string{"west", "east"} {
		pair, err := ca.Issue(testca.Options{SPIFFEID: "spiffe://example.test/" + name, DNSNames: []string{name + ".example.test"}, IPs: []net.IP{net.ParseIP(eastGateway)}})
		b.must(err)
		b.must(pair.Save(b.dir, name))
	}
	b.client = &tls.Config{RootCAs: ca.Pool(), ServerName: "west.example.test"}

	echo, err := b.east.Listen("tcp", "127.0.0.1:9000")
	b.must(err)
	t.Cleanup(func() { _ = echo.Close() })
	go func() {
		for {
			c, err := echo.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				_, _ = io.Copy(c, c)
			}()
		}
	}()
	b.start(b.east, "east", fmt.Sprintf(`
networks: [{name: east, cidrs: [10.99.0.0/16]}]
network: east
listeners:
  - {address: "%[1]s:8080", protocols: [sni, connect, connect-h2, socks5, websocket]}
  - {address: "%[1]s:8443", tls: {certificateFile: east.crt, keyFile: east.key, clientCAFile: ca.crt, clientCertificates: optional, protocols: [connect, connect-h2, websocket]}}
  - {address: "%[1]s:15008", tls: {certificateFile: east.crt, keyFile: east.key, clientCAFile: ca.crt, trustDomains: [example.test], protocols: [hbone]}}
  - {address: "udp://%[1]s:8443", tls: {certificateFile: east.crt, keyFile: east.key, clientCAFile: ca.crt, clientCertificates: optional}}
services:
  - {name: %[2]s, ports: [9000], endpoints: ["127.0.0.1:9000"]}
`, eastGateway, eastService))
	return b
}

func (b *border) must(err error) {
	b.t.Helper()
	if err != nil {
		b.t.Fatal(err)
	}
}

func (b *border) write(name, config string) (file string) {
	b.t.Helper()
	file = filepath.Join(b.dir, name+".yaml")
	b.must(os.WriteFile(file, []byte(config), 0o600))
	return file
}

// start runs a gateway until the returned function is called, or the test ends.
func (b *border) start(ns *netns.NS, name, config string) (stop func()) {
	b.t.Helper()
	socket := "unix:" + filepath.Join(b.dir, name+".sock")
	cmd := ns.Command(context.Background(), culvert, "gateway", "--config", b.write(name, config), "--admin", socket)
	var log bytes.Buffer
	cmd.Stderr = &log
	b.must(cmd.Start())
	ended := make(chan struct{})
	go func() { defer close(ended); _ = cmd.Wait() }()
	stopped := false
	stop = func() {
		if stopped {
			return
		}
		stopped = true
		_ = cmd.Process.Kill()
		<-ended
		report(b.t, name, log.String())
	}
	b.t.Cleanup(stop)
	testnet.Eventually(b.t, patience, func() bool {
		return ready(strings.TrimPrefix(socket, "unix:"))
	}, "%s is ready", name)
	return stop
}

// DialContext implements tunnel.Dialer for programs in the west.
func (b *border) DialContext(ctx context.Context, network, addr string) (net.Conn, error) {
	return b.west.Dial(ctx, network, addr)
}

// A dialOwnPort reaches a port of the one service.
type dialOwnPort struct {
	b    *border
	addr string
}

func (d dialOwnPort) DialContext(ctx context.Context, _, _ string) (net.Conn, error) {
	return d.b.DialContext(ctx, "tcp", d.addr)
}

// entries are the ways by which a client in the west can send plaintext.
func (b *border) entries() (all map[string]tunnel.Dialer, done func()) {
	plain, inTLS := westGateway+":8080", westGateway+":8443"
	overH2 := &h2.Dialer{Proxy: plain, Dialer: b}
	h2InTLS := &h2.Dialer{Proxy: inTLS, Dialer: b, TLS: b.client}
	return map[string]tunnel.Dialer{
		"own port":          dialOwnPort{b, westGateway + ":9000"},
		"connect":           &connect.Dialer{Proxy: plain, Dialer: b},
		"connect in TLS":    &connect.Dialer{Proxy: inTLS, Dialer: b, TLS: b.client},
		"connect-h2":        overH2,
		"connect-h2 in TLS": h2InTLS,
		"socks5":            &socks5.Dialer{Proxy: plain, Dialer: b},
		"websocket":         &ws.Dialer{URL: "ws://" + plain, Dialer: b},
	}, func() { overH2.Close(); h2InTLS.Close() }
}

// say sends secret to the service and waits for it to come back.
func (b *border) say(d tunnel.Dialer) error {
	ctx, cancel := context.WithTimeout(b.t.Context(), patience)
	defer cancel()
	c, err := d.DialContext(ctx, "tcp", eastService+":9000")
	if err != nil {
		return err
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(patience))
	if _, err := io.WriteString(c, secret); err != nil {
		return err
	}
	got := make([]byte, len(secret))
	if _, err := io.ReadFull(c, got); err != nil {
		return err
	}
	if string(got) != secret {
		return fmt.Errorf("got %q back", got)
	}
	return nil
}

// TestNoPlaintextBetweenNetworks: whatever way to another network a configuration has, what
// clients send in the clear is not to be read on that way, unless the configuration says
// insecure. Where config check is content, it arrives; where it is not, it is refused.
func TestNoPlaintextBetweenNetworks(t *testing.T) {
	t.Parallel()
	b := newBorder(t)
	const (
		verified = `caFile: ca.crt`
		mutual   = verified + `, certificateFile: west.crt, keyFile: west.key`
	)
	type row struct {
		name, gateway, via string
		secure             bool // whether config check is content
		clear              bool // whether the way itself is in the clear
		never              bool // whether nothing but TLS by name can go there
		loop               bool // whether it would be refused if it were secure: the last hop is the first one
	}
	rows := []row{
		{name: "nothing said", gateway: `"10.31.0.2:8080"`, never: true},
		{name: "transports", gateway: `{address: "10.31.0.2:8080", transports: [connect-h2, connect, socks5]}`, clear: true},
		{name: "connect", via: `{connect: "10.31.0.2:8080"}`, clear: true},
		{name: "connect-h2", via: `{connect-h2: "10.31.0.2:8080"}`, clear: true},
		{name: "socks5", via: `{socks5: "10.31.0.2:8080"}`, clear: true},
		{name: "websocket", via: `{websocket: "ws://10.31.0.2:8080/"}`, clear: true},
		{name: "a plain hop behind a secure one", via: `{connect: "https://10.31.0.2:8443", ` + mutual + `}, {connect: "10.31.0.2:8080"}`, loop: true},
		{name: "hbone", via: `{hbone: "10.31.0.2:15008", peers: ["spiffe://example.test/east"], ` + mutual + `}`, secure: true},
	}
	for protocol, url := range map[string]string{"connect": "https://10.31.0.2:8443", "connect-h2": "https://10.31.0.2:8443", "connect-h3": "10.31.0.2:8443", "websocket": "wss://10.31.0.2:8443/"} {
		rows = append(rows,
			row{name: protocol + " by TLS without credentials", via: fmt.Sprintf(`{%s: "%s", %s}`, protocol, url, verified)},
			row{name: protocol + " by mutual TLS", via: fmt.Sprintf(`{%s: "%s", %s}`, protocol, url, mutual), secure: true})
	}
	for _, tt := range rows {
		for _, insecure := range []string{"", "the network", "the service"} {
			if insecure == "the service" && tt.secure || insecure != "" && tt.loop {
				continue
			}
			name := tt.name
			ofNetwork, ofService := "", ""
			switch insecure {
			case "the network":
				name, ofNetwork = name+", insecure network", ", insecure: true"
			case "the service":
				name, ofService = name+", insecure service", ", insecure: true"
			}
			t.Run(name, func(t *testing.T) {
				gateways := tt.gateway
				if gateways == "" {
					gateways = `"10.31.0.2:8080"`
				}
				via := ""
				if tt.via != "" {
					via = ", via: [" + tt.via + "]"
				}
				config := fmt.Sprintf(`
network: west
networks:
  - {name: west, cidrs: [10.31.0.1/32]}
  - {name: east, cidrs: [10.99.0.0/16], gateways: [%[1]s]%[2]s%[3]s}
listeners:
  - {address: "%[5]s:8080", protocols: [sni, connect, connect-h2, socks5, websocket]}
  - {address: "%[5]s:8443", tls: {certificateFile: west.crt, keyFile: west.key, protocols: [connect, connect-h2]}}
  - {address: "%[5]s:9000", service: %[6]s}
services:
  - {name: %[6]s, ports: [9000], endpoints: ["10.99.0.5:9000"]%[4]s}
`, gateways, via, ofNetwork, ofService, westGateway, eastService)
				check := exec.Command(culvert, "config", "check", b.write("checked", config))
				out, err := check.CombinedOutput()
				if exit := (*exec.ExitError)(nil); err != nil && (!errors.As(err, &exit) || exit.ExitCode() != 0) {
					t.Fatalf("config check: %v\n%s", err, out)
				}
				if content := !strings.Contains(string(out), "warning"); content != ((tt.secure || tt.never) && insecure == "") {
					t.Errorf("config check: got %q, want a warning: %v", out, !content)
				}
				stop := b.start(b.west, "west", config)
				defer stop()
				entries, done := b.entries()
				defer done()
				carried := !tt.never && (tt.secure || insecure != "")
				for name, entry := range entries {
					before := b.seen.Load()
					err := b.say(entry)
					if carried != (err == nil) {
						t.Errorf("by %s: got %v, want it carried: %v", name, err, carried)
					}
					read := b.seen.Load() > before
					if want := carried && tt.clear; read != want {
						t.Errorf("by %s: read on the way: %v, want %v", name, read, want)
					}
				}
			})
		}
	}
}
