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
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"culvert.dev/connect"
	"culvert.dev/connect/proxyproto"
	"culvert.dev/delegation"
	"culvert.dev/identity"
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
	leaf, err := identity.Leaf(cert)
	if err != nil {
		return nil, err
	}
	key, ok := cert.PrivateKey.(crypto.Signer)
	if !ok {
		return nil, fmt.Errorf("gateway: a key of the type %T cannot sign", cert.PrivateKey)
	}
	id, err := nameOfGateway(leaf)
	if err != nil {
		return nil, err
	}
	signer, err := delegation.NewSigner(id, key, nil)
	if err != nil {
		return nil, err
	}
	s.last.Store(&certSigner{cert, signer})
	return signer, nil
}

// nameOfGateway returns what a gateway with that certificate is called in assertions.
func nameOfGateway(leaf *x509.Certificate) (string, error) {
	switch {
	case len(leaf.URIs) == 1:
		return leaf.URIs[0].String(), nil
	case len(leaf.URIs) == 0 && len(leaf.DNSNames) > 0:
		return "dns:" + leaf.DNSNames[0], nil
	}
	return "", fmt.Errorf("gateway: the certificate of a gateway has %d URIs and %d DNS names, want one URI or a DNS name", len(leaf.URIs), len(leaf.DNSNames))
}

// callerFields has requests to a next hop state who has made them.
type callerFields struct {
	assertion   bool
	source      bool
	certs       delegation.Forwarding
	certificate func(*tls.CertificateRequestInfo) (*tls.Certificate, error) // of this gateway, as the hop sees it
	signers     signers

	mu     sync.Mutex
	signed map[[sha256.Size]byte]signed // by session and caller; guarded by mu
}

// signed is an assertion that is sent again, on the same session, for the same caller.
type signed struct {
	token string
	until time.Time
}

const (
	signedFor  = delegation.MaxLifetime     // how long an assertion to a next hop is valid
	signedSent = delegation.MaxLifetime / 2 // how long it is sent
	maxSigned  = 1024                       // of one next hop
)

type callerKey struct{}

// withCaller returns a ctx whose dials to a next hop state who has made req.
func withCaller(ctx context.Context, req *tunnel.Request) context.Context {
	return context.WithValue(ctx, callerKey{}, req)
}

// in returns the fields that state the caller in the session cs, none for a caller without
// an identity. It is connect.SessionFields.
func (f *callerFields) in(ctx context.Context, cs *tls.ConnectionState) (connect.Fields, error) {
	req, _ := ctx.Value(callerKey{}).(*tunnel.Request)
	if req == nil {
		return nil, nil
	}
	fields, err := f.certificates(req)
	if f.source && req.Source.IsValid() {
		fields = append(fields, connect.Field{Name: connect.SourceField, Value: netip.AddrPortFrom(req.Source.Addr().WithZone(""), req.Source.Port()).String()})
	}
	if err == nil && f.assertion && req.Peer.Method != "" {
		var token string
		token, err = f.token(req, cs)
		fields = append(fields, connect.Field{Name: delegation.HeaderField, Value: token})
	}
	if err != nil {
		return nil, &tunnel.Error{Reason: tunnel.Internal, Err: fmt.Errorf("the caller's identity cannot be told to the gateway: %w", err)}
	}
	return fields, nil
}

// certificates returns the fields that state the client's certificate, in the forms that
// other proxies read.
func (f *callerFields) certificates(req *tunnel.Request) (fields connect.Fields, err error) {
	if f.certs == (delegation.Forwarding{}) || req.TLS == nil || len(req.TLS.Chain) == 0 {
		return nil, nil
	}
	own, err := f.certificate(&tls.CertificateRequestInfo{})
	if err != nil {
		return nil, err
	}
	leaf, err := identity.Leaf(own)
	if err != nil {
		return nil, err
	}
	by, err := nameOfGateway(leaf)
	if err != nil {
		return nil, err
	}
	h := http.Header{}
	if err := f.certs.Set(h, &delegation.Caller{By: by, Chain: req.TLS.Chain, ID: req.TLS.Peer.ID, Before: statedCallers(req)}); err != nil {
		return nil, err
	}
	for _, name := range []string{delegation.XFCCField, delegation.ClientCertField, delegation.ClientCertChainField} {
		if value := h.Get(name); value != "" {
			fields = append(fields, connect.Field{Name: name, Value: value})
		}
	}
	return fields, nil
}

// statedCallers returns whom the gateway that has sent req states as its client, and the
// gateways on the way to that one, the farthest first; none where no such gateway was
// believed. Callers that have shown no certificate have no element.
func statedCallers(req *tunnel.Request) (before []delegation.XFCC) {
	at := &req.Peer
	if at.ID == req.TLS.Peer.ID || at.Auth == nil || at.Auth.Actor == nil || at.Auth.Actor.ID != req.TLS.Peer.ID {
		return nil // the client itself, or what it has shown beside its certificate
	}
	// The chain has the nearest gateway first: each has stated the one behind it, and the
	// last one the caller.
	gateway := at.Auth.Actor
	for ; gateway.Auth != nil && gateway.Auth.Actor != nil; gateway = gateway.Auth.Actor {
		before = appendElement(before, gateway.ID, gateway.Auth.Actor.ID)
	}
	if at.Method == "mtls" {
		before = appendElement(before, gateway.ID, at.ID)
	}
	slices.Reverse(before)
	return before
}

// appendElement appends what the gateway by states of a client that is called id. An id that
// is no name of a certificate is left out.
func appendElement(to []delegation.XFCC, by, id string) []delegation.XFCC {
	if name, ok := strings.CutPrefix(id, "dns:"); ok {
		return append(to, delegation.XFCC{By: []string{by}, DNS: []string{name}})
	}
	uri, ok := strings.CutPrefix(id, "uri:") // of a CA of no trust domain, which must not name a SPIFFE id
	if ok && !strings.HasPrefix(strings.ToLower(uri), "spiffe:") || strings.HasPrefix(id, "spiffe://") {
		return append(to, delegation.XFCC{By: []string{by}, URI: []string{uri}})
	}
	return to
}

func (f *callerFields) token(req *tunnel.Request, cs *tls.ConnectionState) (string, error) {
	if cs == nil || len(cs.PeerCertificates) == 0 {
		return "", errors.New("gateway: it is reached without TLS")
	}
	binding, err := delegation.Binding(cs)
	if err != nil {
		return "", err
	}
	a := assertionOf(req)
	h := sha256.New()
	for _, s := range append([]string{string(binding), a.Subject, a.Method, string(a.CertHash)}, a.Actors...) {
		fmt.Fprintf(h, "%d:%s", len(s), s)
	}
	key, now := [sha256.Size]byte(h.Sum(nil)), time.Now()
	f.mu.Lock()
	have, ok := f.signed[key]
	f.mu.Unlock()
	if ok && now.Before(have.until) {
		return have.token, nil
	}
	cert, err := f.certificate(&tls.CertificateRequestInfo{})
	if err != nil {
		return "", err
	}
	signer, err := f.signers.of(cert)
	if err != nil {
		return "", err
	}
	if a.Audience, err = nameOfGateway(cs.PeerCertificates[0]); err != nil {
		return "", err
	}
	a.Binding, a.IssuedAt, a.Expires = binding, now, now.Add(signedFor)
	token, err := signer.Sign(a)
	if err != nil {
		return "", err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.signed == nil || len(f.signed) >= maxSigned {
		f.signed = make(map[[sha256.Size]byte]signed)
	}
	f.signed[key] = signed{token, now.Add(signedSent)}
	return token, nil
}

// pinned returns the key that get returns first, for as long as there is a carrier. So what
// a carrier signs is signed with the key that its sessions have shown: after a rotation
// there is another carrier, and on this one requests may still be on their way.
func pinned(get func(*tls.CertificateRequestInfo) (*tls.Certificate, error)) func(*tls.CertificateRequestInfo) (*tls.Certificate, error) {
	var first atomic.Pointer[tls.Certificate]
	return func(info *tls.CertificateRequestInfo) (*tls.Certificate, error) {
		if c := first.Load(); c != nil {
			return c, nil
		}
		c, err := get(info)
		if err != nil {
			return nil, err
		}
		first.CompareAndSwap(nil, c)
		return first.Load(), nil
	}
}

// callerHeader returns what states callers to the last of hops, nil where h is another one
// or does not ask for that. It changes cfg, by which h is asked.
func callerHeader(h *registry.Hop, cfg *tls.Config) (connect.SessionFields, error) {
	if h.ForwardIdentity == (registry.HopIdentity{}) {
		return nil, nil
	}
	if cfg.GetClientCertificate != nil {
		cfg.GetClientCertificate = pinned(cfg.GetClientCertificate)
	}
	f := &callerFields{
		assertion: h.ForwardIdentity.Assertion, source: h.ForwardIdentity.Source, certificate: cfg.GetClientCertificate,
		certs: delegation.Forwarding{XFCC: delegation.XFCCMode(h.ForwardIdentity.XFCC), ClientCert: h.ForwardIdentity.ClientCert},
	}
	if len(cfg.Certificates) > 0 {
		own := &cfg.Certificates[0]
		f.certificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return own, nil }
	}
	if f.certificate == nil {
		return nil, errors.New("gateway: who a caller is, is signed with the key of the client certificate for the gateway, and there is none")
	}
	return f.in, nil
}

// describeCaller says how requests to the last gateway state callers, for people; "" where
// they do not.
func describeCaller(h *registry.HopIdentity) string {
	var how []string
	if h.Assertion {
		how = append(how, "with an assertion for it")
	}
	if h.XFCC != "" {
		how = append(how, "in "+delegation.XFCCField+" ("+h.XFCC+")")
	}
	if h.ClientCert {
		how = append(how, "in "+delegation.ClientCertField)
	}
	if how == nil {
		return ""
	}
	return "in the request to the last gateway, " + strings.Join(how, ", ")
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
