package testnet

import (
	"bytes"
	"strings"
	"testing"
)

func TestStreamIsTheSameFromAnyOffset(t *testing.T) {
	whole := make([]byte, 3*checkWindow)
	Stream(7).Fill(whole, 0)
	for off := range 40 {
		for _, n := range []int{0, 1, 3, 7, 8, 9, 16, 100} {
			part := make([]byte, n)
			Stream(7).Fill(part, int64(off))
			if want := whole[off : off+n]; !bytes.Equal(part, want) {
				t.Fatalf("%d bytes from %d on = % x, want % x", n, off, part, want)
			}
		}
	}
	if err := Stream(7).Check(whole[5:], 5); err != nil {
		t.Errorf("Check of the stream itself = %v", err)
	}
}

func TestStreamCheckSaysWhere(t *testing.T) {
	const base, size = 1 << 20, 200 << 10
	for _, tt := range []struct {
		name  string
		spoil func(p []byte) []byte
		want  []string
	}{
		{"one bit", func(p []byte) []byte { p[70001] ^= 4; return p }, []string{"offset 1118577 (byte 70001 of MiB 1)"}},
		{"last byte", func(p []byte) []byte { p[size-1]++; return p }, []string{"offset 1253375"}},
		{"lost", func(p []byte) []byte { return append(p[:1003:1003], p[5010:]...) }, []string{"offset 1049579", "4007 bytes were lost"}},
		{"repeated", func(p []byte) []byte { return append(p[:5010:5010], p[1003:]...) }, []string{"offset 1053586", "they came 4007 bytes ago"}},
	} {
		p := make([]byte, size)
		Stream(7).Fill(p, base)
		err := Stream(7).Check(tt.spoil(p), base)
		for _, want := range tt.want {
			if err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("%s: Check = %v, want %q in it", tt.name, err, want)
			}
		}
	}
}

func TestStreamsDiffer(t *testing.T) {
	a, b := make([]byte, 64), make([]byte, 64)
	Stream(1).Fill(a, 0)
	Stream(2).Fill(b, 0)
	if bytes.Equal(a, b) {
		t.Error("two streams have the same bytes")
	}
	if err := Stream(1).Check(b, 0); err == nil || strings.Contains(err.Error(), "belong") {
		t.Errorf("Check of another stream's bytes = %v, want an error that finds no place for them", err)
	}
}
