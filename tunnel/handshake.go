package tunnel

import "context"

type handshakeKey struct{}

// WithHandshakeDone returns a context for the dial of a next hop. The dialer calls f when
// its handshakes with the hop are complete, and before it sends the request. If f fails,
// the request is not sent, and the dial fails with its error. So a caller may begin
// several dials and have one of them send the request. A dialer that tries again calls f
// again.
func WithHandshakeDone(ctx context.Context, f func() error) context.Context {
	return context.WithValue(ctx, handshakeKey{}, f)
}

// HandshakeDone calls the function of WithHandshakeDone. Without one it returns nil.
func HandshakeDone(ctx context.Context) error {
	if f, ok := ctx.Value(handshakeKey{}).(func() error); ok {
		return f()
	}
	return nil
}

// AwaitsHandshake reports whether ctx is one of WithHandshakeDone: then a dialer waits for
// an answer of the hop to its handshake even where it could send the request at once.
func AwaitsHandshake(ctx context.Context) bool { return ctx.Value(handshakeKey{}) != nil }
