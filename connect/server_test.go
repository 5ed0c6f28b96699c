package connect

import (
	"context"
	"errors"
	"io"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	"culvert.dev/internal/testnet"
	"culvert.dev/tunnel"
)

// A staticRoute is a Resolver of one service.
type staticRoute struct {
	target string
	addr   string
}

func (r staticRoute) Resolve(_ context.Context, req *tunnel.Request) (tunnel.Route, error) {
	if req.Target() != r.target {
		return tunnel.Route{}, tunnel.Refusef(tunnel.NoRoute, "no service has the name and port %q", req.Target())
	}
	ep := tunnel.Endpoint{Addr: netip.MustParseAddrPort(r.addr), Named: true}
	return tunnel.Route{Service: "svc", Endpoints: []tunnel.Endpoint{ep}}, nil
}

// The protocol in its place: behind the server's detection and deadlines, in
// front of the router and the relay.
func TestBehindServer(t *testing.T) {
	outcomes := make(chan tunnel.Outcome, 10)
	observe := func(o *tunnel.Outcome) { outcomes <- *o }
	closed := listen(t)
	_ = closed.Close()
	relay := &tunnel.Relay{}
	t.Cleanup(func() {
		if err := relay.Close(); err != nil {
			t.Error(err)
		}
	})
	start := func(addr string) string {
		srv := &tunnel.Server{
			Handler: &tunnel.Router{Resolver: staticRoute{"svc.test:443", addr}, Dialer: &tunnel.NetDialer{}, Relay: relay, Observe: observe},
			Limits:  tunnel.Limits{Preamble: 200 * time.Millisecond},
			Observe: observe,
		}
		ln := listen(t)
		var wg sync.WaitGroup
		wg.Go(func() {
			other := &tunnel.Fixed{} // a second protocol, so that the first is asked
			if err := srv.Serve(context.WithoutCancel(t.Context()), tunnel.Listener{Listener: ln, Protocols: []tunnel.Protocol{&Protocol{}, other}}); !errors.Is(err, tunnel.ErrServerClosed) {
				t.Errorf("got %v from Serve", err)
			}
		})
		t.Cleanup(func() {
			if err := srv.Shutdown(t.Context()); err != nil && !errors.Is(err, context.Canceled) {
				t.Error(err)
			}
			wg.Wait()
		})
		return ln.Addr().String()
	}
	up, down := start(testnet.Greeting(t, "welcome ").Addr()), start(closed.Addr().String())
	rows := []struct {
		name, addr, in, want string
		reason               tunnel.Reason
		target               string
	}{
		{"a tunnel", up, "CONNECT svc.test:443 HTTP/1.0\r\n\r\nearly", established + "welcome early", tunnel.Done, "svc.test:443"},
		{"no route", up, "CONNECT svc.test:80 HTTP/1.0\r\n\r\nearly", hidden, tunnel.NoRoute, "svc.test:80"},
		{"refused dial", down, "CONNECT svc.test:443 HTTP/1.0\r\n\r\n",
			refusal("502 Bad Gateway", "connection_refused", tunnel.DialFailed, "no endpoint of the service took the connection"), tunnel.DialFailed, "svc.test:443"},
		{"slow head", up, "CONNECT svc.test:443 HTTP/1.0\r\n",
			refusal("408 Request Timeout", "http_request_error", tunnel.HelloTimeout, "the request was not complete in time"), tunnel.HelloTimeout, ""},
		{"bad head", up, "CONNECT svc.test HTTP/1.0\r\n\r\n",
			refusal("400 Bad Request", "http_request_error", tunnel.BadRequest, `authority "svc.test" has no port`), tunnel.BadRequest, ""},
	}
	for _, row := range rows {
		c := dial(t, row.addr)
		if _, err := io.WriteString(c, row.in); err != nil {
			t.Fatal(err)
		}
		if strings.HasSuffix(row.in, "early") {
			_ = c.CloseWrite()
		}
		if got, err := io.ReadAll(c); string(got) != row.want || err != nil {
			t.Errorf("%s: got answer %q, %v, want %q", row.name, got, err, row.want)
		}
		_ = c.Close()
		select {
		case o := <-outcomes:
			if o.Reason != row.reason || o.Proto != "connect" || o.Target != row.target {
				t.Errorf("%s: got outcome %+v, want reason %q, target %q", row.name, o, row.reason, row.target)
			}
		case <-time.After(patience):
			t.Errorf("%s: no outcome", row.name)
		}
	}
}
