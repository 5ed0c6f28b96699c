package gateway

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"culvert.dev/internal/testnet"
	"culvert.dev/registry"
	"culvert.dev/tunnel"
)

// udpPort makes a listener of UDP for one service as the configuration file has it.
func (e *edge) udpPort(port uint16, service string) *registry.Listener {
	return &registry.Listener{
		Name: "udp://" + e.at(port), Protocol: registry.Datagrams, Address: e.addr, Port: port,
		Settings: &registry.ListenerSettings{Service: tunnel.MustParseName(service)},
	}
}

// told returns a service at ep.
func told(name string, ep registry.Endpoint) *registry.Service {
	return &registry.Service{Name: name, Names: []tunnel.Pattern{{Suffix: tunnel.MustParseName(name)}}, Exposed: true, Endpoints: []registry.Endpoint{ep}, Ports: []uint16{ep.Port}}
}

// hearsUDP asks at a port of UDP until it hears an answer, as a datagram may be lost while a
// socket is opened again.
func (e *edge) hearsUDP(port uint16, want, why string) {
	e.t.Helper()
	testnet.Eventually(e.t, soon, func() bool { return query(e.dialUDP(port), 500*time.Millisecond) == want }, "%s: the answer is %s", why, want)
}

// A listener of UDP gets another service, at its socket's address, and two change places.
// One that cannot be served changes nothing.
func TestListenersOfUDPChange(t *testing.T) {
	t.Parallel()
	e := newEdge(t)
	services := []*registry.Service{told("a.test", udpEcho(t, "a")), told("b.test", udpEcho(t, "b"))}
	have := func(listeners ...*registry.Listener) {
		t.Helper()
		e.say(registry.Snapshot{Services: services, Listeners: listeners})
	}
	one, two := e.port(), e.port()
	for i := range 4 {
		names := []string{"a.test", "b.test", "a.test"}[i%2:]
		have(e.udpPort(one, names[0]), e.udpPort(two, names[1]))
		e.hearsUDP(one, names[0][:1]+"?", "the first listener")
		e.hearsUDP(two, names[1][:1]+"?", "the second listener")
		for name, err := range e.ListenerErrors() {
			if err != nil {
				t.Fatalf("%d: %s: %v", i, name, err)
			}
		}
	}
	have(e.udpPort(one, "b.test"))
	e.hearsUDP(one, "b?", "the one that is left")
	bad := e.udpPort(one, "a.test")
	bad.Settings.Service = tunnel.Name{}
	bad.Settings.TLS = []registry.ListenerTLS{{TLSTermination: registry.TLSTermination{Certificates: []registry.KeyPair{{Certificate: "none"}}}}}
	have(bad)
	e.hearsUDP(one, "b?", "one that has no certificate")
	if s := e.Status().Listeners; len(s) != 1 || !strings.Contains(s[0].Problem, "what was served before is served on") {
		t.Errorf("the status is %+v", s)
	}
}

// A listener that moves to all addresses of its port stays where it is while another
// program has the port at one of them.
func TestListenerMovesToAllAddresses(t *testing.T) {
	t.Parallel()
	if runtime.GOOS != "linux" {
		return // the others exclude nobody
	}
	svc := service(testnet.Echo(t).Addr())
	e := newEdge(t)
	old := e.configured("connect")
	e.configure(svc, old)
	kept, err := e.by(old, "")
	if err != nil {
		t.Fatal(err)
	}
	defer kept.Close()
	_, port, err := net.SplitHostPort(old.Name)
	if err != nil {
		t.Fatal(err)
	}
	taken, err := net.Listen("tcp", net.JoinHostPort(e.addr.Next().String(), port))
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	all := *old
	all.Address, all.Name = netip.Addr{}, ":"+port
	e.configure(svc, &all)
	if c, err := e.by(old, ""); err != nil {
		t.Errorf("the listener that stays: %v", err)
	} else {
		_ = c.Close()
	}
	if err := e.ListenerErrors()[all.Name]; err == nil || !strings.Contains(err.Error(), "stays open") {
		t.Errorf("the listener that cannot be opened: %v", err)
	}
	// It is not closed and opened again at each try: no client is refused.
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	var clients sync.WaitGroup
	clients.Go(func() {
		for ctx.Err() == nil {
			c, err := net.Dial("tcp", e.addr.String()+":"+port)
			if errors.Is(err, syscall.ECONNREFUSED) {
				t.Errorf("a client of the listener that stays: %v", err)
				return
			}
			if err == nil {
				_ = c.(*net.TCPConn).SetLinger(0) // no port of the client's waits for its end
				_ = c.Close()
			}
		}
	})
	for range 20 {
		again := all
		e.configure(svc, &again)
	}
	stop()
	clients.Wait()
	_ = taken.Close()
	testnet.Eventually(t, soon, func() bool { return e.ListenerErrors()[all.Name] == nil }, "it is tried again")
	if c, err := e.by(old, ""); err != nil { // which all addresses have
		t.Errorf("the listener at all addresses: %v", err)
	} else {
		_ = c.Close()
	}
	e.configure(svc, old)
	if c, err := e.by(old, ""); err != nil {
		t.Errorf("back at one address: %v", err)
	} else {
		_ = c.Close()
	}
	if n := len(e.inbound.open); n != 1 {
		t.Errorf("%d listeners are open, want 1", n)
	}
	works(t, kept)
}
