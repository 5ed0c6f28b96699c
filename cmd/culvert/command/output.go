package command

import (
	"io"
	"os"
	"runtime"
	"strings"
	"unicode"
	"unicode/utf8"
)

// Marks stand for what a terminal is told: the commands write them, and the
// cleanWriter makes colors of them or nothing. They are private to this
// program: printable leaves none in what others wrote.
const (
	markRed = '\uf8f0' + iota
	markGreen
	markYellow
	markEnd
	markClear // the screen, before it is drawn anew
	markLine  // the line, likewise
	markCut   // what does not fit into the line that follows is not shown
	markWrap  // it is again
)

var markCodes = [...]string{"\x1b[31m", "\x1b[32m", "\x1b[33m", "\x1b[m", "\x1b[H\x1b[2J\x1b[3J", "\r\x1b[K", "\x1b[?7l", "\x1b[?7h"}

// painted is s in a color.
func painted(mark rune, s string) string { return string(mark) + s + string(markEnd) }

// good, bad and doubtful paint words that say how something is.
func good(s string) string     { return painted(markGreen, s) }
func bad(s string) string      { return painted(markRed, s) }
func doubtful(s string) string { return painted(markYellow, s) }

// width is how many columns s takes.
func width(s string) int {
	n := 0
	for _, r := range s {
		if r < markRed || r > markWrap {
			n++
		}
	}
	return n
}

// padded is s, at the left or the right of that many columns.
func padded(s string, columns int, right bool) string {
	room := strings.Repeat(" ", max(columns-width(s), 0))
	if right {
		return room + s
	}
	return s + room
}

// A cleanWriter is what every command writes to: nothing that strangers put
// into a name, a certificate or an error reaches the terminal as anything but
// text. What a terminal would obey becomes U+FFFD; of control characters
// newlines and tabs are left.
type cleanWriter struct {
	w     io.Writer
	color bool
	rest  []byte // the beginning of a character whose end has not come
}

// newCleanWriter returns the writer for w, with colors where w is a terminal
// and nobody asked for none (https://no-color.org).
func newCleanWriter(w io.Writer) *cleanWriter {
	return &cleanWriter{w: w, color: isTerminal(w) && os.Getenv("NO_COLOR") == "" && os.Getenv("TERM") != "dumb"}
}

func isTerminal(w io.Writer) bool {
	f, ok := w.(*os.File)
	if !ok || runtime.GOOS == "windows" { // where a console must be asked to take colors
		return false
	}
	info, err := f.Stat()
	return err == nil && info.Mode()&os.ModeCharDevice != 0
}

func (c *cleanWriter) Write(p []byte) (int, error) {
	in := p
	if len(c.rest) > 0 {
		in = append(c.rest, p...)
		c.rest = nil
	}
	out := make([]byte, 0, len(in)+16)
	for len(in) > 0 {
		if !utf8.FullRune(in) {
			c.rest = append([]byte(nil), in...)
			break
		}
		r, size := utf8.DecodeRune(in)
		switch {
		case r >= markRed && r <= markWrap:
			if c.color {
				out = append(out, markCodes[r-markRed]...)
			}
		case r == '\n' || r == '\t' || unicode.IsPrint(r) && !(r == utf8.RuneError && size == 1):
			out = append(out, in[:size]...)
		default:
			out = utf8.AppendRune(out, unicode.ReplacementChar)
		}
		in = in[size:]
	}
	if _, err := c.w.Write(out); err != nil {
		return 0, err
	}
	return len(p), nil
}

// Close writes what is left of a broken character. It leaves w open.
func (c *cleanWriter) Close() error {
	if len(c.rest) == 0 {
		return nil
	}
	c.rest = nil
	_, err := io.WriteString(c.w, string(unicode.ReplacementChar))
	return err
}

// printable is s without what a terminal would obey, on one line.
func printable(s string) string {
	return strings.Map(func(r rune) rune {
		if !unicode.IsPrint(r) {
			return unicode.ReplacementChar
		}
		return r
	}, s)
}

// escapeJSON escapes in JSON text what the cleanWriter would replace: it stands
// in strings only, and so the value stays the same.
func escapeJSON(in []byte) []byte {
	var out []byte
	for i := 0; i < len(in); {
		r, size := utf8.DecodeRune(in[i:])
		if r == '\n' || unicode.IsPrint(r) && !(r == utf8.RuneError && size == 1) {
			if out != nil {
				out = append(out, in[i:i+size]...)
			}
			i += size
			continue
		}
		if out == nil {
			out = append(make([]byte, 0, len(in)+64), in[:i]...)
		}
		out = append(out, escapedRune(r)...)
		i += size
	}
	if out == nil {
		return in
	}
	return out
}

// escapedRune is r as it stands in a string of JSON, of ASCII alone.
func escapedRune(r rune) string {
	const digits = "0123456789abcdef"
	unit := func(u rune) string {
		return `\u` + string([]byte{digits[u>>12&15], digits[u>>8&15], digits[u>>4&15], digits[u&15]})
	}
	if r > 0xffff {
		r -= 0x10000
		return unit(0xd800+r>>10) + unit(0xdc00+r&0x3ff)
	}
	return unit(r)
}
