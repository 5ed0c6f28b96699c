package admin

import (
	"encoding/json"
	"strings"
	"testing"
	"unicode"
	"unicode/utf8"
)

func TestClean(t *testing.T) {
	for _, tt := range []struct {
		in   string
		most int
		want string
	}{
		{"", 10, ""},
		{"orders.example.com", 253, "orders.example.com"},
		{"a b", 10, "a b"},
		{"josé", 10, "josé"},
		{"a\r\nb", 20, `a\r\nb`},
		{"\x1b[31m", 20, `\x1b[31m`},
		{"a\x00b", 20, `a\x00b`},
		{"\x7f", 20, `\x7f`},
		{"\u009b31m", 20, `\u009b31m`},           // CSI in one C1 byte
		{"a\u202eb\u2066", 20, `a\u202eb\u2066`}, // bidirectional override and isolate
		{"a\u2028b\u2029\u0085", 40, `a\u2028b\u2029\u0085`},
		{"a\u200bb\ufeff", 20, `a\u200bb\ufeff`},
		{"a\u00a0b", 20, `a\u00a0b`},
		{"\U000e0041", 20, `\U000e0041`}, // a tag character
		{"a\xff\xc3", 20, `a\xff\xc3`},
		{"\ufffd", 20, "\ufffd"}, // a real one is no error
		{"abcdef", 6, "abcdef"},
		{"abcdefg", 6, "abc..."},
		{"abc\x1bdef", 8, "abc..."}, // an escape is not cut in two
		{"ééééé", 8, "éé..."},
		{"\x1b", 3, "..."},
	} {
		if got := clean(tt.in, tt.most); got != tt.want {
			t.Errorf("clean(%q, %d) = %q, want %q", tt.in, tt.most, got, tt.want)
		}
	}
}

func FuzzClean(f *testing.F) {
	f.Add("a\r\n\x1b[31m\u202e\xff", 12)
	f.Fuzz(func(t *testing.T, s string, most int) {
		if most < 3 || most > 2000 {
			return
		}
		got := clean(s, most)
		if len(got) > most {
			t.Errorf("clean(%q, %d) has %d bytes", s, most, len(got))
		}
		safe(t, got)
	})
}

// safe fails unless s could be written to a terminal, on one line.
func safe(t *testing.T, s string) {
	t.Helper()
	if !utf8.ValidString(s) {
		t.Errorf("invalid UTF-8: %q", s)
	}
	if i := strings.IndexFunc(s, func(r rune) bool { return !unicode.IsPrint(r) }); i >= 0 {
		t.Errorf("a character that is not printable at %d: %q", i, s)
	}
}

func TestASCIIJSON(t *testing.T) {
	want := "plain \"\\ \x7f \u009b \u202e é \U0001f600 <&> \n"
	in, err := json.Marshal(want)
	if err != nil {
		t.Fatal(err)
	}
	out := asciiJSON(in)
	for _, c := range out {
		if c < ' ' || c > '~' {
			t.Fatalf("asciiJSON(%q) = %q", in, out)
		}
	}
	var got string
	if err := json.Unmarshal(out, &got); err != nil || got != want {
		t.Errorf("asciiJSON(%q) decodes to %q, %v, want %q", in, got, err, want)
	}
}
