package h2

import (
	"net"
	"strconv"
	"testing"

	"golang.org/x/net/http2"

	"culvert.dev/connect/connecttest"
	"culvert.dev/tunnel"
	"culvert.dev/tunnel/tunneltest"
)

// version is this one for the tests of any.
var version = connecttest.Version{
	Name: "connect-h2", Via: "2",
	Serve: func(t *testing.T, routes tunnel.Resolver, s connecttest.Server) (string, *tunneltest.Record) {
		g := serve(t, routes, &Protocol{Auth: s.Auth, Via: s.Via, Service: s.Service})
		return g.Addr, &g.Record
	},
	Connect: func(t *testing.T, addr string) func(fields ...string) connecttest.Answer {
		r, id := rawClient(t, addr), uint32(0)
		return func(fields ...string) connecttest.Answer {
			id = max(id+2, 1) | 1
			_ = r.request(id, false, fields...)
			if fields[0] == ":method" && fields[1] != "CONNECT" {
				_ = r.fr.WriteData(id, true, nil) // the answer waits for the end of a body
			}
			a := r.answer(id)
			status, _ := strconv.Atoi(a.status)
			return connecttest.Answer{Status: status, Fields: a.fields, Body: a.body, Malformed: a.reset == http2.ErrCodeProtocol}
		}
	},
	Dial: func(t *testing.T, gateway string, c connecttest.Client, addr string) net.Conn {
		d := newDialer(t, gateway)
		d.Via, d.Authorization, d.Header, d.Answer = c.Via, c.Authorization, c.Header, c.Answer
		return open(t, d, addr)
	},
}

// TestBadRequests is the first table of docs/internals/protocols/connect-h2.md.
func TestBadRequests(t *testing.T) { connecttest.TestBadRequests(t, version) }

func TestAuthorities(t *testing.T) { connecttest.TestAuthorities(t, version) }

func TestFields(t *testing.T) { connecttest.TestFields(t, version) }
