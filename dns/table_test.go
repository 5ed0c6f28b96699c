package dns

import (
	"context"
	"crypto/tls"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/miekg/dns"

	"culvert.dev/internal/testca"
)

// A fakeTable has answers by name, and by view where the key is "view name".
type fakeTable struct {
	names   map[string]Answer
	parents map[string]bool
	at      time.Time
}

func newTable(names map[string]Answer) *fakeTable {
	t := &fakeTable{names: names, parents: map[string]bool{}, at: time.Unix(1_700_000_000, 0)}
	for n := range names {
		view, n, ok := strings.Cut(n, " ")
		if !ok {
			view, n = "", view
		}
		for {
			_, rest, ok := strings.Cut(n, ".")
			if !ok {
				break
			}
			t.parents[view+" "+rest], n = true, rest
		}
	}
	return t
}

func (t *fakeTable) Answer(q Question, a *Answer) {
	if found, ok := t.names[q.View+" "+q.Name]; ok {
		*a = found
	} else if found, ok := t.names[q.Name]; ok {
		*a = found
	} else if t.parents[q.View+" "+q.Name] || t.parents[" "+q.Name] {
		a.Status = Above
		return
	} else {
		return
	}
	if a.Status == Absent {
		a.Status = Exists
	}
}

func (t *fakeTable) Updated() time.Time { return t.at }

func addrs(list ...string) (as []Addr) {
	for _, s := range list {
		as = append(as, Addr{Addr: netip.MustParseAddr(s)})
	}
	return as
}

func prefixes(list ...string) (ps []netip.Prefix) {
	for _, s := range list {
		ps = append(ps, netip.MustParsePrefix(s))
	}
	return ps
}

var loopback = prefixes("127.0.0.0/8")

// shop is the table most tests ask.
func shop() *fakeTable {
	var many []Addr
	for i := range 100 {
		many = append(many, Addr{Addr: netip.AddrFrom4([4]byte{10, 9, 0, byte(i)})})
	}
	return newTable(map[string]Answer{
		"web.shop.svc.mesh.internal":       {Addrs: addrs("10.0.0.1", "10.0.0.2", "fd00::1")},
		"four.shop.svc.mesh.internal":      {Addrs: addrs("10.0.0.4")},
		"many.shop.svc.mesh.internal":      {Addrs: many},
		"empty.shop.svc.mesh.internal":     {},
		"later.shop.svc.mesh.internal":     {Status: Unknown},
		"later.test":                       {Status: Unknown},
		"there.later.test":                 {Status: Unknown},
		"later.elsewhere.test":             {Status: Unknown},
		"east api.shop.svc.mesh.internal":  {Addrs: addrs("10.1.0.1")},
		"west api.shop.svc.mesh.internal":  {Addrs: addrs("10.2.0.1")},
		"api.shop.svc.mesh.internal":       {Addrs: addrs("203.0.113.1")},
		"east only.shop.svc.mesh.internal": {Addrs: addrs("10.1.0.2")},
		"_https._tcp.web.shop.svc.mesh.internal": {Services: []Service{
			{Priority: 1, Weight: 5, Port: 443, Target: "web.shop.svc.mesh.internal"}}},
		"txt.shop.svc.mesh.internal":   {Texts: []string{"1.0.0", strings.Repeat("x", 300), ""}},
		"https.shop.svc.mesh.internal": {Bindings: []Binding{{ALPN: []string{"h2", "h3"}, Port: 8443, Hints: []netip.Addr{netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("fd00::1")}, ECH: []byte{1, 2, 3}}}},
		"gw.shop.svc.mesh.internal":    {HostKeys: []HostKey{{Algorithm: 4, Hash: 1, Digest: []byte{1, 2}}, {Algorithm: 3, Hash: 2, Digest: []byte{3, 4}}}},
		"alias.shop.svc.mesh.internal": {Alias: "web.shop.svc.mesh.internal"},
		"out.shop.svc.mesh.internal":   {Alias: "elsewhere.test"},
		"loop.shop.svc.mesh.internal":  {Alias: "loop.shop.svc.mesh.internal"},
		"1.0.0.10.in-addr.arpa":        {Hosts: []string{"web.shop.svc.mesh.internal"}},
		"host.example.com":             {Addrs: addrs("10.0.0.7"), TTL: 90 * time.Second},
		"zero.shop.svc.mesh.internal":  {Addrs: addrs("10.0.0.8"), TTL: -1},
		"dns-version.clusterset.local": {Texts: []string{"1.0.0"}},
	})
}

// A rig is a Server that listens on loopback by all transports.
type rig struct {
	*Server
	table   atomic.Pointer[fakeTable]
	addr    map[Transport]string
	tls     *tls.Config
	results chan Result
}

var transports = []Transport{UDP, TCP, TLS, HTTPS}

func eachTransport(t *testing.T, f func(t *testing.T, tr Transport)) {
	for _, tr := range transports {
		t.Run(string(tr), func(t *testing.T) { f(t, tr) })
	}
}

var pair = sync.OnceValues(func() (*testca.Pair, error) {
	ca, err := testca.New("example.test", nil)
	if err != nil {
		return nil, err
	}
	return ca.Issue(testca.Options{SPIFFEID: "spiffe://example.test/dns", DNSNames: []string{"dns.example.test"}, Usage: testca.ServerOnly})
})

// start serves s, with the shop's table unless set says otherwise.
func start(t *testing.T, s *Server) *rig {
	t.Helper()
	r := &rig{Server: s, addr: map[Transport]string{}, results: make(chan Result, 10000)}
	r.table.Store(shop())
	if s.Names == nil {
		s.Names = func() Names {
			if tab := r.table.Load(); tab != nil {
				return tab
			}
			return nil
		}
	}
	if s.Zones == nil {
		s.Zones = []string{"mesh.internal", "clusterset.local."}
	}
	if s.RateLimit == 0 {
		s.RateLimit = -1
	}
	s.Observe = func(res *Result) {
		select {
		case r.results <- *res:
		default:
		}
	}
	p, err := pair()
	if err != nil {
		t.Fatal(err)
	}
	conf := &tls.Config{Certificates: []tls.Certificate{p.TLS}}
	r.tls = &tls.Config{InsecureSkipVerify: true}
	uc, err := net.ListenUDP("udp", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	r.addr[UDP] = uc.LocalAddr().String()
	lns := map[Transport]net.Listener{}
	for _, tr := range transports[1:] {
		if lns[tr], err = net.Listen("tcp", "127.0.0.1:0"); err != nil {
			t.Fatal(err)
		}
		r.addr[tr] = lns[tr].Addr().String()
	}
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	serve := func(f func() error) {
		wg.Go(func() {
			if err := f(); !errors.Is(err, ErrServerClosed) {
				t.Errorf("serve: %v", err)
			}
		})
	}
	serve(func() error { return s.ServeUDP(ctx, uc, "") })
	serve(func() error { return s.ServeTCP(ctx, lns[TCP], "") })
	serve(func() error { return s.ServeTLS(ctx, lns[TLS], conf, "") })
	serve(func() error { return s.ServeHTTPS(ctx, lns[HTTPS], conf, "") })
	t.Cleanup(func() {
		_ = s.Close()
		cancel()
		wg.Wait()
		if s.Forward != nil {
			_ = s.Forward.Close()
		}
	})
	return r
}

// raw sends bytes and returns the answer, or nil if the connection ends
// without one.
func (r *rig) raw(t *testing.T, tr Transport, b []byte) []byte {
	t.Helper()
	out, err := r.send(tr, b)
	if err != nil {
		t.Fatalf("%s: %v", tr, err)
	}
	return out
}

func (r *rig) send(tr Transport, b []byte) ([]byte, error) {
	switch tr {
	case HTTPS:
		client := &http.Client{Transport: &http.Transport{TLSClientConfig: r.tls.Clone(), ForceAttemptHTTP2: true}}
		defer client.CloseIdleConnections()
		res, err := client.Post("https://"+r.addr[HTTPS]+dohPath, dohType, strings.NewReader(string(b)))
		if err != nil {
			return nil, err
		}
		defer res.Body.Close()
		out, err := io.ReadAll(res.Body)
		if res.StatusCode != http.StatusOK {
			return nil, err
		}
		return out, err
	case UDP:
		c, err := net.Dial("udp", r.addr[UDP])
		if err != nil {
			return nil, err
		}
		defer c.Close()
		if _, err := c.Write(b); err != nil {
			return nil, err
		}
		_ = c.SetDeadline(time.Now().Add(20 * time.Second))
		buf := make([]byte, 65535)
		n, err := c.Read(buf)
		return buf[:n], err
	}
	c, err := net.Dial("tcp", r.addr[tr])
	if err != nil {
		return nil, err
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(20 * time.Second))
	if tr == TLS {
		c = tls.Client(c, r.tls)
	}
	if _, err := c.Write(append(binary.BigEndian.AppendUint16(nil, uint16(len(b))), b...)); err != nil {
		return nil, err
	}
	var size [2]byte
	if _, err := io.ReadFull(c, size[:]); err != nil {
		return nil, nil // closed
	}
	out := make([]byte, binary.BigEndian.Uint16(size[:]))
	_, err = io.ReadFull(c, out)
	return out, err
}

// ask sends a question and returns the answer.
func (r *rig) ask(t *testing.T, tr Transport, m *dns.Msg) *dns.Msg {
	t.Helper()
	b, err := m.Pack()
	if err != nil {
		t.Fatal(err)
	}
	out := r.raw(t, tr, b)
	if out == nil {
		t.Fatalf("%s: no answer to %v", tr, m.Question)
	}
	res := new(dns.Msg)
	if err := res.Unpack(out); err != nil {
		t.Fatalf("%s: answer to %v: %v: %x", tr, m.Question, err, out)
	}
	if res.Id != m.Id || !res.Response {
		t.Errorf("%s: id %d, response %v, want %d, true", tr, res.Id, res.Response, m.Id)
	}
	return res
}

func q(name string, qtype uint16) *dns.Msg { return new(dns.Msg).SetQuestion(dns.Fqdn(name), qtype) }

// summary is an answer in one line: the code, flags, then the sections.
func summary(m *dns.Msg) string {
	var s []string
	s = append(s, dns.RcodeToString[m.Rcode])
	for _, f := range []struct {
		on   bool
		name string
	}{{m.Authoritative, "aa"}, {m.Truncated, "tc"}, {m.RecursionAvailable, "ra"}, {m.AuthenticatedData, "ad"}} {
		if f.on {
			s = append(s, f.name)
		}
	}
	section := func(name string, rrs []dns.RR) {
		var list []string
		for _, rr := range rrs {
			if rr.Header().Rrtype == dns.TypeOPT {
				continue
			}
			text := strings.Join(strings.Fields(rr.String()), " ")
			list = append(list, text)
		}
		slices.Sort(list)
		if len(list) > 0 {
			s = append(s, name+":")
			s = append(s, strings.Join(list, ", "))
		}
	}
	section("an", m.Answer)
	section("ns", m.Ns)
	section("ar", m.Extra)
	return strings.Join(s, " ")
}

func (r *rig) expect(t *testing.T, tr Transport, m *dns.Msg, want string) {
	t.Helper()
	if got := summary(r.ask(t, tr, m)); got != want {
		t.Errorf("%s %s by %s:\n got %s\nwant %s", m.Question[0].Name, dns.TypeToString[m.Question[0].Qtype], tr, got, want)
	}
}

// edeOf is the extended error of an answer, -1 if there is none.
func edeOf(m *dns.Msg) int {
	if opt := m.IsEdns0(); opt != nil {
		for _, o := range opt.Option {
			if e, ok := o.(*dns.EDNS0_EDE); ok {
				return int(e.InfoCode)
			}
		}
	}
	return -1
}
