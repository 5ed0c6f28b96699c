package gateway

import (
	"bytes"
	"crypto/tls"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"culvert.dev/internal/testca"
	"culvert.dev/internal/testnet"
	"culvert.dev/registry"
	"culvert.dev/tunnel"
)

// A secondHello changes the name in the second ClientHello that is written.
type secondHello struct {
	net.Conn
	from, to string
	hellos   int
}

func (c *secondHello) Write(b []byte) (int, error) {
	const handshake, clientHello = 22, 1
	if len(b) > 5 && b[0] == handshake && b[5] == clientHello {
		if c.hellos++; c.hellos == 2 {
			b = bytes.ReplaceAll(slices.Clone(b), []byte(c.from), []byte(c.to))
		}
	} else if at := bytes.Index(b, []byte(c.from)); at >= 0 { // behind a change of ciphers, in one write
		c.hellos = 2
		b = bytes.ReplaceAll(slices.Clone(b), []byte(c.from), []byte(c.to))
	}
	return c.Conn.Write(b)
}

// The name in the first ClientHello decides. The second one, after a HelloRetryRequest, goes
// to the same service, whatever it names: RFC 8446 section 4.1.2 has the service refuse
// another name, and the service of that name hears nothing.
func TestSecondHelloGoesWhereTheFirstWent(t *testing.T) {
	ca := newCA(t)
	type backend struct {
		addr        string
		connections atomic.Int32
		mu          sync.Mutex
		err         error
	}
	backends := map[string]*backend{"one.test": {}, "two.test": {}}
	var services []*registry.Service
	for name, b := range backends {
		pair, err := ca.Issue(testca.Options{SPIFFEID: "spiffe://" + ca.TrustDomain + "/" + name, DNSNames: []string{name}})
		if err != nil {
			t.Fatal(err)
		}
		cfg := &tls.Config{Certificates: []tls.Certificate{pair.TLS}, CurvePreferences: []tls.CurveID{tls.CurveP521}}
		b.addr = testnet.Service(t, func(c net.Conn) {
			b.connections.Add(1)
			err := tls.Server(c, cfg).HandshakeContext(t.Context())
			b.mu.Lock()
			b.err = err
			b.mu.Unlock()
		})
		s := service(b.addr)
		s.Name, s.Names = name, []tunnel.Pattern{{Suffix: tunnel.MustParseName(name)}}
		services = append(services, s)
	}
	addr := start(t, "edge", services...)
	for _, to := range []string{"one.test", "two.test"} {
		c, err := net.Dial("tcp", addr)
		if err != nil {
			t.Fatal(err)
		}
		_ = c.SetDeadline(time.Now().Add(6 * patience))
		changed := &secondHello{Conn: c, from: "one.test", to: to}
		err = tls.Client(changed, &tls.Config{ServerName: "one.test", RootCAs: ca.Pool(), CurvePreferences: []tls.CurveID{tls.X25519, tls.CurveP521}}).HandshakeContext(t.Context())
		_ = c.Close()
		if changed.hellos != 2 {
			t.Fatalf("%d hellos were sent, want 2: the service asks for another group", changed.hellos)
		}
		const illegal = "remote error: tls: illegal parameter"
		if same := to == "one.test"; same && err != nil || !same && (err == nil || err.Error() != illegal) {
			t.Errorf("a second hello for %s: got %v, want no error for the same name and %q for another", to, err, illegal)
		}
	}
	if one, two := backends["one.test"].connections.Load(), backends["two.test"].connections.Load(); one != 2 || two != 0 {
		t.Errorf("the services got %d and %d connections, want 2 and 0", one, two)
	}
}
