package gateway

import (
	"bytes"
	"context"
	"crypto/tls"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	wire "github.com/miekg/dns"

	"culvert.dev/dns"
	"culvert.dev/internal/testnet"
	"culvert.dev/registry"
	"culvert.dev/tunnel"
)

// viewNames answer every name of mesh.internal with a TXT of the view.
type viewNames struct{}

func (viewNames) Answer(q dns.Question, a *dns.Answer) {
	if strings.HasSuffix(q.Name, ".mesh.internal") {
		a.Status, a.Texts = dns.Exists, []string{"view " + q.View}
	}
}

func (viewNames) Updated() time.Time { return time.Now() }

// lockedBuffer is a log that is written by many.
type lockedBuffer struct {
	mu sync.Mutex // guards b
	b  bytes.Buffer
}

func (l *lockedBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lockedBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// later is a source that says what there is when it is told to.
type later struct{ now chan registry.Snapshot }

func (s later) Run(ctx context.Context, updates chan<- registry.Update) error {
	for {
		select {
		case snap := <-s.now:
			updates <- registry.Update{Source: "later", Snapshot: snap}
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// A dnsRig is a gateway that answers by DNS alone.
type dnsRig struct {
	*Gateway
	source later
	log    *lockedBuffer
	at     []string // the listeners' addresses
	stop   context.CancelFunc
	ended  chan error
}

func startDNS(t *testing.T, delay time.Duration) *dnsRig {
	t.Helper()
	r := &dnsRig{source: later{make(chan registry.Snapshot)}, log: &lockedBuffer{}, ended: make(chan error, 1)}
	d := &DNS{Server: &dns.Server{Zones: []string{"mesh.internal"}}}
	for _, tr := range []dns.Transport{dns.UDP, dns.TCP, dns.TLS, dns.HTTPS} {
		d.Listeners = append(d.Listeners, DNSListener{Transport: tr, Address: "127.0.0.1:0"})
	}
	d.Listeners = append(d.Listeners, DNSListener{Transport: dns.UDP, Address: "127.0.0.1:0", View: "east"})
	keys, _ := gatewayKeys(t)
	pair, err := keys.Certificates[0].Certificate()
	if err != nil {
		t.Fatal(err)
	}
	d.Use(*pair)
	var g *Gateway
	d.Server.Names = func() dns.Names {
		if g == nil || g.registry.Table() == nil {
			return nil
		}
		return viewNames{}
	}
	g, err = New(t.Context(), Config{
		DNS: d, Sources: []registry.Source{r.source}, DrainDelay: delay, DrainTimeout: 10 * time.Second, Admin: "127.0.0.1:0",
		Log: slog.New(slog.NewTextHandler(r.log, &slog.HandlerOptions{Level: slog.LevelDebug})),
	})
	if err != nil {
		t.Fatal(err)
	}
	r.Gateway = g
	for _, l := range g.Status().DNS.Listeners {
		_, addr, _ := strings.Cut(l.Address, "://")
		r.at = append(r.at, addr)
	}
	ctx, cancel := context.WithCancel(t.Context())
	r.stop = cancel
	go func() { r.ended <- g.Run(ctx, nil) }()
	t.Cleanup(func() {
		cancel()
		select {
		case err := <-r.ended:
			if err != nil {
				t.Error(err)
			}
		case <-time.After(20 * time.Second):
			t.Error("it does not end")
		}
	})
	return r
}

// ask returns the response code and, if there is one, the text of the answer.
func (r *dnsRig) ask(t *testing.T, i int, name string) string {
	t.Helper()
	m := new(wire.Msg).SetQuestion(name, wire.TypeTXT)
	conf := &tls.Config{InsecureSkipVerify: true} // of this test
	var res *wire.Msg
	var err error
	switch i {
	case 3:
		client := &http.Client{Transport: &http.Transport{TLSClientConfig: conf, ForceAttemptHTTP2: true}}
		defer client.CloseIdleConnections()
		b, _ := m.Pack()
		var answer *http.Response
		if answer, err = client.Post("https://"+r.at[i]+"/dns-query", "application/dns-message", bytes.NewReader(b)); err == nil {
			defer answer.Body.Close()
			b, _ = io.ReadAll(answer.Body)
			res = new(wire.Msg)
			err = res.Unpack(b)
		}
	default:
		c := &wire.Client{Net: []string{"udp", "tcp", "tcp-tls", "", "udp"}[i], TLSConfig: conf, Timeout: soon}
		res, _, err = c.Exchange(m, r.at[i])
	}
	if err != nil {
		t.Fatal(err)
	}
	s := wire.RcodeToString[res.Rcode]
	for _, rr := range res.Answer {
		s += " " + strings.Join(rr.(*wire.TXT).Txt, "")
	}
	return s
}

func TestDNSAlone(t *testing.T) {
	r := startDNS(t, -1)
	for i := range r.at {
		if got := r.ask(t, i, "web.mesh.internal."); got != "SERVFAIL" {
			t.Errorf("listener %d before there is a table: %s", i, got)
		}
	}
	if ok, why := r.Ready(); ok || why == "" {
		t.Errorf("ready before there is a table: %q", why)
	}
	r.source.now <- registry.Snapshot{Networks: []registry.Network{{Name: "home", CIDRs: []netip.Prefix{netip.MustParsePrefix("127.0.0.0/8")}}}}
	testnet.Eventually(t, soon, func() bool { ok, _ := r.Ready(); return ok }, "it is ready")
	for i := range r.at {
		want := "NOERROR view home"
		if i == 4 {
			want = "NOERROR view east" // the listener's
		}
		if got := r.ask(t, i, "web.mesh.internal."); got != want {
			t.Errorf("listener %d: %s, want %s", i, got, want)
		}
		if got := r.ask(t, i, "www.example.com."); got != "REFUSED" {
			t.Errorf("listener %d for somebody else's name: %s", i, got)
		}
	}
	// Another network of the same addresses, with no restart.
	r.source.now <- registry.Snapshot{Networks: []registry.Network{{Name: "office", CIDRs: []netip.Prefix{netip.MustParsePrefix("127.0.0.0/8")}}}}
	testnet.Eventually(t, soon, func() bool { return r.ask(t, 0, "web.mesh.internal.") == "NOERROR view office" }, "the other network is seen")

	for _, want := range []string{
		`reason=dns-failed rcode=SERVFAIL transport=udp`, `reason=denied rcode=REFUSED transport=https`, `listener=udp://127.0.0.1:0`,
	} {
		if !strings.Contains(r.log.String(), want) {
			t.Errorf("the log has no %q", want)
		}
	}
	if strings.Contains(r.log.String(), "level=WARN msg=\"dns") || strings.Contains(r.log.String(), "www.example.com") {
		t.Error("the log is loud about questions, or tells what was asked for")
	}
	res, err := http.Get("http://" + r.AdminAddr().String() + "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	text, _ := io.ReadAll(res.Body)
	for _, want := range []string{
		`culvert_dns_queries_total{rcode="SERVFAIL",source="",transport="tls",view=""} 1`,
		`culvert_dns_queries_total{rcode="NOERROR",source="table",transport="https",view="home"} 1`,
		`culvert_dns_queries_total{rcode="REFUSED",source="",transport="udp",view="east"} 1`,
		`culvert_dns_query_duration_seconds_count{source="table"} `,
	} {
		if !strings.Contains(string(text), want) {
			t.Errorf("the metrics have no %s", want)
		}
	}
	http.DefaultClient.CloseIdleConnections()
	s := r.Status().DNS
	if len(s.Listeners) != 5 || s.Listeners[4].View != "east" || s.Listeners[2].Configured != "tls://127.0.0.1:0" || s.Zones[0] != "mesh.internal" {
		t.Errorf("status %+v", s)
	}
}

// Who drains is not ready and answers, until the delay is over.
func TestDNSAnswersWhileLame(t *testing.T) {
	t.Parallel()
	const delay = 4 * time.Second // far more than five answers take on a busy machine
	r := startDNS(t, delay)
	r.source.now <- registry.Snapshot{}
	testnet.Eventually(t, soon, func() bool { ok, _ := r.Ready(); return ok }, "it is ready")
	begun := time.Now()
	r.stop()
	testnet.Eventually(t, soon, func() bool { ok, _ := r.Ready(); return !ok }, "it is not ready any more")
	for i := range r.at {
		if got := r.ask(t, i, "web.mesh.internal."); got != "NOERROR view " && i != 4 {
			t.Errorf("listener %d while draining: %s", i, got)
		}
	}
	err := <-r.ended
	r.ended <- err
	if took := time.Since(begun); err != nil || took < delay || took > soon {
		t.Errorf("it ended after %v with %v", took, err)
	}
	if c, err := net.Dial("tcp", r.at[1]); err == nil {
		c.Close()
		t.Error("it still accepts")
	}
}

// Nobody comes to the DNS of a gateway by a tunnel: it would take him for the
// gateway's host.
func TestDNSIsNotReachedByTunnels(t *testing.T) {
	guard := &tunnel.Guard{}
	d := &DNS{Listeners: []DNSListener{{Transport: dns.UDP, Address: "127.0.0.1:0"}, {Transport: dns.TCP, Address: "127.0.0.1:0"}}}
	s := newDNSService(t.Context(), &Gateway{cfg: Config{DNS: d}}, guard)
	if err := s.openAll(t.Context()); err != nil {
		t.Fatal(err)
	}
	defer s.closeAll()
	byUDP, byTCP := netip.MustParseAddrPort(s.addrs()[0].String()), netip.MustParseAddrPort(s.addrs()[1].String())
	if guard.CheckUDP(byUDP, true) == nil || guard.Check(byTCP, true) == nil {
		t.Error("the listeners may be dialed")
	}
}

// A port that is taken is said so, and the others are given back.
func TestDNSPortsThatAreTaken(t *testing.T) {
	c, err := net.ListenUDP("udp", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	_, err = New(t.Context(), Config{DNS: &DNS{Server: &dns.Server{}, Listeners: []DNSListener{
		{Transport: dns.TCP, Address: "127.0.0.1:0"}, {Transport: dns.UDP, Address: c.LocalAddr().String()}}}})
	if err == nil || !strings.Contains(err.Error(), "listen for DNS at udp://"+c.LocalAddr().String()) {
		t.Errorf("error %v", err)
	}
}
