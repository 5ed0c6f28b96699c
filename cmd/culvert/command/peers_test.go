package command

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"culvert.dev/internal/gateway"
	"culvert.dev/internal/testca"
	"culvert.dev/internal/testnet"
	"culvert.dev/registry/peer"
)

// A testSite is one of two that exchange catalogs: it has a CA of its own, and a service
// that asks for the client certificates of the other's.
type testSite struct {
	*running
	name    string
	ca      *testca.CA
	files   map[string]string
	service string // the address of the service
	stderr  string // of the last command
}

func newTestSite(t *testing.T, name string) *testSite {
	t.Helper()
	s := &testSite{name: name, ca: newTestCA(t, name+".example")}
	gw := s.issue(t, "gw/1", "gw."+name+".example")
	s.files = map[string]string{"gw.crt": string(gw.CertPEM), "gw.key": string(gw.KeyPEM), "own.pem": string(s.ca.CertPEM)}
	return s
}

func (s *testSite) issue(t *testing.T, path string, dns ...string) *testca.Pair {
	t.Helper()
	pair, err := s.ca.Issue(testca.Options{SPIFFEID: "spiffe://" + s.name + ".example/" + path, DNSNames: dns, IPs: []net.IP{net.IPv4(127, 0, 0, 1)}})
	if err != nil {
		t.Fatal(err)
	}
	return pair
}

// serve starts a service of the site, which tells clients of other who they are.
func (s *testSite) serve(t *testing.T, other *testSite, name string) {
	t.Helper()
	pair := s.issue(t, "orders", name)
	ln := tls.NewListener(testnet.Listen(t), &tls.Config{Certificates: []tls.Certificate{pair.TLS}, ClientAuth: tls.RequireAndVerifyClientCert, ClientCAs: other.ca.Pool()})
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			_ = c.SetDeadline(time.Now().Add(patience))
			if c.(*tls.Conn).Handshake() == nil {
				_, _ = fmt.Fprintf(c, "%s sees %s\n", name, c.(*tls.Conn).ConnectionState().PeerCertificates[0].URIs[0])
			}
			_ = c.Close()
		}
	}()
	t.Cleanup(func() { _ = ln.Close(); <-done })
	s.service = ln.Addr().String()
}

// config is the configuration of the site, whose peer is other. Services see the policies
// that are given.
func (s *testSite) config(other *testSite, more string) string {
	gateways := ""
	if other.running != nil {
		gateways = fmt.Sprintf("gateways: [{address: %q, transports: [{protocol: connect-h2, tls: true, key: gw, serverName: gw.%s.example}]}], state: peers, ", other.addrs[0], other.name)
	}
	return fmt.Sprintf(`cluster: %[1]s
listeners:
  - {address: "127.0.0.1:1", protocols: [sni], tls: {key: gw, names: ["gw.%[1]s.example"], trust: [%[2]s.example], protocols: [connect-h2]}}
identity:
  keys: {gw: {certificateFile: gw.crt, keyFile: gw.key}}
  trust: {%[1]s.example: {caFile: own.pem}, %[2]s.example: {caFile: other.pem}}
peers:
  - {name: %[2]s, %[3]sids: ["spiffe://%[2]s.example/gw/*"], zones: ["*.%[2]s.example"]}
admin: "127.0.0.1:2"
%[4]s`, s.name, other.name, gateways, more)
}

// start starts the gateway of the site.
func (s *testSite) start(t *testing.T, other *testSite, more string) {
	t.Helper()
	s.files["other.pem"], s.files["culvert.yaml"] = string(other.ca.CertPEM), s.config(other, more)
	s.running = startFile(t, s.files)
}

// call returns what a service says to a client of caller that asks for it at the gateway of s.
func (s *testSite) call(t *testing.T, caller, of *testSite, name string) (string, error) {
	t.Helper()
	client := caller.issue(t, "client")
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	d := tls.Dialer{Config: &tls.Config{ServerName: name, RootCAs: of.ca.Pool(), Certificates: []tls.Certificate{client.TLS}}}
	c, err := d.DialContext(ctx, "tcp", s.addrs[0])
	if err != nil {
		return "", err
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(patience))
	said, err := bufio.NewReader(c).ReadString('\n')
	if err == io.EOF {
		err = nil
	}
	return strings.TrimSpace(said), err
}

// Two sites exchange what policies offer, over one stream that one of them opens, and a
// client of one reaches a service of the other by name with TLS end to end.
func TestSitesExchangeCatalogs(t *testing.T) {
	east, west := newTestSite(t, "east"), newTestSite(t, "west")
	west.serve(t, east, "orders.west.example")
	services := func(more string) string {
		return fmt.Sprintf(`services:
  - {name: orders.west.example, ports: [443], endpoints: [%q]}
  - {name: hr.west.example, ports: [443], endpoints: [%[1]q]}
  - {name: bank.example, ports: [443], endpoints: [%[1]q]}
%s`, west.service, more)
	}
	const seen = `policies:
  - {name: east-sees, verb: catalog, tier: baseline, action: allow, targets: {services: [orders.west.example, bank.example]}, rules: [{sources: [{trustDomains: [east.example]}]}]}
`
	west.start(t, east, services(seen))
	east.start(t, west, `services: []
`)
	status := func(s *testSite) peer.Status { return s.Status().Peers[0] }
	testnet.Eventually(t, patience, func() bool { s := status(east); return s.Connected && s.Services == 1 }, "east has the catalog of west")
	if s := status(east); len(s.LeftOut) != 1 || !strings.Contains(s.LeftOut[0], `"bank.example" is outside of the zones`) || !s.Dialed {
		t.Errorf("status of west at east is %+v, want bank.example left out", s)
	}
	testnet.Eventually(t, patience, func() bool { s := status(west); return s.Connected && s.Offered == 2 }, "west has the empty catalog of east")

	want := "orders.west.example sees spiffe://east.example/client"
	got := ""
	testnet.Eventually(t, patience, func() bool {
		got, _ = east.call(t, east, west, "orders.west.example")
		return got != ""
	}, "the service is reached")
	if got != want {
		t.Errorf("the service says %q, want %q", got, want)
	}
	for _, name := range []string{"hr.west.example", "bank.example"} {
		if got, err := east.call(t, east, west, name); err == nil {
			t.Errorf("%s says %q, want a refusal: it is not offered, or not of a zone", name, got)
		}
	}

	// What is added there is reached here. The policy that goes takes names away.
	west.write(t, "culvert.yaml", west.config(&testSite{name: "east"}, services(strings.Replace(seen, "orders.west.example, bank", "orders.west.example, hr.west.example, bank", 1))))
	west.source.Reload()
	testnet.Eventually(t, patience, func() bool {
		_, err := east.call(t, east, west, "hr.west.example")
		return err != nil && strings.Contains(err.Error(), "hr.west.example")
	}, "hr.west.example is reached: its certificate is of another name")
	west.write(t, "culvert.yaml", west.config(&testSite{name: "east"}, services("")))
	west.source.Reload()
	testnet.Eventually(t, patience, func() bool { return status(east).Services == 0 }, "nothing is offered any more")
	testnet.Eventually(t, patience, func() bool { _, err := east.call(t, east, west, "orders.west.example"); return err != nil }, "a name that is not offered any more is refused")

	// A peer that is taken out of the configuration is forgotten.
	east.write(t, "culvert.yaml", strings.Replace(east.config(west, "services: []\n"), "peers:\n  - {name: west", "# - {name: west", 1))
	east.source.Reload()
	testnet.Eventually(t, patience, func() bool { return len(east.Status().Peers) == 0 }, "the peer is forgotten")
	testnet.Eventually(t, patience, func() bool { s := status(west); return !s.Connected && s.Streams == 0 }, "its stream has ended")
}

// The command lists peers, with what is left out of what they offer.
func TestPeersCommand(t *testing.T) {
	east, west := newTestSite(t, "east"), newTestSite(t, "west")
	west.start(t, east, `services: [{name: bank.example, ports: [443], endpoints: ["10.0.0.1:443"]}]
policies: [{name: east-sees, verb: catalog, action: allow, rules: [{sources: [{trustDomains: [east.example]}]}]}]
`)
	east.start(t, west, "services: []\n")
	run := func(args ...string) string {
		var out, errs bytes.Buffer
		if code := Main(t.Context(), append([]string{"peers", "--admin", east.AdminAddr().String()}, args...), &out, &errs); code != 0 {
			t.Fatalf("exit code %d: %s", code, &errs)
		}
		return out.String()
	}
	testnet.Eventually(t, patience, func() bool { s := east.Status().Peers[0]; return s.Connected && len(s.LeftOut) == 1 }, "east has the catalog of west")
	out := run()
	for _, want := range []string{"PEER", "west", "connected", "to connect-h2 " + west.addrs[0], `west: left out: service "bank.example": "bank.example" is outside of the zones of the peer; the zones are "*.west.example"`} {
		if !strings.Contains(out, want) {
			t.Errorf("the output does not have %q:\n%s", want, out)
		}
	}
	if out := run("-o", "json"); !strings.Contains(out, `"connected": true`) && !strings.Contains(out, `"connected":true`) {
		t.Errorf("as JSON: %s", out)
	}
	res, err := http.Get("http://" + east.AdminAddr().String() + "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	metrics, err := io.ReadAll(res.Body)
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{`culvert_peer_services_left_out{peer="west"} 1`, `culvert_peer_connected{peer="west"} 1`} {
		if !slices.Contains(strings.Split(string(metrics), "\n"), want) {
			t.Errorf("the metrics do not have %s", want)
		}
	}
}

// joiningSite is the configuration of a site that has peers by tokens alone. With more it
// has services and policies, and with a gateway others can join it.
func (s *testSite) joiningSite(gateway, more string) string {
	gateways := ""
	if gateway != "" {
		gateways = fmt.Sprintf("gateways: [{address: %q, transports: [connect-h2]}], ", gateway)
	}
	return fmt.Sprintf(`cluster: %[1]s
listeners:
  - {address: "127.0.0.1:1", protocols: [sni]}
  - {address: "127.0.0.1:4", tls: {key: gw, trust: [peers], clientCertificates: optional, protocols: [connect-h2]}}
identity:
  keys: {gw: {certificateFile: gw.crt, keyFile: gw.key}}
  trust: {%[1]s.example: {caFile: own.pem}}
site: {%[2]skey: gw, trust: %[1]s.example, state: site}
admin: "127.0.0.1:2"
adminControl: true
%[3]s`, s.name, gateways, more)
}

// command runs a command that asks the gateway of the site, with a text on standard input.
func (s *testSite) command(t *testing.T, stdin string, args ...string) (out string, code int) {
	t.Helper()
	var stdout, stderr bytes.Buffer
	root := New()
	root.SetArgs(append(args, "--admin", s.AdminAddr().String()))
	root.SetIn(strings.NewReader(stdin))
	root.SetOut(&stdout)
	root.SetErr(&stderr)
	err := root.ExecuteContext(t.Context())
	s.stderr = stderr.String()
	if err != nil {
		return stdout.String() + err.Error(), exitFailed
	}
	return stdout.String(), exitOK
}

// Two sites join by a token: a client of one reaches a service of the other by name, with
// the bundles that they have given to each other, until the peer is removed.
func TestSitesJoinByToken(t *testing.T) {
	east, west := newTestSite(t, "east"), newTestSite(t, "west")
	east.serve(t, west, "orders.east.example")
	services := fmt.Sprintf(`services:
  - {name: orders.east.example, ports: [443], endpoints: [%q]}
policies:
  - {name: west-sees, verb: catalog, action: allow, rules: [{sources: [{trustDomains: [west.example]}]}]}
`, east.service)
	// The address of the gateway is known once it is open.
	east.files["culvert.yaml"] = east.joiningSite("gw.east.example:443", services)
	east.running = startFile(t, east.files)
	east.write(t, "culvert.yaml", east.joiningSite(east.addrs[1], services))
	east.source.Reload()
	west.files["culvert.yaml"] = west.joiningSite("", "services: []\n")
	west.running = startFile(t, west.files)

	token := ""
	testnet.Eventually(t, patience, func() bool {
		out, code := east.command(t, "", "invite", "--zones", "*.west.example", "--ttl", "1h")
		token = out
		return code == exitOK && !strings.Contains(east.log.String(), token)
	}, "a token is made")
	if out, code := west.command(t, token[:len(token)/2], "join", "-"); code == exitOK || !strings.Contains(out, "damaged") {
		t.Errorf("by half a token: %q", out)
	}
	if out, code := west.command(t, "", "join", strings.TrimSpace(token)); code == exitOK || !strings.Contains(out, "never an argument") {
		t.Errorf("by a token as an argument: %q", out)
	}
	out := ""
	testnet.Eventually(t, patience, func() bool {
		var code int
		out, code = west.command(t, token, "join", "--zones", "*.east.example", "-")
		// The first token may have been made with the address before.
		if code != exitOK && strings.Contains(out, "can't be asked") {
			token, _ = east.command(t, "", "invite", "--zones", "*.west.example")
		}
		return code == exitOK
	}, "west joins")
	if out != "joined east\n" {
		t.Errorf("the output is %q", out)
	}
	if out, code := west.command(t, token, "join", "--zones", "*.east.example", "-"); code == exitOK || !strings.Contains(out, "has joined already") {
		t.Errorf("where the peer has joined already: %q", out)
	}
	for _, s := range []*testSite{east, west} {
		if secret := strings.TrimSpace(token); strings.Contains(s.log.String(), secret) {
			t.Errorf("the log of %s has the token", s.name)
		}
	}

	want, got := "orders.east.example sees spiffe://west.example/client", ""
	testnet.Eventually(t, patience, func() bool {
		got, _ = west.call(t, west, east, "orders.east.example")
		return got != ""
	}, "the service is reached")
	if got != want {
		t.Errorf("the service says %q, want %q", got, want)
	}
	testnet.Eventually(t, patience, func() bool { s := east.Status().Peers; return len(s) == 1 && s[0].Name == "west" && s[0].Streams == 1 }, "east knows west")

	if out, code := east.command(t, "", "peers", "remove", "west"); code != exitOK || out != "removed west\n" {
		t.Errorf("removing west: %q", out)
	}
	testnet.Eventually(t, patience, func() bool {
		_, err := west.call(t, west, east, "orders.east.example")
		return err != nil && len(east.Status().Peers) == 0
	}, "west is refused")
	if out, code := east.command(t, "", "peers", "remove", "west"); code == exitOK || !strings.Contains(out, `no peer "west" has joined`) {
		t.Errorf("removing west again: %q", out)
	}
	// West is not told, and its operator is told what to look for.
	testnet.Eventually(t, patience, func() bool {
		out, _ := west.command(t, "", "peers")
		return strings.Contains(out, "that gateway does not accept the certificate of this one: see whether this site is a peer there")
	}, "west says why there is no stream")
	if out, code := west.command(t, "", "peers", "remove", "east"); code != exitOK {
		t.Errorf("removing east: %q", out)
	}
	if out, code := west.command(t, token, "join", "--zones", "*.east.example", "-"); code == exitOK || !strings.Contains(out, "was used already") {
		t.Errorf("by a token that was used: %q", out)
	}
	token, _ = east.command(t, "", "invite")
	if out, code := west.command(t, token, "join", "-"); code != exitOK || !strings.Contains(west.stderr, "it may offer no names, because --zones was left out") {
		t.Errorf("without zones: %q, and beside it %q", out, west.stderr)
	}
}

// A gateway whose state of joined sites is damaged has no peers, and says why.
func TestDamagedStateOfSitesIsShown(t *testing.T) {
	east := newTestSite(t, "east")
	east.files["peers.json"] = ""
	east.files["culvert.yaml"] = strings.Replace(east.joiningSite("", "services: []\n"), "state: site", "state: .", 1)
	east.running = startFile(t, east.files)
	for _, what := range []string{"peers", "status"} {
		out, code := east.command(t, "", what)
		if code != exitOK || !strings.Contains(out, "no site can join, and those that have joined are not used: site.state: ") || !strings.Contains(out, "is damaged") {
			t.Errorf("culvert %s says %q", what, out)
		}
	}
}

// A trust bundle that is refused is shown beside the peer.
func TestBundleThatIsRefusedIsShown(t *testing.T) {
	const why = "its trust bundle is refused: it has no CA in common with the one that is trusted: join again"
	s := runningStatus{Status: gateway.Status{Peers: []peer.Status{{Name: "west", Connected: true, Bundle: why}}}}
	var b strings.Builder
	if err := printPeers(&b, &s); err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(b.String(), "west: "+why) {
		t.Errorf("culvert peers says:\n%s", &b)
	}
	b.Reset()
	if err := printStatus(&b, &s, nil); err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(b.String(), "peer:      west: "+why) {
		t.Errorf("culvert status says:\n%s", &b)
	}
}
