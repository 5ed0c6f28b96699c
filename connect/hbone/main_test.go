package hbone

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"testing"
	"time"

	"culvert.dev/identity"
	"culvert.dev/internal/termination"
	"culvert.dev/internal/testca"
	"culvert.dev/internal/testnet"
	"culvert.dev/sni"
	"culvert.dev/tunnel"
	"culvert.dev/tunnel/tunneltest"
)

func TestMain(m *testing.M) { testnet.GoroutinesEnd(m) }

// patience is how long anything in these tests may take.
const patience = time.Minute

// A table is a tunneltest.Table in which what leads to "private" is refused.
type table tunneltest.Table

func (t table) Resolve(ctx context.Context, req *tunnel.Request) (tunnel.Route, error) {
	if t[req.Target()] == "private" {
		return tunnel.Route{}, tunnel.Refusef(tunnel.NotExposed, "%q is private", req.Target())
	}
	return tunneltest.Table(t).Resolve(ctx, req)
}

// serve starts a gateway that ends TLS and speaks HBONE inside.
func serve(t testing.TB, keys *termination.Keys, routes tunnel.Resolver) *tunneltest.Gateway {
	t.Helper()
	p := &termination.Protocol{Hello: &sni.Protocol{Nameless: true}}
	if err := p.Use(termination.Item{Keys: keys, Any: true, Inner: []tunnel.Protocol{&Protocol{}}, ALPN: []termination.Offer{{Name: "h2"}}}); err != nil {
		t.Fatal(err)
	}
	return tunneltest.Serve(t, tunneltest.Setup{Protocols: []tunnel.Protocol{p}, Resolver: routes})
}

// A mesh is a CA and the keys of its workloads.
type mesh struct {
	*testca.CA
	t testing.TB
}

func newMesh(t testing.TB) *mesh {
	t.Helper()
	ca, err := testca.New("cluster.local", nil)
	if err != nil {
		t.Fatal(err)
	}
	return &mesh{ca, t}
}

func (m *mesh) issue(name string, more ...string) tls.Certificate {
	m.t.Helper()
	pair, err := m.Issue(testca.Options{SPIFFEID: id(name), DNSNames: more})
	if err != nil {
		m.t.Fatal(err)
	}
	return pair.TLS
}

func id(name string) string { return "spiffe://cluster.local/ns/test/sa/" + name }

// server returns the keys of a server that asks its clients who they are.
func (m *mesh) server(name string, more ...string) *termination.Keys {
	pair := m.issue(name, more...)
	return &termination.Keys{Certificates: []*identity.Key{identity.NewKey(&pair)}, Trust: []*identity.Trust{identity.NewTrust("cluster.local", m.Root())}}
}

// client returns what a workload dials with.
func (m *mesh) client(name string) *tls.Config {
	return &tls.Config{Certificates: []tls.Certificate{m.issue(name)}, RootCAs: m.Pool()}
}

// verifier returns what verifies servers of the mesh, which must be one of peers.
func (m *mesh) verifier(peers ...string) *identity.Verifier {
	return verifier(peers, identity.NewTrust("cluster.local", m.Root()))
}

// verifier returns what verifies servers by trust, which must be one of peers.
func verifier(peers []string, trust ...*identity.Trust) *identity.Verifier {
	return &identity.Verifier{Trust: trust, Want: identity.Expectation{Usage: x509.ExtKeyUsageServerAuth, IDs: peers}}
}

// newDialer returns a Dialer that ends with the test.
func (m *mesh) newDialer(addr string, peers ...string) *Dialer {
	d := &Dialer{Gateway: addr, TLS: m.client("alice"), Verifier: m.verifier(peers...)}
	d.inner().Idle = 100 * time.Millisecond // the suites count what is left
	m.t.Cleanup(func() { _ = d.Close() })
	return d
}
