package hbone

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"strings"

	"culvert.dev/connect"
	"culvert.dev/tunnel"
)

// Limits of the fields in which a client describes itself, in bytes. Longer ones are
// ignored: ztunnel's baggage takes about 300.
const (
	maxBaggage   = 1024
	maxForwarded = 256
)

// unverified reads the fields that HBONE adds to a CONNECT; nil for none.
func unverified(f connect.Fields) *tunnel.UnverifiedHeaders {
	s := tunnel.UnverifiedHeaders{
		Baggage:   joined(f, "baggage", maxBaggage),
		Forwarded: joined(f, "forwarded", maxForwarded),
	}
	if v, n := f.Get("traceparent"); n == 1 && isTrace(v) {
		s.Trace = strings.Clone(v)
	}
	if s == (tunnel.UnverifiedHeaders{}) {
		return nil
	}
	return &s
}

// joined returns the values of all fields of that name as one list (RFC 9110 section
// 5.3), and "" where it is longer than most or not ASCII.
func joined(f connect.Fields, name string, most int) string {
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

// isTrace reports whether s is a traceparent of version 00, W3C Trace Context
// section 3.2: "00-<32 digits>-<16 digits>-<2 digits>", hexadecimal in lower
// case, neither of the ids all zero.
func isTrace(s string) bool {
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

// newTrace begins a trace: that of a caller that has none.
func newTrace() string {
	var id [24]byte
	_, _ = rand.Read(id[:]) // never fails
	return "00-" + hex.EncodeToString(id[:16]) + "-" + hex.EncodeToString(id[16:]) + "-00"
}

type requestKey struct{}

// WithRequest returns a ctx whose dials are on behalf of req: its unverified headers are
// passed on, and forwarded has its source.
func WithRequest(ctx context.Context, req *tunnel.Request) context.Context {
	return context.WithValue(ctx, requestKey{}, req)
}

// fields returns the fields that are added to a CONNECT in ctx. own is the baggage for a
// request without.
func fields(ctx context.Context, own string) connect.Fields {
	said := tunnel.UnverifiedHeaders{}
	req, _ := ctx.Value(requestKey{}).(*tunnel.Request)
	if req != nil && req.Unverified != nil {
		said = *req.Unverified
	}
	if said.Baggage == "" {
		said.Baggage = own
	}
	if !isTrace(said.Trace) {
		said.Trace = newTrace()
	}
	if req != nil && req.Source.IsValid() {
		ours := `for="` + req.Source.String() + `"` // a node with a port is a quoted string, RFC 7239 section 6
		if all := said.Forwarded + ", " + ours; said.Forwarded != "" && len(all) <= maxForwarded {
			ours = all
		}
		said.Forwarded = ours
	}
	f := connect.Fields{{Name: "traceparent", Value: said.Trace}}
	if said.Baggage != "" {
		f = append(f, connect.Field{Name: "baggage", Value: said.Baggage})
	}
	if said.Forwarded != "" {
		f = append(f, connect.Field{Name: "forwarded", Value: said.Forwarded})
	}
	return f
}
