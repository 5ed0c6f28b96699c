//go:build linux && netns

package networks

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"culvert.dev/connect"
	"culvert.dev/internal/testca"
	"culvert.dev/internal/testnet"
	"culvert.dev/internal/testnet/netns"
	"culvert.dev/sni"
)

// The client's side and the far side of a network that blocks carriers.
const (
	nearAddr = "10.20.0.1"
	farAddr  = "10.21.0.1"
)

// nearConfig is of the gateway on the client's side. docs/guides/fallback.md explains it.
const nearConfig = `
network: near
drain: {delay: 0s, timeout: 1s}
limits: {connectTimeout: 30s, connectTotalTimeout: 60s}
listeners:
  - {address: "10.20.0.1:3128", protocols: [connect]}
networks:
  - {name: near, cidrs: [10.20.0.0/24]}
  - name: far
    cidrs: [10.21.0.0/24]
    gateways:
      - address: 10.21.0.1:443
        check: none
        transports:
          - {protocol: connect-h3, serverName: h3.gw.test, caFile: ca.crt, certificateFile: near.crt, keyFile: near.key}
          - {protocol: connect-h2, tls: true, serverName: h2.gw.test, caFile: ca.crt, certificateFile: near.crt, keyFile: near.key}
          - {protocol: websocket, tls: true, serverName: ws.gw.test, path: /tunnels/, caFile: ca.crt, tokenFile: near.token}
services:
  - {name: svc.test, ports: [7000], endpoints: ["10.21.0.1:7000"]}
`

// farConfig is of the gateway on the far side. WebSockets come to it by nginx, which ends
// their TLS; its port 443 tells them by their name.
const farConfig = `
network: far
drain: {delay: 0s, timeout: 1s}
listeners:
  - address: udp://10.21.0.1:443
    tls: {certificateFile: gw.crt, keyFile: gw.key, clientCAFile: ca.crt}
  - address: 10.21.0.1:443
    protocols: [sni]
    tls: {certificateFile: gw.crt, keyFile: gw.key, names: [h2.gw.test], protocols: [connect-h2], clientCAFile: ca.crt}
  - address: 127.0.0.1:8080
    protocols: [websocket]
    websocket: {path: /tunnels/}
    auth: {tokensFile: tokens}
networks:
  - {name: far, cidrs: [10.21.0.0/24, 127.0.0.0/8]}
services:
  - {name: ws.gw.test, ports: [443], endpoints: ["127.0.0.1:8444"]}
  - {name: svc.test, ports: [7000], endpoints: ["10.21.0.1:7000"]}
`

const nginxConfig = `
daemon off;
pid %[1]s/nginx.pid;
error_log stderr;
worker_processes 1;
events { worker_connections 1024; }
http {
	access_log off;
	client_body_temp_path %[1]s/body;
	proxy_temp_path %[1]s/proxy;
	fastcgi_temp_path %[1]s/fastcgi;
	uwsgi_temp_path %[1]s/uwsgi;
	scgi_temp_path %[1]s/scgi;
	server {
		listen 127.0.0.1:8444 ssl;
		server_name ws.gw.test;
		ssl_certificate %[1]s/nginx.crt;
		ssl_certificate_key %[1]s/nginx.key;
		location / { return 404; }
		location /tunnels/ {
			proxy_pass http://127.0.0.1:8080;
			proxy_http_version 1.1;
			proxy_set_header Upgrade $http_upgrade;
			proxy_set_header Connection "upgrade";
		}
	}
}
`

// A middlebox resets the TLS connections through a network that ask for some name.
type middlebox struct {
	network *netns.NS
	wg      sync.WaitGroup

	mu      sync.Mutex // guards what follows
	blocked string
	open    map[net.Conn]string // by the name that they ask for
	closed  bool
}

// newMiddlebox has all connections to port 443 through a network go through it.
func newMiddlebox(t *testing.T, s *site, network *netns.NS, addr string) *middlebox {
	t.Helper()
	ln, err := network.Listen("tcp", addr+":9443")
	if err != nil {
		t.Fatal(err)
	}
	m := &middlebox{network: network, open: map[net.Conn]string{}}
	for _, rule := range []string{
		"add table ip middlebox",
		"add chain ip middlebox in { type nat hook prerouting priority dstnat ; }",
		"add rule ip middlebox in tcp dport 443 redirect to :9443",
	} {
		s.must(network.Command(t.Context(), "nft", rule))
	}
	m.wg.Go(func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			m.wg.Go(func() { m.serve(c) })
		}
	})
	t.Cleanup(func() {
		_ = ln.Close()
		m.mu.Lock()
		m.closed = true
		for c := range m.open {
			_ = c.Close()
		}
		m.mu.Unlock()
		m.wg.Wait()
	})
	return m
}

// block resets connections that ask for name, now and from now on; "" blocks none.
func (m *middlebox) block(name string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.blocked = name
	for c, n := range m.open {
		if n == name {
			reset(c)
		}
	}
}

func reset(c net.Conn) {
	_ = c.(*net.TCPConn).SetLinger(0)
	_ = c.Close()
}

// add notes a connection that asks for name. It is false where that is blocked.
func (m *middlebox) add(c net.Conn, name string) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.closed || name != "" && name == m.blocked {
		return false
	}
	m.open[c] = name
	return true
}

func (m *middlebox) remove(c net.Conn) {
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.open, c)
}

func (m *middlebox) serve(c net.Conn) {
	defer c.Close()
	if !m.add(c, "") {
		return
	}
	defer m.remove(c)
	var p sni.Parser
	var seen []byte
	b := make([]byte, 16<<10)
	for {
		n, err := c.Read(b)
		if err != nil {
			return
		}
		seen = append(seen, b[:n]...)
		hello, err := p.Feed(seen)
		if err == nil {
			if !m.add(c, hello.Name.String()) {
				reset(c)
				return
			}
			break
		}
		if !errors.Is(err, sni.ErrMore) {
			return
		}
	}
	far, err := m.network.Dial(context.Background(), "tcp", farAddr+":443")
	if err != nil {
		return
	}
	defer far.Close()
	if _, err := far.Write(seen); err != nil {
		return
	}
	m.wg.Go(func() {
		_, _ = io.Copy(far, c)
		_ = far.(*net.TCPConn).CloseWrite()
	})
	_, _ = io.Copy(c, far)
	_ = c.(*net.TCPConn).CloseWrite()
}

// A fallbackRun is a client side and a far side, with the network between them.
type fallbackRun struct {
	*testing.T
	s         *site
	near, far *netns.NS
	box       *middlebox
	admin     map[string]*http.Client

	// requests is held by each request, and by what changes the network: a tunnel that
	// stands when its carrier is blocked ends, as a promise that was given to a client
	// can't be given again.
	requests sync.RWMutex
	done     atomic.Int64
	failed   atomic.Int64
}

func newFallbackRun(t *testing.T) *fallbackRun {
	r := &fallbackRun{T: t, near: netns.New(t, "near"), far: netns.New(t, "far"), admin: map[string]*http.Client{}}
	r.s = &site{t: t, dir: t.TempDir()}
	network := netns.New(t, "network")
	netns.Link(t, r.near, nearAddr+"/24", network, "10.20.0.254/24")
	netns.Link(t, r.far, farAddr+"/24", network, "10.21.0.254/24")
	r.near.Route(t, "default", "10.20.0.254")
	r.far.Route(t, "default", "10.21.0.254")
	r.s.must(network.Command(t.Context(), "sysctl", "-q", "-w", "net.ipv4.ip_forward=1"))
	r.box = newMiddlebox(t, r.s, network, "10.20.0.254")
	r.writeKeys()
	r.serve()
	r.s.run(r.far, "far", "gateway", farConfig)
	r.runNginx()
	r.s.run(r.near, "near", "gateway", nearConfig)
	for _, name := range []string{"near", "far"} {
		r.admin[name] = &http.Client{Transport: &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "unix", r.s.socket(name))
		}}}
		t.Cleanup(r.admin[name].CloseIdleConnections)
	}
	return r
}

func (r *fallbackRun) writeKeys() {
	ca, err := testca.New("example.test", nil)
	if err != nil {
		r.Fatal(err)
	}
	if err := ca.Save(r.s.dir); err != nil {
		r.Fatal(err)
	}
	for name, o := range map[string]testca.Options{
		"near":  {SPIFFEID: "spiffe://example.test/near", Usage: testca.ClientOnly},
		"gw":    {SPIFFEID: "spiffe://example.test/far", DNSNames: []string{"h3.gw.test", "h2.gw.test"}},
		"nginx": {SPIFFEID: "spiffe://example.test/nginx", DNSNames: []string{"ws.gw.test"}},
	} {
		pair, err := ca.Issue(o)
		if err == nil {
			err = pair.Save(r.s.dir, name)
		}
		if err != nil {
			r.Fatal(err)
		}
	}
	const token = "a-token-of-at-least-thirty-two-characters"
	for name, content := range map[string]string{"near.token": token, "tokens": fmt.Sprintf("near:%x\n", sha256.Sum256([]byte(token)))} {
		if err := os.WriteFile(filepath.Join(r.s.dir, name), []byte(content), 0o600); err != nil {
			r.Fatal(err)
		}
	}
}

// serve has a service on the far side that sends back what it gets.
func (r *fallbackRun) serve() {
	ln, err := r.far.Listen("tcp", farAddr+":7000")
	if err != nil {
		r.Fatal(err)
	}
	var serving sync.WaitGroup
	r.Cleanup(func() {
		_ = ln.Close()
		serving.Wait()
	})
	serving.Go(func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			serving.Go(func() {
				_, _ = io.Copy(c, c)
				_ = c.Close()
			})
		}
	})
}

func (r *fallbackRun) runNginx() {
	conf := filepath.Join(r.s.dir, "nginx.conf")
	if err := os.WriteFile(conf, fmt.Appendf(nil, nginxConfig, r.s.dir), 0o600); err != nil {
		r.Fatal(err)
	}
	cmd := r.far.Command(context.Background(), "nginx", "-p", r.s.dir, "-e", "stderr", "-c", conf)
	var log strings.Builder
	cmd.Stderr = &log
	if err := cmd.Start(); err != nil {
		r.Fatal(err)
	}
	r.Cleanup(func() {
		_ = cmd.Process.Signal(os.Interrupt)
		_ = cmd.Wait()
		if r.Failed() {
			r.Logf("nginx said:\n%s", log.String())
		}
	})
	testnet.Eventually(r, patience, func() bool {
		c, err := r.far.Dial(r.Context(), "tcp", "127.0.0.1:8444")
		if err == nil {
			_ = c.Close()
		}
		return err == nil
	}, "nginx is there")
}

// get returns what the admin port of a gateway answers.
func (r *fallbackRun) get(name, path string) []byte {
	r.Helper()
	resp, err := r.admin[name].Get("http://localhost" + path)
	if err != nil {
		r.Fatalf("%s of %s: %v", path, name, err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		r.Fatalf("%s of %s: %v", path, name, err)
	}
	return b
}

// up returns the carriers that are not down, in order of preference.
func (r *fallbackRun) up() string {
	r.Helper()
	var status struct {
		Transports []struct {
			Carrier string
			Up      bool
		}
	}
	if err := json.Unmarshal(r.get("near", "/status"), &status); err != nil {
		r.Fatal(err)
	}
	var up []string
	for _, t := range status.Transports {
		if t.Up {
			up = append(up, t.Carrier)
		}
	}
	return strings.Join(up, " ")
}

// carried returns how many requests have come to the far gateway by a carrier.
func (r *fallbackRun) carried(by string) (n int) {
	r.Helper()
	for line := range strings.Lines(string(r.get("far", "/metrics"))) {
		if strings.HasPrefix(line, "culvert_requests_total{") && strings.Contains(line, `proto="`+by+`"`) && strings.Contains(line, `service="svc.test"`) {
			fields := strings.Fields(line)
			v, err := strconv.ParseFloat(fields[len(fields)-1], 64)
			if err != nil {
				r.Fatal(err)
			}
			n += int(v)
		}
	}
	return n
}

// request asks for the service, and has it send something back.
func (r *fallbackRun) request(n int64) error {
	r.requests.RLock()
	defer r.requests.RUnlock()
	ctx, cancel := context.WithTimeout(r.Context(), time.Minute)
	defer cancel()
	c, err := (&connect.Dialer{Proxy: nearAddr + ":3128", Dialer: dialer{r.near}, Wait: time.Minute}).DialContext(ctx, "tcp", "svc.test:7000")
	if err != nil {
		return err
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(time.Minute))
	want := strconv.FormatInt(n, 10)
	if _, err := io.WriteString(c, want); err != nil {
		return err
	}
	got := make([]byte, len(want))
	if _, err := io.ReadFull(c, got); err != nil {
		return err
	}
	if string(got) != want {
		return fmt.Errorf("got %q back, want %q", got, want)
	}
	return nil
}

// A dialer dials from inside of a namespace.
type dialer struct{ ns *netns.NS }

func (d dialer) DialContext(ctx context.Context, network, addr string) (net.Conn, error) {
	return d.ns.Dial(ctx, network, addr)
}

// change changes the network while no request is under way.
func (r *fallbackRun) change(f func()) {
	r.requests.Lock()
	defer r.requests.Unlock()
	f()
}

// await waits for n more requests, for the carriers that are to be up then, and until half
// as many requests have come by the first of them.
func (r *fallbackRun) await(what string, n int64, up string) {
	r.Helper()
	by, _, _ := strings.Cut(up, " ")
	began, until, before := time.Now(), r.done.Load()+n, r.carried(by)
	last := &struct {
		Up      string
		Carried int
	}{}
	testnet.Eventually(r, 7*time.Minute, func() bool {
		last.Up, last.Carried = r.up(), r.carried(by)-before
		return r.done.Load() >= until && last.Up == up && last.Carried >= int(n/2)
	}, "%s: %d requests, with %s up and most of them by %s; the last was %+v", what, n, up, by, last)
	r.Logf("%s: %v, %d requests, %d by %s", what, time.Since(began).Round(100*time.Millisecond), r.done.Load()-until+n, r.carried(by)-before, by)
}

// A network blocks one carrier after another, and then none. The requests that clients
// make meanwhile all succeed, by what is left: HTTP/3, HTTP/2, WebSockets through nginx, and
// back.
func TestFallback(t *testing.T) {
	t.Parallel()
	const total = 10000
	r := newFallbackRun(t)
	stop := make(chan struct{})
	var working sync.WaitGroup
	for range 8 {
		working.Go(func() {
			for pace := time.NewTicker(5 * time.Millisecond); ; <-pace.C {
				select {
				case <-stop:
					pace.Stop()
					return
				default:
				}
				if err := r.request(r.done.Add(1)); err != nil && r.failed.Add(1) < 5 {
					t.Errorf("a request: %v", err)
				}
			}
		})
	}
	end := sync.OnceFunc(func() { close(stop); working.Wait() })
	defer end()

	const all = "connect-h3 connect-h2 websocket"
	r.await("nothing is blocked", 3000, all)
	r.change(func() { r.far.Drop(t, "udp dport 443") })
	r.await("UDP is dropped", 2000, "connect-h2 websocket")
	r.change(func() { r.box.block("h2.gw.test") })
	r.await("TLS to h2.gw.test is reset", 1000, "websocket")
	r.change(func() {
		r.far.Undrop(t)
		r.box.block("")
	})
	r.await("nothing is blocked again", max(1000, total-r.done.Load()), all)
	end()
	if n := r.failed.Load(); n > 0 {
		t.Errorf("%d of %d requests failed", n, r.done.Load())
	}
}
