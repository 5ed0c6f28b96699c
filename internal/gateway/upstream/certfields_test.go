package upstream

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"culvert.dev/connect"
	"culvert.dev/connect/h3"
	"culvert.dev/delegation"
	"culvert.dev/internal/testca"
	"culvert.dev/registry"
	"culvert.dev/tunnel"
	"culvert.dev/tunnel/tunneltest"
)

// A hopRequest is what a next hop was asked, and by whom.
type hopRequest struct {
	header http.Header
	shown  []*x509.Certificate
}

// proxyOf returns the address of a next hop that refuses all that it is asked by proto, and
// tells of it. It is net/http, but for HTTP/3.
func (w *identityWorld) proxyOf(t *testing.T, proto string) (addr string, asked chan hopRequest) {
	t.Helper()
	hop, err := w.ca.Issue(testca.Options{SPIFFEID: "spiffe://edge.test/ns/inner/sa/gw", DNSNames: []string{"gw.test"}, IPs: []net.IP{net.IPv4(127, 0, 0, 1)}})
	if err != nil {
		t.Fatal(err)
	}
	asked = make(chan hopRequest, 10)
	config := &tls.Config{Certificates: []tls.Certificate{hop.TLS}, ClientAuth: tls.RequireAndVerifyClientCert, ClientCAs: w.ca.Pool()}
	if proto == "connect-h3" {
		pc, err := net.ListenUDP("udp", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
		if err != nil {
			t.Fatal(err)
		}
		s := &h3.Server{TLS: config, Service: &fieldNoter{shown: w.gw.TLS.Leaf, asked: asked}}
		served := make(chan error, 1)
		go func() { served <- s.Serve(context.Background(), pc, &tunnel.Router{Relay: &tunnel.Relay{}}) }()
		t.Cleanup(func() {
			_ = s.Close()
			<-served
		})
		return pc.LocalAddr().String(), asked
	}
	s := httptest.NewUnstartedServer(http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		asked <- hopRequest{r.Header, r.TLS.PeerCertificates}
		rw.WriteHeader(http.StatusForbidden)
	}))
	s.TLS, s.EnableHTTP2 = config, proto != "connect"
	s.StartTLS()
	t.Cleanup(s.Close)
	return s.Listener.Addr().String(), asked
}

// A fieldNoter is CONNECT that notes fields, and refuses.
type fieldNoter struct {
	connect.Protocol
	shown *x509.Certificate // by the one client that there is
	asked chan hopRequest
}

func (n *fieldNoter) AdmitList(_ context.Context, _ *tunnel.Request, list *connect.HeaderList) (context.Context, connect.Fields, error) {
	h := http.Header{}
	for _, f := range list.Fields {
		h.Add(f.Name, f.Value)
	}
	n.asked <- hopRequest{h, []*x509.Certificate{n.shown}}
	return nil, nil, tunnel.Refusef(tunnel.Denied, "noted")
}

// A next hop that knows no assertions is told of the client's certificate in the forms that
// proxies read, by each carrier, in requests that share a connection.
func TestNextHopIsToldOfCertificates(t *testing.T) {
	for _, proto := range []string{"connect", "connect-h2", "connect-h3", "hbone"} {
		t.Run(proto, func(t *testing.T) {
			w := newIdentityWorld(t)
			addr, asked := w.proxyOf(t, proto)
			if proto == "connect" || proto == "connect-h2" {
				addr = "https://" + addr
			}
			up := &Transports{Direct: &tunnel.NetDialer{}}
			t.Cleanup(up.Close)
			hop, err := up.NextHop([]registry.Hop{{
				Proto: proto, Addresses: []string{addr}, Roots: string(w.ca.CertPEM), Certificate: string(w.gw.CertPEM), Key: registry.Secret(w.gw.KeyPEM),
				Peers: []string{"spiffe://edge.test/ns/inner/sa/gw"}, ForwardIdentity: registry.HopIdentity{Assertion: true, XFCC: "appendForward", ClientCert: true},
			}})
			if err != nil {
				t.Fatal(err)
			}
			if got, want := hop.Info().Identity, "in the request to the last gateway, with an assertion for it, in X-Forwarded-Client-Cert (appendForward), in Client-Cert"; got != want {
				t.Errorf("got %q, want %q", got, want)
			}
			ask := func(req *tunnel.Request) hopRequest {
				t.Helper()
				ctx, cancel := context.WithTimeout(t.Context(), patience)
				defer cancel()
				ep := tunneltest.RouteTo("192.0.2.1:443").Endpoints[0]
				if c, err := hop.Dial(ctx, &ep, req); err == nil {
					_ = c.Close()
					t.Fatal("the hop refuses everybody, and was dialed")
				}
				select {
				case got := <-asked:
					return got
				case <-ctx.Done():
					t.Fatal("the hop was not asked")
				}
				panic("unreachable")
			}
			v := &delegation.Verifier{Gateways: []delegation.Gateway{{ID: gatewayID, Roots: w.ca.Pool()}}}
			for range 2 {
				got := ask(w.request())
				elements, err := v.XFCC(&http.Request{Header: got.header, TLS: &tls.ConnectionState{PeerCertificates: got.shown}})
				if err != nil || len(elements) != 1 || !slices.Equal(elements[0].URI, []string{"spiffe://edge.test/ns/web/sa/front"}) {
					t.Errorf("got %+v, %v, want the caller", elements, err)
				}
				if certs, err := delegation.ParseClientCert(got.header); err != nil || len(certs) != 1 || !certs[0].Equal(w.caller.TLS.Leaf) {
					t.Errorf("Client-Cert: got %d certificates, %v, want the caller's", len(certs), err)
				}
				if n := len(got.header.Values(delegation.HeaderField)); n != 1 {
					t.Errorf("got %d assertions, want one", n)
				}
				nobody := ask(&tunnel.Request{Source: netip.MustParseAddrPort("198.51.100.7:2")})
				for name := range nobody.header {
					if delegation.IsCallerField(name) {
						t.Errorf("a client without an identity: got the field %s", name)
					}
				}
			}
		})
	}
}

// What stands in X-Forwarded-Client-Cert depends on the mode, and on whom this gateway
// believes about others.
func TestCertificateFields(t *testing.T) {
	w := newIdentityWorld(t)
	const front, partner = "spiffe://edge.test/ns/web/sa/front", "spiffe://partner.test/ns/a/sa/b"
	gateway := tunnel.Peer{ID: front, Method: "mtls", Auth: &tunnel.AuthInfo{TrustDomain: "edge.test"}} // whose certificate w.caller is
	far := tunnel.Peer{ID: "spiffe://edge.test/far", Method: "delegated"}
	peer := func(id, method string, actor tunnel.Peer) tunnel.Peer {
		return tunnel.Peer{ID: id, Method: method, Auth: new(tunnel.AuthInfo)}.WithActor(actor)
	}
	own := "By=" + gatewayID + ";URI=" + front
	for _, row := range []struct {
		name       string
		peer       tunnel.Peer
		set, added string // the elements of sanitizeSet and of appendForward, without hash and subject
	}{
		{"a client", gateway, own, own},
		{"a gateway that states its client", peer(partner, "mtls", gateway), own, "By=" + front + ";URI=" + partner + "," + own},
		{"a gateway that states one with a DNS name", peer("dns:a.test", "mtls", gateway), own, "By=" + front + ";DNS=a.test," + own},
		{"a gateway that states one of a CA of no trust domain", peer("uri:urn:x:y", "mtls", gateway), own, "By=" + front + ";URI=urn:x:y," + own},
		{"a gateway that states an id of no trust domain", peer("uri:spiffe://partner.test/a", "mtls", gateway), own, own},
		{"a gateway behind a gateway", peer(partner, "mtls", gateway.WithActor(far)), own, "By=" + far.ID + ";URI=" + partner + ",By=" + front + ";URI=" + far.ID + "," + own},
		{"a gateway that states a user", peer("alice", "basic", gateway), own, own},
		{"a gateway that states a token", peer(partner, "jwt", gateway.WithActor(far)), own, "By=" + front + ";URI=" + far.ID + "," + own},
		{"a token beside the certificate", peer(partner, "jwt", gateway), own, own},
		{"a certificate inside of another", peer(front, "mtls", far), own, own},
		{"nobody, with a certificate", tunnel.Peer{}, own, own},
	} {
		for mode, want := range map[string]string{"sanitizeSet": row.set, "appendForward": row.added} {
			fields, err := callerHeader(&registry.Hop{ForwardIdentity: registry.HopIdentity{XFCC: mode}}, &tls.Config{Certificates: []tls.Certificate{w.gw.TLS}})
			if err != nil {
				t.Fatal(err)
			}
			req := w.request()
			req.Peer, req.TLS.Peer = row.peer, gateway
			got, err := fields(withCaller(t.Context(), req), nil)
			if err != nil || len(got) != 1 || got[0].Name != delegation.XFCCField {
				t.Errorf("%s, %s: got %q, %v", row.name, mode, got, err)
				continue
			}
			elements, err := delegation.ParseXFCC(got[0].Value)
			for i := range elements {
				elements[i].Hash, elements[i].Subject = nil, ""
			}
			text, bad := delegation.FormatXFCC(elements...)
			if err != nil || bad != nil || text != want {
				t.Errorf("%s, %s:\n got %s, %v, %v\nwant %s", row.name, mode, text, err, bad, want)
			}
		}
	}
	// What cannot be said is not sent without it.
	req := w.request()
	req.TLS.Chain = append(req.TLS.Chain, slices.Repeat([]*x509.Certificate{w.gw.TLS.Leaf}, 100)...)
	fields, err := callerHeader(&registry.Hop{ForwardIdentity: registry.HopIdentity{ClientCert: true}}, &tls.Config{Certificates: []tls.Certificate{w.gw.TLS}})
	if err != nil {
		t.Fatal(err)
	}
	if _, err = fields(withCaller(t.Context(), req), nil); tunnel.ReasonOf(err) != tunnel.Internal || !strings.Contains(err.Error(), "limit") {
		t.Errorf("a chain that is too long: got %v, want internal", err)
	}
	if _, err := callerHeader(&registry.Hop{ForwardIdentity: registry.HopIdentity{XFCC: "sanitizeSet"}}, &tls.Config{}); err == nil {
		t.Error("without a certificate of the gateway's own: want an error")
	}
}
