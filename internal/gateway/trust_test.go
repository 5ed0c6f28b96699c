package gateway

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"strings"
	"testing"
	"time"

	"culvert.dev/connect/h3"
	"culvert.dev/connect/hbone"
	"culvert.dev/identity"
	"culvert.dev/internal/gateway/upstream"
	"culvert.dev/internal/termination"
	"culvert.dev/internal/testca"
	"culvert.dev/internal/testnet"
	"culvert.dev/registry"
	"culvert.dev/sni"
	"culvert.dev/tunnel"
)

// forge has ca sign an id of any trust domain.
func forge(t *testing.T, ca *testca.CA, id string) *testca.Pair {
	t.Helper()
	forger := *ca
	forger.TrustDomain, _, _ = strings.Cut(strings.TrimPrefix(id, "spiffe://"), "/")
	pair, err := forger.Issue(testca.Options{SPIFFEID: id})
	if err != nil {
		t.Fatal(err)
	}
	return pair
}

// twoDomains are the CAs of a.test and b.test.
func twoDomains(t *testing.T) (a, b *testca.CA) {
	t.Helper()
	a, err := testca.New("a.test", nil)
	if err != nil {
		t.Fatal(err)
	}
	if b, err = testca.New("b.test", nil); err != nil {
		t.Fatal(err)
	}
	return a, b
}

// A client that comes by HTTP/3 may have an id of the trust domain of the CA that
// has signed it, and of no other.
func TestTrustOverHTTP3(t *testing.T) {
	a, b := twoDomains(t)
	for _, alone := range []bool{true, false} {
		keys, roots := gatewayKeys(t)
		keys.Trust = []*identity.Trust{identity.NewTrust("a.test", a.Root()), identity.NewTrust("b.test", b.Root())}
		far, _ := startHTTP3With(t, keys, alone, 0, service(testnet.Echo(t).Addr()))
		pool := x509.NewCertPool()
		pool.AppendCertsFromPEM([]byte(roots))
		for _, tt := range []struct {
			by *testca.CA
			id string
			ok bool
		}{
			{a, "spiffe://a.test/alice", true}, {b, "spiffe://b.test/alice", true},
			{a, "spiffe://b.test/alice", false}, {b, "spiffe://a.test/alice", false},
		} {
			d := &h3.Dialer{Proxy: far, TLS: &tls.Config{RootCAs: pool, ServerName: "gw.test", Certificates: []tls.Certificate{forge(t, tt.by, tt.id).TLS}}}
			if err := check(t, d); (err == nil) != tt.ok {
				t.Errorf("%s, signed by the CA of %s: got %v, want it accepted: %v", tt.id, tt.by.TrustDomain, err, tt.ok)
			}
			_ = d.Close()
		}
	}
}

// A gateway that is asked by HBONE may have an id of the trust domain of the CA
// that has signed it, and of no other; so may one behind it.
func TestTrustOfHops(t *testing.T) {
	a, b := twoDomains(t)
	mesh := newCA(t)
	start := func(pair *testca.Pair, to string) string {
		p := &termination.Protocol{Hello: &sni.Protocol{Nameless: true}}
		if err := p.Use(termination.Item{Keys: &termination.Keys{Certificates: []*identity.Key{identity.NewKey(&pair.TLS)}, Trust: []*identity.Trust{identity.NewTrust(mesh.TrustDomain, mesh.Root())}}, Any: true, Inner: []tunnel.Protocol{&hbone.Protocol{}}, ALPN: []termination.Offer{{Name: "h2"}}}); err != nil {
			t.Fatal(err)
		}
		return startWith(t, pair.TLS.Leaf.URIs[0].Host, []tunnel.Protocol{p}, service(to))
	}
	me := forge(t, mesh, "spiffe://example.test/me")
	for _, tt := range []struct {
		by *testca.CA
		id string
		ok bool
	}{
		{a, "spiffe://a.test/gw", true}, {b, "spiffe://b.test/gw", true},
		{a, "spiffe://b.test/gw", false}, {b, "spiffe://a.test/gw", false},
	} {
		addr := start(forge(t, tt.by, tt.id), testnet.Echo(t).Addr())
		outer := start(forge(t, a, "spiffe://a.test/outer"), addr)
		trust := map[string]string{"a.test": string(a.CertPEM), "b.test": string(b.CertPEM)}
		peers := []string{"spiffe://a.test", "spiffe://b.test"}
		once := registry.Hop{Proto: "hbone", Addresses: []string{addr}, Certificate: string(me.CertPEM), Key: registry.Secret(me.KeyPEM), Peers: peers, Trust: trust}
		twice := once
		twice.Addresses, twice.InnerPeers = []string{outer}, peers
		for _, hop := range []registry.Hop{once, twice} {
			d := &upstream.Transports{Direct: &tunnel.NetDialer{}}
			t.Cleanup(d.Close)
			way, err := d.NextHop([]registry.Hop{hop})
			if err != nil {
				t.Fatal(err)
			}
			ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
			c, err := way.DialContext(ctx, "tcp", "svc.test:443")
			cancel()
			if err == nil {
				_ = c.Close()
			}
			if (err == nil) != tt.ok || err != nil && !strings.Contains(err.Error(), "is signed by a CA of [\""+tt.by.TrustDomain+"\"]") {
				t.Errorf("%s, signed by the CA of %s, behind another: %v: got %v, want it accepted: %v", tt.id, tt.by.TrustDomain, len(hop.InnerPeers) > 0, err, tt.ok)
			}
		}
	}
}
