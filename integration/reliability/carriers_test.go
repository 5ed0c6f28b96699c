//go:build linux

package reliability

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"path/filepath"
	"strings"
	"testing"

	"culvert.dev/connect"
	"culvert.dev/connect/h2"
	"culvert.dev/connect/h3"
	"culvert.dev/connect/hbone"
	"culvert.dev/connect/proxyproto"
	"culvert.dev/connect/socks5"
	"culvert.dev/connect/ws"
	"culvert.dev/identity"
	"culvert.dev/internal/gateway/upstream"
	"culvert.dev/internal/testca"
	"culvert.dev/internal/testnet"
	"culvert.dev/tunnel"
)

// The ports of a gateway that has every way in, beside that of its first
// listener, which detects.
const (
	portTLS     = ":8444"  // CONNECT and WebSocket inside of TLS; at UDP, HTTP/3
	portProxy   = ":8445"  // a PROXY header that names the service
	portBehind  = ":8446"  // a PROXY header, and then the bytes of one service
	portHBONE   = ":15008" // HBONE
	portService = ":8500"  // the service's own
)

// detecting is what the first listener of such a gateway detects.
const detecting = ", protocols: [sni, connect, connect-h2, socks5, websocket]"

// everyWay is a gateway that is not started yet, with a listener for every way
// in. The proxies in front of it are at the addresses of from, and service is
// what has ports to itself.
func everyWay(t *testing.T, ca *testca.CA, from, service string) *gateway {
	t.Helper()
	return everyWayOf(t, ca, from, service, options{})
}

// everyWayOf is everyWay with options.
func everyWayOf(t *testing.T, ca *testca.CA, from, service string, o options) *gateway {
	t.Helper()
	g := withKeysOf(t, ca, o)
	g.opts.Listener = detecting
	g.opts.Listeners = strings.NewReplacer("IP", g.ip, "FROM", from, "SERVICE", service).Replace(`
  - {address: "IP:8444", tls: {certificateFile: gw.crt, keyFile: gw.key, protocols: [connect, connect-h2, websocket]}}
  - {address: "udp://IP:8444", tls: {certificateFile: gw.crt, keyFile: gw.key}}
  - {address: "IP:8445", protocols: [proxy], proxyProtocol: {from: ["FROM"]}}
  - {address: "IP:8446", service: "SERVICE:443", proxyProtocol: {from: ["FROM"]}}
  - {address: "IP:15008", tls: {certificateFile: gw.crt, keyFile: gw.key, clientCAFile: ca.crt, trustDomains: [carry.test], protocols: [hbone]}}
`)
	g.opts.More = fmt.Sprintf("servicePorts: {range: 8500-8500, address: %s, state: ports.json}", g.ip)
	return g
}

// withKeys prepares a gateway that can prove who it is: its folder has gw.crt
// and gw.key, for its address, and ca.crt.
func withKeys(t *testing.T, ca *testca.CA) *gateway {
	t.Helper()
	return withKeysOf(t, ca, options{})
}

// withKeysOf is withKeys with options.
func withKeysOf(t *testing.T, ca *testca.CA, o options) *gateway {
	t.Helper()
	g := prepare(t, o)
	if err := errors.Join(g.issue(ca), ca.Save(filepath.Dir(g.config))); err != nil {
		t.Fatal(err)
	}
	return g
}

// issue gives the gateway a certificate of ca, in place of the one it has.
func (g *gateway) issue(ca *testca.CA) error {
	pair, err := ca.Issue(testca.Options{SPIFFEID: "spiffe://" + ca.TrustDomain + "/gw", IPs: []net.IP{net.ParseIP(g.ip)}})
	if err != nil {
		return err
	}
	return pair.Save(filepath.Dir(g.config), "gw")
}

// serve starts a prepared gateway with services.
func (g *gateway) serve(services string) {
	g.t.Helper()
	g.write(g.yaml(services))
	g.begin()
}

// newCA makes a CA, and what a client of its trust domain has.
func newCA(t *testing.T) (*testca.CA, *tls.Config) {
	t.Helper()
	ca, err := testca.New("carry.test", nil)
	if err != nil {
		t.Fatal(err)
	}
	pair, err := ca.Issue(testca.Options{SPIFFEID: clientID, Usage: testca.ClientOnly})
	if err != nil {
		t.Fatal(err)
	}
	pair.TLS.Certificate = append(pair.TLS.Certificate, ca.Root().Raw) // for verifier
	return ca, &tls.Config{Certificates: []tls.Certificate{pair.TLS}, RootCAs: ca.Pool()}
}

// verifier verifies servers of the trust domain of keys, which newCA has made.
func verifier(t *testing.T, keys *tls.Config) *identity.Verifier {
	t.Helper()
	root, err := x509.ParseCertificate(keys.Certificates[0].Certificate[1])
	if err != nil {
		t.Fatal(err)
	}
	return &identity.Verifier{
		Trust: []*identity.Trust{identity.NewTrust("carry.test", root)},
		Want:  identity.Expectation{Usage: x509.ExtKeyUsageServerAuth, IDs: []string{"spiffe://carry.test"}},
	}
}

const clientID = "spiffe://carry.test/client"

// A source dials from the address of the client of that number.
type source int

func (s source) DialContext(_ context.Context, _, addr string) (net.Conn, error) {
	return dialFrom(int(s), addr)
}

// behindProxy dials addr as a proxy in front does, with a header first.
func behindProxy(addr string, h proxyproto.Header) dialFunc {
	h.Source, h.Destination = netip.MustParseAddrPort("192.0.2.9:5000"), netip.MustParseAddrPort("192.0.2.1:443")
	return func() (net.Conn, error) {
		b, err := h.Append(nil)
		if err != nil {
			return nil, err
		}
		c, err := dialFrom(1, addr)
		if err != nil {
			return nil, err
		}
		if _, err := c.Write(b); err != nil {
			_ = c.Close()
			return nil, err
		}
		return c, nil
	}
}

// relayed is a gateway in front of far: what asks it for the service is led to
// where far speaks HBONE, and what asks it for far.test to the port that detects.
func relayed(t *testing.T, ca *testca.CA, far *gateway) *gateway {
	t.Helper()
	return relayedOf(t, ca, far, options{})
}

// relayedOf is relayed with options.
func relayedOf(t *testing.T, ca *testca.CA, far *gateway, o options) *gateway {
	t.Helper()
	g := withKeysOf(t, ca, o)
	g.opts.Listeners = fmt.Sprintf("  - {address: %q, tls: {certificateFile: gw.crt, keyFile: gw.key, clientCAFile: ca.crt, trustDomains: [carry.test], protocols: [hbone]}}\n", g.ip+portHBONE)
	g.serve("  - {names: [chaos.test, \"*.out.test\"], endpoints: [\"" + far.ip + portHBONE + "\"]}\n" + service("far.test", far.addr))
	return g
}

// carriesExactly checks the tunnels that dial opens: every byte arrives, an end
// stays an end and an abort an abort, in both directions.
func carriesExactly(t *testing.T, dial testnet.Dial) {
	t.Helper()
	testnet.TestEndings(t, dial, testnet.Transparent())
	chaosOver(t, dial, *volumeEach<<20)
}

// A carrier is a way in, and the dialer that speaks it.
type carrier struct {
	name   string
	dialer tunnel.Dialer
	fixed  bool // it leads to the one service, whatever is asked for
}

// carriers are the ways into far from the first client's address, one by way of
// outer, and keys are the client's. They are closed with the test.
func carriers(t *testing.T, far, outer *gateway, keys *tls.Config) []carrier {
	direct := source(1)
	known := verifier(t, keys)
	ways := []carrier{
		{"connect in TLS", &connect.Dialer{Proxy: far.ip + portTLS, Dialer: direct, TLS: keys}, false},
		{"connect-h2", &h2.Dialer{Proxy: far.addr, Dialer: direct}, false},
		{"connect-h2 in TLS", &h2.Dialer{Proxy: far.ip + portTLS, Dialer: direct, TLS: keys}, false},
		{"connect-h3", &h3.Dialer{Proxy: far.ip + portTLS, TLS: keys}, false},
		{"hbone", &hbone.Dialer{Gateway: far.ip + portHBONE, Dialer: direct, TLS: keys, Verifier: known}, false},
		{"double hbone", &hbone.Double{Outer: &hbone.Dialer{Gateway: outer.ip + portHBONE, Dialer: direct, TLS: keys, Verifier: known}, TLS: keys, Verifier: known}, false},
		{"websocket", &ws.Dialer{URL: "ws://" + far.addr, Dialer: direct}, false},
		{"websocket in TLS", &ws.Dialer{URL: "wss://" + far.ip + portTLS, Dialer: direct, TLS: keys}, false},
		{overHTTP2, upstream.NewWebSocketDialer(&ws.Dialer{URL: "wss://" + far.ip + portTLS, Dialer: direct, TLS: keys}), false},
		{"socks5", &socks5.Dialer{Proxy: far.addr, Dialer: direct}, false},
		{"PROXY v2 that names the service", behindProxy(far.ip+portProxy, proxyproto.Header{Version: 2, Authority: onlyService}), true},
		{"PROXY v1 at a port of one service", behindProxy(far.ip+portBehind, proxyproto.Header{Version: 1}), true},
		{"a port of the service's own", dialFunc(func() (net.Conn, error) { return dialFrom(1, far.ip+portService) }), true},
	}
	for _, way := range ways {
		if c, ok := way.dialer.(io.Closer); ok {
			t.Cleanup(func() { _ = c.Close() })
		}
	}
	return ways
}

const (
	overHTTP2   = "websocket over HTTP/2"
	onlyService = "chaos.test" // what the carriers that are fixed lead to
)

// open opens a tunnel to a port of a service.
func (c carrier) open(ctx context.Context, service string) (net.Conn, error) {
	return c.dialer.DialContext(ctx, "tcp", service+":443")
}

// Every way in carries as those of eachWay do, each by the dialer that speaks
// it.
func TestWaysInCarryExactly(t *testing.T) {
	ca, keys := newCA(t)
	b := testnet.NewBackend(t)
	far := everyWay(t, ca, "127.1.0.0/16", onlyService)
	far.serve(service(onlyService, b.Addr()))
	for _, way := range carriers(t, far, relayed(t, ca, far), keys) {
		t.Run(way.name, func(t *testing.T) {
			open := func(ctx context.Context) (net.Conn, error) { return way.open(ctx, onlyService) }
			carriesExactly(t, b.Through(open, nil))
			if way.name == overHTTP2 {
				c, err := open(t.Context())
				if err != nil {
					t.Fatal(err)
				}
				defer c.Close()
				if below, ok := c.(*ws.Stream).NetConn().(*h2.Stream); !ok {
					t.Errorf("it is over a %T, want a stream of HTTP/2", below)
				}
			}
		})
	}
}

// A wayOut is what a service says that is reached by way of another gateway; FAR
// and OUTER stand for gateways.
type wayOut struct{ name, is string }

var waysOut = []wayOut{
	{"connect", `via: [{connect: "FAR:8443", insecure: true}]`},
	{"connect in TLS", `via: [{connect: "https://FAR:8444", certificateFile: gw.crt, keyFile: gw.key, caFile: ca.crt}]`},
	{"connect-h2", `via: [{connect-h2: "FAR:8443", insecure: true}]`},
	{"connect-h2 in TLS", `via: [{connect-h2: "https://FAR:8444", certificateFile: gw.crt, keyFile: gw.key, caFile: ca.crt}]`},
	{"connect-h3", `via: [{connect-h3: "FAR:8444", certificateFile: gw.crt, keyFile: gw.key, caFile: ca.crt}]`},
	{"hbone", `via: [{hbone: "FAR:15008", certificateFile: gw.crt, keyFile: gw.key, caFile: ca.crt}]`},
	{"double hbone", `via: [{hbone: "OUTER:15008", certificateFile: gw.crt, keyFile: gw.key, caFile: ca.crt, behind: ["spiffe://carry.test"]}]`},
	{"websocket", `via: [{websocket: "ws://FAR:8443/", insecure: true}]`},
	{"websocket in TLS", `via: [{websocket: "wss://FAR:8444/", certificateFile: gw.crt, keyFile: gw.key, caFile: ca.crt}]`},
	{overHTTP2, `via: [{websocket: "wss://FAR:8444/", certificateFile: gw.crt, keyFile: gw.key, caFile: ca.crt, http2: true}]`},
	{"socks5", `via: [{socks5: "FAR:8443", insecure: true}]`},
	{"PROXY v2 that names the service", `proxyProtocol: v2, endpoints: ["FAR:8445"]`},
	{"PROXY v1 to a port of one service", `proxyProtocol: v1, endpoints: ["FAR:8446"]`},
	{"a port of the service's own", `endpoints: ["FAR:8500"]`},
	{"three gateways", `via: [{connect-h2: "OUTER:8443", insecure: true}, {websocket: "ws://far.test:8443/", insecure: true}]`},
}

// servicesOut are the services of waysOut: service wayOutName(i) is reached by
// that of number i.
func servicesOut(far, outer *gateway) string {
	var services strings.Builder
	for i, way := range waysOut {
		fmt.Fprintf(&services, "  - {name: %s, ports: [443], %s}\n", wayOutName(i), strings.NewReplacer("FAR", far.ip, "OUTER", outer.ip).Replace(way.is))
	}
	return services.String()
}

func wayOutName(i int) string { return fmt.Sprintf("way%d.out.test", i) }

// So does every way out: a gateway that is asked by CONNECT leads by each of
// them to the one that has the service.
func TestWaysOutCarryExactly(t *testing.T) {
	ca, _ := newCA(t)
	b := testnet.NewBackend(t)
	far := everyWay(t, ca, "127.0.0.0/8", onlyService)
	far.serve("  - {names: [" + onlyService + ", \"*.out.test\"], endpoints: [\"" + b.Addr() + "\"]}\n")
	outer, near := relayed(t, ca, far), withKeys(t, ca)
	near.serve(servicesOut(far, outer))
	for i, way := range waysOut {
		t.Run(way.name, func(t *testing.T) {
			carriesExactly(t, near.through(byConnect, b, wayOutName(i)))
		})
	}
}
