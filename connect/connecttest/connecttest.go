// Package connecttest holds what HTTP CONNECT has to do in every version that
// carries many requests over one connection, as tests: HTTP/2 and HTTP/3 pass
// them. It is imported by tests only.
package connecttest

import (
	"context"
	"fmt"
	"io"
	"net"
	"slices"
	"strings"
	"testing"

	"culvert.dev/connect"
	"culvert.dev/internal/testnet"
	"culvert.dev/tunnel"
	"culvert.dev/tunnel/tunneltest"
)

// A Version is an implementation of one.
type Version struct {
	Name string // of its requests: "connect-h2"
	Via  string // what stands in its via: "2"

	// Serve starts a gateway and returns its address and what it records.
	Serve func(t *testing.T, routes tunnel.Resolver, s Server) (addr string, r *tunneltest.Record)

	// Connect makes a connection of a client that says what it likes. What it
	// returns sends a request without a body and reads the answer.
	Connect func(t *testing.T, addr string) (ask func(fields ...string) Answer)

	// Dial dials addr through a gateway, as the Client says.
	Dial func(t *testing.T, gateway string, c Client, addr string) net.Conn
}

// A Server is what a gateway of any version can be told.
type Server struct {
	Auth    connect.Authenticator
	Via     string
	Service connect.Service // nil for plain CONNECT
}

// A Client is what a Dialer of any version can be told.
type Client struct {
	Via, Authorization string
	Header             func(ctx context.Context, addr string) (connect.Fields, error)
	Answer             func(ctx context.Context, addr string, fields connect.Fields)
}

// An Answer is what came on a stream until it ended, or until the 200.
type Answer struct {
	Status    int // 0 where there was none
	Fields    connect.Fields
	Body      string
	Malformed bool // the stream was reset, with the code for a malformed request
}

// asking is the plain request for "svc:1".
func asking(more ...string) []string {
	return append([]string{":method", "CONNECT", ":authority", "svc:1"}, more...)
}

// A Bad is a request that is refused. One with the Status 0 is malformed: its
// stream is reset.
type Bad struct {
	Name   string
	Auth   bool     // the gateway asks for a password
	Fields []string // names and values
	Status int
	Reason tunnel.Reason
	Error  string // of Proxy-Status
	Extra  string // a field the answer has
}

// bad are the requests that every version refuses alike.
func bad() []Bad {
	const (
		malformed = tunnel.BadRequest
		wrong     = "http_request_error"
		denied    = "http_request_denied"
	)
	return []Bad{
		{"GET", false, []string{":method", "GET", ":scheme", "https", ":path", "/", ":authority", "svc"}, 405, tunnel.BadMethod, wrong, "allow"},
		{"GET of an absolute URL", false, []string{":method", "GET", ":scheme", "https", ":path", "https://svc/", ":authority", "svc:1"}, 405, tunnel.BadMethod, wrong, "allow"},
		{"extended CONNECT", false, []string{":method", "CONNECT", ":protocol", "websocket", ":scheme", "https", ":path", "/", ":authority", "svc:1"}, 501, tunnel.Unsupported, wrong, ""},
		{"CONNECT-UDP", false, []string{":method", "CONNECT", ":protocol", "connect-udp", ":scheme", "https", ":path", "/.well-known/masque/udp/svc/1/", ":authority", "gw"}, 501, tunnel.Unsupported, wrong, ""},
		{"extended CONNECT without a path", false, asking(":protocol", "websocket", ":scheme", "https"), 0, malformed, "", ""},
		{"no authority", false, []string{":method", "CONNECT"}, 0, malformed, "", ""},
		{"CONNECT with scheme and path", false, asking(":scheme", "https", ":path", "/"), 0, malformed, "", ""},
		{"CONNECT with path", false, asking(":path", "/"), 0, malformed, "", ""},
		{"no method", false, []string{":authority", "svc:1"}, 0, malformed, "", ""},
		{"two authorities", false, asking(":authority", "svc:1"), 0, malformed, "", ""},
		{"unknown pseudo-header", false, asking(":x", "y"), 0, malformed, "", ""},
		{"status in a request", false, asking(":status", "200"), 0, malformed, "", ""},
		{"pseudo-header after a field", false, []string{":method", "CONNECT", "a", "b", ":authority", "svc:1"}, 0, malformed, "", ""},
		{"capital in a name", false, asking("Host", "svc:1"), 0, malformed, "", ""},
		{"colon in a name", false, asking("a:b", "c"), 0, malformed, "", ""},
		{"CR in a value", false, asking("a", "b\rc"), 0, malformed, "", ""},
		{"LF in a value", false, asking("a", "b\nProxy-Authorization: c"), 0, malformed, "", ""},
		{"NUL in the authority", false, []string{":method", "CONNECT", ":authority", "svc\x00.evil:1"}, 0, malformed, "", ""},
		{"blank before a value", false, asking("a", " b"), 0, malformed, "", ""},
		{"blank behind a value", false, asking("a", "b "), 0, malformed, "", ""},
		{"connection", false, asking("connection", "close"), 0, malformed, "", ""},
		{"proxy-connection", false, asking("proxy-connection", "keep-alive"), 0, malformed, "", ""},
		{"keep-alive", false, asking("keep-alive", "timeout=5"), 0, malformed, "", ""},
		{"upgrade", false, asking("upgrade", "websocket"), 0, malformed, "", ""},
		{"transfer-encoding", false, asking("transfer-encoding", "chunked"), 0, malformed, "", ""},
		{"te", false, asking("te", "gzip"), 0, malformed, "", ""},
		{"content-length", false, asking("content-length", "0"), 400, malformed, wrong, ""},
		{"host of another", false, asking("host", "other:1"), 400, malformed, wrong, ""},
		{"two hosts", false, asking("host", "svc:1", "host", "svc:1"), 400, malformed, wrong, ""},
		{"list over 16 KiB", false, asking("a", strings.Repeat("a", 9000), "b", strings.Repeat("a", 9000)), 431, tunnel.TooLarge, wrong, ""},
		{"101 fields", false, asking(strings.Split(strings.Repeat("a,b,", 101)+"a,b", ",")...), 431, tunnel.TooLarge, wrong, ""},
		{"no credentials", true, asking(), 407, tunnel.NoAuth, denied, "proxy-authenticate"},
		{"no credentials, nobody's name", true, []string{":method", "CONNECT", ":authority", "nobody:1"}, 407, tunnel.NoAuth, denied, "proxy-authenticate"},
		{"wrong credentials", true, asking("proxy-authorization", connect.BasicCredentials("alice", "x")), 407, tunnel.NoAuth, denied, "proxy-authenticate"},
		{"two credentials", true, asking("proxy-authorization", "a b", "proxy-authorization", "a b"), 400, malformed, wrong, ""},
		{"nobody's name", false, []string{":method", "CONNECT", ":authority", "nobody:1"}, 403, tunnel.NoRoute, denied, ""},
		{"service that is down", false, []string{":method", "CONNECT", ":authority", "closed:1"}, 502, tunnel.DialFailed, "connection_refused", ""},
		{"loop by via", false, asking("via", "2 a, 3 here"), 502, tunnel.Loop, "proxy_loop_detected", ""},
		{"loop by cdn-loop", false, asking("cdn-loop", "here"), 502, tunnel.Loop, "proxy_loop_detected", ""},
	}
}

// TestBadRequests checks that a request that is refused ends its stream and
// nothing else: those above, and more of the version's own.
func TestBadRequests(t *testing.T, v Version, more ...Bad) {
	auth := &connect.BasicAuth{Verify: connect.Passwords(map[string]string{"alice": "secret"})}
	for _, c := range slices.Concat(bad(), more) {
		t.Run(c.Name, func(t *testing.T) {
			t.Parallel() // most of the time goes into the end
			dials := make(chan struct{}, 100)
			routes := tunneltest.Table{
				"svc:1":    testnet.Service(t, func(c net.Conn) { dials <- struct{}{}; _, _ = io.Copy(c, c) }),
				"closed:1": "127.0.0.1:1", // nobody's, where a port that was free may be taken again
			}
			s := Server{Via: "here"}
			if c.Auth {
				s.Auth = auth
			}
			addr, record := v.Serve(t, routes, s)
			ask := v.Connect(t, addr)
			a := ask(c.Fields...)
			if c.Status == 0 {
				if !a.Malformed || a.Status != 0 {
					t.Errorf("got %+v, want a reset for a malformed request", a)
				}
			} else {
				status, _ := a.Fields.Get("proxy-status")
				want := fmt.Sprintf("culvert; error=%s; details=%q", c.Error, c.Reason)
				if a.Status != c.Status || status != want || !strings.HasPrefix(a.Body, "culvert: "+string(c.Reason)+": ") {
					t.Errorf("got %+v, want status %d and proxy-status %s", a, c.Status, want)
				}
				if _, n := a.Fields.Get(c.Extra); c.Extra != "" && n == 0 {
					t.Errorf("no %s field in %v", c.Extra, a.Fields)
				}
			}
			o := record.Reason(t, c.Reason)
			if o.Proto != v.Name || o.Err == nil || strings.Contains(o.Err.Error(), "secret") || !o.Source.IsValid() || o.Listener != addr {
				t.Errorf("outcome %+v", o)
			}
			// The connection lives on, unless it wants credentials.
			if !c.Auth {
				if a := ask(asking()...); a.Status != 200 {
					t.Errorf("the next request on the connection got %+v", a)
				}
				<-dials
			}
			select {
			case <-dials:
				t.Error("something was dialed")
			default:
			}
		})
	}
}

// TestAuthorities has the spellings that resolvers do not agree on.
func TestAuthorities(t *testing.T, v Version) {
	addr, _ := v.Serve(t, tunneltest.Table{}, Server{})
	ask := v.Connect(t, addr)
	for _, authority := range []string{
		"svc", "svc:", "svc:0", "svc:65536", "svc:080", "svc:http", "user@svc:1", "user:pw@svc:1", "svc:1/", "http://svc:1",
		"[::1:1", "::1:1", "[fe80::1%25eth0]:1", "[1.2.3.4]:1", "127.1:1", "0x7f.0.0.1:1", "0177.0.0.1:1", "2130706433:1",
		"s vc:1", "svc,other:1", "svc:1,other:1", "*:1", ":1",
	} {
		if a := ask(":method", "CONNECT", ":authority", authority); a.Status != 400 {
			t.Errorf("authority %q: got %+v, want status 400", authority, a)
		}
	}
}

// A service is plain CONNECT that answers with a field of its own.
type service struct {
	connect.Protocol
	heads chan *connect.HeaderList
}

func (s *service) AdmitList(ctx context.Context, req *tunnel.Request, head *connect.HeaderList) (context.Context, connect.Fields, error) {
	ctx, _, err := s.Protocol.AdmitList(ctx, req, head)
	req.Peer = tunnel.Peer{ID: "x", Method: "test"}
	s.heads <- head
	return ctx, connect.Fields{{Name: "Baggage", Value: "of=server"}}, err
}

// TestFields checks that the fields that a Dialer sends arrive, and that it sees those
// that a gateway's Service answers with.
func TestFields(t *testing.T, v Version) {
	heads, answers := make(chan *connect.HeaderList, 1), make(chan connect.Fields, 1)
	addr, _ := v.Serve(t, tunneltest.Table{"*": testnet.Echo(t).Addr()}, Server{Service: &service{heads: heads}})
	c := v.Dial(t, addr, Client{
		Via: "me", Authorization: connect.BearerCredentials("t"),
		Header: func(context.Context, string) (connect.Fields, error) {
			return connect.Fields{{Name: "Forwarded", Value: `for="192.0.2.1:5"`}}, nil
		},
		Answer: func(_ context.Context, _ string, fields connect.Fields) { answers <- fields },
	}, "10.0.0.1:8080")
	testnet.Ping(t, c, "x")
	head := <-heads
	for name, want := range map[string]string{"via": v.Via + " me", "proxy-authorization": "Bearer t", "forwarded": `for="192.0.2.1:5"`} {
		if got, n := head.Fields.Get(name); got != want || n != 1 {
			t.Errorf("%s: got %q (%d), want %q", name, got, n, want)
		}
	}
	if head.Authority != "10.0.0.1:8080" {
		t.Errorf("authority %q", head.Authority)
	}
	if got, _ := (<-answers).Get("baggage"); got != "of=server" {
		t.Errorf("baggage of the answer: %q", got)
	}
}
