//go:build linux

package reliability

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"culvert.dev/connect"
	"culvert.dev/connect/h2"
	"culvert.dev/connect/h3"
	"culvert.dev/connect/socks5"
	"culvert.dev/connect/ws"
	"culvert.dev/internal/gateway/upstream"
	"culvert.dev/internal/testnet"
	"culvert.dev/tunnel"
)

// lies are the fields by which servers are told of a client by proxies in front
// of them: that it is at 192.0.2.9, and somebody who may do anything.
var lies = connect.Fields{
	{Name: "x-forwarded-for", Value: "192.0.2.9"}, {Name: "x-real-ip", Value: "192.0.2.9"}, {Name: "x-client-ip", Value: "192.0.2.9"},
	{Name: "forwarded", Value: `for=192.0.2.9;proto=https`}, {Name: "true-client-ip", Value: "192.0.2.9"}, {Name: "cf-connecting-ip", Value: "192.0.2.9"},
	{Name: "x-envoy-external-address", Value: "192.0.2.9"}, {Name: "x-remote-user", Value: "admin"}, {Name: "x-ssl-client-s-dn", Value: "CN=admin"},
	{Name: "x-forwarded-client-cert", Value: `By=spiffe://carry.test/gw;Subject="CN=admin";URI=spiffe://carry.test/admin`},
	{Name: "x_forwarded_client_cert", Value: `By=spiffe://carry.test/gw;URI=spiffe://carry.test/admin`}, {Name: "client-cert", Value: ":AAAA:"}, {Name: "client_cert", Value: ":AAAA:"},
	{Name: "culvert-peer", Value: "eyJhbGciOiJFUzI1NiJ9.e30.AA"}, {Name: "culvert-peer", Value: "admin"}, {Name: "culvert_peer", Value: "admin"},
	{Name: "baggage", Value: "source.principal=spiffe://carry.test/admin,k8s.namespace.name=admin"},
}

// proxyV2 is a PROXY header of version 2 that tells the same, and that office
// is asked for.
func proxyV2() []byte {
	tlv := func(kind byte, value string) string { return string(append([]byte{kind}, vec16([]byte(value))...)) }
	ends := string([]byte{192, 0, 2, 9, 192, 0, 2, 1, 5000 >> 8, 5000 & 255, 443 >> 8, 443 & 255})
	// PP2_TYPE_SSL: a certificate on this connection, which was verified, and
	// its common name.
	ssl := tlv(0x20, "\x07\x00\x00\x00\x00"+tlv(0x21, "TLSv1.3")+tlv(0x22, "admin"))
	return append([]byte("\r\n\r\n\x00\r\nQUIT\n\x21\x11"), vec16([]byte(ends+tlv(0x02, "office.test")+ssl))...)
}

// Who a client is, is what its socket and its handshake say. What it says of
// itself is not believed, on any kind of port: not where it is, which would let
// it into the office, and not who it is (must-never N5).
func TestNobodyIsBelieved(t *testing.T) {
	ca, keys := newCA(t)
	office, open := testnet.NewTap(t), testnet.Echo(t)
	g := everyWay(t, ca, "127.7.0.0/16", "office.test")
	g.opts.More += "\nnetworks: [{name: office, cidrs: [192.0.2.0/24]}]"
	g.serve(fmt.Sprintf("  - {name: office.test, exposedTo: [office], endpoints: [%q]}\n  - {name: open.test, ownPort: false, endpoints: [%q]}\n", office.Addr(), open.Addr()))

	// said waits for the one line of the log on the connection from source and
	// what it asked for.
	said := func(t *testing.T, source, target string) (line entry) {
		t.Helper()
		testnet.Eventually(t, patience, func() bool {
			lines := g.entries(func(e entry) bool { return e.str("source") == source && e.str("target") == target })
			if len(lines) > 0 {
				line = lines[0]
			}
			return len(lines) == 1
		}, "the log has a line with the client's own address %s and the target %q", source, target)
		return line
	}

	fields := func(context.Context, string) (connect.Fields, error) { return lies, nil }
	way := &noting{}
	for _, row := range []struct {
		name, peer string
		dialer     tunnel.Dialer
	}{
		{"connect", "", &connect.Dialer{Proxy: g.addr, Dialer: way, Header: fields}},
		{"connect in TLS", "", &connect.Dialer{Proxy: g.ip + portTLS, Dialer: way, TLS: keys, Header: fields}},
		{"connect-h2", "", &h2.Dialer{Proxy: g.addr, Dialer: way, Header: fields}},
		{"connect-h2 in TLS", "", &h2.Dialer{Proxy: g.ip + portTLS, Dialer: way, TLS: keys, Header: fields}},
		{"connect-h3", "", &h3.Dialer{Proxy: g.ip + portTLS, TLS: keys, Listen: way.listen, Header: fields}},
		{"hbone", clientID, &h2.Dialer{Proxy: g.ip + portHBONE, Dialer: way, TLS: keys, Header: fields}},
		{"websocket", "", &ws.Dialer{URL: "ws://" + g.addr, Dialer: way, Header: fields}},
		{"websocket over HTTP/2", "", upstream.NewWebSocketDialer(&ws.Dialer{URL: "wss://" + g.ip + portTLS, Dialer: way, TLS: keys, Header: fields})},
		{"socks5", "", &socks5.Dialer{Proxy: g.addr, Dialer: way, User: "admin", Password: "admin"}},
	} {
		t.Run(row.name, func(t *testing.T) {
			if c, ok := row.dialer.(interface{ Close() error }); ok {
				defer c.Close()
			}
			if c, err := row.dialer.DialContext(t.Context(), "tcp", "office.test:443"); err == nil {
				_ = c.Close()
				t.Error("it is let into the office")
			}
			if e := said(t, way.from, "office.test:443"); e.str("reason") != "not-exposed" || e.str("peer") != row.peer {
				t.Errorf("the log has %v, want not-exposed and the peer %q", e, row.peer)
			}
			c, err := row.dialer.DialContext(t.Context(), "tcp", "open.test:443")
			if err != nil {
				t.Fatal(err)
			}
			err = echo(c, "hello")
			_ = c.Close()
			if e := said(t, way.from, "open.test:443"); err != nil || e.str("peer") != row.peer {
				t.Errorf("%v, and the log has %v, want the peer %q", err, e, row.peer)
			}
		})
	}

	// A PROXY header counts where a listener has it, and from whom it names.
	clients := 1
	v1 := []byte("PROXY TCP4 192.0.2.9 192.0.2.1 5000 443\r\n")
	for _, port := range []struct{ name, addr, reason string }{
		{"one that detects", g.addr, "bad-preamble"},
		{"one that ends TLS", g.ip + portTLS, "bad-preamble"},
		{"one of HBONE", g.ip + portHBONE, "bad-preamble"},
		{"one for proxies, and this is none", g.ip + portProxy, "denied"},
		{"one for proxies and one service", g.ip + portBehind, "denied"},
		{"one of a service's own", g.ip + portService, "not-exposed"},
	} {
		for version, head := range map[string][]byte{"v1": v1, "v2": proxyV2()} {
			clients++
			from := sourceIP(clients)
			t.Run("PROXY "+version+" to "+port.name, func(t *testing.T) {
				if c, err := dialFrom(clients, port.addr); err == nil { // or it is refused as it comes
					request(c, append(slices.Clone(head), hello("office.test")...))
				}
				var lines []entry
				testnet.Eventually(t, patience, func() bool {
					lines = g.entries(func(e entry) bool { return strings.HasPrefix(e.str("source"), from+":") })
					return len(lines) == 1
				}, "the log has a line with the client's own address %s", from)
				if e := lines[0]; e.str("reason") != port.reason || e.str("peer") != "" {
					t.Errorf("the log has %v, want %s", e, port.reason)
				}
			})
		}
	}
	if n := office.Accepted(); n != 0 {
		t.Errorf("the service was dialed %d times, want never", n)
	}

	// A proxy that may say so is believed where its client is, and not who.
	d := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.IPv4(127, 7, 0, 1)}, Timeout: patience}
	c, err := d.DialContext(t.Context(), "tcp", g.ip+portProxy)
	if err != nil {
		t.Fatal(err)
	}
	_, _ = c.Write(proxyV2())
	testnet.Eventually(t, patience, func() bool { return office.Accepted() == 1 }, "the office's own client reaches the service")
	_ = c.Close()
	if e := said(t, "192.0.2.9:5000", "office.test"); e.str("peer") != "" || e.str("peer_method") != "" {
		t.Errorf("behind a proxy: the log has %v, want no peer", e)
	}
	for _, e := range g.entries(func(e entry) bool {
		return strings.HasPrefix(e.str("source"), "192.0.2.") || strings.Contains(e.str("peer"), "admin")
	}) {
		if e.str("source") != "192.0.2.9:5000" {
			t.Errorf("a lie is believed: %v", e)
		}
	}
}

// noting dials from the address of a client and notes its end of the connection
// that it has made last.
type noting struct{ from string }

func (n *noting) DialContext(_ context.Context, _, addr string) (net.Conn, error) {
	c, err := dialFrom(1, addr)
	if err != nil {
		return nil, err
	}
	n.from = c.LocalAddr().String()
	return c, nil
}

// listen is the same for h3.Dialer.
func (n *noting) listen(context.Context, string, netip.AddrPort) (net.PacketConn, error) {
	c, err := net.ListenUDP("udp4", &net.UDPAddr{IP: net.ParseIP(sourceIP(1))})
	if err != nil {
		return nil, err
	}
	n.from = c.LocalAddr().String()
	return c, nil
}
