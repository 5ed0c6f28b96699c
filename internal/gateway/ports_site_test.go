package gateway

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/netip"
	"path/filepath"
	"runtime"
	"slices"
	"sync"
	"syscall"
	"testing"
	"time"

	"culvert.dev/internal/testnet"
	"culvert.dev/registry"
	"culvert.dev/tunnel"
)

// soon is how long anything may take that is expected to happen.
const soon = time.Minute

// A feed is a source that says what it is told to.
type feed chan registry.Snapshot

func (f feed) Run(ctx context.Context, updates chan<- registry.Update) error {
	for {
		select {
		case s := <-f:
			select {
			case updates <- registry.Update{Source: "feed", Snapshot: s}:
			case <-ctx.Done():
				return nil
			}
		case <-ctx.Done():
			return nil
		}
	}
}

// A logbook is a log that may be read while it is written.
type logbook struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (l *logbook) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.buf.Write(p)
}

func (l *logbook) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.buf.String()
}

// A site is where gateways with ports for services run, one after the other.
type site struct {
	t      *testing.T
	cfg    ServicePorts
	limits tunnel.Limits
}

// newSite finds an address and ports that nobody has.
func newSite(t *testing.T, n uint16) *site {
	t.Helper()
	addr := netip.MustParseAddr("127.0.0.1")
	if runtime.GOOS == "linux" { // all of 127.0.0.0/8 is loopback
		addr = netip.AddrFrom4([4]byte{127, byte(64 + rand.IntN(64)), byte(rand.IntN(256)), byte(1 + rand.IntN(250))})
	}
	first := 20000 + uint16(rand.IntN(10000))
	return &site{t: t, cfg: ServicePorts{
		Range: registry.PortRange{First: first, Last: first + n - 1}, Address: addr,
		State: filepath.Join(t.TempDir(), "ports.json"),
	}}
}

// A running is a gateway and what it is told.
type running struct {
	*Gateway
	t    *testing.T
	feed feed
	log  *logbook
	end  func() // drains
}

// start runs a gateway until the end of the test, or end.
func (s *site) start(services ...*registry.Service) *running {
	s.t.Helper()
	cfg := s.cfg
	return launch(s.t, Config{ServicePorts: &cfg, Limits: s.limits}, services...)
}

// launch runs a gateway that is told its services until the end of the test, or
// end.
func launch(t *testing.T, cfg Config, services ...*registry.Service) *running {
	t.Helper()
	r := &running{t: t, feed: make(feed), log: &logbook{}}
	cfg.Sources, cfg.DrainDelay, cfg.DrainTimeout, cfg.Log = []registry.Source{r.feed}, -1, time.Second, slog.New(slog.NewTextHandler(r.log, nil))
	var err error
	if r.Gateway, err = New(t.Context(), cfg); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- r.Run(ctx, nil) }()
	r.end = sync.OnceFunc(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("run: %v", err)
		}
		if t.Failed() {
			t.Logf("the log:\n%s", r.log)
		}
	})
	t.Cleanup(r.end)
	r.feed <- registry.Snapshot{Services: services}
	testnet.Eventually(t, soon, func() bool { ok, _ := r.Ready(); return ok }, "the gateway is ready")
	return r
}

// ports returns what is said of each port, "STATE PORT" by "NAME:PORT".
func (r *running) said() map[string]string {
	all := map[string]string{}
	for _, p := range r.Status().ServicePorts.Ports {
		all[fmt.Sprintf("%s:%d", p.Name, p.Port)] = fmt.Sprintf("%s %d", p.State, p.Assigned)
	}
	return all
}

// change gives the gateway other services and waits until it has taken them up.
func (r *running) change(services ...*registry.Service) {
	r.t.Helper()
	before := r.registry.Table().Generation()
	r.feed <- registry.Snapshot{Services: services}
	testnet.Eventually(r.t, soon, func() bool {
		t := r.registry.Table() // before what is said of it
		list := r.Status().ServicePorts.Ports
		standing := 0
		for _, p := range list {
			if p.State != PortKept {
				standing++
			}
		}
		want := t.Publishable()
		if t.Generation() <= before || standing != len(want) {
			return false
		}
		for _, w := range want {
			if !slices.ContainsFunc(list, func(p ServicePort) bool {
				return p.Name == w.Name.String() && p.Port == w.Port && p.State != PortKept
			}) {
				return false
			}
		}
		return true
	}, "the gateway has taken up the change")
}

// address returns that of the open port of a name.
func (r *running) address(name string) string {
	r.t.Helper()
	for _, p := range r.Status().ServicePorts.Ports {
		if p.Name == name && p.State == PortOpen {
			return p.Address
		}
	}
	r.t.Fatalf("%s has no open port: %v", name, r.said())
	return ""
}

// greeted dials addr, reads a line that the server says first and leaves the
// tunnel open.
func (r *running) greeted(addr, want string) net.Conn {
	r.t.Helper()
	c, err := net.Dial("tcp", addr)
	if err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(func() { _ = c.Close() })
	_ = c.SetDeadline(time.Now().Add(soon))
	got := make([]byte, len(want))
	if _, err := io.ReadFull(c, got); err != nil || string(got) != want {
		r.t.Fatalf("%s: got %q, %v, want %q", addr, got, err, want)
	}
	return c
}

// still checks that a tunnel to a service that echoes after its greeting works.
func (r *running) still(c net.Conn) {
	r.t.Helper()
	if _, err := io.WriteString(c, "still"); err != nil {
		r.t.Error(err)
	}
	got := make([]byte, 5)
	if _, err := io.ReadFull(c, got); err != nil || string(got) != "still" {
		r.t.Errorf("an open tunnel: got %q, %v", got, err)
	}
}

func refused(addr string) bool {
	c, err := net.Dial("tcp", addr)
	if err == nil {
		_ = c.Close()
	}
	return errors.Is(err, syscall.ECONNREFUSED)
}

// greeter says hello with its name, and echoes.
func greeter(t *testing.T, hello string) registry.Endpoint {
	t.Helper()
	s := testnet.Serve(t, func(c net.Conn) {
		if _, err := io.WriteString(c, hello); err == nil {
			_, _ = io.Copy(c, c)
		}
	})
	return registry.Endpoint{Addr: s.AddrPort().Addr(), Port: s.AddrPort().Port()}
}

func published(name string, ep registry.Endpoint, ports ...uint16) *registry.Service {
	return &registry.Service{
		Name: name, Names: []tunnel.Pattern{{Suffix: tunnel.MustParseName(name)}}, Ports: ports,
		Endpoints: []registry.Endpoint{ep}, Exposed: true, Publish: true, Origin: "test:1",
	}
}
