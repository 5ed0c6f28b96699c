package ssh

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/crypto/ssh"

	"culvert.dev/internal/testnet"
	"culvert.dev/reverse"
	"culvert.dev/tunnel"
	"culvert.dev/tunnel/tunneltest"
)

// A world is a gateway where alice and bob may register names, and mallory none.
type world struct {
	*tunneltest.Gateway
	p                   *Protocol
	sessions            *reverse.Server
	groups              *reverse.Groups
	alice, bob, mallory ssh.Signer

	mu     sync.Mutex // guards what follows
	denied map[string]bool
	logged strings.Builder
}

// Write implements io.Writer for the log.
func (w *world) Write(b []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.logged.Write(b)
}

// wantLogged waits until the log has text.
func (w *world) wantLogged(t *testing.T, text string) {
	t.Helper()
	testnet.Eventually(t, patience, func() bool {
		w.mu.Lock()
		defer w.mu.Unlock()
		return strings.Contains(w.logged.String(), text)
	}, "the log has %q", text)
}

// live resolves names that are registered.
type live struct{ w *world }

func (l live) Resolve(_ context.Context, req *tunnel.Request) (tunnel.Route, error) {
	s := l.w.groups.Service(req.Name)
	if s == nil {
		return tunnel.Route{}, tunnel.Refusef(tunnel.NoRoute, "no service %s", req.Target())
	}
	group := s.Endpoints[0].Group
	ep := tunnel.Endpoint{Transport: l.w.groups.Transport(group, false), Named: true}
	ep.Addr = netAddrPort(req.Port)
	return tunnel.Route{Service: s.Name, Pattern: s.Name, Endpoints: []tunnel.Endpoint{ep}}, nil
}

func newWorld(t *testing.T) *world {
	t.Helper()
	w := &world{alice: newKey(t), bob: newKey(t), mallory: newKey(t), denied: map[string]bool{"mallory": true}}
	w.groups = &reverse.Groups{Authorize: func(req *tunnel.Request, name tunnel.Pattern, _ uint16) ([]string, bool, error) {
		w.mu.Lock()
		defer w.mu.Unlock()
		if w.denied[req.Peer.ID] {
			return nil, false, tunnel.Refusef(tunnel.Denied, "no policy")
		}
		return nil, false, nil
	}}
	w.groups.Log = slog.New(slog.NewTextHandler(w, nil))
	w.sessions = &reverse.Server{Groups: w.groups, Log: w.groups.Log}
	w.p = &Protocol{Sessions: w.sessions}
	use(t, w.p, authority(t, line("", w.alice.PublicKey(), "alice"), line("", w.mallory.PublicKey(), "mallory"),
		line(`permitlisten="*.bob.test:443"`, w.bob.PublicKey(), "bob")))
	w.Gateway = serve(t, live{w}, w.p)
	w.sessions.Router = w.Server.Handler.(*tunnel.Router)
	return w
}

func (w *world) deny(id string, no bool) {
	w.mu.Lock()
	w.denied[id] = no
	w.mu.Unlock()
	w.sessions.Recheck()
}

// names returns the names that sessions serve.
func (w *world) names() (all []string) {
	for _, s := range w.sessions.Sessions() {
		for _, n := range s.Names {
			all = append(all, fmt.Sprintf("%s:%d", n.Name, n.Port))
		}
	}
	return all
}

func (w *world) wantNames(t *testing.T, want ...string) {
	t.Helper()
	testnet.Eventually(t, time.Minute, func() bool { return strings.Join(w.names(), " ") == strings.Join(want, " ") }, "the names are not %q", want)
}

// forwardName asks for a name, and returns the port in the answer.
func forwardName(t *testing.T, c *ssh.Client, host string, port uint32) (uint32, bool) {
	t.Helper()
	ok, answer, err := c.SendRequest("tcpip-forward", true, ssh.Marshal(tcpipForward{host, port}))
	if err != nil {
		t.Fatalf("-R %s:%d: %v", host, port, err)
	}
	var got struct{ Port uint32 }
	if ok && port == 0 {
		if err := ssh.Unmarshal(answer, &got); err != nil {
			t.Fatalf("-R %s:%d is answered %x: %v", host, port, answer, err)
		}
	} else if len(answer) > 0 {
		t.Errorf("-R %s:%d is answered %x, want no bytes", host, port, answer)
	}
	return got.Port, ok
}

// answerChannels answers the channels of a client by an echo, after one line with where each
// leads to.
func answerChannels(c *ssh.Client) {
	channels := c.HandleChannelOpen("forwarded-tcpip")
	go func() {
		for nc := range channels {
			var to forwardedTCPIP
			if ssh.Unmarshal(nc.ExtraData(), &to) != nil {
				_ = nc.Reject(ssh.ConnectionFailed, "malformed")
				continue
			}
			ch, requests, err := nc.Accept()
			if err != nil {
				continue
			}
			go ssh.DiscardRequests(requests)
			go func() {
				defer ch.Close()
				_, _ = fmt.Fprintf(ch, "%s:%d from %s\n", to.Host, to.Port, to.Originator)
				_, _ = io.Copy(ch, ch)
				_ = ch.CloseWrite()
			}()
		}
	}()
}

// reach reads the first line of a service through another client.
func reach(c *ssh.Client, addr string) (string, error) {
	nc, err := c.Dial("tcp", addr)
	if err != nil {
		return "", err
	}
	defer nc.Close()
	var line strings.Builder
	for b := make([]byte, 1); ; {
		if _, err := io.ReadFull(nc, b); err != nil || b[0] == '\n' {
			return line.String(), err
		}
		line.WriteByte(b[0])
	}
}

// Clients serve names by stock ssh -R: with a port, with one that the gateway chooses, and
// until they cancel.
func TestRemoteForward(t *testing.T) {
	w := newWorld(t)
	server, caller := login(t, w.Addr, w.alice), login(t, w.Addr, w.mallory)
	answerChannels(server)
	if _, ok := forwardName(t, server, "Web.Test.", 443); !ok {
		t.Fatal("the name is refused")
	}
	port, ok := forwardName(t, server, "web.test", 0)
	if !ok || port < 49152 || port > 65535 {
		t.Fatalf("-R web.test:0: %v with port %d, want one from 49152 to 65535", ok, port)
	}
	w.wantNames(t, "web.test:443", fmt.Sprintf("web.test:%d", port))
	for addr, want := range map[string]string{
		"web.test:443":                   "Web.Test.:443 from 127.0.0.1", // as the client has written it
		fmt.Sprintf("web.test:%d", port): fmt.Sprintf("web.test:%d from 127.0.0.1", port),
	} {
		if got, err := reach(caller, addr); err != nil || got != want {
			t.Errorf("%s leads to %q, %v; want %q", addr, got, err, want)
		}
	}
	if _, ok := forwardName(t, server, "web.test", 443); ok {
		t.Error("a name is registered twice")
	}
	if ok, _, err := server.SendRequest("cancel-tcpip-forward", true, ssh.Marshal(tcpipForward{"web.test", 443})); !ok || err != nil {
		t.Errorf("cancel: %v, %v", ok, err)
	}
	if ok, _, err := server.SendRequest("cancel-tcpip-forward", true, ssh.Marshal(tcpipForward{"web.test", 443})); ok || err != nil {
		t.Errorf("cancel once more: %v, %v; want no", ok, err)
	}
	w.wantNames(t, fmt.Sprintf("web.test:%d", port))
	_ = server.Close()
	w.wantNames(t)
	if got, err := reach(caller, fmt.Sprintf("web.test:%d", port)); err == nil {
		t.Errorf("a name whose connection has ended leads to %q", got)
	}
}

// TestRefusedNames has the names that clients do not get, and what people are told.
func TestRefusedNames(t *testing.T) {
	w := newWorld(t)
	alice := login(t, w.Addr, w.alice)
	if _, ok := forwardName(t, alice, "taken.bob.test", 443); !ok {
		t.Fatal("the first name is refused")
	}
	for _, tc := range []struct {
		by   ssh.Signer
		host string
		port uint32
		want string
	}{
		{w.alice, "", 443, "a wildcard or an empty address can't be registered: name the service"},
		{w.alice, "*", 443, "a wildcard or an empty address can't be registered: name the service"},
		{w.alice, "0.0.0.0", 443, "a wildcard or an empty address can't be registered: name the service"},
		{w.alice, "::", 443, "a wildcard or an empty address can't be registered: name the service"},
		{w.alice, "localhost", 443, `"localhost" is an address of a host`},
		{w.alice, "127.0.0.1", 443, `"127.0.0.1" is an address of a host`},
		{w.alice, "*.test", 443, "is a wildcard"},
		{w.alice, "a\x1b[31mb", 443, "is not a name"},
		{w.alice, "reverse.culvert.alt", 443, "can't be registered"},
		{w.alice, "a.test", 65536, "65536 is not a port"},
		{w.mallory, "a.test", 443, "denied: no policy of the gateway lets you register it"},
		{w.bob, "taken.bob.test", 443, "denied: it belongs to another owner"},
		{w.bob, "a.test", 443, "denied: your key is not for it with port 443: see its permitlisten"},
		{w.bob, "a.bob.test", 444, "denied: your key is not for it with port 444: see its permitlisten"},
		{w.bob, "a.bob.test", 0, "see its permitlisten"},
	} {
		c := login(t, w.Addr, tc.by)
		if _, ok := forwardName(t, c, tc.host, tc.port); ok {
			t.Errorf("%q with port %d is registered", tc.host, tc.port)
		}
		if said := openConsole(t, c, tc.want); strings.ContainsRune(said, '\x1b') {
			t.Errorf("the console says %q", said)
		}
		_ = c.Close()
	}
	w.Find(t, "a refusal of an empty address has no target", func(o *tunnel.Outcome) bool {
		return o.Reason == tunnel.BadRequest && o.Target == "" && strings.Contains(o.Err.Error(), "an empty address")
	})
	w.wantNames(t, "taken.bob.test:443")
	bob := login(t, w.Addr, w.bob)
	if _, ok := forwardName(t, bob, "b.bob.test", 443); !ok {
		t.Error("a name that the key may have is refused")
	}
	if ok, _, err := bob.SendRequest("tcpip-forward", true, []byte("x")); ok || err != nil {
		t.Errorf("a malformed request: %v, %v; want no", ok, err)
	}
}

// openConsole logs in and waits until it has said want.
func openConsole(t *testing.T, c *ssh.Client, want string) string {
	t.Helper()
	s, err := c.NewSession()
	if err != nil {
		t.Fatal(err)
	}
	out, err := s.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Shell(); err != nil {
		t.Fatal(err)
	}
	return hear(t, out, want)
}

// hear reads until want has come.
func hear(t *testing.T, r io.Reader, want string) string {
	t.Helper()
	heard := make(chan string, 1)
	go func() {
		var all strings.Builder
		for b := make([]byte, 1); !strings.Contains(all.String(), want); {
			if _, err := io.ReadFull(r, b); err != nil {
				break
			}
			all.Write(b)
		}
		heard <- all.String()
	}()
	select {
	case all := <-heard:
		if !strings.Contains(all, want) {
			t.Errorf("the console says %q, want %q", all, want)
		}
		return all
	case <-time.After(patience):
		t.Fatalf("the console does not say %q", want)
		return ""
	}
}

// People see which names they serve, and what becomes of them, for as long as they stay.
func TestConsoleOfNames(t *testing.T) {
	w := newWorld(t)
	c := login(t, w.Addr, w.alice)
	answerChannels(c)
	forwardName(t, c, "web.test", 443)
	s, err := c.NewSession()
	if err != nil {
		t.Fatal(err)
	}
	out, err := s.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Shell(); err != nil {
		t.Fatal(err)
	}
	hear(t, out, "web.test:443 is registered\n")
	forwardName(t, c, "*", 80)
	hear(t, out, "\"*\":80 is refused: bad-request: a wildcard or an empty address can't be registered")
	w.deny("alice", true)
	hear(t, out, "web.test:443 is no longer registered: denied: ")
	w.wantNames(t)
	if got, err := reach(login(t, w.Addr, w.bob), "web.test:443"); err == nil {
		t.Errorf("a name that was taken away leads to %q", got)
	}
	w.deny("alice", false)
	hear(t, out, "web.test:443 is registered again\n")
	if _, err := reach(login(t, w.Addr, w.bob), "web.test:443"); err != nil {
		t.Errorf("a name that is registered again: %v", err)
	}
	w.sessions.Drain()
	hear(t, out, "The gateway is about to stop")
	if _, err := reach(login(t, w.Addr, w.bob), "web.test:443"); err != nil {
		t.Errorf("a name of a gateway that is about to stop: %v", err)
	}
	w.p.Drain()
	hear(t, out, "The gateway is stopping.")
	exit := (*ssh.ExitError)(nil)
	if err := s.Wait(); !errors.As(err, &exit) || exit.ExitStatus() != exitStopping {
		t.Errorf("the console ends with %v, want status %d", err, exitStopping)
	}
	_ = c.Wait()
	w.wantNames(t)
}

// The names of a key that was taken away, or that is not for them any more, go at once.
func TestKeyOfNamesIsTakenAway(t *testing.T) {
	w := newWorld(t)
	c := login(t, w.Addr, w.alice)
	forwardName(t, c, "a.test", 443)
	forwardName(t, c, "b.test", 443)
	use(t, w.p, authority(t, line(`permitlisten="b.test:443"`, w.alice.PublicKey(), "alice")))
	if got := strings.Join(w.names(), " "); got != "b.test:443" {
		t.Errorf("names %q, want the one that the key is for", got)
	}
	w.wantLogged(t, `level=WARN msg="name is no longer registered" name=a.test port=443 owner=alice`)
	w.wantLogged(t, `reason=denied error="ssh: the key \"alice\" is not for it any more: see its permitlisten"`)
	use(t, w.p, authority(t, line("", w.bob.PublicKey(), "bob")))
	if got := strings.Join(w.names(), " "); got != "" {
		t.Errorf("names %q of a key that is not accepted any more", got)
	}
	w.wantLogged(t, `reason=no-auth error="ssh: the client's key is no longer accepted`)
	_ = c.Wait() // a connection without a use ends
}

// An owner that is revoked loses the connection, as any session of a connector.
func TestSessionIsKilled(t *testing.T) {
	w := newWorld(t)
	c := login(t, w.Addr, w.alice)
	forwardName(t, c, "a.test", 443)
	if n := w.Relay.EndRecords(tunnel.Revoked, func(r tunnel.Record) bool { return true }); n != 1 {
		t.Errorf("%d sessions are listed, want 1", n)
	}
	_ = c.Wait()
	w.wantNames(t)
	if o := w.Outcome(t); o.Reason != tunnel.Revoked || o.Service != reverse.Name.String() || o.Peer.ID != "alice" {
		t.Errorf("outcome %s of %s by %s, want revoked of %s by alice", o.Reason, o.Service, o.Peer.ID, reverse.Name)
	}
}

// A client that registers and registers is cut off, and others are served.
func TestForwardFlood(t *testing.T) {
	w := newWorld(t)
	c, other := login(t, w.Addr, w.mallory), login(t, w.Addr, w.alice)
	answerChannels(other)
	forwardName(t, other, "web.test", 443)
	for i := 0; ; i++ {
		if _, _, err := c.SendRequest("tcpip-forward", true, ssh.Marshal(tcpipForward{"a.test", uint32(i%60000 + 1)})); err != nil {
			break // the connection has ended
		}
	}
	testnet.Eventually(t, patience, func() bool {
		for _, o := range w.Outcomes() {
			if o.Reason == tunnel.Flood {
				return true
			}
		}
		return false
	}, "no outcome is a flood")
	if _, err := reach(other, "web.test:443"); err != nil {
		t.Error(err)
	}
}

// A connection has so many names.
func TestTooManyNames(t *testing.T) {
	v := &served{}
	for i := range maxForwards {
		if no := v.add(forwardKey{port: uint16(i)}, ""); no != nil {
			t.Fatalf("name %d: %v", i, no.err)
		}
	}
	if no := v.add(forwardKey{port: maxForwards}, ""); no == nil || tunnel.ReasonOf(no.err) != tunnel.Overload {
		t.Errorf("one name too many: %+v, want overload", no)
	}
}

// A client that is cut off without a word loses its names soon.
func TestNamesOfASilentClient(t *testing.T) {
	w := newWorld(t)
	nc, err := net.Dial("tcp", w.Addr)
	if err != nil {
		t.Fatal(err)
	}
	stuck := &cutConn{Conn: nc, cut: make(chan struct{})}
	defer nc.Close()
	cc, channels, requests, err := ssh.NewClientConn(stuck, w.Addr, clientConfig("alice", w.alice))
	if err != nil {
		t.Fatal(err)
	}
	c := ssh.NewClient(cc, channels, requests)
	if _, ok := forwardName(t, c, "a.test", 443); !ok {
		t.Fatal("the name is refused")
	}
	close(stuck.cut)
	w.wantNames(t)
	testnet.Eventually(t, patience, func() bool {
		for _, o := range w.Outcomes() {
			if o.Reason == tunnel.Idle && o.Service == reverse.Name.String() {
				return true
			}
		}
		return false
	}, "no outcome is idle")
}

// A cutConn sends nothing once it is cut, as if the network was gone.
type cutConn struct {
	net.Conn
	cut chan struct{}
}

func (c *cutConn) Write(b []byte) (int, error) {
	select {
	case <-c.cut:
		return len(b), nil
	default:
		return c.Conn.Write(b)
	}
}

// A stream that the client does not read, and channels that it does not answer, do not keep
// others waiting.
func TestUnreadForwards(t *testing.T) {
	w := newWorld(t)
	server, caller := login(t, w.Addr, w.alice), login(t, w.Addr, w.bob)
	channels := server.HandleChannelOpen("forwarded-tcpip")
	stuck := make(chan ssh.Channel, 1)
	go func() {
		for nc := range channels {
			var to forwardedTCPIP
			_ = ssh.Unmarshal(nc.ExtraData(), &to)
			switch to.Port {
			case 1: // it is not answered
				continue
			case 4:
				_ = nc.Reject(ssh.ConnectionFailed, "connect failed")
				continue
			}
			ch, requests, err := nc.Accept()
			if err != nil {
				continue
			}
			go ssh.DiscardRequests(requests)
			if to.Port == 2 { // it is not read
				stuck <- ch
				continue
			}
			go func() {
				defer ch.Close()
				_, _ = io.Copy(ch, ch)
			}()
		}
	}()
	for port := uint32(1); port <= 4; port++ {
		if _, ok := forwardName(t, server, "a.test", port); !ok {
			t.Fatalf("port %d is refused", port)
		}
	}
	unanswered := make(chan error, 1)
	go func() {
		nc, err := caller.Dial("tcp", "a.test:1")
		if err == nil {
			_ = nc.Close()
		}
		unanswered <- err
	}()
	unread, err := caller.Dial("tcp", "a.test:2")
	if err != nil {
		t.Fatal(err)
	}
	wrote := make(chan int64, 1)
	go func() {
		n, _ := io.Copy(unread, zeros{})
		wrote <- n
	}()
	<-stuck
	for range 20 {
		ping(t, caller, "a.test:3")
	}
	if _, err := caller.Dial("tcp", "a.test:4"); err == nil || !strings.Contains(err.Error(), "dial-failed") {
		t.Errorf("a channel that the client refuses: %v, want dial-failed", err)
	}
	_ = server.Close()
	if err := <-unanswered; err == nil {
		t.Error("a channel that nobody has answered is open")
	}
	if n := <-wrote; n > 64<<20 {
		t.Errorf("%d bytes were taken of a channel that is not read", n)
	}
	w.wantNames(t)
}

// A client that is sent more streams than it answers is left alone.
func TestForwardedLimit(t *testing.T) {
	s := &session{}
	v := &s.served
	v.s = s
	v.open.Store(maxForwarded)
	if err := v.begin(); tunnel.ReasonOf(err) != tunnel.Overload || v.open.Load() != maxForwarded {
		t.Errorf("one stream too many: %v with %d open, want overload", err, v.open.Load())
	}
	v.open.Store(0)
	s.ended = true
	if err := v.begin(); !errors.Is(err, reverse.ErrEnded) || v.open.Load() != 0 {
		t.Errorf("a stream of a connection that has ended: %v with %d open", err, v.open.Load())
	}
}

func netAddrPort(port uint16) netip.AddrPort { return netip.AddrPortFrom(netip.Addr{}, port) }

// Two clients with one key and one name share its requests, which the log says.
func TestNamesOfTwoClients(t *testing.T) {
	w := newWorld(t)
	for range 2 {
		if _, ok := forwardName(t, login(t, w.Addr, w.alice), "a.test", 443); !ok {
			t.Fatal("the name is refused")
		}
	}
	w.wantLogged(t, `level=INFO msg="name has several connectors, which share its requests" name=a.test connectors=2 owner=alice`)
	w.deny("alice", true)
	if s := w.sessions.Sessions(); len(s) != 2 || len(s[0].Names) != 0 || len(s[0].Refused) != 1 || s[0].Refused[0].Reason != tunnel.Denied {
		t.Errorf("the sessions are %+v, want a refused name of each", s)
	}
	w.deny("alice", false)
	w.wantLogged(t, `level=INFO msg="name is now registered" name=a.test port=443 owner=alice`)
}
