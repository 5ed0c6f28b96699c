//go:build linux && netns

package networks

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
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
		got, _ := h.client.Command(h.home.t.Context(), "curl", "-sS", "-m", "10", "--cacert", h.home.file("ca.crt"), "--cert", h.cloud.file("client.crt"), "--key", h.cloud.file("client.key"),
			"--connect-to", "::11.0.1.1:8443", "https://orders.home.example/").CombinedOutput()
		last.answer = string(got)
		return last.answer == want
	}, "the service at home is reached from a third network; the last answer is %q", &last)
}

// outageBound is for how long requests that begin may fail where the outside address moves, on
// a machine without other load: both sides of the reverse session find its path dead within 7 s,
// and the connector connects again within one.
const outageBound = 10 * time.Second

// A request is one of a client under load.
type request struct {
	began  time.Time
	took   time.Duration
	served bool
}

// A loadResult is what has become of requests. The outage is the longest time between the
// beginnings of a request that was served and of the last one after it that was not.
type loadResult struct {
	all, failed     int
	outage, slowest time.Duration
}

func resultOf(requests []request) (r loadResult) {
	slices.SortFunc(requests, func(a, b request) int { return a.began.Compare(b.began) })
	var served time.Time
	for i := range requests {
		one := &requests[i]
		if served.IsZero() || one.served {
			served = one.began
		}
		if r.all++; one.served {
			r.slowest = max(r.slowest, one.took)
			continue
		}
		r.failed++
		r.outage = max(r.outage, one.began.Sub(served))
	}
	return r
}

// Requests that fail make an outage, as long as none between them is served.
func TestOutageOfRequests(t *testing.T) {
	t.Parallel()
	var all []request
	for i, served := range []bool{false, false, true, true, false, true, false, false, false, true} {
		all = append(all, request{time.Unix(int64(i), 0), time.Duration(i), served})
	}
	if got, want := resultOf(all), (loadResult{10, 6, 3 * time.Second, 9}); got != want {
		t.Errorf("got %+v, want %+v", got, want)
	}
}

// load has the client ask for the service every 50 ms, until stop is called.
func (h *homeSite) load() (stop func() loadResult) {
	t := h.home.t
	t.Helper()
	roots := x509.NewCertPool()
	pem, err := os.ReadFile(h.home.file("ca.crt"))
	pair, err2 := tls.LoadX509KeyPair(h.cloud.file("client.crt"), h.cloud.file("client.key"))
	if err := errors.Join(err, err2); err != nil || !roots.AppendCertsFromPEM(pem) {
		t.Fatalf("the client's files: %v", err)
	}
	client := &http.Client{Timeout: 5 * time.Second, Transport: &http.Transport{
		DisableKeepAlives: true, TLSClientConfig: &tls.Config{RootCAs: roots, Certificates: []tls.Certificate{pair}},
		DialContext: func(ctx context.Context, _, _ string) (c net.Conn, err error) {
			err = h.client.Do(func() (err error) {
				c, err = new(net.Dialer).DialContext(ctx, "tcp", "11.0.1.1:8443")
				return err
			})
			return c, err
		},
	}}
	ask := func(ctx context.Context) error {
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, "https://orders.home.example/", nil)
		if err != nil {
			return err
		}
		resp, err := client.Do(req)
		if err != nil {
			return err
		}
		defer resp.Body.Close()
		b, err := io.ReadAll(resp.Body)
		if err == nil && string(b) != "orders.home.example saw spiffe://cloud.example/client" {
			err = fmt.Errorf("the answer is %q", b)
		}
		return err
	}
	var (
		mu       sync.Mutex
		requests []request
		running  sync.WaitGroup
	)
	ctx, cancel := context.WithCancel(t.Context())
	running.Go(func() {
		tick := time.NewTicker(50 * time.Millisecond)
		defer tick.Stop()
		for {
			select {
			case <-ctx.Done():
				return
			case <-tick.C:
			}
			began := time.Now()
			running.Go(func() {
				err := ask(context.WithoutCancel(ctx))
				mu.Lock()
				defer mu.Unlock()
				requests = append(requests, request{began, time.Since(began), err == nil})
			})
		}
	})
	end := sync.OnceFunc(func() {
		cancel()
		running.Wait()
	})
	t.Cleanup(end)
	return func() loadResult {
		end()
		return resultOf(requests)
	}
}

// join starts both gateways and has the home site join the other one.
func (h *homeSite) join(protocols string) {
	h.home.t.Helper()
	h.home.extra += "nat: {ports: [\"192.168.1.10:443\"], protocols: [" + protocols + "]}\n"
	h.home.extra += fmt.Sprintf("reverse: {to: [\"11.0.1.1:443\"], protocol: connect-h2, key: gw, caFile: %q, serverName: gw.cloud.example, expose: [{name: orders.home.example}]}\n", h.cloud.file("ca.crt"))
	h.cloud.start(sees("home", "orders.cloud.example") + `  - {name: home-registers, verb: register, action: allow, targets: {services: [orders.home.example]}, rules: [{sources: [{spiffe: ["spiffe://home.example/gw/*"]}]}]}
`)
	h.home.start(sees("cloud", "orders.home.example"))
	h.home.join(h.cloud)
}

// A gateway behind a router serves by its reverse session at first. It publishes its outside address
// at another site once that one has connected back, by each protocol that a real router speaks,
// and moves when the address changes; the reverse session serves meanwhile.
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
			h.reached(patience) // by the reverse session at first
			h.has(patience, "verified 11.0.0.1:443 "+c.protocol)
			h.reached(patience)

			stopLoad := h.load()
			began := time.Now()
			h.home.must(h.router.Command(t.Context(), "ip", "addr", "del", "11.0.0.1/24", "dev", h.wan))
			h.home.must(h.router.Command(t.Context(), "ip", "addr", "add", "11.0.0.2/24", "dev", h.wan))
			h.home.must(h.router.Command(t.Context(), "ip", "route", "replace", "default", "via", "11.0.0.254"))
			h.reached(moved) // by the reverse session meanwhile
			h.has(moved, "verified 11.0.0.2:443 "+c.protocol)
			h.reached(moved)
			t.Logf("moved after %v", time.Since(began).Round(time.Second))
			r := stopLoad()
			t.Logf("%d of %d requests failed, and for %v none was served that began meanwhile; the bound is %v, and the slowest took %v",
				r.failed, r.all, r.outage.Round(10*time.Millisecond), outageBound, r.slowest.Round(10*time.Millisecond))
			if r.all < 20 || r.outage > 6*outageBound {
				t.Errorf("of %d requests, none that began within %v was served; the bound is %v", r.all, r.outage, outageBound)
			}

			stop()
			h.router.Masquerade(t, h.wan)
			h.startRouter(c.router)
			h.reached(moved)
		})
	}
}

// answerAsProvider answers NAT-PMP and PCP at the router, as one whose outside address is of the
// provider's: miniupnpd maps nothing behind such. It grants all mappings, and forwards nothing.
func (h *homeSite) answerAsProvider(outside string) {
	h.home.t.Helper()
	var c net.PacketConn
	if err := h.router.Do(func() (err error) {
		c, err = net.ListenPacket("udp", "192.168.1.1:5351")
		return err
	}); err != nil {
		h.home.t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		b := make([]byte, 1100)
		for {
			n, from, err := c.ReadFrom(b)
			if err != nil {
				return
			}
			if answer := providersAnswer(b[:n], netip.MustParseAddr(outside)); answer != nil {
				_, _ = c.WriteTo(answer, from)
			}
		}
	}()
	h.home.t.Cleanup(func() {
		_ = c.Close()
		<-done
	})
}

// providersAnswer returns the answer to a request of PCP, RFC 6887 sections 7.2 and 11.1, or of
// NAT-PMP, RFC 6886 sections 3.2 and 3.3.
func providersAnswer(b []byte, outside netip.Addr) []byte {
	const epoch = 1000
	switch {
	case len(b) >= 24 && b[0] == 2:
		out := append([]byte{2, 0x80 | b[1], 0, 0}, b[4:8]...)
		out = append(binary.BigEndian.AppendUint32(out, epoch), make([]byte, 12)...)
		if len(b) < 60 {
			return out // ANNOUNCE
		}
		out = append(out, b[24:44]...)
		as16 := outside.As16()
		return append(out, as16[:]...)
	case len(b) >= 2 && b[0] == 0:
		out := binary.BigEndian.AppendUint32([]byte{0, 0x80 | b[1], 0, 0}, epoch)
		if b[1] == 0 {
			return append(out, outside.AsSlice()...)
		}
		if len(b) >= 12 {
			return append(append(append(out, b[4:6]...), b[4:6]...), b[8:12]...)
		}
	}
	return nil
}

// Behind the NAT of a provider, culvert nat and the log say so in plain words, the mapping that the
// router grants is not published, and the service is reached over the connections that the
// gateway itself has opened.
func TestGatewayBehindProvidersNAT(t *testing.T) {
	t.Parallel()
	for _, protocol := range []string{"pcp", "nat-pmp"} {
		t.Run(protocol, func(t *testing.T) {
			h := newHomeSite(t)
			h.answerAsProvider("100.64.7.7")
			h.join(protocol)
			h.has(patience, "mapped 100.64.7.7:443 "+protocol)
			h.reached(patience)
			s := h.home.nat()
			if s.Kind != nat.CGNAT || !strings.Contains(s.Explanation, "100.64.7.7 is an address behind the provider's NAT (CGNAT): no port of the router can be reached from outside") {
				t.Errorf("the NAT is %s: %s", s.Kind, s.Explanation)
			}
			out, _ := h.home.ns.Command(t.Context(), culvert, "nat", "--admin", "unix:"+h.home.socket("home")).Output()
			if !strings.Contains(string(out), "cgnat: 100.64.7.7 is an address behind the provider's NAT") {
				t.Errorf("culvert nat says %q", out)
			}
			if said := h.home.logged("home"); strings.Count(said, "another NAT is between the router and the internet") != 1 || !strings.Contains(said, "provider's NAT (CGNAT)") {
				t.Error("the log does not say once that the provider has a NAT")
			}
			// It is not even tried from outside, and the other site has not heard of it.
			if m := s.Mappings[0]; m.State != nat.Mapped || m.Error != "" {
				t.Errorf("the mapping is %s: %s", m.State, m.Error)
			}
			peers, err := h.cloud.ns.Command(t.Context(), culvert, "peers", "-o", "json", "--admin", "unix:"+h.cloud.socket("cloud")).CombinedOutput()
			if err != nil || strings.Contains(string(peers), "100.64.") || strings.Contains(h.cloud.logged("cloud"), "100.64.") {
				t.Errorf("the other site knows of the address: %s, %v", peers, err)
			}
		})
	}
}
