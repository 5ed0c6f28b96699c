package command

import (
	"bufio"
	"context"
	"crypto/tls"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"culvert.dev/internal/testca"
	"culvert.dev/internal/testnet"
)

// guideBlocks returns the YAML of a guide.
func guideBlocks(t *testing.T, name string) (blocks []string) {
	t.Helper()
	guide, err := os.ReadFile(filepath.Join("..", "..", "..", "docs", "guides", name))
	if err != nil {
		t.Fatal(err)
	}
	rest := string(guide)
	for {
		_, after, ok := strings.Cut(rest, "```yaml\n")
		if !ok {
			return blocks
		}
		block, after, _ := strings.Cut(after, "```\n")
		blocks, rest = append(blocks, block), after
	}
}

// A reverseWorld is what the guide has: a service that only its connector can dial.
type reverseWorld struct {
	ca      *testca.CA
	client  *testca.Pair
	gateway *running
	service net.Listener
	recipe  string // of the connector

	gatewayRecipe string
}

func newReverseWorld(t *testing.T) *reverseWorld {
	t.Helper()
	blocks := guideBlocks(t, "reverse.md")
	if len(blocks) != 2 {
		t.Fatalf("the guide has %d recipes, want 2", len(blocks))
	}
	w := &reverseWorld{ca: newTestCA(t, "corp.example")}
	w.client = w.issue(t, "spiffe://corp.example/ns/web/sa/client")
	cam := w.issue(t, "spiffe://corp.example/ns/edge/sa/cam", "cam.edge.example")

	w.service = tls.NewListener(testnet.Listen(t), &tls.Config{Certificates: []tls.Certificate{cam.TLS}, ClientAuth: tls.RequireAndVerifyClientCert, ClientCAs: w.ca.Pool()})
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			c, err := w.service.Accept()
			if err != nil {
				return
			}
			_ = c.SetDeadline(time.Now().Add(patience))
			if tc, ok := c.(*tls.Conn); ok && tc.Handshake() == nil {
				_, _ = fmt.Fprintf(c, "hello %s\n", tc.ConnectionState().PeerCertificates[0].URIs[0])
			}
			_ = c.Close()
		}
	}()
	t.Cleanup(func() {
		_ = w.service.Close()
		<-done
	})
	w.gatewayRecipe = blocks[0]
	w.gateway = w.startGateway(t)
	w.recipe = strings.Replace(blocks[1], "gw1.example:443", fmt.Sprintf("%q", w.gateway.addrs[0]), 1)
	w.recipe = strings.Replace(w.recipe, "  key: edge\n", "  key: edge\n  serverName: gw1.example\n", 1)
	w.recipe = strings.Replace(w.recipe, "127.0.0.1:8443", w.service.Addr().String(), 1)
	return w
}

// startGateway starts a gateway of the guide.
func (w *reverseWorld) startGateway(t *testing.T) *running {
	t.Helper()
	gw := w.issue(t, "spiffe://corp.example/ns/gw/sa/gw1", "gw1.example")
	return startFile(t, map[string]string{
		"gw.crt": string(gw.CertPEM), "gw.key": string(gw.KeyPEM), "ca.pem": string(w.ca.CertPEM),
		"culvert.yaml": "cluster: gw\n" + strings.Replace(w.gatewayRecipe, `":443"`, `"127.0.0.1:1"`, 1),
	})
}

func (w *reverseWorld) issue(t *testing.T, id string, names ...string) *testca.Pair {
	t.Helper()
	pair, err := w.ca.Issue(testca.Options{SPIFFEID: id, DNSNames: names})
	if err != nil {
		t.Fatal(err)
	}
	return pair
}

// connector starts the connector of the guide with an ID. Its cluster has it differ from the
// gateway in the same process, which would see a loop.
func (w *reverseWorld) connector(t *testing.T, id, config string) *running {
	t.Helper()
	edge := w.issue(t, id)
	return startFile(t, map[string]string{"edge.crt": string(edge.CertPEM), "edge.key": string(edge.KeyPEM), "ca.pem": string(w.ca.CertPEM), "culvert.yaml": "cluster: edge\n" + config})
}

// ask returns what the service says to a client that asks the gateway for its name, with a
// certificate that the service alone verifies.
func (w *reverseWorld) ask(t *testing.T, name string) (string, error) {
	return w.askAt(t, w.gateway.addrs[0], name)
}

// askAt is ask of the gateway at an address.
func (w *reverseWorld) askAt(t *testing.T, address, name string) (string, error) {
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	d := tls.Dialer{Config: &tls.Config{ServerName: name, RootCAs: w.ca.Pool(), Certificates: []tls.Certificate{w.client.TLS}}}
	c, err := d.DialContext(ctx, "tcp", address)
	if err != nil {
		return "", err
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(patience))
	return bufio.NewReader(c).ReadString('\n')
}

// session returns what the connector knows of its one session.
func session(r *running) (connected bool, refused int) {
	s := r.Status().Reverse
	if s == nil || len(s.To) != 1 {
		return false, 0
	}
	for _, n := range s.To[0].Names {
		if n.Reason != "" {
			refused++
		}
	}
	return s.To[0].Connected, refused
}

// The recipe of the guide: a service that only its connector can dial is reached by name
// through the gateway, with the client's certificate from end to end.
func TestReverseGuide(t *testing.T) {
	w := newReverseWorld(t)
	const want = "hello spiffe://corp.example/ns/web/sa/client\n"
	connector := w.connector(t, "spiffe://corp.example/ns/edge/sa/one", w.recipe)
	testnet.Eventually(t, patience, func() bool {
		got, err := w.ask(t, "cam.edge.example")
		return err == nil && got == want
	}, "the service answers")
	if connected, refused := session(connector); !connected || refused != 0 {
		t.Errorf("the connector is connected %v with %d names refused, want true and 0", connected, refused)
	}
	list := w.gateway.Connectors()
	if len(list.Sessions) != 1 || len(list.Names) != 1 || list.Sessions[0].Owner != "spiffe://corp.example/ns/edge/sa/one" || !list.Sessions[0].TLS {
		t.Errorf("the gateway lists %+v", list)
	}

	var out strings.Builder
	if err := printConnectors(&out, &list, time.Now()); err != nil || !strings.Contains(out.String(), "cam.edge.example") {
		t.Errorf("culvert connectors prints %q and %v", out.String(), err)
	}
	out.Reset()
	list.Sessions, list.Names[0].Sessions = nil, 0
	if err := printConnectors(&out, &list, time.Now()); err != nil || !strings.Contains(out.String(), "cam.edge.example has no session, and is kept for spiffe://corp.example/ns/edge/sa/one") {
		t.Errorf("culvert connectors prints %q and %v for a name that is kept", out.String(), err)
	}

	// Another connector with the identity shares the requests, and people see it.
	second := w.connector(t, "spiffe://corp.example/ns/edge/sa/one", w.recipe)
	testnet.Eventually(t, patience, func() bool { c, _ := session(second); return c }, "the second connector has a session")
	list = w.gateway.Connectors()
	out.Reset()
	if err := printConnectors(&out, &list, time.Now()); err != nil || !strings.Contains(out.String(), "\ncam.edge.example has 2 connectors, which share its requests\n") {
		t.Errorf("culvert connectors prints %q and %v for two connectors of one name", out.String(), err)
	}
	if s := second.Status().Reverse.To[0]; len(s.Names) != 1 || !s.Names[0].Shared {
		t.Errorf("the second connector knows %+v, want that the name is shared", s.Names)
	}

	// Another owner gets neither the name nor, without a policy, any other.
	other := w.connector(t, "spiffe://corp.example/ns/edge/sa/two", w.recipe)
	testnet.Eventually(t, patience, func() bool { c, refused := session(other); return c && refused == 1 }, "the name is refused to another owner")
	list = w.gateway.Connectors()
	out.Reset()
	if err := printConnectors(&out, &list, time.Now()); err != nil || !strings.Contains(out.String(), "  refused: cam.edge.example (denied)\n") {
		t.Errorf("culvert connectors prints %q and %v for a name that is refused", out.String(), err)
	}
	stranger := w.connector(t, "spiffe://corp.example/ns/web/sa/three", strings.Replace(w.recipe, "cam.edge", "bell.edge", 1))
	testnet.Eventually(t, patience, func() bool { c, refused := session(stranger); return c && refused == 1 }, "the name is refused to who has no permission")
	if got, err := w.ask(t, "cam.edge.example"); err != nil || got != want {
		t.Errorf("after that: got %q and %v, want %q", got, err, want)
	}
	if got, err := w.ask(t, "bell.edge.example"); err == nil {
		t.Errorf("a name that nobody may register: got %q, want a refusal", got)
	}

	// A reload takes up another name on the same session.
	before := w.gateway.Connectors().Sessions[0].ID
	connector.write(t, "culvert.yaml", "cluster: edge\n"+strings.Replace(w.recipe, "cam.edge.example,", "door.edge.example,", 1))
	connector.source.Reload()
	testnet.Eventually(t, patience, func() bool {
		for _, s := range w.gateway.Connectors().Sessions {
			if s.ID == before {
				return len(s.Names) == 1 && s.Names[0].Name.String() == "door.edge.example"
			}
		}
		return false
	}, "the session has the other name")
}

// With pool connections, what clients and the service send each other goes over these,
// whatever carries the session, and the service is reached as without. A ticket is good once.
func TestReversePool(t *testing.T) {
	for _, carrier := range []string{"connect", "connect-h2", "websocket", "hbone"} {
		t.Run(carrier, func(t *testing.T) {
			testReversePool(t, carrier)
		})
	}
}

// poolPreamble begins a pool connection, and a ticket follows.
const poolPreamble = "\x00culvert-pool/1\n"

func testReversePool(t *testing.T, carrier string) {
	w := newReverseWorld(t)
	w.gatewayRecipe = strings.Replace(w.gatewayRecipe, "protocols: [sni]", "protocols: [sni, reverse-pool]", 1)
	w.gatewayRecipe = strings.Replace(w.gatewayRecipe, "protocols: [connect]", "protocols: ["+carrier+"]", 1)
	access := "  key: edge\n  poolConnections: 2\n  protocol: " + carrier + "\n"
	if carrier == "hbone" { // its clients send no name: those that do have a listener of their own
		w.gatewayRecipe = strings.Replace(w.gatewayRecipe, "protocols: [sni, reverse-pool]", "protocols: [reverse-pool]", 1)
		w.gatewayRecipe = strings.Replace(w.gatewayRecipe, "names: [gw1.example], ", "", 1)
		w.gatewayRecipe = strings.Replace(w.gatewayRecipe, "identity:\n", "  - {address: \"127.0.0.1:4\", protocols: [sni]}\nidentity:\n", 1)
		w.recipe = strings.Replace(w.recipe, "  serverName: gw1.example\n", "  peers: [\"spiffe://corp.example/ns/gw/sa/gw1\"]\n", 1)
	}
	w.gateway = w.startGateway(t)
	path := testnet.NewRecorder(t, w.gateway.addrs[0])
	_, to, _ := strings.Cut(w.recipe, "  to: [")
	old, _, _ := strings.Cut(to, "]")
	w.recipe = strings.Replace(w.recipe, old, fmt.Sprintf("%q", path.Addr()), 1)
	connector := w.connector(t, "spiffe://corp.example/ns/edge/sa/one", strings.Replace(w.recipe, "  key: edge\n", access, 1))
	full := func() bool {
		s, at := connector.Status().Reverse, w.gateway.Connectors().Sessions
		return s != nil && s.To[0].Pool == 2 && len(at) == 1 && at[0].Pool == 2
	}
	// raw returns the tickets that pool connections began with, and how many of them have carried
	// something.
	raw := func() (tickets []string, used int) {
		for _, f := range path.Flows() {
			if ticket, ok := strings.CutPrefix(string(f.Up), poolPreamble); ok && len(ticket) >= 32 {
				tickets = append(tickets, ticket[:32])
				if len(ticket) > 32 && len(f.Down) > 0 {
					used++
				}
			}
		}
		return tickets, used
	}
	const want = "hello spiffe://corp.example/ns/web/sa/client\n"
	const requests = 4
	for range requests {
		testnet.Eventually(t, patience, full, "the pool is full")
		before := w.gateway.Connectors().Sessions[0]
		if got, err := w.askAt(t, w.gateway.addrs[len(w.gateway.addrs)-1], "cam.edge.example"); err != nil || got != want {
			t.Fatalf("got %q and %v, want %q", got, err, want)
		}
		testnet.Eventually(t, patience, func() bool {
			now := w.gateway.Connectors().Sessions[0]
			return now.Streams == 0 && now.In > before.In && now.Out > before.Out
		}, "the session counts what went over the pool connection")
	}
	testnet.Eventually(t, patience, full, "the pool is full again")
	if at := w.gateway.Connectors().Sessions[0]; !at.TLS {
		t.Errorf("the session is not in TLS: %+v", at)
	}
	tickets, used := raw()
	if used != requests {
		t.Errorf("%d of %d pool connections have carried something, want %d", used, len(tickets), requests)
	}
	seen := map[string]bool{}
	for _, ticket := range tickets {
		if seen[ticket] {
			t.Error("the connector has used a ticket twice")
		}
		if seen[ticket] = true; probe(w.gateway.addrs[0], poolPreamble+ticket) == nil {
			t.Error("a connection with a ticket that was used is open")
		}
	}
	if err := probe(w.gateway.addrs[0], poolPreamble+strings.Repeat("x", 32)); err == nil {
		t.Error("a connection with a ticket of nobody's is open")
	}
	if !full() {
		t.Error("connections with such tickets have ended others")
	}
}

// probe returns why a connection has ended that sends something.
func probe(address, text string) error {
	c, err := net.Dial("tcp", address)
	if err != nil {
		return err
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(patience))
	if _, err := c.Write([]byte(text)); err != nil {
		return err
	}
	_, err = c.Read(make([]byte, 1))
	if ne, ok := err.(net.Error); ok && ne.Timeout() {
		return nil
	}
	return err
}
