package gateway

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
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

// Dialers make the ways out of a gateway that lead through others: each hop is
// a tunnel.Dialer that is given the one before it. This is the one place where
// a carrier becomes a way out.
type Dialers struct {
	// Direct dials the first hop's addresses; its guard judges them.
	Direct *tunnel.NetDialer

	// Lookup finds the addresses of the first hop's name; nil means it has none.
	Lookup func(ctx context.Context, host string) ([]netip.Addr, error)

	// Budget is where connections are counted that carry many tunnels, which
	// count for nothing themselves (tunnel.Multiplexed). May be nil.
	Budget *tunnel.Budget

	// Via is this gateway's pseudonym, which every request carries.
	Via string

	// ReportDial is told of every dial of a gateway that Cross leads to: nil for one
	// that worked. It is registry.Registry.Dialed. May be nil.
	ReportDial func(tunnel.Endpoint, error)

	mu   sync.Mutex // guards what follows
	made map[string]*through
	at   map[entrance]*through      // by what Cross asks
	seen map[*registry.Hop]*through // by the first of its hops, in the table that has them
	keep []io.Closer                // that have connections, to be closed

	tls     map[string]*backendTLS               // by what it says
	tlsSeen map[*registry.BackendTLS]*backendTLS // by where it is in a table
}

// maxMade is how many ways are kept. There are as many as different lists of
// hops in the configurations so far; beyond that all are made anew. The places
// in tables that are known to have such a list are maxSeen at most.
const (
	maxMade = 1024
	maxSeen = 64 << 10
)

// To returns the way out to a service: through the gateways of its Via, and
// telling its endpoints of their client and speaking TLS to them where it says
// so. It is nil where the Router's does. It is registry.Registry.Dialer.
func (d *Dialers) To(s *registry.Service) (tunnel.Dialer, error) {
	if len(s.Via) == 0 && s.ProxyProtocol == 0 && s.TLS == nil {
		return nil, nil
	}
	way, err := d.way(s.Via)
	if err != nil {
		return nil, err
	}
	return d.telling(s, way)
}

// telling returns a way that also tells the endpoints of s of their client, and
// speaks TLS to them, where s says so.
func (d *Dialers) telling(s *registry.Service, way proxyproto.EndpointDialer) (tunnel.Dialer, error) {
	var to tunnel.Dialer = way
	if s.ProxyProtocol != 0 {
		to = &proxyproto.Dialer{Version: s.ProxyProtocol, Dialer: way} // the header comes before TLS
	}
	if s.TLS == nil {
		return to, nil
	}
	b, err := d.backendTLS(s.TLS)
	if err != nil {
		return nil, err
	}
	return &tlsDialer{to, b}, nil
}

// way returns what dials through hops, in order. Ways that are equal share
// one, so that carriers may keep connections.
func (d *Dialers) way(hops []registry.Hop) (proxyproto.EndpointDialer, error) {
	if len(hops) == 0 {
		return d.Direct, nil
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	// A table never changes, so that the same place holds the same hops.
	if way, ok := d.seen[&hops[0]]; ok {
		return way, nil
	}
	way, err := d.shared(hops)
	if err != nil {
		return nil, err
	}
	if d.seen == nil || len(d.seen) >= maxSeen {
		d.seen = make(map[*registry.Hop]*through)
	}
	d.seen[&hops[0]] = way
	return way, nil
}

// shared returns the way by hops that are equal, or makes one. The caller holds
// mu.
func (d *Dialers) shared(hops []registry.Hop) (*through, error) {
	key := keyOf(hops)
	if way, ok := d.made[key]; ok {
		return way, nil
	}
	var way tunnel.Dialer = (*first)(d)
	for _, hop := range hops {
		var anyOf alternatives
		for _, to := range hop.Addresses {
			one, err := d.hop(&hop, to, way)
			if err != nil {
				return nil, err
			}
			anyOf = append(anyOf, one)
		}
		if len(anyOf) == 0 {
			return nil, errors.New("gateway: a hop leads nowhere")
		}
		way = anyOf
	}
	made := &through{way: way}
	for _, hop := range hops {
		made.hops = append(made.hops, hop.Proto+" "+strings.Join(hop.Addresses, " or "))
	}
	if d.made == nil || len(d.made) >= maxMade {
		d.made = make(map[string]*through)
		d.forget()
	}
	d.made[key] = made
	return made, nil
}

// forget lets go of ways that nobody uses any more: their connections end by
// themselves. Of both maps there are maxMade each. The caller holds mu.
func (d *Dialers) forget() { d.keep = d.keep[max(0, len(d.keep)-2*maxMade):] }

// keyOf is the same for hops that are the same, and for no others.
func keyOf(hops []registry.Hop) string {
	var b strings.Builder
	for _, h := range hops {
		fmt.Fprintf(&b, "%q %q %q %q %q %q %q %q %q %q %q %t %t;", h.Proto, h.Addresses, string(h.Token), h.User, string(h.Password), h.Roots, h.Certificate, string(h.Key), h.Peers, h.InnerPeers, h.Trust, h.HTTP2, h.Insecure)
	}
	return b.String()
}

// hop returns what asks the gateway at to, which it reaches by way.
func (d *Dialers) hop(h *registry.Hop, to string, way tunnel.Dialer) (tunnel.Dialer, error) {
	credentials := ""
	switch {
	case h.Token != "":
		credentials = connect.BearerCredentials(string(h.Token))
	case h.User != "":
		credentials = connect.BasicCredentials(h.User, string(h.Password))
	}
	if credentials != "" && !h.Insecure {
		if to, clear := h.CleartextAddress(way == tunnel.Dialer((*first)(d))); clear {
			return nil, fmt.Errorf("gateway: the credentials for %q would go there unencrypted, and it is not said to be insecure", to)
		}
	}
	cfg := &tls.Config{MinVersion: tls.VersionTLS12}
	if h.Roots != "" {
		cfg.RootCAs = x509.NewCertPool()
		if !cfg.RootCAs.AppendCertsFromPEM([]byte(h.Roots)) {
			return nil, fmt.Errorf("gateway: the roots for %q hold no certificate", to)
		}
	}
	if h.Certificate != "" {
		pair, err := tls.X509KeyPair([]byte(h.Certificate), []byte(h.Key))
		if err != nil {
			return nil, fmt.Errorf("gateway: the certificate for %q: %w", to, err)
		}
		cfg.Certificates = []tls.Certificate{pair}
	}
	switch h.Proto {
	case "hbone":
		trust, err := pools(h.Trust)
		if err != nil {
			return nil, fmt.Errorf("gateway: the roots for %q: %w", to, err)
		}
		one := &hbone.Dialer{Gateway: to, Dialer: counting{way, d.Budget}, TLS: cfg, Peers: h.Peers, Trust: trust, Via: d.Via}
		if len(h.InnerPeers) == 0 {
			return d.own(one), nil
		}
		return d.own(&hbone.Double{Outer: one, TLS: cfg, Peers: h.InnerPeers, Trust: trust}), nil
	case "connect", "connect-h2":
		addr, secure := strings.CutPrefix(to, "https://")
		if !secure {
			cfg = nil
		}
		if h.Proto == "connect-h2" {
			return d.own(&h2.Dialer{Proxy: addr, Dialer: counting{way, d.Budget}, TLS: cfg, Authorization: credentials, Via: d.Via}), nil
		}
		return &connect.Dialer{Proxy: addr, Dialer: way, TLS: cfg, Authorization: credentials, Via: d.Via}, nil
	case "connect-h3":
		if way != tunnel.Dialer((*first)(d)) {
			return nil, fmt.Errorf("gateway: %q can be asked by connect-h3 only where it is the first gateway: streams carry no datagrams", to)
		}
		return d.own(&h3.Dialer{Proxy: to, TLS: cfg, Authorization: credentials, Via: d.Via, Lookup: d.addresses, Listen: d.socket}), nil
	case "socks5":
		return &socks5.Dialer{Proxy: to, Dialer: way, User: h.User, Password: string(h.Password)}, nil
	case "websocket":
		if _, _, err := ws.ParseURL(to); err != nil {
			return nil, err
		}
		one := &ws.Dialer{URL: to, Dialer: way, TLS: cfg, Authorization: credentials, Via: d.Via}
		if h.HTTP2 {
			return d.own(NewWebSocketDialer(one)), nil
		}
		return one, nil
	}
	return nil, fmt.Errorf("gateway: no hop is called %q", h.Proto)
}

// pools makes the roots of each trust domain ready; nil where there are none.
func pools(trust map[string]string) (map[string]*x509.CertPool, error) {
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

// own notes that way is to be closed in the end. The caller holds mu.
func (d *Dialers) own(way pooled) tunnel.Dialer {
	d.keep = append(d.keep, way)
	return way
}

// A pooled is a way that keeps connections.
type pooled interface {
	tunnel.Dialer
	io.Closer
}

// Close ends the connections that ways keep, with the streams on them.
func (d *Dialers) Close() {
	d.mu.Lock()
	keep := d.keep
	d.keep, d.made, d.at, d.tls, d.tlsSeen = nil, nil, nil, nil, nil
	d.mu.Unlock()
	for _, c := range keep {
		_ = c.Close()
	}
}

// counting is a way to a gateway whose connections carry many tunnels: each has a
// descriptor, and they have none.
type counting struct {
	tunnel.Dialer
	budget *tunnel.Budget
}

// DialContext implements tunnel.Dialer.
func (d counting) DialContext(ctx context.Context, network, addr string) (net.Conn, error) {
	if !d.budget.Take(1) {
		return nil, tunnel.Refusef(tunnel.Overload, "the %d descriptors for connections are taken", d.budget.Limit)
	}
	c, err := d.Dialer.DialContext(ctx, network, addr)
	if err != nil {
		d.budget.Give(1)
		return nil, err
	}
	return &counted{Conn: c, give: sync.OnceFunc(func() { d.budget.Give(1) })}, nil
}

// A counted is a connection that is given back when it is closed.
type counted struct {
	net.Conn
	give func()
}

// Close implements net.Conn.
func (c *counted) Close() error {
	defer c.give()
	return c.Conn.Close()
}

// CloseWrite implements tunnel.Stream.
func (c *counted) CloseWrite() error {
	if w, ok := c.Conn.(tunnel.Stream); ok {
		return w.CloseWrite()
	}
	return errors.ErrUnsupported
}

// first dials the first hop, which is a host and a port.
type first Dialers

const maxFirst = 3 // addresses of the first hop that are tried

// DialContext implements tunnel.Dialer.
func (d *first) DialContext(ctx context.Context, _, addr string) (net.Conn, error) {
	to, err := connect.ParseAuthority(addr)
	if err != nil {
		return nil, err
	}
	eps := []tunnel.Endpoint{{Addr: netip.AddrPortFrom(to.Addr, to.Port), Named: true}}
	if !to.Addr.IsValid() {
		if eps, err = d.lookup(ctx, to); err != nil {
			return nil, err
		}
	}
	var last error
	for _, ep := range eps[:min(len(eps), maxFirst)] {
		c, err := d.Direct.DialEndpoint(ctx, ep)
		if err == nil {
			return c, nil
		}
		last = err
	}
	return nil, last
}

func (d *first) lookup(ctx context.Context, to connect.Authority) ([]tunnel.Endpoint, error) {
	host := to.Name.String()
	addrs, err := (*Dialers)(d).addresses(ctx, host)
	if err != nil {
		return nil, err
	}
	eps := make([]tunnel.Endpoint, len(addrs))
	for i, a := range addrs {
		eps[i] = tunnel.Endpoint{Addr: netip.AddrPortFrom(a, to.Port), Host: host, Named: isLocal(host)}
	}
	return eps, nil
}

// isLocal reports whether host is a name for this host, RFC 6761 section 6.3.
func isLocal(host string) bool { return host == "localhost" || strings.HasSuffix(host, ".localhost") }

// addresses returns those of the first hop's name; there is at least one.
func (d *Dialers) addresses(ctx context.Context, host string) ([]netip.Addr, error) {
	if isLocal(host) {
		return []netip.Addr{netip.AddrFrom4([4]byte{127, 0, 0, 1}), netip.IPv6Loopback()}, nil
	}
	if d.Lookup == nil {
		return nil, tunnel.Refusef(tunnel.LookupError, "gateway %q: no DNS resolver is configured", host)
	}
	addrs, err := d.Lookup(ctx, host)
	if err != nil {
		why := tunnel.LookupError
		if ne := net.Error(nil); errors.As(err, &ne) && ne.Timeout() {
			why = tunnel.LookupTime
		}
		return nil, tunnel.Refusef(why, "lookup of gateway %q: %w", host, err)
	}
	if len(addrs) == 0 {
		return nil, tunnel.Refusef(tunnel.LookupError, "gateway %q has no address", host)
	}
	return addrs, nil
}

// socket opens a UDP socket to reach the first hop at the address to, of a host
// that the configuration names.
func (d *Dialers) socket(ctx context.Context, host string, to netip.AddrPort) (net.PacketConn, error) {
	_, err := netip.ParseAddr(host)
	if err := d.Direct.Guard.CheckUDP(to, err == nil || isLocal(host)); err != nil {
		return nil, err
	}
	return h3.Listen(ctx, to)
}

// alternatives are gateways of which one is enough. The client has heard
// nothing yet, so the next one may be tried where one can't be used; where it
// has decided against the request, that stands.
type alternatives []tunnel.Dialer

// DialContext implements tunnel.Dialer.
func (a alternatives) DialContext(ctx context.Context, network, addr string) (net.Conn, error) {
	var errs []error
	for i, d := range a {
		c, err := dialShare(ctx, d, addr, len(a)-i)
		if err == nil {
			return c, nil
		}
		errs = append(errs, err)
		if ctx.Err() != nil || !another(err) {
			return nil, err
		}
	}
	if len(errs) == 1 {
		return nil, errs[0]
	}
	return nil, &tunnel.Error{Reason: tunnel.ReasonOf(errs[len(errs)-1]), Err: errors.Join(errs...)}
}

// dialShare gives d its share of the time there is for so many: one that does
// not answer must leave some for the next.
func dialShare(ctx context.Context, d tunnel.Dialer, addr string, shares int) (net.Conn, error) {
	if end, ok := ctx.Deadline(); ok && shares > 1 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, time.Until(end)/time.Duration(shares))
		defer cancel()
	}
	return d.DialContext(ctx, "tcp", addr)
}

// another reports whether err is no decision about the request.
func another(err error) bool {
	switch tunnel.ReasonOf(err) {
	case tunnel.NoRoute, tunnel.NotExposed, tunnel.Denied, tunnel.Prohibited, tunnel.Insecure, tunnel.Loop, tunnel.BadRequest, tunnel.TooLarge:
		return false
	}
	return true
}

// through is a way to endpoints whose names and addresses are those of the
// last hop.
type through struct {
	way  tunnel.Dialer
	hops []string // for people
}

// hopsOf says which gateways way leads through.
func hopsOf(way tunnel.Dialer) []string {
	if p, ok := way.(*tlsDialer); ok {
		way = p.way
	}
	if p, ok := way.(*proxyproto.Dialer); ok {
		way, _ = p.Dialer.(tunnel.Dialer)
	}
	if t, ok := way.(*through); ok {
		return t.hops
	}
	return nil
}

// DialEndpoint dials ep by its name, where it has one.
func (t *through) DialEndpoint(ctx context.Context, ep tunnel.Endpoint) (net.Conn, error) {
	tunnel.WillWait(ctx) // for each gateway in turn
	return t.way.DialContext(ctx, "tcp", ep.String())
}

// DialRequest is DialEndpoint on behalf of req.
func (t *through) DialRequest(ctx context.Context, ep tunnel.Endpoint, req *tunnel.Request) (net.Conn, error) {
	return t.DialEndpoint(hbone.WithRequest(ctx, req), ep)
}

// DialContext implements tunnel.Dialer.
func (t *through) DialContext(ctx context.Context, network, addr string) (net.Conn, error) {
	tunnel.WillWait(ctx)
	return t.way.DialContext(ctx, network, addr)
}
