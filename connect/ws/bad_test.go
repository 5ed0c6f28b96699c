package ws

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"culvert.dev/connect"
	"culvert.dev/internal/testnet"
	"culvert.dev/tunnel"
	"culvert.dev/tunnel/tunneltest"
)

func join(frames ...[]byte) []byte { return bytes.Join(frames, nil) }

// What a client sends on a stream that stands, and the close code that answers
// it. The service sees what came before, and then an abort.
func TestBadFrames(t *testing.T) {
	good := frame(0x82, true, []byte("good"))
	flood := bytes.Repeat(frame(0x89, true, nil), maxEmptyFrames+1)
	rows := []struct {
		name string
		in   []byte
		code int
	}{
		{"unmasked", frame(0x82, false, []byte("x")), codeProtocol},
		{"RSV1, as compression would set it", frame(0xc2, true, []byte("x")), codeProtocol},
		{"RSV2", frame(0xa2, true, []byte("x")), codeProtocol},
		{"RSV3", frame(0x92, true, []byte("x")), codeProtocol},
		{"RSV1 on a ping", frame(0xc9, true, nil), codeProtocol},
		{"opcode 3", frame(0x83, true, nil), codeProtocol},
		{"opcode 11", frame(0x8b, true, nil), codeProtocol},
		{"ping in fragments", frame(0x09, true, nil), codeProtocol},
		{"ping of 126 bytes", frame(0x89, true, make([]byte, 126)), codeProtocol},
		{"close of 126 bytes", closeFrame(1000, true, strings.Repeat("x", 124)), codeProtocol},
		{"length 5 in two bytes", []byte{0x82, 0xfe, 0, 5, 0, 0, 0, 0}, codeProtocol},
		{"length 5 in eight bytes", []byte{0x82, 0xff, 0, 0, 0, 0, 0, 0, 0, 5, 0, 0, 0, 0}, codeProtocol},
		{"length 2^63", []byte{0x82, 0xff, 0x80, 0, 0, 0, 0, 0, 0, 0}, codeProtocol},
		{"continuation of nothing", frame(0x80, true, []byte("x")), codeProtocol},
		{"continuation of what is complete", join(frame(0x02, true, []byte("a")), frame(0x80, true, []byte("b")), frame(0x80, true, []byte("c"))), codeProtocol},
		{"message inside of another", join(frame(0x02, true, []byte("a")), frame(0x82, true, []byte("b"))), codeProtocol},
		{"text", frame(0x81, true, []byte("x")), codeUnsupported},
		{"text that is not UTF-8", frame(0x81, true, []byte("\xff")), codeUnsupported},
		{"close of one byte", frame(0x88, true, []byte("x")), codeProtocol},
		{"close code 999", closeFrame(999, true, ""), codeProtocol},
		{"close code 1005", closeFrame(1005, true, ""), codeProtocol},
		{"close code 1006", closeFrame(1006, true, ""), codeProtocol},
		{"close reason not UTF-8", closeFrame(1000, true, "\xff"), codeInvalid},
		{"101 pings", flood, codePolicy},
		{"101 pongs", bytes.Repeat(frame(0x8a, true, nil), maxEmptyFrames+1), codePolicy},
		{"101 empty fragments", join(frame(0x02, true, nil), bytes.Repeat(frame(0x00, true, nil), maxEmptyFrames)), codePolicy},
		{"close code 1001", closeFrame(1001, true, "gone"), 1001}, // a page that is left: no orderly end
		{"close code 1011", closeFrame(1011, true, ""), 1011},
		{"close code 4000", closeFrame(4000, true, ""), 4000},
	}
	for _, over := range carriers(t) {
		for _, row := range rows {
			t.Run(row.name+" "+over.name, func(t *testing.T) {
				t.Parallel()
				type seen struct {
					bytes string
					err   error
				}
				service := make(chan seen, 1)
				g := serve(t, tunneltest.Table{"svc.test:443": testnet.Service(t, func(c net.Conn) {
					b, err := io.ReadAll(c)
					service <- seen{string(b[:min(len(b), 4)]), err}
				})}, over.protocol())
				c := over.open(t, g)
				_, _ = c.Write(good)
				_, _ = c.Write(row.in)
				if got := closeOf(t, c); got != row.code {
					t.Errorf("got close code %d, want %d", got, row.code)
				}
				// Of 1 MiB the end may be lost with the reset.
				if got := <-service; got.err == nil || got.bytes != "good" && !strings.Contains(row.name, "fragments") && got.bytes != "" {
					t.Errorf("the service saw %q and %v, want at most what was good, and an abort", got.bytes, got.err)
				}
				_ = c.Close()
				if o := g.Outcome(t); o.Reason != tunnel.Reset {
					t.Errorf("got outcome %s, %v, want %s", o.Reason, o.Err, tunnel.Reset)
				}
			})
		}
	}
}

// Everything the rules allow: fragments with control frames in between, masks
// of zeros, messages of a byte, of 3 MiB and of none.
func TestGoodFrames(t *testing.T) {
	big := bytes.Repeat([]byte("0123456789abcdef"), 3<<16)
	in := join(
		frame(0x02, true, []byte("frag")), frame(0x89, true, []byte("ping")), frame(0x00, true, nil), frame(0x80, true, []byte("ments ")),
		[]byte{0x82, 0x83, 0, 0, 0, 0}, []byte("a b"),
		frame(0x8a, true, []byte("a pong that nobody asked for")),
		frame(0x82, true, big),
		frame(0x02, true, big[:1<<19]), frame(0x80, true, big[1<<19:]),
	)
	want := "fragments a b" + string(big) + string(big)
	for name, row := range map[string]struct {
		subprotocol string
		end         []byte
	}{
		"end of the stream":              {Subprotocol, frame(0x82, true, nil)},
		"end of the stream in fragments": {Subprotocol, join(frame(0x02, true, nil), frame(0x00, true, nil), frame(0x8a, true, nil), frame(0x80, true, nil))},
		"close":                          {Subprotocol, closeFrame(1000, true, "bye")},
		"a stranger's close":             {"", closeFrame(1000, true, "")},
		"a page's close":                 {"", frame(0x88, true, nil)},
		"empty messages mean nothing":    {"", join(frame(0x82, true, nil), frame(0x02, true, nil), frame(0x80, true, nil), closeFrame(1000, true, ""))},
	} {
		t.Run(name, func(t *testing.T) {
			got := make(chan string, 1)
			g := serve(t, tunneltest.Table{"svc.test:443": testnet.Service(t, func(c net.Conn) {
				b, err := io.ReadAll(c)
				if err != nil {
					t.Errorf("the service: %v", err)
				}
				got <- string(b)
				_ = testnet.CloseWrite(c)
			})}, &Protocol{})
			c := open(t, g, row.subprotocol)
			go func() { _, _ = c.Write(join(in, row.end)) }()
			if h, payload := next(t, c); h.opcode != opPong || string(payload) != "ping" {
				t.Errorf("got opcode %d, %q, want the pong", h.opcode, payload)
			}
			if b := <-got; b != want {
				t.Errorf("the service got %d bytes, want %d, or others", len(b), len(want))
			}
			want := codeNormal
			if name == "a page's close" {
				want = codeNone
			}
			if code := closeOf(t, c); code != want {
				t.Errorf("got close code %d, want %d", code, want)
			}
			_, _ = c.Write(closeFrame(1000, true, ""))
			if rest, err := io.ReadAll(c); len(rest) > 0 || err != nil && !errors.Is(err, syscall.ECONNRESET) {
				t.Errorf("got %x, %v after the close frame, want the end", rest, err)
			}
			if o := g.Outcome(t); o.Reason != tunnel.Done {
				t.Errorf("got outcome %s, %v, want %s", o.Reason, o.Err, tunnel.Done)
			}
		})
	}
}

// Each of several pings that come at once is answered, in their order.
func TestPingsAtOnce(t *testing.T) {
	g := serve(t, tunneltest.Table{"svc.test:443": testnet.Echo(t).Addr()}, &Protocol{})
	c := open(t, g, Subprotocol)
	var in []byte
	for i := range 20 {
		in = append(in, frame(0x89, true, fmt.Append(nil, i))...)
	}
	_, _ = c.Write(in)
	for i := range 20 {
		if h, payload := next(t, c); h.opcode != opPong || string(payload) != fmt.Sprint(i) {
			t.Fatalf("got opcode %d, %q, want the pong to %d", h.opcode, payload, i)
		}
	}
}

// Of the pings of a peer that takes no answer the last ones are kept.
func TestPongsThatNobodyReads(t *testing.T) {
	var p pongs
	for i := range 10 * maxPongs {
		p.add(fmt.Append(nil, i))
	}
	list := p.take()
	if last := string(list[len(list)-1]); len(list) != maxPongs || last != fmt.Sprint(10*maxPongs-1) {
		t.Errorf("%d answers are kept, the last to %s, want %d and the last to %d", len(list), last, maxPongs, 10*maxPongs-1)
	}
	if !p.empty() {
		t.Error("what was taken is still there")
	}
}

// A connection that ends and a stream that does not: an abort to the service.
func TestCutStream(t *testing.T) {
	for name, in := range map[string][]byte{
		"between frames": frame(0x82, true, []byte("good")),
		"in a header":    append(frame(0x82, true, []byte("good")), 0x82),
		"in a payload":   frame(0x82, true, []byte("good and more"))[:14],
		"in a message":   frame(0x02, true, []byte("good")),
	} {
		for _, over := range carriers(t) {
			name := name + " " + over.name
			service := make(chan error, 1)
			g := serve(t, tunneltest.Table{"svc.test:443": testnet.Service(t, func(c net.Conn) {
				_, err := io.ReadAll(c)
				service <- err
			})}, over.protocol())
			c := over.open(t, g)
			_, _ = c.Write(in)
			_ = c.(tunnel.Stream).CloseWrite()
			if err := <-service; err == nil {
				t.Errorf("%s: the service saw an orderly end, want an abort", name)
			}
			_ = c.Close()
			if o := g.Outcome(t); o.Reason != tunnel.Reset {
				t.Errorf("%s: got outcome %s, want %s", name, o.Reason, tunnel.Reset)
			}
		}
	}
}

// A service that aborts: the client sees code 1011, or a reset at the least.
func TestServiceAborts(t *testing.T) {
	for _, over := range carriers(t) {
		g := serve(t, tunneltest.Table{"svc.test:443": testnet.Service(t, func(c net.Conn) {
			_, _ = io.ReadFull(c, make([]byte, 1))
			_ = testnet.Abort(c)
		})}, over.protocol())
		c := over.open(t, g)
		_, _ = c.Write(frame(0x82, true, []byte("x")))
		got, err := io.ReadAll(c)
		if err == nil || len(got) > 0 && !bytes.Equal(got, closeFrame(1011, false, "")) {
			t.Errorf("%s: got %x, %v, want close code 1011 or nothing, and a reset", over.name, got, err)
		}
		if o := g.Outcome(t); o.Reason != tunnel.Reset {
			t.Errorf("%s: got outcome %s, want %s", over.name, o.Reason, tunnel.Reset)
		}
	}
}

// memory returns the two sides of a pipe with time of its own; the test speaks
// for one of them.
func memory(t *testing.T, side Side, o Options) (*Stream, net.Conn) {
	near, far := net.Pipe()
	s := NewStream(near, side, Subprotocol, o)
	t.Cleanup(func() { _ = s.Abort(); _ = far.Close() })
	return s, far
}

// Silence is broken by a ping after 20 seconds, and a peer that answers none
// in a minute is dead.
func TestKeepAlive(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, far := memory(t, Server, Options{})
		start := time.Now()
		dead := make(chan error, 1)
		go func() { _, err := s.Read(make([]byte, 1)); dead <- err }()
		for i := 1; i <= 2; i++ {
			if h, _ := next(t, far); h.opcode != opPing || time.Since(start) != time.Duration(i)*DefaultPing {
				t.Errorf("got opcode %d after %v, want a ping after %v", h.opcode, time.Since(start), time.Duration(i)*DefaultPing)
			}
		}
		if err := <-dead; err == nil || !strings.Contains(err.Error(), "no answer to 3 pings") || time.Since(start) != 3*DefaultPing {
			t.Errorf("got %v after %v, want the end after %v", err, time.Since(start), 3*DefaultPing)
		}
	})
}

// A peer that answers lives, and one that is sent data needs no pings.
func TestKeepAliveAnswered(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, far := memory(t, Server, Options{})
		got := make(chan error, 1)
		go func() { _, err := s.Read(make([]byte, 1)); got <- err }()
		for range 10 {
			if h, _ := next(t, far); h.opcode != opPing {
				t.Errorf("got opcode %d, want a ping", h.opcode)
			}
			_, _ = far.Write(frame(0x8a, true, nil))
		}
		for range 5 {
			time.Sleep(DefaultPing - time.Second)
			go func() { _, _ = s.Write([]byte("x")) }()
			if h, _ := next(t, far); h.opcode != opBinary {
				t.Errorf("got opcode %d, want data and no ping", h.opcode)
			}
			_, _ = far.Write(frame(0x8a, true, nil))
		}
		_, _ = far.Write(frame(0x82, true, []byte("x")))
		if err := <-got; err != nil {
			t.Errorf("got %v, want the data", err)
		}
	})
}

// A peer that is not read from, as the service is slow, is not dead.
func TestKeepAliveUnread(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, far := memory(t, Server, Options{})
		for range 10 {
			if h, _ := next(t, far); h.opcode != opPing {
				t.Errorf("got opcode %d, want a ping", h.opcode)
			}
		}
		go func() { _, _ = far.Write(frame(0x82, true, []byte("x"))) }()
		if n, err := s.Read(make([]byte, 1)); n != 1 || err != nil {
			t.Errorf("got %d, %v, want the data", n, err)
		}
	})
}

// A close frame that is not answered is waited for two seconds, and one that
// is not even taken as long.
func TestCloseUnanswered(t *testing.T) {
	for _, taken := range []bool{true, false} {
		synctest.Test(t, func(t *testing.T) {
			s, far := memory(t, Client, Options{})
			start := time.Now()
			_ = s.Close()
			if got := time.Since(start); got > immediateTimeout {
				t.Errorf("Close took %v, want %v at most", got, immediateTimeout)
			}
			if taken {
				if _, err := io.ReadFull(far, make([]byte, 8)); err != nil {
					t.Fatal(err)
				}
			} else {
				time.Sleep(closeTimeout - time.Nanosecond)
			}
			if n, err := far.Write([]byte{0x82}); taken && (n != 1 || err != nil) {
				t.Errorf("got %d, %v, want what follows to be read", n, err)
			}
			_, _ = io.Copy(io.Discard, far)
			if got := time.Since(start); got != closeTimeout+immediateTimeout {
				t.Errorf("taken %v: the connection ended after %v, want %v", taken, got, closeTimeout+immediateTimeout)
			}
		})
	}
}

// The carrier may be any pair of byte streams, such as a stream of HTTP/2.
func TestAnyCarrier(t *testing.T) {
	type halves struct {
		io.Reader
		io.WriteCloser
	}
	fromClient, toServer := io.Pipe()
	fromServer, toClient := io.Pipe()
	client := NewStream(halves{fromServer, toServer}, Client, Subprotocol, Options{})
	server := NewStream(halves{fromClient, toClient}, Server, Subprotocol, Options{})
	go func() {
		_, _ = io.Copy(server, server)
		_ = server.CloseWrite()
	}()
	go func() {
		_, _ = io.WriteString(client, "there and back")
		_ = client.CloseWrite()
	}()
	if got, err := io.ReadAll(client); string(got) != "there and back" || err != nil {
		t.Errorf("got %q, %v, want what was sent", got, err)
	}
	if err := client.SetDeadline(time.Now()); !errors.Is(err, errors.ErrUnsupported) {
		t.Errorf("got %v from SetDeadline, want errors.ErrUnsupported", err)
	}
	_, _ = client.Close(), server.Close()
	_, _ = fromClient.Close(), fromServer.Close()
}

// Answers that are no yes to a Dialer.
func TestDialerRefusesAnswers(t *testing.T) {
	// KEY stands for the right answer to the key.
	const ok = "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Accept: KEY\r\n"
	rows := []struct {
		name, answer, want string
		reason             tunnel.Reason
	}{
		{"200", "HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello", "with status 200", tunnel.Unsupported},
		{"another key's answer", strings.Replace(ok, "KEY", sampleAccept, 1) + "\r\n", "does not answer the key", tunnel.DialFailed},
		{"no answer to the key", strings.Replace(ok, "Sec-WebSocket-Accept: KEY\r\n", "", 1) + "\r\n", "does not answer the key", tunnel.DialFailed},
		{"no Upgrade", strings.Replace(ok, "Upgrade: websocket\r\n", "", 1) + "\r\n", "not to WebSocket", tunnel.DialFailed},
		{"another Upgrade", strings.Replace(ok, "websocket", "h2c", 1) + "\r\n", "not to WebSocket", tunnel.DialFailed},
		{"an extension", ok + "Sec-WebSocket-Extensions: permessage-deflate\r\n\r\n", "an extension was chosen", tunnel.DialFailed},
		{"another subprotocol", ok + "Sec-WebSocket-Protocol: chat\r\n\r\n", `subprotocol "chat" was chosen`, tunnel.DialFailed},
		{"401", "HTTP/1.1 401 Unauthorized\r\nContent-Length: 0\r\n\r\n", "with status 401", tunnel.NoAuth},
		{"403", "HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n", "with status 403", tunnel.Denied},
		{"404", "HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n", "with status 404", tunnel.NoRoute},
		{"426", "HTTP/1.1 426 Upgrade Required\r\nSec-WebSocket-Version: 8\r\n\r\n", "with status 426", tunnel.Unsupported},
		{"502 of a load balancer", "HTTP/1.1 502 Bad Gateway\r\nContent-Length: 0\r\n\r\n", "with status 502", tunnel.DialFailed},
		{"a redirect", "HTTP/1.1 302 Found\r\nLocation: ws://evil.test/\r\n\r\n", "with status 302", tunnel.Unsupported},
		{"not HTTP", "SSH-2.0-OpenSSH_9.2p1\r\n\r\n", "no HTTP version", tunnel.DialFailed},
		{"nothing", "", "", tunnel.DialFailed},
	}
	for _, row := range rows {
		addr := testnet.Service(t, func(c net.Conn) {
			conn := tunnel.NewConn(c)
			head, err := connect.ReadHead(context.Background(), conn)
			if err != nil {
				t.Error(err)
				return
			}
			key, _ := head.Fields.Get("Sec-WebSocket-Key")
			_, _ = io.WriteString(c, strings.Replace(row.answer, "KEY", acceptKey(key), 1))
		})
		c, err := (&Dialer{URL: "ws://" + addr}).DialContext(t.Context(), "tcp", "svc.test:443")
		if err == nil {
			_ = c.Close()
		}
		if tunnel.ReasonOf(err) != row.reason || !strings.Contains(err.Error(), row.want) {
			t.Errorf("%s: got %v (%s), want %q and %s", row.name, err, tunnel.ReasonOf(err), row.want, row.reason)
		}
	}
}

// The request, to the byte, but for its key.
func TestDialerSends(t *testing.T) {
	rows := []struct {
		d          Dialer
		path, addr string
		want       string
	}{
		{Dialer{}, "", "Svc.Test.:443", "GET /.culvert/tunnel/svc.test:443 HTTP/1.1\r\nHost: ADDR\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n" +
			"Sec-WebSocket-Key: KEY\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Protocol: culvert.v1\r\nVia: 1.1 gw-0\r\n\r\n"},
		{Dialer{Via: "gw-1", Authorization: "Bearer t0ken"}, "/edge/x/", "[2001:DB8::0:1]:80", "GET /edge/x/%5B2001:db8::1%5D:80 HTTP/1.1\r\nHost: ADDR\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n" +
			"Sec-WebSocket-Key: KEY\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Protocol: culvert.v1\r\nVia: 1.1 gw-0, 1.1 gw-1\r\nAuthorization: Bearer t0ken\r\n\r\n"},
		{Dialer{InField: true}, "/", "svc.test:443", "GET /.culvert/tunnel/ HTTP/1.1\r\nHost: ADDR\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n" +
			"Sec-WebSocket-Key: KEY\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Protocol: culvert.v1\r\nCulvert-Target: svc.test:443\r\nVia: 1.1 gw-0\r\n\r\n"},
	}
	for _, row := range rows {
		heads := make(chan string, 1)
		addr := testnet.Service(t, func(c net.Conn) {
			conn := tunnel.NewConn(c)
			head, err := connect.ReadHead(context.Background(), conn)
			if err != nil {
				t.Error(err)
			}
			key, _ := head.Fields.Get("Sec-WebSocket-Key")
			heads <- strings.Replace(string(conn.Buffered()), key, "KEY", 1)
		})
		d := row.d
		d.URL = "ws://" + addr + row.path
		ctx := connect.WithVia(t.Context(), []string{"gw-0"})
		if _, err := d.DialContext(ctx, "tcp", row.addr); err == nil {
			t.Error("a dial without an answer worked")
		}
		if got, want := <-heads, strings.Replace(row.want, "ADDR", addr, 1); got != want {
			t.Errorf("got head\n%s\nwant\n%s", got, want)
		}
	}
}

// Nothing of this is sent.
func TestDialerRefusesToSend(t *testing.T) {
	header := func(name, value string) *Dialer {
		return &Dialer{URL: "ws://127.0.0.1:1", Header: func(context.Context, string) (connect.Fields, error) {
			return connect.Fields{{Name: name, Value: value}}, nil
		}}
	}
	rows := []struct {
		d             *Dialer
		network, addr string
		want          string
	}{
		{&Dialer{URL: "ws://127.0.0.1:1"}, "udp", "svc.test:443", "unknown network udp"},
		{&Dialer{URL: "ws://127.0.0.1:1"}, "tcp", "svc.test", "has no port"},
		{&Dialer{URL: "http://127.0.0.1:1"}, "tcp", "svc.test:443", "does not begin with ws:// or wss://"},
		{&Dialer{URL: "ws:///x/"}, "tcp", "svc.test:443", "names no host"},
		{&Dialer{URL: "ws://gw.test/x"}, "tcp", "svc.test:443", "does not end with a slash"},
		{&Dialer{URL: "ws://gw.test/?x"}, "tcp", "svc.test:443", "has a query"},
		{&Dialer{URL: "ws://u:secret@gw.test/"}, "tcp", "svc.test:443", "user information"},
		{&Dialer{URL: "ws://gw.test:0/"}, "tcp", "svc.test:443", "port"},
		{&Dialer{URL: "ws://127.0.0.1:1", Authorization: "x\r\nEvil: y"}, "tcp", "svc.test:443", "field Authorization has byte 0x0d"},
		{header("Evil\r\n", "x"), "tcp", "svc.test:443", "is not a field name"},
		{header("Host", "x"), "tcp", "svc.test:443", "field Host cannot be set"},
	}
	for _, row := range rows {
		c, err := row.d.DialContext(t.Context(), row.network, row.addr)
		if c != nil || err == nil || !strings.Contains(err.Error(), row.want) || strings.Contains(err.Error(), "secret") {
			t.Errorf("%+v to %s: got %v, want %q", row.d, row.addr, err, row.want)
		}
	}
}
