package hbone

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"
	"sync"
	"time"

	"culvert.dev/connect"
	"culvert.dev/connect/h2"
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

	// TLS has the client's own certificate, and the RootCAs to verify the
	// server's by.
	TLS *tls.Config

	// Peers are the identities that the server may have: SPIFFE ids, or
	// "spiffe://domain" for any of a trust domain. Empty means that its certificate
	// must have the name or address of Gateway, as with any TLS. The hello has no
	// name in either case.
	Peers []string

	// Trust has the CAs that verify the server's certificate, by the trust domain of
	// its SPIFFE id, in place of TLS.RootCAs. It is needed where Peers are of several
	// trust domains, so that no CA can speak for the domain of another. It has no
	// effect without Peers.
	Trust map[string]*x509.CertPool

	// Baggage describes the workloads on this side, for requests without baggage of
	// their own. Via is that of connect.Dialer.
	Baggage string
	Via     string

	once sync.Once
	h2   h2.Dialer
}

var _ tunnel.Dialer = (*Dialer)(nil)

func (d *Dialer) inner() *h2.Dialer {
	d.once.Do(func() {
		d.h2.Proxy, d.h2.Via, d.h2.Header = d.Gateway, d.Via, header(d.Baggage)
		d.h2.Dialer = &secureDialer{dialer: d.Dialer, keys: d.TLS, peers: d.Peers, trust: d.Trust}
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

	// TLS, Peers, Trust and Baggage are those of a Dialer, for the inner server.
	// Without Peers, its certificate must have the name that is dialed.
	TLS     *tls.Config
	Peers   []string
	Trust   map[string]*x509.CertPool
	Baggage string

	once sync.Once
	h2   h2.Dialer
}

var _ tunnel.Dialer = (*Double)(nil)

// DialContext is that of a Dialer.
func (d *Double) DialContext(ctx context.Context, network, addr string) (net.Conn, error) {
	d.once.Do(func() {
		d.h2.Proxy, d.h2.Header = "behind "+d.Outer.Gateway, header(d.Baggage)
		d.h2.Dialer = innerDialer{&secureDialer{dialer: d.Outer, keys: d.TLS, peers: d.Peers, trust: d.Trust}}
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
	dialer tunnel.Dialer
	keys   *tls.Config
	peers  []string
	trust  map[string]*x509.CertPool
}

// DialContext implements tunnel.Dialer.
func (s *secureDialer) DialContext(ctx context.Context, network, addr string) (net.Conn, error) {
	dialer := s.dialer
	if dialer == nil {
		dialer = new(net.Dialer)
	}
	raw, err := dialer.DialContext(ctx, network, addr)
	if err != nil {
		return nil, err
	}
	t := tls.Client(raw, s.config(addr))
	if err := t.HandshakeContext(ctx); err != nil {
		_ = raw.Close()
		return nil, fmt.Errorf("hbone: TLS handshake: %w", err)
	}
	if p := t.ConnectionState().NegotiatedProtocol; p != "h2" {
		_ = raw.Close()
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
	s.verifyIn(cfg, host)
	return cfg
}

// VerifyPeers has cfg, which is a client's, verify a server by its SPIFFE id and not by a
// name, whatever is spoken inside: see Dialer.Peers and Dialer.Trust. There must be peers.
func VerifyPeers(cfg *tls.Config, peers []string, trust map[string]*x509.CertPool) {
	(&secureDialer{peers: peers, trust: trust}).verifyIn(cfg, "")
}

// verifyIn has cfg verify a server, by its host where there are no peers.
func (s *secureDialer) verifyIn(cfg *tls.Config, host string) {
	// VerifyConnection verifies what crypto/tls does not without a name.
	cfg.InsecureSkipVerify = true
	roots, now := cfg.RootCAs, cfg.Time
	cfg.VerifyConnection = func(cs tls.ConnectionState) error {
		opts := x509.VerifyOptions{Roots: roots, Intermediates: x509.NewCertPool()}
		if now != nil {
			opts.CurrentTime = now()
		}
		leaf := cs.PeerCertificates[0]
		if len(s.peers) == 0 {
			opts.DNSName = host
		} else if err := s.rootsOf(leaf, &opts); err != nil {
			return err
		}
		for _, c := range cs.PeerCertificates[1:] {
			opts.Intermediates.AddCert(c)
		}
		if _, err := leaf.Verify(opts); err != nil {
			return &tls.CertificateVerificationError{UnverifiedCertificates: cs.PeerCertificates, Err: err}
		}
		if len(s.peers) == 0 {
			return nil
		}
		return checkPeer(leaf, s.peers)
	}
}

// rootsOf sets the roots of opts to the CAs of the leaf's own trust domain.
func (s *secureDialer) rootsOf(leaf *x509.Certificate, opts *x509.VerifyOptions) error {
	if s.trust == nil {
		for _, p := range s.peers[1:] {
			if domainOf(p) != domainOf(s.peers[0]) {
				return fmt.Errorf("the server may be of the trust domains %q and %q, and it is not known which CA speaks for which", domainOf(s.peers[0]), domainOf(p))
			}
		}
		return nil
	}
	if n := len(leaf.URIs); n != 1 {
		return fmt.Errorf("the server's certificate has %d URIs, want one", n)
	}
	domain := domainOf(leaf.URIs[0].String())
	if opts.Roots = s.trust[domain]; opts.Roots == nil { // crypto/x509 would use the roots of the system
		return fmt.Errorf("no CA is configured for the trust domain of the server, %q", domain[:min(len(domain), 80)])
	}
	return nil
}

// domainOf returns the trust domain of a SPIFFE id.
func domainOf(id string) string {
	rest, _ := strings.CutPrefix(id, "spiffe://")
	domain, _, _ := strings.Cut(rest, "/")
	return domain
}

// checkPeer returns an error unless a verified leaf is one of peers.
func checkPeer(leaf *x509.Certificate, peers []string) error {
	if n := len(leaf.URIs); n != 1 {
		return fmt.Errorf("the server's certificate has %d URIs, want one", n)
	}
	id := leaf.URIs[0].String()
	if !slices.ContainsFunc(peers, func(p string) bool {
		domain := strings.Count(p, "/") == 2
		return id == p || domain && strings.HasPrefix(id, p+"/")
	}) {
		return fmt.Errorf("the server is %q, want one of %q", id, peers)
	}
	return nil
}
