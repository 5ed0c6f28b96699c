package command

import (
	"bufio"
	"context"
	"crypto/tls"
	"fmt"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"culvert.dev/connect"
	"culvert.dev/delegation"
	"culvert.dev/internal/testca"
	"culvert.dev/internal/testnet"
)

// Clients show certificates with large names and long chains. The service and the next
// gateway are told who they are, or the client is refused with the reason; nobody is told
// a part of a name.
func TestLargeCertificatesAreToldOrRefused(t *testing.T) {
	const edge, inner, shop = "spiffe://edge.example/gw", "spiffe://edge.example/inner", "spiffe://edge.example/shop"
	gateways, corp := newTestCA(t, "edge.example"), newTestCA(t, "corp.example")
	issue := func(id string) *testca.Pair {
		t.Helper()
		pair, err := gateways.Issue(testca.Options{SPIFFEID: id, IPs: []net.IP{net.IPv4(127, 0, 0, 1)}})
		if err != nil {
			t.Fatal(err)
		}
		return pair
	}
	v := &delegation.Verifier{Audience: []string{shop}, Gateways: []delegation.Gateway{{ID: edge, Roots: gateways.Pool()}, {ID: inner, Roots: gateways.Pool()}}}
	ln := v.Listener(tls.NewListener(testnet.Listen(t), &tls.Config{Certificates: []tls.Certificate{issue(shop).TLS}, ClientAuth: tls.RequireAnyClientCert}))
	var serving sync.WaitGroup
	serving.Go(func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			_ = c.SetDeadline(time.Now().Add(patience))
			if a, err := c.(*delegation.Conn).Assertion(); err == nil {
				_, _ = fmt.Fprintf(c, "%s through %d\n", a.Subject, len(a.Actors))
			}
			_ = c.Close()
		}
	})
	t.Cleanup(func() {
		_ = ln.Close()
		serving.Wait()
	})
	files := func(id, config string) map[string]string {
		pair := issue(id)
		return map[string]string{"gw.crt": string(pair.CertPEM), "gw.key": string(pair.KeyPEM), "edge.pem": string(gateways.CertPEM), "corp.pem": string(corp.CertPEM), "culvert.yaml": config}
	}
	service := fmt.Sprintf(`    ports: [443]
    endpoints: [%q]
    tls: {serverName: 127.0.0.1, sans: [%q], key: gw, trust: edge.example}
    forwardIdentity: {assertion: true}
`, ln.Addr(), shop)
	in := startFile(t, files(inner, fmt.Sprintf(`cluster: inner
listeners:
  - {address: "127.0.0.1:1", tls: {key: gw, trust: edge.example, protocols: [connect-h2]}}
identity:
  keys: {gw: {certificateFile: gw.crt, keyFile: gw.key}}
  trust: {edge.example: {caFile: edge.pem}, corp.example: {caFile: corp.pem, delegates: [%q]}}
services:
  - name: far.test
%s`, edge, service)))
	out := startFile(t, files(edge, fmt.Sprintf(`cluster: edge
listeners:
  - {address: "127.0.0.1:1", tls: {key: gw, trust: corp.example, protocols: [connect]}}
identity:
  keys: {gw: {certificateFile: gw.crt, keyFile: gw.key}}
  trust: {corp.example: {caFile: corp.pem}, edge.example: {caFile: edge.pem}}
services:
  - {name: far.test, ports: [443], via: [{connect-h2: "https://%s", key: gw, trust: edge.example, peers: [%q], forwardIdentity: true}], insecure: true}
  - name: near.test
%s`, in.addrs[0], inner, service)))
	call := func(name string, own tls.Certificate) (string, error) {
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		defer cancel()
		d := &connect.Dialer{Proxy: out.addrs[0], TLS: &tls.Config{Certificates: []tls.Certificate{own}, InsecureSkipVerify: true}}
		c, err := d.DialContext(ctx, "tcp", name+":443")
		if err != nil {
			return "", err
		}
		defer c.Close()
		_ = c.SetDeadline(time.Now().Add(patience))
		return bufio.NewReader(c).ReadString('\n')
	}
	own := func(o testca.Options) tls.Certificate {
		t.Helper()
		if o.SPIFFEID == "" {
			o.SPIFFEID = frontID
		}
		pair, err := corp.Issue(o)
		if err != nil {
			t.Fatal(err)
		}
		return pair.TLS
	}
	names := func(bytes int) (all []string) {
		for i := range bytes / 50 {
			all = append(all, fmt.Sprintf("%04d.%s.test", i, strings.Repeat("n", 38)))
		}
		return all
	}
	// with returns a chain with more certificates, of others, behind the leaf.
	with := func(leaf tls.Certificate, more int, o testca.Options) tls.Certificate {
		other := own(o).Certificate[0]
		for range more {
			leaf.Certificate = append(leaf.Certificate, other)
		}
		return leaf
	}
	long := func(bytes int) string {
		id := "spiffe://corp.example"
		for len(id) < bytes {
			id += "/" + strings.Repeat("p", min(60, bytes-len(id)-1))
		}
		return id
	}
	for _, name := range []string{"near.test", "far.test"} {
		testnet.Eventually(t, patience, func() bool { _, err := call(name, own(testca.Options{})); return err == nil }, "%s is reached", name)
	}
	for _, row := range []struct {
		name string
		own  tls.Certificate
		id   string // that is told; "" for refused
		err  string // in the log
	}{
		{name: "small", own: own(testca.Options{}), id: frontID},
		{name: "names of 8 KiB", own: own(testca.Options{DNSNames: names(8 << 10)}), id: frontID},
		{name: "a chain of 4 KiB", own: with(own(testca.Options{}), 3, testca.Options{DNSNames: names(1 << 10)}), id: frontID},
		{name: "a chain of 64 KiB", own: with(own(testca.Options{}), 7, testca.Options{DNSNames: names(8 << 10)}), id: frontID},
		{name: "a chain of 100 certificates", own: with(own(testca.Options{}), 99, testca.Options{}), err: "chain has 100 certificates, limit 8"},
		{name: "an id of 700 bytes", own: own(testca.Options{SPIFFEID: long(700)}), id: long(700)},
		{name: "an id of 1,500 bytes", own: own(testca.Options{SPIFFEID: long(1500)}), err: "limit 1536"},
	} {
		for name, gateways := range map[string]int{"near.test": 1, "far.test": 2} {
			want, got := fmt.Sprintf("%s through %d\n", row.id, gateways), ""
			if row.id == "" {
				if said, err := call(name, row.own); err == nil {
					t.Errorf("%s, %s: the service was called by %q, want it refused", row.name, name, said)
				}
				testnet.Eventually(t, patience, func() bool { return strings.Contains(out.log.String(), row.err) }, "%s: the log says %s", row.name, row.err)
				continue
			}
			var err error
			if got, err = call(name, row.own); got != want {
				t.Errorf("%s, %s: the service was called by %q, %v; want %q", row.name, name, got, err, want)
			}
		}
	}
	for _, name := range []string{"near.test", "far.test"} {
		testnet.Eventually(t, patience, func() bool {
			for l := range strings.Lines(out.log.String()) {
				if strings.Contains(l, "target="+name) && strings.Contains(l, "reason=internal") && strings.Contains(l, "limit 1536") {
					return true
				}
			}
			return false
		}, "the caller with a long id is refused for %s with the reason internal", name)
	}
}
