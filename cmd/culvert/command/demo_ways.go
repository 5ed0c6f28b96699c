package command

import (
	"bufio"
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"sync"
	"time"

	"culvert.dev/connect/h3"
	"culvert.dev/internal/gateway"
	"culvert.dev/internal/testca"
	"culvert.dev/internal/udp"
	"culvert.dev/registry"
	"culvert.dev/registry/file"
	"culvert.dev/tunnel"
)

// gateways starts the gateway of the scene, and two more in front of it. done
// waits for their end, after ctx's.
func (d *demo) gateways(ctx context.Context, services []*registry.Service) (done func(), err error) {
	pair, err := d.ca.Issue(testca.Options{
		SPIFFEID: "spiffe://" + demoDomain + "/ns/edge/sa/gateway", DNSNames: []string{"localhost"}, IPs: []net.IP{net.IPv4(127, 0, 0, 1)}, Usage: testca.ServerOnly,
	})
	if err != nil {
		return nil, err
	}
	own := []file.KeyPair{{Certificate: string(pair.CertPEM), Key: registry.Secret(pair.KeyPEM)}}
	var wg sync.WaitGroup
	done = func() { wg.Wait(); d.services.Wait() }
	started := 0
	start := func(services []*registry.Service, listeners ...file.Listener) (addrs []string, err error) {
		c := file.Default()
		c.Drain = file.Drain{Timeout: 2 * time.Second}
		c.Services = services
		for _, l := range listeners {
			l.Address += "127.0.0.1:0"
			c.Listeners = append(c.Listeners, l)
		}
		cfg, err := gatewayConfig(c)
		if err != nil {
			return nil, err
		}
		started++
		cfg.Via = fmt.Sprintf("demo-%d", started)
		cfg.Sources = []registry.Source{registry.Static{Name: "demo", Snapshot: c.Snapshot()}}
		cfg.Log = slog.New(slog.DiscardHandler)
		g, err := gateway.New(ctx, cfg)
		if err != nil {
			return nil, err
		}
		wg.Go(func() { _ = g.Run(ctx, nil) })
		for _, a := range g.Addrs() {
			addrs = append(addrs, a.String())
		}
		return addrs, nil
	}
	all := []string{"sni", "connect", "connect-h2", "socks5", "websocket"}
	at, err := start(services,
		file.Listener{Protocols: all},
		file.Listener{TLS: []file.TLS{{Certificates: own}}},
		file.Listener{TLS: []file.TLS{{Certificates: own, Protocols: []string{"hbone"}, ClientCA: string(d.ca.CertPEM)}}},
		file.Listener{Protocols: []string{"proxy"}, Proxy: &file.Proxy{From: []netip.Prefix{netip.MustParsePrefix("127.0.0.0/8")}}},
		file.Listener{Target: file.Target{Service: tunnel.MustParseName("orders." + demoDomain), Port: 443}},
		file.Listener{Address: udp.Scheme, TLS: []file.TLS{{Certificates: own}}},
		file.Listener{Address: udp.Scheme},
		file.Listener{Address: udp.Scheme, Target: file.Target{Service: tunnel.MustParseName("orders." + demoDomain), Port: 443}},
	)
	if err != nil {
		return done, err
	}
	d.addr, d.https, d.hbone, d.proxy, d.orders, d.http3, d.quic, d.udp = at[0], at[1], at[2], at[3], at[4], at[5], at[6], at[7]
	d.say("gateway at %s: TLS, HTTP CONNECT, HTTP/2, SOCKS and WebSocket on one port. It has no key of any service", d.addr)

	near := d.addr
	for _, hop := range []registry.Hop{{Proto: "websocket", Addresses: []string{"ws://" + d.addr}}, {Proto: "connect-h2"}} {
		if hop.Addresses == nil {
			hop.Addresses = []string{near}
		}
		s := demoService("orders")
		s.Via = []registry.Hop{hop}
		if at, err = start([]*registry.Service{s}, file.Listener{}); err != nil {
			return done, err
		}
		near = at[0]
	}
	d.far = near
	d.say("two more gateways: from the last one, %s, orders is three gateways away", d.far)

	// One more each: that asks the first by SOCKS5, that is in front of it in
	// double HBONE, and that tells orders of its clients.
	s := demoService("orders")
	s.Via = []registry.Hop{{Proto: "socks5", Addresses: []string{d.addr}}}
	if at, err = start([]*registry.Service{s}, file.Listener{}); err != nil {
		return done, err
	}
	d.bySOCKS = at[0]
	s = demoService("orders")
	behind := netip.MustParseAddrPort(d.hbone)
	s.Endpoints = []registry.Endpoint{{Addr: behind.Addr(), Port: behind.Port()}}
	if at, err = start([]*registry.Service{s}, file.Listener{TLS: []file.TLS{{Certificates: own, Protocols: []string{"hbone"}, ClientCA: string(d.ca.CertPEM)}}}); err != nil {
		return done, err
	}
	d.twice = at[0]
	s = demoService("orders")
	s.Endpoints, s.ProxyProtocol = []registry.Endpoint{{Addr: d.ordersProxy.Addr(), Port: d.ordersProxy.Port()}}, 2
	if at, err = start([]*registry.Service{s}, file.Listener{}); err != nil {
		return done, err
	}
	d.told = at[0]
	return done, nil
}

// traffic is what the client does.
func (d *demo) traffic(ctx context.Context) {
	fmt.Fprintln(d.w)
	const orders = "orders." + demoDomain
	for _, way := range []struct{ title, mode, to string }{
		{"by SNI", "sni", d.addr},
		{"by CONNECT", "connect", d.addr},
		{"by CONNECT, with TLS to the gateway", "connect", "https://" + d.https},
		{"by CONNECT over HTTP/2", "connect-h2", d.addr},
		{"by CONNECT over HTTP/2, with TLS to the gateway", "connect-h2", "https://" + d.https},
		{"by CONNECT over HTTP/3", "connect-h3", d.http3},
		{"by HBONE", "hbone", d.hbone},
		{"by HBONE in HBONE, through two gateways", "hbone-twice", d.twice},
		{"by SOCKS5", "socks5", d.addr},
		{"by WebSocket", "websocket", d.addr},
		{"by WebSocket over HTTP/2", "websocket-h2", d.addr},
		{"by the name in a PROXY header", "proxy", d.proxy},
		{"by a port of its own", "sni", d.orders},
		{"by QUIC, by the name in its hello", "quic", d.quic},
		{"by a UDP port of its own", "quic", d.udp},
		{"through two gateways, by SNI and SOCKS5", "sni", d.bySOCKS},
		{"through three gateways, by SNI, HTTP/2 and WebSocket", "sni", d.far},
	} {
		d.reaches(ctx, orders+" "+way.title, way.mode, way.to, orders)
	}
	d.expect(orders+" by SNI, with the client's address in a PROXY header", "sa/web at 127.0.0.1",
		func() (string, error) { return d.get(ctx, "sni", d.told, orders, true) })
	d.reaches(ctx, "stock."+demoDomain+" by SNI on the same port", "sni", d.addr, "stock."+demoDomain)
	d.expect(orders+" by SNI without a certificate: the service refuses", "certificate required",
		func() (string, error) { return d.get(ctx, "sni", d.addr, orders, false) })
	d.expect("payroll."+demoDomain+" by SNI: private, refused", "unrecognized name",
		func() (string, error) { return d.get(ctx, "sni", d.addr, "payroll."+demoDomain, true) })
	d.expect("nobody."+demoDomain+" by CONNECT: no such service, refused", "no-route",
		func() (string, error) { return d.get(ctx, "connect", d.addr, "nobody."+demoDomain, true) })
	d.expect("127.0.0.1 by CONNECT: not an open proxy, refused", "prohibited",
		func() (string, error) { return d.get(ctx, "connect", d.addr, "127.0.0.1", true) })
}

// reaches expects the service's own answer, which names the client.
func (d *demo) reaches(ctx context.Context, what, mode, to, host string) {
	service, _, _ := strings.Cut(host, ".")
	want := fmt.Sprintf("%s here, you are spiffe://%s/ns/shop/sa/web", service, demoDomain)
	d.expect(what, want, func() (string, error) { return d.get(ctx, mode, to, host, true) })
}

// open opens a stream to host's port 443 by a gateway.
func (d *demo) open(ctx context.Context, mode, to, host string) (net.Conn, error) {
	target := net.JoinHostPort(host, "443")
	if mode == "proxy" {
		c, err := new(net.Dialer).DialContext(ctx, "tcp", to)
		if err != nil {
			return nil, err
		}
		return c, sayName(c, host)
	}
	o := &probeOptions{mode: mode, via: to}
	if mode == "hbone-twice" {
		o.mode, o.behind = "hbone", []string{"spiffe://" + demoDomain + "/ns/edge/sa/gateway"}
	}
	p := &prober{o: o, roots: d.ca.Pool(), ca: string(d.ca.CertPEM), tls: d.web.ClientConfig(host)}
	dialer := p.dialer()
	if dialer == nil {
		return new(net.Dialer).DialContext(ctx, "tcp", to)
	}
	if pool, ok := dialer.(io.Closer); ok {
		context.AfterFunc(ctx, func() { _ = pool.Close() })
	}
	return dialer.DialContext(ctx, "tcp", target)
}

// get asks host for / by a gateway and returns its answer.
func (d *demo) get(ctx context.Context, mode, to, host string, withCert bool) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	if mode == "quic" {
		return d.ask(ctx, to, host)
	}
	raw, err := d.open(ctx, mode, to, host)
	if err != nil {
		return "", err
	}
	defer raw.Close()
	cfg := d.web.ClientConfig(host)
	if !withCert {
		cfg.Certificates = nil
	}
	c := tls.Client(raw, cfg)
	if err := c.HandshakeContext(ctx); err != nil {
		return "", err
	}
	deadline, _ := ctx.Deadline()
	_ = c.SetDeadline(deadline)
	if _, err := fmt.Fprintf(c, "GET / HTTP/1.1\r\nHost: %s\r\nConnection: close\r\n\r\n", host); err != nil {
		return "", err
	}
	resp, err := http.ReadResponse(bufio.NewReader(c), nil)
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(io.LimitReader(resp.Body, 4096))
	// Where the service says which address it was told of, it is this one.
	if _, from, ok := strings.Cut(strings.TrimSpace(string(body)), " at "); ok && from != raw.LocalAddr().String() {
		return "", fmt.Errorf("the service was told of %s, and the client is at %s", from, raw.LocalAddr())
	}
	return strings.TrimSpace(string(body)), err
}

// ask is get by QUIC.
func (d *demo) ask(ctx context.Context, to, host string) (string, error) {
	cfg := d.web.ClientConfig(host)
	cfg.NextProtos = []string{demoALPN}
	c, err := h3.DialRawQUIC(ctx, to, cfg)
	if err != nil {
		return "", err
	}
	defer c.Close()
	answer, err := c.Ask(ctx, nil)
	return string(answer), err
}
