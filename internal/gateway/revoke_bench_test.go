package gateway

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/netip"
	"runtime"
	"sync"
	"testing"
	"time"

	"culvert.dev/connect"
	"culvert.dev/connect/h2"
	"culvert.dev/internal/testnet"
	"culvert.dev/policy"
	"culvert.dev/registry"
	"culvert.dev/tunnel"
)

// anybody knows each caller by what it says.
type anybody struct{}

func (anybody) Authenticate(_ context.Context, c connect.Credentials) (tunnel.Peer, error) {
	return tunnel.Peer{ID: c.Value, Method: "bearer"}, nil
}

func (anybody) Challenges() []string { return nil }

// A silentService is a connection to a service that takes everything and says nothing.
type silentService struct {
	net.Conn // nil
	closed   chan struct{}

	mu   sync.Mutex // guards wake
	wake func()
	once sync.Once
}

func (s *silentService) DialContext(context.Context, string, string) (net.Conn, error) {
	return &silentService{closed: make(chan struct{})}, nil
}

func (s *silentService) WaitRead(wake func()) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	select {
	case <-s.closed:
		return true
	default:
	}
	s.wake = wake
	return false
}

func (s *silentService) Close() error {
	s.once.Do(func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		close(s.closed)
		if s.wake != nil {
			s.wake()
		}
	})
	return nil
}

func (s *silentService) Read([]byte) (int, error) {
	<-s.closed
	return 0, io.EOF
}

func (s *silentService) Write(b []byte) (int, error)      { return len(b), nil }
func (s *silentService) IsMultiplexed() bool              { return true } // it takes no descriptor
func (s *silentService) CloseWrite() error                { return nil }
func (s *silentService) LocalAddr() net.Addr              { return &net.TCPAddr{} }
func (s *silentService) RemoteAddr() net.Addr             { return &net.TCPAddr{} }
func (s *silentService) SetDeadline(time.Time) error      { return nil }
func (s *silentService) SetReadDeadline(time.Time) error  { return nil }
func (s *silentService) SetWriteDeadline(time.Time) error { return nil }

// BenchmarkRevokeStreams denies one of 400 callers, who have 250 tunnels each by HTTP/2 on
// a connection of their own, 100,000 in all, to 1,000 services with a policy each. The time
// is from the update of the source until the last tunnel of the caller has ended at the
// caller's side.
func BenchmarkRevokeStreams(b *testing.B) {
	const callers, each, services = 400, 250, 1000
	snapshot := registry.Snapshot{}
	for i := range services {
		name := fmt.Sprintf("s%d", i)
		snapshot.Services = append(snapshot.Services, &registry.Service{
			Name: name, Names: []tunnel.Pattern{{Suffix: tunnel.MustParseName(name + ".test")}}, Ports: []uint16{443}, Exposed: true,
			Endpoints: []registry.Endpoint{{Addr: netip.MustParseAddr("192.0.2.1"), Port: 443}},
		})
		snapshot.Policies = append(snapshot.Policies, &policy.Policy{Name: name, Targets: policy.Targets{Services: []string{name}}, Rules: []policy.Rule{{}}})
	}
	source := make(changingSource, 1)
	source <- snapshot
	limits := noLimits
	limits.IdleTimeout = time.Hour
	g, err := New(b.Context(), Config{
		Listeners: []Listener{{Address: "127.0.0.1:0", Protocols: []tunnel.Protocol{&h2.Protocol{Auth: anybody{}, Streams: each}}}},
		Sources:   []registry.Source{source}, Limits: limits, Memory: -1, DrainDelay: -1, DrainTimeout: -1,
	})
	if err != nil {
		b.Fatal(err)
	}
	g.router.Dialer = &silentService{}
	ctx, cancel := context.WithCancel(b.Context())
	var running sync.WaitGroup
	running.Go(func() { _ = g.Run(ctx, nil) })
	defer running.Wait()
	defer cancel()
	testnet.Eventually(b, patience, func() bool { return g.registry.Table().Len() == services }, "the services are there")

	heap := func() float64 {
		var m runtime.MemStats
		runtime.GC()
		runtime.ReadMemStats(&m)
		return float64(m.HeapInuse + m.StackInuse)
	}
	before := heap()
	tunnels := make([][]net.Conn, callers)
	open := func(i int) {
		d := &h2.Dialer{Proxy: g.Addrs()[0].String(), Authorization: connect.BearerCredentials(fmt.Sprintf("caller-%d", i)), Parallel: 1, Streams: each}
		b.Cleanup(func() { _ = d.Close() })
		tunnels[i] = nil
		for n := range each {
			c, err := d.DialContext(ctx, "tcp", fmt.Sprintf("s%d.test:443", (i*each+n)%services))
			if err != nil {
				b.Errorf("caller %d, tunnel %d: %v", i, n, err)
				return
			}
			tunnels[i] = append(tunnels[i], c)
		}
	}
	var opening sync.WaitGroup
	for w := range 8 {
		opening.Go(func() {
			for i := w; i < callers; i += 8 {
				open(i)
			}
		})
	}
	opening.Wait()
	if b.Failed() || g.relay.Open() != callers*each {
		b.Fatalf("%d tunnels stand, want %d", g.relay.Open(), callers*each)
	}
	perTunnel := (heap() - before) / (callers * each)
	i := 0
	for b.Loop() {
		next := snapshot
		next.Policies = append(snapshot.Policies[:services:services], against(fmt.Sprintf("caller-%d", i)))
		source <- next
		for _, c := range tunnels[i] {
			if _, err := c.Read(make([]byte, 1)); err == nil {
				b.Fatal("a byte came")
			}
		}
		b.StopTimer()
		testnet.Eventually(b, patience, func() bool { return g.relay.Open() == callers*each-each }, "the tunnels of the others stand, and no more")
		i = (i + 1) % callers
		source <- snapshot
		generation := g.registry.Generation()
		testnet.Eventually(b, patience, func() bool { return g.registry.Generation() > generation }, "the policy has gone")
		open((i + callers - 1) % callers)
		b.StartTimer()
	}
	b.ReportMetric(perTunnel, "B/tunnel") // of the gateway and of the callers
}
