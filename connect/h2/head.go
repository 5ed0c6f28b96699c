package h2

import (
	"golang.org/x/net/http2/hpack"

	"culvert.dev/connect"
	"culvert.dev/connect/internal/mux"
	"culvert.dev/tunnel"
)

// A Head is the header list of a request or an answer.
type Head = connect.HeaderList

func refuse(r tunnel.Reason, format string, args ...any) *tunnel.Error {
	return tunnel.Refusef(r, "h2: "+format, args...)
}

// A block is a header block that is being read.
type block struct {
	connect.ListReader
	id    uint32
	end   bool   // with END_STREAM
	parts int    // frames
	size  int    // bytes encoded
	wrong string // with the frame that began it; "" for nothing
}

func (b *block) reset() { *b = block{} }

// cost is what reading it took, in points.
func (b *block) cost() float64 { return float64(b.size>>10) * mux.CostKiB }

// field takes one field.
func (b *block) field(f hpack.HeaderField) { b.Add(f.Name, f.Value) }

// malformed returns what is wrong, "" for nothing.
func (b *block) malformed() string {
	if b.wrong != "" {
		return b.wrong
	}
	return b.Wrong()
}
