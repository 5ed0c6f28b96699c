//go:build unix && !unit

package connect

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"io"
	"log"
	"math/big"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"culvert.dev/tunnel"
	"culvert.dev/tunnel/tunneltest"
)

// A world is a service that demands client certificates, and a gateway that
// asks for a password. Real programs go from one to the other; "go test -tags
// unit" leaves them out.
type world struct {
	proxy  string // host:port
	router *router
	gw     *gateway
	dir    string // has ca.pem, client.pem and client.key
	roots  *x509.CertPool
	cert   tls.Certificate
}

// newWorld has a service svc.example.com:443. It answers "hello, NAME" where
// NAME is that of the client's certificate, and serves the git repository
// repo.git.
func newWorld(t *testing.T, auth Authenticator) *world {
	t.Helper()
	w := &world{dir: t.TempDir(), roots: x509.NewCertPool()}
	ca, caKey := w.issue(t, nil, nil, "test CA")
	w.roots.AddCert(ca)
	w.write(t, "ca.pem", "CERTIFICATE", ca.Raw)
	clientCert, clientKey := w.issue(t, ca, caKey, "alice")
	w.write(t, "client.pem", "CERTIFICATE", clientCert.Raw)
	w.write(t, "client.key", "PRIVATE KEY", pkcs8(t, clientKey))
	w.cert = tls.Certificate{Certificate: [][]byte{clientCert.Raw}, PrivateKey: clientKey}
	serverCert, serverKey := w.issue(t, ca, caKey, "svc.example.com")

	mux := http.NewServeMux()
	mux.Handle("/repo.git/", http.FileServer(http.Dir(w.dir)))
	mux.HandleFunc("/", func(rw http.ResponseWriter, r *http.Request) {
		_, _ = fmt.Fprintf(rw, "hello, %s\n", r.TLS.PeerCertificates[0].Subject.CommonName)
	})
	srv := httptest.NewUnstartedServer(mux)
	srv.Config.ErrorLog = log.New(io.Discard, "", 0)
	srv.TLS = &tls.Config{
		Certificates: []tls.Certificate{{Certificate: [][]byte{serverCert.Raw}, PrivateKey: serverKey}},
		ClientAuth:   tls.RequireAndVerifyClientCert,
		ClientCAs:    w.roots,
	}
	srv.StartTLS()
	t.Cleanup(srv.Close)

	w.router = &router{table: map[string]string{"svc.example.com:443": srv.Listener.Addr().String()}}
	w.gw = serve(t, &Protocol{Auth: auth}, w.router)
	w.proxy = w.gw.addr
	return w
}

// issue makes a certificate: a CA's where parent is nil.
func (w *world) issue(t *testing.T, parent *x509.Certificate, parentKey *ecdsa.PrivateKey, name string) (*x509.Certificate, *ecdsa.PrivateKey) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	tmpl := &x509.Certificate{
		SerialNumber: big.NewInt(time.Now().UnixNano()),
		Subject:      pkix.Name{CommonName: name},
		NotBefore:    time.Now().Add(-time.Hour),
		NotAfter:     time.Now().Add(time.Hour),
	}
	if parent == nil {
		tmpl.IsCA, tmpl.BasicConstraintsValid, tmpl.KeyUsage = true, true, x509.KeyUsageCertSign
		parent, parentKey = tmpl, key
	} else {
		tmpl.DNSNames = []string{name}
		tmpl.KeyUsage = x509.KeyUsageDigitalSignature
		tmpl.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth}
	}
	der, err := x509.CreateCertificate(rand.Reader, tmpl, parent, key.Public(), parentKey)
	if err != nil {
		t.Fatal(err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	return cert, key
}

func pkcs8(t *testing.T, key *ecdsa.PrivateKey) []byte {
	t.Helper()
	der, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	return der
}

func (w *world) write(t *testing.T, name, block string, der []byte) {
	t.Helper()
	b := pem.EncodeToMemory(&pem.Block{Type: block, Bytes: der})
	if err := os.WriteFile(filepath.Join(w.dir, name), b, 0o600); err != nil {
		t.Fatal(err)
	}
}

// run runs a program in the world's folder and returns all it printed.
func (w *world) run(t *testing.T, stdin string, args ...string) (string, error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 3*patience)
	defer cancel()
	cmd := exec.CommandContext(ctx, args[0], args[1:]...)
	cmd.Dir = w.dir
	// Only what is set here: a proxy of the machine's own must not take part.
	cmd.Env = []string{"PATH=" + os.Getenv("PATH"), "HOME=" + w.dir, "GIT_CONFIG_NOSYSTEM=1", "GIT_TERMINAL_PROMPT=0"}
	cmd.Stdin = strings.NewReader(stdin)
	out, err := cmd.CombinedOutput()
	return string(out), err
}

func (w *world) mustRun(t *testing.T, stdin string, args ...string) string {
	t.Helper()
	out, err := w.run(t, stdin, args...)
	if err != nil {
		t.Fatalf("%s: %v\n%s", strings.Join(args, " "), err, out)
	}
	return out
}

func wantOutput(t *testing.T, out, want string) {
	t.Helper()
	if !strings.Contains(out, want) {
		t.Errorf("got output\n%s\nwant it to have %q", out, want)
	}
}

// The inner TLS is the client's own: the service sees its certificate.
const greeting = "hello, alice\n"

func TestCurl(t *testing.T) {
	basic := &BasicAuth{Verify: Passwords(map[string]string{"alice": "secret"})}
	curl := func(w *world, args ...string) []string {
		return append([]string{"curl", "-sS", "--max-time", "20", "--cacert", "ca.pem", "--cert", "client.pem", "--key", "client.key", "-x", "http://" + w.proxy}, args...)
	}
	const page = "https://svc.example.com/"
	t.Run("-x", func(t *testing.T) {
		w := newWorld(t, nil)
		wantOutput(t, w.mustRun(t, "", curl(w, page)...), greeting)
	})
	t.Run("--proxytunnel", func(t *testing.T) {
		w := newWorld(t, nil)
		wantOutput(t, w.mustRun(t, "", curl(w, "--proxytunnel", page)...), greeting)
	})
	t.Run("--proxytunnel to plain HTTP", func(t *testing.T) {
		w := newWorld(t, nil)
		srv := httptest.NewServer(http.HandlerFunc(func(rw http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(rw, "plain\n") }))
		defer srv.Close()
		w.router.mu.Lock()
		w.router.table["plain.test:80"] = srv.Listener.Addr().String()
		w.router.mu.Unlock()
		wantOutput(t, w.mustRun(t, "", curl(w, "--proxytunnel", "http://plain.test/")...), "plain\n")
	})
	t.Run("HTTP/1.0", func(t *testing.T) {
		w := newWorld(t, nil)
		wantOutput(t, w.mustRun(t, "", curl(w, "--proxy1.0", w.proxy, page)...), greeting)
	})
	t.Run("--proxy-user", func(t *testing.T) {
		w := newWorld(t, basic)
		wantOutput(t, w.mustRun(t, "", curl(w, "--proxy-user", "alice:secret", page)...), greeting)
	})
	t.Run("--proxy-anyauth", func(t *testing.T) { // a 407, then a new connection
		w := newWorld(t, basic)
		wantOutput(t, w.mustRun(t, "", curl(w, "--proxy-anyauth", "--proxy-user", "alice:secret", page)...), greeting)
		tunneltest.WantReason(t, w.gw.result(t), tunnel.NoAuth)
		if err := w.gw.result(t); err != nil {
			t.Errorf("second connection: %v", err)
		}
	})
	t.Run("wrong password", func(t *testing.T) {
		w := newWorld(t, basic)
		out, err := w.run(t, "", curl(w, "-v", "--proxy-user", "alice:wrong", page)...)
		if err == nil {
			t.Error("curl got through")
		}
		wantOutput(t, out, "CONNECT tunnel failed, response 407")
	})
	t.Run("no route", func(t *testing.T) {
		w := newWorld(t, nil)
		out, err := w.run(t, "", curl(w, "-v", "https://other.example.com/")...)
		if err == nil {
			t.Error("curl got through")
		}
		wantOutput(t, out, "CONNECT tunnel failed, response 403")
		wantOutput(t, out, `Proxy-Status: culvert; error=http_request_denied; details="no-route"`)
	})
	t.Run("plain GET by proxy", func(t *testing.T) {
		w := newWorld(t, nil)
		wantOutput(t, w.mustRun(t, "", curl(w, "-i", "http://svc.example.com/")...), "HTTP/1.1 405 Method Not Allowed\r\n")
	})
}

func TestGit(t *testing.T) {
	w := newWorld(t, &BasicAuth{Verify: Passwords(map[string]string{"alice": "secret"})})
	git := func(args ...string) string { return w.mustRun(t, "", append([]string{"git"}, args...)...) }
	git("init", "-q", "work")
	git("-C", "work", "-c", "user.name=a", "-c", "user.email=a@example.com", "commit", "-q", "--allow-empty", "-m", "over the tunnel")
	git("clone", "-q", "--bare", "work", "repo.git")
	git("-C", "repo.git", "update-server-info")
	git("-c", "http.proxy=http://alice:secret@"+w.proxy, "-c", "http.sslCAInfo="+filepath.Join(w.dir, "ca.pem"),
		"-c", "http.sslCert="+filepath.Join(w.dir, "client.pem"), "-c", "http.sslKey="+filepath.Join(w.dir, "client.key"),
		"clone", "-q", "https://svc.example.com/repo.git", "copy")
	wantOutput(t, git("-C", "copy", "log", "--format=%s"), "over the tunnel\n")
	if asked, _ := w.router.asked(); len(asked) == 0 || asked[0].Peer.ID != "alice" {
		t.Errorf("got requests %+v, want some by alice", asked)
	}
}

func TestGoTransport(t *testing.T) {
	w := newWorld(t, &BasicAuth{Verify: Passwords(map[string]string{"alice": "secret"})})
	cfg := &tls.Config{RootCAs: w.roots, Certificates: []tls.Certificate{w.cert}}
	for name, tr := range map[string]*http.Transport{
		"Proxy": {TLSClientConfig: cfg.Clone(), Proxy: http.ProxyURL(&url.URL{Scheme: "http", Host: w.proxy, User: url.UserPassword("alice", "secret")})},
		"DialContext": {TLSClientConfig: cfg.Clone(), DialContext: (&Dialer{
			Proxy: w.proxy, Authorization: BasicCredentials("alice", "secret"),
		}).DialContext},
	} {
		client := &http.Client{Transport: tr, Timeout: patience}
		res, err := client.Get("https://svc.example.com/")
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		body, err := io.ReadAll(res.Body)
		_ = res.Body.Close()
		if string(body) != greeting || err != nil {
			t.Errorf("%s: got %q, %v, want %q", name, body, err, greeting)
		}
		tr.CloseIdleConnections()
	}
}

// openssl asks in HTTP/1.0, without Host.
func TestOpenSSL(t *testing.T) {
	w := newWorld(t, nil)
	out := w.mustRun(t, "GET / HTTP/1.0\r\nHost: svc.example.com\r\n\r\n", "openssl", "s_client", "-proxy", w.proxy, "-connect", "svc.example.com:443",
		"-servername", "svc.example.com", "-CAfile", "ca.pem", "-cert", "client.pem", "-key", "client.key", "-verify_return_error", "-ign_eof")
	wantOutput(t, out, "Verify return code: 0 (ok)")
	wantOutput(t, out, greeting)

	out, err := w.run(t, "", "openssl", "s_client", "-proxy", w.proxy, "-connect", "other.example.com:443")
	if err == nil {
		t.Error("openssl got through")
	}
	wantOutput(t, out, "403 Forbidden")
}

func TestPython(t *testing.T) {
	const script = `
import http.client, ssl, sys, base64
proxy, host = sys.argv[1], sys.argv[2]
ctx = ssl.create_default_context(cafile="ca.pem")
ctx.load_cert_chain("client.pem", "client.key")
c = http.client.HTTPSConnection(proxy, context=ctx, timeout=20)
c.set_tunnel(host, 443, headers={"Proxy-Authorization": "Bearer t0ken"})
try:
    c.request("GET", "/")
    print(c.getresponse().read().decode(), end="")
except OSError as e:
    print("refused:", e)
`
	w := newWorld(t, &Bearer{Verify: Tokens(map[string]string{"ci": "t0ken"})})
	wantOutput(t, w.mustRun(t, script, "python3", "-", w.proxy, "svc.example.com"), greeting)
	wantOutput(t, w.mustRun(t, script, "python3", "-", w.proxy, "other.example.com"), "refused: Tunnel connection failed: 403 Forbidden")
}

func TestNode(t *testing.T) {
	const script = `
const http = require("http"), https = require("https"), fs = require("fs");
const [host, port] = process.argv[2].split(":");
const req = http.request({ host, port, method: "CONNECT", path: process.argv[3] + ":443" });
req.on("connect", (res, socket) => {
  if (res.statusCode !== 200) { console.log("refused:", res.statusCode, res.headers["proxy-status"]); socket.destroy(); return; }
  https.get({ host: process.argv[3], path: "/", socket, agent: false,
    ca: fs.readFileSync("ca.pem"), cert: fs.readFileSync("client.pem"), key: fs.readFileSync("client.key"),
  }, r => r.pipe(process.stdout));
});
req.end();
`
	w := newWorld(t, nil)
	wantOutput(t, w.mustRun(t, script, "node", "-", w.proxy, "svc.example.com"), greeting)
	wantOutput(t, w.mustRun(t, script, "node", "-", w.proxy, "other.example.com"), `refused: 403 culvert; error=http_request_denied; details="no-route"`)
}
