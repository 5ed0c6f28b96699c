package termination

import (
	"crypto/tls"
	"crypto/x509"
	"io"
	"strings"
	"testing"
	"time"

	"culvert.dev/internal/testca"
	"culvert.dev/internal/testnet"
	"culvert.dev/tunnel"
)

// trusting returns a trust in which each CA speaks for its own domain.
func trusting(cas ...*testca.CA) trust {
	t := make(trust)
	for _, ca := range cas {
		t[ca.TrustDomain] = append(t[ca.TrustDomain], ca.Root())
	}
	return t
}

// forge has ca sign an id of another trust domain.
func forge(t *testing.T, ca *testca.CA, domain string) *tls.Certificate {
	t.Helper()
	forger := *ca
	forger.TrustDomain = domain
	pair, err := forger.Issue(testca.Options{SPIFFEID: "spiffe://" + domain + "/ns/test/sa/alice"})
	if err != nil {
		t.Fatal(err)
	}
	return &pair.TLS
}

// TestTrust: a CA speaks for its own trust domain alone, in a Protocol and in a KeySet
// that admits clients without an identity.
func TestTrust(t *testing.T) {
	a, b := newCA(t, "a.test"), newCA(t, "b.test")
	renewed := newCA(t, "a.test") // the CA that takes the place of a
	gw := issue(t, a, "gw", "gw.test").TLS
	to := testnet.Greeting(t, "hello").Addr()
	shared := trusting(a, renewed, b)
	shared["c.test"] = shared["b.test"]
	for _, tt := range []struct {
		name  string
		trust trust
		cert  *tls.Certificate
		id    string // "" where the client is refused
	}{
		{"a for a", trusting(a, b), forge(t, a, "a.test"), "spiffe://a.test/ns/test/sa/alice"},
		{"b for b", trusting(a, b), forge(t, b, "b.test"), "spiffe://b.test/ns/test/sa/alice"},
		{"a for b", trusting(a, b), forge(t, a, "b.test"), ""},
		{"b for a", trusting(a, b), forge(t, b, "a.test"), ""},
		{"a for a domain that is not listed", trusting(a, b), forge(t, a, "c.test"), ""},
		{"two CAs of one domain, the first", shared, forge(t, a, "a.test"), "spiffe://a.test/ns/test/sa/alice"},
		{"two CAs of one domain, the second", shared, forge(t, renewed, "a.test"), "spiffe://a.test/ns/test/sa/alice"},
		{"two CAs of one domain, for another", shared, forge(t, renewed, "b.test"), ""},
		{"one CA of two domains", shared, forge(t, b, "c.test"), "spiffe://c.test/ns/test/sa/alice"},
	} {
		for _, kind := range []string{"required", "optional", "unverified"} {
			t.Run(tt.name+"/"+kind, func(t *testing.T) {
				keys := &Keys{Certificates: []tls.Certificate{gw}, Trust: tt.trust, Optional: kind == "optional", Unverified: kind == "unverified"}
				set, err := NewKeySet(keys)
				if err != nil {
					t.Fatal(err)
				}
				g := serve(t, table{"gw.test": to}, tunnel.Limits{}, &terminator{keys: set})
				cfg := roots(a, "gw.test")
				cfg.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return tt.cert, nil }
				c, err := tlsDialer{cfg}.DialContext(t.Context(), "tcp", g.Addr)
				if err == nil {
					defer c.Close()
					_ = c.SetDeadline(time.Now().Add(patience))
					_, err = io.ReadFull(c, make([]byte, len("hello")))
					_ = c.Close()
				}
				if tt.id == "" && kind != "unverified" {
					o := g.Reason(t, tunnel.NoAuth)
					if err == nil || !strings.Contains(err.Error(), "bad certificate") || o.Peer != (tunnel.Peer{}) {
						t.Errorf("got %v, and a peer %+v, want the alert bad certificate", err, o.Peer)
					}
					return
				}
				if err != nil {
					t.Fatal(err)
				}
				testnet.Eventually(t, patience, func() bool { return len(g.Outcomes()) == 1 }, "the tunnel has ended")
				want := tunnel.Peer{ID: tt.id, Method: "mtls"}
				if tt.id == "" {
					want = tunnel.Peer{}
				}
				if o := g.Outcomes()[0]; o.Peer != want {
					t.Errorf("got %+v, want %+v", o.Peer, want)
				}
			})
		}
	}
}

// The CAs that a client is told of are those of all trust domains.
func TestTrustIsAnnounced(t *testing.T) {
	a, b := newCA(t, "a.test"), newCA(t, "b.test")
	g := serve(t, table{}, tunnel.Limits{}, terminating(t, &Keys{Certificates: []tls.Certificate{issue(t, a, "gw", "gw.test").TLS}, Trust: trusting(a, b)}, false))
	told := make(chan [][]byte, 1)
	cfg := roots(a, "gw.test")
	cfg.GetClientCertificate = func(r *tls.CertificateRequestInfo) (*tls.Certificate, error) {
		told <- r.AcceptableCAs
		return new(tls.Certificate), nil
	}
	c, err := tlsDialer{cfg}.DialContext(t.Context(), "tcp", g.Addr)
	if err == nil {
		_ = c.Close()
	}
	got := <-told
	for _, ca := range []*x509.Certificate{a.Root(), b.Root()} {
		found := false
		for _, raw := range got {
			found = found || string(raw) == string(ca.RawSubject)
		}
		if !found {
			t.Errorf("the client is not told of %s", ca.Subject)
		}
	}
}
