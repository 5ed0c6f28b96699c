//go:build linux && netns

package networks

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"culvert.dev/internal/testnet"
	"culvert.dev/internal/testnet/netns"
	"culvert.dev/nat"
)

// moved is how long a gateway may take to find that its outside address is another one, and to
// have it known at other sites.
const moved = 2 * time.Minute

// A homeSite is a site behind a router, and another one in the internet that it joins. A
// client is in a third network.
type homeSite struct {
	home, cloud *joinedSite
	hub, router *netns.NS
	client      *netns.NS
	wan         string // the router's outer interface
}

// newHomeSite makes the networks. The internet is 11.0.0.0/8, as miniupnpd maps nothing behind
// an address that is reserved for documentation.
func newHomeSite(t *testing.T) *homeSite {
	t.Helper()
	shared := &site{t: t, dir: t.TempDir()}
	h := &homeSite{hub: netns.New(t, "hub"), router: netns.New(t, "router"), client: netns.New(t, "client")}
	h.home = newJoinedSite(shared, netns.New(t, "home"), "home", "192.168.1.10")
	h.cloud = newJoinedSite(shared, netns.New(t, "cloud"), "cloud", "11.0.1.1")
	netns.Link(t, h.home.ns, "192.168.1.10/24", h.router, "192.168.1.1/24")
	h.home.ns.Route(t, "default", "192.168.1.1")
	for i, ns := range []*netns.NS{h.router, h.cloud.ns, h.client} {
		dev, _ := netns.Link(t, ns, fmt.Sprintf("11.0.%d.1/24", i), h.hub, fmt.Sprintf("11.0.%d.254/24", i))
		ns.Route(t, "default", fmt.Sprintf("11.0.%d.254", i))
		if ns == h.router {
			h.wan = dev
		}
	}
	shared.must(h.hub.Command(t.Context(), "sysctl", "-q", "-w", "net.ipv4.ip_forward=1"))
	h.router.Masquerade(t, h.wan)
	h.cloud.listeners = "  - {address: \"11.0.1.1:8443\", protocols: [sni]}\n"
	all := []*joinedSite{h.home, h.cloud}
	for _, s := range all {
		s.serveAll(all)
	}
	return h
}

// startRouter runs miniupnpd, with more of its configuration.
func (h *homeSite) startRouter(more string) (stop func()) {
	h.home.t.Helper()
	return h.home.miniupnpd(h.router, h.wan, more)
}

// miniupnpd runs miniupnpd at a router, whose outer interface is wan.
func (s *site) miniupnpd(router *netns.NS, wan, more string) (stop func()) {
	s.t.Helper()
	config := filepath.Join(s.dir, "miniupnpd.conf")
	if err := os.WriteFile(config, []byte(fmt.Sprintf(`ext_ifname=%s
listening_ip=192.168.1.1/24
port=5000
system_uptime=no
secure_mode=yes
notify_interval=60
uuid=fcdaaa8b-f163-4dc1-be3f-f8f2a6a2ff3f
upnp_table_name=filter
upnp_nat_table_name=nat
upnp_forward_chain=miniupnpd
upnp_nat_chain=prerouting_miniupnpd
upnp_nat_postrouting_chain=postrouting_miniupnpd
%sallow 1-65535 192.168.1.0/24 1-65535
`, wan, more)), 0o600); err != nil {
		s.t.Fatal(err)
	}
	end := s.background("miniupnpd", router.Command(context.Background(), "miniupnpd", "-d", "-4", "-f", config, "-P", filepath.Join(s.dir, "miniupnpd.pid")))
	return func() { end(syscall.SIGTERM) }
}

// nat returns what culvert nat shows at the site.
func (s *joinedSite) nat() (out nat.Status) {
	s.t.Helper()
	b, _ := s.ns.Command(s.t.Context(), culvert, "nat", "-o", "json", "--admin", "unix:"+s.socket(s.name)).Output() // 1 while it is pending
	if err := json.Unmarshal(b, &out); err != nil {
		s.t.Fatalf("culvert nat: %v in %q", err, b)
	}
	return out
}

// has waits until the first mapping of the home site is as wanted: STATE EXTERNAL PROTOCOL.
func (h *homeSite) has(d time.Duration, want string) {
	h.home.t.Helper()
	var s nat.Status
	testnet.Eventually(h.home.t, d, func() bool {
		s = h.home.nat()
		return len(s.Mappings) > 0 && fmt.Sprintf("%s %s %s", s.Mappings[0].State, s.Mappings[0].External, s.Mappings[0].Protocol) == want
	}, "the mapping is %q; it is %+v", want, &s)
}

// reached waits until the client in the third network has TLS with its certificate, from end
// to end, with the service behind the router.
func (h *homeSite) reached(d time.Duration) {
	h.home.t.Helper()
	const want = "orders.home.example saw spiffe://cloud.example/client"
	var last struct{ answer string }
	testnet.Eventually(h.home.t, d, func() bool {
		got, _ := h.client.Command(h.home.t.Context(), "curl", "-sS", "-m", "5", "--cacert", h.home.file("ca.crt"), "--cert", h.cloud.file("client.crt"), "--key", h.cloud.file("client.key"),
			"--connect-to", "::11.0.1.1:8443", "https://orders.home.example/").CombinedOutput()
		last.answer = string(got)
		return last.answer == want
	}, "the service at home is reached from a third network; the last answer is %q", &last)
}

// join starts both gateways and has the home site join the other one.
func (h *homeSite) join(protocols string) {
	h.home.t.Helper()
	h.home.extra += "nat: {ports: [\"192.168.1.10:443\"], protocols: [" + protocols + "]}\n"
	h.cloud.start(sees("home", "orders.cloud.example"))
	h.home.start(sees("cloud", "orders.home.example"))
	h.home.join(h.cloud)
}

// A gateway behind a router publishes its outside address at another site once that one has
// connected back, by each protocol that a real router speaks, and moves when the address
// changes.
func TestGatewayBehindRouter(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ protocol, allowed, router string }{
		{"pcp", "pcp, nat-pmp", "enable_natpmp=yes\n"}, // miniupnpd does not tell by PCP that its address has changed
		{"nat-pmp", "nat-pmp", "enable_natpmp=yes\n"},
		{"upnp", "upnp", "enable_upnp=yes\n"},
	} {
		t.Run(c.protocol, func(t *testing.T) {
			h := newHomeSite(t)
			stop := h.startRouter(c.router)
			h.join(c.allowed)
			h.has(patience, "verified 11.0.0.1:443 "+c.protocol)
			h.reached(patience)

			h.home.must(h.router.Command(t.Context(), "ip", "addr", "del", "11.0.0.1/24", "dev", h.wan))
			h.home.must(h.router.Command(t.Context(), "ip", "addr", "add", "11.0.0.2/24", "dev", h.wan))
			h.home.must(h.router.Command(t.Context(), "ip", "route", "replace", "default", "via", "11.0.0.254"))
			began := time.Now()
			h.has(moved, "verified 11.0.0.2:443 "+c.protocol)
			h.reached(moved)
			t.Logf("moved after %v", time.Since(began).Round(time.Second))

			stop()
			h.router.Masquerade(t, h.wan)
			h.startRouter(c.router)
			h.reached(moved)
		})
	}
}
