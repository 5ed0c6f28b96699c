package inbound

import (
	"context"
	"crypto/tls"
	"io"
	"net"
	"testing"

	"culvert.dev/connect"
	"culvert.dev/connect/h2"
	"culvert.dev/connect/h3"
	"culvert.dev/connect/socks5"
	"culvert.dev/connect/ws"
	"culvert.dev/identity"
	"culvert.dev/internal/termination"
	"culvert.dev/internal/testca"
	"culvert.dev/internal/testnet"
	"culvert.dev/sni"
	"culvert.dev/tunnel"
	"culvert.dev/tunnel/tunneltest"
)

// A user that comes with a client certificate has both: the user is the Peer, and whom
// the certificate names is its Actor. It is so by every carrier that takes credentials.
func TestCredentialsKeepTheCertificate(t *testing.T) {
	ca, err := testca.New("example.test", nil)
	if err != nil {
		t.Fatal(err)
	}
	const workload = "spiffe://example.test/client"
	server, err := ca.Issue(testca.Options{SPIFFEID: "spiffe://example.test/gateway", IPs: []net.IP{net.IPv4(127, 0, 0, 1)}})
	if err != nil {
		t.Fatal(err)
	}
	client, err := ca.Issue(testca.Options{SPIFFEID: workload})
	if err != nil {
		t.Fatal(err)
	}
	const password = "open sesame"
	verify := connect.Passwords(map[string]string{"alice": password})
	auth := &connect.BasicAuth{Verify: verify}
	sent := connect.BasicCredentials("alice", password)
	pool := ca.Pool()
	cfg := &tls.Config{RootCAs: pool, Certificates: []tls.Certificate{client.TLS}}

	keys := &termination.Keys{Certificates: []*identity.Key{identity.NewKey(&server.TLS)}, Trust: []*identity.Trust{identity.NewTrust("example.test", ca.Root())}}

	// inside returns where p is spoken inside of TLS that asks for certificates.
	inside := func(alpn string, p tunnel.Protocol) func(*testing.T, tunnel.Resolver) (string, *tunneltest.Record) {
		return func(t *testing.T, routes tunnel.Resolver) (string, *tunneltest.Record) {
			end := &termination.Protocol{Hello: &sni.Protocol{Nameless: true}}
			var offers []termination.Offer
			if alpn != "" {
				offers = []termination.Offer{{Name: alpn}}
			}
			if err := end.Use(termination.Item{Keys: keys, Any: true, Inner: []tunnel.Protocol{p}, ALPN: offers}); err != nil {
				t.Fatal(err)
			}
			g := tunneltest.Serve(t, tunneltest.Setup{Protocols: []tunnel.Protocol{end}, Resolver: routes})
			return g.Addr, &g.Record
		}
	}
	for _, row := range []struct {
		carrier string
		serve   func(*testing.T, tunnel.Resolver) (string, *tunneltest.Record)
		dialer  func(addr string) tunnel.Dialer
	}{
		{"connect", inside("http/1.1", &connect.Protocol{Auth: auth}), func(addr string) tunnel.Dialer {
			return &connect.Dialer{Proxy: addr, TLS: cfg, Authorization: sent}
		}},
		{"connect-h2", inside("h2", &h2.Protocol{Auth: auth}), func(addr string) tunnel.Dialer {
			return &h2.Dialer{Proxy: addr, TLS: cfg, Authorization: sent}
		}},
		{"websocket", inside("http/1.1", &ws.Protocol{Auth: auth}), func(addr string) tunnel.Dialer {
			return &ws.Dialer{URL: "wss://" + addr, TLS: cfg, Authorization: sent}
		}},
		{"socks5", inside("", &socks5.Protocol{Verify: verify}), func(addr string) tunnel.Dialer {
			return &socks5.Dialer{Proxy: addr, User: "alice", Password: password, Dialer: tlsDialer{cfg}}
		}},
		{"connect-h3", func(t *testing.T, routes tunnel.Resolver) (string, *tunneltest.Record) {
			return serveHTTP3(t, keys, auth, routes)
		}, func(addr string) tunnel.Dialer {
			return &h3.Dialer{Proxy: addr, TLS: cfg, Authorization: sent}
		}},
	} {
		t.Run(row.carrier, func(t *testing.T) {
			addr, record := row.serve(t, tunneltest.Table{"svc.test:443": testnet.Echo(t).Addr()})
			d := row.dialer(addr)
			if c, ok := d.(io.Closer); ok {
				defer c.Close()
			}
			c, err := d.DialContext(t.Context(), "tcp", "svc.test:443")
			if err != nil {
				t.Fatal(err)
			}
			testnet.Ping(t, c, "x")
			_ = c.Close()
			o := record.Outcome(t)
			if o.Peer.ID != "alice" || o.Peer.Method != "basic" {
				t.Errorf("the peer is %q by %q, want alice by basic", o.Peer.ID, o.Peer.Method)
			}
			if o.Peer.Auth == nil || o.Peer.Auth.Actor == nil || o.Peer.Auth.Actor.ID != workload || o.Peer.Auth.Actor.Method != "mtls" {
				t.Errorf("beside alice there is %+v, want the Actor %s by mtls", o.Peer.Auth, workload)
			}
		})
	}
}

// serveHTTP3 has HTTP/3 served, and returns where, and what it records.
func serveHTTP3(t *testing.T, keys *termination.Keys, auth connect.Authenticator, routes tunnel.Resolver) (string, *tunneltest.Record) {
	t.Helper()
	record, relay := &tunneltest.Record{}, &tunnel.Relay{}
	p := &HTTP3{Auth: auth, TerminateAll: true}
	if err := p.Use(termination.Item{Keys: keys, Any: true}); err != nil {
		t.Fatal(err)
	}
	p.prepare(&Builder{}, "test")
	s := &p.Server
	s.Observe = record.Observe
	pc, err := net.ListenUDP("udp", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	served := make(chan error, 1)
	go func() {
		served <- s.Serve(context.Background(), pc, &tunnel.Router{Relay: relay, Dialer: &tunnel.NetDialer{}, Resolver: routes, Observe: record.Observe})
	}()
	t.Cleanup(func() {
		_ = relay.Close()
		_ = s.Close()
		<-served
		_ = pc.Close()
	})
	return pc.LocalAddr().String(), record
}

// A tlsDialer dials by TLS.
type tlsDialer struct{ cfg *tls.Config }

func (d tlsDialer) DialContext(ctx context.Context, network, addr string) (net.Conn, error) {
	c, err := (&tls.Dialer{Config: d.cfg}).DialContext(ctx, network, addr)
	return c, err
}
