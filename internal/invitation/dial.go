package invitation

import (
	"context"
	"crypto/sha256"
	"crypto/subtle"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"strings"

	"culvert.dev/connect"
	"culvert.dev/connect/h2"
	"culvert.dev/tunnel"
)

// errPin is the error for a gateway whose public key is not the one in the token.
var errPin = errors.New("the gateway's key is not the one in the token: it is another gateway, or its key was replaced after the invitation; nothing was sent to it")

// Dial opens a stream to a reserved name at the gateway of t, by connections of dialer. The
// public key of the gateway is verified before anything is sent. The stream is the caller's
// to close; it may also end with ctx.
func (t *Token) Dial(ctx context.Context, dialer tunnel.Dialer, name string) (net.Conn, *tls.ConnectionState, error) {
	var wrong error
	cfg := &tls.Config{
		InsecureSkipVerify: true, // VerifyConnection verifies, by the public key
		VerifyConnection: func(cs tls.ConnectionState) error {
			spki := sha256.Sum256(cs.PeerCertificates[0].RawSubjectPublicKeyInfo)
			if subtle.ConstantTimeCompare(spki[:], t.SPKI) != 1 {
				wrong = errPin
				return errPin
			}
			return nil
		},
	}
	c, state, err := Dial(ctx, dialer, t.Transport, t.Address, cfg, name)
	if wrong != nil {
		return nil, nil, wrong
	}
	return c, state, err
}

// Dial opens a stream to a reserved name at the gateway at an address, by a transport of
// Transports and TLS 1.3, as Token.Dial does. It changes cfg, which verifies the gateway.
func Dial(ctx context.Context, dialer tunnel.Dialer, transport, address string, cfg *tls.Config, name string) (net.Conn, *tls.ConnectionState, error) {
	cfg.MinVersion = tls.VersionTLS13
	if cfg.ServerName == "" {
		cfg.ServerName, _, _ = net.SplitHostPort(address)
	}
	var state *tls.ConnectionState
	note := func(_ context.Context, cs *tls.ConnectionState) (connect.Fields, error) {
		state = cs
		return nil, nil
	}
	var d tunnel.Dialer
	if transport == "connect" {
		d = &connect.Dialer{Proxy: address, Dialer: dialer, TLS: cfg, SessionHeader: note}
	} else {
		two := &h2.Dialer{Proxy: address, Dialer: dialer, TLS: cfg, SessionHeader: note}
		d = two
		context.AfterFunc(ctx, func() { _ = two.Close() })
	}
	c, err := d.DialContext(ctx, "tcp", name+":443")
	switch {
	case err != nil:
		return nil, nil, fmt.Errorf("the gateway at %s can't be asked: %w%s", address, err, advice(err, cfg.ServerName))
	case state == nil:
		_ = c.Close()
		return nil, nil, errors.New("the gateway speaks no TLS")
	}
	return c, state, nil
}

// advice returns what to change at a gateway that can't be asked by TLS for host, as the end of an
// error. It is "" if err says that itself.
func advice(err error, host string) string {
	var op *net.OpError
	var plain tls.RecordHeaderError
	switch {
	case errors.As(err, &plain):
		return "; the port does not speak TLS: the gateway has to invite by the address of a listener with tls"
	case !errors.As(err, &op) || op.Op != "remote error":
	case strings.Contains(op.Err.Error(), "unrecognized name"):
		return fmt.Sprintf("; no listener there ends TLS for %q: the gateway needs that name in tls.names of one, or has to invite by another address", host)
	case strings.Contains(op.Err.Error(), "certificate required"):
		return "; the listener there lets in only callers with a certificate: it needs clientCertificates: optional"
	}
	return ""
}
