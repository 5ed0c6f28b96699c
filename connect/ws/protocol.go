package ws

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"strings"
	"time"

	"culvert.dev/connect"
	"culvert.dev/tunnel"
)

// acceptTimeout limits the write of the 101. It fits in any socket buffer, so only
// other carriers reach the limit.
const acceptTimeout = time.Second

// A Protocol is the server side. The zero value serves everybody but browsers:
// what may be reached is the Handler's to say. It is safe for any number of
// connections at once.
type Protocol struct {
	// Path is in front of the destination, or all of the path where the
	// destination is in Culvert-Target. It begins and ends with a slash; ""
	// means DefaultPath.
	Path string

	// Hosts, if there are any, are the names that the Host field may have,
	// in lower case and without a port.
	Hosts []string

	// Origins are what the Origin field may be, as browsers send it:
	// "https://app.example.com". A request with any other is refused, and
	// where there are none so is every request with an Origin: a page must not
	// use what its visitor can reach.
	Origins []string

	// Auth, if set, has to accept the Authorization field of every request.
	// Cookies authenticate nobody.
	Auth connect.Authenticator

	// Intermediary is the load balancer in front, if there is one.
	Intermediary connect.Intermediary

	// Via and CurrentVia say what this gateway's pseudonym is, as in connect.Protocol.
	Via        string
	CurrentVia func() string

	// ProxyName is the name of this gateway in Proxy-Status; "" means "culvert".
	ProxyName string

	// Options are those of the streams.
	Options Options
}

var (
	_ tunnel.Protocol         = (*Protocol)(nil)
	_ tunnel.PreambleDetector = (*Protocol)(nil)
	_ connect.ExtendedService = (*Protocol)(nil)
)

// Name returns "websocket".
func (*Protocol) Name() string { return "websocket" }

const opening = "GET "

// Sniff returns Yes for "GET ", whether a handshake follows or not. On a listener with
// connect, which takes every method, this Protocol comes first.
func (*Protocol) Sniff(b []byte) tunnel.Verdict {
	n := min(len(b), len(opening))
	switch {
	case string(b[:n]) != opening[:n]:
		return tunnel.No
	case n < len(opening):
		return tunnel.More
	}
	return tunnel.Yes
}

// HasPreamble implements tunnel.PreambleDetector: the head is complete, or cannot be one.
func (*Protocol) HasPreamble(prefix []byte) bool {
	_, err := connect.ParseHead(prefix)
	return err != connect.ErrMore
}

// ServeConn implements tunnel.Protocol. It reads one head, calls h at most
// once, and returns when h does. Where it refuses by itself it has closed c.
//
// req.Accept answers with 101 and returns a *Stream; req.Refuse answers as
// connect.Answer does, with 401 in place of 407.
func (p *Protocol) ServeConn(ctx context.Context, c *tunnel.Conn, h tunnel.Handler) error {
	head, err := connect.ReadHead(ctx, c)
	if err != nil {
		p.refuse(c, nil, err)
		return err
	}
	c.Discard(head.Len)
	req := c.NewRequest(p.Name())
	u, err := checkUpgrade(&head)
	if err != nil {
		p.refuse(c, nil, err)
		return err
	}
	host, _ := head.Fields.Get("Host")
	ctx, err = p.Admit(ctx, req, host, head.Target, head.Fields)
	if err != nil {
		p.refuse(c, nil, err)
		return p.Intermediary.ReportRefused(h, req, err)
	}
	req.Accept = func() (tunnel.Stream, error) {
		_ = c.SetWriteDeadline(time.Now().Add(acceptTimeout))
		if _, err := io.WriteString(c, u.answer()); err != nil {
			return nil, &tunnel.Error{Reason: tunnel.Gone, Err: fmt.Errorf("ws: the client left before it was answered: %w", err)}
		}
		s, err := c.Accept()
		if err != nil {
			return nil, err
		}
		return NewStream(s, Server, u.subprotocol, p.Options), nil
	}
	req.Refuse = func(err error) { p.refuse(c, req, err) }
	h.ServeTunnel(ctx, req)
	return nil
}

// answer returns the 101.
func (u *upgrade) answer() string {
	s := "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Accept: " + acceptKey(u.key) + "\r\n"
	if u.subprotocol != "" {
		s += "Sec-WebSocket-Protocol: " + u.subprotocol + "\r\n"
	}
	return s + "\r\n"
}

// Admit checks what a handshake has in every HTTP version: its origin, credentials
// and destination. host is its Host or :authority, target its path. Admit completes
// req and returns the context for the Handler, which has the gateways that the
// request came through.
func (p *Protocol) Admit(ctx context.Context, req *tunnel.Request, host, target string, fields connect.Fields) (context.Context, error) {
	sent, n, err := p.Intermediary.Read(req, "Authorization", fields)
	if err != nil {
		return nil, tunnel.Refusef(tunnel.ReasonOf(err), "ws: %w", err)
	}
	if len(p.Hosts) > 0 && !slices.Contains(p.Hosts, bare(host)) {
		return nil, refuse(tunnel.BadRequest, http.StatusMisdirectedRequest, nil, "host %q is not served here", tunnel.Clip(host))
	}
	switch origin, n := fields.Get("Origin"); {
	case n > 1:
		return nil, bad("%d Origin fields", n)
	case n == 1 && !slices.ContainsFunc(p.Origins, func(o string) bool { return len(o) == len(origin) && strings.EqualFold(o, origin) }):
		return nil, refuse(tunnel.Denied, http.StatusForbidden, nil, "origin %q is not allowed", tunnel.Clip(origin))
	}
	path := p.Path
	if path == "" {
		path = DefaultPath
	}
	to, wrong := destination(target, path, fields)
	if p.Auth != nil {
		if err := connect.Authenticate(ctx, p.Auth, req, sent, n, connect.Credentials{Authority: to, Fields: fields}); err != nil {
			return nil, tunnel.Refusef(tunnel.ReasonOf(err), "ws: %w", err)
		}
	}
	if wrong != nil {
		return nil, wrong
	}
	req.Name, req.Addr, req.Port = to.Name, to.Addr, to.Port
	via := p.Via
	if p.CurrentVia != nil {
		via = p.CurrentVia()
	}
	hops, err := fields.Hops(via, to)
	if err != nil {
		return nil, err
	}
	return connect.WithVia(ctx, hops), nil
}

// AdmitList implements connect.ExtendedService. It is Admit for an extended CONNECT for
// "websocket", RFC 8441 section 5, with what is left there of the rest of a handshake.
// HTTP/2 has no 426, so another version is refused with 400.
func (p *Protocol) AdmitList(ctx context.Context, req *tunnel.Request, list *connect.HeaderList) (_ context.Context, answer connect.Fields, err error) {
	if s := strings.ToLower(list.Scheme); s != "http" && s != "https" {
		return nil, nil, bad("scheme %q, want https", tunnel.Clip(list.Scheme))
	}
	if err := checkVersion(list.Fields, http.StatusBadRequest); err != nil {
		return nil, nil, err
	}
	if ctx, err = p.Admit(ctx, req, list.Authority, list.Path, list.Fields); err != nil {
		return nil, nil, err
	}
	if subprotocol := choose(list.Fields); subprotocol != "" {
		answer = connect.Fields{{Name: subprotocolField, Value: subprotocol}}
	}
	return ctx, answer, nil
}

// NewStream implements connect.ExtendedService: it returns a *Stream with the subprotocol
// that the answer names.
func (p *Protocol) NewStream(s tunnel.Stream, answer connect.Fields) tunnel.Stream {
	subprotocol, _ := answer.Get(subprotocolField)
	return NewStream(s, Server, subprotocol, p.Options)
}

// subprotocolField is the field of an answer to an extended CONNECT, in lower case as
// HTTP/2 has it.
const subprotocolField = "sec-websocket-protocol"

// bare returns a host without its port, in lower case.
func bare(host string) string {
	if h, _, err := net.SplitHostPort(host); err == nil {
		host = h
	}
	return strings.ToLower(strings.TrimSuffix(host, "."))
}

// Refusal is connect.Answer with what is different for a WebSocket: the server
// is an origin and no proxy, so it asks for Authorization by 401.
func (p *Protocol) Refusal(req *tunnel.Request, err error) connect.Refusal {
	r := connect.Answer(req, err)
	if reason := tunnel.ReasonOf(err); req == nil && (reason == tunnel.BadRequest || reason == tunnel.Denied) {
		r.Text = strings.TrimPrefix(r.Text, "ws: ")
	}
	if s := (*statusError)(nil); errors.As(err, &s) {
		r.Status, r.Extra = s.status, s.extra
		r.Text = strings.TrimPrefix(s.Error(), "ws: ")
		r.Reason = tunnel.ReasonOf(err) // said by this package, of what the client sent
	}
	if r.Reason == tunnel.NoAuth {
		r.Status = http.StatusUnauthorized
		if p.Auth != nil {
			for _, challenge := range p.Auth.Challenges() {
				r.Extra = append(r.Extra, connect.Field{Name: "WWW-Authenticate", Value: challenge})
			}
		}
	}
	return r
}

func (p *Protocol) refuse(c *tunnel.Conn, req *tunnel.Request, err error) {
	r := p.Refusal(req, err)
	r.Send(c, req, p.ProxyName)
}
