package socks5

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"net/netip"
	"testing"
	"testing/synctest"
	"time"

	"culvert.dev/internal/testnet"
	"culvert.dev/tunnel"
	"culvert.dev/tunnel/tunneltest"
)

func TestDialer(t *testing.T) {
	for name, verify := range map[string]func(context.Context, netip.Addr, string, string) error{"open": nil, "password": onlyAlice} {
		t.Run(name, func(t *testing.T) {
			tunneltest.TestDialer(t, func(t *testing.T, backend net.Listener) tunneltest.Dialer {
				g := serve(t, tunneltest.Table{"svc.test:443": backend.Addr().String(), "down.test:443": testnet.ClosedPort(t)}, &Protocol{Verify: verify})
				return tunneltest.Dialer{
					Dialer: &Dialer{Proxy: g.Addr, User: "alice", Password: "secret"},
					Addr:   "SVC.test:443",
					Refused: map[string]tunnel.Reason{
						"nobody.test:443":    tunnel.Denied,
						"192.0.2.7:443":      tunnel.Denied,
						"[2001:db8::7]:443":  tunnel.Denied,
						"127.0.0.1:443":      tunnel.Denied,
						"down.test:443":      tunnel.DialFailed,
						"svc.test:0":         tunnel.BadRequest,
						"svc.test":           tunnel.BadRequest,
						"127.1:443":          tunnel.BadRequest,
						"[fe80::1%eth0]:443": tunnel.BadRequest,
					},
				}
			}, tunneltest.Options{Streams: 1000})
		})
	}
}

// One Dialer is the way of another.
func TestDialerChain(t *testing.T) {
	far := serve(t, tunneltest.Table{"svc.test:443": testnet.Echo(t).Addr()}, &Protocol{})
	near := serve(t, tunneltest.Table{"far.test:1080": far.Addr}, &Protocol{Verify: onlyAlice})
	d := &Dialer{Proxy: "far.test:1080", Dialer: &Dialer{Proxy: near.Addr, User: "alice", Password: "secret"}}
	c, err := d.DialContext(t.Context(), "tcp", "svc.test:443")
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	_, _ = io.WriteString(c, "there and back")
	_ = c.(tunnel.Stream).CloseWrite()
	if got, err := io.ReadAll(c); string(got) != "there and back" || err != nil {
		t.Errorf("got %q, %v, want what was sent", got, err)
	}
}

// canned is a proxy that hears as many bytes as it is told to and says what is
// in the script. Then it ends.
type canned []exchange

type exchange struct {
	hear  []byte
	write []byte
}

// dial dials addr through p. It returns what came behind the answer.
func (p canned) dial(t *testing.T, d *Dialer, addr string) (rest []byte, err error) {
	t.Helper()
	d.Proxy = testnet.Service(t, func(far net.Conn) {
		for _, x := range p {
			got := make([]byte, len(x.hear))
			if _, err := io.ReadFull(far, got); err != nil {
				return
			}
			if !bytes.Equal(got, x.hear) {
				t.Errorf("the proxy heard % x, want % x", got, x.hear)
			}
			if _, err := far.Write(x.write); err != nil {
				return
			}
		}
	})
	c, err := d.DialContext(t.Context(), "tcp", addr)
	if err == nil {
		rest, _ = io.ReadAll(c)
		_ = c.Close()
	}
	return rest, err
}

type dialerFunc func(ctx context.Context, network, addr string) (net.Conn, error)

func (f dialerFunc) DialContext(ctx context.Context, network, addr string) (net.Conn, error) {
	return f(ctx, network, addr)
}

var greetBoth = []byte{5, 2, 0, 2}

// What a Dialer says, to the byte, and what it makes of each answer.
func TestDialerHears(t *testing.T) {
	hello := exchange{greetNone, []byte{5, 0}}
	for _, row := range []struct {
		name           string
		user, password string
		proxy          canned
		rest           string        // after the answer
		reason         tunnel.Reason // "" means yes
	}{
		{"yes, IPv4", "", "", canned{hello, {askName, []byte("\x05\x00\x00\x01\x00\x00\x00\x00\x00\x00banner")}}, "banner", ""},
		{"yes, IPv6", "", "", canned{hello, {askName, join([]byte{5, 0, 0, 4}, make([]byte, 18), []byte("banner"))}}, "banner", ""},
		{"yes, name", "", "", canned{hello, {askName, []byte("\x05\x00\x00\x03\x04gate\x00\x01banner")}}, "banner", ""},
		{"yes, empty name", "", "", canned{hello, {askName, []byte("\x05\x00\x00\x03\x00\x00\x01banner")}}, "banner", ""},
		{"password", "alice", "secret", canned{{greetBoth, []byte{5, 2}}, {password("alice", "secret"), []byte{1, 0}}, {askName, answer(Succeeded)}}, "", ""},
		{"password with version 5", "alice", "secret", canned{{greetBoth, []byte{5, 2}}, {password("alice", "secret"), []byte{5, 0}}, {askName, answer(Succeeded)}}, "", ""},
		{"password not asked for", "alice", "secret", canned{{greetBoth, []byte{5, 0}}, {askName, answer(Succeeded)}}, "", ""},
		{"password wrong", "alice", "guess", canned{{greetBoth, []byte{5, 2}}, {password("alice", "guess"), []byte{1, 1}}}, "", tunnel.NoAuth},
		{"no method", "", "", canned{{greetNone, []byte{5, 0xff}}}, "", tunnel.NoAuth},
		{"a method that was not offered", "", "", canned{{greetNone, []byte{5, 2}}}, "", tunnel.DialFailed},
		{"general failure", "", "", canned{hello, {askName, answer(GeneralFailure)}}, "", tunnel.DialFailed},
		{"not allowed", "", "", canned{hello, {askName, answer(NotAllowed)}}, "", tunnel.Denied},
		{"network unreachable", "", "", canned{hello, {askName, answer(NetworkUnreachable)}}, "", tunnel.DialFailed},
		{"host unreachable", "", "", canned{hello, {askName, answer(HostUnreachable)}}, "", tunnel.DialFailed},
		{"refused", "", "", canned{hello, {askName, answer(ConnectionRefused)}}, "", tunnel.DialFailed},
		{"TTL", "", "", canned{hello, {askName, answer(TTLExpired)}}, "", tunnel.DialTimeout},
		{"command", "", "", canned{hello, {askName, answer(CommandNotSupported)}}, "", tunnel.Unsupported},
		{"address type", "", "", canned{hello, {askName, answer(AddressTypeNotSupported)}}, "", tunnel.Unsupported},
		{"a reply nobody knows", "", "", canned{hello, {askName, answer(Reply(0x5a))}}, "", tunnel.DialFailed},
		{"an address of no type", "", "", canned{hello, {askName, []byte{5, 0, 0, 9, 0, 0, 0, 0, 0, 0}}}, "", tunnel.DialFailed},
		{"SOCKS4", "", "", canned{{greetNone, []byte{0, 0x5b, 0, 0, 0, 0, 0, 0}}}, "", tunnel.DialFailed},
		{"HTTP", "", "", canned{{greetNone, []byte("HTTP/1.1 400 Bad Request\r\n\r\n")}}, "", tunnel.DialFailed},
		{"HTTP, later", "", "", canned{hello, {askName, []byte("HTTP/1.1 400 Bad Request\r\n\r\n")}}, "", tunnel.DialFailed},
		{"nothing", "", "", canned{{greetNone, nil}}, "", tunnel.DialFailed},
		{"a byte", "", "", canned{{greetNone, []byte{5}}}, "", tunnel.DialFailed},
		{"half an answer", "", "", canned{hello, {askName, []byte{5, 0, 0, 1, 0, 0}}}, "", tunnel.DialFailed},
	} {
		t.Run(row.name, func(t *testing.T) {
			rest, err := row.proxy.dial(t, &Dialer{User: row.user, Password: row.password}, "svc.test:443")
			if string(rest) != row.rest {
				t.Errorf("the stream begins with %q, want %q", rest, row.rest)
			}
			var te *tunnel.Error
			switch {
			case row.reason == "" && err != nil:
				t.Error(err)
			case row.reason != "" && (!errors.As(err, &te) || te.Reason != row.reason):
				t.Errorf("got %v, want reason %s", err, row.reason)
			}
			if err != nil && row.password != "" && bytes.Contains([]byte(err.Error()), []byte(row.password)) {
				t.Errorf("the error %q quotes the password", err)
			}
		})
	}
}

// The forms of an address on the wire.
func TestDialerAsks(t *testing.T) {
	for addr, want := range map[string][]byte{
		"Svc.Test.:443":          askName,
		"192.0.2.7:443":          askV4,
		"[2001:db8::7]:443":      askV6,
		"[::ffff:192.0.2.7]:443": askV4,
		longName + ":65535":      nameRequest(longName, 65535),
	} {
		if _, err := (canned{{greetNone, []byte{5, 0}}, {want, answer(Succeeded)}}).dial(t, &Dialer{}, addr); err != nil {
			t.Errorf("%s: %v", addr, err)
		}
	}
}

func TestDialerRefusesToAsk(t *testing.T) {
	d := &Dialer{Proxy: testnet.ClosedPort(t), User: "alice"}
	if _, err := d.DialContext(t.Context(), "tcp", "svc.test:443"); err == nil {
		t.Error("a user without a password was let pass")
	}
	d = &Dialer{Proxy: d.Proxy, User: string(make([]byte, 256)), Password: "x"}
	if _, err := d.DialContext(t.Context(), "tcp", "svc.test:443"); err == nil {
		t.Error("a user of 256 bytes was let pass")
	}
	d = &Dialer{Proxy: d.Proxy}
	if _, err := d.DialContext(t.Context(), "udp", "svc.test:443"); err == nil {
		t.Error("UDP was let pass")
	}
	if _, err := d.DialContext(t.Context(), "tcp", "svc.test:443"); tunnel.ReasonOf(err) != tunnel.DialFailed {
		t.Errorf("a proxy that is down: got %v, want reason %s", err, tunnel.DialFailed)
	}
}

// A proxy that says nothing is given up after Wait, and at once where the
// context ends.
func TestDialerWaits(t *testing.T) {
	for _, said := range [][]byte{nil, {5}, {5, 0}, {5, 0, 5, 0}} {
		synctest.Test(t, func(t *testing.T) {
			near, far := net.Pipe()
			defer far.Close()
			go func() { _, _ = io.Copy(io.Discard, far) }()
			go func() { _, _ = far.Write(said) }()
			d := &Dialer{Proxy: "proxy.test:1080", Wait: 3 * time.Second, Dialer: dialerFunc(func(context.Context, string, string) (net.Conn, error) { return near, nil })}
			start := time.Now()
			_, err := d.DialContext(t.Context(), "tcp", "svc.test:443")
			if took := time.Since(start); took != d.Wait || tunnel.ReasonOf(err) != tunnel.DialTimeout {
				t.Errorf("after % x: got %v after %v, want reason %s after %v", said, err, took, tunnel.DialTimeout, d.Wait)
			}
		})
		synctest.Test(t, func(t *testing.T) {
			near, far := net.Pipe()
			defer far.Close()
			go func() { _, _ = io.Copy(io.Discard, far) }()
			go func() { _, _ = far.Write(said) }()
			d := &Dialer{Proxy: "proxy.test:1080", Dialer: dialerFunc(func(context.Context, string, string) (net.Conn, error) { return near, nil })}
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			defer cancel()
			if _, err := d.DialContext(ctx, "tcp", "svc.test:443"); !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("after % x: got %v, want the context's error", said, err)
			}
		})
	}
}

// TestDrain: the end of a gateway.
func TestDrain(t *testing.T) {
	tunneltest.TestDrain(t, func(t *testing.T, routes tunnel.Resolver) tunneltest.Draining {
		g := tunneltest.Serve(t, tunneltest.Setup{Protocols: []tunnel.Protocol{&Protocol{}}, Resolver: routes})
		return tunneltest.Draining{Served: g.With(&Dialer{Proxy: g.Addr}, "svc.test:443"), Socket: g.Addr, Begin: "\x05\x01"}
	})
}

// TestEnds checks that every byte arrives once and in order, that an end stays an
// end and an abort an abort, in both directions.
func TestEnds(t *testing.T) {
	testnet.TestPath(t, func(t *testing.T, service string) (testnet.Dialer, string) {
		return &Dialer{Proxy: serve(t, tunneltest.Table{"svc.test:443": service}, &Protocol{}).Addr}, "svc.test:443"
	}, nil)
}
