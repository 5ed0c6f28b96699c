package command

import (
	"bufio"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"culvert.dev/connect"
	"culvert.dev/delegation"
	"culvert.dev/internal/testca"
	"culvert.dev/internal/testnet"
)

// patientDials is for gateways of which no request may fail, on a machine that takes more than the
// usual 3 seconds for a dial.
const patientDials = "limits: {connectTimeout: 1m, connectTotalTimeout: 2m, handshakeTimeout: 1m}"

// Two callers use the same connections between two gateways all the time, while the keys of
// both gateways, their CA and that of the callers are replaced: no request fails, and the
// service behind is told of each request who has made it.
func TestAssertionsHoldWhileKeysAndCAsAreReplaced(t *testing.T) {
	overCarriersOfCallers(t, rotateTwoGateways)
}

func rotateTwoGateways(t *testing.T, carrier, listener, hop string) {
	const edge, inner, shop = "spiffe://edge.example/gw", "spiffe://edge.example/inner", "spiffe://edge.example/shop"
	callers := []string{"spiffe://corp.example/front", "spiffe://corp.example/back"}
	gateways, nextGateways := newTestCA(t, "edge.example"), newTestCA(t, "edge.example")
	corp, nextCorp := newTestCA(t, "corp.example"), newTestCA(t, "corp.example")
	var shown [2]atomic.Pointer[testca.Pair] // of the callers
	for i, id := range callers {
		shown[i].Store(issueID(t, corp, id))
	}
	both := string(gateways.CertPEM) + string(nextGateways.CertPEM)

	// The service believes the inner gateway, of either CA, and says who calls.
	roots := gateways.Pool()
	roots.AddCert(nextGateways.Root())
	v := &delegation.Verifier{Audience: []string{shop}, Gateways: []delegation.Gateway{{ID: inner, Roots: roots}}}
	ln := v.Listener(tls.NewListener(testnet.Listen(t), &tls.Config{Certificates: []tls.Certificate{issueID(t, gateways, shop).TLS}, ClientAuth: tls.RequireAnyClientCert}))
	var serving sync.WaitGroup
	serving.Go(func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			serving.Go(func() {
				defer c.Close()
				_ = c.SetDeadline(time.Now().Add(3 * patience))
				a, err := c.(*delegation.Conn).Assertion()
				if err != nil {
					_, _ = fmt.Fprintf(c, "refused: %v\n", err)
					return
				}
				_, _ = fmt.Fprintf(c, "%s through %s\n", a.Subject, a.Actors)
				_, _ = io.Copy(io.Discard, c)
			})
		}
	})
	t.Cleanup(func() {
		_ = ln.Close()
		serving.Wait()
	})
	files := func(id, config string) map[string]string {
		pair := issueID(t, gateways, id)
		return map[string]string{
			"gw.crt": string(pair.CertPEM), "gw.key": string(pair.KeyPEM), "edge.pem": string(gateways.CertPEM), "shop.pem": both,
			"corp.pem": string(corp.CertPEM), "culvert.yaml": config,
		}
	}
	in := startFile(t, files(inner, fmt.Sprintf(`cluster: inner
`+patientDials+`
listeners:
  - {address: %q, tls: {key: gw, trust: edge.example, protocols: [%s]}}
identity:
  keys: {gw: {certificateFile: gw.crt, keyFile: gw.key}}
  trust:
    edge.example: {caFile: edge.pem}
    corp.example: {caFile: corp.pem, delegates: [%q]}
services:
  - name: svc.test
    ports: [443]
    endpoints: [%q]
    tls: {serverName: 127.0.0.1, sans: [%q], key: gw, caFile: shop.pem}
    forwardIdentity: {assertion: true}
`, listener, carrier, edge, ln.Addr(), shop)))
	out := startFile(t, files(edge, fmt.Sprintf(`cluster: edge
`+patientDials+`
listeners:
  - {address: "127.0.0.1:1", tls: {key: gw, trust: corp.example, protocols: [connect]}}
identity:
  keys: {gw: {certificateFile: gw.crt, keyFile: gw.key}}
  trust: {corp.example: {caFile: corp.pem}, edge.example: {caFile: edge.pem}}
services:
  - {name: svc.test, ports: [443], via: [{%s, key: gw, trust: edge.example, peers: [%q], forwardIdentity: true}], insecure: true}
`, fmt.Sprintf(hop, in.addrs[0]), inner)))

	call := func(i int) error {
		ctx, cancel := context.WithTimeout(t.Context(), 3*patience)
		defer cancel()
		d := &connect.Dialer{Proxy: out.addrs[0], Wait: 3 * patience, TLS: &tls.Config{Certificates: []tls.Certificate{shown[i].Load().TLS}, InsecureSkipVerify: true}}
		c, err := d.DialContext(ctx, "tcp", "svc.test:443")
		if err != nil {
			return err
		}
		defer c.Close()
		_ = c.SetDeadline(time.Now().Add(3 * patience))
		said, err := bufio.NewReader(c).ReadString('\n')
		if want := fmt.Sprintf("%s through [%s %s]\n", callers[i], inner, edge); err == nil && said != want {
			err = fmt.Errorf("the service was called by %q, want %q", said, want)
		}
		return err
	}
	for i := range callers {
		testnet.Eventually(t, patience, func() bool { return call(i) == nil }, "%s reaches the service", callers[i])
	}
	var done [2]atomic.Int64
	stop := make(chan struct{})
	var work sync.WaitGroup
	for i := range callers {
		for range 2 {
			work.Go(func() {
				for {
					select {
					case <-stop:
						return
					default:
					}
					err := call(i)
					done[i].Add(1)
					if err != nil {
						t.Errorf("%s: %v", callers[i], err)
						return
					}
				}
			})
		}
	}
	settle := func() {
		for i := range callers {
			from := done[i].Load()
			testnet.Eventually(t, 3*patience, func() bool { return t.Failed() || done[i].Load() >= from+6 }, "%s calls", callers[i])
		}
	}
	// show has a gateway show a new key that ca has signed.
	show := func(r *running, ca *testca.CA, id string) {
		t.Helper()
		was, pair := r.ids.store.Key("gw").Generation(), issueID(t, ca, id)
		r.write(t, "gw.crt", string(pair.CertPEM))
		r.write(t, "gw.key", string(pair.KeyPEM))
		testnet.Eventually(t, patience, func() bool { return r.ids.store.Key("gw").Generation() > was }, "the key is read")
		settle()
	}
	// trust has gateways trust CAs for a domain.
	trust := func(domain, file, cas string, all ...*running) {
		t.Helper()
		for _, r := range all {
			was := r.ids.store.Trust(domain).Generation()
			r.write(t, file, cas)
			testnet.Eventually(t, patience, func() bool { return r.ids.store.Trust(domain).Generation() > was }, "the CAs are read")
		}
		settle()
	}
	settle()
	for range 3 {
		show(out, gateways, edge)
		show(in, gateways, inner)
	}
	trust("edge.example", "edge.pem", both, out, in)
	show(out, nextGateways, edge)
	show(in, nextGateways, inner)
	trust("edge.example", "edge.pem", string(nextGateways.CertPEM), out, in)
	trust("corp.example", "corp.pem", string(corp.CertPEM)+string(nextCorp.CertPEM), out, in)
	for i, id := range callers {
		shown[i].Store(issueID(t, nextCorp, id))
	}
	settle()
	trust("corp.example", "corp.pem", string(nextCorp.CertPEM), out, in)
	close(stop)
	work.Wait()
	if t.Failed() {
		return
	}
	// An old certificate of a caller is of no use any more.
	shown[0].Store(issueID(t, corp, callers[0]))
	if err := call(0); err == nil || errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("a certificate of the CA before: got %v, want it refused", err)
	}
}
