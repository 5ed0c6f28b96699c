package command

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"os"
	"strings"
	"testing"
	"time"

	"culvert.dev/connect"
	"culvert.dev/internal/testca"
	"culvert.dev/internal/testnet"
)

// Tunnels through two gateways, of which the first states the caller, end at both as soon as
// the caller is revoked at either, or the first gateway may no longer state it: by policy, by
// a revocation list, by the list of delegates, by trust that is taken away, and with a token.
// Tunnels of others go on. When that is undone, the caller comes in again.
func TestRevokedCallersLoseTheirTunnelsAtEveryHop(t *testing.T) {
	overCarriersOfCallers(t, revokeThroughTwoGateways)
}

// overCarriersOfCallers runs test, with the listener and the hop of two gateways, over each
// carrier by which one gateway states its callers to the next.
func overCarriersOfCallers(t *testing.T, test func(t *testing.T, carrier, listener, hop string)) {
	for _, row := range []struct{ carrier, listener, hop string }{
		{"hbone", "127.0.0.1:1", "hbone: %q"},
		{"connect-h2", "127.0.0.1:1", "connect-h2: https://%s"},
		{"connect", "127.0.0.1:1", "connect: https://%s"},
		{"connect-h3", "udp://127.0.0.1:1", "connect-h3: %q"},
	} {
		t.Run(row.carrier, func(t *testing.T) {
			t.Parallel()
			test(t, row.carrier, row.listener, row.hop)
		})
	}
}

// issueID issues a certificate with a SPIFFE id, for 127.0.0.1.
func issueID(t *testing.T, ca *testca.CA, id string) *testca.Pair {
	t.Helper()
	pair, err := ca.Issue(testca.Options{SPIFFEID: id, IPs: []net.IP{net.IPv4(127, 0, 0, 1)}})
	if err != nil {
		t.Fatal(err)
	}
	return pair
}

func revokeThroughTwoGateways(t *testing.T, carrier, listener, hop string) {
	const edge, inner, partner = "spiffe://edge.example/gw", "spiffe://edge.example/inner", "spiffe://corp.example/partner"
	corp, gateways := newTestCA(t, "corp.example"), newTestCA(t, "edge.example")
	list := func(ca *testca.CA, revoked ...*x509.Certificate) string {
		t.Helper()
		pem, err := ca.RevocationList(revoked...)
		if err != nil {
			t.Fatal(err)
		}
		return string(pem)
	}
	front, direct, edgeKey := issueID(t, corp, frontID), issueID(t, corp, partner), issueID(t, gateways, edge)
	files := func(id string, pair *testca.Pair, config string) map[string]string {
		return map[string]string{
			"gw.crt": string(pair.CertPEM), "gw.key": string(pair.KeyPEM), "corp.pem": string(corp.CertPEM), "edge.pem": string(gateways.CertPEM),
			"corp.crl": list(corp), "edge.crl": list(gateways), "culvert.yaml": config, "tokens.txt": "ci:" + digestOf("t-one") + "\n",
		}
	}
	// The inner gateway has a listener for the partner, too, which speaks for itself.
	innerConfig := fmt.Sprintf(`cluster: inner
listeners:
  - {address: %q, tls: {key: gw, trust: [corp.example, edge.example], protocols: [%s]}}
  - {address: "127.0.0.1:4", tls: {key: gw, trust: corp.example, protocols: [connect]}}
identity:
  keys: {gw: {certificateFile: gw.crt, keyFile: gw.key}}
  trust:
    corp.example: {caFile: corp.pem, delegates: [%q]}
    edge.example: {caFile: edge.pem, crlFile: edge.crl, delegates: [%[3]q]}
services:
  - {name: svc.test, ports: [443], endpoints: [%[4]q], insecure: true}
`, listener, carrier, edge, testnet.Echo(t).Addr())
	in := startFile(t, files(inner, issueID(t, gateways, inner), innerConfig))
	edgeConfig := fmt.Sprintf(`cluster: edge
listeners:
  - address: "127.0.0.1:1"
    tls: {key: gw, trust: corp.example, clientCertificates: optional, protocols: [connect]}
  - address: "127.0.0.1:4"
    auth: {tokensFile: tokens.txt}
    endWithCredential: true
    tls: {key: gw, protocols: [connect]}
identity:
  keys: {gw: {certificateFile: gw.crt, keyFile: gw.key}}
  trust: {corp.example: {caFile: corp.pem, crlFile: corp.crl}, edge.example: {caFile: edge.pem}}
services:
  - {name: svc.test, ports: [443], via: [{%s, key: gw, trust: edge.example, peers: [%q], forwardIdentity: true}], insecure: true}
`, fmt.Sprintf(hop, in.addrs[0]), inner)
	out := startFile(t, files(edge, edgeKey, edgeConfig))

	// A caller that opens a tunnel, and the id that the inner gateway has of it.
	type caller struct {
		id   string
		dial *connect.Dialer
	}
	by := func(id, addr string, own *testca.Pair, authorization string) *caller {
		cfg := &tls.Config{InsecureSkipVerify: true}
		if own != nil {
			cfg.Certificates = []tls.Certificate{own.TLS}
		}
		return &caller{id, &connect.Dialer{Proxy: addr, TLS: cfg, Authorization: authorization}}
	}
	delegated := by(frontID, out.addrs[0], front, "")
	user := by("ci", out.addrs[1], nil, connect.BearerCredentials("t-one"))
	bystander := by(partner, in.addrs[1], direct, "")
	open := func(c *caller) (net.Conn, error) {
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		defer cancel()
		return c.dial.DialContext(ctx, "tcp", "svc.test:443")
	}
	stand := func(c *caller) net.Conn {
		t.Helper()
		var conn net.Conn
		testnet.Eventually(t, patience, func() (ok bool) {
			got, err := open(c)
			if err != nil {
				return false
			}
			conn = got
			return true
		}, "%s has a tunnel", c.id)
		t.Cleanup(func() { _ = conn.Close() })
		_ = conn.SetDeadline(time.Now().Add(3 * patience))
		testnet.Ping(t, conn, "hello")
		return conn
	}
	// lines counts those of the log with both texts.
	lines := func(r *running, a, b string) (n int) {
		for l := range strings.Lines(r.log.String()) {
			if strings.Contains(l, a) && strings.Contains(l, b) {
				n++
			}
		}
		return n
	}
	stays := stand(bystander)
	policy := func(id string) string {
		return fmt.Sprintf("policies:\n  - {name: no, tier: admin, action: deny, rules: [{sources: [{spiffe: [%q]}]}]}\n", id)
	}
	for _, step := range []struct {
		name string
		who  *caller
		at   *running // whose files change, and whose log says revoked
		file string
		to   string
		back string
		late bool // the caller comes in all the same
	}{
		{name: "a policy at the inner gateway", who: delegated, at: in, file: "culvert.yaml", to: innerConfig + policy(frontID), back: innerConfig},
		{name: "a policy at the outer gateway", who: delegated, at: out, file: "culvert.yaml", to: edgeConfig + policy(frontID), back: edgeConfig},
		{name: "a policy about the actor", who: delegated, at: in, file: "culvert.yaml", to: innerConfig + "policies:\n  - {name: no, tier: admin, action: deny, rules: [{sources: [{actors: [\"" + edge + "\"]}]}]}\n", back: innerConfig},
		{name: "the caller's certificate is on a list", who: delegated, at: out, file: "corp.crl", to: list(corp, front.TLS.Leaf), back: list(corp)},
		{name: "the gateway is no delegate of the caller's domain", who: delegated, at: in, file: "culvert.yaml", to: strings.Replace(innerConfig, "corp.pem, delegates: [\""+edge+"\"]", "corp.pem", 1), back: innerConfig},
		{name: "the gateway is no delegate of its own domain, for users", who: user, at: in, file: "culvert.yaml", to: strings.Replace(innerConfig, "edge.crl, delegates: [\""+edge+"\"]", "edge.crl", 1), back: innerConfig},
		{name: "the gateway is nobody's delegate, and so itself", who: delegated, at: in, file: "culvert.yaml", to: strings.ReplaceAll(innerConfig, ", delegates: [\""+edge+"\"]", ""), back: innerConfig, late: true},
		{name: "the gateway's certificate is on a list", who: delegated, at: in, file: "edge.crl", to: list(gateways, edgeKey.TLS.Leaf), back: list(gateways)},
		{name: "the gateway's trust domain is taken away", who: delegated, at: in, file: "culvert.yaml",
			to:   strings.Replace(strings.Replace(innerConfig, "[corp.example, edge.example]", "corp.example", 1), innerConfig[strings.Index(innerConfig, "    edge.example:"):strings.Index(innerConfig, "services:")], "", 1),
			back: innerConfig},
		{name: "the user's token is taken away", who: user, at: out, file: "tokens.txt", to: "cd:" + digestOf("t-two") + "\n", back: "ci:" + digestOf("t-one") + "\n"},
	} {
		conn := stand(step.who)
		testnet.Eventually(t, patience, func() bool { return in.Status().Tunnels == 2 && out.Status().Tunnels == 1 }, "%s: one tunnel stands at both gateways", step.name)
		before := lines(step.at, "reason=revoked", "peer="+step.who.id+" ")
		start := time.Now()
		step.at.write(t, step.file, step.to)
		step.at.source.Reload()
		if n, err := conn.Read(make([]byte, 1)); n > 0 || err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
			t.Fatalf("%s: got %d bytes and %v, want the tunnel ended", step.name, n, err)
		}
		took := time.Since(start)
		testnet.Eventually(t, patience, func() bool { return lines(step.at, "reason=revoked", "peer="+step.who.id+" ") == before+1 }, "%s: the log says that the tunnel was revoked", step.name)
		testnet.Eventually(t, patience, func() bool { return in.Status().Tunnels == 1 && out.Status().Tunnels == 0 }, "%s: the tunnel has ended at both gateways", step.name)
		t.Logf("%s: ended after %v", step.name, took)
		testnet.Ping(t, stays, "goes on")
		again := func() bool {
			c, err := open(step.who)
			if err != nil {
				return false
			}
			_ = c.Close()
			return true
		}
		if got := again(); got != step.late {
			t.Errorf("%s: a new tunnel is opened: %v, want %v", step.name, got, step.late)
		}
		known := lines(in, "reason=", "peer="+step.who.id+" ")
		step.at.write(t, step.file, step.back)
		step.at.source.Reload()
		testnet.Eventually(t, patience, func() bool { return again() && lines(in, "reason=", "peer="+step.who.id+" ") > known }, "%s: it is undone", step.name)
	}
	testnet.Ping(t, stays, "goes on")
}
