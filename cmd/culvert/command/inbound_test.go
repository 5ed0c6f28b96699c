package command

import (
	"bytes"
	"context"
	"crypto"
	"crypto/tls"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"culvert.dev/connect/proxyproto"
	"culvert.dev/delegation"
	"culvert.dev/internal/testca"
	"culvert.dev/internal/testnet"
)

// A told program verifies nothing: it reads a PROXY header, and answers with what that says.
func toldProgram(t *testing.T) net.Listener {
	t.Helper()
	ln := testnet.Listen(t)
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			_ = c.SetDeadline(time.Now().Add(patience))
			if h, err := readPROXY(c); err == nil {
				cn := ""
				if h.SSL != nil {
					cn = h.SSL.CN
				}
				_, _ = fmt.Fprintf(c, "caller %q at %s asks for %s with the certificate of %q\n", h.Caller, h.Source.Addr(), h.Authority, cn)
			}
			_ = c.Close()
		}
	}()
	t.Cleanup(func() {
		_ = ln.Close()
		<-done
	})
	return ln
}

// readPROXY reads a header, and not a byte more.
func readPROXY(r io.Reader) (proxyproto.Header, error) {
	var b []byte
	for {
		h, _, err := proxyproto.Parse(b)
		if !errors.Is(err, proxyproto.ErrMore) {
			return h, err
		}
		var next [1]byte
		if _, err := io.ReadFull(r, next[:]); err != nil {
			return h, err
		}
		b = append(b, next[0])
	}
}

// A program that cannot verify who calls is behind a gateway of its own on loopback, which
// verifies what another gateway states, decides by it, and tells the program. What does not
// hold is refused, with the reason in the log, before the program hears of it.
func TestAnInboundListenerVerifiesForItsProgram(t *testing.T) {
	ca := newTestCA(t, "corp.example")
	issue := func(id string) *testca.Pair {
		t.Helper()
		pair, err := ca.Issue(testca.Options{SPIFFEID: id, DNSNames: []string{"shop.internal", "shop.example.com"}, IPs: []net.IP{net.IPv4(127, 0, 0, 1)}})
		if err != nil {
			t.Fatal(err)
		}
		return pair
	}
	edge, front, shop := issue(edgeID), issue(frontID), issue(shopID)
	program := toldProgram(t)
	files := func(pair *testca.Pair, config string) map[string]string {
		return map[string]string{"own.crt": string(pair.CertPEM), "own.key": string(pair.KeyPEM), "ca.pem": string(ca.CertPEM), "culvert.yaml": config}
	}
	workload := startFile(t, files(shop, fmt.Sprintf(`listeners:
  - {address: "127.0.0.1:1", tls: {key: own, trust: corp.example, protocols: [proxy]}}
identity:
  keys: {own: {certificateFile: own.crt, keyFile: own.key}}
  trust: {corp.example: {caFile: ca.pem, delegates: [%q]}}
services:
  - name: shop.example.com
    endpoints: [%q]
    forwardIdentity: {position: beforeTLS, trustNetwork: true}
policies:
  - name: front
    action: allow
    targets: {names: [shop.example.com]}
    rules: [{sources: [{spiffe: [%q]}]}]
`, edgeID, program.Addr(), frontID)))
	at := workload.addrs[0]
	outer := startFile(t, files(edge, fmt.Sprintf(`listeners:
  - {address: "127.0.0.1:1", protocols: [sni], tls: {key: own, names: [shop.example.com], trust: corp.example, clientCertificates: optional, protocols: [tcp]}}
identity:
  keys: {own: {certificateFile: own.crt, keyFile: own.key}}
  trust: {corp.example: {caFile: ca.pem}}
services:
  - name: shop.example.com
    endpoints: [%q]
    tls: {serverName: 127.0.0.1, sans: [%q], key: own, trust: corp.example}
    forwardIdentity: {assertion: true}
`, at, shopID)))

	dial := func(to, name string, own ...tls.Certificate) (*tls.Conn, error) {
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		defer cancel()
		d := &tls.Dialer{Config: &tls.Config{Certificates: own, ServerName: name, InsecureSkipVerify: true}}
		c, err := d.DialContext(ctx, "tcp", to)
		if err != nil {
			return nil, err
		}
		_ = c.SetDeadline(time.Now().Add(patience))
		return c.(*tls.Conn), nil
	}
	call := func(own ...tls.Certificate) string {
		c, err := dial(outer.addrs[0], "shop.example.com", own...)
		if err != nil {
			return ""
		}
		defer c.Close()
		said, _ := io.ReadAll(c)
		return string(said)
	}
	want := fmt.Sprintf("caller %q at 127.0.0.1 asks for shop.example.com with the certificate of %q\n", frontID, "")
	got := ""
	testnet.Eventually(t, patience, func() bool {
		got = call(front.TLS)
		return got != ""
	}, "the program is reached") // the gateways have not read their files at first
	if got != want {
		t.Errorf("the program was told %q, want %q", got, want)
	}
	logged := func(t *testing.T, words ...string) {
		t.Helper()
		testnet.Eventually(t, patience, func() bool {
			for line := range strings.Lines(workload.log.String()) {
				all := true
				for _, w := range words {
					all = all && strings.Contains(line, w)
				}
				if all {
					return true
				}
			}
			return false
		}, "a line of the log with %q", words)
	}
	logged(t, "peer="+frontID, "actor="+edgeID, "proto=proxy", "target=shop.example.com")
	if got := call(); got != "" {
		t.Errorf("without a certificate the program was told %q, want nothing: the caller is the gateway, to which no policy allows it", got)
	}
	logged(t, "reason=denied", "peer="+edgeID)

	// A gateway that forges each of it.
	sign := func(p *testca.Pair, id string, a delegation.Assertion) string {
		t.Helper()
		s, err := delegation.NewSigner(id, p.TLS.PrivateKey.(crypto.Signer), nil)
		if err != nil {
			t.Fatal(err)
		}
		if a.Subject == "" {
			a.Subject = frontID
		}
		if a.Audience == "" {
			a.Audience = shopID
		}
		a.Method = "mtls"
		token, err := s.Sign(&a)
		if err != nil {
			t.Fatal(err)
		}
		return token
	}
	header := func(token string) []byte {
		t.Helper()
		h := proxyproto.Header{Version: 2, Authority: "shop.example.com", Assertion: token, Caller: "spiffe://corp.example/admin",
			Source: netip.MustParseAddrPort("198.51.100.9:1234"), Destination: netip.MustParseAddrPort("192.0.2.1:443"),
			SSL: &proxyproto.SSL{Certificate: true, Session: true, Verified: true, CN: "admin", ClientCertificate: shop.TLS.Certificate[0]}}
		b, err := h.Append(nil)
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	raw := func(values ...string) []byte {
		var body []byte
		for _, v := range values {
			body = append(body, v[0])
			body = binary.BigEndian.AppendUint16(body, uint16(len(v)-1))
			body = append(body, v[1:]...)
		}
		b := append([]byte("\r\n\r\n\x00\r\nQUIT\n\x21\x00"), 0, 0)
		binary.BigEndian.PutUint16(b[14:], uint16(len(body)))
		return append(b, body...)
	}
	var heard []byte // by the service, in another session
	for _, row := range []struct {
		name   string
		by     *testca.Pair // nil means the gateway that is listed
		send   func(binding []byte) []byte
		told   string // to the program
		logged []string
	}{
		{name: "what holds", send: func(b []byte) []byte {
			heard = header(sign(edge, edgeID, delegation.Assertion{Binding: b}))
			return heard
		}, told: fmt.Sprintf("caller %q at 198.51.100.9 asks for shop.example.com with the certificate of %q\n", frontID, "")},
		{name: "through earlier gateways", send: func(b []byte) []byte {
			return header(sign(edge, edgeID, delegation.Assertion{Binding: b, Actors: []string{"spiffe://third.example/gw", "dns:fourth.example"}}))
		}, told: fmt.Sprintf("caller %q at 198.51.100.9 asks for shop.example.com with the certificate of %q\n", frontID, ""),
			logged: []string{"peer=" + frontID, "actor=" + edgeID, "earlier_actors=", "spiffe://third.example/gw", "dns:fourth.example"}},
		{name: "heard in another session", send: func([]byte) []byte { return heard },
			logged: []string{"reason=no-auth", "bound to another TLS session", "peer=" + edgeID}},
		{name: "for another service", send: func(b []byte) []byte {
			return header(sign(edge, edgeID, delegation.Assertion{Binding: b, Audience: "spiffe://corp.example/other"}))
		}, logged: []string{"reason=no-auth", "spiffe://corp.example/other"}},
		{name: "expired", send: func(b []byte) []byte {
			now := time.Now()
			return header(sign(edge, edgeID, delegation.Assertion{Binding: b, IssuedAt: now.Add(-2 * time.Minute), Expires: now.Add(-time.Minute)}))
		}, logged: []string{"reason=no-auth", "the assertion was valid until"}},
		{name: "of the future", send: func(b []byte) []byte {
			now := time.Now().Add(time.Hour)
			return header(sign(edge, edgeID, delegation.Assertion{Binding: b, IssuedAt: now, Expires: now.Add(time.Minute)}))
		}, logged: []string{"reason=no-auth", "the assertion is from"}},
		{name: "by another key", send: func(b []byte) []byte { return header(sign(front, edgeID, delegation.Assertion{Binding: b})) },
			logged: []string{"reason=no-auth", "not signed by the gateway's key"}},
		{name: "by another gateway", send: func(b []byte) []byte { return header(sign(front, frontID, delegation.Assertion{Binding: b})) },
			logged: []string{"reason=no-auth", "and the TLS session is of"}},
		{name: "of a trust domain that does not list it", send: func(b []byte) []byte {
			return header(sign(edge, edgeID, delegation.Assertion{Binding: b, Subject: "spiffe://partner.example/ns/a/sa/b"}))
		}, logged: []string{"reason=no-auth", "may name callers of the trust domains", "spiffe://partner.example/ns/a/sa/b"}},
		{name: "no assertion at all", send: func([]byte) []byte { return header("not-a-token") }, logged: []string{"reason=no-auth", "the assertion is not a JWS"}},
		{name: "from a client that is no gateway", by: front, send: func(b []byte) []byte {
			return header(sign(front, frontID, delegation.Assertion{Binding: b, Subject: "spiffe://corp.example/admin"}))
		}, logged: []string{"reason=no-auth", "may not send a PROXY header here", "peer=" + frontID}},
		{name: "a certificate, and no assertion", send: func([]byte) []byte { return header("") }, logged: []string{"reason=denied", "peer=" + edgeID, "source=198.51.100.9:1234"}},
		{name: "two assertions", send: func(b []byte) []byte {
			token := sign(edge, edgeID, delegation.Assertion{Binding: b})
			return raw("\x02shop.example.com", "\xe1"+token, "\xe1"+token)
		}, logged: []string{"reason=bad-preamble", "value 0xe1 is repeated"}},
		{name: "no name", send: func(b []byte) []byte { return raw("\xe1" + sign(edge, edgeID, delegation.Assertion{Binding: b})) },
			logged: []string{"reason=no-sni", "the header has no authority", "peer=" + frontID}},
		{name: "no name of a service", send: func(b []byte) []byte {
			return raw("\x02nobody.example.com", "\xe1"+sign(edge, edgeID, delegation.Assertion{Binding: b}))
		}, logged: []string{"reason=no-route", "nobody.example.com"}},
		{name: "version 1", send: func([]byte) []byte { return []byte("PROXY TCP4 198.51.100.7 192.0.2.1 1 443\r\n") }, logged: []string{"reason=bad-preamble", "a header of version 1"}},
		{name: "no header", send: func([]byte) []byte { return []byte("GET / HTTP/1.1\r\nHost: shop.example.com\r\n\r\n") }, logged: []string{"reason=bad-preamble", "begins like neither version"}},
		{name: "a health check", send: func([]byte) []byte { return []byte("\r\n\r\n\x00\r\nQUIT\n\x20\x00\x00\x00") }},
	} {
		t.Run(row.name, func(t *testing.T) {
			by := edge
			if row.by != nil {
				by = row.by
			}
			c, err := dial(at, "shop.internal", by.TLS)
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			cs := c.ConnectionState()
			binding, err := delegation.Binding(&cs)
			if err != nil {
				t.Fatal(err)
			}
			if _, err := c.Write(row.send(binding)); err != nil {
				t.Fatal(err)
			}
			got, _ := io.ReadAll(c)
			_ = c.Close() // for the log
			if string(got) != row.told {
				t.Errorf("the program was told %q, want %q", got, row.told)
			}
			if row.logged != nil {
				logged(t, row.logged...)
			}
		})
	}
	for _, r := range []*running{workload, outer} {
		if bytes.Contains([]byte(r.log.String()), []byte("eyJ")) {
			t.Error("an assertion is in the log")
		}
	}
}
