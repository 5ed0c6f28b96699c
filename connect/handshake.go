package connect

import (
	"context"
	"net"

	"culvert.dev/tunnel"
)

// A HandshakeDialer is a tunnel.Dialer that may know several addresses of a proxy. The kernel
// of a host takes connections for a program that does not answer any more: which address is to
// be used shows only in the handshake.
type HandshakeDialer interface {
	tunnel.Dialer

	// DialHandshake dials addr, calls handshake with the connection, and returns what that
	// returns. It may do so with several addresses at once, in goroutines; the first that is
	// complete counts, the ctx of the others ends, and what they return all the same is closed.
	// A handshake must do no harm where it is made and not used, such as that of TLS without
	// early data. It closes the connection where it fails.
	DialHandshake(ctx context.Context, network, addr string, handshake Handshake) (net.Conn, error)
}

// A Handshake returns the connection to use on top of c.
type Handshake func(ctx context.Context, c net.Conn) (net.Conn, error)

// DialHandshake is that of a HandshakeDialer, and of any other dialer with the one connection
// that it returns. An error of handshake is a *HandshakeError,
// and none that wraps it: that would be of a hop before.
func DialHandshake(ctx context.Context, dialer tunnel.Dialer, network, addr string, handshake Handshake) (net.Conn, error) {
	shake := func(ctx context.Context, c net.Conn) (net.Conn, error) {
		secure, err := handshake(ctx, c)
		if failed, ok := err.(*HandshakeError); ok { // of a dialer that has called this
			return nil, failed
		} else if err != nil {
			return nil, &HandshakeError{err}
		}
		return secure, nil
	}
	if d, ok := dialer.(HandshakeDialer); ok {
		return d.DialHandshake(ctx, network, addr, shake)
	}
	c, err := dialer.DialContext(ctx, network, addr)
	if err != nil {
		return nil, err
	}
	return shake(ctx, c)
}

// A HandshakeError is that of a Handshake with a proxy that was reached.
type HandshakeError struct{ Err error }

func (e *HandshakeError) Error() string { return e.Err.Error() }

func (e *HandshakeError) Unwrap() error { return e.Err }
