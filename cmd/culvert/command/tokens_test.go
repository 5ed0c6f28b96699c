package command

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"maps"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"culvert.dev/connect"
	"culvert.dev/internal/testnet"
	"culvert.dev/tunnel"
)

// tokenRecipe returns the configuration in a section of the guide to tokens.
func tokenRecipe(t *testing.T, section string) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("..", "..", "..", "docs", "guides", "tokens.md"))
	if err != nil {
		t.Fatal(err)
	}
	_, rest, ok := strings.Cut(string(text), "\n## "+section+"\n")
	_, block, hasBlock := strings.Cut(rest, "```yaml\n")
	block, _, closed := strings.Cut(block, "```\n")
	if !ok || !hasBlock || !closed {
		t.Fatalf("the guide has no recipe %q", section)
	}
	return block
}

// An issuer signs tokens, and serves its keys by HTTPS.
type issuer struct {
	*httptest.Server
	key *ecdsa.PrivateKey
	ca  string // PEM
}

func newIssuer(t *testing.T, want string) *issuer {
	t.Helper()
	i := &issuer{}
	var err error
	if i.key, err = ecdsa.GenerateKey(elliptic.P256(), rand.Reader); err != nil {
		t.Fatal(err)
	}
	i.Server = httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		switch {
		case want != "" && r.Header.Get("Authorization") != want:
			w.WriteHeader(http.StatusForbidden)
		case r.URL.Path == "/.well-known/openid-configuration":
			_ = json.NewEncoder(w).Encode(map[string]string{"issuer": i.URL, "jwks_uri": i.URL + "/keys"})
		case r.URL.Path == "/keys":
			_, _ = w.Write(i.keys())
		default:
			w.WriteHeader(http.StatusNotFound)
		}
	}))
	t.Cleanup(i.Close)
	i.ca = string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: i.Certificate().Raw}))
	return i
}

// keys returns the issuer's JWK Set.
func (i *issuer) keys() []byte {
	number := func(b []byte) string { return base64.RawURLEncoding.EncodeToString(b) }
	return fmt.Appendf(nil, `{"keys":[{"kty":"EC","crv":"P-256","use":"sig","alg":"ES256","kid":"one","x":%q,"y":%q}]}`,
		number(i.key.X.FillBytes(make([]byte, 32))), number(i.key.Y.FillBytes(make([]byte, 32))))
}

// token signs one, with more in its header and claims.
func (i *issuer) token(t *testing.T, enc *base64.Encoding, header, claims map[string]any) string {
	t.Helper()
	part := func(base, more map[string]any) string {
		maps.Copy(base, more)
		b, err := json.Marshal(base)
		if err != nil {
			t.Fatal(err)
		}
		return enc.EncodeToString(b)
	}
	signed := part(map[string]any{"alg": "ES256", "kid": "one"}, header) + "." +
		part(map[string]any{"iss": i.URL, "sub": "alice", "aud": "culvert", "exp": time.Now().Add(time.Hour).Unix()}, claims)
	digest := sha256.Sum256([]byte(signed))
	r, s, err := ecdsa.Sign(rand.Reader, i.key, digest[:])
	if err != nil {
		t.Fatal(err)
	}
	return signed + "." + enc.EncodeToString(append(r.FillBytes(make([]byte, 32)), s.FillBytes(make([]byte, 32))...))
}

// A recipe of the guide accepts tokens by every carrier that has credentials, says who
// came, and follows the file.
func TestTokenRecipe(t *testing.T) {
	const guideURL = "https://login.example.com/"
	login := newIssuer(t, "")
	files, roots := keysOfGateway(t)
	files["ca.pem"] = login.ca
	yaml := tokenRecipe(t, "A login service")
	for _, swap := range [][2]string{
		{"      claims: [groups]\n", "      claims: [groups]\n      caFile: ca.pem\n"},
		{"  - address: :443\n", "  - address: 127.0.0.1:1\n"},
		{"services:\n", "  - {address: \"udp://127.0.0.1:1\", tls: {certificateFile: gw.crt, keyFile: gw.key}, auth: {issuers: [" + guideURL + "]}}\nservices:\n"},
		{"name: orders.example.com", "name: svc.test"}, {"10.0.1.7:8443", testnet.Echo(t).Addr()},
	} {
		if !strings.Contains(yaml, swap[0]) {
			t.Fatalf("the recipe has no %q", swap[0])
		}
		yaml = strings.Replace(yaml, swap[0], swap[1], 1)
	}
	yaml = strings.ReplaceAll(yaml, guideURL, login.URL)
	files["culvert.yaml"] = yaml
	r := startFile(t, files)
	good := login.token(t, base64.RawURLEncoding, nil, map[string]any{"groups": []string{"dev"}})
	other := login.token(t, base64.RawURLEncoding, nil, map[string]any{"aud": "billing"})
	for _, carrier := range []string{"connect", "connect-h2", "websocket", "websocket-h2", "connect-h3"} {
		addr := r.addrs[0]
		if carrier == "connect-h3" {
			addr = r.addrs[1]
		}
		c := client{tls: &tls.Config{RootCAs: roots, ServerName: "gw.test"}, token: good}
		if err := try(t, wayInBy(carrier), addr, &c); err != nil {
			t.Errorf("%s: %v", carrier, err)
		}
		for _, bad := range []string{other, good[:len(good)-2], "opaque", ""} {
			c.token = bad
			if err := try(t, wayInBy(carrier), addr, &c); tunnel.ReasonOf(err) != tunnel.NoAuth {
				t.Errorf("%s, another token: got %v, want %s", carrier, err, tunnel.NoAuth)
			}
		}
	}
	testnet.Eventually(t, patience, func() bool { return strings.Count(r.log.String(), "peer=alice peer_method=jwt") == 5 }, "the log names alice five times")
	log := r.log.String()
	for _, part := range strings.Split(good+"."+other, ".") {
		if strings.Contains(log, part) && len(part) > 8 {
			t.Error("the log has a part of a token in it")
		}
	}
	if s := r.Status().Issuers; len(s) != 1 || s[0].Issuer != login.URL || s[0].Keys != 1 || s[0].Fetched == nil || s[0].Error != "" {
		t.Errorf("status %+v, want one key of %s", s, login.URL)
	}

	c := client{tls: &tls.Config{RootCAs: roots, ServerName: "gw.test"}, token: other}
	r.rewrite(t, strings.Replace(yaml, "[culvert]", "[billing]", 1), "configuration read", 1)
	testnet.Eventually(t, patience, func() bool { return try(t, wayInBy("connect"), r.addrs[0], &c) == nil }, "a token of another audience is accepted")
	c.token = good
	if err := try(t, wayInBy("connect"), r.addrs[0], &c); tunnel.ReasonOf(err) != tunnel.NoAuth {
		t.Errorf("a token of the former audience: got %v, want %s", err, tunnel.NoAuth)
	}
}

// A load balancer's token is in a field of its own, for the listener that asks for it.
func TestLoadBalancerRecipe(t *testing.T) {
	const guideURL = "https://login.example.com/"
	alb := newIssuer(t, "")
	yaml := tokenRecipe(t, "Behind a load balancer of AWS")
	_, rest, _ := strings.Cut(yaml, "signer: ")
	arn, _, _ := strings.Cut(rest, "\n")
	yaml = strings.NewReplacer(guideURL, alb.URL, ":8080", "127.0.0.1:1", "orders.example.com", "svc.test", "10.0.1.7:8443", testnet.Echo(t).Addr()).Replace(yaml)
	yaml = strings.Replace(yaml, "https://public-keys.auth.elb.eu-west-1.amazonaws.com/{kid}", "alb.json", 1)
	r := startFile(t, map[string]string{"culvert.yaml": yaml, "alb.json": string(alb.keys())})
	for _, row := range []struct {
		name, signer, field string
		ok                  bool
	}{
		{"ours", arn, "X-Amzn-Oidc-Data", true},
		{"somebody else's", arn + "0", "X-Amzn-Oidc-Data", false},
		{"in another field", arn, "X-Amzn-Oidc-Identity", false},
	} {
		d := webSocket(r.addrs[0], &client{})
		d.Header = func(context.Context, string) (connect.Fields, error) {
			token := alb.token(t, base64.URLEncoding, map[string]any{"signer": row.signer, "client": "x", "iss": alb.URL}, map[string]any{"email": "alice@corp.example", "aud": ""})
			return connect.Fields{{Name: row.field, Value: token}}, nil
		}
		err := try(t, wayIn{"websocket", func(string, *client) tunnel.Dialer { return d }}, "", &client{})
		if row.ok && err != nil || !row.ok && tunnel.ReasonOf(err) != tunnel.NoAuth {
			t.Errorf("%s: got %v, want it accepted: %v", row.name, err, row.ok)
		}
	}
	testnet.Eventually(t, patience, func() bool { return strings.Contains(r.log.String(), "peer=alice@corp.example peer_method=jwt") }, "the log names alice")
}

// The keys of a cluster are fetched with the gateway's own token.
func TestKubernetesTokenRecipe(t *testing.T) {
	const guideURL, account = "https://kubernetes.default.svc.cluster.local", "/var/run/secrets/kubernetes.io/serviceaccount/"
	cluster := newIssuer(t, "Bearer of the gateway")
	yaml := strings.NewReplacer(guideURL, cluster.URL, account, "", ":3128", "127.0.0.1:1", "orders.example.com", "svc.test", "10.0.1.7:8443", testnet.Echo(t).Addr()).Replace(tokenRecipe(t, "Kubernetes"))
	r := startFile(t, map[string]string{"culvert.yaml": yaml, "ca.crt": cluster.ca, "token": "of the gateway\n"})
	pod := map[string]any{"sub": "system:serviceaccount:shop:api", "kubernetes.io": map[string]any{"namespace": "shop", "serviceaccount": map[string]any{"name": "api"}}}
	if err := try(t, wayInBy("connect"), r.addrs[0], &client{token: cluster.token(t, base64.RawURLEncoding, nil, pod)}); err != nil {
		t.Error(err)
	}
	if err := try(t, wayInBy("connect"), r.addrs[0], &client{token: cluster.token(t, base64.RawURLEncoding, nil, nil)}); tunnel.ReasonOf(err) != tunnel.NoAuth {
		t.Errorf("a token that is not of a service account: got %v, want %s", err, tunnel.NoAuth)
	}
	testnet.Eventually(t, patience, func() bool {
		return strings.Contains(r.log.String(), "peer=system:serviceaccount:shop:api peer_method=jwt")
	}, "the log names the service account")
}
