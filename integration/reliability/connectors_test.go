//go:build linux

package reliability

import (
	"bufio"
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"crypto/tls"
	"encoding/json"
	"encoding/pem"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/crypto/ssh"

	"culvert.dev/connect"
	"culvert.dev/internal/testca"
	"culvert.dev/internal/testnet"
	"culvert.dev/reverse"
	"culvert.dev/tunnel"
)

// manyConnectors is how many sessions TestThousandsOfConnectors holds. They take a descriptor
// each, here and at the gateway.
var manyConnectors = flag.Int("connectors", usualConnectors, "reverse sessions to hold")

const (
	sessionsOfOwner = 100       // sessions of one identity
	mostOfOwner     = 150       // that the gateway lets one have
	sessionBytes    = 80 << 10  // of an idle session at the gateway
	sshFlood        = 10_000    // names of one flood
	gwName          = "gw.test" // in the gateway's certificate
)

// connectorsConfig is that of a gateway for connectors, and for ssh -R.
const connectorsConfig = `cluster: many
listeners:
  - address: "%[1]s"
    protocols: [sni]
    tls:
      - {names: [gw.test], key: gw, trust: carry.test, protocols: [connect]}
  - address: "%[2]s"
    protocols: [ssh]
    ssh: {hostKeyFile: host.key, authorizedKeysFile: authorized_keys}
identity:
  keys:
    gw: {certificateFile: gw.crt, keyFile: gw.key}
  trust:
    carry.test: {caFile: ca.pem}
limits: {maxConnectionsPerPrincipal: 150}
policies:
  - name: edge-may-register
    verb: register
    action: allow
    targets: {names: ["*.edge.example"]}
    rules:
      - sources: [{spiffe: ["spiffe://carry.test/edge/*"]}, {users: [alice]}]
admin: "%[3]s"
log: {format: json}
services: []
`

// connectorsGateway starts a gateway for connectors. It returns what a connector with an ID shows,
// and the address for SSH, where alice and mallory have keys.
func connectorsGateway(t *testing.T, keys map[string]ssh.Signer) (g *gateway, of func(id string) *tls.Config, sshAddr string) {
	t.Helper()
	ca, _ := newCA(t)
	server, err := ca.Issue(testca.Options{SPIFFEID: "spiffe://carry.test/gw", DNSNames: []string{gwName}})
	if err != nil {
		t.Fatal(err)
	}
	_, hostKey, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	block, err := ssh.MarshalPrivateKey(hostKey, "")
	if err != nil {
		t.Fatal(err)
	}
	authorized := ""
	for _, user := range []string{"alice", "mallory"} {
		_, key, err := ed25519.GenerateKey(rand.Reader)
		if err != nil {
			t.Fatal(err)
		}
		signer, err := ssh.NewSignerFromKey(key)
		if err != nil {
			t.Fatal(err)
		}
		if keys != nil {
			keys[user] = signer
		}
		authorized += strings.TrimSpace(string(ssh.MarshalAuthorizedKey(signer.PublicKey()))) + " " + user + "\n"
	}
	g = prepare(t, options{})
	for name, content := range map[string][]byte{
		"gw.crt": server.CertPEM, "gw.key": server.KeyPEM, "ca.pem": ca.CertPEM,
		"host.key": pem.EncodeToMemory(block), "authorized_keys": []byte(authorized),
	} {
		if err := os.WriteFile(filepath.Join(filepath.Dir(g.config), name), content, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	sshAddr = g.ip + ":2222"
	g.write(fmt.Sprintf(connectorsConfig, g.addr, sshAddr, g.admin))
	g.begin()
	return g, func(id string) *tls.Config {
		pair, err := ca.Issue(testca.Options{SPIFFEID: "spiffe://carry.test/edge/" + id, Usage: testca.ClientOnly})
		if err != nil {
			t.Fatal(err)
		}
		return &tls.Config{ServerName: gwName, RootCAs: ca.Pool(), Certificates: []tls.Certificate{pair.TLS}}
	}, sshAddr
}

// A crowdOfConnectors is many connectors of one test, each with a session of its own for one name.
type crowdOfConnectors struct {
	prefix    string // of names and of identities
	clients   []*reverse.Client
	connected []atomic.Bool
	opened    []chan struct{} // closed at the first session
	count     atomic.Int64    // of those that are connected

	mu       sync.Mutex  // guards what follows
	attempts []time.Time // to open a session
	firsts   map[int]time.Time
}

// A connectorTransport leads one connector to the gateway, from an address of its own.
type connectorTransport struct {
	crowd *crowdOfConnectors
	n     int
	connect.Dialer
}

func (d *connectorTransport) Dial(ctx context.Context, _ *tunnel.Endpoint, req *tunnel.Request) (net.Conn, error) {
	c := d.crowd
	now := time.Now()
	c.mu.Lock()
	c.attempts = append(c.attempts, now)
	if _, ok := c.firsts[d.n]; !ok {
		c.firsts[d.n] = now
	}
	c.mu.Unlock()
	return d.DialContext(ctx, "tcp", req.Target())
}

func (*connectorTransport) Check(*tunnel.Endpoint) error { return nil }

func (*connectorTransport) Info() tunnel.TransportInfo { return tunnel.TransportInfo{} }

// echoService answers what it gets.
type echoService struct{}

func (echoService) ServeTunnel(_ context.Context, req *tunnel.Request) {
	s, err := req.Accept()
	if err != nil {
		return
	}
	_, _ = io.Copy(s, s)
	_ = s.Close()
}

// name is that of the n-th connector.
func (c *crowdOfConnectors) name(n int) string { return fmt.Sprintf("%s%d.edge.example", c.prefix, n) }

// startConnectors starts n connectors, and returns when all have a session and their name.
func startConnectors(t *testing.T, g *gateway, prefix string, n int, of func(id string) *tls.Config) *crowdOfConnectors {
	t.Helper()
	c := &crowdOfConnectors{prefix: prefix, connected: make([]atomic.Bool, n), firsts: map[int]time.Time{}}
	ctx, stop := context.WithCancel(context.Background())
	var running sync.WaitGroup
	t.Cleanup(func() {
		stop()
		running.Wait()
	})
	var keys *tls.Config
	for i := range n {
		if i%sessionsOfOwner == 0 {
			keys = of(fmt.Sprint(prefix, i/sessionsOfOwner))
		}
		client := &reverse.Client{Handler: echoService{}}
		client.Gateways = []reverse.Gateway{{Name: g.addr, Transport: &connectorTransport{c, i, connect.Dialer{Proxy: g.addr, TLS: keys, Dialer: source(i)}}}}
		c.opened = append(c.opened, make(chan struct{}))
		var once sync.Once
		client.Changed = func() {
			s := client.State()
			now := len(s) == 1 && s[0].Connected && len(s[0].Names) == 1 && s[0].Names[0].Reason == ""
			switch {
			case now && c.connected[i].CompareAndSwap(false, true):
				c.count.Add(1)
				once.Do(func() { close(c.opened[i]) })
			case !now && c.connected[i].CompareAndSwap(true, false):
				c.count.Add(-1)
			}
		}
		name, err := tunnel.ParsePattern(c.name(i))
		if err != nil {
			t.Fatal(err)
		}
		client.SetNames([]reverse.Registration{{Name: name}})
		c.clients = append(c.clients, client)
	}
	crowd(t, n, 16, func(i int) error {
		running.Go(func() { _ = c.clients[i].Run(ctx) })
		select {
		case <-c.opened[i]:
			return nil
		case <-time.After(patience):
			return fmt.Errorf("no session: %+v", c.clients[i].State())
		}
	})
	if t.Failed() {
		t.FailNow()
	}
	c.await(t, g, 2*patience, "at the start")
	return c
}

// await waits until all connectors have a session.
func (c *crowdOfConnectors) await(t *testing.T, g *gateway, most time.Duration, when string) {
	t.Helper()
	n := int64(len(c.clients))
	testnet.Eventually(t, most, func() bool {
		g.alive()
		return c.count.Load() == n
	}, "all of %d connectors have a session %s", n, when)
}

// ask reaches the services of some connectors.
func (c *crowdOfConnectors) ask(t *testing.T, g *gateway, some int) {
	t.Helper()
	crowd(t, some, 8, func(i int) error {
		name := c.name(i * len(c.clients) / some)
		conn, err := g.dial(5000 + i)
		if err != nil {
			return err
		}
		defer conn.Close()
		if err := bySNI.enter(conn, name); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		return nil
	})
}

// Thousands of connectors have a session to one gateway, which holds little for each. It is killed,
// and all come back soon after its start, at times of their own. One that takes all it can get is
// refused, and takes nothing from the others.
func TestThousandsOfConnectors(t *testing.T) {
	n := *manyConnectors
	g, of, _ := connectorsGateway(t, nil)
	first := startConnectors(t, g, "first", sessionsOfOwner, of)
	first.ask(t, g, 10)
	g.collectGarbage()
	before, descriptors := g.rss(), g.descriptors()

	began := time.Now()
	c := startConnectors(t, g, "c", n, of)
	opened := time.Since(began)
	var each int64
	testnet.Eventually(t, patience, func() bool {
		each = g.afterGarbage(g.rss, before) / int64(n)
		return each <= sessionBytes
	}, "each of %d sessions takes %d bytes at most", n, sessionBytes)
	t.Logf("%d sessions in %v; %d bytes and %.2f descriptors each", n, opened.Round(time.Millisecond), each, float64(g.descriptors()-descriptors)/float64(n))
	c.ask(t, g, 50)

	c.mu.Lock()
	c.attempts, c.firsts = nil, map[int]time.Time{}
	c.mu.Unlock()
	killed := time.Now()
	g.restart(func() {
		testnet.Eventually(t, patience, func() bool { return c.count.Load() == 0 }, "all connectors see that the gateway is gone")
		testnet.Eventually(t, patience, func() bool { return time.Since(killed) > 2*time.Second }, "the gateway is away for two seconds")
	})
	ready := time.Now()
	// On a busy machine it takes as long to open them again as it took at first.
	c.await(t, g, max(2*patience, 3*opened), "after the restart")
	back := time.Since(ready)
	c.mu.Lock()
	attempts := len(c.attempts)
	var after []time.Duration // first attempts of each
	for _, at := range c.firsts {
		after = append(after, at.Sub(killed))
	}
	c.mu.Unlock()
	spread := percentile(after, 90) - percentile(after, 10)
	t.Logf("all are back %v after the start; %.1f attempts each; eight tenths of the first attempts are spread over %v", back.Round(time.Millisecond), float64(attempts)/float64(n), spread.Round(time.Millisecond))
	// By then the time between two attempts is up to 4 s, and all log in at once.
	if limit := max(testnet.Deadline(6*time.Second), 3*opened); back > limit {
		t.Errorf("all are back after %v, want %v at most", back, limit)
	}
	// Within 2 s a connector makes four attempts or so, and then the one that succeeds.
	if attempts > 12*n {
		t.Errorf("%d connectors make %d attempts", n, attempts)
	}
	if spread < 50*time.Millisecond {
		t.Errorf("eight tenths of the first attempts come within %v: all at once", spread)
	}
	c.ask(t, g, 50)

	// Sessions and names of one owner count for it.
	mallory := connect.Dialer{Proxy: g.addr, TLS: of("mallory"), Dialer: source(9999)}
	register := func(names ...string) (net.Conn, map[string]int, error) {
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		defer cancel()
		conn, err := mallory.DialContext(ctx, "tcp", "reverse.culvert.alt:443")
		if err != nil {
			return nil, nil, err
		}
		_ = conn.SetDeadline(time.Now().Add(patience))
		line := `{"version":1,"register":[`
		for i, name := range names {
			if i > 0 {
				line += ","
			}
			line += fmt.Sprintf(`{"name":%q}`, name)
		}
		_, _ = io.WriteString(conn, line+"]}\n")
		answer, err := bufio.NewReader(conn).ReadBytes('\n')
		var welcome struct {
			Names []struct{ Reason string }
			Error string
		}
		if err == nil {
			err = json.Unmarshal(answer, &welcome)
		}
		if err == nil && welcome.Error != "" {
			err = fmt.Errorf("refused: %s", welcome.Error)
		}
		if err != nil {
			_ = conn.Close()
			return nil, nil, err
		}
		reasons := map[string]int{}
		for _, one := range welcome.Names {
			reasons[one.Reason]++
		}
		return conn, reasons, nil
	}
	stop, stopped := make(chan struct{}), make(chan struct{})
	stopAsking := sync.OnceFunc(func() { close(stop); <-stopped })
	t.Cleanup(stopAsking)
	go func() {
		defer close(stopped)
		for {
			select {
			case <-stop:
				return
			case <-time.After(5 * time.Millisecond):
				c.ask(t, g, 5)
			}
		}
	}()
	var names []string
	for i := range 500 {
		names = append(names, c.name(i)) // of others
	}
	for i := range 600 {
		names = append(names, fmt.Sprintf("m%d.edge.example", i)) // within the limit of a session
	}
	conn, reasons, err := register(names...)
	if err != nil || reasons["denied"] != 500 || reasons[""] != 500 || reasons["overload"] != 100 {
		t.Errorf("of 500 names of others and 600 more: %v, %v; want 500 denied, 500 registered and 100 above the limit of a session", reasons, err)
	}
	if conn != nil {
		_ = conn.Close()
	}
	held := startConnectors(t, g, "m", mostOfOwner, func(string) *tls.Config { return mallory.TLS })
	for range 500 { // that are refused as long as it asks
		conn, _, err := register("m0.edge.example")
		if tunnel.ReasonOf(err) != tunnel.Overload {
			t.Errorf("a session more than %d of one owner: %v, want overload", mostOfOwner, err)
		}
		if conn != nil {
			_ = conn.Close()
			break
		}
	}
	held.await(t, g, 2*patience, "while more are refused")
	stopAsking()
	if lost := int64(n) - c.count.Load(); lost != 0 {
		t.Errorf("%d of %d connectors have lost their session beside the flood", lost, n)
	}
}

// A client of SSH that asks for name after name that no policy gives it is refused each of them and
// loses its connection, and again when it comes back. Names that ssh -R of another client has are
// served all the while.
func TestFloodOfNamesBySSH(t *testing.T) {
	keys := map[string]ssh.Signer{}
	g, _, addr := connectorsGateway(t, keys)
	login := func(user string) (*ssh.Client, error) {
		return ssh.Dial("tcp", addr, &ssh.ClientConfig{User: user, Auth: []ssh.AuthMethod{ssh.PublicKeys(keys[user])}, HostKeyCallback: ssh.InsecureIgnoreHostKey(), Timeout: patience})
	}
	forward := func(c *ssh.Client, name string, port uint32) (bool, error) {
		ok, _, err := c.SendRequest("tcpip-forward", true, ssh.Marshal(struct {
			Host string
			Port uint32
		}{name, port}))
		return ok, err
	}
	alice, err := login("alice")
	if err != nil {
		t.Fatal(err)
	}
	defer alice.Close()
	var serving sync.WaitGroup
	defer serving.Wait()
	defer alice.Close()
	serving.Go(func() {
		for ch := range alice.HandleChannelOpen("forwarded-tcpip") {
			serving.Go(func() {
				c, requests, err := ch.Accept()
				if err != nil {
					return
				}
				go ssh.DiscardRequests(requests)
				_, _ = io.Copy(c, c)
				_ = c.Close()
			})
		}
	})
	if ok, err := forward(alice, "cam.edge.example", 443); !ok || err != nil {
		t.Fatalf("the name of alice: %t, %v", ok, err)
	}
	served, stop := g.keepAsking(t, "cam.edge.example", 1)
	defer stop()
	testnet.Eventually(t, patience, func() bool { return served.Load() > 0 || t.Failed() }, "the service of alice is reached")

	// Names that others have, that no policy gives it, and that nobody may have.
	ask := []string{"cam.edge.example", "n%d.edge.example", "bank.example", "reverse.culvert.alt", "*", "127.0.0.1"}
	flood := func() (refused int, err error) {
		c, err := login("mallory")
		if err != nil {
			return 0, fmt.Errorf("login: %w", err)
		}
		defer c.Close()
		for i := range sshFlood {
			name := ask[i%len(ask)]
			if strings.Contains(name, "%") {
				name = fmt.Sprintf(name, i)
			}
			ok, err := forward(c, name, uint32(1+i%60_000))
			if err != nil {
				return refused, nil // the connection has ended
			}
			if ok {
				return refused, fmt.Errorf("%q is registered", name)
			}
			refused++
		}
		return refused, fmt.Errorf("%d requests are refused, and the connection goes on", refused)
	}
	cpu := g.cpu()
	var total atomic.Int64
	crowd(t, 20, 5, func(int) error {
		refused, err := flood()
		if err == nil && refused == 0 {
			err = errors.New("no name was refused before the connection has ended")
		}
		total.Add(int64(refused))
		return err
	})
	flooded := func(e entry) bool { return e.str("proto") == "ssh" && e.str("reason") == "flood" }
	testnet.Eventually(t, patience, func() bool { return len(g.entries(flooded)) >= 20 }, "the log has the reason of each connection")
	before := served.Load()
	testnet.Eventually(t, patience, func() bool { return served.Load() > before+10 || t.Failed() }, "the service of alice is reached after the flood")
	t.Logf("%d names were refused on 20 connections, alice was served %d times; %v of CPU", total.Load(), served.Load(), g.cpu()-cpu)
	status, body, err := g.get("/connectors")
	var list struct {
		Names []struct{ Name, Owner string }
	}
	if err != nil || status != http.StatusOK || json.Unmarshal([]byte(body), &list) != nil {
		t.Fatalf("/connectors: %d, %v", status, err)
	}
	if len(list.Names) != 1 || list.Names[0].Name != "cam.edge.example" || list.Names[0].Owner != "alice" {
		t.Errorf("the names are %+v, want that of alice", list.Names)
	}
}
