package sni

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"

	"culvert.dev/tunnel"
)

// A Refusal is the answer to a client that is refused.
type Refusal uint8

const (
	// RefuseAlert sends the TLS alert that says why, in the clear, and ends
	// the connection: every TLS client turns it into an error people can read.
	RefuseAlert Refusal = iota

	// RefuseClose resets the connection without a word, as Gateway API's
	// conformance tests want it.
	RefuseClose
)

// A Protocol passes TLS on by the name in its ClientHello, which it does not
// consume: the server gets every byte the client sent. The zero value is
// ready to use.
type Protocol struct {
	Refusal Refusal // zero means RefuseAlert

	// Nameless makes a request, with a zero Name, of a hello that has no
	// server name extension. It is for whoever serves all names alike.
	Nameless bool
}

// Name returns "sni".
func (*Protocol) Name() string { return "sni" }

// Sniff returns Yes for the start of any TLS record and for an SSLv2 hello: TLS
// that does not begin with a hello gets an answer in TLS, too.
func (*Protocol) Sniff(prefix []byte) tunnel.Verdict {
	switch lead(prefix) {
	case leadTLS, leadSSL2:
		return tunnel.Yes
	case leadMore:
		return tunnel.More
	}
	return tunnel.No
}

// HasPreamble implements tunnel.PreambleDetector: the hello has come, or cannot any more.
// It reads the headers of the records and of the message, and leaves the message to
// ServeConn: a hello is parsed once.
func (*Protocol) HasPreamble(prefix []byte) bool { return complete(prefix) }

// ServeConn reads the ClientHello of c, whatever the first bytes of c are, and
// calls h once if it names somebody.
func (p *Protocol) ServeConn(ctx context.Context, c *tunnel.Conn, h tunnel.Handler) error {
	var parser Parser
	for {
		hello, err := parser.Feed(c.Buffered())
		var bad *ParseError
		switch {
		case err == nil && hello.NameErr != nil && !(p.Nameless && hello.NameErr == ErrNoName):
			err := &tunnel.Error{Reason: tunnel.NoSNI, Err: hello.NameErr}
			p.refuse(c, err)
			return err
		case err == nil:
			req := c.NewRequest(p.Name())
			req.Name = hello.Name
			req.ALPN = offered(&hello)
			req.Hello = tunnel.Fingerprint(c.Buffered()[:hello.Len])
			req.FirstBytes = c.Buffered()
			req.Refuse = func(err error) { p.refuse(c, err) }
			h.ServeTunnel(ctx, req)
			return nil
		case errors.As(err, &bad):
			err := &tunnel.Error{Reason: bad.Reason, Err: err}
			if bad.Reason == tunnel.BadPreamble {
				return p.notTLS(c, err)
			}
			p.refuse(c, err)
			return err
		}
		if err := c.Fill(MaxRaw); err != nil {
			return tunnel.PreambleError(c, err)
		}
	}
}

// offered returns the first of the client's ALPN protocols. A Request lives as long as
// the tunnel, and a hello has room for 30,000; real clients offer three.
func offered(h *Hello) []string {
	list := h.ALPN()
	if len(list) <= tunnel.MaxALPN {
		return list
	}
	short := make([]string, tunnel.MaxALPN)
	for i := range short {
		short[i] = strings.Clone(list[i]) // or the whole list would be kept
	}
	return short
}

// refuse tells the client no and closes c.
func (p *Protocol) refuse(c *tunnel.Conn, err error) {
	a := AlertFor(err)
	if a == 0 || p.Refusal == RefuseClose {
		_ = c.Abort()
		return
	}
	// A fatal alert in a record of its own: RFC 8446 section 6.
	c.CloseWithMessage([]byte{21, 3, 3, 0, 2, 2, byte(a)})
}

// AlertFor returns the TLS alert that a client gets for each Reason; 0 means a close without an
// alert. Names that are unknown and names that are private get the same answer, so that no client
// can probe for private services.
func AlertFor(err error) Alert {
	var bad *ParseError
	if errors.As(err, &bad) {
		return bad.Alert
	}
	switch tunnel.ReasonOf(err) {
	case tunnel.NoSNI, tunnel.NoRoute, tunnel.NotExposed:
		return UnrecognizedName
	case tunnel.Denied, tunnel.Prohibited, tunnel.NoAuth:
		return AccessDenied
	case tunnel.Insecure:
		return InsufficientSecurity
	case tunnel.BadHello:
		return DecodeError
	case tunnel.NoHello, tunnel.HelloTimeout, tunnel.BadPreamble, tunnel.Gone:
		return 0
	}
	return InternalError // all that is the gateway's or the service's, and not the client's
}

const maxLine = 4 << 10 // bytes of an HTTP request line that gets an answer

// notTLS answers a client that does not speak TLS, on a listener that speaks
// nothing else: a few words for HTTP, which a person may have typed, and a
// reset for the rest.
func (p *Protocol) notTLS(c *tunnel.Conn, err *tunnel.Error) error {
	for p.Refusal == RefuseAlert {
		switch requestLine(c.Buffered()) {
		case tunnel.Yes:
			const body = "TLS expected\n"
			c.CloseWithMessage(fmt.Appendf(nil, "HTTP/1.1 400 Bad Request\r\nContent-Type: text/plain; charset=utf-8\r\n"+
				"Content-Length: %d\r\nConnection: close\r\n\r\n%s", len(body), body))
			return err
		case tunnel.More:
			switch ferr := c.Fill(maxLine); {
			case errors.Is(ferr, io.ErrShortBuffer): // the line is too long to be worth an answer
			case ferr != nil:
				return tunnel.PreambleError(c, ferr)
			default:
				continue
			}
		}
		break
	}
	_ = c.Abort()
	return err
}

// requestLine judges whether b begins with a request line of HTTP/1, RFC 9112
// section 3.
func requestLine(b []byte) tunnel.Verdict {
	const version = " HTTP/1."
	i := 0
	for i < len(b) && 'A' <= b[i] && b[i] <= 'Z' {
		i++
	}
	switch {
	case i > len("UPDATEREDIRECTREF"): // the longest method registered
		return tunnel.No
	case i == len(b):
		return tunnel.More
	case i == 0 || b[i] != ' ':
		return tunnel.No
	}
	for i++; i < len(b); i++ {
		switch c := b[i]; {
		case c == ' ':
			rest := b[i:min(i+len(version), len(b))]
			switch {
			case string(rest) != version[:len(rest)]:
				return tunnel.No
			case len(rest) < len(version):
				return tunnel.More
			}
			return tunnel.Yes
		case c < ' ' || c > '~':
			return tunnel.No
		}
	}
	return tunnel.More
}
