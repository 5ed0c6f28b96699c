package proxyproto

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"net"
	"net/netip"
	"slices"
	"strings"
	"unicode/utf8"

	wire "github.com/pires/go-proxyproto"
)

// Limits of a header.
const (
	maxV1       = 107     // bytes of a line, its end included: section 2.1
	headV2      = 16      // signature, version and command, family, length: section 2.2
	maxV2       = 4 << 10 // bytes behind that; a client's certificate fits, and the library takes no more
	maxUniqueID = 128     // bytes: section 2.2.5

	maxAssertion = 1536 // bytes: as package delegation has it
	maxCaller    = 2048 // bytes, as SPIFFE-ID section 2.3 has it
)

// Openings of the two versions.
var (
	lineV1 = append(slices.Clone(wire.SIGV1), ' ')
	signV2 = wire.SIGV2
)

// Version and command, and address families, of version 2: section 2.2.
const (
	v2Local    = 0x20
	v2Proxy    = 0x21
	v2Unspec   = 0x00
	v2TCP4     = 0x11
	v2TCP6     = 0x21
	v2UnixSock = 0x31
)

// ErrMore says that what Parse got is a proper prefix of a header.
var ErrMore = errors.New("proxyproto: more bytes are needed")

// errNone says that the connection does not begin with a header.
var errNone = errors.New("it begins like neither version")

// errTooLarge says that a header has more bytes than readers take.
var errTooLarge = errors.New("the header is too large")

// A Header is what a proxy says of a connection.
type Header struct {
	Version int  // 1 or 2
	Local   bool // the proxy's own connection, such as a health check: nothing is stated

	// Source and Destination are the ends of the client's connection to the
	// proxy. Both are invalid where the header has none: LOCAL, UNKNOWN,
	// UNSPEC and Unix sockets. IPv4-mapped addresses are unmapped.
	Source, Destination netip.AddrPort

	// These are of version 2, "" where they are not stated.
	Authority string // the name the client asked for, valid UTF-8
	ALPN      string
	UniqueID  string // of the connection, at most 128 bytes

	// SSL is what the proxy says of the client's TLS; nil for nothing. Assertion is who it
	// says the caller is, which nobody has verified: see package delegation.
	SSL       *SSL
	Assertion string

	// Caller is the id of the caller, in the words of the proxy, UTF-8 of at most 2,048
	// bytes: as much worth as the addresses.
	Caller string
}

// Parse reads the header that b begins with, and returns its length. The error
// is ErrMore where b could be the beginning of one. It reads nothing behind
// the header and keeps nothing of b.
//
// A header that deviates from the specification is an error: so are a wrong
// checksum, a value that occurs twice or overruns its field, and a datagram's
// family on a stream. Types of value it does not know are skipped.
func Parse(b []byte) (Header, int, error) {
	switch {
	case begins(b, lineV1):
		return parseV1(b)
	case begins(b, signV2):
		return parseV2(b)
	}
	return Header{}, 0, fmt.Errorf("proxyproto: %w: %q", errNone, b[:min(len(b), 16)])
}

// begins reports whether b begins with sign, as far as it goes.
func begins(b, sign []byte) bool {
	n := min(len(b), len(sign))
	return bytes.Equal(b[:n], sign[:n])
}

func parseV1(b []byte) (Header, int, error) {
	end := bytes.IndexByte(b[:min(len(b), maxV1)], '\n')
	switch {
	case end < 0 && len(b) < maxV1:
		return Header{}, 0, ErrMore
	case end < 0:
		return Header{}, 0, fmt.Errorf("proxyproto: the line has no end within %d bytes", maxV1)
	}
	n := end + 1
	w, err := read(b[:n])
	if err != nil {
		return Header{}, 0, fmt.Errorf("proxyproto: %q: %w", b[:n], err)
	}
	h := Header{Version: 1}
	h.setEnds(w)
	return h, n, nil
}

func parseV2(b []byte) (Header, int, error) {
	if len(b) > 12 && b[12] != v2Local && b[12] != v2Proxy {
		return Header{}, 0, fmt.Errorf("proxyproto: version and command are %#02x, want %#02x or %#02x", b[12], v2Local, v2Proxy)
	}
	if len(b) < headV2 {
		return Header{}, 0, ErrMore
	}
	length := int(binary.BigEndian.Uint16(b[14:]))
	n := headV2 + length
	switch {
	case length > maxV2: // said at once, before any of it is kept
		return Header{}, 0, fmt.Errorf("proxyproto: a header of %d bytes, limit %d", length, maxV2)
	case len(b) < n:
		return Header{}, 0, ErrMore
	}
	b = b[:n]
	local, family, sent := b[12] == v2Local, b[13], b
	if !local && family == v2Unspec {
		// The specification leaves it to the receiver to take this, and the
		// library doesn't. Its TLVs are read as those of any other.
		b = slices.Clone(b)
		b[12] = v2Local
	}
	w, err := read(b)
	if err != nil {
		return Header{}, 0, fmt.Errorf("proxyproto: %w", err)
	}
	h := Header{Version: 2, Local: local}
	switch {
	case local:
		return h, n, nil // what stands in it is to be skipped: section 2.2
	case family != v2Unspec && family != v2TCP4 && family != v2TCP6 && family != v2UnixSock:
		return Header{}, 0, fmt.Errorf("proxyproto: family %#02x, which is none of a stream", family)
	}
	if err := h.setTLVs(w, sent); err != nil {
		return Header{}, 0, fmt.Errorf("proxyproto: %w", err)
	}
	h.setEnds(w)
	return h, n, nil
}

// read has the library read one whole header.
func read(b []byte) (*wire.Header, error) {
	return wire.Read(bufio.NewReaderSize(bytes.NewReader(b), len(b)))
}

// setEnds takes over the addresses, where there are both.
func (h *Header) setEnds(w *wire.Header) {
	src, dst, ok := w.TCPAddrs()
	if !ok {
		return
	}
	h.Source, h.Destination = unmapped(src.AddrPort()), unmapped(dst.AddrPort())
}

func unmapped(ap netip.AddrPort) netip.AddrPort {
	return netip.AddrPortFrom(ap.Addr().Unmap(), ap.Port())
}

// setTLVs parses the values behind the addresses. b is the whole header.
func (h *Header) setTLVs(w *wire.Header, b []byte) error {
	tlvs, err := w.TLVs()
	if err != nil {
		return err
	}
	seen := map[wire.PP2Type]bool{}
	for _, v := range tlvs {
		switch v.Type {
		case wire.PP2_TYPE_ALPN, wire.PP2_TYPE_AUTHORITY, wire.PP2_TYPE_CRC32C, wire.PP2_TYPE_UNIQUE_ID, wire.PP2_TYPE_SSL, wire.PP2_TYPE_NETNS, typeAssertion, typeCaller:
			if seen[v.Type] {
				return fmt.Errorf("value %#02x is repeated", byte(v.Type))
			}
			seen[v.Type] = true
		}
		switch v.Type {
		case wire.PP2_TYPE_ALPN:
			h.ALPN = string(v.Value)
		case wire.PP2_TYPE_AUTHORITY:
			if !utf8.Valid(v.Value) {
				return fmt.Errorf("authority %q is not UTF-8", v.Value[:min(len(v.Value), 80)])
			}
			h.Authority = string(v.Value)
		case wire.PP2_TYPE_SSL:
			if h.SSL, err = parseSSL(v.Value); err != nil {
				return err
			}
		case typeAssertion:
			if len(v.Value) > maxAssertion {
				return fmt.Errorf("an assertion of %d bytes, limit %d", len(v.Value), maxAssertion)
			}
			h.Assertion = string(v.Value)
		case typeCaller:
			if err := checkCaller(string(v.Value)); err != nil {
				return err
			}
			h.Caller = string(v.Value)
		case wire.PP2_TYPE_UNIQUE_ID:
			if len(v.Value) > maxUniqueID {
				return fmt.Errorf("a unique id of %d bytes, limit %d", len(v.Value), maxUniqueID)
			}
			h.UniqueID = string(v.Value)
		case wire.PP2_TYPE_CRC32C:
			if len(v.Value) != crc32.Size {
				return fmt.Errorf("a checksum of %d bytes, want %d", len(v.Value), crc32.Size)
			}
			if got, want := binary.BigEndian.Uint32(v.Value), checksum(b); got != want {
				return fmt.Errorf("checksum %#08x, want %#08x", got, want)
			}
		}
	}
	return nil
}

// castagnoli is the polynomial of CRC32C, RFC 3720.
var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// These are among the types that section 2.2 leaves to applications.
const (
	typeAssertion wire.PP2Type = 0xE1
	typeCaller    wire.PP2Type = 0xE2
)

// checkCaller returns why s is no id of a caller, which goes to logs and into fields.
func checkCaller(s string) error {
	switch {
	case len(s) > maxCaller:
		return fmt.Errorf("a caller of %d bytes, limit %d", len(s), maxCaller)
	case !utf8.ValidString(s) || strings.ContainsFunc(s, func(r rune) bool { return r < 0x20 || r == 0x7f }):
		return fmt.Errorf("the caller has bytes that no id has: %q", s[:min(len(s), 80)])
	}
	return nil
}

// checksum is that of a whole header of version 2, in which its own place
// counts as zeros: section 2.2.3. The header's TLVs are well-formed.
func checksum(b []byte) uint32 {
	at := headV2
	switch b[13] {
	case v2TCP4:
		at += 12
	case v2TCP6:
		at += 36
	case v2UnixSock:
		at += 216
	}
	for at+3 <= len(b) && b[at] != byte(wire.PP2_TYPE_CRC32C) {
		at += 3 + int(binary.BigEndian.Uint16(b[at+1:]))
	}
	at += 3
	if at+crc32.Size > len(b) {
		return crc32.Checksum(b, castagnoli)
	}
	sum := crc32.Update(0, castagnoli, b[:at])
	sum = crc32.Update(sum, castagnoli, make([]byte, crc32.Size))
	return crc32.Update(sum, castagnoli, b[at+crc32.Size:])
}

// Append writes h as its version has it, and in version 2 with a checksum.
// Where one of the ends is IPv6 both are written so. It is an error where a
// value does not fit: a header with a wrong length would let its end be read as
// the client's bytes.
func (h *Header) Append(b []byte) ([]byte, error) {
	if h.Version != 1 && h.Version != 2 {
		return nil, fmt.Errorf("proxyproto: version %d, want 1 or 2", h.Version)
	}
	w := wire.Header{Version: byte(h.Version), Command: wire.LOCAL, TransportProtocol: wire.UNSPEC}
	if h.Source.IsValid() && h.Destination.IsValid() && !h.Local {
		w = *wire.HeaderProxyFromAddrs(byte(h.Version), tcpAddr(h.Source), tcpAddr(h.Destination))
	}
	if w.Command == wire.LOCAL && !h.Local && (h.SSL != nil || h.Assertion != "" || h.Caller != "") {
		w.Command = wire.PROXY // UNSPEC, whose values are read
	}
	if h.Version == 1 {
		line, err := w.Format()
		if err != nil {
			return nil, fmt.Errorf("proxyproto: %w", err)
		}
		return append(b, line...), nil
	}
	if len(h.UniqueID) > maxUniqueID {
		return nil, fmt.Errorf("proxyproto: a unique id of %d bytes, limit %d", len(h.UniqueID), maxUniqueID)
	}
	if n := h.SSL.size(); n > maxV2 {
		return nil, fmt.Errorf("proxyproto: %w: %d bytes, limit %d", errTooLarge, n, maxV2)
	}
	if len(h.Assertion) > maxAssertion {
		return nil, fmt.Errorf("proxyproto: an assertion of %d bytes, limit %d", len(h.Assertion), maxAssertion)
	}
	if err := checkCaller(h.Caller); err != nil {
		return nil, fmt.Errorf("proxyproto: %w", err)
	}
	var tlvs []wire.TLV
	for _, v := range []struct {
		kind  wire.PP2Type
		value string
	}{
		{wire.PP2_TYPE_AUTHORITY, h.Authority},
		{wire.PP2_TYPE_ALPN, h.ALPN},
		{wire.PP2_TYPE_UNIQUE_ID, h.UniqueID},
		{wire.PP2_TYPE_SSL, h.SSL.value()},
		{typeAssertion, h.Assertion},
		{typeCaller, h.Caller},
		{wire.PP2_TYPE_CRC32C, "\x00\x00\x00\x00"},
	} {
		if v.value != "" {
			tlvs = append(tlvs, wire.TLV{Type: v.kind, Value: []byte(v.value)})
		}
	}
	if err := w.SetTLVs(tlvs); err != nil {
		return nil, fmt.Errorf("proxyproto: %w", err)
	}
	out, err := w.Format()
	if err != nil {
		return nil, fmt.Errorf("proxyproto: %w", err)
	}
	if len(out) > headV2+maxV2 {
		return nil, fmt.Errorf("proxyproto: %w: %d bytes, limit %d", errTooLarge, len(out)-headV2, maxV2)
	}
	// The checksum is the last value.
	binary.BigEndian.PutUint32(out[len(out)-crc32.Size:], checksum(out))
	return append(b, out...), nil
}

func tcpAddr(ap netip.AddrPort) *net.TCPAddr { return net.TCPAddrFromAddrPort(ap) }
