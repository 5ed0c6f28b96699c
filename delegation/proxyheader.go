package delegation

import (
	"encoding/binary"
	"hash/crc32"
	"io"
	"net/netip"
	"slices"
	"unicode/utf8"
)

// The PROXY header of version 2, section 2.2 of
// https://www.haproxy.org/download/3.4/doc/proxy-protocol.txt
const (
	proxySignature = "\r\n\r\n\x00\r\nQUIT\n"
	headBytes      = 16      // signature, version and command, family, length
	maxHeader      = 4 << 10 // bytes behind that

	commandLocal, commandProxy                     = 0x20, 0x21
	familyUnspec, familyTCP4, familyTCP6, familyUn = 0x00, 0x11, 0x21, 0x31

	typeAuthority, typeChecksum = 0x02, 0x03
)

// addressBytes are those in front of the values, by family.
var addressBytes = map[byte]int{familyUnspec: 0, familyTCP4: 12, familyTCP6: 36, familyUn: 216}

// A proxyHeader is what a PROXY header says that matters here.
type proxyHeader struct {
	source    netip.AddrPort
	authority string
	assertion string // not verified
}

// readHeader reads a header from r, and not a byte more.
func readHeader(r io.Reader) (proxyHeader, error) {
	b := make([]byte, headBytes, 512)
	if _, err := io.ReadFull(r, b); err != nil {
		return proxyHeader{}, ended(err)
	}
	n := int(binary.BigEndian.Uint16(b[14:]))
	switch {
	case string(b[:12]) != proxySignature:
		return proxyHeader{}, refusef(Missing, "the connection does not begin with a PROXY header of version 2: %q", b)
	case n > maxHeader:
		return proxyHeader{}, refusef(TooLarge, "the PROXY header has %d bytes, limit %d", n, maxHeader)
	}
	b = slices.Grow(b, n)[:headBytes+n]
	if _, err := io.ReadFull(r, b[headBytes:]); err != nil {
		return proxyHeader{}, ended(err)
	}
	return parseHeader(b)
}

// ended says where a connection has ended.
func ended(err error) error {
	if err == io.EOF || err == io.ErrUnexpectedEOF {
		return refusef(Missing, "the connection ended before the PROXY header did: %w", err)
	}
	return err
}

// parseHeader parses a whole header.
func parseHeader(b []byte) (h proxyHeader, err error) {
	command, family := b[12], b[13]
	at, ok := addressBytes[family]
	switch {
	case command == commandLocal:
		return h, nil // the gateway's own connection: what stands in it is to be skipped
	case command != commandProxy:
		return h, refusef(Malformed, "the PROXY header has the version and command %#02x, want %#02x or %#02x", command, commandLocal, commandProxy)
	case !ok:
		return h, refusef(Malformed, "the PROXY header has the family %#02x, which is none of a stream", family)
	case headBytes+at > len(b):
		return h, refusef(Malformed, "the addresses overrun the PROXY header")
	}
	addresses, values := b[headBytes:headBytes+at], b[headBytes+at:]
	switch family {
	case familyTCP4:
		h.source = netip.AddrPortFrom(netip.AddrFrom4([4]byte(addresses[:4])), binary.BigEndian.Uint16(addresses[8:]))
	case familyTCP6:
		h.source = netip.AddrPortFrom(netip.AddrFrom16([16]byte(addresses[:16])).Unmap(), binary.BigEndian.Uint16(addresses[32:]))
	}
	seen := [256]bool{}
	for len(values) > 0 {
		if len(values) < 3 || len(values) < 3+int(binary.BigEndian.Uint16(values[1:])) {
			return proxyHeader{}, refusef(Malformed, "a value overruns the PROXY header")
		}
		kind, n := values[0], int(binary.BigEndian.Uint16(values[1:]))
		value := values[3 : 3+n]
		switch kind {
		case TLV, typeAuthority, typeChecksum:
			if seen[kind] {
				return proxyHeader{}, refusef(Malformed, "the value %#02x of the PROXY header is repeated", kind)
			}
			seen[kind] = true
		}
		switch kind {
		case TLV:
			if n > MaxTLV {
				return proxyHeader{}, refusef(TooLarge, "the assertion has %d bytes in a PROXY header, limit %d", n, MaxTLV)
			}
			h.assertion = string(value)
		case typeAuthority:
			if !utf8.Valid(value) {
				return proxyHeader{}, refusef(Malformed, "the authority of the PROXY header is not UTF-8")
			}
			h.authority = string(value)
		case typeChecksum:
			if n != crc32.Size {
				return proxyHeader{}, refusef(Malformed, "the checksum of the PROXY header has %d bytes, want %d", n, crc32.Size)
			}
			zeroed := slices.Clone(b)
			clear(zeroed[len(b)-len(values)+3:][:n])
			if crc32.Checksum(zeroed, crc32.MakeTable(crc32.Castagnoli)) != binary.BigEndian.Uint32(value) {
				return proxyHeader{}, refusef(Malformed, "the checksum of the PROXY header is wrong")
			}
		}
		values = values[3+n:]
	}
	return h, nil
}
