//go:build linux

package reliability

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"culvert.dev/connect"
	"culvert.dev/internal/testca"
	"culvert.dev/internal/testnet"
	"culvert.dev/registry/peer"
	"culvert.dev/tunnel"
)

// peersConfig is that of a gateway with one peer: what it may offer, and where it is asked.
const peersConfig = `cluster: east
listeners:
  - address: "%[1]s"
    protocols: [sni, connect]
    tls:
      - {names: [gw.example], key: gw, trust: west.test, protocols: [connect]}
identity:
  keys:
    gw: {certificateFile: gw.crt, keyFile: gw.key}
  trust:
    west.test: {caFile: west.pem}
peers:
  - name: west
    gateways: [{address: "%[3]s", transports: [{protocol: connect, tls: true, key: gw, serverName: gw.west.test}]}]
    ids: ["spiffe://west.test/gw/*"]
    zones: ["*.west.example"]
    state: west
admin: "%[2]s"
log: {format: json}
services:
  - {name: own.test, endpoints: ["%[4]s"]}
`

// A badPeer is a gateway of another site whose catalog is what a test writes.
type badPeer struct {
	g      *gateway
	keys   *tls.Config // it shows these
	opened int
}

// serveEcho serves CONNECT inside TLS, as a gateway of the peer does: each service is an echo, and
// there is no catalog. It returns the address.
func (p *badPeer) serveEcho(t *testing.T) string {
	t.Helper()
	ln := tls.NewListener(testnet.Listen(t), p.keys)
	var serving sync.WaitGroup
	serving.Go(func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			serving.Go(func() {
				defer c.Close()
				r := bufio.NewReader(c)
				req, err := http.ReadRequest(r)
				if err != nil {
					return
				}
				if strings.HasPrefix(req.Host, peer.Host) {
					_, _ = io.WriteString(c, "HTTP/1.1 403 no\r\nContent-Length: 0\r\n\r\n")
					return
				}
				_, _ = io.WriteString(c, "HTTP/1.1 200 OK\r\n\r\n")
				_, _ = io.Copy(c, r)
			})
		}
	})
	t.Cleanup(func() {
		_ = ln.Close()
		serving.Wait()
	})
	return ln.Addr().String()
}

// A catalogStream is a stream for catalogs that the peer has opened.
type catalogStream struct {
	net.Conn
	r *bufio.Reader
}

func (p *badPeer) open() (*catalogStream, error) {
	d := connect.Dialer{Proxy: p.g.addr, TLS: p.keys}
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	c, err := d.DialContext(ctx, "tcp", peer.Host+":443")
	if err != nil {
		return nil, err
	}
	_ = c.SetDeadline(time.Now().Add(2 * patience))
	return &catalogStream{c, bufio.NewReader(c)}, nil
}

// goodCatalog is what the peer offers before it lies, and what it has to keep.
const goodCatalog = `{"version":1,"kind":"snapshot","generation":5,"services":[{"key":"a","name":"a","names":["a.west.example"],"site":"west"}]}`

// begin opens a stream with a hello that has more, and sends the good catalog.
func (p *badPeer) begin(t *testing.T, more string) *catalogStream {
	t.Helper()
	s, err := p.open()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Close() })
	p.opened++
	s.send(fmt.Sprintf(`{"version":1,"kind":"hello","site":"west","instance":"i%d"%s}`, p.opened, more))
	if m := s.next("subscribe"); m.Kind != "subscribe" {
		t.Fatalf("the gateway says %+v, want a subscribe", m)
	}
	s.send(goodCatalog)
	p.awaitStatus(t, "the good catalog", func(s *peer.Status) bool { return s.Connected && s.Services == 1 && s.Generation == 5 })
	testnet.Eventually(t, patience, func() bool { return p.reaches("a.west.example") == nil && p.reaches("b.west.example") != nil }, "the table has the good catalog")
	return s
}

// send writes lines, until the gateway takes no more.
func (s *catalogStream) send(lines ...string) {
	for _, line := range lines {
		if _, err := io.WriteString(s, line+"\n"); err != nil {
			return
		}
	}
}

// next returns the next message of a kind, or the error that the gateway ends the stream with.
func (s *catalogStream) next(kind string) *peer.Message {
	for {
		line, err := s.r.ReadBytes('\n')
		m := &peer.Message{}
		if err == nil {
			err = json.Unmarshal(line, m)
		}
		if err != nil {
			return &peer.Message{Kind: peer.KindError, Error: "no message: " + err.Error()}
		}
		if m.Kind == kind || m.Kind == peer.KindError {
			return m
		}
	}
}

// status is what the gateway says of the peer.
func (p *badPeer) status() *peer.Status {
	_, body, err := p.g.get("/status")
	var got struct{ Peers []*peer.Status }
	if err != nil || json.Unmarshal([]byte(body), &got) != nil || len(got.Peers) != 1 {
		return &peer.Status{}
	}
	return got.Peers[0]
}

func (p *badPeer) awaitStatus(t *testing.T, what string, right func(*peer.Status) bool) {
	t.Helper()
	var last peer.Status
	testnet.Eventually(t, patience, func() bool {
		p.g.alive()
		last = *p.status()
		return right(&last)
	}, "%s: the status is %+v", what, &last)
}

// reaches asks the gateway for a service of the peer.
func (p *badPeer) reaches(name string) error {
	c, err := p.g.dial(1)
	if err != nil {
		return err
	}
	defer c.Close()
	return byConnect.enter(c, name)
}

// catalogLine is a part of a snapshot that does not end, with n services from the i-th of all.
func catalogLine(i, n int, names func(i int) string) string {
	var b bytes.Buffer
	b.WriteString(`{"version":1,"kind":"snapshot","generation":6,"more":true,"services":[`)
	for k := i; k < i+n; k++ {
		if k > i {
			b.WriteByte(',')
		}
		fmt.Fprintf(&b, `{"key":"k%d","name":"","names":[%s]}`, k, names(k))
	}
	b.WriteString("]}")
	return b.String()
}

// The gateway of a peer that lies in any part of its catalog is told why and loses its stream, or
// loses that part alone. The last good catalog stays in force, also over a restart, and so does all
// else that the gateway serves.
func TestPeersThatLie(t *testing.T) {
	ca, err := testca.New("east.test", nil)
	if err != nil {
		t.Fatal(err)
	}
	west, err := testca.New("west.test", nil)
	if err != nil {
		t.Fatal(err)
	}
	server, err := ca.Issue(testca.Options{SPIFFEID: "spiffe://east.test/gw", DNSNames: []string{"gw.example"}})
	if err != nil {
		t.Fatal(err)
	}
	pair, err := west.Issue(testca.Options{SPIFFEID: "spiffe://west.test/gw/1", DNSNames: []string{"gw.west.test"}})
	if err != nil {
		t.Fatal(err)
	}
	g := prepare(t, options{})
	p := &badPeer{g: g, keys: &tls.Config{ServerName: "gw.example", RootCAs: ca.Pool(), Certificates: []tls.Certificate{pair.TLS}, ClientAuth: tls.RequireAndVerifyClientCert, ClientCAs: ca.Pool()}}
	for name, content := range map[string][]byte{"gw.crt": server.CertPEM, "gw.key": server.KeyPEM, "west.pem": west.CertPEM} {
		if err := os.WriteFile(filepath.Join(filepath.Dir(g.config), name), content, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	g.write(fmt.Sprintf(peersConfig, g.addr, g.admin, p.serveEcho(t), startBackend(t, "echo").addr))
	g.begin()
	before := g.rss()

	// A gateway that the peer names, and that nobody may dial.
	trap, trapped := testnet.Listen(t), atomic.Int64{}
	var watching sync.WaitGroup
	watching.Go(func() {
		for {
			c, err := trap.Accept()
			if err != nil {
				return
			}
			trapped.Add(1)
			_ = c.Close()
		}
	})
	t.Cleanup(func() { _ = trap.Close(); watching.Wait() })
	loopback := fmt.Sprintf(`{"address":%q,"transports":["connect"]}`, trap.Addr())
	forbidden := func(address string) string {
		return fmt.Sprintf(`,"gateways":[{"address":%q,"transports":["connect"]}]`, address)
	}

	// Another client asks for a service of the gateway's own all the while.
	served, asked := g.keepAsking(t, "own.test", 2)
	defer asked()

	one := func(fields string) []string {
		return []string{fmt.Sprintf(`{"version":1,"kind":"snapshot","generation":6,"services":[{"key":"a","name":"a","names":["a.west.example"]},{"key":"b","name":"b","names":["b.west.example"]},{"key":"x","name":"x"%s}]}`, fields)}
	}
	longNames := strings.Repeat(fmt.Sprintf(`,"%s.%[1]s.%[1]s.%[1]s.west.example"`, strings.Repeat("x", 58)), 230)
	endless := func(perLine int, names func(i int) string) func(*catalogStream) {
		return func(s *catalogStream) {
			for i := 0; i < 10_000_000; i += perLine {
				if _, err := io.WriteString(s, catalogLine(i, perLine, names)+"\n"); err != nil {
					return
				}
			}
		}
	}
	for _, c := range []struct {
		name  string
		hello string                 // more of it
		lines []string               // after the good catalog
		write func(s *catalogStream) // in place of lines

		told    string   // why the stream ends; "" where it stays
		leftOut string   // of what the peer offers
		lost    []string // names that nobody reaches
	}{
		{name: "a name outside of its zones", lines: one(`,"names":["bank.example","own.test","x.west.example.bank.example"]`), leftOut: `"bank.example" is outside of the zones`, lost: []string{"bank.example", "x.west.example.bank.example"}},
		{name: "all names", lines: one(`,"names":["*","*.example","west.example"]`), leftOut: "is outside of the zones", lost: []string{"x.example", "west.example"}},
		{name: "a reserved name", lines: one(`,"names":["join.culvert.alt"]`), leftOut: "is outside of the zones"},
		{name: "a service of a third site", lines: one(`,"names":["x.west.example"],"site":"south"`), leftOut: `is that of site "south"`, lost: []string{"x.west.example"}},
		{name: "a service of our own", lines: one(`,"names":["x.west.example"],"site":"east"`), leftOut: "is our own", lost: []string{"x.west.example"}},
		{name: "a port", lines: one(`,"names":["x.west.example"],"ports":[0]`), leftOut: "port 0", lost: []string{"x.west.example"}},
		{name: "a named port", lines: one(`,"names":["x.west.example"],"namedPorts":[{"name":"a.b","protocol":"sctp","port":1}]`), leftOut: "named port", lost: []string{"x.west.example"}},
		{name: "ALPN", lines: one(`,"names":["x.west.example"],"alpn":[""]`), leftOut: "ALPN", lost: []string{"x.west.example"}},
		{name: "a gateway at loopback", hello: `,"gateways":[` + loopback + `]`, lines: one(`,"names":["x.west.example"]`), leftOut: "loopback"},
		{name: "gateways that have moved to loopback", lines: append(one(`,"names":["x.west.example"]`), `{"version":1,"kind":"heartbeat","moved":true,"gateways":[`+loopback+`]}`), leftOut: "loopback"},
		{name: "a link-local gateway", hello: forbidden("[fe80::1]:443"), lines: one(`,"names":["x.west.example"]`), leftOut: "may not be used"},
		{name: "a gateway at a metadata service", hello: forbidden("169.254.169.254:80"), lines: one(`,"names":["x.west.example"]`), leftOut: "may not be used"},
		{name: "a metadata service by NAT64", hello: forbidden("[64:ff9b::a9fe:a9fe]:80"), lines: one(`,"names":["x.west.example"]`), leftOut: "may not be used"},

		{name: "too many gateways", hello: "", lines: []string{`{"version":1,"kind":"heartbeat","moved":true,"gateways":[` + strings.Repeat("{},", 16) + `{}]}`}, told: "17 gateways"},
		{name: "the generation of before", lines: []string{`{"version":1,"kind":"change","generation":5,"removed":["a"]}`}, told: "generation 5 has come after generation 5"},
		{name: "an old generation", lines: []string{strings.Replace(goodCatalog, `"generation":5`, `"generation":4`, 1)}, told: "generation 4 has come after generation 5"},
		{name: "no generation", lines: []string{`{"version":1,"kind":"snapshot"}`}, told: "no generation"},
		{name: "a generation without its change", lines: []string{`{"version":1,"kind":"heartbeat","generation":9}`}, told: "no change to that"},
		{name: "an unknown version", lines: []string{`{"version":2,"kind":"snapshot","generation":6}`}, told: "of version 2"},
		{name: "an unknown kind", lines: []string{`{"version":1,"kind":"erase"}`}, told: "unknown kind"},
		{name: "no message", lines: []string{"\x00\xff{}"}, told: "not a message"},
		{name: "a long line", write: func(s *catalogStream) { _, _ = s.Write(bytes.Repeat([]byte("x"), 2*peer.MaxLine)) }, told: "longer than the limit of 65536 bytes"},
		{name: "ten million services", write: endless(500, func(i int) string { return fmt.Sprintf(`"s%d.west.example"`, i) }), told: "more than 10000 services"},
		{name: "ten million services outside of its zones", write: endless(500, func(i int) string { return fmt.Sprintf(`"s%d.bank.example"`, i) }), told: "more than 10000 services"},
		{name: "more than 16 MiB", write: endless(1, func(i int) string { return fmt.Sprintf(`"s%d.west.example"%s`, i, longNames) }), told: "more than 16777216 bytes"},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := p.begin(t, c.hello)
			if c.write == nil {
				c.write = func(s *catalogStream) { s.send(c.lines...) }
			}
			var writing sync.WaitGroup
			writing.Go(func() { c.write(s) })
			if c.told != "" {
				if m := s.next(peer.KindError); !strings.Contains(m.Error, c.told) {
					t.Errorf("the peer is told %q, want %q", m.Error, c.told)
				}
				p.awaitStatus(t, "the last good catalog, as one of before", func(s *peer.Status) bool { return !s.Connected && s.Services == 1 && s.Generation == 5 })
				said := func(e entry) bool {
					return e.str("peer") == "west" && strings.Contains(e.str("error"), c.told)
				}
				testnet.Eventually(t, patience, func() bool { return len(g.entries(said)) > 0 }, "the log says %q", c.told)
			} else {
				p.awaitStatus(t, "the catalog without what is left out", func(s *peer.Status) bool {
					return s.Connected && s.Generation == 6 && slices.ContainsFunc(s.LeftOut, func(why string) bool { return strings.Contains(why, c.leftOut) })
				})
				// The table has the rest soon, and would have all else by then.
				testnet.Eventually(t, patience, func() bool { return p.reaches("b.west.example") == nil }, "what is offered beside it is reached")
			}
			if err := p.reaches("a.west.example"); err != nil {
				t.Errorf("a service of the last good catalog: %v", err)
			}
			for _, name := range c.lost {
				if r := g.refused(byConnect, 1, name); r.code != http.StatusForbidden {
					t.Errorf("%s: %v, want 403", name, r)
				}
			}
			_ = s.Close()
			writing.Wait()
			p.awaitStatus(t, "the end of the stream", func(s *peer.Status) bool { return s.Streams == 0 })
		})
	}
	const mostMemory = 128 << 20
	if grew := g.kilobytes("status", "VmHWM:")<<10 - before; grew > mostMemory {
		t.Errorf("the gateway has had %d MiB more at some time, want %d at most", grew>>20, mostMemory>>20)
	} else {
		t.Logf("the gateway has had %d MiB more at the most", grew>>20)
	}
	if n := trapped.Load(); n != 0 {
		t.Errorf("%d connections have come to loopback, where the peer says that its gateway is", n)
	}

	t.Run("too many streams", func(t *testing.T) {
		const most = 64
		var refusal error
		open := 0
		for ; refusal == nil && open <= 2*most; open++ {
			var s *catalogStream
			if s, refusal = p.open(); refusal == nil {
				defer s.Close()
			}
		}
		if open != most+1 || tunnel.ReasonOf(refusal) != tunnel.Overload {
			t.Errorf("stream %d is refused: %v; want %d, overload", open, refusal, most+1)
		}
	})
	p.awaitStatus(t, "the end of all streams", func(s *peer.Status) bool { return s.Streams == 0 })

	// A peer that has lied is heard when it says what is right.
	s := p.begin(t, "")
	s.send(`{"version":1,"kind":"change","generation":6,"services":[{"key":"c","name":"c","names":["c.west.example"]}]}`)
	testnet.Eventually(t, patience, func() bool { return p.reaches("c.west.example") == nil }, "a service that is added is reached")
	asked()
	t.Logf("another client was served %d times", served.Load())

	g.restart(nil)
	testnet.Eventually(t, patience, func() bool { return p.reaches("a.west.example") == nil }, "a service of the peer is reached after a restart")
	for _, name := range []string{"bank.example", "x.west.example"} {
		if r := g.refused(byConnect, 1, name); r.code != http.StatusForbidden {
			t.Errorf("%s after a restart: %v, want 403", name, r)
		}
	}
}

// restart kills the process, and starts another one in its place after meanwhile, which may be nil.
func (g *gateway) restart(meanwhile func()) {
	g.t.Helper()
	g.killed = true
	g.signal(syscall.SIGKILL)
	g.awaitExit()
	if meanwhile != nil {
		meanwhile()
	}
	g.exited, g.killed = make(chan struct{}), false
	g.begin()
}
