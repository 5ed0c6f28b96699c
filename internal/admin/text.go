package admin

import (
	"bytes"
	"fmt"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf16"
	"unicode/utf8"
)

// clean makes text that others wrote fit for a line on a terminal: control
// characters, line and paragraph separators, bidirectional overrides and
// invalid UTF-8 are written as \xNN, \uNNNN or \UNNNNNNNN, and the result has
// at most most bytes, the last three of which are dots where something was cut.
//
// The log's handler quotes too, but a JSON handler passes on what is legal in
// JSON, and that includes the C1 controls and the overrides.
func clean(s string, most int) string {
	if len(s) <= most && plain(s) {
		return s
	}
	var b strings.Builder
	cut := 0 // the length up to which dots still fit
	for i := 0; i < len(s); {
		r, size := utf8.DecodeRuneInString(s[i:])
		var piece string
		switch {
		case r == utf8.RuneError && size == 1:
			piece = fmt.Sprintf(`\x%02x`, s[i])
		case unicode.IsPrint(r): // of the spaces, U+0020 alone
			piece = s[i : i+size]
		default:
			q := strconv.QuoteRuneToASCII(r)
			piece = q[1 : len(q)-1]
		}
		if b.Len()+len(piece) > most {
			return b.String()[:cut] + "..."
		}
		b.WriteString(piece)
		if b.Len() <= most-len("...") {
			cut = b.Len()
		}
		i += size
	}
	return b.String()
}

// plain reports whether s is printable ASCII.
func plain(s string) bool {
	for i := range len(s) {
		if s[i] < ' ' || s[i] > '~' {
			return false
		}
	}
	return true
}

// asciiJSON escapes what is not ASCII in JSON text, and DEL. These stand in
// strings only, so the value stays the same.
func asciiJSON(in []byte) []byte {
	if bytes.IndexFunc(in, func(r rune) bool { return r >= 0x7f }) < 0 {
		return in
	}
	out := make([]byte, 0, len(in)+len(in)/4)
	for len(in) > 0 {
		r, size := utf8.DecodeRune(in)
		in = in[size:]
		switch {
		case r < 0x7f:
			out = append(out, byte(r))
		case r > 0xffff:
			hi, lo := utf16.EncodeRune(r)
			out = fmt.Appendf(out, `\u%04x\u%04x`, hi, lo)
		default:
			out = fmt.Appendf(out, `\u%04x`, r)
		}
	}
	return out
}
