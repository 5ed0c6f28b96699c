package dns

import (
	"encoding/binary"

	"github.com/miekg/dns"
)

const (
	headerLen  = 12    // RFC 1035 section 4.1.1
	maxWire    = 255   // octets of a name, RFC 1035 section 3.1
	maxQuery   = 4096  // bytes of a question, by any transport
	maxMessage = 65535 // bytes, by the two that stand before it on TCP
	plainSize  = 512   // bytes by UDP to those who say nothing else
)

// Bits of the header's third and fourth octets.
const (
	bitQR = 1 << 15
	bitAA = 1 << 10
	bitTC = 1 << 9
	bitRD = 1 << 8
	bitRA = 1 << 7
	bitCD = 1 << 4

	maskOpcode = 0xf << 11
)

// drop means that a message gets no answer.
const drop = -1

// A query is the question of a message, undecoded.
type query struct {
	id     uint16
	flags  uint16
	raw    []byte // the question section, as sent; "" if there is none to repeat
	labels int    // octets of raw that are the name
	name   string // see Question.Name
	qtype  uint16
	class  uint16

	edns    bool
	version uint8
	size    int  // bytes the asker takes by UDP
	do      bool // DNSSEC records wanted
	pad     bool // the asker pads, RFC 7830
	cookie  []byte
}

// newQuery returns the question for name, which is fully qualified.
func newQuery(name string, qtype uint16) (*query, error) {
	b, err := new(dns.Msg).SetQuestion(name, qtype).Pack()
	if err != nil {
		return nil, err
	}
	q := new(query)
	if rcode := parseQuery(b, q); rcode != dns.RcodeSuccess {
		return nil, rcodeError(rcode)
	}
	return q, nil
}

// parseQuery reads a message that should be a question, RFC 1035 section 4 and
// RFC 6891. It returns drop, or the response code for an invalid message, or
// dns.RcodeSuccess; then q refers to b.
func parseQuery(b []byte, q *query) int {
	*q = query{size: plainSize}
	if len(b) < headerLen {
		return drop
	}
	q.id, q.flags = binary.BigEndian.Uint16(b), binary.BigEndian.Uint16(b[2:])
	if q.flags&bitQR != 0 {
		return drop // an answer to an answer is how loops between servers begin
	}
	if q.flags&maskOpcode != 0 {
		return dns.RcodeNotImplemented
	}
	if binary.BigEndian.Uint16(b[4:]) != 1 {
		return dns.RcodeFormatError
	}
	end, ok := q.readQuestion(b)
	if !ok {
		return dns.RcodeFormatError
	}
	// Sections of records. Nothing in them is used but one OPT; they are
	// walked to know that the message is whole.
	others := int(binary.BigEndian.Uint16(b[6:])) + int(binary.BigEndian.Uint16(b[8:]))
	all := others + int(binary.BigEndian.Uint16(b[10:]))
	for i := range all {
		start := end
		if end, ok = skipName(b, end); !ok || end+10 > len(b) {
			return dns.RcodeFormatError
		}
		rtype := binary.BigEndian.Uint16(b[end:])
		size := int(binary.BigEndian.Uint16(b[end+8:]))
		data := end + 10
		if data+size > len(b) {
			return dns.RcodeFormatError
		}
		if rtype == dns.TypeOPT {
			if i < others || q.edns || end != start+1 || !q.readOPT(b[end:data], b[data:data+size]) {
				return dns.RcodeFormatError
			}
		}
		end = data + size
	}
	return dns.RcodeSuccess
}

// readQuestion reads the name, type and class behind the header and returns
// where they end.
func (q *query) readQuestion(b []byte) (int, bool) {
	var text [4 * maxWire]byte // a byte is four where it is escaped
	n, off := 0, headerLen
	for {
		if off >= len(b) {
			return 0, false
		}
		size := int(b[off])
		off++
		if size == 0 {
			break
		}
		// There is nothing before the first name that a pointer could mean.
		if size > 63 || off+size >= len(b) || off+size-headerLen >= maxWire {
			return 0, false
		}
		if n > 0 {
			text[n] = '.'
			n++
		}
		for _, c := range b[off : off+size] {
			switch {
			case 'A' <= c && c <= 'Z':
				text[n] = c + 'a' - 'A'
			case 'a' <= c && c <= 'z', '0' <= c && c <= '9', c == '-', c == '_', c == '*':
				text[n] = c
			default:
				text[n], text[n+1], text[n+2] = '\\', '0'+c/100, '0'+c/10%10
				text[n+3] = '0' + c%10
				n += 3
			}
			n++
		}
		off += size
	}
	if off+4 > len(b) {
		return 0, false
	}
	q.name, q.labels, q.raw = string(text[:n]), off-headerLen, b[headerLen:off+4]
	q.qtype, q.class = binary.BigEndian.Uint16(b[off:]), binary.BigEndian.Uint16(b[off+2:])
	return off + 4, true
}

// readOPT reads the OPT pseudo-record, RFC 6891 section 6.1: head is from its
// type on. Options and flags that are not known are passed over.
func (q *query) readOPT(head, data []byte) bool {
	q.edns = true
	q.size = max(int(binary.BigEndian.Uint16(head[2:])), plainSize)
	q.version = head[5]
	q.do = head[6]&0x80 != 0
	for len(data) > 0 {
		if len(data) < 4 {
			return false
		}
		size := int(binary.BigEndian.Uint16(data[2:]))
		if 4+size > len(data) {
			return false
		}
		if binary.BigEndian.Uint16(data) == dns.EDNS0COOKIE {
			// RFC 7873 section 5.2.2: 8 octets of the client's, and none or 8
			// to 32 of a server's.
			if size != 8 && (size < 16 || size > 40) || q.cookie != nil {
				return false
			}
			q.cookie = data[4 : 4+size]
		}
		if binary.BigEndian.Uint16(data) == dns.EDNS0PADDING {
			q.pad = true
		}
		data = data[4+size:]
	}
	return true
}

// skipName returns where the name at off ends. A pointer may lead only to an
// earlier offset, so every name ends (RFC 1035 section 4.1.4: "a prior
// occurrence").
func skipName(b []byte, off int) (end int, ok bool) {
	length, before := 0, off
	for {
		if off >= len(b) {
			return 0, false
		}
		switch size := int(b[off]); {
		case size == 0:
			if end == 0 {
				end = off + 1
			}
			return end, true
		case size < 64:
			off += 1 + size
			if length += 1 + size; length >= maxWire {
				return 0, false
			}
		case size >= 0xc0 && off+1 < len(b):
			to := int(binary.BigEndian.Uint16(b[off:]) & 0x3fff)
			if to >= before || to < headerLen {
				return 0, false
			}
			if end == 0 {
				end = off + 2
			}
			off, before = to, to
		default:
			return 0, false
		}
	}
}
