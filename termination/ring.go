package termination

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"

	"culvert.dev/tunnel"
)

// A Ring is Keys made ready for whoever decides for each hello by what keys TLS
// ends, and what is asked for inside: it has no names of its own and no
// protocols.
type Ring struct{ ring *ring }

// NewRing checks k and makes it ready. k.Names must be empty. It speaks no ALPN.
func NewRing(k *Keys) (*Ring, error) {
	if len(k.Names) > 0 {
		return nil, errors.New("termination: a ring has no names of its own")
	}
	r, err := makeRing(k, nil, false)
	if err != nil {
		return nil, err
	}
	return &Ring{r}, nil
}

// End ends TLS on c, whose hello has been read for name, the zero one where it
// names nobody, and has not been consumed. It returns what is inside, of whom is
// calling. After an error, which is what ServeConn returns, c has been ended:
// by an alert where the client is to know.
func (r *Ring) End(ctx context.Context, c *tunnel.Conn, name tunnel.Name) (*tunnel.Conn, error) {
	held, err := hold(ctx)
	if err != nil {
		_ = c.Abort()
		return nil, err
	}
	inner, _, err := r.ring.end(ctx, c, name, &held)
	return inner, err
}

// Begin is the other side: it speaks TLS as a client upon c, which it owns from
// now on, and returns what is inside as a tunnel.Stream that is an
// tunnel.Aborter. After an error c is closed.
func Begin(ctx context.Context, c net.Conn, config *tls.Config) (net.Conn, error) {
	below := &below{Conn: c, left: MaxHandshake}
	t := tls.Client(below, config)
	if err := t.HandshakeContext(ctx); err != nil {
		_ = c.Close()
		if errors.Is(err, io.EOF) || below.broken() && ctx.Err() == nil {
			err = fmt.Errorf("the connection ended in the handshake: %w", err)
		}
		return nil, err
	}
	below.carry()
	return &stream{Conn: t, below: below, other: "service"}, nil
}

// verifyClient fills in the chains of a client that may come without, and
// leaves none where peerOf would refuse it.
func verifyClient(cs *tls.ConnectionState, roots *x509.CertPool, t trust) {
	n := len(cs.PeerCertificates)
	if n == 0 || n > maxChain {
		return
	}
	between := x509.NewCertPool()
	for _, c := range cs.PeerCertificates[1:] {
		between.AddCert(c)
	}
	chains, err := cs.PeerCertificates[0].Verify(x509.VerifyOptions{
		Roots: roots, Intermediates: between, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
	})
	if err != nil {
		return
	}
	cs.VerifiedChains = chains
	if _, err := peerOf(cs, t); err != nil {
		cs.VerifiedChains = nil
	}
}
