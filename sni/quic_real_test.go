package sni

import (
	"encoding/binary"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// captured are the first datagrams of real clients, by file name; see
// testdata/quic/README.md.
func captured(t testing.TB) map[string][][]byte {
	t.Helper()
	files, err := filepath.Glob("testdata/quic/*.bin")
	if err != nil || len(files) < 5 {
		t.Fatalf("%d fixtures (%v), want at least 5", len(files), err)
	}
	all := make(map[string][][]byte)
	for _, f := range files {
		raw, err := os.ReadFile(f)
		if err != nil {
			t.Fatal(err)
		}
		name := strings.TrimSuffix(filepath.Base(f), ".bin")
		for len(raw) > 0 {
			n := int(binary.BigEndian.Uint16(raw))
			all[name], raw = append(all[name], raw[2:2+n]), raw[2+n:]
		}
	}
	return all
}

func TestQUICOfRealClients(t *testing.T) {
	two := 0
	for name, datagrams := range captured(t) {
		want := svc
		if strings.Contains(name, "localhost") {
			want = "localhost"
		}
		if len(datagrams) > 1 {
			two++
		}
		for _, order := range []string{"in order", "backwards"} {
			var q QUIC
			h, err := feed(t, &q, datagrams...)
			if err != nil || h.Name.String() != want || !slices.Contains(h.ALPN(), "h3") || h.Version != 0x0304 {
				t.Errorf("%s, %s: %q %q, version %#x, %v, want %q with h3", name, order, h.Name, h.ALPN(), h.Version, err, want)
			}
			for i, d := range datagrams {
				if !q.Check(d) {
					t.Errorf("%s, %s: datagram %d may not come again", name, order, i)
				}
			}
			slices.Reverse(datagrams)
		}
	}
	if two < 3 {
		t.Errorf("%d hellos over two datagrams, want 3", two)
	}
}
