package sni

import (
	"errors"
	"fmt"
	"strings"

	"culvert.dev/tunnel"
)

// A span is a part of the message, to be copied when it has arrived.
type span struct {
	off, record int // the Parser's, where it begins
	n           int // bytes of the message
}

// next returns the next n bytes of the message: the very bytes, unless they
// are split over records.
func (p *Parser) next(n int) ([]byte, error) {
	if n == 0 {
		return nil, nil
	}
	if p.have == 0 {
		if err := p.open(); err != nil {
			return nil, err
		}
		if p.at = p.off; n <= p.record {
			if n > len(p.raw)-p.off {
				return nil, ErrMore
			}
			p.advance(n)
			return p.raw[p.off-n : p.off], nil
		}
	}
	for p.have < n {
		if err := p.open(); err != nil {
			return nil, err
		}
		k := copy(p.field[p.have:n], p.raw[p.off:min(p.off+p.record, len(p.raw))])
		if k == 0 {
			return nil, ErrMore
		}
		p.have += k
		p.advance(k)
	}
	p.have = 0
	return p.field[:n], nil
}

// discard steps over the bytes to be skipped.
func (p *Parser) discard() error {
	for p.skip > 0 {
		if err := p.open(); err != nil {
			return err
		}
		k := min(p.skip, p.record, len(p.raw)-p.off)
		if k == 0 {
			return ErrMore
		}
		p.skip -= k
		p.advance(k)
	}
	return nil
}

func (p *Parser) advance(n int) {
	p.off += n
	p.pos += n
	p.record -= n
}

// open reads the header of the next record (RFC 8446 section 5.1) where the
// last one is used up: type, version and length, each as soon as it is there.
func (p *Parser) open() error {
	if p.record > 0 {
		return nil
	}
	if p.records == MaxRecords {
		return p.fail(p.off, IllegalParameter, MaxRecords, "hello is spread over more than %d records", MaxRecords)
	}
	h := p.raw[p.off:min(p.off+recordHeader, len(p.raw))]
	if p.records == 0 {
		switch lead(h) {
		case leadMore:
			return ErrMore
		case leadNone:
			return &ParseError{Reason: tunnel.BadPreamble, Err: fmt.Errorf("not TLS: begins with %q", h)}
		case leadSSL2:
			return &ParseError{Reason: tunnel.BadHello, Err: errors.New("SSLv2 hello, which has no server name and is not supported")}
		}
	}
	switch {
	case len(h) >= 1 && h[0] != typeHandshake:
		return p.fail(p.off, UnexpectedMessage, 0, "record of type %d in place of the hello, want handshake (%d)", h[0], typeHandshake)
	case len(h) >= 2 && h[1] != 3:
		return p.fail(p.off+1, ProtocolVersion, 0, "record of major version %d, want 3", h[1])
	case len(h) < recordHeader:
		return ErrMore
	}
	n := int(h[3])<<8 | int(h[4])
	if n > MaxRecord {
		return p.fail(p.off+3, RecordOverflow, MaxRecord, "record is %d bytes, limit %d", n, MaxRecord)
	}
	if n == 0 {
		return p.fail(p.off+3, UnexpectedMessage, 0, "handshake record of 0 bytes")
	}
	p.off += recordHeader
	p.record = n
	p.records++
	return nil
}

// mark notes that the next n bytes of the message are to be copied.
func (p *Parser) mark(n int) span { return span{off: p.off, record: p.record, n: n} }

// text copies a part of the message, which has been read, out of its records.
func (p *Parser) text(s span) string {
	var b strings.Builder
	b.Grow(s.n)
	for s.n > 0 {
		if s.record == 0 {
			h := p.raw[s.off:]
			s.record = int(h[3])<<8 | int(h[4])
			s.off += recordHeader
		}
		k := min(s.n, s.record)
		b.Write(p.raw[s.off : s.off+k])
		s.off, s.record, s.n = s.off+k, s.record-k, s.n-k
	}
	return b.String()
}

// A leading is what the first bytes of a connection are the start of.
type leading uint8

const (
	leadNone leading = iota
	leadMore
	leadTLS
	leadSSL2
)

// lead judges the first bytes of a connection, of which it needs at most five.
func lead(b []byte) leading {
	switch {
	case len(b) == 0:
		return leadMore
	case 20 <= b[0] && b[0] <= 23: // change_cipher_spec, alert, handshake, application_data
		switch {
		case len(b) < 2:
			return leadMore
		case b[1] == 3:
			return leadTLS
		}
	case b[0]&0x80 != 0:
		// RFC 5246 appendix E.2: uint16 length with the top bit set,
		// uint8 type 1, uint16 version.
		switch {
		case len(b) >= 3 && b[2] != typeClientHello,
			len(b) >= 4 && b[3] != 0 && b[3] != 3,
			len(b) >= 5 && b[3] == 0 && b[4] != 2:
			return leadNone
		case len(b) < 5:
			return leadMore
		}
		return leadSSL2
	}
	return leadNone
}
