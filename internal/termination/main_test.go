package termination

import (
	"context"
	"crypto/tls"
	"net"
	"testing"
	"time"

	"culvert.dev/connect"
	"culvert.dev/connect/h2"
	"culvert.dev/identity"
	"culvert.dev/internal/testca"
	"culvert.dev/internal/testnet"
	"culvert.dev/sni"
	"culvert.dev/tunnel"
	"culvert.dev/tunnel/tunneltest"
)

func TestMain(m *testing.M) { testnet.GoroutinesEnd(m) }

// patience is how long anything in these tests may take.
const patience = time.Minute

// A table is a Resolver: from the name, for a hello says no port, to the
// address.
type table map[string]string

func (t table) Resolve(_ context.Context, req *tunnel.Request) (tunnel.Route, error) {
	to, ok := t[req.Host()]
	if !ok {
		return tunnel.Route{}, tunnel.Refusef(tunnel.NoRoute, "no route for %q", req.Target())
	}
	return tunneltest.RouteTo(to), nil
}

func serve(t testing.TB, routes tunnel.Resolver, limits tunnel.Limits, protocols ...tunnel.Protocol) *tunneltest.Gateway {
	t.Helper()
	limits.ConnectionRatePerClient, limits.MaxConnectionsPerClient = -1, -1
	return tunneltest.Serve(t, tunneltest.Setup{Protocols: protocols, Resolver: routes, Limits: limits})
}

func newCA(t testing.TB, domain string) *testca.CA {
	t.Helper()
	ca, err := testca.New(domain, nil)
	if err != nil {
		t.Fatal(err)
	}
	return ca
}

// issue makes a certificate of the workload name, for the DNS names.
func issue(t testing.TB, ca *testca.CA, name string, names ...string) *testca.Pair {
	t.Helper()
	pair, err := ca.Issue(testca.Options{SPIFFEID: "spiffe://" + ca.TrustDomain + "/ns/test/sa/" + name, DNSNames: names})
	if err != nil {
		t.Fatal(err)
	}
	return pair
}

// keysOf returns keys with these certificates.
func keysOf(certs ...tls.Certificate) (keys []*identity.Key) {
	for i := range certs {
		keys = append(keys, identity.NewKey(&certs[i]))
	}
	return keys
}

// trusting returns trust in which each CA speaks for its own domain.
func trusting(cas ...*testca.CA) (all []*identity.Trust) {
	for _, ca := range cas {
		all = append(all, identity.NewTrust(ca.TrustDomain, ca.Root()))
	}
	return all
}

// terminating makes a Protocol that carries CONNECT, of both versions.
func terminating(t testing.TB, k *Keys, all bool) *Protocol {
	t.Helper()
	p := &Protocol{Hello: &sni.Protocol{Nameless: all}, Pass: !all}
	if err := p.Use(carrying(k, all)); err != nil {
		t.Fatal(err)
	}
	return p
}

// carrying is an Item with CONNECT of both versions inside.
func carrying(k *Keys, all bool) Item {
	one, two := &connect.Protocol{}, &h2.Protocol{}
	return Item{
		Keys: k, Any: all, Inner: []tunnel.Protocol{one, two},
		ALPN: []Offer{{"h2", []tunnel.Protocol{two}}, {"http/1.1", []tunnel.Protocol{one}}},
	}
}

// A tlsDialer speaks TLS to whom it dials, and gives what this package's own
// end is.
type tlsDialer struct{ cfg *tls.Config }

func (d tlsDialer) DialContext(ctx context.Context, network, addr string) (net.Conn, error) {
	raw, err := new(net.Dialer).DialContext(ctx, network, addr)
	if err != nil {
		return nil, err
	}
	return Client(ctx, raw, d.cfg)
}

// roots returns what a client trusts.
func roots(ca *testca.CA, name string, alpn ...string) *tls.Config {
	return &tls.Config{RootCAs: ca.Pool(), ServerName: name, NextProtos: alpn}
}
