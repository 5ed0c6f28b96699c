package connect

import (
	"errors"
	"io"
	"net/http"
	"strconv"
	"strings"
	"syscall"

	"culvert.dev/tunnel"
)

// A Refusal is the answer to a request that is refused, in any version of HTTP.
type Refusal struct {
	Status int
	Reason tunnel.Reason // that the client is told; the log has the true one
	Error  string        // the error type of Proxy-Status, RFC 9209 section 2.3
	Text   string        // one line for people: no endpoint's address, and what the client sent only quoted
	Extra  Fields        // that the status requires: Allow, Retry-After, Proxy-Authenticate
}

// An answer is a row of the table below.
type answer struct {
	status int
	token  string
	text   string
}

// answers has a row for every Reason. Answer refines those whose status or
// error depends on more than the Reason.
var answers = map[tunnel.Reason]answer{
	tunnel.NoHello:      {408, "http_request_error", "nothing was sent"},
	tunnel.HelloTimeout: {408, "http_request_error", "the request was not complete in time"},
	tunnel.BadPreamble:  {400, "http_request_error", "this is not a protocol of this port"},
	tunnel.BadHello:     {400, "http_request_error", "the ClientHello cannot be read"},
	tunnel.BadRequest:   {400, "http_request_error", "the request is malformed"},
	tunnel.BadMethod:    {405, "http_request_error", "this proxy takes CONNECT only"},
	tunnel.TooLarge:     {431, "http_request_error", "the request is over a size limit"},
	tunnel.Gone:         {400, "http_request_error", "the request was cut short"},
	tunnel.Overload:     {503, "connection_limit_reached", "a connection limit is reached, try again"},
	tunnel.Flood:        {429, "http_request_error", "too many frames that carry nothing"},

	tunnel.NoSNI:       {400, "http_request_error", "the ClientHello has no server name"},
	tunnel.NoAuth:      {407, "http_request_denied", "credentials are required and are missing or wrong"},
	tunnel.NoRoute:     {403, "destination_not_found", "no such service here"},
	tunnel.NotExposed:  {403, "http_request_denied", "the service is private"},
	tunnel.Denied:      {403, "http_request_denied", "policy does not allow this"},
	tunnel.Prohibited:  {502, "destination_ip_prohibited", "the address is one this gateway never dials"},
	tunnel.Insecure:    {403, "http_request_denied", "the request would go to another network unencrypted"},
	tunnel.Loop:        {502, "proxy_loop_detected", "the way leads back to this gateway"},
	tunnel.NoEndpoint:  {503, "destination_unavailable", "the service has no endpoint"},
	tunnel.LookupError: {502, "dns_error", "the service's endpoint has no address"},
	tunnel.LookupTime:  {504, "dns_timeout", "the service's endpoint was not resolved in time"},
	tunnel.DialFailed:  {502, "connection_refused", "no endpoint of the service took the connection"},
	tunnel.DialTimeout: {504, "connection_timeout", "no endpoint of the service answered in time"},
	tunnel.Unsupported: {501, "http_request_error", "this gateway does not do that part of the protocol"},
	tunnel.Internal:    {500, "proxy_internal_error", "a fault of the gateway's own"},

	tunnel.Done:       {500, "proxy_internal_error", "a fault of the gateway's own"},
	tunnel.Reset:      {502, "connection_terminated", "the service aborted the connection"},
	tunnel.Idle:       {504, "connection_timeout", "nothing was sent for too long"},
	tunnel.HalfClosed: {504, "connection_timeout", "nothing was sent for too long"},
	tunnel.Drain:      {503, "connection_limit_reached", "the gateway is stopping, try again"},
	tunnel.Killed:     {503, "connection_terminated", "closed by an operator"},
	tunnel.Revoked:    {403, "http_request_denied", "this is no longer allowed"},
}

// Answer returns what the client that made req hears of err. It is the one
// place where a Reason becomes HTTP; req is nil where the request could not
// be read.
//
// A caller without a verified identity gets one and the same answer for a
// service that does not exist, one that is private and one it may not reach.
func Answer(req *tunnel.Request, err error) Refusal {
	reason := tunnel.ReasonOf(err)
	if _, ok := answers[reason]; !ok {
		reason = tunnel.Internal
	}
	known := req != nil && req.Peer.Method != ""
	hidden := false
	if !known {
		switch reason {
		case tunnel.NoRoute, tunnel.NotExposed, tunnel.Denied:
			reason, hidden = tunnel.NoRoute, true
		}
	}
	row := answers[reason]
	r := Refusal{Status: row.status, Reason: reason, Error: row.token, Text: row.text}
	if hidden {
		r.Error = "http_request_denied"
	}
	literal := req != nil && req.Addr.IsValid()
	switch reason {
	case tunnel.Prohibited, tunnel.Loop:
		if literal {
			r.Status = http.StatusForbidden // the client itself asked for it
		}
	case tunnel.DialFailed:
		r.Error = dialError(err)
	case tunnel.BadRequest, tunnel.TooLarge:
		if head := (*HeadError)(nil); errors.As(err, &head) {
			r.Status = head.Status
		}
		if req == nil { // said by this package, of bytes the client knows
			r.Text = strings.TrimPrefix(err.Error(), "connect: ")
		}
	case tunnel.BadMethod:
		r.Extra = Fields{{"Allow", "CONNECT"}}
	case tunnel.Overload, tunnel.Drain:
		r.Extra = Fields{{"Retry-After", "1"}}
	}
	return r
}

// dialError picks the error type of a dial that failed. Windows has its own
// numbers, which name nothing elsewhere.
func dialError(err error) string {
	const wsaNetUnreach, wsaConnReset, wsaHostUnreach = syscall.Errno(10051), syscall.Errno(10054), syscall.Errno(10065)
	switch {
	case errors.Is(err, syscall.ENETUNREACH), errors.Is(err, syscall.EHOSTUNREACH),
		errors.Is(err, wsaNetUnreach), errors.Is(err, wsaHostUnreach):
		return "destination_ip_unroutable"
	case errors.Is(err, syscall.ECONNRESET), errors.Is(err, syscall.EPIPE), errors.Is(err, wsaConnReset), errors.Is(err, io.EOF):
		return "connection_terminated"
	}
	return "connection_refused"
}

// Body returns the one line of the answer, with its line feed.
func (r *Refusal) Body() string { return "culvert: " + string(r.Reason) + ": " + r.Text + "\n" }

// Fields returns the field lines of the answer, without those that belong to
// one HTTP version. proxy is the name in Proxy-Status, "" means "culvert".
func (r *Refusal) Fields(proxy string) Fields {
	if proxy == "" {
		proxy = "culvert"
	}
	return append(Fields{
		{"Proxy-Status", sfItem(proxy) + "; error=" + r.Error + `; details="` + string(r.Reason) + `"`},
		{"Content-Type", "text/plain; charset=utf-8"},
		{"Content-Length", strconv.Itoa(len(r.Body()))},
	}, r.Extra...)
}

// Send answers req with r in HTTP/1.1 and closes c; req is nil if the request could not
// be read. Nothing is sent to a client that has left or has sent nothing. proxy is as in
// Fields.
func (r *Refusal) Send(c *tunnel.Conn, req *tunnel.Request, proxy string) {
	switch silent := req == nil && len(c.Buffered()) == 0; {
	case r.Reason == tunnel.NoHello, r.Reason == tunnel.Gone,
		silent && (r.Reason == tunnel.HelloTimeout || r.Reason == tunnel.Drain):
		_ = c.Close()
		return
	}
	answer := r.append1(nil, r.Fields(proxy))
	if r.Reason == tunnel.HelloTimeout {
		// It has had its time: nothing is kept for it, not even for as long as
		// it takes to be sure that the answer arrives.
		_, _ = c.Write(answer)
		_ = c.Close()
		return
	}
	c.CloseWithMessage(answer)
}

// append1 writes the answer as HTTP/1.1.
func (r *Refusal) append1(b []byte, fields Fields) []byte {
	b = append(b, "HTTP/1.1 "...)
	b = strconv.AppendInt(b, int64(r.Status), 10)
	b = append(b, ' ')
	b = append(b, http.StatusText(r.Status)...)
	b = append(b, "\r\n"...)
	b = fields.append1(b)
	b = append(b, "Connection: close\r\n\r\n"...)
	return append(b, r.Body()...)
}

func (f Fields) append1(b []byte) []byte {
	for _, field := range f {
		b = append(b, field.Name...)
		b = append(b, ": "...)
		b = append(b, field.Value...)
		b = append(b, "\r\n"...)
	}
	return b
}

// sfItem writes s as a token or a string of RFC 8941 section 3.3.
func sfItem(s string) string {
	token := s != ""
	var quoted strings.Builder
	quoted.WriteByte('"')
	for i := range len(s) {
		c := s[i]
		token = token && (isToken(c) || c == ':' || c == '/') && (i > 0 || c == '*' || isAlnum(c) && !isDigit(c))
		switch {
		case c == '"' || c == '\\':
			quoted.WriteByte('\\')
			quoted.WriteByte(c)
		case c < ' ' || c > '~':
			quoted.WriteByte('?')
		default:
			quoted.WriteByte(c)
		}
	}
	if token {
		return s
	}
	quoted.WriteByte('"')
	return quoted.String()
}
