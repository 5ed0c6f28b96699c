package ws

import (
	"bytes"
	"encoding/binary"
	"errors"
	"testing"
)

// frame writes one frame by hand: not with the code under test.
func frame(first byte, masked bool, payload []byte) []byte {
	b := []byte{first, 0}
	switch n := len(payload); {
	case n < 126:
		b[1] = byte(n)
	case n < 1<<16:
		b[1] = 126
		b = append(b, byte(n>>8), byte(n))
	default:
		b[1] = 127
		b = binary.BigEndian.AppendUint64(b, uint64(n))
	}
	if !masked {
		return append(b, payload...)
	}
	b[1] |= 0x80
	key := []byte{0x37, 0xfa, 0x21, 0x3d}
	b = append(b, key...)
	for i, c := range payload {
		b = append(b, c^key[i%4])
	}
	return b
}

// closeFrame is a close frame with a code.
func closeFrame(code int, masked bool, reason string) []byte {
	return frame(0x88, masked, append([]byte{byte(code >> 8), byte(code)}, reason...))
}

func TestParseHeader(t *testing.T) {
	key := [4]byte{0x37, 0xfa, 0x21, 0x3d}
	rows := []struct {
		name   string
		in     []byte
		masked bool
		want   header
	}{
		{"empty", []byte{0x82, 0}, false, header{fin: true, opcode: opBinary, size: 2}},
		{"fragment", []byte{0x02, 5}, false, header{opcode: opBinary, length: 5, size: 2}},
		{"125 bytes", []byte{0x82, 125}, false, header{fin: true, opcode: opBinary, length: 125, size: 2}},
		{"126 bytes", []byte{0x82, 126, 0, 126}, false, header{fin: true, opcode: opBinary, length: 126, size: 4}},
		{"65535 bytes", []byte{0x82, 126, 0xff, 0xff}, false, header{fin: true, opcode: opBinary, length: 65535, size: 4}},
		{"65536 bytes", []byte{0x82, 127, 0, 0, 0, 0, 0, 1, 0, 0}, false, header{fin: true, opcode: opBinary, length: 65536, size: 10}},
		{"2^63-1 bytes", []byte{0x82, 127, 0x7f, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff}, false, header{fin: true, opcode: opBinary, length: 1<<63 - 1, size: 10}},
		{"masked", []byte{0x80, 0x85, 0x37, 0xfa, 0x21, 0x3d}, true, header{fin: true, opcode: opContinuation, key: key, length: 5, size: 6}},
		{"masked, 65536 bytes", []byte{0x82, 0xff, 0, 0, 0, 0, 0, 1, 0, 0, 0x37, 0xfa, 0x21, 0x3d}, true, header{fin: true, opcode: opBinary, key: key, length: 65536, size: 14}},
		{"ping", []byte{0x89, 0x80, 0x37, 0xfa, 0x21, 0x3d}, true, header{fin: true, opcode: opPing, key: key, size: 6}},
	}
	for _, row := range rows {
		got, err := parseHeader(append(bytes.Clone(row.in), "payload"...), row.masked)
		if got != row.want || err != nil {
			t.Errorf("%s: got %+v, %v, want %+v", row.name, got, err, row.want)
		}
		for n := range row.in {
			if _, err := parseHeader(row.in[:n], row.masked); err != errMore {
				t.Errorf("%s: %d of %d bytes: got %v, want more", row.name, n, len(row.in), err)
			}
		}
	}
}

// Each broken header, and from which byte on it is known to be.
func TestParseHeaderRefuses(t *testing.T) {
	rows := []struct {
		name   string
		in     []byte
		masked bool
		code   int
	}{
		{"RSV1", []byte{0xc2}, false, codeProtocol},
		{"RSV2", []byte{0xa2}, false, codeProtocol},
		{"RSV3", []byte{0x92}, true, codeProtocol},
		{"opcode 3", []byte{0x83}, false, codeProtocol},
		{"opcode 7", []byte{0x87}, false, codeProtocol},
		{"opcode 11", []byte{0x8b}, false, codeProtocol},
		{"opcode 15", []byte{0x8f}, false, codeProtocol},
		{"text", []byte{0x81}, false, codeUnsupported},
		{"fragment of text", []byte{0x01}, false, codeUnsupported},
		{"ping in fragments", []byte{0x09}, false, codeProtocol},
		{"close in fragments", []byte{0x08}, false, codeProtocol},
		{"ping of 126 bytes", []byte{0x89, 126}, false, codeProtocol},
		{"close of 2^16 bytes", []byte{0x88, 127}, false, codeProtocol},
		{"client without a mask", []byte{0x82, 5}, true, codeProtocol},
		{"server with a mask", []byte{0x82, 0x85}, false, codeProtocol},
		{"125 in two bytes", []byte{0x82, 126, 0, 125}, false, codeProtocol},
		{"65535 in eight bytes", []byte{0x82, 127, 0, 0, 0, 0, 0, 0, 0xff, 0xff}, false, codeProtocol},
		{"2^63", []byte{0x82, 127, 0x80}, false, codeProtocol},
	}
	for _, row := range rows {
		_, err := parseHeader(row.in, row.masked)
		if v := (*violation)(nil); !errors.As(err, &v) || v.code != row.code {
			t.Errorf("%s: got %v, want close code %d", row.name, err, row.code)
		}
		for n := range row.in {
			if _, err := parseHeader(row.in[:n], row.masked); err != errMore {
				t.Errorf("%s: %d of %d bytes: got %v, want more", row.name, n, len(row.in), err)
			}
		}
	}
}

func TestAppendHeader(t *testing.T) {
	for _, n := range []int{0, 1, 125, 126, 65535, 65536} {
		payload := bytes.Repeat([]byte{'x'}, n)
		key := [4]byte{0x37, 0xfa, 0x21, 0x3d}
		got := appendHeader(nil, opBinary, n, &key)
		if want := frame(0x82, true, payload); !bytes.HasPrefix(want, got) || len(want) != len(got)+n {
			t.Errorf("%d bytes masked: got header %x, want that of %x", n, got, want[:min(16, len(want))])
		}
		got = appendHeader(nil, opBinary, n, nil)
		if want := frame(0x82, false, payload); !bytes.HasPrefix(want, got) || len(want) != len(got)+n {
			t.Errorf("%d bytes: got header %x, want that of %x", n, got, want[:min(16, len(want))])
		}
	}
}

func TestMask(t *testing.T) {
	key := [4]byte{1, 2, 4, 8}
	for pos := range 4 {
		for n := range 40 {
			got, want := make([]byte, n), make([]byte, n)
			for i := range want {
				got[i], want[i] = byte(i), byte(i)^key[(pos+i)%4]
			}
			if mask(got, key, pos); !bytes.Equal(got, want) {
				t.Fatalf("%d bytes at %d: got %x, want %x", n, pos, got, want)
			}
		}
	}
}

func TestParseClose(t *testing.T) {
	rows := []struct {
		in     string
		code   int
		reason string
		bad    int // the close code that answers it
	}{
		{"", codeNone, "", 0},
		{"\x03\xe8", 1000, "", 0},
		{"\x03\xe8bye", 1000, "bye", 0},
		{"\x03\xf3", 1011, "", 0},
		{"\x03\xf6", 1014, "", 0},
		{"\x0b\xb8", 3000, "", 0},
		{"\x13\x87", 4999, "", 0},
		{"\x03", 0, "", codeProtocol},
		{"\x00\x00", 0, "", codeProtocol},
		{"\x03\xe7", 0, "", codeProtocol}, // 999
		{"\x03\xec", 0, "", codeProtocol}, // 1004
		{"\x03\xed", 0, "", codeProtocol}, // 1005
		{"\x03\xee", 0, "", codeProtocol}, // 1006
		{"\x03\xf7", 0, "", codeProtocol}, // 1015
		{"\x0b\xb7", 0, "", codeProtocol}, // 2999
		{"\x13\x88", 0, "", codeProtocol}, // 5000
		{"\x03\xe8\xff", 0, "", codeInvalid},
	}
	for _, row := range rows {
		code, reason, err := parseClose([]byte(row.in))
		v := (*violation)(nil)
		if row.bad == 0 && (code != row.code || reason != row.reason || err != nil) || row.bad != 0 && (!errors.As(err, &v) || v.code != row.bad) {
			t.Errorf("%q: got %d, %q, %v; want %d, %q, or close code %d", row.in, code, reason, err, row.code, row.reason, row.bad)
		}
	}
}
