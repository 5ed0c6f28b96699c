//go:build unix

package interop

import (
	"bytes"
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/miekg/dns"
	"github.com/quic-go/quic-go"
	"github.com/quic-go/quic-go/http3"
	"github.com/quic-go/quic-go/quicvarint"
	"golang.org/x/net/http2"

	"culvert.dev/connect"
	"culvert.dev/internal/testca"
)

const (
	resolver = "dns.example.test"
	echoing  = "echo.example.test"
)

// serveDNS answers every question with a TXT record of the size that its name begins
// with.
func serveDNS(t *testing.T) (addr string) {
	t.Helper()
	pc, err := net.ListenPacket("udp", "127.0.0.1:0")
	must(t, err)
	srv := &dns.Server{PacketConn: pc, Handler: dns.HandlerFunc(func(rw dns.ResponseWriter, q *dns.Msg) {
		m := new(dns.Msg).SetReply(q)
		var size int
		_, _ = fmt.Sscanf(q.Question[0].Name, "%d.", &size)
		txt := &dns.TXT{Hdr: dns.RR_Header{Name: q.Question[0].Name, Rrtype: dns.TypeTXT, Class: dns.ClassINET}}
		for ; size > 0; size -= 200 {
			txt.Txt = append(txt.Txt, strings.Repeat("x", min(size, 200)))
		}
		m.Answer = append(m.Answer, txt)
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
	return pc.LocalAddr().String()
}

// resolve asks the resolver at addr for a record of size bytes. A datagram may be lost.
func resolve(t *testing.T, addr string, size int) {
	t.Helper()
	var err error
	for range 5 {
		var m *dns.Msg
		q := new(dns.Msg).SetQuestion(fmt.Sprintf("%d.example.test.", size), dns.TypeTXT).SetEdns0(4096, false)
		if m, _, err = (&dns.Client{Timeout: patience / 10}).Exchange(q, addr); err == nil {
			if n := len(strings.Join(m.Answer[0].(*dns.TXT).Txt, "")); n != size {
				t.Fatalf("an answer of %d bytes, want %d", n, size)
			}
			return
		}
	}
	t.Fatalf("a question for %d bytes: %v", size, err)
}

// A hopGateway is one that takes datagrams for its services.
type hopGateway struct {
	*gateway
	carrier, address string
	config           string
}

// hop returns the way to h as an entry of via, by its address or by a name.
func (h *hopGateway) hop(w *world, name string) string {
	to := h.address
	if name != "" {
		_, port, _ := net.SplitHostPort(to)
		to = name + ":" + port
	}
	if h.carrier == "connect-h2" {
		to = "https://" + to
	}
	return fmt.Sprintf("{%s: %q, caFile: %q, certificateFile: %q, keyFile: %q}", h.carrier, to, w.ca, w.cert, w.key)
}

// startHop starts a gateway that is asked by carrier for services, and wants to know who
// asks.
func startHop(t *testing.T, w *world, name, carrier, services string) *hopGateway {
	t.Helper()
	ca, err := testca.Load(w.dir, nil)
	must(t, err)
	if _, err := os.Stat(w.dir + "/gw.crt"); err != nil {
		issue(t, ca, w.dir, "gw", testca.Options{
			SPIFFEID: "spiffe://example.test/gw", DNSNames: []string{"gw.example.test"}, IPs: []net.IP{net.IPv4(127, 0, 0, 1)}, Usage: testca.ServerOnly,
		})
	}
	h := &hopGateway{carrier: carrier, address: "127.0.0.1:" + freePort(t)}
	at := h.address
	if carrier == "connect-h3" {
		at = "udp://" + at
	}
	h.config = w.write(t, name+".yaml", fmt.Sprintf(`
listeners:
  - address: %q
    tls: {certificateFile: gw.crt, keyFile: gw.key, clientCAFile: ca.crt, protocols: [%s, connect-udp]}
admin: 127.0.0.1:%s
drain: {delay: 0s, timeout: 1s}
services:
%s`, at, carrier, freePort(t), services))
	h.gateway = startGateway(t, "--config", h.config)
	return h
}

// endpoints are the services at their own addresses.
func endpoints(quicAddr, dnsAddr, echoAddr string) string {
	// ngtcp2's client names localhost where it is given an address.
	return service(svc, quicAddr, "ports: [443]") + service("localhost", quicAddr, "ports: [443]") + service(resolver, dnsAddr, "ports: [53]") + service(echoing, echoAddr, "ports: [7]")
}

// behind are the services behind the hops.
func behind(hops ...string) string {
	s := ""
	for _, one := range []struct {
		name string
		port int
	}{{svc, 443}, {"localhost", 443}, {resolver, 53}, {echoing, 7}} {
		s += fmt.Sprintf("  - name: %s\n    ports: [%d]\n    via:\n", one.name, one.port)
		for _, h := range hops {
			s += "      - " + h + "\n"
		}
	}
	return s
}

// A nearGateway is the one that clients use: QUIC by its name, a port for the resolver, and
// CONNECT.
type nearGateway struct {
	*gateway
	quic, dns, connect string
}

func startNear(t *testing.T, w *world, services string) *nearGateway {
	t.Helper()
	n := &nearGateway{quic: "127.0.0.1:" + freePort(t), dns: "127.0.0.1:" + freePort(t), connect: "127.0.0.1:" + freePort(t)}
	n.gateway = startGateway(t, "--config", w.write(t, "near.yaml", fmt.Sprintf(`
listeners:
  - address: %q
    protocols: [connect]
  - address: "udp://%s"
  - {address: "udp://%s", service: "%s:53"}
admin: 127.0.0.1:%s
services:
%s`, n.connect, n.quic, n.dns, resolver, freePort(t), services)))
	return n
}

// TestDatagramsOverGateways: DNS and QUIC go over one gateway and over two, by HTTP/2 and
// by HTTP/3, and each of them logs what it carried.
func TestDatagramsOverGateways(t *testing.T) {
	t.Parallel()
	for _, carriers := range [][]string{
		{"connect-h2"}, {"connect-h3"}, {"connect-h2", "connect-h2"}, {"connect-h3", "connect-h3"}, {"connect-h2", "connect-h3"}, {"connect-h3", "connect-h2"},
	} {
		t.Run(strings.Join(carriers, ", "), func(t *testing.T) {
			w := newWorld(t)
			s := w.serveQUIC(t, nil)
			services := endpoints(s.addr, serveDNS(t), listenAndEcho(t))
			hops := make([]*hopGateway, len(carriers))
			for i := len(carriers) - 1; i >= 0; i-- {
				hops[i] = startHop(t, w, fmt.Sprintf("hop%d", i), carriers[i], services)
				services = behind(hops[i].hop(w, ""))
			}
			near := startNear(t, w, services)
			resolve(t, near.dns, 10)
			resolve(t, near.dns, 1000)
			if carriers[0] == "connect-h2" && carriers[len(carriers)-1] == "connect-h2" {
				resolve(t, near.dns, 3000) // capsules are no packets
			}
			c := w.quicClient(t)
			conn := c.mustDial(near.quic, svc)
			if id := c.exchange(conn, 1<<20); id != clientID {
				t.Errorf("the service saw %q, want %q", id, clientID)
			}
			must(t, conn.CloseWithError(0, ""))
			for _, h := range hops {
				h.signal(syscall.SIGTERM) // which ends the tunnels, and has them logged
				h.awaitEnd(t)
				for _, name := range []string{svc, resolver} {
					l := h.line(t, "carried "+name, func(l line) bool { return l.Msg == "tunnel" && l.Proto == "connect-udp" && l.Service == name })
					if l.In == 0 || l.Out == 0 || l.Peer != clientPeer {
						t.Errorf("the line: %+v", l)
					}
				}
			}
		})
	}
}

// TestNgtcp2OverGateways: HTTP/3 of ngtcp2 on both sides, over two gateways.
func TestNgtcp2OverGateways(t *testing.T) {
	w := newWorld(t)
	dir := t.TempDir()
	must(t, os.WriteFile(filepath.Join(dir, "file"), bytes.Repeat([]byte("x"), 1_000_000), 0o600))
	port := freePort(t)
	p := start(t, "gtlsserver", "-q", "-d", dir, "127.0.0.1", port, w.svcKey, w.svcCert)
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
	for _, carriers := range [][2]string{{"connect-h2", "connect-h3"}, {"connect-h3", "connect-h2"}} {
		t.Run(carriers[0]+", "+carriers[1], func(t *testing.T) {
			far := startHop(t, w, "far", carriers[1], endpoints("127.0.0.1:"+port, serveDNS(t), listenAndEcho(t)))
			middle := startHop(t, w, "middle", carriers[0], behind(far.hop(w, "")))
			near := startNear(t, w, behind(middle.hop(w, "")))
			host, port, err := net.SplitHostPort(near.quic)
			must(t, err)
			got := t.TempDir()
			_, errs, code := command(t, "gtlsclient", "-q", "--timeout=60s", "--exit-on-all-streams-close", "--download="+got, host, port, "https://"+svc+":"+port+"/file")
			b, err := os.ReadFile(filepath.Join(got, "file"))
			if err != nil || len(b) != 1_000_000 {
				t.Errorf("exit code %d, %d bytes (%v)\n%s", code, len(b), err, errs)
			}
		})
	}
}

// TestHTTP3IsAnyHop: a gateway behind another one is asked by HTTP/3, through a tunnel of
// datagrams. Streams and datagrams go by it.
func TestHTTP3IsAnyHop(t *testing.T) {
	for _, first := range []string{"connect-h2", "connect-h3"} {
		t.Run(first, func(t *testing.T) {
			w := newWorld(t)
			s := w.serveQUIC(t, nil)
			far := startHop(t, w, "far", "connect-h3", endpoints(s.addr, serveDNS(t), listenAndEcho(t)))
			_, port, err := net.SplitHostPort(far.address)
			must(t, err)
			middle := startHop(t, w, "middle", first, service("gw.example.test", far.address, "ports: ["+port+"]"))
			near := startNear(t, w, behind(middle.hop(w, ""), far.hop(w, "gw.example.test")))
			resolve(t, near.dns, 10)
			c := w.quicClient(t)
			if id := c.exchange(c.mustDial(near.quic, svc), 1<<20); id != clientID {
				t.Errorf("the service saw %q, want %q", id, clientID)
			}
			d := &connect.Dialer{Proxy: near.connect}
			conn, err := d.DialContext(t.Context(), "tcp", echoing+":7")
			must(t, err)
			defer conn.Close()
			must(t, conn.SetDeadline(time.Now().Add(2*patience)))
			want := bytes.Repeat([]byte("0123456789abcdef"), 1<<16)
			var wg sync.WaitGroup
			defer wg.Wait()
			wg.Go(func() { _, _ = conn.Write(want) })
			got := make([]byte, len(want))
			if n, err := io.ReadFull(conn, got); err != nil || !bytes.Equal(got, want) {
				t.Errorf("%d of %d bytes came back, and %v", n, len(want), err)
			}
		})
	}
}

// TestNextDatagramBeginsAgain: where the gateway behind has gone, the sessions end, and the
// next datagram makes another one as soon as it is back.
func TestNextDatagramBeginsAgain(t *testing.T) {
	for _, carrier := range []string{"connect-h2", "connect-h3"} {
		t.Run(carrier, func(t *testing.T) {
			w := newWorld(t)
			far := startHop(t, w, "far", carrier, endpoints("127.0.0.1:1", serveDNS(t), "127.0.0.1:1"))
			near := startNear(t, w, behind(far.hop(w, "")))
			c, err := dns.Dial("udp", near.dns) // one client, and so one session
			must(t, err)
			defer c.Close()
			ask := func() error {
				must(t, c.SetDeadline(time.Now().Add(time.Second)))
				if err := c.WriteMsg(new(dns.Msg).SetQuestion("10.example.test.", dns.TypeTXT)); err != nil {
					return err
				}
				_, err := c.ReadMsg()
				return err
			}
			answered := func() {
				t.Helper()
				end := time.Now().Add(2 * patience)
				for ask() != nil {
					if time.Now().After(end) {
						t.Fatal("no answer")
					}
				}
			}
			answered()
			far.signal(syscall.SIGTERM)
			far.awaitEnd(t)
			near.line(t, "ended the session", func(l line) bool { return l.Msg == "tunnel" && l.Proto == "udp" && l.Service == resolver })
			startGateway(t, "--config", far.config)
			answered()
		})
	}
}

// TestForeignClientsOfConnectUDP: quic-go's HTTP/3 with DATAGRAM frames, and Go's HTTP/2
// with capsules.
func TestForeignClientsOfConnectUDP(t *testing.T) {
	w := newWorld(t)
	question, err := new(dns.Msg).SetQuestion("10.example.test.", dns.TypeTXT).Pack()
	must(t, err)
	path := "/.well-known/masque/udp/" + resolver + "/53/"
	conf := w.client.ClientConfig("gw.example.test")
	answered := func(b []byte) {
		t.Helper()
		if m := new(dns.Msg); m.Unpack(b) != nil || len(m.Answer) != 1 {
			t.Errorf("answer %x", b)
		}
	}
	ctx, cancel := context.WithTimeout(t.Context(), 3*patience)
	defer cancel()

	t.Run("HTTP/3", func(t *testing.T) {
		h := startHop(t, w, "h3", "connect-h3", endpoints("127.0.0.1:1", serveDNS(t), "127.0.0.1:1"))
		conf := conf.Clone()
		conf.NextProtos = []string{http3.NextProtoH3}
		qc, err := quic.DialAddr(ctx, h.address, conf, &quic.Config{EnableDatagrams: true})
		must(t, err)
		defer func() { _ = qc.CloseWithError(0x100, "") }()
		cc := (&http3.Transport{EnableDatagrams: true}).NewClientConn(qc)
		select {
		case <-cc.ReceivedSettings():
		case <-ctx.Done():
			t.Fatal("no settings")
		}
		if s := cc.Settings(); !s.EnableDatagrams || !s.EnableExtendedConnect {
			t.Errorf("settings %+v", s)
		}
		s, err := cc.OpenRequestStream(ctx)
		must(t, err)
		req := &http.Request{
			Method: http.MethodConnect, Proto: "connect-udp", Host: "gw.example.test", URL: &url.URL{Scheme: "https", Host: "gw.example.test", Path: path},
			Header: http.Header{"Capsule-Protocol": {"?1"}},
		}
		must(t, s.SendRequestHeader(req.WithContext(ctx)))
		resp, err := s.ReadResponse()
		must(t, err)
		if resp.StatusCode != 200 || resp.Header.Get("Capsule-Protocol") != "?1" {
			t.Fatalf("status %d, %v", resp.StatusCode, resp.Header)
		}
		must(t, s.SendDatagram(append([]byte{0}, question...)))
		b, err := s.ReceiveDatagram(ctx)
		must(t, err)
		answered(b[1:])
		// The same in a capsule: the answer comes as a frame.
		_, err = s.Write(append(quicvarint.Append([]byte{0}, uint64(1+len(question))), append([]byte{0}, question...)...))
		must(t, err)
		b, err = s.ReceiveDatagram(ctx)
		must(t, err)
		answered(b[1:])
		must(t, s.Close())
		if _, err := io.ReadAll(s); err != nil {
			t.Errorf("the end: %v", err)
		}
		h.line(t, "logged the tunnel", func(l line) bool {
			return l.Proto == "connect-udp" && l.Reason == "done" && l.In == int64(2*len(question))
		})
	})

	t.Run("HTTP/2", func(t *testing.T) {
		h := startHop(t, w, "h2", "connect-h2", endpoints("127.0.0.1:1", serveDNS(t), "127.0.0.1:1"))
		conf := conf.Clone()
		conf.NextProtos = []string{"h2"}
		raw, err := (&tls.Dialer{Config: conf}).DialContext(ctx, "tcp", h.address)
		must(t, err)
		//lint:ignore SA1019 net/http takes no field :protocol
		cc, err := (&http2.Transport{}).NewClientConn(raw)
		must(t, err)
		defer cc.Close()
		body, send := io.Pipe()
		req, err := http.NewRequestWithContext(ctx, http.MethodConnect, "https://gw.example.test"+path, body)
		must(t, err)
		req.Header = http.Header{":protocol": {"connect-udp"}, "Capsule-Protocol": {"?1"}}
		resp, err := cc.RoundTrip(req)
		must(t, err)
		defer resp.Body.Close()
		if resp.StatusCode != 200 || resp.Header.Get("Capsule-Protocol") != "?1" {
			t.Fatalf("status %d, %v", resp.StatusCode, resp.Header)
		}
		other := []byte{0x40, 0x99, 3, 1, 2, 3} // a capsule that nobody knows
		_, err = send.Write(append(append(other, quicvarint.Append([]byte{0}, uint64(1+len(question)))...), append([]byte{0}, question...)...))
		must(t, err)
		r := quicvarint.NewReader(resp.Body)
		kind, err := quicvarint.Read(r)
		must(t, err)
		size, err := quicvarint.Read(r)
		must(t, err)
		value := make([]byte, size)
		_, err = io.ReadFull(r, value)
		must(t, err)
		if kind != 0 || value[0] != 0 {
			t.Fatalf("a capsule of type %d and context %d", kind, value[0])
		}
		answered(value[1:])
		must(t, send.Close())
		h.line(t, "logged the tunnel", func(l line) bool { return l.Proto == "connect-udp" && l.Reason == "done" })
	})
}
