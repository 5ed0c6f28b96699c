package termination

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"

	"culvert.dev/tunnel"
)

// NewKeySet prepares k for a caller that chooses the keys for each hello itself: k.Names
// must be empty, and the KeySet neither owns names nor speaks ALPN.
func NewKeySet(k *Keys) (*KeySet, error) {
	if len(k.Names) > 0 {
		return nil, errors.New("termination: a key set has no names of its own")
	}
	return newKeySet(k, nil, false)
}

// Server terminates TLS on c, whose hello was read for the request asked and not
// consumed. It returns the connection inside TLS, with the client's identity. After an
// error, which is one for ServeConn to return, c has been closed, after an alert where
// the client should know.
func (r *KeySet) Server(ctx context.Context, c *tunnel.Conn, asked *tunnel.Request) (*tunnel.Conn, error) {
	held, err := reserveMemory(ctx)
	if err != nil {
		_ = c.Abort()
		return nil, err
	}
	inner, _, err := r.handshake(ctx, c, asked, &held)
	return inner, err
}

// Client speaks TLS as a client on c, which it owns from now on. It returns a
// tunnel.Stream that is a tunnel.Aborter. After an error c is closed.
func Client(ctx context.Context, c net.Conn, config *tls.Config) (net.Conn, error) {
	transport := &tlsTransport{Conn: c, left: MaxHandshake}
	t := tls.Client(transport, config)
	if err := t.HandshakeContext(ctx); err != nil {
		_ = c.Close()
		if errors.Is(err, io.EOF) || transport.broken() && ctx.Err() == nil {
			err = fmt.Errorf("the connection ended in the handshake: %w", err)
		}
		return nil, err
	}
	transport.carry()
	return &stream{Conn: t, transport: transport, peer: "service"}, nil
}
