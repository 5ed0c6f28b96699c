package sni

import "encoding/binary"

// The versions of QUIC whose Initials can be read.
const (
	quicV1 = 0x00000001 // RFC 9000
	quicV2 = 0x6b3343cf // RFC 9369
)

// quicVersions are the versions that a Version Negotiation packet lists.
var quicVersions = [...]uint32{quicV1, quicV2}

const (
	maxConnID     = 20 // bytes of a connection id in these versions, RFC 9000 section 17.2
	leastFirstID  = 8  // bytes of the first one, which the client makes up: section 7.2
	leastDatagram = 1200
)

// A packetType is one of the four of long headers.
type packetType uint8

const (
	packetInitial packetType = iota
	packet0RTT
	packetHandshake
	packetRetry
)

// A longHeader is the part of a packet that is never encrypted. Its slices are
// the datagram's.
type longHeader struct {
	first      byte
	version    uint32
	dcid, scid []byte
	typ        packetType // of version 1 and 2, as is all that follows
	token      []byte     // of an Initial
	number     int        // offset of the packet number
	end        int        // of the packet, in bytes
}

// readInvariants reads what is the same in every version of QUIC, RFC 8999
// section 5.1:
//
//	1 form (1 bit), version-specific (7)   4 version
//	1 length, destination connection id    1 length, source connection id
//
// It returns the offset of what follows.
func readInvariants(b []byte) (h longHeader, rest int, ok bool) {
	if len(b) < 7 || b[0]&0x80 == 0 {
		return h, 0, false
	}
	h.first, h.version = b[0], binary.BigEndian.Uint32(b[1:])
	at := 5
	for _, id := range []*[]byte{&h.dcid, &h.scid} {
		if at >= len(b) || at+1+int(b[at]) > len(b) {
			return h, 0, false
		}
		n := int(b[at])
		*id, at = b[at+1:at+1+n:at+1+n], at+1+n
	}
	return h, at, true
}

// readLong reads the header of a packet of version 1 or 2 (RFC 9000 section
// 17.2) and finds the packet's end.
func readLong(b []byte) (h longHeader, ok bool) {
	h, at, ok := readInvariants(b)
	if !ok || h.version != quicV1 && h.version != quicV2 || len(h.dcid) > maxConnID || len(h.scid) > maxConnID {
		return h, false
	}
	h.typ = packetType(h.first >> 4 & 3)
	if h.version == quicV2 { // RFC 9369 section 3.2: Retry, Initial, 0-RTT, Handshake
		h.typ = (h.typ + 3) % 4
	}
	if h.typ == packetRetry {
		h.number, h.end = at, len(b)
		return h, true
	}
	if h.typ == packetInitial {
		n, size := varint(b[at:])
		if at += size; size == 0 || n > uint64(len(b)-at) {
			return h, false
		}
		h.token, at = b[at:at+int(n)], at+int(n)
	}
	n, size := varint(b[at:])
	if at += size; size == 0 || n > uint64(len(b)-at) {
		return h, false
	}
	h.number, h.end = at, at+int(n)
	return h, true
}

// varint reads a variable-length integer, RFC 9000 section 16: the two highest
// bits say how many bytes it has. A size of 0 means that they are not all there.
func varint(b []byte) (n uint64, size int) {
	if len(b) == 0 {
		return 0, 0
	}
	size = 1 << (b[0] >> 6)
	if len(b) < size {
		return 0, 0
	}
	n = uint64(b[0] & 0x3f)
	for _, c := range b[1:size] {
		n = n<<8 | uint64(c)
	}
	return n, size
}

// appendVarint is the other way, for n below 2^30.
func appendVarint(b []byte, n uint64) []byte {
	switch {
	case n < 1<<6:
		return append(b, byte(n))
	case n < 1<<14:
		return append(b, byte(n>>8)|0x40, byte(n))
	}
	return append(b, byte(n>>24)|0x80, byte(n>>16), byte(n>>8), byte(n))
}
