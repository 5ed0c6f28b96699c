package connect

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"strings"
	"time"

	"culvert.dev/internal/records"
	"culvert.dev/tunnel"
)

// What a Dialer waits, at most, where its fields say nothing.
const (
	defaultWait    = 15 * time.Second
	defaultTimeout = 5 * time.Second
)

const (
	maxInterim = 8   // 1xx answers before the one that counts
	maxQuote   = 200 // bytes of a refusal's body that are read for the error
)

// A Dialer reaches its destinations through an HTTP proxy, by CONNECT over
// HTTP/1.1. It is a tunnel.Dialer, so one can be the way to another. It is
// safe for concurrent use and keeps no connections.
type Dialer struct {
	// Proxy is the address of the proxy, "host:port".
	Proxy string

	// Dialer is the way to the proxy; nil means a net.Dialer.
	Dialer tunnel.Dialer

	// TLS, if set, is used to the proxy; without a ServerName it asks for
	// the host of Proxy. Nil means plaintext.
	TLS *tls.Config

	// Authorization is the value of Proxy-Authorization: see
	// BasicCredentials and BearerCredentials. "" sends none.
	Authorization string

	// Header, if set, returns more fields for a request: for credentials
	// that change, among others.
	Header func(ctx context.Context, addr string) (Fields, error)

	// SessionHeader, if set, returns more fields for a request that DialContext sends, which
	// depend on the TLS session.
	SessionHeader SessionFields

	// Answer, if set, sees the status and the field lines of each answer to
	// DialContext but interim ones. Its error makes of a 2xx a wrong answer.
	Answer func(status int, fields Fields) error

	// Via is this gateway's pseudonym, which the request carries so that a
	// Protocol with the same name sees a loop. "" sends only the names of
	// the proxies the request in ctx came through.
	Via string

	// Wait is how long the TLS handshake with the proxy may take, and how long
	// the beginning of its answer: it dials in that time. 0 means 15 s.
	Wait time.Duration

	// Timeout is how long a head of the proxy's may take from its first byte
	// to its last. 0 means 5 s.
	Timeout time.Duration
}

var _ tunnel.Dialer = (*Dialer)(nil)

// DialContext asks the proxy for addr, a "host:port" that ParseAuthority
// takes; network is "tcp". The ctx covers all of it and nothing after; it is
// the only limit on reaching the proxy where Dialer has none of its own.
//
// The net.Conn has CloseWrite, belongs to the caller, and begins with what
// the proxy sent behind its answer. Where that was nothing and there is no
// TLS, it is the very connection that leads to the proxy; otherwise it is a
// tunnel.Stream around that, and without TLS a tunnel.Unwrapper.
//
// A refusal is a *tunnel.Error with the Reason the proxy gave in Proxy-Status
// or, failing that, the one its status comes nearest to.
func (d *Dialer) DialContext(ctx context.Context, network, addr string) (net.Conn, error) {
	if network != "tcp" {
		return nil, net.UnknownNetworkError(network)
	}
	head, err := d.request(ctx, addr)
	if err != nil {
		return nil, err
	}
	conn, early, err := d.exchange(ctx, head, addr, d.SessionHeader, func(status int, fields Fields) (bool, error) {
		if d.Answer != nil {
			if err := d.Answer(status, fields); err != nil && status/100 == 2 {
				return false, err
			}
		}
		return status/100 == 2, nil
	})
	if err != nil {
		return nil, err
	}
	return newStream(conn, early), nil
}

// Exchange reaches the proxy, sends it head, and reads its answer. It is what
// carriers share whose streams begin with an HTTP/1.1 request: of d it uses
// Proxy, Dialer, TLS, Wait and Timeout. addr is for errors.
//
// The function yes judges the answer, which is any but an interim one; 101
// counts. Where it says false, the answer is a refusal and becomes a
// *tunnel.Error as with DialContext; where it says an error, the answer is no
// answer to head.
//
// The conn belongs to the caller, has no deadline, and has sent early behind
// its answer.
func (d *Dialer) Exchange(ctx context.Context, head []byte, addr string, yes func(status int, fields Fields) (bool, error)) (conn net.Conn, early []byte, err error) {
	return d.exchange(ctx, head, addr, nil, yes)
}

// exchange is Exchange with the fields that more returns added to head.
func (d *Dialer) exchange(ctx context.Context, head []byte, addr string, more SessionFields, yes func(status int, fields Fields) (bool, error)) (conn net.Conn, early []byte, err error) {
	way := d.Dialer
	if way == nil {
		way = new(net.Dialer)
	}
	nc, err := d.reach(ctx, way)
	if err != nil {
		return nil, nil, err
	}
	raw := nc
	if t, ok := nc.(*records.Conn); ok && d.TLS != nil {
		raw = t.NetConn()
	}

	// A close wakes whatever waits on raw, where a deadline could be
	// overwritten by one of ours.
	closed := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		_ = raw.Close()
		close(closed)
	})
	conn, early, err = d.open(ctx, nc, head, addr, more, yes)
	if !stop() {
		<-closed
		err = d.failed(ctx, "was given up", ctx.Err())
	}
	if err == nil {
		if err = raw.SetDeadline(time.Time{}); err != nil {
			err = d.failed(ctx, "is gone", err)
		}
	}
	if err != nil {
		_ = raw.Close()
		return nil, nil, err
	}
	return conn, early, nil
}

// request returns the head to send.
func (d *Dialer) request(ctx context.Context, addr string) ([]byte, error) {
	to, err := ParseAuthority(addr)
	if err != nil {
		return nil, &tunnel.Error{Reason: tunnel.BadRequest, Err: err}
	}
	fields := Fields{{"Host", to.String()}}
	if via, ok := ViaField(ctx, "1.1", d.Via); ok {
		fields = append(fields, via)
	}
	if d.Authorization != "" {
		fields = append(fields, Field{"Proxy-Authorization", d.Authorization})
	}
	if d.Header != nil {
		more, err := d.Header(ctx, addr)
		if err != nil {
			return nil, fmt.Errorf("connect: fields for %q: %w", addr, err)
		}
		fields = append(fields, more...)
	}
	for i, f := range fields {
		if err := checkField(f, i > 0); err != nil {
			return nil, err
		}
	}
	return fields.Request("CONNECT", to.String()), nil
}

// Check refuses fields that would change the request around them: what is no
// name or no value, and Host, Content-Length and Transfer-Encoding. Its error
// quotes no value.
func (f Fields) Check() error {
	for _, field := range f {
		if err := checkField(field, true); err != nil {
			return err
		}
	}
	return nil
}

// Request returns the head of an HTTP/1.1 request with these fields, which
// are not checked.
func (f Fields) Request(method, target string) []byte {
	b := fmt.Appendf(nil, "%s %s HTTP/1.1\r\n", method, target)
	return append(f.append1(b), "\r\n"...)
}

// checkField refuses what would change the request around it. It does not
// quote the value, which may be a secret.
func checkField(f Field, more bool) error {
	ok := f.Name != ""
	for i := range len(f.Name) {
		ok = ok && isToken(f.Name[i])
	}
	if !ok {
		return fmt.Errorf("connect: %q is not a field name", f.Name)
	}
	for i := range len(f.Value) {
		if !isValue(f.Value[i]) {
			return fmt.Errorf("connect: field %s has byte %#02x at offset %d", f.Name, f.Value[i], i)
		}
	}
	if more {
		for _, ours := range []string{"Host", "Content-Length", "Transfer-Encoding"} {
			if strings.EqualFold(f.Name, ours) {
				return fmt.Errorf("connect: field %s cannot be set", f.Name)
			}
		}
	}
	return nil
}

// reach connects to the proxy, with TLS where there is to be some.
func (d *Dialer) reach(ctx context.Context, way tunnel.Dialer) (net.Conn, error) {
	if d.TLS == nil {
		c, err := way.DialContext(ctx, "tcp", d.Proxy)
		if err != nil {
			return nil, d.failed(ctx, "cannot be reached", err)
		}
		return c, nil
	}
	c, err := DialHandshake(ctx, way, "tcp", d.Proxy, func(ctx context.Context, raw net.Conn) (net.Conn, error) {
		ctx, cancel := context.WithTimeout(ctx, orElse(d.Wait, defaultWait))
		defer cancel()
		t := records.Client(raw, d.tlsConfig())
		if err := t.HandshakeContext(ctx); err != nil {
			_ = raw.Close()
			return nil, err
		}
		return t, nil
	})
	if failed, ok := err.(*HandshakeError); ok {
		return nil, d.failed(ctx, "did not complete the TLS handshake", failed.Err)
	} else if err != nil {
		return nil, d.failed(ctx, "cannot be reached", err)
	}
	return c, nil
}

// open sends head over conn and reads the answer.
func (d *Dialer) open(ctx context.Context, conn net.Conn, head []byte, addr string, more SessionFields, yes func(int, Fields) (bool, error)) (net.Conn, []byte, error) {
	wait := time.Now().Add(orElse(d.Wait, defaultWait))
	if err := conn.SetDeadline(wait); err != nil {
		return nil, nil, d.failed(ctx, "is gone", err)
	}
	if err := tunnel.HandshakeDone(ctx); err != nil {
		return nil, nil, d.failed(ctx, "is not asked", err)
	}
	fields, err := more.For(ctx, conn)
	if err != nil {
		return nil, nil, fmt.Errorf("connect: fields for %q: %w", addr, err)
	}
	if len(fields) > 0 { // in front of the empty line
		head = append(fields.append1(bytes.Clone(head[:len(head)-2])), "\r\n"...)
	}
	if _, err := conn.Write(head); err != nil {
		return nil, nil, d.failed(ctx, "did not take the request", err)
	}

	c := tunnel.NewConn(conn) // for its look-ahead
	for used, interim := 0, 0; ; interim++ {
		r, err := d.readReply(c, MaxHead-used, wait)
		if err != nil {
			return nil, nil, d.failed(ctx, "gave no answer that can be read", err)
		}
		c.Discard(r.Len)
		used += r.Len
		if r.status/100 != 1 || r.status == http.StatusSwitchingProtocols {
			switch ok, err := yes(r.status, r.Fields); {
			case err != nil:
				return nil, nil, d.failed(ctx, "gave a wrong answer", err)
			case !ok:
				return nil, nil, d.refused(c, r, addr)
			}
			return conn, bytes.Clone(c.Buffered()), nil
		}
		if interim == maxInterim {
			return nil, nil, d.failed(ctx, "gave no answer", fmt.Errorf("more than %d interim ones", maxInterim))
		}
	}
}

func (d *Dialer) tlsConfig() *tls.Config {
	cfg := d.TLS.Clone()
	if cfg.ServerName == "" {
		cfg.ServerName, _, _ = net.SplitHostPort(d.Proxy)
	}
	cfg.NextProtos = []string{"http/1.1"}
	return cfg
}

// readReply reads one head of at most limit bytes. Its first byte may come
// until wait, and the rest for Timeout from then on.
func (d *Dialer) readReply(c *tunnel.Conn, limit int, wait time.Time) (reply, error) {
	if err := c.SetDeadline(wait); err != nil {
		return reply{}, err
	}
	p := parser{reply: true}
	begun := false
	for {
		if len(c.Buffered()) > 0 && !begun {
			begun = true
			if err := c.SetDeadline(time.Now().Add(orElse(d.Timeout, defaultTimeout))); err != nil {
				return reply{}, err
			}
		}
		err := p.parse(c.Buffered())
		if err == nil && p.start > limit || err == ErrMore && len(c.Buffered()) >= limit {
			return reply{}, fmt.Errorf("heads of more than %d bytes", MaxHead)
		}
		if err == nil {
			return reply{Head: p.head(c.Buffered()), status: p.line.status}, nil
		}
		if err != ErrMore {
			return reply{}, err
		}
		if err := c.Fill(limit); err != nil {
			return reply{}, fmt.Errorf("after %d bytes: %w", len(c.Buffered()), err)
		}
	}
}

// refused makes an error of an answer that is not 2xx.
func (d *Dialer) refused(c *tunnel.Conn, r reply, addr string) error {
	body := ""
	if n := r.bodyLen(maxQuote); n > 0 {
		for len(c.Buffered()) < n && bytes.IndexByte(c.Buffered(), '\n') < 0 {
			if c.Fill(n) != nil {
				break // an error without its last words is still one
			}
		}
		line, _, _ := bytes.Cut(c.Buffered()[:min(n, len(c.Buffered()))], []byte("\n"))
		body = fmt.Sprintf(": %q", bytes.TrimRight(line, "\r"))
	}
	reason := r.reason()
	return tunnel.HopRefusedf(reason, "connect: proxy %q refused %q with status %d, %s%s", d.Proxy, addr, r.status, reason, body)
}

// failed is for a proxy that cannot be used.
func (d *Dialer) failed(ctx context.Context, what string, err error) error {
	if ctx.Err() != nil {
		// The caller's own doing: no Reason but what its context says.
		return fmt.Errorf("connect: proxy %q %s: %w", d.Proxy, what, ctx.Err())
	}
	e := Unusable(d.Proxy, what, err)
	switch e.Reason {
	case tunnel.DialTimeout, tunnel.Prohibited, tunnel.Loop, tunnel.Overload: // of the way to the proxy
	default:
		e.Reason = tunnel.DialFailed
	}
	return e
}

// Unusable makes an error of a proxy that can't be used, whichever version of
// HTTP it was to speak: what goes on behind its name, err is the reason. A
// Reason that err has, of the way to the proxy, stands.
func Unusable(proxy, what string, err error) *tunnel.Error {
	var ne net.Error
	reason := tunnel.DialFailed
	if why := tunnel.ReasonOf(err); why != tunnel.Internal {
		reason = why
	}
	if errors.Is(err, os.ErrDeadlineExceeded) || errors.As(err, &ne) && ne.Timeout() {
		reason = tunnel.DialTimeout
	}
	return tunnel.Refusef(reason, "connect: proxy %q %s: %w", proxy, what, err)
}

func orElse(d, otherwise time.Duration) time.Duration {
	if d > 0 {
		return d
	}
	return otherwise
}
