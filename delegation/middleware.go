package delegation

import (
	"context"
	"errors"
	"net"
	"net/http"
)

// A RefusedFunc answers a request that Middleware refuses.
type RefusedFunc func(w http.ResponseWriter, r *http.Request, err error)

// Middleware returns a handler that verifies the assertion in a request's field
// Culvert-Peer, and has next serve the request with it in the context: see FromContext.
// A request with none, with several, or with a wrong one is refused.
//
// next sees no such field, however it is spelled: neither with "_" in place of "-", which
// some servers take for the same, nor as a trailer.
func (v *Verifier) Middleware(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		a, err := v.ofRequest(r)
		if err != nil {
			if v.Refused != nil {
				v.Refused(w, r, err)
				return
			}
			http.Error(w, refusal(err), http.StatusForbidden)
			return
		}
		inner := r.WithContext(context.WithValue(r.Context(), assertionKey{}, a))
		inner.Header = without(r.Header)
		inner.Trailer = without(r.Trailer)
		next.ServeHTTP(w, inner)
	})
}

// ofRequest returns the assertion of a request.
func (v *Verifier) ofRequest(r *http.Request) (*Assertion, error) {
	var tokens []string
	for name, values := range r.Header {
		if isField(name) {
			if name != HeaderField {
				return nil, refusef(Malformed, "the field %q is not spelled %q", clip(name), HeaderField)
			}
			tokens = values
		}
	}
	switch {
	case len(tokens) == 0 && v.Optional:
		return nil, nil
	case len(tokens) == 0:
		return nil, refusef(Missing, "the request has no field %s", HeaderField)
	case len(tokens) > 1:
		return nil, refusef(Malformed, "the request has %d fields %s, want one", len(tokens), HeaderField)
	}
	return v.Verify(tokens[0], r.TLS)
}

// refusal is what a caller hears: the kind of what is wrong, and no names.
func refusal(err error) string {
	if e, ok := errors.AsType[*Error](err); ok {
		return HeaderField + ": " + string(e.Reason)
	}
	return HeaderField
}

// isField reports whether a field may be read as Culvert-Peer by somebody.
func isField(name string) bool {
	return len(name) == len(HeaderField) && foldField(name) == "culvert-peer"
}

// without returns h without the fields that are assertions.
func without(h http.Header) http.Header {
	if h == nil {
		return nil
	}
	out := make(http.Header, len(h))
	for name, values := range h {
		if !isField(name) {
			out[name] = values
		}
	}
	return out
}

type (
	assertionKey struct{}
	connKey      struct{}
)

// FromContext returns the Assertion of a request, nil for none. The context is that of a
// request that Middleware has passed on, or of one on a connection of ConnContext.
func FromContext(ctx context.Context) *Assertion {
	if a, ok := ctx.Value(assertionKey{}).(*Assertion); ok {
		return a
	}
	if c, ok := ctx.Value(connKey{}).(*Conn); ok {
		a, _ := c.Assertion() // the request was read, so that this does not wait
		return a
	}
	return nil
}

// ConnContext is for http.Server.ConnContext of a server on a Listener: all requests of a
// connection have its Assertion.
func ConnContext(ctx context.Context, c net.Conn) context.Context {
	return context.WithValue(ctx, connKey{}, c)
}
