// Package postgres routes PostgreSQL by the name in the ClientHello that follows an
// SSLRequest.
//
// A PostgreSQL client asks for TLS in its own protocol first: it sends an SSLRequest of
// eight bytes, and begins TLS when the server has answered with one byte, "S".
// PostgreSQL's documentation, "Message Flow", section "SSL Session Encryption". Protocol
// gives that answer and leaves the TLS, untouched, to another Protocol. Layer is the
// client's side, towards a server that expects an SSLRequest.
//
// Clients of PostgreSQL 17 and later that are told sslnegotiation=direct begin with TLS.
// They need neither.
package postgres

import (
	"context"
	"encoding/binary"
	"io"

	"culvert.dev/tunnel"
)

// Codes of the messages that a connection may begin with. They take the place of a
// protocol version: src/include/libpq/pqcomm.h.
const (
	cancelRequest    = 1234<<16 | 5678
	sslRequest       = 1234<<16 | 5679
	gssEncRequest    = 1234<<16 | 5680
	majorVersion     = 3
	headBytes        = 8     // of each of them: its length, and the code
	maxStartupLength = 10000 // of a StartupMessage: MAX_STARTUP_PACKET_LENGTH
)

// A Protocol answers an SSLRequest and has TLS serve the connection from there.
type Protocol struct {
	TLS tunnel.Protocol // reads the ClientHello: an sni.Protocol, or one that ends TLS
}

// Name returns "postgres".
func (*Protocol) Name() string { return "postgres" }

// Sniff implements tunnel.Protocol.
func (*Protocol) Sniff(prefix []byte) tunnel.Verdict {
	// A length below 65,536 begins with two zero bytes, as nothing else does.
	for i := range min(len(prefix), 2) {
		if prefix[i] != 0 {
			return tunnel.No
		}
	}
	if len(prefix) < headBytes {
		return tunnel.More
	}
	if _, code := head(prefix); code != sslRequest && code != gssEncRequest && code != cancelRequest && code>>16 != majorVersion {
		return tunnel.No
	}
	return tunnel.Yes
}

// HasPreamble implements tunnel.PreambleDetector: a message is complete as far as it is
// read. What follows the answer is waited for by a goroutine.
func (*Protocol) HasPreamble(prefix []byte) bool { return len(prefix) >= headBytes }

func head(b []byte) (length, code uint32) {
	return binary.BigEndian.Uint32(b), binary.BigEndian.Uint32(b[4:])
}

// ServeConn implements tunnel.Protocol. The request is that of TLS, as is the answer to
// a ClientHello that is refused.
func (p *Protocol) ServeConn(ctx context.Context, c *tunnel.Conn, h tunnel.Handler) error {
	for refusedGSS := false; ; {
		for len(c.Buffered()) < headBytes {
			if err := c.Fill(headBytes + 1); err != nil {
				return tunnel.PreambleError(c, err)
			}
		}
		length, code := head(c.Buffered())
		switch {
		case code == cancelRequest:
			_ = c.Abort()
			return tunnel.Refusef(tunnel.Unsupported, "postgres: a CancelRequest without TLS names no service; libpq 17 and later cancel by TLS")
		case code>>16 == majorVersion && length <= maxStartupLength:
			c.CloseWithMessage(errorResponse("28000", "SSL required: this port is routed by the server name of TLS; connect with sslmode=require or stronger"))
			return tunnel.Refusef(tunnel.BadPreamble, "postgres: the client connects without TLS, and names no service; it should use sslmode=require or stronger")
		case length != headBytes || code != sslRequest && code != gssEncRequest || code == gssEncRequest && refusedGSS:
			_ = c.Abort()
			return tunnel.Refusef(tunnel.BadPreamble, "postgres: a first message of %d bytes with the code %d", length, code)
		case len(c.Buffered()) > headBytes:
			// Bytes that come before the answer could have been put there by anybody on the
			// path, and would be taken for the client's: CVE-2021-23214.
			_ = c.Abort()
			return tunnel.Refusef(tunnel.BadPreamble, "postgres: %d bytes follow the request for TLS before its answer", len(c.Buffered())-headBytes)
		}
		c.Discard(headBytes)
		answer := "S"
		if code == gssEncRequest {
			answer, refusedGSS = "N", true
		}
		if _, err := io.WriteString(c, answer); err != nil {
			return tunnel.PreambleError(c, err)
		}
		if code == sslRequest {
			return p.TLS.ServeConn(ctx, c, h)
		}
	}
}

// errorResponse is an ErrorResponse of severity FATAL: "Message Formats".
func errorResponse(sqlState, message string) []byte {
	fields := "SFATAL\x00VFATAL\x00C" + sqlState + "\x00M" + message + "\x00\x00"
	b := binary.BigEndian.AppendUint32([]byte{'E'}, uint32(4+len(fields)))
	return append(b, fields...)
}
