package tunnel

import (
	"context"
	"crypto/x509"
	"io"
	"net"
	"net/netip"
	"sync/atomic"
	"time"

	"culvert.dev/tunnel/internal/poll"
	"culvert.dev/tunnel/internal/relay"
)

// closeTimeout is how long a refused client may take to read why: a close with
// unread input would send a reset, and the reset would discard the answer.
const closeTimeout = time.Second

// A Conn is an accepted connection with a look-ahead buffer: a Protocol reads
// its preamble with Fill and Buffered, and what it does not Discard is the
// start of the stream.
//
// A Conn is a Stream. It holds no buffer until its first byte arrives.
type Conn struct {
	net.Conn
	Listener string // the address of the listener, as configured
	Peer     Peer   // the identity proved on this connection, zero if none

	accepted time.Time
	source   netip.AddrPort // the socket's peer
	process  *Process       // that connected, of a LocalConn; nil if unknown
	local    uint16         // the socket's own port; 0 means it was not asked yet
	buf      []byte         // read and not consumed
	scratch  *poll.Scratch  // what buf began in, if it is to be given back
	leaving  atomic.Bool    // the last answer is on its way
	began    atomic.Int64   // when the first byte came, nanoseconds after accepted; 0 before
	handed   bool           // accepted as a Stream: the Server no longer closes it
	bare     bool           // its listener requires TLS, and no TLS was ended around it
	nest     *nest          // what this one is carried in, see Nest; nil for a connection of its own
}

// A nest is the place of a Conn inside of another one.
type nest struct {
	outer *Conn
	tls   EndedTLS
}

// An EndedTLS is TLS of a client that was ended at the gateway.
type EndedTLS struct {
	ServerName Name     // that the client asked for; zero where it sent none
	ALPN       []string // protocols that the client offered, at most MaxALPN
	Peer       Peer     // the identity that the client proved; zero if none

	// Chain has the client's certificates, verified, the leaf first. Nil for none.
	Chain []*x509.Certificate

	// Version and CipherSuite are those of crypto/tls, and Certificate is the one that the
	// gateway has shown. They are zero where they are not known.
	Version, CipherSuite uint16
	Certificate          *x509.Certificate

	// Exporter returns keying material of the session, RFC 8446 section 7.5.
	Exporter func(label string, context []byte, length int) ([]byte, error)
}

// NewConn wraps c, which the Conn owns from now on.
func NewConn(c net.Conn) *Conn {
	conn := new(Conn)
	conn.init(c)
	return conn
}

// addresses is what a connection can do that knows its addresses without
// asking the kernel or making a net.Addr.
type addresses interface {
	AddrPorts() (remote netip.AddrPort, localPort uint16)
}

func (conn *Conn) init(c net.Conn) {
	conn.Conn, conn.accepted = c, time.Now()
	if a, ok := c.(addresses); ok {
		conn.source, conn.local = a.AddrPorts()
	} else if client, ok := c.(LocalConn); ok {
		if p, ok := client.Process(); ok {
			conn.process = &p
		}
	} else if a, ok := c.RemoteAddr().(*net.TCPAddr); ok {
		ap := a.AddrPort()
		conn.source = netip.AddrPortFrom(ap.Addr().Unmap(), ap.Port())
	}
}

// Buffered returns the bytes read and not discarded. The slice is valid until
// the next Fill or Read.
func (c *Conn) Buffered() []byte { return c.buf }

// Discard consumes the first n buffered bytes.
func (c *Conn) Discard(n int) {
	if c.buf = c.buf[n:]; len(c.buf) == 0 {
		c.buf = nil // a tunnel outlives its preamble by far
	}
}

// Fill waits for more bytes and appends them to the look-ahead buffer, at
// most as many as make limit bytes in all. It is an error to call it with
// limit bytes buffered. At the end of the stream it returns io.EOF.
func (c *Conn) Fill(limit int) error {
	if len(c.buf) >= limit {
		return io.ErrShortBuffer
	}
	first := len(c.buf) == 0
	err := c.fill(limit)
	if first && len(c.buf) > 0 {
		c.markBegun()
	}
	return err
}

// markBegun notes when the first byte came: the limit for the whole preamble
// runs from there.
func (c *Conn) markBegun() {
	if c.began.Load() == 0 {
		c.began.Store(max(1, int64(time.Since(c.accepted))))
	}
}

// A filler appends to buf what one read finds, up to limit bytes in all, and holds
// no buffer while it waits.
type filler interface {
	Fill(buf []byte, limit int) ([]byte, error)
}

func (c *Conn) fill(limit int) (err error) {
	if f, ok := c.Conn.(filler); ok {
		c.buf, err = f.Fill(c.buf, limit)
		return err
	}
	p := make([]byte, min(512, limit-len(c.buf)))
	n, err := c.Conn.Read(p)
	c.buf = append(c.buf, p[:n]...)
	if n > 0 {
		return nil // an error comes again with the next read
	}
	return err
}

// Read returns the buffered bytes first.
func (c *Conn) Read(p []byte) (int, error) {
	if len(c.buf) > 0 {
		n := copy(p, c.buf)
		c.Discard(n)
		return n, nil
	}
	return c.Conn.Read(p)
}

// CloseWrite half-closes the connection where it can.
func (c *Conn) CloseWrite() error { return relay.CloseWrite(c.Conn) }

// Abort closes the connection so that the peer sees a reset.
func (c *Conn) Abort() error { return relay.Abort(c.Conn) }

// Unwrap implements Unwrapper.
func (c *Conn) Unwrap() (net.Conn, []byte) {
	c.markHanded()
	early := c.buf
	c.buf = nil
	return c.Conn, early
}

// CloseWithMessage writes msg, the last bytes for the client, and closes the
// connection so that they arrive: the end of the stream is sent at once, and
// what the client still sends is discarded for at most closeTimeout and a
// megabyte.
func (c *Conn) CloseWithMessage(msg []byte) {
	for o := c; o != nil; o = o.outer() {
		o.leaving.Store(true)
	}
	_ = c.Conn.SetDeadline(time.Now().Add(closeTimeout))
	if _, err := c.Conn.Write(msg); err == nil && c.CloseWrite() == nil {
		for left := 1 << 20; left > 0; left -= len(c.buf) {
			c.buf = nil
			if c.Fill(left) != nil {
				break
			}
		}
	}
	_ = c.Conn.Close()
}

// NewRequest makes a request of this connection. Its Accept returns the
// connection itself, what is buffered included; its Refuse aborts it. The
// protocol fills in where to, and its own Accept and Refuse where it has them.
func (c *Conn) NewRequest(proto string) *Request {
	r := &Request{
		Proto:     proto,
		Listener:  c.Listener,
		Source:    c.source,
		Process:   c.process,
		Peer:      c.Peer,
		Accept:    c.Accept,
		Refuse:    func(error) { _ = c.Abort() },
		Start:     c.accepted,
		LocalPort: c.local,

		RequireTLS: c.bare,
	}
	if c.nest != nil {
		r.TLS = &c.nest.tls
	}
	if c.local == 0 {
		if a, ok := c.LocalAddr().(*net.TCPAddr); ok {
			r.LocalPort = uint16(a.Port)
		}
	}
	return r
}

// Accept ends the preamble: the deadlines are lifted and c is handed on as a
// Stream. It is the Accept of requests that need no answer to the client.
func (c *Conn) Accept() (Stream, error) {
	if err := c.Conn.SetDeadline(time.Time{}); err != nil {
		return nil, err // the Server closes c
	}
	c.markHanded()
	return c, nil
}

// Nest returns the Conn of what is carried inside of c: TLS that was ended
// here. inner is a layer upon c, and closing it closes c. The two are one
// connection to the Server, with one place, one deadline for the whole
// preamble and one source. The requests inside have ended as their TLS. A user of this
// machine is the caller inside, too, and the Actor of one with a certificate.
func (c *Conn) Nest(inner net.Conn, ended EndedTLS) *Conn {
	c.scratch = nil // which would stay as long as what is inside
	peer := ended.Peer
	switch {
	case c.Peer.Method != "unix":
	case peer.Method == "":
		peer = c.Peer
	default:
		peer = peer.WithActor(c.Peer)
	}
	return &Conn{Conn: inner, Listener: c.Listener, Peer: peer, nest: &nest{c, ended}, accepted: c.accepted, source: c.source, process: c.process, local: c.local}
}

// outer returns what c is carried in, nil for a connection of its own.
func (c *Conn) outer() *Conn {
	if c.nest == nil {
		return nil
	}
	return c.nest.outer
}

// markHanded notes that c belongs to whoever has it as a Stream, and with it what it
// is carried in.
func (c *Conn) markHanded() {
	for ; c != nil; c = c.outer() {
		c.handed = true
	}
}

// ServeInner finds out which of the protocols c speaks and has it serve c, as
// the Server does with a connection that it accepted. It is for a Conn made by
// Nest.
func ServeInner(ctx context.Context, c *Conn, protocols []Protocol, h Handler) error {
	p, err := detect(c, nil, protocols)
	if err != nil {
		return err
	}
	return p.ServeConn(ctx, c, h)
}
