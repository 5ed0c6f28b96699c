package connect

import (
	"bytes"
	"slices"
	"strings"
	"testing"
)

// A head sent one byte at a time costs as much as one sent whole.
func TestParserLooksOnce(t *testing.T) {
	head := []byte("CONNECT svc.test:443 HTTP/1.1\r\nHost: x\r\n" + strings.Repeat("A: bbbbbbbb\r\n", 50) + "\r\n")
	var p parser
	for i := range head {
		if err := p.parse(head[:i]); err != ErrMore {
			t.Fatalf("%d bytes: got %v, want ErrMore", i, err)
		}
		if p.seen != i {
			t.Fatalf("%d bytes: looked at %d", i, p.seen)
		}
	}
	if err := p.parse(head); err != nil {
		t.Fatal(err)
	}
	whole, err := ParseHead(bytes.Clone(head))
	if err != nil || !slices.Equal(whole.Fields, p.head(head).Fields) || whole.Len != len(head) {
		t.Errorf("got %+v, %v, want what the pieces gave", whole, err)
	}
}
