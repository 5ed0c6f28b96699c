package command

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"

	"culvert.dev/connect"
	"culvert.dev/connect/h2"
	"culvert.dev/connect/h3"
	"culvert.dev/connect/ws"
	"culvert.dev/delegation"
	"culvert.dev/internal/testca"
	"culvert.dev/internal/testnet"
	"culvert.dev/tunnel"
)

// Clients say in fields who they are, in every spelling and twice, by each carrier and at each kind of
// listener: nobody believes it, and no next hop hears of it. It hears of the certificate that the
// gateway has verified.
func TestClientsDoNotSayWhoTheyAre(t *testing.T) {
	ca := newTestCA(t, "corp.example")
	issue := func(id string) *testca.Pair {
		t.Helper()
		pair, err := ca.Issue(testca.Options{SPIFFEID: id, IPs: []net.IP{net.IPv4(127, 0, 0, 1)}})
		if err != nil {
			t.Fatal(err)
		}
		return pair
	}
	front, edge, inner, admin := issue(frontID), issue(edgeID), issue(innerID), issue(adminID)

	// A proxy of another make, which refuses all requests and keeps their fields.
	asked := make(chan http.Header, 16)
	proxy := httptest.NewUnstartedServer(http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		asked <- r.Header
		rw.WriteHeader(http.StatusForbidden)
	}))
	proxy.TLS = &tls.Config{Certificates: []tls.Certificate{inner.TLS}, ClientAuth: tls.RequireAndVerifyClientCert, ClientCAs: ca.Pool()}
	proxy.EnableHTTP2 = true
	proxy.StartTLS()
	t.Cleanup(proxy.Close)

	gw := startFile(t, map[string]string{
		"gw.crt": string(edge.CertPEM), "gw.key": string(edge.KeyPEM), "ca.pem": string(ca.CertPEM),
		"culvert.yaml": fmt.Sprintf(`cluster: edge
listeners:
  - {address: "127.0.0.1:1", protocols: [connect, connect-h2, websocket], tls: {key: gw, trust: corp.example, clientCertificates: optional, protocols: [connect, connect-h2, websocket]}}
  - {address: "127.0.0.1:4", tls: {key: gw, trust: corp.example, protocols: [hbone]}}
  - {address: "udp://127.0.0.1:1", tls: {key: gw, trust: corp.example, clientCertificates: optional, protocols: [connect-h3]}}
identity:
  keys: {gw: {certificateFile: gw.crt, keyFile: gw.key}}
  trust: {corp.example: {caFile: ca.pem, delegates: [%q]}}
services:
  - name: shop.example.com
    ports: [443]
    insecure: true
    via: [{connect-h2: "https://%s", key: gw, trust: corp.example, peers: [%q], forwardIdentity: {assertion: true, xfcc: appendForward, clientCert: true}}]
`, innerID, proxy.Listener.Addr(), innerID)})

	xfcc, err := delegation.FormatXFCC(delegation.NewXFCC(edgeID, admin.TLS.Leaf))
	if err != nil {
		t.Fatal(err)
	}
	cert, _, err := delegation.FormatClientCert([]*x509.Certificate{admin.TLS.Leaf})
	if err != nil {
		t.Fatal(err)
	}
	var lies connect.Fields
	for _, lie := range []connect.Field{{Name: "X-Forwarded-Client-Cert", Value: xfcc}, {Name: "Client-Cert", Value: cert}, {Name: "Client-Cert-Chain", Value: cert}, {Name: "Culvert-Peer", Value: "eyJhbGciOiJFUzI1NiJ9.e30.AA"}} {
		for _, name := range []string{lie.Name, strings.ToLower(lie.Name), strings.ToUpper(lie.Name), strings.ReplaceAll(lie.Name, "-", "_"), strings.Replace(lie.Name, "-", "_", 1), lie.Name} {
			lies = append(lies, connect.Field{Name: name, Value: lie.Value})
		}
	}
	header := func(context.Context, string) (connect.Fields, error) { return slices.Clone(lies), nil }
	keys := func(own ...tls.Certificate) *tls.Config {
		return &tls.Config{Certificates: own, InsecureSkipVerify: true}
	}
	secure, hbone, quic := gw.addrs[0], gw.addrs[1], gw.addrs[2]
	plain := secure // TLS is told from the rest
	for _, row := range []struct {
		name   string
		shown  bool // the client has a certificate
		dialer tunnel.Dialer
	}{
		{"connect", false, &connect.Dialer{Proxy: plain, Header: header}},
		{"connect-h2", false, &h2.Dialer{Proxy: plain, Header: header}},
		{"websocket", false, &ws.Dialer{URL: "ws://" + plain + "/", Header: header}},
		{"connect in TLS, without a certificate", false, &connect.Dialer{Proxy: secure, TLS: keys(), Header: header}},
		{"connect-h2 in TLS, without a certificate", false, &h2.Dialer{Proxy: secure, TLS: keys(), Header: header}},
		{"connect-h3, without a certificate", false, &h3.Dialer{Proxy: quic, TLS: keys(), Header: header}},
		{"connect in TLS", true, &connect.Dialer{Proxy: secure, TLS: keys(front.TLS), Header: header}},
		{"connect-h2 in TLS", true, &h2.Dialer{Proxy: secure, TLS: keys(front.TLS), Header: header}},
		{"connect-h3", true, &h3.Dialer{Proxy: quic, TLS: keys(front.TLS), Header: header}},
		{"hbone", true, &h2.Dialer{Proxy: hbone, TLS: keys(front.TLS), Header: header}},
		{"websocket in TLS", true, &ws.Dialer{URL: "wss://" + secure + "/", TLS: keys(front.TLS), Header: header}},
	} {
		t.Run(row.name, func(t *testing.T) {
			if c, ok := row.dialer.(interface{ Close() error }); ok {
				defer c.Close()
			}
			var got http.Header
			testnet.Eventually(t, patience, func() bool { // the gateway may not have read its files yet
				ctx, cancel := context.WithTimeout(t.Context(), patience)
				defer cancel()
				c, err := row.dialer.DialContext(ctx, "tcp", "shop.example.com:443")
				if err == nil {
					_ = c.Close()
					t.Fatal("the proxy refuses everybody, and was dialed")
				}
				select {
				case got = <-asked:
					return true
				default:
					return false
				}
			}, "the next hop is asked")
			for name, values := range got {
				switch {
				case !delegation.IsCallerField(name):
				case !row.shown || name != http.CanonicalHeaderKey(name) || strings.Contains(name, "_") || len(values) != 1:
					t.Errorf("the next hop is told %s: %.80q", name, values)
				}
				for _, lie := range lies {
					if slices.Contains(values, lie.Value) {
						t.Errorf("the next hop is told what the client has said: %s", name)
					}
				}
			}
			if !row.shown {
				return
			}
			v := &delegation.Verifier{Gateways: []delegation.Gateway{{ID: edgeID, Roots: ca.Pool()}}}
			elements, err := v.XFCC(&http.Request{Header: got, TLS: &tls.ConnectionState{PeerCertificates: []*x509.Certificate{edge.TLS.Leaf}}})
			if err != nil || len(elements) != 1 || !slices.Equal(elements[0].URI, []string{frontID}) {
				t.Errorf("the next hop is told of %+v, %v, want %s", elements, err, frontID)
			}
			if certs, err := delegation.ParseClientCert(got); err != nil || len(certs) == 0 || !certs[0].Equal(front.TLS.Leaf) {
				t.Errorf("the next hop is told of %d certificates, %v, want the client's", len(certs), err)
			}
		})
	}
	if log := gw.log.String(); strings.Contains(log, "admin") || strings.Contains(log, "actor=") {
		t.Errorf("the log has somebody who was not there:\n%s", log)
	}
}
