package termination

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"sync/atomic"

	"culvert.dev/tunnel"
)

// A Protocol terminates TLS and serves the stream inside. Its fields must not change
// once it serves, and it must not be copied.
type Protocol struct {
	// Hello reads every hello: an *sni.Protocol, which is Nameless where an Item is for
	// Any name. It must not consume the hello.
	Hello Hello

	// Pass has Hello serve the hellos for names that no Item has. Without it their
	// clients are refused.
	Pass bool

	items atomic.Pointer[itemSet]
}

// An Item says how TLS is terminated for some names.
type Item struct {
	*Keys

	// Any terminates TLS also for the names that no other Item has, and for clients that
	// send no name.
	Any bool

	// Inner are the protocols inside TLS; the first whose Sniff accepts a stream
	// serves it. ALPN is what clients may ask for, in order of preference; empty
	// means that ALPN is not offered.
	Inner []tunnel.Protocol
	ALPN  []Offer

	// Check, if set, returns why a client is refused before a certificate is shown to it.
	// The request is the one of its hello.
	Check func(*tunnel.Request) error
}

// An Offer is a name of ALPN (RFC 7301), and the protocols that may serve the stream
// where it was chosen.
type Offer struct {
	Name      string
	Protocols []tunnel.Protocol // nil means all that are inside
}

// chosen returns the protocols for a stream on which ALPN has chosen name; "" stands
// for none.
func (i *Item) chosen(name string) []tunnel.Protocol {
	for _, o := range i.ALPN {
		if o.Name == name && o.Protocols != nil {
			return o.Protocols
		}
	}
	return i.Inner
}

// A Hello is a Protocol that makes its request of a ClientHello.
type Hello interface {
	tunnel.Protocol
	tunnel.PreambleDetector
}

var (
	_ tunnel.Protocol         = (*Protocol)(nil)
	_ tunnel.PreambleDetector = (*Protocol)(nil)
	_ tunnel.Drainer          = (*Protocol)(nil)
)

// Use makes items those of later connections. After an error the previous ones stay in
// use. A Protocol without items refuses the connections that it should terminate.
func (p *Protocol) Use(items ...Item) error {
	set, err := newItemSet(items)
	if err != nil {
		return err
	}
	p.items.Store(set)
	return nil
}

// Owns reports whether TLS for n is terminated here.
func (p *Protocol) Owns(n tunnel.Name) bool { return p.items.Load().find(n) != nil }

// Inside returns the protocols inside TLS for n, nil where it is not terminated here.
func (p *Protocol) Inside(n tunnel.Name) []tunnel.Protocol {
	if i := p.items.Load().find(n); i != nil {
		return i.Inner
	}
	return nil
}

// Inner returns the protocols inside TLS of all items.
func (p *Protocol) Inner() (all []tunnel.Protocol) {
	if set := p.items.Load(); set != nil {
		for _, i := range set.list {
			all = append(all, i.Inner...)
		}
	}
	return all
}

// Config returns how TLS for n is terminated, for one handshake of a caller that does so
// without Protocol; nil where it is not terminated here. verified is called with the
// identity of a client that has one, and shown with the certificate that it gets; it is
// only true if the handshake completes.
func (p *Protocol) Config(n tunnel.Name, verified func(tunnel.Peer), shown func(*tls.Certificate)) *tls.Config {
	if i := p.items.Load().find(n); i != nil {
		return i.keys.configFor(verified, shown)
	}
	return nil
}

// Name returns "tls".
func (*Protocol) Name() string { return "tls" }

// Sniff is that of Hello.
func (p *Protocol) Sniff(prefix []byte) tunnel.Verdict { return p.Hello.Sniff(prefix) }

// HasPreamble is that of Hello: until there is a hello, nobody waits.
func (p *Protocol) HasPreamble(prefix []byte) bool { return p.Hello.HasPreamble(prefix) }

// Drain implements tunnel.Drainer for the protocols inside.
func (p *Protocol) Drain() {
	for _, inner := range p.Inner() {
		if d, ok := inner.(tunnel.Drainer); ok {
			d.Drain()
		}
	}
}

// ServeConn implements tunnel.Protocol.
func (p *Protocol) ServeConn(ctx context.Context, c *tunnel.Conn, h tunnel.Handler) error {
	set := p.items.Load() // one for all that follows
	var own *tunnel.Request
	var item *useItem
	err := p.Hello.ServeConn(ctx, c, tunnel.HandlerFunc(func(ctx context.Context, req *tunnel.Request) {
		if item = set.find(req.Name); item == nil && p.Pass {
			h.ServeTunnel(ctx, req)
			return
		}
		own = req // the request inside is not read yet
		own.Proto = p.Name()
	}))
	if err != nil || own == nil {
		return err
	}
	if err := check(set, item, own); err != nil {
		return Refuse(own, h, err)
	}
	held, err := reserveMemory(ctx)
	if err != nil {
		return Refuse(own, h, err)
	}
	inner, alpn, err := item.keys.handshake(ctx, c, own, &held)
	if err != nil {
		return err
	}
	return tunnel.ServeInner(ctx, inner, item.chosen(alpn), h)
}

// check returns why the client of a hello is refused before TLS begins.
func check(set *itemSet, item *useItem, req *tunnel.Request) error {
	switch {
	case set == nil:
		return tunnel.Refusef(tunnel.Internal, "termination: there is no certificate yet")
	case item == nil && req.Name.IsZero():
		return tunnel.Refusef(tunnel.NoSNI, "termination: the ClientHello has no server name, by which TLS is terminated here")
	case item == nil:
		return tunnel.Refusef(tunnel.NoRoute, "termination: TLS for %q is neither terminated nor passed on here", req.Name)
	case item.Check != nil:
		return item.Check(req)
	}
	return nil
}

// Refuse ends the connection of req, to which no certificate was shown, because of err. It
// does so in place of the Router, as TLS must not begin for a client that is refused. It
// returns what ServeConn is to return.
func Refuse(req *tunnel.Request, h tunnel.Handler, err error) error {
	req.Refuse(err)
	if r, ok := h.(tunnel.Refuser); ok {
		r.Refused(req, err) // the log knows whom it asked for
		return nil
	}
	return err
}

// Plain is the Protocol of a stream inside TLS that is for To, or where that is nil for the
// service with the name that TLS was terminated for. No byte of it is read, so the server may
// speak first.
type Plain struct{ To *tunnel.Fixed }

// Name returns "tls".
func (Plain) Name() string { return "tls" }

// Sniff says Yes to anything.
func (Plain) Sniff([]byte) tunnel.Verdict { return tunnel.Yes }

// ServeConn makes the one Request.
func (p Plain) ServeConn(ctx context.Context, c *tunnel.Conn, h tunnel.Handler) error {
	req := c.NewRequest(p.Name())
	if req.TLS == nil {
		return tunnel.Refusef(tunnel.Internal, "termination: the stream is not inside TLS")
	}
	req.ALPN = req.TLS.ALPN
	if p.To != nil {
		p.To.Direct(req)
	} else {
		req.Name = req.TLS.ServerName
	}
	h.ServeTunnel(ctx, req)
	return nil
}

const (
	// handshakeMemory is about what an unfinished handshake takes: the hello, keys, the
	// answer and a stack.
	handshakeMemory = 48 << 10 // bytes

	// handshakeBytes is how much of what the client sends is in it. What is above it, of a
	// long chain of certificates, counts twice: crypto/tls gathers it and copies it.
	handshakeBytes = 16 << 10
)

// reserveMemory counts the memory of an unfinished handshake, or refuses it if the
// client has its share of memory already.
func reserveMemory(ctx context.Context) (held tunnel.BufferAccount, err error) {
	held = tunnel.NewBufferAccount(ctx, true)
	if err := held.CheckLimit(); err != nil {
		return held, err
	}
	held.Set(handshakeMemory)
	return held, nil
}

// handshake terminates TLS on c, whose hello was read for the request asked and not
// consumed. It returns the connection inside and what ALPN has chosen. After an error
// c has been closed. The handshake counts in held until it is over.
func (r *KeySet) handshake(ctx context.Context, c *tunnel.Conn, asked *tunnel.Request, held *tunnel.BufferAccount) (inner *tunnel.Conn, alpn string, err error) {
	defer held.Set(0)
	transport := &tlsTransport{Conn: c, left: MaxHandshake, count: func(read int) error {
		if read <= handshakeBytes {
			return nil
		}
		if err := held.CheckLimit(); err != nil {
			return err
		}
		held.Set(handshakeMemory + 2*(read-handshakeBytes))
		return nil
	}}
	var peer tunnel.Peer
	var shown *x509.Certificate
	t := tls.Server(transport, r.configFor(func(p tunnel.Peer) { peer = p }, func(c *tls.Certificate) { shown = c.Leaf }))
	if err := t.HandshakeContext(ctx); err != nil {
		return nil, "", failed(ctx, c, transport, err)
	}
	cs := t.ConnectionState()
	if name, _ := tunnel.ParseName(cs.ServerName); name != asked.Name {
		// The two parsers of the hello disagree, and the first one decided; or the client
		// has sent a second hello, with another name, on being asked for one.
		_ = c.Abort()
		return nil, "", tunnel.Refusef(tunnel.Internal, "termination: the hello was read for %q and then for %q", asked.Name, name)
	}
	transport.carry()
	ended := tunnel.EndedTLS{ServerName: asked.Name, ALPN: asked.ALPN, Peer: peer, Version: cs.Version, CipherSuite: cs.CipherSuite, Certificate: shown, Exporter: exporter{t}.export}
	if peer.Method != "" {
		ended.Chain = cs.PeerCertificates
	}
	return c.Nest(&stream{Conn: t, transport: transport, peer: "client"}, ended), cs.NegotiatedProtocol, nil
}

// An exporter exports keying material of a session.
type exporter struct{ conn *tls.Conn }

func (e exporter) export(label string, context []byte, length int) ([]byte, error) {
	cs := e.conn.ConnectionState()
	return cs.ExportKeyingMaterial(label, context, length)
}

// failed closes a connection whose handshake failed, so that an alert that was sent
// arrives.
func failed(ctx context.Context, c *tunnel.Conn, b *tlsTransport, err error) error {
	why := tunnel.BadHello
	refused, decided := errors.AsType[*tunnel.Error](err)
	switch {
	case ctx.Err() != nil:
		why = tunnel.Drain
		_ = c.Abort()
	case errors.Is(err, errTooLong):
		why = tunnel.TooLarge
		_ = c.Abort()
	case errors.Is(err, os.ErrDeadlineExceeded):
		_ = c.Abort()
		return tunnel.Refusef(tunnel.HelloTimeout, "termination: the handshake is not complete in time, after %d bytes", b.received())
	case decided: // before texts are looked at, which may have names of the client's in them
		why = refused.Reason
		c.CloseWithMessage(nil)
	case strings.HasPrefix(err.Error(), "tls: failed to parse client certificate"), strings.HasPrefix(err.Error(), "tls: client sent certificate"):
		why = tunnel.NoAuth // crypto/tls has no type for these; a malformed name is quoted in them
		c.CloseWithMessage(nil)
	case errors.Is(err, io.EOF), b.broken(), strings.Contains(err.Error(), "remote error"):
		why = tunnel.Gone // and perhaps said why, by an alert
		_ = c.Close()
	case strings.Contains(err.Error(), "provide a certificate"):
		why = tunnel.NoAuth
		c.CloseWithMessage(nil)
	default:
		c.CloseWithMessage(nil)
	}
	return &tunnel.Error{Reason: why, Err: fmt.Errorf("termination: handshake: %w", err)}
}
