package connectudp

import (
	"bufio"
	"encoding/binary"
	"fmt"
	"io"
	"math/bits"
	"slices"
)

// A capsule, RFC 9297 section 3.2, is
//
//	type (i), length (i), value (length bytes)
//
// where (i) is a variable-length integer, RFC 9000 section 16. The value of a DATAGRAM
// capsule is an HTTP Datagram. With CONNECT-UDP that is, RFC 9298 section 5,
//
//	context id (i), payload
//
// and context 0 is that of UDP payloads.
const (
	typeDatagram = 0
	contextUDP   = 0

	maxNumber  = 8     // bytes of a variable-length integer
	maxPayload = 65527 // bytes of a UDP payload, RFC 9298 section 5
	maxHead    = 1 + 4 + 1
)

// Memory of a capsuleReader, in bytes.
const (
	readBuffer   = 512
	firstPayload = 2 << 10 // is taken at once; more is taken as the bytes come
	keptPayload  = 4 << 10 // is kept for the next datagram
)

// A capsuleError is a violation of the RFC. It ends the stream.
type capsuleError string

func (e capsuleError) Error() string { return "connectudp: " + string(e) }

// appendCapsule appends a DATAGRAM capsule with the UDP payload p.
func appendCapsule(b, p []byte) []byte {
	b = appendNumber(append(b, typeDatagram), uint64(1+len(p)))
	return append(append(b, contextUDP), p...)
}

// appendNumber appends a variable-length integer.
func appendNumber(b []byte, n uint64) []byte {
	switch width := bits.Len64(n); {
	case width <= 6:
		return append(b, byte(n))
	case width <= 14:
		return binary.BigEndian.AppendUint16(b, uint16(n)|1<<14)
	case width <= 30:
		return binary.BigEndian.AppendUint32(b, uint32(n)|2<<30)
	}
	return binary.BigEndian.AppendUint64(b, n|3<<62)
}

// parseNumber reads a variable-length integer. A size of 0 means that it is cut off.
func parseNumber(b []byte) (n uint64, size int) {
	if len(b) == 0 || len(b) < 1<<(b[0]>>6) {
		return 0, 0
	}
	size = 1 << (b[0] >> 6)
	n = uint64(b[0] & 0x3f)
	for _, c := range b[1:size] {
		n = n<<8 | uint64(c)
	}
	return n, size
}

// parseDatagram returns the UDP payload of an HTTP Datagram. It returns false for one of
// another context, which is passed over.
func parseDatagram(b []byte) (payload []byte, ok bool, err error) {
	context, size := parseNumber(b)
	switch {
	case size == 0:
		return nil, false, capsuleError("a datagram without a context")
	case context != contextUDP:
		return nil, false, nil
	case len(b)-size > maxPayload:
		return nil, false, capsuleError(fmt.Sprintf("a datagram of %d bytes, limit %d", len(b)-size, maxPayload))
	}
	return b[size:], true, nil
}

// A capsuleReader reads the capsules of a stream.
type capsuleReader struct {
	r    *bufio.Reader
	kept []byte // memory for the next datagram
}

func newCapsuleReader(r io.Reader) *capsuleReader {
	return &capsuleReader{r: bufio.NewReaderSize(r, readBuffer)}
}

// next returns the UDP payload of the next datagram, which is valid until the next call.
// At the end of the stream it returns io.EOF, and io.ErrUnexpectedEOF where that is inside
// of a capsule.
func (r *capsuleReader) next() ([]byte, error) {
	for {
		kind, err := r.number()
		if err != nil {
			return nil, err
		}
		length, err := r.number()
		if err != nil {
			return nil, inside(err)
		}
		if kind != typeDatagram { // RFC 9297 section 3.2: unknown ones are skipped
			if err := r.skip(length); err != nil {
				return nil, err
			}
			continue
		}
		if length > maxPayload+maxNumber {
			return nil, capsuleError(fmt.Sprintf("a datagram of %d bytes, limit %d", length, maxPayload))
		}
		b, err := r.value(int(length))
		if err != nil {
			return nil, err
		}
		if payload, ok, err := parseDatagram(b); ok || err != nil {
			return payload, err
		}
	}
}

// inside is the error of a read within a capsule.
func inside(err error) error {
	if err == io.EOF {
		return io.ErrUnexpectedEOF
	}
	return err
}

// number reads a variable-length integer.
func (r *capsuleReader) number() (uint64, error) {
	first, err := r.r.Peek(1)
	if err != nil {
		return 0, err
	}
	b, err := r.r.Peek(1 << (first[0] >> 6))
	if err != nil {
		return 0, inside(err)
	}
	n, size := parseNumber(b)
	_, _ = r.r.Discard(size) // they are there
	return n, nil
}

// skip passes over n bytes, which may be 2^62-1.
func (r *capsuleReader) skip(n uint64) error {
	for n > 0 {
		m, err := r.r.Discard(int(min(n, 1<<20)))
		n -= uint64(m)
		if err != nil {
			return inside(err)
		}
	}
	return nil
}

// value reads n bytes. Memory for them is taken as they come.
func (r *capsuleReader) value(n int) ([]byte, error) {
	b := r.kept[:0]
	for len(b) < n {
		if len(b) == cap(b) {
			b = slices.Grow(b, min(n-len(b), max(len(b), firstPayload)))
		}
		m, err := r.r.Read(b[len(b):min(n, cap(b))])
		if b = b[:len(b)+m]; err != nil && len(b) < n {
			return nil, inside(err)
		}
	}
	if r.kept = b; cap(b) > keptPayload {
		r.kept = nil
	}
	return b, nil
}
