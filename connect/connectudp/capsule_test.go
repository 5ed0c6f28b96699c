package connectudp

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"strings"
	"testing"
	"testing/iotest"

	"culvert.dev/connect"
	"culvert.dev/tunnel"
)

// capsule is one of any type.
func capsule(kind uint64, value ...byte) []byte {
	return append(appendNumber(appendNumber(nil, kind), uint64(len(value))), value...)
}

// datagramsOf reads all datagrams of in, and the error after them.
func datagramsOf(r io.Reader) (got []string, err error) {
	c := newCapsuleReader(r)
	for {
		b, err := c.next()
		if err != nil {
			return got, err
		}
		got = append(got, string(b))
	}
}

// TestCapsules: datagrams of context 0 are read, and all else is passed over.
func TestCapsules(t *testing.T) {
	long := strings.Repeat("x", maxPayload)
	wrong := errors.New("a capsuleError")
	for _, test := range []struct {
		title string
		in    []byte
		want  []string
		err   error
	}{
		{"nothing", nil, nil, io.EOF},
		{"one", appendCapsule(nil, []byte("one")), []string{"one"}, io.EOF},
		{"two", appendCapsule(appendCapsule(nil, []byte("one")), []byte("two")), []string{"one", "two"}, io.EOF},
		{"an empty payload", appendCapsule(nil, nil), []string{""}, io.EOF},
		{"the largest payload", appendCapsule(nil, []byte(long)), []string{long}, io.EOF},
		{"numbers longer than they need to be", []byte{0xc0, 0, 0, 0, 0, 0, 0, 0, 0x80, 0, 0, 3, 0x40, 0, 'x'}, []string{"x"}, io.EOF},
		{"another type", append(capsule(0x2575, 1, 2, 3), capsule(0, 0, 'x')...), []string{"x"}, io.EOF},
		{"another type without a value", append(capsule(1<<62-1), capsule(0, 0, 'x')...), []string{"x"}, io.EOF},
		{"another context", append(capsule(0, 2, 'n', 'o'), capsule(0, 0, 'x')...), []string{"x"}, io.EOF},
		{"a payload over the limit", appendCapsule(nil, []byte(long+"x")), nil, wrong},
		{"a length of 2^62-1", append([]byte{0}, appendNumber(nil, 1<<62-1)...), nil, wrong},
		{"another type of 2^62-1 bytes", append([]byte{7}, appendNumber(nil, 1<<62-1)...), nil, io.ErrUnexpectedEOF},
		{"no context", capsule(0), nil, wrong},
		{"half a context", capsule(0, 0x40), nil, wrong},
		{"half a type", []byte{0x40}, nil, io.ErrUnexpectedEOF},
		{"a type alone", []byte{0}, nil, io.ErrUnexpectedEOF},
	} {
		for title, r := range map[string]io.Reader{"at once": bytes.NewReader(test.in), "byte by byte": iotest.OneByteReader(bytes.NewReader(test.in)), "with its end": iotest.DataErrReader(bytes.NewReader(test.in))} {
			got, err := datagramsOf(r)
			if _, is := errors.AsType[capsuleError](err); is && test.err == wrong {
				err = wrong
			}
			if fmt.Sprint(got) != fmt.Sprint(test.want) || err != test.err {
				t.Errorf("%s, %s: got %d datagrams and %v, want %d and %v", test.title, title, len(got), err, len(test.want), test.err)
			}
		}
	}
}

// TestCutCapsules: every proper prefix of capsules has the datagrams that are whole, and
// ends in the middle.
func TestCutCapsules(t *testing.T) {
	one, other := appendCapsule(nil, []byte("one")), capsule(0x2575, make([]byte, 70)...)
	in := append(append(append([]byte(nil), one...), other...), appendCapsule(nil, bytes.Repeat([]byte("x"), 100))...)
	for n := range in {
		want := io.ErrUnexpectedEOF
		if n == 0 || n == len(one) || n == len(one)+len(other) {
			want = io.EOF
		}
		got, err := datagramsOf(bytes.NewReader(in[:n]))
		if err != want || len(got) != min(n/len(one), 1) {
			t.Errorf("%d of %d bytes: got %q and %v, want %v", n, len(in), got, err, want)
		}
	}
}

// TestAnnouncedMemory: memory is taken for bytes that have come, and not for those that
// are announced.
func TestAnnouncedMemory(t *testing.T) {
	c := newCapsuleReader(bytes.NewReader(append(append([]byte{0}, appendNumber(nil, maxPayload)...), make([]byte, 100)...)))
	taken := testing.AllocsPerRun(1, func() { _, _ = c.next() })
	if _, err := c.next(); err == nil || taken > 5 {
		t.Errorf("after %v allocations: %v", taken, err)
	}
	if cap(c.kept) > keptPayload {
		t.Errorf("%d bytes are kept, limit %d", cap(c.kept), keptPayload)
	}
}

func TestNumbers(t *testing.T) {
	for _, n := range []uint64{0, 1, 63, 64, 16383, 16384, 1<<30 - 1, 1 << 30, 1<<62 - 1} {
		b := appendNumber(nil, n)
		if got, size := parseNumber(append(b, 0xff)); got != n || size != len(b) {
			t.Errorf("%d: %x is %d in %d bytes", n, b, got, size)
		}
		for i := range b {
			if _, size := parseNumber(b[:i]); size != 0 {
				t.Errorf("%d: %x is a number", n, b[:i])
			}
		}
	}
}

func TestPaths(t *testing.T) {
	for path, want := range map[string]string{
		"/.well-known/masque/udp/dns.example.com/53/":       "dns.example.com:53",
		"/.well-known/masque/udp/DNS.Example.com./53/":      "dns.example.com:53",
		"/.well-known/masque/udp/192.0.2.6/443/":            "192.0.2.6:443",
		"/.well-known/masque/udp/2001%3Adb8%3A%3A42/443/":   "[2001:db8::42]:443",
		"/.well-known/masque/udp/2001:db8::42/443/":         "[2001:db8::42]:443",
		"/.well-known/masque/udp/%64ns.example.com/53/":     "dns.example.com:53",
		"/.well-known/masque/udp/dns.example.com/53":        "",
		"/.well-known/masque/udp/dns.example.com/":          "",
		"/.well-known/masque/udp/dns.example.com/53//":      "",
		"/.well-known/masque/udp/dns.example.com/53/?h=1":   "",
		"/.well-known/masque/udp/dns.example.com/0/":        "",
		"/.well-known/masque/udp/dns.example.com/053/":      "",
		"/.well-known/masque/udp/dns.example.com/65536/":    "",
		"/.well-known/masque/udp/*/*/":                      "",
		"/.well-known/masque/udp//53/":                      "",
		"/.well-known/masque/udp/127.1/53/":                 "",
		"/.well-known/masque/udp/fe80%3A%3A1%25eth0/443/":   "",
		"/.well-known/masque/udp/%5B2001%3Adb8::42%5D/1/":   "",
		"/.well-known/masque/udp/a%2Fb/53/":                 "",
		"/.well-known/masque/udp/%zz/53/":                   "",
		"/.well-known/masque/udp/user%40dns.example.com/1/": "",
		"/masque?h=dns.example.com&p=53":                    "",
		"":                                                  "",
	} {
		to, err := parsePath(path)
		switch {
		case want == "" && tunnel.ReasonOf(err) != tunnel.BadRequest:
			t.Errorf("%s: got %v and %v, want a bad request", path, to, err)
		case want != "" && (err != nil || to.String() != want):
			t.Errorf("%s: got %v and %v, want %s", path, to, err, want)
		}
	}
	for _, authority := range []string{"dns.example.com:53", "192.0.2.6:443", "[2001:db8::42]:443"} {
		to, err := connect.ParseAuthority(authority)
		if err != nil {
			t.Fatal(err)
		}
		if back, err := parsePath(pathOf(to)); back != to || err != nil {
			t.Errorf("%s: %s is %v, %v", authority, pathOf(to), back, err)
		}
	}
}
