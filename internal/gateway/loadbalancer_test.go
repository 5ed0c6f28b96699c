package gateway

import (
	"context"
	"crypto/sha256"
	"io"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"testing"

	"culvert.dev/connect"
	"culvert.dev/connect/h2"
	"culvert.dev/connect/ws"
	"culvert.dev/internal/testnet"
	"culvert.dev/registry"
	"culvert.dev/tunnel"
)

// Behind a load balancer the client that it names is the one in the log, for the service's
// allowed addresses and for limits, by every carrier; streams of one shared connection have
// a client and a principal each. At any other listener the same field has no meaning, and from
// any other address nobody is served.
func TestLoadBalancerNamesClients(t *testing.T) {
	t.Parallel()
	const clientField, credentialsField = "X-Forwarded-For", "Culvert-Credentials"
	e := newEdge(t)
	svc := service(testnet.Echo(t).Addr())
	svc.Clients = registry.ClientFilter{Allow: []netip.Prefix{netip.MustParsePrefix("203.0.113.0/24")}}
	auth := func(s *registry.ListenerSettings) {
		s.Auth = &registry.Auth{Tokens: map[registry.TokenDigest]string{sha256.Sum256([]byte("of alice")): "alice", sha256.Sum256([]byte("of bob")): "bob"}}
	}
	behind := changed(changed(e.configured("connect", "connect-h2", "websocket"), auth), func(s *registry.ListenerSettings) {
		s.LoadBalancer = &registry.LoadBalancer{From: []netip.Prefix{netip.MustParsePrefix("127.0.0.1/32")}, ClientField: clientField, CredentialsField: credentialsField}
	})
	elsewhere := changed(behind, func(s *registry.ListenerSettings) {
		lb := *s.LoadBalancer
		lb.From = []netip.Prefix{netip.MustParsePrefix("192.0.2.0/24")}
		s.LoadBalancer = &lb
	})
	elsewhere.Port = e.port()
	elsewhere.Name = e.at(elsewhere.Port)
	open := changed(e.configured("connect"), auth)
	e.configure(svc, behind, elsewhere, open)

	type say struct{ client, token string }
	key := new(int)
	header := func(ctx context.Context, _ string) (connect.Fields, error) {
		s := ctx.Value(key).(say)
		return connect.Fields{{Name: clientField, Value: s.client}, {Name: credentialsField, Value: "Bearer " + s.token}}, nil
	}
	shared := &h2.Dialer{Proxy: behind.Name, Header: header}
	defer shared.Close()
	for _, carrier := range []struct {
		proto string
		d     tunnel.Dialer
	}{
		{"connect", &connect.Dialer{Proxy: behind.Name, Header: header}},
		{"connect-h2", shared},
		{"websocket", &ws.Dialer{URL: "ws://" + behind.Name + "/", Header: header}},
	} {
		dial := func(s say) (net.Conn, error) {
			return carrier.d.DialContext(context.WithValue(t.Context(), key, s), "tcp", "svc.test:443")
		}
		var opened []net.Conn
		for _, s := range []say{{"198.51.100.1, 203.0.113.7", "of alice"}, {"203.0.113.8:4711", "of bob"}} {
			c, err := dial(s)
			if err != nil {
				t.Fatalf("%s: %v", carrier.proto, err)
			}
			testnet.Ping(t, c, carrier.proto)
			opened = append(opened, c)
		}
		for _, c := range opened {
			_ = c.Close()
		}
		e.logs("proto="+carrier.proto+" ", "source=203.0.113.7:0", "peer=alice", "service=svc")
		e.logs("proto="+carrier.proto+" ", "source=203.0.113.8:4711", "peer=bob", "service=svc")
		for _, row := range []struct {
			say    say
			source string
			reason string
		}{
			{say{"203.0.113.7, 198.51.100.2", "of alice"}, "198.51.100.2:0", "denied"},
			{say{"203.0.113.9", "of nobody"}, "203.0.113.9:0", "no-auth"},
			{say{"someone", "of alice"}, "127.0.0.1:", "bad-request"},
		} {
			c, err := dial(row.say)
			if err == nil {
				_ = c.Close()
				t.Errorf("%s: %q was served, want %s", carrier.proto, row.say, row.reason)
				continue
			}
			e.logs("proto="+carrier.proto+" ", "source="+row.source, "reason="+row.reason)
		}
	}
	// Wrong guesses of one client don't end the connection of the others: a load balancer has
	// no reason to count them.
	balancer := &http.Transport{Protocols: new(http.Protocols)}
	balancer.Protocols.SetUnencryptedHTTP2(true)
	defer balancer.CloseIdleConnections()
	ask := func(client, token string, body io.Reader) *http.Response {
		t.Helper()
		req, err := http.NewRequestWithContext(t.Context(), http.MethodConnect, "http://"+behind.Name, body)
		if err != nil {
			t.Fatal(err)
		}
		req.Host = "svc.test:443"
		req.Header.Set(clientField, client)
		req.Header.Set(credentialsField, "Bearer "+token)
		resp, err := balancer.RoundTrip(req)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = resp.Body.Close() })
		return resp
	}
	body, into := io.Pipe()
	stays := ask("203.0.113.7", "of alice", body)
	for range 200 {
		if r := ask("203.0.113.66", "guess", nil); r.StatusCode != http.StatusProxyAuthRequired {
			t.Fatalf("a guess is answered %s", r.Status)
		}
	}
	go func() { _, _ = io.WriteString(into, "ping") }()
	if got := make([]byte, 4); stays.StatusCode != http.StatusOK {
		t.Errorf("a tunnel is answered %s", stays.Status)
	} else if _, err := io.ReadFull(stays.Body, got); err != nil || string(got) != "ping" {
		t.Errorf("a tunnel beside a client that guesses: got %q, %v", got, err)
	}
	_ = into.Close()

	if c, err := (&connect.Dialer{Proxy: elsewhere.Name, Header: header}).DialContext(context.WithValue(t.Context(), key, say{"203.0.113.7", "of alice"}), "tcp", "svc.test:443"); err == nil {
		_ = c.Close()
		t.Error("a client that is no load balancer was served")
	}
	e.logs("listener="+elsewhere.Name, "reason=denied", "this port is for proxies in front")
	d := &connect.Dialer{Proxy: open.Name, Authorization: "Bearer of alice", Header: header}
	if c, err := d.DialContext(context.WithValue(t.Context(), key, say{"203.0.113.7", "of bob"}), "tcp", "svc.test:443"); err == nil {
		_ = c.Close()
		t.Error("a listener without a load balancer has believed what a client wrote")
	}
	e.logs("listener="+open.Name, "source=127.0.0.1:", "peer=alice", "reason=denied")
	if log := e.log.String(); strings.Contains(log, "198.51.100.1") || strings.Contains(log, "of alice") {
		t.Error("the log has an address that a client wrote, or a token")
	}
}
