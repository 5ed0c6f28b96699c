package h2

import (
	"strconv"
	"strings"

	"golang.org/x/net/http2/hpack"

	"culvert.dev/connect"
	"culvert.dev/tunnel"
)

// A Head is the header list of a request or an answer.
type Head struct {
	Status    int    // of an answer
	Authority string // of a request, as sent: "host:port" for a tunnel
	Protocol  string // of an extended CONNECT, RFC 8441: "websocket"; "" for a plain one
	Scheme    string // of an extended CONNECT
	Path      string // of an extended CONNECT

	// Fields are the rest, in order, their names in lower case.
	Fields connect.Fields

	// Answer are field lines to send with the 200. A hook of the Protocol's
	// may set them; Dialer.Open sets them to those that came.
	Answer connect.Fields

	// Stream, if a hook of the Protocol's sets it, makes of a stream that was
	// accepted what its Handler gets.
	Stream func(*Stream) tunnel.Stream

	// Refusal, if a hook of the Protocol's sets it, is what the client hears of
	// an error, in place of what all of CONNECT says.
	Refusal func(req *tunnel.Request, err error) connect.Refusal

	method string
}

const tooLarge = tunnel.TooLarge

func refuse(r tunnel.Reason, format string, args ...any) *tunnel.Error {
	return tunnel.Refusef(r, "h2: "+format, args...)
}

// A block is a header block that is being read.
type block struct {
	id    uint32
	end   bool // with END_STREAM
	parts int  // frames
	size  int  // bytes encoded

	head    Head
	seen    int    // bits of pseudo
	regular bool   // a field that is no pseudo-header came
	list    int    // bytes, as RFC 9113 section 6.5.2 counts
	large   bool   // over maxList or maxCount
	wrong   string // what is malformed, "" for nothing
}

func (b *block) reset() { *b = block{} }

// full reports whether no more fields are wanted.
func (b *block) full() bool { return b.large || b.wrong != "" }

func (b *block) bad(what string) {
	if b.wrong == "" {
		b.wrong = what
	}
}

// Bits of seen.
const (
	sawMethod = 1 << iota
	sawAuthority
	sawScheme
	sawPath
	sawProtocol
	sawStatus
)

// field takes one field, RFC 9113 section 8.2 and 8.3. Its texts never quote
// a value.
func (b *block) field(f hpack.HeaderField) {
	if b.full() {
		return
	}
	if b.list += int(f.Size()); b.list > maxList || len(b.head.Fields) >= maxCount {
		b.large = true
		b.head.Fields = nil
		return
	}
	if !isValue(f.Value) {
		b.bad("a field value with a byte that none may have")
		return
	}
	if !strings.HasPrefix(f.Name, ":") {
		b.regular = true
		b.plain(f)
		return
	}
	if b.regular {
		b.bad("a pseudo-header field after others")
		return
	}
	bit := 0
	switch f.Name {
	case ":method":
		bit, b.head.method = sawMethod, f.Value
	case ":authority":
		bit, b.head.Authority = sawAuthority, f.Value
	case ":scheme":
		bit, b.head.Scheme = sawScheme, f.Value
	case ":path":
		bit, b.head.Path = sawPath, f.Value
	case ":protocol":
		bit, b.head.Protocol = sawProtocol, f.Value
	case ":status":
		bit = sawStatus
		n, err := strconv.ParseUint(f.Value, 10, 16)
		if err != nil || len(f.Value) != 3 || n < 100 {
			b.bad("a :status that is none")
		}
		b.head.Status = int(n)
	default:
		b.bad("an unknown pseudo-header field")
		return
	}
	if b.seen&bit != 0 {
		b.bad("a pseudo-header field twice")
	}
	b.seen |= bit
}

func (b *block) plain(f hpack.HeaderField) {
	if !isName(f.Name) {
		b.bad("a field name with a byte that none may have")
		return
	}
	switch f.Name {
	case "connection", "proxy-connection", "keep-alive", "transfer-encoding", "upgrade":
		b.bad("a field of HTTP/1.1 connections") // section 8.2.2
	case "te":
		if f.Value != "trailers" {
			b.bad("a te field that is not \"trailers\"")
		}
	}
	b.head.Fields = append(b.head.Fields, connect.Field{Name: f.Name, Value: f.Value})
}

// request judges a request's pseudo-header fields, RFC 9113 sections 8.3.1
// and 8.5, RFC 8441 section 4.
func (b *block) request() {
	const plain = sawMethod | sawScheme | sawPath
	connect := b.head.method == "CONNECT"
	switch {
	case b.full():
	case b.seen&sawStatus != 0:
		b.bad("a request with :status")
	case b.seen&sawMethod == 0:
		b.bad("a request without :method")
	case b.seen&sawProtocol != 0:
		if !connect || b.seen&plain != plain || b.seen&sawAuthority == 0 || b.head.Protocol == "" || b.head.Path == "" {
			b.bad("an extended CONNECT without all it needs")
		}
	case connect && b.seen&(sawScheme|sawPath) != 0:
		b.bad("a CONNECT with :scheme or :path")
	case connect && b.seen&sawAuthority == 0:
		b.bad("a CONNECT without :authority")
	case !connect && (b.seen&plain != plain || b.head.Path == ""):
		b.bad("a request without :scheme or :path")
	}
}

// isValue reports whether s may be a field value, section 8.2.1.
func isValue(s string) bool {
	for i := range len(s) {
		if s[i] < ' ' && s[i] != '\t' || s[i] == 0x7f {
			return false
		}
	}
	return s == "" || !isBlank(s[0]) && !isBlank(s[len(s)-1])
}

func isBlank(c byte) bool { return c == ' ' || c == '\t' }

// isName reports whether s may be a field name: a token without capitals.
func isName(s string) bool {
	for i := range len(s) {
		c := s[i]
		if !('a' <= c && c <= 'z' || '0' <= c && c <= '9') && strings.IndexByte("!#$%&'*+-.^_`|~", c) < 0 {
			return false
		}
	}
	return s != ""
}

// lower is strings.ToLower for field names.
func lower(s string) string { return strings.ToLower(s) }
