//go:build unix

package interop

import (
	"bytes"
	"encoding/binary"
)

// The builders make ClientHellos field by field, so that any field can be made
// wrong. They share no code with the gateway's parser or its tests.

func num16(n int) []byte { return binary.BigEndian.AppendUint16(nil, uint16(n)) }

func cat(parts ...[]byte) []byte { return bytes.Join(parts, nil) }

// vector is b with its length in front, in size bytes.
func vector(size int, b ...[]byte) []byte {
	body := cat(b...)
	n := binary.BigEndian.AppendUint32(nil, uint32(len(body)))
	return cat(n[4-size:], body)
}

func extension(kind int, body ...[]byte) []byte { return cat(num16(kind), vector(2, body...)) }

// named is a server_name extension.
func named(hosts ...string) []byte {
	var list []byte
	for _, h := range hosts {
		list = cat(list, []byte{0}, vector(2, []byte(h)))
	}
	return extension(0, vector(2, list))
}

// padding is an extension of n bytes in all.
func padding(n int) []byte { return extension(21, make([]byte, n-4)) }

// postQuantum is what a TLS 1.3 client offers in the first place: a key share
// of X25519MLKEM768 and one of X25519, 1.3 KiB together.
func postQuantum() []byte {
	share := func(group, n int) []byte { return cat(num16(group), vector(2, bytes.Repeat([]byte{7}, n))) }
	return cat(
		extension(51, vector(2, share(0x11ec, 1216), share(0x001d, 32))),
		extension(10, vector(2, num16(0x11ec), num16(0x001d))),
		extension(43, vector(1, num16(0x0304), num16(0x0303))),
		extension(13, vector(2, num16(0x0403), num16(0x0804))),
	)
}

// clientHello is a handshake message with the given extensions.
func clientHello(extensions ...[]byte) []byte {
	return handshake(1, num16(0x0303), bytes.Repeat([]byte{1}, 32), vector(1, bytes.Repeat([]byte{2}, 32)),
		vector(2, num16(0x1301), num16(0xc02f)), vector(1, []byte{0}), vector(2, extensions...))
}

func handshake(kind byte, body ...[]byte) []byte { return cat([]byte{kind}, vector(3, body...)) }

func tlsRecord(kind byte, payload []byte) []byte { return cat([]byte{kind, 3, 1}, vector(2, payload)) }

// inRecords cuts a message into handshake records of the given sizes, the
// last of which counts for the rest too.
func inRecords(msg []byte, sizes ...int) []byte {
	var raw []byte
	for len(msg) > 0 {
		n := min(sizes[0], len(msg))
		raw, msg = append(raw, tlsRecord(22, msg[:n])...), msg[n:]
		if len(sizes) > 1 {
			sizes = sizes[1:]
		}
	}
	return raw
}

func inOne(msg []byte) []byte { return tlsRecord(22, msg) }

// hello is a whole hello of the usual kind for a name.
func hello(name string) []byte { return inOne(clientHello(postQuantum(), named(name))) }
