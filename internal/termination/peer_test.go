package termination

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/asn1"
	"io"
	"math/big"
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
	for range 8 {
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
		{"required", Keys{Trust: trusting(ca)}, &good, alice, ""},
		{"of the trust domain", Keys{Trust: trusting(other, ca)}, &good, alice, ""},
		{"optional and there", Keys{Trust: trusting(ca), Optional: true}, &good, alice, ""},
		{"optional and not there", Keys{Trust: trusting(ca), Optional: true}, nil, tunnel.Peer{}, ""},
		{"required and not there", Keys{Trust: trusting(ca)}, nil, tunnel.Peer{}, "certificate required"},
		{"of another CA", Keys{Trust: trusting(other)}, &good, tunnel.Peer{}, "bad certificate"},
		{"of another CA, where it is optional", Keys{Trust: trusting(other), Optional: true}, &good, tunnel.Peer{}, "bad certificate"},
		{"of another trust domain", Keys{Trust: []*identity.Trust{identity.NewTrust("other.test", ca.Root())}}, &good, tunnel.Peer{}, "bad certificate"},
		{"of a trust domain that is not listed", Keys{Trust: trusting(other)}, &good, tunnel.Peer{}, "bad certificate"},
		{"for servers only", Keys{Trust: trusting(ca)}, &server.TLS, tunnel.Peer{}, "bad certificate"},
		{"expired", Keys{Trust: trusting(ca)}, &expired.TLS, tunnel.Peer{}, "bad certificate"},
		{"not valid yet", Keys{Trust: trusting(ca)}, &early.TLS, tunnel.Peer{}, "bad certificate"},
		{"a chain of nine", Keys{Trust: trusting(ca)}, &chain, tunnel.Peer{}, "bad certificate"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			tt.keys.Certificates = keysOf(gw)
			g := serve(t, table{"plain": testnet.Echo(t).Addr()}, tunnel.Limits{}, terminating(t, &tt.keys, false))
			cfg := roots(ca, "gw.test")
			if tt.cert != nil {
				cfg.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return tt.cert, nil }
			}
			if tt.alert == "" {
				c := tunneltest.Dial(t, &connect.Dialer{Proxy: g.Addr, TLS: cfg}, "plain:1")
				testnet.Ping(t, c, "hello")
				_ = c.Close()
				o := g.Reason(t, tunnel.Done)
				if auth := o.Peer.Auth; (auth != nil) != (tt.peer.ID != "") || auth != nil && (auth.TrustDomain != "example.test" || auth.Namespace != "test" || auth.ServiceAccount != "alice" || !auth.Expires.Equal(good.Leaf.NotAfter)) {
					t.Errorf("the identity rests on %+v", auth)
				}
				o.Peer.Auth = nil
				if o.Peer != tt.peer {
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

// TestUnreadableCertificates: a certificate that crypto/x509 can't read is refused as any
// other bad one, whatever is written in its name.
func TestUnreadableCertificates(t *testing.T) {
	ca := newCA(t, "example.test")
	g := serve(t, table{}, tunnel.Limits{}, terminating(t, &Keys{
		Certificates: keysOf(issue(t, ca, "gw", "gw.test").TLS), Trust: trusting(ca),
	}, true))
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	for _, uri := range []string{"spiffe://example.test/%zz", "spiffe://a b/c", "spiffe://%zz/remote error", "spiffe://%zz/EOF"} {
		sans, err := asn1.Marshal([]asn1.RawValue{{Class: asn1.ClassContextSpecific, Tag: 6, Bytes: []byte(uri)}}) // RFC 5280 section 4.2.1.6
		if err != nil {
			t.Fatal(err)
		}
		template := &x509.Certificate{
			SerialNumber: big.NewInt(1), NotAfter: time.Now().Add(time.Hour),
			ExtraExtensions: []pkix.Extension{{Id: asn1.ObjectIdentifier{2, 5, 29, 17}, Value: sans}},
		}
		der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
		if err != nil {
			t.Fatal(err)
		}
		cfg := roots(ca, "gw.test")
		cfg.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { // whatever CAs are announced
			return &tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}, nil
		}
		c := tunneltest.Dial(t, tlsDialer{cfg}, g.Addr)
		_, err = io.ReadAll(c) // TLS 1.3 tells of it only now
		if err == nil || !strings.Contains(err.Error(), "error decoding message") {
			t.Errorf("%q: the client got %v, want the alert decode_error", uri, err)
		}
		if o := g.Reason(t, tunnel.NoAuth); !strings.Contains(o.Err.Error(), "failed to parse client certificate: x509: cannot parse URI") {
			t.Errorf("%q: got %v, want that the URI can't be parsed", uri, o.Err)
		}
	}
}
