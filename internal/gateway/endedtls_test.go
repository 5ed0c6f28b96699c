package gateway

import (
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"culvert.dev/connect"
	"culvert.dev/connect/h2"
	"culvert.dev/connect/h3"
	"culvert.dev/connect/socks5"
	"culvert.dev/connect/ws"
	"culvert.dev/internal/testca"
	"culvert.dev/internal/testnet"
	"culvert.dev/registry"
	"culvert.dev/tunnel"
)

// endsFor is how TLS ends for names, with their certificate. Clients must have one of
// clients, if there is such a CA.
func (e *edge) endsFor(clients *testca.CA, protocols []string, names ...string) registry.ListenerTLS {
	e.t.Helper()
	t := registry.ListenerTLS{TLSTermination: *e.ends(names...), Protocols: protocols}
	for _, n := range names {
		t.Names = append(t.Names, pattern(n))
	}
	if clients != nil {
		t.Trust = map[string]string{clients.TrustDomain: string(clients.CertPEM)}
	}
	return t
}

// plainTCP is inside TLS for a service.
var plainTCP = []string{registry.PlainTCP}

// named is a service of some names that greets with a letter, and echoes.
func named(ep registry.Endpoint, names ...string) *registry.Service {
	s := &registry.Service{Name: names[0], Ports: []uint16{443}, Exposed: true, Endpoints: []registry.Endpoint{ep}, Origin: "test"}
	for _, n := range names {
		s.Names = append(s.Names, pattern(n))
	}
	return s
}

// first returns what a tunnel by d to target says first, a letter, or its error.
func first(t *testing.T, d tunnel.Dialer, target string) (string, error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), soon)
	defer cancel()
	c, err := d.DialContext(ctx, "tcp", target)
	if err != nil {
		return "", err
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(soon))
	b := make([]byte, 1)
	_, err = io.ReadFull(c, b)
	return string(b), err
}

// What a listener asks of the clients of one name can't be evaded by another name at the
// same port.
func TestClientCertificatesOfAName(t *testing.T) {
	e := newEdge(t)
	clients, err := testca.New("clients.test", nil)
	if err != nil {
		t.Fatal(err)
	}
	alice := issueOf(t, clients, "alice.test").TLS
	shop := named(greeter(t, "s"), "shop.test", "alias.test", "*.shop.test")
	shop.Addresses = []netip.Addr{netip.MustParseAddr("192.0.2.10")}
	carriers := []string{"connect", "connect-h2"}
	l := changed(e.configured("sni", "connect", "socks5", "websocket"), func(s *registry.ListenerSettings) {
		s.TLS = []registry.ListenerTLS{
			e.endsFor(clients, plainTCP, "shop.test"),
			e.endsFor(nil, plainTCP, "open.test"),
			e.endsFor(nil, carriers, "gw.test"),
			e.endsFor(clients, carriers, "sure.test"),
			e.endsFor(e.ca, carriers, "other.test"),
		}
	})
	elsewhere := e.configured("connect")
	e.say(registry.Snapshot{Services: []*registry.Service{shop, named(greeter(t, "o"), "open.test")}, Listeners: []*registry.Listener{l, elsewhere}})

	for _, row := range []struct {
		name  string
		certs []tls.Certificate
		want  string
	}{{"shop.test", []tls.Certificate{alice}, "s"}, {"open.test", nil, "o"}, {"open.test", []tls.Certificate{alice}, "o"}} {
		c, err := e.dialTLS(l.Port, row.name, row.certs...)
		if err != nil {
			t.Fatalf("%s: %v", row.name, err)
		}
		if got := hears(c, 1); got != row.want {
			t.Errorf("%s: heard %s, want %s", row.name, got, row.want)
		}
		works(t, c)
		_ = c.Close()
	}
	e.logs("proto=tls", "shop.test", "peer=spiffe://clients.test/ns/test/sa/a")
	c, err := e.dialTLS(l.Port, "shop.test")
	if err == nil {
		_, err = c.Read(make([]byte, 1))
	}
	if err == nil || !strings.Contains(err.Error(), "certificate required") {
		t.Errorf("without a certificate: %v, want the alert certificate_required", err)
	}

	by := func(name string, certs ...tls.Certificate) *tls.Config {
		return &tls.Config{RootCAs: e.ca.Pool(), ServerName: name, Certificates: certs}
	}
	own := e.issue("own.test").TLS
	for _, row := range []struct {
		how    string
		d      tunnel.Dialer
		target string
		want   string // "" means that it is refused
	}{
		{"CONNECT inside TLS for another name", &connect.Dialer{Proxy: l.Name, TLS: by("gw.test")}, "shop.test:443", ""},
		{"the same with a certificate, which is not asked for", &connect.Dialer{Proxy: l.Name, TLS: by("gw.test", alice)}, "shop.test:443", ""},
		{"the same by HTTP/2", pooling(t, &h2.Dialer{Proxy: l.Name, TLS: by("gw.test")}), "shop.test:443", ""},
		{"another name of the service", &connect.Dialer{Proxy: l.Name, TLS: by("gw.test")}, "alias.test:443", ""},
		{"a name below", &connect.Dialer{Proxy: l.Name, TLS: by("gw.test")}, "a.shop.test:443", ""},
		{"its address", &connect.Dialer{Proxy: l.Name, TLS: by("gw.test")}, "192.0.2.10:443", ""},
		{"with a certificate of another CA", &connect.Dialer{Proxy: l.Name, TLS: by("other.test", own)}, "shop.test:443", ""},
		{"CONNECT in the clear", &connect.Dialer{Proxy: l.Name}, "shop.test:443", ""},
		{"SOCKS", &socks5.Dialer{Proxy: l.Name}, "alias.test:443", ""},
		{"WebSocket", &ws.Dialer{URL: "ws://" + l.Name}, "shop.test:443", ""},
		{"with a certificate that is as good", &connect.Dialer{Proxy: l.Name, TLS: by("sure.test", alice)}, "shop.test:443", "s"},
		{"the same by HTTP/2", pooling(t, &h2.Dialer{Proxy: l.Name, TLS: by("sure.test", alice)}), "alias.test:443", "s"},
		{"a service that asks for none", &connect.Dialer{Proxy: l.Name, TLS: by("gw.test")}, "open.test:443", "o"},
		{"another listener", &connect.Dialer{Proxy: elsewhere.Name}, "shop.test:443", "s"},
	} {
		before := strings.Count(e.log.String(), "reason=denied")
		got, err := first(t, row.d, row.target)
		if got != row.want && err == nil || row.want != "" && err != nil || row.want == "" && err == nil {
			t.Errorf("%s: heard %q, %v, want %q", row.how, got, err, row.want)
		}
		if row.want == "" {
			testnet.Eventually(t, soon, func() bool { return strings.Count(e.log.String(), "reason=denied") > before }, "%s: the log says that it was denied", row.how)
		}
	}
	e.logs("reason=denied", `requires the client certificates of [\"shop.test\"]`)
	// TLS that is passed on shows no certificate to the gateway, and what follows its
	// hello may be anything.
	if _, err := e.dialTLS(l.Port, "alias.test", alice); err == nil || !strings.Contains(err.Error(), "access denied") {
		t.Errorf("TLS that is passed on: %v, want the alert access_denied", err)
	}

	x := Explain(t.Context(), e.router, e.inbound.listeners(), Query{Host: "shop.test", Proto: "sni", Listener: l.Name})
	if x.Reason != "" || x.Proto != "tls" || x.Service != "shop.test" || len(x.Endpoints) != 1 {
		t.Errorf("explained as %+v", x)
	}
	if x := Explain(t.Context(), e.router, e.inbound.listeners(), Query{Host: "shop.test", Port: 443, Proto: "connect", Listener: l.Name}); x.Reason != tunnel.Denied {
		t.Errorf("CONNECT is explained as %+v", x)
	}
	for _, s := range e.Status().Listeners {
		if s.Configured == l.Name && (len(s.TLS) != 5 || fmt.Sprint(s.TLS[0]) != "{[shop.test] false [tcp] required}" || s.TLS[2].ClientCertificates != "ignored") {
			t.Errorf("the status has %+v", s)
		}
	}
}

// A session of HTTP/2 that is older than the settings of a name has no more rights than
// a new one.
func TestOlderSessionNeedsTheCertificate(t *testing.T) {
	e := newEdge(t)
	shop := named(greeter(t, "s"), "shop.test")
	gw := e.endsFor(nil, []string{"connect-h2"}, "gw.test")
	open, closed := e.endsFor(nil, plainTCP, "shop.test"), e.endsFor(e.ca, plainTCP, "shop.test")
	l := changed(e.configured("sni"), func(s *registry.ListenerSettings) { s.TLS = []registry.ListenerTLS{gw, open} })
	e.configure(shop, l)
	d := pooling(t, &h2.Dialer{Proxy: l.Name, TLS: &tls.Config{RootCAs: e.ca.Pool(), ServerName: "gw.test"}})
	kept, err := d.DialContext(t.Context(), "tcp", "shop.test:443")
	if err != nil {
		t.Fatal(err)
	}
	defer kept.Close()
	_ = kept.SetDeadline(time.Now().Add(soon))
	if got := hears(kept, 1); got != "s" {
		t.Errorf("before: heard %s", got)
	}
	e.configure(shop, changed(l, func(s *registry.ListenerSettings) { s.TLS = []registry.ListenerTLS{gw, closed} }))
	if got, err := first(t, d, "shop.test:443"); err == nil {
		t.Errorf("a new stream of the session heard %q", got)
	}
	e.logs("proto=connect-h2", "reason=denied")
	works(t, kept)
}

// A name is resolved before a certificate is shown: a client that is to be refused does
// not learn whose certificate there is.
func TestNameIsResolvedBeforeTLSEnds(t *testing.T) {
	e := newEdge(t)
	private, denied, empty, far := named(greeter(t, "p"), "private.test"), named(greeter(t, "d"), "denied.test"), named(greeter(t, "e"), "empty.test"), named(registry.Endpoint{Addr: netip.MustParseAddr("198.51.100.7"), Port: 1}, "far.test")
	private.Exposed = false
	denied.Clients.Deny = []netip.Prefix{netip.MustParsePrefix("127.0.0.0/8")}
	empty.Endpoints = nil
	far.Via = []registry.Hop{{Proto: "connect", Addresses: []string{"198.51.100.8:8080"}}} // without TLS
	l := changed(e.configured("sni"), func(s *registry.ListenerSettings) {
		s.TLS = []registry.ListenerTLS{e.endsFor(nil, plainTCP, "private.test", "denied.test", "empty.test", "far.test", "nobody.test")}
	})
	e.say(registry.Snapshot{Services: []*registry.Service{private, denied, empty, far}, Listeners: []*registry.Listener{l}})
	for name, want := range map[string]struct {
		alert  string
		reason tunnel.Reason
	}{
		"private.test": {"unrecognized name", tunnel.NotExposed},
		"nobody.test":  {"unrecognized name", tunnel.NoRoute},
		"denied.test":  {"access denied", tunnel.Denied},
		"empty.test":   {"internal error", tunnel.NoEndpoint},
		"far.test":     {"insufficient security", tunnel.Insecure},
	} {
		d := &net.Dialer{Timeout: soon}
		_, err := tls.DialWithDialer(d, "tcp", l.Name, &tls.Config{ServerName: name, InsecureSkipVerify: true, VerifyConnection: func(tls.ConnectionState) error {
			t.Errorf("%s: a certificate is shown", name)
			return nil
		}})
		if err == nil || !strings.Contains(err.Error(), want.alert) {
			t.Errorf("%s: got %v, want the alert %s", name, err, want.alert)
		}
		e.logs("proto=tls", "reason="+string(want.reason), name)
	}
}

// Names for which TLS ends come and go at a reload: no tunnel and no session of many
// streams ends, and keys that are bad change nothing.
func TestEndedTLSFollowsReloads(t *testing.T) {
	t.Parallel()
	e := newEdge(t)
	shop := named(greeter(t, "s"), "shop.test")
	gw, one := e.endsFor(nil, []string{"connect-h2"}, "gw.test"), e.endsFor(nil, plainTCP, "shop.test")
	l := changed(e.configured("sni"), func(s *registry.ListenerSettings) { s.TLS = []registry.ListenerTLS{gw} })
	with := func(items ...registry.ListenerTLS) *registry.Listener {
		return changed(l, func(s *registry.ListenerSettings) { s.TLS = items })
	}
	e.configure(shop, l)
	d := pooling(t, &h2.Dialer{Proxy: l.Name, TLS: &tls.Config{RootCAs: e.ca.Pool(), ServerName: "gw.test"}})
	session, err := d.DialContext(t.Context(), "tcp", "shop.test:443")
	if err != nil {
		t.Fatal(err)
	}
	defer session.Close()
	_ = session.SetDeadline(time.Now().Add(soon))
	hears(session, 1)

	e.configure(shop, with(gw, one))
	kept, err := e.dialTLS(l.Port, "shop.test")
	if err != nil {
		t.Fatal(err)
	}
	hears(kept, 1)

	bad := one
	bad.Certificates = []registry.KeyPair{{Certificate: one.Certificates[0].Certificate, Key: gw.Certificates[0].Key}}
	twice := e.endsFor(e.ca, plainTCP, "shop.test")
	for why, items := range map[string][]registry.ListenerTLS{
		"private key does not match": {gw, bad},
		"no certificate":             {gw, {Protocols: plainTCP, Names: one.Names}},
		"two items terminate TLS":    {gw, one, twice},
		"hold no certificate":        {gw, {Protocols: plainTCP, Names: one.Names, TLSTermination: registry.TLSTermination{Certificates: one.Certificates, ClientCAs: "none"}}},
	} {
		e.configure(shop, with(items...))
		problem := ""
		for _, s := range e.Status().Listeners {
			problem += s.Problem
		}
		if !strings.Contains(problem, "keeping the current certificates") || !strings.Contains(problem, why) {
			t.Errorf("the status says %q, want %q", problem, why)
		}
		c, err := e.dialTLS(l.Port, "shop.test")
		if err != nil {
			t.Fatalf("%s: the certificate before is gone: %v", why, err)
		}
		if got := hears(c, 1); got != "s" {
			t.Errorf("%s: heard %s", why, got)
		}
	}
	e.configure(shop, with(gw))
	if got := e.asked(l.Port, "shop.test"); got == "s" {
		t.Error("TLS ends for a name that left the configuration")
	}
	works(t, kept)
	works(t, session)
	if n := strings.Count(e.log.String(), "reason=drain"); n > 0 {
		t.Errorf("%d streams were drained", n)
	}
	if got, err := first(t, d, "shop.test:443"); got != "s" || err != nil {
		t.Errorf("a new stream heard %q, %v", got, err)
	}
}

// A listener that requires TLS carries what came by TLS, and of other clients what begins
// as TLS.
func TestListenerRequiresTLS(t *testing.T) {
	const hello, plain = "\x16\x03\x01\x00\x40\x01 like a ClientHello", "GET / HTTP/1.1\r\n\r\n"
	e := newEdge(t)
	svc := service(testnet.Echo(t).Addr())
	require := func(s *registry.ListenerSettings) { s.RequireTLS = true }
	l := changed(e.configured("sni", "connect", "connect-h2", "socks5", "websocket"), require)
	l.Settings.TLS = []registry.ListenerTLS{e.endsFor(nil, []string{"connect", "connect-h2"}, "gw.test"), e.endsFor(nil, plainTCP, "svc.test")}
	port := changed(e.configured(), func(s *registry.ListenerSettings) {
		s.Service, s.Port, s.RequireTLS = tunnel.MustParseName("svc.test"), 443, true
	})
	e.configure(svc, l, port)
	cfg := &tls.Config{RootCAs: e.ca.Pool(), ServerName: "gw.test"}
	for how, row := range map[string]struct {
		d     tunnel.Dialer
		plain bool // may be carried
		proto string
	}{
		"CONNECT":            {&connect.Dialer{Proxy: l.Name}, false, "connect"},
		"CONNECT by HTTP/2":  {pooling(t, &h2.Dialer{Proxy: l.Name}), false, "connect-h2"},
		"SOCKS":              {&socks5.Dialer{Proxy: l.Name}, false, "socks5"},
		"WebSocket":          {&ws.Dialer{URL: "ws://" + l.Name}, false, "websocket"},
		"its own port":       {straight(port.Name), false, "tcp"},
		"CONNECT inside TLS": {&connect.Dialer{Proxy: l.Name, TLS: cfg}, true, ""},
		"HTTP/2 inside TLS":  {pooling(t, &h2.Dialer{Proxy: l.Name, TLS: cfg}), true, ""},
	} {
		if got, err := say(t, row.d, hello); got != hello || err != nil {
			t.Errorf("by %s: a hello comes back as %q, %v", how, got, err)
		}
		got, err := say(t, row.d, plain)
		if row.plain && (got != plain || err != nil) || !row.plain && (got != "" || err == nil) {
			t.Errorf("by %s: plaintext comes back as %q, %v; want it carried: %v", how, got, err, row.plain)
		}
		if row.plain {
			continue
		}
		e.logs("proto="+row.proto+" ", "reason=insecure", "requires TLS")
		q := Query{Host: "svc.test", Port: 443, Proto: row.proto, Listener: l.Name}
		if row.proto == "tcp" {
			q = Query{Listener: port.Name}
		}
		if x := Explain(t.Context(), e.router, e.inbound.listeners(), q); len(x.Endpoints) != 1 || !strings.Contains(x.Endpoints[0].TLSOnly, "requires TLS") {
			t.Errorf("by %s: explained as %+v", how, x)
		}
	}
	c, err := e.dialTLS(l.Port, "svc.test")
	if err != nil {
		t.Fatal(err)
	}
	works(t, c)
	// A reload takes the requirement back, at the same socket.
	e.configure(svc, changed(l, func(s *registry.ListenerSettings) { s.RequireTLS = false }), port)
	if got, err := say(t, &connect.Dialer{Proxy: l.Name}, plain); got != plain || err != nil {
		t.Errorf("without the requirement: plaintext comes back as %q, %v", got, err)
	}
	works(t, c)
}

// QUIC ends by name too: each with its certificate and what it asks of clients. Names come
// and go at the same socket.
func TestHTTP3EndsByNames(t *testing.T) {
	e := newEdge(t)
	svc := service(testnet.Echo(t).Addr())
	clients, err := testca.New("clients.test", nil)
	if err != nil {
		t.Fatal(err)
	}
	alice := issueOf(t, clients, "alice.test").TLS
	carrier := []string{"connect-h3"}
	gw, sure := e.endsFor(nil, carrier, "gw.test"), e.endsFor(clients, carrier, "sure.test")
	l := e.udpPort(e.port(), "svc.test")
	l.Settings = &registry.ListenerSettings{TLS: []registry.ListenerTLS{gw}}
	e.configure(svc, l)
	socket := e.inbound.open[l.Name].socket
	carried := func(name string, certs ...tls.Certificate) error {
		d := &h3.Dialer{Proxy: e.at(l.Port), TLS: &tls.Config{RootCAs: e.ca.Pool(), ServerName: name, Certificates: certs}}
		defer d.Close()
		ctx, cancel := context.WithTimeout(t.Context(), soon)
		defer cancel()
		c, err := d.DialContext(ctx, "tcp", "svc.test:443")
		if err != nil {
			return err
		}
		defer c.Close()
		_ = c.SetDeadline(time.Now().Add(soon))
		works(t, c)
		return nil
	}
	if err := carried("gw.test"); err != nil {
		t.Errorf("gw.test: %v", err)
	}
	if err := carried("sure.test"); err == nil {
		t.Error("a name that is not configured is served")
	}
	e.configure(svc, changed(l, func(s *registry.ListenerSettings) { s.TLS = []registry.ListenerTLS{gw, sure} }))
	if e.inbound.open[l.Name].socket != socket {
		t.Error("the socket was opened again")
	}
	if err := carried("gw.test"); err != nil {
		t.Errorf("gw.test: %v", err)
	}
	if err := carried("sure.test", alice); err != nil {
		t.Errorf("sure.test: %v", err)
	}
	e.logs("proto=connect-h3", "peer=spiffe://clients.test/ns/test/sa/a")
	if err := carried("sure.test"); err == nil {
		t.Error("sure.test serves a client without a certificate")
	}
	if err := carried("other.test"); err == nil {
		t.Error("a name that is not configured is served")
	}
}
