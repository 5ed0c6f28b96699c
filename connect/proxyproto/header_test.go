package proxyproto

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"net/netip"
	"reflect"
	"strings"
	"testing"

	"culvert.dev/internal/testnet"
)

func TestMain(m *testing.M) { testnet.GoroutinesEnd(m) }

func ap(s string) netip.AddrPort { return netip.MustParseAddrPort(s) }

// v2 is a header of version 2.
func v2(verCmd, family byte, parts ...[]byte) []byte {
	body := bytes.Join(parts, nil)
	b := append(bytes.Clone(signV2), verCmd, family)
	b = binary.BigEndian.AppendUint16(b, uint16(len(body)))
	return append(b, body...)
}

// tlv is a value.
func tlv(kind byte, value string) []byte {
	b := binary.BigEndian.AppendUint16([]byte{kind}, uint16(len(value)))
	return append(b, value...)
}

// withCRC is a header that ends with a checksum, whose place stands there.
func withCRC(b []byte) []byte {
	binary.BigEndian.PutUint32(b[len(b)-4:], checksum(b))
	return b
}

var (
	ends4 = []byte{198, 51, 100, 7, 192, 0, 2, 1, 0xdd, 0xd5, 0x01, 0xbb}
	ends6 = append(append(netip.MustParseAddr("2001:db8::7").AsSlice(), netip.MustParseAddr("2001:db8::1").AsSlice()...), 0xdd, 0xd5, 0x01, 0xbb)
	place = tlv(3, "\x00\x00\x00\x00")
)

// A goodRow is a header and what it says.
type goodRow struct {
	name string
	in   []byte
	want Header
}

var goodRows = []goodRow{
	{"v1 TCP4", []byte("PROXY TCP4 198.51.100.7 192.0.2.1 56789 443\r\n"), Header{Version: 1, Source: ap("198.51.100.7:56789"), Destination: ap("192.0.2.1:443")}},
	{"v1 TCP6", []byte("PROXY TCP6 2001:db8::7 2001:db8::1 56789 443\r\n"), Header{Version: 1, Source: ap("[2001:db8::7]:56789"), Destination: ap("[2001:db8::1]:443")}},
	{"v1 TCP6 mapped", []byte("PROXY TCP6 ::ffff:198.51.100.7 2001:db8::1 56789 443\r\n"), Header{Version: 1, Source: ap("198.51.100.7:56789"), Destination: ap("[2001:db8::1]:443")}},
	{"v1 longest", []byte("PROXY TCP6 ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff ffff:ffff:ffff:ffff:ffff:ffff:ffff:fff0 65535 65535\r\n"), Header{Version: 1, Source: ap("[ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff]:65535"), Destination: ap("[ffff:ffff:ffff:ffff:ffff:ffff:ffff:fff0]:65535")}},
	{"v1 UNKNOWN", []byte("PROXY UNKNOWN\r\n"), Header{Version: 1}},
	{"v1 UNKNOWN with more", []byte("PROXY UNKNOWN ffff:: ffff:: 1 2 whatever\r\n"), Header{Version: 1}},
	{"v2 LOCAL", v2(0x20, 0), Header{Version: 2, Local: true}},
	{"v2 LOCAL with a family and no address", v2(0x20, 0x11), Header{Version: 2, Local: true}},
	{"v2 LOCAL with addresses", v2(0x20, 0x11, ends4), Header{Version: 2, Local: true}},
	{"v2 LOCAL with what is no value", v2(0x20, 0, []byte{1, 2}), Header{Version: 2, Local: true}},
	{"v2 UNSPEC", v2(0x21, 0), Header{Version: 2}},
	{"v2 UNSPEC with a name", withCRC(v2(0x21, 0, tlv(2, "svc.test"), place)), Header{Version: 2, Authority: "svc.test"}},
	{"v2 TCP4", v2(0x21, 0x11, ends4), Header{Version: 2, Source: ap("198.51.100.7:56789"), Destination: ap("192.0.2.1:443")}},
	{"v2 TCP6", v2(0x21, 0x21, ends6), Header{Version: 2, Source: ap("[2001:db8::7]:56789"), Destination: ap("[2001:db8::1]:443")}},
	{"v2 Unix", v2(0x21, 0x31, make([]byte, 216)), Header{Version: 2}},
	{
		"v2 with values", withCRC(v2(0x21, 0x11, ends4, tlv(1, "h2"), tlv(2, "Svc.Test"), tlv(5, "id-7"), place)),
		Header{Version: 2, Source: ap("198.51.100.7:56789"), Destination: ap("192.0.2.1:443"), ALPN: "h2", Authority: "Svc.Test", UniqueID: "id-7"},
	},
	{"v2 with a checksum", withCRC(v2(0x21, 0x21, ends6, place)), Header{Version: 2, Source: ap("[2001:db8::7]:56789"), Destination: ap("[2001:db8::1]:443")}},
	{"v2 with empty values", v2(0x21, 0x11, ends4, tlv(5, ""), tlv(2, ""), tlv(1, "")), Header{Version: 2, Source: ap("198.51.100.7:56789"), Destination: ap("192.0.2.1:443")}},
	{
		"v2 with values nobody knows", v2(0x21, 0x11, ends4, tlv(0xe0, "x"), tlv(0xe0, "y"), tlv(0xff, ""), tlv(0x77, "z"), tlv(4, strings.Repeat("\x00", 64)), tlv(4, "")),
		Header{Version: 2, Source: ap("198.51.100.7:56789"), Destination: ap("192.0.2.1:443")},
	},
	{ // client=7, verify=0, a CN
		"v2 with an identity", v2(0x21, 0x11, ends4, tlv(0x20, "\x07\x00\x00\x00\x00"+string(tlv(0x22, "root")))),
		Header{Version: 2, Source: ap("198.51.100.7:56789"), Destination: ap("192.0.2.1:443"), SSL: &SSL{Certificate: true, Session: true, Verified: true, CN: "root"}},
	},
	{
		"v2 with all of SSL and an assertion", withCRC(v2(0x21, 0x11, ends4, tlv(0x20, "\x03\x00\x00\x00\x00"+string(bytes.Join([][]byte{
			tlv(0x21, "TLSv1.3"), tlv(0x22, "web"), tlv(0x23, "TLS_AES_128_GCM_SHA256"), tlv(0x24, "ecdsa-with-SHA256"), tlv(0x25, "EC256"), tlv(0x26, "X25519"), tlv(0x28, "\x30\x00"),
		}, nil))), tlv(0xe1, "a.b.c"), place)),
		Header{Version: 2, Source: ap("198.51.100.7:56789"), Destination: ap("192.0.2.1:443"), Assertion: "a.b.c", SSL: &SSL{
			Certificate: true, Verified: true, Version: "TLSv1.3", CN: "web", Cipher: "TLS_AES_128_GCM_SHA256", SigAlg: "ecdsa-with-SHA256", KeyAlg: "EC256", ClientCertificate: []byte{0x30, 0},
		}},
	},
	{
		"v2 with a caller", withCRC(v2(0x21, 0x11, ends4, tlv(0xe2, "spiffe://corp.example/a"), place)),
		Header{Version: 2, Source: ap("198.51.100.7:56789"), Destination: ap("192.0.2.1:443"), Caller: "spiffe://corp.example/a"},
	},
	{
		"v2 with a certificate that was not verified", v2(0x21, 0x11, ends4, tlv(0x20, "\x03\x00\x00\x00\x12")),
		Header{Version: 2, Source: ap("198.51.100.7:56789"), Destination: ap("192.0.2.1:443"), SSL: &SSL{Certificate: true}},
	},
	{
		"v2 without TLS", v2(0x21, 0x11, ends4, tlv(0x20, "\x00\x00\x00\x00\x00"+string(tlv(0x22, "root")))),
		Header{Version: 2, Source: ap("198.51.100.7:56789"), Destination: ap("192.0.2.1:443")},
	},
	{"v2 largest", v2(0x21, 0x11, ends4, tlv(0xe0, strings.Repeat("x", maxV2-12-3))), Header{Version: 2, Source: ap("198.51.100.7:56789"), Destination: ap("192.0.2.1:443")}},
}

// What HAProxy 2.6.12 sends with "send-proxy-v2 check-send-proxy
// proxy-v2-options crc32c,authority,unique-id,ssl" for a client, and for a
// health check.
const (
	haproxyHeader = "0d0a0d0a000d0a515549540a2111004c7f0000017f000001842246a10300047c079a3601000268320200107376632e6578616d706c652e74657374" +
		"05000c69642d3132372e302e302e3120000f0100000000210007544c5376312e33"
	haproxyCheck = "0d0a0d0a000d0a515549540a2000000f030004889da1df2000050000000000"
)

var badRows = []struct {
	name string
	in   []byte
	says string
}{
	{"nothing of it", []byte("\x16\x03\x01\x02\x00"), "neither version"},
	{"HTTP", []byte("GET / HTTP/1.1\r\n"), "neither version"},
	{"v1 in lower case", []byte("proxy TCP4 198.51.100.7 192.0.2.1 56789 443\r\n"), "neither version"},
	{"v1 without a space", []byte("PROXYTCP4 198.51.100.7 192.0.2.1 56789 443\r\n"), "neither version"},
	{"v1 without an end", []byte("PROXY UNKNOWN" + strings.Repeat(" ", 94)), "no end within 107"},
	{"v1 end at 108", []byte("PROXY UNKNOWN" + strings.Repeat(" ", 93) + "\r\n"), "no end within 107"},
	{"v1 LF alone", []byte("PROXY TCP4 198.51.100.7 192.0.2.1 56789 443\n"), `end with \r\n`},
	{"v1 UDP", []byte("PROXY UDP4 198.51.100.7 192.0.2.1 56789 443\r\n"), "family"},
	{"v1 tcp4", []byte("PROXY tcp4 198.51.100.7 192.0.2.1 56789 443\r\n"), "family"},
	{"v1 extra space", []byte("PROXY TCP4  198.51.100.7 192.0.2.1 56789 443\r\n"), "family"},
	{"v1 space at the end", []byte("PROXY TCP4 198.51.100.7 192.0.2.1 56789 443 \r\n"), "family"},
	{"v1 too few", []byte("PROXY TCP4 198.51.100.7 192.0.2.1 56789\r\n"), "family"},
	{"v1 IPv6 as TCP4", []byte("PROXY TCP4 2001:db8::7 2001:db8::1 56789 443\r\n"), "address"},
	{"v1 IPv4 as TCP6", []byte("PROXY TCP6 198.51.100.7 192.0.2.1 56789 443\r\n"), "address"},
	{"v1 short address", []byte("PROXY TCP4 127.1 192.0.2.1 56789 443\r\n"), "address"},
	{"v1 leading zero in an address", []byte("PROXY TCP4 198.051.100.7 192.0.2.1 56789 443\r\n"), "address"},
	{"v1 zone", []byte("PROXY TCP6 fe80::1%eth0 2001:db8::1 56789 443\r\n"), "address"},
	{"v1 leading zero in a port", []byte("PROXY TCP4 198.51.100.7 192.0.2.1 056789 443\r\n"), "port"},
	{"v1 port over 65535", []byte("PROXY TCP4 198.51.100.7 192.0.2.1 65536 443\r\n"), "port"},
	{"v1 port with a sign", []byte("PROXY TCP4 198.51.100.7 192.0.2.1 +5678 443\r\n"), "port"},

	{"v2 version 1", v2(0x11, 0x11, ends4), "version and command are 0x11"},
	{"v2 version 3", v2(0x31, 0x11, ends4), "version and command are 0x31"},
	{"v2 command 2", v2(0x22, 0x11, ends4), "version and command are 0x22"},
	{"v2 command 15", v2(0x2f, 0x11, ends4), "version and command are 0x2f"},
	{"v2 UDP over IPv4", v2(0x21, 0x12, ends4), "none of a stream"},
	{"v2 UDP over IPv6", v2(0x21, 0x22, ends6), "none of a stream"},
	{"v2 Unix datagram", v2(0x21, 0x32, make([]byte, 216)), "none of a stream"},
	{"v2 family 4", v2(0x21, 0x41, ends4), "family"},
	{"v2 protocol 3", v2(0x21, 0x13, ends4), "family"},
	{"v2 protocol 0", v2(0x21, 0x10, ends4), "family"},
	{"v2 LOCAL of family 4", v2(0x20, 0x41), "family"},
	{"v2 no address", v2(0x21, 0x11), "length"},
	{"v2 short IPv4", v2(0x21, 0x11, ends4[:11]), "length"},
	{"v2 short IPv6", v2(0x21, 0x21, ends6[:35]), "length"},
	{"v2 short Unix", v2(0x21, 0x31, make([]byte, 215)), "length"},
	{"v2 too large", v2(0x21, 0x11, ends4, tlv(0xe0, strings.Repeat("x", maxV2-12-2))), "limit 4096"},
	{"v2 largest TLV there is", v2(0x21, 0x11, ends4, tlv(0xe0, strings.Repeat("x", 65535-15))), "limit 4096"},
	{"v2 LOCAL too large", v2(0x20, 0, make([]byte, 5000)), "limit 4096"},
	{"v2 length alone of 65535", append(bytes.Clone(signV2), 0x21, 0x11, 0xff, 0xff), "limit 4096"},
	{"v2 TLV over the end", v2(0x21, 0x11, ends4, []byte{0xe0, 0, 2, 'x'}), "truncated"},
	{"v2 TLV over the end by much", v2(0x21, 0x11, ends4, []byte{0xe0, 0xff, 0xff, 'x'}), "truncated"},
	{"v2 TLV without a length", v2(0x21, 0x11, ends4, []byte{0xe0}), "truncated"},
	{"v2 TLV with half a length", v2(0x21, 0x11, ends4, []byte{0xe0, 0}), "truncated"},
	{"v2 two authorities", v2(0x21, 0x11, ends4, tlv(2, "a.test"), tlv(2, "b.test")), "repeated"},
	{"v2 two empty authorities", v2(0x21, 0x11, ends4, tlv(2, ""), tlv(2, "")), "repeated"},
	{"v2 two ALPNs", v2(0x21, 0x11, ends4, tlv(1, "h2"), tlv(1, "h2")), "repeated"},
	{"v2 two ids", v2(0x21, 0x11, ends4, tlv(5, "a"), tlv(5, "a")), "repeated"},
	{"v2 two checksums", withCRC(v2(0x21, 0x11, ends4, place, place)), "checksum"},
	{"v2 two identities", v2(0x21, 0x11, ends4, tlv(0x20, "\x00\x00\x00\x00\x00"), tlv(0x20, "\x00\x00\x00\x00\x00")), "repeated"},
	{"v2 short identity", v2(0x21, 0x11, ends4, tlv(0x20, "\x01\x00\x00\x00")), "has 4 bytes, want at least 5"},
	{"v2 identity with a value over its end", v2(0x21, 0x11, ends4, tlv(0x20, "\x01\x00\x00\x00\x00\x22\x00\x05x")), "truncated"},
	{"v2 identity with two names", v2(0x21, 0x11, ends4, tlv(0x20, "\x07\x00\x00\x00\x00"+string(tlv(0x22, "web"))+string(tlv(0x22, "root")))), "value 0x22 of the value SSL is repeated"},
	{"v2 identity with two certificates", v2(0x21, 0x11, ends4, tlv(0x20, "\x07\x00\x00\x00\x00"+string(tlv(0x28, "a"))+string(tlv(0x28, "a")))), "value 0x28 of the value SSL is repeated"},
	{"v2 identity not UTF-8", v2(0x21, 0x11, ends4, tlv(0x20, "\x07\x00\x00\x00\x00"+string(tlv(0x22, "\xff")))), "value 0x22 of the value SSL is not UTF-8"},
	{"v2 two assertions", v2(0x21, 0x11, ends4, tlv(0xe1, "a"), tlv(0xe1, "b")), "repeated"},
	{"v2 assertion of 1537 bytes", v2(0x21, 0x11, ends4, tlv(0xe1, strings.Repeat("x", 1537))), "limit 1536"},
	{"v2 two callers", v2(0x21, 0x11, ends4, tlv(0xe2, "a"), tlv(0xe2, "b")), "repeated"},
	{"v2 caller of 2049 bytes", v2(0x21, 0x11, ends4, tlv(0xe2, strings.Repeat("x", 2049))), "limit 2048"},
	{"v2 caller with a line feed", v2(0x21, 0x11, ends4, tlv(0xe2, "a\nb")), "bytes that no id has"},
	{"v2 caller not UTF-8", v2(0x21, 0x11, ends4, tlv(0xe2, "\xff")), "bytes that no id has"},
	{"v2 authority not UTF-8", v2(0x21, 0x11, ends4, tlv(2, "a\xff.test")), "not UTF-8"},
	{"v2 id of 129 bytes", v2(0x21, 0x11, ends4, tlv(5, strings.Repeat("x", 129))), "limit 128"},
	{"v2 checksum of zeros", v2(0x21, 0x11, ends4, place), "checksum"},
	{"v2 checksum of another header", flip(withCRC(v2(0x21, 0x11, ends4, place)), 16), "checksum"},
	{"v2 checksum in other order", reverse(withCRC(v2(0x21, 0x11, ends4, place))), "checksum"},
	{"v2 checksum of 3 bytes", v2(0x21, 0x11, ends4, tlv(3, "abc")), "checksum of 3 bytes"},
	{"v2 checksum of 5 bytes", v2(0x21, 0x11, ends4, tlv(3, "abcde")), "checksum of 5 bytes"},
}

func flip(b []byte, at int) []byte { b[at] ^= 1; return b }

func reverse(b []byte) []byte {
	t := b[len(b)-4:]
	t[0], t[1], t[2], t[3] = t[3], t[2], t[1], t[0]
	return b
}

func TestParse(t *testing.T) {
	for _, row := range goodRows {
		t.Run(row.name, func(t *testing.T) {
			behind := append(bytes.Clone(row.in), "PROXY TCP4 and what the client says"...)
			before := bytes.Clone(behind)
			got, n, err := Parse(behind)
			if !reflect.DeepEqual(got, row.want) || n != len(row.in) || err != nil {
				t.Errorf("got %+v, %d bytes, %v; want %+v, %d bytes", got, n, err, row.want, len(row.in))
			}
			if !bytes.Equal(behind, before) {
				t.Error("the input was changed")
			}
			for i := range row.in {
				if _, _, err := Parse(row.in[:i]); err != ErrMore {
					t.Fatalf("%d of %d bytes: got %v, want more", i, len(row.in), err)
				}
			}
		})
	}
}

func TestParseRefuses(t *testing.T) {
	for _, row := range badRows {
		t.Run(row.name, func(t *testing.T) {
			h, n, err := Parse(row.in)
			if err == nil || err == ErrMore {
				t.Fatalf("got %+v, %d bytes, %v; want it refused", h, n, err)
			}
			if h != (Header{}) || n != 0 {
				t.Errorf("got %+v, %d bytes and an error", h, n)
			}
			if !strings.Contains(strings.ToLower(err.Error()), strings.ToLower(row.says)) {
				t.Errorf("got %q, want it to say %q", err, row.says)
			}
			// What is wrong is wrong with more bytes too.
			if _, _, err := Parse(append(bytes.Clone(row.in), "more"...)); err == nil || err == ErrMore {
				t.Errorf("with more bytes: got %v", err)
			}
		})
	}
}

// A header longer than it may be is refused by its length, and not after it
// was read.
func TestParseRefusesByLength(t *testing.T) {
	long := v2(0x21, 0x11, ends4, tlv(0xe0, strings.Repeat("x", 65535-15)))
	if _, _, err := Parse(long[:16]); err == nil || err == ErrMore {
		t.Errorf("got %v after the length, want it refused", err)
	}
	if _, _, err := Parse(long[:15]); err != ErrMore {
		t.Errorf("got %v before the length, want more", err)
	}
	if _, _, err := Parse(append(bytes.Clone(signV2), 0x11)); err == nil || err == ErrMore {
		t.Errorf("got %v of version 1 in version 2, want it refused", err)
	}
}

// A header that another program made, and its checksum.
func TestChecksum(t *testing.T) {
	b, err := hex.DecodeString(haproxyHeader)
	if err != nil {
		t.Fatal(err)
	}
	h, n, err := Parse(b)
	want := Header{
		Version: 2, Source: ap("127.0.0.1:33826"), Destination: ap("127.0.0.1:18081"),
		Authority: "svc.example.test", ALPN: "h2", UniqueID: "id-127.0.0.1",
		SSL: &SSL{Version: "TLSv1.3"}, // it has no certificate, and HAProxy says that it is verified
	}
	if err != nil || n != len(b) || !reflect.DeepEqual(h, want) {
		t.Errorf("got %+v, %d bytes, %v; want %+v of %d", h, n, err, want, len(b))
	}
	for i := headV2; i < len(b); i++ {
		if i == headV2+len(ends4) {
			continue // the type of the checksum: without one there is nothing to see
		}
		c := bytes.Clone(b)
		c[i] ^= 0x80
		if _, _, err := Parse(c); err == nil {
			t.Errorf("byte %d changed, and nobody saw it", i)
		}
	}
}

func TestHealthCheckOfHAProxy(t *testing.T) {
	b, err := hex.DecodeString(haproxyCheck)
	if err != nil {
		t.Fatal(err)
	}
	if h, n, err := Parse(b); h != (Header{Version: 2, Local: true}) || n != len(b) || err != nil {
		t.Errorf("got %+v, %d bytes of %d, %v; want LOCAL", h, n, len(b), err)
	}
}

func TestAppend(t *testing.T) {
	for _, row := range []struct {
		name string
		h    Header
		want string // "" means what Parse reads again
		back Header
	}{
		{"v1", Header{Version: 1, Source: ap("198.51.100.7:56789"), Destination: ap("192.0.2.1:443"), Authority: "svc.test"}, "PROXY TCP4 198.51.100.7 192.0.2.1 56789 443\r\n", Header{}},
		{"v1 IPv6", Header{Version: 1, Source: ap("[2001:db8::7]:56789"), Destination: ap("[2001:db8::1]:443")}, "PROXY TCP6 2001:db8::7 2001:db8::1 56789 443\r\n", Header{}},
		{"v1 mixed", Header{Version: 1, Source: ap("198.51.100.7:56789"), Destination: ap("[2001:db8::1]:443")}, "PROXY TCP6 ::ffff:198.51.100.7 2001:db8::1 56789 443\r\n", Header{}},
		{"v1 nothing known", Header{Version: 1}, "PROXY UNKNOWN\r\n", Header{}},
		{"v1 local", Header{Version: 1, Local: true}, "PROXY UNKNOWN\r\n", Header{}},
		{"v2", Header{Version: 2, Source: ap("198.51.100.7:56789"), Destination: ap("192.0.2.1:443")}, string(withCRC(v2(0x21, 0x11, ends4, place))), Header{}},
		{"v2 IPv6", Header{Version: 2, Source: ap("[2001:db8::7]:56789"), Destination: ap("[2001:db8::1]:443")}, string(withCRC(v2(0x21, 0x21, ends6, place))), Header{}},
		{
			"v2 with values",
			Header{Version: 2, Source: ap("198.51.100.7:56789"), Destination: ap("192.0.2.1:443"), Authority: "svc.test", ALPN: "h2", UniqueID: "id-7"},
			string(withCRC(v2(0x21, 0x11, ends4, tlv(2, "svc.test"), tlv(1, "h2"), tlv(5, "id-7"), place))), Header{},
		},
		{ // as docs/internals/protocols/proxy-protocol.md has it
			"v2 of the documentation",
			Header{Version: 2, Source: ap("198.51.100.7:56789"), Destination: ap("192.0.2.1:443"), Authority: "svc.test", ALPN: "h2", UniqueID: strings.Repeat("0", 32)},
			string(withCRC([]byte("\r\n\r\n\x00\r\nQUIT\n\x21\x11\x00\x46\xc6\x33\x64\x07\xc0\x00\x02\x01\xdd\xd5\x01\xbb" +
				"\x02\x00\x08svc.test\x01\x00\x02h2\x05\x00\x20" + strings.Repeat("0", 32) + "\x03\x00\x04\x00\x00\x00\x00"))), Header{},
		},
		{"v2 mixed", Header{Version: 2, Source: ap("198.51.100.7:56789"), Destination: ap("[2001:db8::1]:443")}, "", Header{Version: 2, Source: ap("198.51.100.7:56789"), Destination: ap("[2001:db8::1]:443")}},
		{"v2 nothing known", Header{Version: 2, Authority: "svc.test"}, "", Header{Version: 2, Local: true}},
		{"v2 local", Header{Version: 2, Local: true}, string(withCRC(v2(0x20, 0, place))), Header{}},
	} {
		t.Run(row.name, func(t *testing.T) {
			got, err := row.h.Append([]byte("before"))
			if err != nil || !bytes.HasPrefix(got, []byte("before")) {
				t.Fatalf("got %q, %v", got, err)
			}
			got = got[len("before"):]
			if row.want != "" && string(got) != row.want {
				t.Errorf("got %q, want %q", got, row.want)
			}
			if row.want == "" {
				if back, _, err := Parse(got); back != row.back || err != nil {
					t.Errorf("read again: got %+v, %v, want %+v", back, err, row.back)
				}
			}
		})
	}
}

func TestAppendRefusesWhatDoesNotFit(t *testing.T) {
	ends := Header{Version: 2, Source: ap("198.51.100.7:56789"), Destination: ap("192.0.2.1:443")}
	for name, change := range map[string]func(*Header){
		"a name of 65,536 bytes":   func(h *Header) { h.Authority = strings.Repeat("x", 65536) },
		"values of 65,535 in all":  func(h *Header) { h.Authority, h.ALPN = strings.Repeat("x", 40000), strings.Repeat("y", 25535) },
		"values of 4,097":          func(h *Header) { h.Authority = strings.Repeat("x", maxV2) },
		"a unique id of 129 bytes": func(h *Header) { h.UniqueID = strings.Repeat("x", 129) },
		"version 3":                func(h *Header) { h.Version = 3 },
		"version 0":                func(h *Header) { h.Version = 0 },
	} {
		h := ends
		change(&h)
		if b, err := h.Append(nil); err == nil {
			t.Errorf("%s: got %d bytes, want an error", name, len(b))
		}
	}
}
