package bundle

import (
	"bytes"
	"context"
	"crypto/sha256"
	"crypto/tls"
	"encoding/base64"
	"errors"
	"io"
	"log"
	"net"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"culvert.dev/identity"
)

// A Handler serves the bundle of a trust domain. It serves what Trust has at the time.
type Handler struct {
	Trust       *identity.Trust
	RefreshHint time.Duration // 0 means DefaultRefresh, unless the bundle has one

	now atomic.Pointer[served]
}

// A served is a bundle as it is written.
type served struct {
	of   *identity.Bundle
	doc  []byte
	etag string
}

// ServeHTTP answers with the bundle.
func (h *Handler) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if r.Method != http.MethodGet && r.Method != http.MethodHead {
		w.Header().Set("Allow", "GET, HEAD")
		http.Error(w, "method not allowed", http.StatusMethodNotAllowed)
		return
	}
	s, err := h.current()
	if err != nil {
		w.Header().Set("Retry-After", "10")
		http.Error(w, "there is no bundle yet", http.StatusServiceUnavailable)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("ETag", s.etag)
	w.Header().Set("X-Content-Type-Options", "nosniff")
	http.ServeContent(w, r, "", time.Time{}, bytes.NewReader(s.doc))
}

// current returns what is served, made anew when the bundle is another.
func (h *Handler) current() (*served, error) {
	b, err := h.Trust.Bundle()
	if err != nil {
		return nil, err
	}
	if s := h.now.Load(); s != nil && s.of == b {
		return s, nil
	}
	out := identity.Bundle{TrustDomain: b.TrustDomain, Roots: b.Roots, JWTKeys: b.JWTKeys, Sequence: b.Sequence, RefreshHint: b.RefreshHint}
	if out.RefreshHint == 0 {
		out.RefreshHint = h.RefreshHint
	}
	if out.RefreshHint == 0 {
		out.RefreshHint = DefaultRefresh
	}
	doc, err := Marshal(&out)
	if err != nil {
		return nil, err
	}
	sum := sha256.Sum256(doc)
	s := &served{of: b, doc: doc, etag: `"` + base64.RawURLEncoding.EncodeToString(sum[:16]) + `"`}
	h.now.Store(s)
	return s, nil
}

// A Server is a bundle endpoint.
type Server struct {
	Handler *Handler
	Path    string        // of the URL, "/bundle"
	Key     *identity.Key // the certificate: for the host name (https_web), or an SVID (https_spiffe)
}

// Limits of a Server.
const (
	maxConns  = 256 // at a time; others wait
	maxHeader = 16 << 10
)

// Serve serves ln until ctx is done, closes it, and returns when the last request is
// over, but a few seconds later at most. Its error is nil then.
func (s *Server) Serve(ctx context.Context, ln net.Listener) error {
	mux := http.NewServeMux()
	mux.Handle(s.Path, s.Handler)
	protocols := new(http.Protocols)
	protocols.SetHTTP1(true)
	server := &http.Server{
		Handler: mux,
		TLSConfig: &tls.Config{
			MinVersion:     tls.VersionTLS12,
			NextProtos:     []string{"http/1.1"},
			GetCertificate: func(*tls.ClientHelloInfo) (*tls.Certificate, error) { return s.Key.Certificate() },
		},
		Protocols:         protocols,
		ReadHeaderTimeout: 10 * time.Second,
		ReadTimeout:       10 * time.Second,
		WriteTimeout:      30 * time.Second,
		IdleTimeout:       30 * time.Second,
		MaxHeaderBytes:    maxHeader,
		ErrorLog:          log.New(io.Discard, "", 0), // handshakes that fail are a client's to report
	}
	var stopped sync.WaitGroup
	defer stopped.Wait()
	stopped.Add(1)
	over := context.AfterFunc(ctx, func() {
		grace, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
		defer cancel()
		if server.Shutdown(grace) != nil {
			_ = server.Close()
		}
		stopped.Done()
	})
	err := server.ServeTLS(&limited{Listener: ln, slots: make(chan struct{}, maxConns)}, "", "")
	if over() {
		stopped.Done()
	}
	if errors.Is(err, http.ErrServerClosed) {
		return nil
	}
	return err
}

// A limited listener accepts so many connections at a time.
type limited struct {
	net.Listener
	slots chan struct{}
}

func (l *limited) Accept() (net.Conn, error) {
	l.slots <- struct{}{}
	c, err := l.Listener.Accept()
	if err != nil {
		<-l.slots
		return nil, err
	}
	return &limitedConn{Conn: c, slots: l.slots}, nil
}

type limitedConn struct {
	net.Conn
	slots chan struct{}
	once  sync.Once
}

func (c *limitedConn) Close() error {
	c.once.Do(func() { <-c.slots })
	return c.Conn.Close()
}
