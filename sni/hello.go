package sni

import (
	"errors"
	"fmt"

	"culvert.dev/tunnel"
)

// Limits of what is read before a hello must be complete.
const (
	MaxHello   = 68 << 10 // bytes of the ClientHello, without the four of its header: extensions alone may have 65,535
	MaxRecords = 4096     // TLS records it may be spread over
	MaxRaw     = 96 << 10 // bytes on the wire, see below
	MaxRecord  = 16 << 10 // bytes in a record, RFC 8446 section 5.1

	recordHeader = 5 // type, version, length
	helloHeader  = 4 // type, length
)

// A hello within MaxHello and MaxRecords is within MaxRaw: the constant must
// not be negative.
const _ = uint(MaxRaw - (helloHeader + MaxHello + MaxRecords*recordHeader))

// ErrMore says that the bytes so far are the beginning of a hello.
var ErrMore = errors.New("sni: the hello is not complete")

// ErrNoName is why a well-formed hello has no Name. A name that is an address
// gives an error that wraps tunnel.ErrNameAddress instead.
var ErrNoName = errors.New("sni: the hello has no server name")

// A Hello is what a ClientHello says in the clear. It holds no reference to
// the bytes it was read from.
type Hello struct {
	Name    tunnel.Name // whom the client asks for; zero where it names nobody, or an address
	NameErr error       // why Name is zero, otherwise nil
	RawName string      // the name as sent: for showing, quoted, and for nothing else

	Version uint16 // the highest TLS version offered, GREASE aside
	ECH     bool   // there is an outer encrypted_client_hello, real or GREASE (RFC 9849)

	// Len is the number of raw bytes from the first record's header to the end of
	// the hello. Later bytes, in the same record or not, go to the server
	// unchanged.
	Len int

	alpn string // the ProtocolNameList as sent, valid
}

// ALPN returns the protocols the client offers inside, in its order of
// preference (RFC 7301), nil where it offers none.
func (h *Hello) ALPN() []string {
	n := 0
	for i := 0; i < len(h.alpn); i += 1 + int(h.alpn[i]) {
		n++
	}
	if n == 0 {
		return nil
	}
	list := make([]string, 0, n)
	for s := h.alpn; s != ""; {
		end := 1 + int(s[0])
		list, s = append(list, s[1:end]), s[end:]
	}
	return list
}

// An Alert is a TLS alert description, RFC 8446 section 6. Zero means no alert:
// close_notify never refuses anything.
type Alert uint8

// The alerts this package sends.
const (
	UnexpectedMessage    Alert = 10
	RecordOverflow       Alert = 22
	IllegalParameter     Alert = 47
	AccessDenied         Alert = 49
	DecodeError          Alert = 50
	ProtocolVersion      Alert = 70
	InsufficientSecurity Alert = 71
	InternalError        Alert = 80
	UnrecognizedName     Alert = 112
)

// A ParseError says that the bytes are not a hello, whatever may follow.
type ParseError struct {
	Reason tunnel.Reason // BadPreamble where it is not TLS, otherwise BadHello
	Alert  Alert         // what to tell the client; 0 where it would not understand
	Offset int           // of the field at fault, in the raw bytes
	Limit  int           // the limit that was passed, 0 if it was none
	Err    error         // what is wrong
}

func (e *ParseError) Error() string {
	return fmt.Sprintf("sni: %v, at offset %d", e.Err, e.Offset)
}

func (e *ParseError) Unwrap() error { return e.Err }
