package command

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"crypto"
	"crypto/ed25519"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/crypto/ssh"

	"culvert.dev/connect"
	"culvert.dev/connect/h2"
	"culvert.dev/connect/h3"
	"culvert.dev/connect/proxyproto"
	"culvert.dev/connect/socks5"
	"culvert.dev/connect/ws"
	"culvert.dev/delegation"
	"culvert.dev/internal/testca"
	"culvert.dev/internal/testnet"
	"culvert.dev/tunnel"
)

// Services of TestPROXYHeadersOfClientsNameNobody.
const (
	shopName  = "shop.example.com"  // is told of its caller inside TLS, with an assertion
	passName  = "pass.example.com"  // ends the client's TLS itself, and is told before that
	adminName = "admin.example.com" // is for adminID alone
)

// listeningServices are programs behind one gateway, which say what they are told of a caller, and
// echo what follows that.
type listeningServices struct {
	inTLS, beforeTLS *testnet.Server
	calls            atomic.Int64
	heard            chan proxyproto.Header // what the service inside TLS was told last
}

func startListeningServices(t *testing.T, ca *testca.CA, own tls.Certificate) *listeningServices {
	t.Helper()
	s := &listeningServices{heard: make(chan proxyproto.Header, 1)}
	v := &delegation.Verifier{Audience: []string{shopID}, Gateways: []delegation.Gateway{{ID: edgeID, Roots: ca.Pool()}}}
	s.inTLS = testnet.ServeTLS(t, &tls.Config{Certificates: []tls.Certificate{own}, ClientAuth: tls.RequireAnyClientCert}, func(c *tls.Conn) {
		s.calls.Add(1)
		h, err := readPROXY(c)
		if err != nil {
			return
		}
		select {
		case <-s.heard:
		default:
		}
		s.heard <- h
		proven := ""
		if h.Assertion != "" {
			cs := c.ConnectionState()
			if a, err := v.Verify(h.Assertion, &cs); err != nil {
				proven = err.Error()
			} else {
				proven = a.Subject
			}
		}
		tellAndEcho(c, &h, proven)
	})
	s.beforeTLS = testnet.Serve(t, func(c net.Conn) {
		s.calls.Add(1)
		if h, err := readPROXY(c); err == nil {
			tellAndEcho(tls.Server(c, &tls.Config{Certificates: []tls.Certificate{own}}), &h, "")
		}
	})
	return s
}

// tellAndEcho says in a line what the header h says, and echoes what c says.
func tellAndEcho(c net.Conn, h *proxyproto.Header, proven string) {
	_ = c.SetDeadline(time.Now().Add(patience))
	certificate := ""
	if h.SSL != nil && (h.SSL.ClientCertificate != nil || h.SSL.CN != "" || h.SSL.Verified) {
		certificate = "unknown"
		if leaf, err := x509.ParseCertificate(h.SSL.ClientCertificate); err == nil && len(leaf.URIs) == 1 {
			certificate = leaf.URIs[0].String()
		}
	}
	if _, err := fmt.Fprintln(c, toldOf(h.Caller, proven, certificate)); err == nil {
		_, _ = io.Copy(c, c)
	}
}

// toldOf is what a service says that it is told of a caller.
func toldOf(caller, proven, certificate string) string {
	return fmt.Sprintf("the caller is %q, proven is %q, and the certificate is that of %q", caller, proven, certificate)
}

// opening opens connections to a listener, whatever address is asked for. Each begins with first.
// With tls, TLS is next, for the name that is asked for.
type opening struct {
	network, addr string
	first         []byte
	tls           *tls.Config
}

func (o *opening) DialContext(ctx context.Context, _, to string) (net.Conn, error) {
	var d net.Dialer
	c, err := d.DialContext(ctx, o.network, o.addr)
	if err != nil {
		return nil, err
	}
	_ = c.SetDeadline(time.Now().Add(patience))
	if _, err := c.Write(o.first); err != nil {
		_ = c.Close()
		return nil, err
	}
	if o.tls == nil {
		return c, nil
	}
	config := o.tls.Clone()
	config.ServerName, _, _ = net.SplitHostPort(to)
	secure := tls.Client(c, config)
	if err := secure.HandshakeContext(ctx); err != nil {
		_ = c.Close()
		return nil, err
	}
	return secure, nil
}

// newSSHKey returns a key of Ed25519.
func newSSHKey(t *testing.T) ed25519.PrivateKey {
	t.Helper()
	_, key, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	return key
}

// An sshDialer opens a channel of a connection of its own.
type sshDialer struct {
	by  *opening
	key ssh.Signer
}

func (d *sshDialer) DialContext(ctx context.Context, network, to string) (net.Conn, error) {
	c, err := d.by.DialContext(ctx, network, to)
	if err != nil {
		return nil, err
	}
	_ = c.SetDeadline(time.Now().Add(patience))
	conn, channels, requests, err := ssh.NewClientConn(c, d.by.addr, &ssh.ClientConfig{
		User: adminID, Auth: []ssh.AuthMethod{ssh.PublicKeys(d.key)}, HostKeyCallback: ssh.InsecureIgnoreHostKey(),
	})
	if err != nil {
		_ = c.Close()
		return nil, err
	}
	client := ssh.NewClient(conn, channels, requests)
	channel, err := client.DialContext(ctx, network, to)
	if err != nil {
		_ = client.Close()
		return nil, err
	}
	return &sshChannel{channel, client}, nil
}

// An sshChannel is the one channel of its connection, which Close closes.
type sshChannel struct {
	net.Conn
	client *ssh.Client
}

func (c *sshChannel) Close() error { return c.client.Close() }

// Clients send PROXY headers that say who they are, to each kind of listener: in front of what the
// listener expects, inside TLS that ends there, and inside of tunnels. They have heard an
// assertion in another session, or make one up; they name another's certificate and id. No policy
// and no line of the log believes that, and a service that is told of its callers hears of the true
// one or of nobody. Where a listener takes headers from the client, its address is believed and no
// more.
func TestPROXYHeadersOfClientsNameNobody(t *testing.T) {
	ca := newTestCA(t, "corp.example")
	issue := func(id string) *testca.Pair {
		t.Helper()
		pair, err := ca.Issue(testca.Options{SPIFFEID: id, DNSNames: []string{shopName, passName, adminName}, IPs: []net.IP{net.IPv4(127, 0, 0, 1)}})
		if err != nil {
			t.Fatal(err)
		}
		return pair
	}
	edge, front, admin, shop := issue(edgeID), issue(frontID), issue(adminID), issue(shopID)
	services := startListeningServices(t, ca, shop.TLS)
	hostKey, key := newSSHKey(t), newSSHKey(t)
	alice, err := ssh.NewSignerFromKey(key)
	if err != nil {
		t.Fatal(err)
	}
	block, err := ssh.MarshalPrivateKey(hostKey, "")
	if err != nil {
		t.Fatal(err)
	}
	start := func(t *testing.T, listener string) *running {
		t.Helper()
		return startFile(t, map[string]string{
			"tokens.txt": "ci:" + digestOf("t-one") + "\n", "host.key": string(pem.EncodeToMemory(block)),
			"keys":    strings.TrimSpace(string(ssh.MarshalAuthorizedKey(alice.PublicKey()))) + " alice\n",
			"own.crt": string(edge.CertPEM), "own.key": string(edge.KeyPEM), "ca.pem": string(ca.CertPEM),
			"culvert.yaml": fmt.Sprintf(`listeners: [%s]
identity:
  keys: {own: {certificateFile: own.crt, keyFile: own.key}}
  trust: {corp.example: {caFile: ca.pem, delegates: [%q]}}
services:
  - name: shop.example.com
    ports: [443]
    endpoints: [%[3]q]
    tls: {serverName: 127.0.0.1, sans: [%[4]q], key: own, trust: corp.example}
    forwardIdentity: {assertion: true}
  - {name: admin.example.com, ports: [443], endpoints: [%[3]q], tls: {serverName: 127.0.0.1, sans: [%[4]q], key: own, trust: corp.example}, forwardIdentity: {assertion: true}}
  - {name: pass.example.com, ports: [443], endpoints: [%[5]q], forwardIdentity: {position: beforeTLS, trustNetwork: true}}
policies:
  - name: admins
    action: allow
    targets: {names: [admin.example.com]}
    rules: [{sources: [{spiffe: [%[6]q]}]}]
`, listener, innerID, services.inTLS.Addr(), shopID, services.beforeTLS.Addr(), adminID)})
	}
	shown := func(own ...tls.Certificate) *tls.Config {
		return &tls.Config{Certificates: own, InsecureSkipVerify: true}
	}
	const (
		inTLS    = `{address: "127.0.0.1:1", tls: {key: own, trust: corp.example, clientCertificates: optional, protocols: [%s]}}`
		byToken  = `{address: "127.0.0.1:1", protocols: [%s], auth: {tokensFile: tokens.txt}}`
		bySSHKey = `{address: "127.0.0.1:1", protocols: [ssh], ssh: {hostKeyFile: host.key, authorizedKeysFile: keys}%s}`
		tcp      = `{address: "127.0.0.1:1", protocols: [sni], tls: {key: own, trust: corp.example, names: [shop.example.com, admin.example.com], clientCertificates: optional, protocols: [tcp]}%s}`
	)

	// The true admin calls, and somebody hears what the service is told of that.
	var heard proxyproto.Header
	gw := start(t, fmt.Sprintf(tcp, ""))
	testnet.Eventually(t, patience, func() bool {
		line, c := ask(t, &opening{network: "tcp", addr: gw.addrs[0], tls: shown(admin.TLS)}, shopName)
		if c == nil {
			return false // the gateway has not read its files yet
		}
		_ = c.Close()
		if want := toldOf(adminID, adminID, adminID); line != want {
			t.Errorf("of the admin the service says %q, want %q", line, want)
		}
		heard = <-services.heard
		return true
	}, "the admin reaches the service")

	forger, err := delegation.NewSigner(frontID, front.TLS.PrivateKey.(crypto.Signer), nil)
	if err != nil {
		t.Fatal(err)
	}
	forged, err := forger.Sign(&delegation.Assertion{Subject: adminID, Method: "mtls", Audience: shopID, Binding: make([]byte, 32)})
	if err != nil {
		t.Fatal(err)
	}
	lies := map[string]proxyproto.Header{
		"heard": heard,
		"made up": {Version: 2, Assertion: forged, Caller: adminID, Source: netip.MustParseAddrPort("198.51.100.9:1234"), Destination: netip.MustParseAddrPort("192.0.2.1:443"),
			SSL: &proxyproto.SSL{Certificate: true, Session: true, Verified: true, Version: "TLSv1.3", CN: "admin", ClientCertificate: admin.TLS.Certificate[0]}},
	}
	lie := func(t *testing.T, h proxyproto.Header, name string) []byte {
		t.Helper()
		h.Authority = name
		b, err := h.Append(nil)
		if err != nil {
			t.Fatal(err)
		}
		if said, _, err := proxyproto.Parse(b); err != nil || said.Caller != adminID || said.Assertion == "" || said.SSL == nil || said.SSL.ClientCertificate == nil {
			t.Fatalf("the lie is no lie: %+v, %v", said, err)
		}
		return b
	}

	own := fmt.Sprintf("uid:%d", os.Getuid())
	direct := func(o *opening) tunnel.Dialer { return o }
	byConnect := func(o *opening) tunnel.Dialer { return &connect.Dialer{Proxy: o.addr, Dialer: o} }
	byH2 := func(o *opening) tunnel.Dialer { return &h2.Dialer{Proxy: o.addr, Dialer: o} }
	byWebSocket := func(o *opening) tunnel.Dialer { return &ws.Dialer{URL: "ws://127.0.0.1/", Dialer: o} }
	bySOCKS := func(o *opening) tunnel.Dialer { return &socks5.Dialer{Proxy: o.addr, Dialer: o} }
	bearer := connect.BearerCredentials("t-one")
	bySSH := func(o *opening) tunnel.Dialer { return &sshDialer{o, alice} }
	byH3 := func(o *opening) tunnel.Dialer { return &h3.Dialer{Proxy: o.addr, TLS: o.tls} }
	for _, row := range []struct {
		name, listener string
		network        string                         // "" means "tcp"
		tls            *tls.Config                    // that the client opens to the gateway, or to the service
		ask            func(o *opening) tunnel.Dialer // asks for services; nil where nobody may
		service        string                         // "" means shopName
		one            bool                           // the listener leads to one service alone

		inFront string // the reason for which a header in front of everything is refused; "" means that it is not
		inside  string // and inside TLS that ends at the gateway
		trusts  bool   // the listener takes headers from the client, and each call needs one

		caller, certificate string // that the gateway knows of and tells
	}{
		{name: "sni", listener: `{address: "127.0.0.1:1", protocols: [sni]}`, tls: shown(front.TLS), ask: direct, service: passName, inFront: "bad-preamble"},
		{name: "connect", listener: `{address: "127.0.0.1:1", protocols: [connect]}`, ask: byConnect, inFront: "bad-request"},
		{name: "connect-h2", listener: `{address: "127.0.0.1:1", protocols: [connect-h2]}`, ask: byH2, inFront: "bad-preamble"},
		{name: "websocket", listener: `{address: "127.0.0.1:1", protocols: [websocket]}`, ask: byWebSocket, inFront: "bad-request"},
		{name: "socks5", listener: `{address: "127.0.0.1:1", protocols: [socks5]}`, ask: bySOCKS, inFront: "bad-preamble"},
		{name: "all that can be detected", listener: `{address: "127.0.0.1:1", protocols: [sni, postgres, connect, connect-h2, websocket, socks5]}`, ask: byConnect, inFront: "bad-preamble"},
		{name: "one service", listener: `{address: "127.0.0.1:1", service: shop.example.com}`, ask: direct, one: true},
		{name: "a Unix socket", listener: fmt.Sprintf(`{address: "unix:%s", protocols: [connect], peerCredentials: true}`, filepath.Join(shortDir(t), "proxy.sock")), network: "unix", ask: byConnect, inFront: "bad-request", caller: own},

		{name: "connect with a token", listener: fmt.Sprintf(byToken, "connect"), ask: func(o *opening) tunnel.Dialer {
			return &connect.Dialer{Proxy: o.addr, Dialer: o, Authorization: bearer}
		}, inFront: "bad-request", caller: "ci"},
		{name: "connect-h2 with a token", listener: fmt.Sprintf(byToken, "connect-h2"), ask: func(o *opening) tunnel.Dialer {
			return &h2.Dialer{Proxy: o.addr, Dialer: o, Authorization: bearer}
		}, inFront: "bad-preamble", caller: "ci"},
		{name: "websocket with a token", listener: fmt.Sprintf(byToken, "websocket"), ask: func(o *opening) tunnel.Dialer {
			return &ws.Dialer{URL: "ws://127.0.0.1/", Dialer: o, Authorization: bearer}
		}, inFront: "bad-request", caller: "ci"},
		{name: "ssh", listener: fmt.Sprintf(bySSHKey, ""), ask: bySSH, inFront: "bad-preamble", caller: "alice"},

		{name: "connect in TLS", listener: fmt.Sprintf(inTLS, "connect"), tls: shown(front.TLS), ask: byConnect, inFront: "bad-preamble", inside: "bad-preamble", caller: frontID, certificate: frontID},
		{name: "connect-h2 in TLS", listener: fmt.Sprintf(inTLS, "connect-h2"), tls: shown(front.TLS), ask: byH2, inFront: "bad-preamble", inside: "bad-preamble", caller: frontID, certificate: frontID},
		{name: "websocket in TLS", listener: fmt.Sprintf(inTLS, "websocket"), tls: shown(front.TLS), ask: byWebSocket, inFront: "bad-preamble", inside: "bad-preamble", caller: frontID, certificate: frontID},
		{name: "socks5 in TLS", listener: fmt.Sprintf(inTLS, "socks5"), tls: shown(front.TLS), ask: bySOCKS, inFront: "bad-preamble", inside: "bad-preamble", caller: frontID, certificate: frontID},
		{name: "hbone", listener: `{address: "127.0.0.1:1", tls: {key: own, trust: corp.example, protocols: [hbone]}}`, tls: shown(front.TLS), ask: byH2, inFront: "bad-preamble", inside: "bad-preamble", caller: frontID, certificate: frontID},
		{name: "connect in TLS, without a certificate", listener: fmt.Sprintf(inTLS, "connect"), tls: shown(), ask: byConnect, inFront: "bad-preamble", inside: "bad-preamble"},
		{name: "tcp in TLS", listener: fmt.Sprintf(tcp, ""), tls: shown(front.TLS), ask: direct, inFront: "bad-preamble", caller: frontID, certificate: frontID},
		{name: "tcp in TLS, without a certificate", listener: fmt.Sprintf(tcp, ""), tls: shown(), ask: direct, inFront: "bad-preamble"},
		{name: "connect-h3", listener: `{address: "udp://127.0.0.1:1", tls: {key: own, trust: corp.example, clientCertificates: optional, protocols: [connect-h3]}}`, network: "udp", tls: shown(front.TLS), ask: byH3, caller: frontID, certificate: frontID},

		{name: "headers of gateways in TLS", listener: `{address: "127.0.0.1:1", tls: {key: own, trust: corp.example, protocols: [proxy]}}`, tls: shown(front.TLS), inFront: "bad-preamble", inside: "no-auth", caller: frontID},
		{name: "headers of others, and connect", listener: `{address: "127.0.0.1:1", protocols: [connect], proxyProtocol: {from: [192.0.2.0/24]}}`, inFront: "denied"},
		{name: "headers of others, and a name in them", listener: `{address: "127.0.0.1:1", protocols: [proxy], proxyProtocol: {from: [192.0.2.0/24]}}`, inFront: "denied"},
		{name: "headers of the client, and connect", listener: `{address: "127.0.0.1:1", protocols: [connect], proxyProtocol: {from: [127.0.0.0/8]}}`, ask: byConnect, trusts: true},
		{name: "headers of the client, and ssh", listener: fmt.Sprintf(bySSHKey, ", proxyProtocol: {from: [127.0.0.0/8]}"), ask: bySSH, trusts: true, caller: "alice"},
		{name: "headers of the client, and a name in them", listener: `{address: "127.0.0.1:1", protocols: [proxy], proxyProtocol: {from: [127.0.0.0/8]}}`, ask: direct, trusts: true},
		{name: "headers of the client, and tcp in TLS", listener: fmt.Sprintf(tcp, ", proxyProtocol: {from: [127.0.0.0/8]}"), tls: shown(front.TLS), ask: direct, trusts: true, caller: frontID, certificate: frontID},
		{name: "headers of the client, and tcp in TLS without a certificate", listener: fmt.Sprintf(tcp, ", proxyProtocol: {from: [127.0.0.0/8]}"), tls: shown(), ask: direct, trusts: true},
	} {
		t.Run(row.name, func(t *testing.T) {
			gw := start(t, row.listener)
			network, service := cmp.Or(row.network, "tcp"), cmp.Or(row.service, shopName)
			for i, name := range []string{"heard", "made up"} {
				h, n := lies[name], i+1 // lines of each kind
				calls := services.calls.Load()
				if network == "udp" {
					send(t, &opening{network: network, addr: gw.addrs[0]}, lie(t, h, service))
				}
				if row.inFront != "" {
					send(t, &opening{network: network, addr: gw.addrs[0]}, lie(t, h, service))
					gw.wantLines(t, n, "msg=refused", "reason="+row.inFront)
				}
				if row.inside != "" {
					send(t, &opening{network: network, addr: gw.addrs[0], tls: row.tls}, lie(t, h, service))
					gw.wantLines(t, n, "msg=refused", "reason="+row.inside)
				}
				if called := services.calls.Load() - calls; called != 0 {
					t.Errorf("%s: after the header in place of a request a service was called %d times, want never", name, called)
				}
				if row.ask == nil {
					continue
				}
				dialer := func(to string) tunnel.Dialer {
					o := &opening{network: network, addr: gw.addrs[0], tls: row.tls}
					if row.trusts {
						o.first = lie(t, h, to)
					}
					d := row.ask(o)
					if c, ok := d.(interface{ Close() error }); ok {
						t.Cleanup(func() { _ = c.Close() })
					}
					return d
				}
				var line string
				var c net.Conn
				testnet.Eventually(t, patience, func() bool { // the gateway may not have read its files yet
					line, c = ask(t, dialer(service), service, lie(t, h, service)...)
					return c != nil
				}, "%s: the service is reached", name)
				_ = c.Close()
				proven := row.caller
				if service != shopName {
					proven = ""
				}
				if want := toldOf(row.caller, proven, row.certificate); line != want {
					t.Errorf("%s: the service says that %s, want that %s", name, line, want)
				}
				words := []string{"msg=tunnel", "target=" + service}
				if row.trusts {
					words, n = append(words, "source="+h.Source.String()), 1
				}
				if row.caller != "" {
					words = append(words, "peer="+row.caller)
				}
				gw.wantLines(t, n, words...)
				if row.one {
					continue
				}
				calls = services.calls.Load()
				if line, c := ask(t, dialer(adminName), adminName); c != nil {
					_ = c.Close()
					t.Errorf("%s: the service of the admin is reached, and says that %s", name, line)
				}
				words[0], words[1] = "msg=refused", "target="+adminName
				gw.wantLines(t, n, append(words, "reason=denied", "policy=admins")...)
				if called := services.calls.Load() - calls; called != 0 {
					t.Errorf("%s: for a request that is denied a service was called %d times, want never", name, called)
				}
			}
			for l := range strings.Lines(gw.log.String()) {
				if strings.Contains(l, "peer=") && (row.caller == "" || !strings.Contains(l, "peer="+row.caller+" ")) || strings.Contains(l, adminID) || strings.Contains(l, "actor=") {
					t.Errorf("the log has somebody who was not there: %s", l)
				}
				if strings.Contains(l, "198.51.100.9") && !row.trusts {
					t.Errorf("the log has an address that is believed of the client: %s", l)
				}
				if strings.Contains(l, "eyJ") {
					t.Errorf("the log has an assertion: %s", l)
				}
			}
		})
	}
}

// shortDir returns a new folder for a Unix socket, whose path has a limit of 108 bytes.
func shortDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "culvert")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	return dir
}

// ask dials a service and returns the line that it says, and the connection; nil where it is not
// reached. After the line the client says rest, which comes back as it is.
func ask(t *testing.T, d tunnel.Dialer, service string, rest ...byte) (string, net.Conn) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	c, err := d.DialContext(ctx, "tcp", service+":443")
	if err != nil {
		return "", nil
	}
	_ = c.SetDeadline(time.Now().Add(patience))
	// In what the client says first, a service that is told of nobody may look for who that is.
	if _, err := c.Write(rest); err != nil {
		_ = c.Close()
		return "", nil
	}
	r := bufio.NewReader(c)
	line, err := r.ReadString('\n')
	if err != nil {
		_ = c.Close()
		return "", nil
	}
	back := make([]byte, len(rest))
	if _, err := io.ReadFull(r, back); err != nil || !bytes.Equal(back, rest) {
		t.Errorf("after its line the service has heard %q, %v, want what the client has said: %q", back, err, rest)
	}
	return strings.TrimSuffix(line, "\n"), c
}

// send opens a connection, sends a header and a request, and waits until the gateway has refused
// them. Over UDP it is one datagram, of which nothing is heard.
func send(t *testing.T, o *opening, header []byte) {
	t.Helper()
	c, err := o.DialContext(t.Context(), "tcp", "127.0.0.1:443")
	if err != nil && o.tls == nil {
		return // it is refused as it comes, which the log says
	}
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	_, _ = c.Write(append(header, "CONNECT shop.example.com:443 HTTP/1.1\r\nHost: shop.example.com:443\r\n\r\n"...)) // it may be refused before
	if o.network == "udp" {
		return
	}
	if said, _ := io.ReadAll(c); bytes.Contains(said, []byte("the caller is")) {
		t.Errorf("a service answers: %q", said)
	}
}

// wantLines waits for at least n lines of the log that have all of some words.
func (r *running) wantLines(t *testing.T, n int, words ...string) {
	t.Helper()
	testnet.Eventually(t, patience, func() bool {
		found := 0
		for line := range strings.Lines(r.log.String()) {
			if !slices.ContainsFunc(words, func(w string) bool { return !strings.Contains(line, w) }) {
				found++
			}
		}
		return found >= n
	}, "the log has %d lines with %q", n, words)
}
