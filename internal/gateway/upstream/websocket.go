package upstream

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"sync/atomic"
	"time"

	"culvert.dev/connect"
	"culvert.dev/connect/h2"
	"culvert.dev/connect/ws"
	"culvert.dev/tunnel"
)

// http2RetryInterval is how long a load balancer that did not take WebSockets over
// HTTP/2 is not asked for them again.
const http2RetryInterval = 10 * time.Minute

// A WebSocketDialer is a ws.Dialer whose streams share connections of HTTP/2
// where its URL is wss and the other side takes them there, as it says by ALPN
// and in its settings. Where it does not, each stream has a connection of its
// own, as those of a ws.Dialer have. Close it to end its connections.
type WebSocketDialer struct {
	ws.Dialer

	HTTP2      *h2.Dialer                // keeps the shared connections; nil where the URL is not wss
	http1Until atomic.Pointer[time.Time] // until then HTTP/2 is not tried; nil for no such time
}

var _ tunnel.Dialer = (*WebSocketDialer)(nil)

// NewWebSocketDialer makes one of d, which it copies.
func NewWebSocketDialer(d *ws.Dialer) *WebSocketDialer {
	w := &WebSocketDialer{Dialer: *d}
	addr, secure, err := ws.ParseURL(d.URL)
	if err != nil || !secure { // a dial says what is wrong with the URL
		return w
	}
	cfg := &tls.Config{}
	if d.TLS != nil {
		cfg = d.TLS.Clone()
	}
	// Servers that speak HTTP/1.1 only would refuse the handshake without it, and
	// a refusal could mean anything.
	cfg.NextProtos = []string{"h2", "http/1.1"}
	w.HTTP2 = &h2.Dialer{Proxy: addr, Dialer: d.Dialer, TLS: cfg, Wait: d.Wait}
	w.Extended = w.extended
	return w
}

// extended is ws.Dialer.Extended.
func (w *WebSocketDialer) extended(ctx context.Context, list *connect.HeaderList) (net.Conn, connect.Fields, error) {
	if until := w.http1Until.Load(); until != nil && time.Now().Before(*until) {
		return nil, nil, errors.ErrUnsupported
	}
	s, answer, err := w.HTTP2.Open(ctx, list)
	switch {
	case errors.Is(err, h2.ErrNotSpoken):
		until := time.Now().Add(http2RetryInterval)
		w.http1Until.Store(&until)
		return nil, nil, fmt.Errorf("%w: %w", errors.ErrUnsupported, err)
	case err != nil:
		return nil, nil, err
	}
	return s, answer, nil
}

// Conns returns how many connections streams share.
func (w *WebSocketDialer) Conns() int {
	if w.HTTP2 == nil {
		return 0
	}
	return w.HTTP2.Conns()
}

// Close ends the connections that streams share, with the streams on them.
func (w *WebSocketDialer) Close() error {
	if w.HTTP2 == nil {
		return nil
	}
	return w.HTTP2.Close()
}
