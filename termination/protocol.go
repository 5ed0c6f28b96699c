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

// A Protocol ends TLS and serves what is inside. Its fields are not to be
// changed once it serves, and it must not be copied.
type Protocol struct {
	// Hello reads every hello and serves those that are for others: an
	// *sni.Protocol, and with All one that is Nameless. It must not consume
	// the hello.
	Hello Hello

	// All has TLS end here whatever name is asked for, if any.
	All bool

	// Inner are the protocols spoken inside of TLS, asked in order whose the
	// stream is. ALPN is what of them clients may ask for, the first one first;
	// empty means that ALPN is not spoken.
	Inner []tunnel.Protocol
	ALPN  []Offer

	ring atomic.Pointer[ring]
}

// An Offer is a name of ALPN (RFC 7301), and the protocols that are spoken where
// it was chosen: they alone are asked whose the stream is.
type Offer struct {
	Name      string
	Protocols []tunnel.Protocol // nil means all that are inside
}

// chosen returns the protocols that may be inside where ALPN chose name, "" for
// nothing.
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

// Use makes k the keys of the connections to come. Where it fails, those
// before stay. A Protocol without any refuses what would end here.
func (p *Protocol) Use(k *Keys) error {
	var names []string
	for _, o := range p.ALPN {
		names = append(names, o.Name)
	}
	r, err := newRing(k, names)
	if err != nil {
		return err
	}
	if !p.All && len(r.names) == 0 {
		return errors.New("termination: no certificate has a name that could end here, wildcards aside: list the names")
	}
	p.ring.Store(r)
	return nil
}

// Owns reports whether TLS for n ends here.
func (p *Protocol) Owns(n tunnel.Name) bool {
	r := p.ring.Load()
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
	r := p.ring.Load() // one set of keys for all that follows
	var own *tunnel.Request
	err := p.Hello.ServeConn(ctx, c, tunnel.HandlerFunc(func(ctx context.Context, req *tunnel.Request) {
		if p.All || r != nil && r.owns(req.Name) {
			own = req // which ends here, and its request is yet to come
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
	held, err := hold(ctx)
	if err != nil {
		own.Refuse(err)
		return err
	}
	inner, alpn, err := r.end(ctx, c, own.Name, &held)
	if err != nil {
		return err
	}
	return tunnel.ServeInner(ctx, inner, p.chosen(alpn), h)
}

// handshakeMemory is about what an unfinished handshake takes: the hello, keys, the
// answer and a stack.
const handshakeMemory = 48 << 10 // bytes

// hold counts an unfinished handshake in the accounts of memory, or refuses it where
// its client has its share of that.
func hold(ctx context.Context) (held tunnel.BufferAccount, err error) {
	held = tunnel.NewBufferAccount(ctx, true)
	if err := held.CheckLimit(); err != nil {
		return held, err
	}
	held.Set(handshakeMemory)
	return held, nil
}

// end ends TLS on c, whose hello was read for a name and is still there, and
// returns what is inside, and what ALPN chose. After an error c has been ended.
// held counts until the handshake is over.
func (r *ring) end(ctx context.Context, c *tunnel.Conn, asked tunnel.Name, held *tunnel.BufferAccount) (inner *tunnel.Conn, alpn string, err error) {
	defer held.Set(0)
	tunnel.WillWait(ctx) // a signature takes a while, and so does the client
	below := &below{Conn: c, left: MaxHandshake}
	t := tls.Server(below, r.config)
	if err := t.HandshakeContext(ctx); err != nil {
		return nil, "", failed(ctx, c, below, err)
	}
	cs := t.ConnectionState()
	if name, _ := tunnel.ParseName(cs.ServerName); name != asked {
		// Two parsers, and what the first one judged is not what this one saw.
		_ = c.Abort()
		return nil, "", tunnel.Refusef(tunnel.Internal, "termination: the hello was read for %q and then for %q", asked, name)
	}
	if r.verify != nil {
		r.verify(&cs)
	}
	peer, err := PeerOf(&cs) // whom VerifyConnection has let pass
	if err != nil {
		_ = c.Abort()
		return nil, "", err
	}
	below.carry()
	return c.Nest(&stream{Conn: t, below: below, other: "client"}, peer), cs.NegotiatedProtocol, nil
}

// failed ends a connection whose handshake failed. An alert that was sent
// arrives.
func failed(ctx context.Context, c *tunnel.Conn, b *below, err error) error {
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
		return tunnel.Refusef(tunnel.HelloTimeout, "termination: the handshake is not complete in time, after %d bytes", b.taken())
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
