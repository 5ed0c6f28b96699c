package gateway

import (
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"runtime"
	"strconv"
	"strings"
	"testing"
	"time"

	wire "github.com/miekg/dns"

	"culvert.dev/dns"
	"culvert.dev/internal/testnet"
	"culvert.dev/registry"
	"culvert.dev/tunnel"
)

// reconfigure gives the gateway other settings than it has.
func (r *running) reconfigure(change func(*Config)) {
	r.t.Helper()
	next := *r.settings.Load()
	change(&next)
	if err := r.Reconfigure(next); err != nil {
		r.t.Fatal(err)
	}
}

// Another range and another address of service ports follow a reload under a tunnel, and
// the state does not move.
func TestServicePortsAreReconfigured(t *testing.T) {
	s := newSite(t, 4)
	r := s.start(published("a.test", greeter(t, "a")), published("b.test", greeter(t, "b")))
	before := r.said()
	tunnel := r.greeted(r.address("a.test"), "a")
	ports := s.cfg
	ports.Range = registry.PortRange{First: s.cfg.Range.Last + 1, Last: s.cfg.Range.Last + 4}
	ports.State += ".other"
	r.reconfigure(func(c *Config) { c.ServicePorts = &ports })
	testnet.Eventually(t, soon, func() bool {
		for name, said := range r.said() {
			if said == before[name] || !strings.HasPrefix(said, PortOpen) {
				return false
			}
		}
		return r.Status().ServicePorts.Range == ports.Range.String()
	}, "both services have a port of the other range")
	r.greeted(r.address("a.test"), "a")
	r.still(tunnel)
	if _, err := os.Stat(ports.State); err == nil {
		t.Error("the state has moved")
	}
	if runtime.GOOS != "linux" {
		return // there is one loopback address
	}
	was := r.address("a.test")
	other := ports
	other.Address = ports.Address.Next()
	r.reconfigure(func(c *Config) { c.ServicePorts = &other })
	testnet.Eventually(t, soon, func() bool { return refused(was) }, "the earlier address is closed")
	testnet.Eventually(t, soon, func() bool { return r.address("a.test") != was }, "the other address is told")
	r.greeted(r.address("a.test"), "a")
	r.still(tunnel)
	if n := len(r.ports.open); n != 2 {
		t.Errorf("%d ports are open, want 2", n)
	}
}

// Other ranges of virtual IPs follow a reload; one that is not allowed changes nothing.
func TestVIPsAreReconfigured(t *testing.T) {
	s := newVIPSite(t, "240.0.0.0/8")
	r := s.start(withVIP("a.test", greeter(t, "a")))
	first := r.vips()["a.test"]
	vips := *r.settings.Load().VIPs
	vips.Ranges = []netip.Prefix{netip.MustParsePrefix("127.0.0.0/8")}
	next := *r.settings.Load()
	next.VIPs, next.Limits.MaxTunnels = &vips, 1
	if err := r.Reconfigure(next); err == nil || r.currentLimits.Load().MaxTunnels == 1 {
		t.Errorf("a range of others: got %v, and limits %+v", err, r.currentLimits.Load())
	}
	vips.Ranges = []netip.Prefix{netip.MustParsePrefix("241.0.0.0/8")}
	r.reconfigure(func(c *Config) { c.VIPs = &vips })
	testnet.Eventually(t, soon, func() bool {
		got := r.vips()["a.test"]
		return got != first && strings.HasPrefix(got, "241.")
	}, "the service has an address of the other range")
}

// DNS listeners that move to a port that is taken stay where they are, by UDP and by TCP,
// until it is free, with the new zones; and one that moves to all addresses of its port
// does not wait for itself.
func TestDNSListenersMove(t *testing.T) {
	t.Parallel()
	r := launch(t, Config{SourcesListen: true})
	old, to := freeEverywhere(t), freeEverywhere(t)
	listen := func(zone string, listeners ...DNSListener) {
		t.Helper()
		r.reconfigure(func(c *Config) { c.DNS = &DNS{Listeners: listeners, Server: &dns.Server{Zones: []string{zone}}} })
	}
	at := func(address string) []DNSListener {
		return []DNSListener{{Transport: dns.UDP, Address: address}, {Transport: dns.TCP, Address: address}}
	}
	answers := func(network, address, zone string) func() bool {
		return func() bool {
			c := &wire.Client{Net: network, Timeout: time.Second}
			res, _, err := c.Exchange(new(wire.Msg).SetQuestion("none."+zone+".", wire.TypeA), address)
			return err == nil && res.Rcode == wire.RcodeNameError
		}
	}
	listen("a.test", at(old)...)
	for _, network := range []string{"udp", "tcp"} {
		testnet.Eventually(t, soon, answers(network, old, "a.test"), "DNS is answered by %s", network)
	}
	taken, err := net.Listen("tcp", to)
	if err != nil {
		t.Fatal(err)
	}
	listen("b.test", at(to)...)
	for _, network := range []string{"udp", "tcp"} {
		testnet.Eventually(t, soon, answers(network, old, "b.test"), "the listener that stays answers by %s", network)
	}
	testnet.Eventually(t, soon, func() bool { return r.dns.problems() > 0 }, "the status has a problem")
	for _, l := range r.Status().DNS.Listeners {
		if l.Configured == "tcp://"+to && (l.Address != "" || !strings.Contains(l.Problem, "in use")) {
			t.Errorf("the listener that is taken: %+v", l)
		}
	}
	_ = taken.Close()
	for _, network := range []string{"udp", "tcp"} {
		testnet.Eventually(t, soon, answers(network, to, "b.test"), "the listener that was taken answers by %s", network)
	}
	testnet.Eventually(t, soon, func() bool { return refused(old) }, "the earlier listener is closed")
	_, port, _ := net.SplitHostPort(to)
	listen("c.test", at(":"+port)...)
	for _, network := range []string{"udp", "tcp"} {
		testnet.Eventually(t, soon, answers(network, to, "c.test"), "the listener at all addresses answers by %s", network)
	}
	testnet.Eventually(t, soon, func() bool { return r.dns.problems() == 0 }, "nothing is wrong")
	r.reconfigure(func(c *Config) { c.DNS = nil })
	testnet.Eventually(t, soon, func() bool { return refused(to) && r.Status().DNS == nil }, "DNS is gone")
}

// freeEverywhere returns loopback with a port that nobody has, by UDP and by TCP, at any
// address. The system gives none of those to clients.
func freeEverywhere(t *testing.T) string {
	t.Helper()
	for range 100 {
		port := strconv.Itoa(20000 + rand.IntN(10000))
		byTCP, err := net.Listen("tcp", ":"+port)
		if err != nil {
			continue
		}
		byUDP, err := net.ListenPacket("udp", ":"+port)
		_ = byTCP.Close()
		if err != nil {
			continue
		}
		_ = byUDP.Close()
		return "127.0.0.1:" + port
	}
	t.Fatal("no port is free")
	return ""
}

// A forwarder that has others in its place is closed after a while, and one that stays is not.
func TestForwardersAreRetired(t *testing.T) {
	t.Parallel()
	r := launch(t, Config{SourcesListen: true})
	one, two := &dns.Forwarder{}, &dns.Forwarder{}
	use := func(f *dns.Forwarder) {
		r.reconfigure(func(c *Config) { c.DNS = &DNS{Server: &dns.Server{Forward: f}} })
	}
	retired := func() int {
		r.dns.retiring.Lock()
		defer r.dns.retiring.Unlock()
		return len(r.dns.retired)
	}
	use(one)
	use(one)
	if n := retired(); n != 0 {
		t.Errorf("%d forwarders are retired, and none has changed", n)
	}
	use(two)
	if n := retired(); n != 1 {
		t.Errorf("%d forwarders are retired, want 1", n)
	}
	testnet.Eventually(t, soon, func() bool { return retired() == 0 }, "the first one is closed")
}

// Another limit on memory is taken up where the runtime's may move, and none is none.
func TestMemoryLimitIsReconfigured(t *testing.T) {
	limits := make(chan int64, 10)
	r := launch(t, Config{SourcesListen: true, Memory: 1 << 40, SetMemory: func(n int64) { limits <- n }})
	for _, limit := range []int64{1 << 41, -1, 1 << 40} {
		r.reconfigure(func(c *Config) { c.Memory = limit })
		testnet.Eventually(t, soon, func() bool {
			select {
			case got := <-limits:
				return got == limit
			default:
				return false
			}
		}, "the runtime is told %d", limit)
	}
	if p := r.router.Budget.Pressure(); p != tunnel.Calm {
		t.Errorf("memory is %v", p)
	}
}
