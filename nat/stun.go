package nat

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"net/netip"
	"sync"
	"time"
)

// The wire format of STUN, RFC 8489 sections 5 and 14: a header of 20 bytes, and attributes that
// are padded to multiples of 4.
//
//	0-1 type  2-3 length behind the header  4-7 magic cookie  8-19 transaction id
//	attribute: 0-1 type  2-3 length  4- value
const (
	stunHeaderSize = 20
	stunCookie     = 0x2112A442

	stunRequest = 0x0001 // Binding
	stunSuccess = 0x0101
	stunFailure = 0x0111

	stunXORMappedAddress  = 0x0020
	stunErrorCode         = 0x0009
	stunUnknownAttributes = 0x000A
	stunFingerprint       = 0x8028

	stunFingerprintXOR = 0x5354554e

	maxUnknown = 4 // attributes that an answer names
)

// stunSchedule is that of RFC 8489 section 6.2.1: 500 ms, doubling, seven times, but for the
// last wait, which is left to the context.
var stunSchedule = doubling(500*time.Millisecond, 16*time.Second, 7)

// A stunMessage is a message that was parsed.
type stunMessage struct {
	kind        uint16
	id          [12]byte
	mapped      netip.AddrPort // of XOR-MAPPED-ADDRESS
	code        int            // of ERROR-CODE
	fingerprint bool           // it has one, and that is correct
	unknown     []uint16       // the first of the attributes that must be understood, and are not
}

// IsSTUN reports whether b may be a message of STUN. No message of QUIC or TLS begins like one.
func IsSTUN(b []byte) bool {
	return len(b) >= stunHeaderSize && b[0] < 2 && binary.BigEndian.Uint32(b[4:]) == stunCookie && int(binary.BigEndian.Uint16(b[2:]))+stunHeaderSize == len(b)
}

// parseSTUN parses a message, all of which must be well-formed.
func parseSTUN(b []byte) (m stunMessage, err error) {
	if !IsSTUN(b) || len(b)%4 != 0 {
		return m, errors.New("nat: not a message of STUN")
	}
	m.kind, m.id = binary.BigEndian.Uint16(b), [12]byte(b[8:20])
	for at := stunHeaderSize; at < len(b); {
		if m.fingerprint {
			return stunMessage{}, errors.New("nat: an attribute of STUN behind the fingerprint")
		}
		kind, size := binary.BigEndian.Uint16(b[at:]), int(binary.BigEndian.Uint16(b[at+2:]))
		if size > len(b)-at-4 {
			return stunMessage{}, fmt.Errorf("nat: attribute %#04x of STUN is %d bytes, and %d are left", kind, size, len(b)-at-4)
		}
		value := b[at+4 : at+4+size]
		switch {
		case kind == stunXORMappedAddress:
			if m.mapped.IsValid() { // the first one counts: section 14
				break
			}
			if m.mapped, err = parseXORAddress(value, b[4:20]); err != nil {
				return stunMessage{}, err
			}
		case kind == stunErrorCode:
			if size < 4 {
				return stunMessage{}, fmt.Errorf("nat: error code of STUN is %d bytes, less than 4", size)
			}
			m.code = int(value[2]&7)*100 + int(value[3])
		case kind == stunFingerprint:
			if size != 4 || binary.BigEndian.Uint32(value) != crc32.ChecksumIEEE(b[:at])^stunFingerprintXOR {
				return stunMessage{}, errors.New("nat: the fingerprint of STUN is wrong")
			}
			m.fingerprint = true
		case kind < 0x8000 && kind > 0x0001 && len(m.unknown) < maxUnknown: // MAPPED-ADDRESS is known, and what a NAT may have changed
			m.unknown = append(m.unknown, kind)
		}
		at += 4 + (size+3)&^3
	}
	return m, nil
}

// parseXORAddress parses the value of XOR-MAPPED-ADDRESS: RFC 8489 section 14.2. xor is the
// cookie and the transaction id.
func parseXORAddress(b, xor []byte) (netip.AddrPort, error) {
	want := 8
	if len(b) >= 2 && b[1] == 2 {
		want = 20
	}
	if len(b) != want || b[1] != 1 && b[1] != 2 {
		return netip.AddrPort{}, fmt.Errorf("nat: mapped address of STUN is %d bytes of no family", len(b))
	}
	port := binary.BigEndian.Uint16(b[2:]) ^ binary.BigEndian.Uint16(xor)
	ip := make([]byte, want-4)
	for i := range ip {
		ip[i] = b[4+i] ^ xor[i]
	}
	addr, _ := netip.AddrFromSlice(ip)
	return netip.AddrPortFrom(addr.Unmap(), port), nil
}

// appendSTUN appends a header, for length bytes of attributes.
func appendSTUN(b []byte, kind uint16, length int, id []byte) []byte {
	b = binary.BigEndian.AppendUint16(b, kind)
	b = binary.BigEndian.AppendUint16(b, uint16(length))
	b = binary.BigEndian.AppendUint32(b, stunCookie)
	return append(b, id...)
}

// appendFingerprint completes the message b, whose length has room for it.
func appendFingerprint(b []byte) []byte {
	sum := crc32.ChecksumIEEE(b) ^ stunFingerprintXOR
	b = append(b, stunFingerprint>>8, stunFingerprint&0xff, 0, 4)
	return binary.BigEndian.AppendUint32(b, sum)
}

// AskSTUN returns the address that a server sees the caller at. dial may be nil, for a
// net.Dialer's. The answer counts if it has the transaction id of the question and all of it is
// well-formed.
func AskSTUN(ctx context.Context, dial DialFunc, server netip.AddrPort) (netip.AddrPort, error) {
	var id [12]byte
	if _, err := rand.Read(id[:]); err != nil {
		return netip.AddrPort{}, err
	}
	var mapped netip.AddrPort
	err := exchange(ctx, dialOr(dial), server, stunSchedule, func(netip.Addr) []byte {
		return appendFingerprint(appendSTUN(nil, stunRequest, 8, id[:]))
	}, func(answer []byte) error {
		m, err := parseSTUN(answer)
		switch {
		case err != nil || m.id != id || m.kind != stunSuccess && m.kind != stunFailure:
			return errOther
		case m.kind == stunFailure:
			return fmt.Errorf("%s answers with the error %d of STUN", server, m.code)
		case len(m.unknown) > 0 || !m.mapped.IsValid() || m.mapped.Port() == 0 || m.mapped.Addr().IsUnspecified(): // section 6.3.3
			return errOther
		}
		mapped = m.mapped
		return nil
	})
	return mapped, err
}

// Limits of a Responder.
const (
	stunPerClient  = 10   // answers a second to one client: an address of IPv4, or a /64 of IPv6
	stunPerSecond  = 2000 // answers a second to all of them
	maxSTUNClients = 4096 // that are told apart in a second
)

// A Responder answers Binding requests of STUN. The source of a datagram may be forged, so that
// an answer is at most 24 bytes longer than its question, and there are few of them. The zero
// Responder is ready, and safe for use by several goroutines.
type Responder struct {
	mu      sync.Mutex // guards what follows
	second  time.Time
	all     int
	clients map[netip.Prefix]int // answers in this second
}

// Answer returns the answer to a datagram, nil where there is none. stun reports whether it was a
// message of STUN at all, with or without an answer.
func (r *Responder) Answer(b []byte, from netip.AddrPort) (answer []byte, stun bool) {
	if !IsSTUN(b) {
		return nil, false
	}
	m, err := parseSTUN(b)
	if err != nil || m.kind != stunRequest || !r.allow(from.Addr(), time.Now()) {
		return nil, true
	}
	if n := len(m.unknown); n > 0 { // 420 Unknown Attribute: section 6.3.1
		size := 2 * n
		answer = appendSTUN(make([]byte, 0, 48), stunFailure, 12+(size+3)&^3, m.id[:])
		answer = append(answer, stunErrorCode>>8, stunErrorCode&0xff, 0, 4, 0, 0, 4, 20)
		answer = append(answer, stunUnknownAttributes>>8, stunUnknownAttributes&0xff, 0, byte(size))
		for _, kind := range m.unknown {
			answer = binary.BigEndian.AppendUint16(answer, kind)
		}
		return append(answer, make([]byte, size&2)...), true
	}
	ip, family := from.Addr().Unmap().AsSlice(), byte(1)
	if len(ip) == 16 {
		family = 2
	}
	length := 8 + len(ip)
	if m.fingerprint {
		length += 8
	}
	answer = appendSTUN(make([]byte, 0, stunHeaderSize+length), stunSuccess, length, m.id[:])
	answer = append(answer, stunXORMappedAddress>>8, stunXORMappedAddress&0xff, 0, byte(4+len(ip)), 0, family)
	answer = binary.BigEndian.AppendUint16(answer, from.Port()^(stunCookie>>16))
	for i, c := range ip {
		answer = append(answer, c^answer[4+i])
	}
	if m.fingerprint {
		answer = appendFingerprint(answer)
	}
	return answer, true
}

// allow counts an answer to a client.
func (r *Responder) allow(client netip.Addr, now time.Time) bool {
	bits := 32
	if client = client.Unmap(); client.Is6() {
		bits = 64
	}
	prefix, _ := client.WithZone("").Prefix(bits)
	r.mu.Lock()
	defer r.mu.Unlock()
	if now.Sub(r.second) >= time.Second || r.clients == nil {
		r.second, r.all = now, 0
		if r.clients == nil {
			r.clients = make(map[netip.Prefix]int)
		}
		clear(r.clients)
	}
	n, known := r.clients[prefix]
	if r.all >= stunPerSecond || n >= stunPerClient || !known && len(r.clients) >= maxSTUNClients {
		return false
	}
	r.all++
	r.clients[prefix] = n + 1
	return true
}
