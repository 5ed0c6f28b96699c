package proxyproto

import (
	"bytes"
	"encoding/hex"
	"reflect"
	"testing"
	"unicode/utf8"

	"culvert.dev/internal/testnet"
)

// FuzzParse reads anything. What is a header says the same with more behind it
// and more before its end, states nothing that could not be written, and can
// be read again from what Append makes of it.
func FuzzParse(f *testing.F) {
	for _, row := range goodRows {
		f.Add(row.in)
	}
	for _, row := range badRows {
		f.Add(row.in)
	}
	for _, digits := range []string{haproxyHeader, haproxyCheck} {
		b, err := hex.DecodeString(digits)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, in []byte) {
		before := bytes.Clone(in)
		var h Header
		var n int
		var err error
		// The library makes a list of the values, of 3 bytes each at the least, and
		// an error quotes what it is about: 128 KiB of the largest header, which
		// Parse does not keep. There is a second list where all is in the value SSL.
		testnet.Bounded(t, 40*len(in)+6<<10, func() { h, n, err = Parse(in) })
		if !bytes.Equal(in, before) {
			t.Fatal("the input was changed")
		}
		if err != nil {
			if h != (Header{}) || n != 0 {
				t.Fatalf("got %+v, %d bytes and %v", h, n, err)
			}
			if err == ErrMore && len(in) >= headV2+maxV2 {
				t.Fatalf("more than %d bytes are wanted", len(in))
			}
			return
		}
		if n <= 0 || n > len(in) || n > headV2+maxV2 {
			t.Fatalf("a header of %d bytes in %d", n, len(in))
		}
		if again, m, err := Parse(append(bytes.Clone(in[:n]), "PROXY "...)); !reflect.DeepEqual(again, h) || m != n || err != nil {
			t.Fatalf("with more behind it: got %+v, %d bytes, %v; want %+v, %d", again, m, err, h, n)
		}
		for i := range n {
			if _, _, err := Parse(in[:i]); err != ErrMore {
				t.Fatalf("%d of %d bytes: got %v, want more", i, n, err)
			}
		}
		if !utf8.ValidString(h.Authority) || len(h.UniqueID) > maxUniqueID || h.Source.IsValid() != h.Destination.IsValid() {
			t.Fatalf("got %+v", h)
		}
		if h.Local && h != (Header{Version: 2, Local: true}) {
			t.Fatalf("LOCAL states something: %+v", h)
		}
		b, err := h.Append(nil)
		if err != nil {
			if n > headV2+maxV2-7 {
				return // there may be no place for a checksum
			}
			t.Fatalf("%+v: %v", h, err)
		}
		if !h.Source.IsValid() {
			return // UNSPEC is written as LOCAL
		}
		if again, _, err := Parse(b); !reflect.DeepEqual(again, h) || err != nil {
			t.Fatalf("written and read again: got %+v, %v; want %+v", again, err, h)
		}
	})
}
