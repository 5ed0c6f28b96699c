//go:build unix

package interop

import (
	"context"
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"log"
	"maps"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/netip"
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"culvert.dev/connect"
	"culvert.dev/connect/ws"
	"culvert.dev/internal/testca"
	"culvert.dev/internal/testnet"
	"culvert.dev/tunnel"
)

// A tokenKey signs tokens: by ES256, or by RS256.
type tokenKey struct{ crypto.Signer }

func newTokenKey(t *testing.T, alg string) tokenKey {
	t.Helper()
	if alg == "RS256" {
		k, err := rsa.GenerateKey(rand.Reader, 2048)
		must(t, err)
		return tokenKey{k}
	}
	k, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	must(t, err)
	return tokenKey{k}
}

// jwks returns the key as a JWK Set, with the id "k".
func (k tokenKey) jwks(t *testing.T) string {
	t.Helper()
	encode := base64.RawURLEncoding.EncodeToString
	jwk := map[string]string{"kid": "k"}
	switch p := k.Public().(type) {
	case *rsa.PublicKey:
		jwk["kty"], jwk["n"], jwk["e"] = "RSA", encode(p.N.Bytes()), encode(big.NewInt(int64(p.E)).Bytes())
	case *ecdsa.PublicKey:
		point, err := p.Bytes() // 4, x, y
		must(t, err)
		jwk["kty"], jwk["crv"], jwk["x"], jwk["y"] = "EC", "P-256", encode(point[1:33]), encode(point[33:])
	}
	out, err := json.Marshal(map[string]any{"keys": []any{jwk}})
	must(t, err)
	return string(out)
}

// token signs claims, which expire in an hour if they say nothing else.
func (k tokenKey) token(t *testing.T, encoding *base64.Encoding, header, claims map[string]any) string {
	t.Helper()
	h := map[string]any{"alg": "ES256", "kid": "k"}
	_, isRSA := k.Signer.(*rsa.PrivateKey)
	if isRSA {
		h["alg"] = "RS256"
	}
	c := map[string]any{"exp": time.Now().Add(time.Hour).Unix()}
	maps.Copy(h, header)
	maps.Copy(c, claims)
	parts := make([]string, 2)
	for i, part := range []any{h, c} {
		out, err := json.Marshal(part)
		must(t, err)
		parts[i] = encoding.EncodeToString(out)
	}
	signed := strings.Join(parts, ".")
	sum := sha256.Sum256([]byte(signed))
	if isRSA {
		sig, err := k.Sign(rand.Reader, sum[:], crypto.SHA256)
		must(t, err)
		return signed + "." + encoding.EncodeToString(sig)
	}
	r, s, err := ecdsa.Sign(rand.Reader, k.Signer.(*ecdsa.PrivateKey), sum[:])
	must(t, err)
	sig := make([]byte, 64)
	r.FillBytes(sig[:32])
	s.FillBytes(sig[32:])
	return signed + "." + encoding.EncodeToString(sig)
}

const loginIssuer = "https://login.example.com/"

// of returns a token of loginIssuer.
func (k tokenKey) of(t *testing.T, subject string) string {
	t.Helper()
	return k.token(t, base64.RawURLEncoding, nil, map[string]any{"iss": loginIssuer, "aud": "culvert", "sub": subject})
}

// nginxPooling ends TLS and keeps connections to the gateway, as far as it may.
func (w *world) nginxPooling(t *testing.T, gateway string) (addr string) {
	t.Helper()
	addr = "127.0.0.1:" + freePort(t)
	cert, key, _ := w.loadBalancer(t)
	w.runNginx(t, "nginx-pool", addr, "", fmt.Sprintf(`
	upstream gateway {
		server %[4]s;
		keepalive 8;
	}
	server {
		listen %[1]s ssl;
		ssl_certificate %[2]s;
		ssl_certificate_key %[3]s;
		location /edge/ {
			proxy_pass http://gateway;
			proxy_http_version 1.1;
			proxy_set_header Upgrade $http_upgrade;
			proxy_set_header Connection "upgrade";
			proxy_set_header X-Forwarded-For $proxy_add_x_forwarded_for;
		}
	}`, addr, cert, key, gateway))
	return addr
}

// haproxyPooling does the same. Its connections to the gateway are those of server, which may
// say HTTP/2.
func (w *world) haproxyPooling(t *testing.T, gateway, server string) (addr string) {
	t.Helper()
	addr = "127.0.0.1:" + freePort(t)
	_, _, pem := w.loadBalancer(t)
	conf := fmt.Sprintf(`global
	maxconn 200
defaults
	mode http
	timeout connect 20s
	timeout client 60s
	timeout server 60s
	timeout tunnel 60s
	option forwardfor
frontend lb
	bind %[1]s ssl crt %[2]s alpn h2,http/1.1
	default_backend gateway
backend gateway
	http-reuse always
	server gateway %[3]s %[4]s
`, addr, pem, gateway, server)
	start(t, "haproxy", "-db", "-f", w.write(t, "haproxy-pool.cfg", conf)).listens(t, addr)
	return addr
}

// Two clients with tokens of their own, and one whose token is wrong, come by one load balancer
// that ends TLS, at the same time and over connections that it shares among them. Each tunnel
// has the principal and the address of its own client, whatever that writes into the field
// of the load balancer. Mutual TLS with the service goes through.
func TestClientsBehindOneLoadBalancer(t *testing.T) {
	for name, before := range map[string]func(*world, *testing.T, string) string{
		"nginx":                   (*world).nginxPooling,
		"HAProxy":                 func(w *world, t *testing.T, to string) string { return w.haproxyPooling(t, to, "") },
		"HAProxy, HTTP/2 from it": func(w *world, t *testing.T, to string) string { return w.haproxyPooling(t, to, "proto h2") },
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			key := newTokenKey(t, "ES256")
			w.write(t, "jwks.json", key.jwks(t))
			g := startGateway(t, "--config", w.write(t, "behind.yaml", fmt.Sprintf(`
admin: 127.0.0.1:%s
identity:
  tokens: [{issuer: %q, audience: culvert, jwks: jwks.json}]
listeners:
  - address: 127.0.0.1:%s
    protocols: [connect-h2, websocket]
    websocket: {path: /edge/}
    loadBalancer: {from: [127.0.0.1/32]}
    auth: {issuers: [%[2]q]}
services:
%[4]s`, freePort(t), loginIssuer, freePort(t), service(svc, w.serveHTTPS(t, http.HandlerFunc(whoami))))))
			_, port, _ := net.SplitHostPort(before(w, t, g.addr))
			ca, err := testca.Load(w.dir, nil)
			must(t, err)
			dialer := func(from, token string) *ws.Dialer {
				return &ws.Dialer{
					URL: "wss://localhost:" + port + "/edge/", TLS: &tls.Config{RootCAs: ca.Pool()}, Authorization: connect.BearerCredentials(token),
					Dialer: &net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(from)}},
					Header: func(context.Context, string) (connect.Fields, error) {
						return connect.Fields{{Name: "X-Forwarded-For", Value: "203.0.113.66"}, {Name: "x-amzn-oidc-data", Value: key.of(t, "mallory")}}, nil
					},
				}
			}
			ask := func(d *ws.Dialer) (string, error) {
				client := http.Client{Timeout: patience, Transport: &http.Transport{DialContext: d.DialContext, TLSClientConfig: w.client.ClientConfig(svc), DisableKeepAlives: true}}
				resp, err := client.Get("https://" + svc + "/")
				if err != nil {
					return "", err
				}
				defer resp.Body.Close()
				body, err := io.ReadAll(resp.Body)
				return string(body), err
			}
			const each = 20
			people := map[string]string{"alice": "127.0.0.2", "bob": "127.0.0.3"}
			var all sync.WaitGroup
			for who, from := range people {
				right, wrong := dialer(from, key.of(t, who)), dialer(from, newTokenKey(t, "ES256").of(t, who))
				for range 4 {
					all.Go(func() {
						for range each / 4 {
							if got, err := ask(right); err != nil || !strings.Contains(got, "you are "+clientID) {
								t.Errorf("%s: got %q, %v; want it to name %s", who, got, err, clientID)
							}
							if c, err := wrong.DialContext(t.Context(), "tcp", svc+":443"); err == nil {
								_ = c.Close()
								t.Errorf("%s: a token of a wrong key was accepted", who)
							}
						}
					})
				}
			}
			all.Wait()
			for who, from := range people {
				g.await(t, fmt.Sprintf("logged at least %d tunnels of %s and as many refusals", each, who), func() bool {
					tunnels, refused := 0, 0
					for _, l := range g.lines() {
						if source, err := netip.ParseAddrPort(l.Source); err == nil && source.Addr().String() == from {
							switch {
							case l.Peer == who:
								tunnels++
							case l.Reason == "no-auth":
								refused++
							default:
								t.Fatalf("a request from %s: got %+v, want %s, or no-auth", from, l, who)
							}
						}
					}
					return tunnels >= each && refused >= each
				})
			}
			if out := g.output(); strings.Contains(out, "203.0.113.66") || strings.Contains(out, "mallory") {
				t.Error("the log has what clients wrote into fields that mean nothing")
			}
		})
	}
}

// A gateway whose token is in a file is the client of nginx, and sends it in a header of its own.
// The token expires under an open tunnel: that ends, at a listener that wants it so, and tunnels
// with the token that has taken its place go on.
func TestTokenOfGatewayRotatesBehindNginx(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	key := newTokenKey(t, "ES256")
	w.write(t, "jwks.json", key.jwks(t))
	const soon = 10 * time.Second
	token := func(subject string, lasts time.Duration) {
		t.Helper()
		exp := time.Now().Add(lasts).Unix() - 60 // clocks may be off by a minute
		w.write(t, "next.token", key.token(t, base64.RawURLEncoding, nil, map[string]any{"iss": loginIssuer, "aud": "culvert", "sub": subject, "exp": exp}))
		must(t, os.Rename(filepath.Join(w.dir, "next.token"), filepath.Join(w.dir, "west.token")))
	}
	token("west", soon)
	east := startGateway(t, "--config", w.write(t, "east.yaml", fmt.Sprintf(`
admin: 127.0.0.1:%s
identity:
  tokens: [{issuer: %q, audience: culvert, jwks: jwks.json}]
listeners:
  - address: 127.0.0.1:%s
    protocols: [websocket]
    websocket: {path: /edge/}
    endWithCredential: true
    loadBalancer: {from: [127.0.0.1/32], credentialsHeader: Culvert-Credentials}
    auth: {issuers: [%[2]q]}
services:
%[4]s`, freePort(t), loginIssuer, freePort(t), service(svc, testnet.Echo(t).Addr()))))
	west := startGateway(t, "--config", w.write(t, "west.yaml", fmt.Sprintf(`
admin: 127.0.0.1:%s
listeners:
  - {address: "127.0.0.1:%s", protocols: [connect]}
services:
  - name: %s
    ports: [443]
    via: [{websocket: "wss://%s/edge/", serverName: localhost, caFile: ca.crt, tokenFile: west.token, credentialsHeader: Culvert-Credentials}]
`, freePort(t), freePort(t), svc, w.nginxPooling(t, east.addr))))
	dial := func() (net.Conn, error) {
		return (&connect.Dialer{Proxy: west.addr}).DialContext(t.Context(), "tcp", svc+":443")
	}
	var first net.Conn
	testnet.Eventually(t, patience, func() (ok bool) {
		token("west", soon) // which may be over before it is shown, on a slow machine
		var err error
		first, err = dial()
		return err == nil
	}, "a tunnel by a token that expires soon")
	defer first.Close()
	token("west with the next token", time.Hour)
	testnet.Eventually(t, patience, func() bool { // the file is read again after a second
		if c, err := dial(); err == nil {
			_ = c.Close()
		}
		return slices.ContainsFunc(east.lines(), func(l line) bool { return l.Peer == "west with the next token" })
	}, "a tunnel by the next token")
	second, err := dial()
	must(t, err)
	defer second.Close()
	_ = first.SetReadDeadline(time.Now().Add(patience))
	if n, err := first.Read(make([]byte, 1)); n > 0 || err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("after its token has expired: got %d bytes and %v, want the tunnel ended", n, err)
	}
	east.line(t, "logged a tunnel that ended with its token", func(l line) bool { return l.Reason == "revoked" && l.Peer == "west" })
	_ = second.SetDeadline(time.Now().Add(patience))
	testnet.Ping(t, second, "by the token that is valid")
}

// A cloud is a load balancer that signs who has logged in, as one of the clouds does.
type cloud struct {
	section string // of the guide
	field   string // that it signs
	issuer  string // of the guide
	token   tokenKey
	sign    func(t *testing.T, key tokenKey, wrong string) string // wrong says what is not as it should be
	pass    func(h http.Header, client string)                    // writes who the client is
	wrong   []string
}

// The configurations of the guide do behind stand-ins, which sign as the load balancers of the clouds do,
// what the guide says.
func TestLoadBalancersOfClouds(t *testing.T) {
	text, err := os.ReadFile("../../docs/guides/behind-load-balancer.md")
	must(t, err)
	appended := func(h http.Header, client string) {
		h.Set("X-Forwarded-For", strings.TrimPrefix(h.Get("X-Forwarded-For")+", "+client, ", "))
	}
	signed := func(issuer, audience string) func(*testing.T, tokenKey, string) string {
		return func(t *testing.T, key tokenKey, wrong string) string {
			c := map[string]any{"iss": issuer, "aud": audience, "email": "alice@example.com", "sub": "1"}
			switch wrong {
			case "audience":
				c["aud"] = audience + "0"
			case "expired":
				c["exp"] = time.Now().Add(-time.Hour).Unix()
			}
			return key.token(t, base64.RawURLEncoding, nil, c)
		}
	}
	const signer = "arn:aws:elasticloadbalancing:eu-west-1:123456789012:loadbalancer/app/edge/0123456789abcdef"
	for _, c := range []cloud{
		{
			section: "## AWS", field: "x-amzn-oidc-data", issuer: "https://users.example.com/", token: newTokenKey(t, "ES256"), pass: appended,
			sign: func(t *testing.T, key tokenKey, wrong string) string {
				exp := time.Now().Add(2 * time.Minute).Unix()
				h := map[string]any{"typ": "JWT", "iss": "https://users.example.com/", "client": "the client id", "signer": signer, "exp": exp}
				switch wrong {
				case "signer":
					h["signer"] = signer + "0"
				case "expired":
					h["exp"] = exp - 3600
				}
				return key.token(t, base64.URLEncoding, h, map[string]any{"iss": "https://users.example.com/", "email": "alice@example.com", "sub": "1", "exp": h["exp"]})
			},
			wrong: []string{"signer", "expired", "key", "unsigned", "twice"},
		},
		{
			section: "## Google Cloud", field: "x-goog-iap-jwt-assertion", issuer: "https://cloud.google.com/iap", token: newTokenKey(t, "ES256"),
			pass:  func(h http.Header, client string) { appended(h, client); appended(h, "203.0.113.1") },
			sign:  signed("https://cloud.google.com/iap", "/projects/123456789012/global/backendServices/1234567890"),
			wrong: []string{"audience", "expired", "key", "unsigned", "twice"},
		},
		{
			section: "## Cloudflare", field: "Cf-Access-Jwt-Assertion", issuer: "https://team.cloudflareaccess.com", token: newTokenKey(t, "RS256"),
			pass:  func(h http.Header, client string) { h.Set("Cf-Connecting-Ip", client) },
			sign:  signed("https://team.cloudflareaccess.com", "4714c1358e65fe4b408ad6d432a5f878f08194bdb4752441fd56faefa9b2b6f2"),
			wrong: []string{"audience", "expired", "key", "unsigned", "twice"},
		},
	} {
		t.Run(strings.TrimPrefix(c.section, "## "), func(t *testing.T) {
			w := newWorld(t)
			login := newTokenKey(t, "ES256")
			w.write(t, "login.json", login.jwks(t))
			config := c.config(t, w, string(text))
			g := startGateway(t, "--config", w.write(t, "guide.yaml", config))
			// The stand-in writes its own fields in place of what clients have sent there.
			var mu sync.Mutex
			says := ""
			lb := w.tlsServer(t, &httputil.ReverseProxy{Rewrite: func(r *httputil.ProxyRequest) {
				r.SetURL(&url.URL{Scheme: "http", Host: g.addr})
				r.Out.Header["X-Forwarded-For"] = r.In.Header["X-Forwarded-For"]
				client, _, _ := net.SplitHostPort(r.In.RemoteAddr)
				c.pass(r.Out.Header, client)
				r.Out.Header.Del(c.field)
				mu.Lock()
				defer mu.Unlock()
				switch wrong := says; wrong {
				case "nothing":
				case "key":
					r.Out.Header.Set(c.field, c.sign(t, newTokenKey(t, map[bool]string{true: "RS256", false: "ES256"}[c.section == "## Cloudflare"]), ""))
				case "unsigned":
					parts := strings.Split(c.sign(t, c.token, ""), ".")
					r.Out.Header.Set(c.field, base64.RawURLEncoding.EncodeToString([]byte(`{"alg":"none","kid":"k"}`))+"."+parts[1]+".")
				case "twice":
					r.Out.Header[http.CanonicalHeaderKey(c.field)] = []string{c.sign(t, c.token, ""), c.sign(t, c.token, "")}
				default:
					r.Out.Header.Set(c.field, c.sign(t, c.token, wrong))
				}
			}, ErrorLog: log.New(io.Discard, "", 0)})
			ca, err := testca.Load(w.dir, nil)
			must(t, err)
			dial := func(say, token string) error {
				mu.Lock()
				says = say
				mu.Unlock()
				d := &ws.Dialer{URL: "wss://" + lb + "/", TLS: &tls.Config{RootCAs: ca.Pool()}}
				d.Header = func(context.Context, string) (connect.Fields, error) {
					f := connect.Fields{{Name: "X-Forwarded-For", Value: "203.0.113.66"}, {Name: "CF-Connecting-IP", Value: "203.0.113.66"}, {Name: c.field, Value: "mine"}}
					switch {
					case token != "" && strings.Contains(config, "credentialsHeader: Culvert-Credentials"):
						f = append(f, connect.Field{Name: "Culvert-Credentials", Value: "Bearer " + token}, connect.Field{Name: "Authorization", Value: "Bearer of the load balancer"})
					case token != "":
						f = append(f, connect.Field{Name: "Authorization", Value: "Bearer " + token})
					}
					return f, nil
				}
				conn, err := d.DialContext(t.Context(), "tcp", "orders.example.com:443")
				if err == nil {
					testnet.Ping(t, conn, say)
					must(t, conn.Close())
				}
				return err
			}
			logged := func(peer, reason string) {
				t.Helper()
				g.line(t, "logged "+peer+" "+reason, func(l line) bool { return l.Source == "127.0.0.1:0" && l.Peer == peer && l.Reason == reason })
			}
			must(t, dial("", ""))
			logged("alice@example.com", "done")
			must(t, dial("", login.of(t, "program")))
			logged("program", "done")
			must(t, dial("nothing", login.of(t, "another program")))
			logged("another program", "done")
			for _, wrong := range append(slices.Clone(c.wrong), "nothing") {
				if err := dial(wrong, ""); tunnel.ReasonOf(err) != tunnel.NoAuth {
					t.Errorf("%s: got %v, want %s", wrong, err, tunnel.NoAuth)
				}
			}
			if err := dial("", newTokenKey(t, "ES256").of(t, "program")); tunnel.ReasonOf(err) != tunnel.NoAuth {
				t.Errorf("a client's wrong token beside a right one of the load balancer: got %v, want %s", err, tunnel.NoAuth)
			}
			if strings.Contains(g.output(), "203.0.113.66") {
				t.Error("the log has an address that a client has written")
			}
		})
	}
}

// config returns the configuration of the guide, at addresses of this machine.
func (c *cloud) config(t *testing.T, w *world, guide string) string {
	t.Helper()
	_, rest, ok := strings.Cut(guide, c.section)
	_, rest, begins := strings.Cut(rest, "```yaml\n")
	block, _, ends := strings.Cut(rest, "```")
	if !ok || !begins || !ends {
		t.Fatalf("the guide has no configuration in %q", c.section)
	}
	der, err := x509.MarshalPKIXPublicKey(c.token.Public())
	must(t, err)
	mux := http.NewServeMux()
	mux.HandleFunc("/jwks", func(rw http.ResponseWriter, _ *http.Request) {
		rw.Header().Set("Content-Type", "application/json")
		_, _ = rw.Write([]byte(c.token.jwks(t)))
	})
	mux.HandleFunc("/k", func(rw http.ResponseWriter, _ *http.Request) {
		_ = pem.Encode(rw, &pem.Block{Type: "PUBLIC KEY", Bytes: der})
	})
	keys := "https://" + w.tlsServer(t, mux) + "/jwks"
	if strings.Contains(block, "{kid}") {
		keys = strings.TrimSuffix(keys, "jwks") + "{kid}"
	}
	for old, replacement := range map[string]string{
		`(?m)^( *)jwks: https://\S*`:               "${1}jwks: " + keys + "\n${1}caFile: ca.crt",
		`(?m)^( *)- issuer: ` + loginIssuer + `.*`: "${0}\n$1  jwks: login.json",
		`(?m)address: \S+`:                         "address: 127.0.0.1:" + freePort(t),
		`from: \[[^]]*\]`:                          "from: [127.0.0.1/32]",
		`endpoints: .*`:                            "endpoints: [\"" + testnet.Echo(t).Addr() + "\"]\n    ports: [443]",
	} {
		re := regexp.MustCompile(old)
		if !re.MatchString(block) {
			t.Fatalf("the configuration in %q has no %s", c.section, old)
		}
		block = re.ReplaceAllString(block, replacement)
	}
	return "admin: 127.0.0.1:" + freePort(t) + "\n" + block
}

// tlsServer starts an HTTPS server and returns its address at localhost.
func (w *world) tlsServer(t *testing.T, h http.Handler) (addr string) {
	t.Helper()
	cert, key, _ := w.loadBalancer(t)
	pair, err := tls.LoadX509KeyPair(cert, key)
	must(t, err)
	srv := httptest.NewUnstartedServer(h)
	srv.TLS = &tls.Config{Certificates: []tls.Certificate{pair}}
	srv.StartTLS()
	t.Cleanup(srv.Close)
	_, port, _ := net.SplitHostPort(srv.Listener.Addr().String())
	return "localhost:" + port
}
