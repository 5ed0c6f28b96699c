package gateway

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"culvert.dev/connect"
	"culvert.dev/internal/gateway/upstream"
	"culvert.dev/internal/testca"
	"culvert.dev/internal/testnet"
	"culvert.dev/registry"
	"culvert.dev/tunnel"
	"culvert.dev/tunnel/tunneltest"
)

// TLS to a service is what its policy says, or it is nothing: no byte of a
// client goes there otherwise.
func TestBackendTLS(t *testing.T) {
	e := newEdge(t)
	other, err := testca.New("other.test", nil)
	if err != nil {
		t.Fatal(err)
	}
	leaf := e.issue("db.test", "*.wild.test")
	expired, err := e.ca.Issue(testca.Options{SPIFFEID: "spiffe://edge.test/ns/test/sa/a", DNSNames: []string{"db.test"}, NotBefore: time.Now().Add(-2 * time.Hour), TTL: time.Hour})
	if err != nil {
		t.Fatal(err)
	}
	asked := make(chan string, 100)
	config := func(p *testca.Pair, auth tls.ClientAuthType) *tls.Config {
		return &tls.Config{Certificates: []tls.Certificate{p.TLS}, ClientAuth: auth, ClientCAs: e.ca.Pool(), GetConfigForClient: func(h *tls.ClientHelloInfo) (*tls.Config, error) {
			asked <- h.ServerName
			return nil, nil
		}}
	}
	plain := tlsBackend(t, config(leaf, tls.NoClientCert), "h")
	mutual := tlsBackend(t, func() *tls.Config {
		c := config(leaf, tls.RequireAndVerifyClientCert)
		c.MaxVersion = tls.VersionTLS12 // where who is refused hears it in the handshake
		return c
	}(), "m")
	old := tlsBackend(t, config(expired, tls.NoClientCert), "o")
	ancient := tlsBackend(t, &tls.Config{Certificates: []tls.Certificate{leaf.TLS}, MinVersion: tls.VersionTLS10, MaxVersion: tls.VersionTLS11}, "v")
	tap := testnet.NewTap(t)
	clear := registry.Endpoint{Addr: tap.AddrPort().Addr(), Port: tap.AddrPort().Port()}
	roots, wrong := string(e.ca.CertPEM), string(other.CertPEM)
	client := e.issue("gateway.test")
	strange := issueOf(t, other, "gateway.test")
	for _, test := range []struct {
		name string
		at   registry.Endpoint
		tls  registry.BackendTLS
		want string // the greeting, or what the log says
		sni  string
	}{
		{"right", plain, registry.BackendTLS{ServerName: "db.test", Roots: roots}, "h", "db.test"},
		{"wildcard", plain, registry.BackendTLS{ServerName: "a.wild.test", Roots: roots}, "h", "a.wild.test"},
		{"other CA", plain, registry.BackendTLS{ServerName: "db.test", Roots: wrong}, "not signed by any of the CAs that are configured", "db.test"},
		{"system's CAs", plain, registry.BackendTLS{ServerName: "db.test"}, "not signed by any of the CAs of the system", "db.test"},
		{"other name", plain, registry.BackendTLS{ServerName: "web.test", Roots: roots}, "its certificate is for other names", "web.test"},
		{"expired", old, registry.BackendTLS{ServerName: "db.test", Roots: roots}, "is not valid now", "db.test"},
		{"expired, with SANs", old, registry.BackendTLS{ServerName: "x.test", Roots: roots, SANs: []string{"db.test"}}, "is not valid now", "x.test"},
		{"SAN", plain, registry.BackendTLS{ServerName: "web.test", Roots: roots, SANs: []string{"no.test", "DB.test"}}, "h", "web.test"},
		{"SAN below a wildcard", plain, registry.BackendTLS{ServerName: "web.test", Roots: roots, SANs: []string{"b.wild.test"}}, "h", "web.test"},
		{"wildcard SAN", plain, registry.BackendTLS{ServerName: "web.test", Roots: roots, SANs: []string{"*.wild.test"}}, "h", "web.test"},
		{"other wildcard SAN", plain, registry.BackendTLS{ServerName: "web.test", Roots: roots, SANs: []string{"*.test"}}, "none of the names", "web.test"},
		{"URI", plain, registry.BackendTLS{ServerName: "web.test", Roots: roots, SANs: []string{"spiffe://edge.test/ns/test/sa/a"}}, "h", "web.test"},
		{"other URI", plain, registry.BackendTLS{ServerName: "db.test", Roots: roots, SANs: []string{"spiffe://edge.test/ns/test/sa/b"}}, "none of the names", "db.test"},
		{"server name with SANs", plain, registry.BackendTLS{ServerName: "db.test", Roots: roots, SANs: []string{"web.test"}}, "none of the names", "db.test"},
		{"SAN, other CA", plain, registry.BackendTLS{ServerName: "db.test", Roots: wrong, SANs: []string{"db.test"}}, "not signed by any", "db.test"},
		{"mutual", mutual, registry.BackendTLS{ServerName: "db.test", Roots: roots, Certificate: string(client.CertPEM), Key: registry.Secret(client.KeyPEM)}, "m", "db.test"},
		{"mutual, without", mutual, registry.BackendTLS{ServerName: "db.test", Roots: roots}, "the service refuses it", "db.test"},
		{"mutual, of another CA", mutual, registry.BackendTLS{ServerName: "db.test", Roots: roots, Certificate: string(strange.CertPEM), Key: registry.Secret(strange.KeyPEM)}, "the service refuses it", "db.test"},
		{"old version", ancient, registry.BackendTLS{ServerName: "db.test", Roots: roots}, "protocol version", ""},
		{"no TLS", clear, registry.BackendTLS{ServerName: "db.test", Roots: roots}, "reason=dial-timeout", ""},
		{"bad roots", clear, registry.BackendTLS{ServerName: "db.test", Roots: "nonsense"}, "hold no certificate", ""},
		{"bad certificate", clear, registry.BackendTLS{ServerName: "db.test", Roots: roots, Certificate: "nonsense"}, "the certificate to show", ""},
		{"no name", clear, registry.BackendTLS{Roots: roots}, "needs a server name", ""},
	} {
		r := ruled("rule", nil, registry.Backend{Weight: 1, Service: &registry.Service{Name: "db", Endpoints: []registry.Endpoint{test.at}, TLS: &test.tls}})
		l := e.listener("tcp/"+strings.ReplaceAll(test.name, " ", "_"), registry.TCP, section("tcp/"+test.name, "", r))
		e.have(l)
		got := "cut"
		if c, err := net.Dial("tcp", e.at(l.Port)); err == nil {
			_ = c.SetDeadline(time.Now().Add(soon))
			_, _ = io.WriteString(c, "secret of a client")
			got = hears(c, 1)
			_ = c.Close()
		} else if !wasCut(err) { // or it was, before connect had returned
			t.Error(err)
		}
		if len(test.want) == 1 {
			if got != test.want {
				t.Errorf("%s: got %s, want %s", test.name, got, test.want)
			}
		} else if e.logs("tcp/"+test.name, test.want); len(got) == 1 {
			t.Errorf("%s: got %s", test.name, got)
		}
		if test.sni != "" {
			if got := <-asked; got != test.sni {
				t.Errorf("%s: the service was asked for %q, want %q", test.name, got, test.sni)
			}
		}
	}
	for _, f := range tap.Flows() {
		if bytes.Contains(f.Data, []byte("secret of a client")) {
			t.Error("what a client said went on in the clear")
		}
	}
	if n := len(tap.Flows()); n != 1 {
		t.Errorf("%d connections to what speaks no TLS, want one", n)
	}
}

// What ends by TLS here goes on by TLS, and each way ends by itself.
func TestFrontReencrypts(t *testing.T) {
	e := newEdge(t)
	backend := tlsBackend(t, &tls.Config{Certificates: []tls.Certificate{e.issue("db.test").TLS}}, "r")
	rule := func(roots string) *registry.Rule {
		return ruled("r", nil, registry.Backend{Weight: 1, Service: &registry.Service{Name: "db", Endpoints: []registry.Endpoint{backend}, TLS: &registry.BackendTLS{ServerName: "db.test", Roots: roots}}})
	}
	other, err := testca.New("other.test", nil)
	if err != nil {
		t.Fatal(err)
	}
	good, bad := section("good", "good.test", rule(string(e.ca.CertPEM))), section("bad", "bad.test", rule(string(other.CertPEM)))
	good.TLS, bad.TLS = e.ends("good.test"), e.ends("bad.test")
	l := e.listener("tls", registry.TLS, good, bad)
	e.have(l)
	c, err := e.dialTLS(l.Port, "good.test")
	if err != nil {
		t.Fatal(err)
	}
	if got := hears(c, 1); got != "r" {
		t.Errorf("got %s", got)
	}
	big := bytes.Repeat([]byte("0123456789abcdef"), 1<<16)
	go func() {
		_, _ = c.Write(big)
		_ = c.CloseWrite()
	}()
	if got, err := io.ReadAll(c); err != nil || !bytes.Equal(got, big) {
		t.Errorf("got %d bytes, %v, want %d", len(got), err, len(big))
	}
	if got := e.asked(l.Port, "bad.test"); len(got) == 1 {
		t.Errorf("by the wrong CA: got %s", got)
	}
	e.logs("listener=bad ", "reason=dial-failed", "not signed by any")
}

// A way that is TLS is a carrier as all others are, also behind another gateway.
func TestBackendTLSEndings(t *testing.T) {
	ca, err := testca.New("edge.test", nil)
	if err != nil {
		t.Fatal(err)
	}
	backendTLS := &registry.BackendTLS{ServerName: "db.test", Roots: string(ca.CertPEM)}
	d := &upstream.Transports{Direct: &tunnel.NetDialer{}}
	defer d.Close()
	way, err := d.New(&registry.Service{TLS: backendTLS}, nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	b := testnet.NewBackend(t)
	front := tlsInFrontOf(t, ca, b.Addr())
	testnet.TestEndings(t, b.Through(func(ctx context.Context) (net.Conn, error) {
		return way.Dial(ctx, &tunneltest.RouteTo(front).Endpoints[0], &tunnel.Request{})
	}, nil), testnet.Transparent())
}

// tlsInFrontOf ends TLS by a gateway of its own, and passes on to addr.
func tlsInFrontOf(t *testing.T, ca *testca.CA, addr string) string {
	t.Helper()
	e := newEdge(t)
	e.ca = ca
	to := netipEndpoint(addr)
	s := section("s", "db.test", ruled("r", nil, registry.Backend{Weight: 1, Service: &registry.Service{Name: "b", Endpoints: []registry.Endpoint{to}}}))
	s.TLS = e.ends("db.test")
	l := e.listener("tls", registry.TLS, s)
	e.have(l)
	return e.at(l.Port)
}

func netipEndpoint(addr string) registry.Endpoint {
	ap := tunneltest.RouteTo(addr).Endpoints[0].Addr
	return registry.Endpoint{Addr: ap.Addr(), Port: ap.Port()}
}

// A handshake that the service does not go on with has the dial's time.
func TestBackendTLSTimeout(t *testing.T) {
	silent := testnet.Listen(t)
	d := &upstream.Transports{Direct: &tunnel.NetDialer{}}
	defer d.Close()
	way, err := d.New(&registry.Service{TLS: &registry.BackendTLS{ServerName: "db.test"}}, nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	c, err := way.Dial(ctx, &tunneltest.RouteTo(silent.Addr().String()).Endpoints[0], &tunnel.Request{})
	if tunnel.ReasonOf(err) != tunnel.DialTimeout || c != nil {
		t.Errorf("got %v, %v", c, err)
	}
	if errors.Unwrap(err) == nil || !strings.Contains(err.Error(), "db.test") {
		t.Errorf("got %v", err)
	}
}

// TLS is upon whatever else there is on the way: a header for the endpoint comes
// before it, and another gateway sees nothing else.
func TestBackendTLSUponOtherWays(t *testing.T) {
	ca, err := testca.New("edge.test", nil)
	if err != nil {
		t.Fatal(err)
	}
	cfg := &tls.Config{Certificates: []tls.Certificate{issueOf(t, ca, "db.test").TLS}}
	header := make(chan string, 1)
	told := testnet.Serve(t, func(raw net.Conn) {
		var line []byte
		for b := make([]byte, 1); !bytes.HasSuffix(line, []byte("\r\n")); line = append(line, b...) {
			if _, err := raw.Read(b); err != nil {
				return
			}
		}
		header <- string(line)
		c := tls.Server(raw, cfg)
		_, _ = io.WriteString(c, "h")
		_ = c.Close()
	})
	plain := tlsBackend(t, cfg, "h")
	next := tunneltest.Serve(t, tunneltest.Setup{Protocols: []tunnel.Protocol{&connect.Protocol{}}, Resolver: byTarget{"db.internal:5432": endpointAddr(plain)}})
	d := &upstream.Transports{Direct: &tunnel.NetDialer{}, Lookup: nil}
	defer d.Close()
	policy := &registry.BackendTLS{ServerName: "db.test", Roots: string(ca.CertPEM)}
	req := &tunnel.Request{Name: tunnel.MustParseName("a.test"), Source: netip.MustParseAddrPort("192.0.2.9:4711")}
	for _, test := range []struct {
		s  *registry.Service
		ep tunnel.Endpoint
	}{
		{&registry.Service{TLS: policy, ProxyProtocol: 1}, tunneltest.RouteTo(told.Addr()).Endpoints[0]},
		{&registry.Service{TLS: policy, Via: []registry.Hop{{Proto: "connect", Addresses: []string{next.Addr}}}}, tunnel.Endpoint{Host: "db.internal", Addr: netip.AddrPortFrom(netip.Addr{}, 5432)}},
	} {
		way, err := d.New(test.s, nil, nil)
		if err != nil {
			t.Fatal(err)
		}
		if info := way.Info(); len(info.Hops) != len(test.s.Via) || info.Security != tunnel.ServerVerified {
			t.Errorf("explain would say %+v of the transport", info)
		}
		c, err := way.Dial(t.Context(), &test.ep, req)
		if err != nil {
			t.Fatal(err)
		}
		_ = c.SetDeadline(time.Now().Add(soon))
		if got := hears(c, 1); got != "h" {
			t.Errorf("%s: got %s", test.ep, got)
		}
		_ = c.Close()
	}
	if got := <-header; !strings.HasPrefix(got, "PROXY TCP4 192.0.2.9 ") {
		t.Errorf("the endpoint was told %q", got)
	}
}

func endpointAddr(ep registry.Endpoint) string { return netip.AddrPortFrom(ep.Addr, ep.Port).String() }

// byTarget is a Resolver of what is asked for, with its port.
type byTarget map[string]string

func (b byTarget) Resolve(_ context.Context, req *tunnel.Request) (tunnel.Route, error) {
	to, ok := b[req.Target()]
	if !ok {
		return tunnel.Route{}, tunnel.Refusef(tunnel.NoRoute, "no route for %q", req.Target())
	}
	return tunneltest.RouteTo(to), nil
}
