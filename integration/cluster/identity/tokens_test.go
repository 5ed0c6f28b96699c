package identity_test

import (
	"context"
	"crypto/ecdsa"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"culvert.dev/connect"
	"culvert.dev/connect/h2"
	"culvert.dev/connect/ws"
	"culvert.dev/integration/cluster"
	"culvert.dev/tunnel"
)

const tokenListener = "127.0.0.1:3128"

// carriers are how clients ask with a token.
var carriers = []string{"connect", "connect-h2", "websocket"}

// bearer is one who asks by a carrier with a token.
func bearer(name, carrier, token string) caller {
	return caller{name + " by " + carrier, func(ctx context.Context) (string, error) {
		var d tunnel.Dialer
		switch auth := connect.BearerCredentials(token); carrier {
		case "connect":
			d = &connect.Dialer{Proxy: tokenListener, Authorization: auth}
		case "connect-h2":
			one := &h2.Dialer{Proxy: tokenListener, Authorization: auth}
			defer one.Close()
			d = one
		default:
			d = &ws.Dialer{URL: "ws://" + tokenListener, Authorization: auth}
		}
		return ask(ctx, d)
	}}
}

// Pods of the west show the tokens that the API server makes for them. Its gateway fetches the keys
// from there, and has a token of its own to be let in.
func (w *world) tokens(t *testing.T) {
	c := w.west
	c.Apply(t, `
apiVersion: v1
kind: Namespace
metadata: {name: front}
---
apiVersion: v1
kind: ServiceAccount
metadata: {name: api, namespace: front}
---
apiVersion: v1
kind: ServiceAccount
metadata: {name: job, namespace: front}
---
apiVersion: v1
kind: Namespace
metadata: {name: back}
---
apiVersion: v1
kind: ServiceAccount
metadata: {name: api, namespace: back}
---
apiVersion: v1
kind: Pod
metadata: {name: caller, namespace: front}
spec: {serviceAccountName: job, containers: [{name: caller, image: echo-basic}]}
`)
	w.east.Apply(t, "{apiVersion: v1, kind: Namespace, metadata: {name: front}}\n---\n{apiVersion: v1, kind: ServiceAccount, metadata: {name: api, namespace: front}}\n")
	c.WaitReady(t, cluster.PodTime, "front")
	api, job := c.Token(t, "front", "api", nil, "culvert"), c.Token(t, "front", "job", w.pod(t), "other", "culvert")

	for _, carrier := range carriers {
		c.wantServed(t, "without a policy", bearer("api", carrier, api))
		c.wantServed(t, "without a policy", bearer("job", carrier, job))
	}
	w.policy(t, "AuthorizationPolicy", "accounts", "{enforcementLevel: Network, action: ALLOW, targetRefs: [{group: '', kind: Service, name: echo}], rules: [{sources: [{type: ServiceAccount, serviceAccount: {namespace: front, name: api}}]}]}")
	for _, carrier := range carriers {
		c.wantRefused(t, "another account", bearer("job", carrier, job), tunnel.Denied)
		c.wantServed(t, "the account", bearer("api", carrier, api))
		c.wantLog(t, "msg=refused", "proto="+carrier, "peer=system:serviceaccount:front:job", "peer_method=jwt", "reason=denied", "policy=shop/accounts", `policy_origin="AuthorizationPolicy shop/accounts"`)
	}
	w.behindNginx(t, api, job)
	here := netip.MustParseAddr("127.0.0.1")
	if out := c.explain(t.Context(), tokenListener, here, "system:serviceaccount:front:api"); !strings.Contains(out, "allowed by shop/accounts of AuthorizationPolicy shop/accounts, rule 1") {
		t.Errorf("explain says of the account:\n%s\nwant that the policy allows it", out)
	}
	if out := c.explain(t.Context(), tokenListener, here, "system:serviceaccount:front:job"); !strings.Contains(out, "denied by shop/accounts of AuthorizationPolicy shop/accounts, which allows others only") {
		t.Errorf("explain says of another account:\n%s\nwant the refusal by the policy", out)
	}

	for _, row := range []struct{ name, token, result string }{
		{"for the API server", c.Token(t, "front", "api", nil), `the token is for \"` + issuer},
		{"for another audience", c.Token(t, "front", "api", nil, "vault"), `the token is for \"vault`},
		{"that has expired", w.altered(t, api, func(claims map[string]any) {
			claims["exp"], claims["iat"], claims["nbf"] = time.Now().Add(-2*time.Minute).Unix(), time.Now().Add(-time.Hour).Unix(), time.Now().Add(-time.Hour).Unix()
		}), "the token expired at"},
		{"of another cluster with the same issuer", w.east.Token(t, "front", "api", nil, "culvert"), " has no key "},
		{"changed", changed(api), "the signature is not that of the key"},
	} {
		for _, carrier := range carriers {
			c.wantRefused(t, "a token "+row.name, bearer("api", carrier, row.token), tunnel.NoAuth)
		}
		c.wantLog(t, "reason=no-auth", row.result)
	}
	if strings.Contains(c.gateway.Output(), api[strings.LastIndexByte(api, '.')+1:]) {
		t.Error("the gateway has logged a token")
	}
	w.removed(t, job)
	w.rotated(t, api)
}

// behindNginx has the same workloads come by nginx, which ends HTTPS: the policy, the log and explain
// name the same account, and the log has the address that nginx names.
func (w *world) behindNginx(t *testing.T, api, job string) {
	t.Helper()
	const frontend, listener = "127.0.0.1:18443", "127.0.0.1:18080"
	c := w.west
	c.write(t, "nginx.conf", fmt.Sprintf(`daemon off;
master_process off;
pid %[1]s/nginx.pid;
error_log stderr;
events {}
http {
	access_log off;
	client_body_temp_path %[1]s/body;
	proxy_temp_path %[1]s/proxy;
	fastcgi_temp_path %[1]s/fastcgi;
	uwsgi_temp_path %[1]s/uwsgi;
	scgi_temp_path %[1]s/scgi;
	server {
		listen %[2]s ssl;
		ssl_certificate %[1]s/gw.crt;
		ssl_certificate_key %[1]s/gw.key;
		location / {
			proxy_pass http://%[3]s;
			proxy_http_version 1.1;
			proxy_set_header Upgrade $http_upgrade;
			proxy_set_header Connection "upgrade";
			proxy_set_header X-Forwarded-For $remote_addr;
		}
	}
}
`, c.dir, frontend, listener))
	path, err := exec.LookPath("nginx")
	if err != nil {
		t.Fatalf("%v; make peers installs it", err)
	}
	nginx := c.Run(t, nil, path, "-p", c.dir, "-e", "stderr", "-c", filepath.Join(c.dir, "nginx.conf"))
	defer nginx.Stop(5 * time.Second)
	behind := func(name, token string) caller {
		return caller{name + " behind nginx", func(ctx context.Context) (string, error) {
			return ask(ctx, &ws.Dialer{
				URL: "wss://" + frontend, TLS: &tls.Config{RootCAs: c.ca.Pool(), ServerName: "gw." + c.ca.TrustDomain}, Authorization: connect.BearerCredentials(token),
				Dialer: &net.Dialer{LocalAddr: &net.TCPAddr{IP: net.IPv4(127, 0, 0, 7)}},
			})
		}}
	}
	c.wantServed(t, "the account", behind("api", api))
	c.wantRefused(t, "another account", behind("job", job), tunnel.Denied)
	c.wantRefused(t, "the account with that name of another namespace", behind("api of back", c.Token(t, "back", "api", nil, "culvert")), tunnel.Denied)
	c.wantRefused(t, "a changed token", behind("api", changed(api)), tunnel.NoAuth)
	c.wantLog(t, "msg=tunnel", "listener="+listener, "source=127.0.0.7:0", "peer=system:serviceaccount:front:api", "peer_method=jwt")
	c.wantLog(t, "msg=refused", "listener="+listener, "source=127.0.0.7:0", "peer=system:serviceaccount:front:job", "peer_method=jwt", "reason=denied", "policy=shop/accounts")
	c.wantLog(t, "msg=refused", "listener="+listener, "source=127.0.0.7:0", "peer=system:serviceaccount:back:api", "peer_method=jwt", "reason=denied", "policy=shop/accounts")
	c.wantLog(t, "msg=refused", "listener="+listener, "source=127.0.0.7:0", "reason=no-auth", "the signature is not that of the key")
	from := netip.MustParseAddr("127.0.0.7")
	if out := c.explain(t.Context(), listener, from, "system:serviceaccount:front:api", "--proto", "websocket"); !strings.Contains(out, "allowed by shop/accounts") {
		t.Errorf("explain says of the account behind nginx:\n%s\nwant that the policy allows it", out)
	}
	for _, account := range []string{"front:job", "back:api"} {
		if out := c.explain(t.Context(), listener, from, "system:serviceaccount:"+account, "--proto", "websocket"); !strings.Contains(out, "denied by shop/accounts") {
			t.Errorf("explain says of %s behind nginx:\n%s\nwant the refusal by the policy", account, out)
		}
	}
}

// changed returns a token with another signature.
func changed(token string) string {
	b := []byte(token)
	at := strings.LastIndexByte(token, '.') + 1
	if b[at] == 'A' {
		b[at] = 'B'
	} else {
		b[at] = 'A'
	}
	return string(b)
}

// pod is the one that callers of the account job are in.
func (w *world) pod(t *testing.T) *corev1.Pod {
	t.Helper()
	pod, err := w.west.Client.CoreV1().Pods("front").Get(t.Context(), "caller", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return pod
}

// removed deletes the pod and the account of a token. The API server would not take it any more; a
// gateway that asks nobody takes it until it expires, or until a policy denies the account.
func (w *world) removed(t *testing.T, job string) {
	t.Helper()
	c := w.west
	const everyAccount = "{enforcementLevel: Network, action: ALLOW, targetRefs: [{group: '', kind: Service, name: echo}], rules: [{sources: [{type: ServiceAccount, serviceAccount: {namespace: front, name: '*'}}]}]}"
	w.policy(t, "AuthorizationPolicy", "accounts", everyAccount)
	c.Delete(t, "{apiVersion: v1, kind: Pod, metadata: {name: caller, namespace: front}}\n---\n{apiVersion: v1, kind: ServiceAccount, metadata: {name: job, namespace: front}}\n")
	c.Wait(t, soon, func(ctx context.Context) error {
		r, err := c.Client.AuthenticationV1().TokenReviews().Create(ctx, &authenticationv1.TokenReview{Spec: authenticationv1.TokenReviewSpec{Token: job, Audiences: []string{"culvert"}}}, metav1.CreateOptions{})
		if err == nil && r.Status.Authenticated {
			err = fmt.Errorf("the API server takes the token of an account that is gone")
		}
		return err
	})
	c.wantServed(t, "an account that is gone, until its token expires", bearer("job", "connect", job))
	w.policy(t, "ClusterAuthorizationPolicy", "gone", "{enforcementLevel: Network, tier: Admin, action: DENY, rules: [{sources: [{type: ServiceAccount, serviceAccount: {namespace: front, name: job}}]}]}")
	c.wantRefused(t, "an account that is gone, and denied", bearer("job", "connect", job), tunnel.Denied)
	w.noPolicy(t, "ClusterAuthorizationPolicy", "gone")
}

// rotated gives the API server new keys. What the new one signs is accepted at once, and what the
// old one has signed for as long as the API server has its key.
func (w *world) rotated(t *testing.T, old string) {
	t.Helper()
	c := w.west
	c.RotateTokenKey(t, true)
	fresh := c.Token(t, "front", "api", nil, "culvert")
	c.wantServed(t, "a token of the new key", bearer("api", "connect", fresh))
	c.wantServed(t, "a token of the old key, which counts beside it", bearer("api", "connect", old))

	c.RotateTokenKey(t, false)
	c.write(t, "token", c.Token(t, system, "culvert", nil)) // as what plays kubelet does for pods
	last := c.Token(t, "front", "api", nil, "culvert")
	c.wantServed(t, "a token of the last key", bearer("api", "connect", last))
	c.wantRefused(t, "a token of a key that is gone", bearer("api", "connect", old), tunnel.NoAuth)
	c.wantRefused(t, "a token of another key that is gone", bearer("api", "connect", fresh), tunnel.NoAuth)
}

// altered returns a token with other claims, as the API server would sign it.
func (w *world) altered(t *testing.T, token string, change func(claims map[string]any)) string {
	t.Helper()
	parts := strings.Split(token, ".")
	text, err := base64.RawURLEncoding.DecodeString(parts[1])
	if err != nil {
		t.Fatal(err)
	}
	var claims map[string]any
	if err := json.Unmarshal(text, &claims); err != nil {
		t.Fatal(err)
	}
	change(claims)
	if text, err = json.Marshal(claims); err != nil {
		t.Fatal(err)
	}
	file, err := os.ReadFile(w.west.TokenKeyFile())
	if err != nil {
		t.Fatal(err)
	}
	block, _ := pem.Decode(file)
	key, err := x509.ParseECPrivateKey(block.Bytes)
	if err != nil {
		t.Fatal(err)
	}
	signed := parts[0] + "." + base64.RawURLEncoding.EncodeToString(text)
	sum := sha256.Sum256([]byte(signed))
	r, s, err := ecdsa.Sign(rand.Reader, key, sum[:])
	if err != nil {
		t.Fatal(err)
	}
	var signature [64]byte
	r.FillBytes(signature[:32])
	s.FillBytes(signature[32:])
	return signed + "." + base64.RawURLEncoding.EncodeToString(signature[:])
}
