package bundle

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"log/slog"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/spiffe/go-spiffe/v2/bundle/spiffebundle"
	"github.com/spiffe/go-spiffe/v2/federation"
	"github.com/spiffe/go-spiffe/v2/spiffeid"

	"culvert.dev/identity"
	"culvert.dev/internal/testca"
	"culvert.dev/internal/testnet"
)

const waitFor = time.Minute

// An endpoint is a server whose answer and certificate a test sets.
type endpoint struct {
	*httptest.Server
	mu      sync.Mutex
	handler http.Handler
	cert    *tls.Certificate
	asked   []http.Header
}

func newEndpoint(t *testing.T, cert *tls.Certificate, h http.Handler) *endpoint {
	t.Helper()
	e := &endpoint{handler: h, cert: cert}
	e.Server = httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		e.mu.Lock()
		h := e.handler
		e.asked = append(e.asked, r.Header.Clone())
		e.mu.Unlock()
		h.ServeHTTP(w, r)
	}))
	e.TLS = &tls.Config{GetConfigForClient: func(*tls.ClientHelloInfo) (*tls.Config, error) {
		e.mu.Lock()
		defer e.mu.Unlock()
		return &tls.Config{Certificates: []tls.Certificate{*e.cert}}, nil // httptest has one of its own
	}}
	e.Config.ErrorLog = slog.NewLogLogger(slog.DiscardHandler, 0)
	e.StartTLS()
	t.Cleanup(e.Close)
	return e
}

func (e *endpoint) set(cert *tls.Certificate, h http.Handler) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if cert != nil {
		e.cert = cert
	}
	if h != nil {
		e.handler = h
	}
}

func (e *endpoint) requests() []http.Header {
	e.mu.Lock()
	defer e.mu.Unlock()
	return slices.Clone(e.asked)
}

// web returns a certificate for 127.0.0.1, and the pool that verifies it.
func web(t *testing.T) (*tls.Certificate, *x509.CertPool) {
	t.Helper()
	ca := newCA(t, "web.example")
	return svid(t, ca, "spiffe://web.example/server"), ca.Pool()
}

func svid(t *testing.T, ca *testca.CA, id string) *tls.Certificate {
	t.Helper()
	pair, err := ca.Issue(testca.Options{SPIFFEID: id, IPs: []net.IP{{127, 0, 0, 1}}})
	if err != nil {
		t.Fatal(err)
	}
	return &pair.TLS
}

// theirs is go-spiffe's handler, which serves the CAs of a trust domain.
func theirs(t *testing.T, td string, cas ...*testca.CA) http.Handler {
	t.Helper()
	domain := spiffeid.RequireTrustDomainFromString(td)
	b := spiffebundle.New(domain)
	for _, ca := range cas {
		b.AddX509Authority(ca.Root())
	}
	b.SetRefreshHint(time.Second)
	h, err := federation.NewHandler(domain, b)
	if err != nil {
		t.Fatal(err)
	}
	return h
}

type logged struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *logged) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *logged) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

func start(t *testing.T, endpoints ...Endpoint) (*Source, *logged) {
	t.Helper()
	out := new(logged)
	s := &Source{Store: new(identity.Store), Log: slog.New(slog.NewTextHandler(out, nil)), refresh: 10 * time.Millisecond}
	if err := s.Configure(endpoints); err != nil {
		t.Fatal(err)
	}
	run(t, s)
	return s, out
}

// run runs s until the test ends, or stop is called.
func run(t *testing.T, s *Source) (stop func()) {
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = s.Run(ctx)
	}()
	stop = func() {
		cancel()
		<-done
	}
	t.Cleanup(stop)
	return stop
}

// trusts waits until s trusts exactly these CAs for a trust domain.
func trusts(t *testing.T, s *Source, td string, cas ...*testca.CA) {
	t.Helper()
	testnet.Eventually(t, waitFor, func() bool {
		b, err := s.Store.Trust(td).Bundle()
		if err != nil || len(b.Roots) != len(cas) {
			return false
		}
		for i, ca := range cas {
			if !b.Roots[i].Equal(ca.Root()) {
				return false
			}
		}
		return true
	}, "%d CAs of %s; %v", len(cas), td, status{s})
}

type status struct{ *Source }

func (s status) String() string { return fmt.Sprintf("%+v", s.Status()) }

func problem(t *testing.T, s *Source, want string) {
	t.Helper()
	testnet.Eventually(t, waitFor, func() bool {
		return slices.ContainsFunc(s.Status(), func(st Status) bool {
			return want == "" && st.Problem == "" && !st.Updated.IsZero() || want != "" && strings.Contains(st.Problem, want)
		})
	}, "problem %q; %v", want, status{s})
}

// By https_web, go-spiffe's endpoint is verified by its host name. What it serves
// follows.
func TestWeb(t *testing.T) {
	cert, roots := web(t)
	one, two := newCA(t, "b.example"), newCA(t, "b.example")
	e := newEndpoint(t, cert, theirs(t, "b.example", one))
	s, _ := start(t, Endpoint{Name: "b.example", TrustDomain: "b.example", URL: e.URL, Roots: roots})
	trusts(t, s, "b.example", one)
	generation := s.Store.Trust("b.example").Generation()
	asked := len(e.requests())
	testnet.Eventually(t, waitFor, func() bool { return len(e.requests()) > asked+3 }, "more requests")
	if got := s.Store.Trust("b.example").Generation(); got != generation {
		t.Errorf("generation of an unchanged bundle: got %d, want %d", got, generation)
	}
	e.set(nil, theirs(t, "b.example", one, two))
	trusts(t, s, "b.example", one, two)
	// A host that proves nothing is not believed.
	other, _ := web(t)
	e.set(other, nil)
	problem(t, s, "unknown authority")
	e.set(nil, theirs(t, "b.example", two)) // once no verified connection is open
	trusts(t, s, "b.example", one, two)
	// One that does again, is.
	e.set(cert, nil)
	trusts(t, s, "b.example", two)
}

// By https_spiffe, the endpoint is verified by its id and the bundle that it has served
// before: its CA rotates, again and again, and nothing else is believed meanwhile.
func TestSPIFFE(t *testing.T) {
	const id = "spiffe://b.example/bundle"
	ca := newCA(t, "b.example")
	e := newEndpoint(t, svid(t, ca, id), theirs(t, "b.example", ca))
	boot := &identity.Bundle{TrustDomain: "b.example", Roots: []*x509.Certificate{ca.Root()}}
	s, _ := start(t, Endpoint{Name: "b.example", TrustDomain: "b.example", URL: e.URL, ID: id, Bootstrap: boot})
	problem(t, s, "")
	for range 3 {
		next := newCA(t, "b.example")
		e.set(nil, theirs(t, "b.example", ca, next))
		trusts(t, s, "b.example", ca, next)
		e.set(svid(t, next, id), theirs(t, "b.example", next))
		trusts(t, s, "b.example", next)
		ca = next
	}
	mallory := newCA(t, "b.example")
	for _, c := range []struct {
		cert *tls.Certificate
		want string
	}{
		{svid(t, ca, "spiffe://b.example/other"), "want one of"},
		{svid(t, mallory, id), "unknown CA"},
		{svid(t, newCA(t, "c.example"), "spiffe://c.example/bundle"), "trust domain"},
		{plain(t), "certificate"},
	} {
		e.set(c.cert, nil)
		problem(t, s, c.want)
		e.set(nil, theirs(t, "b.example", mallory)) // once no verified connection is open
		asked := len(e.requests())
		trusts(t, s, "b.example", ca)
		if n := len(e.requests()); n != asked {
			t.Errorf("%s: %d requests over connections that prove nothing, want none", c.want, n-asked)
		}
		e.set(nil, theirs(t, "b.example", ca))
		e.set(svid(t, ca, id), nil)
		problem(t, s, "")
	}
}

// plain returns a certificate with no name at all.
func plain(t *testing.T) *tls.Certificate {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(1), NotAfter: time.Now().Add(time.Hour)}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	return &tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}
}

// The endpoint of one trust domain may be a workload of another, whose bundle we have.
func TestSPIFFEOfAnotherDomain(t *testing.T) {
	const id = "spiffe://hub.example/bundles"
	hub, b := newCA(t, "hub.example"), newCA(t, "b.example")
	e := newEndpoint(t, svid(t, hub, id), theirs(t, "b.example", b))
	s, _ := start(t, Endpoint{Name: "b.example", TrustDomain: "b.example", URL: e.URL, ID: id})
	problem(t, s, "certificate can't be verified")
	s.Store.Trust("hub.example").Set(&identity.Bundle{TrustDomain: "hub.example", Roots: []*x509.Certificate{hub.Root()}})
	trusts(t, s, "b.example", b)
}

// Whatever an endpoint answers: the last good bundle stays, the problem is in the status
// and once in the log, and the next good answer ends it.
func TestBadAnswers(t *testing.T) {
	cert, roots := web(t)
	ca := newCA(t, "b.example")
	good := theirs(t, "b.example", ca)
	e := newEndpoint(t, cert, good)
	s, out := start(t, Endpoint{Name: "b.example", TrustDomain: "b.example", URL: e.URL, Roots: roots})
	elsewhere := newEndpoint(t, cert, theirs(t, "b.example", newCA(t, "b.example")))
	say := func(status int, body string) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			w.WriteHeader(status)
			_, _ = w.Write([]byte(body))
		})
	}
	for _, c := range []struct {
		name, want string
		handler    http.Handler
	}{
		{"another domain", `trust domain "c.example", want "b.example"`, theirs(t, "c.example", newCA(t, "c.example"))},
		{"empty bundle", "bundle is empty", say(200, `{"keys":[]}`)},
		{"redirect", "redirects (status 302)", http.RedirectHandler(elsewhere.URL, http.StatusFound)},
		{"more than 1 MiB", "more than 1048576 bytes", say(200, strings.Repeat(" ", MaxSize+1))},
		{"not JSON", "not a JWK set", say(200, "no")},
		{"a page", "page of HTML", say(200, "<!DOCTYPE html><html>")},
		{"an error", "status 500", say(500, "no")},
		{"not modified, unasked", "status 304", say(304, "")},
		{"an answer cut off", "unexpected EOF", http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Length", "1000")
			_, _ = w.Write([]byte("{"))
		})},
		{"a header of 64 KiB", "exceeded", http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("X-A", strings.Repeat("a", 64<<10))
		})},
	} {
		t.Run(c.name, func(t *testing.T) {
			e.set(nil, good)
			problem(t, s, "")
			trusts(t, s, "b.example", ca)
			e.set(nil, c.handler)
			problem(t, s, c.want)
			asked := len(e.requests())
			testnet.Eventually(t, waitFor, func() bool { return len(e.requests()) > asked+10 }, "more requests")
			trusts(t, s, "b.example", ca)
			if n := strings.Count(out.String(), c.want); n > 3 { // a busy machine may have others in between
				t.Errorf("the log has the problem %d times of more than 10, want once:\n%s", n, out)
			}
		})
	}
	if n := len(elsewhere.requests()); n > 0 {
		t.Errorf("the redirect was followed %d times", n)
	}
	e.set(nil, good)
	problem(t, s, "")
	if !strings.Contains(out.String(), "bundle endpoint has a problem; keeping the last bundle") || !strings.Contains(out.String(), "bundle endpoint answers again") {
		t.Errorf("log:\n%s\nwant the problem and its end", out)
	}
}

// Our endpoint sends a bundle once, and says after that that it is the same.
func TestETag(t *testing.T) {
	cert, roots := web(t)
	ca := newCA(t, "b.example")
	trust := new(identity.Store).Trust("b.example")
	trust.Set(&identity.Bundle{TrustDomain: "b.example", Roots: []*x509.Certificate{ca.Root()}})
	e := newEndpoint(t, cert, &Handler{Trust: trust, RefreshHint: time.Second})
	s, _ := start(t, Endpoint{Name: "b.example", TrustDomain: "b.example", URL: e.URL, Roots: roots})
	trusts(t, s, "b.example", ca)
	testnet.Eventually(t, waitFor, func() bool { return len(e.requests()) > 3 }, "more requests")
	if all := e.requests(); all[0].Get("If-None-Match") != "" || all[2].Get("If-None-Match") == "" {
		t.Errorf("If-None-Match: got %q and %q, want none and one", all[0].Get("If-None-Match"), all[2].Get("If-None-Match"))
	}
	problem(t, s, "")
	next := newCA(t, "b.example")
	trust.Set(&identity.Bundle{TrustDomain: "b.example", Roots: []*x509.Certificate{next.Root()}})
	trusts(t, s, "b.example", next)
}

// The bundle of the last run is there at the next start, and verifies an endpoint whose
// CA has rotated since the bootstrap bundle was written.
func TestStateFile(t *testing.T) {
	const id = "spiffe://b.example/bundle"
	old, ca := newCA(t, "b.example"), newCA(t, "b.example")
	e := newEndpoint(t, svid(t, old, id), theirs(t, "b.example", ca))
	state := filepath.Join(t.TempDir(), "b.json")
	of := Endpoint{
		Name: "b.example", TrustDomain: "b.example", URL: e.URL, ID: id, StateFile: state,
		Bootstrap: &identity.Bundle{TrustDomain: "b.example", Roots: []*x509.Certificate{old.Root()}},
	}
	first := &Source{Store: new(identity.Store), refresh: 10 * time.Millisecond}
	if err := first.Configure([]Endpoint{of}); err != nil {
		t.Fatal(err)
	}
	stop := run(t, first)
	trusts(t, first, "b.example", ca)
	testnet.Eventually(t, waitFor, func() bool { _, err := os.Stat(state); return err == nil }, "state file")
	stop()
	e.set(svid(t, ca, id), nil)
	second, _ := start(t, of)
	trusts(t, second, "b.example", ca)
	problem(t, second, "")
	// A file with nonsense is not used; the bootstrap bundle is.
	if err := os.WriteFile(state, []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	third, out := start(t, of)
	trusts(t, third, "b.example", old)
	problem(t, third, "certificate")
	if !strings.Contains(out.String(), "cannot use the bundle that was kept") {
		t.Errorf("log:\n%s\nwant that the file can't be used", out)
	}
}

// What is configured anew is asked, and what is not any more is not.
func TestConfigure(t *testing.T) {
	cert, roots := web(t)
	ca := newCA(t, "b.example")
	b, c := newEndpoint(t, cert, theirs(t, "b.example", ca)), newEndpoint(t, cert, theirs(t, "c.example", newCA(t, "c.example")))
	of := func(td, url string) Endpoint { return Endpoint{Name: td, TrustDomain: td, URL: url, Roots: roots} }
	s, _ := start(t)
	if err := s.Configure([]Endpoint{of("b.example", b.URL)}); err != nil {
		t.Fatal(err)
	}
	trusts(t, s, "b.example", ca)
	if err := s.Configure([]Endpoint{of("c.example", c.URL)}); err != nil {
		t.Fatal(err)
	}
	asked := len(c.requests())
	testnet.Eventually(t, waitFor, func() bool { return len(c.requests()) > asked+3 }, "requests of the other")
	trusts(t, s, "b.example", ca) // it stays
	if st := s.Status(); len(st) != 1 || st[0].TrustDomain != "c.example" {
		t.Errorf("status: got %+v, want that of c.example alone", st)
	}
	for want, e := range map[string]Endpoint{
		"want https":          {Name: "x", TrustDomain: "x", URL: "http://x/"},
		"has no host":         {Name: "x", TrustDomain: "x", URL: "https:///"},
		"user has no meaning": {Name: "x", TrustDomain: "x", URL: "https://u:secret@x/"},
		"fragment":            {Name: "x", TrustDomain: "x", URL: "https://x/#a"},
		"no trust domain":     {URL: "https://x/"},
		"id of the bundle":    {Name: "x", TrustDomain: "x", URL: "https://x/", ID: "spiffe://x"},
	} {
		if err := s.Configure([]Endpoint{e}); err == nil || !strings.Contains(err.Error(), want) || strings.Contains(err.Error(), "secret") {
			t.Errorf("got error %v, want %q", err, want)
		}
	}
	if err := s.Configure([]Endpoint{of("b.example", b.URL), of("b.example", c.URL)}); err == nil {
		t.Error("two endpoints for one trust: no error")
	}
}
