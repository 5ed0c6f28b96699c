package command

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"sync"
	"time"

	"culvert.dev/connect/h3"
	"culvert.dev/connect/proxyproto"
	"culvert.dev/internal/testca"
)

// serve starts one HTTPS service that demands a client certificate. Orders
// answers in QUIC at the same port too, and at another where connections begin
// with a PROXY header.
func (d *demo) serve(ctx context.Context, name string) (netip.AddrPort, error) {
	pair, err := d.ca.Issue(testca.Options{
		SPIFFEID: "spiffe://" + demoDomain + "/ns/shop/sa/" + name,
		DNSNames: []string{name + "." + demoDomain},
		Usage:    testca.ServerOnly,
	})
	if err != nil {
		return netip.AddrPort{}, err
	}
	hello := func(who *tls.ConnectionState) string {
		id, _ := testca.PeerID(who.PeerCertificates[0])
		return name + " here, you are " + id
	}
	ln, pc, err := listenBoth(ctx)
	if err != nil {
		return netip.AddrPort{}, err
	}
	serveHTTPS(ctx, ln, pair, func(r *http.Request) string { return hello(r.TLS) })
	if name != "orders" {
		_ = pc.Close()
		return addrOf(ln), nil
	}
	cfg := pair.ServerConfig()
	cfg.NextProtos = []string{demoALPN}
	d.services.Go(func() {
		defer pc.Close()
		_ = h3.ServeRawQUIC(ctx, pc, cfg, func(client *tls.ConnectionState, _ []byte) []byte { return []byte(hello(client)) })
	})
	proxied, err := new(net.ListenConfig).Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return netip.AddrPort{}, err
	}
	d.ordersProxy = addrOf(proxied)
	serveHTTPS(ctx, headed{proxied}, pair, func(r *http.Request) string { return hello(r.TLS) + " at " + r.RemoteAddr })
	return addrOf(ln), nil
}

// demoALPN is what orders speaks in QUIC: its one line, whatever it is asked.
const demoALPN = "demo"

func addrOf(ln net.Listener) netip.AddrPort { return ln.Addr().(*net.TCPAddr).AddrPort() }

// listenBoth listens at one port by TCP and by UDP.
func listenBoth(ctx context.Context) (ln net.Listener, pc net.PacketConn, err error) {
	for range 10 { // until there is one that is free for both
		if ln, err = new(net.ListenConfig).Listen(ctx, "tcp", "127.0.0.1:0"); err != nil {
			return nil, nil, err
		}
		if pc, err = new(net.ListenConfig).ListenPacket(ctx, "udp", ln.Addr().String()); err == nil {
			return ln, pc, nil
		}
		_ = ln.Close()
	}
	return nil, nil, err
}

// serveHTTPS serves one page until ctx is done.
func serveHTTPS(ctx context.Context, ln net.Listener, pair *testca.Pair, page func(r *http.Request) string) {
	srv := &http.Server{
		Handler:           http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { fmt.Fprintln(w, page(r)) }),
		ReadHeaderTimeout: 5 * time.Second,
		ErrorLog:          slog.NewLogLogger(slog.DiscardHandler, slog.LevelError),
	}
	go func() { _ = srv.Serve(tls.NewListener(ln, pair.ServerConfig())) }()
	context.AfterFunc(ctx, func() { _ = srv.Close() })
}

// headed is a listener whose connections begin with a PROXY header.
type headed struct{ net.Listener }

// Accept does not wait for the header: the first call of RemoteAddr reads it.
func (l headed) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return &headedConn{Conn: c}, nil
}

type headedConn struct {
	net.Conn
	once sync.Once
	from net.Addr
}

// RemoteAddr is what the header says.
func (c *headedConn) RemoteAddr() net.Addr {
	c.once.Do(c.read)
	return c.from
}

// Read begins behind the header.
func (c *headedConn) Read(p []byte) (int, error) {
	c.once.Do(c.read)
	return c.Conn.Read(p)
}

func (c *headedConn) read() {
	c.from = c.Conn.RemoteAddr()
	var head []byte
	for b := make([]byte, 1); ; {
		if _, err := c.Conn.Read(b); err != nil {
			return
		}
		head = append(head, b[0])
		h, _, err := proxyproto.Parse(head)
		switch {
		case err == nil:
			c.from = net.TCPAddrFromAddrPort(h.Source)
			return
		case !errors.Is(err, proxyproto.ErrMore):
			_ = c.Conn.Close()
			return
		}
	}
}
