package postgres

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"time"

	"culvert.dev/tunnel"
)

// A Layer asks for TLS on a connection to a PostgreSQL server. What follows on the
// connection is TLS, of the client's own or of the gateway's.
type Layer struct{}

// Handshake sends an SSLRequest over c and returns c when ep has agreed. It closes c
// where it fails.
func (Layer) Handshake(ctx context.Context, c net.Conn, ep *tunnel.Endpoint, _ *tunnel.Request) (net.Conn, error) {
	stop := context.AfterFunc(ctx, func() { _ = c.SetDeadline(time.Unix(1, 0)) })
	err := requestTLS(c)
	if !stop() && err == nil {
		err = ctx.Err()
	}
	if err == nil {
		return c, nil
	}
	_ = c.Close()
	reason := tunnel.DialFailed
	if errors.Is(ctx.Err(), context.DeadlineExceeded) {
		reason, err = tunnel.DialTimeout, errors.New("no answer in time")
	}
	return nil, &tunnel.Error{Reason: reason, Err: fmt.Errorf("SSLRequest to %s: %w", ep, err)}
}

// requestTLS returns nil if the server at c agrees to begin TLS.
func requestTLS(c net.Conn) error {
	if _, err := c.Write([]byte{0, 0, 0, headBytes, sslRequest >> 24, sslRequest >> 16 & 0xff, sslRequest >> 8 & 0xff, sslRequest & 0xff}); err != nil {
		return err
	}
	// A second byte would be taken for a part of the TLS session, and anybody on the
	// path could have put it there (CVE-2021-23222). A correct server waits for the
	// ClientHello after its answer.
	var answer [2]byte
	n, err := io.ReadAtLeast(c, answer[:], 1)
	switch {
	case n == 0 && errors.Is(err, io.EOF):
		return errors.New("the server closed the connection")
	case n == 0:
		return err
	case n > 1:
		return errors.New("the server answered with more than one byte")
	case answer[0] == 'N':
		return errors.New("the server does not offer TLS; set ssl = on there")
	case answer[0] != 'S':
		return fmt.Errorf("the server answered %q, want 'S'; is it PostgreSQL?", answer[0])
	}
	return nil
}

// RequestSize is the size of a request for encryption, in bytes.
const RequestSize = headBytes

// AnswerTo returns the answer to what a client begins with: 'S' to a request for TLS, 'N' to one
// for GSSAPI encryption, and 0 to anything else.
func AnswerTo(first []byte) byte {
	if len(first) < headBytes {
		return 0
	}
	switch length, code := head(first); {
	case length != headBytes:
	case code == sslRequest:
		return 'S'
	case code == gssEncRequest:
		return 'N'
	}
	return 0
}
