package dns

import (
	"context"
	"crypto/tls"
	"encoding/base64"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/netip"
	"sync"
	"sync/atomic"

	"github.com/miekg/dns"

	"culvert.dev/tunnel"
)

const (
	dohPath = "/dns-query"
	dohType = "application/dns-message"

	// A connection that brings more than mostIdle bytes beyond askedBytes for
	// each of its questions is not there to ask: the HTTP/2 of net/http answers
	// PING and SETTINGS and takes PRIORITY without an end.
	mostIdle   = 32 << 10
	askedBytes = 2 * maxQuery
)

// ServeHTTPS answers by HTTPS, RFC 8484, on HTTP/1.1 and HTTP/2, until
// Shutdown, Close or the end of ctx, and returns ErrServerClosed, or the error
// of a listener that is of no use any more. It owns ln. The view is that of
// all who ask here; "" means by Views.
func (s *Server) ServeHTTPS(ctx context.Context, ln net.Listener, conf *tls.Config, view string) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var protocols http.Protocols
	protocols.SetHTTP1(true)
	protocols.SetHTTP2(true)
	srv := &http.Server{
		Handler:           s.Handler(view),
		TLSConfig:         conf.Clone(),
		Protocols:         &protocols,
		HTTP2:             &http.HTTP2Config{MaxConcurrentStreams: pipelined, MaxReadFrameSize: 1 << 14, MaxReceiveBufferPerConnection: 1 << 17},
		ReadHeaderTimeout: tcpRead, ReadTimeout: tcpRead, WriteTimeout: tcpWrite, IdleTimeout: tcpIdle,
		MaxHeaderBytes: 2 * maxQuery,
		BaseContext:    func(net.Listener) context.Context { return ctx },
		ConnContext: func(ctx context.Context, c net.Conn) context.Context {
			if t, ok := c.(*tls.Conn); ok {
				if counted, ok := t.NetConn().(*countedConn); ok {
					return context.WithValue(ctx, connKey{}, counted)
				}
			}
			return ctx
		},
		ErrorLog: log.New(io.Discard, "", 0), // handshakes that fail, mostly
	}
	srv.TLSConfig.NextProtos = []string{"h2", "http/1.1"}
	drain := make(chan struct{})
	k := s.track(ctx, ln, sync.OnceFunc(func() { close(drain) }), closers{cancel, srv})
	if k == nil {
		_ = ln.Close()
		return ErrServerClosed
	}
	defer s.untrack(k)
	var drained sync.WaitGroup
	drained.Go(func() {
		select {
		case <-drain:
			_ = srv.Shutdown(ctx)
		case <-ctx.Done():
		}
		_ = srv.Close()
	})
	err := srv.ServeTLS(&countedListener{Listener: ln, s: s, view: view}, "", "")
	if errors.Is(err, http.ErrServerClosed) || s.isClosing() || k.ended.Load() || ctx.Err() != nil {
		drained.Wait() // before cancel ends what is still being answered
		return ErrServerClosed
	}
	cancel()
	drained.Wait()
	return err
}

// A countedListener gives each client its share of connections.
type countedListener struct {
	net.Listener
	s    *Server
	view string
}

func (l *countedListener) Accept() (net.Conn, error) {
	for {
		c, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		from := addrPort(c.RemoteAddr())
		if l.s.webConns.take(from.Addr()) {
			return &countedConn{
				Conn: c, give: sync.OnceFunc(func() { l.s.webConns.give(from.Addr()) }),
				flood: sync.OnceFunc(func() { l.s.refusedConn(HTTPS, from, l.view, tunnel.Flood) }),
			}, nil
		}
		_ = c.Close()
		l.s.refusedConn(HTTPS, from, l.view, tunnel.Overload)
	}
}

// connKey finds the countedConn of a request.
type connKey struct{}

// A countedConn is one client's connection, from below TLS.
type countedConn struct {
	net.Conn
	give, flood func()
	spare       atomic.Int64 // bytes received that belong to no question
}

func (c *countedConn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	if c.spare.Add(int64(n)) > mostIdle {
		c.flood()
		_ = c.Close()
		return 0, net.ErrClosed
	}
	return n, err
}

// asked gives a question its share of the bytes received, which then do not count as idle.
func (c *countedConn) asked() {
	for {
		spare := c.spare.Load()
		if c.spare.CompareAndSwap(spare, max(spare-askedBytes, 0)) {
			return
		}
	}
}

func (c *countedConn) Close() error {
	c.give()
	return c.Conn.Close()
}

// Handler answers /dns-query, for an HTTPS server that does other things too.
// Its connections are that server's business; Shutdown does not know of them.
func (s *Server) Handler(view string) http.Handler {
	s.init()
	return http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		from, err := netip.ParseAddrPort(r.RemoteAddr)
		if err != nil {
			http.Error(rw, "no address", http.StatusBadRequest)
			return
		}
		if c, ok := r.Context().Value(connKey{}).(*countedConn); ok {
			c.asked()
		}
		x := s.take(HTTPS, view)
		status, why := x.readHTTP(rw, r)
		if status != 0 {
			x.out = x.out[:0]
			x.result = Result{Transport: HTTPS, From: from, View: view, Rcode: rcodeDrop, Reason: why}
			x.done()
			x.giveBack()
			http.Error(rw, http.StatusText(status), status)
			return
		}
		if !x.begin(from) {
			x.finish(r.Context())
		}
		defer x.giveBack()
		defer x.done()
		if len(x.out) == 0 {
			http.Error(rw, "not a DNS question", http.StatusBadRequest)
			return
		}
		h := rw.Header()
		h.Set("Content-Type", dohType)
		h.Set("Content-Length", fmt.Sprint(len(x.out)))
		// RFC 8484 section 5.1: no longer than the shortest TTL.
		h.Set("Cache-Control", fmt.Sprintf("max-age=%d", shortestTTL(x.out)))
		_, _ = rw.Write(x.out)
	})
}

func (x *exchange) giveBack() {
	x.in = x.in[:cap(x.in)]
	x.s.give(x)
}

// readHTTP reads the question of a request into x.in. It returns a status, and
// a reason, where there is none.
func (x *exchange) readHTTP(rw http.ResponseWriter, r *http.Request) (int, tunnel.Reason) {
	if r.URL.Path != dohPath {
		return http.StatusNotFound, tunnel.BadRequest
	}
	switch r.Method {
	case http.MethodGet:
		if len(r.URL.RawQuery) > 2*maxQuery {
			return http.StatusRequestURITooLong, tunnel.TooLarge
		}
		text := r.URL.Query().Get("dns")
		if base64.RawURLEncoding.DecodedLen(len(text)) > maxQuery {
			return http.StatusRequestURITooLong, tunnel.TooLarge
		}
		n, err := base64.RawURLEncoding.Decode(x.in[:maxQuery], []byte(text))
		if err != nil || n == 0 {
			return http.StatusBadRequest, tunnel.BadRequest
		}
		x.in = x.in[:n]
	case http.MethodPost:
		if r.Header.Get("Content-Type") != dohType {
			return http.StatusUnsupportedMediaType, tunnel.BadRequest
		}
		if r.ContentLength > maxQuery {
			return http.StatusRequestEntityTooLarge, tunnel.TooLarge
		}
		n, err := io.ReadFull(r.Body, x.in[:maxQuery])
		if err == nil {
			if _, err = io.ReadFull(r.Body, make([]byte, 1)); err == nil {
				return http.StatusRequestEntityTooLarge, tunnel.TooLarge
			}
		}
		switch {
		case err != nil && !errors.Is(err, io.EOF) && !errors.Is(err, io.ErrUnexpectedEOF):
			return http.StatusBadRequest, tunnel.BadRequest
		}
		x.in = x.in[:n]
	default:
		rw.Header().Set("Allow", "GET, POST")
		return http.StatusMethodNotAllowed, tunnel.BadMethod
	}
	return 0, ""
}

// shortestTTL is that of a message's records, in seconds; 0 if it has none.
func shortestTTL(b []byte) uint32 {
	end, ok := skipName(b, headerLen)
	if !ok || end+4 > len(b) {
		return 0
	}
	least, found := uint32(0), false
	for off := end + 4; off < len(b); {
		if end, ok = skipName(b, off); !ok || end+10 > len(b) {
			break
		}
		ttl := binary.BigEndian.Uint32(b[end+4:])
		if binary.BigEndian.Uint16(b[end:]) != dns.TypeOPT && (!found || ttl < least) {
			least, found = ttl, true
		}
		off = end + 10 + int(binary.BigEndian.Uint16(b[end+8:]))
	}
	return least
}
