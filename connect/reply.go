package connect

import (
	"strconv"
	"strings"

	"culvert.dev/tunnel"
)

// A reply is the head of a proxy's answer.
type reply struct {
	Head
	status int
}

// parseReply is ParseHead for a status line.
func parseReply(b []byte) (reply, error) {
	p := parser{reply: true}
	if err := p.parse(b); err != nil {
		return reply{}, err
	}
	return reply{Head: p.head(b), status: p.line.status}, nil
}

// bodyLen returns how many bytes of content are sure to come, at most most.
func (r *reply) bodyLen(most int) int {
	s, n := r.Fields.Get("Content-Length")
	length, err := strconv.ParseUint(s, 10, 31)
	if n != 1 || err != nil {
		return 0
	}
	return min(int(length), most)
}

// tokenReasons is the way back from the error types of RFC 9209 section 2.3.
var tokenReasons = map[string]tunnel.Reason{
	"dns_timeout":               tunnel.LookupTime,
	"dns_error":                 tunnel.LookupError,
	"destination_not_found":     tunnel.NoRoute,
	"destination_unavailable":   tunnel.NoEndpoint,
	"destination_ip_prohibited": tunnel.Prohibited,
	"destination_ip_unroutable": tunnel.DialFailed,
	"connection_refused":        tunnel.DialFailed,
	"connection_terminated":     tunnel.DialFailed,
	"connection_timeout":        tunnel.DialTimeout,
	"connection_read_timeout":   tunnel.DialTimeout,
	"connection_write_timeout":  tunnel.DialTimeout,
	"connection_limit_reached":  tunnel.Overload,
	"tls_protocol_error":        tunnel.DialFailed,
	"tls_certificate_error":     tunnel.DialFailed,
	"tls_alert_received":        tunnel.DialFailed,
	"http_request_error":        tunnel.BadRequest,
	"http_request_denied":       tunnel.Denied,
	"http_response_timeout":     tunnel.DialTimeout,
	"proxy_internal_response":   tunnel.Internal,
	"proxy_internal_error":      tunnel.Internal,
	"proxy_configuration_error": tunnel.Internal,
	"proxy_loop_detected":       tunnel.Loop,
}

// statusReasons is for proxies that do not send Proxy-Status. They say 502
// and 503 for whatever they could not connect to.
var statusReasons = map[int]tunnel.Reason{
	400: tunnel.BadRequest,
	401: tunnel.NoAuth,
	404: tunnel.NoRoute,
	405: tunnel.Unsupported,
	407: tunnel.NoAuth,
	408: tunnel.HelloTimeout,
	414: tunnel.TooLarge,
	429: tunnel.Overload,
	426: tunnel.Unsupported,
	431: tunnel.TooLarge,
	500: tunnel.Internal,
	501: tunnel.Unsupported,
	502: tunnel.DialFailed,
	503: tunnel.DialFailed,
	504: tunnel.DialTimeout,
	505: tunnel.Unsupported,
	508: tunnel.Loop,
}

// reason returns the Reason of a refusal: the word itself where a gateway of
// our kind sends it as details, else what its error type means, else what its
// status means.
func (r *reply) reason() tunnel.Reason {
	for _, f := range r.Fields {
		if !strings.EqualFold(f.Name, "Proxy-Status") {
			continue
		}
		// The first entry with an error is the one nearest to its cause.
		for params := range proxyStatus(f.Value) {
			token, ok := params["error"]
			if !ok {
				continue
			}
			if word := tunnel.Reason(params["details"]); refuses(word) {
				return word
			}
			if reason, ok := tokenReasons[token]; ok {
				return reason
			}
		}
	}
	if reason, ok := statusReasons[r.status]; ok {
		return reason
	}
	switch r.status / 100 {
	case 4:
		return tunnel.Denied
	case 5:
		return tunnel.DialFailed
	}
	return tunnel.Unsupported
}

// refuses reports whether r is a word that a gateway refuses a CONNECT with:
// every Reason but those of other protocols and those of a tunnel's end.
func refuses(r tunnel.Reason) bool {
	switch r {
	case tunnel.NoHello, tunnel.BadPreamble, tunnel.BadHello, tunnel.Gone, tunnel.NoSNI,
		tunnel.Done, tunnel.Reset, tunnel.Idle, tunnel.HalfClosed, tunnel.Killed, tunnel.Revoked:
		return false
	}
	_, ok := answers[r]
	return ok
}

// proxyStatus yields the parameters of each member of a Proxy-Status list
// (RFC 9209 section 2, RFC 8941 section 4.2). It is lenient: what it does not
// understand is left out, for all that hangs on it is a better error.
func proxyStatus(s string) func(yield func(map[string]string) bool) {
	return func(yield func(map[string]string) bool) {
		for s != "" {
			var params map[string]string
			for first := true; ; first = false {
				var word string
				word, s = cutUnquoted(s)
				key, value, _ := strings.Cut(strings.Trim(word, " \t"), "=")
				if !first && key != "" {
					if params == nil {
						params = make(map[string]string)
					}
					params[key] = unquote(value)
				}
				if s == "" || s[0] == ',' {
					break
				}
				s = s[1:] // the semicolon
			}
			if s != "" {
				s = s[1:] // the comma
			}
			if params != nil && !yield(params) {
				return
			}
		}
	}
}

// cutUnquoted cuts s before its first comma or semicolon outside of a string.
func cutUnquoted(s string) (word, rest string) {
	quoted := false
	for i := 0; i < len(s); i++ {
		switch c := s[i]; {
		case c == '"':
			quoted = !quoted
		case c == '\\' && quoted:
			i++
		case (c == ',' || c == ';') && !quoted:
			return s[:i], s[i:]
		}
	}
	return s, ""
}

// unquote returns what an RFC 8941 string says, and anything else as it is.
func unquote(s string) string {
	if len(s) < 2 || s[0] != '"' || s[len(s)-1] != '"' {
		return s
	}
	s = s[1 : len(s)-1]
	if strings.IndexByte(s, '\\') < 0 {
		return s
	}
	var b strings.Builder
	for i := 0; i < len(s); i++ {
		if s[i] == '\\' && i+1 < len(s) {
			i++
		}
		b.WriteByte(s[i])
	}
	return b.String()
}
