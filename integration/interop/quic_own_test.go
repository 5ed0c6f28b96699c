//go:build unix

package interop

import (
	"bytes"
	"io"
	"net"
	"testing"
	"time"

	"github.com/quic-go/quic-go"
	"github.com/quic-go/quic-go/http3"
)

// QUIC to the gateway's own name ends there, at a library behind the same port,
// and to others it passes. Both follow a client to a new address, with the
// tunnels that it has, and the library also one that moves on purpose.
func TestQUICEndsHere(t *testing.T) {
	w := newWorld(t)
	s := w.serveQUIC(t, nil)
	g, addr := startHTTP3(t, w, "    protocols: [quic]", service(svc, s.addr), service("echo.example.test", listenAndEcho(t)))
	r := newRelay(t, g, nil)

	there := w.quicClient(t)
	here := *there // the same socket
	here.tls = w.client.ClientConfig("gw.example.test")
	here.tls.NextProtos = []string{http3.NextProtoH3}
	tunnel := func(cc *http3.ClientConn) *http3.RequestStream {
		s, resp, err := ask(t.Context(), cc, "echo.example.test:7")
		must(t, err)
		if resp.StatusCode != 200 {
			t.Fatalf("status %d", resp.StatusCode)
		}
		must(t, s.SetDeadline(time.Now().Add(2*patience)))
		return s
	}
	carry := func(s *http3.RequestStream) {
		t.Helper()
		want := bytes.Repeat([]byte("0123456789abcdef"), 200_000/16)
		wrote := make(chan error, 1)
		go func() { _, err := s.Write(want); wrote <- err }()
		got := make([]byte, len(want))
		if n, err := io.ReadFull(s, got); err != nil || !bytes.Equal(got, want) {
			t.Fatalf("%d of %d bytes came back, and %v", n, len(want), err)
		}
		must(t, <-wrote)
	}
	passes := there.mustDial(r.addr(), svc)
	ends := tunnel((&http3.Transport{}).NewClientConn(here.mustDial(r.addr(), "gw.example.test")))
	for range 3 {
		carry(ends)
		if id := there.exchange(passes, 200_000); id != clientID {
			t.Errorf("the client is %q, want %q", id, clientID)
		}
		r.rebind(t)
	}
	if n := s.count(); n != 1 {
		t.Errorf("%d connections at the service, want one", n)
	}

	// On purpose: the client validates another path and switches to it.
	pc, err := net.ListenUDP("udp", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	must(t, err)
	defer pc.Close()
	tr := &quic.Transport{Conn: pc}
	defer tr.Close()
	direct := here.mustDial(addr, "gw.example.test")
	cc := (&http3.Transport{}).NewClientConn(direct)
	before := tunnel(cc)
	carry(before)
	path, err := direct.AddPath(tr)
	must(t, err)
	must(t, path.Probe(t.Context()))
	must(t, path.Switch())
	carry(before)
	after := tunnel(cc)
	carry(after)
	must(t, after.Close())
	g.line(t, "the new path", func(l line) bool { return l.Proto == "connect-h3" && l.Source == pc.LocalAddr().String() })
}
