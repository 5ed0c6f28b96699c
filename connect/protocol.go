package connect

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"culvert.dev/tunnel"
)

// established accepts a request. HTTP/1.0 clients get it too: the version is the
// proxy's own (RFC 9110 section 2.5), and a 2xx to CONNECT has no
// Content-Length and no Transfer-Encoding (section 9.3.6).
const established = "HTTP/1.1 200 Connection Established\r\n\r\n"

// acceptTimeout limits the write of the 200. It fits in any socket buffer, so only other
// carriers reach the limit.
const acceptTimeout = time.Second

// A Protocol is the proxy side of CONNECT over HTTP/1.x. The zero value serves every
// client that can connect: the Handler decides what may be reached. A Protocol is safe
// for any number of connections at once.
type Protocol struct {
	// Auth, if set, has to accept the credentials of every request. What is wrong with
	// a target is said only after it has, so a 407 reveals nothing about names.
	Auth Authenticator

	// Intermediary is the load balancer in front, if there is one.
	Intermediary Intermediary

	// Via is this gateway's pseudonym: a request that names it in Via or
	// CDN-Loop has been here before. Unique among the gateways of a chain;
	// "" means loops are ended by their length only.
	Via        string
	CurrentVia func() string // if set, takes the place of Via; called for every request

	// ProxyName is the name of this gateway in Proxy-Status; "" means "culvert".
	ProxyName string

	// Delegate, if set, returns who has made req, where its client has a verified
	// certificate and states something of a caller, and sets the StatedSource of req where that
	// is stated. req.TLS.Peer is the client. One that may not do that is the caller itself:
	// req.Peer. An error refuses the request. For any other client the fields have no meaning.
	Delegate DelegateFunc
}

// A DelegateFunc is a Protocol's Delegate.
type DelegateFunc func(req *tunnel.Request, stated Stated) (tunnel.Peer, error)

// Stated is what a gateway states of the caller of a request that it passes on: the values of
// all fields of each name.
type Stated struct {
	Callers []string // Culvert-Peer: an assertion
	Sources []string // Culvert-Source: the address and port of the client
}

// SourceField is the field in which a gateway states the address and port of a client.
const SourceField = "Culvert-Source"

// via returns this gateway's pseudonym.
func (p *Protocol) via() string {
	if p.CurrentVia != nil {
		return p.CurrentVia()
	}
	return p.Via
}

var _ tunnel.Protocol = (*Protocol)(nil)

// Name returns "connect".
func (*Protocol) Name() string { return "connect" }

// Openings that have the form of a request line and belong to others.
var foreign = []string{"PRI * HTTP/2.0\r\n", "SSH-", "PROXY "}

// maxMethod is how much of a method Sniff reads. The longest registered one
// has 17 bytes.
const maxMethod = 24

// Sniff returns Yes for a word and a space, which begin every HTTP/1.x request of any
// method: ServeConn can then answer with what is wrong with it. The preface of HTTP/2,
// SSH and the PROXY protocol belong to other protocols.
func (*Protocol) Sniff(b []byte) tunnel.Verdict {
	for _, s := range foreign {
		n := min(len(b), len(s))
		switch {
		case string(b[:n]) != s[:n]:
		case n == len(s):
			return tunnel.No
		default:
			return tunnel.More
		}
	}
	for i, c := range b[:min(len(b), maxMethod+1)] {
		switch {
		case c == ' ' && i > 0:
			return tunnel.Yes
		case !isToken(c):
			return tunnel.No
		}
	}
	if len(b) > maxMethod {
		return tunnel.No
	}
	return tunnel.More
}

// HasPreamble implements tunnel.PreambleDetector: the head has come, or cannot any more.
func (*Protocol) HasPreamble(prefix []byte) bool {
	_, err := ParseHead(prefix)
	return err != ErrMore
}

// ServeConn implements tunnel.Protocol. It reads one head, calls h at most
// once, and returns when h does. If it refuses the request itself it has closed c.
//
// req.Accept writes the 200 and returns c itself, which begins with the bytes that the
// client sent behind its head. req.Refuse answers with the Refusal of Answer.
func (p *Protocol) ServeConn(ctx context.Context, c *tunnel.Conn, h tunnel.Handler) error {
	head, err := ReadHead(ctx, c)
	if err != nil {
		p.refuse(c, nil, err)
		return err
	}
	c.Discard(head.Len)
	req := c.NewRequest(p.Name())
	if err := checkHead(&head); err != nil {
		p.refuse(c, nil, err)
		return err
	}
	ctx, err = p.Admit(ctx, req, head.Target, head.Fields)
	if err != nil {
		p.refuse(c, nil, err)
		return p.Intermediary.ReportRefused(h, req, err)
	}
	req.Accept = func() (tunnel.Stream, error) {
		_ = c.SetWriteDeadline(time.Now().Add(acceptTimeout))
		if _, err := io.WriteString(c, established); err != nil {
			return nil, &tunnel.Error{Reason: tunnel.Gone, Err: fmt.Errorf("connect: the client left before it was answered: %w", err)}
		}
		return c.Accept()
	}
	req.Refuse = func(err error) { p.refuse(c, req, err) }
	h.ServeTunnel(ctx, req)
	return nil
}

// readError returns why a head could not be read to its end.
func readError(ctx context.Context, c *tunnel.Conn, err error) error {
	if errors.Is(ctx.Err(), context.Canceled) {
		return tunnel.Refusef(tunnel.Drain, "connect: stopped after %d bytes of a head", len(c.Buffered()))
	}
	return tunnel.PreambleError(c, err)
}

// checkHead judges what HTTP/1.x has and later versions do not.
//
// A Host that is not the target's is let pass: clients leave out the port or
// copy it from elsewhere, and nothing is ever decided by it (RFC 9112 section
// 3.2.2 has a proxy ignore it). Two of them, or one that is no host, are an
// error by section 3.2, and so is none in HTTP/1.1. openssl, ncat and Python
// send CONNECT in HTTP/1.0 without.
func checkHead(h *Head) error {
	if h.Method != "CONNECT" {
		return tunnel.Refusef(tunnel.BadMethod, "connect: method %q, want CONNECT", tunnel.Clip(h.Method))
	}
	host, n := h.Fields.Get("Host")
	switch {
	case n > 1:
		return badRequest("%d Host fields", n)
	case n == 0 && h.Minor > 0:
		return badRequest("no Host field in HTTP/1.%d", h.Minor)
	case !isHost(host):
		return badRequest("Host field is not a host")
	}
	// CONNECT has no content, and a length another proxy believed in is the
	// start of a smuggled request. "Content-Length: 0" is no exception.
	for _, name := range []string{"Content-Length", "Transfer-Encoding"} {
		if _, n := h.Fields.Get(name); n > 0 {
			return badRequest("CONNECT with %s", name)
		}
	}
	return nil
}

// refuse sends a refusal and closes c.
func (p *Protocol) refuse(c *tunnel.Conn, req *tunnel.Request, err error) {
	r := p.Refusal(req, err)
	r.Send(c, req, p.ProxyName)
}

func badRequest(format string, args ...any) error {
	return tunnel.Refusef(tunnel.BadRequest, "connect: "+format, args...)
}

// isHost reports whether s could be "host", "host:port" or empty: the bytes
// of RFC 3986 section 3.2.2, without the comma that joins two fields.
func isHost(s string) bool {
	for i := range len(s) {
		if !isAlnum(s[i]) && strings.IndexByte("-._~%!$&'()*+;=:[]", s[i]) < 0 {
			return false
		}
	}
	return true
}
