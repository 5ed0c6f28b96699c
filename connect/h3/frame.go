package h3

import (
	"errors"
	"fmt"
	"io"

	"github.com/quic-go/quic-go/quicvarint"
)

// Types of frames, RFC 9114 section 7.2 and RFC 9218 section 7.2.
const (
	frameData           = 0x0
	frameHeaders        = 0x1
	frameCancelPush     = 0x3
	frameSettings       = 0x4
	framePushPromise    = 0x5
	frameGoAway         = 0x7
	frameMaxPushID      = 0xd
	framePriorityUpdate = 0xf0700
	framePriorityPush   = 0xf0701
)

// isHTTP2 reports whether t is the type of a frame that HTTP/2 has and HTTP/3
// must not have, RFC 9114 section 7.2.8.
func isHTTP2(t uint64) bool { return t == 0x2 || t == 0x6 || t == 0x8 || t == 0x9 }

// Types of unidirectional streams, RFC 9114 section 6.2 and RFC 9204 section
// 4.2.
const (
	streamControl = 0x0
	streamPush    = 0x1
	streamEncoder = 0x2
	streamDecoder = 0x3
)

// Settings, RFC 9114 section 7.2.4.1, RFC 9220 section 3 and RFC 9297 section 2.1.1. Of
// the peer's, those of QPACK (RFC 9204 section 5) do not matter: it may have no dynamic
// table of ours and hears of no setting that would let it.
const (
	settingMaxFieldSection = 0x6
	settingExtendedConnect = 0x8
	settingDatagrams       = 0x33
)

// An ErrCode says why a stream or a connection was given up, RFC 9114 section
// 8.1, RFC 9204 section 6 and RFC 9297 section 5.2.
type ErrCode uint64

// The codes.
const (
	NoError             ErrCode = 0x100
	GeneralProtocol     ErrCode = 0x101
	InternalError       ErrCode = 0x102
	StreamCreation      ErrCode = 0x103
	ClosedCritical      ErrCode = 0x104
	FrameUnexpected     ErrCode = 0x105
	FrameError          ErrCode = 0x106
	ExcessiveLoad       ErrCode = 0x107
	IDError             ErrCode = 0x108
	SettingsError       ErrCode = 0x109
	MissingSettings     ErrCode = 0x10a
	RequestRejected     ErrCode = 0x10b
	RequestCancelled    ErrCode = 0x10c
	RequestIncomplete   ErrCode = 0x10d
	MessageError        ErrCode = 0x10e
	ConnectError        ErrCode = 0x10f
	DatagramError       ErrCode = 0x33
	DecompressionFailed ErrCode = 0x200
	EncoderStream       ErrCode = 0x201
)

var codeNames = map[ErrCode]string{
	NoError: "H3_NO_ERROR", GeneralProtocol: "H3_GENERAL_PROTOCOL_ERROR", InternalError: "H3_INTERNAL_ERROR",
	StreamCreation: "H3_STREAM_CREATION_ERROR", ClosedCritical: "H3_CLOSED_CRITICAL_STREAM",
	FrameUnexpected: "H3_FRAME_UNEXPECTED", FrameError: "H3_FRAME_ERROR", ExcessiveLoad: "H3_EXCESSIVE_LOAD",
	IDError: "H3_ID_ERROR", SettingsError: "H3_SETTINGS_ERROR", MissingSettings: "H3_MISSING_SETTINGS",
	RequestRejected: "H3_REQUEST_REJECTED", RequestCancelled: "H3_REQUEST_CANCELLED",
	RequestIncomplete: "H3_REQUEST_INCOMPLETE", MessageError: "H3_MESSAGE_ERROR", ConnectError: "H3_CONNECT_ERROR", DatagramError: "H3_DATAGRAM_ERROR",
	DecompressionFailed: "QPACK_DECOMPRESSION_FAILED", EncoderStream: "QPACK_ENCODER_STREAM_ERROR",
}

func (c ErrCode) String() string {
	if s, ok := codeNames[c]; ok {
		return s
	}
	return fmt.Sprintf("error code %#x", uint64(c))
}

// A frameReader reads the frames of a stream. What a read error interrupts can
// be gone on with: a deadline loses nothing.
type frameReader struct {
	r    io.Reader
	left uint64 // bytes of the frame's payload that were not read
	skip bool   // and are of no interest
	end  bool   // r has ended

	// Bytes that were read ahead to find a frame's head, which has two numbers
	// of at most 8 bytes.
	ahead    [16]byte
	from, to int
}

// next returns the head of the next frame. The payload of the last one must
// have been read. At the end of the stream it returns io.EOF, and
// io.ErrUnexpectedEOF where that is inside of a head.
func (f *frameReader) next() (frame uint64, err error) {
	for {
		b := f.ahead[f.from:f.to]
		t, n, err := quicvarint.Parse(b)
		if err == nil {
			length, m, err := quicvarint.Parse(b[n:])
			if err == nil {
				f.from += n + m
				f.left = length
				return t, nil
			}
		}
		if f.end {
			if len(b) > 0 {
				return 0, io.ErrUnexpectedEOF
			}
			return 0, io.EOF
		}
		if f.from > 0 {
			f.to = copy(f.ahead[:], b)
			f.from = 0
		}
		got, err := f.r.Read(f.ahead[f.to:])
		f.to += got
		if err == io.EOF {
			f.end = true
		} else if err != nil && got == 0 {
			return 0, err
		}
	}
}

// read reads of the frame's payload, of which there must be some left. Where
// the stream ends before it, it returns io.ErrUnexpectedEOF.
func (f *frameReader) read(p []byte) (int, error) {
	if uint64(len(p)) > f.left {
		p = p[:f.left]
	}
	if f.from < f.to {
		n := copy(p, f.ahead[f.from:f.to])
		f.from += n
		f.left -= uint64(n)
		return n, nil
	}
	if f.end {
		return 0, io.ErrUnexpectedEOF
	}
	n, err := f.r.Read(p)
	f.left -= uint64(n)
	if err == io.EOF {
		f.end = true
	}
	if n > 0 {
		return n, nil // an error comes again with the next read
	}
	if err == io.EOF {
		err = io.ErrUnexpectedEOF
	}
	return 0, err
}

// payload reads the rest of the frame's payload into memory that grows as the
// bytes come. The caller has looked at how much that is.
func (f *frameReader) payload() ([]byte, error) {
	const first = 1 << 10
	b := make([]byte, 0, min(f.left, first))
	for f.left > 0 {
		if len(b) == cap(b) {
			b = append(make([]byte, 0, min(uint64(2*cap(b)), uint64(len(b))+f.left)), b...)
		}
		n, err := f.read(b[len(b):cap(b)])
		if b = b[:len(b)+n]; err != nil {
			return b, err
		}
	}
	return b, nil
}

// pass reads the rest of the frame's payload into scratch and forgets it. Where a
// deadline interrupts it, skip stays set, and pass is to be called again before
// anything else.
func (f *frameReader) pass(scratch []byte) error {
	f.skip = true
	for f.left > 0 {
		if _, err := f.read(scratch); err != nil {
			return err
		}
	}
	f.skip = false
	return nil
}

// appendFrameHead appends the head of a frame.
func appendFrameHead(b []byte, frame, length uint64) []byte {
	return quicvarint.Append(quicvarint.Append(b, frame), length)
}

const maxFrameHead = 16 // bytes

// appendSettings appends the SETTINGS frame that both sides send: how large a
// header list may be, and the names and values of more. That there is no dynamic table
// is the default.
func appendSettings(b []byte, more ...uint64) []byte {
	all := append([]uint64{settingMaxFieldSection, maxList}, more...)
	n := 0
	for _, v := range all {
		n += quicvarint.Len(v)
	}
	b = appendFrameHead(b, frameSettings, uint64(n))
	for _, v := range all {
		b = quicvarint.Append(b, v)
	}
	return b
}

// readSettings reads the payload of a SETTINGS frame, RFC 9114 section 7.2.4.
func readSettings(b []byte) (p peerSettings, _ *connError) {
	seen := make(map[uint64]struct{})
	for len(b) > 0 {
		id, n, err := quicvarint.Parse(b)
		if err != nil {
			return p, wrong(FrameError, "SETTINGS cut short")
		}
		value, m, err := quicvarint.Parse(b[n:])
		if err != nil {
			return p, wrong(FrameError, "SETTINGS cut short")
		}
		b = b[n+m:]
		if _, twice := seen[id]; twice {
			return p, wrong(SettingsError, "setting %#x twice", id)
		}
		seen[id] = struct{}{}
		switch id {
		case 0x0, 0x2, 0x3, 0x4, 0x5: // of HTTP/2, section 7.2.4.1
			return p, wrong(SettingsError, "setting %#x is one of HTTP/2", id)
		case settingExtendedConnect, settingDatagrams:
			if value > 1 {
				return p, wrong(SettingsError, "setting %#x is %d", id, value)
			}
			p.extended = p.extended || id == settingExtendedConnect && value == 1
			p.datagrams = p.datagrams || id == settingDatagrams && value == 1
		}
	}
	return p, nil
}

// parseID reads the number that is all of a frame's payload.
func parseID(b []byte) (uint64, error) {
	id, n, err := quicvarint.Parse(b)
	if err != nil || n != len(b) {
		return 0, errors.New("not one number")
	}
	return id, nil
}
