package ws

import (
	"context"
	"crypto/rand"
	"crypto/tls"
	"encoding/base64"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"strings"
	"time"

	"culvert.dev/connect"
	"culvert.dev/tunnel"
)

// A Dialer reaches its destinations through a gateway, by WebSocket. It is a
// tunnel.Dialer, so one can be the way to another. It is safe for concurrent
// use and keeps no connections; what Extended does may.
type Dialer struct {
	// URL is where the gateway is: "ws://host[:port][/path/]", or "wss" for
	// TLS. The destination goes behind the path; without one that is
	// DefaultPath. The ports are 80 and 443 where it names none.
	URL string

	// Dialer is the way there; nil means a net.Dialer.
	Dialer tunnel.Dialer

	// TLS is used with wss. Without a ServerName it asks for the URL's host;
	// nil means the system's roots.
	TLS *tls.Config

	// InField sends the destination in Culvert-Target and not in the path,
	// for load balancers that route by the whole path.
	InField bool

	// Authorization is the value of the field of that name: see
	// connect.BasicCredentials and connect.BearerCredentials. "" sends none.
	Authorization string

	// Header, if set, returns more fields for a request.
	Header func(ctx context.Context, addr string) (connect.Fields, error)

	// Via, Wait and Timeout are those of connect.Dialer.
	Via           string
	Wait, Timeout time.Duration

	// Extended, if set, is called first for every destination. It sends list as an
	// extended CONNECT for "websocket" (RFC 8441 section 5), which has no key, and
	// returns the stream of a 200, which the Dialer owns from then on, and its fields.
	// After an error that is errors.ErrUnsupported the handshake is made over HTTP/1.1;
	// any other error stands.
	Extended func(ctx context.Context, list *connect.HeaderList) (_ net.Conn, answer connect.Fields, err error)

	// Options are those of the streams.
	Options Options
}

var _ tunnel.Dialer = (*Dialer)(nil)

// DialContext asks the gateway for addr, a "host:port" that
// connect.ParseAuthority takes; network is "tcp". The ctx covers all of it and
// nothing after. The net.Conn is a *Stream and belongs to the caller.
//
// A refusal is a *tunnel.Error, as with connect.Dialer. A gateway that does not
// agree on Subprotocol gives a stream that cannot half-close.
func (d *Dialer) DialContext(ctx context.Context, network, addr string) (net.Conn, error) {
	to, err := connect.ParseDial(network, addr)
	if err != nil {
		return nil, err
	}
	at, err := parseURL(d.URL)
	if err != nil {
		return nil, err
	}
	if d.Extended != nil {
		if c, err := d.extended(ctx, at, to, addr); err == nil || !errors.Is(err, errors.ErrUnsupported) {
			return c, err
		}
	}
	var nonce [16]byte
	_, _ = rand.Read(nonce[:]) // never fails
	key := base64.StdEncoding.EncodeToString(nonce[:])
	path, fields, err := d.request(ctx, at, to, addr, "1.1")
	if err != nil {
		return nil, err
	}
	head := append(connect.Fields{
		{Name: "Host", Value: at.host},
		{Name: "Upgrade", Value: "websocket"},
		{Name: "Connection", Value: "Upgrade"},
		{Name: "Sec-WebSocket-Key", Value: key},
	}, fields...).Request("GET", path)
	way := connect.Dialer{Proxy: at.addr, Dialer: d.Dialer, Wait: d.Wait, Timeout: d.Timeout}
	if at.secure {
		if way.TLS = d.TLS; way.TLS == nil {
			way.TLS = &tls.Config{}
		}
	}
	subprotocol := ""
	conn, early, err := way.Exchange(ctx, head, addr, func(status int, f connect.Fields) (ok bool, err error) {
		if status != http.StatusSwitchingProtocols {
			return false, nil
		}
		subprotocol, err = checkAnswer(f, key)
		return true, err
	})
	if err != nil {
		return nil, err
	}
	return newStream(conn, early, Client, subprotocol, d.Options), nil
}

// extended asks for addr by extended CONNECT.
func (d *Dialer) extended(ctx context.Context, at place, to connect.Authority, addr string) (net.Conn, error) {
	path, fields, err := d.request(ctx, at, to, addr, "2")
	if err != nil {
		return nil, err
	}
	scheme := "http"
	if at.secure {
		scheme = "https"
	}
	conn, answer, err := d.Extended(ctx, &connect.HeaderList{Protocol: "websocket", Scheme: scheme, Authority: at.host, Path: path, Fields: fields})
	if err != nil {
		return nil, err
	}
	subprotocol, err := checkChoice(answer)
	if err != nil {
		_ = connect.Abort(conn)
		return nil, &tunnel.Error{Reason: tunnel.DialFailed, Err: err}
	}
	return NewStream(conn, Client, subprotocol, d.Options), nil
}

// request returns the path, and the fields that are those of every version of
// HTTP.
func (d *Dialer) request(ctx context.Context, at place, to connect.Authority, addr, http string) (path string, fields connect.Fields, err error) {
	fields = connect.Fields{
		{Name: "Sec-WebSocket-Version", Value: version},
		{Name: "Sec-WebSocket-Protocol", Value: Subprotocol},
	}
	path = at.path
	if d.InField {
		fields = append(fields, connect.Field{Name: TargetField, Value: to.String()})
	} else {
		path += strings.NewReplacer("[", "%5B", "]", "%5D").Replace(to.String())
	}
	more := connect.Fields{}
	if via, ok := connect.ViaField(ctx, http, d.Via); ok {
		more = append(more, via)
	}
	if d.Authorization != "" {
		more = append(more, connect.Field{Name: "Authorization", Value: d.Authorization})
	}
	if d.Header != nil {
		given, err := d.Header(ctx, addr)
		if err != nil {
			return "", nil, fmt.Errorf("ws: fields for %q: %w", addr, err)
		}
		more = append(more, given...)
	}
	if err := more.Check(); err != nil {
		return "", nil, err
	}
	return path, append(fields, more...), nil
}

// checkAnswer judges a 101, RFC 6455 section 4.1, and returns the subprotocol.
func checkAnswer(f connect.Fields, key string) (string, error) {
	accept, n := f.Get("Sec-WebSocket-Accept")
	switch {
	case !lists(f, "Upgrade", "websocket") || !lists(f, "Connection", "upgrade"):
		return "", errors.New("ws: 101, but not to WebSocket")
	case n != 1 || accept != acceptKey(key):
		return "", errors.New("ws: Sec-WebSocket-Accept does not answer the key: something in between made it up or kept it from an earlier request")
	}
	return checkChoice(f)
}

// checkChoice judges what a server chose of what it was offered, and returns
// the subprotocol.
func checkChoice(f connect.Fields) (string, error) {
	_, extensions := f.Get("Sec-WebSocket-Extensions")
	sub, subs := f.Get("Sec-WebSocket-Protocol")
	switch {
	case extensions > 0:
		return "", errors.New("ws: an extension was chosen that was not offered")
	case subs > 1 || subs == 1 && sub != Subprotocol:
		return "", fmt.Errorf("ws: subprotocol %q was chosen, which was not offered", tunnel.Clip(sub))
	}
	return sub, nil
}

// A place is a parsed URL.
type place struct {
	addr   string // to dial, host:port
	host   string // for the Host field
	path   string
	secure bool
}

// ParseURL returns the "host:port" that a Dialer of that URL connects to, and
// whether by TLS, or why there can be none.
func ParseURL(s string) (addr string, secure bool, err error) {
	p, err := parseURL(s)
	return p.addr, p.secure, err
}

func parseURL(s string) (place, error) {
	u, err := url.Parse(s)
	wrong := func(why string) (place, error) {
		return place{}, fmt.Errorf("ws: URL %q %s", tunnel.Clip(s), why)
	}
	switch {
	case err != nil:
		return place{}, errors.New("ws: what is given is not a URL") // it may have a password in it
	case u.User != nil:
		return place{}, errors.New("ws: the URL has user information before an @")
	case u.Scheme != "ws" && u.Scheme != "wss":
		return wrong("does not begin with ws:// or wss://")
	case u.Hostname() == "":
		return wrong("names no host")
	case u.RawQuery != "" || u.Fragment != "" || u.ForceQuery:
		return wrong("has a query")
	}
	p := place{host: u.Host, path: u.EscapedPath(), secure: u.Scheme == "wss"}
	port := u.Port()
	if port == "" {
		port = map[bool]string{false: "80", true: "443"}[p.secure]
	}
	p.addr = net.JoinHostPort(u.Hostname(), port)
	if _, err := connect.ParseAuthority(p.addr); err != nil {
		return place{}, err
	}
	switch {
	case p.path == "" || p.path == "/":
		p.path = DefaultPath
	case !strings.HasSuffix(p.path, "/"):
		return wrong("has a path that does not end with a slash")
	}
	return p, nil
}
