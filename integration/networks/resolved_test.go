//go:build linux && netns

package networks

import (
	"bytes"
	"context"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/miekg/dns"

	"culvert.dev/internal/testca"
	"culvert.dev/internal/testnet"
	"culvert.dev/internal/testnet/netns"
)

// resolved starts systemd-resolved as on a machine of its own: with the
// configuration file $1, and as if networkd had been told of a DNS server, $2, at
// the interface $3. $4 is the program. There is no D-Bus, which its stub at
// 127.0.0.53 does without.
const resolved = `set -eu
mount -t tmpfs tmpfs /run
mount -t tmpfs tmpfs /etc/systemd
mkdir -p /etc/systemd/resolved.conf.d /run/systemd/resolve /run/systemd/netif/links
cp "$1" /etc/systemd/resolved.conf.d/culvert.conf
chmod 644 /etc/systemd/resolved.conf.d/culvert.conf
printf 'ADMIN_STATE=configured\nOPER_STATE=routable\nDNS=%s\n' "$2" >/run/systemd/netif/links/"$(cat /sys/class/net/"$3"/ifindex)"
for kind in passwd group; do
	grep -q '^systemd-resolve:' /etc/$kind && continue
	cat /etc/$kind >/run/$kind
	case $kind in
	passwd) echo 'systemd-resolve:x:64999:64999::/:/usr/sbin/nologin' ;;
	group) echo 'systemd-resolve:x:64999:' ;;
	esac >>/run/$kind
	mount --bind /run/$kind /etc/$kind
done
chown systemd-resolve:systemd-resolve /run/systemd/resolve
SYSTEMD_LOG_LEVEL=debug SYSTEMD_LOG_TARGET=console exec "$4"
`

// An upstream is a DNS server that knows a few addresses, and who was asked for.
type upstream struct {
	rcode int // the answer for names that addrs lacks

	mu    sync.Mutex // guards what follows
	addrs map[string]string
	asked []string
}

// knows has the server answer for one name more.
func (u *upstream) knows(name, addr string) {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.addrs[name] = addr
}

func (u *upstream) ServeDNS(w dns.ResponseWriter, q *dns.Msg) {
	name := strings.ToLower(q.Question[0].Name)
	u.mu.Lock()
	u.asked = append(u.asked, name)
	addr := u.addrs[name]
	u.mu.Unlock()
	m := new(dns.Msg).SetReply(q)
	m.RecursionAvailable = true
	if addr == "" {
		m.Rcode = u.rcode
	} else if q.Question[0].Qtype == dns.TypeA {
		m.Answer = []dns.RR{&dns.A{Hdr: dns.RR_Header{Name: q.Question[0].Name, Rrtype: dns.TypeA, Class: dns.ClassINET, Ttl: 60}, A: net.ParseIP(addr)}}
	}
	_ = w.WriteMsg(m)
}

func (u *upstream) wasAsked(name string) bool {
	u.mu.Lock()
	defer u.mu.Unlock()
	return slices.ContainsFunc(u.asked, func(s string) bool { return s == name || strings.HasSuffix(s, "."+name) })
}

// serve answers in a network until the end of the test.
func (u *upstream) serve(t *testing.T, ns *netns.NS, addr string) {
	t.Helper()
	srv := &dns.Server{Handler: u}
	err := ns.Do(func() (err error) {
		srv.PacketConn, err = net.ListenPacket("udp", addr)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	ended := make(chan struct{})
	go func() { defer close(ended); _ = srv.ActivateAndServe() }()
	t.Cleanup(func() { _ = srv.PacketConn.Close(); <-ended })
}

// background runs a program until the end of the test, or stop.
func background(t *testing.T, cmd *exec.Cmd) (stop func()) {
	t.Helper()
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan struct{})
	go func() { _ = cmd.Wait(); close(ended) }()
	stop = sync.OnceFunc(func() {
		_ = cmd.Process.Kill()
		<-ended
		report(t, strings.Join(cmd.Args, " "), out.String())
	})
	t.Cleanup(stop)
	return stop
}

// What the page about DNS says for systemd-resolved works, on a machine whose
// network has a DNS server as others have: names of the mesh are ours and nobody
// else is asked, even while we are away; for other names that server is asked
// and we are, and the better answer is taken, be ours that we don't answer.
func TestResolvedOfTheDocs(t *testing.T) {
	t.Parallel()
	t.Run("recursion", func(t *testing.T) { testResolved(t, true) })
	t.Run("none", func(t *testing.T) { testResolved(t, false) })
}

// testResolved is it, with recursion as the page has it, or without.
func testResolved(t *testing.T, recursion bool) {
	page, err := os.ReadFile(filepath.Join("..", "..", "docs", "guides", "dns.md"))
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	write := func(name, language, begin string) string {
		t.Helper()
		blocks := regexp.MustCompile("(?ms)^```"+language+"\n("+regexp.QuoteMeta(begin)+".*?)^```").FindAllSubmatch(page, -1)
		if len(blocks) != 1 {
			t.Fatalf("the page has %d blocks of %s that begin with %q, want 1", len(blocks), language, begin)
		}
		text := blocks[0][1]
		if !recursion {
			text = regexp.MustCompile(`(?m)^  (recursion|upstreams|forward): *.*\n(    - \{zone: .*\n)?`).ReplaceAll(text, nil)
		}
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, text, 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	ours, theirs := write("culvert.yaml", "yaml", "network: west\n"), write("culvert.conf", "ini", "[Resolve]\n")
	ca, err := testca.New("example.test", nil)
	if err != nil {
		t.Fatal(err)
	}
	pair, err := ca.Issue(testca.Options{SPIFFEID: "spiffe://example.test/dns", DNSNames: []string{"dns.example.test"}, Usage: testca.ServerOnly})
	if err != nil {
		t.Fatal(err)
	}
	if err := pair.Save(dir, "dns"); err != nil {
		t.Fatal(err)
	}

	host, isp := netns.New(t, "host"), netns.New(t, "isp")
	dev, _ := netns.Link(t, host, "192.0.2.1/24", isp, "192.0.2.53/24")
	host.Route(t, "default", "192.0.2.53")
	network := &upstream{rcode: dns.RcodeNameError, addrs: map[string]string{"www.other.test.": "192.0.2.80"}}
	network.serve(t, isp, "192.0.2.53:53")
	corp := &upstream{rcode: dns.RcodeServerFailure, addrs: map[string]string{"www.corp.example.": "10.9.9.9"}} // whom ours asks
	corp.serve(t, host, "127.0.0.1:5354")

	dig := func(server string, question ...string) string {
		t.Helper()
		// It exits with 9 where nobody answers, which is in what it prints.
		out, _ := host.Command(t.Context(), "dig", append([]string{"@" + server, "+tries=1", "+time=20"}, question...)...).CombinedOutput()
		return string(out)
	}
	stop := background(t, host.Command(context.Background(), culvert, "dns", "--config", ours))
	const web, mapped = "web.shop.svc.west.mesh.internal", "10.1.0.7"
	testnet.Eventually(t, patience, func() bool { return strings.Contains(dig("127.0.0.1", "-p", "5353", web), mapped) }, "culvert answers")
	bin, err := filepath.Abs("../../bin/resolved/systemd-resolved")
	if err == nil {
		_, err = os.Stat(bin)
	}
	if err != nil {
		t.Fatalf("%v: run make peers", err)
	}
	background(t, host.Command(context.Background(), "unshare", "-m", "sh", "-c", resolved, "sh", theirs, "192.0.2.53", dev, bin))
	testnet.Eventually(t, patience, func() bool { return strings.Contains(dig("127.0.0.53", web), mapped) }, "systemd-resolved answers")

	// An address that a service has to itself, and its name.
	const cache = "cache.shop.svc.west.mesh.internal"
	var vip netip.Addr
	testnet.Eventually(t, patience, func() bool {
		vip, err = netip.ParseAddr(strings.TrimSpace(dig("127.0.0.1", "-p", "5353", "+short", cache)))
		return err == nil && netip.MustParsePrefix("240.9.0.0/16").Contains(vip)
	}, "%s has an address", cache)
	reverse, err := dns.ReverseAddr(vip.String())
	if err != nil {
		t.Fatal(err)
	}

	type question struct{ name, qtype, status, want string }
	questions := []question{
		{web, "A", "NOERROR", "10.1.0.8"},
		{web, "AAAA", "NOERROR", "ANSWER: 0"},
		{"db.shop.svc.east.mesh.internal", "A", "NOERROR", "198.51.100."}, // either of the two: neither is there, and one is found out first
		{"_https._tcp." + web, "SRV", "NOERROR", "443 " + web},
		{"nobody.shop.svc.west.mesh.internal", "A", "NXDOMAIN", ""},
		{"web.shop.svc.clusterset.local", "A", "NOERROR", mapped},
		{"dns-version.clusterset.local", "TXT", "NOERROR", `"1.0.0"`},
		{cache, "A", "NOERROR", vip.String()},
		{reverse, "PTR", "NOERROR", cache + "."},
		{"1.0.9.240.in-addr.arpa", "PTR", "NXDOMAIN", ""},
		{"www.other.test", "A", "NOERROR", "192.0.2.80"},
		{"nobody.other.test", "A", "NXDOMAIN", ""},
	}
	if recursion {
		questions = append(questions, question{"www.corp.example", "A", "NOERROR", "10.9.9.9"})
	}
	for _, q := range questions {
		if out := dig("127.0.0.53", q.name, q.qtype); !strings.Contains(out, "status: "+q.status) || !strings.Contains(out, q.want) {
			t.Errorf("%s %s: want %s and %q in\n%s", q.name, q.qtype, q.status, q.want, out)
		}
	}
	// As programs ask, by a resolv.conf that leads there.
	s := &site{t: t, dir: dir, resolver: map[*netns.NS]string{host: "127.0.0.53"}}
	if out, err := s.resolving(host, "options edns0 trust-ad\n", "getent", "ahostsv4", web); err != nil || !strings.Contains(out, mapped) {
		t.Errorf("getent %s: %q, %v", web, out, err)
	}
	if recursion {
		testnet.Eventually(t, patience, func() bool { return corp.wasAsked("www.other.test.") }, "culvert is asked for www.other.test, as the page says")
	}

	stop()
	if out := dig("127.0.0.53", "another.shop.svc.west.mesh.internal", "A"); !strings.Contains(out, "status: SERVFAIL") {
		t.Errorf("without culvert: want SERVFAIL in\n%s", out)
	}
	if out := dig("127.0.0.53", "www.other.test", "AAAA"); !strings.Contains(out, "status: NOERROR") {
		t.Errorf("another name without culvert: want NOERROR in\n%s", out)
	}
	for _, zone := range []string{"mesh.internal.", "clusterset.local.", "9.240.in-addr.arpa."} {
		if network.wasAsked(zone) {
			t.Errorf("the network's server was asked for names in %s", zone)
		}
	}
}
