package postgres

import (
	"fmt"
	"io"
	"net"

	"culvert.dev/tunnel"
)

// Handshake asks the server at c for TLS and returns when it has agreed. What follows on
// c is TLS. The caller sets the deadlines, and closes c after an error.
func Handshake(c net.Conn) error {
	if _, err := c.Write([]byte{0, 0, 0, headBytes, sslRequest >> 24, sslRequest >> 16 & 0xff, sslRequest >> 8 & 0xff, sslRequest & 0xff}); err != nil {
		return fmt.Errorf("postgres: ask for TLS: %w", err)
	}
	// One byte and no more: what came with it would be taken for a part of the TLS
	// session, and anybody on the path could have put it there (CVE-2021-23222). A
	// server that is as it should waits for the ClientHello.
	var answer [2]byte
	n, err := io.ReadAtLeast(c, answer[:], 1)
	switch {
	case n == 0 && err == io.EOF:
		return tunnel.Refusef(tunnel.DialFailed, "postgres: the server closed the connection when asked for TLS")
	case n == 0:
		return fmt.Errorf("postgres: wait for the answer to an SSLRequest: %w", err)
	case n > 1:
		return tunnel.Refusef(tunnel.DialFailed, "postgres: the server sent more than one byte in answer to an SSLRequest")
	case answer[0] == 'N':
		return tunnel.Refusef(tunnel.DialFailed, "postgres: the server does not offer TLS: set ssl = on there")
	case answer[0] != 'S':
		return tunnel.Refusef(tunnel.DialFailed, "postgres: the server answered an SSLRequest with %q", answer[0])
	}
	return nil
}
