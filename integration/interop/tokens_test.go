//go:build unix

package interop

import (
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"culvert.dev/connect"
	"culvert.dev/internal/testnet"
	"culvert.dev/tunnel"
)

// tokenPeers returns where packages of npm are that issue tokens, for a node that runs
// them. It reports false where there are none.
func tokenPeers(t *testing.T) (modules string, ok bool) {
	t.Helper()
	modules, err := filepath.Abs("../../bin/jwtpeers/node_modules")
	must(t, err)
	if _, err := os.Stat(filepath.Join(modules, "jose")); err != nil {
		testnet.LeaveOut(t, "no packages of npm: tokens of oidc-provider and jose")
		return "", false
	}
	out, _, _ := command(t, "node", "--version")
	version, _, _ := strings.Cut(strings.TrimPrefix(out, "v"), ".")
	if major, err := strconv.Atoi(version); err != nil || major < 20 {
		testnet.LeaveOut(t, "node is older than 20: tokens of oidc-provider and jose")
		return "", false
	}
	return modules, true
}

// connectWith asks the gateway for svc with a token.
func connectWith(t *testing.T, addr, token string) (net.Conn, error) {
	t.Helper()
	d := &connect.Dialer{Proxy: addr, Authorization: connect.BearerCredentials(token)}
	return d.DialContext(t.Context(), "tcp", svc+":443")
}

// What jose says of tokens that it signs, and HAProxy's jwt_verify with the checks around it
// that HAProxy's manual shows, are second opinions on ours. Where they are laxer or stricter,
// the table says so.
func TestTokensOfJose(t *testing.T) {
	modules, ok := tokenPeers(t)
	if !ok {
		return
	}
	w := newWorld(t)
	out, errs, code := command(t, "node", "testdata/tokens/jose.mjs", modules, w.dir)
	if code != 0 {
		t.Fatalf("jose: exit code %d, %s", code, errs)
	}
	var rows []struct {
		Name, Token string
		Good        bool // says jose
	}
	must(t, json.Unmarshal([]byte(out), &rows))
	g := startGateway(t, "--config", w.write(t, "tokens.yaml", fmt.Sprintf(`
admin: 127.0.0.1:%s
identity:
  tokens: [{issuer: https://login.example.test/, audience: [culvert], jwks: jwks.json}]
listeners:
  - {address: "127.0.0.1:%s", protocols: [connect], auth: {issuers: [https://login.example.test/]}}
services:
%s`, freePort(t), freePort(t), service(svc, testnet.Echo(t).Addr()))))
	proxy := "127.0.0.1:" + freePort(t)
	w.haproxyTokens(t, proxy)
	joseTakes := []string{"type of a logout token", "nested", "over 16 KiB", "iat ahead", "sub a SPIFFE id"}
	// HAProxy 2.6 looks at no kid, typ, cty and iat, and at no claim that it is not told to.
	haproxyTakes := []string{"type of a logout token", "nested", "iat ahead", "sub a SPIFFE id", "sub missing", "kid that is a path", "kid that is a URL", "algorithm of another key"}
	// It has two keys here, and takes an aud of several as one text.
	haproxyRefuses := []string{"good RS384", "good RS512", "good PS256", "good PS384", "good PS512", "good ES384", "good ES512", "good EdDSA", "good, several audiences"}
	seen := 0
	for _, row := range rows {
		want := strings.HasPrefix(row.Name, "good")
		conn, err := connectWith(t, g.addr, row.Token)
		switch reason := tunnel.ReasonOf(err); {
		case want && err != nil, !want && err == nil:
			t.Errorf("%s: got %v, want it accepted: %v", row.Name, err, want)
		case !want && reason != tunnel.NoAuth && !(reason == tunnel.TooLarge && row.Name == "over 16 KiB"):
			t.Errorf("%s: got %v, want %s", row.Name, err, tunnel.NoAuth)
		}
		if err == nil {
			must(t, conn.Close())
		}
		if takes := want || slices.Contains(joseTakes, row.Name); row.Good != takes {
			t.Errorf("%s: jose accepts it: %v, want %v", row.Name, row.Good, takes)
		}
		takes := (want || slices.Contains(haproxyTakes, row.Name)) && !slices.Contains(haproxyRefuses, row.Name)
		if got := asked(t, proxy, row.Token); got != takes {
			t.Errorf("%s: HAProxy accepts it: %v, want %v", row.Name, got, takes)
		}
		for _, list := range [][]string{joseTakes, haproxyTakes, haproxyRefuses} {
			if slices.Contains(list, row.Name) {
				seen++
			}
		}
	}
	if n := len(joseTakes) + len(haproxyTakes) + len(haproxyRefuses); seen != n {
		t.Errorf("%d of the %d rows that others judge otherwise were there", seen, n)
	}
	for _, row := range rows {
		if len(row.Token) > 8 && strings.Contains(g.output(), row.Token) {
			t.Errorf("%s: the log has the token in it", row.Name)
		}
	}
}

// haproxyTokens starts an HAProxy at addr that answers 200 to a token of the issuer, and
// 401 to any other.
func (w *world) haproxyTokens(t *testing.T, addr string) {
	t.Helper()
	conf := fmt.Sprintf(`defaults
	mode http
	timeout connect 5s
	timeout client 20s
	timeout server 20s
frontend tokens
	bind %[1]s
	http-request set-var(txn.bearer) http_auth_bearer
	http-request set-var(txn.alg) var(txn.bearer),jwt_header_query('$.alg')
	http-request set-var(txn.iss) var(txn.bearer),jwt_payload_query('$.iss')
	http-request set-var(txn.aud) var(txn.bearer),jwt_payload_query('$.aud')
	http-request set-var(txn.exp) var(txn.bearer),jwt_payload_query('$.exp','int')
	http-request set-var(txn.nbf) var(txn.bearer),jwt_payload_query('$.nbf','int')
	http-request set-var(txn.now) date()
	http-request deny deny_status 401 unless { var(txn.alg) -m str RS256 ES256 }
	http-request deny deny_status 401 unless { var(txn.iss) -m str https://login.example.test/ }
	http-request deny deny_status 401 unless { var(txn.aud) -m str culvert }
	http-request deny deny_status 401 unless { var(txn.exp) -m found }
	http-request deny deny_status 401 if { var(txn.exp),sub(txn.now) -m int lt -60 }
	http-request deny deny_status 401 if { var(txn.nbf) -m found } { var(txn.nbf),sub(txn.now) -m int gt 60 }
	http-request deny deny_status 401 if { var(txn.alg) -m str RS256 } ! { var(txn.bearer),jwt_verify(txn.alg,"%[2]s") -m int 1 }
	http-request deny deny_status 401 if { var(txn.alg) -m str ES256 } ! { var(txn.bearer),jwt_verify(txn.alg,"%[3]s") -m int 1 }
	http-request return status 200
`, addr, filepath.Join(w.dir, "RS256.pem"), filepath.Join(w.dir, "ES256.pem"))
	start(t, "haproxy", "-db", "-f", w.write(t, "haproxy-tokens.cfg", conf)).listens(t, addr)
}

// asked reports whether an HTTP server answers 200 to a token. A server that closes the
// connection while a token too long for it is still being sent refuses it.
func asked(t *testing.T, addr, token string) bool {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://"+addr+"/", nil)
	must(t, err)
	req.Header.Set("Authorization", "Bearer "+token)
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}, Timeout: patience}
	resp, err := client.Do(req)
	if errors.Is(err, syscall.EPIPE) || errors.Is(err, syscall.ECONNRESET) {
		return false
	}
	must(t, err)
	defer resp.Body.Close()
	return resp.StatusCode == http.StatusOK
}

// oidcProvider starts an oidc-provider whose key has that name.
func (w *world) oidcProvider(t *testing.T, modules, port, kid string) *process {
	t.Helper()
	cert, key, _ := w.loadBalancer(t)
	p := startCmd(t, exec.Command(look(t, "node"), "testdata/tokens/oidc.mjs", modules, port, cert, key, kid))
	p.listens(t, "127.0.0.1:"+port)
	return p
}

// An oidc-provider is an issuer: its discovery, its keys, its tokens for clients. It gets
// other keys while a tunnel is open.
func TestOIDCProvider(t *testing.T) {
	t.Parallel()
	modules, ok := tokenPeers(t)
	if !ok {
		return
	}
	w := newWorld(t)
	port := freePort(t)
	issuer := "https://localhost:" + port
	p := w.oidcProvider(t, modules, port, "one")
	g := startGateway(t, "--config", w.write(t, "oidc.yaml", fmt.Sprintf(`
admin: 127.0.0.1:%s
identity:
  tokens: [{issuer: "%s", audience: [culvert], id: "ci:{client_id}", caFile: ca.crt}]
listeners:
  - {address: "127.0.0.1:%s", protocols: [connect], auth: {issuers: ["%[2]s"]}}
services:
%[4]s`, freePort(t), issuer, freePort(t), service(svc, testnet.Echo(t).Addr()))))
	first := w.clientCredentials(t, issuer)
	conn, err := connectWith(t, g.addr, first)
	must(t, err)
	defer conn.Close()
	testnet.Ping(t, conn, "before")

	p.signal(9)
	p.awaitEnd(t)
	w.oidcProvider(t, modules, port, "two")
	second := w.clientCredentials(t, issuer)
	// A key that is not known is asked for at once, but not more often than every 10 seconds.
	testnet.Eventually(t, 6*patience, func() bool {
		c, err := connectWith(t, g.addr, second)
		if err != nil {
			return false
		}
		_ = c.Close()
		return true
	}, "a token by the next key is accepted")
	if c, err := connectWith(t, g.addr, first); tunnel.ReasonOf(err) != tunnel.NoAuth {
		t.Errorf("a token by the former key: got %v, %v, want %s", c, err, tunnel.NoAuth)
	}
	testnet.Ping(t, conn, "after")
	must(t, conn.Close())
	g.line(t, "logged the tunnel", func(l line) bool { return l.Msg == "tunnel" && l.Peer == "ci:ci" })
	var s struct {
		Issuers []struct {
			Issuer, Error string
			Keys          int
			Next          *time.Time
		}
	}
	must(t, g.ask("/status", &s))
	if len(s.Issuers) != 1 || s.Issuers[0].Issuer != issuer || s.Issuers[0].Keys != 1 || s.Issuers[0].Error != "" || s.Issuers[0].Next == nil {
		t.Errorf("status: got %+v, want one key of %s", s.Issuers, issuer)
	}
}

// clientCredentials gets a token of an issuer by the client credentials grant, RFC 6749
// section 4.4.
func (w *world) clientCredentials(t *testing.T, issuer string) string {
	t.Helper()
	ca, err := os.ReadFile(w.ca)
	must(t, err)
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(ca)
	client := &http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{RootCAs: roots}, DisableKeepAlives: true}, Timeout: patience}
	resp, err := client.PostForm(issuer+"/token", url.Values{"grant_type": {"client_credentials"}, "client_id": {"ci"}, "client_secret": {"a secret of the test"}})
	must(t, err)
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	must(t, err)
	var answer struct {
		Token string `json:"access_token"`
	}
	must(t, json.Unmarshal(body, &answer))
	if strings.Count(answer.Token, ".") != 2 {
		t.Fatalf("the issuer's answer, with status %d, has no JWT", resp.StatusCode)
	}
	return answer.Token
}
