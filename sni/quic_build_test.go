package sni

import (
	"bytes"
	"encoding/binary"
	"math/rand/v2"
	"testing"
)

// The builders make QUIC's datagrams field by field, as build_test.go makes
// hellos. They share the keys with what they test, and the vectors of the RFCs
// judge those.

// A packet is a long header and what is in it.
type packet struct {
	version    uint32 // 0 means 1
	typ        packetType
	first      byte // or'ed to the first byte's bits that are not encrypted
	dcid, scid []byte
	keyID      []byte // what the keys are made of; nil means dcid
	side       string // "" means the client's
	token      []byte
	number     uint32
	frames     []byte
	size       int // of the packet, padded inside; 0 means as it comes
}

var (
	clientID = []byte("clientid")
	firstID  = []byte("first id, 16 B.!")
	serverID = []byte("server!!")
)

func (p packet) header(rest int) []byte {
	if p.version == 0 {
		p.version = quicV1
	}
	t := byte(p.typ)
	if p.version == quicV2 {
		t = (t + 1) % 4
	}
	b := []byte{0xc0 | t<<4 | p.first | 3}
	b = binary.BigEndian.AppendUint32(b, p.version)
	b = join(b, vec8(p.dcid), vec8(p.scid))
	if p.typ == packetRetry {
		return b
	}
	if p.typ == packetInitial {
		b = append(appendVarint(b, uint64(len(p.token))), p.token...)
	}
	b = append(b, 0x40|byte(rest>>8), byte(rest)) // a varint of two bytes
	return binary.BigEndian.AppendUint32(b, p.number)
}

// seal returns the packet's bytes.
func (p packet) seal(t testing.TB) []byte {
	t.Helper()
	const overhead = 4 + tagSize
	head := len(p.header(0))
	if short := p.size - head - tagSize - len(p.frames); short > 0 {
		p.frames = append(bytes.Clone(p.frames), make([]byte, short)...)
	}
	b := p.header(overhead + len(p.frames))
	if p.typ != packetInitial { // whose keys nobody but the ends has
		return append(b, bytes.Repeat([]byte{0xe5}, len(p.frames)+tagSize)...)
	}
	keyID, side, version := p.keyID, p.side, p.version
	if keyID == nil {
		keyID = p.dcid
	}
	if side == "" {
		side = clientSide
	}
	if version == 0 {
		version = quicV1
	}
	k, err := newInitialKeys(version, keyID, side)
	if err != nil {
		t.Fatal(err)
	}
	at := len(b)
	b = k.aead.Seal(b, k.nonce(uint64(p.number)), p.frames, b)
	var mask [sampleSize]byte
	k.hp.Encrypt(mask[:], b[at:at+sampleSize])
	b[0] ^= mask[0] & 0x0f
	for i := range 4 {
		b[at-4+i] ^= mask[1+i]
	}
	return b
}

// initial is a client's first packet, in a datagram of its own.
func initial(t testing.TB, number int, frames ...[]byte) []byte {
	t.Helper()
	return packet{dcid: firstID, scid: clientID, number: uint32(number), frames: join(frames...), size: 1200}.seal(t)
}

// crypto is a CRYPTO frame.
func crypto(at int, data []byte) []byte {
	return join([]byte{frameCrypto}, appendVarint(nil, uint64(at)), appendVarint(nil, uint64(len(data))), data)
}

// spread cuts a hello into datagrams of n bytes of it each.
func spread(t testing.TB, msg []byte, n int) [][]byte {
	t.Helper()
	var list [][]byte
	for at := 0; at < len(msg); at += n {
		list = append(list, initial(t, len(list), crypto(at, msg[at:min(at+n, len(msg))])))
	}
	return list
}

// chaos cuts a hello into one datagram's frames as Chromium does: small pieces
// in any order, with PING and PADDING between.
func chaos(t testing.TB, rnd *rand.Rand, msg []byte) []byte {
	t.Helper()
	var frames [][]byte
	for at := 0; at < len(msg); {
		n := min(1+rnd.IntN(60), len(msg)-at)
		frames = append(frames, crypto(at, msg[at:at+n]))
		at += n
		if rnd.IntN(3) == 0 {
			frames = append(frames, []byte{framePing}, make([]byte, rnd.IntN(5)))
		}
	}
	rnd.Shuffle(len(frames), func(i, j int) { frames[i], frames[j] = frames[j], frames[i] })
	return initial(t, 0, frames...)
}

// ack is an ACK frame of several ranges, with ECN counts where wanted.
func ack(ecn bool) []byte {
	b := []byte{frameAck, 0x40, 9, 1, 2, 0, 1, 0, 1, 0}
	if ecn {
		b[0] = frameAckECN
		b = append(b, 1, 2, 3)
	}
	return b
}
