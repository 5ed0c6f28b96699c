package tunnel

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"time"

	"culvert.dev/tunnel/internal/relay"
)

// A Reason says in one word why a request was refused or how a tunnel ended.
// The same word stands in the log line, the metric label, the wire answer and
// in "culvert explain". The set is closed: see Reasons.
type Reason = relay.Reason

// How a connection ends before it has asked for anything.
const (
	NoHello      Reason = "no-hello"      // the client left without sending a byte
	HelloTimeout Reason = "hello-timeout" // the preamble was not complete in time
	BadPreamble  Reason = "bad-preamble"  // no protocol of the listener begins like this
	BadHello     Reason = "bad-hello"     // TLS, but not a ClientHello that can be parsed
	BadRequest   Reason = "bad-request"   // a malformed request head or authority
	BadMethod    Reason = "bad-method"    // HTTP, but not CONNECT
	TooLarge     Reason = "too-large"     // a request head over its limit
	Gone         Reason = "gone"          // the client left in the middle of its preamble
	Overload     Reason = "overload"      // a limit on connections, tunnels, descriptors or memory is reached
	Flood        Reason = "flood"         // far more HTTP/2 or HTTP/3 frames than bytes: resets, pings, settings
)

// Why a request is refused.
const (
	NoSNI       Reason = "no-sni"       // the ClientHello has no name, or an address for one
	NoAuth      Reason = "no-auth"      // credentials are required, and missing or wrong
	NoRoute     Reason = "no-route"     // no service has this name and port
	NotExposed  Reason = "not-exposed"  // the service is private, or not for this client
	Denied      Reason = "denied"       // policy says no
	Prohibited  Reason = "prohibited"   // the address is one that the gateway never dials
	Insecure    Reason = "insecure"     // plaintext would cross to another network without mutual TLS
	Loop        Reason = "loop"         // the route leads back to this gateway
	NoEndpoint  Reason = "no-endpoint"  // the service has no endpoint that can be dialed
	LookupError Reason = "dns-failed"   // the endpoint's DNS name has no address
	LookupTime  Reason = "dns-timeout"  // the endpoint's DNS name was not resolved in time
	DialFailed  Reason = "dial-failed"  // no endpoint accepted the connection
	DialTimeout Reason = "dial-timeout" // no endpoint answered in time
	Unsupported Reason = "unsupported"  // a part of the protocol that this gateway does not support
	Internal    Reason = "internal"     // a fault of the gateway itself
)

// How a tunnel ends.
const (
	Done       Reason = "done"        // both sides closed in order
	Reset      Reason = "reset"       // one side aborted, and the other was aborted too
	Idle       Reason = "idle"        // no byte for the idle limit
	HalfClosed Reason = "half-closed" // one side closed, and the other was silent for the limit
	Drain      Reason = "drain"       // the gateway is stopping
	Killed     Reason = "killed"      // closed by an operator
	Revoked    Reason = "revoked"     // policy, or the end of a credential, no longer allows what it allowed
)

// Reasons lists every Reason, in the order of a tunnel's life.
func Reasons() []Reason {
	return []Reason{
		NoHello, HelloTimeout, BadPreamble, BadHello, BadRequest, BadMethod, TooLarge, Gone, Overload, Flood,
		NoSNI, NoAuth, NoRoute, NotExposed, Denied, Prohibited, Insecure, Loop, NoEndpoint, LookupError, LookupTime,
		DialFailed, DialTimeout, Unsupported, Internal,
		Done, Reset, Idle, HalfClosed, Drain, Killed, Revoked,
	}
}

// An Error is a refusal: a Reason for machines and for the wire, and Err for
// the log, which says what was asked, what happened and what to do.
type Error struct {
	Reason Reason
	Err    error

	// BehindHop says that a next hop has answered: what failed is behind it, and
	// the hop itself works. Final says that it has refused the request itself, so
	// that no other endpoint is tried.
	BehindHop bool
	Final     bool

	// Unconnected says that the dialed address made no TCP connection: it refused it, or did
	// not answer, or could not be reached. A NetDialer says so.
	Unconnected bool
}

// Refusef makes an *Error.
func Refusef(r Reason, format string, args ...any) *Error {
	return &Error{Reason: r, Err: fmt.Errorf(format, args...)}
}

// HopRefusedf makes the *Error of a refusal by a next hop. It is final where any
// other hop would refuse the request for the same Reason.
func HopRefusedf(r Reason, format string, args ...any) *Error {
	e := Refusef(r, format, args...)
	e.BehindHop = true
	switch r {
	case NoRoute, NotExposed, Denied, Prohibited, Insecure, Loop, BadRequest, TooLarge:
		e.Final = true
	}
	return e
}

func (e *Error) Error() string { return e.Err.Error() }
func (e *Error) Unwrap() error { return e.Err }

// ReasonOf returns the Reason err carries, Internal for an error without one
// and Done for nil.
func ReasonOf(err error) Reason {
	if err == nil {
		return Done
	}
	var e *Error
	switch {
	case errors.As(err, &e):
		return e.Reason
	case errors.Is(err, context.DeadlineExceeded):
		return DialTimeout
	}
	return Internal
}

// A Panic is the error that a panic becomes in a goroutine that serves one
// connection or one tunnel: that ends, and nothing else. Whoever reports the end
// logs the stack.
type Panic = relay.Panic

// Caught makes a Panic of what recover has returned, in the deferred function
// that called it.
func Caught(v any) *Panic { return relay.Caught(v) }

// An Outcome is all there is to say about one request, once, at its end. The
// log line and the metrics are made from it and nowhere else.
type Outcome struct {
	ID         uint64 // of the request, unique in this process; 0 where a connection ended without one
	Start      time.Time
	Proto      string // "" where no protocol was recognised
	Listener   string
	Source     netip.AddrPort
	Process    *Process // that connected, of a client on this machine; nil for others
	Peer       Peer
	Unverified *UnverifiedHeaders // nil for nothing
	Target     string             // as asked, at most 253 bytes and a port; "" where nothing was asked
	ALPN       []string
	Service    string // of the route; "" where there is none
	Pattern    string // of the route
	Endpoint   string // the one that was reached
	Attempts   []Attempt
	Insecure   bool            // Endpoint.Insecure of the one that was reached
	Policy     *PolicyDecision // of the route; nil where no policy is about it

	Reason Reason
	Err    error // for people; nil after an orderly end

	Waited   time.Duration // from accept to the request: the client's time
	Dialed   time.Duration // from the request to the client's yes
	Lasted   time.Duration // from accept to the end
	BytesIn  int64         // from the client to the service
	BytesOut int64         // from the service to the client
}

// Carried reports whether a tunnel stood, as opposed to a refusal.
func (o *Outcome) Carried() bool {
	switch o.Reason {
	case Done, Reset, Idle, HalfClosed, Drain, Killed, Revoked:
		return o.Endpoint != ""
	}
	return false
}

// An Attempt is one dial.
type Attempt struct {
	Endpoint Endpoint
	Took     time.Duration
	Err      error // nil for the one that worked
}
