package upstream

import (
	"context"
	"crypto"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"sync"
	"sync/atomic"

	"culvert.dev/connect/proxyproto"
	"culvert.dev/delegation"
	"culvert.dev/registry"
	"culvert.dev/tunnel"
)

// An identityLayer speaks TLS and then tells the endpoint, inside of it, who the client is.
// The connection is one client's from then on: nothing shares it.
type identityLayer struct {
	tls      *tlsLayer
	header   proxyproto.Layer
	audience string // of assertions; "" where none is due
	signers  signers
}

// newIdentityLayer returns the layer of s, which speaks TLS by layer.
func (t *Transports) newIdentityLayer(s *registry.Service, layer *tlsLayer) (*identityLayer, error) {
	if s.ForwardIdentity.Assertion && layer.config.GetClientCertificate == nil {
		return nil, errors.New("gateway: an assertion is signed with the key of the client certificate for the service, and there is none")
	}
	return &identityLayer{
		tls: layer, audience: s.ForwardedAudience(),
		header: proxyproto.Layer{Version: 2, Identity: true, TooLarge: t.certificateTooLarge(s)},
	}, nil
}

// certificateTooLarge returns what tells the log, once, that clients' certificates do not
// fit into the header to s.
func (t *Transports) certificateTooLarge(s *registry.Service) func(*tunnel.Endpoint, int) {
	log, service := t.Log, s.Name
	if log == nil {
		return nil
	}
	var once sync.Once
	return func(_ *tunnel.Endpoint, bytes int) {
		once.Do(func() {
			log.Warn("client certificate does not fit into the PROXY header; the service is told of it without its bytes", slog.String("service", service), slog.Int("bytes", bytes))
		})
	}
}

// describe says how the endpoint is told of the client, for people.
func (l *identityLayer) describe() string {
	if l.audience == "" {
		return "in a PROXY header inside TLS"
	}
	return "in a PROXY header inside TLS, with an assertion for " + l.audience
}

// security is that of the TLS.
func (l *identityLayer) security() tunnel.Security { return l.tls.security() }

// Handshake implements Layer.
func (l *identityLayer) Handshake(ctx context.Context, c net.Conn, ep *tunnel.Endpoint, req *tunnel.Request) (net.Conn, error) {
	config, header := l.tls.config, l.header
	if l.audience != "" && req.Peer.Method != "" {
		var shown *tls.Certificate
		get := config.GetClientCertificate
		config = config.Clone()
		config.GetClientCertificate = func(info *tls.CertificateRequestInfo) (cert *tls.Certificate, err error) {
			shown, err = get(info)
			return shown, err
		}
		header.Assert = func(c net.Conn, req *tunnel.Request) (string, error) {
			if shown == nil { // the endpoint has not asked for it, and knows the key
				var err error
				if shown, err = get(&tls.CertificateRequestInfo{}); err != nil {
					return "", err
				}
			}
			return l.assert(c, req, shown)
		}
	}
	inner, err := l.tls.handshake(ctx, c, ep, config)
	if err != nil {
		return nil, err
	}
	return header.Handshake(ctx, inner, ep, req)
}

// assert returns an assertion of who made req, for the session c, by the key of cert.
func (l *identityLayer) assert(c net.Conn, req *tunnel.Request, cert *tls.Certificate) (string, error) {
	session, ok := c.(interface{ ConnectionState() tls.ConnectionState })
	if !ok {
		return "", fmt.Errorf("gateway: %T is no TLS session", c)
	}
	cs := session.ConnectionState()
	binding, err := delegation.Binding(&cs)
	if err != nil {
		return "", err
	}
	signer, err := l.signers.of(cert)
	if err != nil {
		return "", err
	}
	a := assertionOf(req)
	a.Audience, a.Binding = l.audience, binding
	return signer.Sign(a)
}

// assertionOf returns what the gateway knows of who made req. The nearer peers that have
// stated it are the actors.
func assertionOf(req *tunnel.Request) *delegation.Assertion {
	a := &delegation.Assertion{Subject: req.Peer.ID, Method: req.Peer.Method}
	for at := req.Peer.Auth; at != nil && at.Actor != nil; at = at.Actor.Auth {
		a.Actors = append(a.Actors, at.Actor.ID)
	}
	if len(a.Actors) == 0 && req.Peer.Method == "mtls" && req.TLS != nil && len(req.TLS.Chain) > 0 {
		sum := sha256.Sum256(req.TLS.Chain[0].Raw)
		a.CertHash = sum[:]
	}
	return a
}

// signers has the Signer of the certificate that was used last: there is another one after
// a rotation only.
type signers struct {
	last atomic.Pointer[certSigner]
}

type certSigner struct {
	cert   *tls.Certificate
	signer *delegation.Signer
}

// of returns the Signer with the key of cert.
func (s *signers) of(cert *tls.Certificate) (*delegation.Signer, error) {
	if have := s.last.Load(); have != nil && have.cert == cert {
		return have.signer, nil
	}
	leaf := cert.Leaf
	if leaf == nil {
		var err error
		if len(cert.Certificate) == 0 {
			return nil, errors.New("gateway: the certificate is empty")
		}
		if leaf, err = x509.ParseCertificate(cert.Certificate[0]); err != nil {
			return nil, err
		}
	}
	key, ok := cert.PrivateKey.(crypto.Signer)
	if !ok {
		return nil, fmt.Errorf("gateway: a key of the type %T cannot sign", cert.PrivateKey)
	}
	id := ""
	switch {
	case len(leaf.URIs) == 1:
		id = leaf.URIs[0].String()
	case len(leaf.URIs) == 0 && len(leaf.DNSNames) > 0:
		id = "dns:" + leaf.DNSNames[0]
	default:
		return nil, fmt.Errorf("gateway: the gateway's certificate names it by %d URIs and %d DNS names, want one URI or a DNS name", len(leaf.URIs), len(leaf.DNSNames))
	}
	signer, err := delegation.NewSigner(id, key, nil)
	if err != nil {
		return nil, err
	}
	s.last.Store(&certSigner{cert, signer})
	return signer, nil
}

// cannotForward is the transport to endpoints that are to be told of the client inside of
// TLS, for clients that speak TLS with them.
type cannotForward struct{}

var errPassedOn = tunnel.Refusef(tunnel.Unsupported, "gateway: the service is told who the client is inside of TLS that the gateway speaks (forwardIdentity), and this client speaks TLS with the service itself: its TLS has to end at a listener")

// Check implements tunnel.Transport.
func (cannotForward) Check(*tunnel.Endpoint) error { return errPassedOn }

// Dial implements tunnel.Transport.
func (cannotForward) Dial(context.Context, *tunnel.Endpoint, *tunnel.Request) (net.Conn, error) {
	return nil, errPassedOn
}

// Info implements tunnel.Transport.
func (cannotForward) Info() tunnel.TransportInfo { return tunnel.TransportInfo{} }
