package bundle

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/spiffe/go-spiffe/v2/bundle/x509bundle"
	"github.com/spiffe/go-spiffe/v2/federation"
	"github.com/spiffe/go-spiffe/v2/spiffeid"

	"culvert.dev/identity"
)

// serve starts a Server with a certificate, and returns its URL.
func serve(t *testing.T, b *identity.Bundle, cert *tls.Certificate) (url string, trust *identity.Trust, key *identity.Key) {
	t.Helper()
	store := new(identity.Store)
	trust, key = store.Trust("a.example"), store.Key("edge")
	if b != nil {
		trust.Set(b)
	}
	key.Set(cert)
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	s := &Server{Handler: &Handler{Trust: trust}, Path: "/bundle", Key: key}
	go func() { done <- s.Serve(ctx, ln) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("Serve: got error %v, want none", err)
		}
	})
	return "https://" + ln.Addr().String() + "/bundle", trust, key
}

// go-spiffe's client gets our bundle by both profiles, while the CA and the SVID of the
// endpoint rotate.
func TestServe(t *testing.T) {
	const id = "spiffe://a.example/bundle"
	domain := spiffeid.RequireTrustDomainFromString("a.example")
	ca := newCA(t, "a.example")
	b := full(t, ca)
	url, trust, key := serve(t, b, svid(t, ca, id))
	for range 2 {
		bundles := x509bundle.FromX509Authorities(domain, []*x509.Certificate{ca.Root()})
		got, err := federation.FetchBundle(t.Context(), domain, url, federation.WithSPIFFEAuth(bundles, spiffeid.RequireFromString(id)))
		if err != nil {
			t.Fatal(err)
		}
		if roots := got.X509Authorities(); len(roots) != 1 || !roots[0].Equal(ca.Root()) || len(got.JWTAuthorities()) != 5 {
			t.Errorf("got %d CAs and %d JWT keys, want ours and 5", len(roots), len(got.JWTAuthorities()))
		}
		if hint, _ := got.RefreshHint(); hint != b.RefreshHint {
			t.Errorf("refresh hint: got %v, want %v", hint, b.RefreshHint)
		}
		if _, err = federation.FetchBundle(t.Context(), domain, url, federation.WithWebPKIRoots(ca.Pool())); err != nil {
			t.Error(err)
		}
		ca = newCA(t, "a.example")
		b = full(t, ca)
		trust.Set(b)
		key.Set(svid(t, ca, id))
	}
	http.DefaultTransport.(*http.Transport).CloseIdleConnections()
}

// What is not a request for the bundle is refused, and there may be no bundle yet.
func TestServeAnswers(t *testing.T) {
	ca := newCA(t, "a.example")
	url, trust, _ := serve(t, nil, svid(t, ca, "spiffe://a.example/bundle"))
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true, TLSClientConfig: &tls.Config{RootCAs: ca.Pool()}}}
	do := func(method, url, etag string, body string) (int, string, string) {
		t.Helper()
		req, err := http.NewRequestWithContext(t.Context(), method, url, strings.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		if etag != "" {
			req.Header.Set("If-None-Match", etag)
		}
		resp, err := client.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		got, err := io.ReadAll(resp.Body)
		if err != nil {
			t.Fatal(err)
		}
		return resp.StatusCode, resp.Header.Get("ETag"), string(got)
	}
	if code, _, body := do("GET", url, "", ""); code != http.StatusServiceUnavailable || strings.Contains(body, "a.example") {
		t.Errorf("without a bundle: got %d %q, want 503 and no details", code, body)
	}
	trust.Set(&identity.Bundle{TrustDomain: "a.example", Roots: []*x509.Certificate{ca.Root()}})
	code, etag, body := do("GET", url, "", "")
	if code != http.StatusOK || etag == "" || !strings.Contains(body, `"spiffe_refresh_hint":300`) {
		t.Errorf("GET: got %d, ETag %q, %q, want 200, one, and a hint of 300", code, etag, body)
	}
	if code, _, body := do("GET", url, etag, ""); code != http.StatusNotModified || body != "" {
		t.Errorf("GET of the same: got %d %q, want 304 and nothing", code, body)
	}
	if code, _, body := do("HEAD", url, "", ""); code != http.StatusOK || body != "" {
		t.Errorf("HEAD: got %d %q, want 200 and nothing", code, body)
	}
	if code, _, _ := do("POST", url, "", "x"); code != http.StatusMethodNotAllowed {
		t.Errorf("POST: got %d, want 405", code)
	}
	if code, _, _ := do("GET", url+"/x", "", ""); code != http.StatusNotFound {
		t.Errorf("another path: got %d, want 404", code)
	}
	// Connections that say nothing do not keep others away for long: there are many slots.
	for range 20 {
		c, err := net.DialTimeout("tcp", strings.TrimSuffix(strings.TrimPrefix(url, "https://"), "/bundle"), 10*time.Second)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
	}
	if code, _, _ := do("GET", url, "", ""); code != http.StatusOK {
		t.Errorf("beside 20 silent connections: got %d, want 200", code)
	}
}
