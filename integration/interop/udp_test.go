//go:build unix

package interop

import (
	"bytes"
	"crypto/sha256"
	"crypto/tls"
	"encoding/base64"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/miekg/dns"
	"github.com/quic-go/quic-go"
	"github.com/quic-go/quic-go/http3"

	"culvert.dev/internal/testca"
)

// serveHTTP3 starts an HTTP/3 server that says whom it saw and sends as many
// bytes as the path says. A client certificate is asked for and not demanded:
// not every client here can show one.
func (w *world) serveHTTP3(t *testing.T) *quicService {
	t.Helper()
	pc, err := net.ListenUDP("udp", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	must(t, err)
	tlsConf := &tls.Config{Certificates: []tls.Certificate{w.service.TLS}, ClientAuth: tls.RequestClientCert}
	srv := &http3.Server{TLSConfig: http3.ConfigureTLSConfig(tlsConf), Handler: http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		id := "nobody"
		if len(r.TLS.PeerCertificates) > 0 {
			id, _ = testca.PeerID(r.TLS.PeerCertificates[0])
		}
		rw.Header().Set("Content-Type", "text/plain")
		_, _ = fmt.Fprintf(rw, "you are %s by %s\n", id, r.Proto)
		var n int
		_, _ = fmt.Sscanf(r.URL.Path, "/%d", &n)
		_, _ = rw.Write(bytes.Repeat([]byte("0123456789abcdef"), n/16))
	})}
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = srv.Serve(pc)
	}()
	t.Cleanup(func() {
		_ = srv.Close()
		_ = pc.Close()
		<-done
	})
	return &quicService{addr: pc.LocalAddr().String()}
}

// ngtcp2's client and Chromium.
func TestQUICOtherClients(t *testing.T) {
	w := newWorld(t)
	s := w.serveHTTP3(t)
	// ngtcp2's client names localhost where it is given an address.
	g := quicGateway(t, "--route", route(s.addr), "--route", "localhost="+s.addr)
	_, port, err := net.SplitHostPort(strings.TrimPrefix(g.addr, "udp://"))
	must(t, err)
	for name, args := range map[string][]string{
		"ngtcp2": nil,
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			args = append(args, "-q", "--timeout=60s", "--exit-on-all-streams-close", "--download="+dir,
				"--cert="+w.cert, "--key="+w.key, "127.0.0.1", port, "https://"+svc+":"+port+"/8000000")
			_, errs, code := command(t, "gtlsclient", args...)
			got, err := os.ReadFile(filepath.Join(dir, "8000000"))
			if err != nil || len(got) < 8_000_000 || !bytes.HasPrefix(got, []byte("you are "+clientID+" by HTTP/3")) {
				t.Errorf("exit code %d, %d bytes %.60q (%v)\n%s", code, len(got), got, err, errs)
			}
		})
	}
	t.Run("Chromium", func(t *testing.T) {
		out, errs, _ := command(t, "chromium", "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
			"--disable-component-update", "--disable-sync", "--user-data-dir="+t.TempDir(), "--enable-quic",
			"--origin-to-force-quic-on="+svc+":"+port, "--host-resolver-rules=MAP "+svc+" 127.0.0.1",
			"--ignore-certificate-errors-spki-list="+w.spki(), "--ignore-certificate-errors", "--virtual-time-budget=5000", "--dump-dom", "https://"+svc+":"+port+"/1")
		if !strings.Contains(out, "you are nobody by HTTP/3") {
			t.Errorf("Chromium shows %q\n%s", out, errs)
		}
	})
}

// A service that is not Go's: ids of 18 bytes, and a Retry.
func TestQUICOtherServices(t *testing.T) {
	w := newWorld(t)
	dir := t.TempDir()
	must(t, os.WriteFile(filepath.Join(dir, "file"), bytes.Repeat([]byte("x"), 3_000_000), 0o600))
	for name, args := range map[string][]string{"ngtcp2": nil, "ngtcp2 with Retry": {"--validate-addr"}} {
		t.Run(name, func(t *testing.T) {
			port := freePort(t)
			p := start(t, "gtlsserver", append(args, "-q", "-d", dir, "127.0.0.1", port, w.svcKey, w.svcCert)...)
			p.await(t, "listened", func() bool { // as a closed port says so
				c, err := net.Dial("udp", "127.0.0.1:"+port)
				must(t, err)
				defer c.Close()
				for range 2 {
					if _, err := c.Write([]byte{0}); err != nil {
						return false
					}
				}
				return true
			})
			g := quicGateway(t, "--route", route("127.0.0.1:"+port))
			conf := w.client.ClientConfig(svc)
			tr := &http3.Transport{TLSClientConfig: conf, QUICConfig: &quic.Config{HandshakeIdleTimeout: patience}}
			defer tr.Close()
			req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "https://"+strings.TrimPrefix(g.addr, "udp://")+"/file", nil)
			must(t, err)
			resp, err := tr.RoundTrip(req)
			if err != nil {
				t.Fatalf("%v\n%s", err, p.output())
			}
			defer resp.Body.Close()
			var b bytes.Buffer
			if n, err := b.ReadFrom(resp.Body); n != 3_000_000 || err != nil {
				t.Errorf("%d bytes, %v", n, err)
			}

			// ngtcp2 at both ends.
			g = quicGateway(t, "--route", "localhost=127.0.0.1:"+port)
			_, gport, err := net.SplitHostPort(strings.TrimPrefix(g.addr, "udp://"))
			must(t, err)
			to := t.TempDir()
			_, errs, _ := command(t, "gtlsclient", "-q", "--timeout=60s", "--exit-on-all-streams-close", "--download="+to, "127.0.0.1", gport, "https://localhost:"+gport+"/file")
			if got, err := os.Stat(filepath.Join(to, "file")); err != nil || got.Size() != 3_000_000 {
				t.Errorf("%v, %v\n%s", got, err, errs)
			}
		})
	}
}

// DNS by UDP for one service: dig, and many clients at once.
func TestDNSOverUDP(t *testing.T) {
	w := newWorld(t)
	pc, err := net.ListenPacket("udp", "127.0.0.1:0")
	must(t, err)
	srv := &dns.Server{PacketConn: pc, Handler: dns.HandlerFunc(func(rw dns.ResponseWriter, q *dns.Msg) {
		m := new(dns.Msg).SetReply(q)
		m.Answer = []dns.RR{&dns.TXT{Hdr: dns.RR_Header{Name: q.Question[0].Name, Rrtype: dns.TypeTXT, Class: dns.ClassINET}, Txt: []string{"from the service"}}}
		_ = rw.WriteMsg(m)
	})}
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = srv.ActivateAndServe()
	}()
	t.Cleanup(func() {
		_ = srv.Shutdown()
		<-done
	})
	g := w.udpGateway(t, "connectionRatePerClient: -1, maxConnectionsPerClient: -1, maxPendingPerClient: -1", "- {address: \"udp://127.0.0.1:"+freePort(t)+"\", service: "+svc+"}", pc.LocalAddr().String())
	addr := strings.TrimPrefix(g.addr, "udp://")
	host, port, err := net.SplitHostPort(addr)
	must(t, err)
	out, errs, code := command(t, "dig", "@"+host, "-p", port, "+short", "+time=20", "foo.example.test", "TXT")
	if strings.TrimSpace(out) != `"from the service"` || code != 0 {
		t.Errorf("dig: exit code %d, %q %s", code, out, errs)
	}
	const clients = 1000
	failed := make(chan error, clients)
	few := make(chan struct{}, 50) // at once: a socket's buffer has room for 250
	for i := range clients {
		few <- struct{}{}
		go func() {
			defer func() { <-few }()
			c := dns.Client{Timeout: patience}
			m, _, err := c.Exchange(new(dns.Msg).SetQuestion(fmt.Sprintf("n%d.example.test.", i), dns.TypeTXT), addr)
			if err == nil && (len(m.Answer) != 1 || m.Answer[0].Header().Name != m.Question[0].Name) {
				err = fmt.Errorf("answer %v", m)
			}
			failed <- err
		}()
	}
	for range clients {
		if err := <-failed; err != nil {
			t.Errorf("a client of %d: %v", clients, err)
		}
	}
}

// One client's datagrams at a steady rate, as a call or a measurement sends
// them: all arrive, in order, and come back.
func TestSteadyUDP(t *testing.T) {
	w := newWorld(t)
	echo, err := net.ListenUDP("udp", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	must(t, err)
	done := make(chan struct{})
	go func() {
		defer close(done)
		b := make([]byte, 1<<16)
		for {
			n, from, err := echo.ReadFromUDPAddrPort(b)
			if err != nil {
				return
			}
			_, _ = echo.WriteToUDPAddrPort(b[:n], from)
		}
	}()
	t.Cleanup(func() { _ = echo.Close(); <-done })
	g := w.udpGateway(t, "udpIdleTimeout: 1s", "- {address: \"udp://127.0.0.1:"+freePort(t)+"\", service: "+svc+"}", echo.LocalAddr().String())
	c, err := net.Dial("udp", strings.TrimPrefix(g.addr, "udp://"))
	must(t, err)
	defer c.Close()
	const n, size, window = 20_000, 1200, 20
	b := make([]byte, size)
	_ = c.SetDeadline(time.Now().Add(patience))
	for sent, got := 0, 0; got < n; {
		for ; sent < n && sent-got < min(window, got+1); sent++ {
			binary.BigEndian.PutUint32(b, uint32(sent))
			if _, err := c.Write(b); err != nil {
				t.Fatal(err)
			}
		}
		m, err := c.Read(b)
		if err != nil {
			t.Fatalf("after %d of %d: %v", got, n, err)
		}
		if seq := int(binary.BigEndian.Uint32(b)); m != size || seq != got {
			t.Fatalf("datagram %d of %d bytes, want %d of %d", seq, m, got, size)
		}
		got++
	}
	if l := g.outcome(t, c.LocalAddr().String()); l.Reason != "idle" || l.Proto != "udp" || l.In != n*size || l.Out != n*size {
		t.Errorf("the line: %+v", l)
	}
}

// 100,000 datagrams of garbage: the gateway's memory stays level, few lines are
// written, nothing is said to whom they claim to be from, and those that are
// served notice nothing.
func TestUDPFlood(t *testing.T) {
	w := newWorld(t)
	s := w.serveQUIC(t, nil)
	g := quicGateway(t, "--route", route(s.addr))
	c := w.quicClient(t)
	conn := c.mustDial(g.addr, svc)
	c.exchange(conn, 10_000)
	flood, err := net.Dial("udp", strings.TrimPrefix(g.addr, "udp://"))
	must(t, err)
	defer flood.Close()
	before := rss(t, g)
	rnd := rand.New(rand.NewPCG(1, 2))
	b := make([]byte, 1304)
	for i := range 100_000 {
		for j := 0; j < len(b); j += 8 {
			binary.BigEndian.PutUint64(b[j:], rnd.Uint64())
		}
		switch i % 4 {
		case 0: // an Initial that does not decrypt
			copy(b, []byte{0xc3, 0, 0, 0, 1, 8, 1, 2, 3, 4, 5, 6, 7, 8, 0, 0, 0x45, 0x00})
		case 1:
			b[0] |= 0x80
		}
		_, _ = flood.Write(b[:1+rnd.IntN(len(b))])
	}
	c.exchange(conn, 10_000)
	if grown := rss(t, g) - before; grown > 16<<20 && !raceEnabled {
		t.Errorf("the gateway has grown by %d bytes", grown)
	}
	lines := 0
	for _, l := range g.lines() {
		if l.Source == flood.LocalAddr().String() {
			lines++
		}
	}
	if lines == 0 || lines > 500 {
		t.Errorf("%d lines, want ten a second", lines)
	}
	_ = flood.SetReadDeadline(time.Now().Add(100 * time.Millisecond))
	answers := 0
	for {
		n, err := flood.Read(b)
		if err != nil {
			break
		}
		if answers += n; answers > 100_000 {
			t.Fatalf("%d bytes of answer to garbage", answers)
		}
	}
}

// rss is the gateway's resident memory in bytes.
func rss(t *testing.T, g *gateway) (n int) {
	t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/statm", g.cmd.Process.Pid))
	must(t, err)
	var size int
	_, err = fmt.Sscan(string(b), &size, &n)
	must(t, err)
	return n * os.Getpagesize()
}

// spki is the hash of the service's key, as Chromium wants it.
func (w *world) spki() string {
	sum := sha256.Sum256(w.service.TLS.Leaf.RawSubjectPublicKeyInfo)
	return base64.StdEncoding.EncodeToString(sum[:])
}
