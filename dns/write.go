package dns

import (
	"encoding/binary"
	"net/netip"
	"strings"

	"github.com/miekg/dns"
)

// maxRecords is how many records an answer of the table's has at most.
const maxRecords = 1000

// A writer makes a message of answers behind a question. If the record does not
// fit below the limit, ok is false and the message is unchanged.
type writer struct {
	b      []byte
	q      *query
	limit  int // bytes
	spare  int // of these, kept for the OPT
	counts [3]uint16
}

// The sections of a message behind the question.
const (
	inAnswer = iota
	inAuthority
	inAdditional
)

// begin starts a message with q's header and question in b's memory. Flags
// are those beside QR, RD and CD.
func (w *writer) begin(b []byte, q *query, flags uint16, rcode int, limit int) {
	*w = writer{b: b[:0], q: q, limit: limit}
	if q.edns {
		w.spare = 11
	}
	flags |= bitQR | q.flags&(bitRD|bitCD|maskOpcode) | uint16(rcode&0xf)
	w.b = binary.BigEndian.AppendUint16(w.b, q.id)
	w.b = binary.BigEndian.AppendUint16(w.b, flags)
	questions := uint16(0)
	if len(q.raw) > 0 {
		questions = 1
	}
	w.b = binary.BigEndian.AppendUint16(w.b, questions)
	w.b = append(w.b, 0, 0, 0, 0, 0, 0)
	w.b = append(w.b, q.raw...) // with the case it was sent in
}

// end writes the OPT, if q had one, and the counts, and returns the message.
func (w *writer) end(rcode int, options ...ede) []byte {
	if w.q.edns {
		w.b = append(w.b, 0, 0, byte(dns.TypeOPT))
		w.b = binary.BigEndian.AppendUint16(w.b, udpSize)
		flags := uint16(0)
		if w.q.do {
			flags = 0x8000
		}
		w.b = append(w.b, byte(rcode>>4), 0) // extended code, version
		w.b = binary.BigEndian.AppendUint16(w.b, flags)
		at := len(w.b)
		w.b = append(w.b, 0, 0)
		for _, o := range options {
			if o == 0 || len(w.b)+6 > w.limit {
				continue
			}
			w.b = binary.BigEndian.AppendUint16(w.b, dns.EDNS0EDE)
			w.b = append(w.b, 0, 2)
			w.b = binary.BigEndian.AppendUint16(w.b, uint16(o-1))
		}
		if w.q.pad {
			w.pad()
		}
		binary.BigEndian.PutUint16(w.b[at:], uint16(len(w.b)-at-2))
		w.counts[inAdditional]++
	}
	for i, n := range w.counts {
		binary.BigEndian.PutUint16(w.b[6+2*i:], n)
	}
	return w.b
}

// padTo is what answers are padded to a multiple of, RFC 8467 section 4.1.
const padTo = 468

// pad extends the message, which ends in an option, to a common length, so that
// its length does not reveal the question: RFC 7830.
func (w *writer) pad() {
	const head = 4
	if len(w.b)+head > w.limit {
		return
	}
	size := min((len(w.b)+head+padTo-1)/padTo*padTo, w.limit) - len(w.b) - head
	w.b = binary.BigEndian.AppendUint16(w.b, dns.EDNS0PADDING)
	w.b = binary.BigEndian.AppendUint16(w.b, uint16(size))
	w.b = append(w.b, make([]byte, size)...)
}

// An ede is an extended error code of RFC 8914 and 1; 0 is none.
type ede uint16

// truncate takes back all records and says that there were some.
func (w *writer) truncate() {
	w.b = w.b[:headerLen+len(w.q.raw)]
	w.b[2] |= bitTC >> 8
	w.counts = [3]uint16{}
}

// record writes a record whose data is written by data. The owner "" is the
// name asked for.
func (w *writer) record(section int, owner string, t uint16, ttl uint32, data func(*writer) bool) bool {
	start := len(w.b)
	if owner == "" {
		w.b = append(w.b, 0xc0, headerLen)
	} else if !w.name(owner, true) {
		w.b = w.b[:start]
		return false
	}
	w.b = binary.BigEndian.AppendUint16(w.b, t)
	w.b = binary.BigEndian.AppendUint16(w.b, dns.ClassINET)
	w.b = binary.BigEndian.AppendUint32(w.b, ttl)
	at := len(w.b)
	w.b = append(w.b, 0, 0)
	if !data(w) || len(w.b)+w.spare > w.limit || len(w.b)-at-2 > maxMessage {
		w.b = w.b[:start]
		return false
	}
	binary.BigEndian.PutUint16(w.b[at:], uint16(len(w.b)-at-2))
	w.counts[section]++
	return true
}

// addr writes an A or AAAA record.
func (w *writer) addr(section int, owner string, a netip.Addr, ttl uint32) bool {
	start := len(w.b)
	if owner == "" {
		w.b = append(w.b, 0xc0, headerLen)
	} else if !w.name(owner, true) {
		w.b = w.b[:start]
		return false
	}
	t, size := dns.TypeA, 4
	if a.Is6() {
		t, size = dns.TypeAAAA, 16
	}
	w.b = append(w.b, 0, byte(t), 0, byte(dns.ClassINET))
	w.b = binary.BigEndian.AppendUint32(w.b, ttl)
	w.b = append(w.b, 0, byte(size))
	if a.Is6() {
		v := a.As16()
		w.b = append(w.b, v[:]...)
	} else {
		v := a.As4()
		w.b = append(w.b, v[:]...)
	}
	if len(w.b)+w.spare > w.limit {
		w.b = w.b[:start]
		return false
	}
	w.counts[section]++
	return true
}

// name writes a name of the table's. Compressed, its end is written as a
// pointer where the question has the same. A name that can't be written, for
// the table's mistake, is false.
func (w *writer) name(s string, compress bool) bool {
	s = strings.TrimSuffix(s, ".")
	length := 1
	for rest := s; rest != ""; {
		if compress {
			if to, ok := w.suffix(rest); ok {
				w.b = append(w.b, 0xc0, byte(to))
				return true
			}
		}
		at := len(w.b)
		w.b = append(w.b, 0)
		i := 0
		for i < len(rest) && rest[i] != '.' {
			c := rest[i]
			i++
			if c == '\\' && i+3 <= len(rest) {
				c = (rest[i]-'0')*100 + (rest[i+1]-'0')*10 + rest[i+2] - '0'
				i += 3
			}
			w.b = append(w.b, c)
		}
		size := len(w.b) - at - 1
		if length += size + 1; size == 0 || size > 63 || length > maxWire {
			return false
		}
		w.b[at] = byte(size)
		if i == len(rest) {
			break
		}
		rest = rest[i+1:]
	}
	w.b = append(w.b, 0)
	return true
}

// suffix returns where the question has the name s, in lower case.
func (w *writer) suffix(s string) (int, bool) {
	name := w.q.name
	if len(s) > len(name) || !strings.HasSuffix(name, s) {
		return 0, false
	}
	if i := len(name) - len(s); i > 0 && name[i-1] != '.' {
		return 0, false
	}
	// Labels of the question before s, counted by dots.
	off := headerLen
	for range strings.Count(name[:len(name)-len(s)], ".") {
		off += 1 + int(w.b[off])
	}
	return off, off < 256 // a pointer's second byte
}

func (w *writer) u16(v uint16) { w.b = binary.BigEndian.AppendUint16(w.b, v) }
func (w *writer) u32(v uint32) { w.b = binary.BigEndian.AppendUint32(w.b, v) }

// soa writes the SOA of a zone, for answers that say no (RFC 2308 section 3).
func (w *writer) soa(section int, zone string, serial, ttl uint32) bool {
	owner := zone
	if owner == "" {
		owner = "." // not the name asked for
	}
	return w.record(section, owner, dns.TypeSOA, ttl, func(w *writer) bool {
		if !w.name(join2("ns", zone), true) || !w.name(join2("hostmaster", zone), true) {
			return false
		}
		w.u32(serial)
		w.u32(3600) // refresh, retry, expire: nobody transfers these zones
		w.u32(600)
		w.u32(86400)
		w.u32(ttl)
		return true
	})
}

func join2(label, zone string) string {
	if zone == "" {
		return label
	}
	return label + "." + zone
}

// service writes a SRV record. RFC 2782 has no compression of the target.
func (w *writer) service(s *Service, ttl uint32) bool {
	return w.record(inAnswer, "", dns.TypeSRV, ttl, func(w *writer) bool {
		w.u16(s.Priority)
		w.u16(s.Weight)
		w.u16(s.Port)
		return w.name(s.Target, false)
	})
}

// hostKey writes an SSHFP record, RFC 4255 section 3.1.
func (w *writer) hostKey(k *HostKey, ttl uint32) bool {
	return w.record(inAnswer, "", dns.TypeSSHFP, ttl, func(w *writer) bool {
		w.b = append(append(w.b, k.Algorithm, k.Hash), k.Digest...)
		return true
	})
}

// text writes a TXT record, cut into strings of 255 bytes.
func (w *writer) text(s string, ttl uint32) bool {
	return w.record(inAnswer, "", dns.TypeTXT, ttl, func(w *writer) bool {
		for first := true; first || s != ""; first = false {
			part := s[:min(len(s), 255)]
			w.b = append(append(w.b, byte(len(part))), part...)
			s = s[len(part):]
		}
		return true
	})
}

// binding writes a HTTPS or SVCB record, RFC 9460 section 2.2: parameters in
// the order of their keys.
func (w *writer) binding(t uint16, v *Binding, ttl uint32) bool {
	return w.record(inAnswer, "", t, ttl, func(w *writer) bool {
		w.u16(max(v.Priority, 1))
		if !w.name(v.Target, false) {
			return false
		}
		if len(v.ALPN) > 0 {
			size := 0
			for _, a := range v.ALPN {
				if a == "" || len(a) > 255 {
					return false
				}
				size += 1 + len(a)
			}
			w.u16(uint16(dns.SVCB_ALPN))
			w.u16(uint16(size))
			for _, a := range v.ALPN {
				w.b = append(append(w.b, byte(len(a))), a...)
			}
		}
		if v.Port != 0 {
			w.u16(uint16(dns.SVCB_PORT))
			w.u16(2)
			w.u16(v.Port)
		}
		w.hints(uint16(dns.SVCB_IPV4HINT), v.Hints, false)
		if len(v.ECH) > 0 {
			w.u16(uint16(dns.SVCB_ECHCONFIG))
			w.u16(uint16(len(v.ECH)))
			w.b = append(w.b, v.ECH...)
		}
		w.hints(uint16(dns.SVCB_IPV6HINT), v.Hints, true)
		return true
	})
}

func (w *writer) hints(key uint16, addrs []netip.Addr, six bool) {
	at := len(w.b)
	w.u16(key)
	w.u16(0)
	for _, a := range addrs[:min(len(addrs), 8)] {
		if a = a.Unmap(); a.IsValid() && a.Is6() == six {
			w.b = append(w.b, a.AsSlice()...)
		}
	}
	if len(w.b) == at+4 {
		w.b = w.b[:at]
		return
	}
	binary.BigEndian.PutUint16(w.b[at+2:], uint16(len(w.b)-at-4))
}
