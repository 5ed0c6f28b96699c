package socks5

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"culvert.dev/internal/testnet"
	"culvert.dev/tunnel"
	"culvert.dev/tunnel/tunneltest"
)

// A badRow is something no tunnel may come of: what is sent, what the client
// hears, and the word in the log.
type badRow struct {
	name   string
	in     []byte
	out    []byte // what is heard; nil means a reset
	reason tunnel.Reason
}

// no is the answer to a request in a session without a password.
func no(r Reply) []byte { return join([]byte{5, 0}, answer(r)) }

var badRows = []badRow{
	{"no methods", []byte{5, 0}, []byte{5, 0xff}, tunnel.Unsupported},
	{"only GSSAPI", []byte{5, 1, 1}, []byte{5, 0xff}, tunnel.Unsupported},
	{"only a password where none is wanted", []byte{5, 1, 2}, []byte{5, 0xff}, tunnel.Unsupported},
	{"request behind a refused greeting", join([]byte{5, 1, 1}, askName), []byte{5, 0xff}, tunnel.Unsupported},

	{"BIND", join(greetNone, []byte{5, 2, 0, 1, 192, 0, 2, 7, 1, 187}), no(CommandNotSupported), tunnel.Unsupported},
	{"UDP ASSOCIATE", join(greetNone, []byte{5, 3, 0, 1, 0, 0, 0, 0, 0, 0}), no(CommandNotSupported), tunnel.Unsupported},
	{"command 0", join(greetNone, []byte{5, 0, 0, 1, 192, 0, 2, 7, 1, 187}), no(CommandNotSupported), tunnel.Unsupported},
	{"RESOLVE of Tor", join(greetNone, []byte{5, 0xf0, 0, 3}, nameRequest("svc.test", 443)[4:]), no(CommandNotSupported), tunnel.Unsupported},
	{"address type 0", join(greetNone, []byte{5, 1, 0, 0, 1, 187}), no(AddressTypeNotSupported), tunnel.Unsupported},
	{"address type 2", join(greetNone, []byte{5, 1, 0, 2, 1, 187}), no(AddressTypeNotSupported), tunnel.Unsupported},
	{"address type 255", join(greetNone, []byte{5, 1, 0, 255}), no(AddressTypeNotSupported), tunnel.Unsupported},

	{"unknown name", join(greetNone, nameRequest("nobody.test", 443)), no(NotAllowed), tunnel.NoRoute},
	{"unknown port", join(greetNone, nameRequest("svc.test", 444)), no(NotAllowed), tunnel.NoRoute},
	{"unknown IPv4", join(greetNone, askV4), no(NotAllowed), tunnel.NoRoute},
	{"unknown IPv6", join(greetNone, askV6), no(NotAllowed), tunnel.NoRoute},
	{"loopback", join(greetNone, []byte{5, 1, 0, 1, 127, 0, 0, 1, 0, 80}), no(NotAllowed), tunnel.Prohibited},
	{"metadata", join(greetNone, []byte{5, 1, 0, 1, 169, 254, 169, 254, 0, 80}), no(NotAllowed), tunnel.Prohibited},
	{"loopback as a name", join(greetNone, nameRequest("127.0.0.1", 80)), no(NotAllowed), tunnel.Prohibited},
	{"IPv6 loopback as a name", join(greetNone, nameRequest("::1", 80)), no(NotAllowed), tunnel.Prohibited},
	{"mapped loopback", join(greetNone, []byte{5, 1, 0, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 255, 255, 127, 0, 0, 1, 0, 80}), no(NotAllowed), tunnel.Prohibited},
	{"service that is down", join(greetNone, nameRequest("down.test", 443)), no(ConnectionRefused), tunnel.DialFailed},

	{"empty name", join(greetNone, nameRequest("", 443)), no(GeneralFailure), tunnel.BadRequest},
	{"name with NUL", join(greetNone, nameRequest("svc.test\x00.evil", 443)), no(GeneralFailure), tunnel.BadRequest},
	{"name of a dot", join(greetNone, nameRequest(".", 443)), no(GeneralFailure), tunnel.BadRequest},
	{"name of two dots", join(greetNone, nameRequest("..", 443)), no(GeneralFailure), tunnel.BadRequest},
	{"name of 254 bytes", join(greetNone, nameRequest("a."+longName[:251]+"b", 443)), no(GeneralFailure), tunnel.BadRequest},
	{"name of 255 bytes", join(greetNone, nameRequest(strings.Repeat("a.", 127)+"a", 443)), no(GeneralFailure), tunnel.BadRequest},
	{"name with a port", join(greetNone, nameRequest("svc.test:443", 443)), no(GeneralFailure), tunnel.BadRequest},
	{"name in UTF-8", join(greetNone, nameRequest("bücher.test", 443)), no(GeneralFailure), tunnel.BadRequest},
	{"short IPv4 as a name", join(greetNone, nameRequest("127.1", 443)), no(GeneralFailure), tunnel.BadRequest},
	{"hexadecimal IPv4 as a name", join(greetNone, nameRequest("0x7f000001", 443)), no(GeneralFailure), tunnel.BadRequest},
	{"IPv4 in one number as a name", join(greetNone, nameRequest("2130706433", 443)), no(GeneralFailure), tunnel.BadRequest},
	{"brackets", join(greetNone, nameRequest("[::1]", 443)), no(GeneralFailure), tunnel.BadRequest},
	{"zone", join(greetNone, nameRequest("fe80::1%eth0", 443)), no(GeneralFailure), tunnel.BadRequest},
	{"port 0", join(greetNone, nameRequest("svc.test", 0)), no(GeneralFailure), tunnel.BadRequest},
	{"reserved byte", join(greetNone, []byte{5, 1, 1, 3}, nameRequest("svc.test", 443)[4:]), no(GeneralFailure), tunnel.BadRequest},
	{"request of SOCKS4", join(greetNone, []byte{4, 1, 1, 187, 192, 0, 2, 7, 0}), no(GeneralFailure), tunnel.BadRequest},
	{"second greeting", join(greetNone, []byte{5, 2, 0, 2}), no(CommandNotSupported), tunnel.Unsupported},
	{"request behind a refused one", join(greetNone, nameRequest("nobody.test", 443), askName), no(NotAllowed), tunnel.NoRoute},
	{"request behind a bad one", join(greetNone, nameRequest("..", 443), askName), no(GeneralFailure), tunnel.BadRequest},

	{"SOCKS4", []byte{4, 1, 1, 187, 192, 0, 2, 7, 0}, []byte{0, 0x5b, 0, 0, 0, 0, 0, 0}, tunnel.Unsupported},
	{"SOCKS4a", join([]byte{4, 1, 1, 187, 0, 0, 0, 1, 'u', 0}, []byte("svc.test\x00")), []byte{0, 0x5b, 0, 0, 0, 0, 0, 0}, tunnel.Unsupported},
	{"SOCKS4 with a user that does not end", join([]byte{4, 1, 1, 187, 192, 0, 2, 7}, bytes.Repeat([]byte{'u'}, 5000)), []byte{0, 0x5b, 0, 0, 0, 0, 0, 0}, tunnel.Unsupported},
	{"version 6", []byte{6, 1, 0}, nil, tunnel.BadPreamble},
	{"HTTP", []byte("CONNECT svc.test:443 HTTP/1.1\r\n\r\n"), nil, tunnel.BadPreamble},
	{"zeros", make([]byte, 100), nil, tunnel.BadPreamble},
}

// passwordRows are for a port that wants a password.
var passwordRows = []badRow{
	{"no password offered", join(greetNone, askName), []byte{5, 0xff}, tunnel.NoAuth},
	{"no methods", []byte{5, 0}, []byte{5, 0xff}, tunnel.NoAuth},
	{"request in place of the password", join([]byte{5, 2, 0, 2}, askName), []byte{5, 2, 1, 1}, tunnel.NoAuth},
	{"wrong password", join(greetPassword, password("alice", "guess"), askName), []byte{5, 2, 1, 1}, tunnel.NoAuth},
	{"unknown user", join(greetPassword, password("mallory", "secret"), askName), []byte{5, 2, 1, 1}, tunnel.NoAuth},
	{"empty password", join(greetPassword, password("alice", ""), askName), []byte{5, 2, 1, 1}, tunnel.NoAuth},
	{"empty user", join(greetPassword, password("", ""), askName), []byte{5, 2, 1, 1}, tunnel.NoAuth},
	{"right password behind a wrong one", join(greetPassword, password("alice", "guess"), password("alice", "secret"), askName), []byte{5, 2, 1, 1}, tunnel.NoAuth},
	{"unknown name with the right password", join(greetPassword, password("alice", "secret"), nameRequest("nobody.test", 443)), join([]byte{5, 2, 1, 0}, answer(NotAllowed)), tunnel.NoRoute},
}

func TestBadInput(t *testing.T) {
	table := tunneltest.Table{"svc.test:443": testnet.Echo(t).Addr(), "down.test:443": testnet.ClosedPort(t)}
	for _, port := range []struct {
		name string
		p    *Protocol
		rows []badRow
	}{
		{"Open", &Protocol{}, badRows},
		{"Password", &Protocol{Verify: onlyAlice}, passwordRows},
	} {
		t.Run(port.name, func(t *testing.T) {
			for _, row := range port.rows {
				t.Run(row.name, func(t *testing.T) {
					t.Parallel()
					g := serve(t, table, port.p)
					c := testnet.Connect(t, g.Addr)
					_, _ = c.Write(row.in)
					got, err := io.ReadAll(c)
					switch {
					case row.out == nil:
						if len(got) > 0 || !errors.Is(err, syscall.ECONNRESET) {
							t.Errorf("got % x, %v, want a reset", got, err)
						}
					case !bytes.Equal(got, row.out) || err != nil:
						t.Errorf("got % x, %v, want % x and the end", got, err, row.out)
					}
					_ = c.Close() // the gateway waits a second for it
					o := g.Outcome(t)
					if o.Reason != row.reason || o.Proto != "socks5" || o.Err == nil {
						t.Errorf("got outcome %s of %q, %v; want %s of socks5", o.Reason, o.Proto, o.Err, row.reason)
					}
					want := 0
					if row.reason == tunnel.DialFailed {
						want = 1
					}
					if n := g.Dials(); n != want {
						t.Errorf("%d dials, want %d", n, want)
					}
				})
			}
		})
	}
}

// Each row gets the same answer however it is cut in two: a request smuggled
// into the segment of a greeting or of a password is no other than one that
// comes when it should, and one behind a refusal is none (must-never N30).
func TestBadInputAtEverySplit(t *testing.T) {
	for _, port := range []struct {
		p    *Protocol
		rows []badRow
	}{{&Protocol{}, badRows}, {&Protocol{Verify: onlyAlice}, passwordRows}} {
		for _, row := range port.rows {
			if row.reason == tunnel.NoAuth && len(row.out) == 4 || len(row.in) > 300 {
				continue // waits a second each time; too long for nothing
			}
			for cut := 1; cut < len(row.in); cut++ {
				conn := &script{in: [][]byte{row.in[:cut], row.in[cut:]}}
				err := port.p.ServeConn(t.Context(), tunnel.NewConn(conn), tunnel.HandlerFunc(func(_ context.Context, req *tunnel.Request) {
					req.Refuse(tunnel.Refusef(row.reason, "no"))
				}))
				if !bytes.Equal(conn.out, row.out) {
					t.Errorf("%s, cut after %d bytes: got % x, want % x", row.name, cut, conn.out, row.out)
				}
				if err != nil && tunnel.ReasonOf(err) != row.reason {
					t.Errorf("%s, cut after %d bytes: got %v, want reason %s", row.name, cut, err, row.reason)
				}
				if !conn.closed {
					t.Errorf("%s, cut after %d bytes: the connection is open", row.name, cut)
				}
			}
		}
	}
}

// nothing is a net.Conn that does nothing.
type nothing struct{}

func (nothing) LocalAddr() net.Addr              { return nil }
func (nothing) RemoteAddr() net.Addr             { return nil }
func (nothing) SetDeadline(time.Time) error      { return nil }
func (nothing) SetReadDeadline(time.Time) error  { return nil }
func (nothing) SetWriteDeadline(time.Time) error { return nil }

// A script is a connection that reads what stands in it and then ends.
type script struct {
	nothing
	in     [][]byte
	out    []byte
	closed bool
}

func (s *script) Read(p []byte) (int, error) {
	for len(s.in) > 0 && len(s.in[0]) == 0 {
		s.in = s.in[1:]
	}
	if len(s.in) == 0 {
		return 0, io.EOF
	}
	n := copy(p, s.in[0])
	s.in[0] = s.in[0][n:]
	return n, nil
}

func (s *script) Write(p []byte) (int, error) {
	s.out = append(s.out, p...)
	return len(p), nil
}

func (s *script) Close() error      { s.closed = true; return nil }
func (s *script) CloseWrite() error { return nil }

// Nobody is let through whom the table does not name, by whatever words.
func TestNoOpenProxy(t *testing.T) {
	g := serve(t, nil, &Protocol{})
	for i := range 300 {
		b := byte(i)
		in := [][]byte{
			join(greetNone, []byte{5, 1, 0, 1, b, byte(i >> 1), 2, 7, b, 187}),
			join(greetNone, []byte{5, 1, 0, 4, 0x20, 1, b, 0xb8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 7, b, 187}),
			join(greetNone, nameRequest(strings.Repeat("x", 1+i%63)+".test", 443)),
		}[i%3]
		c := testnet.Connect(t, g.Addr)
		_, _ = c.Write(in)
		if got, err := io.ReadAll(c); !bytes.HasPrefix(got, []byte{5, 0, 5}) || got[3] == byte(Succeeded) || err != nil {
			t.Errorf("% x: got % x, %v, want a refusal", in, got, err)
		}
		_ = c.Close()
	}
	if n := g.Dials(); n > 0 {
		t.Errorf("%d dials, want none", n)
	}
}

// The time for the whole preamble is the Server's, and no byte prolongs it.
func TestSlowClient(t *testing.T) {
	whole := join([]byte{5, 1, 0}, askName)
	for _, sent := range []int{0, 1, 3, 10, len(whole) - 1} {
		near := &script{in: [][]byte{whole[:sent]}}
		late := &lateScript{script: near}
		err := (&Protocol{}).ServeConn(t.Context(), tunnel.NewConn(late), tunnel.HandlerFunc(func(context.Context, *tunnel.Request) {
			t.Error("a request that is not complete")
		}))
		if tunnel.ReasonOf(err) != tunnel.HelloTimeout || !near.closed {
			t.Errorf("after %d bytes: got %v, closed %v; want %s and closed", sent, err, near.closed, tunnel.HelloTimeout)
		}
		if late.moved {
			t.Errorf("after %d bytes: the read deadline was moved", sent)
		}
	}
}

// A lateScript is a script whose time is up at its end.
type lateScript struct {
	*script
	moved bool
}

func (s *lateScript) Read(p []byte) (int, error) {
	n, err := s.script.Read(p)
	if err == io.EOF {
		err = os.ErrDeadlineExceeded
	}
	return n, err
}

func (s *lateScript) SetReadDeadline(time.Time) error { s.moved = true; return nil }
func (s *lateScript) SetDeadline(time.Time) error     { s.moved = true; return nil }
