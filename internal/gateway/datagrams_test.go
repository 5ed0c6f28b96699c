package gateway

import (
	"context"
	"log/slog"
	"net"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	"culvert.dev/internal/gateway/inbound"

	"culvert.dev/internal/testnet"
	"culvert.dev/registry"
	"culvert.dev/tunnel"
)

// lines is a log.
type lines struct {
	mu sync.Mutex // guards b
	b  strings.Builder
}

func (l *lines) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lines) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// Datagrams go nowhere that a stream may not: not to loopback by a name that
// somebody else's DNS has, and not to the gateway's own listeners. An address
// that the configuration writes itself is dialed.
func TestDatagramsAreGuarded(t *testing.T) {
	service, err := net.ListenUDP("udp", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	defer service.Close()
	port := service.LocalAddr().(*net.UDPAddr).AddrPort().Port()
	heard := make(chan string, 10)
	go func() {
		b := make([]byte, 100)
		for {
			n, from, err := service.ReadFromUDPAddrPort(b)
			if err != nil {
				return
			}
			heard <- string(b[:n])
			_, _ = service.WriteToUDPAddrPort(b[:n], from)
		}
	}()
	source := later{make(chan registry.Snapshot)}
	listener := func(name string) Listener {
		return Listener{Address: "udp://127.0.0.1:0", Datagrams: &inbound.Datagrams{Service: tunnel.MustParseName(name), Port: 1}}
	}
	var log lines
	g, err := New(t.Context(), Config{
		Sources:   []registry.Source{source},
		Listeners: []Listener{listener("named.test"), listener("looked-up.test"), listener("own.test")},
		Lookup: func(context.Context, string) ([]netip.Addr, error) {
			return []netip.Addr{netip.MustParseAddr("127.0.0.1")}, nil
		},
		Log: slog.New(slog.NewTextHandler(&log, nil)), DrainDelay: -1, DrainTimeout: -1,
	})
	if err != nil {
		t.Fatal(err)
	}
	defer g.Close()
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- g.Run(ctx, nil) }()
	defer func() {
		cancel()
		<-ended
	}()
	own := netip.MustParseAddrPort(g.Addrs()[2].String())
	service1 := func(name string, ep registry.Endpoint) *registry.Service {
		return &registry.Service{Name: name, Names: []tunnel.Pattern{{Suffix: tunnel.MustParseName(name)}}, Exposed: true, Endpoints: []registry.Endpoint{ep}}
	}
	source.now <- registry.Snapshot{Services: []*registry.Service{
		service1("named.test", registry.Endpoint{Addr: netip.MustParseAddr("127.0.0.1"), Port: port}),
		service1("looked-up.test", registry.Endpoint{Host: "somewhere.test", Port: port}),
		service1("own.test", registry.Endpoint{Addr: own.Addr(), Port: own.Port()}),
	}}
	testnet.Eventually(t, soon, func() bool { return g.registry.Table() != nil }, "the table is there")

	say := func(i int, text string) *net.UDPConn {
		c, err := net.Dial("udp", g.Addrs()[i].String())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = c.Close() })
		if _, err := c.Write([]byte(text)); err != nil {
			t.Fatal(err)
		}
		return c.(*net.UDPConn)
	}
	for i, want := range map[int]tunnel.Reason{1: tunnel.Prohibited, 2: tunnel.Loop} {
		say(i, "no")
		testnet.Eventually(t, soon, func() bool { return strings.Contains(log.String(), "reason="+string(want)) }, "%s is logged", want)
	}
	select {
	case text := <-heard:
		t.Errorf("the service heard %q", text)
	default:
	}
	c := say(0, "yes")
	_ = c.SetReadDeadline(time.Now().Add(10 * time.Second))
	b := make([]byte, 10)
	if n, err := c.Read(b); err != nil || string(b[:n]) != "yes" {
		t.Errorf("by an address that is written down: %q, %v", b[:n], err)
	}
}
