//go:build !nospiffe

package command

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/spiffe/go-spiffe/v2/proto/spiffe/workload"

	"culvert.dev/connect"
	"culvert.dev/identity/spiffe/spiffetest"
	"culvert.dev/internal/testca"
	"culvert.dev/internal/testnet"
)

// guideRecipe returns the configuration in a section of the guide to SPIFFE, with some of
// its texts replaced.
func guideRecipe(t *testing.T, section string, replace map[string]string) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("..", "..", "..", "docs", "guides", "spiffe.md"))
	if err != nil {
		t.Fatal(err)
	}
	_, block, ok := strings.Cut(string(text), "\n## "+section+"\n")
	_, block, begins := strings.Cut(block, "```yaml\n")
	block, _, ends := strings.Cut(block, "```\n")
	if !ok || !begins || !ends {
		t.Fatalf("the guide has no recipe in %q", section)
	}
	for old, now := range replace {
		if strings.Count(block, old) != 1 {
			t.Fatalf("the recipe has %q %d times, want once", old, strings.Count(block, old))
		}
		block = strings.Replace(block, old, now, 1)
	}
	return block
}

// A rotatingMesh is a trust domain whose CA and keys are replaced while gateways use them.
type rotatingMesh struct {
	domain  string
	signer  *testca.CA
	trusted []*testca.CA
}

func newRotatingMesh(t *testing.T, domain string) *rotatingMesh {
	ca := newTestCA(t, domain)
	return &rotatingMesh{domain, ca, []*testca.CA{ca}}
}

func (m *rotatingMesh) issue(t *testing.T, id string) *testca.Pair {
	t.Helper()
	pair, err := m.signer.Issue(testca.Options{SPIFFEID: id})
	if err != nil {
		t.Fatal(err)
	}
	return pair
}

// pem returns the CAs that are trusted.
func (m *rotatingMesh) pem() (text string) {
	for _, ca := range m.trusted {
		text += string(ca.CertPEM)
	}
	return text
}

// trustedBy reports whether the trust with a name, of r, has the CAs of m and no others.
func (m *rotatingMesh) trustedBy(r *running, name string) bool {
	b, err := r.ids.store.Trust(name).Bundle()
	return err == nil && slices.EqualFunc(b.Roots, m.trusted, func(c *x509.Certificate, ca *testca.CA) bool { return c.Equal(ca.Root()) })
}

// The recipe of the guide for listeners, next hops and services, beside a gateway of the
// other mesh whose keys and CAs are files, by name and in place: while the CAs and the keys
// of both are replaced twice under load, no connection fails, the tunnels from before stay,
// and neither gateway makes a table.
func TestNamedCredentialsRotate(t *testing.T) {
	corp, partner := newRotatingMesh(t, "corp.example"), newRotatingMesh(t, "partner.example")

	// The service orders has its own certificate, and takes that of the gateway alone.
	var ofOrders atomic.Pointer[tls.Certificate]
	ofOrders.Store(&corp.issue(t, "spiffe://corp.example/ns/shop/sa/orders").TLS)
	orders := testnet.ServeTLS(t, &tls.Config{
		ClientAuth:     tls.RequireAnyClientCert,
		GetCertificate: func(*tls.ClientHelloInfo) (*tls.Certificate, error) { return ofOrders.Load(), nil },
		VerifyConnection: func(cs tls.ConnectionState) error {
			if leaf := cs.PeerCertificates[0]; len(leaf.URIs) != 1 || leaf.URIs[0].String() != corpGateway {
				return fmt.Errorf("the client is %v, want %s", leaf.URIs, corpGateway)
			}
			return nil
		},
	}, nil)
	web := testnet.Echo(t)

	answer := func() spiffetest.Answer {
		return spiffetest.Answer{
			SVIDs:   []*workload.X509SVID{spiffetest.SVID(t, corp.signer, testca.Options{SPIFFEID: corpGateway})},
			Bundles: map[string][]byte{"spiffe://corp.example": spiffetest.Bundle(corp.trusted...), "spiffe://partner.example": spiffetest.Bundle(partner.trusted...)},
		}
	}
	agent := spiffetest.New(t, answer())
	files := func() map[string]string {
		pair := partner.issue(t, partnerGateway)
		return map[string]string{"gw.crt": string(pair.CertPEM), "gw.key": string(pair.KeyPEM), "corp.pem": corp.pem(), "partner.pem": partner.pem()}
	}
	theirConfig := func(hop string) string {
		return fmt.Sprintf(`cluster: partner
listeners:
  - {address: "127.0.0.1:1", tls: {certificateFile: gw.crt, keyFile: gw.key, clientCAFile: {corp.example: corp.pem, partner.example: partner.pem}, protocols: [hbone]}}
  - {address: "127.0.0.1:4", protocols: [connect]}
identity:
  keys: {gw: {certificateFile: gw.crt, keyFile: gw.key}}
  trust: {corp.example: {caFile: corp.pem}, partner.example: {caFile: partner.pem}}
services:
  - {name: web.partner.example, ports: [443], endpoints: [%q], insecure: true}
  - {name: orders.corp.example, ports: [443], via: [{hbone: %q, key: gw, trust: corp.example, peers: ["spiffe://corp.example"]}]}
`, web.Addr(), hop)
	}
	config := files()
	config["culvert.yaml"] = theirConfig(testnet.ClosedPort(t))
	theirs := startFile(t, config)
	ours := startFile(t, map[string]string{"culvert.yaml": guideRecipe(t, "Listeners, next hops and services", map[string]string{
		`":15008"`:                     `"127.0.0.1:1"`,
		`"127.0.0.1:3128"`:             `"127.0.0.1:4"`,
		"unix:///run/spire/agent.sock": agent.Socket(),
		"unix:/run/culvert/admin.sock": `"127.0.0.1:2"`,
		"10.0.1.7:8443":                orders.Addr(),
		"gw.partner.example:15008":     theirs.addrs[0],
	})})
	theirs.write(t, "culvert.yaml", theirConfig(ours.addrs[0]))

	dial := func(from *running, name string) (net.Conn, error) {
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		defer cancel()
		return (&connect.Dialer{Proxy: from.addrs[1]}).DialContext(ctx, "tcp", name+":443")
	}
	calls := []struct {
		from *running
		name string
		done atomic.Int64
	}{
		{from: ours, name: "orders.corp.example"},   // backend TLS
		{from: ours, name: "web.partner.example"},   // a next hop
		{from: theirs, name: "orders.corp.example"}, // the listener, and backend TLS behind it
	}
	var kept []net.Conn
	for i := range calls {
		testnet.Eventually(t, patience, func() bool {
			c, err := dial(calls[i].from, calls[i].name)
			if err == nil {
				kept = append(kept, c)
			}
			return err == nil
		}, "%s is reached", calls[i].name)
	}
	before := []uint64{ours.Status().Generation, theirs.Status().Generation}

	stop := make(chan struct{})
	var work sync.WaitGroup
	for i := range calls {
		work.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				c, err := dial(calls[i].from, calls[i].name)
				if err == nil {
					_ = c.SetDeadline(time.Now().Add(patience))
					testnet.Ping(t, c, "hello")
					_ = c.Close()
				}
				calls[i].done.Add(1)
				if err != nil {
					t.Errorf("%s: %v", calls[i].name, err)
					return
				}
			}
		})
	}
	settle := func() {
		for i := range calls {
			from := calls[i].done.Load()
			testnet.Eventually(t, patience, func() bool { return t.Failed() || calls[i].done.Load() >= from+4 }, "calls of %s", calls[i].name)
		}
	}
	// use has both gateways use what there is now, and returns when they do.
	use := func() {
		t.Helper()
		generation := func(r *running, key string) uint64 { return r.ids.store.Key(key).Generation() }
		our, their, theirOwn := generation(ours, "gateway"), generation(theirs, "gw"), generation(theirs, "file:gw.crt")
		agent.Set(answer())
		for name, content := range files() {
			theirs.write(t, name, content)
		}
		testnet.Eventually(t, patience, func() bool {
			for _, m := range []*rotatingMesh{corp, partner} {
				own := "file:" + strings.TrimSuffix(m.domain, ".example") + ".pem#" + m.domain
				if !m.trustedBy(ours, m.domain) || !m.trustedBy(theirs, m.domain) || !m.trustedBy(theirs, own) {
					return false
				}
			}
			return generation(ours, "gateway") > our && generation(theirs, "gw") > their && generation(theirs, "file:gw.crt") > theirOwn
		}, "both gateways have what is new")
		settle()
	}
	settle()
	for range 2 {
		for _, m := range []*rotatingMesh{corp, partner} {
			next := newTestCA(t, m.domain)
			m.trusted = append(m.trusted, next)
			use()
			m.signer = next
			ofOrders.Store(&corp.issue(t, "spiffe://corp.example/ns/shop/sa/orders").TLS)
			use()
			m.trusted = m.trusted[1:]
			use()
		}
	}
	close(stop)
	work.Wait()
	if after := []uint64{ours.Status().Generation, theirs.Status().Generation}; !slices.Equal(after, before) {
		t.Errorf("the tables are %d, want %d: rotation makes none", after, before)
	}
	for _, c := range kept {
		testnet.Ping(t, c, "a tunnel from before")
		_ = c.Close()
	}
}
