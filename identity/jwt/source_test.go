package jwt

import (
	"bytes"
	"context"
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rsa"
	"crypto/x509"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/big"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"culvert.dev/connect"
	"culvert.dev/internal/testnet"
	"culvert.dev/tunnel"
)

// A site is an issuer's, without a network.
type site struct {
	mu    sync.Mutex
	pages map[string]string // by URL; a missing one is a 404
	asked map[string]int
	delay time.Duration
}

func (s *site) RoundTrip(req *http.Request) (*http.Response, error) {
	s.mu.Lock()
	url := req.URL.String()
	s.asked[url]++
	page, ok := s.pages[url]
	delay := s.delay
	s.mu.Unlock()
	select {
	case <-time.After(delay):
	case <-req.Context().Done():
		return nil, req.Context().Err()
	}
	resp := &http.Response{StatusCode: 200, Header: http.Header{"Content-Type": {"application/json"}}, Body: io.NopCloser(strings.NewReader(page)), Request: req}
	if !ok {
		resp.StatusCode = 404
	}
	if to, ok := strings.CutPrefix(page, "redirect "); ok {
		resp.StatusCode = 302
		resp.Header.Set("Location", to)
	}
	return resp, nil
}

func (s *site) set(url, page string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.pages[url] = page
}

func (s *site) count(url string) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.asked[url]
}

const (
	configURL = "https://login.example/.well-known/openid-configuration"
	keysURL   = "https://keys.example/jwks"
)

// newSite is the site of login, with its configuration document.
func newSite() *site {
	return &site{asked: map[string]int{}, pages: map[string]string{configURL: fmt.Sprintf(`{"issuer":%q,"jwks_uri":%q,"more":{}}`, login, keysURL)}}
}

// runTokens has tokens of login verified with the keys of s, until the test ends.
func runTokens(t *testing.T, s *site, log *slog.Logger) (*Tokens, func(token string) error) {
	t.Helper()
	return runTokensAt(t, s, log, nil)
}

// runTokensAt is runTokens with a clock of their own.
func runTokensAt(t *testing.T, s *site, log *slog.Logger, now func() time.Time) (*Tokens, func(token string) error) {
	t.Helper()
	tokens := &Tokens{Log: log, transport: s, now: now}
	if err := tokens.Use([]Issuer{{URL: login, Audiences: []string{"culvert"}}}); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() { tokens.Run(ctx) })
	t.Cleanup(func() {
		cancel()
		wg.Wait()
	})
	auth := tokens.Accept([]string{login})
	return tokens, func(token string) error {
		_, err := auth.Authenticate(t.Context(), bearer(token))
		return err
	}
}

// A key that the issuer has withdrawn while the machine was suspended is good for half a minute
// after that, and not for another quarter of an hour.
func TestKeysAreFetchedAfterSuspension(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		old, other := newEC(t, elliptic.P256()), newEC(t, elliptic.P256())
		s := newSite()
		s.set(keysURL, string(set(t, map[string]crypto.PublicKey{"1": old.Public()})))
		var clock testnet.Clock
		_, ask := runTokensAt(t, s, nil, clock.Now)
		token := sign(t, "ES256", old, map[string]any{"kid": "1"}, good(claims{"exp": time.Now().Add(24 * time.Hour).Unix()}))
		if err := ask(token); err != nil {
			t.Fatal(err)
		}
		s.set(keysURL, string(set(t, map[string]crypto.PublicKey{"2": other.Public()})))
		time.Sleep(time.Minute)
		synctest.Wait()
		if got := s.count(keysURL); got != 1 {
			t.Errorf("%d fetches in a minute, want 1", got)
		}
		clock.Jump(12 * time.Hour)
		time.Sleep(lookEvery)
		synctest.Wait()
		wantRefused(t, ask(token), "", UnknownKey, "has no key")
		if got := s.count(keysURL); got != 2 {
			t.Errorf("%d fetches after it, want 2", got)
		}
	})
}

// Keys are fetched at the start, every 15 minutes and for tokens with an unknown key, for
// these at most once in 10 seconds. A failed fetch keeps the last good keys.
func TestKeysAreFetched(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		first, second := newEC(t, elliptic.P256()), newEC(t, elliptic.P256())
		s := newSite()
		s.set(keysURL, string(set(t, map[string]crypto.PublicKey{"1": first.Public()})))
		var log bytes.Buffer
		tokens, ask := runTokens(t, s, slog.New(slog.NewTextHandler(&log, nil)))
		token := func(k any, kid string) string {
			return sign(t, "ES256", k, map[string]any{"kid": kid}, good(claims{"exp": time.Now().Add(24 * time.Hour).Unix()}))
		}
		one := token(first, "1")
		if err := ask(one); err != nil { // before the first fetch has ended
			t.Fatal(err)
		}
		fetches := func(when string, want int) {
			t.Helper()
			synctest.Wait()
			if got := s.count(keysURL); got != want || s.count(configURL) != want {
				t.Errorf("%s: %d fetches of keys and %d of the configuration, want %d", when, got, s.count(configURL), want)
			}
		}
		fetches("at the start", 1)
		for n := range 100 {
			err := ask(token(second, fmt.Sprint("x", n)))
			wantRefused(t, err, "", UnknownKey, "has no key")
		}
		fetches("100 unknown keys at once", 1)
		time.Sleep(fetchAtMost)
		var all sync.WaitGroup
		for n := range 2 * maxWaiting {
			all.Go(func() {
				if err := ask(token(second, fmt.Sprint("y", n))); err == nil {
					t.Error("an unknown key is accepted")
				}
			})
		}
		all.Wait()
		fetches("many unknown keys after 10 seconds", 2)

		s.set(keysURL, string(set(t, map[string]crypto.PublicKey{"1": first.Public(), "2": second.Public()})))
		wantRefused(t, ask(token(second, "2")), "", UnknownKey, "has no key")
		time.Sleep(fetchAtMost)
		if err := ask(token(second, "2")); err != nil {
			t.Errorf("a new key, ten seconds later: %v", err)
		}
		fetches("a new key", 3)

		for _, bad := range []string{"", "{}", `{"keys":[]}`, `{"keys":[{"kty":"oct","k":"AAAA","kid":"1"}]}`, "redirect https://evil.example/", strings.Repeat(" ", maxKeySet+1)} {
			s.set(keysURL, bad)
			time.Sleep(fetchAtMost)
			wantRefused(t, ask(token(second, "3")), "", UnknownKey, "has no key")
			if err := ask(token(second, "2")); err != nil {
				t.Errorf("after the key set %.40q: %v, want the last good keys", bad, err)
			}
			if st := tokens.Status()[0]; st.Error == "" || st.Keys != 2 || st.Fetched == nil || st.Next == nil || !st.Next.After(time.Now()) || time.Until(*st.Next) > fetchAgain {
				t.Errorf("after the key set %.40q: status %+v, want an error and 2 keys", bad, st)
			}
		}
		if n := strings.Count(log.String(), "cannot be fetched"); n != 1 {
			t.Errorf("%d lines say that it failed, want one: %s", n, log.String())
		}
		// The first key is taken away: what it has signed is good until that is known.
		s.set(keysURL, string(set(t, map[string]crypto.PublicKey{"2": second.Public()})))
		time.Sleep(fetchEvery)
		synctest.Wait()
		wantRefused(t, ask(one), "", UnknownKey, `no key "1"`)
		if st := tokens.Status()[0]; st.Error != "" || st.Keys != 1 || time.Since(*st.Fetched) > fetchEvery || time.Until(*st.Next) > fetchEvery {
			t.Errorf("status %+v, want one key and no error", st)
		}
		if !strings.Contains(log.String(), "fetched again") {
			t.Errorf("nothing says that it works again: %s", log.String())
		}
	})
}

// Where each key is served by itself, those of tokens are fetched, in PEM, and no others: an id
// never makes another URL, and who invents ids causes no more than a few requests.
func TestKeysByID(t *testing.T) {
	const base = "https://public-keys.auth.elb.eu-west-1.amazonaws.com/"
	synctest.Test(t, func(t *testing.T) {
		first, second := newEC(t, elliptic.P256()), newEC(t, elliptic.P256())
		s := newSite()
		inPEM := func(k crypto.PublicKey) string {
			der, err := x509.MarshalPKIXPublicKey(k)
			if err != nil {
				t.Fatal(err)
			}
			return string(pem.EncodeToMemory(&pem.Block{Type: "PUBLIC KEY", Bytes: der}))
		}
		s.set(base+"kid-1", inPEM(first.Public()))
		tokens := &Tokens{transport: s}
		const field = "x-amzn-oidc-data"
		if err := tokens.Use([]Issuer{{URL: alb, Header: field, Signer: arn, JWKSURL: base + "{kid}", ID: "{email}"}}); err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		var wg sync.WaitGroup
		wg.Go(func() { tokens.Run(ctx) })
		defer wg.Wait()
		defer cancel()
		auth := tokens.Accept([]string{alb})
		ask := func(k *ecdsa.PrivateKey, kid string) error {
			exp := time.Now().Add(24 * time.Hour).Unix()
			h := claims{"alg": "ES256", "signer": arn, "iss": alb, "exp": exp, "kid": kid}
			_, err := auth.Authenticate(t.Context(), inField(field, signParts(t, "ES256", k, padded(t, h)+"."+padded(t, claims{"email": "alice@corp.example", "exp": exp, "iss": alb}), base64.URLEncoding)))
			return err
		}
		asked := func() (n int) {
			s.mu.Lock()
			defer s.mu.Unlock()
			for _, some := range s.asked {
				n += some
			}
			return n
		}
		status := func(when string, keys int, says string) {
			t.Helper()
			if st := tokens.Status()[0]; st.Keys != keys || (st.Error == "") != (says == "") || !strings.Contains(st.Error, says) {
				t.Errorf("%s: status %+v, want %d keys and the error %q", when, st, keys, says)
			}
		}
		synctest.Wait()
		status("before a token came", 0, "")
		for range 3 {
			if err := ask(first, "kid-1"); err != nil {
				t.Fatal(err)
			}
		}
		if n := asked(); n != 1 {
			t.Errorf("%d requests for a key that three tokens name, want one", n)
		}
		status("after a token", 1, "")
		wantRefused(t, ask(second, "kid-1"), "", BadSignature, "signature")
		time.Sleep(keysAtMost)
		for _, kid := range []string{".", "..", "../kid-1", "a/kid-1", "a%2fb", "a?b", "a#b", "a@b", "kid 1", strings.Repeat("a", maxKid+1), "k\u00e9y"} {
			wantRefused(t, ask(second, kid), "", UnknownKey, "has no key")
		}
		if n := asked(); n != 1 {
			t.Errorf("%d requests after ids that are none, want one", n)
		}
		wantRefused(t, ask(second, "kid-2"), "", UnknownKey, `no key "kid-2"`)
		status("after an id of no key", 1, "")
		before := asked()
		var all sync.WaitGroup
		time.Sleep(keysAtMost)
		for n := range 100 {
			all.Go(func() {
				if err := ask(second, fmt.Sprint("x", n)); err == nil {
					t.Error("an unknown key is accepted")
				}
			})
		}
		all.Wait()
		if n := asked() - before; n > 2*maxWanted+2 {
			t.Errorf("%d requests for 100 ids that somebody has made up, want at most %d", n, 2*maxWanted+2)
		}
		s.set(base+"kid-2", inPEM(second.Public()))
		for range 3 { // after what is still wanted of those
			time.Sleep(keysAtMost)
			_ = ask(second, "kid-2")
		}
		if err := ask(second, "kid-2"); err != nil {
			t.Errorf("a new key: %v", err)
		}
		for _, bad := range []string{"", "no PEM", "redirect https://evil.example/", inPEM(first.Public()) + "more", inPEM(first.Public())[:80], strings.ReplaceAll(inPEM(first.Public()), "PUBLIC KEY", "PRIVATE KEY"), inPEM(&rsa.PublicKey{N: new(big.Int).Lsh(big.NewInt(1), 1000), E: 3})} {
			s.set(base+"kid-1", bad)
			time.Sleep(fetchEvery)
			synctest.Wait()
			if err := ask(first, "kid-1"); err != nil {
				t.Errorf("after the key %.40q: %v, want the last good one", bad, err)
			}
			if tokens.Status()[0].Error == "" {
				t.Errorf("after the key %.40q: no error in the status", bad)
			}
		}
		s.mu.Lock()
		delete(s.pages, base+"kid-1")
		s.mu.Unlock()
		time.Sleep(fetchEvery)
		synctest.Wait()
		wantRefused(t, ask(first, "kid-1"), "", UnknownKey, `no key "kid-1"`)
		if err := ask(second, "kid-2"); err != nil {
			t.Errorf("another key than the one that was taken away: %v", err)
		}
		status("after a key was taken away", 1, "")
	})
}

// What an issuer's server can do wrong.
func TestKeysThatCannotBeFetched(t *testing.T) {
	for name, page := range map[string]string{
		"no document":         "",
		"not JSON":            "<html>",
		"of another issuer":   `{"issuer":"https://evil.example/","jwks_uri":"https://keys.example/jwks"}`,
		"keys by http":        `{"issuer":"https://login.example/","jwks_uri":"http://keys.example/jwks"}`,
		"keys nowhere":        `{"issuer":"https://login.example/"}`,
		"a redirect":          "redirect https://evil.example/",
		"an endless document": strings.Repeat(" ", maxKeySet+1),
	} {
		synctest.Test(t, func(t *testing.T) {
			s := newSite()
			s.set(configURL, page)
			s.set(keysURL, string(set(t, map[string]crypto.PublicKey{"1": newEC(t, elliptic.P256()).Public()})))
			tokens, ask := runTokens(t, s, nil)
			synctest.Wait()
			err := ask(sign(t, "ES256", newEC(t, elliptic.P256()), nil, good(nil)))
			wantRefused(t, err, "", NoKeys, "there are no keys of "+login)
			if s.count(keysURL) != 0 || s.count("https://evil.example/") != 0 || tokens.Status()[0].Error == "" {
				t.Errorf("%s: asked %v, status %+v; want an error and no further question", name, s.asked, tokens.Status())
			}
		})
	}
}

// An issuer that does not answer holds nobody for longer than it takes to give up, and not
// more than 64.
func TestSlowIssuer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newSite()
		s.delay = time.Hour
		_, ask := runTokens(t, s, nil)
		start := time.Now()
		var all sync.WaitGroup
		var mu sync.Mutex
		causes := map[string]int{}
		for range maxWaiting + 10 {
			token := sign(t, "ES256", newEC(t, elliptic.P256()), nil, good(nil))
			all.Go(func() {
				err := ask(token)
				cause := string(tunnel.ReasonOf(err))
				if r := (*Refusal)(nil); errors.As(err, &r) {
					cause = string(r.Cause)
				}
				mu.Lock()
				defer mu.Unlock()
				causes[cause]++
			})
		}
		all.Wait()
		if took := time.Since(start); took > 2*fetchTimeout {
			t.Errorf("it took %v, want at most %v", took, 2*fetchTimeout)
		}
		if causes[string(NoKeys)] != maxWaiting || causes[string(tunnel.Overload)] != 10 {
			t.Errorf("got %v, want %d without keys and 10 refused for overload", causes, maxWaiting)
		}
	})
}

// A token whose client has left is not waited for.
func TestClientThatLeaves(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newSite()
		s.delay = time.Hour
		tokens, _ := runTokens(t, s, nil)
		ctx, cancel := context.WithCancel(t.Context())
		time.AfterFunc(time.Second, cancel)
		start := time.Now()
		_, err := tokens.Accept([]string{login}).Authenticate(ctx, bearer(sign(t, "ES256", newEC(t, elliptic.P256()), nil, good(nil))))
		if tunnel.ReasonOf(err) != tunnel.Gone || time.Since(start) != time.Second {
			t.Errorf("got %v after %v, want %s after a second", err, time.Since(start), tunnel.Gone)
		}
	})
}

// Issuers may come and go while others are fetched.
func TestIssuersComeAndGo(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newSite()
		s.set(keysURL, string(set(t, map[string]crypto.PublicKey{"1": newEC(t, elliptic.P256()).Public()})))
		tokens, _ := runTokens(t, s, nil)
		synctest.Wait()
		same := tokens.issuers()[0]
		if err := tokens.Use([]Issuer{same.Issuer, {URL: "https://other.example", Audiences: []string{"a"}}}); err != nil {
			t.Fatal(err)
		}
		if tokens.issuers()[0] != same {
			t.Error("the first issuer is another one")
		}
		synctest.Wait()
		if n := s.count(configURL); n != 1 {
			t.Errorf("the keys of the first were fetched %d times, want once", n)
		}
		if err := tokens.Use(nil); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Hour)
		synctest.Wait()
		if n := s.count(configURL); n != 1 {
			t.Errorf("the keys of an issuer that is gone were fetched %d times", n)
		}
	})
}

// Over a network, with a CA and a token of the gateway's own.
func TestKeysOverHTTPS(t *testing.T) {
	ec := newEC(t, elliptic.P256())
	keys := set(t, map[string]crypto.PublicKey{"k": ec.Public()})
	var server *httptest.Server
	server = httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		switch {
		case r.Header.Get("Authorization") != "Bearer projected":
			w.WriteHeader(http.StatusUnauthorized)
		case r.URL.Path == "/.well-known/openid-configuration":
			_ = json.NewEncoder(w).Encode(map[string]string{"issuer": server.URL, "jwks_uri": server.URL + "/openid/v1/jwks"})
		case r.URL.Path == "/openid/v1/jwks":
			_, _ = w.Write(keys)
		default:
			w.WriteHeader(http.StatusNotFound)
		}
	}))
	defer server.Close()
	file := t.TempDir() + "/token"
	if err := os.WriteFile(file, []byte("projected\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	roots := string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw}))
	for _, row := range []struct {
		name, roots, file, want string
	}{
		{"all is well", roots, file, ""},
		{"another CA", "", file, "certificate"},
		{"no token", roots, "", "status 401"},
		{"no file", roots, file + "x", "no such file"},
	} {
		t.Run(row.name, func(t *testing.T) {
			tokens := &Tokens{ReadFile: os.ReadFile}
			if err := tokens.Use([]Issuer{{URL: server.URL, Audiences: []string{"culvert"}, Roots: row.roots, TokenFile: row.file}}); err != nil {
				t.Fatal(err)
			}
			ctx, cancel := context.WithCancel(t.Context())
			var wg sync.WaitGroup
			wg.Go(func() { tokens.Run(ctx) })
			defer wg.Wait()
			defer cancel()
			c := bearer(sign(t, "ES256", ec, map[string]any{"kid": "k"}, good(claims{"iss": server.URL})))
			_, err := tokens.Accept([]string{server.URL}).Authenticate(t.Context(), c)
			if row.want == "" && err != nil || row.want != "" && (err == nil || !strings.Contains(err.Error(), row.want) || !errors.Is(err, connect.ErrCredentials)) {
				t.Errorf("got %v, want %q", err, row.want)
			}
		})
	}
}

// FuzzParse: no token makes the parser panic, and what it takes is not larger than a token.
func FuzzParse(f *testing.F) {
	ec := newEC(f, elliptic.P256())
	for _, seed := range []string{
		sign(f, "ES256", ec, map[string]any{"kid": "k"}, good(nil)), "a.b.c", "..", "a.b.c.d.e", "e30.e30.AA", "eyJhbGciOiJFUzI1NiJ9.e30.AA==",
		sign(f, "ES256", ec, map[string]any{"crit": []string{"x"}, "jku": "x"}, good(claims{"aud": []string{"a", "b"}, "cnf": claims{"x5t#S256": "AA"}, "a": claims{"b": claims{"c": 1}}})),
	} {
		f.Add(seed)
	}
	tokens := &Tokens{}
	if err := tokens.Use([]Issuer{{URL: login, Audiences: []string{"culvert"}, JWKS: set(f, map[string]crypto.PublicKey{"k": ec.Public()}), ID: "{a.b.c}{sub}", Claims: []string{"a", "a.b", "aud"}}}); err != nil {
		f.Fatal(err)
	}
	i := tokens.issuers()[0]
	f.Fuzz(func(t *testing.T, s string) {
		tok, r := parse(s)
		if r != nil {
			if r.Cause == Accepted || r.text == "" {
				t.Errorf("%q is refused for %+v", s, r)
			}
			return
		}
		if len(s) > MaxToken || tok.signed >= len(s) || tok.header.Alg == "none" || strings.HasPrefix(tok.header.Alg, "HS") {
			t.Errorf("%q is taken", s)
		}
		_, _ = tok.binding()
		_ = tok.checkDates(time.Now())
		if p, r := i.peer(tok); r == nil && (p.ID == "" || len(p.ID) > maxID) {
			t.Errorf("%q has the id %q", s, p.ID)
		}
	})
}
