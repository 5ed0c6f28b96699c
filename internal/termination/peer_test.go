package termination

import (
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"net/url"
	"strings"
	"testing"
	"time"

	"culvert.dev/connect"
	"culvert.dev/internal/testca"
	"culvert.dev/internal/testnet"
	"culvert.dev/tunnel"
	"culvert.dev/tunnel/tunneltest"
)

// TestClients: who a client is, by its certificate, and whom the gateway does
// not let in.
func TestClients(t *testing.T) {
	ca, other := newCA(t, "example.test"), newCA(t, "other.test")
	gw := issue(t, ca, "gw", "gw.test").TLS
	good := issue(t, ca, "alice", "alice.test").TLS
	server, err := ca.Issue(testca.Options{SPIFFEID: "spiffe://example.test/server", Usage: testca.ServerOnly})
	if err != nil {
		t.Fatal(err)
	}
	expired, err := ca.Issue(testca.Options{SPIFFEID: "spiffe://example.test/late", NotBefore: time.Now().Add(-time.Hour), TTL: time.Minute})
	if err != nil {
		t.Fatal(err)
	}
	early, err := ca.Issue(testca.Options{SPIFFEID: "spiffe://example.test/early", NotBefore: time.Now().Add(time.Hour)})
	if err != nil {
		t.Fatal(err)
	}
	chain := good
	for range maxChain {
		chain.Certificate = append(chain.Certificate[:len(chain.Certificate):len(chain.Certificate)], gw.Certificate[0])
	}
	alice := tunnel.Peer{ID: "spiffe://example.test/ns/test/sa/alice", Method: "mtls"}
	for _, tt := range []struct {
		name  string
		keys  Keys
		cert  *tls.Certificate
		peer  tunnel.Peer
		alert string // what the client hears; "" where it is let in
	}{
		{"none is asked for", Keys{}, &good, tunnel.Peer{}, ""},
		{"required", Keys{ClientCAs: ca.Pool()}, &good, alice, ""},
		{"of the trust domain", Keys{Trust: trusting(other, ca)}, &good, alice, ""},
		{"optional and there", Keys{ClientCAs: ca.Pool(), Optional: true}, &good, alice, ""},
		{"optional and not there", Keys{ClientCAs: ca.Pool(), Optional: true}, nil, tunnel.Peer{}, ""},
		{"required and not there", Keys{ClientCAs: ca.Pool()}, nil, tunnel.Peer{}, "certificate required"},
		{"of another CA", Keys{ClientCAs: other.Pool()}, &good, tunnel.Peer{}, "unknown certificate authority"},
		{"of another CA, where it is optional", Keys{ClientCAs: other.Pool(), Optional: true}, &good, tunnel.Peer{}, "unknown certificate authority"},
		{"of another trust domain", Keys{Trust: trust{"other.test": {ca.Root()}}}, &good, tunnel.Peer{}, "bad certificate"},
		{"of a trust domain that is not listed", Keys{Trust: trusting(other)}, &good, tunnel.Peer{}, "unknown certificate authority"},
		{"for servers only", Keys{ClientCAs: ca.Pool()}, &server.TLS, tunnel.Peer{}, "bad certificate"},
		{"expired", Keys{ClientCAs: ca.Pool()}, &expired.TLS, tunnel.Peer{}, "expired certificate"},
		{"not valid yet", Keys{ClientCAs: ca.Pool()}, &early.TLS, tunnel.Peer{}, "expired certificate"},
		{"a chain of nine", Keys{ClientCAs: ca.Pool()}, &chain, tunnel.Peer{}, "bad certificate"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			tt.keys.Certificates = []tls.Certificate{gw}
			g := serve(t, table{"plain": testnet.Echo(t).Addr()}, tunnel.Limits{}, terminating(t, &tt.keys, false))
			cfg := roots(ca, "gw.test")
			if tt.cert != nil {
				cfg.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return tt.cert, nil }
			}
			if tt.alert == "" {
				c := tunneltest.Dial(t, &connect.Dialer{Proxy: g.Addr, TLS: cfg}, "plain:1")
				testnet.Ping(t, c, "hello")
				_ = c.Close()
				if o := g.Reason(t, tunnel.Done); o.Peer != tt.peer {
					t.Errorf("the peer is %+v, want %+v", o.Peer, tt.peer)
				}
				return
			}
			c, err := tlsDialer{cfg}.DialContext(t.Context(), "tcp", g.Addr)
			if err == nil { // TLS 1.3: the client is done before its certificate was looked at
				_ = c.SetDeadline(time.Now().Add(patience))
				_, err = c.Read(make([]byte, 1))
				_ = c.Close()
			}
			if err == nil || !strings.Contains(err.Error(), tt.alert) {
				t.Errorf("the client hears %v, want %q", err, tt.alert)
			}
			if o := g.Reason(t, tunnel.NoAuth); o.Peer != (tunnel.Peer{}) || o.Proto != "tls" {
				t.Errorf("outcome of %q with peer %+v, want tls and none", o.Proto, o.Peer)
			}
		})
	}
}

// TestPeerOf: what a verified leaf says.
func TestPeerOf(t *testing.T) {
	for id, ok := range map[string]bool{
		"spiffe://example.test/ns/a/sa/b":                    true,
		"spiffe://example.test/a.b_c-D":                      true,
		"spiffe://example.test":                              false,
		"spiffe://example.test/":                             false,
		"spiffe://Example.test/a":                            false,
		"spiffe://example.test:1/a":                          false,
		"spiffe://a@example.test/a":                          false,
		"spiffe://example.test/a//b":                         false,
		"spiffe://example.test/a/../b":                       false,
		"spiffe://example.test/a/.":                          false,
		"spiffe://example.test/a/":                           false,
		"spiffe://example.test/a?b":                          false,
		"spiffe://example.test/a#b":                          false,
		"spiffe://example.test/a%62":                         false,
		"SPIFFE://example.test/a":                            false,
		"spiffe:///a":                                        false,
		"spiffe://example.test/" + strings.Repeat("a", 2100): false,
	} {
		td, err := trustDomain(id)
		if (err == nil) != ok || ok && td != "example.test" {
			t.Errorf("%.60s: %q and %v, want it accepted: %v", id, td, err, ok)
		}
	}
	leaf := func(subject, dns string, uris ...string) *x509.Certificate {
		c := &x509.Certificate{Subject: pkix.Name{CommonName: subject}}
		if dns != "" {
			c.DNSNames = strings.Split(dns, " ")
		}
		for _, s := range uris {
			u, err := url.Parse(s)
			if err != nil {
				t.Fatal(err)
			}
			c.URIs = append(c.URIs, u)
		}
		return c
	}
	const alice = "spiffe://example.test/alice"
	for _, tt := range []struct {
		leaf   *x509.Certificate
		domain string // that its CA speaks for; "" where any identity will do
		want   string // "" where it is refused
	}{
		{leaf("x", "a.test", alice), "", alice},
		{leaf("x", "a.test", alice), "example.test", alice},
		{leaf("x", "a.test", alice), "test", ""},
		{leaf("x", "a.test", alice, "spiffe://example.test/bob"), "", ""},
		{leaf("x", "a.test", alice, "https://example.test/"), "", ""},
		{leaf("x", "a.test", "spiffe://example.test/a//b"), "", ""},
		{leaf("x", "a.test", "https://example.test/"), "", "uri:https://example.test/"},
		{leaf("x", "a.test", "https://example.test/"), "example.test", ""},
		{leaf("x", "a.test b.test"), "", "dns:a.test"},
		{leaf("x", "a.test"), "example.test", ""},
		{leaf(alice, ""), "", "subject:CN=" + alice},
		{leaf(strings.Repeat("x", maxOther), ""), "", ""},
	} {
		// What else a client shows proves nothing of it.
		root := leaf("root", "")
		cs := tls.ConnectionState{PeerCertificates: []*x509.Certificate{leaf("other", "", "spiffe://example.test/other")}, VerifiedChains: [][]*x509.Certificate{{tt.leaf, root}}}
		var by trust
		if tt.domain != "" {
			by = trust{tt.domain: {root}}
		}
		got, err := peerOf(&cs, by)
		if tt.want == "" && (err == nil || tunnel.ReasonOf(err) != tunnel.NoAuth || got != (tunnel.Peer{})) || tt.want != "" && (err != nil || got.ID != tt.want || got.Method != "mtls") {
			t.Errorf("%q %q %v of %q: %+v and %v, want %q", tt.leaf.Subject, tt.leaf.DNSNames, tt.leaf.URIs, tt.domain, got, err, tt.want)
		}
	}
	if p, err := PeerOf(&tls.ConnectionState{}); p != (tunnel.Peer{}) || err != nil {
		t.Errorf("nothing was verified: %+v and %v, want nobody", p, err)
	}
}
