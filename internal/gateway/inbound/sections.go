package inbound

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"reflect"

	"culvert.dev/identity"
	"culvert.dev/internal/termination"
	"culvert.dev/registry"
	"culvert.dev/sni"
	"culvert.dev/tunnel"
)

// sectionKeys are the keys of a section that terminates TLS.
type sectionKeys struct {
	termination *registry.TLSTermination
	keys        *termination.KeySet
	err         error // why there are no keys: the section terminates no TLS then
}

// makeKeySets makes the keys of the sections. Those that are the same as before are kept.
func (o *config) makeKeySets(store *identity.Store, before *config) {
	for _, s := range o.Sections {
		if s.TLS == nil || o.Protocol != registry.TLS {
			continue
		}
		if o.keySets == nil {
			o.keySets = make(map[string]*sectionKeys)
		}
		if before != nil && before.keySets[s.Name] != nil && sameTermination(before.keySets[s.Name].termination, s.TLS) {
			o.keySets[s.Name] = before.keySets[s.Name]
			continue
		}
		k := &sectionKeys{termination: s.TLS}
		k.keys, k.err = newKeySet(store, s.TLS)
		o.keySets[s.Name] = k
	}
}

// problem says which sections can't be served, and notes each by its name.
func (o *config) problem(parts map[string]error) error {
	var errs []error
	for _, s := range o.Sections {
		if k := o.keySets[s.Name]; k != nil && k.err != nil {
			parts[s.Name] = k.err
			errs = append(errs, fmt.Errorf("section %q: %w", s.Name, k.err))
		}
	}
	return errors.Join(errs...)
}

func sameTermination(a, b *registry.TLSTermination) bool {
	return a == b || reflect.DeepEqual(a, b)
}

func newKeySet(store *identity.Store, e *registry.TLSTermination) (*termination.KeySet, error) {
	k, err := terminationKeys(store, e)
	if err != nil {
		return nil, err
	}
	if k.MinVersion == 0 { // these are for clients of any kind
		k.MinVersion = tls.VersionTLS12
	}
	return termination.NewKeySet(k)
}

// A tlsProtocol is the Protocol of a TLS listener: of each hello the name says
// which section it is for, and that one whether it is passed on or TLS ends.
// A client that is not served gets no answer: its connection is closed, as Gateway
// API requires.
type tlsProtocol struct{ l *Listener }

var _ tunnel.PreambleDetector = (*tlsProtocol)(nil)

// hello reads them all: a client that names nobody may be served by who serves
// any name.
var hello = sni.Protocol{Refusal: sni.RefuseClose, Nameless: true}

// Name returns "tls".
func (*tlsProtocol) Name() string { return "tls" }

// Sniff and HasPreamble are those of package sni.
func (*tlsProtocol) Sniff(prefix []byte) tunnel.Verdict { return hello.Sniff(prefix) }

// HasPreamble implements tunnel.PreambleDetector.
func (*tlsProtocol) HasPreamble(prefix []byte) bool { return hello.HasPreamble(prefix) }

// ServeConn implements tunnel.Protocol.
func (f *tlsProtocol) ServeConn(ctx context.Context, c *tunnel.Conn, h tunnel.Handler) error {
	has := f.l.config.Load() // one for all that follows
	var ends *tunnel.Request
	if err := hello.ServeConn(ctx, c, tunnel.HandlerFunc(func(ctx context.Context, req *tunnel.Request) {
		if f.route(has, req) {
			h.ServeTunnel(ctx, req)
		} else {
			ends = req
		}
	})); err != nil || ends == nil {
		return err
	}
	// Once a certificate is shown, the client takes itself for accepted.
	if err := f.l.builder.Table().PrecheckRoute(ends); err != nil {
		return termination.Refuse(ends, h, err)
	}
	k := has.keySets[ends.Listener]
	if k.err != nil {
		return termination.Refuse(ends, h, &tunnel.Error{Reason: tunnel.Internal, Err: fmt.Errorf("section %q: %w", ends.Listener, k.err)})
	}
	inner, err := k.keys.Server(ctx, c, ends)
	if err != nil {
		return err
	}
	return termination.Plain{}.ServeConn(ctx, inner, tunnel.HandlerFunc(func(ctx context.Context, req *tunnel.Request) {
		req.Listener, req.ListenerOnly = ends.Listener, true
		h.ServeTunnel(ctx, req)
	}))
}

// route says what req leads to, and reports whether TLS is passed on there.
func (f *tlsProtocol) route(has *config, req *tunnel.Request) bool {
	req.ListenerOnly = true // to nothing, unless there is a section
	s := has.table.SectionOf(has.Name, req.Name)
	if s == nil {
		return true
	}
	if s.Istio && has.table.SectionAdmits(s.Name, req) {
		if name, port, _, ok := sni.ParseIstio(req.Name); ok {
			req.Name, req.Port, req.Listener, req.ListenerOnly = name, port, Address(has.Listener), false
			return true
		}
	}
	req.Listener = s.Name
	return s.TLS == nil
}

// routeAll sends req to the one section of a listener of TCP or UDP.
func (l *Listener) routeAll(req *tunnel.Request) {
	has := l.config.Load()
	req.ListenerOnly = true
	if s := has.table.SectionOf(has.Name, tunnel.Name{}); s != nil {
		req.Listener = s.Name
	}
}

// An httpProtocol is the Protocol of a listener for HTTP, which is not routed.
type httpProtocol struct{ l *Listener }

var _ tunnel.PreambleDetector = (*httpProtocol)(nil)

// Name returns "http".
func (*httpProtocol) Name() string { return "http" }

// Sniff says Yes to anything.
func (*httpProtocol) Sniff([]byte) tunnel.Verdict { return tunnel.Yes }

// HasPreamble implements tunnel.PreambleDetector: whatever comes, it is not served.
func (*httpProtocol) HasPreamble([]byte) bool { return true }

// ServeConn tells a client of HTTP that there is none here, and cuts off one of
// HTTPS.
func (f *httpProtocol) ServeConn(ctx context.Context, c *tunnel.Conn, _ tunnel.Handler) error {
	if len(c.Buffered()) == 0 {
		if err := c.Fill(1 << 10); err != nil {
			_ = c.Abort()
			return tunnel.PreambleError(c, err)
		}
	}
	const handshake = 22 // a record of TLS, RFC 8446 section 5.1
	if c.Buffered()[0] == handshake {
		_ = c.Abort()
		return tunnel.Refusef(tunnel.Unsupported, "listener %s: HTTPS is not routed", c.Listener)
	}
	const body = "This gateway routes no HTTP.\n"
	c.CloseWithMessage(fmt.Appendf(nil, "HTTP/1.1 501 Not Implemented\r\nContent-Type: text/plain; charset=utf-8\r\n"+
		"Content-Length: %d\r\nConnection: close\r\n\r\n%s", len(body), body))
	return tunnel.Refusef(tunnel.Unsupported, "listener %s: HTTP is not routed", c.Listener)
}
