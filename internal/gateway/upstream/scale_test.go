package upstream

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/netip"
	"runtime"
	"sync/atomic"
	"testing"

	"culvert.dev/connect"
	"culvert.dev/connect/h2"
	"culvert.dev/internal/testnet"
	"culvert.dev/registry"
	"culvert.dev/tunnel"
	"culvert.dev/tunnel/tunneltest"
)

const (
	scaleServices = 1000
	scaleGateways = 50
)

// counting counts what its listener accepts.
type counting struct {
	net.Listener
	accepted *atomic.Int64
}

func (c counting) Accept() (net.Conn, error) {
	conn, err := c.Listener.Accept()
	if err == nil {
		c.accepted.Add(1)
	}
	return conn, err
}

// scaleSnapshot is scaleServices over scaleGateways, each in a network of its own with three
// transports, at addrs.
func scaleSnapshot(addrs []string) registry.Snapshot {
	s := registry.Snapshot{Networks: []registry.Network{{Name: "home"}}}
	for i, addr := range addrs {
		at := netip.MustParseAddrPort(addr)
		s.Networks = append(s.Networks, registry.Network{Name: fmt.Sprint("network-", i), Gateways: []registry.Gateway{{
			Address: registry.Endpoint{Addr: at.Addr(), Port: at.Port()}, Transports: registry.HopsBy("connect-h2", "connect", "websocket"),
		}}})
	}
	for i := range scaleServices {
		name := tunnel.MustParseName(fmt.Sprintf("s%d.test", i))
		s.Services = append(s.Services, &registry.Service{
			Name: name.String(), Names: []tunnel.Pattern{{Suffix: name}}, Ports: []uint16{443}, Exposed: true, ProxyProtocol: i % 2,
			Endpoints: []registry.Endpoint{{Addr: netip.MustParseAddr("10.0.0.1"), Port: 443, Network: fmt.Sprint("network-", i%len(addrs))}},
		})
	}
	return s
}

// A thousand services over fifty gateways, with three transports each, share one fallback
// dialer and three carriers for each gateway. A reload makes none anew, a transport costs
// neither a goroutine nor a connection before it is used, and then a few connections to each
// gateway carry the requests of all its services.
func TestManyServicesShareTransports(t *testing.T) {
	var accepted atomic.Int64
	var addrs []string
	asked := make([]*tunneltest.Gateway, scaleGateways)
	echo := tunneltest.RouteTo(echoServer(t))
	for i := range asked {
		ln, err := tunnel.Listen(t.Context(), "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		asked[i] = tunneltest.Serve(t, tunneltest.Setup{
			Socket: counting{ln, &accepted}, Protocols: []tunnel.Protocol{&h2.Protocol{}, &connect.Protocol{}},
			Resolver: resolverFunc(func(context.Context, *tunnel.Request) (tunnel.Route, error) { return echo, nil }),
		})
		addrs = append(addrs, asked[i].Addr)
	}
	up := &Transports{Direct: &tunnel.NetDialer{}, Budget: &tunnel.Budget{Limit: 100_000}}
	defer up.Close()
	r := &registry.Registry{Mesh: registry.Mesh{Network: "home"}, NewTransport: up.New}
	merge := func() {
		t.Helper()
		table, err := r.Merge(scaleSnapshot(addrs))
		if err != nil {
			t.Fatal(err)
		}
		r.Swap(table)
	}
	resolve := func(i int) *tunnel.Endpoint {
		t.Helper()
		route, err := r.Resolve(t.Context(), &tunnel.Request{Proto: "connect", Name: tunnel.MustParseName(fmt.Sprintf("s%d.test", i)), Port: 443})
		if err != nil || len(route.Endpoints) != 1 {
			t.Fatalf("service %d: got %v, %v; want its gateway", i, route.Endpoints, err)
		}
		return &route.Endpoints[0]
	}
	// carriers returns the transport of service i without its layers.
	carriers := func(i int) tunnel.Transport {
		transport := resolve(i).Transport
		if l, ok := transport.(*layered); ok {
			transport = l.Transport
		}
		return transport
	}
	goroutines, heap := runtime.NumGoroutine(), heapInUse()
	merge()
	before := map[int]tunnel.Transport{}
	for i := range scaleServices {
		before[i] = carriers(i)
		if before[i] != before[i%scaleGateways] {
			t.Fatalf("service %d does not share the transport of service %d, which is behind the same gateway", i, i%scaleGateways)
		}
	}
	for range 3 {
		merge()
	}
	for i := range scaleServices {
		if carriers(i) != before[i] {
			t.Fatalf("service %d has another transport after a reload", i)
		}
	}
	if hops, fallbacks := len(up.hops.all()), len(up.fallbacks.all()); hops != 3*scaleGateways || fallbacks != scaleGateways {
		t.Errorf("there are %d carriers and %d fallback dialers, want %d and %d", hops, fallbacks, 3*scaleGateways, scaleGateways)
	}
	if n := accepted.Load(); n != 0 {
		t.Errorf("%d connections before any request, want 0", n)
	}
	if n := runtime.NumGoroutine() - goroutines; n > 10 {
		t.Errorf("%d goroutines more before any request, want about none", n)
	}
	// Two tables, of which one may not be collected yet, take about 6 MB.
	if grown := heapInUse() - heap; grown > 32<<20 {
		t.Errorf("the heap has grown by %d KB, want at most 32 MB", grown>>10)
	} else {
		t.Logf("the heap has grown by %d KB", grown>>10)
	}

	var open []net.Conn
	defer func() {
		for _, c := range open {
			_ = c.Close()
		}
	}()
	for i := range scaleServices {
		ep := resolve(i)
		c, err := before[i].Dial(t.Context(), ep, &tunnel.Request{})
		if err != nil {
			t.Fatalf("service %d: %v", i, err)
		}
		open = append(open, c)
	}
	for i, gateway := range asked {
		requests := gateway.Requests()
		if len(requests) < scaleServices/scaleGateways { // on a slow machine one may be asked again
			t.Errorf("gateway %d was asked %d times, want %d", i, len(requests), scaleServices/scaleGateways)
		}
		for _, req := range requests {
			n := -1
			if _, err := fmt.Sscanf(req.Name.String(), "s%d.test", &n); err != nil || n%scaleGateways != i {
				t.Errorf("gateway %d was asked for %s", i, req.Name)
			}
		}
	}
	// HTTP/2 opens another connection for each 8 tunnels, up to 4. One that is slow to begin
	// may be overtaken by the next carrier, which opens one for each tunnel.
	if n := accepted.Load(); n < scaleGateways || n > scaleServices/2 {
		t.Errorf("%d connections for %d tunnels, want about 3 to each gateway", n, scaleServices)
	} else {
		t.Logf("%d connections for %d tunnels", n, scaleServices)
	}
}

// heapInUse returns the bytes that are in use after a collection.
func heapInUse() int64 {
	runtime.GC()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}

// A resolverFunc is a tunnel.Resolver.
type resolverFunc func(context.Context, *tunnel.Request) (tunnel.Route, error)

func (f resolverFunc) Resolve(ctx context.Context, req *tunnel.Request) (tunnel.Route, error) {
	return f(ctx, req)
}

// echoServer returns the address of a server that sends back what it gets.
func echoServer(t *testing.T) string {
	t.Helper()
	return testnet.Service(t, func(c net.Conn) { _, _ = io.Copy(c, c) })
}
