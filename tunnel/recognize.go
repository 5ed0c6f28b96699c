package tunnel

import (
	"bytes"
	"errors"
	"fmt"
	"slices"
	"strings"
)

// A stranger is a protocol that a listener does not take and that is known by
// its first bytes, for the log to say what came and what to do about it.
type stranger struct {
	name   string // as people call it
	advice string
	is     func(b []byte) bool
}

const (
	adviceWeb = "it is no web server: use https:// and HTTP CONNECT"
	adviceOwn = "give it a port of its own: "
)

// strangers are asked in order.
var strangers = []stranger{
	{"SOCKS5", "add socks5 to its protocols", isSOCKS5},
	{"SOCKS4", "have the client use SOCKS5", func(b []byte) bool { return len(b) > 1 && b[0] == 4 && (b[1] == 1 || b[1] == 2) }},
	{"a PROXY header", "add proxyProtocol: {from: [...]} to the listener", begins("PROXY ", "\r\n\r\n\x00\r\nQUIT\n")},
	{"TLS", "add sni to its protocols", begins("\x16\x03")},
	{"SSH", adviceOwn + "service: NAME:22", begins("SSH-")},
	{"PostgreSQL", adviceOwn + "service: NAME:5432", func(b []byte) bool {
		// The length of the message, and then SSLRequest, GSSENCRequest or version 3.0.
		return len(b) >= 8 && b[0] == 0 && b[1] == 0 && slices.ContainsFunc([]string{"\x04\xd2\x16\x2f", "\x04\xd2\x16\x30", "\x00\x03\x00\x00"},
			func(s string) bool { return string(b[4:8]) == s })
	}},
	{"SMTP", adviceOwn + "service: NAME:25", begins("EHLO ", "HELO ")},
	{"Redis", adviceOwn + "service: NAME:6379", func(b []byte) bool {
		return len(b) > 3 && b[0] == '*' && b[1] >= '1' && b[1] <= '9' && bytes.Contains(b, []byte("\r\n$"))
	}},
	{"HTTP/2", "add connect-h2 to its protocols", begins("PRI * HTTP/2.0")},
	{"HTTP CONNECT", "add connect to its protocols", begins("CONNECT ")},
	{"HTTP", adviceWeb, begins("GET ", "POST ", "HEAD ", "PUT ", "OPTIONS ", "DELETE ", "PATCH ")},
}

// at says what came to a listener, and what to do about it.
func (s *stranger) at(listener string) string {
	return fmt.Sprintf("this is %s, which listener %s does not accept; %s", s.name, listener, s.advice)
}

// ForeignProtocol says which protocol a listener received in place of HTTP, and
// what to do about it. It returns "" where it does not know the protocol. Some
// protocols begin with words, as HTTP does.
func ForeignProtocol(listener string, b []byte) string {
	for i := range strangers {
		if s := &strangers[i]; !strings.HasPrefix(s.name, "HTTP") && s.is(b) {
			return s.at(listener)
		}
	}
	return ""
}

func begins(with ...string) func(b []byte) bool {
	return func(b []byte) bool {
		return slices.ContainsFunc(with, func(s string) bool { return bytes.HasPrefix(b, []byte(s)) })
	}
}

// isSOCKS5 reports whether b is the whole first message of SOCKS5 and no more.
func isSOCKS5(b []byte) bool { return len(b) > 2 && b[0] == 5 && len(b) == 2+int(b[1]) }

// unknownPreamble is the refusal of bytes that no protocol of a listener takes.
func unknownPreamble(listener string, b []byte) *Error {
	for i := range strangers {
		if s := &strangers[i]; s.is(b) {
			return &Error{Reason: BadPreamble, Err: errors.New(s.at(listener))}
		}
	}
	return Refusef(BadPreamble, "%d bytes that begin like no protocol of listener %s: %q", len(b), listener, b[:min(len(b), 16)])
}
