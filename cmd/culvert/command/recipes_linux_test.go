package command

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"culvert.dev/internal/gateway"
	"culvert.dev/internal/testnet"
	"culvert.dev/registry"
	"culvert.dev/registry/file"
)

// recipe returns the configuration in a section of the guide to load balancing.
func recipe(t *testing.T, section string) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("..", "..", "..", "docs", "guides", "load-balancing.md"))
	if err != nil {
		t.Fatal(err)
	}
	_, rest, ok := strings.Cut(string(text), "\n## "+section+"\n")
	_, block, hasBlock := strings.Cut(rest, "```yaml\n")
	block, _, closed := strings.Cut(block, "```\n")
	if !ok || !hasBlock || !closed {
		t.Fatalf("the guide has no recipe %q", section)
	}
	return block
}

// A server is one of a cluster: it serves clients at one port, to whom it says its name,
// and tells its health at another one.
type server struct {
	name   string
	status atomic.Pointer[map[string]string] // the answer to each path: its first line, and a body
	served net.Listener
	health net.Listener
	all    sync.WaitGroup
}

// newCluster starts servers at several addresses of loopback, with the same two ports.
func newCluster(t *testing.T, names ...string) (servers []*server, served, health string) {
	t.Helper()
	listen := func() (all []net.Listener, port string) {
		port = "0"
		for i := range names {
			ln, err := net.Listen("tcp", net.JoinHostPort(fmt.Sprintf("127.0.0.%d", 11+i), port))
			if err != nil {
				for _, ln := range all {
					_ = ln.Close()
				}
				return nil, ""
			}
			_, port, _ = net.SplitHostPort(ln.Addr().String())
			all = append(all, ln)
		}
		return all, port
	}
	for range 100 { // until a port is free at all addresses
		clients, one := listen()
		checks, other := listen()
		if clients != nil && checks != nil {
			for i, name := range names {
				s := &server{name: name, served: clients[i], health: checks[i]}
				s.all.Go(func() { s.accept(s.served, s.greet) })
				s.all.Go(func() { s.accept(s.health, s.answer) })
				t.Cleanup(func() {
					_ = s.served.Close()
					_ = s.health.Close()
					s.all.Wait()
				})
				servers = append(servers, s)
			}
			return servers, one, other
		}
		for _, ln := range append(clients, checks...) {
			_ = ln.Close()
		}
	}
	t.Fatal("no port is free at all addresses")
	return nil, "", ""
}

func (s *server) accept(ln net.Listener, serve func(net.Conn)) {
	for {
		c, err := ln.Accept()
		if err != nil {
			return
		}
		s.all.Go(func() {
			defer c.Close()
			serve(c)
		})
	}
}

func (s *server) greet(c net.Conn) {
	_, _ = io.WriteString(c, s.name+"\n")
	_, _ = io.Copy(io.Discard, c) // until the client leaves
}

func (s *server) answer(c net.Conn) {
	req, err := http.ReadRequest(bufio.NewReader(c))
	if err != nil {
		return
	}
	answer := (*s.status.Load())[req.URL.Path]
	if req.Method != http.MethodGet || answer == "" {
		answer = "HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
	}
	_, _ = io.WriteString(c, answer)
}

// patroni has s answer as Patroni's REST API does, which is a server of HTTP/1.0 in
// Python: with the document of the node whatever it is asked for, and the status that
// says whether it is that.
func (s *server) patroni(role string) {
	answer := func(ok bool) string {
		status := "200 OK"
		if !ok {
			status = "503 Service Unavailable"
		}
		body := fmt.Sprintf(`{"state": "running", "postmaster_start_time": "2026-01-05 10:21:07.120318+00:00", "role": %q, "server_version": 160004, "xlog": {"location": 67395656}, "timeline": 2, "dcs_last_seen": 1767608467, "database_system_identifier": "7456781234567890123", "patroni": {"version": "4.0.4", "scope": "db", "name": %q}}`, role, s.name)
		return "HTTP/1.0 " + status + "\r\nServer: BaseHTTP/0.6 Python/3.11.2\r\nDate: Mon, 05 Jan 2026 10:21:07 GMT\r\nContent-Type: application/json\r\n\r\n" + body
	}
	s.status.Store(&map[string]string{"/primary": answer(role == "primary"), "/replica": answer(role == "replica")})
}

// keycloak has s answer as Keycloak's management port does.
func (s *server) keycloak(ready bool) {
	status, word := "200 OK", "UP"
	if !ready {
		status, word = "503 Service Unavailable", "DOWN"
	}
	body := fmt.Sprintf("{\n    \"status\": %q,\n    \"checks\": [\n        {\n            \"name\": \"Keycloak database connections async health check\",\n            \"status\": %q\n        }\n    ]\n}", word, word)
	s.status.Store(&map[string]string{"/health/ready": "HTTP/1.1 " + status + "\r\ncontent-type: application/json; charset=UTF-8\r\ncontent-length: " + strconv.Itoa(len(body)) + "\r\n\r\n" + body})
}

// recipeGateway runs a gateway with a configuration, and returns a function that opens a
// tunnel and says whom it reached. The caller closes the tunnel.
func recipeGateway(t *testing.T, config string) func(target string) (net.Conn, string) {
	t.Helper()
	c, err := file.Parse("recipe.yaml", []byte(config))
	if err != nil {
		t.Fatal(err)
	}
	c.Listeners = []file.Listener{{Address: "127.0.0.1:0", Protocols: []string{"connect"}, Refusal: "alert"}}
	cfg, err := gatewayConfig(c)
	if err != nil {
		t.Fatal(err)
	}
	cfg.Sources = []registry.Source{registry.Static{Name: "recipe", Snapshot: c.Snapshot()}}
	cfg.DrainDelay, cfg.DrainTimeout = -1, -1
	g, err := gateway.New(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	running.Go(func() {
		if err := g.Run(ctx, nil); err != nil {
			t.Errorf("Run: %v", err)
		}
	})
	t.Cleanup(func() {
		cancel()
		running.Wait()
	})
	return func(target string) (net.Conn, string) {
		t.Helper()
		c, err := net.Dial("tcp", g.Addrs()[0].String())
		if err != nil {
			t.Fatal(err)
		}
		_ = c.SetDeadline(time.Now().Add(time.Minute))
		_, _ = fmt.Fprintf(c, "CONNECT %s HTTP/1.1\r\nHost: %[1]s\r\n\r\n", target)
		r := bufio.NewReader(c)
		resp, err := http.ReadResponse(r, &http.Request{Method: http.MethodConnect})
		if err != nil || resp.StatusCode != http.StatusOK {
			return c, ""
		}
		name, _ := r.ReadString('\n')
		return c, strings.TrimSpace(name)
	}
}

// settled waits until all of several tunnels in a row reach servers of a list.
func settled(t *testing.T, open func(string) (net.Conn, string), target string, want ...string) {
	t.Helper()
	testnet.Eventually(t, time.Minute, func() bool {
		for range 10 {
			c, name := open(target)
			_ = c.Close()
			if !slices.Contains(want, name) {
				return false
			}
		}
		return true
	}, "tunnels to %s reach %s", target, strings.Join(want, " or "))
}

// TestRecipeOfPatroni follows a leader through a failover: new connections go to the new
// one, and others stay where they are.
func TestRecipeOfPatroni(t *testing.T) {
	nodes, postgres, rest := newCluster(t, "pg-1", "pg-2", "pg-3")
	lead := func(leader string) {
		for _, n := range nodes {
			role := "replica"
			if n.name == leader {
				role = "primary"
			}
			n.patroni(role)
		}
	}
	lead("pg-1")
	config := strings.NewReplacer(
		"10.0.1.8:5432", "127.0.0.11:"+postgres, "10.0.1.9:5432", "127.0.0.12:"+postgres, "10.0.1.10:5432", "127.0.0.13:"+postgres,
		"port: 8008", "port: "+rest, "interval: 1s", "interval: 100ms",
	).Replace(recipe(t, "A leader: PostgreSQL with Patroni"))
	open := recipeGateway(t, config)
	settled(t, open, "db.example.com:5432", "pg-1")
	settled(t, open, "replicas.db.example.com:5432", "pg-2", "pg-3")
	old, name := open("db.example.com:5432")
	defer old.Close()
	if name != "pg-1" {
		t.Fatalf("a tunnel reached %q, want pg-1", name)
	}
	lead("nobody") // while they elect one
	c, name := open("db.example.com:5432")
	_ = c.Close()
	if name == "" {
		t.Error("without a leader connections are refused, want one of the servers")
	}
	lead("pg-3")
	settled(t, open, "db.example.com:5432", "pg-3")
	settled(t, open, "replicas.db.example.com:5432", "pg-1", "pg-2")
	_ = old.SetReadDeadline(time.Now().Add(time.Millisecond))
	if _, err := old.Read(make([]byte, 1)); err == nil || !strings.Contains(err.Error(), "timeout") {
		t.Errorf("the tunnel to the old leader: %v, want it open", err)
	}
}

// TestRecipeOfKeycloak keeps a client at its node until that is not ready, and then at
// the next one.
func TestRecipeOfKeycloak(t *testing.T) {
	nodes, https, management := newCluster(t, "kc-1", "kc-2", "kc-3")
	ready := func(unready string) {
		for _, n := range nodes {
			n.keycloak(n.name != unready)
		}
	}
	ready("")
	config := strings.NewReplacer(
		"10.0.1.21:8443", "127.0.0.11:"+https, "10.0.1.22:8443", "127.0.0.12:"+https, "10.0.1.23:8443", "127.0.0.13:"+https,
		"port: 9000", "port: "+management, "interval: 5s", "interval: 100ms",
	).Replace(recipe(t, "Sessions: Keycloak"))
	open := recipeGateway(t, config)
	const target = "sso.example.com:443"
	settled(t, open, target, "kc-1", "kc-2", "kc-3")
	c, first := open(target)
	_ = c.Close()
	settled(t, open, target, first)
	ready(first)
	var others []string
	for _, n := range nodes {
		if n.name != first {
			others = append(others, n.name)
		}
	}
	settled(t, open, target, others...)
	c, second := open(target)
	_ = c.Close()
	ready("")
	settled(t, open, target, second)
}
