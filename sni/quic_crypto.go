package sni

import (
	"crypto/aes"
	"crypto/cipher"
	"crypto/hkdf"
	"crypto/sha256"
)

// The salts of Initial secrets: RFC 9001 section 5.2, RFC 9369 section 3.3.1.
var (
	saltV1 = []byte{0x38, 0x76, 0x2c, 0xf7, 0xf5, 0x59, 0x34, 0xb3, 0x4d, 0x17, 0x9a, 0xe6, 0xa4, 0xc8, 0x0c, 0xad, 0xcc, 0xbb, 0x7f, 0x0a}
	saltV2 = []byte{0x0d, 0xed, 0xe3, 0xde, 0xf7, 0x00, 0xa6, 0xdb, 0x81, 0x93, 0x81, 0xbe, 0x6e, 0x26, 0x9d, 0xcb, 0xf9, 0xbd, 0x2e, 0xd9}
)

const (
	keySize    = 16 // AES-128
	ivSize     = 12
	tagSize    = 16
	sampleSize = 16
)

// initialKeys protect the Initials of one side. They are no secret: everybody
// who sees the first datagram can make them.
type initialKeys struct {
	aead cipher.AEAD
	hp   cipher.Block // for the header
	iv   [ivSize]byte
}

// The sides, by their labels of RFC 9001 section 5.2.
const (
	clientSide = "client in"
	serverSide = "server in"
)

// newInitialKeys makes the keys of side for connections whose client first
// wrote to dcid.
func newInitialKeys(version uint32, dcid []byte, side string) (*initialKeys, error) {
	salt, prefix := saltV1, "quic "
	if version == quicV2 {
		salt, prefix = saltV2, "quicv2 "
	}
	initial, err := hkdf.Extract(sha256.New, dcid, salt)
	if err != nil {
		return nil, err
	}
	secret, err := expandLabel(initial, side, sha256.Size)
	if err != nil {
		return nil, err
	}
	var k initialKeys
	key, err := expandLabel(secret, prefix+"key", keySize)
	if err != nil {
		return nil, err
	}
	block, err := aes.NewCipher(key)
	if err != nil {
		return nil, err
	}
	if k.aead, err = cipher.NewGCM(block); err != nil {
		return nil, err
	}
	iv, err := expandLabel(secret, prefix+"iv", ivSize)
	if err != nil {
		return nil, err
	}
	copy(k.iv[:], iv)
	hp, err := expandLabel(secret, prefix+"hp", keySize)
	if err != nil {
		return nil, err
	}
	k.hp, err = aes.NewCipher(hp)
	return &k, err
}

// expandLabel is HKDF-Expand-Label of RFC 8446 section 7.1 with no context.
func expandLabel(secret []byte, label string, n int) ([]byte, error) {
	info := make([]byte, 0, 24)
	info = append(info, byte(n>>8), byte(n), byte(len("tls13 ")+len(label)))
	info = append(info, "tls13 "...)
	info = append(info, label...)
	info = append(info, 0)
	return hkdf.Expand(sha256.New, secret, string(info), n)
}

func (k *initialKeys) nonce(number uint64) []byte {
	nonce := k.iv // a copy
	for i := range 8 {
		nonce[ivSize-1-i] ^= byte(number >> (8 * i))
	}
	return nonce[:]
}

// open decrypts a packet, of which h is the header, into new memory: the bytes
// of the datagram stay as they are. largest is the highest packet number so
// far, -1 for none.
func (k *initialKeys) open(packet []byte, h *longHeader, largest int64) (payload []byte, number uint64, ok bool) {
	// The sample is taken as if the packet number had four bytes.
	if h.end-h.number < 4+sampleSize {
		return nil, 0, false
	}
	b := make([]byte, h.end)
	copy(b, packet)
	var mask [sampleSize]byte
	k.hp.Encrypt(mask[:], b[h.number+4:h.number+4+sampleSize])
	b[0] ^= mask[0] & 0x0f
	size := int(b[0]&3) + 1
	for i := range size {
		b[h.number+i] ^= mask[1+i]
		number = number<<8 | uint64(b[h.number+i])
	}
	number = fullNumber(number, size, largest)
	at := h.number + size
	payload, err := k.aead.Open(b[at:at], k.nonce(number), b[at:h.end], b[:at])
	return payload, number, err == nil
}

// fullNumber finds the packet number nearest to the one after largest that
// ends in the given bytes, RFC 9000 appendix A.3.
func fullNumber(low uint64, size int, largest int64) uint64 {
	window := int64(1) << (8 * size)
	next := largest + 1
	n := next&^(window-1) | int64(low)
	switch {
	case n+window/2 <= next:
		n += window
	case n > next+window/2 && n >= window:
		n -= window
	}
	return uint64(n)
}

// seal makes the one Initial that a server whose keys k are says before it
// goes, with payload in the clear as the frames in it.
func (k *initialKeys) seal(version uint32, dcid, scid, payload []byte) []byte {
	const number = 1 // bytes of the packet number, which is 0
	first := byte(0xc0)
	if version == quicV2 {
		first = 0xd0
	}
	for len(payload) < 4-number { // or there is nothing to sample, RFC 9001 section 5.4.2
		payload = append(payload, 0)
	}
	b := []byte{first, byte(version >> 24), byte(version >> 16), byte(version >> 8), byte(version), byte(len(dcid))}
	b = append(b, dcid...)
	b = append(b, byte(len(scid)))
	b = append(b, scid...)
	b = append(b, 0) // no token
	b = appendVarint(b, uint64(number+len(payload)+tagSize))
	at := len(b)
	b = append(b, 0)
	b = k.aead.Seal(b, k.nonce(0), payload, b)
	var mask [sampleSize]byte
	k.hp.Encrypt(mask[:], b[at+4:at+4+sampleSize])
	b[0] ^= mask[0] & 0x0f
	b[at] ^= mask[1]
	return b
}
