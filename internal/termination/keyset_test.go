package termination

import (
	"context"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"strings"
	"testing"
	"time"

	"culvert.dev/identity"
	"culvert.dev/internal/testnet"
	"culvert.dev/sni"
	"culvert.dev/tunnel"
)

// A terminator terminates TLS by a KeySet and requests the name in the hello.
type terminator struct {
	sni.Protocol
	keys *KeySet
}

func (e *terminator) ServeConn(ctx context.Context, c *tunnel.Conn, h tunnel.Handler) error {
	var asked *tunnel.Request
	if err := e.Protocol.ServeConn(ctx, c, tunnel.HandlerFunc(func(_ context.Context, req *tunnel.Request) { asked = req })); err != nil {
		return err
	}
	inner, err := e.keys.Server(ctx, c, asked)
	if err != nil {
		return err
	}
	return Plain{}.ServeConn(ctx, inner, h)
}

// TestKeySet: the stream inside TLS is a tunnel, with the identity of a certificate
// that was verified, and with none where others are admitted.
func TestKeySet(t *testing.T) {
	ca, other := newCA(t, "ring.test"), newCA(t, "other.test")
	to := testnet.Greeting(t, "hello")
	keys := &Keys{Certificates: keysOf(issue(t, ca, "gw", "*.gw.test", "odd_name.*.test").TLS), MinVersion: tls.VersionTLS12, Trust: trusting(ca), Optional: true, Unverified: true}
	set, err := NewKeySet(keys)
	if err != nil {
		t.Fatal(err)
	}
	g := serve(t, table{"a.gw.test": to.Addr()}, tunnel.Limits{}, &terminator{keys: set})
	good, strange := issue(t, ca, "alice").TLS, issue(t, other, "alice").TLS
	for _, version := range []uint16{tls.VersionTLS12, tls.VersionTLS13} {
		for _, test := range []struct {
			cert *tls.Certificate
			want tunnel.Peer
		}{
			{&good, tunnel.Peer{ID: "spiffe://ring.test/ns/test/sa/alice", Method: "mtls"}}, {&strange, tunnel.Peer{}}, {nil, tunnel.Peer{}},
		} {
			cfg := roots(ca, "a.gw.test")
			cfg.MinVersion, cfg.MaxVersion = version, version
			if test.cert != nil {
				cfg.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return test.cert, nil }
			}
			before := len(g.Outcomes())
			c, err := tlsDialer{cfg}.DialContext(t.Context(), "tcp", g.Addr)
			if err != nil {
				t.Fatal(err)
			}
			_ = c.SetDeadline(time.Now().Add(patience))
			got := make([]byte, len("hello"))
			if _, err := io.ReadFull(c, got); err != nil || string(got) != "hello" {
				t.Errorf("got %q, %v", got, err)
			}
			_ = c.Close()
			testnet.Eventually(t, patience, func() bool { return len(g.Outcomes()) > before }, "the tunnel has ended")
			o := g.Outcomes()[before]
			o.Peer.Auth = nil
			if o.Peer != test.want || o.Target != "a.gw.test" || o.Proto != "tls" {
				t.Errorf("got %+v of %s by %s, want %+v", o.Peer, o.Target, o.Proto, test.want)
			}
		}
	}
	// A client of another trust domain is admitted, too, without an identity.
	keys.Trust = []*identity.Trust{identity.NewTrust("elsewhere.test", ca.Root()), identity.NewTrust("other.test", other.Root())}
	if set, err = NewKeySet(keys); err != nil {
		t.Fatal(err)
	}
	g = serve(t, table{"a.gw.test": to.Addr()}, tunnel.Limits{}, &terminator{keys: set})
	cfg := roots(ca, "a.gw.test")
	cfg.Certificates = []tls.Certificate{good}
	c, err := tlsDialer{cfg}.DialContext(t.Context(), "tcp", g.Addr)
	if err != nil {
		t.Fatal(err)
	}
	_ = c.SetDeadline(time.Now().Add(patience))
	if _, err := io.ReadFull(c, make([]byte, len("hello"))); err != nil {
		t.Error(err)
	}
	_ = c.Close()
	testnet.Eventually(t, patience, func() bool { return len(g.Outcomes()) == 1 }, "the tunnel has ended")
	if o := g.Outcomes()[0]; o.Peer != (tunnel.Peer{}) {
		t.Errorf("of another trust domain: got %+v", o.Peer)
	}
	for want, k := range map[string]*Keys{
		"no names of its own": {Certificates: keys.Certificates, Names: []tunnel.Pattern{{Suffix: tunnel.MustParseName("a.test")}}},
		"no certificate":      {},
		"no CA to verify":     {Certificates: keys.Certificates, Unverified: true},
	} {
		if _, err := NewKeySet(k); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want %s", err, want)
		}
	}
}

// Client closes the connection where it fails, and says how.
func TestBeginFails(t *testing.T) {
	ca := newCA(t, "begin.test")
	server := testnet.ServeTLS(t, &tls.Config{Certificates: []tls.Certificate{issue(t, ca, "a", "a.test").TLS}}, nil)
	hangsUp := testnet.Serve(t, func(c net.Conn) { _, _ = c.Read(make([]byte, 1)) })
	garbage := testnet.Greeting(t, strings.Repeat("no TLS ", 50))
	silent := testnet.Listen(t)
	for _, test := range []struct {
		addr, name, want string
	}{
		{server.Addr(), "b.test", "not b.test"}, {hangsUp.Addr(), "a.test", "ended in the handshake"},
		{garbage.Addr(), "a.test", "does not look like"}, {silent.Addr().String(), "a.test", "deadline"},
	} {
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		if test.want == "deadline" {
			cancel()
			ctx, cancel = context.WithTimeout(t.Context(), 20*time.Millisecond)
		}
		raw, err := net.Dial("tcp", test.addr)
		if err != nil {
			t.Fatal(err)
		}
		c, err := Client(ctx, raw, roots(ca, test.name))
		if c != nil || err == nil || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s: got %v, %v", test.want, c, err)
		}
		if _, err := raw.Write([]byte("x")); !errors.Is(err, net.ErrClosed) {
			t.Errorf("%s: the connection is open: %v", test.want, err)
		}
		cancel()
	}
}
