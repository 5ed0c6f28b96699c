package h3

import (
	"bytes"
	"io"

	"github.com/quic-go/qpack"

	"culvert.dev/connect"
	"culvert.dev/tunnel"
)

// A Head is the header list of a request or an answer.
type Head = connect.HeaderList

const maxList = connect.MaxList

func refuse(r tunnel.Reason, format string, args ...any) *tunnel.Error {
	return tunnel.Refusef(r, "h3: "+format, args...)
}

// decodeHead decodes a field section, RFC 9204 section 4.5, up to the first
// field that is wrong or too much. The error is for one that can't be decoded.
func decodeHead(section []byte) (*connect.ListReader, error) {
	r := new(connect.ListReader)
	next := qpack.NewDecoder().Decode(section)
	for !r.Full() {
		f, err := next()
		if err == io.EOF {
			return r, nil
		}
		if err != nil {
			return nil, err
		}
		r.Add(f.Name, f.Value)
	}
	return r, nil
}

// appendHead appends a HEADERS frame. All names are in lower case.
func appendHead(b []byte, lists ...connect.Fields) []byte {
	var section bytes.Buffer
	enc := qpack.NewEncoder(&section)
	for _, list := range lists {
		for _, f := range list {
			_ = enc.WriteField(qpack.HeaderField{Name: f.Name, Value: f.Value})
		}
	}
	b = appendFrameHead(b, frameHeaders, uint64(section.Len()))
	return append(b, section.Bytes()...)
}
