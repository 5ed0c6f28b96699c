package hbone

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"sync"
	"time"

	"culvert.dev/connect"
	"culvert.dev/connect/h2"
	"culvert.dev/identity"
	"culvert.dev/internal/records"
	"culvert.dev/tunnel"
)

// Limits of a connection to a server, as ztunnel has them.
const (
	pingInterval     = 10 * time.Second
	pongTimeout      = 20 * time.Second
	maxStreams       = 100              // at once
	idleTimeout      = 5 * time.Minute  // without a stream
	innerIdleTimeout = 10 * time.Second // the same of the inner connection of a Double
)

// A Dialer reaches its destinations through an HBONE server, and shares its
// connections between them. It is a tunnel.Dialer. Close it to end them.
//
// Its fields are not to be changed once it dials. It must not be copied.
type Dialer struct {
	// Gateway is the address of the server, "host:port". Dialer connects to it; nil
	// means a net.Dialer.
	Gateway string
	Dialer  tunnel.Dialer

	// TLS has the client's own certificate.
	TLS *tls.Config

	// Verifier verifies the server. Nil means that its certificate must have the name or
	// address of Gateway and be signed by one of TLS.RootCAs, as with any TLS. The hello
	// has no name in either case.
	Verifier *identity.Verifier

	// Baggage describes the workloads on this side, for requests without baggage of
	// their own. Via is that of connect.Dialer.
	Baggage string
	Via     string

	SessionHeader connect.SessionFields // that of connect.Dialer

	once sync.Once
	h2   h2.Dialer
}

var _ tunnel.Dialer = (*Dialer)(nil)

func (d *Dialer) inner() *h2.Dialer {
	d.once.Do(func() {
		d.h2.Proxy, d.h2.Via, d.h2.Header, d.h2.SessionHeader = d.Gateway, d.Via, header(d.Baggage), d.SessionHeader
		d.h2.Dialer = &secureDialer{dialer: d.Dialer, keys: d.TLS, verifier: d.Verifier}
		d.h2.Streams, d.h2.Idle, d.h2.Ping, d.h2.Pong = maxStreams, idleTimeout, pingInterval, pongTimeout
	})
	return &d.h2
}

func header(baggage string) func(context.Context, string) (connect.Fields, error) {
	return func(ctx context.Context, _ string) (connect.Fields, error) { return fields(ctx, baggage), nil }
}

// DialContext asks the server for addr, a "host:port" that
// connect.ParseAuthority takes; network is "tcp". The net.Conn is an *h2.Stream
// and belongs to the caller. A refusal is a *tunnel.Error.
func (d *Dialer) DialContext(ctx context.Context, network, addr string) (net.Conn, error) {
	return d.inner().DialContext(ctx, network, addr)
}

// Close ends every connection, with the streams on it.
func (d *Dialer) Close() error { return d.inner().Close() }

// Conns returns how many connections there are.
func (d *Dialer) Conns() int { return d.inner().Conns() }

// A Double reaches destinations behind two HBONE servers: the outer one is asked for
// the destination, and its tunnel leads to an inner one, of its choice, which is asked
// for it again. The outer server learns the client and the destination, and nothing of
// the stream.
//
// Connections to the outer server are shared. Those to the inner one are not: all
// streams of one would go to one endpoint.
//
// Its fields are not to be changed once it dials. It must not be copied.
type Double struct {
	Outer *Dialer

	// TLS, Verifier and Baggage are those of a Dialer, for the inner server. Without a
	// Verifier, its certificate must have the name that is dialed.
	TLS      *tls.Config
	Verifier *identity.Verifier
	Baggage  string

	once sync.Once
	h2   h2.Dialer
}

var _ tunnel.Dialer = (*Double)(nil)

// DialContext is that of a Dialer.
func (d *Double) DialContext(ctx context.Context, network, addr string) (net.Conn, error) {
	d.once.Do(func() {
		d.h2.Proxy, d.h2.Header = "behind "+d.Outer.Gateway, header(d.Baggage)
		d.h2.Dialer = innerDialer{&secureDialer{dialer: d.Outer, keys: d.TLS, verifier: d.Verifier}}
		d.h2.Single, d.h2.Idle, d.h2.Ping, d.h2.Pong = true, innerIdleTimeout, pingInterval, pongTimeout
	})
	to, err := connect.ParseAuthority(addr)
	if err != nil {
		return nil, &tunnel.Error{Reason: tunnel.BadRequest, Err: err}
	}
	// Each connection is for one dial, whose ctx has the destination.
	return d.h2.DialContext(context.WithValue(ctx, targetKey{}, to.String()), network, addr)
}

// Close ends every connection, those of Outer included.
func (d *Double) Close() error { return errors.Join(d.h2.Close(), d.Outer.Close()) }

type targetKey struct{}

// An innerDialer connects to the inner server, by the destination in the ctx.
type innerDialer struct{ *secureDialer }

func (w innerDialer) DialContext(ctx context.Context, network, _ string) (net.Conn, error) {
	addr, _ := ctx.Value(targetKey{}).(string)
	return w.secureDialer.DialContext(ctx, network, addr)
}

// A secureDialer connects by TLS as HBONE uses it.
type secureDialer struct {
	dialer   tunnel.Dialer
	keys     *tls.Config
	verifier *identity.Verifier
}

// DialContext implements tunnel.Dialer.
func (s *secureDialer) DialContext(ctx context.Context, network, addr string) (net.Conn, error) {
	dialer := s.dialer
	if dialer == nil {
		dialer = new(net.Dialer)
	}
	c, err := connect.DialHandshake(ctx, dialer, network, addr, func(ctx context.Context, raw net.Conn) (net.Conn, error) {
		t := records.Client(raw, s.config(addr))
		if err := t.HandshakeContext(ctx); err != nil {
			_ = raw.Close()
			return nil, err
		}
		return t, nil
	})
	if failed, ok := err.(*connect.HandshakeError); ok {
		return nil, fmt.Errorf("hbone: TLS handshake: %w", failed.Err)
	} else if err != nil {
		return nil, err
	}
	t := c.(*records.Conn)
	if p := t.ConnectionState().NegotiatedProtocol; p != "h2" {
		_ = t.NetConn().Close()
		return nil, fmt.Errorf("hbone: the server does not speak HTTP/2: it chose the protocol %q", p)
	}
	return t, nil
}

func (s *secureDialer) config(addr string) *tls.Config {
	cfg := &tls.Config{}
	if s.keys != nil {
		cfg = s.keys.Clone()
	}
	host, _, _ := net.SplitHostPort(addr)
	cfg.ServerName = "" // a client of HBONE sends no name
	cfg.NextProtos = []string{"h2"}
	cfg.MinVersion = max(cfg.MinVersion, tls.VersionTLS13)
	cfg.ClientSessionCache = nil
	if s.verifier != nil {
		s.verifier.Client(cfg)
	} else {
		verifyName(cfg, host)
	}
	return cfg
}

// verifyName has cfg verify a server by its host, as crypto/tls does only where the hello
// has the name, too.
func verifyName(cfg *tls.Config, host string) {
	cfg.InsecureSkipVerify = true
	roots, now := cfg.RootCAs, cfg.Time
	cfg.VerifyConnection = func(cs tls.ConnectionState) error {
		opts := x509.VerifyOptions{Roots: roots, Intermediates: x509.NewCertPool(), DNSName: host}
		if now != nil {
			opts.CurrentTime = now()
		}
		for _, c := range cs.PeerCertificates[1:] {
			opts.Intermediates.AddCert(c)
		}
		if _, err := cs.PeerCertificates[0].Verify(opts); err != nil {
			return &tls.CertificateVerificationError{UnverifiedCertificates: cs.PeerCertificates, Err: err}
		}
		return nil
	}
}
