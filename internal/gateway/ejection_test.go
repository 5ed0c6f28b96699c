package gateway

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http/httptest"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"culvert.dev/internal/testnet"
	"culvert.dev/registry"
	"culvert.dev/tunnel"
)

// A moodyServer answers each byte with its name, or resets connections once a byte has
// come.
type moodyServer struct {
	name   byte
	at     netip.AddrPort
	resets atomic.Bool
	came   atomic.Int64 // connections
}

func newMoodyServer(t *testing.T, name byte) *moodyServer {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s := &moodyServer{name: name, at: netip.MustParseAddrPort(ln.Addr().String())}
	var serving sync.WaitGroup
	t.Cleanup(func() {
		_ = ln.Close()
		serving.Wait()
	})
	serving.Go(func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			s.came.Add(1)
			serving.Go(func() {
				defer c.Close()
				b := make([]byte, 1)
				for {
					if _, err := io.ReadFull(c, b); err != nil {
						return
					}
					if s.resets.Load() {
						_ = testnet.Abort(c)
						return
					}
					if _, err := c.Write([]byte{s.name}); err != nil {
						return
					}
				}
			})
		}
	})
	return s
}

// TestEjectionUnderLoad has one of two endpoints accept and reset: only the connections
// that it takes to eject it are lost, and those that began meanwhile. Once it answers
// again it is used again.
func TestEjectionUnderLoad(t *testing.T) {
	t.Parallel()
	const workers, each, failures = 6, 40, 3
	good, moody := newMoodyServer(t, 'g'), newMoodyServer(t, 'm')
	name := tunnel.MustParseName("a.test")
	s := &registry.Service{
		Name: "a.test", Names: []tunnel.Pattern{{Suffix: name}}, Exposed: true,
		OutlierEjection: &registry.OutlierEjection{ConsecutiveFailures: failures, EjectionTime: time.Second, MaxEjectedPercent: 50},
		Endpoints:       []registry.Endpoint{{Addr: good.at.Addr(), Port: good.at.Port()}, {Addr: moody.at.Addr(), Port: moody.at.Port()}},
	}
	var log lockedBuffer
	g, err := New(t.Context(), Config{
		Listeners: []Listener{{Address: "127.0.0.1:0", Protocols: []tunnel.Protocol{&tunnel.Fixed{To: name, Port: 1}}}},
		Sources:   []registry.Source{registry.Static{Name: "test", Snapshot: registry.Snapshot{Services: []*registry.Service{s}}}},
		Admin:     "127.0.0.1:0", DrainDelay: -1, DrainTimeout: -1, Log: slog.New(slog.NewTextHandler(&log, nil)),
	})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- g.Run(ctx, nil) }()
	defer func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("Run: %v", err)
		}
	}()
	testnet.Eventually(t, soon, func() bool { return g.Status().Services == 1 }, "the table is there")
	ask := func() (answer byte, err error) {
		c, err := net.Dial("tcp", g.Addrs()[0].String())
		if err != nil {
			return 0, err
		}
		defer c.Close()
		_ = c.SetDeadline(time.Now().Add(soon))
		b := []byte{'?'}
		if _, err := c.Write(b); err != nil {
			return 0, err
		}
		_, err = io.ReadFull(c, b)
		return b[0], err
	}
	for _, s := range []*moodyServer{good, moody} {
		testnet.Eventually(t, soon, func() bool { b, err := ask(); return err == nil && b == s.name }, "both endpoints answer")
	}

	moody.resets.Store(true)
	before := moody.came.Load()
	var lost atomic.Int64
	var load sync.WaitGroup
	began := time.Now()
	for range workers {
		load.Go(func() {
			for range each {
				if _, err := ask(); err != nil {
					lost.Add(1)
				}
			}
		})
	}
	load.Wait()
	// It is tried once, 1, 3, 6, 10, ... seconds after the ejection.
	trials := int64(time.Since(began)/time.Second) + 1
	if n, came := lost.Load(), moody.came.Load()-before; n != came || n < failures || n > failures+workers+trials {
		t.Errorf("%d connections were lost, and %d came to the endpoint that resets them; want as many, from %d to %d", n, came, failures, failures+workers+trials)
	}
	h := g.Status().Health
	if len(h) != 1 || h[0].Address != moody.at.String() || h[0].By != "tunnels" || h[0].State != registry.StateEjected && h[0].State != registry.StateSuspect || !strings.Contains(h[0].Error, "reset") {
		t.Errorf("the status has %+v", h)
	}
	gauge := fmt.Sprintf("culvert_endpoints_ejected{service=%q} 1\n", "a.test")
	rec := httptest.NewRecorder()
	g.metrics.Handler().ServeHTTP(rec, httptest.NewRequest("GET", "/metrics", nil))
	if !strings.Contains(rec.Body.String(), gauge) {
		t.Errorf("the metrics lack %s", gauge)
	}

	moody.resets.Store(false)
	testnet.Eventually(t, time.Minute, func() bool { b, err := ask(); return err == nil && b == moody.name && len(g.Status().Health) == 0 }, "the endpoint is back")
	testnet.Eventually(t, soon, func() bool { return g.relay.Connections("a.test") == 0 }, "nothing is counted that has ended")
	for _, want := range []string{"endpoint ejected; it is tried last", "ejected endpoint is back"} {
		if got := log.String(); !strings.Contains(got, want) {
			t.Errorf("the log lacks %q:\n%s", want, got)
		}
	}
}
