package udp

import (
	"bytes"
	"encoding/binary"
	"testing"

	"culvert.dev/internal/testnet"
)

// FuzzHeader reads the invariants of QUIC from any datagram: what it finds are
// parts of it, and written again they are its beginning (RFC 8999 section 5.1).
func FuzzHeader(f *testing.F) {
	f.Add(long(firstID, clientID, "name=svc.test"))
	f.Add(versionNegotiation(clientID, firstID))
	f.Add(short(serverID, "data"))
	f.Add([]byte{0xc0, 0, 0, 0, 1, 255})
	f.Add(append([]byte{0xff, 1, 2, 3, 4, 0, 255}, make([]byte, 255)...))
	f.Fuzz(func(t *testing.T, b []byte) {
		before := bytes.Clone(b)
		var version uint32
		var dcid, scid []byte
		var ok bool
		testnet.Bounded(t, 0, func() { version, dcid, scid, ok = readHeader(b) })
		if !bytes.Equal(b, before) {
			t.Error("the datagram was changed")
		}
		if !ok {
			if dcid != nil || scid != nil || version != 0 {
				t.Errorf("no long header, and yet version %#x, ids %x and %x", version, dcid, scid)
			}
			return
		}
		again := binary.BigEndian.AppendUint32([]byte{b[0]}, version)
		again = append(append(again, byte(len(dcid))), dcid...)
		again = append(append(again, byte(len(scid))), scid...)
		if b[0]&0x80 == 0 || !bytes.HasPrefix(b, again) {
			t.Errorf("version %#x, ids %x and %x of %x", version, dcid, scid, b[:min(len(b), 80)])
		}
		// A prefix is no header, or the same.
		for n := range min(len(b), len(again)) {
			if _, _, _, ok := readHeader(b[:n]); ok {
				t.Errorf("%d of %d bytes are a header", n, len(again))
			}
		}
	})
}
