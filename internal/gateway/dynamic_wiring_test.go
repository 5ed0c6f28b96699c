package gateway

import (
	"context"
	"crypto/tls"
	"net"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"culvert.dev/internal/testca"
	"culvert.dev/internal/testnet"
	"culvert.dev/registry"
	"culvert.dev/tunnel"
)

// Here is what a listener of a source has of the gateway, whatever it speaks: the
// guard, exposure, limits and the memory. The listeners of a configuration are in
// cmd/culvert/command. A kind that is added belongs into frontKinds. At none of them
// do clients have credentials to show.

// A frontKind is a kind of listener at which something is carried.
type frontKind struct {
	name string
	// listener makes one that is for a.test and leads to b.
	listener func(e *edge, b registry.Backend) *registry.Listener
	// backend is what answers "h" to what comes by it.
	backend func(e *edge) registry.Endpoint
	// ask returns what a client hears: "h", "cut" or something else. The connection
	// stays open for as long as the test.
	ask func(e *edge, port uint16) string
}

var frontKinds = []frontKind{
	{"TLS passed on", func(e *edge, b registry.Backend) *registry.Listener {
		return e.listener("passed", registry.TLS, section("passed/a", "a.test", ruled("r", nil, b)))
	}, func(e *edge) registry.Endpoint {
		return tlsBackend(e.t, &tls.Config{Certificates: []tls.Certificate{e.issue("a.test").TLS}}, "h")
	}, (*edge).staysTLS},
	{"TLS that ends", func(e *edge, b registry.Backend) *registry.Listener {
		s := section("ended/a", "a.test", ruled("r", nil, b))
		s.TLS = e.ends("a.test")
		return e.listener("ended", registry.TLS, s)
	}, func(e *edge) registry.Endpoint { return greeter(e.t, "h") }, (*edge).staysTLS},
	{"TCP", func(e *edge, b registry.Backend) *registry.Listener {
		return e.listener("tcp", registry.TCP, section("tcp", "", ruled("r", nil, b)))
	}, func(e *edge) registry.Endpoint { return greeter(e.t, "h") }, (*edge).staysTCP},
	{"UDP", func(e *edge, b registry.Backend) *registry.Listener {
		return e.listener("udp", registry.UDP, section("udp", "", ruled("r", nil, b)))
	}, func(e *edge) registry.Endpoint { return udpEcho(e.t, "h") }, (*edge).staysUDP},
}

// staysTLS, staysTCP and staysUDP are what a client hears who stays.
func (e *edge) staysTLS(port uint16) string {
	c, err := e.dialTLS(port, "a.test")
	switch {
	case err == nil:
		return cutOr(c)
	case wasCut(err):
		return "cut"
	}
	return err.Error()
}

func (e *edge) staysTCP(port uint16) string {
	c, err := net.DialTimeout("tcp", e.at(port), soon)
	if err != nil {
		if wasCut(err) {
			return "cut"
		}
		return err.Error()
	}
	e.t.Cleanup(func() { _ = c.Close() })
	_ = c.SetDeadline(time.Now().Add(soon))
	return cutOr(c)
}

// cutOr returns the first letter that c hears, or "cut".
func cutOr(c net.Conn) string {
	b := make([]byte, 1)
	if _, err := c.Read(b); wasCut(err) {
		return "cut"
	} else if err != nil {
		return err.Error()
	}
	return string(b)
}

func (e *edge) staysUDP(port uint16) string {
	switch got := query(e.dialUDP(port), 500*time.Millisecond); got {
	case "h?":
		return "h"
	case "silence":
		return "cut"
	default:
		return got
	}
}

// eachFront runs f in a gateway of cfg for each kind of listener.
func eachFront(t *testing.T, cfg Config, f func(t *testing.T, e *edge, kind *frontKind)) {
	for i := range frontKinds {
		t.Run(frontKinds[i].name, func(t *testing.T) { f(t, newEdgeOf(t, cfg), &frontKinds[i]) })
	}
}

// noLimits are those of a gateway whose test is about something else.
var noLimits = tunnel.Limits{ConnectionRatePerClient: -1, MaxConnectionsPerClient: -1, MaxPendingPerClient: -1}

// wants asks at a port.
func (e *edge) wants(kind *frontKind, port uint16, want, why string) {
	e.t.Helper()
	got := kind.ask(e, port)
	for late := time.Now().Add(soon); want == "h" && got == "cut" && time.Now().Before(late); {
		got = kind.ask(e, port) // the answer to a datagram may come late
	}
	if got != want {
		e.t.Errorf("%s: the client hears %s, want %s", why, got, want)
	}
}

// serving is what a backend leads to.
func serving(name string, ep registry.Endpoint) *registry.Service {
	return &registry.Service{Name: name, Endpoints: []registry.Endpoint{ep}}
}

// By no kind of listener is an address dialed that the gateway never dials: one of
// its own listeners, or loopback by a name that somebody else's DNS has.
func TestFrontsAreGuarded(t *testing.T) {
	t.Parallel()
	lookup := func(context.Context, string) ([]netip.Addr, error) {
		return []netip.Addr{netip.MustParseAddr("127.0.0.1")}, nil
	}
	limits := noLimits
	limits.MaxTunnels = 50
	eachFront(t, Config{Limits: limits, Lookup: lookup}, func(t *testing.T, e *edge, kind *frontKind) {
		ep := kind.backend(e)
		l := kind.listener(e, registry.Backend{Weight: 1, Service: serving("named", ep)})
		e.have(l)
		e.wants(kind, l.Port, "h", "an address that is written down")
		lead := func(ep registry.Endpoint) {
			var sections []*registry.Section
			for _, s := range l.Sections {
				s := *s
				s.Rules = []*registry.Rule{ruled("r", nil, registry.Backend{Weight: 1, Service: serving("other", ep)})}
				sections = append(sections, &s)
			}
			e.have(with(l, sections...))
		}
		lead(registry.Endpoint{Host: "somewhere.test", Port: ep.Port})
		e.wants(kind, l.Port, "cut", "loopback by a name")
		e.logs("reason=prohibited")
		lead(registry.Endpoint{Addr: e.addr, Port: l.Port})
		e.wants(kind, l.Port, "cut", "the listener itself")
		e.logs("reason=loop")
	})
}

// By no kind of listener does a backend that stands for a service lead to one that
// is private, or that is exposed to others than the client.
func TestFrontsKeepExposure(t *testing.T) {
	t.Parallel()
	networks := []registry.Network{
		{Name: "office", CIDRs: []netip.Prefix{netip.MustParsePrefix("203.0.113.0/24")}},
		{Name: "here", CIDRs: []netip.Prefix{netip.MustParsePrefix("127.0.0.0/8")}},
	}
	eachFront(t, Config{Limits: noLimits, Mesh: registry.Mesh{Network: "here"}}, func(t *testing.T, e *edge, kind *frontKind) {
		ep := kind.backend(e)
		l := kind.listener(e, registry.Backend{Weight: 1, ServiceName: tunnel.MustParseName("shop.test"), Service: &registry.Service{Name: "stands for shop", Ports: []uint16{443}}})
		for _, trial := range []struct {
			exposed bool
			to      []string
			want    string
		}{
			{true, nil, "h"}, {true, []string{"here"}, "h"}, {true, []string{"office"}, "cut"}, {false, nil, "cut"},
		} {
			e.say(registry.Snapshot{Networks: networks, Listeners: []*registry.Listener{l}, Services: []*registry.Service{{
				Name: "shop", Names: []tunnel.Pattern{pattern("shop.test")}, Ports: []uint16{443}, Exposed: trial.exposed, ExposedTo: trial.to, Endpoints: []registry.Endpoint{ep},
			}}})
			before := strings.Count(e.log.String(), "reason=not-exposed")
			if got := kind.ask(e, l.Port); got != trial.want {
				t.Errorf("exposed %v to %v: the client hears %s, want %s", trial.exposed, trial.to, got, trial.want)
			}
			if trial.want == "cut" {
				testnet.Eventually(t, soon, func() bool { return strings.Count(e.log.String(), "reason=not-exposed") > before }, "the log says why")
			}
		}
	})
}

// At every kind of listener a client has no more connections, and no more new ones in
// a second, than the configuration lets one client have.
func TestFrontsKeepLimits(t *testing.T) {
	t.Parallel()
	for key, limits := range map[string]tunnel.Limits{
		"limits.maxConnectionsPerClient": {MaxConnectionsPerClient: 3, ConnectionRatePerClient: -1, MaxPendingPerClient: -1},
		"limits.connectionRatePerClient": {MaxConnectionsPerClient: -1, ConnectionRatePerClient: 3, MaxPendingPerClient: -1},
	} {
		t.Run(key, func(t *testing.T) {
			eachFront(t, Config{Limits: limits}, func(t *testing.T, e *edge, kind *frontKind) {
				l := kind.listener(e, registry.Backend{Weight: 1, Service: serving("s", kind.backend(e))})
				e.have(l)
				e.wants(kind, l.Port, "h", "the first connection")
				var all sync.WaitGroup
				var refused atomic.Int32
				for range 20 { // at once: the next second has room again
					all.Go(func() {
						if kind.ask(e, l.Port) == "cut" {
							refused.Add(1)
						}
					})
				}
				all.Wait()
				if refused.Load() == 0 {
					t.Error("none of 20 connections at once was refused")
				}
				e.logs("reason=overload", key+": ")
			})
		})
	}
}

// While memory is short, no kind of listener carries anything new.
func TestFrontsRefuseWhileMemoryIsShort(t *testing.T) {
	t.Parallel()
	eachFront(t, Config{Limits: noLimits, Memory: -1}, func(t *testing.T, e *edge, kind *frontKind) {
		l := kind.listener(e, registry.Backend{Weight: 1, Service: serving("s", kind.backend(e))})
		e.have(l)
		e.loops.Budget.SetPressure(tunnel.Short)
		e.wants(kind, l.Port, "cut", "memory is short")
		e.logs("reason=overload", "memory is short")
		e.loops.Budget.SetPressure(tunnel.Calm)
		e.wants(kind, l.Port, "h", "memory is there again")
	})
}

// A client that says nothing has the time of a preamble where one is waited for.
func TestFrontsWaitForSoLong(t *testing.T) {
	t.Parallel()
	limits := noLimits
	limits.FirstByteTimeout, limits.HandshakeTimeout = 300*time.Millisecond, 300*time.Millisecond
	eachFront(t, Config{Limits: limits}, func(t *testing.T, e *edge, kind *frontKind) {
		if !strings.HasPrefix(kind.name, "TLS") {
			return // there is nothing to wait for
		}
		l := kind.listener(e, registry.Backend{Weight: 1, Service: serving("s", kind.backend(e))})
		e.have(l)
		for _, said := range []string{"", "\x16\x03\x01\x02\x00"} {
			c, err := net.DialTimeout("tcp", e.at(l.Port), soon)
			if err != nil {
				t.Fatal(err)
			}
			_ = c.SetDeadline(time.Now().Add(soon))
			if _, err := c.Write([]byte(said)); err != nil {
				t.Fatal(err)
			}
			if _, err := c.Read(make([]byte, 1)); !wasCut(err) {
				t.Errorf("after %q the client got %v, want to be cut off", said, err)
			}
			_ = c.Close()
		}
		e.logs("reason=hello-timeout")
	})
}

// A CA speaks for the clients of its own section: one of another section, of the same
// listener or not, lets nobody in.
func TestFrontsTrustTheirOwnCAs(t *testing.T) {
	e := newEdge(t)
	ep := greeter(t, "h")
	names := []string{"a.test", "b.test", "c.test"}
	certs := map[string]tls.Certificate{}
	var sections []*registry.Section
	for _, name := range names {
		ca, err := testca.New("clients."+name, nil)
		if err != nil {
			t.Fatal(err)
		}
		certs[name] = issueOf(t, ca, "client.test").TLS
		s := section("s/"+name, name, to(ep, name))
		s.TLS = e.ends(name)
		s.TLS.ClientCAs = string(ca.CertPEM)
		sections = append(sections, s)
	}
	one, two := e.listener("one", registry.TLS, sections[:2]...), e.listener("two", registry.TLS, sections[2])
	ports := map[string]uint16{"a.test": one.Port, "b.test": one.Port, "c.test": two.Port}
	e.have(one, two)
	for _, name := range names {
		for _, of := range names {
			cert := certs[of]
			cfg := &tls.Config{ServerName: name, RootCAs: e.ca.Pool()}
			cfg.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return &cert, nil }
			c, err := tls.DialWithDialer(&net.Dialer{Timeout: soon}, "tcp", e.at(ports[name]), cfg)
			var got string
			if err == nil {
				_ = c.SetDeadline(time.Now().Add(soon))
				b := make([]byte, 1)
				if _, err = c.Read(b); err == nil {
					got = string(b)
				}
				_ = c.Close()
			}
			if want := name == of; (got == "h") != want {
				t.Errorf("%s with a certificate of a CA for %s: got %q, %v, want it let in: %v", name, of, got, err, want)
			}
		}
	}
}
