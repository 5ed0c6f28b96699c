package upstream

import (
	"net/netip"
	"runtime"
	"testing"
	"time"

	"culvert.dev/registry"
	"culvert.dev/tunnel"
)

// closed is an address that nobody listens at.
var closed = netip.MustParseAddrPort("127.0.0.1:1")

// overGateway makes the transport over a gateway.
func overGateway(t *testing.T, up *Transports, s *registry.Service, ep registry.Endpoint, by string) tunnel.Transport {
	t.Helper()
	transport, err := up.New(s, &ep, &registry.Gateway{Transports: registry.HopsBy(by)})
	if err != nil {
		t.Fatal(err)
	}
	return transport
}

// The requests that go over one gateway share a transport, and those over others do
// not.
func TestTransportsAreShared(t *testing.T) {
	up := &Transports{Direct: &tunnel.NetDialer{}}
	defer up.Close()
	plain := &registry.Service{}
	ep := registry.Endpoint{Addr: closed.Addr(), Port: closed.Port()}
	a := overGateway(t, up, plain, ep, "connect-h2")
	if overGateway(t, up, &registry.Service{Name: "another"}, ep, "connect-h2") != a {
		t.Error("the same gateway has two transports")
	}
	told := overGateway(t, up, &registry.Service{ProxyProtocol: 2}, ep, "connect-h2").(*layered)
	if told.Transport != a || len(told.layers) != 1 {
		t.Errorf("a service with a layer has %+v, want the layer on the gateway's transport", told)
	}
	for name, b := range map[string]tunnel.Transport{
		"by another carrier": overGateway(t, up, plain, ep, "connect"),
		"by name":            overGateway(t, up, plain, registry.Endpoint{Host: "gw.test", Port: 1}, "connect-h2"),
	} {
		if a == b {
			t.Errorf("a gateway %s has the transport of another", name)
		}
	}
	if _, err := up.NextHop([]registry.Hop{{Proto: "carrier pigeon", Addresses: []string{"gw.test:1"}}}); err == nil {
		t.Error("there is a transport by carrier pigeon")
	}
	runtime.KeepAlive(a)
}

// What no table uses any more is forgotten, with its secrets and its connections.
func TestUnusedTransportsAreForgotten(t *testing.T) {
	up := &Transports{Direct: &tunnel.NetDialer{}}
	defer up.Close()
	count := func() (hops, pools int) {
		up.hops.mu.Lock()
		defer up.hops.mu.Unlock()
		up.mu.Lock()
		defer up.mu.Unlock()
		return len(up.hops.byKey), len(up.pools)
	}
	for i := range 1000 {
		overGateway(t, up, &registry.Service{}, registry.Endpoint{Addr: closed.Addr(), Port: uint16(i + 1)}, "connect-h2")
	}
	kept := overGateway(t, up, &registry.Service{}, registry.Endpoint{Host: "kept.test", Port: 1}, "connect-h2")
	for end := time.Now().Add(10 * time.Second); ; {
		runtime.GC()
		hops, pools := count()
		if hops == 1 && pools == 2 { // a carrier, and what probes it
			break
		}
		if time.Now().After(end) {
			t.Fatalf("%d transports and %d pools are kept, want the one in use", hops, pools)
		}
		runtime.Gosched()
	}
	if overGateway(t, up, &registry.Service{}, registry.Endpoint{Host: "kept.test", Port: 1}, "connect-h2") != kept {
		t.Error("a transport in use was forgotten")
	}
}
