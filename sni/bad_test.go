package sni

import (
	"strings"

	"culvert.dev/tunnel"
)

// An illegal case is input that is refused, and after how many bytes.
type illegal struct {
	name   string
	raw    []byte
	reason tunnel.Reason
	alert  Alert
	at     int // bytes that are enough to refuse it
	offset int // of the field that is named
	limit  int
	says   string // part of the error
}

// Offsets of the fields of what hello makes, in one record.
const (
	atVersion    = 5 + 4
	atSession    = atVersion + 2 + 32
	atSuites     = atSession + 1 + 32
	atCompress   = atSuites + 2 + 6
	atExtensions = atCompress + 1 + 1
	atExt        = atExtensions + 2 // the first extension's header
	atList       = atExt + 4        // its body: for server_name, the list's length
	atName       = atList + 2       // type and length of the first name
	atHost       = atName + 3       // its first byte
)

// illegals are the rows of the table of bad input, each with the exact alert.
func illegals() []illegal {
	const hi, pre = tunnel.BadHello, tunnel.BadPreamble
	good := one(hello(sniExt(svc)))
	// patched is good with other bytes at one place.
	patched := func(at int, b ...byte) []byte {
		raw := join(good)
		copy(raw[at:], b)
		return raw
	}
	named := func(name string) []byte { return one(hello(sniExt(name))) }
	end := func(name string) int { return atHost + len(name) }
	label64 := strings.Repeat("a", 64) + ".test"
	list := func(b ...[]byte) []byte { return one(hello(ext(0, b...))) }
	body := func(b ...[]byte) []byte { return one(message(b...)) }
	dup := one(hello(sniExt(svc), sniExt(svc)))
	second := atHost + len(svc)

	return []illegal{
		// Names.
		{"two names", one(hello(sniExt(svc, "b.example.test"))), hi, IllegalParameter, atHost, atName, 0, "more than one server name"},
		{"two empty names", one(hello(sniExt("", ""))), hi, IllegalParameter, atHost, atName, 0, "more than one server name"},
		{"server_name twice", dup, hi, IllegalParameter, second + 4, second, 0, "extension 0 occurs twice"},
		{"ALPN twice", one(hello(alpnExt("h2"), alpnExt("h2"))), hi, IllegalParameter, atExt + 9 + 4, atExt + 9, 0, "extension 16 occurs twice"},
		{"unknown extension twice", one(hello(ext(0x4a4a), ext(0x4a4a), sniExt(svc))), hi, IllegalParameter, atExt + 8, atExt + 4, 0, "occurs twice"},
		{"twice among 1,100 extensions", one(hello(many(1100), ext(0x4000), sniExt(svc))), hi, IllegalParameter, atExt + 4404, atExt + 4400, 0, "occurs twice"},
		{"twice after 1,100 extensions", one(hello(many(1100), ext(0x4000+1099))), hi, IllegalParameter, atExt + 4404, atExt + 4400, 0, "occurs twice"},
		{"name of another type", list(vec16([]byte{1}, vec16([]byte(svc)))), hi, IllegalParameter, atHost, atName, 0, "type 1"},
		{"name with NUL", named("a.example.test\x00.evil"), hi, IllegalParameter, end("a.example.test\x00.evil"), atHost, 0, `"a.example.test\x00.evil"`},
		{"name with a space", named("a b.test"), hi, IllegalParameter, end("a b.test"), atHost, 0, "offset 1"},
		{"name with an asterisk", named("*.example.test"), hi, IllegalParameter, end("*.example.test"), atHost, 0, "byte"},
		{"name with a port", named("svc.test:443"), hi, IllegalParameter, end("svc.test:443"), atHost, 0, "byte"},
		{"name with a line end", named("svc.test\r\nx: y"), hi, IllegalParameter, end("svc.test\r\nx: y"), atHost, 0, `\r\n`},
		{"name in raw UTF-8", named("bücher.example"), hi, IllegalParameter, end("bücher.example"), atHost, 0, "byte"},
		{"name with an empty label", named("a..test"), hi, IllegalParameter, end("a..test"), atHost, 0, "label"},
		{"name with a dot in front", named(".test"), hi, IllegalParameter, end(".test"), atHost, 0, "label"},
		{"name with two dots at the end", named("test.."), hi, IllegalParameter, end("test.."), atHost, 0, "label"},
		{"name of one dot", named("."), hi, IllegalParameter, end("."), atHost, 0, "label"},
		{"label of 64 bytes", named(label64), hi, IllegalParameter, end(label64), atHost, 0, "want 1 to 63"},
		{"name of 254 bytes", named(longest + "b"), hi, IllegalParameter, end(longest + "b"), atHost, 253, "254 bytes, limit 253"},
		{"name of 255 bytes", named(longest + "bb"), hi, IllegalParameter, atHost, atName + 1, 253, "255 bytes, limit 253"},

		// Lengths.
		{"list longer than its extension", list(u16(20), hostName("svc.test")), hi, DecodeError, atName, atList, 0, "server names are 20 bytes where 11 are left"},
		{"list shorter than its extension", list(vec16(hostName("svc.test")), []byte{0}), hi, DecodeError, atName, atList, 0, "server names are 11 bytes where 12 are left"},
		{"server_name of 0 bytes", list(), hi, DecodeError, atList, atList, 0, "where 0 are left"},
		{"server_name of 1 byte", list([]byte{0}), hi, DecodeError, atList, atList, 0, "where 1 are left"},
		{"list of 2 bytes", list(vec16([]byte{0, 0})), hi, DecodeError, atName, atName, 0, "where 2 are left"},
		{"name longer than its list", list(vec16([]byte{0}, u16(9), []byte("svc.test"))), hi, DecodeError, atHost, atName + 1, 0, "9 bytes where 8 are left"},
		{"bytes left over after the name", list(vec16([]byte{0}, u16(6), []byte("svc.test"))), hi, DecodeError, atHost, atName + 1, 0, "2 bytes left over"},
		{"extension longer than the rest", patched(atExt+2, 0, 60), hi, DecodeError, atList, atExt, 0, "extension 0 is 60 bytes where 21 are left"},
		{"extension one byte longer than the rest", one(message([]byte{3, 3}, random, vec8(session), vec16(suites), vec8([]byte{0}), vec16(u16(21), u16(5), make([]byte, 4)))), hi, DecodeError, atList, atExt, 0, "extension 21 is 5 bytes where 4 are left"},
		{"3 bytes after the last extension", body([]byte{3, 3}, random, vec8(), vec16(suites), vec8([]byte{0}), vec16(sniExt("a.test"), []byte{0, 1, 0})), hi, DecodeError, 71, 71, 0, "a field of 4 bytes where 3 are left"},
		{"extensions longer than the hello", patched(atExtensions, 0, 200), hi, DecodeError, atExt, atExtensions, 0, "200 bytes where 25 are left"},
		{"extensions shorter than the hello", patched(atExtensions, 0, 20), hi, DecodeError, atExt, atExtensions, 0, "20 bytes where 25 are left"},
		{"1 byte of extensions' length", body([]byte{3, 3}, random, vec8(), vec16(suites), vec8([]byte{0}), []byte{0}), hi, DecodeError, 54, 54, 0, "a field of 2 bytes where 1 are left"},
		{"session id of 33 bytes", patched(atSession, 33), hi, DecodeError, atSession + 1, atSession, 32, "session id is 33 bytes, limit 32"},
		{"session id longer than the hello", body([]byte{3, 3}, random, []byte{9, 0}), hi, DecodeError, atSession + 1, atSession, 0, "9 bytes where 1 are left"},
		{"odd cipher suites", patched(atSuites, 0, 7), hi, DecodeError, atSuites + 2, atSuites, 0, "7 bytes"},
		{"no cipher suites", patched(atSuites, 0, 0), hi, DecodeError, atSuites + 2, atSuites, 0, "0 bytes"},
		{"cipher suites longer than the hello", patched(atSuites, 4, 0), hi, DecodeError, atSuites + 2, atSuites, 0, "1024 bytes"},
		{"no compression methods", patched(atCompress, 0), hi, DecodeError, atCompress + 1, atCompress, 0, "no compression method"},
		{"hello of 0 bytes", body(), hi, DecodeError, 9, 9, 0, "a field of 2 bytes where 0 are left"},
		{"hello that ends in its random", body([]byte{3, 3}, random[:31]), hi, DecodeError, 11, 9, 0, "32 bytes where 31 are left"},
		{"hello that ends at its cipher suites", body([]byte{3, 3}, random, vec8()), hi, DecodeError, 44, 44, 0, "where 0 are left"},
		{"empty ALPN list", one(hello(ext(16, u16(0)), sniExt(svc))), hi, DecodeError, atList + 2, atList, 0, "ALPN list"},
		{"ALPN list shorter than its extension", one(hello(ext(16, vec16(vec8([]byte("h2"))), []byte{0}), sniExt(svc))), hi, DecodeError, atList + 2, atList, 0, "ALPN list"},
		{"empty ALPN protocol", one(hello(ext(16, vec16(vec8([]byte("h2")), vec8())), sniExt(svc))), hi, DecodeError, atList + 6, atList + 5, 0, "ALPN protocol"},
		{"ALPN protocol longer than its list", one(hello(ext(16, vec16([]byte{3, 'h', '2'})), sniExt(svc))), hi, DecodeError, atList + 3, atList + 2, 0, "ALPN protocol is 3 bytes, want 1 to 2"},
		{"odd supported versions", one(hello(ext(43, vec8([]byte{3, 4, 3})), sniExt(svc))), hi, DecodeError, atList + 1, atList, 0, "supported versions"},
		{"no supported versions", one(hello(ext(43, vec8()), sniExt(svc))), hi, DecodeError, atList + 1, atList, 0, "supported versions"},

		// Records and limits, each at the field that shows it.
		{"record over 16,384 bytes", join([]byte{22, 3, 1}, vec16(hello(padding(18<<10), sniExt(svc)))), hi, RecordOverflow, 5, 3, MaxRecord, "limit 16384"},
		{"record of 16,385 bytes", []byte{22, 3, 1, 0x40, 1}, hi, RecordOverflow, 5, 3, MaxRecord, "record is 16385 bytes, limit 16384"},
		{"second record over 16,384 bytes", join(records(hello(sniExt(svc))[:50], 50), []byte{22, 3, 1, 0xff, 0xff}), hi, RecordOverflow, 60, 58, MaxRecord, "record is 65535 bytes"},
		{"zero-length record first", join(record(22, nil), good), hi, UnexpectedMessage, 5, 3, 0, "0 bytes"},
		{"zero-length record inside", join(records(hello(sniExt(svc))[:50], 50), record(22, nil)), hi, UnexpectedMessage, 60, 58, 0, "0 bytes"},
		{"alert first", []byte{21, 3, 1, 0, 2, 2, 40}, hi, UnexpectedMessage, 2, 0, 0, "record of type 21"},
		{"change_cipher_spec first", []byte{20, 3, 3, 0, 1, 1}, hi, UnexpectedMessage, 2, 0, 0, "record of type 20"},
		{"application data first", []byte{23, 3, 3, 0, 5, 1, 2, 3, 4, 5}, hi, UnexpectedMessage, 2, 0, 0, "record of type 23"},
		{"other record between fragments", join(records(hello(sniExt(svc))[:50], 50), record(20, []byte{1}), records(hello(sniExt(svc))[50:], 1<<14)), hi, UnexpectedMessage, 56, 55, 0, "record of type 20"},
		{"record of another version inside", join(records(hello(sniExt(svc))[:50], 50), []byte{22, 2}), hi, ProtocolVersion, 57, 56, 0, "major version 2"},
		{"server_hello", one(join([]byte{2}, hello()[1:])), hi, UnexpectedMessage, 6, 5, 0, "handshake message of type 2"},
		{"hello_request", one([]byte{0, 0, 0, 0}), hi, UnexpectedMessage, 6, 5, 0, "handshake message of type 0"},
		{"hello of 70,000 bytes", join([]byte{22, 3, 1, 0x40, 0, 1}, u24(70000)), hi, IllegalParameter, 9, 6, MaxHello, "hello is 70000 bytes, limit 69632"},
		{"hello one over the limit", records(sized(4+MaxHello+1), 1<<14), hi, IllegalParameter, 9, 6, MaxHello, "hello is 69633 bytes, limit 69632"},
		{"hello of 16 MiB in small records", join(record(22, []byte{1, 255}), record(22, []byte{255}), record(22, []byte{255})), hi, IllegalParameter, 19, 6, MaxHello, "16777215 bytes"},
		{"4,097 records", records(sized(MaxRecords+1), 1), hi, IllegalParameter, 6 * MaxRecords, 6 * MaxRecords, MaxRecords, "more than 4096 records"},
		{"empty list of names", one(hello(ext(0, u16(0)))), hi, DecodeError, 94, 92, 0, "list of server names is empty"},
		{"empty name", one(hello(sniExt(""))), hi, DecodeError, 97, 95, 0, "server name is 0 bytes"},
		{"hello of version 2", patched(atVersion, 0, 2), hi, ProtocolVersion, atVersion + 2, atVersion, 0, "version 0x0002"},

		// Not TLS, or not this one.
		{"SSLv2 hello", []byte{0x80, 0x2e, 1, 0, 2, 0, 0x15, 0, 0, 0, 0x10, 1, 0, 0x80}, hi, 0, 5, 0, 0, "SSLv2"},
		{"SSLv2 hello that offers TLS 1.2", []byte{0x80, 0x2e, 1, 3, 3, 0, 0x15, 0, 0, 0, 0x10}, hi, 0, 5, 0, 0, "SSLv2"},
		{"SSLv2 server hello", []byte{0x80, 0x2e, 4, 0, 2}, pre, 0, 3, 0, 0, "not TLS"},
		{"SSLv2 hello of version 1", []byte{0x80, 0x2e, 1, 0, 1}, pre, 0, 5, 0, 0, "not TLS"},
		{"SSLv2 hello of version 9", []byte{0x80, 0x2e, 1, 9, 1}, pre, 0, 4, 0, 0, "not TLS"},
		{"record of major version 2", []byte{22, 2, 0, 0, 5}, pre, 0, 2, 0, 0, "not TLS"},
		{"HTTP", []byte("GET / HTTP/1.1\r\nHost: svc.example.test\r\n\r\n"), pre, 0, 1, 0, 0, "not TLS"},
		{"SSH", []byte("SSH-2.0-OpenSSH_9.2\r\n"), pre, 0, 1, 0, 0, "not TLS"},
		{"PROXY", []byte("PROXY TCP4 192.0.2.1 192.0.2.2 1 443\r\n"), pre, 0, 1, 0, 0, "not TLS"},
		{"PROXY version 2", []byte("\r\n\r\n\x00\r\nQUIT\n"), pre, 0, 1, 0, 0, "not TLS"},
		{"HTTP/2", []byte("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"), pre, 0, 1, 0, 0, "not TLS"},
		{"zeros", make([]byte, 64), pre, 0, 1, 0, 0, "not TLS"},
	}
}

// A nameless case is a good hello that names nobody.
type unnamed struct {
	name string
	raw  []byte
	want error // Hello.NameErr, or what it wraps
}

func nameless() []unnamed {
	named := func(name string) []byte { return one(hello(sniExt(name))) }
	return []unnamed{
		{"no server name", one(hello(alpnExt("h2"))), ErrNoName},
		{"no extensions", one(hello()), ErrNoName},
		{"no extensions' length", one(message([]byte{3, 1}, random, vec8(), vec16(suites), vec8([]byte{0}))), ErrNoName},
		{"IPv4 address", named("192.0.2.1"), tunnel.ErrNameAddress},
		{"IPv4 address with a dot", named("192.0.2.1."), tunnel.ErrNameAddress},
		{"IPv4 address in one number", named("3221225985"), tunnel.ErrNameAddress},
		{"IPv4 address in hexadecimal", named("0xC0000201"), tunnel.ErrNameAddress},
		{"IPv6 address", named("2001:db8::1"), tunnel.ErrNameAddress},
		{"IPv6 address in brackets", named("[2001:db8::1]"), tunnel.ErrNameAddress},
		{"loopback", named("127.1"), tunnel.ErrNameAddress},
	}
}
