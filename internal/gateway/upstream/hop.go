package upstream

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"sync"
	"time"

	"culvert.dev/connect"
	"culvert.dev/connect/h2"
	"culvert.dev/connect/h3"
	"culvert.dev/connect/hbone"
	"culvert.dev/connect/proxyproto"
	"culvert.dev/connect/socks5"
	"culvert.dev/connect/ws"
	"culvert.dev/registry"
	"culvert.dev/tunnel"
)

// newHopDialer returns the dialer that asks the gateway at addr, one of h's,
// which it reaches by dialer. This is the one place where a carrier becomes a
// dialer. The caller holds mu.
func (d *Dialers) newHopDialer(h *registry.Hop, addr string, dialer tunnel.Dialer) (tunnel.Dialer, error) {
	_, first := dialer.(firstHopDialer)
	credentials := ""
	switch {
	case h.Token != "":
		credentials = connect.BearerCredentials(string(h.Token))
	case h.User != "":
		credentials = connect.BasicCredentials(h.User, string(h.Password))
	}
	if credentials != "" && !h.Insecure {
		if to, clear := h.CleartextAddress(first); clear {
			return nil, fmt.Errorf("gateway: the credentials for %q would go there unencrypted, and it is not said to be insecure", to)
		}
	}
	cfg := &tls.Config{MinVersion: tls.VersionTLS12}
	if h.Roots != "" {
		cfg.RootCAs = x509.NewCertPool()
		if !cfg.RootCAs.AppendCertsFromPEM([]byte(h.Roots)) {
			return nil, fmt.Errorf("gateway: the roots for %q hold no certificate", addr)
		}
	}
	if h.Certificate != "" {
		pair, err := tls.X509KeyPair([]byte(h.Certificate), []byte(h.Key))
		if err != nil {
			return nil, fmt.Errorf("gateway: the certificate for %q: %w", addr, err)
		}
		cfg.Certificates = []tls.Certificate{pair}
	}
	switch h.Proto {
	case "hbone":
		trust, err := trustPools(h.Trust)
		if err != nil {
			return nil, fmt.Errorf("gateway: the roots for %q: %w", addr, err)
		}
		outer := &hbone.Dialer{Gateway: addr, Dialer: budgetDialer{dialer, d.Budget}, TLS: cfg, Peers: h.Peers, Trust: trust, Via: d.Via}
		if len(h.InnerPeers) == 0 {
			return d.pooled(outer), nil
		}
		return d.pooled(&hbone.Double{Outer: outer, TLS: cfg, Peers: h.InnerPeers, Trust: trust}), nil
	case "connect", "connect-h2":
		proxy, secure := strings.CutPrefix(addr, "https://")
		if !secure {
			cfg = nil
		}
		if h.Proto == "connect-h2" {
			return d.pooled(&h2.Dialer{Proxy: proxy, Dialer: budgetDialer{dialer, d.Budget}, TLS: cfg, Authorization: credentials, Via: d.Via}), nil
		}
		return &connect.Dialer{Proxy: proxy, Dialer: dialer, TLS: cfg, Authorization: credentials, Via: d.Via}, nil
	case "connect-h3":
		if !first {
			return nil, fmt.Errorf("gateway: %q can be asked by connect-h3 only where it is the first gateway: streams carry no datagrams", addr)
		}
		return d.pooled(&h3.Dialer{Proxy: addr, TLS: cfg, Authorization: credentials, Via: d.Via, Lookup: d.addresses, Listen: d.listenUDP}), nil
	case "socks5":
		return &socks5.Dialer{Proxy: addr, Dialer: dialer, User: h.User, Password: string(h.Password)}, nil
	case "websocket":
		if _, _, err := ws.ParseURL(addr); err != nil {
			return nil, err
		}
		single := &ws.Dialer{URL: addr, Dialer: dialer, TLS: cfg, Authorization: credentials, Via: d.Via}
		if h.HTTP2 {
			return d.pooled(NewWebSocketDialer(single)), nil
		}
		return single, nil
	}
	return nil, fmt.Errorf("gateway: no hop is called %q", h.Proto)
}

// trustPools parses the roots of each trust domain; nil where there are none.
func trustPools(trust map[string]string) (map[string]*x509.CertPool, error) {
	if trust == nil {
		return nil, nil
	}
	pools := make(map[string]*x509.CertPool, len(trust))
	for domain, pem := range trust {
		pools[domain] = x509.NewCertPool()
		if !pools[domain].AppendCertsFromPEM([]byte(pem)) {
			return nil, fmt.Errorf("those of the trust domain %q hold no certificate", domain)
		}
	}
	return pools, nil
}

// A viaHops dials endpoints through gateways. The names and addresses of the
// endpoints are those that the last gateway knows.
type viaHops struct {
	last tunnel.Dialer
	hops []string // for people
}

// HopsOf describes the gateways that a dialer of To leads through.
func HopsOf(dialer tunnel.Dialer) []string {
	if d, ok := dialer.(*tlsDialer); ok {
		dialer = d.transport
	}
	if d, ok := dialer.(*proxyproto.Dialer); ok {
		dialer = d.Dialer
	}
	if v, ok := dialer.(*viaHops); ok {
		return v.hops
	}
	return nil
}

// DialEndpoint dials ep by its name, where it has one.
func (v *viaHops) DialEndpoint(ctx context.Context, ep tunnel.Endpoint) (net.Conn, error) {
	return v.last.DialContext(ctx, "tcp", ep.String())
}

// DialRequest is DialEndpoint on behalf of req.
func (v *viaHops) DialRequest(ctx context.Context, ep tunnel.Endpoint, req *tunnel.Request) (net.Conn, error) {
	return v.DialEndpoint(hbone.WithRequest(ctx, req), ep)
}

// DialContext implements tunnel.Dialer.
func (v *viaHops) DialContext(ctx context.Context, network, addr string) (net.Conn, error) {
	return v.last.DialContext(ctx, network, addr)
}

// A firstHopDialer dials the first hop, which is a host and a port.
type firstHopDialer struct{ dialers *Dialers }

// maxFirstHopAddrs is how many addresses of the first hop are tried.
const maxFirstHopAddrs = 3

// DialContext implements tunnel.Dialer.
func (d firstHopDialer) DialContext(ctx context.Context, _, addr string) (net.Conn, error) {
	to, err := connect.ParseAuthority(addr)
	if err != nil {
		return nil, err
	}
	eps := []tunnel.Endpoint{{Addr: netip.AddrPortFrom(to.Addr, to.Port), Named: true}}
	if !to.Addr.IsValid() {
		host := to.Name.String()
		addrs, err := d.dialers.addresses(ctx, host)
		if err != nil {
			return nil, err
		}
		eps = eps[:0]
		for _, a := range addrs {
			eps = append(eps, tunnel.Endpoint{Addr: netip.AddrPortFrom(a, to.Port), Host: host, Named: registry.IsLocalhost(host)})
		}
	}
	var last error
	for _, ep := range eps[:min(len(eps), maxFirstHopAddrs)] {
		c, err := d.dialers.Direct.DialEndpoint(ctx, ep)
		if err == nil {
			return c, nil
		}
		last = err
	}
	return nil, last
}

// addresses returns those of the first hop's name; there is at least one.
func (d *Dialers) addresses(ctx context.Context, host string) ([]netip.Addr, error) {
	if registry.IsLocalhost(host) {
		return []netip.Addr{netip.AddrFrom4([4]byte{127, 0, 0, 1}), netip.IPv6Loopback()}, nil
	}
	if d.Lookup == nil {
		return nil, tunnel.Refusef(tunnel.LookupError, "gateway %q: no DNS resolver is configured", host)
	}
	addrs, err := d.Lookup(ctx, host)
	if err != nil {
		reason := tunnel.LookupError
		if ne := net.Error(nil); errors.As(err, &ne) && ne.Timeout() {
			reason = tunnel.LookupTime
		}
		return nil, tunnel.Refusef(reason, "lookup of gateway %q: %w", host, err)
	}
	if len(addrs) == 0 {
		return nil, tunnel.Refusef(tunnel.LookupError, "gateway %q has no address", host)
	}
	return addrs, nil
}

// listenUDP opens a UDP socket to reach the first hop at the address to, of a
// host that the configuration names.
func (d *Dialers) listenUDP(ctx context.Context, host string, to netip.AddrPort) (net.PacketConn, error) {
	_, err := netip.ParseAddr(host)
	written := err == nil || registry.IsLocalhost(host)
	if err := d.Direct.Guard.CheckUDP(to, written); err != nil {
		return nil, err
	}
	return h3.Listen(ctx, to)
}

// A fallbackDialer asks gateways in order until one dials. The client has been
// promised nothing yet, so the next one may be tried where one fails. Where a
// gateway has decided against the request, that decision stands.
type fallbackDialer []tunnel.Dialer

// DialContext implements tunnel.Dialer.
func (f fallbackDialer) DialContext(ctx context.Context, network, addr string) (net.Conn, error) {
	var errs []error
	for i, d := range f {
		c, err := dialWithin(ctx, d, addr, len(f)-i)
		if err == nil {
			return c, nil
		}
		errs = append(errs, err)
		if ctx.Err() != nil || isDecision(err) {
			return nil, err
		}
	}
	if len(errs) == 1 {
		return nil, errs[0]
	}
	return nil, &tunnel.Error{Reason: tunnel.ReasonOf(errs[len(errs)-1]), Err: errors.Join(errs...)}
}

// dialWithin dials addr in an equal part of the time that is left: a gateway that
// does not answer must leave some for the next.
func dialWithin(ctx context.Context, d tunnel.Dialer, addr string, parts int) (net.Conn, error) {
	if end, ok := ctx.Deadline(); ok && parts > 1 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, time.Until(end)/time.Duration(parts))
		defer cancel()
	}
	return d.DialContext(ctx, "tcp", addr)
}

// isDecision reports whether err is a gateway's decision about the request.
func isDecision(err error) bool {
	switch tunnel.ReasonOf(err) {
	case tunnel.NoRoute, tunnel.NotExposed, tunnel.Denied, tunnel.Prohibited, tunnel.Insecure, tunnel.Loop, tunnel.BadRequest, tunnel.TooLarge:
		return true
	}
	return false
}

// A budgetDialer dials gateways by connections that carry many tunnels: each
// connection takes a descriptor of the budget, and its tunnels take none.
type budgetDialer struct {
	tunnel.Dialer
	budget *tunnel.Budget
}

// DialContext implements tunnel.Dialer.
func (d budgetDialer) DialContext(ctx context.Context, network, addr string) (net.Conn, error) {
	if !d.budget.Take(1) {
		return nil, tunnel.Refusef(tunnel.Overload, "the %d descriptors for connections are taken", d.budget.Limit)
	}
	c, err := d.Dialer.DialContext(ctx, network, addr)
	if err != nil {
		d.budget.Give(1)
		return nil, err
	}
	return &budgetConn{Conn: c, release: sync.OnceFunc(func() { d.budget.Give(1) })}, nil
}

// A budgetConn gives its descriptor back when it is closed.
type budgetConn struct {
	net.Conn
	release func()
}

// Close implements net.Conn.
func (c *budgetConn) Close() error {
	defer c.release()
	return c.Conn.Close()
}

// CloseWrite implements tunnel.Stream.
func (c *budgetConn) CloseWrite() error {
	if w, ok := c.Conn.(tunnel.Stream); ok {
		return w.CloseWrite()
	}
	return errors.ErrUnsupported
}
