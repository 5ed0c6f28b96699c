package termination

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"culvert.dev/connect"
	"culvert.dev/connect/proxyproto"
	"culvert.dev/identity"
	"culvert.dev/internal/testnet"
	"culvert.dev/sni"
	"culvert.dev/tunnel"
	"culvert.dev/tunnel/tunneltest"
)

// TestNames: what ends here is the gateway's own, and what does not goes on
// with every byte as it was.
func TestNames(t *testing.T) {
	ca, other := newCA(t, "example.test"), newCA(t, "service.test")
	service := issue(t, other, "svc", "svc.test", "a.wild.test", "deep.a.wild.test")
	passed := testnet.Service(t, func(c net.Conn) {
		s := tls.Server(c, &tls.Config{Certificates: []tls.Certificate{service.TLS}})
		_, _ = io.Copy(s, s)
	})
	keys := &Keys{Certificates: keysOf(
		issue(t, ca, "gw", "gw.test").TLS, issue(t, ca, "two", "two.test", "*.wild.test").TLS,
	)}
	p := terminating(t, keys, false)
	g := serve(t, table{"svc.test": passed, "a.wild.test": passed, "plain": testnet.Echo(t).Addr()}, tunnel.Limits{}, p, &connect.Protocol{})
	for _, name := range []string{"gw.test", "GW.Test", "two.test"} {
		c := tunneltest.Dial(t, &connect.Dialer{Proxy: g.Addr, TLS: roots(ca, name)}, "plain:1")
		testnet.Ping(t, c, "inside of TLS, which ended at the gateway as "+name)
	}
	for _, name := range []string{"svc.test", "a.wild.test"} { // a wildcard says what may be, not what is
		c := tunneltest.Dial(t, tlsDialer{roots(other, name)}, g.Addr)
		testnet.Ping(t, c, "inside of TLS, which ended at the service as "+name)
	}
	_, err := tlsDialer{roots(ca, "nobody.test")}.DialContext(t.Context(), "tcp", g.Addr)
	if err == nil || !strings.Contains(err.Error(), "unrecognized name") {
		t.Errorf("a name that nobody has: %v, want the alert unrecognized_name", err)
	}
	c := tunneltest.Dial(t, &connect.Dialer{Proxy: g.Addr}, "plain:1")
	testnet.Ping(t, c, "in the clear, on the same port")

	keys.Names = []tunnel.Pattern{{Suffix: tunnel.MustParseName("wild.test"), Wildcard: true}}
	if err := p.Use(carrying(keys, false)); err != nil {
		t.Fatal(err)
	}
	c = tunneltest.Dial(t, &connect.Dialer{Proxy: g.Addr, TLS: roots(ca, "a.wild.test")}, "plain:1")
	testnet.Ping(t, c, "the wildcard is one of the names")
	for name, want := range map[string]bool{"a.wild.test": true, "a.b.wild.test": true, "wild.test": false, "gw.test": false} {
		if got := p.Owns(tunnel.MustParseName(name)); got != want {
			t.Errorf("%s ends here: %v, want %v", name, got, want)
		}
	}
}

// TestPassedUntouched: the hello of a name that is not ours reaches its service
// as it was sent.
func TestPassedUntouched(t *testing.T) {
	ca := newCA(t, "example.test")
	got := make(chan []byte, 1)
	to := testnet.Service(t, func(c net.Conn) {
		b, _ := io.ReadAll(c)
		got <- b
	})
	g := serve(t, table{"svc.test": to}, tunnel.Limits{}, terminating(t, &Keys{Certificates: keysOf(issue(t, ca, "gw", "gw.test").TLS)}, false))
	hello := append(helloFor(t, "svc.test"), "what follows"...)
	c := tunneltest.Dial(t, new(net.Dialer), g.Addr)
	for _, b := range hello {
		_, _ = c.Write([]byte{b})
	}
	_ = c.(*net.TCPConn).CloseWrite()
	if b := <-got; !bytes.Equal(b, hello) {
		t.Errorf("the service got %d bytes, not the %d that were sent", len(b), len(hello))
	}
}

// helloFor returns the ClientHello of crypto/tls.
func helloFor(t testing.TB, name string) []byte {
	t.Helper()
	a, b := net.Pipe()
	defer b.Close()
	go func() { _ = tls.Client(a, &tls.Config{ServerName: name, InsecureSkipVerify: true}).Handshake() }()
	head := make([]byte, 5)
	if _, err := io.ReadFull(b, head); err != nil {
		t.Fatal(err)
	}
	rest := make([]byte, int(head[3])<<8|int(head[4]))
	if _, err := io.ReadFull(b, rest); err != nil {
		t.Fatal(err)
	}
	return append(head, rest...)
}

// TestNoName: where all TLS ends here, who names nobody is shown the first
// certificate, and who names somebody the one that has the name.
func TestNoName(t *testing.T) {
	ca := newCA(t, "example.test")
	g := serve(t, table{"plain": testnet.Echo(t).Addr()}, tunnel.Limits{}, terminating(t, &Keys{Certificates: keysOf(
		issue(t, ca, "first", "first.test").TLS, issue(t, ca, "second", "second.test", "*.wild.test").TLS,
	)}, true))
	for name, want := range map[string]string{"": "first", "second.test": "second", "a.wild.test": "second", "a.b.wild.test": "first", "nobody.test": "first"} {
		var shown string
		cfg := &tls.Config{ServerName: name, InsecureSkipVerify: true, VerifyConnection: func(cs tls.ConnectionState) error {
			shown = cs.PeerCertificates[0].Subject.CommonName
			return nil
		}}
		c := tunneltest.Dial(t, tlsDialer{cfg}, g.Addr)
		_ = c.Close()
		if shown != want {
			t.Errorf("who asks for %q is shown %q, want %q", name, shown, want)
		}
	}
}

// TestKeysChange: new keys are for new connections, and no connection takes
// anything of another along.
func TestKeysChange(t *testing.T) {
	old, fresh := newCA(t, "old.test"), newCA(t, "fresh.test")
	p := terminating(t, &Keys{Certificates: keysOf(issue(t, old, "gw", "gw.test").TLS), Trust: trusting(old)}, false)
	g := serve(t, table{"plain": testnet.Echo(t).Addr()}, tunnel.Limits{}, p)
	cfg := roots(old, "gw.test")
	cfg.Certificates = []tls.Certificate{issue(t, old, "alice").TLS}
	cfg.ClientSessionCache = tls.NewLRUClientSessionCache(10)
	held := tunneltest.Dial(t, &connect.Dialer{Proxy: g.Addr, TLS: cfg}, "plain:1")
	testnet.Ping(t, held, "before")
	for range 3 {
		c, err := tlsDialer{cfg}.DialContext(t.Context(), "tcp", g.Addr)
		if err != nil {
			t.Fatal(err)
		}
		if c.(*stream).ConnectionState().DidResume {
			t.Error("a session was resumed")
		}
		_ = c.Close()
	}
	if err := p.Use(carrying(&Keys{}, false)); err == nil {
		t.Error("keys without a certificate are taken")
	}
	if err := p.Use(carrying(&Keys{Certificates: keysOf(issue(t, fresh, "gw", "gw.test").TLS), Trust: trusting(fresh)}, false)); err != nil {
		t.Fatal(err)
	}
	testnet.Ping(t, held, "after")
	if c, err := (tlsDialer{cfg}).DialContext(t.Context(), "tcp", g.Addr); err == nil {
		_ = c.Close()
		t.Error("a new connection is shown the old certificate")
	}
	cfg = roots(fresh, "gw.test")
	cfg.Certificates = []tls.Certificate{issue(t, fresh, "bob").TLS}
	testnet.Ping(t, tunneltest.Dial(t, &connect.Dialer{Proxy: g.Addr, TLS: cfg}, "plain:1"), "new")
}

// TestBadKeys: what can't be meant is refused before anybody connects.
func TestBadKeys(t *testing.T) {
	ca := newCA(t, "example.test")
	certs := keysOf(issue(t, ca, "gw", "gw.test", "*.wild.test").TLS)
	name := func(s string) []tunnel.Pattern {
		p, err := tunnel.ParsePattern(s)
		if err != nil {
			t.Fatal(err)
		}
		return []tunnel.Pattern{p}
	}
	for want, k := range map[string]Keys{
		"no certificate":             {},
		"a certificate is empty":     {Certificates: keysOf(tls.Certificate{})},
		"has the name \"b.test\"":    {Certificates: certs, Names: name("b.test")},
		"has the name \"*.b.test":    {Certificates: certs, Names: name("*.b.test")},
		"is not a trust domain":      {Certificates: certs, Trust: []*identity.Trust{identity.NewTrust("Example.test", ca.Root())}},
		"no CA to verify":            {Certificates: certs, Optional: true},
		"\"example.test\" has no CA": {Certificates: certs, Trust: []*identity.Trust{identity.NewTrust("example.test")}},
		"and no CA to":               {Certificates: certs, Unverified: true},
		"TLS 1.1 is too old":         {Certificates: certs, MinVersion: tls.VersionTLS11},
		"a name that could end":      {Certificates: keysOf(issue(t, ca, "svid").TLS)},
		"wildcards aside":            {Certificates: keysOf(issue(t, ca, "svid", "*.wild.test").TLS)},
		"a name of a certificate:":   {Certificates: keysOf(issue(t, ca, "svid", "a..test").TLS)},
	} {
		if err := new(Protocol).Use(Item{Keys: &k}); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%+v: got %v, want %q", k, err, want)
		}
	}
	for _, ok := range []string{"gw.test", "a.wild.test", "*.wild.test"} {
		if err := new(Protocol).Use(Item{Keys: &Keys{Certificates: certs, Names: name(ok)}}); err != nil {
			t.Errorf("%s: %v", ok, err)
		}
	}
}

// TestNamedKeys: the certificate of a key that may be replaced at any time has no say in
// which names end here, whether it is there already or not.
func TestNamedKeys(t *testing.T) {
	ca := newCA(t, "example.test")
	var store identity.Store
	key := store.Key("gw")
	name := []tunnel.Pattern{{Suffix: tunnel.MustParseName("gw.test")}}
	for _, has := range []string{"nothing", "svid", "name"} {
		switch has {
		case "svid":
			key.Set(&issue(t, ca, "gw").TLS)
		case "name":
			key.Set(&issue(t, ca, "gw", "other.test").TLS)
		}
		if err := new(Protocol).Use(Item{Keys: &Keys{Certificates: []*identity.Key{key}, Names: name}}); err != nil {
			t.Errorf("%s: with a name: %v", has, err)
		}
		if err := new(Protocol).Use(Item{Keys: &Keys{Certificates: []*identity.Key{key}}}); err == nil || !strings.Contains(err.Error(), "list the names") {
			t.Errorf("%s: without names: got error %v, want that they are listed", has, err)
		}
		if err := new(Protocol).Use(Item{Keys: &Keys{Certificates: []*identity.Key{key}}, Any: true}); err != nil {
			t.Errorf("%s: for any name: %v", has, err)
		}
	}
}

// TestBadInput is the table of docs/internals/protocols/tls.md.
func TestBadInput(t *testing.T) {
	ca := newCA(t, "example.test")
	keys := &Keys{Certificates: keysOf(issue(t, ca, "gw", "gw.test").TLS)}
	own := helloFor(t, "gw.test")
	for _, tt := range []struct {
		name   string
		all    bool
		send   []byte
		alert  byte // the alert's number in the clear; 0 for none
		reason tunnel.Reason
	}{
		{"a connection without a byte", true, nil, 0, tunnel.NoHello},
		{"half a hello", true, own[:100], 0, tunnel.Gone},
		{"no more than a hello", true, own, 0, tunnel.Gone},
		{"garbage behind the hello", true, append(bytes.Clone(own), "\x16\x03\x03\x00\x05abcde"...), 0, tunnel.BadHello}, // its alert is encrypted
		{"an alert first", true, []byte{21, 3, 3, 0, 2, 1, 0}, 10, tunnel.BadHello},
		{"a record of 16,385 bytes", true, []byte{22, 3, 1, 0x40, 1}, 22, tunnel.BadHello},
		{"a record of 0 bytes", true, []byte{22, 3, 1, 0, 0}, 10, tunnel.BadHello},
		{"a hello of 70,000 bytes", true, []byte{22, 3, 1, 0x10, 0, 1, 1, 0x11, 0x70}, 47, tunnel.BadHello},
		{"SSLv2", true, []byte{0x80, 46, 1, 0, 2}, 0, tunnel.BadHello},
		{"TLS 1.1 at most", true, versionHello(own, tls.VersionTLS11), 70, tunnel.BadHello},
		{"TLS 1.2 at most, where 1.3 is the least", true, versionHello(own, tls.VersionTLS12), 70, tunnel.BadHello},
		{"an address for a name", true, renamed(own, "1.2.3.4"), 112, tunnel.NoSNI},
		{"a NUL in the name", true, renamed(own, "gw.te\x00t"), 47, tunnel.BadHello},
		{"an empty label", true, renamed(own, "gw..tst"), 47, tunnel.BadHello},
		{"a name with its last dot, which crypto/tls does not take", true, renamed(own, "gwtest."), 50, tunnel.BadHello},
		{"HTTP", true, []byte("GET / HTTP/1.1\r\n\r\n"), 0, tunnel.BadPreamble},
		{"SSH", true, []byte("SSH-2.0-x\r\n"), 0, tunnel.BadPreamble},
		{"no name, where names decide", false, nameHello(t, ""), 112, tunnel.NoSNI},
		{"a name that nobody has", false, nameHello(t, "nobody.test"), 112, tunnel.NoRoute},
	} {
		t.Run(tt.name, func(t *testing.T) {
			g := serve(t, table{}, tunnel.Limits{}, terminating(t, keys, tt.all))
			c := tunneltest.Dial(t, new(net.Dialer), g.Addr)
			_, _ = c.Write(tt.send)
			_ = c.(*net.TCPConn).CloseWrite()
			heard, _ := io.ReadAll(c)
			var alert byte
			if n := len(heard); n >= 7 && heard[n-7] == 21 && heard[n-6] == 3 && heard[n-4] == 0 && heard[n-3] == 2 {
				alert = heard[n-1]
			}
			if alert != tt.alert {
				t.Errorf("heard %x, the alert %d; want %d", heard[max(0, len(heard)-16):], alert, tt.alert)
			}
			if got := string(heard); tt.name == "HTTP" && !strings.HasSuffix(got, "\r\n\r\nTLS expected\n") {
				t.Errorf("heard %q, want to be told", got)
			}
			g.Reason(t, tt.reason)
			if n := len(g.Outcomes()); n != 1 {
				t.Errorf("%d outcomes, want one", n)
			}
		})
	}
}

// renamed puts another name of seven bytes into the hello for gw.test.
func renamed(hello []byte, name string) []byte {
	return bytes.Replace(hello, []byte("gw.test"), []byte(name), 1)
}

func nameHello(t *testing.T, name string) []byte {
	if name != "" {
		return helloFor(t, name)
	}
	return helloFor(t, "192.0.2.1") // crypto/tls leaves out what is no name
}

// versionHello takes supported_versions out of a hello, by making it an
// extension that nobody knows, so that version is the highest it offers.
func versionHello(hello []byte, version uint16) []byte {
	b := bytes.Clone(hello)
	b[9], b[10] = byte(version>>8), byte(version)
	i := bytes.LastIndex(b, []byte{0, 43, 0, 5, 4, 3, 4, 3, 3}) // supported_versions: 1.3 and 1.2
	if i < 0 {
		panic("the hello has no supported_versions")
	}
	b[i], b[i+1] = 0xfe, 0xfe
	return b
}

// TestLimits: handshake and the preamble inside have one deadline together,
// whatever comes, and the handshake has a limit in bytes.
func TestLimits(t *testing.T) {
	ca := newCA(t, "example.test")
	keys := &Keys{Certificates: keysOf(issue(t, ca, "gw", "gw.test").TLS), Trust: trusting(ca)}
	limits := tunnel.Limits{HandshakeTimeout: 300 * time.Millisecond}

	t.Run("handshake", func(t *testing.T) {
		g := serve(t, table{}, limits, terminating(t, keys, true))
		c := tunneltest.Dial(t, new(net.Dialer), g.Addr)
		_, _ = c.Write(helloFor(t, "gw.test"))
		_, _ = io.ReadAll(c)
		if o := g.Reason(t, tunnel.HelloTimeout); o.Lasted > patience/2 {
			t.Errorf("it took %v", o.Lasted)
		}
	})
	t.Run("inside", func(t *testing.T) {
		// As long as a handshake may take on a machine that is busy.
		g := serve(t, table{}, tunnel.Limits{HandshakeTimeout: 5 * time.Second}, terminating(t, keys, true))
		cfg := roots(ca, "gw.test")
		cfg.Certificates = []tls.Certificate{issue(t, ca, "alice").TLS}
		c := tunneltest.Dial(t, tlsDialer{cfg}, g.Addr)
		_, _ = io.WriteString(c, "CONNECT svc.test:443 HTTP/1.1\r\n")
		go func() { _, _ = io.ReadAll(c) }()
		g.Reason(t, tunnel.HelloTimeout)
	})
	t.Run("nothing inside", func(t *testing.T) {
		g := serve(t, table{}, tunnel.Limits{}, terminating(t, keys, true))
		cfg := roots(ca, "gw.test")
		cfg.Certificates = []tls.Certificate{issue(t, ca, "alice").TLS}
		c := tunneltest.Dial(t, tlsDialer{cfg}, g.Addr)
		_ = c.Close()
		if o := g.Reason(t, tunnel.NoHello); o.Source.String() != c.LocalAddr().String() {
			t.Errorf("the source is %v, want %v", o.Source, c.LocalAddr())
		}
	})
	t.Run("bytes", func(t *testing.T) {
		b := &tlsTransport{Conn: zeros{}, left: MaxHandshake}
		n, err := io.Copy(io.Discard, b)
		if n != MaxHandshake || !errors.Is(err, errTooLong) {
			t.Errorf("read %d bytes and %v, want %d and the limit", n, err, MaxHandshake)
		}
	})
	t.Run("a stranger inside", func(t *testing.T) {
		g := serve(t, table{}, tunnel.Limits{}, terminating(t, &Keys{Certificates: keys.Certificates}, true))
		c := tunneltest.Dial(t, tlsDialer{roots(ca, "gw.test")}, g.Addr)
		_, _ = c.Write([]byte{0, 1, 2, 3})
		_, _ = io.ReadAll(c)
		g.Reason(t, tunnel.BadPreamble)
	})
}

// zeros never ends.
type zeros struct{ net.Conn }

func (zeros) Read(p []byte) (int, error) { return len(p), nil }

// TestOneConnection: what is inside counts as the connection it came in, until
// the tunnel's end.
func TestOneConnection(t *testing.T) {
	ca := newCA(t, "example.test")
	keys := &Keys{Certificates: keysOf(issue(t, ca, "gw", "gw.test").TLS)}
	p := terminating(t, keys, true)
	ln, err := tunnel.Listen(t.Context(), "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	relay := &tunnel.Relay{}
	srv := &tunnel.Server{
		Handler: &tunnel.Router{Relay: relay, Dialer: &tunnel.NetDialer{}, Resolver: table{"plain": testnet.Echo(t).Addr()}},
		Limits:  tunnel.Limits{MaxConnectionsPerClient: 1, ConnectionRatePerClient: -1},
	}
	served := make(chan error, 1)
	go func() {
		served <- srv.Serve(context.WithoutCancel(t.Context()), tunnel.Listener{Listener: ln, Protocols: []tunnel.Protocol{p}})
	}()
	defer func() {
		_ = relay.Close()
		_ = srv.Close()
		<-served
	}()
	d := &connect.Dialer{Proxy: ln.Addr().String(), TLS: roots(ca, "gw.test")}
	c := tunneltest.Dial(t, d, "plain:1")
	testnet.Ping(t, c, "the first")
	if c2, err := d.DialContext(t.Context(), "tcp", "plain:1"); err == nil {
		_ = c2.Close()
		t.Error("a second connection of a source that may have one was let in")
	}
	_ = c.Close()
	for deadline := time.Now().Add(patience); ; time.Sleep(time.Millisecond) {
		c, err := d.DialContext(t.Context(), "tcp", "plain:1")
		if err == nil {
			_ = c.Close()
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("after the first one's end: %v", err)
		}
	}
}

// TestALPN: what is offered has to be something that is spoken, and nothing
// need be.
func TestALPN(t *testing.T) {
	ca := newCA(t, "example.test")
	g := serve(t, table{}, tunnel.Limits{}, terminating(t, &Keys{Certificates: keysOf(issue(t, ca, "gw", "gw.test").TLS)}, false))
	for offer, want := range map[string]string{"": "", "h2": "h2", "http/1.1": "http/1.1", "imap http/1.1 h2": "h2"} {
		c := tunneltest.Dial(t, tlsDialer{roots(ca, "gw.test", strings.Fields(offer)...)}, g.Addr)
		if got := c.(*stream).ConnectionState().NegotiatedProtocol; got != want {
			t.Errorf("offered %q: got %q, want %q", offer, got, want)
		}
		_ = c.Close()
	}
	_, err := tlsDialer{roots(ca, "gw.test", "imap")}.DialContext(t.Context(), "tcp", g.Addr)
	if err == nil || !strings.Contains(err.Error(), "no application protocol") {
		t.Errorf("got %v, want the alert no_application_protocol", err)
	}
	g.Reason(t, tunnel.BadHello)
}

// What ALPN has chosen is what is spoken: bytes of another protocol are not
// taken for it.
func TestALPNIsKept(t *testing.T) {
	ca := newCA(t, "example.test")
	g := serve(t, table{}, tunnel.Limits{}, terminating(t, &Keys{Certificates: keysOf(issue(t, ca, "gw", "gw.test").TLS)}, false))
	const one, two = "CONNECT nobody.test:443 HTTP/1.1\r\nHost: nobody.test:443\r\n\r\n", "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00"
	isOne := func(answer string) bool { return strings.HasPrefix(answer, "HTTP/1.1 ") }
	isTwo := func(answer string) bool { return len(answer) > 3 && (answer[3] == 4 || answer[3] == 7) } // SETTINGS, or GOAWAY at once
	for _, c := range []struct {
		alpn, say string
		is        func(answer string) bool
	}{
		{"", one, isOne}, {"", two, isTwo},
		{"http/1.1", one, isOne}, {"h2", two, isTwo},
		{"http/1.1", two, isOne}, {"h2", one, isTwo},
	} {
		conn := tunneltest.Dial(t, tlsDialer{roots(ca, "gw.test", strings.Fields(c.alpn)...)}, g.Addr)
		if _, err := io.WriteString(conn, c.say); err != nil {
			t.Fatal(err)
		}
		_ = conn.SetReadDeadline(time.Now().Add(patience))
		b := make([]byte, 100)
		n, err := conn.Read(b)
		if !c.is(string(b[:n])) {
			t.Errorf("ALPN %q, and %.10q: %q, %v", c.alpn, c.say, b[:n], err)
		}
		_ = conn.Close()
	}
}

// TestNoKeys: a Protocol that was given none refuses, and passes on the rest.
func TestNoKeys(t *testing.T) {
	ca := newCA(t, "example.test")
	g := serve(t, table{}, tunnel.Limits{}, &Protocol{Hello: &sni.Protocol{Nameless: true}})
	_, err := tlsDialer{roots(ca, "gw.test")}.DialContext(t.Context(), "tcp", g.Addr)
	if err == nil || !strings.Contains(err.Error(), "internal error") {
		t.Errorf("got %v, want the alert internal_error", err)
	}
	g.Reason(t, tunnel.Internal)
}

func ExampleProtocol() {
	p := &Protocol{Hello: &sni.Protocol{}, Pass: true}
	fmt.Println(p.Use(Item{Keys: &Keys{}, Inner: []tunnel.Protocol{&connect.Protocol{}}}))
	// Output: termination: no certificate
}

// TestBehindAProxy: the source is whom the proxy in front names.
func TestBehindAProxy(t *testing.T) {
	ca := newCA(t, "example.test")
	g := tunneltest.Serve(t, tunneltest.Setup{
		Resolver:   table{"plain": testnet.Echo(t).Addr()},
		Protocols:  []tunnel.Protocol{terminating(t, &Keys{Certificates: keysOf(issue(t, ca, "gw", "gw.test").TLS)}, true)},
		ConnHeader: &proxyproto.ConnHeader{From: []netip.Prefix{netip.MustParsePrefix("127.0.0.0/8")}},
	})
	way := dialerFunc(func(ctx context.Context, network, addr string) (net.Conn, error) {
		c, err := new(net.Dialer).DialContext(ctx, network, addr)
		if err == nil {
			_, err = io.WriteString(c, "PROXY TCP4 192.0.2.7 192.0.2.1 1000 443\r\n")
		}
		return c, err
	})
	c := tunneltest.Dial(t, &connect.Dialer{Proxy: g.Addr, Dialer: tlsOver{way, roots(ca, "gw.test")}}, "plain:1")
	testnet.Ping(t, c, "hello")
	_ = c.Close()
	if o := g.Reason(t, tunnel.Done); o.Source.String() != "192.0.2.7:1000" {
		t.Errorf("the source is %v, want the one in the header", o.Source)
	}
}

type dialerFunc func(ctx context.Context, network, addr string) (net.Conn, error)

func (f dialerFunc) DialContext(ctx context.Context, network, addr string) (net.Conn, error) {
	return f(ctx, network, addr)
}

// TestHandshakesAreCounted: an unfinished handshake counts as memory of its client.
// One client that begins many is refused more when its share is used up, and another
// one is served.
func TestHandshakesAreCounted(t *testing.T) {
	const each = handshakeMemory
	budget := &tunnel.Budget{Limit: 1000, Backlogs: 2 * each} // of which twice as much may be held
	ca := newCA(t, "gw")
	srv := &tunnel.Server{Budget: budget, Handler: tunnel.HandlerFunc(func(_ context.Context, req *tunnel.Request) {
		req.Refuse(tunnel.Refusef(tunnel.NoRoute, "there is nothing here"))
	})}
	ln := testnet.Listen(t)
	served := make(chan error, 1)
	go func() {
		served <- srv.Serve(context.WithoutCancel(t.Context()), tunnel.Listener{Listener: ln, Name: "test", Protocols: []tunnel.Protocol{
			terminating(t, &Keys{Certificates: keysOf(issue(t, ca, "gw", "gw.test").TLS)}, true),
		}})
	}()
	t.Cleanup(func() { _ = srv.Close(); <-served })
	var conns []net.Conn
	begin := func() net.Conn {
		c := testnet.Connect(t, ln.Addr().String())
		conns = append(conns, c)
		if _, err := c.Write(helloFor(t, "gw.test")); err != nil {
			t.Fatal(err)
		}
		return c
	}
	const most = 4
	for i := range most {
		begin()
		testnet.Eventually(t, patience, func() bool { return budget.Buffered() == int64(i+1)*each }, "handshake %d is counted", i+1)
	}
	const alert = 21
	head := make([]byte, 1)
	last := begin()
	_ = last.SetReadDeadline(time.Now().Add(10 * time.Second))
	if _, err := io.ReadFull(last, head); err != nil || head[0] != alert {
		t.Errorf("one more: got %v, %v, want an alert", head, err)
	}
	other := tls.Dialer{NetDialer: &net.Dialer{LocalAddr: &net.TCPAddr{IP: net.IPv4(127, 0, 0, 9)}}, Config: roots(ca, "gw.test")}
	c, err := other.DialContext(t.Context(), "tcp", ln.Addr().String())
	if err != nil {
		t.Errorf("another client: %v", err)
	} else {
		_ = c.Close()
	}
	for _, c := range conns {
		_ = c.Close()
	}
	testnet.Eventually(t, patience, func() bool { return budget.Buffered() == 0 }, "nothing is counted any more")
}

// TestChainsAreCounted: a chain of certificates counts as memory of its client as it comes,
// and a client that has its share of memory may send no more of it.
func TestChainsAreCounted(t *testing.T) {
	const chain, limit = 100 << 10, 300 << 10
	budget := &tunnel.Budget{Limit: 1000, Backlogs: limit / 2} // of which twice as much may be held
	ca := newCA(t, "example.test")
	outcomes := make(chan *tunnel.Outcome, 10)
	srv := &tunnel.Server{Budget: budget, Observe: func(o *tunnel.Outcome) { outcomes <- o }, Handler: tunnel.HandlerFunc(func(_ context.Context, req *tunnel.Request) {
		req.Refuse(tunnel.Refusef(tunnel.NoRoute, "there is nothing here"))
	})}
	ln := testnet.Listen(t)
	served := make(chan error, 1)
	go func() {
		served <- srv.Serve(context.WithoutCancel(t.Context()), tunnel.Listener{Listener: ln, Name: "test", Protocols: []tunnel.Protocol{
			terminating(t, &Keys{Certificates: keysOf(issue(t, ca, "gw", "gw.test").TLS), Trust: trusting(ca)}, true),
		}})
	}()
	t.Cleanup(func() { _ = srv.Close(); <-served })

	cfg := roots(ca, "gw.test")
	shown := issue(t, ca, "alice").TLS
	shown.Certificate = append(shown.Certificate, make([]byte, chain))
	cfg.Certificates = []tls.Certificate{shown}
	begin := func() net.Conn {
		raw := testnet.Connect(t, ln.Addr().String())
		c := tls.Client(&cutConn{raw, chain}, cfg) // it ends before the certificates do
		done := make(chan struct{})
		go func() {
			defer close(done)
			_ = c.HandshakeContext(t.Context())
			_, _ = io.Copy(io.Discard, raw) // until the server refuses
		}()
		t.Cleanup(func() { _ = raw.Close(); <-done })
		return raw
	}
	one := begin()
	const want = handshakeMemory + 2*(chain-handshakeBytes) - 64<<10 // the account is a little behind
	testnet.Eventually(t, patience, func() bool { return budget.Buffered() > want }, "one chain is counted")
	begin()
	select {
	case o := <-outcomes:
		if o.Reason != tunnel.Overload {
			t.Errorf("two chains: got %s, %v, want overload", o.Reason, o.Err)
		}
	case <-time.After(patience):
		t.Errorf("two chains are held at once: %d bytes, the limit is %d", budget.Buffered(), limit)
	}
	_ = one.Close()
	testnet.Eventually(t, patience, func() bool { return budget.Buffered() == 0 }, "nothing is counted any more")
}

// A cutConn sends so many bytes, and no more.
type cutConn struct {
	net.Conn
	left int
}

func (c *cutConn) Write(p []byte) (int, error) {
	n := min(len(p), c.left)
	c.left -= n
	if _, err := c.Conn.Write(p[:n]); err != nil {
		return 0, err
	}
	return len(p), nil
}
