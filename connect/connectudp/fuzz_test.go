package connectudp

import (
	"bytes"
	"io"
	"slices"
	"strings"
	"testing"
	"testing/iotest"
)

// reference reads capsules in the plainest way there is. It returns the datagrams of
// context 0 and whether the rest is in order.
func reference(in []byte) (got []string, orderly bool) {
	for len(in) > 0 {
		var head [2]uint64
		for i := range head {
			n, size := parseNumber(in)
			if size == 0 {
				return got, false
			}
			head[i], in = n, in[size:]
		}
		if head[0] == 0 && head[1] > maxPayload+8 || head[1] > uint64(len(in)) {
			return got, false
		}
		value := in[:head[1]]
		if in = in[head[1]:]; head[0] != 0 {
			continue
		}
		context, size := parseNumber(value)
		if size == 0 || context == 0 && len(value)-size > maxPayload {
			return got, false
		}
		if context == 0 {
			got = append(got, string(value[size:]))
		}
	}
	return got, true
}

// FuzzCapsules: whatever a peer sends, and in whatever pieces, is read as the reference
// reads it.
func FuzzCapsules(f *testing.F) {
	for _, in := range [][]byte{
		nil, appendCapsule(nil, []byte("one")), append(capsule(0x2575, 1, 2, 3), capsule(0, 0, 'x')...), capsule(0, 2, 'n'), capsule(0),
		append([]byte{0}, appendNumber(nil, 1<<62-1)...), append([]byte{9}, appendNumber(nil, 1<<62-1)...), appendCapsule(nil, bytes.Repeat([]byte("x"), 5000)), {0x40}, {0, 5, 0, 1},
		{0xc0, 0, 0, 0, 0, 0, 0, 0, 0x80, 0, 0, 3, 0x40, 0, 'x'},
	} {
		f.Add(in)
	}
	f.Fuzz(func(t *testing.T, in []byte) {
		want, orderly := reference(in)
		for _, r := range []io.Reader{bytes.NewReader(in), iotest.HalfReader(bytes.NewReader(in)), iotest.DataErrReader(bytes.NewReader(in))} {
			got, err := datagramsOf(r)
			if !slices.Equal(got, want) || (err == io.EOF) != orderly {
				t.Fatalf("%x: got %q and %v, want %q, in order %v", in, got, err, want, orderly)
			}
		}
		var again []byte
		for _, b := range want {
			again = appendCapsule(again, []byte(b))
		}
		if got, err := datagramsOf(bytes.NewReader(again)); !slices.Equal(got, want) || err != io.EOF {
			t.Fatalf("written again: got %q and %v, want %q", got, err, want)
		}
	})
}

// FuzzPath: a path that is taken leads where its own form does.
func FuzzPath(f *testing.F) {
	for _, p := range []string{"dns.example.com/53/", "2001%3Adb8%3A%3A42/443/", "192.0.2.6/443/", "*/*/", "a/b/c/", "%2F/1/"} {
		f.Add(pathPrefix + p)
	}
	f.Fuzz(func(t *testing.T, path string) {
		to, err := parsePath(path)
		if err != nil {
			return
		}
		if back, err := parsePath(pathOf(to)); back != to || err != nil {
			t.Fatalf("%q is %v, and %q is %v, %v", path, to, pathOf(to), back, err)
		}
		if to.Port == 0 || to.Addr.Zone() != "" || strings.ContainsAny(to.Name.String(), "/:@?#*") {
			t.Fatalf("%q leads to %v", path, to)
		}
	})
}
