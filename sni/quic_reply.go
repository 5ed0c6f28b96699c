package sni

import (
	"crypto/rand"
	"errors"

	"culvert.dev/tunnel"
)

// Errors of QUIC's own, RFC 9000 section 20.1. A TLS alert's code is 0x100 plus
// the alert, RFC 9001 section 4.8.
const (
	quicConnectionRefused = 0x02
	quicProtocolViolation = 0x0a
	quicCryptoError       = 0x100
)

// VersionNegotiation returns the answer to a first datagram of an unknown
// version (RFC 9000 section 6.1): the list of known versions. It is nil where
// the datagram must not be answered: one that is shorter than 1,200 bytes, as
// an answer must not be larger than a datagram with a forged source, and one
// that is itself a Version Negotiation.
func VersionNegotiation(datagram []byte) []byte {
	h, _, ok := readInvariants(datagram)
	if !ok || len(datagram) < leastDatagram || h.version == 0 {
		return nil
	}
	// RFC 8999 section 6: the ids change places, whatever their length.
	b := make([]byte, 0, 7+len(h.dcid)+len(h.scid)+4*len(quicVersions))
	b = append(b, 0xc0, 0, 0, 0, 0, byte(len(h.scid)))
	b = append(b, h.scid...)
	b = append(b, byte(len(h.dcid)))
	b = append(b, h.dcid...)
	for _, v := range quicVersions {
		b = append(b, byte(v>>24), byte(v>>16), byte(v>>8), byte(v))
	}
	return b
}

// Refuse returns the datagram that refuses the client: an Initial with a
// CONNECTION_CLOSE (RFC 9000 section 19.19) that carries the TLS alert a client
// of TCP would get. It is nil where the Reason has no code, or the client could
// not decrypt it. It is shorter than 128 bytes and always an answer to 1,200 or
// more.
func (q *QUIC) Refuse(err error) []byte {
	var version *VersionError
	if errors.As(err, &version) {
		return version.reply
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	code, words := closeCode(err)
	if q.version == 0 || code == 0 {
		return nil
	}
	keys, kerr := newInitialKeys(q.version, q.dcid, serverSide)
	if kerr != nil {
		return nil
	}
	frame := appendVarint([]byte{frameClose}, code)
	frame = append(frame, 0) // the type of the frame at fault: none
	frame = append(appendVarint(frame, uint64(len(words))), words...)
	var scid [8]byte
	_, _ = rand.Read(scid[:]) // which never fails
	return keys.seal(q.version, q.scid, scid[:], frame)
}

// closeCode returns the code that a QUIC client gets for each Reason, 0 for no
// answer. It is AlertFor with two differences: QUIC has codes of its own for
// failures of the gateway or the service, and for invalid packets around a
// valid hello.
func closeCode(err error) (code uint64, words string) {
	switch tunnel.ReasonOf(reasonOf(err)) {
	case tunnel.NoHello, tunnel.HelloTimeout, tunnel.BadPreamble, tunnel.Gone:
		return 0, ""
	}
	switch a := AlertFor(err); a {
	case 0:
		return quicProtocolViolation, ""
	case InternalError:
		return quicConnectionRefused, ""
	case UnrecognizedName:
		return quicCryptoError + uint64(a), "unrecognized name"
	case AccessDenied:
		return quicCryptoError + uint64(a), "access denied"
	default:
		return quicCryptoError + uint64(a), ""
	}
}

// reasonOf gives err its Reason where it is this package's own.
func reasonOf(err error) error {
	var bad *ParseError
	var version *VersionError
	switch {
	case errors.As(err, &bad):
		return &tunnel.Error{Reason: bad.Reason, Err: err}
	case errors.As(err, &version):
		return &tunnel.Error{Reason: tunnel.Unsupported, Err: err}
	}
	return err
}

// ReadHello takes in a datagram of the client and says whether req, of which it
// fills in Name and ALPN, is complete: Yes, or More. Of More with an error the
// datagram is to be dropped, and No is the end of it, for the error's Reason.
func (q *QUIC) ReadHello(datagram []byte, req *tunnel.Request) (tunnel.Verdict, error) {
	h, err := q.Feed(datagram)
	switch {
	case err == nil && h.NameErr != nil:
		return tunnel.No, &tunnel.Error{Reason: tunnel.NoSNI, Err: h.NameErr}
	case err == nil:
		req.Name, req.ALPN = h.Name, offered(&h)
		return tunnel.Yes, nil
	case errors.Is(err, ErrMore):
		return tunnel.More, nil
	case errors.Is(err, ErrStray):
		return tunnel.More, err
	}
	return tunnel.No, reasonOf(err)
}
