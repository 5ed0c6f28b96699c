package socks5

import (
	"errors"
	"fmt"
	"syscall"

	"culvert.dev/tunnel"
)

// A Reply is the second byte of the answer to a request, RFC 1928 section 6.
type Reply byte

// The replies there are.
const (
	Succeeded               Reply = 0
	GeneralFailure          Reply = 1
	NotAllowed              Reply = 2
	NetworkUnreachable      Reply = 3
	HostUnreachable         Reply = 4
	ConnectionRefused       Reply = 5
	TTLExpired              Reply = 6
	CommandNotSupported     Reply = 7
	AddressTypeNotSupported Reply = 8
)

var replyTexts = [...]string{
	"succeeded", "general failure", "not allowed", "network unreachable", "host unreachable",
	"connection refused", "TTL expired", "command not supported", "address type not supported",
}

func (r Reply) String() string {
	if int(r) < len(replyTexts) {
		return replyTexts[r]
	}
	return fmt.Sprintf("reply %#02x", byte(r))
}

// replies is what a client hears for each Reason. A name that is unknown, one
// that is private and one that policy keeps have the same reply, so that nobody
// learns of a service by asking.
var replies = map[tunnel.Reason]Reply{
	tunnel.NoRoute:    NotAllowed,
	tunnel.NotExposed: NotAllowed,
	tunnel.Denied:     NotAllowed,
	tunnel.Prohibited: NotAllowed,
	tunnel.Insecure:   NotAllowed,
	tunnel.NoAuth:     NotAllowed,
	tunnel.Loop:       NotAllowed,

	tunnel.NoEndpoint:  HostUnreachable,
	tunnel.LookupError: HostUnreachable,
	tunnel.LookupTime:  HostUnreachable,
	tunnel.DialTimeout: HostUnreachable,
	tunnel.Idle:        HostUnreachable,
	tunnel.HalfClosed:  HostUnreachable,
	tunnel.DialFailed:  ConnectionRefused, // unless its error says more
	tunnel.Reset:       ConnectionRefused,
	tunnel.Unsupported: CommandNotSupported, // unless it is the type of address

	tunnel.Overload:     GeneralFailure,
	tunnel.Flood:        GeneralFailure,
	tunnel.Internal:     GeneralFailure,
	tunnel.Drain:        GeneralFailure,
	tunnel.Killed:       GeneralFailure,
	tunnel.Done:         GeneralFailure,
	tunnel.BadRequest:   GeneralFailure,
	tunnel.BadMethod:    GeneralFailure,
	tunnel.TooLarge:     GeneralFailure,
	tunnel.NoHello:      GeneralFailure,
	tunnel.HelloTimeout: GeneralFailure,
	tunnel.BadPreamble:  GeneralFailure,
	tunnel.BadHello:     GeneralFailure,
	tunnel.Gone:         GeneralFailure,
	tunnel.NoSNI:        GeneralFailure,
}

// ReplyFor returns what a client hears of err. It is the one place where a
// Reason becomes a reply, and never Succeeded.
func ReplyFor(err error) Reply {
	var bad *requestError
	if errors.As(err, &bad) {
		return bad.reply
	}
	why := tunnel.ReasonOf(err)
	if why == tunnel.DialFailed {
		// Windows has its own numbers, which name nothing elsewhere.
		const wsaNetUnreach, wsaHostUnreach = syscall.Errno(10051), syscall.Errno(10065)
		switch {
		case errors.Is(err, syscall.ENETUNREACH), errors.Is(err, wsaNetUnreach):
			return NetworkUnreachable
		case errors.Is(err, syscall.EHOSTUNREACH), errors.Is(err, wsaHostUnreach):
			return HostUnreachable
		}
	}
	if r, ok := replies[why]; ok {
		return r
	}
	return GeneralFailure
}

// reasons is the way back, for the Dialer. A server may mean many things by
// a general failure: it could not dial is the one that all have in common.
var reasons = map[Reply]tunnel.Reason{
	GeneralFailure:          tunnel.DialFailed,
	NotAllowed:              tunnel.Denied,
	NetworkUnreachable:      tunnel.DialFailed,
	HostUnreachable:         tunnel.DialFailed,
	ConnectionRefused:       tunnel.DialFailed,
	TTLExpired:              tunnel.DialTimeout,
	CommandNotSupported:     tunnel.Unsupported,
	AddressTypeNotSupported: tunnel.Unsupported,
}

// answer is the whole answer to a request. The address the service was reached
// from is nobody's business: it is always 0.0.0.0:0, as RFC 1928 allows those
// who have none.
func answer(r Reply) []byte {
	return []byte{version5, byte(r), 0, typeIPv4, 0, 0, 0, 0, 0, 0}
}
