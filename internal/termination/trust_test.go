package termination

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"io"
	"net"
	"slices"
	"strings"
	"testing"
	"time"

	"culvert.dev/connect"
	"culvert.dev/identity"
	"culvert.dev/internal/testca"
	"culvert.dev/internal/testnet"
	"culvert.dev/tunnel"
	"culvert.dev/tunnel/tunneltest"
)

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
	shared = append(shared, identity.NewTrust("c.test", b.Root()))
	for _, tt := range []struct {
		name  string
		trust []*identity.Trust
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
				keys := &Keys{Certificates: keysOf(gw), Trust: tt.trust, Optional: kind == "optional", Unverified: kind == "unverified"}
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
				o := g.Outcomes()[0]
				if o.Peer.Auth != nil && o.Peer.Auth.TrustDomain != tt.cert.Leaf.URIs[0].Host {
					t.Errorf("got the trust domain %q of %s", o.Peer.Auth.TrustDomain, tt.id)
				}
				o.Peer.Auth = nil
				if o.Peer != want {
					t.Errorf("got %+v, want %+v", o.Peer, want)
				}
			})
		}
	}
}

// The CAs that a client is told of are those of all trust domains.
func TestTrustIsAnnounced(t *testing.T) {
	a, b := newCA(t, "a.test"), newCA(t, "b.test")
	g := serve(t, table{}, tunnel.Limits{}, terminating(t, &Keys{Certificates: keysOf(issue(t, a, "gw", "gw.test").TLS), Trust: trusting(a, b)}, false))
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

// A request inside of TLS has the client's certificates and the session's exporter where
// the client was verified, and no certificates where it was not.
func TestEndedTLS(t *testing.T) {
	ca, other := newCA(t, "a.test"), newCA(t, "b.test")
	gw := issue(t, ca, "gw", "gw.test").TLS
	for _, tt := range []struct {
		name string
		cert tls.Certificate
		ok   bool
	}{{"verified", issue(t, ca, "alice").TLS, true}, {"not verified", issue(t, other, "mallory").TLS, false}} {
		t.Run(tt.name, func(t *testing.T) {
			set, err := NewKeySet(&Keys{Certificates: keysOf(gw), Trust: trusting(ca), Unverified: true})
			if err != nil {
				t.Fatal(err)
			}
			asked := make(chan *tunnel.EndedTLS, 1)
			routes := resolverFunc(func(req *tunnel.Request) (tunnel.Route, error) {
				asked <- req.TLS
				return tunneltest.RouteTo(testnet.Greeting(t, "hello").Addr()), nil
			})
			g := serve(t, routes, tunnel.Limits{}, &terminator{keys: set})
			cfg := roots(ca, "gw.test")
			cfg.Certificates = []tls.Certificate{tt.cert}
			cfg.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return &tt.cert, nil }
			raw, err := net.Dial("tcp", g.Addr)
			if err != nil {
				t.Fatal(err)
			}
			defer raw.Close()
			c := tls.Client(raw, cfg)
			_ = c.SetDeadline(time.Now().Add(patience))
			if _, err := io.ReadFull(c, make([]byte, len("hello"))); err != nil {
				t.Fatal(err)
			}
			got := <-asked
			if tt.ok != (len(got.Chain) == 1 && got.Chain[0].Equal(tt.cert.Leaf)) || tt.ok != (got.Peer.ID != "") {
				t.Errorf("got %d certificates and the peer %q, want them: %v", len(got.Chain), got.Peer.ID, tt.ok)
			}
			cs := c.ConnectionState()
			want, err := cs.ExportKeyingMaterial("EXPORTER-test", []byte("x"), 32)
			if err != nil {
				t.Fatal(err)
			}
			if ours, err := got.Exporter("EXPORTER-test", []byte("x"), 32); err != nil || string(ours) != string(want) {
				t.Errorf("got keying material %x and %v, want %x", ours, err, want)
			}
		})
	}
}

type resolverFunc func(*tunnel.Request) (tunnel.Route, error)

func (f resolverFunc) Resolve(_ context.Context, req *tunnel.Request) (tunnel.Route, error) {
	return f(req)
}

// The next handshake has the new key and the new bundle, without Use, and open tunnels
// stay. A key that was removed is shown to nobody.
func TestKeysRotate(t *testing.T) {
	old, renewed := newCA(t, "a.test"), newCA(t, "a.test")
	first, second := issue(t, old, "gw", "gw.test").TLS, issue(t, renewed, "gw", "gw.test").TLS
	key, trust := identity.NewKey(&first), identity.NewTrust("a.test", old.Root())
	p := terminating(t, &Keys{Certificates: []*identity.Key{key}, Trust: []*identity.Trust{trust}}, true)
	g := serve(t, table{"plain": testnet.Echo(t).Addr()}, tunnel.Limits{}, p)
	dial := func(server, client *testca.CA) (net.Conn, error) {
		cfg := roots(server, "gw.test")
		pair := issue(t, client, "alice").TLS
		cfg.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return &pair, nil }
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		defer cancel()
		return (&connect.Dialer{Proxy: g.Addr, TLS: cfg}).DialContext(ctx, "tcp", "plain:1")
	}
	kept, err := dial(old, old)
	if err != nil {
		t.Fatal(err)
	}
	defer kept.Close()
	testnet.Ping(t, kept, "before")
	key.Set(&second)
	trust.Set(&identity.Bundle{TrustDomain: "a.test", Roots: []*x509.Certificate{renewed.Root()}})
	c, err := dial(renewed, renewed)
	if err != nil {
		t.Fatalf("with the new key and CA: %v", err)
	}
	testnet.Ping(t, c, "after")
	_ = c.Close()
	if c, err := dial(renewed, old); err == nil {
		_ = c.Close()
		t.Error("a client of the old CA is accepted")
	}
	testnet.Ping(t, kept, "an open tunnel stays")
	key.Remove(errors.New("the file is gone"))
	if c, err := dial(renewed, renewed); err == nil {
		_ = c.Close()
		t.Error("a key is shown that was removed")
	}
	testnet.Eventually(t, patience, func() bool {
		return slices.ContainsFunc(g.Outcomes(), func(o *tunnel.Outcome) bool {
			return o.Reason == tunnel.Internal && strings.Contains(o.Err.Error(), "the file is gone")
		})
	}, "an outcome says why no certificate was shown")
}
