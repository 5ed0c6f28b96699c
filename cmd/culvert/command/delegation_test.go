package command

import (
	"bufio"
	"context"
	"crypto/tls"
	"fmt"
	"net"
	"slices"
	"strings"
	"testing"
	"time"

	"culvert.dev/connect"
	"culvert.dev/delegation"
	"culvert.dev/internal/testca"
	"culvert.dev/internal/testnet"
)

const (
	edgeID  = "spiffe://corp.example/ns/edge/sa/gw"
	innerID = "spiffe://corp.example/ns/inner/sa/gw"
	frontID = "spiffe://corp.example/ns/web/sa/front"
	shopID  = "spiffe://corp.example/ns/shop/sa/api"
	adminID = "spiffe://corp.example/ns/admin/sa/admin"
)

// A service behind two gateways, of which the first has ended the client's TLS, proves who
// called and through whom, over each carrier that can say so. Where the second gateway does
// not list the first one, the first one is the caller.
func TestCallersAreProvenBehindTwoGateways(t *testing.T) {
	ca := newTestCA(t, "corp.example")
	issue := func(id string) *testca.Pair {
		t.Helper()
		pair, err := ca.Issue(testca.Options{SPIFFEID: id, IPs: []net.IP{net.IPv4(127, 0, 0, 1)}})
		if err != nil {
			t.Fatal(err)
		}
		return pair
	}
	front, shop := issue(frontID), issue(shopID)

	// The service believes the inner gateway alone.
	v := &delegation.Verifier{Audience: []string{shopID}, Gateways: []delegation.Gateway{{ID: innerID, Roots: ca.Pool()}}}
	ln := v.Listener(tls.NewListener(testnet.Listen(t), &tls.Config{Certificates: []tls.Certificate{shop.TLS}, ClientAuth: tls.RequireAnyClientCert}))
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			_ = c.SetDeadline(time.Now().Add(patience))
			a, err := c.(*delegation.Conn).Assertion()
			if err == nil {
				_, _ = fmt.Fprintf(c, "%s by %s through %s\n", a.Subject, a.Method, a.Actors)
			}
			_ = c.Close()
		}
	}()
	t.Cleanup(func() {
		_ = ln.Close()
		<-done
	})
	files := func(id, config string) map[string]string {
		pair := issue(id)
		return map[string]string{"gw.crt": string(pair.CertPEM), "gw.key": string(pair.KeyPEM), "ca.pem": string(ca.CertPEM), "culvert.yaml": config}
	}
	for _, row := range []struct {
		carrier, listener, hop string // of the inner gateway
	}{
		{"hbone", "127.0.0.1:1", "hbone: %q"},
		{"connect-h2", "127.0.0.1:1", "connect-h2: https://%s"},
		{"connect", "127.0.0.1:1", "connect: https://%s"},
		{"connect-h3", "udp://127.0.0.1:1", "connect-h3: %q"},
	} {
		for _, listed := range []bool{true, false} {
			t.Run(fmt.Sprintf("%s, listed %v", row.carrier, listed), func(t *testing.T) {
				delegates := ""
				if listed {
					delegates = fmt.Sprintf(", delegates: [%q]", edgeID)
				}
				inner := startFile(t, files(innerID, fmt.Sprintf(`cluster: inner
listeners:
  - {address: %q, tls: {key: gw, trust: corp.example, protocols: [%s]}}
identity:
  keys: {gw: {certificateFile: gw.crt, keyFile: gw.key}}
  trust: {corp.example: {caFile: ca.pem%s}}
services:
  - name: shop.example.com
    ports: [443]
    endpoints: [%q]
    tls: {serverName: 127.0.0.1, sans: [%q], key: gw, trust: corp.example}
    forwardIdentity: {assertion: true}
`, row.listener, row.carrier, delegates, ln.Addr(), shopID)))
				edge := startFile(t, files(edgeID, fmt.Sprintf(`cluster: edge
listeners:
  - {address: "127.0.0.1:1", tls: {key: gw, trust: corp.example, clientCertificates: optional, protocols: [connect]}}
identity:
  keys: {gw: {certificateFile: gw.crt, keyFile: gw.key}}
  trust: {corp.example: {caFile: ca.pem}}
services:
  - {name: shop.example.com, ports: [443], via: [{%s, key: gw, trust: corp.example, peers: [%q], forwardIdentity: true}], insecure: true}
`, fmt.Sprintf(row.hop, inner.addrs[0]), innerID)))
				call := func(own ...tls.Certificate) string {
					ctx, cancel := context.WithTimeout(t.Context(), patience)
					defer cancel()
					d := &connect.Dialer{Proxy: edge.addrs[0], TLS: &tls.Config{Certificates: own, InsecureSkipVerify: true}}
					c, err := d.DialContext(ctx, "tcp", "shop.example.com:443")
					if err != nil {
						return "" // the gateways have not read their files yet
					}
					defer c.Close()
					_ = c.SetDeadline(time.Now().Add(patience))
					said, _ := bufio.NewReader(c).ReadString('\n')
					return said
				}
				throughBoth := frontID + " by mtls through [" + innerID + " " + edgeID + "]\n"
				edgeCalls := edgeID + " by mtls through [" + innerID + "]\n"
				want := throughBoth
				if !listed {
					want = edgeCalls
				}
				got := ""
				testnet.Eventually(t, patience, func() bool {
					got = call(front.TLS)
					return got != ""
				}, "the service is reached")
				if got != want {
					t.Errorf("the service was called by %q, want %q", got, want)
				}
				// A caller without an identity is the gateway's own, on the same connection to the
				// inner gateway, and leaves no trace on the next.
				if got := call(); got != edgeCalls {
					t.Errorf("a client without a certificate: the service was called by %q, want %q", got, edgeCalls)
				}
				if got := call(front.TLS); got != want {
					t.Errorf("again: the service was called by %q, want %q", got, want)
				}
				testnet.Eventually(t, patience, func() bool {
					return slices.ContainsFunc(strings.Split(inner.log.String(), "\n"), func(l string) bool {
						return strings.Contains(l, frontID) && strings.Contains(l, "actor="+edgeID)
					}) == listed
				}, "the log of the inner gateway has the caller and its actor: %v", listed)
				if strings.Contains(inner.log.String()+edge.log.String(), "eyJ") {
					t.Error("an assertion is in the log")
				}
			})
		}
	}
}

func newTestCA(t *testing.T, td string) *testca.CA {
	t.Helper()
	ca, err := testca.New(td, nil)
	if err != nil {
		t.Fatal(err)
	}
	return ca
}
