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

// replies has the reply for each Reason. An unknown name, a private one and one that
// policy denies have the same reply, so that a client cannot find services by trying names.
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
	tunnel.Revoked:      NotAllowed,
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

// ReplyFor returns the reply for err, which is never Succeeded. It is the one place
// where a Reason becomes a reply.
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

// reasons has the Reason for each reply that a Dialer gets. A general failure may
// mean many things: that the proxy could not dial is true of all.
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

// answer returns the whole answer to a request. It does not reveal the address that
// the gateway dials from: the address is always 0.0.0.0:0, which RFC 1928 allows.
func answer(r Reply) []byte {
	return []byte{version5, byte(r), 0, typeIPv4, 0, 0, 0, 0, 0, 0}
}
