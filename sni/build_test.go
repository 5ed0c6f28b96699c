package sni

import (
	"bytes"
	"encoding/binary"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// The builders make hellos field by field, so that a test can make any field
// wrong. They share no code with the parser.

func u16(n int) []byte { return binary.BigEndian.AppendUint16(nil, uint16(n)) }
func u24(n int) []byte { return []byte{byte(n >> 16), byte(n >> 8), byte(n)} }

func join(parts ...[]byte) []byte { return bytes.Join(parts, nil) }

// vec8 and vec16 are vectors with a length in front.
func vec8(b ...[]byte) []byte  { v := join(b...); return append([]byte{byte(len(v))}, v...) }
func vec16(b ...[]byte) []byte { v := join(b...); return append(u16(len(v)), v...) }

func ext(t int, data ...[]byte) []byte { return append(u16(t), vec16(data...)...) }

func hostName(name string) []byte { return append([]byte{0}, vec16([]byte(name))...) }

func sniExt(names ...string) []byte {
	var list [][]byte
	for _, n := range names {
		list = append(list, hostName(n))
	}
	return ext(0, vec16(list...))
}

func alpnExt(protocols ...string) []byte {
	var list [][]byte
	for _, p := range protocols {
		list = append(list, vec8([]byte(p)))
	}
	return ext(16, vec16(list...))
}

// padding is an extension of n bytes, with its header.
func padding(n int) []byte { return ext(21, make([]byte, n-4)) }

var (
	random  = bytes.Repeat([]byte{0x5a}, 32)
	session = bytes.Repeat([]byte{0xa5}, 32)
	suites  = []byte{0x13, 0x01, 0x13, 0x02, 0xc0, 0x2f}
)

// message puts the handshake header in front of a body.
func message(body ...[]byte) []byte {
	b := join(body...)
	return join([]byte{1}, u24(len(b)), b)
}

// hello is a ClientHello with the given extensions.
func hello(exts ...[]byte) []byte {
	return message([]byte{3, 3}, random, vec8(session), vec16(suites), vec8([]byte{0}), vec16(exts...))
}

func record(t byte, payload []byte) []byte { return join([]byte{t, 3, 1}, vec16(payload)) }

// records cuts a message into records of the given sizes; the last size is
// used again for the rest.
func records(msg []byte, sizes ...int) []byte {
	var raw []byte
	for len(msg) > 0 {
		n := min(sizes[0], len(msg))
		raw, msg = append(raw, record(22, msg[:n])...), msg[n:]
		if len(sizes) > 1 {
			sizes = sizes[1:]
		}
	}
	return raw
}

// one puts a message into one record.
func one(msg []byte) []byte { return record(22, msg) }

// payload takes the records off a hello, which raw may end in the middle of one.
func payload(raw []byte) []byte {
	var msg []byte
	for len(raw) > 0 {
		end := min(len(raw), 5+int(binary.BigEndian.Uint16(raw[3:])))
		msg, raw = append(msg, raw[5:end]...), raw[end:]
	}
	return msg
}

// chromium is a hello in the shape of Chromium's: GREASE at both ends and in
// every list, GREASE ECH, an X25519MLKEM768 share.
func chromium(name string) []byte {
	grease := func(n int) []byte { return []byte{byte(n), byte(n)} }
	share := func(group, n int) []byte { return join(u16(group), vec16(bytes.Repeat([]byte{7}, n))) }
	return message([]byte{3, 3}, random, vec8(session),
		vec16(grease(0x2a), suites), vec8([]byte{0}), vec16(
			ext(0x3a3a),
			ext(0xfe0d, []byte{0, 0, 1, 0, 1, 0x42}, vec16(make([]byte, 32)), vec16(make([]byte, 176))),
			ext(51, vec16(join(grease(0x4a), vec16([]byte{0})), share(0x11ec, 1216), share(0x1d, 32))),
			ext(10, vec16(grease(0x4a), u16(0x11ec), u16(0x1d), u16(0x17))),
			ext(35),
			ext(43, vec8(grease(0x5a), []byte{3, 4, 3, 3})),
			ext(13, vec16([]byte{4, 3, 8, 4, 4, 1})),
			sniExt(name),
			ext(18),
			ext(0xff01, []byte{0}),
			alpnExt("h2", "http/1.1"),
			ext(0x44cd, vec16(vec8([]byte("h2")))),
			ext(27, vec8([]byte{0, 2})),
			ext(0x6a6a, []byte{0}),
		))
}

// fixtures are the hellos of real clients, by file name; see
// testdata/capture.
func fixtures(t testing.TB) map[string][]byte {
	t.Helper()
	files, err := filepath.Glob("testdata/hellos/*.bin")
	if err != nil || len(files) < 20 {
		t.Fatalf("%d fixtures (%v), want at least 20", len(files), err)
	}
	all := make(map[string][]byte)
	for _, f := range files {
		raw, err := os.ReadFile(f)
		if err != nil {
			t.Fatal(err)
		}
		all[strings.TrimSuffix(filepath.Base(f), ".bin")] = raw
	}
	return all
}

// A legal case is a hello that must reach the backend of its name.
type legal struct {
	name string
	raw  []byte
	want string
	cuts []int // where TCP splits it; the last one again for the rest
}

const svc = "svc.example.test"

// legals are the ways to say a legal hello that other routers get wrong.
func legals() []legal {
	mlkem := chromium(svc)
	at := bytes.Index(mlkem, []byte(svc)) + 4
	return []legal{
		{"one record with an ML-KEM share", one(mlkem), svc, nil},
		{"TCP split after 1 byte", one(mlkem), svc, []int{1, 1 << 20}},
		{"TCP split after 5 bytes", one(mlkem), svc, []int{5, 1 << 20}},
		{"TCP split after 1448 bytes", one(mlkem), svc, []int{1448}},
		{"TCP chunks of 100 bytes", one(mlkem), svc, []int{100}},
		{"two records split inside the name", records(mlkem, at, 1<<14), svc, nil},
		{"first record of 1 byte", records(mlkem, 1, 1<<14), svc, nil},
		{"records of 64 bytes", records(mlkem, 64), svc, nil},
		{"second record in its own segment", records(mlkem, 300, 1<<14), svc, []int{305, 1 << 20}},
		{"mixed case", one(chromium("Svc.eXample.TEST")), svc, nil},
		{"trailing dot", one(chromium(svc + ".")), svc, nil},
		{"8 KiB extension before the name", one(hello(padding(8<<10), sniExt(svc))), svc, nil},
		{"15.9 KiB", one(hello(padding(15<<10+900), sniExt(svc))), svc, nil},
		{"17 KiB in two records", records(hello(padding(17<<10), sniExt(svc)), 1<<14), svc, nil},
		{"60 KiB in four records", records(hello(padding(60<<10), sniExt(svc)), 1<<14), svc, nil},
		{"60 KiB, name first", records(hello(sniExt(svc), padding(60<<10)), 1<<14), svc, nil},

		{"largest hello", records(sized(4+MaxHello), 1<<14), svc, nil},
		{"largest hello in the most records", records(sized(4+MaxHello), 18), svc, []int{MaxRaw}},
		{"all the extensions there may be", records(sized(len(hello())+1<<16-1), 1<<14), svc, nil},
		{"most records", records(sized(MaxRecords), 1), svc, nil},
		{"Istio's name", one(hello(sniExt("outbound_.443_._.svc.example.test"))), "outbound_.443_._.svc.example.test", nil},
		{"A-label", one(hello(sniExt("xn--bcher-kva.example"))), "xn--bcher-kva.example", nil},
		{"longest name", one(hello(sniExt(longest))), longest, nil},
		{"longest name and a dot", one(hello(sniExt(longest + "."))), longest, nil},
		{"one label", one(hello(sniExt("localhost"))), "localhost", nil},
		{"TLS 1.0 without other extensions", one(message([]byte{3, 1}, random, vec8(), vec16(suites), vec8([]byte{0}), vec16(sniExt(svc)))), svc, nil},
		{"record version 3.0", join([]byte{22, 3, 0}, vec16(hello(sniExt(svc)))), svc, nil},
		{"record version 3.3", join([]byte{22, 3, 3}, vec16(hello(sniExt(svc)))), svc, nil},
		{"record version 3.255", join([]byte{22, 3, 255}, vec16(hello(sniExt(svc)))), svc, nil},
		{"empty ECH extension", one(hello(ext(0xfe0d), sniExt(svc))), svc, nil},
		{"early data", join(one(hello(sniExt(svc), ext(42))), record(20, []byte{1}), record(23, make([]byte, 300))), svc, nil},
		{"another message in the same record", one(join(hello(sniExt(svc)), []byte{99, 0, 0, 1, 0})), svc, nil},
		{"2,000 extensions", one(hello(many(2000), sniExt(svc))), svc, nil},
	}
}

var longest = strings.Repeat(strings.Repeat("a", 63)+".", 3) + strings.Repeat("b", 61)

// sized is a hello of n bytes with its header.
func sized(n int) []byte {
	const most = 1<<16 - 1 // bytes of all extensions
	left := n - len(hello(sniExt(svc)))
	pad := min(left, most-len(sniExt(svc))-1)
	pad -= (left - pad) % 2 // the rest is cipher suites of two bytes
	more := bytes.Repeat([]byte{0x12, 0x34}, (left-pad)/2)
	return message([]byte{3, 3}, random, vec8(session), vec16(suites, more), vec8([]byte{0}), vec16(sniExt(svc), padding(pad)))
}

// many is n empty extensions of types nobody has.
func many(n int) []byte {
	var b []byte
	for i := range n {
		b = append(b, ext(0x4000+i)...)
	}
	return b
}

// seeds is everything here that goes into the fuzz targets' corpora.
func seeds(t testing.TB) map[string][]byte {
	all := fixtures(t)
	for _, c := range legals() {
		all[c.name] = c.raw
	}
	for _, c := range illegals() {
		all[c.name] = c.raw
	}
	for _, c := range nameless() {
		all[c.name] = c.raw
	}
	return all
}

// chunks splits raw as cuts says.
func chunks(raw []byte, cuts []int) [][]byte {
	if len(cuts) == 0 {
		return [][]byte{raw}
	}
	cuts = slices.Clone(cuts)
	var list [][]byte
	for len(raw) > 0 {
		n := min(cuts[0], len(raw))
		list, raw = append(list, raw[:n]), raw[n:]
		if len(cuts) > 1 {
			cuts = cuts[1:]
		}
	}
	return list
}
