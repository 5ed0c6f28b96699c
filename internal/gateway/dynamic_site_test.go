package gateway

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/netip"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"culvert.dev/internal/testca"
	"culvert.dev/internal/testnet"
	"culvert.dev/registry"
	"culvert.dev/tunnel"
)

// An edge is a gateway with no listener but those its source brings.
type edge struct {
	*running
	addr netip.Addr
	next uint16
	ca   *testca.CA
}

func newEdge(t *testing.T, services ...*registry.Service) *edge {
	t.Helper()
	return newEdgeOf(t, Config{Limits: noLimits}, services...)
}

// newEdgeOf is newEdge with more of a configuration.
func newEdgeOf(t *testing.T, cfg Config, services ...*registry.Service) *edge {
	t.Helper()
	e := newPorts()
	var err error
	if e.ca, err = testca.New("edge.test", nil); err != nil {
		t.Fatal(err)
	}
	cfg.SourcesListen = true
	e.running = launch(t, cfg, services...)
	return e
}

// newPorts returns an edge of which nothing but port, at and listener can be used.
func newPorts() *edge {
	e := &edge{addr: netip.MustParseAddr("127.0.0.1"), next: 20000 + uint16(rand.IntN(10000))}
	if runtime.GOOS == "linux" { // all of 127.0.0.0/8 is loopback
		e.addr = netip.AddrFrom4([4]byte{127, byte(64 + rand.IntN(64)), byte(rand.IntN(256)), byte(1 + rand.IntN(250))})
	}
	return e
}

// port returns one that nobody has.
func (e *edge) port() uint16 {
	for {
		e.next++
		ln, err := net.Listen("tcp", e.at(e.next))
		if err == nil {
			_ = ln.Close()
			return e.next
		}
	}
}

func (e *edge) at(port uint16) string { return netip.AddrPortFrom(e.addr, port).String() }

// have gives the gateway other listeners and waits until it has taken them up.
func (e *edge) have(listeners ...*registry.Listener) {
	e.t.Helper()
	e.say(registry.Snapshot{Listeners: listeners})
}

func (e *edge) say(s registry.Snapshot) {
	e.t.Helper()
	before := e.registry.Table().Generation()
	e.feed <- s
	testnet.Eventually(e.t, soon, func() bool {
		e.inbound.mu.Lock()
		defer e.inbound.mu.Unlock()
		return e.inbound.generation > before
	}, "the gateway has taken up the change")
}

// listener makes one at a new port.
func (e *edge) listener(name, protocol string, sections ...*registry.Section) *registry.Listener {
	return &registry.Listener{Name: name, Protocol: protocol, Address: e.addr, Port: e.port(), Sections: sections, Origin: "test"}
}

// with is l with other sections.
func with(l *registry.Listener, sections ...*registry.Section) *registry.Listener {
	other := *l
	other.Sections = sections
	return &other
}

func pattern(s string) tunnel.Pattern {
	if s == "" {
		return tunnel.Pattern{}
	}
	p, err := tunnel.ParsePattern(s)
	if err != nil {
		panic(err)
	}
	return p
}

func section(name, host string, rules ...*registry.Rule) *registry.Section {
	return &registry.Section{Name: name, Host: pattern(host), Rules: rules}
}

// to is a rule that leads to one backend.
func to(ep registry.Endpoint, names ...string) *registry.Rule {
	return ruled("rule-of-"+fmt.Sprint(names), names, registry.Backend{Weight: 1, Service: &registry.Service{Name: "backend", Endpoints: []registry.Endpoint{ep}}})
}

func ruled(name string, names []string, backends ...registry.Backend) *registry.Rule {
	r := &registry.Rule{Name: name, Backends: backends, Origin: "test"}
	for _, n := range names {
		r.Names = append(r.Names, pattern(n))
	}
	return r
}

func keyPair(p *testca.Pair) registry.KeyPair {
	return registry.KeyPair{Certificate: string(p.CertPEM), Key: registry.Secret(p.KeyPEM)}
}

// issue makes a certificate for DNS names.
func (e *edge) issue(names ...string) *testca.Pair {
	e.t.Helper()
	return issueOf(e.t, e.ca, names...)
}

func issueOf(t *testing.T, ca *testca.CA, names ...string) *testca.Pair {
	t.Helper()
	p, err := ca.Issue(testca.Options{SPIFFEID: "spiffe://" + ca.TrustDomain + "/ns/test/sa/a", DNSNames: names})
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func (e *edge) ends(names ...string) *registry.TLSTermination {
	return &registry.TLSTermination{Certificates: []registry.KeyPair{keyPair(e.issue(names...))}}
}

// tlsBackend says hello inside of TLS and echoes.
func tlsBackend(t *testing.T, cfg *tls.Config, hello string) registry.Endpoint {
	t.Helper()
	s := testnet.ServeTLS(t, cfg, func(c *tls.Conn) {
		if _, err := io.WriteString(c, hello); err == nil {
			_, _ = io.Copy(c, c)
			_ = c.CloseWrite()
		}
	})
	return registry.Endpoint{Addr: s.AddrPort().Addr(), Port: s.AddrPort().Port()}
}

// dialTLS asks for a name, by a certificate of the edge's CA; "" asks for
// nobody.
func (e *edge) dialTLS(port uint16, name string, certs ...tls.Certificate) (*tls.Conn, error) {
	d := &net.Dialer{Timeout: soon}
	cfg := &tls.Config{ServerName: name, Certificates: certs, RootCAs: e.ca.Pool(), InsecureSkipVerify: name == ""}
	c, err := tls.DialWithDialer(d, "tcp", e.at(port), cfg)
	if err != nil {
		return nil, err
	}
	e.t.Cleanup(func() { _ = c.Close() })
	_ = c.SetDeadline(time.Now().Add(soon))
	return c, nil
}

// hears reads what a backend says first.
func hears(c net.Conn, n int) string {
	b := make([]byte, n)
	n, err := io.ReadFull(c, b)
	if err != nil {
		return fmt.Sprintf("%q, %v", b[:n], err)
	}
	return string(b)
}

// asked returns what one who asks for a name by TLS hears, one letter; or "cut"
// where the connection ends with no word of TLS, as Gateway API has it.
func (e *edge) asked(port uint16, name string) string {
	e.t.Helper()
	c, err := e.dialTLS(port, name)
	switch {
	case err == nil:
		defer c.Close()
		return hears(c, 1)
	case wasCut(err):
		return "cut"
	}
	return err.Error()
}

func wasCut(err error) bool {
	return errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, syscall.ECONNRESET)
}

// plainly returns what one hears who says nothing, one letter; or "cut".
func (e *edge) plainly(port uint16) string {
	e.t.Helper()
	c, err := net.DialTimeout("tcp", e.at(port), soon)
	if wasCut(err) { // before connect had returned
		return "cut"
	} else if err != nil {
		return err.Error()
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(soon))
	b := make([]byte, 1)
	switch _, err := io.ReadFull(c, b); {
	case err == nil:
		return string(b)
	case wasCut(err):
		return "cut"
	default:
		return err.Error()
	}
}

// logs waits for a line of the log that has all of parts.
func (e *edge) logs(parts ...string) {
	e.t.Helper()
	testnet.Eventually(e.t, soon, func() bool {
		for line := range strings.Lines(e.log.String()) {
			if !slices.ContainsFunc(parts, func(p string) bool { return !strings.Contains(line, p) }) {
				return true
			}
		}
		return false
	}, "the log has a line of %q", parts)
}

// works checks that an open stream carries.
func works(t *testing.T, c net.Conn) {
	t.Helper()
	const said = "ping"
	if _, err := io.WriteString(c, said); err != nil {
		t.Error(err)
	}
	if got := hears(c, len(said)); got != said {
		t.Errorf("an open tunnel: got %s", got)
	}
}

// leafOf returns the serial number of whom c talks to.
func leafOf(c *tls.Conn) string { return c.ConnectionState().PeerCertificates[0].SerialNumber.String() }

func parseLeaf(t *testing.T, p *testca.Pair) *x509.Certificate {
	t.Helper()
	leaf, err := x509.ParseCertificate(p.TLS.Certificate[0])
	if err != nil {
		t.Fatal(err)
	}
	return leaf
}
