//go:build linux && netns

package networks

import (
	"context"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/miekg/dns"

	"culvert.dev/internal/testca"
	"culvert.dev/internal/testnet"
	"culvert.dev/internal/testnet/netns"
)

// A busHost is a host with a system bus of its own and systemd-resolved, whose network has a
// DNS server.
type busHost struct {
	*netns.NS
	t       *testing.T
	dir     string
	dev     string
	bus     string
	ca      *testca.CA
	network *upstream
}

const busConfig = `<!DOCTYPE busconfig PUBLIC "-//freedesktop//DTD D-Bus Bus Configuration 1.0//EN" "http://www.freedesktop.org/standards/dbus/1.0/busconfig.dtd">
<busconfig>
  <type>system</type>
  <listen>unix:path=BUS</listen>
  <auth>EXTERNAL</auth>
  <policy context="default"><allow user="*"/><allow own="*"/><allow send_destination="*"/><allow receive_sender="*"/></policy>
</busconfig>
`

func newBusHost(t *testing.T) *busHost {
	t.Helper()
	dir, err := os.MkdirTemp("", "culvert-bus-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	if err := os.Chmod(dir, 0o755); err != nil { // systemd-resolved has a user of its own
		t.Fatal(err)
	}
	h := &busHost{NS: netns.New(t, "host"), t: t, dir: dir, bus: filepath.Join(dir, "bus")}
	isp := netns.New(t, "isp")
	h.dev, _ = netns.Link(t, h.NS, "192.0.2.1/24", isp, "192.0.2.53/24")
	h.Route(t, "default", "192.0.2.53")
	h.network = &upstream{rcode: dns.RcodeNameError, addrs: map[string]string{"www.other.test.": "192.0.2.80"}}
	h.network.serve(t, isp, "192.0.2.53:53")
	h.write("bus.conf", strings.ReplaceAll(busConfig, "BUS", h.bus))
	h.write("resolved.conf", "[Resolve]\nDNS=192.0.2.53\nCache=no\n")
	// It has to know the user of systemd-resolved.
	for kind, line := range map[string]string{"passwd": "systemd-resolve:x:64999:64999::/:/usr/sbin/nologin\n", "group": "systemd-resolve:x:64999:\n"} {
		text, err := os.ReadFile("/etc/" + kind)
		if err != nil {
			t.Fatal(err)
		}
		if !strings.Contains("\n"+string(text), "\nsystemd-resolve:") {
			text = append(text, line...)
		}
		h.write(kind, string(text))
	}
	const script = `mount --bind passwd /etc/passwd && mount --bind group /etc/group && exec dbus-daemon --nofork --nopidfile --config-file=bus.conf`
	daemon := exec.Command("unshare", "-m", "sh", "-c", script)
	daemon.Dir = dir
	background(t, daemon)
	testnet.Eventually(t, patience, func() bool { _, err := os.Stat(h.bus); return err == nil }, "there is a bus")
	if h.ca, err = testca.New("example.test", nil); err != nil {
		t.Fatal(err)
	}
	pair, err := h.ca.Issue(testca.Options{SPIFFEID: "spiffe://example.test/me", Usage: testca.ClientOnly})
	if err != nil {
		t.Fatal(err)
	}
	if err := pair.Save(dir, "me"); err != nil {
		t.Fatal(err)
	}
	return h
}

func (h *busHost) write(name, text string) string {
	h.t.Helper()
	path := filepath.Join(h.dir, name)
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		h.t.Fatal(err)
	}
	return path
}

// withBus returns a command in the host that finds the bus.
func (h *busHost) withBus(ctx context.Context, name string, args ...string) *exec.Cmd {
	cmd := h.Command(ctx, name, args...)
	cmd.Env = append(os.Environ(), "DBUS_SYSTEM_BUS_ADDRESS=unix:path="+h.bus)
	return cmd
}

// startResolved runs systemd-resolved until the end of the test, or stop.
func (h *busHost) startResolved() (stop func()) {
	h.t.Helper()
	bin, err := filepath.Abs("../../bin/resolved/systemd-resolved")
	if err == nil {
		_, err = os.Stat(bin)
	}
	if err != nil {
		h.t.Fatalf("%v: run make peers", err)
	}
	stop = background(h.t, h.withBus(context.Background(), "unshare", "-m", "sh", "-c", resolved, "sh", filepath.Join(h.dir, "resolved.conf"), "192.0.2.53", h.dev, bin))
	testnet.Eventually(h.t, patience, func() bool { return strings.Contains(h.dig("www.other.test"), "192.0.2.80") }, "systemd-resolved answers")
	return stop
}

// dig asks systemd-resolved.
func (h *busHost) dig(question ...string) string {
	out, _ := h.Command(h.t.Context(), "dig", append([]string{"@127.0.0.53", "+tries=1", "+time=20"}, question...)...).CombinedOutput()
	return string(out)
}

// property returns one of systemd-resolved's.
func (h *busHost) property(name string) string {
	h.t.Helper()
	out, err := h.withBus(h.t.Context(), "busctl", "get-property", "org.freedesktop.resolve1", "/org/freedesktop/resolve1", "org.freedesktop.resolve1.Manager", name).CombinedOutput()
	if err != nil {
		h.t.Errorf("busctl: %v: %s", err, out)
	}
	return string(out)
}

const resolvedAgent = `agent:
  gateway: 192.0.2.7:443
  certificateFile: me.crt
  keyFile: me.key
  names: ["*.shop.test"]
  forwards: {"127.0.7.1:15432": "db.shop.test:15432"}
  dns: {listen: ["udp://127.0.0.1:5354", "tcp://127.0.0.1:5354"], install: systemd-resolved}
`

// systemd-resolved asks an agent for its names and for no others, also after a restart, and has
// nothing of it any more when the agent is killed.
func TestAgentInResolved(t *testing.T) {
	t.Parallel()
	h := newBusHost(t)
	stopResolved := h.startResolved()
	before := map[string]string{"DNS": h.property("DNS"), "Domains": h.property("Domains")}
	file := h.write("agent.yaml", resolvedAgent)

	agent := h.withBus(context.Background(), culvert, "agent", "--config", file)
	stop := background(t, agent)
	answers := func(name, want string) {
		t.Helper()
		testnet.Eventually(t, patience, func() bool { return strings.Contains(h.dig(name), want) }, "systemd-resolved says %s of %s", want, name)
	}
	testnet.Eventually(t, patience, func() bool { return strings.Contains(h.property("Domains"), "shop.test") }, "the agent has told systemd-resolved")
	answers("db.shop.test", "127.0.7.1")
	answers("nobody.shop.test", "status: NXDOMAIN")
	answers("www.other.test", "192.0.2.80")
	if h.network.wasAsked("shop.test.") {
		t.Error("the network's server was asked for names of the agent")
	}
	s := &site{t: t, dir: h.dir, resolver: map[*netns.NS]string{h.NS: "127.0.0.53"}}
	if out, err := s.resolving(h.NS, "options edns0 trust-ad\nsearch corp.test\n", "getent", "ahostsv4", "db.shop.test"); err != nil || !strings.Contains(out, "127.0.7.1") {
		t.Errorf("getent: %q, %v", out, err)
	}
	if out, err := s.resolving(h.NS, "search shop.test\n", "getent", "ahostsv4", "db"); err != nil || !strings.Contains(out, "127.0.7.1") {
		t.Errorf("getent with a search list: %q, %v", out, err)
	}

	// Changes of the file, and a restart of systemd-resolved.
	h.write("new.yaml", strings.ReplaceAll(resolvedAgent, "shop.test", "store.test"))
	if err := os.Rename(filepath.Join(h.dir, "new.yaml"), file); err != nil {
		t.Fatal(err)
	}
	answers("db.store.test", "127.0.7.1")
	if h.dig("db.shop.test"); !h.network.wasAsked("shop.test.") {
		t.Error("the network's server was not asked for names that are the agent's no more")
	}
	stopResolved()
	h.startResolved()
	answers("db.store.test", "127.0.7.1")

	stop() // by SIGKILL
	testnet.Eventually(t, patience, func() bool { return h.property("Domains") == before["Domains"] && h.property("DNS") == before["DNS"] }, "systemd-resolved is as before: %q", before)
	if out, _ := h.Command(t.Context(), "ip", "-o", "link").CombinedOutput(); strings.Contains(string(out), "culvert") {
		t.Errorf("an interface is left:\n%s", out)
	}
	answers("www.other.test", "192.0.2.80")
	answers("db.store.test", "status: NXDOMAIN")
	if !h.network.wasAsked("store.test.") {
		t.Error("the network's server was not asked after the agent had ended")
	}
}

// Names of the catalog in the zones that the agent accepts are asked of the agent, for as long as
// the gateway offers them, and no others.
func TestAgentInResolvedHasTheCatalog(t *testing.T) {
	t.Parallel()
	h := newBusHost(t)
	h.startResolved()
	pair, err := h.ca.Issue(testca.Options{SPIFFEID: "spiffe://example.test/gw", IPs: []net.IP{{127, 0, 9, 1}}})
	if err != nil {
		t.Fatal(err)
	}
	if err := pair.Save(h.dir, "gw"); err != nil {
		t.Fatal(err)
	}
	h.write("ca.pem", string(h.ca.CertPEM))
	const gateway = `identity:
  trust: {example.test: {caFile: ca.pem}}
listeners:
  - {address: "127.0.9.1:443", tls: {certificateFile: gw.crt, keyFile: gw.key, trust: example.test}}
policies:
  - {name: all, verb: catalog, action: allow, rules: [{sources: [{spiffe: ["spiffe://example.test/me"]}]}]}
services:
  - {name: db.shop.test, ports: [15432], endpoints: ["127.0.9.2:1"]}
  - {name: mail.bank.test, ports: [15433], endpoints: ["127.0.9.2:1"]}
`
	file := h.write("gw.yaml", gateway)
	background(t, h.Command(context.Background(), culvert, "gateway", "--config", file))
	background(t, h.withBus(context.Background(), culvert, "agent", "--config", h.write("agent.yaml", `agent:
  gateway: 127.0.9.1:443
  certificateFile: me.crt
  keyFile: me.key
  caFile: ca.pem
  names: [one.else.test]
  catalog: {zones: ["*.shop.test"]}
  capture: {vips: true}
  dns: {listen: ["udp://127.0.0.1:5354", "tcp://127.0.0.1:5354"], install: systemd-resolved}
`)))
	testnet.Eventually(t, patience, func() bool { return strings.Contains(h.dig("db.shop.test"), "198.1") }, "systemd-resolved asks the agent for a name of the catalog")
	if domains := h.property("Domains"); !strings.Contains(domains, `"db.shop.test" true`) || !strings.Contains(domains, `"one.else.test" true`) || strings.Contains(domains, "bank") {
		t.Errorf("the domains are %s", domains)
	}
	if h.dig("mail.bank.test"); !h.network.wasAsked("bank.test.") {
		t.Error("the network's server was not asked for a name that the agent does not accept")
	}

	h.write("new.yaml", strings.Replace(gateway, "db.shop.test", "web.shop.test", 1))
	if err := os.Rename(filepath.Join(h.dir, "new.yaml"), file); err != nil {
		t.Fatal(err)
	}
	testnet.Eventually(t, patience, func() bool {
		domains := h.property("Domains")
		return strings.Contains(domains, `"web.shop.test"`) && !strings.Contains(domains, `"db.shop.test"`)
	}, "systemd-resolved is told of changes")
}

// Without rights the agent says what it needs, and does not start.
func TestAgentInResolvedWithoutRights(t *testing.T) {
	t.Parallel()
	h := newBusHost(t)
	file := h.write("agent.yaml", resolvedAgent)
	if err := os.Chmod(filepath.Join(h.dir, "me.key"), 0o644); err != nil {
		t.Fatal(err)
	}
	copied := filepath.Join(h.dir, "culvert")
	if out, err := exec.Command("cp", culvert, copied).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	out, err := h.withBus(t.Context(), "setpriv", "--reuid", "65534", "--clear-groups", copied, "agent", "--config", file).CombinedOutput()
	if err == nil || !strings.Contains(string(out), "it needs root, or CAP_NET_ADMIN") {
		t.Errorf("%v: %s", err, out)
	}
	out, err = h.withBus(t.Context(), culvert, "agent", "--config", file).CombinedOutput()
	if err == nil || !strings.Contains(string(out), "is systemd-resolved enabled?") {
		t.Errorf("without systemd-resolved: %v: %s", err, out)
	}
}

// A plainHost is a host without systemd-resolved, with an /etc of its own.
type plainHost struct {
	*busHost
	etc string
}

const plainResolvConf = "# by hand\nsearch corp.test\nnameserver 192.0.2.53\noptions ndots:5 timeout:1\n"

func newPlainHost(t *testing.T) *plainHost {
	t.Helper()
	h := &plainHost{busHost: newBusHost(t)}
	h.etc = filepath.Join(h.dir, "etc")
	if err := os.Mkdir(h.etc, 0o755); err != nil {
		t.Fatal(err)
	}
	for name, text := range map[string]string{"resolv.conf": plainResolvConf, "nsswitch.conf": "hosts: files dns\n", "hosts": "127.0.0.1 localhost\n", "passwd": "root:x:0:0::/:/bin/sh\n"} {
		if err := os.WriteFile(filepath.Join(h.etc, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return h
}

// command runs with the host's /etc.
func (h *plainHost) command(ctx context.Context, args ...string) *exec.Cmd {
	return h.Command(ctx, "unshare", append([]string{"-m", "sh", "-c", `mount --bind "$1" /etc && shift && exec "$@"`, "sh", h.etc}, args...)...)
}

func (h *plainHost) getent(name string) string {
	out, _ := h.command(h.t.Context(), "getent", "ahostsv4", name).CombinedOutput()
	return string(out)
}

func (h *plainHost) resolvConf() string {
	text, _ := os.ReadFile(filepath.Join(h.etc, "resolv.conf"))
	return string(text)
}

// The agent is the first resolver of a host without systemd-resolved, which asks the others for all
// other names, with what search lists make of them; and resolv.conf is as before when it is killed.
func TestAgentInResolvConf(t *testing.T) {
	t.Parallel()
	h := newPlainHost(t)
	text := strings.NewReplacer("udp://127.0.0.1:5354", "udp://127.0.0.54:53", "tcp://127.0.0.1:5354", "tcp://127.0.0.54:53", "systemd-resolved", "resolv.conf",
		"192.0.2.7:443", "gw.shop.test:443").Replace(resolvedAgent)
	h.network.knows("gw.shop.test.", "192.0.2.9")
	h.network.knows("printer.local.", "192.0.2.10")
	stop := background(t, h.command(context.Background(), culvert, "agent", "--config", h.write("agent.yaml", text)))
	testnet.Eventually(t, patience, func() bool {
		return strings.Contains(h.resolvConf(), "nameserver 127.0.0.54\nsearch corp.test\nnameserver 192.0.2.53\n")
	}, "the agent is first")
	for name, want := range map[string]string{"db.shop.test": "127.0.7.1", "www.other.test": "192.0.2.80", "gw.shop.test": "192.0.2.9", "printer.local": "192.0.2.10"} {
		testnet.Eventually(t, patience, func() bool { return strings.Contains(h.getent(name), want) }, "%s has %s: %s", name, want, h.getent(name))
	}
	if out := h.getent("nobody.shop.test"); out != "" {
		t.Errorf("nobody.shop.test: %q", out)
	}
	if !h.network.wasAsked("db.shop.test.corp.test.") {
		t.Error("the network's server was not asked for what the search list makes of the agent's name")
	}
	stop() // by SIGKILL
	testnet.Eventually(t, patience, func() bool { return h.resolvConf() == plainResolvConf }, "resolv.conf is as before")
	if left, _ := filepath.Glob(filepath.Join(h.etc, "resolv.conf.*")); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
}

// dnsmasq asks the agent for its names, as the page says.
func TestAgentBehindDnsmasq(t *testing.T) {
	t.Parallel()
	h := newPlainHost(t)
	page, err := os.ReadFile(filepath.Join("..", "..", "docs", "guides", "agent.md"))
	if err != nil {
		t.Fatal(err)
	}
	_, conf, ok := strings.Cut(string(page), "```dnsmasq\n")
	conf, _, ended := strings.Cut(conf, "```")
	if !ok || !ended {
		t.Fatal("the page has no configuration of dnsmasq")
	}
	conf = strings.ReplaceAll(conf, "shop.example", "shop.test")
	background(t, h.command(context.Background(), culvert, "agent", "--config", h.write("agent.yaml", strings.ReplaceAll(resolvedAgent, ", install: systemd-resolved", ""))))
	background(t, h.command(context.Background(), "dnsmasq", "--keep-in-foreground", "--user=root", "--pid-file=", "--listen-address=127.0.0.1", "--bind-interfaces",
		"--conf-file="+h.write("dnsmasq.conf", conf)))
	ask := func(name string) string {
		out, _ := h.Command(t.Context(), "dig", "@127.0.0.1", "+tries=1", "+time=20", name).CombinedOutput()
		return string(out)
	}
	for name, want := range map[string]string{"db.shop.test": "127.0.7.1", "nobody.shop.test": "NXDOMAIN", "www.other.test": "192.0.2.80"} {
		testnet.Eventually(t, patience, func() bool { return strings.Contains(ask(name), want) }, "dnsmasq says %s of %s", want, name)
	}
	if h.network.wasAsked("shop.test.") {
		t.Error("the network's server was asked for names of the agent")
	}
}
