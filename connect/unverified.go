package connect

import (
	"strings"

	"culvert.dev/tunnel"
)

// Limits of the fields in which a client describes itself, in bytes. Longer ones are
// ignored: ztunnel's baggage takes about 300.
const (
	MaxBaggage   = 1024
	MaxForwarded = 256
)

// UnverifiedHeaders reads the fields of a CONNECT in which a caller describes itself, which it does
// for HBONE and in reverse sessions; nil for none. The caller of this function sets
// Request.Unverified only for those who may say so to the log.
func UnverifiedHeaders(f Fields) *tunnel.UnverifiedHeaders {
	s := tunnel.UnverifiedHeaders{
		Baggage:   joined(f, "baggage", MaxBaggage),
		Forwarded: joined(f, "forwarded", MaxForwarded),
	}
	if v, n := f.Get("traceparent"); n == 1 && IsTrace(v) {
		s.Trace = strings.Clone(v)
	}
	if s == (tunnel.UnverifiedHeaders{}) {
		return nil
	}
	return &s
}

// SaidOf returns what a request to the next hop says of req's caller: what the caller said of itself,
// and in Forwarded the address it came from, behind those before it where there is room. A nil req
// says nothing.
func SaidOf(req *tunnel.Request) (said tunnel.UnverifiedHeaders) {
	if req == nil {
		return said
	}
	if req.Unverified != nil {
		said = *req.Unverified
	}
	if req.Source.IsValid() {
		ours := `for="` + req.Source.String() + `"` // a node with a port is a quoted string, RFC 7239 section 6
		if all := said.Forwarded + ", " + ours; said.Forwarded != "" && len(all) <= MaxForwarded {
			ours = all
		}
		said.Forwarded = ours
	}
	return said
}

// joined returns the values of all fields of that name as one list (RFC 9110 section
// 5.3), and "" where it is longer than most or not ASCII.
func joined(f Fields, name string, most int) string {
	var values []string
	size := 0
	for _, field := range f {
		if !strings.EqualFold(field.Name, name) || field.Value == "" {
			continue
		}
		if size += len(", ") + len(field.Value); size > most+len(", ") || strings.ContainsFunc(field.Value, func(r rune) bool { return r < ' ' || r > '~' }) {
			return ""
		}
		values = append(values, field.Value)
	}
	return strings.Join(values, ", ")
}

// IsTrace reports whether s is a traceparent of version 00, W3C Trace Context
// section 3.2: "00-<32 digits>-<16 digits>-<2 digits>", hexadecimal in lower
// case, neither of the ids all zero.
func IsTrace(s string) bool {
	const zero = "00-00000000000000000000000000000000-0000000000000000-00"
	if len(s) != len(zero) || s[:3] != "00-" || s[35] != '-' || s[52] != '-' || s[3:35] == zero[3:35] || s[36:52] == zero[36:52] {
		return false
	}
	for i := range len(s) {
		c := s[i]
		if zero[i] == '0' && !('0' <= c && c <= '9' || 'a' <= c && c <= 'f') {
			return false
		}
	}
	return true
}
