package hbone

import (
	"context"
	"crypto/rand"
	"encoding/hex"

	"culvert.dev/connect"
	"culvert.dev/tunnel"
)

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
	req, _ := ctx.Value(requestKey{}).(*tunnel.Request)
	said := connect.SaidOf(req)
	if said.Baggage == "" {
		said.Baggage = own
	}
	if !connect.IsTrace(said.Trace) {
		said.Trace = newTrace()
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
