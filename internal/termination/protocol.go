package termination

import (
	"context"
	"crypto/tls"
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
	// Hello reads every hello and serves those for names that the Protocol does not
	// own: an *sni.Protocol, and with All one that is Nameless. It must not consume
	// the hello.
	Hello Hello

	// All terminates TLS for any name, and without one.
	All bool

	// Inner are the protocols inside TLS; the first whose Sniff accepts a stream
	// serves it. ALPN is what clients may ask for, in order of preference; empty
	// means that ALPN is not offered.
	Inner []tunnel.Protocol
	ALPN  []Offer

	keys atomic.Pointer[KeySet]
}

// An Offer is a name of ALPN (RFC 7301), and the protocols that may serve the stream
// where it was chosen.
type Offer struct {
	Name      string
	Protocols []tunnel.Protocol // nil means all that are inside
}

// chosen returns the protocols for a stream on which ALPN has chosen name; "" stands
// for none.
func (p *Protocol) chosen(name string) []tunnel.Protocol {
	for _, o := range p.ALPN {
		if o.Name == name && o.Protocols != nil {
			return o.Protocols
		}
	}
	return p.Inner
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

// Use makes k the keys of later connections. After an error the previous keys stay
// in use. A Protocol without keys refuses the connections that it should terminate.
func (p *Protocol) Use(k *Keys) error {
	var names []string
	for _, o := range p.ALPN {
		names = append(names, o.Name)
	}
	r, err := newKeySet(k, names, len(k.Names) == 0)
	if err != nil {
		return err
	}
	if !p.All && len(r.names) == 0 {
		return errors.New("termination: no certificate has a name that could end here, wildcards aside: list the names")
	}
	p.keys.Store(r)
	return nil
}

// Owns reports whether TLS for n is terminated here.
func (p *Protocol) Owns(n tunnel.Name) bool {
	r := p.keys.Load()
	return p.All || r != nil && r.owns(n)
}

// Name returns "tls".
func (*Protocol) Name() string { return "tls" }

// Sniff is that of Hello.
func (p *Protocol) Sniff(prefix []byte) tunnel.Verdict { return p.Hello.Sniff(prefix) }

// HasPreamble is that of Hello: until there is a hello, nobody waits.
func (p *Protocol) HasPreamble(prefix []byte) bool { return p.Hello.HasPreamble(prefix) }

// Drain implements tunnel.Drainer for the protocols inside.
func (p *Protocol) Drain() {
	for _, inner := range p.Inner {
		if d, ok := inner.(tunnel.Drainer); ok {
			d.Drain()
		}
	}
}

// ServeConn implements tunnel.Protocol.
func (p *Protocol) ServeConn(ctx context.Context, c *tunnel.Conn, h tunnel.Handler) error {
	r := p.keys.Load() // one set of keys for all that follows
	var own *tunnel.Request
	err := p.Hello.ServeConn(ctx, c, tunnel.HandlerFunc(func(ctx context.Context, req *tunnel.Request) {
		if p.All || r != nil && r.owns(req.Name) {
			own = req // terminated here; the request inside is not read yet
			return
		}
		h.ServeTunnel(ctx, req)
	}))
	switch {
	case err != nil || own == nil:
		return err
	case r == nil:
		err := tunnel.Refusef(tunnel.Internal, "termination: there is no certificate yet")
		own.Refuse(err)
		return err
	}
	held, err := reserveMemory(ctx)
	if err != nil {
		own.Refuse(err)
		return err
	}
	inner, alpn, err := r.handshake(ctx, c, own.Name, &held)
	if err != nil {
		return err
	}
	return tunnel.ServeInner(ctx, inner, p.chosen(alpn), h)
}

// handshakeMemory is about what an unfinished handshake takes: the hello, keys, the
// answer and a stack.
const handshakeMemory = 48 << 10 // bytes

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

// handshake terminates TLS on c, whose hello was read for the name asked and not
// consumed. It returns the connection inside and what ALPN has chosen. After an error
// c has been closed. The handshake counts in held until it is over.
func (r *KeySet) handshake(ctx context.Context, c *tunnel.Conn, asked tunnel.Name, held *tunnel.BufferAccount) (inner *tunnel.Conn, alpn string, err error) {
	defer held.Set(0)
	transport := &tlsTransport{Conn: c, left: MaxHandshake}
	t := tls.Server(transport, r.config)
	if err := t.HandshakeContext(ctx); err != nil {
		return nil, "", failed(ctx, c, transport, err)
	}
	cs := t.ConnectionState()
	if name, _ := tunnel.ParseName(cs.ServerName); name != asked {
		// The two parsers of the hello disagree, and the first one decided.
		_ = c.Abort()
		return nil, "", tunnel.Refusef(tunnel.Internal, "termination: the hello was read for %q and then for %q", asked, name)
	}
	if r.verify != nil {
		r.verify(&cs)
	}
	peer, err := PeerOf(&cs) // VerifyConnection has checked it
	if err != nil {
		_ = c.Abort()
		return nil, "", err
	}
	transport.carry()
	return c.Nest(&stream{Conn: t, transport: transport, peer: "client"}, peer), cs.NegotiatedProtocol, nil
}

// failed closes a connection whose handshake failed, so that an alert that was sent
// arrives.
func failed(ctx context.Context, c *tunnel.Conn, b *tlsTransport, err error) error {
	why := tunnel.BadHello
	switch bad := (*tls.CertificateVerificationError)(nil); {
	case ctx.Err() != nil:
		why = tunnel.Drain
		_ = c.Abort()
	case errors.Is(err, errTooLong):
		why = tunnel.TooLarge
		_ = c.Abort()
	case errors.Is(err, os.ErrDeadlineExceeded):
		_ = c.Abort()
		return tunnel.Refusef(tunnel.HelloTimeout, "termination: the handshake is not complete in time, after %d bytes", b.received())
	case errors.Is(err, io.EOF), b.broken(), strings.Contains(err.Error(), "remote error"):
		why = tunnel.Gone // and perhaps said why, by an alert
		_ = c.Close()
	case errors.As(err, &bad), tunnel.ReasonOf(err) == tunnel.NoAuth, strings.Contains(err.Error(), "provide a certificate"):
		why = tunnel.NoAuth
		c.CloseWithMessage(nil)
	default:
		c.CloseWithMessage(nil)
	}
	return &tunnel.Error{Reason: why, Err: fmt.Errorf("termination: handshake: %w", err)}
}
