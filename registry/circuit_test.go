package registry

import (
	"context"
	"fmt"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"culvert.dev/tunnel"
)

// A deadDialer dials endpoints of which those in up answer. It counts dials by address.
type deadDialer struct {
	mu    sync.Mutex // guards what follows
	up    map[string]bool
	dials map[string]int
	under int           // dials under way at dead addresses
	most  int           // the most of those at a time
	takes time.Duration // until a dead address fails
	err   *tunnel.Error // of dead addresses; nil for a refused connection
}

func (d *deadDialer) DialContext(ctx context.Context, _, addr string) (net.Conn, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.dials[addr]++
	if d.up[addr] {
		here, there := net.Pipe()
		_ = there.Close()
		return pipeStream{here}, nil
	}
	d.under++
	d.most = max(d.most, d.under)
	d.mu.Unlock()
	time.Sleep(d.takes)
	d.mu.Lock()
	d.under--
	if d.err != nil {
		e := *d.err
		return nil, &e
	}
	return nil, &tunnel.Error{Reason: tunnel.DialFailed, Unconnected: true, Err: fmt.Errorf("dial %s: %w", addr, syscall.ECONNREFUSED)}
}

func (d *deadDialer) set(addr string, up bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.up[addr] = up
}

// count returns how many dials of addr there were since the last call.
func (d *deadDialer) count(addr string) int {
	d.mu.Lock()
	defer d.mu.Unlock()
	n := d.dials[addr]
	d.dials[addr] = 0
	return n
}

type pipeStream struct{ net.Conn }

func (pipeStream) CloseWrite() error { return nil }

// open asks for a.test once. A tunnel ends at once.
func openOnce(t *testing.T, r *tunnel.Router) error {
	s, err := r.Open(t.Context(), byName("a.test", 443, 443))
	if err != nil {
		return err
	}
	_ = s.Conn.Close()
	s.End(tunnel.End{Reason: tunnel.Done})
	return nil
}

const deadAddr, goodAddr = "192.0.2.1:443", "192.0.2.2:443"

func circuitWorld(t *testing.T, specs ...string) (*Registry, *tunnel.Router, *deadDialer) {
	reg := serving(t, nil, []uint16{443}, specs...)
	d := &deadDialer{up: map[string]bool{}, dials: map[string]int{}, takes: time.Millisecond}
	return reg, &tunnel.Router{Resolver: reg, Dialer: d, Relay: &tunnel.Relay{}}, d
}

// A fork storm: programs that connect again as fast as they can, to a service that is dead.
func TestCircuitBoundsTheDialsOfAStorm(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		reg, r, d := circuitWorld(t, deadAddr)
		const clients, perClient, pause = 1000, 100, 100 * time.Millisecond // 10,000 a second for 10 s
		var all sync.WaitGroup
		var failed, atOnce atomic.Int64
		for i := range clients {
			all.Go(func() {
				time.Sleep(time.Duration(i) * pause / clients)
				for range perClient {
					start := time.Now()
					if err := openOnce(t, r); tunnel.ReasonOf(err) == tunnel.DialFailed {
						failed.Add(1)
					}
					if time.Since(start) == 0 {
						atOnce.Add(1)
					}
					time.Sleep(pause)
				}
			})
		}
		all.Wait()
		if n := failed.Load(); n != clients*perClient {
			t.Errorf("%d of %d requests failed with dial-failed, want all", n, clients*perClient)
		}
		// Ten to find out and those under way with them, and one in each of ten seconds.
		if n := d.count(deadAddr); n < circuitFailures+9 || n > 3*circuitFailures+11 {
			t.Errorf("%d dials of a dead service in 10 s, want about %d", n, circuitFailures+10)
		}
		if n := atOnce.Load(); n < clients*perClient-3*circuitFailures-11 {
			t.Errorf("%d of %d requests were refused at once, want all but the trials", n, clients*perClient)
		}
		if open, refused := reg.Circuits(); open != 1 || refused != uint64(atOnce.Load()) {
			t.Errorf("%d circuits are open and refused %d, want 1 and %d", open, refused, atOnce.Load())
		}
		if h := reg.Health(); len(h) != 1 || h[0].State != StateOpen || h[0].Err == nil {
			t.Errorf("health is %+v, want one that is open", h)
		}

		// It is back within a second, for all.
		d.set(deadAddr, true)
		time.Sleep(circuitInterval)
		for i := range 100 {
			if err := openOnce(t, r); err != nil {
				t.Fatalf("request %d after the service is back: %v", i, err)
			}
		}
		if open, _ := reg.Circuits(); open != 0 || len(reg.Health()) != 0 {
			t.Errorf("%d circuits are open with the service back, health is %v", open, reg.Health())
		}
	})
}

// A black hole takes the whole timeout of each dial: no more than a few are under way.
func TestCircuitOfABlackHole(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		_, r, d := circuitWorld(t, deadAddr)
		d.takes, d.err = tunnel.DefaultConnectTimeout, &tunnel.Error{Reason: tunnel.DialTimeout, Unconnected: true, Err: context.DeadlineExceeded}
		var all sync.WaitGroup
		for range circuitFailures {
			all.Go(func() { _ = openOnce(t, r) })
		}
		all.Wait()
		d.count(deadAddr)
		d.most = 0
		for range 1000 {
			all.Go(func() { _ = openOnce(t, r) })
			time.Sleep(10 * time.Millisecond)
		}
		all.Wait()
		if n := d.count(deadAddr); n > 10 || d.most > 10 {
			t.Errorf("%d dials of a black hole in 10 s and %d at a time, want one each second", n, d.most)
		}
	})
}

// The death of one endpoint takes no request away from the others.
func TestCircuitLeavesTheOthersAlone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		reg, r, d := circuitWorld(t, deadAddr, goodAddr, "192.0.2.3:443", "192.0.2.4:443", "192.0.2.5:443")
		d.set(goodAddr, false)
		for range 20 * circuitFailures { // all are dead
			_ = openOnce(t, r)
		}
		if open, _ := reg.Circuits(); open != 5 {
			t.Fatalf("%d circuits are open, want 5", open)
		}
		d.set(goodAddr, true)
		time.Sleep(circuitInterval)
		for range 5 { // trials of the others may come first, with three for a request
			_ = openOnce(t, r)
		}
		for i := range 100 {
			if err := openOnce(t, r); err != nil {
				t.Fatalf("request %d with one endpoint that works: %v", i, err)
			}
			time.Sleep(50 * time.Millisecond)
		}
	})
}

// What UDP at an address does says nothing of TCP there, and the other way round.
func TestCircuitsOfTCPAndUDP(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		reg, r, d := circuitWorld(t, deadAddr)
		d.set(deadAddr, true)
		datagrams := func() error {
			req := byName("a.test", 443, 443)
			req.Proto, req.Datagrams = "quic", &deadDialer{up: map[string]bool{}, dials: map[string]int{}}
			_, err := r.Open(t.Context(), req)
			return err
		}
		for range 2 * circuitFailures {
			if err := datagrams(); tunnel.ReasonOf(err) != tunnel.DialFailed {
				t.Fatalf("UDP: got %v, want dial-failed", err)
			}
		}
		for range circuitFailures {
			if err := openOnce(t, r); err != nil {
				t.Fatalf("TCP beside UDP that is dead: %v", err)
			}
		}
		if h := reg.Health(); len(h) != 1 || !h[0].Datagrams {
			t.Errorf("health is %+v, want UDP alone to have failed", h)
		}

		d.set(deadAddr, false)
		for range 2 * circuitFailures {
			_ = openOnce(t, r)
		}
		if open := opened(reg, false); open != StateOpen {
			t.Errorf("TCP that is dead is %q, want its circuit to be open", open)
		}
		before := opened(reg, true)
		if err := datagrams(); strings.Contains(err.Error(), "circuit") {
			t.Errorf("UDP beside TCP that is dead: %v", err)
		}
		d.set(deadAddr, true)
		time.Sleep(circuitInterval)
		if err := openOnce(t, r); err != nil {
			t.Errorf("TCP is back: %v", err)
		}
		if after := opened(reg, true); before == "" || after == "" || opened(reg, false) != "" {
			t.Errorf("with TCP back, UDP is %q, before %q, and TCP is %q, want UDP alone", after, before, opened(reg, false))
		}
	})
}

// opened returns the state of TCP or of UDP of the one address of reg, "" where it works.
func opened(reg *Registry, datagrams bool) string {
	for _, h := range reg.Health() {
		if h.Datagrams == datagrams {
			return h.State
		}
	}
	return ""
}

// What is not the failure of an address opens no circuit.
func TestWhatOpensNoCircuit(t *testing.T) {
	for name, err := range map[string]*tunnel.Error{
		"a handshake that fails": tunnel.Refusef(tunnel.DialFailed, "tls: bad certificate"),
		"a handshake too late":   tunnel.Refusef(tunnel.DialTimeout, "tls: no answer"),
		"what a next hop says":   tunnel.HopRefusedf(tunnel.DialFailed, "502"),
		"this host's own lack":   {Reason: tunnel.Overload, Unconnected: true, Err: syscall.EMFILE},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				reg, r, d := circuitWorld(t, deadAddr)
				d.err = err
				for range 5 * circuitFailures {
					_ = openOnce(t, r)
				}
				if n := d.count(deadAddr); n != 5*circuitFailures {
					t.Errorf("%d of %d requests were dialed, want all", n, 5*circuitFailures)
				}
				if open, _ := reg.Circuits(); open != 0 {
					t.Errorf("%d circuits are open, want none", open)
				}
			})
		})
	}
}

// A forecast shows an open circuit, and takes no trial away from clients.
func TestForecastOfAnOpenCircuit(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		_, r, d := circuitWorld(t, deadAddr)
		for range 2 * circuitFailures {
			_ = openOnce(t, r)
		}
		forecast := func() error {
			_, _, err := r.Forecast(t.Context(), byName("a.test", 443, 443))
			return err
		}
		if err := forecast(); tunnel.ReasonOf(err) != tunnel.DialFailed || !strings.Contains(err.Error(), "circuit is open") {
			t.Errorf("the forecast is %v, want dial-failed with the circuit", err)
		}
		time.Sleep(circuitInterval)
		for range 3 {
			if err := forecast(); err != nil {
				t.Errorf("the forecast with a trial due is %v, want none", err)
			}
		}
		d.count(deadAddr)
		_ = openOnce(t, r)
		_ = openOnce(t, r)
		if n := d.count(deadAddr); n != 1 {
			t.Errorf("%d dials with one trial due, want 1", n)
		}
	})
}
