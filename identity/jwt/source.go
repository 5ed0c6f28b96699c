package jwt

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"mime"
	"net/http"
	"strings"
	"sync"
	"time"

	"culvert.dev/internal/wallclock"
	"culvert.dev/tunnel"
)

// When keys are fetched.
const (
	fetchEvery   = 15 * time.Minute // without a reason
	fetchAgain   = 30 * time.Second // after an error
	fetchAtMost  = 10 * time.Second // for tokens with unknown keys
	fetchTimeout = 5 * time.Second  // for configuration and keys together
	maxWaiting   = 64               // requests that wait for one issuer
)

// A place is where keys are fetched.
type place struct {
	url       string
	discovery bool // url is that of an issuer, whose configuration document says where
	roots     string
	tokenFile string
}

// A source fetches the keys of an issuer, and keeps the last good ones.
type source struct {
	place
	readFile func(name string) ([]byte, error)
	client   http.Client
	ask      chan struct{} // a fetch is wanted
	now      func() time.Time

	mu      sync.Mutex // guards what follows
	set     *keySet
	fetched time.Time // when set came
	began   time.Time // the last fetch
	next    time.Time // when the next is due; zero before the first
	running bool      // a fetch
	err     error     // of the last fetch
	waiting int
	wanted  []string      // ids of keys to fetch beside those of set, where each is fetched by itself
	done    chan struct{} // closed at the end of the next fetch
}

func newSource(p place, t *Tokens) (*source, error) {
	cfg := &tls.Config{MinVersion: tls.VersionTLS12}
	if p.roots != "" {
		cfg.RootCAs = x509.NewCertPool()
		if !cfg.RootCAs.AppendCertsFromPEM([]byte(p.roots)) {
			return nil, errors.New("the CAs hold no certificate")
		}
	}
	s := &source{place: p, readFile: t.ReadFile, ask: make(chan struct{}, 1), done: make(chan struct{}), now: t.now}
	if s.now == nil {
		s.now = time.Now
	}
	if p.byID() {
		s.set = &keySet{} // that of a token is fetched when it comes
	}
	s.client.Transport = t.transport
	if t.transport == nil {
		s.client.Transport = &http.Transport{DialContext: t.Dial, TLSClientConfig: cfg, Proxy: http.ProxyFromEnvironment, DisableKeepAlives: true, MaxResponseHeaderBytes: 64 << 10, ForceAttemptHTTP2: true}
	}
	s.client.CheckRedirect = func(*http.Request, []*http.Request) error {
		return errors.New("it answers with a redirect, which is not followed")
	}
	return s, nil
}

// keys returns the last good ones.
func (s *source) keys() (*keySet, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.set != nil:
		return s.set, nil
	case s.err != nil:
		return nil, s.err
	}
	return nil, errors.New("they were not fetched yet")
}

// refresh has the keys fetched for a token that was signed by the one with the id kid, and waits
// until they are. It does nothing where that was begun a moment ago and has ended.
func (s *source) refresh(ctx context.Context, kid string) error {
	s.mu.Lock()
	if !s.running && s.early() || s.byID() && !s.want(kid) {
		s.mu.Unlock()
		return nil
	}
	if s.waiting >= maxWaiting {
		s.mu.Unlock()
		return tunnel.Refusef(tunnel.Overload, "jwt: %d requests wait for the keys of %s, the limit", maxWaiting, s.url)
	}
	s.waiting++
	done := s.done
	if !s.running {
		select {
		case s.ask <- struct{}{}:
		default: // somebody else has asked
		}
	}
	s.mu.Unlock()
	defer func() {
		s.mu.Lock()
		s.waiting--
		s.mu.Unlock()
	}()
	timeout := time.NewTimer(fetchTimeout)
	defer timeout.Stop()
	select {
	case <-done:
	case <-timeout.C:
	case <-ctx.Done():
		return tunnel.Refusef(tunnel.Gone, "jwt: the client left before its token was verified: %w", ctx.Err())
	}
	return nil
}

// early reports whether a fetch began a moment ago. The caller holds mu.
func (s *source) early() bool {
	atMost := fetchAtMost
	if s.byID() {
		atMost = keysAtMost
	}
	return !s.began.IsZero() && time.Since(s.began) < atMost
}

// lookEvery is how often run looks whether keys are due, by either clock: they are also after the
// machine was suspended, when a timer is late.
const lookEvery = 30 * time.Second

// run fetches keys until ctx ends.
func (s *source) run(ctx context.Context, changed func(*source, error)) {
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-timer.C:
			if now := s.now(); !wallclock.Passed(now, s.next) { // which run alone writes
				timer.Reset(min(s.next.Sub(now), lookEvery))
				continue
			}
		case <-s.ask:
			s.mu.Lock()
			early := s.early() && len(s.wanted) == 0
			s.mu.Unlock()
			if early { // it was asked for before the last fetch began
				continue
			}
		}
		s.mu.Lock()
		if s.byID() && len(s.set.keys)+len(s.wanted) == 0 {
			s.mu.Unlock()
			timer.Reset(fetchEvery)
			continue
		}
		known, wanted := s.set, s.wanted
		s.began, s.running, s.wanted = time.Now(), true, nil
		s.mu.Unlock()
		set, err := s.fetch(ctx, known, wanted)
		if ctx.Err() != nil {
			return
		}
		next := fetchEvery
		s.mu.Lock()
		before := s.err
		s.running = false
		if s.err = err; err == nil {
			s.fetched = time.Now()
		} else {
			next = fetchAgain
		}
		if set != nil && (s.set == nil || s.set.sum != set.sum) {
			s.set = set // tokens that the old keys have verified are verified again
		}
		s.next = s.now().Add(next)
		close(s.done)
		s.done = make(chan struct{})
		s.mu.Unlock()
		if (err == nil) != (before == nil) {
			changed(s, err)
		}
		timer.Reset(min(next, lookEvery))
	}
}

// fetch returns the keys that the issuer has now; nil after an error, unless each key is fetched by
// itself.
func (s *source) fetch(ctx context.Context, known *keySet, wanted []string) (set *keySet, err error) {
	defer func() {
		if v := recover(); v != nil {
			set, err = nil, tunnel.Caught(v)
		}
	}()
	ctx, cancel := context.WithTimeout(ctx, fetchTimeout)
	defer cancel()
	if s.byID() {
		return s.fetchEach(ctx, known, wanted)
	}
	at := s.url
	if s.discovery {
		var doc struct {
			Issuer  string `json:"issuer"`
			JWKSURI string `json:"jwks_uri"`
		}
		data, err := s.get(ctx, strings.TrimSuffix(s.url, "/")+"/.well-known/openid-configuration")
		if err != nil {
			return nil, err
		}
		switch err := json.Unmarshal(data, &doc); {
		case err != nil:
			return nil, errors.New("the configuration document is not JSON")
		case doc.Issuer != s.url: // OpenID Connect Discovery 1.0 section 4.3
			return nil, fmt.Errorf("the configuration document is that of %q", tunnel.Clip(doc.Issuer))
		case !isHTTPS(doc.JWKSURI):
			return nil, fmt.Errorf("the configuration document has the keys at %q, which is not an https URL", tunnel.Clip(doc.JWKSURI))
		}
		at = doc.JWKSURI
	}
	data, err := s.get(ctx, at)
	if err != nil {
		return nil, err
	}
	return parseKeys(data)
}

// get returns a document of the issuer.
func (s *source) get(ctx context.Context, url string) ([]byte, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return nil, err
	}
	req.Header.Set("Accept", "application/json, application/jwk-set+json")
	req.Header.Set("User-Agent", "culvert")
	if s.tokenFile != "" {
		if s.readFile == nil {
			return nil, errors.New("there is no token to show")
		}
		token, err := s.readFile(s.tokenFile)
		if err != nil {
			return nil, err
		}
		req.Header.Set("Authorization", "Bearer "+strings.TrimSpace(string(token)))
	}
	resp, err := s.client.Do(req)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("GET %s: %w", url, statusError(resp.StatusCode))
	}
	if kind, _, _ := mime.ParseMediaType(resp.Header.Get("Content-Type")); kind == "text/html" {
		return nil, fmt.Errorf("GET %s: a page in HTML, want JSON", url)
	}
	data, err := io.ReadAll(io.LimitReader(resp.Body, maxKeySet+1))
	switch {
	case err != nil:
		return nil, fmt.Errorf("GET %s: %w", url, err)
	case len(data) > maxKeySet:
		return nil, fmt.Errorf("GET %s: more than %d bytes", url, maxKeySet)
	}
	return data, nil
}
