//go:build unix

package interop

import (
	"context"
	"crypto"
	"crypto/tls"
	"crypto/x509"
	"encoding/binary"
	"fmt"
	"io"
	"maps"
	"net"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"culvert.dev/connect/proxyproto"
	"culvert.dev/delegation"
	"culvert.dev/internal/testca"
	"culvert.dev/internal/testnet"
)

// Those on the way from a client to a service behind two gateways.
const (
	edgeID  = "spiffe://example.test/ns/edge/sa/gw"
	innerID = "spiffe://example.test/ns/inner/sa/gw"
	shopID  = "spiffe://example.test/ns/shop/sa/svc"
)

// A delegationWorld has two gateways, of which the first one ends the TLS of clients, and
// services that end the TLS of the second one.
type delegationWorld struct {
	*world
	roots       *x509.CertPool
	inner, edge *testca.Pair
	other       *testca.Pair // of the same CA, and no gateway
}

func newDelegationWorld(t *testing.T) *delegationWorld {
	t.Helper()
	w := newWorld(t)
	ca, err := testca.Load(w.dir, nil)
	must(t, err)
	d := &delegationWorld{world: w, roots: ca.Pool()}
	gateway := func(name, id string) *testca.Pair {
		return issue(t, ca, w.dir, name, testca.Options{SPIFFEID: id, DNSNames: []string{"go.test", "node.test", "java.test", "haproxy.test", "program.test"}, IPs: []net.IP{net.IPv4(127, 0, 0, 1)}})
	}
	d.edge, d.inner, d.other = gateway("edge", edgeID), gateway("inner", innerID), gateway("other", "spiffe://example.test/ns/a/sa/other")
	return d
}

// goService is a service with package delegation.
func (d *delegationWorld) goService(t *testing.T) (addr string) {
	t.Helper()
	v := &delegation.Verifier{Audience: []string{shopID}, Gateways: []delegation.Gateway{{ID: innerID, Roots: d.roots}}}
	ln := v.Listener(tls.NewListener(testnet.Listen(t), &tls.Config{Certificates: []tls.Certificate{d.service.TLS}, ClientAuth: tls.RequireAnyClientCert}))
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			_ = c.SetDeadline(time.Now().Add(patience))
			if a, err := c.(*delegation.Conn).Assertion(); err == nil {
				_, _ = fmt.Fprintf(c, "%s by %s through %s\n", a.Subject, a.Method, a.Actors)
			}
			_ = c.Close()
		}
	}()
	t.Cleanup(func() {
		_ = ln.Close()
		<-done
	})
	return ln.Addr().String()
}

// nodeService is one with Node.js and jose.
func (d *delegationWorld) nodeService(t *testing.T, modules string) (addr string, p *process) {
	t.Helper()
	port := freePort(t)
	p = start(t, "node", "testdata/delegation/service.mjs", modules, port, d.ca, d.svcCert, d.svcKey, shopID, innerID)
	p.says(t, "listening")
	return "127.0.0.1:" + port, p
}

// javaService is one with what Java has.
func (d *delegationWorld) javaService(t *testing.T) (addr string, p *process) {
	t.Helper()
	port := freePort(t)
	p = start(t, "java", "-Xshare:auto", "-XX:TieredStopAtLevel=1", "testdata/delegation/Service.java", port, d.ca, d.svcCert, d.svcKey, shopID, innerID)
	p.says(t, "listening")
	return "127.0.0.1:" + port, p
}

// haproxyService ends the TLS of the gateway alone, finds who calls, and passes the stream on to
// a frontend that answers with what the header says.
func (d *delegationWorld) haproxyService(t *testing.T) (addr string, p *process) {
	t.Helper()
	addr, inside := "127.0.0.1:"+freePort(t), "127.0.0.1:"+freePort(t)
	lua, err := filepath.Abs("testdata/delegation/caller.lua")
	must(t, err)
	p = start(t, "haproxy", "-db", "-f", d.write(t, "haproxy.cfg", fmt.Sprintf(`global
	lua-load %s
	log stdout format raw local0
defaults
	timeout connect 5s
	timeout client 20s
	timeout server 20s
frontend tls
	mode tcp
	log global
	log-format "caller %%[var(txn.caller)] through %%[ssl_c_s_dn(CN)]"
	bind %s ssl crt %s ca-file %s verify optional
	tcp-request inspect-delay 10s
	tcp-request content reject unless { ssl_c_used } { ssl_c_s_dn(CN) gw }
	tcp-request content lua.caller
	tcp-request content reject if { var(txn.caller) -m found } ! { var(txn.caller) -m beg spiffe://example.test/ns/shop/ }
	tcp-request content accept if { var(txn.caller) -m found }
	tcp-request content reject if WAIT_END
	default_backend inside
backend inside
	mode tcp
	server inside %s
frontend inside
	mode http
	bind %s accept-proxy
	http-request deny unless { fc_pp_authority haproxy.test }
	http-request return status 200 content-type text/plain lf-string "hello %%[src], who asked for %%[fc_pp_authority]\n"
`, lua, addr, d.write(t, "haproxy.pem", string(d.service.CertPEM)+string(d.service.KeyPEM)), d.ca, inside, inside)))
	p.listens(t, inside)
	return addr, p
}

// ask calls a service by the first gateway, as the client, and returns its answer.
func (d *delegationWorld) ask(t *testing.T, addr, name, say string) string {
	t.Helper()
	dialer := &tls.Dialer{Config: &tls.Config{Certificates: []tls.Certificate{d.client.TLS}, ServerName: name, InsecureSkipVerify: true}}
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	c, err := dialer.DialContext(ctx, "tcp", addr)
	must(t, err)
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(patience))
	_, _ = io.WriteString(c, say)
	out, _ := io.ReadAll(c)
	return string(out)
}

// A service behind two gateways, of which the first one has ended the client's TLS, proves who
// calls and through whom, in Go, in Node.js with jose, in Java and in HAProxy. The logs of both
// gateways and explain say the same. What is forged is refused by each.
func TestServicesProveWhoCalls(t *testing.T) {
	d := newDelegationWorld(t)
	services := map[string]string{"go.test": d.goService(t)}
	java, javaLog := d.javaService(t)
	services["java.test"] = java
	haproxy, haproxyLog := d.haproxyService(t)
	services["haproxy.test"] = haproxy
	var nodeLog *process
	if modules, ok := tokenPeers(t); ok {
		services["node.test"], nodeLog = d.nodeService(t, modules)
	}
	inner, edge := "", ""
	for _, name := range []string{"go.test", "node.test", "java.test", "haproxy.test"} {
		to := services[name]
		if to == "" {
			continue
		}
		inner += fmt.Sprintf(`  - name: %s
    ports: [443]
    endpoints: [%q]
    tls: {serverName: %s, sans: [%q], key: gw, trust: example.test}
    forwardIdentity: {assertion: true}
`, name, to, svc, shopID)
		edge += fmt.Sprintf("  - {name: %s, ports: [443], via: [{hbone: %%[1]q, key: gw, trust: example.test, peers: [%q], forwardIdentity: true}]}\n", name, innerID)
	}
	names := strings.Join(slices.Sorted(maps.Keys(services)), ", ")
	second := startGateway(t, "--config", d.write(t, "inner.yaml", fmt.Sprintf(`cluster: inner
listeners:
  - {address: "127.0.0.1:%s", tls: {key: gw, trust: example.test, protocols: [hbone]}}
admin: 127.0.0.1:%s
identity:
  keys: {gw: {certificateFile: inner.crt, keyFile: inner.key}}
  trust: {example.test: {caFile: ca.crt, delegates: [%q]}}
services:
%spolicies:
  - name: web
    action: allow
    targets: {names: ["*.test"]}
    rules: [{sources: [{spiffe: [%q], actors: [%q]}]}]
`, freePort(t), freePort(t), edgeID, inner, clientID, edgeID)))
	first := startGateway(t, "--config", d.write(t, "edge.yaml", fmt.Sprintf(`cluster: edge
listeners:
  - {address: "127.0.0.1:%s", protocols: [sni], tls: {key: gw, names: [%s], trust: example.test, protocols: [tcp]}}
admin: 127.0.0.1:%s
identity:
  keys: {gw: {certificateFile: edge.crt, keyFile: edge.key}}
  trust: {example.test: {caFile: ca.crt}}
services:
%s`, freePort(t), names, freePort(t), fmt.Sprintf(edge, second.addr))))

	want := fmt.Sprintf("%s by mtls through [%s %s]\n", clientID, innerID, edgeID)
	for name := range services {
		say := ""
		if name == "haproxy.test" {
			want, say := "who asked for haproxy.test", "GET / HTTP/1.1\r\nHost: haproxy.test\r\nConnection: close\r\n\r\n"
			if got := d.ask(t, first.addr, name, say); !strings.Contains(got, want) {
				t.Errorf("%s: got %q, want %q", name, got, want)
			}
			haproxyLog.says(t, "caller "+clientID+" through gw")
			continue
		}
		if got := d.ask(t, first.addr, name, say); got != want {
			t.Errorf("%s: called by %q, want %q", name, got, want)
		}
	}
	for name := range services {
		first.line(t, "logged the caller of "+name, func(l line) bool { return l.Service == name && l.Peer == clientID && l.Out > 0 })
		second.line(t, "logged the caller of "+name, func(l line) bool { return l.Service == name && l.Peer == clientID && l.Out > 0 })
		out, errs, code := command(t, "culvert", "explain", name+":443", "--proto", "hbone", "--as", clientID, "--actor", edgeID, "--admin", second.admin)
		if code != 0 || !strings.Contains(out, "allowed by web") || !strings.Contains(out, "with an assertion for "+shopID) || !strings.Contains(out, "caller:  "+clientID+", by "+edgeID+"\n") {
			t.Errorf("explain %s: exit code %d, %q, %s", name, code, out, errs)
		}
	}
	if !strings.Contains(second.output(), `"actor":"`+edgeID+`"`) {
		t.Error("the log of the second gateway does not name the first one")
	}
	if strings.Contains(first.output()+second.output(), "eyJ") {
		t.Error("an assertion is in a log")
	}

	// What is forged, by one who has the key of a gateway, or another's.
	sign := func(by *testca.Pair, id string, a delegation.Assertion) string {
		s, err := delegation.NewSigner(id, by.TLS.PrivateKey.(crypto.Signer), nil)
		must(t, err)
		a.Method = "mtls"
		if a.Subject == "" {
			a.Subject = clientID
		}
		if a.Audience == "" {
			a.Audience = shopID
		}
		token, err := s.Sign(&a)
		must(t, err)
		return token
	}
	const javaOnSessions = "of another TLS session" // which it knows if it has an exporter
	now := time.Now()
	for _, row := range []struct {
		name       string
		by         *testca.Pair
		token      func(binding []byte) []string
		node, java string // what they say, "" for nothing; Java may have no exporter
	}{
		{"true", d.inner, func(b []byte) []string { return []string{sign(d.inner, innerID, delegation.Assertion{Binding: b})} }, "", ""},
		{"of another session", d.inner, func(b []byte) []string {
			return []string{sign(d.inner, innerID, delegation.Assertion{Binding: append([]byte("x"), b[1:]...)})}
		}, "of another TLS session", javaOnSessions},
		{"for another service", d.inner, func(b []byte) []string {
			return []string{sign(d.inner, innerID, delegation.Assertion{Binding: b, Audience: "spiffe://example.test/other"})}
		}, `unexpected "aud" claim value`, "for another service"},
		{"expired", d.inner, func(b []byte) []string {
			return []string{sign(d.inner, innerID, delegation.Assertion{Binding: b, IssuedAt: now.Add(-2 * time.Hour), Expires: now.Add(-2*time.Hour + time.Minute)})}
		}, `"exp" claim timestamp check failed`, "out of its time"},
		{"of the future", d.inner, func(b []byte) []string {
			return []string{sign(d.inner, innerID, delegation.Assertion{Binding: b, IssuedAt: now.Add(time.Hour), Expires: now.Add(time.Hour + time.Minute)})}
		}, `"iat" claim timestamp check failed`, "out of its time"},
		{"by another key", d.inner, func(b []byte) []string { return []string{sign(d.other, innerID, delegation.Assertion{Binding: b})} },
			"signature verification failed", "not by the gateway's key"},
		{"by another gateway", d.edge, func(b []byte) []string { return []string{sign(d.edge, edgeID, delegation.Assertion{Binding: b})} },
			"is not the gateway", "is not the gateway"},
		{"in the name of another", d.inner, func(b []byte) []string { return []string{sign(d.inner, edgeID, delegation.Assertion{Binding: b})} },
			`unexpected "iss" claim value`, "of another gateway"},
		{"missing", d.inner, func([]byte) []string { return nil }, "there is no assertion", "there is no assertion"},
		{"twice", d.inner, func(b []byte) []string {
			token := sign(d.inner, innerID, delegation.Assertion{Binding: b})
			return []string{token, token}
		}, "there are two assertions", "there are two assertions"},
		{"none", d.inner, func([]byte) []string { return []string{"a.b"} }, "Invalid Compact JWS", "is not a JWS"},
	} {
		for name, to := range services {
			if name == "haproxy.test" {
				continue // it believes the gateway's session
			}
			t.Run(row.name+", "+name, func(t *testing.T) {
				c, err := tls.DialWithDialer(&net.Dialer{Timeout: patience}, "tcp", to, &tls.Config{Certificates: []tls.Certificate{row.by.TLS}, InsecureSkipVerify: true})
				must(t, err)
				defer c.Close()
				_ = c.SetDeadline(time.Now().Add(patience))
				cs := c.ConnectionState()
				binding, err := delegation.Binding(&cs)
				must(t, err)
				_, _ = c.Write(headerOf(t, row.token(binding)...))
				got, _ := io.ReadAll(c)
				_ = c.Close() // Java waits for that before it says anything
				switch {
				case row.node == "":
					if want := fmt.Sprintf("%s by mtls through [%s]\n", clientID, innerID); string(got) != want {
						t.Errorf("got %q, want %q", got, want)
					}
					return
				case name == "java.test" && row.java == javaOnSessions && strings.Contains(javaLog.output(), "without an exporter"):
					if len(got) == 0 {
						t.Error("it is refused, and the guide says that Java cannot know it")
					}
					return
				case len(got) > 0:
					t.Errorf("got %q, want it refused", got)
				}
				if name == "node.test" {
					nodeLog.says(t, row.node)
				}
				if name == "java.test" {
					javaLog.says(t, row.java)
				}
			})
		}
	}
}

// HAProxy decides by the certificate of the TLS session that a header is in, and by the name in the
// header: only the gateway is heard, and it reaches only what the frontend is for.
func TestHAProxyDecidesBySessionAndHeader(t *testing.T) {
	d := newDelegationWorld(t)
	addr, _ := d.haproxyService(t)
	for _, row := range []struct {
		name, authority string
		by              []tls.Certificate
		want            string // the status line; "" where it is not heard
	}{
		{"the gateway", "haproxy.test", []tls.Certificate{d.inner.TLS}, "HTTP/1.1 200 "},
		{"the gateway, for another name", svc, []tls.Certificate{d.inner.TLS}, "HTTP/1.1 403 "},
		{"a client without a certificate", "haproxy.test", nil, ""},
		{"a client with its own certificate", "haproxy.test", []tls.Certificate{d.client.TLS}, ""},
	} {
		t.Run(row.name, func(t *testing.T) {
			c, err := tls.DialWithDialer(&net.Dialer{Timeout: patience}, "tcp", addr, &tls.Config{Certificates: row.by, InsecureSkipVerify: true})
			must(t, err)
			defer c.Close()
			_ = c.SetDeadline(time.Now().Add(patience))
			h := proxyproto.Header{Version: 2, Authority: row.authority, Caller: clientID,
				Source: netip.MustParseAddrPort("198.51.100.9:1234"), Destination: netip.MustParseAddrPort("192.0.2.1:443")}
			b, err := h.Append(nil)
			must(t, err)
			_, _ = c.Write(append(b, "GET / HTTP/1.1\r\nHost: haproxy.test\r\nConnection: close\r\n\r\n"...))
			got, _ := io.ReadAll(c)
			if row.want == "" && len(got) > 0 || !strings.HasPrefix(string(got), row.want) {
				t.Errorf("got %q, want %q", got, row.want)
			}
		})
	}
}

// headerOf returns a PROXY header with those assertions.
func headerOf(t *testing.T, tokens ...string) []byte {
	t.Helper()
	h := proxyproto.Header{Version: 2, Authority: svc, Caller: clientID, SSL: &proxyproto.SSL{Certificate: true, Session: true, Verified: true, CN: "web"}}
	b, err := h.Append(nil)
	must(t, err)
	b = b[:len(b)-7]                                                // without the checksum
	b = append(append(b, 0xe0, 0x04, 0x00), make([]byte, 1<<10)...) // so that it takes several records
	for _, token := range tokens {
		b = append(b, delegation.TLV)
		b = binary.BigEndian.AppendUint16(b, uint16(len(token)))
		b = append(b, token...)
	}
	binary.BigEndian.PutUint16(b[14:], uint16(len(b)-16))
	return b
}

// HAProxy, which has ended the TLS of a client and verified its certificate, says so in its
// header. That is no identity here: policies that ask for one refuse the client, by whatever
// name HAProxy has for it, and so they do where it has none.
func TestCertificatesThatHAProxyHasVerifiedAreNobody(t *testing.T) {
	w := newWorld(t)
	banner := testnet.Greeting(t, "welcome\n")
	g := startProxied(t, w, "    protocols: [proxy]\n", service(svc, banner.Addr())+service("open.example.test", banner.Addr())+`policies:
  - name: web
    action: allow
    targets: {names: [`+svc+`]}
    rules: [{sources: [{spiffe: ["spiffe://example.test/*"]}, {users: [web, "uri:`+clientID+`"]}]}]
`)
	addr := "127.0.0.1:" + freePort(t)
	w.haproxy(t, addr, fmt.Sprintf("listen f\n\tbind %s ssl crt %s ca-file %s verify optional\n\tserver g %s send-proxy-v2-ssl-cn proxy-v2-options ssl,cert-cn,authority,crc32c\n",
		addr, w.write(t, "both.pem", string(w.service.CertPEM)+string(w.service.KeyPEM)), w.ca, g.addr))
	ask := func(name string, own ...tls.Certificate) string {
		c, err := tls.DialWithDialer(&net.Dialer{Timeout: patience}, "tcp", addr, &tls.Config{ServerName: name, Certificates: own, InsecureSkipVerify: true})
		must(t, err)
		defer c.Close()
		_ = c.SetDeadline(time.Now().Add(patience))
		b := make([]byte, len("welcome\n"))
		n, _ := io.ReadFull(c, b)
		return string(b[:n])
	}
	for _, own := range [][]tls.Certificate{{w.client.TLS}, nil} {
		if got := ask(svc, own...); got != "" {
			t.Errorf("%d certificates: got %q, want nothing", len(own), got)
		}
		if got := ask("open.example.test", own...); got != "welcome\n" {
			t.Errorf("%d certificates: got %q from a service for everybody", len(own), got)
		}
	}
	g.line(t, "refused by the policy", func(l line) bool { return l.Target == svc && l.Reason == "denied" })
	for _, l := range g.lines() {
		if l.Peer != "" {
			t.Errorf("the gateway has a name for a client that it has not verified: %+v", l)
		}
	}
}
