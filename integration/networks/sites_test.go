//go:build linux && netns

package networks

import (
	"crypto/tls"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"culvert.dev/internal/testca"
	"culvert.dev/internal/testnet"
	"culvert.dev/internal/testnet/netns"
)

// rejoin is how long two sites may take to see each other again: until the heartbeats are
// missed, and until the next attempt.
const rejoin = 2 * time.Minute

// A joinedSite is one of several that know each other by tokens alone: it has a network, a
// CA and a gateway of its own.
type joinedSite struct {
	*site
	name, address string
	ns            *netns.NS
	ca            *testca.CA
	stop          func(os.Signal)

	listeners, extra string // more of the configuration
}

// newJoinedSites returns sites that reach each other's gateways and nothing else.
func newJoinedSites(t *testing.T, names ...string) (all []*joinedSite) {
	t.Helper()
	shared := &site{t: t, dir: t.TempDir()}
	hub := netns.New(t, "hub")
	for i, name := range names {
		s := newJoinedSite(shared, netns.New(t, name), name, fmt.Sprintf("192.0.%d.1", 2+i))
		netns.Link(t, s.ns, s.address+"/24", hub, fmt.Sprintf("192.0.%d.254/24", 2+i))
		s.ns.Route(t, "default", fmt.Sprintf("192.0.%d.254", 2+i))
		all = append(all, s)
	}
	shared.must(hub.Command(t.Context(), "sysctl", "-q", "-w", "net.ipv4.ip_forward=1"))
	for _, s := range all {
		s.serveAll(all)
	}
	return all
}

// newJoinedSite returns a site that has a CA, and a service at 10.0.0.1.
func newJoinedSite(shared *site, ns *netns.NS, name, address string) *joinedSite {
	t := shared.t
	t.Helper()
	s := &joinedSite{site: shared, name: name, address: address, ns: ns}
	shared.must(s.ns.Command(t.Context(), "ip", "addr", "add", "10.0.0.1/32", "dev", "lo"))
	var err error
	if s.ca, err = testca.New(name+".example", nil); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(s.file(""), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := s.ca.Save(s.file("")); err != nil {
		t.Fatal(err)
	}
	s.issue("gw", testca.Options{SPIFFEID: "spiffe://" + name + ".example/gw/1", DNSNames: []string{"gw." + name + ".example"}})
	s.issue("client", testca.Options{SPIFFEID: "spiffe://" + name + ".example/client", Usage: testca.ClientOnly})
	return s
}

func (s *joinedSite) file(name string) string { return filepath.Join(s.dir, s.name, name) }

func (s *joinedSite) issue(name string, o testca.Options) *testca.Pair {
	s.t.Helper()
	p, err := s.ca.Issue(o)
	if err != nil {
		s.t.Fatal(err)
	}
	if err := p.Save(s.file(""), name); err != nil {
		s.t.Fatal(err)
	}
	return p
}

// serveAll has a service of mutual TLS for clients of all sites, which says whom it sees. At
// /hold the answer does not end.
func (s *joinedSite) serveAll(all []*joinedSite) {
	s.t.Helper()
	pair := s.issue("service", testca.Options{SPIFFEID: "spiffe://" + s.name + ".example/service", DNSNames: []string{"*." + s.name + ".example"}})
	clients := s.ca.Pool()
	for _, other := range all {
		clients.AppendCertsFromPEM(other.ca.CertPEM)
	}
	ln, err := s.ns.Listen("tcp", "10.0.0.1:443")
	if err != nil {
		s.t.Fatal(err)
	}
	srv := &http.Server{
		ErrorLog: slog.NewLogLogger(slog.DiscardHandler, slog.LevelInfo), // checks that leave after the handshake
		Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			fmt.Fprintf(w, "%s saw %s", r.Host, r.TLS.PeerCertificates[0].URIs[0])
			if r.URL.Path == "/hold" {
				_ = http.NewResponseController(w).Flush()
				<-r.Context().Done()
			}
		}),
	}
	go func() {
		_ = srv.Serve(tls.NewListener(ln, &tls.Config{Certificates: []tls.Certificate{pair.TLS}, ClientAuth: tls.RequireAndVerifyClientCert, ClientCAs: clients}))
	}()
	s.t.Cleanup(func() { _ = srv.Close() })
}

// start starts the gateway of the site, or starts it again.
func (s *joinedSite) start(policies string) {
	s.t.Helper()
	services := ""
	for _, name := range []string{"orders", "shop", "hr"} {
		services += fmt.Sprintf("  - {name: %s.%s.example, ports: [443], endpoints: [\"10.0.0.1:443\"]}\n", name, s.name)
	}
	s.stop = s.run(s.ns, s.name, "gateway", fmt.Sprintf(`cluster: %[1]s
drain: {delay: 0s, timeout: 1s}
listeners:
  - {address: "127.0.0.1:443", protocols: [sni]}
  - {address: "%[2]s:443", tls: {key: gw, trust: [peers], clientCertificates: optional, protocols: [connect-h2]}}
%[9]sidentity:
  keys: {gw: {certificateFile: %[3]s, keyFile: %[4]s}}
  trust: {%[1]s.example: {caFile: %[5]s}}
site: {gateways: [{address: "%[2]s:443", transports: [connect-h2]}], key: gw, trust: %[1]s.example, state: %[6]s}
adminControl: true
services:
%[7]spolicies:
%[8]s%[10]s`, s.name, s.address, s.file("gw.crt"), s.file("gw.key"), s.file("ca.crt"), s.file("state"), services, policies, s.listeners, s.extra))
}

// sees is a policy that lets the gateways of one site see services.
func sees(other string, services ...string) string {
	return fmt.Sprintf("  - {name: %s-sees, verb: catalog, action: allow, targets: {services: [%s]}, rules: [{sources: [{trustDomains: [%[1]s.example]}]}]}\n",
		other, strings.Join(services, ", "))
}

// culvert runs a command that asks the gateway of the site.
func (s *joinedSite) culvert(stdin string, args ...string) string {
	s.t.Helper()
	cmd := s.ns.Command(s.t.Context(), culvert, append(args, "--admin", "unix:"+s.socket(s.name))...)
	cmd.Stdin = strings.NewReader(stdin)
	return s.must(cmd)
}

// join has the site join other by a token.
func (s *joinedSite) join(other *joinedSite) {
	s.t.Helper()
	token := other.culvert("", "invite", "--zones", "*."+s.name+".example")
	if got := s.culvert(token, "join", "--zones", "*."+other.name+".example", "-"); got != "joined "+other.name+"\n" {
		s.t.Fatalf("%s joins %s: %q", s.name, other.name, got)
	}
}

// ask returns what a client of the site is told by name at the site's own gateway.
func (s *joinedSite) ask(name string) (string, error) {
	of := strings.Split(name, ".")[1]
	out, err := s.ns.Command(s.t.Context(), "curl", "-sS", "-m", "20", "--cacert", filepath.Join(s.dir, of, "ca.crt"), "--cert", s.file("client.crt"), "--key", s.file("client.key"),
		"--connect-to", "::127.0.0.1:443", "https://"+name+"/").CombinedOutput()
	return string(out), err
}

// reaches waits until a client of the site has end-to-end TLS with the service of a name.
func (s *joinedSite) reaches(name string) {
	s.t.Helper()
	want, got := name+" saw spiffe://"+s.name+".example/client", ""
	testnet.Eventually(s.t, rejoin, func() bool { got, _ = s.ask(name); return got == want }, "%s is reached from %s; the last answer is %q", name, s.name, got)
}

// refuses checks that a name is none at the site.
func (s *joinedSite) refuses(names ...string) {
	s.t.Helper()
	for _, name := range names {
		if got, err := s.ask(name); err == nil || strings.Contains(got, " saw ") {
			s.t.Errorf("%s is reached from %s: %q", name, s.name, got)
		}
	}
}

// has reports whether the site has a name, reachable or not.
func (s *joinedSite) has(name string) bool {
	s.t.Helper()
	return strings.Contains(s.culvert("", "registry", "ls"), name)
}

// Three sites join by two tokens. Each sees what the others' policies let it see, and a
// client of each reaches services of another by name with TLS end to end: after a
// partition, and after a restart of each gateway. A peer that is removed is refused, and its
// tunnels end.
func TestThreeSitesByTwoTokens(t *testing.T) {
	t.Parallel()
	all := newJoinedSites(t, "east", "west", "north")
	east, west, north := all[0], all[1], all[2]
	policies := map[*joinedSite]string{
		east:  sees("west", "orders.east.example", "shop.east.example", "hr.north.example") + sees("north", "shop.east.example"),
		west:  sees("east", "orders.west.example") + sees("north", "orders.west.example"),
		north: sees("east", "hr.north.example"),
	}
	for _, s := range all {
		s.start(policies[s])
	}
	west.join(east)
	north.join(east)

	everything := func(t *testing.T) {
		t.Helper()
		for s, names := range map[*joinedSite][]string{
			east:  {"orders.west.example", "hr.north.example"},
			west:  {"orders.east.example", "shop.east.example"},
			north: {"shop.east.example"},
		} {
			for _, name := range names {
				s.reaches(name)
			}
		}
		east.refuses("shop.west.example", "hr.west.example", "orders.north.example", "shop.north.example")
		west.refuses("hr.east.example", "hr.north.example", "shop.north.example") // a policy offers the name of north, but there is no transit
		north.refuses("orders.east.example", "hr.east.example", "orders.west.example")
	}
	everything(t)

	t.Run("partition", func(t *testing.T) {
		west.ns.Drop(t, "ip saddr 192.0.0.0/16")
		testnet.Eventually(t, rejoin, func() bool { return strings.Contains(west.culvert("", "peers"), "lost") }, "west knows that east is gone")
		if !west.has("orders.east.example") || !east.has("orders.west.example") {
			t.Error("names are gone in the partition")
		}
		north.reaches("shop.east.example")
		west.ns.Undrop(t)
		everything(t)
	})
	t.Run("restart", func(t *testing.T) {
		for _, s := range all {
			s.stop(syscall.SIGTERM)
			for _, other := range all {
				if other == east && s != east && !east.has(map[string]string{"west": "orders.west.example", "north": "hr.north.example"}[s.name]) {
					t.Errorf("east has lost the names of %s, which has stopped", s.name)
				}
			}
			if s == east && (!west.has("orders.east.example") || !north.has("shop.east.example")) {
				t.Error("the names of east are gone while it is down")
			}
			s.start(policies[s])
			everything(t)
		}
	})
	t.Run("removed", func(t *testing.T) {
		held := west.ns.Command(t.Context(), "curl", "-sSN", "-m", "300", "--cacert", east.file("ca.crt"), "--cert", west.file("client.crt"), "--key", west.file("client.key"),
			"--connect-to", "::127.0.0.1:443", "https://orders.east.example/hold")
		out, err := held.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := held.Start(); err != nil {
			t.Fatal(err)
		}
		first := make([]byte, len("orders.east.example saw"))
		if _, err := io.ReadFull(out, first); err != nil {
			t.Fatalf("the tunnel has not begun: %v", err)
		}
		if got := east.culvert("", "peers", "remove", "west"); got != "removed west\n" {
			t.Fatalf("peers remove: %q", got)
		}
		began := time.Now()
		_, _ = io.Copy(io.Discard, out)
		if err := held.Wait(); err == nil || time.Since(began) > patience {
			t.Errorf("the tunnel of a removed peer ends after %v with %v", time.Since(began), err)
		}
		testnet.Eventually(t, patience, func() bool { return strings.Contains(east.logged(east.name), "revoked") }, "the log has the reason revoked")
		west.refuses("orders.east.example", "shop.east.example")
		if east.has("orders.west.example") {
			t.Error("east still has names of a peer that was removed")
		}
		north.reaches("shop.east.example")
	})
}
