package admin

import (
	"context"
	"encoding/json"
	"io"
	"log/slog"
	"net/netip"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"
	"unicode"
	"unicode/utf8"

	"culvert.dev/tunnel"
)

// A Handler is log/slog's handler for text or JSON. An AccessLog whose Logger
// has one writes its lines without log/slog: the same bytes, for a fraction of
// the time and without allocation. Its format may change while it is used.
type Handler struct {
	formats
	w     io.Writer
	level slog.Leveler
}

// NewHandler returns a Handler that writes to w, which must allow Writes from
// several goroutines at once, as an AsyncWriter and an *os.File do.
func NewHandler(w io.Writer, asJSON bool, level slog.Leveler) *Handler {
	opts := &slog.HandlerOptions{Level: level}
	h := &Handler{w: w, level: level}
	h.formats = formats{text: slog.NewTextHandler(w, opts), json: slog.NewJSONHandler(w, opts), asJSON: new(atomic.Bool)}
	h.SetJSON(asJSON)
	if f, ok := w.(interface{ Flush() }); ok {
		h.flush = f.Flush
	}
	return h
}

// SetJSON has JSON written from the next line on, or else text: by h and by all that was
// made of it.
func (h *Handler) SetJSON(on bool) { h.asJSON.Store(on) }

// formats are a handler for text and one for JSON, of which one is used. Their records do
// not wait for others: only the lines of the access log are so many that they gather.
type formats struct {
	text, json slog.Handler
	asJSON     *atomic.Bool
	flush      func() // nil where nothing gathers
}

func (f formats) handler() slog.Handler {
	if f.asJSON.Load() {
		return f.json
	}
	return f.text
}

// Enabled implements slog.Handler.
func (f formats) Enabled(ctx context.Context, l slog.Level) bool { return f.text.Enabled(ctx, l) }

// Handle implements slog.Handler.
func (f formats) Handle(ctx context.Context, r slog.Record) error {
	if f.flush != nil {
		defer f.flush()
	}
	return f.handler().Handle(ctx, r)
}

// WithAttrs implements slog.Handler.
func (f formats) WithAttrs(attrs []slog.Attr) slog.Handler {
	f.text, f.json = f.text.WithAttrs(attrs), f.json.WithAttrs(attrs)
	return f
}

// WithGroup implements slog.Handler.
func (f formats) WithGroup(name string) slog.Handler {
	f.text, f.json = f.text.WithGroup(name), f.json.WithGroup(name)
	return f
}

// write writes o's line.
func (h *Handler) write(level slog.Level, msg string, o *tunnel.Outcome) {
	if level < h.level.Level() {
		return
	}
	l := lines.Get().(*lineWriter)
	l.json = h.asJSON.Load()
	l.begin(time.Now(), level, msg)
	fields(o, l)
	if l.json {
		l.b = append(l.b, '}')
	}
	l.b = append(l.b, '\n')
	_, _ = h.w.Write(l.b)
	if cap(l.b) <= maxKeptLine {
		l.b = l.b[:0]
		lines.Put(l)
	}
}

// maxKeptLine is the capacity up to which a line's buffer is used again, in bytes.
const maxKeptLine = 8 << 10

var lines = sync.Pool{New: func() any { return &lineWriter{b: make([]byte, 0, 512)} }}

// A fieldWriter takes a line's fields, in order.
type fieldWriter interface {
	text(key, value string)
	address(key string, value netip.AddrPort, most int) // at most so many bytes
	number(key string, value int64)
	unsigned(key string, value uint64)
	duration(key string, value time.Duration)
	list(key string, value []string)
}

// attrWriter collects the fields for any slog.Handler.
type attrWriter struct{ attrs []slog.Attr }

func (a *attrWriter) text(key, value string) { a.attrs = append(a.attrs, slog.String(key, value)) }
func (a *attrWriter) address(key string, value netip.AddrPort, most int) {
	a.text(key, clean(value.String(), most))
}
func (a *attrWriter) number(key string, value int64) {
	a.attrs = append(a.attrs, slog.Int64(key, value))
}
func (a *attrWriter) unsigned(key string, value uint64) {
	a.attrs = append(a.attrs, slog.Uint64(key, value))
}
func (a *attrWriter) duration(key string, value time.Duration) {
	a.attrs = append(a.attrs, slog.Duration(key, value))
}
func (a *attrWriter) list(key string, value []string) {
	a.attrs = append(a.attrs, slog.Any(key, value))
}

// A lineWriter writes a line as log/slog's handlers do.
type lineWriter struct {
	b    []byte
	json bool
}

func (l *lineWriter) begin(now time.Time, level slog.Level, msg string) {
	if l.json {
		l.b = append(l.b, `{"time":"`...)
		l.b = now.AppendFormat(l.b, time.RFC3339Nano)
		l.b = append(l.b, '"')
	} else {
		l.b = append(l.b, "time="...)
		l.b = appendMillis(l.b, now)
	}
	l.text(slog.LevelKey, level.String())
	l.text(slog.MessageKey, msg)
}

// appendMillis appends now as RFC 3339 with milliseconds.
func appendMillis(b []byte, now time.Time) []byte {
	// As log/slog does: a tenth is added, so that the format has a fixed width,
	// and cut out again.
	const width = len("2006-01-02T15:04:05.000")
	n := len(b)
	now = now.Truncate(time.Millisecond).Add(time.Millisecond / 10)
	b = now.AppendFormat(b, time.RFC3339Nano)
	return append(b[:n+width], b[n+width+1:]...)
}

func (l *lineWriter) key(key string) {
	if l.json {
		l.b = append(l.b, ',', '"')
		l.b = append(l.b, key...)
		l.b = append(l.b, '"', ':')
		return
	}
	l.b = append(l.b, ' ')
	l.b = append(l.b, key...)
	l.b = append(l.b, '=')
}

func (l *lineWriter) text(key, value string) {
	l.key(key)
	switch {
	case l.json:
		l.b = appendJSONText(l.b, value)
	case needsQuotes(value):
		l.b = strconv.AppendQuote(l.b, value)
	default:
		l.b = append(l.b, value...)
	}
}

func (l *lineWriter) address(key string, value netip.AddrPort, most int) {
	if value.Addr().Zone() != "" { // may be anything
		l.text(key, clean(value.String(), most))
		return
	}
	l.key(key)
	if l.json {
		l.b = append(l.b, '"')
		l.b = value.AppendTo(l.b)
		l.b = append(l.b, '"')
		return
	}
	l.b = value.AppendTo(l.b)
}

func (l *lineWriter) number(key string, value int64) {
	l.key(key)
	l.b = strconv.AppendInt(l.b, value, 10)
}

func (l *lineWriter) unsigned(key string, value uint64) {
	l.key(key)
	l.b = strconv.AppendUint(l.b, value, 10)
}

func (l *lineWriter) duration(key string, value time.Duration) {
	if l.json {
		l.number(key, int64(value))
		return
	}
	l.key(key)
	l.b = appendDuration(l.b, value)
}

func (l *lineWriter) list(key string, value []string) {
	if !l.json {
		l.text(key, "["+strings.Join(value, " ")+"]")
		return
	}
	l.key(key)
	l.b = append(l.b, '[')
	for i, s := range value {
		if i > 0 {
			l.b = append(l.b, ',')
		}
		l.b = appendJSONText(l.b, s)
	}
	l.b = append(l.b, ']')
}

// needsQuotes is log/slog's rule for text.
func needsQuotes(s string) bool {
	if s == "" {
		return true
	}
	for i := 0; i < len(s); {
		c := s[i]
		if c < utf8.RuneSelf {
			if c <= ' ' || c == '=' || c == '"' || c == 0x7f {
				return true
			}
			i++
			continue
		}
		r, size := utf8.DecodeRuneInString(s[i:])
		if r == utf8.RuneError || unicode.IsSpace(r) || !unicode.IsPrint(r) {
			return true
		}
		i += size
	}
	return false
}

// appendJSONText appends s as log/slog's JSON handler does, which leaves <, >
// and & alone.
func appendJSONText(b []byte, s string) []byte {
	for i := range len(s) {
		if c := s[i]; c < ' ' || c > '~' || c == '"' || c == '\\' {
			return appendJSONSlowly(b, s)
		}
	}
	b = append(b, '"')
	b = append(b, s...)
	return append(b, '"')
}

func appendJSONSlowly(b []byte, s string) []byte {
	var out strings.Builder
	enc := json.NewEncoder(&out)
	enc.SetEscapeHTML(false)
	if enc.Encode(s) != nil { // strings are always encoded
		return append(b, `""`...)
	}
	return append(b, strings.TrimSuffix(out.String(), "\n")...)
}

// appendDuration appends d as its String method has it, without an allocation
// where that is usual: from a microsecond to a minute.
func appendDuration(b []byte, d time.Duration) []byte {
	unit, name := time.Duration(0), ""
	switch {
	case d >= time.Microsecond && d < time.Millisecond:
		unit, name = time.Microsecond, "µs"
	case d >= time.Millisecond && d < time.Second:
		unit, name = time.Millisecond, "ms"
	case d >= time.Second && d < time.Minute:
		unit, name = time.Second, "s"
	default:
		return append(b, d.String()...)
	}
	b = strconv.AppendInt(b, int64(d/unit), 10)
	if rest := d % unit; rest > 0 {
		b = append(b, '.')
		for unit /= 10; rest > 0; unit /= 10 {
			b = append(b, byte('0'+rest/unit))
			rest %= unit
		}
	}
	return append(b, name...)
}
