package checks

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"time"

	"culvert.dev/registry"
	"culvert.dev/tunnel"
)

const (
	maxHead = 16 << 10 // bytes of the head of an answer, with those of 1xx
	maxBody = 16 << 10 // bytes of a body that are read
)

// probe asks an address once, in the time it has, and returns nil if it is well.
func (c *Checker) probe(ctx context.Context, it *item) error {
	if !c.Budget.Take(1) {
		return tunnel.Refusef(tunnel.Overload, "check %s: no descriptor is left", it.Addr)
	}
	defer c.Budget.Give(1)
	ctx, cancel := context.WithTimeout(ctx, it.Check.Timeout)
	defer cancel()
	addr := netip.AddrPortFrom(it.Addr.Addr(), cmp.Or(it.Check.Port, it.Addr.Port()))
	ep := tunnel.Endpoint{Addr: addr, Host: it.Host, Named: it.Host == "" || registry.IsLocalhost(it.Host)}
	dialed, err := c.dial(ctx, it, &ep)
	if err != nil {
		return err
	}
	conn := dialed
	defer func() { _ = conn.Close() }()
	stop := context.AfterFunc(ctx, func() { _ = dialed.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	header := proxyHeaders[it.ProxyProtocol]
	if header != "" && !it.ProxyInsideTLS {
		if _, err := io.WriteString(conn, header); err != nil {
			return fmt.Errorf("send a PROXY header: %w", err)
		}
	}
	if it.TLS != nil {
		inside, err := it.TLS.Handshake(ctx, conn, &ep, nil)
		if err != nil {
			return err // which closes conn
		}
		conn = inside
		if header != "" && it.ProxyInsideTLS {
			if _, err := io.WriteString(conn, header); err != nil {
				return fmt.Errorf("send a PROXY header inside TLS: %w", err)
			}
		}
	}
	switch it.Check.Kind {
	case "tcp":
	case "tls":
		if it.TLS != nil {
			break // the handshake is complete, and the certificate was verified
		}
		name := it.Check.Host
		if name == "" {
			name = it.name
		}
		err = askTLS(ctx, conn, name)
	case "http":
		host := it.Check.Host
		if host == "" {
			host = addr.String()
		}
		err = askHTTP(conn, host, it.Check.Path, it.Check.Statuses)
	default:
		return tunnel.Refusef(tunnel.Prohibited, "check %s: no check is called %q", it.Addr, it.Check.Kind)
	}
	if err != nil && ctx.Err() != nil {
		// The context says why, the connection only that.
		if errors.Is(ctx.Err(), context.Canceled) {
			return ctx.Err()
		}
		return fmt.Errorf("%s: nothing that ends the check came within %v", it.Check.Kind, it.Check.Timeout)
	}
	return err
}

// dial connects to ep, which is to be probed for it.
func (c *Checker) dial(ctx context.Context, it *item, ep *tunnel.Endpoint) (net.Conn, error) {
	if it.Transport == nil {
		return c.Dial(ctx, *ep)
	}
	ep.Named = true
	return it.Transport.Dial(ctx, ep, &tunnel.Request{Proto: "check"})
}

// proxyHeaders are, by version, the headers of a connection that has no client:
// it is the sender's own. PROXY protocol sections 2.1 and 2.2, LOCAL.
var proxyHeaders = map[int]string{
	1: "PROXY UNKNOWN\r\n",
	2: "\r\n\r\n\x00\r\nQUIT\n\x20\x00\x00\x00",
}

// askTLS sends a ClientHello and looks for a record of TLS in answer: RFC 8446
// sections 5.1 and 6.
func askTLS(ctx context.Context, conn net.Conn, name string) error {
	hello, err := clientHello(ctx, name)
	if err != nil {
		return tunnel.Refusef(tunnel.Prohibited, "tls: no hello can be made for %q: %w", name, err)
	}
	// The reset tells the server at once that nothing follows, and leaves neither
	// side in TIME-WAIT.
	if l, ok := conn.(interface{ SetLinger(int) error }); ok {
		_ = l.SetLinger(0)
	}
	if _, err := conn.Write(hello); err != nil {
		return fmt.Errorf("tls: send a hello: %w", err)
	}
	const (
		alert       = 21 // content types
		handshake   = 22
		serverHello = 2 // of handshake; a HelloRetryRequest is one, too
	)
	answer := make([]byte, 6) // type, version, length, and the first byte
	if n, err := io.ReadFull(conn, answer); err != nil {
		if n == 0 {
			return fmt.Errorf("tls: no answer to a hello: %w", err)
		}
		return fmt.Errorf("tls: the answer to a hello ends after %d bytes: %w", n, err)
	}
	length := int(answer[3])<<8 | int(answer[4])
	switch {
	case answer[1] != 3 || length == 0 || length > 1<<14+256:
	case answer[0] == handshake && answer[5] == serverHello:
		return nil
	case answer[0] == alert && length == 2 && (answer[5] == 1 || answer[5] == 2): // warning or fatal
		return nil
	}
	return fmt.Errorf("tls: the answer to a hello is not TLS, it begins with %q", answer)
}

// clientHello returns the record of a ClientHello for name, "" for none.
func clientHello(ctx context.Context, name string) ([]byte, error) {
	var rec recorder
	client := tls.Client(&rec, &tls.Config{
		ServerName:         name,
		InsecureSkipVerify: true, // nothing is ever shown
		MinVersion:         tls.VersionTLS12,
		// The small key share: the key is not used, and a server that wants another
		// group says so, which is an answer.
		CurvePreferences: []tls.CurveID{tls.X25519, tls.CurveP256},
	})
	err := client.HandshakeContext(ctx)
	if len(rec.sent) == 0 {
		return nil, err
	}
	return rec.sent, nil
}

// A recorder is a connection that records the bytes written to it and returns
// none.
type recorder struct {
	net.Conn
	sent []byte
}

func (r *recorder) Write(p []byte) (int, error) {
	r.sent = append(r.sent, p...)
	return len(p), nil
}
func (*recorder) Read([]byte) (int, error)         { return 0, io.EOF }
func (*recorder) Close() error                     { return nil }
func (*recorder) SetDeadline(time.Time) error      { return nil }
func (*recorder) SetWriteDeadline(time.Time) error { return nil }

// askHTTP sends a GET and returns nil if the status of the answer is one of those
// expected.
func askHTTP(conn net.Conn, host, path string, expected registry.Statuses) error {
	if strings.ContainsFunc(host+path, func(r rune) bool { return r <= ' ' || r == 0x7f }) {
		return tunnel.Refusef(tunnel.Prohibited, "http: host %q or path %q has a space or control character in it", host, path)
	}
	var req bytes.Buffer
	fmt.Fprintf(&req, "GET %s HTTP/1.1\r\nHost: %s\r\nUser-Agent: culvert-check\r\nAccept: */*\r\nConnection: close\r\n\r\n", path, host)
	if _, err := conn.Write(req.Bytes()); err != nil {
		return fmt.Errorf("http: send a request: %w", err)
	}
	limited := &io.LimitedReader{R: conn, N: maxHead}
	r := bufio.NewReader(limited)
	for {
		resp, err := http.ReadResponse(r, nil)
		if err != nil {
			if limited.N == 0 {
				return fmt.Errorf("http: no head of an answer in %d bytes", maxHead)
			}
			return fmt.Errorf("http: no answer that can be read: %w", err)
		}
		if resp.StatusCode < 200 && resp.StatusCode != http.StatusSwitchingProtocols {
			continue // 100, 103: the answer comes after it
		}
		limited.N = maxBody // and a little that is read already
		_, _ = io.Copy(io.Discard, resp.Body)
		if !expected.Has(resp.StatusCode) {
			return fmt.Errorf("http: the status is %d, want %s", resp.StatusCode, expected)
		}
		return nil
	}
}
