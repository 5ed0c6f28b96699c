package ws

import (
	"encoding/binary"
	"errors"
	"fmt"
	"unicode/utf8"
)

// Opcodes, RFC 6455 section 5.2.
const (
	opContinuation = 0x0
	opText         = 0x1
	opBinary       = 0x2
	opClose        = 0x8
	opPing         = 0x9
	opPong         = 0xA
)

// Close codes, RFC 6455 section 7.4.1.
const (
	codeNormal      = 1000
	codeGoingAway   = 1001
	codeProtocol    = 1002
	codeUnsupported = 1003
	codeNone        = 1005 // is never sent: it stands for a close without a code
	codeInvalid     = 1007
	codePolicy      = 1008
	codeInternal    = 1011
)

const (
	maxHeader  = 2 + 8 + 4 // bytes
	maxControl = 125       // bytes of a control frame's payload, section 5.5
)

// errMore is what a parser returns for the beginning of a header.
var errMore = errors.New("ws: the header is not complete")

// A violation is what ends a connection by section 7.1.7: the close code the
// peer is told, and what it did.
type violation struct {
	code int
	what string
}

func (v *violation) Error() string { return fmt.Sprintf("ws: %s (close code %d)", v.what, v.code) }

func violated(code int, format string, args ...any) error {
	return &violation{code: code, what: fmt.Sprintf(format, args...)}
}

// A header is that of one frame:
//
//	FIN 1 | RSV 3 | opcode 4 | MASK 1 | length 7 | length 16 or 64 | key 32 if MASK
type header struct {
	fin    bool
	opcode byte
	key    [4]byte // zero where the frame is not masked
	length uint64  // of the payload, at most 2^63-1
	size   int     // of the header itself, bytes
}

// parseHeader parses the header at the start of b. masked says what the
// peer's frames must be: a client's are masked and a server's are not. It
// returns errMore where b is the beginning of a header and a *violation where
// no more bytes could make it one.
func parseHeader(b []byte, masked bool) (header, error) {
	if len(b) == 0 {
		return header{}, errMore
	}
	h := header{fin: b[0]&0x80 != 0, opcode: b[0] & 0x0f, size: 2}
	control := h.opcode >= opClose
	switch {
	case b[0]&0x70 != 0: // no extension was agreed on that could define them
		return header{}, violated(codeProtocol, "reserved bits %03b are set", b[0]>>4&7)
	case h.opcode > opPong || h.opcode > opBinary && h.opcode < opClose:
		return header{}, violated(codeProtocol, "opcode %#x is not defined", h.opcode)
	case h.opcode == opText:
		return header{}, violated(codeUnsupported, "text message: a tunnel's are binary")
	case control && !h.fin:
		return header{}, violated(codeProtocol, "control frame in fragments")
	case len(b) == 1:
		return header{}, errMore
	}
	short := b[1] & 0x7f
	switch {
	case b[1]&0x80 != 0 != masked:
		return header{}, violated(codeProtocol, "%s", map[bool]string{true: "frame of a client without a mask", false: "frame of a server with a mask"}[masked])
	case control && short > maxControl:
		return header{}, violated(codeProtocol, "control frame of more than %d bytes", maxControl)
	}
	switch short {
	case 126:
		if len(b) < 4 {
			return header{}, errMore
		}
		h.length, h.size = uint64(binary.BigEndian.Uint16(b[2:])), 4
		if h.length < 126 {
			return header{}, violated(codeProtocol, "length %d takes more bytes than it needs", h.length)
		}
	case 127:
		// The first byte says it all where the length is over the limit.
		if len(b) > 2 && b[2]&0x80 != 0 {
			return header{}, violated(codeProtocol, "length of 2^63 or more")
		}
		if len(b) < 10 {
			return header{}, errMore
		}
		h.length, h.size = binary.BigEndian.Uint64(b[2:]), 10
		if h.length < 1<<16 {
			return header{}, violated(codeProtocol, "length %d takes more bytes than it needs", h.length)
		}
	default:
		h.length = uint64(short)
	}
	if masked {
		if len(b) < h.size+4 {
			return header{}, errMore
		}
		h.size += copy(h.key[:], b[h.size:])
	}
	return h, nil
}

// appendHeader appends the header of a frame that is a whole message or a
// control frame. key is nil for a server's frame.
func appendHeader(b []byte, opcode byte, length int, key *[4]byte) []byte {
	mask := byte(0)
	if key != nil {
		mask = 0x80
	}
	b = append(b, 0x80|opcode)
	switch {
	case length < 126:
		b = append(b, mask|byte(length))
	case length < 1<<16:
		b = binary.BigEndian.AppendUint16(append(b, mask|126), uint16(length))
	default:
		b = binary.BigEndian.AppendUint64(append(b, mask|127), uint64(length))
	}
	if key != nil {
		b = append(b, key[:]...)
	}
	return b
}

// mask masks or unmasks b, section 5.3. pos is where in the payload b begins.
func mask(b []byte, key [4]byte, pos int) {
	if key == ([4]byte{}) {
		return
	}
	k := [8]byte{}
	for i := range k {
		k[i] = key[(pos+i)&3]
	}
	word := binary.LittleEndian.Uint64(k[:])
	for len(b) >= 32 {
		block := b[:32]
		binary.LittleEndian.PutUint64(block[:8], binary.LittleEndian.Uint64(block[:8])^word)
		binary.LittleEndian.PutUint64(block[8:16], binary.LittleEndian.Uint64(block[8:16])^word)
		binary.LittleEndian.PutUint64(block[16:24], binary.LittleEndian.Uint64(block[16:24])^word)
		binary.LittleEndian.PutUint64(block[24:], binary.LittleEndian.Uint64(block[24:])^word)
		b = b[32:]
	}
	for len(b) >= 8 {
		binary.LittleEndian.PutUint64(b, binary.LittleEndian.Uint64(b)^word)
		b = b[8:]
	}
	for i := range b {
		b[i] ^= k[i]
	}
}

// parseClose reads the payload of a close frame, section 5.5.1. An empty one
// is code 1005.
func parseClose(p []byte) (code int, reason string, err error) {
	switch {
	case len(p) == 0:
		return codeNone, "", nil
	case len(p) == 1:
		return 0, "", violated(codeProtocol, "close frame of one byte")
	}
	code = int(binary.BigEndian.Uint16(p))
	if !mayBeSent(code) {
		return 0, "", violated(codeProtocol, "close code %d may not be sent", code)
	}
	if !utf8.Valid(p[2:]) {
		return 0, "", violated(codeInvalid, "reason of a close frame is not UTF-8")
	}
	return code, string(p[2:]), nil
}

// mayBeSent reports whether a close frame may have the code: those of the
// registry of section 11.7, and the ranges of libraries and applications.
func mayBeSent(code int) bool {
	return code >= 1000 && code <= 1014 && code != 1004 && code != 1005 && code != 1006 || code >= 3000 && code <= 4999
}

// closePayload is the payload of a close frame.
func closePayload(code int) []byte {
	if code == codeNone {
		return nil
	}
	return binary.BigEndian.AppendUint16(nil, uint16(code))
}
