package socks5

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"net/netip"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"culvert.dev/internal/testnet"
	"culvert.dev/tunnel"
	"culvert.dev/tunnel/tunneltest"
)

// Parts of what a client sends.
var (
	greetNone     = []byte{5, 1, 0}
	greetPassword = []byte{5, 1, 2}
	askName       = join([]byte{5, 1, 0, 3, 8}, []byte("svc.test"), []byte{0x01, 0xbb})
	askV4         = []byte{5, 1, 0, 1, 192, 0, 2, 7, 0x01, 0xbb}
	askV6         = join([]byte{5, 1, 0, 4}, netip.MustParseAddr("2001:db8::7").AsSlice(), []byte{0x01, 0xbb})
)

func join(parts ...[]byte) []byte { return bytes.Join(parts, nil) }

func password(user, password string) []byte {
	return join([]byte{1, byte(len(user))}, []byte(user), []byte{byte(len(password))}, []byte(password))
}

func nameRequest(name string, port uint16) []byte {
	return join([]byte{5, 1, 0, 3, byte(len(name))}, []byte(name), []byte{byte(port >> 8), byte(port)})
}

func onlyAlice(_ context.Context, _ netip.Addr, user, password string) error {
	if user == "alice" && password == "secret" {
		return nil
	}
	return errors.New("wrong")
}

func TestProtocol(t *testing.T) {
	svc := tunnel.MustParseName("svc.test")
	tunneltest.TestProtocol(t, &Protocol{},
		tunneltest.Preamble{Title: "name", Bytes: join(greetNone, askName), Name: svc, Port: 443},
		tunneltest.Preamble{Title: "upper case with a dot", Bytes: join(greetNone, nameRequest("SVC.Test.", 443)), Name: svc, Port: 443},
		tunneltest.Preamble{Title: "IPv4", Bytes: join(greetNone, askV4), Addr: netip.MustParseAddr("192.0.2.7"), Port: 443},
		tunneltest.Preamble{Title: "IPv6", Bytes: join(greetNone, askV6), Addr: netip.MustParseAddr("2001:db8::7"), Port: 443},
		tunneltest.Preamble{
			Title: "IPv4-mapped", Addr: netip.MustParseAddr("192.0.2.7"), Port: 443,
			Bytes: join(greetNone, []byte{5, 1, 0, 4}, netip.MustParseAddr("::ffff:192.0.2.7").AsSlice(), []byte{0x01, 0xbb}),
		},
		tunneltest.Preamble{Title: "IPv4 as a name", Bytes: join(greetNone, nameRequest("192.0.2.7", 443)), Addr: netip.MustParseAddr("192.0.2.7"), Port: 443},
		tunneltest.Preamble{Title: "IPv6 as a name", Bytes: join(greetNone, nameRequest("2001:db8::7", 443)), Addr: netip.MustParseAddr("2001:db8::7"), Port: 443},
		tunneltest.Preamble{Title: "many methods", Bytes: join([]byte{5, 255}, make([]byte, 255), askName), Name: svc, Port: 443},
	)
	tunneltest.TestProtocol(t, &Protocol{Verify: onlyAlice},
		tunneltest.Preamble{Title: "with a password", Bytes: join([]byte{5, 2, 0, 2}, password("alice", "secret"), askName), Name: svc, Port: 443},
	)
	all := func(context.Context, netip.Addr, string, string) error { return nil }
	tunneltest.TestProtocol(t, &Protocol{Verify: all}, tunneltest.Preamble{
		Title: "with the longest name", Name: tunnel.MustParseName(longName), Port: 65535,
		Bytes: join([]byte{5, 1, 2}, password("u", "p"), nameRequest(longName, 65535)),
	})
}

// longName has 253 bytes.
var longName = strings.Repeat(strings.Repeat("a", 62)+".", 4)[:252] + "b"

// What a client hears until yes, to the byte.
func TestProtocolSays(t *testing.T) {
	g := serve(t, tunneltest.Table{"svc.test:443": testnet.Echo(t).Addr()}, &Protocol{Verify: onlyAlice})
	c := testnet.Connect(t, g.Addr)
	for _, step := range []struct {
		name      string
		out, want []byte
	}{
		{"greeting", []byte{5, 3, 0, 1, 2}, []byte{5, 2}},
		{"password", password("alice", "secret"), []byte{1, 0}},
		{"request", askName, []byte{5, 0, 0, 1, 0, 0, 0, 0, 0, 0}},
		{"stream", []byte("there and back"), []byte("there and back")},
	} {
		if _, err := c.Write(step.out); err != nil {
			t.Fatalf("%s: %v", step.name, err)
		}
		got := make([]byte, len(step.want))
		if _, err := io.ReadFull(c, got); err != nil || !bytes.Equal(got, step.want) {
			t.Fatalf("%s: got % x, %v, want % x", step.name, got, err, step.want)
		}
	}
	_ = c.CloseWrite()
	if rest, err := io.ReadAll(c); len(rest) > 0 || err != nil {
		t.Errorf("after the end: got %q, %v", rest, err)
	}
	o := g.Outcome(t)
	if o.Reason != tunnel.Done || o.Peer != (tunnel.Peer{ID: "alice", Method: "basic"}) || o.Proto != "socks5" || o.Target != "svc.test:443" {
		t.Errorf("got outcome %s by %+v, %s to %s; want done by alice, socks5 to svc.test:443", o.Reason, o.Peer, o.Proto, o.Target)
	}
}

// The client hears yes only once the service is connected, and what it sent
// with its request is what the service hears first.
func TestProtocolYesAfterTheDial(t *testing.T) {
	near, far := net.Pipe()
	defer near.Close()
	_ = near.SetDeadline(time.Now().Add(patience))
	decided := make(chan struct{})
	done := make(chan error, 1)
	go func() {
		done <- (&Protocol{}).ServeConn(t.Context(), tunnel.NewConn(far), tunnel.HandlerFunc(func(_ context.Context, req *tunnel.Request) {
			<-decided
			stream, err := req.Accept()
			if err != nil {
				t.Error(err)
				return
			}
			got := make([]byte, 5)
			if _, err := io.ReadFull(stream, got); string(got) != "early" {
				t.Errorf("the stream begins with %q, %v, want what came with the request", got, err)
			}
			_ = stream.Close()
		}))
	}()
	go func() { _, _ = near.Write(join(greetNone, askName, []byte("early"))) }()
	var method [2]byte
	if _, err := io.ReadFull(near, method[:]); err != nil {
		t.Fatal(err)
	}
	_ = near.SetReadDeadline(time.Now().Add(20 * time.Millisecond))
	if n, err := near.Read(make([]byte, 1)); err == nil {
		t.Errorf("%d bytes before the decision", n)
	}
	_ = near.SetReadDeadline(time.Now().Add(patience))
	close(decided)
	if got, err := io.ReadAll(near); !bytes.Equal(got, answer(Succeeded)) || err != nil {
		t.Errorf("got % x, %v, want yes and the end", got, err)
	}
	if err := <-done; err != nil {
		t.Error(err)
	}
}

// Every field as long as it can be, in one segment and by bytes.
func TestProtocolLongest(t *testing.T) {
	user, secret := strings.Repeat("u", 255), strings.Repeat("p", 255)
	verify := func(_ context.Context, _ netip.Addr, u, p string) error {
		if u == user && p == secret {
			return nil
		}
		return errors.New("wrong")
	}
	g := serve(t, tunneltest.Table{longName + ":65535": testnet.Echo(t).Addr()}, &Protocol{Verify: verify})
	all := join([]byte{5, 255}, bytes.Repeat([]byte{2}, 255), password(user, secret), nameRequest(longName, 65535), []byte("early"))
	for _, chunk := range []int{len(all), 1} {
		c := testnet.Connect(t, g.Addr)
		for b := all; len(b) > 0; b = b[min(chunk, len(b)):] {
			if _, err := c.Write(b[:min(chunk, len(b))]); err != nil {
				t.Fatal(err)
			}
		}
		_ = c.CloseWrite()
		want := join([]byte{5, 2, 1, 0}, answer(Succeeded), []byte("early"))
		if got, err := io.ReadAll(c); !bytes.Equal(got, want) || err != nil {
			t.Errorf("in chunks of %d: got % x, %v, want % x", chunk, got, err, want)
		}
		if o := g.Outcome(t); o.Reason != tunnel.Done || o.Peer.ID != user {
			t.Errorf("in chunks of %d: got %s, %v", chunk, o.Reason, o.Err)
		}
	}
}

func TestComplete(t *testing.T) {
	p := &Protocol{}
	for _, row := range []struct {
		prefix []byte
		want   bool
	}{
		{nil, false},
		{[]byte{5}, false},
		{[]byte{5, 2, 0}, false},
		{[]byte{5, 2, 0, 2}, true},
		{[]byte{5, 0}, true},
		{[]byte{4}, true},
		{[]byte{0x16}, true},
	} {
		if got := p.HasPreamble(row.prefix); got != row.want {
			t.Errorf("HasPreamble(% x): got %v, want %v", row.prefix, got, row.want)
		}
	}
}

// A wrong password is answered after a second, whatever is wrong with it, and
// Verify sees only what could be right.
func TestWrongPasswordTakesItsTime(t *testing.T) {
	for _, row := range []struct {
		name           string
		user, password string
		asked          bool // Verify is
	}{
		{"wrong password", "alice", "guess", true},
		{"unknown user", "mallory", "secret", true},
		{"empty user", "", "secret", false},
		{"empty password", "alice", "", false},
		{"a line feed in the user", "alice\nroot", "secret", false},
		{"not UTF-8", "\xff", "secret", false},
		{"longest", strings.Repeat("u", 255), strings.Repeat("p", 255), true},
	} {
		t.Run(row.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				asked := false
				p := &Protocol{Verify: func(ctx context.Context, from netip.Addr, user, password string) error {
					asked = true
					return onlyAlice(ctx, from, user, password)
				}}
				near, far := net.Pipe()
				start := time.Now()
				go func() {
					_, _ = near.Write(join(greetPassword, password(row.user, row.password), askName))
				}()
				heard := make(chan []byte, 1)
				var took time.Duration
				go func() {
					got := make([]byte, 4)
					_, _ = io.ReadFull(near, got)
					took = time.Since(start)
					_ = near.Close()
					heard <- got
				}()
				err := p.ServeConn(t.Context(), tunnel.NewConn(far), tunnel.HandlerFunc(func(context.Context, *tunnel.Request) {
					t.Error("a request without a password")
				}))
				if got, want := <-heard, []byte{5, 2, 1, 1}; !bytes.Equal(got, want) {
					t.Errorf("got % x, want % x", got, want)
				}
				if tunnel.ReasonOf(err) != tunnel.NoAuth {
					t.Errorf("got %v, want reason %s", err, tunnel.NoAuth)
				}
				if strings.Contains(err.Error(), "guess") || row.user != "" && strings.Contains(err.Error(), row.user) {
					t.Errorf("the error %q quotes credentials", err)
				}
				if took < minPasswordDelay || took > maxPasswordDelay {
					t.Errorf("the answer took %v, want %v to %v", took, minPasswordDelay, maxPasswordDelay)
				}
				if asked != row.asked {
					t.Errorf("Verify was asked: %v, want %v", asked, row.asked)
				}
			})
		})
	}
}

// Every Reason has a reply of its own row, and none is yes.
func TestReplyFor(t *testing.T) {
	for _, r := range tunnel.Reasons() {
		if _, ok := replies[r]; !ok {
			t.Errorf("reason %s has no row", r)
		}
		if got := ReplyFor(tunnel.Refusef(r, "x")); got == Succeeded {
			t.Errorf("reason %s: got %s", r, got)
		}
	}
	dial := func(err error) error { return &tunnel.Error{Reason: tunnel.DialFailed, Err: err} }
	for _, row := range []struct {
		name string
		err  error
		want Reply
	}{
		{"no route", tunnel.Refusef(tunnel.NoRoute, "x"), NotAllowed},
		{"private", tunnel.Refusef(tunnel.NotExposed, "x"), NotAllowed},
		{"denied", tunnel.Refusef(tunnel.Denied, "x"), NotAllowed},
		{"prohibited", tunnel.Refusef(tunnel.Prohibited, "x"), NotAllowed},
		{"refused", dial(syscall.ECONNREFUSED), ConnectionRefused},
		{"network unreachable", dial(syscall.ENETUNREACH), NetworkUnreachable},
		{"host unreachable", dial(syscall.EHOSTUNREACH), HostUnreachable},
		{"timeout", tunnel.Refusef(tunnel.DialTimeout, "x"), HostUnreachable},
		{"overload", tunnel.Refusef(tunnel.Overload, "x"), GeneralFailure},
		{"drain", tunnel.Refusef(tunnel.Drain, "x"), GeneralFailure},
		{"no reason", errors.New("x"), GeneralFailure},
	} {
		if got := ReplyFor(row.err); got != row.want {
			t.Errorf("%s: got %s, want %s", row.name, got, row.want)
		}
	}
}

// A password that was not looked at is refused at once, and not as a wrong one.
func TestPasswordIsNotLookedAt(t *testing.T) {
	var from netip.Addr
	verify := func(_ context.Context, addr netip.Addr, _, _ string) error {
		from = addr
		return tunnel.Refusef(tunnel.Overload, "too many")
	}
	g := serve(t, tunneltest.Table{}, &Protocol{Verify: verify})
	took := minPasswordDelay
	for try := 0; try < 5 && took >= minPasswordDelay; try++ { // a busy machine may be late, and not each time
		c := testnet.Connect(t, g.Addr)
		start := time.Now()
		_, _ = c.Write(join(greetPassword, password("alice", "secret"), askName))
		got, _ := io.ReadAll(c)
		took = time.Since(start)
		if !bytes.Equal(got, []byte{5, 2, 1, 1}) {
			t.Errorf("heard % x, want no", got)
		}
		g.Reason(t, tunnel.Overload)
	}
	if took >= minPasswordDelay {
		t.Errorf("heard no after %v, want it at once", took)
	}
	if from != netip.MustParseAddr("127.0.0.1") {
		t.Errorf("asked for %s, want the client's address", from)
	}
}
