//go:build unix

package command

import (
	"bufio"
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"net/netip"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"culvert.dev/connect"
	"culvert.dev/connect/h2"
	"culvert.dev/connect/proxyproto"
	"culvert.dev/connect/ws"
	"culvert.dev/internal/testca"
	"culvert.dev/internal/testnet"
	"culvert.dev/tunnel"
)

// The programs behind inbound listeners of an agent hear of the caller that has shown a certificate,
// whatever that caller says itself: in a PROXY header of its own, before TLS and inside, and in fields
// of a request. Two programs share a listener by the name that callers ask for, each with its own list.
func TestAgentTellsItsProgramsWhoCalls(t *testing.T) {
	ca := newTestCA(t, "corp.example")
	issue := func(id string, names ...string) *testca.Pair {
		t.Helper()
		pair, err := ca.Issue(testca.Options{SPIFFEID: id, DNSNames: names})
		if err != nil {
			t.Fatal(err)
		}
		return pair
	}
	const web, ops = "web.shop.example", "ops.shop.example"
	laptop, front, admin, edge := issue(shopID, web, ops), issue(frontID), issue(adminID), issue(edgeID)
	told := func(c net.Conn) {
		_ = c.SetDeadline(time.Now().Add(patience))
		if h, err := readPROXY(c); err == nil && h.SSL != nil {
			_, _ = fmt.Fprintf(c, "caller %q at %s asks for %s with the certificate of %q\n", h.Caller, h.Source.Addr(), h.Authority, h.SSL.CN)
			_, _ = io.Copy(io.Discard, c) // what the caller says
		}
	}
	program, other := testnet.Service(t, told), testnet.Service(t, told)
	byName, byH2, byWS := testnet.FreePort(t), testnet.FreePort(t), testnet.FreePort(t)
	agent := startFile(t, map[string]string{
		"own.crt": string(laptop.CertPEM), "own.key": string(laptop.KeyPEM), "ca.pem": string(ca.CertPEM),
		"culvert.yaml": fmt.Sprintf(`identity:
  keys: {own: {certificateFile: own.crt, keyFile: own.key}}
  trust: {corp.example: {caFile: ca.pem, delegates: [%q]}}
agent:
  gateway: %q
  key: own
  trust: corp.example
  catalog: false
  proxy: %q
  inbound:
    - {name: %[4]s, listen: %[6]q, to: %[9]q, allow: [%[11]q], tell: proxy}
    - {name: %[5]s, listen: %[6]q, to: %[10]q, allow: [%[12]q], tell: proxy}
    - {name: %[4]s, listen: %[7]q, to: %[9]q, allow: [%[11]q], tell: proxy, protocol: connect-h2}
    - {name: %[4]s, listen: %[8]q, to: %[9]q, allow: [%[11]q], tell: proxy, protocol: websocket}
`, edgeID, testnet.ClosedPort(t), "unix:"+filepath.Join(t.TempDir(), "proxy"), web, ops, byName, byH2, byWS, program, other, frontID, adminID)})

	if strings.Contains(agent.log.String(), "configuration warning") {
		t.Error("the configuration is warned of")
	}
	forged := func() []byte {
		b, err := (&proxyproto.Header{Version: 2, Authority: web, Caller: adminID, Source: netip.MustParseAddrPort("198.51.100.9:1"), Destination: netip.MustParseAddrPort("192.0.2.1:443"),
			SSL: &proxyproto.SSL{Certificate: true, Session: true, Verified: true, CN: "admin", ClientCertificate: admin.TLS.Certificate[0]}}).Append(nil)
		if err != nil {
			t.Fatal(err)
		}
		return b
	}()
	lies := connect.Fields{
		{Name: "X-Forwarded-For", Value: "198.51.100.9"}, {Name: "Forwarded", Value: "for=198.51.100.9"}, {Name: "Culvert-Source", Value: "198.51.100.9:1"},
		{Name: "X-Forwarded-Client-Cert", Value: "URI=" + adminID}, {Name: "Authorization", Value: "Bearer " + adminID},
	}
	header := func(context.Context, string) (connect.Fields, error) { return lies, nil }
	config := func(p *testca.Pair, name string) *tls.Config {
		c := &tls.Config{RootCAs: ca.Pool(), ServerName: name}
		if p != nil {
			c.Certificates = []tls.Certificate{p.TLS}
		}
		return c
	}
	inTLS := func(p *testca.Pair, name string, before []byte) func(context.Context) (net.Conn, error) {
		return func(ctx context.Context) (net.Conn, error) {
			c, err := (&net.Dialer{}).DialContext(ctx, "tcp", byName)
			if err != nil {
				return nil, err
			}
			if _, err := c.Write(before); err != nil {
				t.Error(err)
			}
			return tls.Client(c, config(p, name)), nil
		}
	}
	by := func(d tunnel.Dialer, target string) func(context.Context) (net.Conn, error) {
		if c, ok := d.(io.Closer); ok {
			t.Cleanup(func() { _ = c.Close() })
		}
		return func(ctx context.Context) (net.Conn, error) { return d.DialContext(ctx, "tcp", target) }
	}
	overH2 := func(p *testca.Pair) tunnel.Dialer {
		return &h2.Dialer{Proxy: byH2, TLS: config(p, web), Header: header}
	}
	overWS := func(p *testca.Pair) tunnel.Dialer {
		return &ws.Dialer{URL: "wss://" + byWS + "/", TLS: config(p, web), Header: header}
	}
	for _, row := range []struct {
		name   string
		dial   func(context.Context) (net.Conn, error)
		caller string // that the program hears of; "" means that it hears nothing
		cn     string // of its certificate
		target string
		logged []string
	}{
		{name: "by name", dial: inTLS(front, web, nil), caller: frontID, cn: "front", target: web},
		{name: "another program by name", dial: inTLS(admin, ops, nil), caller: adminID, cn: "admin", target: ops},
		{name: "not on the first list", dial: inTLS(admin, web, nil), logged: []string{"reason=denied", "target=" + web, "peer=" + adminID}},
		{name: "not on the second list", dial: inTLS(front, ops, nil), logged: []string{"reason=denied", "target=" + ops, "peer=" + frontID}},
		{name: "a name that no program has", dial: inTLS(front, "db.shop.example", nil), logged: []string{"target=db.shop.example"}},
		{name: "no certificate", dial: inTLS(nil, web, nil), logged: []string{"reason=no-auth"}},
		{name: "a header before TLS", dial: inTLS(front, web, forged), logged: []string{"reason=bad-preamble"}},
		{name: "a request without TLS", dial: by(&connect.Dialer{Proxy: byName, Header: header}, web+":8080"), logged: []string{"listener=" + byName, "reason=bad-preamble", "not TLS"}},
		{name: "a request without TLS for connect-h2", dial: by(&h2.Dialer{Proxy: byH2, Header: header}, web+":8080"), logged: []string{"listener=" + byH2, "reason=bad-preamble"}},
		{name: "connect-h2", dial: by(overH2(front), web+":8080"), caller: frontID, cn: "front", target: web},
		{name: "connect-h2, not on the list", dial: by(overH2(admin), web+":8080"), logged: []string{"proto=connect-h2", "reason=denied", "peer=" + adminID}},
		{name: "connect-h2, to the other program", dial: by(overH2(front), ops+":8080"), logged: []string{"proto=connect-h2", "reason=denied", "target=" + ops}},
		{name: "a delegate that states no caller", dial: by(overH2(edge), web+":8080"), logged: []string{"proto=connect-h2", "reason=denied", "peer=" + edgeID}},
		{name: "websocket", dial: by(overWS(front), web+":8080"), caller: frontID, cn: "front", target: web},
		{name: "websocket, not on the list", dial: by(overWS(admin), web+":8080"), logged: []string{"proto=websocket", "reason=denied", "peer=" + adminID}},
	} {
		t.Run(row.name, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), patience)
			defer cancel()
			var said string
			c, err := row.dial(ctx)
			if err == nil {
				_ = c.SetDeadline(time.Now().Add(patience))
				if _, err = c.Write(forged); err == nil {
					said, err = bufio.NewReader(c).ReadString('\n')
				}
				_ = c.Close()
			}
			want := ""
			if row.caller != "" {
				want = fmt.Sprintf("caller %q at 127.0.0.1 asks for %s with the certificate of %q\n", row.caller, row.target, row.cn)
			}
			if said != want {
				t.Errorf("the program was told %q, want %q; the caller has %v", said, want, err)
			}
			testnet.Eventually(t, patience, func() bool {
				for line := range strings.Lines(agent.log.String()) {
					found := true
					for _, w := range row.logged {
						found = found && strings.Contains(line, w)
					}
					if found {
						return true
					}
				}
				return false
			}, "a line of the log with %q", row.logged)
		})
	}
}
