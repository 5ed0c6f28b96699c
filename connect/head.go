package connect

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"

	"culvert.dev/tunnel"
)

// Limits of a head, request line and the empty line at its end included.
const (
	MaxHead        = 16 << 10 // bytes; more is answered 431
	MaxRequestLine = 8 << 10  // bytes, RFC 9112 section 3 asks for 8000; more is answered 414
	MaxFields      = 100      // field lines; more is answered 431
)

// ErrMore is what a parser returns for the beginning of a head.
var ErrMore = errors.New("connect: the head is not complete")

// A HeadError says what is wrong with a head, and where. Its text never
// quotes a field line, which may hold credentials.
type HeadError struct {
	Status int    // what HTTP answers to it: 400, 414, 431 or 505
	Offset int    // of the byte it was seen at
	Limit  int    // the limit that was passed; 0 where there is none
	What   string // for people
}

func (e *HeadError) Error() string {
	if e.Limit > 0 {
		return fmt.Sprintf("connect: %s at offset %d, limit %d", e.What, e.Offset, e.Limit)
	}
	return fmt.Sprintf("connect: %s at offset %d", e.What, e.Offset)
}

// A Field is one field line.
type Field struct{ Name, Value string }

// Fields are the field lines of a head, in order.
type Fields []Field

// Get returns the first value of the named field, in whatever case it was
// sent, and how many lines have that name.
func (f Fields) Get(name string) (value string, n int) {
	for i := range f {
		if strings.EqualFold(f[i].Name, name) {
			if n == 0 {
				value = f[i].Value
			}
			n++
		}
	}
	return value, n
}

// A Head is a request line and its field lines. Its strings share one copy of
// the head: clone what is to outlive it.
type Head struct {
	Method string
	Target string // as sent: visible ASCII
	Minor  int    // of "HTTP/1.x"
	Fields Fields
	Len    int // bytes the head takes, with the empty line
}

// ParseHead parses the head at the start of b, by the grammar of RFC 9112
// sections 2 to 5. It returns ErrMore where b is the beginning of one and a
// *HeadError where no more bytes could make it one.
//
// Where the RFC leaves a choice, it refuses: a line ends in CRLF, never in a
// bare LF (section 2.2 says a recipient MAY take it; two programs that differ
// there see two heads); no bare CR, no NUL and no other control but the tab;
// no empty line before the request line (there was no earlier body it could
// belong to); exactly one space between the parts of the request line; no
// space before a colon; no folded lines. HTTP/0.9 is answered 400, a major
// version other than 1 505.
func ParseHead(b []byte) (Head, error) {
	var p parser
	if err := p.parse(b); err != nil {
		return Head{}, err
	}
	return p.head(b), nil
}

// ReadHead reads the head of c and leaves it buffered; Discard its Len. The
// deadline is that of c, and ctx tells a drain. Its error is a *tunnel.Error.
func ReadHead(ctx context.Context, c *tunnel.Conn) (Head, error) {
	var p parser
	for {
		err := p.parse(c.Buffered())
		var he *HeadError
		switch {
		case err == nil:
			return p.head(c.Buffered()), nil
		case errors.As(err, &he) && he.Limit > 0:
			return Head{}, &tunnel.Error{Reason: tunnel.TooLarge, Err: err}
		case err != ErrMore:
			if what := tunnel.ForeignProtocol(c.Listener, c.Buffered()); what != "" {
				err = fmt.Errorf("%s (%w)", what, err)
			}
			return Head{}, &tunnel.Error{Reason: tunnel.BadRequest, Err: err}
		}
		if err := c.Fill(MaxHead); err != nil {
			return Head{}, readError(ctx, c, err)
		}
	}
}

// A parser is ParseHead for a head that comes in pieces: parse is called with
// ever more of the same bytes and looks at each byte once, so a head sent
// byte by byte costs no more than one sent whole.
type parser struct {
	reply  bool // a status line comes first, not a request line
	start  int  // of the line being read
	seen   int  // bytes searched for the end of that line
	line   startLine
	fields []fieldSpan
}

// A startLine says where the parts of the first line are.
type startLine struct {
	method int    // its end
	target [2]int // or a reply's reason phrase
	minor  int
	status int
}

// A fieldSpan says where a field line is: name, value.
type fieldSpan struct{ name, value [2]int }

func (p *parser) parse(b []byte) error {
	b = b[:min(len(b), MaxHead)]
	for {
		i := bytes.IndexByte(b[p.seen:], '\n')
		if i < 0 {
			p.seen = len(b)
			switch {
			case p.start == 0 && len(b) > MaxRequestLine:
				return p.tooLong()
			case len(b) == MaxHead:
				return &HeadError{Status: http.StatusRequestHeaderFieldsTooLarge, Offset: MaxHead, Limit: MaxHead, What: "head is too long"}
			}
			return ErrMore
		}
		from, end := p.start, p.seen+i
		p.start, p.seen = end+1, end+1
		if from == 0 && end >= MaxRequestLine {
			return p.tooLong()
		}
		if end == from || b[end-1] != '\r' {
			return bad(end, "line feed without carriage return")
		}
		line := b[from : end-1]
		switch {
		case from == 0 && p.reply:
			if err := p.statusLine(line); err != nil {
				return err
			}
		case from == 0:
			if err := p.requestLine(line); err != nil {
				return err
			}
		case len(line) == 0:
			return nil
		case len(p.fields) == MaxFields:
			return &HeadError{Status: http.StatusRequestHeaderFieldsTooLarge, Offset: from, Limit: MaxFields, What: "too many field lines"}
		default:
			if err := p.fieldLine(line, from); err != nil {
				return err
			}
		}
	}
}

func (p *parser) tooLong() error {
	return &HeadError{Status: http.StatusRequestURITooLong, Offset: MaxRequestLine, Limit: MaxRequestLine, What: "first line is too long"}
}

func bad(offset int, format string, args ...any) error {
	return &HeadError{Status: http.StatusBadRequest, Offset: offset, What: fmt.Sprintf(format, args...)}
}

// requestLine parses "method SP target SP HTTP/1.x".
func (p *parser) requestLine(line []byte) error {
	i := 0
	for i < len(line) && isToken(line[i]) {
		i++
	}
	if i == 0 || i == len(line) || line[i] != ' ' {
		return bad(i, "no method and space in the request line")
	}
	p.line.method = i
	i++
	from := i
	for i < len(line) && line[i] > ' ' && line[i] < 0x7f {
		i++
	}
	switch {
	case i == from:
		return bad(i, "no target in the request line")
	case i == len(line):
		return bad(i, "no HTTP version in the request line: HTTP/0.9 is not spoken here")
	case line[i] != ' ':
		return bad(i, "byte %#02x in the target", line[i])
	}
	p.line.target = [2]int{from, i}
	return p.version(line[i+1:], i+1)
}

// statusLine parses "HTTP/1.x SP 3DIGIT [ SP reason ]". The last space is
// required by the RFC and forgotten by servers without a reason phrase.
func (p *parser) statusLine(line []byte) error {
	const v, s = len("HTTP/1.1"), len("HTTP/1.1 200")
	if len(line) < s {
		return bad(len(line), "status line is too short")
	}
	if err := p.version(line[:v], 0); err != nil {
		return err
	}
	if line[v] != ' ' || line[v+1] < '1' || line[v+1] > '9' || !isDigit(line[v+2]) || !isDigit(line[v+3]) || len(line) > s && line[s] != ' ' {
		return bad(v, "no three-digit status in the status line")
	}
	p.line.status = 100*int(line[v+1]-'0') + 10*int(line[v+2]-'0') + int(line[v+3]-'0')
	p.line.target = [2]int{min(s+1, len(line)), len(line)}
	for i := s; i < len(line); i++ {
		if !isValue(line[i]) {
			return bad(i, "byte %#02x in the reason phrase", line[i])
		}
	}
	return nil
}

// version parses "HTTP/1.x", which ends the line or the word at offset.
func (p *parser) version(b []byte, offset int) error {
	if len(b) != len("HTTP/1.1") || string(b[:5]) != "HTTP/" || !isDigit(b[5]) || b[6] != '.' || !isDigit(b[7]) {
		return bad(offset, "no HTTP version")
	}
	if b[5] != '1' {
		return &HeadError{Status: http.StatusHTTPVersionNotSupported, Offset: offset, What: fmt.Sprintf("version %q is not HTTP/1.x", b)}
	}
	p.line.minor = int(b[7] - '0')
	return nil
}

// fieldLine parses "name: value"; from is the line's offset in the head.
func (p *parser) fieldLine(line []byte, from int) error {
	colon := 0
	for colon < len(line) && isToken(line[colon]) {
		colon++
	}
	switch {
	case colon == 0 && (line[0] == ' ' || line[0] == '\t'):
		return bad(from, "folded field line")
	case colon == len(line):
		return bad(from+colon, "field line without a colon")
	case colon == 0 || line[colon] != ':':
		return bad(from+colon, "byte %#02x in a field name", line[colon])
	}
	v, end := colon+1, len(line)
	for i := v; i < end; i++ {
		if !isValue(line[i]) {
			return bad(from+i, "byte %#02x in a field value", line[i])
		}
	}
	for v < end && isBlank(line[v]) {
		v++
	}
	for end > v && isBlank(line[end-1]) {
		end--
	}
	p.fields = append(p.fields, fieldSpan{name: [2]int{from, from + colon}, value: [2]int{from + v, from + end}})
	return nil
}

// head makes the Head of b, which parse said nil to.
func (p *parser) head(b []byte) Head {
	s := string(b[:p.start])
	h := Head{
		Method: s[:p.line.method],
		Target: s[p.line.target[0]:p.line.target[1]],
		Minor:  p.line.minor,
		Fields: make(Fields, len(p.fields)),
		Len:    p.start,
	}
	for i, f := range p.fields {
		h.Fields[i] = Field{Name: s[f.name[0]:f.name[1]], Value: s[f.value[0]:f.value[1]]}
	}
	return h
}

// isToken reports whether c is a tchar, RFC 9110 section 5.6.2.
func isToken(c byte) bool {
	return isAlnum(c) || strings.IndexByte("!#$%&'*+-.^_`|~", c) >= 0
}

// isValue reports whether c may stand in a field value, RFC 9110 section 5.5.
func isValue(c byte) bool { return c >= ' ' && c != 0x7f || c == '\t' }

func isBlank(c byte) bool { return c == ' ' || c == '\t' }
func isDigit(c byte) bool { return '0' <= c && c <= '9' }
func isAlnum(c byte) bool {
	return 'a' <= c && c <= 'z' || 'A' <= c && c <= 'Z' || isDigit(c)
}
