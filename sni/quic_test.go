package sni

import (
	"bytes"
	"encoding/hex"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"culvert.dev/tunnel"
)

func unhex(t testing.TB, s string) []byte {
	t.Helper()
	b, err := hex.DecodeString(strings.ReplaceAll(s, " ", ""))
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// rfcHello is the CRYPTO frame of RFC 9001 appendix A.2 and RFC 9369 appendix
// A.2: a hello for example.com.
const rfcHello = "060040f1010000ed0303ebf8fa56f12939b9584a3896472ec40bb863cfd3e868" +
	"04fe3a47f06a2b69484c00000413011302010000c000000010000e00000b6578" +
	"616d706c652e636f6dff01000100000a00080006001d00170018001000070005" +
	"04616c706e000500050100000000003300260024001d00209370b2c9caa47fba" +
	"baf4559fedba753de171fa71f50f1ce15d43e994ec74d748002b000302030400" +
	"0d0010000e0403050306030203080408050806002d00020101001c0002400100" +
	"3900320408ffffffffffffffff05048000ffff07048000ffff08011001048000" +
	"75300901100f088394c8f03e51570806048000ffff"

func TestVectorsOfTheRFCs(t *testing.T) {
	dcid := unhex(t, "8394c8f03e515708")
	for _, c := range []struct {
		name       string
		version    uint32
		head, tail string // of the protected packet
	}{
		{"RFC 9001 A.2", quicV1,
			"c000000001088394c8f03e5157080000449e7b9aec34d1b1c98dd7689fb8ec11d242b123dc9bd8bab936b47d92ec356c0bab7df5976d27cd449f63300099f399",
			"e221af44860018ab0856972e194cd934"},
		{"RFC 9369 A.2", quicV2,
			"d76b3343cf088394c8f03e5157080000449ea0c95e82ffe67b6abcdb4298b485dd04de806071bf03dceebfa162e75d6c96058bdbfb127cdfcbf903388e99ad04",
			"a18b2faa745b6fe189cf772a9f84cbfc"},
	} {
		t.Run(c.name, func(t *testing.T) {
			datagram := packet{version: c.version, dcid: dcid, number: 2, frames: unhex(t, rfcHello), size: 1200}.seal(t)
			if got := hex.EncodeToString(datagram); !strings.HasPrefix(got, c.head) || !strings.HasSuffix(got, c.tail) {
				t.Fatalf("sealed as %s...%s, want %s...%s", got[:128], got[len(got)-32:], c.head, c.tail)
			}
			before := bytes.Clone(datagram)
			var q QUIC
			h, err := q.Feed(datagram)
			if err != nil || h.Name.String() != "example.com" || !slices.Equal(h.ALPN(), []string{"alpn"}) {
				t.Errorf("Feed = %q %q, %v, want example.com with alpn", h.Name, h.ALPN(), err)
			}
			if !bytes.Equal(datagram, before) {
				t.Error("Feed changed the datagram")
			}
		})
	}

	// RFC 9001 appendix A.3, what the server answers.
	raw := unhex(t, "cf000000010008f067a5502a4262b5004075c0d95a482cd0991cd25b0aac406a"+
		"5816b6394100f37a1c69797554780bb38cc5a99f5ede4cf73c3ec2493a1839b3"+
		"dbcba3f6ea46c5b7684df3548e7ddeb9c3bf9c73cc3f3bded74b562bfb19fb84"+
		"022f8ef4cdd93795d77d06edbb7aaf2f58891850abbdca3d20398c276456cbc42158407dd074ee")
	k, err := newInitialKeys(quicV1, dcid, serverSide)
	if err != nil {
		t.Fatal(err)
	}
	h, ok := readLong(raw)
	if !ok {
		t.Fatal("the server's header can't be read")
	}
	frames, number, ok := k.open(raw, &h, -1)
	if want := unhex(t, "02000000000600405a020000560303eefce7f7b37ba1d1632e96677825ddf739"); !ok || number != 1 || !bytes.HasPrefix(frames, want) {
		t.Errorf("open = %x, packet %d (%t), want %x..., packet 1", frames, number, ok, want)
	}
}

// feed gives a flow its datagrams and returns the last answer.
func feed(t testing.TB, q *QUIC, datagrams ...[]byte) (h Hello, err error) {
	t.Helper()
	for i, d := range datagrams {
		if h, err = q.Feed(d); err != ErrMore && i < len(datagrams)-1 {
			t.Fatalf("after datagram %d of %d: %v, want ErrMore", i+1, len(datagrams), err)
		}
	}
	return h, err
}

func TestQUICReadsEveryHello(t *testing.T) {
	rnd := rand.New(rand.NewPCG(1, 2))
	all := map[string][]byte{}
	for name, raw := range fixtures(t) {
		if h, err := Parse(raw); err == nil && h.NameErr == nil {
			all[name] = payload(raw[:h.Len])
		}
	}
	for _, c := range legals() {
		if h, err := Parse(c.raw); err == nil && h.Len < 8<<10 {
			all[c.name] = payload(c.raw)[:len(payload(c.raw[:h.Len]))]
		}
	}
	if len(all) < 30 {
		t.Fatalf("%d hellos, want more", len(all))
	}
	for name, msg := range all {
		t.Run(name, func(t *testing.T) {
			want, err := Parse(records(msg, 1<<14))
			if err != nil {
				t.Fatal(err)
			}
			check := func(how string, datagrams ...[]byte) {
				t.Helper()
				var q QUIC
				h, err := feed(t, &q, datagrams...)
				h.Len = want.Len
				if err != nil || !same(h, want) {
					t.Errorf("%s: %+v, %v, want %+v", how, h, err, want)
				}
			}
			size := max(len(msg)/3+1, 100)
			three := spread(t, msg, size)
			check("in order", three...)
			slices.Reverse(three)
			check("backwards", three...)
			if len(three) == 3 {
				check("twice", three[1], three[1], three[0], three[2])
			}
			if len(msg) < 1000 {
				check("at once", initial(t, 7, ack(false), crypto(0, msg), ack(true)))
				check("in small pieces", chaos(t, rnd, msg))
			}
		})
	}
}

func TestQUICVersion2AndOtherShapes(t *testing.T) {
	msg := hello(sniExt(svc), alpnExt("h3"))
	early := packet{typ: packet0RTT, dcid: firstID, scid: clientID, frames: make([]byte, 100)}
	whole := packet{dcid: firstID, scid: clientID, frames: crypto(0, msg), size: 1200}
	for name, datagrams := range map[string][][]byte{
		"version 2":               {func() []byte { p := whole; p.version = quicV2; return p.seal(t) }()},
		"a token":                 {func() []byte { p := whole; p.token = bytes.Repeat([]byte{9}, 70); return p.seal(t) }()},
		"no source id":            {func() []byte { p := whole; p.scid = nil; return p.seal(t) }()},
		"early data behind":       {join(func() []byte { p := whole; p.size = 1000; return p.seal(t) }(), early.seal(t), make([]byte, 200))},
		"early data before":       {initial(t, 0, crypto(0, msg[:50])), early.seal(t), initial(t, 1, crypto(50, msg[50:]))},
		"two Initials coalesced":  {join(packet{dcid: firstID, scid: clientID, frames: crypto(90, msg[90:]), size: 600}.seal(t), packet{dcid: firstID, scid: clientID, number: 1, frames: crypto(0, msg[:90]), size: 600}.seal(t))},
		"large datagram":          {packet{dcid: firstID, scid: clientID, frames: crypto(0, msg), size: 9000}.seal(t)},
		"packet number of a wrap": {packet{dcid: firstID, scid: clientID, number: 1 << 30, frames: crypto(0, msg), size: 1200}.seal(t)},
		"overlap":                 {initial(t, 0, crypto(0, msg[:100]), crypto(50, msg[50:]))},
		"an empty CRYPTO frame":   {initial(t, 0, crypto(0, nil), crypto(0, msg), crypto(5000, nil))},
	} {
		t.Run(name, func(t *testing.T) {
			var q QUIC
			h, err := feed(t, &q, datagrams...)
			if err != nil || h.Name.String() != svc || !slices.Equal(h.ALPN(), []string{"h3"}) {
				t.Errorf("%q %q, %v, want %q with h3", h.Name, h.ALPN(), err, svc)
			}
		})
	}
}

// An answer that is final stays, whatever comes.
func TestQUICRefuses(t *testing.T) {
	msg := hello(sniExt(svc))
	nine := spread(t, hello(padding(3000), sniExt(svc)), 300)
	garbled := initial(t, 0, crypto(0, msg))
	garbled[700] ^= 1
	for _, c := range []struct {
		name      string
		datagrams [][]byte
		reason    tunnel.Reason
		text      string
		code      uint64 // of CONNECTION_CLOSE, 0 for no answer
	}{
		{"nothing", [][]byte{{}}, tunnel.BadPreamble, "empty", 0},
		{"a DNS query", [][]byte{join(make([]byte, 12), []byte("\x07example\x04test\x00\x00\x01\x00\x01"))}, tunnel.BadPreamble, "no long header", 0},
		{"DTLS", [][]byte{join([]byte{22, 0xfe, 0xfd}, make([]byte, 300))}, tunnel.BadPreamble, "no long header", 0},
		{"a long header cut off", [][]byte{{0xc0, 0, 0, 0, 1, 8, 1, 2}}, tunnel.BadPreamble, "cut off", 0},
		{"Version Negotiation", [][]byte{join([]byte{0xc0, 0, 0, 0, 0}, vec8(firstID), vec8(clientID), make([]byte, 1200))}, tunnel.BadPreamble, "Version Negotiation", 0},
		{"a length that overruns", [][]byte{initial(t, 0, crypto(0, msg))[:1199]}, tunnel.BadPreamble, "malformed header or length", 0},
		{"a short datagram", [][]byte{packet{dcid: firstID, scid: clientID, frames: crypto(0, msg), size: 1199}.seal(t)}, tunnel.BadPreamble, "1199 bytes", 0},
		{"a short connection id", [][]byte{packet{dcid: firstID[:7], frames: crypto(0, msg), size: 1200}.seal(t)}, tunnel.BadPreamble, "7 bytes", 0},
		{"a long connection id", [][]byte{packet{dcid: make([]byte, 21), frames: crypto(0, msg), size: 1200}.seal(t)}, tunnel.BadPreamble, "malformed header", 0},
		{"no fixed bit", [][]byte{func() []byte { b := initial(t, 0, crypto(0, msg)); b[0] &^= 0x40; return b }()}, tunnel.BadPreamble, "fixed bit", 0},
		{"garbled", [][]byte{garbled}, tunnel.BadPreamble, "does not decrypt", 0},
		{"the server's own Initial", [][]byte{packet{dcid: firstID, side: serverSide, frames: crypto(0, msg), size: 1200}.seal(t)}, tunnel.BadPreamble, "does not decrypt", 0},
		{"Handshake first", [][]byte{packet{typ: packetHandshake, dcid: firstID, frames: make([]byte, 1200)}.seal(t)}, tunnel.BadPreamble, "no connection we know", 0},
		{"early data first", [][]byte{packet{typ: packet0RTT, dcid: firstID, frames: make([]byte, 1200)}.seal(t)}, tunnel.BadPreamble, "no connection we know", 0},
		{"Retry", [][]byte{join(packet{typ: packetRetry, dcid: firstID}.seal(t), make([]byte, 1200))}, tunnel.BadPreamble, "no connection we know", 0},
		{"another connection coalesced", [][]byte{join(packet{dcid: firstID, frames: crypto(0, msg), size: 600}.seal(t), packet{dcid: serverID, frames: crypto(0, msg), size: 600}.seal(t))}, tunnel.BadPreamble, "mixed with others", 0},
		{"no CRYPTO frame in ten datagrams", slices.Repeat([][]byte{initial(t, 0, []byte{framePing})}, 10), tunnel.BadHello, "10 datagrams", 0x12f},
		{"a frame that must not be there", [][]byte{initial(t, 0, []byte{0x08, 0, 1, 1})}, tunnel.BadHello, "malformed or must not", 0x0a},
		{"a frame cut off", [][]byte{packet{dcid: firstID, scid: clientID, frames: join(make([]byte, 1100), []byte{frameCrypto, 0, 0x40})}.seal(t)}, tunnel.BadPreamble, "bytes, want at least", 0},
		{"an ACK cut off", [][]byte{initial(t, 0, make([]byte, 1140), []byte{frameAck, 0, 0, 0x3f, 0})}, tunnel.BadHello, "malformed", 0x0a},
		{"a CRYPTO frame that overruns", [][]byte{initial(t, 0, []byte{frameCrypto, 0, 0x7f, 0xff, 1})}, tunnel.BadHello, "malformed", 0x0a},
		{"a CRYPTO frame far away", [][]byte{initial(t, 0, crypto(MaxQUICHello, []byte{1}))}, tunnel.BadHello, "limit 12288", 0x12f},
		{"a CRYPTO frame at the end of the world", [][]byte{initial(t, 0, join([]byte{frameCrypto}, bytes.Repeat([]byte{0xff}, 8), []byte{1, 1}))}, tunnel.BadHello, "malformed", 0x0a},
		{"a hello that says it is too large", [][]byte{initial(t, 0, crypto(0, join([]byte{1}, u24(MaxQUICHello-3))))}, tunnel.BadHello, "limit 12288", 0x12f},
		{"bytes that come twice and differ", [][]byte{initial(t, 0, crypto(0, msg[:60])), initial(t, 1, crypto(50, join([]byte{msg[50] ^ 1}, msg[51:])))}, tunnel.BadHello, "differ", 0x0a},
		{"too many pieces", [][]byte{initial(t, 0, everyOther(1)), initial(t, 1, everyOther(601))}, tunnel.BadHello, "256 pieces", 0x0a},
		{"another message", [][]byte{initial(t, 0, crypto(0, []byte{2, 0, 0, 5}))}, tunnel.BadHello, "type 2", 0x10a},
		{"two names", [][]byte{initial(t, 0, crypto(0, hello(sniExt(svc, svc))))}, tunnel.BadHello, "more than one server name", 0x12f},
		{"an extension twice", [][]byte{initial(t, 0, crypto(0, hello(sniExt(svc), sniExt(svc))))}, tunnel.BadHello, "occurs twice", 0x12f},
		{"lengths that overrun", [][]byte{initial(t, 0, crypto(0, hello(ext(0, u16(99)))))}, tunnel.BadHello, "are left", 0x132},
		{"the client closes", [][]byte{nine[0], initial(t, 9, []byte{frameClose, 0, 0, 0})}, tunnel.Gone, "closed", 0},
		{"no name", [][]byte{initial(t, 0, crypto(0, hello(alpnExt("h3"))))}, tunnel.NoSNI, "no server name", 0x170},
		{"an address", [][]byte{initial(t, 0, crypto(0, hello(sniExt("192.0.2.1"))))}, tunnel.NoSNI, "address", 0x170},
		{"a name with a NUL", [][]byte{initial(t, 0, crypto(0, hello(sniExt("a.test\x00.b"))))}, tunnel.BadHello, "name has", 0x12f},
	} {
		t.Run(c.name, func(t *testing.T) {
			var q QUIC
			var v tunnel.Verdict
			var err error
			sent := 0
			for _, d := range c.datagrams {
				sent += len(d)
				if v, err = q.ReadHello(d, &tunnel.Request{}); v != tunnel.More {
					break
				}
			}
			if v != tunnel.No || tunnel.ReasonOf(err) != c.reason || !strings.Contains(err.Error(), c.text) {
				t.Fatalf("ReadHello = %d, %v (%s), want No, %q (%s)", v, err, tunnel.ReasonOf(err), c.text, c.reason)
			}
			checkClose(t, q.Refuse(err), c.code, sent)
			if again, err := q.ReadHello(initial(t, 99, crypto(0, msg)), &tunnel.Request{}); c.reason == tunnel.BadHello && again != tunnel.No {
				t.Errorf("a good datagram after it: %d, %v", again, err)
			}
		})
	}
}

// everyOther is CRYPTO in single bytes from the given place on, with gaps between.
func everyOther(at int) []byte {
	var b []byte
	for end := at + 400; at < end; at += 2 {
		b = append(b, crypto(at, []byte{byte(at)})...)
	}
	return b
}

// checkClose opens the answer to a client as the client would.
func checkClose(t *testing.T, datagram []byte, code uint64, sent int) {
	t.Helper()
	if code == 0 {
		if datagram != nil {
			t.Errorf("the client hears %x, want nothing", datagram)
		}
		return
	}
	h, ok := readLong(datagram)
	if !ok || h.typ != packetInitial || !bytes.Equal(h.dcid, clientID) || len(h.scid) != 8 || h.end != len(datagram) {
		t.Fatalf("the client hears %x (%+v), want an Initial to %x", datagram, h, clientID)
	}
	if len(datagram) > 128 || len(datagram) > sent { // must-never N28
		t.Errorf("%d bytes of answer to %d", len(datagram), sent)
	}
	k, err := newInitialKeys(h.version, firstID, serverSide)
	if err != nil {
		t.Fatal(err)
	}
	frames, number, ok := k.open(datagram, &h, -1)
	if !ok || number != 0 || len(frames) < 4 || frames[0] != frameClose {
		t.Fatalf("the client opens %x (%t), packet %d, want a CONNECTION_CLOSE", frames, ok, number)
	}
	if got, _ := varint(frames[1:]); got != code {
		t.Errorf("CONNECTION_CLOSE with %#x, want %#x", got, code)
	}
}

// TestQUICRefusals is must-never N28 too: no answer is longer than what it
// answers, whose source has proven nothing.
func TestQUICRefusals(t *testing.T) {
	for _, version := range []uint32{quicV1, quicV2} {
		for why, code := range map[tunnel.Reason]uint64{
			tunnel.NoRoute: 0x170, tunnel.NotExposed: 0x170, tunnel.Denied: 0x131, tunnel.Prohibited: 0x131,
			tunnel.DialFailed: 2, tunnel.NoEndpoint: 2, tunnel.Overload: 2, tunnel.Drain: 2, tunnel.Unsupported: 2,
			tunnel.HelloTimeout: 0, tunnel.Gone: 0,
		} {
			t.Run(fmt.Sprint(version, why), func(t *testing.T) {
				var q QUIC
				d := packet{version: version, dcid: firstID, scid: clientID, frames: crypto(0, hello(sniExt(svc))), size: 1200}.seal(t)
				if _, err := q.Feed(d); err != nil {
					t.Fatal(err)
				}
				checkClose(t, q.Refuse(tunnel.Refusef(why, "no")), code, len(d))
			})
		}
	}
}

func TestVersionNegotiation(t *testing.T) {
	ask := func(version uint32, size int) []byte {
		b := join([]byte{0xff}, u16(int(version>>16)), u16(int(version)), vec8(firstID), vec8(clientID))
		return append(b, make([]byte, size-len(b))...)
	}
	var q QUIC
	d := ask(0xff00001d, 1200)
	v, err := q.ReadHello(d, &tunnel.Request{})
	if v != tunnel.No || tunnel.ReasonOf(err) != tunnel.Unsupported {
		t.Fatalf("ReadHello = %d, %v, want No for unsupported", v, err)
	}
	// RFC 8999 section 6: version 0, the client's ids in places changed, versions.
	want := join([]byte{0, 0, 0, 0}, vec8(clientID), vec8(firstID), []byte{0, 0, 0, 1, 0x6b, 0x33, 0x43, 0xcf})
	if got := q.Refuse(err); len(got) == 0 || got[0]&0x80 == 0 || !bytes.Equal(got[1:], want) {
		t.Errorf("Refuse = %x, want %x", got, want)
	}
	long := ask(0x1a2a3a4a, 1200)
	long[5] = 255 // an id longer than any of ours, which is legal in another version
	if got := VersionNegotiation(long); len(got) < 255 || len(got) > 1200 {
		t.Errorf("%d bytes of answer to ids of 255 bytes", len(got))
	}
	for name, d := range map[string][]byte{
		"a datagram of 1199 bytes": ask(0xff00001d, 1199),
		"Version Negotiation":      ask(0, 1300),
		"a short header":           append([]byte{0x40}, make([]byte, 1300)...),
		"ids that overrun":         join([]byte{0xff, 1, 2, 3, 4, 20}, make([]byte, 8)),
	} {
		if got := VersionNegotiation(d); got != nil {
			t.Errorf("%s: %x, want nothing", name, got)
		}
	}
}

// What the client sends once it is routed must not say another hello.
func TestQUICCheck(t *testing.T) {
	msg, other := hello(sniExt(svc)), hello(sniExt("pri.example.test"))
	at := bytes.Index(msg, []byte(svc))
	to := func(id, keyID []byte, frames ...[]byte) []byte {
		return packet{dcid: id, keyID: keyID, scid: clientID, number: 5, frames: join(frames...), size: 1200}.seal(t)
	}
	handshake := packet{typ: packetHandshake, dcid: serverID, scid: clientID, frames: make([]byte, 50)}.seal(t)
	short := append([]byte{0x43}, make([]byte, 60)...)
	retry := packet{typ: packetRetry, dcid: clientID, scid: serverID}.seal(t)
	small := packet{dcid: serverID, keyID: firstID, scid: clientID, frames: ack(false)}.seal(t)
	v2 := packet{version: quicV2, dcid: serverID, keyID: firstID, frames: ack(false), size: 1200}.seal(t)
	for _, c := range []struct {
		name  string
		heard []byte
		sent  [][]byte // all but the last may go
		ok    bool
	}{
		{"the same hello again", nil, [][]byte{to(firstID, nil, crypto(0, msg))}, true},
		{"a part of it", nil, [][]byte{to(firstID, nil, crypto(20, msg[20:]))}, true},
		{"to the server's id", nil, [][]byte{to(serverID, firstID, ack(false))}, true},
		{"the answer to a HelloRetryRequest", nil, [][]byte{to(serverID, firstID, crypto(len(msg), msg))}, true},
		{"a short header", nil, [][]byte{short}, true},
		{"Handshake", nil, [][]byte{handshake}, true},
		{"Handshake behind an Initial", nil, [][]byte{join(to(serverID, firstID, ack(false)), handshake, short)}, true},
		{"early data", nil, [][]byte{packet{typ: packet0RTT, dcid: firstID, frames: make([]byte, 50)}.seal(t)}, true},
		{"CONNECTION_CLOSE", nil, [][]byte{to(serverID, firstID, []byte{frameClose, 0, 0, 0})}, true},
		{"after a Retry", retry, [][]byte{to(serverID, nil, crypto(0, msg))}, true},
		{"version 2 chosen by the server", nil, [][]byte{v2}, true},
		{"another hello", nil, [][]byte{to(firstID, nil, crypto(0, other))}, false},
		{"another hello to the server's id", nil, [][]byte{to(serverID, firstID, crypto(0, other))}, false},
		{"another hello in part", nil, [][]byte{to(firstID, nil, crypto(at, other[at:at+1]))}, false},
		{"another hello behind the same", nil, [][]byte{to(firstID, nil, crypto(0, msg), crypto(0, other))}, false},
		{"another hello after a Retry", retry, [][]byte{to(serverID, nil, crypto(0, other))}, false},
		{"keys of the server's id without a Retry", nil, [][]byte{to(serverID, nil, crypto(0, msg))}, false},
		{"another connection coalesced", nil, [][]byte{join(to(firstID, nil, crypto(0, msg)), to(serverID, nil, crypto(0, other)))}, false},
		{"another id coalesced", nil, [][]byte{join(to(firstID, nil, crypto(0, msg)), to(serverID, firstID, ack(false)))}, false},
		{"another connection behind Handshake", nil, [][]byte{join(handshake, to(firstID, nil, crypto(0, other)))}, false},
		{"an Initial after Handshake", nil, [][]byte{handshake, to(serverID, firstID, ack(false))}, false},
		{"an Initial in a small datagram", nil, [][]byte{small}, false},
		{"a version we can't read", nil, [][]byte{join([]byte{0xc3, 0xff, 0, 0, 0x1d}, vec8(firstID), vec8(clientID), make([]byte, 1200))}, false},
		{"a client's Retry", nil, [][]byte{retry}, false},
		{"a header cut off", nil, [][]byte{{0xc3, 0, 0, 0, 1}}, false},
		{"an empty datagram", nil, [][]byte{{}}, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			var q QUIC
			if _, err := q.Feed(initial(t, 0, crypto(0, msg))); err != nil {
				t.Fatal(err)
			}
			q.ServiceDatagram(c.heard)
			q.ServiceDatagram(packet{typ: packetHandshake, dcid: clientID, scid: serverID}.seal(t))
			for i, d := range c.sent {
				want := c.ok || i < len(c.sent)-1
				if got := q.Check(d); got != want {
					t.Errorf("datagram %d: Check = %t, want %t", i, got, want)
				}
			}
		})
	}
}

// Strays are dropped and do no harm.
func TestQUICStrays(t *testing.T) {
	msg := hello(sniExt(svc))
	var q QUIC
	if _, err := q.Feed(initial(t, 0, crypto(0, msg[:60]))); err != ErrMore {
		t.Fatal(err)
	}
	garbled := initial(t, 1, crypto(60, msg[60:]))
	garbled[1100] ^= 1
	for name, d := range map[string][]byte{
		"nothing":            {},
		"a short header":     append([]byte{0x40}, make([]byte, 50)...),
		"garbled":            garbled,
		"another connection": packet{dcid: serverID, frames: crypto(60, msg[60:]), size: 1200}.seal(t),
		"Handshake":          packet{typ: packetHandshake, dcid: firstID, frames: make([]byte, 1200)}.seal(t),
		"another version":    join([]byte{0xc3, 0xff, 0, 0, 0x1d}, vec8(firstID), vec8(clientID), make([]byte, 1200)),
	} {
		if v, err := q.ReadHello(d, &tunnel.Request{}); v != tunnel.More || !errors.Is(err, ErrStray) {
			t.Errorf("%s: %d, %v, want More and ErrStray", name, v, err)
		}
	}
	var req tunnel.Request
	if v, err := q.ReadHello(initial(t, 1, crypto(60, msg[60:])), &req); v != tunnel.Yes || err != nil || req.Name.String() != svc {
		t.Errorf("the rest: %d, %v, %q, want Yes and %q", v, err, req.Name, svc)
	}
}
