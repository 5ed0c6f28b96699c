package gateway

import (
	"context"
	"crypto/tls"
	"errors"
	"log/slog"
	"net"
	"sync/atomic"

	"culvert.dev/connect"
	"culvert.dev/connect/h3"
	"culvert.dev/internal/termination"
	"culvert.dev/tunnel"
)

// An HTTP3 ends QUIC at an address of UDP and takes CONNECT over HTTP/3. Its
// keys may be changed while it serves; it has none before Use.
type HTTP3 struct {
	Auth connect.Authenticator // nil asks for no credentials
	Via  string                // this gateway's pseudonym

	// TerminateAll says that nothing else is at the address: all connections end here,
	// whatever name they ask for, and those that ask for none.
	TerminateAll bool

	names  termination.Protocol // knows which end here
	keys   atomic.Pointer[tls.Config]
	server h3.Server
}

// Use has QUIC ended with k from the next connection on. Where it returns an
// error, nothing has changed.
func (p *HTTP3) Use(k *termination.Keys) error {
	cfg, err := k.Config("h3")
	if err != nil {
		return err
	}
	p.names.All = p.TerminateAll
	if err := p.names.Use(k); err != nil {
		return err
	}
	p.keys.Store(cfg)
	return nil
}

// Owns reports whether connections to n end here.
func (p *HTTP3) Owns(n tunnel.Name) bool { return p.names.Owns(n) }

// prepare sets what of the server belongs to the gateway.
func (p *HTTP3) prepare(g *Gateway, name string, budget *tunnel.Budget, observe func(*tunnel.Outcome)) {
	s := &p.server
	s.TLS = &tls.Config{GetConfigForClient: func(*tls.ClientHelloInfo) (*tls.Config, error) {
		if cfg := p.keys.Load(); cfg != nil {
			return cfg, nil
		}
		return nil, errors.New("gateway: no certificate for HTTP/3")
	}}
	s.Identify = termination.PeerOf // of a client that the keys have let pass, whatever they are now
	s.Auth, s.Via, s.Name = p.Auth, p.Via, name
	s.Limits, s.Budget, s.Observe, s.Log = g.cfg.Limits, budget, observe, g.log
}

// serve takes what comes to c, which it owns, until the server is shut down.
func (p *HTTP3) serve(ctx context.Context, c net.PacketConn, h tunnel.Handler) error {
	if err := p.server.Serve(ctx, c, h); !errors.Is(err, tunnel.ErrServerClosed) {
		return err
	}
	return nil
}

// A http3Listener is a socket at which there is HTTP/3 and nothing else: it needs
// nobody to tell its connections from others'.
type http3Listener struct {
	*HTTP3
	conn *net.UDPConn
	name string
}

func (p *http3Listener) run(ctx context.Context, h tunnel.Handler, log *slog.Logger) error {
	log.Info("serving", "listener", p.name, "address", p.conn.LocalAddr().String())
	return p.serve(ctx, p.conn, h)
}
