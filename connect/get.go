package connect

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	"culvert.dev/tunnel"
)

// An HTTP serves requests for http:// URLs, for programs that are told of it by http_proxy:
// GET http://shop.example/ HTTP/1.1 and other methods in absolute form, RFC 9112 section
// 3.2.2. Each goes to port 80 of the service by the URL's name, or to the URL's port. A
// connection carries one request: the service is told to close it after its response, and
// what the client sends behind the request is dropped. Content has a Content-Length or comes in
// chunks, which are written anew; a request with both, or with another coding or a trailer section,
// is refused: another server could read another request out of it. It is for listeners that have
// Protocol, too, which takes the CONNECT requests.
//
// Requests in origin form, which is all that a web page can have a browser send here, are
// refused, but for the PAC file.
type HTTP struct {
	Protocol // for credentials and loops

	// PAC returns the proxy auto-config file for clients that reach this proxy at an
	// address, HOST:PORT. It is served at PACPath. Nil means that there is none.
	PAC func(proxy string) []byte
}

// PACPath is where the PAC file is, for GET in origin form.
const PACPath = "/proxy.pac"

var _ tunnel.Protocol = (*HTTP)(nil)

// Name returns "http".
func (*HTTP) Name() string { return "http" }

// Sniff returns Yes for what Protocol takes, with another method than CONNECT.
func (p *HTTP) Sniff(b []byte) tunnel.Verdict {
	const connect = http.MethodConnect + " "
	n := min(len(b), len(connect))
	switch {
	case string(b[:n]) != connect[:n]:
		return p.Protocol.Sniff(b)
	case n == len(connect):
		return tunnel.No
	}
	return tunnel.More
}

// ServeConn implements tunnel.Protocol, as Protocol does. req.Accept answers nothing: the
// service does.
func (p *HTTP) ServeConn(ctx context.Context, c *tunnel.Conn, h tunnel.Handler) error {
	head, err := ReadHead(ctx, c)
	if err != nil {
		p.refuse(c, nil, err)
		return err
	}
	c.Discard(head.Len)
	if p.PAC != nil && strings.HasPrefix(head.Target, "/") {
		return p.servePAC(c, &head)
	}
	forward, err := newForwardHead(&head)
	if err != nil {
		p.refuse(c, nil, err)
		return err
	}
	req := c.NewRequest(p.Name())
	ctx, err = p.Admit(ctx, req, forward.authority, head.Fields)
	if err != nil {
		p.refuse(c, nil, err)
		return p.Intermediary.ReportRefused(h, req, err)
	}
	req.Accept = func() (tunnel.Stream, error) {
		s, err := c.Accept()
		if err != nil {
			return nil, err
		}
		r := &oneRequest{Stream: s, head: forward.text, body: forward.body}
		if forward.chunked {
			r.chunks = newChunkReader(s)
		}
		return r, nil
	}
	req.Refuse = func(err error) { p.refuse(c, req, err) }
	h.ServeTunnel(ctx, req)
	return nil
}

// pacLifetime is how long clients may keep the PAC file.
const pacLifetime = time.Minute

// servePAC answers a request in origin form. The Host must be an address of loopback, or
// localhost: by any other name, a page of that name could read the answer.
func (p *HTTP) servePAC(c *tunnel.Conn, head *Head) error {
	host, n := head.Fields.Get("Host")
	name := host
	if h, _, err := net.SplitHostPort(host); err == nil {
		name = h
	}
	addr, err := netip.ParseAddr(strings.Trim(name, "[]"))
	path, _, _ := strings.Cut(head.Target, "?")
	switch {
	case path != PACPath || head.Method != http.MethodGet && head.Method != http.MethodHead:
		err = badRequest("%s in origin form: this is a proxy, and serves %s alone itself", tunnel.Clip(head.Method), PACPath)
	case n != 1 || name != "localhost" && (err != nil || !addr.IsLoopback()):
		err = badRequest("%s is for the Host localhost, or an address of loopback", PACPath)
	default:
		file := p.PAC(c.LocalAddr().String())
		var b bytes.Buffer
		fmt.Fprintf(&b, "HTTP/1.1 200 OK\r\nContent-Type: application/x-ns-proxy-autoconfig\r\nContent-Length: %d\r\nCache-Control: max-age=%d\r\nX-Content-Type-Options: nosniff\r\nConnection: close\r\n\r\n", len(file), int(pacLifetime.Seconds()))
		if head.Method == http.MethodGet {
			b.Write(file)
		}
		c.CloseWithMessage(b.Bytes())
		return nil
	}
	p.refuse(c, nil, err)
	return err
}

// A forwardHead is the head of a request as it goes to a service.
type forwardHead struct {
	authority string // HOST:PORT that it goes to
	text      []byte
	body      int64 // bytes that follow it
	chunked   bool  // chunks follow it, and no body
}

// hopByHop are the fields of one connection alone, RFC 9110 section 7.6.1.
var hopByHop = []string{"Connection", "Proxy-Connection", "Keep-Alive", "Proxy-Authorization", "Proxy-Authenticate", "TE", "Trailer", "Transfer-Encoding", "Upgrade", "HTTP2-Settings"}

// newForwardHead makes the head for the service of one in absolute form.
func newForwardHead(h *Head) (*forwardHead, error) {
	scheme, rest, ok := strings.Cut(h.Target, "://")
	switch {
	case !ok:
		return nil, badRequest("target %q: this proxy takes CONNECT, and http:// URLs", tunnel.Clip(h.Target))
	case !strings.EqualFold(scheme, "http"):
		return nil, badRequest("target %q: this proxy takes https:// and others by CONNECT alone", tunnel.Clip(h.Target))
	case strings.Contains(rest, "#"):
		return nil, badRequest("target with a fragment")
	}
	end := strings.IndexAny(rest, "/?")
	if end < 0 {
		end = len(rest)
	}
	host, path := rest[:end], rest[end:]
	if strings.Contains(host, "@") {
		return nil, badRequest("target with a user")
	}
	f := &forwardHead{authority: host}
	if i := strings.LastIndexByte(host, ':'); i < 0 || strings.HasSuffix(host, "]") {
		f.authority = host + ":80"
	}
	switch {
	case path == "" && h.Method == http.MethodOptions:
		path = "*"
	case path == "" || path[0] == '?':
		path = "/" + path
	}
	if err := f.readBody(h.Fields, h.Minor); err != nil {
		return nil, err
	}
	f.write(h, host, path)
	return f, nil
}

// readBody reads how long the content of a request is.
func (f *forwardHead) readBody(fields Fields, minor int) error {
	length, n := fields.Get("Content-Length")
	if coding, codings := fields.Get("Transfer-Encoding"); codings > 0 {
		switch {
		case n > 0: // which a server may read as another length: RFC 9112 section 6.3
			return badRequest("Transfer-Encoding and Content-Length")
		case minor < 1:
			return badRequest("Transfer-Encoding in HTTP/1.0")
		case codings > 1 || !strings.EqualFold(coding, "chunked"):
			return badRequest("%d Transfer-Encoding fields, %q, want one with chunked", codings, tunnel.Clip(coding))
		}
		f.chunked = true
		return nil
	}
	if n == 0 {
		return nil
	}
	v, err := strconv.ParseUint(length, 10, 63)
	if n > 1 || err != nil || strings.HasPrefix(length, "+") {
		return badRequest("%d Content-Length fields, want one with a number", n)
	}
	f.body = int64(v)
	return nil
}

// write writes the head. The Host that was sent does not count: RFC 9112 section 3.2.2.
func (f *forwardHead) write(h *Head, host, path string) {
	dropped := slices.Clone(hopByHop)
	for _, field := range h.Fields {
		if strings.EqualFold(field.Name, "Connection") || strings.EqualFold(field.Name, "Proxy-Connection") {
			for name := range strings.SplitSeq(field.Value, ",") {
				if name = strings.TrimSpace(name); !strings.EqualFold(name, "Content-Length") {
					dropped = append(dropped, name)
				}
			}
		}
	}
	var b bytes.Buffer
	fmt.Fprintf(&b, "%s %s HTTP/1.%d\r\nHost: %s\r\n", h.Method, path, min(h.Minor, 1), host)
	for _, field := range h.Fields {
		if strings.EqualFold(field.Name, "Host") || slices.ContainsFunc(dropped, func(name string) bool { return strings.EqualFold(name, field.Name) }) {
			continue
		}
		fmt.Fprintf(&b, "%s: %s\r\n", field.Name, field.Value)
	}
	if f.chunked {
		b.WriteString("Transfer-Encoding: chunked\r\n")
	}
	fmt.Fprintf(&b, "Via: 1.%d culvert\r\nConnection: close\r\n\r\n", min(h.Minor, 1))
	f.text = b.Bytes()
}

// A oneRequest is a client's stream of which the service sees one request: its head, and so
// many bytes behind it, or chunks. What the client sends after that is dropped, and its end is an end.
type oneRequest struct {
	tunnel.Stream
	head   []byte
	body   int64
	chunks *chunkReader // nil for a body
}

// Read implements net.Conn.
func (r *oneRequest) Read(p []byte) (int, error) {
	if len(p) == 0 {
		return 0, nil
	}
	if len(r.head) > 0 {
		n := copy(p, r.head)
		r.head = r.head[n:]
		return n, nil
	}
	if r.chunks != nil {
		return r.chunks.read(p)
	}
	if r.body > 0 {
		n, err := r.Stream.Read(p[:min(int64(len(p)), r.body)])
		r.body -= int64(n)
		if err == io.EOF && r.body > 0 {
			err = io.ErrUnexpectedEOF
		}
		return n, err
	}
	for {
		if _, err := r.Stream.Read(p); err != nil {
			return 0, err
		}
	}
}

// Abort implements tunnel.Aborter.
func (r *oneRequest) Abort() error { return tunnel.Abort(r.Stream) }
