package upstream

import (
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/netip"
	"runtime"
	"slices"
	"strings"
	"sync"
	"time"

	"culvert.dev/connect"
	"culvert.dev/connect/h2"
	"culvert.dev/connect/h3"
	"culvert.dev/connect/hbone"
	"culvert.dev/connect/socks5"
	"culvert.dev/connect/ws"
	"culvert.dev/identity"
	"culvert.dev/registry"
	"culvert.dev/tunnel"
)

// A NextHop opens connections over further gateways. The last of them is asked for the
// endpoint, by the name or address that it has there.
type NextHop struct {
	last     tunnel.Dialer // of hops that name no key and no trust
	rotates  *rotation     // in place of last; nil for those
	info     tunnel.TransportInfo
	direct   *tunnel.NetDialer
	literals []tunnel.Endpoint // the first hop's; none where it has a name, too
}

// NextHop returns the transport over hops, in order. Equal lists share one.
func (t *Transports) NextHop(hops []registry.Hop) (*NextHop, error) {
	return t.hops.get(func() (*NextHop, error) { return t.newNextHop(hops) }, append(hopSettings(hops), t.via())...)
}

// hopSettings returns all that makes two lists of hops differ.
func hopSettings(hops []registry.Hop) []any {
	settings := make([]any, 0, 16*len(hops)+2)
	for _, h := range hops {
		var svid []string
		if h.JWTSVID != nil {
			svid = append([]string{h.JWTSVID.ID}, h.JWTSVID.Audience...)
		}
		settings = append(settings, h.Proto, h.Addresses, h.ServerName, string(h.Token), h.TokenFile, svid, h.CredentialsField, h.User, string(h.Password), h.Roots, h.Certificate, string(h.Key), h.Peers, h.InnerPeers, h.Trust, h.KeyName, h.TrustNames, fmt.Sprint(h.ForwardIdentity), fmt.Sprint(h.HTTP2), fmt.Sprint(h.Insecure))
	}
	return settings
}

func (t *Transports) newNextHop(hops []registry.Hop) (*NextHop, error) {
	version := t.hopVersion(hops)
	n, pools, err := t.makeNextHop(hops)
	if err != nil {
		return nil, err
	}
	if version != nil {
		n.rotates = &rotation{transports: t, hops: hops, version: version, used: version(), last: n.last, pools: pools}
		pools = []io.Closer{n.rotates}
	}
	keepOpen(t, n, pools)
	return n, nil
}

// hopVersion returns what counts the changes of the keys and trust that hops name; nil
// where they name none.
func (t *Transports) hopVersion(hops []registry.Hop) func() uint64 {
	store := t.store()
	var keys []*identity.Key
	var trust []*identity.Trust
	for i := range hops {
		if name := hops[i].KeyName; name != "" {
			keys = append(keys, store.Key(name))
		}
		trust = append(trust, t.trust(hops[i].TrustNames)...)
	}
	if len(keys)+len(trust) == 0 {
		return nil
	}
	return func() (sum uint64) {
		for _, k := range keys {
			sum += k.Generation()
		}
		for _, b := range trust {
			sum += b.Generation()
		}
		return sum
	}
}

// A rotation has the carriers of hops whose keys and trust may be replaced. Carriers that
// keep connections were verified by those of their time: after a change new ones dial, and
// the connections of the old ones end with the tunnels on them.
type rotation struct {
	transports *Transports
	hops       []registry.Hop
	version    func() uint64

	mu     sync.Mutex // guards what follows
	closed bool
	used   uint64 // version of last
	last   tunnel.Dialer
	pools  []io.Closer   // of last
	old    [][]io.Closer // of carriers before, that may have connections
}

// dialer returns the carriers of now.
func (r *rotation) dialer() tunnel.Dialer {
	version := r.version()
	r.mu.Lock()
	defer r.mu.Unlock()
	if version == r.used || r.closed {
		return r.last
	}
	n, pools, err := r.transports.makeNextHop(r.hops)
	if err != nil { // it was made of the same hops before
		return r.last
	}
	r.old = append(slices.DeleteFunc(r.old, unused), r.pools)
	if len(r.old) > maxRotated {
		r.old = slices.Delete(r.old, 0, 1) // its connections end with the tunnels on them
	}
	r.used, r.last, r.pools = version, n.last, pools
	return r.last
}

// maxRotated is how many carriers before are kept, so that Close ends their connections.
const maxRotated = 8

// unused reports whether none of pools has a connection.
func unused(pools []io.Closer) bool {
	for _, p := range pools {
		if c, ok := p.(interface{ Conns() int }); !ok || c.Conns() > 0 {
			return false
		}
	}
	return true
}

// Close ends all connections.
func (r *rotation) Close() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.closed = true
	var errs []error
	for _, pools := range append(r.old, r.pools) {
		for _, p := range pools {
			errs = append(errs, p.Close())
		}
	}
	return errors.Join(errs...)
}

// makeNextHop returns a NextHop, and its carriers that keep connections.
func (t *Transports) makeNextHop(hops []registry.Hop) (n *NextHop, pools []io.Closer, err error) {
	n = &NextHop{direct: t.Direct, info: tunnel.TransportInfo{Security: tunnel.Mutual}}
	n.last = firstHopDialer{t}
	for i := range hops {
		hop := &hops[i]
		var gateways gatewayList
		for _, addr := range hop.Addresses {
			own := *hop
			if i < len(hops)-1 {
				own.ForwardIdentity = registry.HopIdentity{} // connections to those before may be shared
			}
			carrier, err := t.newCarrier(&own, addr, n.last)
			if err != nil {
				return nil, nil, err
			}
			if c, ok := carrier.(io.Closer); ok {
				pools = append(pools, c)
			}
			gateways = append(gateways, carrier)
			n.info.Security = min(n.info.Security, hop.Security(addr))
		}
		if len(gateways) == 0 {
			return nil, nil, errors.New("gateway: a hop leads nowhere")
		}
		n.last, n.info.Datagrams = gateways, gateways.carriesDatagrams()
		if i == len(hops)-1 {
			n.info.Identity = describeCaller(&hop.ForwardIdentity)
		}
		n.info.Hops = append(n.info.Hops, hop.Proto+" "+strings.Join(hop.Addresses, " or "))
	}
	n.literals = literals(&hops[0])
	return n, pools, nil
}

// keepOpen has Close close the pools of owner. Of a transport that nobody uses any more
// they are forgotten: their connections end with the streams on them.
func keepOpen[T any](t *Transports, owner *T, pools []io.Closer) {
	if len(pools) == 0 {
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.pools == nil {
		t.pools = make(map[io.Closer]struct{})
	}
	for _, c := range pools {
		t.pools[c] = struct{}{}
	}
	runtime.AddCleanup(owner, func(pools []io.Closer) {
		t.mu.Lock()
		defer t.mu.Unlock()
		for _, c := range pools {
			delete(t.pools, c)
		}
	}, pools)
}

// literals returns the addresses of h, and none where one of them is a name.
func literals(h *registry.Hop) []tunnel.Endpoint {
	var eps []tunnel.Endpoint
	for _, to := range h.Addresses {
		ap, err := netip.ParseAddrPort(h.HostPort(to))
		if err != nil {
			return nil
		}
		eps = append(eps, tunnel.Endpoint{Addr: ap, Named: true})
	}
	return eps
}

// Dial implements tunnel.Transport.
func (n *NextHop) Dial(ctx context.Context, ep *tunnel.Endpoint, req *tunnel.Request) (net.Conn, error) {
	network := "tcp"
	if req.Datagrams != nil {
		network = "udp"
	}
	return n.DialContext(withCaller(hbone.WithRequest(ctx, req), req), network, ep.String())
}

// DialContext implements tunnel.Dialer, for streams that no request has asked for.
func (n *NextHop) DialContext(ctx context.Context, network, addr string) (net.Conn, error) {
	last := n.last
	if n.rotates != nil {
		last = n.rotates.dialer()
	}
	return last.DialContext(ctx, network, addr)
}

// Check implements tunnel.Transport: it refuses where no address of the first hop may
// be dialed.
func (n *NextHop) Check(*tunnel.Endpoint) (err error) {
	for _, ep := range n.literals {
		if err = n.direct.Check(ep); err == nil {
			return nil
		}
	}
	return err
}

// Info implements tunnel.Transport.
func (n *NextHop) Info() tunnel.TransportInfo { return n.info }

// newCarrier returns the dialer that asks the gateway at addr, one of h's, which it
// reaches by dialer. This is the one place where a carrier becomes a dialer.
func (t *Transports) newCarrier(h *registry.Hop, addr string, dialer tunnel.Dialer) (tunnel.Dialer, error) {
	_, first := dialer.(firstHopDialer)
	credentials, token := "", t.hopToken(h, addr)
	switch {
	case h.Token != "":
		credentials = connect.BearerCredentials(string(h.Token))
	case h.User != "":
		credentials = connect.BasicCredentials(h.User, string(h.Password))
	}
	usual := "Proxy-Authorization"
	if h.Proto == "websocket" {
		usual = "Authorization"
	}
	header := token.in(cmp.Or(h.CredentialsField, usual))
	if (credentials != "" || token != nil) && !h.Insecure {
		if to, clear := h.CleartextAddress(first); clear {
			return nil, fmt.Errorf("gateway: the credentials for %q would go there unencrypted, and it is not said to be insecure", to)
		}
	}
	if credentials != "" && h.CredentialsField != "" {
		fixed := connect.Field{Name: h.CredentialsField, Value: credentials}
		header, credentials = func(context.Context, string) (connect.Fields, error) { return connect.Fields{fixed}, nil }, ""
	}
	cfg := &tls.Config{MinVersion: tls.VersionTLS12, ServerName: h.ServerName, DynamicRecordSizingDisabled: true}
	if h.Certificate != "" {
		pair, err := tls.X509KeyPair([]byte(h.Certificate), []byte(h.Key))
		if err != nil {
			return nil, fmt.Errorf("gateway: the certificate for %q: %w", addr, err)
		}
		cfg.Certificates = []tls.Certificate{pair}
	}
	if h.KeyName != "" {
		cfg.GetClientCertificate = t.clientCertificate(h.KeyName)
	}
	verifier, err := t.hopVerifier(h, addr, h.Peers)
	if err != nil {
		return nil, err
	}
	verifier.Client(cfg)
	caller, err := callerHeader(h, cfg)
	if err != nil {
		return nil, err
	}
	switch h.Proto {
	case "hbone":
		outer := &hbone.Dialer{Gateway: addr, Dialer: budgetDialer{dialer, t.Budget}, TLS: cfg, Verifier: verifier, Via: t.via()}
		if len(h.InnerPeers) == 0 {
			outer.SessionHeader = caller
			return outer, nil
		}
		behind, err := t.hopVerifier(h, addr, h.InnerPeers)
		if err != nil {
			return nil, err
		}
		return &hbone.Double{Outer: outer, TLS: cfg, Verifier: behind}, nil
	case "connect", "connect-h2":
		proxy, secure := strings.CutPrefix(addr, "https://")
		if !secure {
			cfg = nil
		}
		if h.Proto == "connect-h2" {
			d := &h2.Dialer{Proxy: proxy, Dialer: budgetDialer{dialer, t.Budget}, TLS: cfg, Authorization: credentials, Header: header, SessionHeader: caller, Via: t.via()}
			return t.withDatagrams(d, proxy), nil
		}
		return &connect.Dialer{Proxy: proxy, Dialer: dialer, TLS: cfg, Authorization: credentials, Header: header, SessionHeader: caller, Via: t.via()}, nil
	case "connect-h3":
		d := &h3.Dialer{Proxy: addr, TLS: cfg, Authorization: credentials, Header: header, SessionHeader: caller, Via: t.via(), Lookup: t.addresses, Listen: t.listenUDP}
		if !first {
			if before, ok := dialer.(gatewayList); !ok || !before.carriesDatagrams() {
				return nil, fmt.Errorf("gateway: %q can be asked by connect-h3 only if the gateway before it is asked by connect-h2 or connect-h3, which carry datagrams", addr)
			}
			d.Tunneled, d.Listen = true, listenTunneled(dialer, addr)
			d.Lookup = func(context.Context, string) ([]netip.Addr, error) { return []netip.Addr{tunneledAddr}, nil }
		}
		return t.withDatagrams(d, addr), nil
	case "socks5":
		return &socks5.Dialer{Proxy: addr, Dialer: dialer, User: h.User, Password: string(h.Password)}, nil
	case "websocket":
		to, _, err := ws.ParseURL(addr)
		if err != nil {
			return nil, err
		}
		if h.ServerName != "" { // the URL has it, too: a server may serve several names
			addr, dialer = withHost(addr, to, h.ServerName), dialerTo{dialer, to}
		}
		single := &ws.Dialer{URL: addr, Dialer: dialer, TLS: cfg, Authorization: credentials, Header: header, Via: t.via()}
		if h.HTTP2 {
			return NewWebSocketDialer(single), nil
		}
		return single, nil
	}
	return nil, fmt.Errorf("gateway: no hop is called %q", h.Proto)
}

// withHost returns the URL of a WebSocket with another host, where to is its HOST:PORT.
func withHost(url, to, host string) string {
	scheme, rest, _ := strings.Cut(url, "://")
	_, path, _ := strings.Cut(rest, "/")
	_, port, _ := net.SplitHostPort(to)
	return scheme + "://" + net.JoinHostPort(host, port) + "/" + path
}

// A dialerTo dials one address, whatever it is asked for.
type dialerTo struct {
	tunnel.Dialer
	addr string
}

// DialContext implements tunnel.Dialer.
func (d dialerTo) DialContext(ctx context.Context, network, _ string) (net.Conn, error) {
	return d.Dialer.DialContext(ctx, network, d.addr)
}

// HopVerifier returns what verifies a gateway of h at addr, which must be one of peers, or
// have its name where there are none.
func HopVerifier(h *registry.Hop, addr string, peers []string) (*identity.Verifier, error) {
	v := &identity.Verifier{Want: identity.Expectation{Usage: x509.ExtKeyUsageServerAuth, IDs: peers}}
	domain := ""
	if len(peers) == 0 {
		v.Want.DNSName = serverName(h, addr)
	} else {
		rest, _ := strings.CutPrefix(peers[0], "spiffe://")
		domain, _, _ = strings.Cut(rest, "/")
		for _, p := range peers[1:] {
			if h.Trust == nil && p != "spiffe://"+domain && !strings.HasPrefix(p, "spiffe://"+domain+"/") {
				return nil, fmt.Errorf("gateway: %q and %q, which the gateway at %q may be, are of two trust domains, and it is not known which CA speaks for which", peers[0], p, addr)
			}
		}
	}
	switch {
	case h.Trust != nil:
		for _, domain := range slices.Sorted(maps.Keys(h.Trust)) {
			roots, err := identity.ParseCertificates(h.Trust[domain])
			if err != nil {
				return nil, fmt.Errorf("gateway: the roots for %q: those of the trust domain %q hold no certificate", addr, domain)
			}
			v.Trust = append(v.Trust, identity.NewTrust(domain, roots...))
		}
	case h.Roots != "":
		roots, err := identity.ParseCertificates(h.Roots)
		if err != nil {
			return nil, fmt.Errorf("gateway: the roots for %q hold no certificate", addr)
		}
		v.Trust = []*identity.Trust{identity.NewTrust(domain, roots...)}
	default:
		v.System = true
	}
	return v, nil
}

// hopVerifier is HopVerifier for a hop that may name its trust.
func (t *Transports) hopVerifier(h *registry.Hop, addr string, peers []string) (*identity.Verifier, error) {
	if len(h.TrustNames) == 0 {
		return HopVerifier(h, addr, peers)
	}
	v := &identity.Verifier{Trust: t.trust(h.TrustNames), Want: identity.Expectation{Usage: x509.ExtKeyUsageServerAuth, IDs: peers}}
	if len(peers) == 0 {
		v.Want.DNSName = serverName(h, addr)
	}
	return v, nil
}

// store returns the Store of keys and trust.
func (t *Transports) store() *identity.Store {
	if t.Identity == nil {
		return new(identity.Store)
	}
	return t.Identity
}

// trust returns the trust with those names.
func (t *Transports) trust(names []string) (all []*identity.Trust) {
	store := t.store()
	for _, name := range names {
		all = append(all, store.Trust(name))
	}
	return all
}

// clientCertificate returns what shows the key with that name, whatever it is by then. It
// is shown whatever CAs the other side names: there is no other one.
func (t *Transports) clientCertificate(name string) func(*tls.CertificateRequestInfo) (*tls.Certificate, error) {
	key := t.store().Key(name)
	return func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return key.Certificate() }
}

// serverName returns the name that a gateway of h at addr must have.
func serverName(h *registry.Hop, addr string) string {
	if h.ServerName != "" {
		return h.ServerName
	}
	return hostOf(h.HostPort(addr))
}

// hostOf returns the host of a HOST:PORT, whose port may be left out.
func hostOf(addr string) string {
	if host, _, err := net.SplitHostPort(addr); err == nil {
		return host
	}
	return addr
}

// FirstHop returns what dials a host and a port that an operator has named.
func (t *Transports) FirstHop() tunnel.Dialer { return firstHopDialer{t} }

// A firstHopDialer dials the first hop, which is a host and a port.
type firstHopDialer struct{ transports *Transports }

// DialContext implements tunnel.Dialer. The addresses of a name are tried at once where
// the first one does not answer soon.
func (d firstHopDialer) DialContext(ctx context.Context, _, addr string) (net.Conn, error) {
	to, err := connect.ParseAuthority(addr)
	if err != nil {
		return nil, err
	}
	if to.Addr.IsValid() {
		return d.transports.Direct.DialEndpoint(ctx, tunnel.Endpoint{Addr: netip.AddrPortFrom(to.Addr, to.Port), Named: true})
	}
	host := to.Name.String()
	addrs, err := d.transports.addresses(ctx, host)
	if err != nil {
		return nil, err
	}
	return race(ctx, min(len(addrs), maxFirstHopAddrs), func(ctx context.Context, i int) (net.Conn, error) {
		return d.transports.Direct.DialEndpoint(ctx, tunnel.Endpoint{Addr: netip.AddrPortFrom(addrs[i], to.Port), Host: host, Named: registry.IsLocalhost(host)})
	})
}

// maxFirstHopAddrs is how many addresses of the first hop are tried.
const maxFirstHopAddrs = 3

// addresses returns those of the first hop's name; there is at least one.
func (t *Transports) addresses(ctx context.Context, host string) ([]netip.Addr, error) {
	if registry.IsLocalhost(host) {
		return []netip.Addr{netip.AddrFrom4([4]byte{127, 0, 0, 1}), netip.IPv6Loopback()}, nil
	}
	if t.Lookup == nil {
		return nil, tunnel.Refusef(tunnel.LookupError, "gateway %q: no DNS resolver is configured", host)
	}
	addrs, err := t.Lookup(ctx, host)
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
func (t *Transports) listenUDP(ctx context.Context, host string, to netip.AddrPort) (net.PacketConn, error) {
	_, err := netip.ParseAddr(host)
	written := err == nil || registry.IsLocalhost(host)
	if err := t.Direct.Guard.CheckUDP(to, written); err != nil {
		return nil, err
	}
	return h3.Listen(ctx, to)
}

// A gatewayList asks gateways in order until one dials. The client has been
// promised nothing yet, so the next one may be tried where one fails. Where a
// gateway has decided against the request, that decision stands.
type gatewayList []tunnel.Dialer

// DialContext implements tunnel.Dialer.
func (f gatewayList) DialContext(ctx context.Context, network, addr string) (net.Conn, error) {
	var errs []error
	for i, d := range f {
		c, err := dialWithin(ctx, d, network, addr, len(f)-i)
		if err == nil {
			return c, nil
		}
		errs = append(errs, err)
		if ctx.Err() != nil || isFinal(err) {
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
func dialWithin(ctx context.Context, d tunnel.Dialer, network, addr string, parts int) (net.Conn, error) {
	if end, ok := ctx.Deadline(); ok && parts > 1 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, time.Until(end)/time.Duration(parts))
		defer cancel()
	}
	return d.DialContext(ctx, network, addr)
}

// isFinal reports whether err is a gateway's refusal of the request itself.
func isFinal(err error) bool {
	e, ok := errors.AsType[*tunnel.Error](err)
	return ok && e.Final
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
