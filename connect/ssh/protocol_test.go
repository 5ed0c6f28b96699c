package ssh

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"os"
	"strings"
	"testing"
	"time"

	"golang.org/x/crypto/ssh"

	"culvert.dev/internal/testnet"
	"culvert.dev/tunnel"
	"culvert.dev/tunnel/tunneltest"
)

// ping sends a line through a client and wants it back.
func ping(t *testing.T, c *ssh.Client, addr string) {
	t.Helper()
	nc, err := c.Dial("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	defer nc.Close()
	testnet.Ping(t, nc, "hello\n")
}

// A client that calls itself OpenSSH gets the cipher that costs least of those that it has, and
// is let in with any of them, also where it waits for the algorithms of the server.
func TestCiphersOfOpenSSH(t *testing.T) {
	key := newKey(t)
	g := serve(t, tunneltest.Table{"svc.test:1": testnet.Echo(t).Addr()}, newProtocol(t, key.PublicKey(), ""))
	const chacha, gcm, ctr = ssh.CipherChaCha20Poly1305, ssh.CipherAES128GCM, ssh.CipherAES256CTR
	for _, tt := range []struct {
		name  string
		has   []string
		waits bool // for the server
		want  string
	}{
		{"its order", []string{chacha, ctr, gcm}, false, gcm},
		{"no GCM", []string{chacha, ctr}, false, ctr},
		{"ChaCha20 alone", []string{chacha}, false, chacha},
		{"waits", []string{chacha, ctr, gcm}, true, chacha},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			if !fastAES {
				tt.want = tt.has[0]
			}
			nc, err := net.Dial("tcp", g.Addr)
			if err != nil {
				t.Fatal(err)
			}
			defer nc.Close()
			config := clientConfig("alice", key)
			config.ClientVersion, config.Ciphers = openSSH+"9.9 test", tt.has
			var conn net.Conn = nc
			if tt.waits {
				conn = &waits{Conn: nc, theirs: len(version) + len("\r\n"), more: make(chan struct{})}
			}
			c, channels, requests, err := ssh.NewClientConn(conn, g.Addr, config)
			if err != nil {
				t.Fatal(err)
			}
			client := ssh.NewClient(c, channels, requests)
			defer client.Close()
			if got := c.(ssh.AlgorithmsConnMetadata).Algorithms().Write.Cipher; got != tt.want {
				t.Errorf("the cipher is %s, want %s", got, tt.want)
			}
			ping(t, client, "svc.test:1")
		})
	}
}

// waits holds back what a client sends after its version until the server has sent more than
// its own.
type waits struct {
	net.Conn
	theirs int           // bytes of the server's version that are still to come
	more   chan struct{} // closed when more has come
	begun  bool
}

func (w *waits) Read(p []byte) (int, error) {
	n, err := w.Conn.Read(p)
	if before := w.theirs; n > 0 {
		if w.theirs -= n; before >= 0 && w.theirs < 0 {
			close(w.more)
		}
	}
	return n, err
}

func (w *waits) Write(p []byte) (int, error) {
	if w.begun {
		<-w.more
	}
	w.begun = true
	return w.Conn.Write(p)
}

// A client that sends first and one that waits for the server are let in by the same port.
func TestSharedPort(t *testing.T) {
	key := newKey(t)
	g := serve(t, tunneltest.Table{"svc.test:1": testnet.Echo(t).Addr()}, other{}, newProtocol(t, key.PublicKey(), ""))
	ping(t, login(t, g.Addr, key), "svc.test:1")

	nc, err := net.Dial("tcp", g.Addr)
	if err != nil {
		t.Fatal(err)
	}
	defer nc.Close()
	_ = nc.SetDeadline(time.Now().Add(patience))
	before := time.Now()
	r := bufio.NewReader(nc)
	greeting, err := r.Peek(len(version))
	if err != nil || string(greeting) != version {
		t.Fatalf("a client that sends nothing hears %q, %v; want %q", greeting, err, version)
	}
	if waited := time.Since(before); waited < DefaultSilence/2 {
		t.Errorf("the server has spoken after %v, before another protocol's client had %v", waited, DefaultSilence)
	}
	c, channels, requests, err := ssh.NewClientConn(&readAhead{nc, r}, g.Addr, clientConfig("alice", key))
	if err != nil {
		t.Fatal(err)
	}
	_ = nc.SetDeadline(time.Time{})
	client := ssh.NewClient(c, channels, requests)
	defer client.Close()
	ping(t, client, "svc.test:1")
}

// other is a protocol beside SSH, whose clients send "other" and the rest later.
type other struct{}

func (other) Name() string { return "other" }

func (other) Sniff(b []byte) tunnel.Verdict {
	if n := min(len(b), 5); string(b[:n]) != "other"[:n] {
		return tunnel.No
	}
	return tunnel.Yes
}

func (other) HasPreamble(b []byte) bool { return len(b) > 0 }

func (other) ServeConn(_ context.Context, c *tunnel.Conn, _ tunnel.Handler) error {
	for len(c.Buffered()) < 10 {
		if err := c.Fill(10); err != nil {
			return tunnel.PreambleError(c, err)
		}
	}
	c.CloseWithMessage([]byte("done"))
	return nil
}

// A client of another protocol that sends its first byte late is served, and heard of in time
// when it sends no more.
func TestOthersBesideSilence(t *testing.T) {
	key := newKey(t)
	g := serve(t, tunneltest.Table{}, other{}, newProtocol(t, key.PublicKey(), ""))
	nc := testnet.Connect(t, g.Addr)
	for _, b := range []byte("other") {
		if _, err := nc.Write([]byte{b}); err != nil {
			t.Fatal(err)
		}
	}
	_ = nc.SetReadDeadline(time.Now().Add(2 * DefaultSilence))
	if n, err := nc.Read(make([]byte, 1)); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("the server has sent %d bytes, %v, to a client of another protocol", n, err)
	}
	if _, err := io.WriteString(nc, " more"); err != nil {
		t.Fatal(err)
	}
	_ = nc.SetReadDeadline(time.Now().Add(patience))
	if b, err := io.ReadAll(nc); string(b) != "done" {
		t.Errorf("heard %q, %v; want %q", b, err, "done")
	}
}

type readAhead struct {
	net.Conn
	r *bufio.Reader
}

func (c *readAhead) Read(p []byte) (int, error) { return c.r.Read(p) }

// TestWhoIsLetIn has why clients are not, and what the log says.
func TestWhoIsLetIn(t *testing.T) {
	alice, mallory := newKey(t), newKey(t)
	for _, tc := range []struct {
		title   string
		options string
		auth    []ssh.AuthMethod
		want    tunnel.Reason // "" for nobody's
		text    string
	}{
		{"a key", "", []ssh.AuthMethod{ssh.PublicKeys(mallory, alice)}, "", ""},
		{"another key", "", []ssh.AuthMethod{ssh.PublicKeys(mallory)}, tunnel.NoAuth, "no key in authorized_keys is SHA256:"},
		{"two other keys", "", []ssh.AuthMethod{ssh.PublicKeys(mallory, newKey(t))}, tunnel.NoAuth, "; no key in authorized_keys is SHA256:"},
		{"no key", "", nil, tunnel.NoAuth, "has shown no key"},
		{"a password", "", []ssh.AuthMethod{ssh.Password("secret")}, tunnel.NoAuth, "has shown no key"},
		{"another address", `from="192.0.2.1"`, []ssh.AuthMethod{ssh.PublicKeys(alice)}, tunnel.NoAuth, "is not for clients at 127.0.0.1"},
		{"an expired key", `expiry-time="20200101"`, []ssh.AuthMethod{ssh.PublicKeys(alice)}, tunnel.NoAuth, "has expired"},
	} {
		t.Run(tc.title, func(t *testing.T) {
			g := serve(t, tunneltest.Table{"svc.test:1": testnet.Echo(t).Addr()}, newProtocol(t, alice.PublicKey(), tc.options))
			config := clientConfig("root")
			config.Auth = tc.auth
			c, err := ssh.Dial("tcp", g.Addr, config)
			if tc.want == "" {
				if err != nil {
					t.Fatal(err)
				}
				ping(t, c, "svc.test:1")
				_ = c.Close()
				if o := g.Outcome(t); o.Peer.ID != "alice" || o.Peer.Method != "ssh" || o.Proto != "ssh" {
					t.Errorf("the outcome has %+v by %q, want alice by ssh", o.Peer, o.Proto)
				}
				return
			}
			if err == nil {
				_ = c.Close()
				t.Fatal("the client is let in")
			}
			if o := g.Outcome(t); o.Reason != tc.want || !strings.Contains(o.Err.Error(), tc.text) {
				t.Errorf("outcome %s %v, want %s %q", o.Reason, o.Err, tc.want, tc.text)
			}
		})
	}
}

// TestRefusals has what a client hears of channels that it does not get.
func TestRefusals(t *testing.T) {
	key := newKey(t)
	g := serve(t, tunneltest.Table{"svc.test:1": testnet.Echo(t).Addr(), "other.test:1": testnet.Echo(t).Addr(), "closed.test:1": testnet.ClosedPort(t)},
		newProtocol(t, key.PublicKey(), `permitopen="svc.test:1",permitopen="closed.test:1",permitopen="none.test:1"`))
	c := login(t, g.Addr, key)
	ping(t, c, "SVC.test.:1")
	for _, tc := range []struct {
		kind string
		data any
		why  ssh.RejectionReason
		text string
	}{
		{"direct-tcpip", directTCPIP{"none.test", 1, "", 0}, ssh.Prohibited, "no-route: no such service here"},
		{"direct-tcpip", directTCPIP{"other.test", 1, "", 0}, ssh.Prohibited, "denied: your key is not for it: see its permitopen"},
		{"direct-tcpip", directTCPIP{"closed.test", 1, "", 0}, ssh.ConnectionFailed, "dial-failed: "},
		{"direct-tcpip", directTCPIP{"svc.test", 0, "", 0}, ssh.Prohibited, "bad-request: "},
		{"direct-tcpip", directTCPIP{"svc.test", 65537, "", 0}, ssh.Prohibited, "bad-request: "},
		{"direct-tcpip", directTCPIP{"a\x00b", 1, "", 0}, ssh.Prohibited, "bad-request: "},
		{"direct-tcpip", struct{ Host string }{"svc.test"}, ssh.Prohibited, "bad-request: "},
		{"direct-streamlocal@openssh.com", struct{ Path string }{"/run/x"}, ssh.UnknownChannelType, "TCP streams"},
		{"x11", struct{ Path string }{"x"}, ssh.UnknownChannelType, "TCP streams"},
		{"tun@openssh.com", struct{ Path string }{"x"}, ssh.UnknownChannelType, "TCP streams"},
	} {
		_, _, err := c.OpenChannel(tc.kind, ssh.Marshal(tc.data))
		refused, ok := errors.AsType[*ssh.OpenChannelError](err)
		if !ok || refused.Reason != tc.why || !strings.HasPrefix(refused.Message, tc.text) && !strings.Contains(refused.Message, "TCP streams") {
			t.Errorf("%s %+v: %v, want %v %q", tc.kind, tc.data, err, tc.why, tc.text)
		}
	}
}

// A key that is taken away opens no more channels on the connections that it has.
func TestKeyIsTakenAway(t *testing.T) {
	alice, bob := newKey(t), newKey(t)
	p := newProtocol(t, alice.PublicKey(), "")
	g := serve(t, tunneltest.Table{"svc.test:1": testnet.Echo(t).Addr()}, p)
	c := login(t, g.Addr, alice)
	ping(t, c, "svc.test:1")
	use(t, p, authority(t, line("", bob.PublicKey(), "bob"), line(`permitopen="svc.test:2"`, alice.PublicKey(), "alice")))
	if _, err := c.Dial("tcp", "svc.test:1"); err == nil || !strings.Contains(err.Error(), "denied") {
		t.Errorf("a destination that the key has no more: %v, want denied", err)
	}
	use(t, p, authority(t, line("", bob.PublicKey(), "bob")))
	if _, err := c.Dial("tcp", "svc.test:1"); err == nil || !strings.Contains(err.Error(), "your key is no longer accepted") {
		t.Errorf("a key that was taken away: %v, want that it is no longer accepted", err)
	}
	ping(t, login(t, g.Addr, bob), "svc.test:1")
}

// TestConsole: what people see who log in, and that nothing runs.
func TestConsole(t *testing.T) {
	key := newKey(t)
	g := serve(t, tunneltest.Table{}, newProtocol(t, key.PublicKey(), ""))
	c := login(t, g.Addr, key)
	for what, ask := range map[string]func(*ssh.Session) error{
		"a command":   func(s *ssh.Session) error { return s.Start("id") },
		"a subsystem": func(s *ssh.Session) error { return s.RequestSubsystem("sftp") },
	} {
		s, err := c.NewSession()
		if err != nil {
			t.Fatal(err)
		}
		stderr, err := s.StderrPipe()
		if err != nil {
			t.Fatal(err)
		}
		stdout, err := s.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := ask(s); err != nil {
			t.Errorf("%s is refused with %v: the client has no text to show", what, err)
			continue
		}
		if text, err := io.ReadAll(stderr); string(text) != noCommands || err != nil {
			t.Errorf("of %s it says %q and %v, want %q", what, text, err, noCommands)
		}
		if text, err := io.ReadAll(stdout); len(text) > 0 || err != nil {
			t.Errorf("%s printed %q, %v", what, text, err)
		}
		if what == "a command" {
			if exit, ok := errors.AsType[*ssh.ExitError](s.Wait()); !ok || exit.ExitStatus() != exitNoCommands {
				t.Errorf("%s ends with %v, want status %d", what, exit, exitNoCommands)
			}
		}
	}
	s, err := c.NewSession()
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Setenv("A", "b"); err == nil {
		t.Error("the environment may be set")
	}
	if err := s.RequestPty("vt100", 24, 80, nil); err != nil {
		t.Error(err)
	}
	in, err := s.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	s.Stdout = &out
	if err := s.Shell(); err != nil {
		t.Fatal(err)
	}
	if _, err := in.Write([]byte("whoami\n\x03")); err != nil {
		t.Fatal(err)
	}
	if err := s.Wait(); err != nil {
		t.Errorf("Ctrl-C ends the session with %v", err)
	}
	if !strings.HasPrefix(out.String(), "You are alice.") {
		t.Errorf("the console says %q", out.String())
	}
	if ok, _, err := c.SendRequest("tcpip-forward", true, ssh.Marshal(struct {
		Host string
		Port uint32
	}{"cam.test", 443})); ok || err != nil {
		t.Errorf("a registration is answered %v, %v; want no", ok, err)
	}
}

// A connection has so many channels and no more, also where the client never closes them.
func TestChannelFlood(t *testing.T) {
	key := newKey(t)
	p := newProtocol(t, key.PublicKey(), "")
	p.Streams = 3
	g := serve(t, tunneltest.Table{"svc.test:1": testnet.Echo(t).Addr()}, p)
	c := login(t, g.Addr, key)
	for range 3 {
		if _, err := c.Dial("tcp", "svc.test:1"); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := c.Dial("tcp", "svc.test:1"); err == nil || !strings.Contains(err.Error(), "3 channels, the limit") {
		t.Errorf("the channel after the last one: %v", err)
	}
	for {
		_, _, err := c.OpenChannel("x11", nil)
		if _, refused := errors.AsType[*ssh.OpenChannelError](err); !refused {
			break // the connection has ended
		}
	}
	testnet.Eventually(t, patience, func() bool {
		for _, o := range g.Outcomes() {
			if o.Reason == tunnel.Flood {
				return true
			}
		}
		return false
	}, "no outcome is a flood")
}

// What is no SSH is refused, and takes no longer than a preamble may.
func TestGarbage(t *testing.T) {
	for _, tc := range []struct {
		title string
		send  string
		want  []tunnel.Reason
	}{
		{"HTTP", "GET / HTTP/1.1\r\nHost: x\r\n\r\n" + strings.Repeat("x", 300), []tunnel.Reason{tunnel.BadPreamble}},
		{"SSH 1", "SSH-1.5-old\r\n" + strings.Repeat("\xff", 64), []tunnel.Reason{tunnel.BadPreamble}},
		{"a version without an end", "SSH-2.0-" + strings.Repeat("x", 300), []tunnel.Reason{tunnel.BadPreamble}},
		{"garbage after the version", "SSH-2.0-x\r\n" + strings.Repeat("\xff", 64), []tunnel.Reason{tunnel.BadPreamble}},
		{"a packet of 4 GiB", "SSH-2.0-x\r\n\xff\xff\xff\xff\x04" + strings.Repeat("\x00", 64), []tunnel.Reason{tunnel.BadPreamble}},
	} {
		t.Run(tc.title, func(t *testing.T) {
			g := serve(t, tunneltest.Table{}, newProtocol(t, newKey(t).PublicKey(), ""))
			nc := testnet.Connect(t, g.Addr)
			if _, err := io.WriteString(nc, tc.send); err != nil {
				t.Fatal(err)
			}
			_ = nc.SetReadDeadline(time.Now().Add(patience))
			if _, err := io.Copy(io.Discard, nc); errors.Is(err, os.ErrDeadlineExceeded) {
				t.Error("the connection stays open")
			}
			o := g.Outcome(t)
			for _, want := range tc.want {
				if o.Reason == want {
					return
				}
			}
			t.Errorf("outcome %s %v, want one of %s", o.Reason, o.Err, tc.want)
		})
	}
}

// A connection that drains serves the channels that it has, takes no more and ends with the last.
func TestDrain(t *testing.T) {
	key := newKey(t)
	p := newProtocol(t, key.PublicKey(), "")
	g := tunneltest.Serve(t, tunneltest.Setup{Protocols: []tunnel.Protocol{p}, Resolver: tunneltest.Table{"svc.test:1": testnet.Echo(t).Addr()}})
	c := login(t, g.Addr, key)
	nc, err := c.Dial("tcp", "svc.test:1")
	if err != nil {
		t.Fatal(err)
	}
	testnet.Ping(t, nc, "before")
	p.Drain()
	if _, err := c.Dial("tcp", "svc.test:1"); err == nil || !strings.Contains(err.Error(), "the gateway is stopping") {
		t.Errorf("a channel of a connection that drains: %v", err)
	}
	testnet.Ping(t, nc, "after")
	_ = nc.Close()
	ended := make(chan error, 1)
	go func() { ended <- c.Wait() }()
	select {
	case <-ended:
	case <-time.After(patience):
		t.Error("the connection does not end with its last channel")
	}
}

// Bytes that nobody reads are bounded, and other channels go on.
func TestUnreadChannel(t *testing.T) {
	key := newKey(t)
	stuck := testnet.Service(t, func(c net.Conn) { _, _ = io.Copy(io.Discard, &neverReads{t.Context()}) })
	g := serve(t, tunneltest.Table{"stuck.test:1": stuck, "svc.test:1": testnet.Echo(t).Addr()}, newProtocol(t, key.PublicKey(), ""))
	c := login(t, g.Addr, key)
	nc, err := c.Dial("tcp", "stuck.test:1")
	if err != nil {
		t.Fatal(err)
	}
	wrote := make(chan int64, 1)
	go func() {
		n, _ := io.Copy(nc, zeros{})
		wrote <- n
	}()
	for range 20 {
		ping(t, c, "svc.test:1")
	}
	_ = c.Close()
	if n := <-wrote; n > 64<<20 {
		t.Errorf("%d bytes were taken of a channel that is not read", n)
	}
}

type neverReads struct{ ctx context.Context }

func (n *neverReads) Read([]byte) (int, error) {
	<-n.ctx.Done()
	return 0, io.EOF
}

type zeros struct{}

func (zeros) Read(p []byte) (int, error) { return len(p), nil }

// A client that exchanges keys again and again is cut off; one that moves bytes may.
func TestKeyExchanges(t *testing.T) {
	s := &session{}
	s.conn = &conn{Conn: nopConn{}, s: s}
	e := &exchanges{s: s, began: time.Now()}
	for i := range freeKeyExchanges {
		if err := e.allow(); err != nil {
			t.Fatalf("exchange %d: %v", i, err)
		}
	}
	s.conn.arrived.Store(3 * bytesPerExchange)
	for i := range 3 {
		if err := e.allow(); err != nil {
			t.Fatalf("exchange %d after its bytes: %v", i, err)
		}
	}
	err := e.allow()
	if tunnel.ReasonOf(err) != tunnel.Flood {
		t.Errorf("one exchange too many: %v, want a flood", err)
	}
}

type nopConn struct{ net.Conn }

func (nopConn) Close() error { return nil }

// A client that renews its keys with each MiB, as by OpenSSH's "RekeyLimit 1M", is not cut off.
func TestKeysRenewedByTheMegabyte(t *testing.T) {
	const total = 40 << 20
	key := newKey(t)
	g := serve(t, tunneltest.Table{"svc.test:1": testnet.Echo(t).Addr()}, newProtocol(t, key.PublicKey(), ""))
	config := clientConfig("alice", key)
	config.RekeyThreshold = 1 << 20
	c, err := ssh.Dial("tcp", g.Addr, config)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	s, err := c.Dial("tcp", "svc.test:1")
	if err != nil {
		t.Fatal(err)
	}
	sent := make(chan error, 1)
	go func() {
		_, err := io.CopyN(s, zeros{}, total)
		sent <- err
	}()
	if n, err := io.CopyN(io.Discard, s, total); err != nil {
		t.Errorf("%d of %d bytes came back: %v", n, total, err)
	}
	if err := <-sent; err != nil {
		t.Error(err)
	}
}

// OpenSSH 9.2 with "RekeyLimit 1M" exchanges keys whenever 0.94 MiB have passed, both ways together.
func TestKeyExchangesOfOpenSSH(t *testing.T) {
	s := &session{}
	s.conn = &conn{Conn: nopConn{}, s: s}
	e := &exchanges{s: s, began: time.Now()}
	for i := range 1000 {
		if err := e.allow(); err != nil {
			t.Fatalf("exchange %d: %v", i, err)
		}
		s.conn.arrived.Add(450 << 10)
		s.conn.left.Add(450 << 10)
	}
}
