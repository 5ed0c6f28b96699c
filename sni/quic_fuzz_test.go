package sni

import (
	"bytes"
	"testing"

	"culvert.dev/internal/testnet"
	"culvert.dev/tunnel"
)

// Whatever comes, no refusal is longer than what it answers (must-never N28),
// memory is bounded by what was sent, and a datagram stays as it is.
func FuzzQUIC(f *testing.F) {
	msg := hello(sniExt(svc))
	for _, d := range [][]byte{
		initial(f, 0, crypto(0, msg)),
		packet{version: quicV2, dcid: firstID, frames: crypto(0, msg), size: 1200}.seal(f),
		join(packet{dcid: firstID, scid: clientID, frames: crypto(0, msg), size: 1000}.seal(f), packet{typ: packet0RTT, dcid: firstID, frames: make([]byte, 200)}.seal(f)),
		packet{typ: packetHandshake, dcid: serverID, frames: make([]byte, 50)}.seal(f),
		packet{typ: packetRetry, dcid: clientID, scid: serverID}.seal(f),
		join([]byte{0xff, 0xff, 0, 0, 0x1d}, vec8(firstID), vec8(clientID), make([]byte, 1200)),
		join([]byte{0xc0, 0, 0, 0, 0}, vec8(firstID), vec8(clientID), make([]byte, 1200)),
		append([]byte{0x43}, make([]byte, 60)...),
		{},
	} {
		f.Add(d, d)
	}
	for _, datagrams := range captured(f) {
		f.Add(datagrams[0], datagrams[len(datagrams)-1])
	}
	f.Fuzz(func(t *testing.T, a, b []byte) {
		before := bytes.Clone(a)
		testnet.Bounded(t, 2*len(a)+2*len(b)+MaxQUICHello+8<<10, func() {
			var q QUIC
			q.ServiceDatagram(b)
			v, err := q.ReadHello(a, &tunnel.Request{})
			if v == tunnel.No && err == nil || v == tunnel.Yes && err != nil {
				t.Errorf("ReadHello = %d, %v", v, err)
			}
			if r := q.Refuse(err); err != nil && len(r) > len(a) {
				t.Errorf("%d bytes of answer to %d", len(r), len(a))
			}
			_, _ = q.ReadHello(b, &tunnel.Request{})
			_ = q.Check(b)
		})
		if !bytes.Equal(a, before) {
			t.Error("the datagram was changed")
		}
	})
}

// The frames of two Initials, which the fuzzer could not encrypt by itself.
// Of what is read as a hello, crypto/tls reads the same name; the order of the
// datagrams makes no other name of them; and what may follow says no other.
func FuzzQUICFrames(f *testing.F) {
	for _, raw := range small(f) {
		h, err := Parse(raw)
		if err != nil || h.Len > 2000 {
			continue
		}
		msg := payload(raw[:h.Len])
		f.Add(crypto(0, msg), []byte{framePing})
		f.Add(crypto(len(msg)/2, msg[len(msg)/2:]), crypto(0, msg[:len(msg)/2]))
		f.Add(join(ack(true), crypto(3, msg[3:]), make([]byte, 3), crypto(0, msg[:9])), []byte{frameClose, 0, 0, 0})
	}
	f.Fuzz(func(t *testing.T, a, b []byte) {
		if len(a)+len(b) > 8<<10 {
			return
		}
		one, two := initial(t, 0, a), initial(t, 1, b)
		read := func(datagrams ...[]byte) (*QUIC, Hello, bool) {
			q := new(QUIC)
			for _, d := range datagrams {
				if h, err := q.Feed(d); err == nil {
					return q, h, true
				}
			}
			return q, Hello{}, false
		}
		q, h, ok := read(one, two)
		if _, other, also := read(two, one); ok && also && other.Name != h.Name && !bytes.Contains(b, []byte{frameCrypto}) {
			t.Errorf("%q, in the other order %q", h.Name, other.Name)
		}
		if !ok {
			return
		}
		if name, known := oracle(records(plain(q.crypto), MaxRecord)); known && name != h.RawName {
			t.Errorf("name %q, crypto/tls reads %q", h.RawName, name)
		}
		if q.Check(two) {
			var again QUIC
			if h2, err := again.Feed(two); err == nil && h2.Name != h.Name {
				t.Errorf("%q may follow %q", h2.Name, h.Name)
			}
		}
	})
}
