package gateway

import (
	"errors"
	"io"
	"net/netip"
	"testing"
	"time"

	"culvert.dev/internal/testnet"
	"culvert.dev/registry"
	"culvert.dev/tunnel"
)

// A gateway without a listener dials for its own process: by the table, with an Outcome, and on
// the list of tunnels, where it can be killed.
func TestDial(t *testing.T) {
	ended := make(chan tunnel.Outcome, 10)
	g := startDialing(t, Config{
		Observe: func(o *tunnel.Outcome) { ended <- *o },
	}, service(testnet.Echo(t).Addr()))
	c, err := g.Dial(t.Context(), "svc.test:443")
	if err != nil {
		t.Fatal(err)
	}
	_ = c.SetDeadline(time.Now().Add(patience))
	if _, err := io.WriteString(c, "hello"); err != nil {
		t.Fatal(err)
	}
	if err := c.CloseWrite(); err != nil {
		t.Fatal(err)
	}
	if got, err := io.ReadAll(c); string(got) != "hello" || err != nil {
		t.Errorf("got %q, %v", got, err)
	}
	if in, out := g.Carried(); in != 5 || out != 5 || g.relay.Open() != 1 {
		t.Errorf("while it is open, %d tunnels have carried %d and %d bytes; want 1, 5 and 5", g.relay.Open(), in, out)
	}
	_, _ = c.Close(), c.Close()
	if o := <-ended; o.Reason != tunnel.Done || o.BytesIn != 5 || o.BytesOut != 5 || o.Proto != "dial" || o.Service != "svc" && o.Service != "svc.test" {
		t.Errorf("outcome %+v", o)
	}

	for target, want := range map[string]tunnel.Reason{"other.test:443": tunnel.NoRoute, "svc.test:80": tunnel.NoRoute, "svc.test": tunnel.BadRequest} {
		if c, err := g.Dial(t.Context(), target); err == nil || tunnel.ReasonOf(err) != want {
			t.Errorf("%s: %v, %v; want %s", target, c, err, want)
		} else if want != tunnel.BadRequest {
			<-ended
		}
	}

	if c, err = g.Dial(t.Context(), "svc.test:443"); err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if n := g.relay.EndRecords(tunnel.Killed, func(tunnel.Record) bool { return true }); n != 1 {
		t.Errorf("%d tunnels were killed, want 1", n)
	}
	if _, err := c.Read(make([]byte, 1)); err == nil {
		t.Error("a tunnel that was killed can be read")
	}
	if o := <-ended; o.Reason != tunnel.Killed {
		t.Errorf("outcome %+v", o)
	}
}

// Where plaintext must not go, a stream that does not begin as TLS is refused before a byte of
// it leaves, and so is a service that speaks first.
func TestDialOfPlaintext(t *testing.T) {
	const hello = "\x16\x03\x01\x00\x40\x01 like a ClientHello"
	far := start(t, "far", service(testnet.Echo(t).Addr()))
	at := netip.MustParseAddrPort(far)
	first := start(t, "first", &registry.Service{
		Name: "far", Names: []tunnel.Pattern{{Suffix: tunnel.MustParseName("far.gw.test")}}, Exposed: true,
		Endpoints: []registry.Endpoint{{Addr: at.Addr(), Port: at.Port()}},
	})
	g := startDialing(t, Config{}, service("", byConnect(first), byConnect("far.gw.test:8080")))
	for what, ok := range map[string]bool{hello: true, "GET / HTTP/1.1\r\n\r\n": false} {
		c, err := g.Dial(t.Context(), "svc.test:443")
		if err != nil {
			t.Fatal(err)
		}
		_ = c.SetDeadline(time.Now().Add(patience))
		_, err = io.WriteString(c, what)
		got := make([]byte, len(what))
		if ok && err == nil {
			_, err = io.ReadFull(c, got)
		}
		if ok && (string(got) != what || err != nil) {
			t.Errorf("%q comes back as %q, %v", what, got, err)
		}
		var refused *tunnel.Error
		if !ok && (!errors.As(err, &refused) || refused.Reason != tunnel.Insecure) {
			t.Errorf("%q: %v; want insecure", what, err)
		}
		_ = c.Close()
	}
}

// startDialing runs a gateway of services that has no listener.
func startDialing(t *testing.T, cfg Config, services ...*registry.Service) *Gateway {
	t.Helper()
	serving := make(chan struct{})
	cfg.DialOnly, cfg.Serving = true, func() { close(serving) }
	cfg.Sources = []registry.Source{registry.Static{Name: "test", Snapshot: registry.Snapshot{Services: services}}}
	_, g := startGateway(t, cfg)
	<-serving
	return g
}
