package bundle

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"mime"
	"net"
	"net/http"
	"net/url"
	"strings"
	"time"

	"culvert.dev/identity"
)

// An Endpoint is where the bundle of a trust domain is found.
type Endpoint struct {
	Name        string // of the trust in the Store
	TrustDomain string
	URL         string // https

	// ID is the SPIFFE id that the endpoint proves by its certificate: the profile
	// https_spiffe. It is verified by the bundle that the Store has of the id's trust
	// domain. Empty means https_web: the certificate is one for the host of URL.
	ID string

	// Bootstrap is the bundle to begin with; nil means none. The profile https_spiffe
	// needs one, or one in StateFile, where the id is of TrustDomain itself.
	Bootstrap *identity.Bundle

	// Roots are the CAs for https_web; nil means those of the system.
	Roots *x509.CertPool

	// StateFile is where the last bundle is kept for the next start; "" means nowhere.
	// Nobody else may write to it.
	StateFile string
}

func (e *Endpoint) equal(other *Endpoint) bool {
	return e.Name == other.Name && e.TrustDomain == other.TrustDomain && e.URL == other.URL && e.ID == other.ID &&
		e.StateFile == other.StateFile && e.Roots.Equal(other.Roots) // Bootstrap is of the start alone
}

func (e *Endpoint) check() error {
	if e.Name == "" || e.TrustDomain == "" {
		return errors.New("bundle endpoint has no trust domain")
	}
	if err := CheckURL(e.URL); err != nil {
		return err
	}
	if e.ID != "" {
		if _, err := identity.Principal(e.ID); err != nil {
			return fmt.Errorf("id of the bundle endpoint: %w", err)
		}
	}
	return nil
}

// CheckURL returns an error if s cannot be the URL of a bundle endpoint (SPIFFE
// Federation section 5.2.1.1).
func CheckURL(s string) error {
	u, err := url.Parse(s)
	switch {
	case err != nil:
		return errors.New("bundle endpoint: what is given is not a URL") // it may have a password in it
	case u.User != nil:
		return fmt.Errorf("bundle endpoint of host %q: a user has no meaning here", u.Host)
	case u.Scheme != "https":
		return fmt.Errorf("bundle endpoint %q: want https://", s)
	case u.Host == "" || u.Hostname() == "":
		return fmt.Errorf("bundle endpoint %q has no host", s)
	case u.Fragment != "":
		return fmt.Errorf("bundle endpoint %q: a fragment has no meaning here", s)
	}
	return nil
}

// newClient returns a client that follows no redirect, and has a connection for each
// request, so that each is verified by what is trusted then.
func (e *Endpoint) newClient(s *Source) *http.Client {
	config := &tls.Config{MinVersion: tls.VersionTLS12, RootCAs: e.Roots}
	if e.ID != "" {
		v := &identity.Verifier{
			Trust: []*identity.Trust{s.Store.Trust(e.Name)},
			Want:  identity.Expectation{Usage: x509.ExtKeyUsageServerAuth, IDs: []string{e.ID}},
		}
		if who, err := identity.Principal(e.ID); err == nil && who.TrustDomain != e.Name {
			v.Trust = append(v.Trust, s.Store.Trust(who.TrustDomain))
		}
		v.Client(config)
	}
	return &http.Client{
		Timeout:       timeout,
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
		Transport: &http.Transport{
			TLSClientConfig:        config,
			DialContext:            s.dial,
			TLSHandshakeTimeout:    10 * time.Second,
			ResponseHeaderTimeout:  10 * time.Second,
			MaxResponseHeaderBytes: 16 << 10,
			DisableKeepAlives:      true,
			DisableCompression:     true, // so that MaxSize holds for what is read
		},
	}
}

// dial connects within ten seconds.
func (s *Source) dial(ctx context.Context, network, address string) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	if s.Dial != nil {
		return s.Dial(ctx, network, address)
	}
	return new(net.Dialer).DialContext(ctx, network, address)
}

// fetch returns what the endpoint serves, nil if that is what p has, and its ETag.
func (p *poll) fetch(ctx context.Context) (doc []byte, etag string, err error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, p.URL, nil)
	if err != nil {
		return nil, "", err
	}
	req.Header.Set("Accept", "application/json")
	if p.etag != "" {
		req.Header.Set("If-None-Match", p.etag)
	}
	resp, err := p.client.Do(req)
	if err != nil {
		var ue *url.Error
		if errors.As(err, &ue) {
			err = ue.Err // the URL is beside it in the log
		}
		return nil, "", err
	}
	defer resp.Body.Close()
	switch {
	case resp.StatusCode == http.StatusNotModified && p.etag != "":
		return nil, p.etag, nil
	case resp.StatusCode >= 300 && resp.StatusCode < 400:
		return nil, "", fmt.Errorf("bundle endpoint redirects (status %d), which is not followed: %q", resp.StatusCode, clip(resp.Header.Get("Location")))
	case resp.StatusCode != http.StatusOK:
		return nil, "", fmt.Errorf("bundle endpoint answers with status %d", resp.StatusCode)
	}
	if kind, _, err := mime.ParseMediaType(resp.Header.Get("Content-Type")); err == nil && strings.HasPrefix(kind, "text/html") {
		return nil, "", errors.New("bundle endpoint answers with a page of HTML")
	}
	doc, err = io.ReadAll(io.LimitReader(resp.Body, MaxSize+1))
	if err != nil {
		return nil, "", fmt.Errorf("cannot read the bundle: %w", err)
	}
	if len(doc) > MaxSize {
		return nil, "", fmt.Errorf("bundle has more than %d bytes", MaxSize)
	}
	if etag = resp.Header.Get("ETag"); len(etag) > 256 {
		etag = ""
	}
	return doc, etag, nil
}
