//go:build unix

package interop

import (
	"crypto/tls"
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strings"
	"testing"
	"time"

	"culvert.dev/internal/testnet"
)

// A question is asked four ways, which must agree: as bytes on the wire, by
// "culvert probe", by "culvert explain" from the configuration and by "culvert
// explain" of the running gateway.
type question struct {
	name   string
	host   string
	port   string // "" for SNI
	at     int    // the listener, by its place
	reason string // "" for a tunnel
	wire   string // the reason on the wire, where explain can't know it: it does not dial
	probe  string // "closed" where the client is told nothing
}

// agree asks every way. from are the flags that the gateway was started with.
func agree(t *testing.T, g *gateway, from []string, q question) {
	t.Helper()
	target, mode, raw := q.host, "sni", hello(q.host)
	if q.port != "" {
		target, mode = q.host+":"+q.port, "connect"
		raw = []byte("CONNECT " + target + " HTTP/1.1\r\nHost: a\r\n\r\n")
	}
	wire := q.reason
	if q.wire != "" {
		wire = q.wire
	}

	// On the wire.
	c := dial(t, g.addrs[q.at])
	defer c.Close()
	must(t, c.SetDeadline(time.Now().Add(patience)))
	_, err := c.Write(raw)
	must(t, err)
	must(t, c.CloseWrite())
	_, _ = io.Copy(io.Discard, c)
	switch l := g.outcome(t, c.LocalAddr().String()); {
	case wire != "" && l.Reason != wire:
		t.Errorf("the wire: got reason %q (%s), want %q", l.Reason, l.Err, wire)
	case wire == "" && l.Msg != "tunnel":
		t.Errorf("the wire: got %q, reason %q (%s), want a tunnel", l.Msg, l.Reason, l.Err)
	}

	// Probe. Who the service is does not matter here.
	var report struct {
		Reached bool
		Refusal struct{ Reasons []string }
	}
	args := []string{"probe", target, "--via", g.addrs[q.at], "--mode", mode, "--insecure", "-o", "json"}
	out, errs, code := command(t, "culvert", args...)
	if err := json.Unmarshal([]byte(out), &report); err != nil {
		t.Fatalf("probe: %v in %q, %s", err, out, errs)
	}
	switch {
	case wire == "" && (!report.Reached || code != 0):
		t.Errorf("probe: exit code %d, %s", code, out)
	case wire != "" && (report.Reached || code != 1 || q.probe != "closed" && !slices.Contains(report.Refusal.Reasons, wire)):
		t.Errorf("probe: exit code %d, reasons %q, want %q among them", code, report.Refusal.Reasons, wire)
	}

	// Explain, from the configuration and from the gateway.
	ask := []string{"explain", target, "-o", "json", "--proto", mode}
	var status struct{ Listeners []struct{ Configured string } }
	must(t, g.ask("/status", &status))
	ask = append(ask, "--listener", status.Listeners[q.at].Configured)
	for how, args := range map[string][]string{
		"explain":         append(ask, from...),
		"explain --admin": append(ask, "--admin", g.admin),
	} {
		var x struct {
			Reason    string
			Endpoints []endpoint
		}
		out, errs, code := command(t, "culvert", args...)
		if err := json.Unmarshal([]byte(out), &x); err != nil {
			t.Fatalf("%s: %v in %q, %s", how, err, out, errs)
		}
		wantCode := 0
		if q.reason != "" {
			wantCode = 1
		}
		if x.Reason != q.reason || code != wantCode {
			t.Errorf("%s: got reason %q and exit code %d, want %q and %d: %s", how, x.Reason, code, q.reason, wantCode, out)
		}
		if q.reason == "" && !slices.ContainsFunc(x.Endpoints, func(ep endpoint) bool { return ep.Problem == "" }) {
			t.Errorf("%s: got %s, want an endpoint without a problem", how, out)
		}
	}
}

// An endpoint is one in the answer of explain.
type endpoint struct{ Address, Problem string }

// From a configuration file: listeners for all, for users, for one service.
func TestProbeAndExplainAgreeWithTheDataPath(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	open := w.service.ServerConfig()
	open.ClientAuth = tls.NoClientCert
	open.VerifyConnection = nil
	s := testnet.ServeTLS(t, open, nil)
	hash, _, _ := runCmd(t, withInput(t, "wonderland\n", "config", "password", "alice"))
	w.write(t, "users.txt", hash)
	addrs := make([]any, 5)
	for i := range addrs {
		addrs[i] = "127.0.0.1:" + freePort(t)
	}
	config := w.write(t, "culvert.yaml", fmt.Sprintf(`
networks:
  - {name: office, cidrs: [192.0.2.0/24]}
listeners:
  - address: %[1]s
  - address: %[2]s
    protocols: [sni, connect, connect-h2]
    auth: {usersFile: users.txt}
  - address: %[3]s
    service: svc.example.test:443
  - address: %[4]s
    protocols: [connect]
  - address: %[5]s
    protocols: [sni]
admin: 127.0.0.1:%[7]s
services:
  - {name: svc.example.test, ports: [443], endpoints: ["%[6]s"]}
  - {name: two.example.test, ports: [443, 8443], endpoints: ["%[6]s"]}
  - {name: "*.wild.example.test", endpoints: ["%[6]s"]}
  - {name: private.example.test, exposed: false, endpoints: ["%[6]s"]}
  - {name: office.example.test, exposedTo: [office], endpoints: ["%[6]s"]}
  - {name: down.example.test, endpoints: ["127.0.0.1:%[8]s"]}
`, append(addrs, s.Addr(), freePort(t), freePort(t))...))
	g := startGateway(t, "--config", config, "--log-format", "json")
	from := []string{"--config", config}
	for _, q := range []question{
		{name: "a service by SNI", host: svc},
		{name: "a service by CONNECT", host: svc, port: "443"},
		{name: "a service by another spelling", host: "SVC.Example.TEST.", port: "443"},
		{name: "a service under a wildcard", host: "a.b.wild.example.test"},
		{name: "the apex of a wildcard", host: "wild.example.test", reason: "no-route"},
		{name: "nobody by SNI", host: "nobody.example.org", reason: "no-route"},
		{name: "nobody by CONNECT", host: "nobody.example.org", port: "443", reason: "no-route"},
		{name: "a port the service does not have", host: svc, port: "444", reason: "no-route"},
		{name: "a service of two ports by SNI at another", host: "two.example.test", reason: "no-route"},
		{name: "a private service by SNI", host: "private.example.test", reason: "not-exposed"},
		{name: "a private service by CONNECT", host: "private.example.test", port: "443", reason: "not-exposed"},
		{name: "a service of another network", host: "office.example.test", reason: "not-exposed"},
		{name: "an address by SNI", host: "192.0.2.1", reason: "no-sni"},
		{name: "an odd address by CONNECT", host: "127.1", port: "443", reason: "bad-request"},
		{name: "loopback by CONNECT", host: "127.0.0.1", port: "443", reason: "prohibited"},
		{name: "metadata by CONNECT", host: "169.254.169.254", port: "80", reason: "prohibited"},
		{name: "an address nobody has", host: "192.0.2.1", port: "443", reason: "no-route"},
		{name: "a service that is down, by SNI", host: "down.example.test", wire: "dial-failed"},
		{name: "a service that is down, by CONNECT", host: "down.example.test", port: "443", wire: "dial-failed"},
		{name: "without credentials", host: svc, port: "443", at: 1, reason: "no-auth"},
		{name: "without credentials, for nobody", host: "nobody.example.org", port: "443", at: 1, reason: "no-auth"},
		{name: "by SNI, which needs none", host: svc, at: 1},
		{name: "the port of a service", host: "whatever.example.test", at: 2},
		{name: "the port of a service, by CONNECT", host: svc, port: "443", at: 3},
		{name: "SNI at a listener for CONNECT", host: svc, at: 3, reason: "bad-request", probe: "closed"},
		{name: "CONNECT at a listener for SNI", host: svc, port: "443", at: 4, reason: "bad-preamble", probe: "closed"},
	} {
		t.Run(q.name, func(t *testing.T) { agree(t, g, from, q) })
	}
}

// From flags: what the file's checks would not let through.
func TestProbeAndExplainAgreeAboutTheGatewayItself(t *testing.T) {
	listen, admin := "127.0.0.1:"+freePort(t), "127.0.0.1:"+freePort(t)
	from := []string{"--listen", listen, "--admin", admin, "--route", "loop.example.test=" + listen, "--route", "admin.example.test=" + admin,
		"--route", "local.example.test=" + strings.Replace(listen, "127.0.0.1", "localhost", 1)}
	g := startGateway(t, from...)
	for _, q := range []question{
		{name: "a loop by SNI", host: "loop.example.test", reason: "loop"},
		{name: "a loop by CONNECT", host: "loop.example.test", port: "443", reason: "loop"},
		{name: "a loop by a name of this host", host: "local.example.test", port: "443", wire: "loop"},
		{name: "the admin port by SNI", host: "admin.example.test", reason: "prohibited"},
		{name: "the admin port by CONNECT", host: "admin.example.test", port: "443", reason: "prohibited"},
	} {
		t.Run(q.name, func(t *testing.T) { agree(t, g, from, q) })
	}
}

// Explain as a user sees what the user's credentials open.
func TestExplainAsAUser(t *testing.T) {
	w := newWorld(t)
	hash, _, _ := runCmd(t, withInput(t, "wonderland\n", "config", "password", "alice"))
	w.write(t, "users.txt", hash)
	config := w.write(t, "culvert.yaml", `
listeners:
  - address: 127.0.0.1:8443
    protocols: [sni, connect, connect-h2]
    auth: {usersFile: users.txt}
services:
  - {name: svc.example.test, endpoints: ["127.0.0.1:1"]}
`)
	for _, c := range []struct {
		as   []string
		want string
		code int
	}{
		{nil, "refused: no-auth", 1},
		{[]string{"--as", "alice"}, "route:   svc.example.test", 0},
	} {
		out, errs, code := command(t, "culvert", append([]string{"explain", svc + ":443", "--config", config}, c.as...)...)
		if !strings.Contains(out, c.want) || code != c.code {
			t.Errorf("explain %q: exit code %d, got %s%s, want %q and %d", c.as, code, out, errs, c.want, c.code)
		}
	}
}
