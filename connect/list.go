package connect

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strconv"
	"strings"

	"culvert.dev/tunnel"
)

// Limits of a header list, in HTTP/2 and HTTP/3.
const (
	MaxList       = 16 << 10 // bytes, as RFC 9113 section 6.5.2 and RFC 9114 section 4.2.2 count; more is answered 431
	MaxListFields = 100      // fields; more is answered 431
)

const listOverhead = 32 // bytes that each field of a list counts beyond its own

// A HeaderList is the head of a request or an answer as HTTP/2 and HTTP/3 have
// it.
type HeaderList struct {
	Method    string // of a request
	Status    int    // of an answer
	Authority string // of a request, as sent: "host:port" for a tunnel
	Protocol  string // of an extended CONNECT, RFC 8441 and 9220: "websocket"; "" for a plain one
	Scheme    string // of an extended CONNECT
	Path      string // of an extended CONNECT

	// Fields are the rest, in order, their names in lower case.
	Fields Fields
}

// A ListReader makes a HeaderList of fields as they are decoded, and judges
// it: RFC 9113 sections 8.2, 8.3 and 8.5, RFC 9114 sections 4.2 to 4.4. The
// zero value is ready for one list. Its verdict never quotes a
// value, which may be a secret.
type ListReader struct {
	List HeaderList

	seen    int    // bits of pseudo-header fields
	regular bool   // a field that is no pseudo-header came
	size    int    // bytes, as MaxList counts
	large   bool   // over a limit
	wrong   string // what is malformed, "" for nothing
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

// Full reports whether nothing more of the list needs to be decoded.
func (r *ListReader) Full() bool { return r.large || r.wrong != "" }

// Large reports whether the list is over a limit.
func (r *ListReader) Large() bool { return r.large }

// Wrong returns what is malformed, "" for nothing so far.
func (r *ListReader) Wrong() string { return r.wrong }

// IsTrailers reports whether the list could be trailers: it has no pseudo-header
// field.
func (r *ListReader) IsTrailers() bool { return !r.Full() && r.seen == 0 }

// IsAnswer reports whether the list is that of an answer.
func (r *ListReader) IsAnswer() bool { return !r.Full() && r.seen == sawStatus }

func (r *ListReader) bad(what string) {
	if r.wrong == "" {
		r.wrong = what
	}
}

// Add takes the next field.
func (r *ListReader) Add(name, value string) {
	if r.Full() {
		return
	}
	if r.size += len(name) + len(value) + listOverhead; r.size > MaxList || len(r.List.Fields) >= MaxListFields {
		r.large = true
		r.List.Fields = nil
		return
	}
	if !isListValue(value) {
		r.bad("a field value with a byte that none may have")
		return
	}
	if strings.HasPrefix(name, ":") {
		r.pseudo(name, value)
	} else {
		r.regular = true
		r.plain(name, value)
	}
}

func (r *ListReader) pseudo(name, value string) {
	if r.regular {
		r.bad("a pseudo-header field after others")
		return
	}
	bit := 0
	switch name {
	case ":method":
		bit, r.List.Method = sawMethod, value
	case ":authority":
		bit, r.List.Authority = sawAuthority, value
	case ":scheme":
		bit, r.List.Scheme = sawScheme, value
	case ":path":
		bit, r.List.Path = sawPath, value
	case ":protocol":
		bit, r.List.Protocol = sawProtocol, value
	case ":status":
		bit = sawStatus
		n, err := strconv.ParseUint(value, 10, 16)
		if err != nil || len(value) != 3 || n < 100 {
			r.bad("a :status that is none")
		}
		r.List.Status = int(n)
	default:
		r.bad("an unknown pseudo-header field")
		return
	}
	if r.seen&bit != 0 {
		r.bad("a pseudo-header field twice")
	}
	r.seen |= bit
}

func (r *ListReader) plain(name, value string) {
	if !isListName(name) {
		r.bad("a field name with a byte that none may have")
		return
	}
	switch name {
	case "connection", "proxy-connection", "keep-alive", "transfer-encoding", "upgrade":
		r.bad("a field of HTTP/1.1 connections") // RFC 9113 section 8.2.2, RFC 9114 section 4.2
	case "te":
		if value != "trailers" {
			r.bad("a te field that is not \"trailers\"")
		}
	}
	r.List.Fields = append(r.List.Fields, Field{Name: name, Value: value})
}

// Request judges a complete list as that of a request; Wrong has the verdict.
func (r *ListReader) Request() {
	const plain = sawMethod | sawScheme | sawPath
	connect := r.List.Method == http.MethodConnect
	switch {
	case r.Full():
	case r.seen&sawStatus != 0:
		r.bad("a request with :status")
	case r.seen&sawMethod == 0:
		r.bad("a request without :method")
	case r.seen&sawProtocol != 0: // RFC 8441 section 4, RFC 9220 section 3
		if !connect || r.seen&plain != plain || r.seen&sawAuthority == 0 || r.List.Protocol == "" || r.List.Path == "" {
			r.bad("an extended CONNECT without all it needs")
		}
	case connect && r.seen&(sawScheme|sawPath) != 0:
		r.bad("a CONNECT with :scheme or :path")
	case connect && r.seen&sawAuthority == 0:
		r.bad("a CONNECT without :authority")
	case !connect && (r.seen&plain != plain || r.List.Path == ""):
		r.bad("a request without :scheme or :path")
	}
}

// Check refuses a CONNECT, extended or not, for what is malformed in HTTP and
// not in its carrier.
func (l *HeaderList) Check() error {
	if _, n := l.Fields.Get("content-length"); n > 0 {
		return badRequest("CONNECT with content-length")
	}
	if host, n := l.Fields.Get("host"); n > 1 || n == 1 && host != l.Authority { // RFC 9113 section 8.3.1, RFC 9114 section 4.3.1
		return badRequest("host field that is not the :authority")
	}
	return nil
}

// A Service decides about the requests of HTTP/2 and HTTP/3: plain CONNECT, as a Protocol
// does, or a protocol that is built on it, such as HBONE.
type Service interface {
	// Name is that of a tunnel.Protocol. Requests have it as their Proto.
	Name() string

	// AdmitList checks a request whose list has passed Check. It completes req and
	// returns the context for the Handler, and the fields to send with the 200.
	AdmitList(ctx context.Context, req *tunnel.Request, list *HeaderList) (context.Context, Fields, error)

	// Refusal returns the answer to a request that is refused because of err. The req
	// is nil for a request that did not reach the Handler.
	Refusal(req *tunnel.Request, err error) Refusal
}

// An ExtendedService is a Service for extended CONNECT (RFC 8441, RFC 9220), such as
// WebSocket. It serves the :protocol that is its Name.
type ExtendedService interface {
	Service

	// NewStream returns what the Handler gets: s, a stream whose request was accepted
	// with fields, as the :protocol uses it.
	NewStream(s tunnel.Stream, fields Fields) tunnel.Stream
}

// AdmitList is Admit for a plain CONNECT that came as a header list. No field is sent
// with its 200.
func (p *Protocol) AdmitList(ctx context.Context, req *tunnel.Request, list *HeaderList) (context.Context, Fields, error) {
	ctx, err := p.Admit(ctx, req, list.Authority, list.Fields)
	return ctx, nil, err
}

// A SessionFields returns the fields of a request that depend on the TLS session cs that it is sent
// over. The ctx is that of the dial. Of a connection without TLS, cs is nil.
type SessionFields func(ctx context.Context, cs *tls.ConnectionState) (Fields, error)

// For returns the fields of a request over conn. f may be nil. All can be sent as they are,
// with names in lower case.
func (f SessionFields) For(ctx context.Context, conn net.Conn) (Fields, error) {
	if f == nil {
		return nil, nil
	}
	var cs *tls.ConnectionState
	if t, ok := conn.(interface{ ConnectionState() tls.ConnectionState }); ok {
		state := t.ConnectionState()
		cs = &state
	}
	return f.ForSession(ctx, cs)
}

// ForSession is For of a session; nil for a connection without TLS.
func (f SessionFields) ForSession(ctx context.Context, cs *tls.ConnectionState) (Fields, error) {
	if f == nil {
		return nil, nil
	}
	fields, err := f(ctx, cs)
	if err == nil {
		err = fields.Check()
	}
	if err != nil {
		return nil, err
	}
	for i := range fields {
		fields[i].Name = strings.ToLower(fields[i].Name)
	}
	return fields, nil
}

// An Asker makes the requests of a Dialer of any version. Its fields are those of Dialer.
type Asker struct {
	Version       string // "2", "3": for Via
	Via           string
	Authorization string
	Header        func(ctx context.Context, addr string) (Fields, error)
}

// Lists returns the header list of a request for list.Authority, extended where
// list has a Protocol: its pseudo-header fields, and the others in the order to
// send, which are those of list and the Asker's own. All can be sent as they
// are.
func (a *Asker) Lists(ctx context.Context, list *HeaderList) (pseudo, fields Fields, err error) {
	pseudo = Fields{{":method", http.MethodConnect}}
	if list.Protocol != "" {
		pseudo = append(pseudo, Field{":protocol", list.Protocol}, Field{":scheme", list.Scheme}, Field{":path", list.Path})
	}
	pseudo = append(pseudo, Field{":authority", list.Authority})
	if via, ok := ViaField(ctx, a.Version, a.Via); ok {
		fields = append(fields, via)
	}
	if a.Authorization != "" {
		fields = append(fields, Field{"Proxy-Authorization", a.Authorization})
	}
	fields = append(fields, list.Fields...)
	if a.Header != nil {
		more, err := a.Header(ctx, list.Authority)
		if err != nil {
			return nil, nil, fmt.Errorf("connect: fields for %q: %w", list.Authority, err)
		}
		fields = append(fields, more...)
	}
	if err := fields.Check(); err != nil {
		return nil, nil, err
	}
	for i := range fields {
		fields[i].Name = strings.ToLower(fields[i].Name)
	}
	for _, f := range pseudo {
		if !isListValue(f.Value) {
			return nil, nil, fmt.Errorf("connect: %s has a byte that none may have", f.Name)
		}
	}
	return pseudo, fields, nil
}

// Refused makes an error of an answer that is not 2xx: the Reason that
// ReplyReason finds, and the first line of body, which it reads no further.
func Refused(proxy, addr string, answer *HeaderList, body io.Reader) *tunnel.Error {
	line := make([]byte, 0, maxQuote)
	for len(line) < maxQuote && !strings.Contains(string(line), "\n") {
		n, err := body.Read(line[len(line):cap(line)])
		if line = line[:len(line)+n]; err != nil {
			break // an error without its last words is still one
		}
	}
	quote := ""
	if first, _, _ := strings.Cut(string(line), "\n"); first != "" {
		quote = fmt.Sprintf(": %q", first)
	}
	reason := ReplyReason(answer.Status, answer.Fields)
	return tunnel.HopRefusedf(reason, "connect: proxy %q refused %q with status %d, %s%s", proxy, addr, answer.Status, reason, quote)
}

// isListValue reports whether s may be a value, RFC 9113 section 8.2.1.
func isListValue(s string) bool {
	for i := range len(s) {
		if !isValue(s[i]) {
			return false
		}
	}
	return s == "" || !isBlank(s[0]) && !isBlank(s[len(s)-1])
}

// isListName reports whether s may be a name: a token without capitals.
func isListName(s string) bool {
	for i := range len(s) {
		if !isToken(s[i]) || 'A' <= s[i] && s[i] <= 'Z' {
			return false
		}
	}
	return s != ""
}

// A DatagramStream is a stream of an extended CONNECT that has datagrams beside its bytes,
// which are neither ordered nor sent again: QUIC DATAGRAM frames, RFC 9297 section 2.1.
type DatagramStream interface {
	tunnel.Stream

	// SendDatagram sends an HTTP Datagram, head and then payload, and keeps neither. It
	// does not wait: ErrDatagramLost says that there was no room. The error wraps
	// errors.ErrUnsupported as long as the peer has not said that it takes DATAGRAM frames.
	SendDatagram(head, payload []byte) error

	// HandleDatagrams has deliver called with each HTTP Datagram that comes, and tooLarge
	// with each that was sent and is larger than a packet on this path. Both may be called
	// by several goroutines, must not wait, and must not keep what they get. It is called
	// once.
	HandleDatagrams(deliver, tooLarge func(b []byte))
}

// ErrDatagramLost is the error of a datagram that was not sent, as too many wait.
var ErrDatagramLost = errors.New("connect: too many datagrams wait to be sent")
