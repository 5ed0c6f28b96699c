package h3

import (
	"net"
	"strings"
	"testing"

	"culvert.dev/connect/connecttest"
	"culvert.dev/tunnel"
	"culvert.dev/tunnel/tunneltest"
)

// version is this one for the tests of any.
var version = connecttest.Version{
	Name: "connect-h3", Via: "3",
	Serve: func(t *testing.T, routes tunnel.Resolver, s connecttest.Server) (string, *tunneltest.Record) {
		g := serve(t, routes, &Server{Auth: s.Auth, Via: s.Via, Service: s.Service})
		return g.addr, &g.Record
	},
	Connect: func(t *testing.T, addr string) func(fields ...string) connecttest.Answer {
		r := rawClient(t, addr)
		r.begin()
		return func(fields ...string) connecttest.Answer {
			a := r.request(fields...).answer()
			if a.status >= 300 && !a.end {
				t.Errorf("an answer of %d without an end", a.status)
			}
			return connecttest.Answer{Status: a.status, Fields: a.fields, Body: a.body, Malformed: a.reset == MessageError}
		}
	},
	Dial: func(t *testing.T, gateway string, c connecttest.Client, addr string) net.Conn {
		d := newDialer(t, gateway)
		d.Via, d.Authorization, d.Header, d.Answer = c.Via, c.Authorization, c.Header, c.Answer
		return open(t, d, addr)
	},
}

// TestBadRequests is the first table of docs/internals/protocols/connect-h3.md.
func TestBadRequests(t *testing.T) {
	connecttest.TestBadRequests(t, version, connecttest.Bad{
		Name: "section over 32 KiB", Fields: with("a", strings.Repeat("~", 30<<10)),
		Status: 431, Reason: tunnel.TooLarge, Error: "http_request_error",
	})
}

func TestAuthorities(t *testing.T) { connecttest.TestAuthorities(t, version) }

func TestFields(t *testing.T) { connecttest.TestFields(t, version) }
