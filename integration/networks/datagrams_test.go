//go:build linux && netns

package networks

import (
	"context"
	"crypto/tls"
	"io"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/quic-go/quic-go"

	"culvert.dev/internal/testca"
	"culvert.dev/internal/testnet"
	"culvert.dev/internal/testnet/netns"
)

// A logbook is what a program says.
type logbook struct {
	mu sync.Mutex // guards b
	b  strings.Builder
}

func (l *logbook) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *logbook) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// udpIn opens a socket of UDP in a namespace.
func udpIn(t *testing.T, ns *netns.NS, addr string) *net.UDPConn {
	t.Helper()
	var c *net.UDPConn
	err := ns.Do(func() (err error) {
		at, err := net.ResolveUDPAddr("udp", addr)
		if err != nil {
			return err
		}
		c, err = net.ListenUDP("udp", at)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	return c
}

// Datagrams obey the rule of plaintext between networks: those of a service in another
// network are refused before one has left, unless the configuration permits it, and QUIC
// is carried, as it is encrypted.
func TestDatagramsBetweenNetworks(t *testing.T) {
	t.Parallel()
	home, lab := netns.New(t, "home"), netns.New(t, "lab")
	netns.Link(t, home, "192.0.2.1/24", lab, "192.0.2.2/24")
	home.Route(t, "198.51.100.0/24", "192.0.2.2")
	s := &site{t: t, dir: t.TempDir()}
	s.must(lab.Command(t.Context(), "ip", "addr", "add", "198.51.100.7/32", "dev", "lo"))

	// Services that echo, and count what comes.
	var heard sync.Map // the number of datagrams by port
	for _, port := range []string{"5000", "5001"} {
		c := udpIn(t, lab, "198.51.100.7:"+port)
		go func() {
			b := make([]byte, 100)
			for n := 1; ; n++ {
				size, from, err := c.ReadFromUDPAddrPort(b)
				if err != nil {
					return
				}
				heard.Store(port, n)
				_, _ = c.WriteToUDPAddrPort(b[:size], from)
			}
		}()
	}
	ca, err := testca.New("example.test", nil)
	if err != nil {
		t.Fatal(err)
	}
	pair, err := ca.Issue(testca.Options{SPIFFEID: "spiffe://example.test/svc", DNSNames: []string{"svc.example.test"}, Usage: testca.ServerOnly})
	if err != nil {
		t.Fatal(err)
	}
	ln, err := quic.Listen(udpIn(t, lab, "198.51.100.7:443"), &tls.Config{Certificates: []tls.Certificate{pair.TLS}, NextProtos: []string{"echo"}}, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	go func() {
		for {
			c, err := ln.Accept(context.WithoutCancel(t.Context()))
			if err != nil {
				return
			}
			if stream, err := c.AcceptStream(c.Context()); err == nil {
				_, _ = io.Copy(stream, stream)
				_ = stream.Close()
			}
		}
	}()

	config := filepath.Join(s.dir, "home.yaml")
	if err := os.WriteFile(config, []byte(`
network: home
networks:
  - {name: home, cidrs: [192.0.2.0/24]}
  - {name: lab, cidrs: [198.51.100.0/24]}
listeners:
  - {address: "udp://127.0.0.1:6000", service: "refused.example.test:5000"}
  - {address: "udp://127.0.0.1:6001", service: "permitted.example.test:5001"}
  - {address: "udp://127.0.0.1:6443", protocols: [quic]}
services:
  - {name: refused.example.test, ports: [5000], endpoints: ["198.51.100.7:5000"]}
  - {name: permitted.example.test, ports: [5001], endpoints: ["198.51.100.7:5001"], insecure: true}
  - {name: svc.example.test, ports: [443], endpoints: ["198.51.100.7:443"]}
`), 0o600); err != nil {
		t.Fatal(err)
	}
	cmd := home.Command(context.WithoutCancel(t.Context()), culvert, "gateway", "--config", config, "--admin", "unix:"+s.socket("home"))
	log := &logbook{}
	cmd.Stderr = log
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Signal(syscall.SIGKILL)
		_ = cmd.Wait()
		report(t, "home", log.String())
	})
	testnet.Eventually(t, patience, func() bool { return strings.Count(log.String(), "msg=serving ") >= 3 }, "the gateway serves")

	client := udpIn(t, home, "127.0.0.1:0")
	ask := func(to, what string) {
		t.Helper()
		if _, err := client.WriteTo([]byte(what), net.UDPAddrFromAddrPort(netip.MustParseAddrPort(to))); err != nil {
			t.Fatal(err)
		}
	}
	ask("127.0.0.1:6000", "nobody may read this")
	testnet.Eventually(t, patience, func() bool {
		for line := range strings.Lines(log.String()) {
			if strings.Contains(line, "proto=udp") && strings.Contains(line, "reason=insecure") && strings.Contains(line, "refused.example.test") {
				return true
			}
		}
		return false
	}, "the log says that it is refused")

	b := make([]byte, 100)
	answered := false
	for deadline := time.Now().Add(patience); !answered && time.Now().Before(deadline); {
		ask("127.0.0.1:6001", "everybody may read this") // again, as a datagram may be lost
		_ = client.SetReadDeadline(time.Now().Add(time.Second))
		n, _, err := client.ReadFromUDPAddrPort(b)
		answered = err == nil && string(b[:n]) == "everybody may read this"
	}
	if !answered {
		t.Error("what the configuration permits is not carried")
	}
	if n, ok := heard.Load("5000"); ok {
		t.Errorf("%v datagrams have crossed in the clear", n)
	}

	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	c, err := quic.Dial(ctx, udpIn(t, home, "127.0.0.1:0"), net.UDPAddrFromAddrPort(netip.MustParseAddrPort("127.0.0.1:6443")),
		&tls.Config{RootCAs: ca.Pool(), ServerName: "svc.example.test", NextProtos: []string{"echo"}}, nil)
	if err != nil {
		t.Fatalf("QUIC: %v", err)
	}
	defer c.CloseWithError(0, "")
	stream, err := c.OpenStreamSync(ctx)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := io.WriteString(stream, "end to end"); err != nil {
		t.Fatal(err)
	}
	_ = stream.Close()
	_ = stream.SetReadDeadline(time.Now().Add(patience))
	if got, err := io.ReadAll(stream); string(got) != "end to end" || err != nil {
		t.Errorf("QUIC: heard %q, %v", got, err)
	}
}
