package gateway

import (
	"context"
	"crypto/sha256"
	"fmt"
	"io"
	"net"
	"strings"
	"testing"

	"culvert.dev/connect"
	"culvert.dev/connect/h2"
	"culvert.dev/internal/testnet"
	"culvert.dev/registry"
	"culvert.dev/tunnel"
)

// configured makes a listener as the configuration file has it.
func (e *edge) configured(protocols ...string) *registry.Listener {
	port := e.port()
	return &registry.Listener{
		Name: e.at(port), Protocol: registry.Streams, Address: e.addr, Port: port,
		Settings: &registry.ListenerSettings{Protocols: protocols},
	}
}

// changed is l with other settings.
func changed(l *registry.Listener, change func(*registry.ListenerSettings)) *registry.Listener {
	other, s := *l, *l.Settings
	change(&s)
	other.Settings = &s
	return &other
}

// configure gives the gateway a service that answers "h", and listeners.
func (e *edge) configure(s *registry.Service, listeners ...*registry.Listener) {
	e.t.Helper()
	e.say(registry.Snapshot{Services: []*registry.Service{s}, Listeners: listeners})
}

// by opens a tunnel by CONNECT.
func (e *edge) by(l *registry.Listener, authorization string) (net.Conn, error) {
	d := &connect.Dialer{Proxy: l.Name, Authorization: authorization}
	return d.DialContext(e.t.Context(), "tcp", "svc.test:443")
}

// While listeners come, change and go under open tunnels, none of these ends, no socket
// that stays is closed, and nothing of the others is left.
func TestReloadsEndNoTunnel(t *testing.T) {
	tunnels, reloads := 50, 100
	if testnet.Measuring {
		tunnels, reloads = 1000, 1000
	}
	// A testnet.Echo ends its connections after 40 s, and a thousand reloads take longer.
	backend := testnet.Serve(t, func(c net.Conn) { _, _ = io.Copy(c, c) })
	svc := service(backend.Addr())
	e := newEdge(t)
	base := e.loops.Budget.Used()
	stays, changes := e.configured("connect"), e.configured("connect", "connect-h2")
	e.configure(svc, stays, changes)
	if n := e.loops.Budget.Used() - base; n != 2 {
		t.Errorf("%d descriptors are counted, want 2", n)
	}
	sockets := map[string]net.Listener{}
	for _, l := range []*registry.Listener{stays, changes} {
		sockets[l.Name] = e.inbound.open[l.Name].stream
	}
	first := e.configured("connect")
	e.configure(svc, stays, changes, first)
	var open []net.Conn
	way := &h2.Dialer{Proxy: changes.Name}
	defer way.Close()
	for i := range tunnels {
		l := []*registry.Listener{stays, changes, first}[i%3]
		c, err := e.by(l, "")
		if i%3 == 1 {
			_ = c.Close()
			c, err = way.DialContext(t.Context(), "tcp", "svc.test:443")
		}
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		open = append(open, c)
	}
	last := first
	for i := range reloads {
		protocols := []string{"connect", "connect-h2", "socks5"}[:1+i%3]
		last = e.configured("connect")
		e.configure(svc, stays, changed(changes, func(s *registry.ListenerSettings) { s.Protocols = protocols }), last)
	}
	for name, socket := range sockets {
		if e.inbound.open[name].stream != socket {
			t.Errorf("the socket of %s was opened again", name)
		}
	}
	if !refused(first.Name) {
		t.Error("a listener that is gone accepts")
	}
	if c, err := e.by(last, ""); err != nil {
		t.Errorf("the newest listener: %v", err)
	} else {
		_ = c.Close()
	}
	if n := len(e.inbound.open); n != 3 {
		t.Errorf("%d listeners are open, want 3", n)
	}
	for _, c := range open {
		works(t, c)
	}
	for _, c := range open {
		_ = c.Close()
	}
	_ = way.Close()
	e.configure(svc)
	testnet.Eventually(t, soon, func() bool { return e.loops.Budget.Used() == base }, "every descriptor is given back")
}

// A listener that moves to a port that is taken stays where it is, with its new
// credentials, until the port is free. The log and the status say so.
func TestListenerMovesToATakenPort(t *testing.T) {
	t.Parallel()
	svc := service(testnet.Echo(t).Addr())
	e := newEdge(t)
	old := e.configured("connect")
	e.configure(svc, old)
	kept, err := e.by(old, "")
	if err != nil {
		t.Fatal(err)
	}
	defer kept.Close()
	to := e.configured("connect")
	other, err := net.Listen("tcp", to.Name)
	if err != nil {
		t.Fatal(err)
	}
	token := connect.BearerCredentials("t-one")
	to = changed(to, func(s *registry.ListenerSettings) {
		s.Auth = &registry.Auth{Tokens: map[registry.TokenDigest]string{sha256.Sum256([]byte("t-one")): "ci"}}
	})
	e.configure(svc, to)
	if _, err := e.by(old, ""); err == nil {
		t.Error("the listener that stays takes clients without the new credentials")
	}
	if c, err := e.by(old, token); err != nil {
		t.Errorf("the listener that stays: %v", err)
	} else {
		_ = c.Close()
	}
	problems := map[string]string{}
	for _, l := range e.Status().Listeners {
		problems[l.Configured] = l.Problem
	}
	if want := "until it can be opened, " + old.Name + " stays open"; !strings.Contains(problems[to.Name], want) || !strings.Contains(e.log.String(), want) {
		t.Errorf("status says %q, want it and the log to say %q", problems[to.Name], want)
	}
	if !strings.Contains(problems[old.Name], "not configured any more") {
		t.Errorf("status says %q of the listener that stays", problems[old.Name])
	}
	_ = other.Close()
	testnet.Eventually(t, soon, func() bool {
		c, err := e.by(to, token)
		if err == nil {
			_ = c.Close()
		}
		return err == nil
	}, "the listener has its port")
	testnet.Eventually(t, soon, func() bool { return refused(old.Name) }, "the one before is closed")
	works(t, kept)
}

// A listener never serves without the credentials and keys it should have: a new one is
// not opened, and one that is open keeps those it has.
func TestListenerThatLosesItsCredentials(t *testing.T) {
	svc := service(testnet.Echo(t).Addr())
	e := newEdge(t)
	auth := func(a *registry.Auth) func(*registry.ListenerSettings) {
		return func(s *registry.ListenerSettings) { s.Auth = a }
	}
	l := changed(e.configured("connect"), auth(&registry.Auth{Tokens: map[registry.TokenDigest]string{sha256.Sum256([]byte("t-one")): "ci"}}))
	fresh := changed(e.configured("connect"), auth(&registry.Auth{}))
	e.configure(svc, changed(l, auth(l.Settings.Auth)))
	e.configure(svc, changed(l, auth(&registry.Auth{})), fresh, changed(e.configured(), func(s *registry.ListenerSettings) {
		s.TLS = []registry.ListenerTLS{{Protocols: []string{"connect"}, TLSTermination: registry.TLSTermination{Certificates: []registry.KeyPair{{Certificate: "none"}}}}}
	}))
	if !refused(fresh.Name) {
		t.Error("a listener without its credentials is open")
	}
	if _, err := e.by(l, ""); err == nil {
		t.Error("a listener that lost its credentials lets clients in")
	}
	c, err := e.by(l, connect.BearerCredentials("t-one"))
	if err != nil {
		t.Errorf("the credentials before: %v", err)
	} else {
		_ = c.Close()
	}
	failed := 0
	for _, s := range e.Status().Listeners {
		if s.Problem != "" {
			failed++
		}
	}
	if failed != 3 {
		t.Errorf("status has %d listeners with a problem, want 3: %+v", failed, e.Status().Listeners)
	}
}

// What a listener speaks changes at its socket, also to a protocol whose server speaks
// first.
func TestListenerChangesItsProtocols(t *testing.T) {
	t.Parallel()
	ep := greeter(t, "h")
	svc := &registry.Service{Name: "svc.test", Names: []tunnel.Pattern{{Suffix: tunnel.MustParseName("svc.test")}}, Ports: []uint16{443}, Exposed: true, Endpoints: []registry.Endpoint{ep}}
	e := newEdge(t)
	l := e.configured("sni", "connect")
	e.configure(svc, l)
	fixed := changed(l, func(s *registry.ListenerSettings) {
		*s = registry.ListenerSettings{Service: tunnel.MustParseName("svc.test")}
	})
	for i := range 3 {
		e.configure(svc, fixed)
		c, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", l.Name)
		if err != nil {
			t.Fatal(err)
		}
		if got := hears(c, 1); got != "h" {
			t.Errorf("%d: the service's port: got %s", i, got)
		}
		_ = c.Close()
		e.configure(svc, l)
		c, err = e.by(l, "")
		if err != nil {
			t.Fatal(err)
		}
		if got := hears(c, 1); got != "h" {
			t.Errorf("%d: CONNECT: got %s", i, got)
		}
		_ = c.Close()
	}
}

// A listener of the start is opened by New, which fails where that fails.
func TestSourceListenersAreOpenedAtTheStart(t *testing.T) {
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	l := &registry.Listener{
		Name: taken.Addr().String(), Protocol: registry.Streams, Address: taken.Addr().(*net.TCPAddr).AddrPort().Addr(), Port: taken.Addr().(*net.TCPAddr).AddrPort().Port(),
		Settings: &registry.ListenerSettings{Protocols: []string{"connect"}},
	}
	if _, err := New(context.Background(), Config{SourceListeners: []*registry.Listener{l}}); !inUse(err) {
		t.Errorf("got %v, want that the port is taken", err)
	}
	free := *l
	free.Name, free.Port = fmt.Sprint(l.Address, ":0"), 0
	g, err := New(t.Context(), Config{SourceListeners: []*registry.Listener{&free}})
	if err != nil {
		t.Fatal(err)
	}
	defer g.Close()
	if s := g.Status().Listeners; len(s) != 1 || s[0].Address != g.Addrs()[0].String() {
		t.Errorf("got %+v, want the one at %v", s, g.Addrs())
	}
}
