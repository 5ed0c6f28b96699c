package testnet

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"sync"
)

// A Stream is an endless sequence of bytes that its number determines. Every
// position can be computed by itself, so a receiver can check each byte, and
// no eight bytes come twice, so it can say where wrong bytes belong.
type Stream uint64

// The words of a stream are the outputs of the generator splitmix64. Each
// step of it can be undone, which is how locate finds a word's place.
const (
	gamma = 0x9e3779b97f4a7c15
	mul1  = 0xbf58476d1ce4e5b9
	mul2  = 0x94d049bb133111eb

	// Their inverses modulo 2^64.
	gammaInv = 0xf1de83e19937733d
	mul1Inv  = 0x96de1b173f119089
	mul2Inv  = 0x319642b2d24d8ec3
)

func (s Stream) word(i int64) uint64 {
	z := uint64(s) + uint64(i+1)*gamma
	z = (z ^ z>>30) * mul1
	z = (z ^ z>>27) * mul2
	return z ^ z>>31
}

// index returns the i for which word(i) is w. There is always one; it is a
// huge number if w is not of this stream.
func (s Stream) index(w uint64) int64 {
	w = (w ^ w>>31 ^ w>>62) * mul2Inv
	w = (w ^ w>>27 ^ w>>54) * mul1Inv
	w ^= w>>30 ^ w>>60
	return int64((w-uint64(s))*gammaInv) - 1
}

// Fill writes the stream's bytes from offset off on to p.
func (s Stream) Fill(p []byte, off int64) {
	var w [8]byte
	if skip := off % 8; skip != 0 {
		binary.LittleEndian.PutUint64(w[:], s.word(off/8))
		n := copy(p, w[skip:])
		p, off = p[n:], off+int64(n)
	}
	i := off / 8
	for ; len(p) >= 8; i++ {
		binary.LittleEndian.PutUint64(p, s.word(i))
		p = p[8:]
	}
	if len(p) > 0 {
		binary.LittleEndian.PutUint64(w[:], s.word(i))
		copy(p, w[:])
	}
}

const checkWindow = 64 << 10 // bytes compared at once

var windows = sync.Pool{New: func() any { return new([checkWindow]byte) }}

// Check returns an error that names the first offset at which p, received at
// offset off, is not the stream, and where the bytes belong if they are of
// the stream at all.
func (s Stream) Check(p []byte, off int64) error {
	buf := windows.Get().(*[checkWindow]byte)
	defer windows.Put(buf)
	for len(p) > 0 {
		n := min(len(p), len(buf))
		want := buf[:n]
		s.Fill(want, off)
		if !bytes.Equal(p[:n], want) {
			at := 0
			for p[at] == want[at] {
				at++
			}
			end := min(at+8, n)
			err := fmt.Errorf("offset %d (byte %d of MiB %d): got % x, want % x",
				off+int64(at), (off+int64(at))&(1<<20-1), (off+int64(at))>>20, p[at:end], want[at:end])
			if from, ok := s.locate(p[at:]); ok {
				err = fmt.Errorf("%w; these bytes belong at offset %d: %s", err, from, shift(off+int64(at), from))
			}
			return err
		}
		p, off = p[n:], off+int64(n)
	}
	return nil
}

func shift(at, from int64) string {
	if from > at {
		return fmt.Sprintf("%d bytes were lost", from-at)
	}
	return fmt.Sprintf("they came %d bytes ago", at-from)
}

// locate returns the offset in the stream at which p begins.
func (s Stream) locate(p []byte) (int64, bool) {
	for lead := range 8 { // bytes of p before a word's boundary
		if lead+16 > len(p) {
			return 0, false
		}
		i := s.index(binary.LittleEndian.Uint64(p[lead:]))
		if i >= 0 && i < 1<<50 && s.word(i+1) == binary.LittleEndian.Uint64(p[lead+8:]) {
			return i*8 - int64(lead), true
		}
	}
	return 0, false
}
