package tunnel

import (
	"context"
	"errors"
	"fmt"
	"hash/maphash"
	"io"
	"net"
	"sync/atomic"
	"time"

	"culvert.dev/tunnel/internal/relay"
)

// helloTimeout is how long a client has to begin a TLS handshake where nothing else
// may be carried. Of a protocol in which the service speaks first nothing ever comes.
const helloTimeout = 10 * time.Second

// mustBeTLS lets a tunnel pass whose client begins a TLS handshake. Otherwise it ends
// both sides and returns an error with why in it; nothing has gone to server then. The
// stream that it returns takes the place of client.
func (r *Router) mustBeTLS(ctx context.Context, why error, client Stream, server net.Conn, l *lease) (_ Stream, err error) {
	passed := false
	defer func() {
		if !passed { // refused, or a panic is on its way up
			_ = relay.Abort(server)
			_ = relay.AbortWithReason(client, Insecure)
			r.giveBack(l, isMultiplexed(server))
		}
	}()
	first, err := beginsTLS(ctx, client)
	if err != nil {
		return nil, &Error{Reason: reasonOr(err, Insecure), Err: fmt.Errorf("%w; %w", err, why)}
	}
	passed = true
	return &begun{client, first}, nil
}

// requireTLS has nothing but TLS carried to the endpoints of r, as a listener requires it.
func (r *Route) requireTLS(listener string) {
	why := fmt.Errorf("listener %s requires TLS", listener)
	eps := make([]Endpoint, len(r.Endpoints)) // the others are the Resolver's
	for i, ep := range r.Endpoints {
		if ep.Insecure = false; ep.TLSOnly == nil {
			ep.TLSOnly = why
		}
		eps[i] = ep
	}
	r.Endpoints = eps
}

// reasonOr returns the Reason of err, or another one where it has none.
func reasonOr(err error, other Reason) Reason {
	if e, ok := errors.AsType[*Error](err); ok {
		return e.Reason
	}
	return other
}

// beginsTLS reads the first bytes of a client until they are known to begin a
// ClientHello, and returns them.
func beginsTLS(ctx context.Context, client net.Conn) (first []byte, err error) {
	first, err = ReadFirst(ctx, client, helloTimeout, func(b []byte) bool { return len(b) >= helloStart || !mayBeTLS(b) })
	switch {
	case err != nil && err != io.EOF:
		return nil, err
	case err != nil && mayBeTLS(first) && len(first) < helloStart:
		return nil, &Error{Reason: Gone, Err: fmt.Errorf("the client left before it began TLS: %w", err)}
	case !mayBeTLS(first):
		return nil, fmt.Errorf("the client began with %q, which is no TLS", first[:min(len(first), 16)])
	case len(first) < helloStart:
		return nil, fmt.Errorf("the client did not begin TLS within %s", helloTimeout)
	}
	return first, nil
}

// helloStart is how much of a stream says that it begins with a ClientHello: the
// header of a record of type handshake, whose length is not zero, and the type of
// the message. RFC 8446, sections 4 and 5.1.
const helloStart = 6

// mayBeTLS reports whether b, of at least helloStart bytes, begins with a ClientHello,
// and of less whether it may yet.
func mayBeTLS(b []byte) bool {
	for i, c := range b[:min(len(b), helloStart)] {
		ok := true
		switch i {
		case 0:
			ok = c == 22
		case 1:
			ok = c == 3
		case 3:
			ok = c <= 0x40
		case 4:
			ok = b[3] != 0 || c != 0
		case 5:
			ok = c == 1
		}
		if !ok {
			return false
		}
	}
	return true
}

// A begun is a stream of which the first bytes were read.
type begun struct {
	Stream
	first []byte
}

// Read implements net.Conn.
func (b *begun) Read(p []byte) (int, error) {
	if len(b.first) > 0 {
		n := copy(p, b.first)
		b.first = b.first[n:]
		return n, nil
	}
	return b.Stream.Read(p)
}

// Unwrap implements Unwrapper.
func (b *begun) Unwrap() (net.Conn, []byte) { return b.Stream, b.first }

// TLS that is passed on by its name says nothing of the gateways that it came
// through. But it is passed on as it came: where the ways of several gateways
// form a loop, the same ClientHello comes again and again, with the client's
// random bytes in it, and is never answered. (QUIC has connection ids, which
// package udp knows again.)

// DefaultMaxHelloRepeats is how often the same ClientHello may be on its way to services at
// once. A client sends each of its own once. But a generator of load may repeat
// one, to services that wait for more, and is no loop: so the limit is far above
// what such a program has waiting, and below the local ports that a loop over
// another gateway would take.
const DefaultMaxHelloRepeats = 4096

// hellos counts the ClientHellos that are on their way to a service and have not
// been answered, by their fingerprint. It holds few of them: of two in the same
// place the newer one is counted. So it takes as much memory whatever comes, and
// a loop is found a few times round later where thousands wait.
type hellos struct {
	places atomic.Pointer[[hellosPlaces]atomic.Uint32] // nil until there is one
}

const (
	hellosPlaces = 1 << 14 // of four bytes: which hello, and how often
	hellosCount  = hellosPlaces - 1
)

var fingerprintSeed = maphash.MakeSeed()

// fingerprintBytes is how much of a hello is looked at: all 32 random bytes if it
// is in records of a usual size, and many if each byte has its own.
const fingerprintBytes = 128

// Fingerprint returns what tells a ClientHello from others, as it arrived:
// passed on it is the same. It is never 0.
func Fingerprint(hello []byte) uint32 {
	return uint32(maphash.Bytes(fingerprintSeed, hello[:min(len(hello), fingerprintBytes)])) | hellosPlaces
}

// enter counts a hello that is about to be passed on. It is false where the same
// one is on its way as often as most.
func (h *hellos) enter(fingerprint uint32, most int) bool {
	places := h.places.Load()
	if places == nil {
		h.places.CompareAndSwap(nil, new([hellosPlaces]atomic.Uint32))
		places = h.places.Load()
	}
	place := &places[fingerprint%hellosPlaces]
	which := fingerprint &^ hellosCount
	for {
		old := place.Load()
		now := which | 1
		if old&^hellosCount == which {
			if int(old&hellosCount) >= min(most, hellosCount) {
				return false
			}
			now = old + 1
		}
		if place.CompareAndSwap(old, now) {
			return true
		}
	}
}

// leave takes back an enter.
func (h *hellos) leave(fingerprint uint32) {
	place := &h.places.Load()[fingerprint%hellosPlaces]
	for {
		old := place.Load()
		if old&^hellosCount != fingerprint&^hellosCount || old&hellosCount == 0 {
			return // another one has its place
		}
		if place.CompareAndSwap(old, old-1) {
			return
		}
	}
}
