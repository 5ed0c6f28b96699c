//go:build unix

package interop

import (
	"crypto/tls"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"culvert.dev/internal/testca"
)

// The service's name, and the client's identity.
const (
	svc        = "svc.example.test"
	clientID   = "spiffe://example.test/ns/shop/sa/web"
	clientPeer = "uri:" + clientID // what logs have: no trust domain is configured
)

// A world is a CA with certificates for a service and a client, in files, and
// those of a CA nobody knows.
type world struct {
	dir             string
	host            string   // at which gateways and what is in front of them listen
	within          []string // the command that runs client programs in a network of their own; nil for none
	authority       *testca.CA
	client, service *testca.Pair

	ca, cert, key       string // files
	svcCert, svcKey     string
	wrongCert, wrongKey string // of the other CA
}

func newWorld(t *testing.T) *world {
	t.Helper()
	w := &world{dir: t.TempDir(), host: "127.0.0.1"}
	file := func(name string) string { return filepath.Join(w.dir, name) }
	w.ca, w.cert, w.key = file("ca.crt"), file("web.crt"), file("web.key")
	w.svcCert, w.svcKey = file("svc.crt"), file("svc.key")
	w.wrongCert, w.wrongKey = file("other/web.crt"), file("other/web.key")

	ca, err := testca.New("example.test", nil)
	must(t, err)
	must(t, ca.Save(w.dir))
	w.authority = ca
	w.client = issue(t, ca, w.dir, "web", testca.Options{SPIFFEID: clientID, Usage: testca.ClientOnly})
	w.service = issue(t, ca, w.dir, "svc", testca.Options{
		SPIFFEID: "spiffe://example.test/ns/shop/sa/svc", DNSNames: []string{svc}, Usage: testca.ServerOnly,
	})
	other, err := testca.New("example.test", nil)
	must(t, err)
	must(t, other.Save(file("other")))
	issue(t, other, file("other"), "web", testca.Options{SPIFFEID: clientID, Usage: testca.ClientOnly})
	return w
}

func issue(t *testing.T, ca *testca.CA, dir, name string, o testca.Options) *testca.Pair {
	t.Helper()
	pair, err := ca.Issue(o)
	must(t, err)
	must(t, pair.Save(dir, name))
	return pair
}

// serial is the client's serial number, as nginx and openssl write it.
func (w *world) serial() string {
	s := fmt.Sprintf("%X", w.client.TLS.Leaf.SerialNumber)
	return strings.Repeat("0", len(s)%2) + s
}

// write makes a file and returns its path.
func (w *world) write(t *testing.T, name, text string) string {
	t.Helper()
	path := filepath.Join(w.dir, name)
	must(t, os.WriteFile(path, []byte(text), 0o600))
	return path
}

// serveHTTPS starts a Go server that wants a client certificate.
func (w *world) serveHTTPS(t *testing.T, h http.Handler) (addr string) {
	t.Helper()
	srv := httptest.NewUnstartedServer(h)
	srv.TLS = w.service.ServerConfig()
	srv.EnableHTTP2 = true
	srv.StartTLS()
	t.Cleanup(srv.Close)
	return srv.Listener.Addr().String()
}

// whoami answers with the client's identity.
func whoami(rw http.ResponseWriter, r *http.Request) {
	id, err := testca.PeerID(r.TLS.PeerCertificates[0])
	if err != nil {
		http.Error(rw, err.Error(), http.StatusInternalServerError)
		return
	}
	_, _ = fmt.Fprintf(rw, "you are %s by %s, %s\n", id, r.Proto, tls.VersionName(r.TLS.Version))
}

// nginx starts an nginx that wants a client certificate and says whose it was.
func (w *world) nginx(t *testing.T) (addr string) {
	t.Helper()
	addr = "127.0.0.1:" + freePort(t)
	w.runNginx(t, "nginx", addr, "", fmt.Sprintf(`
	server {
		listen %[1]s ssl http2;
		ssl_certificate %[2]s;
		ssl_certificate_key %[3]s;
		ssl_client_certificate %[4]s;
		ssl_verify_client on;
		default_type text/plain;
		location / {
			return 200 "dn=$ssl_client_s_dn serial=$ssl_client_serial proto=$server_protocol sni=$ssl_server_name\n";
		}
	}`, addr, w.svcCert, w.svcKey, w.ca))
	return addr
}

// runNginx starts an nginx of what stands in its http block and, if it has one,
// in stream, and waits until it listens at addr.
func (w *world) runNginx(t *testing.T, name, addr, stream, http string) {
	t.Helper()
	dir := filepath.Join(w.dir, name)
	must(t, os.MkdirAll(dir, 0o700))
	module := ""
	if stream != "" {
		module = "load_module /usr/lib/nginx/modules/ngx_stream_module.so;\n"
		stream = "stream {\n" + stream + "\n}\n"
	}
	conf := fmt.Sprintf(`%[2]sdaemon off;
master_process off;
pid %[1]s/pid;
error_log stderr warn;
events {}
%[3]shttp {
	access_log off;
	client_body_temp_path %[1]s/body;
	proxy_temp_path %[1]s/proxy;
	fastcgi_temp_path %[1]s/fastcgi;
	uwsgi_temp_path %[1]s/uwsgi;
	scgi_temp_path %[1]s/scgi;
	%[4]s
}
`, dir, module, stream, http)
	start(t, "nginx", "-p", dir, "-e", "stderr", "-c", w.write(t, name+".conf", conf)).listens(t, addr)
}

// sshd starts an OpenSSH server on a port of loopback that runs one command, whatever its clients
// ask for; "" runs theirs. The key "client" of the folder lets in.
func (w *world) sshd(t *testing.T, forced string) (dir, port string) {
	t.Helper()
	dir = filepath.Join(w.dir, "ssh")
	must(t, os.MkdirAll(dir, 0o700))
	for _, name := range []string{"host", "client"} {
		if _, errs, code := command(t, "ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", filepath.Join(dir, name)); code != 0 {
			t.Fatalf("ssh-keygen: %s", errs)
		}
	}
	public, err := os.ReadFile(filepath.Join(dir, "client.pub"))
	must(t, err)
	must(t, os.WriteFile(filepath.Join(dir, "authorized"), public, 0o600))
	if os.Geteuid() == 0 {
		must(t, os.MkdirAll("/run/sshd", 0o755)) // where sshd gives up its rights; its init script makes it
	}
	port = freePort(t)
	sshd := start(t, "/usr/sbin/sshd", "-D", "-e", "-f", "/dev/null", "-h", filepath.Join(dir, "host"), "-p", port,
		"-o", "ListenAddress=127.0.0.1", "-o", "PidFile=none", "-o", "MaxStartups=1000", "-o", "StrictModes=no", "-o", "UsePAM=no",
		"-o", "AuthorizedKeysFile="+filepath.Join(dir, "authorized"), "-o", "PasswordAuthentication=no", "-o", "KbdInteractiveAuthentication=no",
		"-o", "ForceCommand="+orNone(forced), "-o", "Subsystem=sftp internal-sftp", "-o", "ExposeAuthInfo=yes")
	sshd.listens(t, "127.0.0.1:"+port)
	return dir, port
}

// orNone is what sshd calls no command.
func orNone(command string) string {
	if command == "" {
		return "none"
	}
	return command
}

// route is a --route of the service, for any port.
func route(addr string) string { return svc + "=" + addr }

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
