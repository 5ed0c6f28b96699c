//go:build linux

package main

import (
	"bytes"
	"crypto/tls"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"strings"
)

const services = 100 // SNI routes in each proxy, where a measurement says nothing else

// serviceName has the same length for every i, so that one hello does for all:
// see opener.
func serviceName(i int) string { return fmt.Sprintf("svc%0*d.bench.test", nameDigits, i) }

const nameDigits = 6

// errCaptured ends a handshake once its first flight is written.
var errCaptured = errors.New("captured")

type captureConn struct {
	net.Conn
	hello []byte
}

func (c *captureConn) Write(p []byte) (int, error) {
	c.hello = append(c.hello, p...)
	return 0, errCaptured
}

// captureHello returns the ClientHello record of Go's own TLS client.
func captureHello(config *tls.Config) ([]byte, error) {
	c := &captureConn{}
	if err := tls.Client(c, config).Handshake(); !errors.Is(err, errCaptured) {
		return nil, fmt.Errorf("capture a hello: %w", err)
	}
	if len(c.hello) != helloLen(c.hello) {
		return nil, fmt.Errorf("capture a hello: %d bytes are not one record", len(c.hello))
	}
	return c.hello, nil
}

// hello returns what today's clients send: about 1,500 bytes, with a
// post-quantum key share.
func hello(name string) ([]byte, error) {
	return captureHello(&tls.Config{ServerName: name, MinVersion: tls.VersionTLS12})
}

// hello512 returns a hello of exactly 512 bytes, the size many clients pad to.
func hello512(name string) ([]byte, error) {
	const size, alpnHead = 512, 4 + 2 + 1 // extension, list and string lengths
	config := &tls.Config{ServerName: name, MinVersion: tls.VersionTLS12, CurvePreferences: []tls.CurveID{tls.X25519}}
	p, err := captureHello(config)
	if err != nil {
		return nil, err
	}
	missing := size - len(p) - alpnHead
	if missing > 255 {
		config.NextProtos = []string{strings.Repeat("x", 200)}
		missing -= 200 + 1
	}
	if missing < 1 || missing > 255 {
		return nil, fmt.Errorf("a hello of %d bytes can't be padded to %d", len(p), size)
	}
	config.NextProtos = append(config.NextProtos, strings.Repeat("y", missing))
	p, err = captureHello(config)
	if err == nil && len(p) != size {
		err = fmt.Errorf("the padded hello has %d bytes, want %d", len(p), size)
	}
	return p, err
}

// helloLen returns the length of the record that p begins with, or 0 if p is
// too short to tell.
func helloLen(p []byte) int {
	if len(p) < 5 {
		return 0
	}
	return 5 + int(binary.BigEndian.Uint16(p[3:]))
}

// After its hello a client sends one command of commandLen bytes: what the
// connection is for, seven zero bytes, and a number.
const (
	commandLen  = 16
	cmdEcho     = 'E' // the backend sends back what it gets
	cmdStall    = 'S' // the backend reads nothing more
	cmdUpload   = 'U' // it counts to the end of the stream, and sends the count in 8 bytes
	cmdDownload = 'D' // it sends for so many milliseconds, and then the end of the stream
	payloadLen  = 64  // bytes of a round trip
)

// opening is a hello and a command, sent in one piece.
func opening(hello []byte, cmd byte, arg uint64) []byte {
	p := append(append([]byte(nil), hello...), cmd, 0, 0, 0, 0, 0, 0, 0)
	return binary.BigEndian.AppendUint64(p, arg)
}

// An opener is an opening of which only the name changes, by its digits: a
// ClientHello has no checksum.
type opener struct {
	p      []byte
	digits int // where they stand in p
}

func newOpener(p []byte) (*opener, error) {
	const any = 0 // the name that p was made with
	at := bytes.Index(p, []byte(serviceName(any)))
	if at < 0 {
		return nil, errors.New("the name does not stand in the hello")
	}
	return &opener{p, at + len("svc")}, nil
}

// to returns the opening for service i. It is good until the next call.
func (o *opener) to(i int) []byte {
	digits := o.p[o.digits : o.digits+nameDigits]
	for d := len(digits) - 1; d >= 0; d-- {
		digits[d] = '0' + byte(i%10)
		i /= 10
	}
	return o.p
}
