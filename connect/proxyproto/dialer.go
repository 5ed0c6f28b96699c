package proxyproto

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"time"

	"culvert.dev/tunnel"
)

// telling is how long the header may take to leave. It fits in any socket
// buffer, so the timeout only matters for other kinds of connections.
const telling = time.Second

// A Layer sends a header over a connection, which tells the endpoint of the client:
// in version 1 its address; in version 2 also the name it asked for (AUTHORITY), the
// protocol it offered inside, where that is one (ALPN), a name for the connection
// (UNIQUE_ID), and a checksum (CRC32C).
//
// The endpoint has to be one that expects it.
type Layer struct {
	Version int // 1 or 2

	// Identity adds the id of the caller, and what the gateway knows of the client's TLS that
	// it has ended, the client's certificate included (SSL). It is of version 2. The
	// certificate is left out where the header would be too large; the rest says that there
	// is one.
	Identity bool

	// Assert, if set, returns an assertion of who made req, for the connection c alone. It
	// is of version 2. Without it nothing is sent. "" means that there is nothing to say.
	Assert func(c net.Conn, req *tunnel.Request) (string, error)

	// TooLarge, if set, is told of the bytes of a certificate that was left out.
	TooLarge func(ep *tunnel.Endpoint, bytes int)
}

// Handshake tells ep, over c, of the client that made req, and returns c. It closes c
// where it fails.
//
// The header's destination is the endpoint's own address, or none in
// particular where it has a name only: the gateway's, at which the client was,
// says nothing to a service. A unique id that a proxy in
// front gave the connection is passed on.
func (l Layer) Handshake(ctx context.Context, c net.Conn, ep *tunnel.Endpoint, req *tunnel.Request) (net.Conn, error) {
	b, err := l.header(ctx, c, ep, req)
	if err != nil {
		_ = c.Close()
		return nil, err
	}
	return tell(c, b, ep.String())
}

// header returns what to send over c; c is nil where it is not dialed yet.
func (l Layer) header(ctx context.Context, c net.Conn, ep *tunnel.Endpoint, req *tunnel.Request) ([]byte, error) {
	h := Header{Version: l.Version, Source: unmapped(req.Source), Destination: unmapped(ep.Addr), Authority: req.Name.String()}
	if !ep.Addr.Addr().IsValid() {
		none := netip.IPv4Unspecified()
		if h.Source.Addr().Is6() {
			none = netip.IPv6Unspecified()
		}
		h.Destination = netip.AddrPortFrom(none, ep.Addr.Port())
	}
	if !req.Source.IsValid() {
		h.Source, h.Destination = req.Source, req.Source // UNKNOWN, and UNSPEC
	}
	if len(req.ALPN) == 1 {
		h.ALPN = req.ALPN[0]
	}
	if said := FromContext(ctx); said != nil && said.UniqueID != "" {
		h.UniqueID = said.UniqueID
	} else {
		var id [16]byte
		_, _ = rand.Read(id[:]) // never fails
		h.UniqueID = hex.EncodeToString(id[:])
	}
	if l.Identity {
		h.SSL = sslOf(req)
		if req.Peer.Method != "" {
			h.Caller = req.Peer.ID
		}
	}
	if l.Assert != nil {
		var err error
		if h.Assertion, err = l.Assert(c, req); err != nil {
			return nil, &tunnel.Error{Reason: tunnel.Internal, Err: fmt.Errorf("the caller's identity cannot be told to %s: %w", ep, err)}
		}
	}
	b, err := h.Append(nil)
	if errors.Is(err, errTooLarge) && h.SSL != nil && h.SSL.ClientCertificate != nil {
		if l.TooLarge != nil {
			l.TooLarge(ep, len(h.SSL.ClientCertificate))
		}
		h.SSL.ClientCertificate = nil
		b, err = h.Append(nil)
	}
	if err != nil {
		return nil, &tunnel.Error{Reason: tunnel.Internal, Err: err}
	}
	return b, nil
}

// A Dialer dials as another one does and sends a header first, as a Layer does. It is
// a tunnel.Dialer, and a tunnel.Transport.
type Dialer struct {
	Version int // 1 or 2
	Dialer  tunnel.EndpointDialer
}

var (
	_ tunnel.Dialer    = (*Dialer)(nil)
	_ tunnel.Transport = (*Dialer)(nil)
)

// Check implements tunnel.Transport.
func (d *Dialer) Check(ep *tunnel.Endpoint) error {
	if c, ok := d.Dialer.(interface{ Check(tunnel.Endpoint) error }); ok {
		return c.Check(*ep)
	}
	return nil
}

// Info implements tunnel.Transport.
func (d *Dialer) Info() tunnel.TransportInfo { return tunnel.TransportInfo{} }

// Dial implements tunnel.Transport. A header that can't be written is no reason to
// dial.
func (d *Dialer) Dial(ctx context.Context, ep *tunnel.Endpoint, req *tunnel.Request) (net.Conn, error) {
	b, err := Layer{Version: d.Version}.header(ctx, nil, ep, req)
	if err != nil {
		return nil, err
	}
	c, err := d.Dialer.DialEndpoint(ctx, *ep)
	if err != nil {
		return nil, err
	}
	return tell(c, b, ep.String())
}

// DialContext dials addr on the caller's own behalf: LOCAL in version 2,
// UNKNOWN in version 1.
func (d *Dialer) DialContext(ctx context.Context, network, addr string) (net.Conn, error) {
	h := Header{Version: d.Version, Local: true}
	b, err := h.Append(nil)
	if err != nil {
		return nil, &tunnel.Error{Reason: tunnel.Internal, Err: err}
	}
	c, err := d.Dialer.DialContext(ctx, network, addr)
	if err != nil {
		return nil, err
	}
	return tell(c, b, addr)
}

// tell sends a header over c, and closes c where that fails.
func tell(c net.Conn, header []byte, to string) (net.Conn, error) {
	_ = c.SetWriteDeadline(time.Now().Add(telling))
	_, err := c.Write(header)
	if err == nil {
		err = c.SetWriteDeadline(time.Time{})
	}
	if err != nil {
		_ = c.Close()
		return nil, &tunnel.Error{Reason: tunnel.DialFailed, Err: fmt.Errorf("proxyproto: %s did not take the header: %w", to, err)}
	}
	return c, nil
}
