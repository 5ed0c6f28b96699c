//go:build unix

package interop

import (
	"context"
	"crypto/tls"
	"errors"
	"net"
	"net/netip"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"culvert.dev/dns"
	"culvert.dev/internal/testca"
)

// dnsNames is a table for dig and kdig.
type dnsNames map[string]dns.Answer

func (n dnsNames) Answer(q dns.Question, a *dns.Answer) {
	if found, ok := n[q.Name]; ok {
		*a = found
		a.Status = dns.Exists
		return
	}
	for name := range n {
		if strings.HasSuffix(name, "."+q.Name) {
			a.Status = dns.Above
		}
	}
}

func (n dnsNames) Updated() time.Time { return time.Unix(1_700_000_000, 0) }

func dnsAddrs(list ...string) (as []dns.Addr) {
	for _, s := range list {
		as = append(as, dns.Addr{Addr: netip.MustParseAddr(s)})
	}
	return as
}

func manyAddrs(n int) (as []dns.Addr) {
	for i := range n {
		as = append(as, dns.Addr{Addr: netip.AddrFrom4([4]byte{10, 9, 0, byte(i)})})
	}
	return as
}

var dnsTable = dnsNames{
	"web.shop.svc.mesh.internal":             {Addrs: dnsAddrs("10.0.0.1", "fd00::1")},
	"many.shop.svc.mesh.internal":            {Addrs: manyAddrs(200)},
	"_https._tcp.web.shop.svc.mesh.internal": {Services: []dns.Service{{Priority: 1, Weight: 5, Port: 443, Target: "web.shop.svc.mesh.internal"}}},
	"https.mesh.internal":                    {Bindings: []dns.Binding{{ALPN: []string{"h2"}, Port: 8443, Hints: []netip.Addr{netip.MustParseAddr("10.0.0.1")}}}},
	"dns-version.clusterset.local":           {Texts: []string{"1.0.0"}},
}

// A dnsServer is one of ours, with its ports by transport.
type dnsServer struct {
	port map[string]string // udp, tcp, tls, https
	ca   string
}

// startDNS serves the table on loopback. Two servers may forward to each
// other's.
func startDNS(t *testing.T, s *dns.Server) *dnsServer {
	t.Helper()
	ca, err := testca.New("example.test", nil)
	must(t, err)
	dir := t.TempDir()
	must(t, ca.Save(dir))
	p, err := ca.Issue(testca.Options{SPIFFEID: "spiffe://example.test/dns", DNSNames: []string{"dns.example.test"}, Usage: testca.ServerOnly})
	must(t, err)
	conf := &tls.Config{Certificates: []tls.Certificate{p.TLS}}

	d := &dnsServer{port: map[string]string{}, ca: dir + "/ca.crt"}
	var uc *net.UDPConn
	var ln net.Listener
	for range 100 { // one port for UDP and TCP, as dig expects it
		uc, err = net.ListenUDP("udp", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
		must(t, err)
		if ln, err = net.Listen("tcp", uc.LocalAddr().String()); err == nil {
			break
		}
		uc.Close()
	}
	must(t, err)
	lt, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	lh, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	for name, a := range map[string]net.Addr{"udp": uc.LocalAddr(), "tcp": ln.Addr(), "tls": lt.Addr(), "https": lh.Addr()} {
		_, d.port[name], _ = net.SplitHostPort(a.String())
	}
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	for _, f := range []func() error{
		func() error { return s.ServeUDP(ctx, uc, "") },
		func() error { return s.ServeTCP(ctx, ln, "") },
		func() error { return s.ServeTLS(ctx, lt, conf, "") },
		func() error { return s.ServeHTTPS(ctx, lh, conf, "") },
	} {
		wg.Go(func() {
			if err := f(); !errors.Is(err, dns.ErrServerClosed) {
				t.Error(err)
			}
		})
	}
	t.Cleanup(func() { _ = s.Close(); cancel(); wg.Wait() })
	return d
}

func ourDNS(t *testing.T) *dnsServer {
	t.Helper()
	return startDNS(t, &dns.Server{Zones: []string{"mesh.internal", "clusterset.local"}, Names: func() dns.Names { return dnsTable }, RateLimit: -1})
}

// tool runs a program and returns what it says.
func tool(t *testing.T, name string, args ...string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	cmd := exec.CommandContext(ctx, look(t, name), args...)
	cmd.Env = environ()
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Errorf("%s %s: %v\n%s", name, strings.Join(args, " "), err, out)
	}
	return string(out)
}

func TestDigAndKdig(t *testing.T) {
	d := ourDNS(t)
	type way struct {
		name string
		args []string
	}
	ways := []way{
		{"dig", []string{"@127.0.0.1", "-p", d.port["udp"], "+notcp"}},
		{"dig", []string{"@127.0.0.1", "-p", d.port["tcp"], "+tcp"}},
		{"dig", []string{"@127.0.0.1", "-p", d.port["tls"], "+tls", "+tls-ca=" + d.ca, "+tls-hostname=dns.example.test"}},
		{"dig", []string{"@127.0.0.1", "-p", d.port["https"], "+https", "+tls-ca=" + d.ca, "+tls-hostname=dns.example.test"}},
		{"dig", []string{"@127.0.0.1", "-p", d.port["https"], "+https-get", "+tls-ca=" + d.ca, "+tls-hostname=dns.example.test"}},
		{"kdig", []string{"@127.0.0.1", "-p", d.port["udp"]}},
		{"kdig", []string{"@127.0.0.1", "-p", d.port["tcp"], "+tcp"}},
		{"kdig", []string{"@127.0.0.1", "-p", d.port["tls"], "+tls-ca=" + d.ca, "+tls-host=dns.example.test"}},
		{"kdig", []string{"@127.0.0.1", "-p", d.port["https"], "+https", "+tls-ca=" + d.ca, "+tls-host=dns.example.test"}},
		{"kdig", []string{"@127.0.0.1", "-p", d.port["https"], "+https-get", "+tls-ca=" + d.ca, "+tls-host=dns.example.test"}},
	}
	for _, c := range []struct{ name, qtype, want string }{
		{"web.shop.svc.mesh.internal", "A", "10.0.0.1"},
		{"wEb.Shop.svc.MESH.internal", "AAAA", "fd00::1"},
		{"_https._tcp.web.shop.svc.mesh.internal", "SRV", "1 5 443 web.shop.svc.mesh.internal."},
		{"dns-version.clusterset.local", "TXT", `"1.0.0"`},
		{"nobody.mesh.internal", "A", ""},
	} {
		for _, w := range ways {
			got := strings.TrimSpace(tool(t, w.name, append(slices.Clone(w.args), c.name, c.qtype, "+short")...))
			if got != c.want {
				t.Errorf("%s %v %s %s: %q, want %q", w.name, w.args, c.name, c.qtype, got, c.want)
			}
		}
	}
	// What the tools say of the whole message: any warning is a fault of ours.
	for _, w := range ways {
		for _, name := range []string{"web.shop.svc.mesh.internal", "nobody.mesh.internal", "many.shop.svc.mesh.internal", "https.mesh.internal"} {
			out := strings.ToLower(tool(t, w.name, append(slices.Clone(w.args), name, "A", "+norec")...))
			out = strings.ReplaceAll(out, "warning: truncated reply", "") // kdig says so before it does right
			if strings.Contains(out, "warning") || strings.Contains(out, "malformed") || strings.Contains(out, "mismatch") {
				t.Errorf("%s %v %s:\n%s", w.name, w.args, name, out)
			}
		}
	}
	// By UDP 200 addresses do not fit: both tools ask again by TCP.
	for _, w := range []way{ways[0], ways[5]} {
		args := slices.DeleteFunc(slices.Clone(w.args), func(a string) bool { return a == "+notcp" })
		if got := tool(t, w.name, append(args, "many.shop.svc.mesh.internal", "A", "+short")...); strings.Count(got, "10.9.0.") != 200 {
			t.Errorf("%s: %d addresses of 200", w.name, strings.Count(got, "10.9.0."))
		}
	}
}

// The questions of the EDNS compliance tests, RFC 6891.
func TestDigEDNS(t *testing.T) {
	d := ourDNS(t)
	base := []string{"@127.0.0.1", "-p", d.port["udp"], "+notcp", "+norec", "mesh.internal", "SOA"}
	for _, c := range []struct {
		args       string
		want, none []string
	}{
		{"+noedns", []string{"status: NOERROR"}, []string{"EDNS:"}},
		{"+edns=0", []string{"status: NOERROR", "EDNS: version: 0"}, nil},
		{"+edns=1 +noednsneg", []string{"status: BADVERS", "EDNS: version: 0"}, []string{"ANSWER SECTION"}},
		{"+edns=100 +noednsneg", []string{"status: BADVERS", "EDNS: version: 0"}, nil},
		{"+ednsopt=100", []string{"status: NOERROR", "EDNS: version: 0"}, []string{"OPT=100"}},
		{"+ednsflags=0x40", []string{"status: NOERROR", "EDNS: version: 0"}, []string{"MBZ"}},
		{"+edns=1 +noednsneg +ednsopt=100", []string{"status: BADVERS"}, []string{"OPT=100"}},
		{"+dnssec", []string{"status: NOERROR", "flags: do"}, nil},
		{"+bufsize=512 +dnssec", []string{"status: NOERROR", "EDNS: version: 0"}, nil},
		{"+cookie", []string{"status: NOERROR"}, nil},
		{"+zflag", []string{"status: NOERROR"}, []string{"MBZ: 0x4"}},
		{"+opcode=2", []string{"status: NOTIMP"}, nil},
		{"+opcode=15 +header-only", []string{"status: NOTIMP"}, nil},
		{"-t AXFR +tcp", nil, nil},
	} {
		if strings.HasPrefix(c.args, "-t") {
			if out := tool(t, "dig", "@127.0.0.1", "-p", d.port["tcp"], "mesh.internal", "AXFR"); !strings.Contains(out, "Transfer failed") {
				t.Errorf("AXFR:\n%s", out)
			}
			continue
		}
		out := tool(t, "dig", append(slices.Clone(base), strings.Fields(c.args)...)...)
		for _, w := range c.want {
			if !strings.Contains(out, w) {
				t.Errorf("dig %s: want %q in\n%s", c.args, w, out)
			}
		}
		for _, w := range c.none {
			if strings.Contains(out, w) {
				t.Errorf("dig %s: want no %q in\n%s", c.args, w, out)
			}
		}
	}
}
