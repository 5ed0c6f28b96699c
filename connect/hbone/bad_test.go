package hbone

import (
	"context"
	"fmt"
	"net/http"
	"strings"
	"testing"

	"culvert.dev/connect/h2"
	"culvert.dev/internal/testnet"
	"culvert.dev/tunnel"
	"culvert.dev/tunnel/tunneltest"
)

// TestBadRequests is the table of docs/internals/protocols/hbone.md: the stream ends and
// the connection goes on.
func TestBadRequests(t *testing.T) {
	m := newMesh(t)
	svc := testnet.Echo(t)
	routes := table{"svc.test:80": svc.Addr(), "down.test:80": "127.0.0.1:1", "secret.test:80": "private"}
	g := serve(t, m.server("gw"), resolverFunc(func(req *tunnel.Request) (tunnel.Route, error) {
		switch req.Host() {
		case "127.0.0.1":
			return tunnel.Route{}, tunnel.Refusef(tunnel.Prohibited, "%q is prohibited", req.Target())
		case "denied.test":
			return tunnel.Route{}, tunnel.Refusef(tunnel.Denied, "%q is denied", req.Target())
		case "empty.test":
			return tunnel.Route{}, tunnel.Refusef(tunnel.NoEndpoint, "%q has no endpoint", req.Target())
		case "slow.test":
			return tunnel.Route{}, tunnel.Refusef(tunnel.DialTimeout, "%q does not answer", req.Target())
		case "stopping.test":
			return tunnel.Route{}, tunnel.Refusef(tunnel.Drain, "stopping")
		case "full.test":
			return tunnel.Route{}, tunnel.Refusef(tunnel.Overload, "no room for %q", req.Target())
		}
		return routes.Resolve(t.Context(), req)
	}))
	d := m.newDialer(g.Addr, id("gw"))
	for _, tt := range []struct {
		authority string
		status    int
		reason    tunnel.Reason
	}{
		{"svc.test", 400, tunnel.BadRequest},
		{"svc.test:0", 400, tunnel.BadRequest},
		{"svc.test:80/path", 400, tunnel.BadRequest},
		{"user@svc.test:80", 400, tunnel.BadRequest},
		{"0x7f000001:80", 400, tunnel.BadRequest},
		{"127.0.0.1:80", 400, tunnel.Prohibited},
		{"192.0.2.1:80", 503, tunnel.NoRoute},
		{"other.test:80", 503, tunnel.NoRoute},
		{"down.test:80", 503, tunnel.DialFailed},
		{"empty.test:80", 503, tunnel.NoEndpoint},
		{"slow.test:80", 503, tunnel.DialTimeout},
		{"full.test:80", 503, tunnel.Overload},
		{"stopping.test:80", 503, tunnel.Drain},
		{"secret.test:80", 401, tunnel.NotExposed},
		{"denied.test:80", 401, tunnel.Denied},
	} {
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		s, _, err := d.inner().Open(ctx, &h2.Head{Authority: tt.authority})
		cancel()
		if err == nil {
			_ = s.Close()
		}
		tunneltest.WantReason(t, err, tt.reason)
		if err == nil || !strings.Contains(err.Error(), fmt.Sprintf("status %d", tt.status)) {
			t.Errorf("%s: got %v, want status %d", tt.authority, err, tt.status)
		}
		if o := g.Reason(t, tt.reason); o.Proto != "hbone" || o.Peer.ID != id("alice") {
			t.Errorf("%s: outcome of %q by %+v, want hbone by alice", tt.authority, o.Proto, o.Peer)
		}
	}
	if svc.Accepted() > 0 {
		t.Error("something was dialed")
	}
	if n := d.Conns(); n != 1 {
		t.Errorf("%d connections, want the one to have gone on", n)
	}

	cfg := m.client("alice")
	cfg.InsecureSkipVerify = true // the server has no name to verify
	web := &http.Client{Transport: &http.Transport{TLSClientConfig: cfg, ForceAttemptHTTP2: true}}
	defer web.CloseIdleConnections()
	resp, err := web.Get("https://" + g.Addr + "/")
	if err != nil {
		t.Fatal(err)
	}
	_ = resp.Body.Close()
	if resp.StatusCode != 405 || resp.ProtoMajor != 2 {
		t.Errorf("GET: status %d by %s, want 405 by HTTP/2", resp.StatusCode, resp.Proto)
	}
	g.Reason(t, tunnel.BadMethod)
}
