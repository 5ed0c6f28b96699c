//go:build unix

package interop

import (
	"bytes"
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/spiffe/go-spiffe/v2/bundle/spiffebundle"
	"github.com/spiffe/go-spiffe/v2/federation"
	"github.com/spiffe/go-spiffe/v2/proto/spiffe/workload"
	"github.com/spiffe/go-spiffe/v2/spiffeid"

	"culvert.dev/identity/spiffe/spiffetest"
	"culvert.dev/internal/testca"
	"culvert.dev/internal/testnet"
)

// A mesh is a trust domain with a gateway and its agent.
type mesh struct {
	t      *testing.T
	domain string
	agent  *spiffetest.Agent
	other  func() []*testca.CA // the CAs of the other mesh, where the agent knows them

	mu      sync.Mutex
	cas     []*testca.CA // that are trusted, the newest last
	signs   *testca.CA
	gateway *workload.X509SVID

	issued  int
	workers atomic.Pointer[string] // path of the certificate and key of a workload, less their endings
	dir     string
}

func newMesh(t *testing.T, domain string, other func() []*testca.CA) *mesh {
	t.Helper()
	m := &mesh{t: t, domain: domain, dir: t.TempDir(), other: other}
	m.addCA()
	m.signs = m.cas[0]
	m.issue()
	m.agent = spiffetest.New(t, m.answer())
	return m
}

// addCA has the mesh trust one more CA, which signs nothing yet.
func (m *mesh) addCA() {
	ca, err := testca.New(m.domain, nil)
	must(m.t, err)
	m.mu.Lock()
	defer m.mu.Unlock()
	m.cas = append(m.cas, ca)
}

// trusted returns the CAs of the mesh.
func (m *mesh) trusted() []*testca.CA {
	m.mu.Lock()
	defer m.mu.Unlock()
	return append([]*testca.CA(nil), m.cas...)
}

// issue makes new SVIDs of the gateway and of a workload.
func (m *mesh) issue() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.gateway = spiffetest.SVID(m.t, m.signs, testca.Options{SPIFFEID: m.id("gw"), DNSNames: []string{"svc." + m.domain}, IPs: []net.IP{{127, 0, 0, 1}}})
	pair, err := m.signs.Issue(testca.Options{SPIFFEID: m.id("web"), Usage: testca.ClientOnly})
	must(m.t, err)
	m.issued++
	name := fmt.Sprintf("web%d", m.issued)
	must(m.t, pair.Save(m.dir, name))
	path := filepath.Join(m.dir, name)
	m.workers.Store(&path)
}

func (m *mesh) id(name string) string { return "spiffe://" + m.domain + "/ns/edge/sa/" + name }

func (m *mesh) answer() spiffetest.Answer {
	m.mu.Lock()
	defer m.mu.Unlock()
	a := spiffetest.Answer{SVIDs: []*workload.X509SVID{m.gateway}, Bundles: map[string][]byte{"spiffe://" + m.domain: spiffetest.Bundle(m.cas...)}}
	if m.other != nil {
		cas := m.other()
		a.Bundles["spiffe://"+cas[0].TrustDomain] = spiffetest.Bundle(cas...)
	}
	return a
}

// isShownAt reports whether the gateway's certificate is the last one that was issued.
func (m *mesh) isShownAt(port string) bool {
	c, err := tls.Dial("tcp", "127.0.0.1:"+port, &tls.Config{InsecureSkipVerify: true})
	if err != nil {
		return false
	}
	defer c.Close()
	m.mu.Lock()
	defer m.mu.Unlock()
	return bytes.Equal(c.ConnectionState().PeerCertificates[0].Raw, m.gateway.X509Svid)
}

// bundle is what a bundle endpoint of the mesh serves now.
func (m *mesh) bundle() *spiffebundle.Bundle {
	b := spiffebundle.New(spiffeid.RequireTrustDomainFromString(m.domain))
	for _, ca := range m.trusted() {
		b.AddX509Authority(ca.Root())
	}
	b.SetRefreshHint(time.Second)
	return b
}

// serveBundle starts go-spiffe's bundle endpoint, by https_spiffe.
func (m *mesh) serveBundle() (url string) {
	srv := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		h, err := federation.NewHandler(spiffeid.RequireTrustDomainFromString(m.domain), m.bundle())
		if err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
			return
		}
		h.ServeHTTP(w, r)
	}))
	srv.TLS = &tls.Config{GetConfigForClient: func(*tls.ClientHelloInfo) (*tls.Config, error) {
		m.mu.Lock()
		defer m.mu.Unlock()
		pair, err := m.signs.Issue(testca.Options{SPIFFEID: m.id("bundles")})
		if err != nil {
			return nil, err
		}
		return &tls.Config{Certificates: []tls.Certificate{pair.TLS}}, nil
	}}
	srv.Config.ErrorLog = slog.NewLogLogger(slog.DiscardHandler, 0)
	srv.StartTLS()
	m.t.Cleanup(srv.Close)
	return srv.URL
}

// TestMeshesRotateUnderLoad: the gateways of two meshes have all keys and CAs from their
// agents and from a bundle endpoint. Keys rotate every second and the CAs of both sides are
// replaced, while workloads of both come by mutual TLS, by HBONE, and through one gateway to
// the other. Nobody fails, and no gateway makes a table.
func TestMeshesRotateUnderLoad(t *testing.T) {
	corp := newMesh(t, "corp.example", nil)
	partner := newMesh(t, "partner.example", corp.trusted)
	backend := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Connection", "close")
		_, _ = io.WriteString(w, "admitted\n")
	}))
	t.Cleanup(backend.Close)

	type ports struct{ mtls, hbone, connect, bundle string }
	at := func() ports { return ports{freePort(t), freePort(t), freePort(t), freePort(t)} }
	ours, theirs := at(), at()
	config := func(m *mesh, own, far ports, other, trust string) string {
		return fmt.Sprintf(`
listeners:
  - address: 127.0.0.1:%[1]s
    tls: {names: [svc.%[5]s], key: gateway, trust: [corp.example, partner.example], protocols: [tcp]}
  - {address: "127.0.0.1:%[2]s", tls: {key: gateway, trust: [corp.example, partner.example], protocols: [hbone]}}
  - {address: "127.0.0.1:%[3]s", protocols: [connect]}
admin: 127.0.0.1:%[4]s
identity:
  spiffe: {socket: "%[6]s"}
  keys:
    gateway: {spiffe: "spiffe://%[5]s/ns/edge/sa/gw"}
  trust:
    %[5]s: {spiffe: true}
    %[7]s: %[8]s
  serveBundle: {listener: "127.0.0.1:%[9]s", trust: %[5]s, key: gateway}
services:
  - {name: svc.%[5]s, endpoints: ["%[10]s"]}
  - name: svc.%[7]s
    ports: [443]
    via: [{hbone: "127.0.0.1:%[11]s", key: gateway, trust: %[7]s, peers: ["spiffe://%[7]s/ns/edge/sa/gw"]}]
`, own.mtls, own.hbone, own.connect, freePort(t), m.domain, m.agent.Socket(), other, trust, own.bundle, backend.Listener.Addr(), far.hbone)
	}
	write := func(m *mesh, name, text string) string {
		path := filepath.Join(m.dir, name)
		must(t, os.WriteFile(path, []byte(text), 0o600))
		return path
	}
	first, err := partner.bundle().Marshal()
	must(t, err)
	write(corp, "partner.json", string(first))
	byEndpoint := fmt.Sprintf("{bundle: %q, endpointID: %q, bundleFile: partner.json}", partner.serveBundle(), partner.id("bundles"))
	a := startGateway(t, "--config", write(corp, "culvert.yaml", config(corp, ours, theirs, partner.domain, byEndpoint)))
	b := startGateway(t, "--config", write(partner, "culvert.yaml", config(partner, theirs, ours, corp.domain, "{spiffe: true}")))

	// published is what a gateway serves as its bundle, to go-spiffe's client.
	published := func(m *mesh, port string) int {
		t.Helper()
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		defer cancel()
		got, err := federation.FetchBundle(ctx, spiffeid.RequireTrustDomainFromString(m.domain), "https://127.0.0.1:"+port+"/bundle",
			federation.WithSPIFFEAuth(spiffebundle.NewSet(m.bundle()), spiffeid.RequireFromString(m.id("gw"))))
		if err != nil {
			return 0 // it has no key yet
		}
		return len(got.X509Authorities())
	}
	testnet.Eventually(t, patience, func() bool { return published(corp, ours.bundle) == 1 && published(partner, theirs.bundle) == 1 }, "both gateways have their bundles")
	generations := [2]float64{a.generation(t), b.generation(t)}

	// What clients verify gateways by is written anew with each CA.
	roots := write(corp, "roots.pem", "")
	saveRoots := func() {
		var text []byte
		for _, ca := range append(corp.trusted(), partner.trusted()...) {
			text = append(text, ca.CertPEM...)
		}
		must(t, os.WriteFile(roots+".new", text, 0o600))
		must(t, os.Rename(roots+".new", roots))
	}
	saveRoots()
	https := func(m *mesh, by ports) []string {
		name := "svc." + m.domain
		return []string{"curl", "-sS", "-m", "60", "--cacert", roots, "--connect-to", name + ":443:127.0.0.1:" + by.mtls, "https://" + name + "/"}
	}
	own := func(m *mesh, prefix string, args []string) func() []string {
		return func() []string {
			path := *m.workers.Load()
			return append(args[:len(args):len(args)], "--"+prefix+"cert", path+".crt", "--"+prefix+"key", path+".key")
		}
	}
	loads := map[string]func() []string{
		"curl of corp, mutual TLS":    own(corp, "", https(corp, ours)),
		"curl of partner, mutual TLS": own(partner, "", https(corp, ours)),
		"curl of corp to partner":     own(corp, "", https(partner, theirs)),
		"curl of partner, HBONE":      own(partner, "proxy-", []string{"../../bin/newcurl/curl", "-sS", "-m", "60", "--proxy-http2", "-p", "--proxy-cacert", roots, "-x", "https://127.0.0.1:" + ours.hbone, "http://svc.corp.example:443/"}),
		"from one gateway to the other": func() []string {
			return []string{"curl", "-sS", "-m", "60", "-p", "-x", "http://127.0.0.1:" + ours.connect, "http://svc.partner.example:443/"}
		},
		"and back": func() []string {
			return []string{"curl", "-sS", "-m", "60", "-p", "-x", "http://127.0.0.1:" + theirs.connect, "http://svc.corp.example:443/"}
		},
		"openssl of partner": func() []string {
			path := *partner.workers.Load()
			return []string{"openssl", "s_client", "-connect", "127.0.0.1:" + ours.mtls, "-servername", "svc.corp.example", "-CAfile", roots,
				"-verify_return_error", "-quiet", "-cert", path + ".crt", "-key", path + ".key"}
		},
	}
	var (
		running sync.RWMutex // held for reading by each client that runs
		wg      sync.WaitGroup
		done    = make(chan struct{})
		counts  = make(map[string]*atomic.Int64)
	)
	for name, args := range loads {
		n := new(atomic.Int64)
		counts[name] = n
		program := look(t, args()[0])
		wg.Go(func() {
			for {
				select {
				case <-done:
					return
				default:
				}
				running.RLock()
				line := args()
				cmd := exec.Command(program, line[1:]...)
				cmd.Env, cmd.Stdin = environ(), strings.NewReader("GET / HTTP/1.0\r\nHost: a\r\n\r\n")
				out, err := cmd.CombinedOutput()
				running.RUnlock()
				if !bytes.Contains(out, []byte("admitted")) {
					t.Errorf("%s: %v, %s\n%s", name, err, out, strings.Join(line, " "))
					return
				}
				n.Add(1)
			}
		})
	}
	stop := sync.OnceFunc(func() { close(done); wg.Wait() })
	defer stop()
	// each waits until all clients have come again, a few times.
	each := func(times int64, what string) {
		t.Helper()
		for name, n := range counts {
			before := n.Load()
			testnet.Eventually(t, 3*patience, func() bool { return n.Load() >= before+times || t.Failed() }, "%s: %s comes", what, name)
		}
	}
	tell := func() {
		corp.agent.Set(corp.answer())
		partner.agent.Set(partner.answer())
	}
	// rotate gives workloads and gateways new keys, and waits until the gateways show theirs.
	rotate := func() {
		t.Helper()
		corp.issue()
		partner.issue()
		tell()
		for m, port := range map[*mesh]string{corp: ours.bundle, partner: theirs.bundle} {
			testnet.Eventually(t, patience, func() bool { return m.isShownAt(port) }, "the gateway of %s shows its new key", m.domain)
		}
	}

	each(1, "at first")
	for range 2 {
		rotate()
		each(1, "with new keys")
	}
	// The next CAs are known to all before they sign.
	corp.addCA()
	partner.addCA()
	saveRoots()
	tell()
	testnet.Eventually(t, 3*patience, func() bool {
		return published(corp, ours.bundle) == 2 && published(partner, theirs.bundle) == 2 && strings.Contains(a.output(), `"msg":"bundle changed"`) && strings.Contains(a.output(), `"roots":2`)
	}, "the gateways have the CAs of both sides")
	each(1, "before the new CAs sign")
	corp.signs, partner.signs = corp.trusted()[1], partner.trusted()[1]
	rotate()
	each(2, "with keys of the new CAs")
	// What the old ones have signed is used by nobody any more.
	running.Lock()
	for _, m := range []*mesh{corp, partner} {
		m.mu.Lock()
		m.cas = m.cas[1:]
		m.mu.Unlock()
	}
	running.Unlock()
	tell()
	testnet.Eventually(t, patience, func() bool { return published(corp, ours.bundle) == 1 }, "the old CA is gone")
	rotate()
	each(2, "without the old CAs")
	stop()

	if got := [2]float64{a.generation(t), b.generation(t)}; got != generations {
		t.Errorf("the generations of the tables went from %v to %v", generations, got)
	}
	for name, n := range counts {
		t.Logf("%s: %d connections", name, n.Load())
	}
	for _, m := range []*mesh{corp, partner} {
		peer := m.id("web")
		a.line(t, "logged "+peer, func(l line) bool { return l.Peer == peer && l.Service == "svc.corp.example" })
	}
	a.line(t, "logged the other gateway", func(l line) bool { return l.Proto == "hbone" && l.Peer == partner.id("gw") })
	b.line(t, "logged the other gateway", func(l line) bool { return l.Proto == "hbone" && l.Peer == corp.id("gw") })
}

// generation is that of the gateway's table.
func (g *gateway) generation(t *testing.T) (n float64) {
	t.Helper()
	body, err := g.get("/metrics")
	must(t, err)
	for l := range strings.Lines(string(body)) {
		if v, ok := strings.CutPrefix(l, "culvert_registry_generation "); ok {
			if _, err := fmt.Sscan(v, &n); err != nil {
				t.Fatalf("metric %q: %v", l, err)
			}
		}
	}
	return n
}
