package delegation

import "fmt"

// A Reason is the kind of an Error.
type Reason string

// Reasons.
const (
	Missing        Reason = "missing"         // there is no assertion
	Malformed      Reason = "malformed"       // it is none, or it is given twice
	TooLarge       Reason = "too-large"       // it has more bytes than permitted
	TooManyActors  Reason = "too-many-actors" // more than MaxActors gateways
	TooLong        Reason = "too-long"        // it is valid for more than MaxLifetime
	NotYetValid    Reason = "not-yet-valid"   // it was issued in the future
	Expired        Reason = "expired"         // its time is over
	WrongAudience  Reason = "wrong-audience"  // it is for another service
	WrongSession   Reason = "wrong-session"   // it is bound to another TLS session
	NoBinding      Reason = "no-binding"      // the TLS session has no exporter, or there is none
	UnknownGateway Reason = "unknown-gateway" // no configured gateway has signed it
	BadCertificate Reason = "bad-certificate" // the gateway's certificate can't be verified
	BadSignature   Reason = "bad-signature"   // the signature is not by the gateway's key
	NotDelegated   Reason = "not-delegated"   // the gateway may not state callers of that trust domain
	BadKey         Reason = "bad-key"         // the signer's own key can't sign
)

// An Error is why an Assertion was not signed or is not believed.
type Error struct {
	Reason Reason
	Err    error
}

func (e *Error) Error() string { return "delegation: " + e.Err.Error() }
func (e *Error) Unwrap() error { return e.Err }

func refusef(reason Reason, format string, args ...any) *Error {
	return &Error{reason, fmt.Errorf(format, args...)}
}
