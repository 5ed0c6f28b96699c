package command

import (
	"context"
	"encoding/json"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"culvert.dev/internal/testca"
	"culvert.dev/internal/testnet"
)

// A sickMachine is one that the doctor looks at: a good one that a test breaks.
type sickMachine struct {
	w *reverseWorld
	d *doctor
	o doctorOptions
}

func newSickMachine(t *testing.T, w *reverseWorld) *sickMachine {
	t.Helper()
	m := &sickMachine{w: w, d: newDoctorOf()}
	m.d.root = t.TempDir()
	m.sysctl(t, "user/max_user_namespaces", "1000")
	m.d.nft = func(context.Context) ([]byte, error) { return []byte(`{"nftables":[]}`), nil }
	m.o.timeout = patience
	m.o.agent = agentFlags{gateways: []string{w.gateway.addrs[0]}, gatewayAccess: gatewayAccess{serverName: "gw1.example"}, proxy: "unix:" + filepath.Join(t.TempDir(), "proxy.sock")}
	m.shows(t, w.issue(t, "spiffe://corp.example/ns/edge/sa/one"))
	m.o.agent.ca = m.file(t, "ca.pem", w.ca.CertPEM)
	return m
}

func (m *sickMachine) file(t *testing.T, name string, content []byte) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	if err := os.WriteFile(path, content, 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func (m *sickMachine) shows(t *testing.T, pair *testca.Pair) {
	t.Helper()
	m.o.agent.cert, m.o.agent.key = m.file(t, "me.crt", pair.CertPEM), m.file(t, "me.key", pair.KeyPEM)
}

func (m *sickMachine) sysctl(t *testing.T, name, value string) {
	t.Helper()
	path := filepath.Join(m.d.root, "proc/sys", name)
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(value+"\n"), 0o644); err != nil {
		t.Fatal(err)
	}
}

func issueAt(t *testing.T, w *reverseWorld, from time.Time) *testca.Pair {
	t.Helper()
	pair, err := w.ca.Issue(testca.Options{SPIFFEID: "spiffe://corp.example/ns/edge/sa/one", NotBefore: from, TTL: 24 * time.Hour})
	if err != nil {
		t.Fatal(err)
	}
	return pair
}

const foreignRules = `{"nftables":[{"metainfo":{"version":"1.0.6"}},
{"chain":{"family":"inet","table":"culvert","name":"output","type":"nat","hook":"output","prio":-101}},
{"chain":{"family":"ip","table":"mesh","name":"out","type":"nat","hook":"output","prio":-110,"policy":"accept"}},
{"rule":{"family":"ip","table":"mesh","chain":"out","handle":4,"expr":[{"match":{}},{"redirect":{"port":15001}}]}},
{"rule":{"family":"inet","table":"culvert","chain":"output","handle":4,"expr":[{"redirect":{"port":1}}]}}]}`

// Each broken set-up is named in a sentence, with what to do.
func TestDoctorNamesTheFault(t *testing.T) {
	w := newReverseWorld(t)
	other := newTestCA(t, "other.example")
	for name, c := range map[string]struct {
		breaks func(t *testing.T, m *sickMachine)
		check  string
		state  string
		text   string
		remedy string
	}{
		"nothing":              {func(*testing.T, *sickMachine) {}, "carrier", checkOK, "is reached by connect", ""},
		"a carrier is blocked": {func(*testing.T, *sickMachine) {}, "carrier", checkWarning, "is not reached by connect-h3", "let UDP to that port through"},
		"DNS": {func(_ *testing.T, m *sickMachine) {
			m.o.agent.gateways = []string{"gw.invalid"}
			m.d.lookup = func(context.Context, string) ([]string, error) {
				return nil, &net.DNSError{Err: "no such host", IsNotFound: true}
			}
		}, "dns", checkFailed, "DNS does not know the gateway gw.invalid", "correct the name"},
		"no DNS server": {func(_ *testing.T, m *sickMachine) {
			m.o.agent.gateways = []string{"gw.invalid"}
			m.d.lookup = func(context.Context, string) ([]string, error) { return nil, &net.DNSError{Err: "server misbehaving"} }
		}, "dns", checkFailed, "DNS does not answer", "/etc/resolv.conf"},
		"the clock":      {func(t *testing.T, m *sickMachine) { m.shows(t, issueAt(t, m.w, time.Now().Add(time.Hour))) }, "clock", checkFailed, "the clock is behind", "set the clock"},
		"an expired key": {func(t *testing.T, m *sickMachine) { m.shows(t, issueAt(t, m.w, time.Now().Add(-48*time.Hour))) }, "key", checkFailed, "has expired at", "replace its files"},
		"a key of another certificate": {func(t *testing.T, m *sickMachine) {
			m.o.agent.key = m.file(t, "other.key", m.w.issue(t, "spiffe://corp.example/x").KeyPEM)
		}, "key", checkFailed, "does not belong to the certificate", "made together"},
		"an unknown CA": {func(t *testing.T, m *sickMachine) { m.o.agent.ca = m.file(t, "ca.pem", other.CertPEM) }, "trust", checkFailed, "signed by a CA that this machine does not trust", "--ca FILE"},
		"a stranger": {func(t *testing.T, m *sickMachine) {
			pair, err := other.Issue(testca.Options{SPIFFEID: "spiffe://other.example/me"})
			if err != nil {
				t.Fatal(err)
			}
			m.shows(t, pair)
		}, "identity", checkFailed, "does not accept the identity of this machine", "its log has the reason"},
		"the gateway is away": {func(t *testing.T, m *sickMachine) { m.o.agent.gateways = []string{testnet.ClosedPort(t)} }, "tcp", checkFailed, "nothing accepts connections", "start the gateway"},
		"a captive portal that redirects": {func(t *testing.T, m *sickMachine) {
			m.portal(t, func(w http.ResponseWriter, r *http.Request) {
				http.Redirect(w, r, "http://login.example/", http.StatusFound)
			})
		}, "portal", checkFailed, "a captive portal answers in place of the gateway", "log in to the network"},
		"a captive portal with a page": {func(t *testing.T, m *sickMachine) {
			m.portal(t, func(w http.ResponseWriter, _ *http.Request) {
				w.Header().Set("Content-Type", "text/html")
				_, _ = w.Write([]byte("<html>pay here</html>"))
			})
		}, "portal", checkFailed, "it answers HTTP with a page", "log in to the network"},
		"an upstream proxy":                           {func(t *testing.T, m *sickMachine) { m.behindProxy(t, "") }, "carrier", checkOK, "the gateway gw.corp.example:443 is reached by connect", ""},
		"an upstream proxy that asks for credentials": {func(t *testing.T, m *sickMachine) { m.behindProxy(t, "secret") }, "proxy", checkFailed, "it asks for credentials", "upstreamProxy"},
		"an upstream proxy that is away": {func(t *testing.T, m *sickMachine) {
			m.behindProxy(t, "")
			m.o.agent.upstream = "http://" + testnet.ClosedPort(t)
		}, "proxy", checkFailed, "can't be reached", "url of upstreamProxy"},
		"rules of others": {func(_ *testing.T, m *sickMachine) {
			m.d.nft = func(context.Context) ([]byte, error) { return []byte(foreignRules), nil }
		}, "nftables", checkWarning, "chain out of table ip mesh, which comes before culvert's rules in output, redirects connections", "nft list chain ip mesh out"},
		"no user namespaces":       {func(t *testing.T, m *sickMachine) { m.sysctl(t, "user/max_user_namespaces", "0") }, "userns", checkWarning, "user namespaces are off", "sysctl -w user.max_user_namespaces"},
		"user namespaces for root": {func(t *testing.T, m *sickMachine) { m.sysctl(t, "kernel/unprivileged_userns_clone", "0") }, "userns", checkWarning, "for root alone", "kernel.unprivileged_userns_clone=1"},
		"AppArmor":                 {func(t *testing.T, m *sickMachine) { m.sysctl(t, "kernel/apparmor_restrict_unprivileged_userns", "1") }, "userns", checkWarning, "AppArmor", "profile"},
		"a port is taken":          {func(t *testing.T, m *sickMachine) { m.o.agent.proxy = testnet.Echo(t).Addr() }, "port", checkFailed, "another program has the port", "ss -ltnp"},
		"no configuration":         {func(_ *testing.T, m *sickMachine) { m.o.config = "/nonexistent/culvert.yaml" }, "config", checkFailed, "no such file", "doctor --help"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			m := newSickMachine(t, w)
			c.breaks(t, m)
			ctx, cancel := context.WithTimeout(t.Context(), m.o.timeout)
			defer cancel()
			m.d.examine(ctx, &m.o)
			found := false
			for _, got := range m.d.report.Checks {
				found = found || got.Check == c.check && got.State == c.state && strings.Contains(got.Text, c.text) && strings.Contains(got.Remedy, c.remedy)
				if got.State == checkFailed != (got.State == checkFailed && got.Remedy != "") {
					t.Errorf("a fault without a remedy: %+v", got)
				}
				if got.State == checkFailed && c.state != checkFailed {
					t.Errorf("a fault: %+v", got)
				}
			}
			if !found {
				t.Errorf("want %s %s with %q, got %+v", c.check, c.state, c.text, m.d.report.Checks)
			}
			var out strings.Builder
			m.d.report.print(newCleanWriter(&out))
			if strings.ContainsAny(out.String(), "\x1b\x00") || !strings.Contains(out.String(), c.text) {
				t.Errorf("the output is %q", out.String())
			}
		})
	}
}

// portal answers in the gateway's place.
func (m *sickMachine) portal(t *testing.T, f http.HandlerFunc) {
	t.Helper()
	s := httptest.NewServer(f)
	t.Cleanup(s.Close)
	m.o.agent.gateways = []string{s.Listener.Addr().String()}
}

// behindProxy has the gateway be at a name that a proxy alone knows, and that is asked for
// this password.
func (m *sickMachine) behindProxy(t *testing.T, password string) {
	t.Helper()
	gateway := m.w.gateway.addrs[0]
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if _, given, _ := r.BasicAuth(); r.Method != http.MethodConnect || given != password {
			w.Header().Set("Proxy-Authenticate", "Basic")
			w.WriteHeader(http.StatusProxyAuthRequired)
			return
		}
		to, err := net.Dial("tcp", gateway)
		if err != nil || r.Host != "gw.corp.example:443" {
			w.WriteHeader(http.StatusBadGateway)
			return
		}
		defer to.Close()
		from, _, err := http.NewResponseController(w).Hijack()
		if err != nil {
			return
		}
		defer from.Close()
		_, _ = from.Write([]byte("HTTP/1.1 200 OK\r\n\r\n"))
		done := make(chan struct{})
		go func() { defer close(done); _, _ = io.Copy(to, from); _ = to.Close() }()
		_, _ = io.Copy(from, to)
		_ = from.Close()
		<-done
	}))
	t.Cleanup(s.Close)
	m.o.agent.gateways, m.o.agent.upstream = []string{"gw.corp.example"}, s.URL
}

// The command says it as JSON, too, with exit code 1 for a fault.
func TestDoctorCommand(t *testing.T) {
	out, code := runText(t, "", "doctor", "--gateway", testnet.ClosedPort(t), "--token-file", filepath.Join(t.TempDir(), "none"), "-o", "json")
	var r doctorReport
	if err := json.Unmarshal([]byte(out), &r); err != nil || code == exitOK || r.Failed == 0 || len(r.Checks) == 0 {
		t.Errorf("exit code %d, %v: %s", code, err, out)
	}
}
