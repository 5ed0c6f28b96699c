package upstream

import (
	"context"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"io"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"culvert.dev/connect/proxyproto"
	"culvert.dev/delegation"
	"culvert.dev/internal/testca"
	"culvert.dev/internal/testnet"
	"culvert.dev/registry"
	"culvert.dev/tunnel"
	"culvert.dev/tunnel/tunneltest"
)

const (
	gatewayID = "spiffe://edge.test/ns/edge/sa/gw"
	serviceID = "spiffe://edge.test/ns/shop/sa/api"
)

// told is what a service was told of a connection.
type told struct {
	assertion *delegation.Assertion
	client    netip.AddrPort
	err       error
}

// An identityWorld has a gateway's certificate, and a service that verifies who calls.
type identityWorld struct {
	ca          *testca.CA
	gw, service *testca.Pair
	caller      *testca.Pair // whose TLS ends at the gateway
}

func newIdentityWorld(t *testing.T) *identityWorld {
	t.Helper()
	ca, err := testca.New("edge.test", nil)
	if err != nil {
		t.Fatal(err)
	}
	w := &identityWorld{ca: ca}
	for to, o := range map[**testca.Pair]testca.Options{
		&w.gw: {SPIFFEID: gatewayID}, &w.service: {SPIFFEID: serviceID, DNSNames: []string{"shop.test"}}, &w.caller: {SPIFFEID: "spiffe://edge.test/ns/web/sa/front"},
	} {
		if *to, err = ca.Issue(o); err != nil {
			t.Fatal(err)
		}
	}
	return w
}

// serve returns the address of a service that verifies who calls, says "h" to whom it
// believes, and tells of all.
func (w *identityWorld) serve(t *testing.T, change func(*tls.Config, *delegation.Verifier)) (addr string, heard chan told) {
	t.Helper()
	config := &tls.Config{Certificates: []tls.Certificate{w.service.TLS}, ClientAuth: tls.RequireAnyClientCert}
	v := &delegation.Verifier{Audience: []string{serviceID, "shop.test"}, Gateways: []delegation.Gateway{{ID: gatewayID, Roots: w.ca.Pool()}}}
	if change != nil {
		change(config, v)
	}
	ln := v.Listener(tls.NewListener(testnet.Listen(t), config))
	heard = make(chan told, 10)
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			_ = c.SetDeadline(time.Now().Add(patience))
			var got told
			got.assertion, got.err = c.(*delegation.Conn).Assertion()
			got.client, _ = c.(*delegation.Conn).Client()
			heard <- got
			_, _ = io.WriteString(c, "h")
			_ = c.Close()
		}
	}()
	t.Cleanup(func() {
		_ = ln.Close()
		<-done
	})
	return ln.Addr().String(), heard
}

// backend is how the gateway speaks TLS to the service.
func (w *identityWorld) backend() *registry.BackendTLS {
	return &registry.BackendTLS{ServerName: "shop.test", Roots: string(w.ca.CertPEM), Certificate: string(w.gw.CertPEM), Key: registry.Secret(w.gw.KeyPEM)}
}

// request is that of the caller, whose TLS has ended.
func (w *identityWorld) request() *tunnel.Request {
	return &tunnel.Request{
		Source: netip.MustParseAddrPort("198.51.100.7:1"),
		Peer:   tunnel.Peer{ID: "spiffe://edge.test/ns/web/sa/front", Method: "mtls", Auth: &tunnel.AuthInfo{}},
		TLS:    &tunnel.EndedTLS{Version: tls.VersionTLS13, Chain: []*x509.Certificate{w.caller.TLS.Leaf}, Peer: tunnel.Peer{ID: "spiffe://edge.test/ns/web/sa/front", Method: "mtls"}},
	}
}

// dial dials s at addr for req, and returns the first byte that it says.
func dial(t *testing.T, up *Transports, s *registry.Service, addr string, req *tunnel.Request) (string, error) {
	t.Helper()
	transport, err := up.New(s, nil, nil)
	if err != nil {
		return "", err
	}
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	c, err := transport.Dial(ctx, &tunneltest.RouteTo(addr).Endpoints[0], req)
	if err != nil {
		return "", err
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(patience))
	b := make([]byte, 1)
	_, err = io.ReadFull(c, b)
	return string(b), err
}

// A service inside TLS is told who calls, by an assertion for it and for its session.
func TestServiceIsToldWhoCalls(t *testing.T) {
	w := newIdentityWorld(t)
	hash := sha256.Sum256(w.caller.TLS.Leaf.Raw)
	alice := tunnel.Peer{ID: "alice", Method: "jwt"}.WithActor(tunnel.Peer{ID: "spiffe://partner.test/gw", Method: "mtls"})
	for _, row := range []struct {
		name    string
		service func(*tls.Config, *delegation.Verifier)
		tls     func(*registry.BackendTLS)
		forward registry.ForwardIdentity
		req     func(*tunnel.Request)
		subject string // "" for a connection that the service refuses
		actors  []string
		hash    bool
		reason  delegation.Reason // of that
		err     string            // of the dial
	}{
		{name: "a client certificate", subject: "spiffe://edge.test/ns/web/sa/front", actors: []string{gatewayID}, hash: true},
		{name: "TLS 1.2", tls: func(b *registry.BackendTLS) { b.MaxVersion = tls.VersionTLS12 }, subject: "spiffe://edge.test/ns/web/sa/front", actors: []string{gatewayID}, hash: true},
		{name: "the service's own id", tls: func(b *registry.BackendTLS) { b.SANs = []string{serviceID} }, subject: "spiffe://edge.test/ns/web/sa/front", actors: []string{gatewayID}, hash: true},
		{name: "a token, and who has brought it", req: func(r *tunnel.Request) { r.Peer = alice }, subject: "alice", actors: []string{gatewayID, "spiffe://partner.test/gw"}},
		{name: "nobody", req: func(r *tunnel.Request) { r.Peer = tunnel.Peer{} }, reason: delegation.Missing},
		{name: "another audience", forward: registry.ForwardIdentity{Audience: "other.test"}, reason: delegation.WrongAudience},
		{name: "a service that does not know the gateway", service: func(_ *tls.Config, v *delegation.Verifier) { v.Gateways[0].ID = serviceID }, reason: delegation.UnknownGateway},
		{name: "a service that asks for no certificate and knows no key", service: func(c *tls.Config, _ *delegation.Verifier) { c.ClientAuth = tls.NoClientCert }, reason: delegation.BadCertificate},
		{name: "a service that asks for none and knows the key", service: func(c *tls.Config, v *delegation.Verifier) {
			c.ClientAuth, v.Gateways[0].Keys = tls.NoClientCert, append(v.Gateways[0].Keys, w.gw.TLS.Leaf.PublicKey)
		}, subject: "spiffe://edge.test/ns/web/sa/front", actors: []string{gatewayID}, hash: true},
		{name: "too many gateways", req: func(r *tunnel.Request) {
			p := tunnel.Peer{ID: "g4", Method: "mtls"}
			for _, id := range []string{"g3", "g2", "g1"} {
				p = tunnel.Peer{ID: id, Method: "mtls"}.WithActor(p)
			}
			r.Peer = r.Peer.WithActor(p)
		}, err: "the caller's identity cannot be told to 127.0.0.1"},
		{name: "a caller with a long name", req: func(r *tunnel.Request) { r.Peer.ID = strings.Repeat("a", 1500) }, err: "limit 1536"},
		{name: "no key", tls: func(b *registry.BackendTLS) { b.Certificate, b.Key = "", "" }, err: "signed with the key of the client certificate for the service, and there is none"},
	} {
		t.Run(row.name, func(t *testing.T) {
			addr, heard := w.serve(t, row.service)
			row.forward.InsideTLS, row.forward.Assertion = true, true
			s := &registry.Service{ProxyProtocol: 2, ForwardIdentity: &row.forward, TLS: w.backend()}
			if row.tls != nil {
				row.tls(s.TLS)
			}
			req := w.request()
			if row.req != nil {
				row.req(req)
			}
			up := &Transports{Direct: &tunnel.NetDialer{}}
			defer up.Close()
			got, err := dial(t, up, s, addr, req)
			if row.err != "" {
				if err == nil || !strings.Contains(err.Error(), row.err) {
					t.Errorf("got %q, %v, want %q", got, err, row.err)
				}
				if row.name != "no key" {
					if reason := tunnel.ReasonOf(err); reason != tunnel.Internal {
						t.Errorf("got the reason %s, want %s", reason, tunnel.Internal)
					}
					<-heard
				}
				return
			}
			is := <-heard
			if row.subject == "" {
				if is.err == nil || delegationReason(is.err) != row.reason || got == "h" {
					t.Errorf("the service got %+v, %v, and the client %q; want %s", is.assertion, is.err, got, row.reason)
				}
				return
			}
			if err != nil || got != "h" || is.err != nil {
				t.Fatalf("got %q, %v, and the service %v", got, err, is.err)
			}
			if a := is.assertion; a.Subject != row.subject || !slices.Equal(a.Actors, row.actors) || row.hash != (string(a.CertHash) == string(hash[:])) || is.client != req.Source {
				t.Errorf("the service got %+v from %v, want %s through %q", a, is.client, row.subject, row.actors)
			}
		})
	}
}

func delegationReason(err error) delegation.Reason {
	if e, ok := err.(*delegation.Error); ok {
		return e.Reason
	}
	return ""
}

// Each connection has the assertion of its own caller, and one that is heard on a
// connection is of no use on another.
func TestAssertionsAreOfOneConnection(t *testing.T) {
	w := newIdentityWorld(t)
	addr, heard := w.serve(t, nil)
	up := &Transports{Direct: &tunnel.NetDialer{}}
	defer up.Close()
	s := &registry.Service{ProxyProtocol: 2, ForwardIdentity: &registry.ForwardIdentity{InsideTLS: true, Assertion: true}, TLS: w.backend()}
	bindings := map[string]bool{}
	for _, id := range []string{"alice", "bob", "alice"} {
		req := w.request()
		req.Peer = tunnel.Peer{ID: id, Method: "basic"}
		if got, err := dial(t, up, s, addr, req); got != "h" || err != nil {
			t.Fatal(got, err)
		}
		is := <-heard
		if is.err != nil || is.assertion.Subject != id || bindings[string(is.assertion.Binding)] {
			t.Errorf("got %+v, %v, want %s, in a session of its own", is.assertion, is.err, id)
		}
		bindings[string(is.assertion.Binding)] = true
	}
}

// Before TLS the header is the first that the endpoint gets, and it has what the gateway
// knows of the client's certificate.
func TestIdentityBeforeTLS(t *testing.T) {
	w := newIdentityWorld(t)
	heard := make(chan proxyproto.Header, 1)
	addr := testnet.Service(t, func(c net.Conn) {
		var b []byte
		one := make([]byte, 1)
		for {
			if h, _, err := proxyproto.Parse(b); err != proxyproto.ErrMore {
				if err != nil {
					t.Error(err)
				}
				heard <- h
				_, _ = io.WriteString(c, "h")
				return
			}
			if _, err := io.ReadFull(c, one); err != nil {
				t.Error(err)
				return
			}
			b = append(b, one...)
		}
	})
	up := &Transports{Direct: &tunnel.NetDialer{}}
	defer up.Close()
	s := &registry.Service{ProxyProtocol: 2, ForwardIdentity: &registry.ForwardIdentity{}}
	if got, err := dial(t, up, s, addr, w.request()); got != "h" || err != nil {
		t.Fatal(got, err)
	}
	h := <-heard
	if h.SSL == nil || !h.SSL.Verified || h.SSL.CN != "front" || string(h.SSL.ClientCertificate) != string(w.caller.TLS.Leaf.Raw) || h.Assertion != "" {
		t.Errorf("got %+v, want the client's certificate", h.SSL)
	}
}

// A client that speaks TLS with the service itself can't be named inside of it: it is
// refused, and the service hears nothing.
func TestPassedOnTLSIsNotForwarded(t *testing.T) {
	up := &Transports{Direct: &tunnel.NetDialer{}}
	defer up.Close()
	s := &registry.Service{ProxyProtocol: 2, ForwardIdentity: &registry.ForwardIdentity{InsideTLS: true}}
	_, err := dial(t, up, s, testnet.ClosedPort(t), &tunnel.Request{})
	if tunnel.ReasonOf(err) != tunnel.Unsupported || !strings.Contains(err.Error(), "its TLS has to end at a listener") {
		t.Errorf("got %v, want %s", err, tunnel.Unsupported)
	}
}

// Transports say how they name clients, for culvert explain.
func TestTransportsSayHowTheyForward(t *testing.T) {
	w := newIdentityWorld(t)
	up := &Transports{Direct: &tunnel.NetDialer{}}
	defer up.Close()
	for _, row := range []struct {
		s    registry.Service
		want string
	}{
		{registry.Service{ProxyProtocol: 2}, ""},
		{registry.Service{ProxyProtocol: 2, ForwardIdentity: &registry.ForwardIdentity{}}, "in a PROXY header before TLS"},
		{registry.Service{ProxyProtocol: 2, TLS: w.backend(), ForwardIdentity: &registry.ForwardIdentity{InsideTLS: true}}, "in a PROXY header inside TLS"},
		{registry.Service{ProxyProtocol: 2, TLS: w.backend(), ForwardIdentity: &registry.ForwardIdentity{InsideTLS: true, Assertion: true}}, "in a PROXY header inside TLS, with an assertion for shop.test"},
	} {
		made, err := up.New(&row.s, nil, nil)
		if err != nil {
			t.Fatal(err)
		}
		if got := made.Info().Identity; got != row.want {
			t.Errorf("got %q, want %q", got, row.want)
		}
	}
}
