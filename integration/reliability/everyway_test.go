//go:build linux

package reliability

import (
	"context"
	"crypto/tls"
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/net/http2"

	"culvert.dev/connect"
	"culvert.dev/internal/testca"
	"culvert.dev/internal/testnet"
	"culvert.dev/tunnel"
)

// These tests hold, of every carrier and every kind of listener, what others
// hold of TLS by its name and of CONNECT over HTTP/1.1.

// carriersAnd is carriers, and those two.
func carriersAnd(t *testing.T, far, outer *gateway) []carrier {
	t.Helper()
	return append([]carrier{
		{"sni", hearing{bySNI, far.addr}, false},
		{"connect", &connect.Dialer{Proxy: far.addr, Dialer: source(1)}, false},
	}, carriers(t, far, outer, outer.keys)...)
}

// A hearing opens tunnels to services that are echoes, and hears what of the
// preamble comes back.
type hearing struct {
	way  way
	addr string
}

func (h hearing) DialContext(_ context.Context, _, target string) (net.Conn, error) {
	c, err := dialFrom(1, h.addr)
	if err != nil {
		return nil, err
	}
	name, _, _ := net.SplitHostPort(target)
	_, err = c.Write(h.way.preamble(name))
	if err == nil {
		err = expect(c, append([]byte(h.way.yes), h.way.carried(name)...))
	}
	if err != nil {
		_ = c.Close()
		return nil, err
	}
	return c, nil
}

// A held tunnel is to an echo.
type held struct {
	name string
	conn net.Conn
}

// echoes says text on every tunnel at once and expects it back.
func echoes(t *testing.T, when string, tunnels []held) {
	t.Helper()
	var wg sync.WaitGroup
	for _, h := range tunnels {
		wg.Go(func() {
			_ = h.conn.SetWriteDeadline(time.Now().Add(patience))
			if err := echo(h.conn, "still here"); err != nil {
				t.Errorf("%s: %s: %v", h.name, when, err)
			}
		})
	}
	wg.Wait()
}

// hold opens n tunnels by each of ways, which are closed with the test.
func hold(t *testing.T, ways []carrier, n int) (tunnels []held) {
	t.Helper()
	for _, way := range ways {
		for range n {
			ctx, cancel := context.WithTimeout(t.Context(), patience)
			c, err := way.open(ctx, onlyService)
			cancel()
			if err != nil {
				t.Fatalf("%s: %v", way.name, err)
			}
			t.Cleanup(func() { _ = c.Close() })
			tunnels = append(tunnels, held{way.name, c})
		}
	}
	echoes(t, "at first", tunnels)
	return tunnels
}

// edges starts a gateway with a listener for every way in, more in its
// configuration, and the one in front of it that double HBONE needs.
func edges(t *testing.T, services, more string) (far, outer *gateway, ca *testca.CA) {
	t.Helper()
	ca, keys := newCA(t)
	far = everyWay(t, ca, "127.1.0.0/16", onlyService)
	far.opts.More += "\n" + more
	far.serve(services)
	outer = relayed(t, ca, far)
	outer.keys = keys
	return far, outer, ca
}

// Reloads are noticed by no carrier: tunnels stand, new ones are served, be it
// services that change or the certificates, or both.
func TestReloadsOverEveryCarrier(t *testing.T) {
	const reloads = 8
	b := testnet.Echo(t)
	table := func(n int) string {
		return service(onlyService, b.Addr()) + service(fmt.Sprintf("g%d.test", n), b.Addr())
	}
	far, outer, ca := edges(t, table(0), "")
	ways := carriersAnd(t, far, outer)
	tunnels := hold(t, ways, 2)
	for n := 1; n <= reloads; n++ {
		if n%2 == 0 {
			if err := far.issue(ca); err != nil {
				t.Fatal(err)
			}
		}
		far.write(far.yaml(table(n)))
		// What comes in the middle of a reload is served, too.
		fresh := hold(t, ways, 1)
		testnet.Eventually(t, effect, func() bool { return far.reaches(byConnect, fmt.Sprintf("g%d.test", n)) }, "reload %d takes effect", n)
		echoes(t, fmt.Sprintf("after reload %d", n), slices.Concat(tunnels, fresh, hold(t, ways, 1)))
	}
	if n := far.metric("culvert_config_reload_failures_total"); n > 0 {
		t.Errorf("%v reloads failed", n)
	}
}

// What a carrier asks for and may not have is refused for the same reason by
// every carrier, in the words of the one that asked, with a line in the log and a
// count: names that nobody has, that are private or exposed to others, endpoints that
// are down, and addresses that no gateway dials.
func TestRefusalsOverEveryCarrier(t *testing.T) {
	b := testnet.Echo(t)
	far, outer, _ := edges(t, service(onlyService, b.Addr()), "networks: [{name: office, cidrs: [203.0.113.0/24]}]")
	far.write(far.yaml(service(onlyService, b.Addr()) + strings.NewReplacer("ECHO", b.Addr(), "CLOSED", closedPort(t, 1)).Replace(`
  - {name: "*.private.out.test", exposed: false, endpoints: ["ECHO"]}
  - {name: "*.office.out.test", exposedTo: [office], endpoints: ["ECHO"]}
  - {name: "*.closed.out.test", endpoints: ["CLOSED"]}
`)))
	testnet.Eventually(t, patience, func() bool { return far.metric("culvert_config_reloads_total") > 0 }, "the services are there")
	// The client may hear less: that a service is private is no business of its own.
	may := map[tunnel.Reason][]tunnel.Reason{
		tunnel.NoRoute:    {tunnel.NoRoute, tunnel.Denied},
		tunnel.NotExposed: {tunnel.NoRoute, tunnel.NotExposed, tunnel.Denied},
		tunnel.Prohibited: {tunnel.Prohibited, tunnel.NoRoute, tunnel.Denied},
		tunnel.DialFailed: {tunnel.DialFailed},
	}
	for i, way := range carriers(t, far, outer, outer.keys) {
		if way.fixed {
			continue // it asks for nothing
		}
		t.Run(way.name, func(t *testing.T) {
			for what, want := range map[string]tunnel.Reason{
				"absent": tunnel.NoRoute, "private": tunnel.NotExposed, "office": tunnel.NotExposed,
				"closed": tunnel.DialFailed, "metadata": tunnel.Prohibited,
			} {
				name := fmt.Sprintf("way%d.%s.out.test", i, what)
				if what == "metadata" {
					if way.name == "double hbone" {
						continue // the gateway in front refuses it, and far is not asked
					}
					name = fmt.Sprintf("169.254.169.%d", 200+i)
				}
				counted := far.metric("culvert_requests_total", fmt.Sprintf("reason=%q", want))
				ctx, cancel := context.WithTimeout(t.Context(), patience)
				c, err := way.open(ctx, name)
				cancel()
				if err == nil {
					_ = c.Close()
					t.Errorf("%s: it is carried", what)
					continue
				}
				lines := func() []entry {
					return far.entries(func(e entry) bool { return strings.HasPrefix(e.str("target"), strings.ToLower(name)) })
				}
				testnet.Eventually(t, patience, func() bool { return len(lines()) > 0 }, "%s: a line of the log", what)
				if got := lines(); len(got) != 1 || got[0].str("reason") != string(want) || got[0].str("err") == "" {
					t.Errorf("%s: the log has %v, want one line with %s", what, got, want)
				}
				if n := far.metric("culvert_requests_total", fmt.Sprintf("reason=%q", want)) - counted; n != 1 {
					t.Errorf("%s: %v more are counted, want 1", what, n)
				}
				heard := tunnel.ReasonOf(err)
				if !slices.Contains(may[want], heard) {
					t.Errorf("%s: the client heard %s (%v), want one of %v", what, heard, err, may[want])
				}
			}
		})
	}
	if n := b.Accepted(); n != 0 {
		t.Errorf("the service was dialed %d times, want never", n)
	}
}

// A drain means the same to every carrier: a tunnel that its ends finish in time
// ends in order, and one that is left over is reset and told of as such.
func TestDrainOverEveryCarrier(t *testing.T) {
	t.Parallel()
	b := testnet.Echo(t)
	far, outer, _ := edges(t, service(onlyService, b.Addr()), "drain: {delay: 200ms, timeout: 3s}")
	ways := carriersAnd(t, far, outer)
	orderly, left := hold(t, ways, 1), hold(t, ways, 1)
	far.signal(syscall.SIGTERM)
	testnet.Eventually(t, patience, func() bool {
		status, _, err := far.get("/readyz")
		return err == nil && status == http.StatusServiceUnavailable
	}, "/readyz says no")
	echoes(t, "while draining", slices.Concat(orderly, left))
	var wg sync.WaitGroup
	end := func(h held, want testnet.Ending) {
		wg.Go(func() {
			_ = h.conn.SetReadDeadline(time.Now().Add(patience))
			_, err := h.conn.Read(make([]byte, 1))
			if got := testnet.EndingOf(err); got != want {
				t.Errorf("%s: it ended with %v, want %s", h.name, err, want)
			}
			_ = h.conn.Close()
		})
	}
	for _, h := range orderly {
		if err := testnet.CloseWrite(h.conn); err != nil {
			t.Errorf("%s: %v", h.name, err)
		}
		end(h, testnet.FIN)
	}
	for _, h := range left {
		end(h, testnet.RST)
	}
	wg.Wait()
	far.awaitExit()
	if n := len(far.entries(func(e entry) bool { return e.str("reason") == "drain" && e.str("msg") == "tunnel" })); n != len(left) {
		t.Errorf("%d lines of the log say that a tunnel was drained, want %d", n, len(left))
	}
}

// A tunnel without a byte for the limit is ended whatever carries it, and one with
// a side that is closed by its own limit; one with a byte now and then is not.
func TestLimitsOfTunnelsOverEveryCarrier(t *testing.T) {
	t.Parallel()
	const limit = 5 * time.Second // and half of it for a machine that is busy
	b := testnet.NewBackend(t)
	for _, tt := range []struct {
		limits string
		reason tunnel.Reason
		half   bool
	}{
		{"idleTimeout: 5s", tunnel.Idle, false},
		{"halfClosedTimeout: 5s", tunnel.HalfClosed, true},
	} {
		t.Run(string(tt.reason), func(t *testing.T) {
			t.Parallel()
			far, outer, _ := edges(t, service(onlyService, b.Addr()), "limits: {"+tt.limits+"}")
			ways := carriers(t, far, outer, outer.keys)
			var wg sync.WaitGroup
			for _, way := range ways {
				client, server, err := b.Through(func(ctx context.Context) (net.Conn, error) { return way.open(ctx, onlyService) }, nil)(t.Context())
				if err != nil {
					t.Fatalf("%s: %v", way.name, err)
				}
				t.Cleanup(func() {
					_ = client.Close()
					_ = server.Close()
				})
				wg.Go(func() {
					// A byte halfway begins the time anew.
					began := time.Now()
					if tt.half {
						if err := testnet.CloseWrite(client); err != nil {
							t.Errorf("%s: %v", way.name, err)
						}
					}
					pause(t.Context(), limit/2)
					if _, err := server.Write([]byte("x")); err != nil {
						t.Errorf("%s: %v", way.name, err)
						return
					}
					_ = client.SetReadDeadline(time.Now().Add(patience))
					got, err := io.ReadAll(client)
					took := time.Since(began)
					if string(got) != "x" || !wasReset(err) {
						t.Errorf("%s: it ended with %q and %v, want a reset", way.name, got, err)
					}
					if took < limit+limit/2 || took > 2*limit+limit/2 {
						t.Errorf("%s: it ended after %v, want %v", way.name, took, limit+limit/2)
					}
				})
			}
			wg.Wait()
			testnet.Eventually(t, patience, func() bool {
				return far.metric("culvert_tunnels_ended_total", fmt.Sprintf("reason=%q", tt.reason)) == float64(len(ways)) ||
					len(far.entries(func(e entry) bool { return e.str("reason") == string(tt.reason) })) == len(ways)
			}, "each is told of as %s", tt.reason)
		})
	}
}

// A gateway that stands still for ten seconds and goes on, as a virtual machine
// that is moved does, has lost no tunnel, be it idle or not, neither of clients'
// nor of other gateways'. Nobody may take such a peer for dead so soon.
func TestPausesOverEveryCarrier(t *testing.T) {
	t.Parallel()
	const still, rest = 10 * time.Second, 7 * time.Second
	b := testnet.Echo(t)
	ca, keys := newCA(t)
	far := everyWay(t, ca, "127.0.0.0/8", onlyService)
	far.serve("  - {names: [" + onlyService + ", \"*.out.test\"], endpoints: [\"" + b.Addr() + "\"]}\n")
	outer, near := relayed(t, ca, far), withKeys(t, ca)
	outer.keys = keys
	near.serve(servicesOut(far, outer))
	tunnels := hold(t, carriersAnd(t, far, outer), 1)
	for i, way := range waysOut {
		c := near.mustDial(2)
		if err := byConnect.enter(c, wayOutName(i)); err != nil {
			t.Fatalf("by way of another gateway, %s: %v", way.name, err)
		}
		tunnels = append(tunnels, held{"by way of another gateway, " + way.name, c})
	}
	pause(t.Context(), rest) // so that what asks whether anybody is there asks while nobody is
	far.signal(syscall.SIGSTOP)
	defer far.signal(syscall.SIGCONT)
	pause(t.Context(), still)
	far.signal(syscall.SIGCONT)
	echoes(t, fmt.Sprintf("after it stood still for %v", still), tunnels)
}

// Without descriptors for more, tunnels by every carrier are refused, those that
// stand go on, what an operator needs works, and when some have left there is room
// again. What is carried by streams takes descriptors, too: those of the services.
func TestDescriptorsRunOutByEveryCarrier(t *testing.T) {
	t.Parallel()
	const limit = 256
	b := testnet.Echo(t)
	ca, keys := newCA(t)
	far := everyWay(t, ca, "127.1.0.0/16", onlyService)
	far.opts.Wrap = []string{"sh", "-c", fmt.Sprintf(`ulimit -n %d; exec "$0" "$@"`, limit)}
	far.serve(service(onlyService, b.Addr()))
	for _, way := range carriers(t, far, relayed(t, ca, far), keys) {
		t.Run(way.name, func(t *testing.T) {
			open := func() (net.Conn, error) {
				ctx, cancel := context.WithTimeout(t.Context(), patience)
				defer cancel()
				c, err := way.open(ctx, onlyService)
				if err != nil {
					return nil, err
				}
				if err := echo(c, "x"); err != nil {
					_ = c.Close()
					return nil, err
				}
				return c, nil
			}
			overloads := func() float64 {
				m := far.metrics()
				return sum(m, "culvert_requests_total", `reason="overload"`) + sum(m, "culvert_connections_refused_total", `reason="overload"`)
			}
			was := overloads()
			var tunnels []held
			var full error
			for full == nil && len(tunnels) < limit {
				var c net.Conn
				if c, full = open(); full == nil {
					t.Cleanup(func() { _ = c.Close() })
					tunnels = append(tunnels, held{way.name, c})
				}
			}
			t.Logf("%d tunnels with %d descriptors, and then %v", len(tunnels), limit, full)
			if len(tunnels) < 50 || full == nil {
				t.Fatalf("%d tunnels with %d descriptors, want at least 50 and a refusal", len(tunnels), limit)
			}
			testnet.Eventually(t, patience, func() bool { return overloads() > was }, "what did not fit is counted")
			echoes(t, "with no room for more", tunnels)
			for _, path := range []string{"/healthz", "/readyz", "/metrics", "/status"} {
				if status, _, err := far.get(path); err != nil || status != http.StatusOK {
					t.Errorf("%s without descriptors for clients: %d, %v", path, status, err)
				}
			}
			for _, h := range tunnels[:10] {
				_ = h.conn.Close()
			}
			testnet.Eventually(t, patience, func() bool {
				c, err := open()
				if err == nil {
					_ = c.Close()
				}
				return err == nil
			}, "there is room again")
			echoes(t, "in the end", tunnels[10:])
			for _, h := range tunnels {
				_ = h.conn.Close()
			}
			testnet.Eventually(t, patience, func() bool { return far.metric("culvert_tunnels_open") == 0 }, "they are over")
		})
	}
	if n := len(far.entries(func(e entry) bool { return strings.Contains(e.str("err"), "too many open files") })); n > 0 {
		t.Errorf("%d lines say that there was no descriptor: they are not counted right", n)
	}
}

// helloOf is what a client with config begins TLS with.
func helloOf(t *testing.T, config *tls.Config) []byte {
	t.Helper()
	near, far := net.Pipe()
	defer far.Close()
	go func() {
		defer near.Close()
		_ = tls.Client(near, config).HandshakeContext(t.Context())
	}()
	_ = far.SetReadDeadline(time.Now().Add(patience))
	b := make([]byte, 5)
	if _, err := io.ReadFull(far, b); err != nil {
		t.Fatal(err)
	}
	b = append(b, make([]byte, binary.BigEndian.Uint16(b[3:]))...)
	if _, err := io.ReadFull(far, b[5:]); err != nil {
		t.Fatal(err)
	}
	return b
}

// The time for a preamble is absolute at every kind of listener and in every
// phase: no byte renews it, whatever is spoken, and neither does TLS that ends.
func TestDeadlinesAreAbsoluteAtEveryListener(t *testing.T) {
	t.Parallel()
	const second = time.Second
	b := testnet.Echo(t)
	ca, keys := newCA(t)
	g := everyWay(t, ca, "127.1.0.0/16", onlyService)
	g.serve(service(onlyService, b.Addr()))
	keys.ServerName = g.ip
	head := byConnect.preamble(onlyService)
	handshake := helloOf(t, keys)
	upgrade := []byte("GET / HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n")
	v1, v2 := []byte("PROXY TCP4 192.0.2.9 192.0.2.1 5000 443\r\n"), []byte("\r\n\r\n\x00\r\nQUIT\n\x21\x11\x00\x54")
	settings := []byte(http2.ClientPreface + "\x00\x00\x00\x04\x00\x00\x00\x00\x00")
	for _, tt := range []struct {
		name string
		addr string
		alpn string // "" where TLS is not begun first, as a client does
		raw  []byte // at once
		drip []byte // then one of them a second
		want time.Duration
	}{
		{"a head of WebSocket", g.addr, "", nil, upgrade, 5 * second},
		{"a greeting of SOCKS", g.addr, "", nil, []byte("\x05\xff\x01\x01\x01\x01\x01\x01\x01\x01\x01\x01\x01\x01"), 5 * second},
		{"a request of SOCKS", g.addr, "", []byte("\x05\x01\x00"), []byte("\x05\x01\x00\x03\x10aaaaaaaaaaaaaaaa"), 5 * second},
		{"a preface of HTTP/2", g.addr, "", nil, []byte(http2.ClientPreface), 5 * second},
		{"HTTP/2 without a request", g.addr, "", settings, nil, 5 * second},
		{"a head of HTTP/2", g.addr, "", settings, []byte("\x00\x10\x00\x01\x04\x00\x00\x00\x01aaaaaaaaaaaaaa"), 5 * second},
		{"silence where TLS ends", g.ip + portTLS, "", nil, nil, 10 * second},
		{"a hello where TLS ends", g.ip + portTLS, "", nil, handshake, 5 * second},
		{"half a handshake", g.ip + portTLS, "", handshake, []byte("\x14\x03\x03\x00\x01\x01"), 5 * second},
		{"silence inside of TLS", g.ip + portTLS, "http/1.1", nil, nil, 5 * second},
		{"a head inside of TLS", g.ip + portTLS, "http/1.1", nil, head, 5 * second},
		{"a head of WebSocket inside of TLS", g.ip + portTLS, "http/1.1", nil, upgrade, 5 * second},
		{"a preface of HTTP/2 inside of TLS", g.ip + portTLS, "h2", nil, []byte(http2.ClientPreface), 5 * second},
		{"HTTP/2 inside of TLS, without a request", g.ip + portTLS, "h2", settings, nil, 5 * second},
		{"a header of PROXY v1 that names the service", g.ip + portProxy, "", nil, v1, 5 * second},
		{"a header of PROXY v2 that names the service", g.ip + portProxy, "", nil, v2, 5 * second},
		{"silence where a proxy is", g.ip + portProxy, "", nil, nil, 10 * second},
		{"a header of PROXY v1 before a service", g.ip + portBehind, "", nil, v1, 5 * second},
		{"a header of PROXY v2 before a service", g.ip + portBehind, "", nil, v2, 5 * second},
		{"silence before a service", g.ip + portBehind, "", nil, nil, 10 * second},
		{"silence where HBONE is", g.ip + portHBONE, "", nil, nil, 10 * second},
		{"a hello where HBONE is", g.ip + portHBONE, "", nil, handshake, 5 * second},
		{"silence inside of HBONE's TLS", g.ip + portHBONE, "h2", nil, nil, 5 * second},
		{"a preface inside of HBONE's TLS", g.ip + portHBONE, "h2", nil, []byte(http2.ClientPreface), 5 * second},
		{"HBONE without a request", g.ip + portHBONE, "h2", settings, nil, 5 * second},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			began := time.Now() // the gateway's time begins between this and accepted
			raw, err := dialFrom(3, tt.addr)
			if err != nil {
				t.Fatal(err)
			}
			defer raw.Close()
			accepted := time.Now()
			c := net.Conn(raw)
			if tt.alpn != "" {
				with := keys.Clone()
				with.NextProtos = []string{tt.alpn}
				inner := tls.Client(raw, with)
				if err := inner.HandshakeContext(t.Context()); err != nil {
					t.Fatal(err)
				}
				c = inner
			}
			if _, err := c.Write(tt.raw); err != nil {
				t.Fatal(err)
			}
			ctx, cancel := context.WithCancel(t.Context())
			var wg sync.WaitGroup
			wg.Go(func() {
				if len(tt.drip) > 0 {
					_, _ = c.Write(tt.drip[:1])
					drip(ctx, c, tt.drip[1:])
				}
			})
			_ = c.SetReadDeadline(time.Now().Add(patience))
			_, err = io.Copy(io.Discard, c)
			lived := time.Since(accepted)
			if time.Since(began) < tt.want-100*time.Millisecond || lived > tt.want+preambleSlack {
				t.Errorf("ended after %v, with %v, want %v", lived, err, tt.want)
			}
			cancel()
			wg.Wait()
		})
	}
}

// Tunnels whose clients don't read, and those whose services don't, are bounded by
// the memory that the gateway may use, whatever carries them: new ones are refused
// in time, what stands goes on, and when they leave there is room again.
func TestMemoryRunsOutByEveryCarrier(t *testing.T) {
	t.Parallel()
	const (
		limit = 40 << 20 // of which the process takes 16 to 26 by itself under the race detector, once it has had much to do
		most  = 500      // tunnels, of each carrier
	)
	flood, deaf := startBackend(t, "flood"), startBackend(t, "deaf")
	b := testnet.Echo(t)
	ca, keys := newCA(t)
	for _, tt := range []struct{ name, service string }{{"the client does not read", flood.addr}, {"the service does not read", deaf.addr}} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			far := everyWay(t, ca, "127.1.0.0/16", onlyService)
			far.opts.More += fmt.Sprintf("\nlimits: {memory: %dMiB}", limit>>20)
			services := service(onlyService, tt.service) + service("echo.test", b.Addr())
			far.serve(services)
			stands := far.tunnel(byConnect, 2, "echo.test")
			base := far.rss() // most of it is beside what is limited: the program, and what the race detector knows of it
			// Where memory is full a connection waits to be accepted.
			served := func() bool {
				c := far.mustDial(2)
				defer c.Close()
				defer time.AfterFunc(time.Second, func() { _ = c.Close() }).Stop()
				return byConnect.enter(c, "echo.test") == nil
			}
			for _, way := range carriers(t, far, relayed(t, ca, far), keys) {
				if way.fixed {
					continue // TestMemoryRunsOut has what is no stream of another
				}
				t.Run(way.name, func(t *testing.T) {
					var slow many
					defer slow.close()
					opened := 0
					began := time.Now()
					for ; opened < most && served(); opened += 50 {
						crowdMay(50, 10, func(int) {
							ctx, cancel := context.WithTimeout(t.Context(), time.Second)
							defer cancel()
							c, err := way.open(ctx, onlyService)
							if err != nil {
								return
							}
							slow.add(c)
							_ = c.SetWriteDeadline(time.Now().Add(50 * time.Millisecond))
							_, _ = c.Write(make([]byte, 1<<20))
						})
					}
					t.Logf("%d tunnels in %v; %.1f MiB of memory in use, RSS %d MiB", opened, time.Since(began).Round(time.Millisecond), far.metric("culvert_memory_used_bytes")/(1<<20), far.rss()>>20)
					if rss := far.rss(); rss > base+limit {
						t.Errorf("the process has %d MiB, want %d at most", rss>>20, (base+limit)>>20)
					}
					if err := echo(stands, "still here"); err != nil {
						t.Errorf("the tunnel that stood: %v", err)
					}
					slow.abort() // what ends in order has to be delivered first
					testnet.Eventually(t, patience, served, "there is room again")
					testnet.Eventually(t, patience, func() bool { return far.metric("culvert_tunnels_open") == 1 }, "they are over")
				})
			}
		})
	}
}

// crowdMay calls f for 0 to n-1, some at a time.
func crowdMay(n, workers int, f func(i int)) {
	var wg sync.WaitGroup
	next := make(chan int)
	for range workers {
		wg.Go(func() {
			for i := range next {
				f(i)
			}
		})
	}
	for i := range n {
		next <- i
	}
	close(next)
	wg.Wait()
}

// A peer that is gone without a word is asked for by the kernel, on the socket of
// every tunnel to its service, and on that from its client where that is one of the
// tunnel alone: connections of many are asked for by PING. TestDeadPeers shows what
// comes of it.
func TestSocketsOfEveryCarrierAreKeptAlive(t *testing.T) {
	t.Parallel()
	b := testnet.Echo(t)
	far, outer, _ := edges(t, service(onlyService, b.Addr()), "")
	ways := carriersAnd(t, far, outer)
	alone := 0
	for _, h := range hold(t, ways, 1) {
		if !slices.Contains(shared, h.name) {
			alone++
		}
	}
	to, from := hexAddr(t, b.Addr()), hexAddr(t, far.ip+":0")[:8]
	var services, clients int
	testnet.Eventually(t, patience, func() bool {
		services, clients = 0, 0
		for ends, timer := range far.sockets(t) {
			switch local, remote, _ := strings.Cut(ends, " "); {
			case timer != keepaliveTimer:
			case remote == to:
				services++
			case strings.HasPrefix(local, from):
				clients++
			}
		}
		return services == len(ways) && clients >= alone
	}, "%d sockets to services and %d from clients are kept alive", len(ways), alone)
}

// shared are the carriers of many tunnels.
var shared = []string{"connect-h2", "connect-h2 in TLS", "connect-h3", "hbone", "double hbone", overHTTP2}

// hexAddr is an address of IPv4 as /proc/net/tcp has it.
func hexAddr(t *testing.T, addr string) string {
	t.Helper()
	ap, err := netip.ParseAddrPort(addr)
	if err != nil {
		t.Fatal(err)
	}
	ip := ap.Addr().As4()
	return fmt.Sprintf("%08X:%04X", binary.NativeEndian.Uint32(ip[:]), ap.Port())
}

// keepaliveTimer is how /proc/net/tcp says that a socket's timer is that.
const keepaliveTimer = "02"

// sockets are the connections that the gateway has, and the timer of each.
func (g *gateway) sockets(t *testing.T) map[string]string {
	t.Helper()
	own := map[string]bool{} // by inode
	fds, err := os.ReadDir(g.proc("fd"))
	if err != nil {
		t.Fatal(err)
	}
	for _, fd := range fds {
		to, _ := os.Readlink(g.proc("fd/" + fd.Name()))
		own[strings.TrimSuffix(strings.TrimPrefix(to, "socket:["), "]")] = true
	}
	found := map[string]string{}
	for _, file := range []string{"net/tcp", "net/tcp6"} {
		text, err := os.ReadFile(g.proc(file))
		if err != nil {
			t.Fatal(err)
		}
		for line := range strings.Lines(string(text)) {
			const established = "01"
			f := strings.Fields(line) // proc(5): number, local, remote, state, queues, timer:when, ..., inode
			if len(f) > 9 && f[3] == established && own[f[9]] {
				timer, _, _ := strings.Cut(f[5], ":")
				found[f[1]+" "+f[2]] = timer
			}
		}
	}
	return found
}
