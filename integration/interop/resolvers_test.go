//go:build unix

package interop

import (
	"encoding/base64"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"testing"

	wire "github.com/miekg/dns"

	"culvert.dev/internal/testca"
	"culvert.dev/internal/testnet"
)

// dnsPage is what the documentation has of a kind of configuration: its blocks
// in order, with free ports in place of the ports it names.
type dnsPage struct {
	text  string
	dir   string
	ports map[string]string
}

func newDNSPage(t *testing.T) *dnsPage {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("..", "..", "docs", "guides", "dns.md"))
	must(t, err)
	p := &dnsPage{text: string(text), dir: t.TempDir(), ports: map[string]string{}}
	for _, port := range []string{"5353", "5354", "5355", "5356", "8853", "8443"} {
		p.ports[port] = freePort(t)
	}
	ca, err := testca.New("example.test", nil)
	must(t, err)
	must(t, ca.Save(p.dir))
	issue(t, ca, p.dir, "dns", testca.Options{SPIFFEID: "spiffe://example.test/dns", DNSNames: []string{"dns.example.test"}, Usage: testca.ServerOnly})
	return p
}

// blocks returns those of a language, of which there are as many.
func (p *dnsPage) blocks(t *testing.T, language string, n int) []string {
	t.Helper()
	var blocks []string
	for _, m := range regexp.MustCompile("(?ms)^```"+language+"\n(.*?)^```").FindAllStringSubmatch(p.text, -1) {
		blocks = append(blocks, regexp.MustCompile(`\b(5353|5354|5355|5356|8853|8443)\b`).ReplaceAllStringFunc(m[1], func(port string) string { return p.ports[port] }))
	}
	if len(blocks) != n {
		t.Fatalf("the page has %d blocks of %s, want %d", len(blocks), language, n)
	}
	return blocks
}

func (p *dnsPage) write(t *testing.T, name, text string) string {
	t.Helper()
	path := filepath.Join(p.dir, name)
	must(t, os.WriteFile(path, []byte(text), 0o600))
	return path
}

// run starts a program where the page's files are.
func (p *dnsPage) run(t *testing.T, path string, args ...string) *process {
	t.Helper()
	cmd := exec.Command(path, args...)
	cmd.Env, cmd.Dir = environ(), p.dir
	return startCmd(t, cmd)
}

// culvert starts ours with the page's configuration, and waits for its answers.
func (p *dnsPage) culvert(t *testing.T, args ...string) {
	t.Helper()
	conf := p.write(t, "culvert.yaml", p.blocks(t, "yaml", 1)[0])
	c := p.run(t, culvert, append([]string{"dns", "--config", conf}, args...)...)
	c.await(t, "answered", func() bool {
		out, _, _ := command(t, "dig", "@127.0.0.1", "-p", p.ports["5353"], "+tries=1", "+time=1", "web.shop.svc.west.mesh.internal")
		return strings.Contains(out, "10.1.0.7")
	})
}

// coreDNS is the path of a CoreDNS, which is built once.
var coreDNS = sync.OnceValues(func() (string, error) {
	path := filepath.Join(buildDir, "coredns")
	cmd := exec.Command("go", "build", "-o", path, ".")
	cmd.Dir, cmd.Env = filepath.Join("..", "coredns"), append(os.Environ(), "CGO_ENABLED=0") // as make check has compiled it
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("build CoreDNS: %w\n%s", err, out)
	}
	return path, nil
})

// What the page says of other resolvers works: each of them answers the mesh's
// names by ours, and ours the names of others by CoreDNS.
func TestResolversOfTheDocs(t *testing.T) {
	p := newDNSPage(t)
	p.culvert(t)
	asked := map[string]string{"culvert": p.ports["5353"]}

	// CoreDNS forwards to us, and is what we forward to.
	core, err := coreDNS()
	must(t, err)
	corefile := strings.ReplaceAll(strings.Join(p.blocks(t, "corefile", 2), ""), " {\n    errors", " {\n    bind 127.0.0.1\n    errors") +
		fmt.Sprintf(".:%s {\n bind 127.0.0.1\n hosts {\n 10.9.9.9 www.corp.example\n 192.0.2.80 www.other.test\n 10.9.9.8 private.other.test\n }\n}\n", p.ports["5354"])
	c := p.run(t, core, "-conf", p.write(t, "Corefile", corefile))
	for name, port := range map[string]string{"CoreDNS": "5355", "CoreDNS by TLS": "5356", "": "5354"} {
		c.listens(t, "127.0.0.1:"+p.ports[port])
		if name != "" {
			asked[name] = p.ports[port]
		}
	}

	plain, secure := p.blocks(t, "unbound", 2)[0], p.blocks(t, "unbound", 2)[1]
	// By TLS the first two lines of the second block are there for each of the first one's.
	cut := strings.Index(secure, "server:")
	if cut < 0 || strings.Count(plain, "\tforward-addr:") != 4 {
		t.Fatalf("the page's blocks for unbound:\n%s%s", plain, secure)
	}
	byTLS := regexp.MustCompile(`\tforward-addr:.*\n`).ReplaceAllLiteralString(plain, secure[:cut]) + secure[cut:]
	for name, conf := range map[string]string{"unbound": plain, "unbound by TLS": byTLS} {
		port := freePort(t)
		conf += fmt.Sprintf("server:\n interface: 127.0.0.1@%s\n do-daemonize: no\n use-syslog: no\n username: \"\"\n chroot: \"\"\n directory: %s\n pidfile: \"\"\n do-ip6: no\n module-config: \"iterator\"\nremote-control:\n control-enable: no\n", port, p.dir)
		u := p.run(t, "/usr/sbin/unbound", "-d", "-c", p.write(t, name+".conf", conf))
		u.listens(t, "127.0.0.1:"+port)
		asked[name] = port
	}

	asked["dnsmasq"] = freePort(t)
	m := p.run(t, "/usr/sbin/dnsmasq", "--keep-in-foreground", "--conf-file="+p.write(t, "dnsmasq.conf", p.blocks(t, "dnsmasq", 1)[0]),
		"--no-resolv", "--no-hosts", "--user=", "--pid-file=", "--listen-address=127.0.0.1", "--bind-interfaces", "--port="+asked["dnsmasq"])
	m.listens(t, "127.0.0.1:"+asked["dnsmasq"])

	const web, db, cache = "web.shop.svc.west.mesh.internal", "db.shop.svc.east.mesh.internal", "cache.shop.svc.west.mesh.internal"
	vips := p.vips(t, cache)
	for name, port := range asked {
		questions := []struct{ name, qtype, status, want string }{
			{web, "A", "NOERROR", "10.1.0.8"},
			{web, "AAAA", "NOERROR", ""},
			{db, "A", "NOERROR", "198.51.100."}, // either of the two: neither is there, and one is found out first
			{"_https._tcp." + web, "SRV", "NOERROR", "443 " + web},
			{"nobody.shop.svc.west.mesh.internal", "A", "NXDOMAIN", ""},
			{"web.shop.svc.clusterset.local", "A", "NOERROR", "10.1.0.7"},
			{"nobody.shop.svc.clusterset.local", "A", "NXDOMAIN", ""},
			{"dns-version.clusterset.local", "TXT", "NOERROR", `"1.0.0"`},
			{cache, "A", "NOERROR", vips[0].String()},
			{cache, "AAAA", "NOERROR", vips[1].String()},
			{reverse(vips[0]), "PTR", "NOERROR", cache + "."},
			{reverse(vips[1]), "PTR", "NOERROR", cache + "."},
			{reverse(vips[0].Next()), "PTR", "NXDOMAIN", ""},
			{reverse(vips[1].Next()), "PTR", "NXDOMAIN", ""},
		}
		for _, q := range questions {
			out := tool(t, "dig", "@127.0.0.1", "-p", port, q.name, q.qtype)
			if !strings.Contains(out, "status: "+q.status) || !strings.Contains(out, q.want) {
				t.Errorf("by %s, %s %s: want %s and %q in\n%s", name, q.name, q.qtype, q.status, q.want, out)
			}
		}
	}
	for name, want := range map[string]string{"www.corp.example": "10.9.9.9", "www.other.test": "192.0.2.80", "private.other.test": "(Filtered)", "nobody.corp.example": "status: "} {
		out := tool(t, "dig", "@127.0.0.1", "-p", p.ports["5353"], name, "A")
		if !strings.Contains(out, want) || strings.Contains(out, "10.9.9.8") {
			t.Errorf("culvert before CoreDNS, %s: want %s in\n%s", name, want, out)
		}
	}
	for _, ask := range [][]string{
		{"kdig", "-p", p.ports["8853"], "+tls-ca=" + p.dir + "/ca.crt", "+tls-host=dns.example.test"},
		{"kdig", "-p", p.ports["8443"], "+https", "+tls-ca=" + p.dir + "/ca.crt", "+tls-host=dns.example.test"},
		{"dig", "-p", p.ports["8443"], "+https-get", "+tls-ca=" + p.dir + "/ca.crt", "+tls-hostname=dns.example.test"},
	} {
		if out := tool(t, ask[0], append(ask[1:], "@127.0.0.1", "+short", "www.corp.example")...); strings.TrimSpace(out) != "10.9.9.9" {
			t.Errorf("%v: %s", ask, out)
		}
	}
}

// vips returns the addresses that a service has to itself, by ours.
func (p *dnsPage) vips(t *testing.T, name string) (vips [2]netip.Addr) {
	t.Helper()
	ranges := [2]netip.Prefix{netip.MustParsePrefix("240.9.0.0/16"), netip.MustParsePrefix("fd12:3456:789a::/64")}
	for i, qtype := range []string{"A", "AAAA"} {
		testnet.Eventually(t, patience, func() bool {
			a, err := netip.ParseAddr(strings.TrimSpace(tool(t, "dig", "@127.0.0.1", "-p", p.ports["5353"], "+short", name, qtype)))
			vips[i] = a
			return err == nil && ranges[i].Contains(a)
		}, "%s has an address of %s", name, ranges[i])
	}
	return vips
}

// reverse is the name of an address's PTR record.
func reverse(a netip.Addr) string {
	s, err := wire.ReverseAddr(a.String())
	if err != nil {
		panic(err)
	}
	return s
}

// dnsperf gets an answer to every question. By HTTPS h2load asks: dnsperf 2.10
// waits for ever after some hundred answers of any server in Go, CoreDNS too.
func TestDNSPerf(t *testing.T) {
	p := newDNSPage(t)
	p.culvert(t)
	questions := p.write(t, "questions", "web.shop.svc.west.mesh.internal A\nweb.shop.svc.west.mesh.internal AAAA\ndb.shop.svc.east.mesh.internal A\n_https._tcp.web.shop.svc.west.mesh.internal SRV\nmesh.internal SOA\n")
	for mode, port := range map[string]string{"udp": "5353", "tcp": "5353", "dot": "8853"} {
		out := tool(t, "dnsperf", "-s", "127.0.0.1", "-p", p.ports[port], "-m", mode, "-d", questions, "-n", "1000", "-e")
		if !strings.Contains(out, "Queries completed:    5000 (100.00%)") || !strings.Contains(out, "NOERROR 5000 (100.00%)") || strings.Contains(out, "Warning") {
			t.Errorf("dnsperf by %s:\n%s", mode, out)
		}
	}
	question := append([]byte{0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0}, "\x03web\x04shop\x03svc\x04west\x04mesh\x08internal\x00\x00\x01\x00\x01"...)
	url := "https://127.0.0.1:" + p.ports["8443"] + "/dns-query?dns=" + base64.RawURLEncoding.EncodeToString(question)
	if out := tool(t, "h2load", "-n", "5000", "-c", "4", "-m", "50", url); !strings.Contains(out, "5000 succeeded, 0 failed, 0 errored, 0 timeout") || !strings.Contains(out, "5000 2xx") {
		t.Errorf("h2load:\n%s", out)
	}
}

// What was asked is in the metrics of the process.
func TestDNSMetricsOfAProcess(t *testing.T) {
	p := newDNSPage(t)
	admin := "127.0.0.1:" + freePort(t)
	p.culvert(t, "--admin", admin)
	want := `culvert_dns_queries_total{rcode="NOERROR",source="table",transport="udp",view="west"}`
	testnet.Eventually(t, patience, func() bool { return strings.Contains(tool(t, "curl", "-sS", "http://"+admin+"/metrics"), want) }, "the metrics have %s", want)
}
